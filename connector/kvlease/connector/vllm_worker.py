"""The worker's side inside vLLM: stock's NIXL pull worker, plus the seal table and the proof of each borrowed load.

Only hooks and NIXL calls here; what they mean is decided by `Prover`. Runs on the worker's main thread.

Invariant: a load that came with a LoadOrder is reported finished exactly once, as good only after its proof; a READ
given up is never posted later, and its local blocks are reported late until it can write no more.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlease.connector.borrower import ComputeReason
from kvlease.connector.loads import LoadOrder, LoadReport, WorkerReports
from kvlease.connector.notifications import NotificationFilter
from kvlease.connector.prover import Prover, ReadSeals, Release
from kvlease.connector.seal_reader import SealRead, SealReader, SealReadState
from kvlease.connector.seal_table import SealTable, sweep
from kvlease.connector.settings import ConnectorSettings
from kvlease.connector.vllm_metadata import ReportsFromWorkers, SealedHandshake, attached_orders, attached_refused
from kvlease.registry.clock import Clock
from kvlease.registry.values import Incarnation
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)
NOBODY = Incarnation(b"")
"""No lender's incarnation: the next READ shakes hands anew."""


@dataclass(slots=True)
class _Load:
    """What is needed beside the core: whom a load reads from, and how long it took."""

    engine_id: str
    blocks: int
    posted_ns: int
    landed_ns: int = 0
    seals: list[SealRead] = field(default_factory=list)


class KvleaseWorker(NixlPullConnectorWorker):  # type: ignore[misc]  # vLLM is not typed here
    """One rank of a lender, a borrower or both."""

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
        self._kvl_settings = settings
        self._kvl_clock = clock
        self._kvl_prover = Prover(settings.read_limit_ms)
        self._kvl_loads: dict[str, _Load] = {}
        self._kvl_late: dict[str, tuple[str, list[Any]]] = {}
        """Engine id and handles of READs given up, by request."""
        self._kvl_incarnations: dict[str, Incarnation] = {}
        """Which incarnation of a lender the handshake was made with."""
        self._kvl_refused: list[str] = []
        """Loads that the scheduler's side promised and could not order."""
        self._kvl_reports = WorkerReports()
        self._kvl_table = None
        if lends:
            sweep()
            self._kvl_table = SealTable.create(settings.max_leases)
        self._kvl_notified = NotificationFilter(self.nixl_wrapper)
        self.nixl_wrapper: Any = self._kvl_notified
        self._kvl_reader = SealReader(self.nixl_wrapper) if borrows else None

    # -- registration ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        regions: list[tuple[int, int, int, str]] = []
        if self._kvl_table is not None:
            regions.append((self._kvl_table.address, self._kvl_table.size, 0, ""))
        if self._kvl_reader is not None:
            regions.append(self._kvl_reader.region)
        if regions:
            descriptors = self.nixl_wrapper.get_reg_descs(regions, "DRAM")
            self.nixl_wrapper.register_memory(descriptors, backends=self.nixl_backends)
            self._registered_descs.append(descriptors)
        super().register_kv_caches(kv_caches)
        payload: Any = self.xfer_handshake_metadata
        self.xfer_handshake_metadata: Any = SealedHandshake(
            compatibility_hash=payload.compatibility_hash,
            agent_metadata_bytes=payload.agent_metadata_bytes,
            seal_table="" if self._kvl_table is None else str(self._kvl_table.path),
        )

    # -- loads -----------------------------------------------------------------------------------------------------

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        for request_id, order in attached_orders(metadata).items():
            self._kvl_expect(request_id, order, metadata.reqs_to_recv[request_id])
        self._kvl_refused += attached_refused(metadata)
        super().start_load_kv(metadata)

    def _kvl_expect(self, request_id: str, order: LoadOrder, meta: ReqMeta) -> None:
        self._kvl_meet(meta.remote.engine_id, order.incarnation)
        self._kvl_prover.posted(request_id, order.proofs, self._kvl_clock.now_ms())
        self._kvl_loads[request_id] = _Load(
            engine_id=meta.remote.engine_id,
            blocks=sum(len(group) for group in meta.local_block_ids),
            posted_ns=time.monotonic_ns(),
        )

    def _kvl_meet(self, engine_id: str, incarnation: Incarnation) -> None:
        """Forgets what stock knows of a lender that was restarted, or whose last READ failed: it shakes hands again.

        Stock keeps a peer by its engine id for ever, and every READ from a restarted one would fail.
        """
        known = self._kvl_incarnations.get(engine_id, incarnation)
        if known != incarnation and engine_id in self._remote_agents:
            if self._handshake_futures or self._kvl_busy(engine_id):  # a handshake may be loading its peer into NIXL
                return
            self._cleanup_remote_engine(engine_id, log_eviction=False)
        self._kvl_incarnations[engine_id] = incarnation

    def _kvl_busy(self, engine_id: str) -> bool:
        """Whether a READ from this engine may still be under way."""
        return (
            any(load.engine_id == engine_id for load in self._kvl_loads.values())
            or any(engine == engine_id for engine, _ in self._kvl_late.values())
            or any(meta.remote.engine_id == engine_id for meta in self._recving_metadata.values())
        )

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if meta.awaiting_kvs and req_id not in self._recving_metadata:
            return  # given up while its handshake was under way: its local blocks may belong to another request by now
        if req_id not in self._kvl_loads:
            super()._read_blocks_for_req(req_id, meta)
            return
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception:  # a record that NIXL cannot read by: it fails as if NIXL had given the READ up
            log.exception("kvlease: the READ of request %s cannot be posted; it is computed", req_id)
            self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        results = super().get_transfer_results()
        if self._kvl_refused:
            results.finished_recving.update(self._kvl_refused)
            results.failed_recving.update(self._kvl_refused)
            self._kvl_refused.clear()
        if self._kvl_loads:
            self._kvl_prove(results)
        if self._kvl_late:
            self._kvl_watch_late()
        return results

    def _kvl_prove(self, results: KVConnectorTransferResults) -> None:
        """Takes finished loads out of the results, reads their seals, and puts those with a verdict back."""
        now_ms = self._kvl_clock.now_ms()
        landed = False
        for request_id in [rid for rid in results.finished_recving if rid in self._kvl_loads]:
            results.finished_recving.discard(request_id)
            if request_id in results.failed_recving:
                results.failed_recving.discard(request_id)
                self._kvl_release(results, self._kvl_prover.read_failed(request_id, now_ms))
                continue
            load = self._kvl_loads[request_id]
            load.landed_ns, landed = time.monotonic_ns(), True
            plan = self.tp_mappings.get(load.engine_id)
            ranks = {(0, rank) for rank in plan.all_source_ranks} if plan is not None else set()
            match self._kvl_prover.landed(request_id, now_ms, ranks):
                case ReadSeals(proofs=proofs):
                    agents = self._remote_agents.get(load.engine_id, {})
                    assert self._kvl_reader is not None
                    load.seals = [
                        self._kvl_reader.post(agents.get((p.seal.pp_rank, p.seal.tp_rank), ""), p.seal) for p in proofs
                    ]
                case Release() as release:
                    self._kvl_release(results, release)
        self._kvl_poll_seals(results, self._kvl_settings.proof_poll_us if landed else 0)
        for release in self._kvl_prover.overdue(self._kvl_clock.now_ms()):
            self._kvl_release(results, release)

    def _kvl_poll_seals(self, results: KVConnectorTransferResults, wait_us: int) -> None:
        """Looks at every seal READ under way; waits a little for new ones, since the alternative is a whole step.

        One that was not over by then is looked at once a step: a lender that hangs must not slow every step down.
        """
        until_ns = time.monotonic_ns() + wait_us * 1_000
        proving = [rid for rid, load in self._kvl_loads.items() if load.seals]
        while proving:
            proving = [rid for rid in proving if not self._kvl_poll(results, rid)]
            if time.monotonic_ns() >= until_ns:
                return

    def _kvl_poll(self, results: KVConnectorTransferResults, request_id: str) -> bool:
        """Whether this request has its verdict."""
        assert self._kvl_reader is not None
        load = self._kvl_loads[request_id]
        for index, read in enumerate(load.seals):
            state = self._kvl_reader.poll(read)
            if state is SealReadState.PENDING:
                continue
            slot = read.data if state is SealReadState.DONE else None
            release = self._kvl_prover.seal_read(request_id, index, slot, self._kvl_clock.now_ms())
            if release is not None:
                self._kvl_release(results, release)
                return True
        return False

    def _kvl_release(self, results: KVConnectorTransferResults, release: Release) -> None:
        request_id = release.request_id
        load = self._kvl_loads.pop(request_id)
        for read in load.seals:
            assert self._kvl_reader is not None
            self._kvl_reader.give_up(read)
        late = release.late and self._kvl_abandon(request_id, load.engine_id)
        if release.reason is ComputeReason.READ_FAILED:
            self._kvl_incarnations[load.engine_id] = NOBODY
        results.finished_recving.add(request_id)
        if release.reason is not None:
            results.failed_recving.add(request_id)
        now_ns = time.monotonic_ns()
        landed_ns = load.landed_ns or now_ns
        landed = load.landed_ns and release.reason is not ComputeReason.READ_FAILED
        self._kvl_reports.loads.append(
            LoadReport(
                request_id=request_id,
                rank=self.tp_rank,
                reason=release.reason,
                late=late,
                read_us=(landed_ns - load.posted_ns) // 1_000,
                prove_us=(now_ns - landed_ns) // 1_000,
                bytes_read=load.blocks * self._kvl_block_bytes() if landed else 0,
            )
        )

    def _kvl_block_bytes(self) -> int:
        """KV bytes of one of this rank's logical blocks."""
        return int(sum(self.block_len_per_layer)) * int(self._physical_blocks_per_logical_kv_block)

    def _kvl_abandon(self, request_id: str, engine_id: str) -> bool:
        """Stops waiting for a READ over its limit; whether it may still write."""
        handles = self._recving_transfers.pop(request_id, [])
        self._recving_metadata.pop(request_id, None)
        self._recv_failures.discard(request_id)
        if handles:
            self._kvl_late[request_id] = (engine_id, handles)
        return bool(handles)

    def _kvl_watch_late(self) -> None:
        for request_id, (engine_id, handles) in list(self._kvl_late.items()):
            left = [handle for handle in handles if not self._kvl_over(request_id, handle)]
            if left:
                self._kvl_late[request_id] = (engine_id, left)
            else:
                del self._kvl_late[request_id]
                self._kvl_reports.landed_late.append((request_id, self.tp_rank))

    def _kvl_over(self, request_id: str, handle: Any) -> bool:
        """Whether this transfer can write no more: it is done, or in error and NIXL lets go of it."""
        try:
            if self.nixl_wrapper.check_xfer_state(handle) == "PROC":
                return False
        except Exception:  # noqa: BLE001, S110 - in error: the release tells whether it is over
            pass
        return bool(self._try_release_xfer_handle(request_id, handle))

    # -- engines that reads are open with must not be forgotten ------------------------------------------------------

    def _kvl_reading(self) -> set[str]:
        """Engines that a late READ or a seal READ is open with, which stock knows nothing of."""
        proving = {load.engine_id for load in self._kvl_loads.values() if load.seals}
        return proving | {engine_id for engine_id, _ in self._kvl_late.values()}

    def _engines_with_inflight_transfers(self) -> set[str]:
        busy: set[str] = super()._engines_with_inflight_transfers() | self._kvl_reading()
        return busy

    def _cleanup_remote_engines(self) -> None:
        """Stock's, which asks the above for all but engines whose address another one has taken over."""
        if self._kvl_late or self._kvl_loads:
            with self._handshake_lock:
                replaced = self._remote_agents.keys() - self._engine_by_address.values()
            if replaced & self._kvl_reading():
                return
        super()._cleanup_remote_engines()

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
        self._kvl_incarnations.pop(engine_id, None)

    # -- reports and the end -----------------------------------------------------------------------------------------

    def build_reports(self) -> ReportsFromWorkers | None:
        """What happened since the last step; None if nothing did."""
        reads = self._kvl_notified.take_reads()
        if not self.tp_rank:  # each rank is read and told; one of them counts
            self._kvl_reports.reads += reads
        if not (self._kvl_reports.loads or self._kvl_reports.landed_late or self._kvl_reports.reads):
            return None
        reports, self._kvl_reports = self._kvl_reports, WorkerReports()
        return ReportsFromWorkers(reports=reports)

    def shutdown(self) -> None:
        table = getattr(self, "_kvl_table", None)
        if table is not None:
            table.break_all()
            table.close()
        super().shutdown()
