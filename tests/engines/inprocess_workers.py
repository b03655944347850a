"""Two real workers of kvlease in this process: a lender's and a borrower's, each with a real NIXL agent and a tensor.

No engine, no model, no scheduler: a lease is a slot in the lender's seal table and a record, a load is the metadata of
one step. The lender's side channel is vLLM's own listener, started when a test opens it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from kvlease.connector.loads import LoadOrder
from kvlease.connector.record import RecordContent, encode, record_hash
from kvlease.connector.seal import Proof, SealRef, slot_offset
from kvlease.registry.values import EngineId, Incarnation, LeaseId, TenantId

from tests.engines.engine import BLOCK_TOKENS, ENVIRONMENT
from tests.engines.inprocess import environment
from tests.engines.model import model_dir
from tests.ports import free_port

BLOCKS: Final = 16
READ_LIMIT_MS: Final = 1_000
WAIT_S: Final = 20.0
PROGRESS_DELAY_US: Final = 1_000


class HandClock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.ms = 1_000

    def now_ms(self) -> int:
        return self.ms


class Pair:
    """A lender and a borrower. Block b of the lender holds b everywhere, the borrower's hold -1."""

    def __init__(self, lender: Any, borrower: Any, port: int, clock: HandClock) -> None:
        self.lender = lender
        self.borrower = borrower
        self.port = port
        self.clock = clock
        self.incarnation = Incarnation(bytes([1]) * 16)
        self._value = 1
        self._stop = threading.Event()
        self._listener: threading.Thread | None = None

    @property
    def table(self) -> Any:
        return self.lender._kvl_table

    def listen(self) -> None:
        """The lender's side channel answers from now on."""
        import msgspec
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

        payload = msgspec.msgpack.encode(self.lender.xfer_handshake_metadata.plain())
        ready = threading.Event()
        self._listener = threading.Thread(
            target=NixlBaseConnectorScheduler._nixl_handshake_listener,
            args=({(0, 0): payload}, ready, self._stop, "127.0.0.1", self.port),
            daemon=True,
        )
        self._listener.start()
        assert ready.wait(WAIT_S)

    def close(self) -> None:
        self._stop.set()
        if self._listener is not None:
            self._listener.join(WAIT_S)

    def order(self, slot: int, blocks: Sequence[int]) -> tuple[LoadOrder, bytes]:
        """A lease of these blocks, its seal written to `slot`; and its record's hash."""
        self._value += 1
        seal = SealRef(pp_rank=0, tp_rank=0, address=self.table.address + slot_offset(slot), value=self._value)
        content = RecordContent(
            lease_id=LeaseId(f"lease-{slot}"),
            engine_id=EngineId("lender"),
            incarnation=self.incarnation,
            fingerprint_hash=bytes(16),
            tenant=TenantId("t"),
            stride_tokens=BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            tokens=BLOCK_TOKENS * len(blocks),
            block_ids=(tuple(blocks),),
            seals=(seal,),
            engine_params=b"{}",
        )
        expected = record_hash(encode(content, bytes(16 * len(blocks))))
        self.table.write_hash(slot, expected)
        self.table.write_value(slot, seal.value)
        proof = Proof(seal=seal, record_hash=expected)
        return LoadOrder(incarnation=self.incarnation, proofs=(proof,)), expected

    def start(
        self,
        request_id: str,
        order: LoadOrder | None,
        remote: Sequence[int],
        local: Sequence[int],
        **params: object,
    ) -> None:
        """One step that orders this load, or refuses it if there is no order."""
        from kvlease.connector.vllm_metadata import attach_orders, attach_refused
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        metadata = NixlConnectorMetadata()
        if order is None:
            attach_refused(metadata, [request_id])
        else:
            told: Mapping[str, object] = {
                "remote_block_ids": (list(remote),),
                "remote_engine_id": "lender",
                "remote_request_id": "kvl:lease",
                "remote_host": "127.0.0.1",
                "remote_port": self.port,
                "tp_size": 1,
                **params,
            }
            metadata.add_new_req_to_recv(
                request_id=request_id,
                local_block_ids=(list(local),),
                kv_transfer_params=dict(told),
                local_num_computed_blocks=(0,),
                awaiting_kvs=True,
            )
            attach_orders(metadata, {request_id: order})
        self.borrower.start_load_kv(metadata)

    def step(self) -> Any:
        """A step that orders nothing; returns what it reports."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        self.borrower.start_load_kv(NixlConnectorMetadata())
        return self.borrower.get_transfer_results()

    def outcome(self, request_id: str) -> Any:
        """Steps until the load is reported; returns its report, or None for one that was refused."""
        limit = time.monotonic() + WAIT_S
        while time.monotonic() < limit:
            results = self.step()
            if request_id in results.finished_recving:
                reports = self.borrower.build_reports()
                report = (
                    next((r for r in reports.reports.loads if r.request_id == request_id), None) if reports else None
                )
                failed = request_id in results.failed_recving
                assert failed == (report is None or report.reason is not None)
                return report
            time.sleep(0.001)
        raise AssertionError(f"{request_id} was not reported in {WAIT_S:.0f} s")

    def held(self, local: Sequence[int]) -> list[float]:
        """What the borrower's blocks hold; fails if one is torn."""
        blocks = self.borrower.device_kv_caches["layer"][list(local)].flatten(1)
        assert bool((blocks == blocks[:, :1]).all())
        return [float(value) for value in blocks[:, 0]]


@contextmanager
def pair() -> Iterator[Pair]:
    """Opens both. Raises what vLLM or NIXL raise when they cannot start here."""
    import torch
    from kvlease.connector.settings import ConnectorSettings
    from kvlease.connector.vllm_worker import KvleaseWorker
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    clock, port = HandClock(), free_port()
    settings = ConnectorSettings.load({"registry": "127.0.0.1:1", "read_limit_ms": READ_LIMIT_MS})
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.enter_context(environment({**ENVIRONMENT, "UCX_TLS": "sm,tcp,self"}))
        stack.enter_context(calm_agents())
        stack.callback(os.sched_setaffinity, 0, cores)  # stock's worker moves its thread to one core
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        workers: list[Any] = []
        for engine_id, role in (("lender", "kv_consumer"), ("borrower", "kv_producer")):
            config = EngineArgs(
                model=str(model_dir()),
                dtype="float32",
                enforce_eager=True,
                block_size=BLOCK_TOKENS,
                max_model_len=2_048,
                kv_transfer_config={
                    "kv_connector": "NixlConnector",
                    "kv_connector_module_path": "kvlease.connector",
                    "kv_role": role,
                    "kv_buffer_device": "cpu",
                    "kv_load_failure_policy": "recompute",
                    "engine_id": engine_id,
                    "kv_connector_extra_config": {"num_threads": 0},
                },
            ).create_engine_config()
            config.cache_config.kv_cache_layout = "LBHNC"
            with set_current_vllm_config(config):
                if not workers:
                    init_distributed_environment(1, 0, f"file://{Path(folder) / 'ranks'}", 0, "gloo")
                    stack.callback(cleanup_dist_env_and_memory)
                    ensure_model_parallel_initialized(1, 1)
                worker = KvleaseWorker(
                    config,
                    engine_id,
                    cache,
                    settings=settings,
                    clock=clock,
                    lends=engine_id == "lender",
                    borrows=engine_id == "borrower",
                )
                tensor = torch.full((BLOCKS, 2, BLOCK_TOKENS, 128), -1.0)
                if engine_id == "lender":
                    tensor[:] = torch.arange(float(BLOCKS)).reshape(-1, 1, 1, 1)
                worker.register_kv_caches({"layer": tensor})
                worker.device_kv_caches = {"layer": tensor}
            stack.callback(worker.shutdown)
            workers.append(worker)
        opened = Pair(workers[0], workers[1], port, clock)
        stack.callback(opened.close)
        yield opened


@contextmanager
def calm_agents() -> Iterator[None]:
    """NIXL's progress threads wait between looks, instead of spinning on the two cores that everybody shares."""
    import nixl_cu12._bindings as bindings

    original = bindings.nixlAgentConfig

    class Calm(original):  # type: ignore[misc, valid-type]  # NIXL is not typed
        """The API sets the delay after construction; this keeps ours."""

        def __setattr__(self, name: str, value: object) -> None:
            original.__setattr__(self, name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Calm
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original
