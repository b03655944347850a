"""Follows what happens to an engine's weights and adapters, and decides whether its KV still is what it is said to be.

Between the engine's calls (`vllm_calls.py`) and the scheduler's side, which ends leases and introduces itself anew when
told so. Runs on the engine's thread.

Invariants: every lease has ended before a worker hears of a call that its KV may not outlive; KV that another engine
computed with other weights, or with nobody knows which, serves its own turn and is in no prefix cache.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvlease.connector import vllm_cache
from kvlease.connector.adapters import AdapterUnknown, AdapterVersion
from kvlease.connector.settings import ConnectorSettings
from kvlease.connector.vllm_adapters import RequestAdapters
from kvlease.connector.vllm_calls import EngineCalls
from kvlease.connector.weights import CallKind, Weights
from kvlease.registry.values import EndReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

WEIGHTS: Final = "kvlease_weights"
"""In the transfer parameters that a prefill engine hands over, beside stock's."""
ADAPTER: Final = "kvlease_adapter"
UNKNOWN: Final = "unknown"
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
        self._adapters = RequestAdapters(config)
        self._calls = EngineCalls(config, settings.harmless_calls, self._called, self._named, self._adapters.loading)
        self._end_leases = end_leases
        self._renamed = renamed
        self._manager: Any = None
        self._foreign: set[str] = set()
        """Requests with KV that another engine computed with other weights, or may have."""

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
        vllm_cache.watch_resets(manager, lambda: self._end_leases(EndReason.CACHE_RESET), self._cleared)
        vllm_cache.keep_out(manager, self._foreign)
        self._calls.open()

    def adapter(self, request: Request) -> AdapterVersion | AdapterUnknown:
        """Which adapter the request's KV is computed with, or why that cannot be said."""
        return self._adapters.version(request)

    def not_lent(self, request: Request, adapter: AdapterVersion | AdapterUnknown) -> str | None:
        """Why a finished turn is not lent, as the counter says it; None if it may be."""
        if not plain(request):
            return "unsupported"
        if isinstance(adapter, AdapterUnknown):
            return adapter.value
        if not self.known or not self._prefilled_with_these(request):
            return "weights_changed"
        prefilled_elsewhere = (request.kv_transfer_params or {}).get("remote_engine_id")
        if prefilled_elsewhere and not _prefilled_with(request, adapter):
            return AdapterUnknown.UNKNOWN.value
        return None

    def received(self, request: Request) -> None:
        """A prefill engine's KV is about to come. If it may be of other weights than this engine's, no other turn may
        find it: that one would be lent, or handed over, as computed with this engine's."""
        self._foreign.add(request.request_id)  # also if what follows fails
        if self._prefilled_with_these(request) and _prefilled_with(request, self.adapter(request)):
            self._foreign.discard(request.request_id)

    def finished(self, request_id: str) -> None:
        self._foreign.discard(request_id)

    def name(self, request: Request, handed_over: dict[str, Any] | None) -> None:
        """Says in what a prefill hands over what its KV was computed with. A stock engine does not: it is believed as
        to weights, which a fleet shares, not as to adapters, which come and go."""
        if handed_over is None:
            return
        handed_over[WEIGHTS] = self.version if self.known else UNKNOWN
        adapter = self.adapter(request)
        if adapter:
            handed_over[ADAPTER] = UNKNOWN if isinstance(adapter, AdapterUnknown) else adapter.hex()

    def arrived(self) -> None:
        """A request has arrived and has no KV yet: if nobody else has any either, none of it is of earlier weights."""
        if self._weights.mixed and vllm_cache.is_empty(self._manager):
            self._weights.forgotten()

    def _prefilled_with_these(self, request: Request) -> bool:
        """Whether a prefill engine, if there was one, had this engine's weights; one that does not say is believed."""
        return (request.kv_transfer_params or {}).get(WEIGHTS) in (None, self.version)

    def close(self) -> None:
        self._calls.close()
        self._adapters.close()

    def _cleared(self) -> None:
        self._weights.forgotten()
        self._adapters.forgotten()

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


def plain(request: Request) -> bool:
    """Whether the request's tokens and what is said beside them decide its KV. Embeddings given as such are nobody's to
    share, and a request that must not read the prefix cache must not read a lease either."""
    return request.prompt_embeds is None and not request.skip_reading_prefix_cache


def _prefilled_with(request: Request, adapter: AdapterVersion | AdapterUnknown) -> bool:
    """Whether the prefill engine says that it used this adapter; there is nothing to say where there is none."""
    if isinstance(adapter, AdapterUnknown):
        return False
    return not adapter or (request.kv_transfer_params or {}).get(ADAPTER) == adapter.hex()
