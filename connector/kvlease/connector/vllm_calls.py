"""Hears what the engine tells its workers before they do it, and what an operator names the weights.

Sleep, reloads, weight transfers and functions of an operator's own all reach workers through one method of the engine's
executor, on the engine's thread. A connector is given neither executor nor engine, so that method is wrapped on the
executor's class, and the one that names weights on the engine's. `close` takes the wrappers out again.

Invariant: what is called here returns before any worker hears of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from kvlease.connector.weights import HARMLESS, CallKind, call_kind, call_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OnCall = Callable[[CallKind, str], None]


class EngineCalls:
    """The calls of the engine in this process."""

    def __init__(
        self,
        config: VllmConfig,
        harmless: Collection[str],
        on_call: OnCall,
        on_named: Callable[[str], None],
        on_adapter: Callable[[Any], None],
    ) -> None:
        """`on_call(kind, name)` for every call that is not harmless; `harmless`: an operator's own that are.

        `on_named(version)` when the weights get a name, `on_adapter(lora_request)` when an adapter is to be loaded.
        """
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self._executor: type[Any] = Executor.get_class(config)
        self._engine: type[Any] = EngineCore
        self._harmless = frozenset(harmless)
        self._on_call = on_call
        self._on_named = on_named
        self._on_adapter = on_adapter
        self._open = False
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        self._open = True
        self._undo = [
            _wrap(self._executor, "collective_rpc", self._hear),
            _wrap(self._engine, "set_weight_version", self._hear_name),
        ]

    def close(self) -> None:
        self._open = False
        while self._undo:
            self._undo.pop()()

    def _hear(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> None:
        if not self._open:
            return
        if isinstance(method, str) and method in HARMLESS:
            if method == "add_lora" and args:
                self._on_adapter(args[0])
            return
        kind = call_kind(method, args or (), kwargs or {}, self._harmless)
        if kind is not CallKind.HARMLESS:
            self._on_call(kind, call_name(method))

    def _hear_name(self, weight_version: str) -> None:
        if self._open:
            self._on_named(weight_version)


def _wrap(owner: type[Any], name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Calls `before` with the arguments of each call of `owner.name`, then the method; returns how to undo it."""
    method = getattr(owner, name)
    own = name in owner.__dict__

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, wrapped)

    def undo() -> None:
        if owner.__dict__.get(name) is not wrapped:
            return  # somebody has wrapped it since: it stays, and says nothing
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)

    return undo
