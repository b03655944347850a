"""The scheduler's side inside vLLM: stock's NIXL pull scheduler, plus lending at the end of a turn and borrowing at its
beginning.

Only hooks here; decisions are `Lending`'s and `Borrowing`'s. Runs on EngineCore's main thread, whose time is the
engine's: no hook waits for anything.

Invariant: whatever fails in here costs a lease or a borrow and is counted, never a request (`guarded`).
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlease.connector import engine_facts, request_params, vllm_cache, vllm_startup
from kvlease.connector.adapters import AdapterUnknown
from kvlease.connector.borrower import Compute, ComputeReason, Read, Wait
from kvlease.connector.borrowing import ArrivedRequest, Borrowing
from kvlease.connector.guarded import guarded
from kvlease.connector.instruments import Instruments
from kvlease.connector.journal import Journal
from kvlease.connector.lending import FinishedTurn, Lending
from kvlease.connector.link import Link
from kvlease.connector.loads import LoadOrder
from kvlease.connector.loan import LenderTerms
from kvlease.connector.probe import LenderProbe
from kvlease.connector.request_params import RequestParams
from kvlease.connector.seal_table import SealTable, SealTableUnavailable
from kvlease.connector.settings import ConnectorSettings
from kvlease.connector.termination import Termination
from kvlease.connector.vllm_metadata import ReportsFromWorkers, SealedHandshake, attach_orders, attach_refused
from kvlease.connector.vllm_side_channel import VllmSideChannel
from kvlease.connector.vllm_weights import WeightsWatch, plain
from kvlease.registry.clock import Clock
from kvlease.registry.telemetry import configure_tracing, serve_metrics
from kvlease.registry.values import EndReason, LeaseId
from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class KvleaseScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]  # vLLM is not typed here
    """One engine's scheduler: a lender, a borrower or both."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        *,
        settings: ConnectorSettings,
        clock: Clock,
        lends: bool,
        borrows: bool,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if lends:
            engine_facts.check_side_channel(self.side_channel_host, settings)
        self._settings = settings
        self._clock = clock
        self._lends = lends
        self._borrows = borrows
        self._instruments = Instruments()
        self._side_channel = VllmSideChannel()
        self._link = Link(
            settings,
            clock,
            Journal(configure_tracing("kvlease-connector", otlp_endpoint=settings.otlp_endpoint or None)),
            LenderProbe(self._side_channel, clock, settings.probe_ms),
        )
        self._instruments.follow(lambda: self._link.client)
        self._metrics = None
        if settings.metrics:
            host, _, port = settings.metrics.rpartition(":")
            rank = int(vllm_config.parallel_config.data_parallel_index)  # each rank is an engine and a process
            self._metrics = serve_metrics(self._instruments.registry, host=host, port=int(port) + rank)
        self._manager: Any = None
        """The engine's cache manager."""
        self._identity: vllm_startup.EngineIdentity | None = None
        self._lending: Lending | None = None
        self._borrowing: Borrowing | None = None
        self._loaded: set[str] = set()
        """Requests with KV from another engine, lent only after a step of their own: until then a READ, or what the
        engine does to its blocks afterwards, may still be writing to them."""
        self._reads: dict[str, tuple[Read, int]] = {}
        self._orders: dict[str, tuple[dict[str, Any], tuple[list[int], ...], tuple[int, ...], LoadOrder]] = {}
        self._refused: list[str] = []
        """Requests that were promised a load which could not be ordered: the worker reports it as failed."""
        self._terms: LenderTerms | None = None
        self._terminating = False
        self._drained = False
        self._termination = Termination(self._terminate, self._link.end_all)
        self._weights = WeightsWatch(vllm_config, settings, self._end_all, self._reidentify)

    # -- start -------------------------------------------------------------------------------------------------------

    def bind(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager exists: digests and block references mean something from here on."""
        self._identity = vllm_startup.identify(
            self.vllm_config, self._settings, kv_cache_manager, int(self.block_size), self._weights.version
        )
        self._manager = kv_cache_manager
        self._weights.bind(kv_cache_manager)
        if self._lends:
            vllm_cache.let_leases_give_way(kv_cache_manager, self._identity.block_tokens, self._give_way)
            self._termination.open()
        self._link.start()
        if self._borrows:
            self._borrowing = Borrowing(
                vllm_startup.borrow_terms(self, self._identity, self._settings),
                hash_tokens=self._identity.hash_tokens,
                pool=self._identity.pool,
                link=self._link,
                clock=self._clock,
                instruments=self._instruments,
            )

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The workers are ready: their seal tables can be mapped, and lending begins."""
        payloads = {
            rank: item.plain() if isinstance(item, SealedHandshake) else item for rank, item in metadata.items()
        }
        super().set_xfer_handshake_metadata(payloads)
        self._side_channel.compatibility_hash = next(iter(payloads.values())).compatibility_hash
        if self._lends:
            self._start_lending(metadata)

    def _start_lending(self, metadata: dict[tuple[int, int], Any]) -> None:
        assert self._identity is not None
        try:
            tables = {rank: SealTable.attach(Path(item.seal_table)) for rank, item in sorted(metadata.items())}
        except SealTableUnavailable as error:
            log.error("kvlease: this engine lends nothing: %s", error)
            return
        self._terms = vllm_startup.lender_terms(self, self._identity, self._settings, tables)
        self._lending = Lending(
            self._terms,
            hash_tokens=self._identity.hash_tokens,
            engine_params=vllm_startup.stock_params(self),
            pool=self._identity.pool,
            tables=list(tables.values()),
            link=self._link,
            clock=self._clock,
            instruments=self._instruments,
        )
        self._link.lend_as(vllm_startup.lender(self, self._terms, self._identity, self._settings))

    # -- a request arrives, is admitted, ends ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        self._arrived(request)

    @guarded
    def _arrived(self, request: Request) -> None:
        self._service()
        self._weights.arrived()
        if self._borrowing is None or not plain(request):
            return
        params = self._params(request, self._instruments.computed)
        if params is None or (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return
        adapter = self._weights.adapter(request)
        if isinstance(adapter, AdapterUnknown):
            self._borrowing.refused(ComputeReason(adapter.value))
            return
        self._borrowing.arrived(
            ArrivedRequest(
                request_id=request.request_id,
                params=params,
                prompt_tokens=request.num_prompt_tokens,
                block_hashes=request.block_hashes,
                adapter=adapter,
            )
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        offers: list[tuple[int | None, bool]] = []
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            # Stock offers to read back what such a request names even where that is off (as kvlease demands), orders no
            # READ then, and the request would wait for ever.
            answer = (0, False)
        if answer == (0, False):
            self._admit(request, num_computed_tokens, offers)
        return offers[0] if offers else answer

    @guarded
    def _admit(self, request: Request, computed_tokens: int, offers: list[tuple[int | None, bool]]) -> None:
        self._service()
        if self._borrowing is None or request.request_id not in self._borrowing:
            return
        self._reads.pop(request.request_id, None)
        if request.lora_request is not None:
            adapter = self._weights.adapter(request)
            self._borrowing.confirm(request.request_id, b"" if isinstance(adapter, AdapterUnknown) else adapter)
        match self._borrowing.decide(request.request_id, computed_tokens):
            case Wait():
                offers.append((None, False))
            case Read() as read:
                self._reads[request.request_id] = (read, computed_tokens)
                offers.append((read.load_tokens, True))
            case Compute():
                pass

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        request_id = request.request_id
        offered = request_id in self._reads
        if num_external_tokens:
            self._loaded.add(request_id)
        self._allocated(request, blocks, num_external_tokens)
        if offered and num_external_tokens and request_id not in self._orders:
            self._refused.append(request_id)
            self._give_up(request_id)

    @guarded
    def _give_up(self, request_id: str) -> None:
        if self._borrowing is not None:
            self._borrowing.failed(request_id)

    @guarded
    def _allocated(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        offered = self._reads.pop(request.request_id, None)
        if offered is None and num_external_tokens:  # a lease is found by its weights, what a prefill hands over is not
            self._weights.received(request)
        if offered is None or self._borrowing is None or num_external_tokens != offered[0].load_tokens:
            return
        read, computed_tokens = offered
        first, last = computed_tokens // self.block_size, read.matched_tokens // self.block_size
        local = tuple(list(group[first:last]) for group in blocks.get_block_ids())
        params: dict[str, Any] = {
            **request_params.engine_params(read.engine_params),
            "remote_block_ids": tuple(list(group[first:last]) for group in read.block_ids),
        }
        order = LoadOrder(incarnation=read.content.incarnation, proofs=read.proofs)
        self._borrowing.committed(request.request_id, read, tuple(block for group in local for block in group))
        self._orders[request.request_id] = (params, local, tuple(first for _ in local), order)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        self._add_orders(metadata)
        return metadata

    @guarded
    def _add_orders(self, metadata: Any) -> None:
        self._service()
        if self._refused:
            refused, self._refused = self._refused, []
            attach_refused(metadata, refused)
        if not self._orders:
            return
        orders, self._orders = self._orders, {}
        for request_id, (params, local, computed, _) in orders.items():
            metadata.add_new_req_to_recv(
                request_id=request_id,
                local_block_ids=local,
                kv_transfer_params=params,
                local_num_computed_blocks=computed,
                awaiting_kvs=True,
            )
        attach_orders(metadata, {request_id: order for request_id, (_, _, _, order) in orders.items()})

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self._reported(connector_output)

    @guarded
    def _reported(self, connector_output: Any) -> None:
        finished = connector_output.finished_recving or ()
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, ReportsFromWorkers) and self._lending is not None:
            self._lending.was_read(map(LeaseId, reports.reports.reads))
        if self._borrowing is None:
            return
        if isinstance(reports, ReportsFromWorkers):
            self._borrowing.reported(reports.reports)
        for request_id in finished:
            self._borrowing.settled(request_id)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        self._finished(request, block_ids, answer[1])
        return answer

    @guarded
    def _finished(self, request: Request, block_ids: tuple[list[int], ...], handed_over: dict[str, Any] | None) -> None:
        self._weights.name(request, handed_over)
        request_id = request.request_id
        self._weights.finished(request_id)
        if self._borrowing is not None:
            self._reads.pop(request_id, None)
            self._borrowing.forget(request_id)
        untouched = request_id in self._loaded and not request.num_output_tokens
        self._loaded.discard(request_id)
        prefill = (request.kv_transfer_params or {}).get("do_remote_decode")
        if self._lending is None or self._identity is None or untouched or prefill:
            return
        params = self._params(request, self._instruments.not_lent)
        if params is None:
            return
        adapter = self._weights.adapter(request)
        refusal = self._weights.not_lent(request, adapter)
        if isinstance(adapter, AdapterUnknown) or refusal is not None:
            self._instruments.not_lent.labels(refusal).inc()
            return
        self._lending.finished(
            FinishedTurn(
                params=params,
                real_tokens=min(
                    engine_facts.real_tokens(request, self._identity.reprefillable_tokens),
                    min(len(group) for group in block_ids) * self.block_size,
                ),
                block_hashes=request.block_hashes,
                block_ids=block_ids,
                held=vllm_cache.blocks_of(self._manager, request_id),
                adapter=adapter,
            )
        )

    def _params(self, request: Request, refused: Counter) -> RequestParams | None:
        """None if there are none, or if they mean nothing: that is counted."""
        try:
            return request_params.parse(request.kv_transfer_params, self._settings.default_tenant)
        except ValueError as error:
            refused.labels(ComputeReason.INVALID.value).inc()
            log.warning("kvlease: request %s has no usable kvlease parameters: %s", request.request_id, error)
            return None

    # -- room, reset, end --------------------------------------------------------------------------------------------

    def _give_way(self, more_blocks: int, least_blocks: int) -> bool:
        """A request, running or waiting, found no room: leases give way before anything waits or is preempted."""
        given: list[bool] = []
        self._end_some(more_blocks, least_blocks, given)
        return bool(given and given[0])

    @guarded
    def _end_some(self, more_blocks: int, least_blocks: int, given: list[bool]) -> None:
        if self._lending is not None:
            given.append(self._lending.give_way(more_blocks, least_blocks))

    def reset_cache(self) -> None:
        """The operator resets the engine's caches: every lease ends, so that the pool finds no reference of ours."""
        self._end_all(EndReason.CACHE_RESET)

    @guarded
    def _end_all(self, reason: EndReason) -> None:
        if self._lending is not None:
            self._lending.end_all(reason)

    @guarded
    def _reidentify(self) -> None:
        """Other weights, other digests: what was lent or found under the earlier ones is nobody's."""
        assert self._identity is not None
        self._identity = vllm_startup.with_weights(self._identity, self._weights.version)
        hashed = self._identity.fingerprint.hash
        if self._borrowing is not None:
            self._borrowing.rebase(hashed)
        if self._lending is not None and self._terms is not None:
            self._terms = dataclasses.replace(self._terms, fingerprint_hash=hashed)
            self._lending.rebase(self._terms)
            self._link.lend_as(vllm_startup.lender(self, self._terms, self._identity, self._settings))

    @guarded
    def _service(self) -> None:
        if self._lending is None:
            return
        if self._terminating and not self._drained:
            self._drained = True
            self._lending.drain()
        self._lending.service()

    def _terminate(self) -> None:
        """At SIGTERM, between two byte codes of this thread: the next hook ends all leases."""
        self._terminating = True

    def shutdown(self) -> None:
        self._close()
        super().shutdown()

    @guarded
    def _close(self) -> None:
        self._termination.close()
        self._weights.close()
        if self._lending is not None:
            self._lending.close()
        self._link.close()
        if self._metrics is not None:
            self._metrics.close()
