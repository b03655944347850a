"""Keeps Python's garbage collector from walking over every lease: a process-wide choice, for a registry's own process.

A full collection looks at every container there is: with a million leases a pause of about a second, in which no
resolve is answered and heartbeats go stale. Leases are in no reference cycle; they go when the last reference goes.
So what has survived full collections is frozen once there is much of it: later ones pass over it and look at what came
since.
Price: a cycle that dies after it was frozen is never freed. A call that is open at that moment is such a cycle, of
grpc's making: some kilobytes, and what was sent with it if it ends in an error. So it is frozen seldom, in step with
what is published and not with what is called.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Final

THRESHOLDS: Final = (5_000, 4, 4)
"""New containers to a collection of the youngest, and how many of those to one of the next age: a full one comes after
some 100 000 were made that are not gone yet."""
MANY_SURVIVORS: Final = 50_000
"""Containers, of some 10 000 leases. A full collection looks at so many and at what is new: less than 15 ms."""

_OLDEST: Final = 2


def freeze_survivors() -> None:
    """From now on, in this process. Call it once everything is imported; calling it again changes nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def _freeze(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == _OLDEST and len(gc.get_objects(_OLDEST)) >= MANY_SURVIVORS:
        gc.freeze()
