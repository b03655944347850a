"""The outermost frame of what the engine calls: an error of ours is logged and counted, never raised into it.

Invariant: whatever fails in a guarded hook costs a lease or a borrow, never a request.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvlease.connector.instruments import Instruments

log = logging.getLogger(__name__)
P = ParamSpec("P")


class Counted(Protocol):
    """Whose faults are counted."""

    _instruments: Instruments


S = TypeVar("S", bound=Counted)


def guarded(hook: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """The hook without its errors."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception:
            self._instruments.faults.labels(hook.__name__).inc()
            log.exception("kvlease: %s failed; the request goes on without a lease", hook.__name__)

    functools.update_wrapper(call, hook)
    return call
