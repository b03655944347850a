"""Follows what happens to an engine's weights, and decides whether its KV still is what its fingerprint says.

Between the engine's calls (`vllm_calls.py`) and the scheduler's side, which ends leases and introduces itself anew when
told so. Runs on the engine's thread.

Invariant: every lease has ended before a worker hears of a call that its KV may not outlive.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlease.connector import vllm_cache
from kvlease.connector.settings import ConnectorSettings
from kvlease.connector.vllm_calls import EngineCalls
from kvlease.connector.weights import CallKind, Weights
from kvlease.registry.values import EndReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)


class WeightsWatch:
    """One engine's weights."""

    def __init__(
        self,
        config: VllmConfig,
        settings: ConnectorSettings,
        end_leases: Callable[[EndReason], None],
        renamed: Callable[[], None],
    ) -> None:
        """`end_leases` before anything is lost; `renamed` once `version` is another one."""
        self._weights = Weights(settings.weights_version)
        self._calls = EngineCalls(config, settings.harmless_calls, self._called, self._named)
        self._end_leases = end_leases
        self._renamed = renamed
        self._manager: Any = None

    @property
    def version(self) -> str:
        return self._weights.version

    @property
    def known(self) -> bool:
        """Whether all KV in this engine is of weights with a name, and of the present ones."""
        return not self._weights.mixed and not self._weights.unnamed

    def bind(self, manager: Any) -> None:
        """The engine's cache manager exists."""
        self._manager = manager
        vllm_cache.watch_resets(manager, lambda: self._end_leases(EndReason.CACHE_RESET), self._weights.forgotten)
        self._calls.open()

    def arrived(self) -> None:
        """A request has arrived and has no KV yet: if nobody else has any either, none of it is of earlier weights."""
        if self._weights.mixed and vllm_cache.is_empty(self._manager):
            self._weights.forgotten()

    def close(self) -> None:
        self._calls.close()

    def _called(self, kind: CallKind, name: str) -> None:
        changes = kind is CallKind.CHANGES_WEIGHTS
        self._end_leases(EndReason.WEIGHTS_CHANGED if changes else EndReason.CACHE_RESET)
        if not changes:
            return
        renamed = self._weights.changed(secrets.token_hex(8), empty=vllm_cache.is_empty(self._manager))
        if renamed:
            log.warning(
                "kvlease: %s may change the weights in place: nothing is lent or borrowed until they have a name "
                "(/update_weight_version) or this engine starts anew",
                name,
            )
            self._renamed()

    def _named(self, name: str) -> None:
        self._end_leases(EndReason.WEIGHTS_CHANGED)
        self._weights.named(name)
        self._renamed()
