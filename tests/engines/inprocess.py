"""vLLM's real scheduler with kvlease's scheduler side, in this process: no engine, no model, no NIXL.

A step's forward pass is played by `Desk.step`: every request that is up to date samples one made-up token. What workers
would report about loads is passed in. The registry is a listener that never answers, so the only answers to resolves
are those that a test puts in.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvlease.connector.borrower import ComputeReason
from kvlease.connector.loads import LoadReport, WorkerReports
from kvlease.connector.seal import VALUE_BYTES
from kvlease.connector.seal_table import SealTable
from kvlease.registry.metrics import Metric
from kvlease.registry.values import EndReason

from tests.engines.engine import BLOCK_TOKENS, ENVIRONMENT
from tests.engines.model import model_dir
from tests.ports import free_port

Params = Mapping[str, object]
OUTPUT_TOKEN: Final = 7
TOLD_S: Final = 10.0
LISTEN_MS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskSettings:
    role: str
    engine_id: str = "desk"
    blocks: int = 64
    prefix_caching: bool = True
    async_scheduling: bool = False
    max_batched_tokens: int = 2_048
    max_model_len: int = 2_048
    slots: int = 256
    """Of the seal table."""
    kvlease: Mapping[str, object] = field(default_factory=dict)
    engine: Mapping[str, object] = field(default_factory=dict)
    """More of vLLM's engine arguments."""


@dataclass(slots=True)
class Loads:
    """What the workers report in one step."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    """Prefills that were fetched."""
    reports: WorkerReports = field(default_factory=WorkerReports)

    def over(self, request_id: str, reason: ComputeReason | None = None, *, late: bool = False, rank: int = 0) -> None:
        self.finished.add(request_id)
        if reason is not None:
            self.failed.add(request_id)
        self.reports.loads.append(
            LoadReport(request_id=request_id, rank=rank, reason=reason, late=late, read_us=1, prove_us=1, bytes_read=1)
        )


class Played:
    """vLLM's scheduler; the model, and what workers report, are played."""

    def __init__(self, scheduler: Any, hasher: Any) -> None:
        self.scheduler = scheduler
        self._hasher = hasher

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        max_tokens: int = 1,
        params: Params | None = None,
        kvlease: Params | None = None,
        lora: Any | None = None,
        sampling: Params | None = None,
        **request: Any,
    ) -> Any:
        """A new request; `kvlease` is put into its transfer parameters, `lora` is vLLM's LoRARequest.

        `sampling` and `request`: more for vLLM's SamplingParams and Request.
        """
        from vllm import SamplingParams
        from vllm.v1.request import Request

        transfer = dict(params or {})
        if kvlease is not None:
            transfer["kvlease"] = dict(kvlease)
        chosen = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
            **(sampling or {}),
        )
        chosen.update_from_generation_config({}, 0)
        added = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=chosen,
            pooling_params=None,
            lora_request=lora,
            block_hasher=self._hasher,
            **request,
        )
        self.scheduler.add_request(added)
        return added

    def takes_images(self) -> None:
        """From now on requests may have some, as if the model could see."""
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

        room = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_encoder_input_tokens = room
        self.scheduler.encoder_cache_manager = EncoderCacheManager(room)

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def executed(self, output: Any, loads: Loads | None = None, *, accepted: int = 0) -> Any:
        """What the model would say of the step `output`; `accepted` of the tokens guessed for it turned out right."""
        from kvlease.connector.vllm_metadata import ReportsFromWorkers
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            prefilling = request is not None and request.num_computed_tokens < request.num_tokens
            tokens.append([] if request is None or prefilling else [OUTPUT_TOKEN] * (1 + accepted))
        reported = None
        if loads is not None:
            reported = KVConnectorOutput(
                finished_recving=loads.finished or None,
                failed_recving=loads.failed,
                finished_sending=loads.sent or None,
                kv_connector_worker_meta=ReportsFromWorkers(reports=loads.reports),
            )
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=reported,
        )

    def finish(self, output: Any, loads: Loads | None = None, *, accepted: int = 0) -> Any:
        """The step `output` has been executed."""
        return self.scheduler.update_from_output(output, self.executed(output, loads, accepted=accepted))

    def step(self, loads: Loads | None = None) -> Any:
        """Schedules and executes one step; returns what was scheduled."""
        output = self.schedule()
        self.finish(output, loads)
        return output

    def run(self, steps: int = 50) -> None:
        """Steps until no request is left. Fails after `steps` of them."""
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"requests are still there after {steps} steps")


class Desk(Played):
    """One engine's scheduler with kvlease's side of it, and what stands around both."""

    def __init__(self, scheduler: Any, hasher: Any, table: SealTable) -> None:
        super().__init__(scheduler, hasher)
        self.side: Any = scheduler.connector.connector_scheduler
        self.table = table

    @property
    def leases(self) -> int:
        return len(self.side._lending)

    @property
    def whole_seals(self) -> int:
        return sum(any(self.table.read(slot)[:VALUE_BYTES]) for slot in range(self.table.slots))

    def count(self, metric: Metric, **labels: str) -> float:
        """A counter of the connector, once its thread has done what it was given; 0 if it was never touched."""
        link, done = self.side._link, threading.Event()
        link.call(done.set)
        assert link._ended or done.wait(TOLD_S), "the connector's thread hangs"
        return self.side._instruments.registry.get_sample_value(metric.name, labels) or 0.0

    def settle(self) -> None:
        """The judge of leaks: once every request, load and lease is over, every block is back where it was.

        Ends what a test has left under way as vLLM's workers would report it. Called when a desk closes.
        """
        from vllm.v1.request import RequestStatus

        scheduler, borrowing = self.scheduler, self.side._borrowing
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        for _ in range(3):
            over = Loads()
            for request_id, request in scheduler.requests.items():
                fetched = (request.kv_transfer_params or {}).get("do_remote_decode")
                (over.sent if fetched else over.finished).add(request_id)
            if borrowing is not None:
                over.reports.landed_late += [
                    (request_id, rank)
                    for request_id, (ranks, _) in borrowing._quarantine._late.items()
                    for rank in ranks
                ]
            self.step(over)
        if self.side._lending is not None:
            self.side._lending._holder.check()
            self.side._lending.end_all(EndReason.RELEASED)
            self.side._lending.service()
        assert not scheduler.requests, "requests that nothing ends"
        assert self.whole_seals == 0, "a seal is whole though every lease has ended"
        held = self.pool.num_gpu_blocks - 1 - self.free
        assert not held, f"{held} blocks are held though nothing uses them"


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt; another seed shares no block with it."""
    return [(seed * 7_919 + place) % 250 + 1 for place in range(count)]


@contextmanager
def desk(settings: DeskSettings) -> Iterator[Desk]:
    """Opens a scheduler with kvlease's side; everything it started has ended afterwards, and nothing is leaked."""
    from kvlease.connector.vllm_metadata import SealedHandshake

    with silent_registry() as registry, _quick_listener():
        connector = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "kvlease.connector",
            "kv_role": settings.role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "engine_id": settings.engine_id,
            "kv_connector_extra_config": {
                "kvlease": {"registry": registry, "resolve_wait_ms": 5_000, **settings.kvlease}
            },
        }
        with _scheduler(settings, connector) as (scheduler, hasher):
            table = SealTable.create(settings.slots)
            try:
                scheduler.connector.set_xfer_handshake_metadata_pp_aware(
                    {
                        (0, 0): SealedHandshake(
                            compatibility_hash="desk", agent_metadata_bytes=b"", seal_table=str(table.path)
                        )
                    }
                )
                opened = Desk(scheduler, hasher, table)
                yield opened
                opened.settle()
            finally:
                scheduler.shutdown()
                table.close()


@contextmanager
def without_connector(settings: DeskSettings) -> Iterator[Played]:
    """vLLM alone, as it is where nothing is transferred; `settings` that speak of kvlease mean nothing."""
    with _scheduler(settings, None) as (scheduler, hasher):
        try:
            yield Played(scheduler, hasher)
        finally:
            scheduler.shutdown()


@contextmanager
def _scheduler(settings: DeskSettings, connector: Params | None) -> Iterator[tuple[Any, Any]]:
    """With the function that hashes the blocks of its requests."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with environment({**ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}):
        import torch

        config = EngineArgs(
            model=str(model_dir()),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_batched_tokens,
            enable_prefix_caching=settings.prefix_caching,
            async_scheduling=settings.async_scheduling,
            kv_transfer_config=connector,
            **dict(settings.engine),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = settings.blocks
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=settings.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        kind = AsyncScheduler if settings.async_scheduling else Scheduler
        scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        yield scheduler, get_request_block_hasher(BLOCK_TOKENS, hash_function)


class _QuickSocket:
    """A socket that waits LISTEN_MS at most."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def setsockopt(self, option: int, value: int) -> None:
        import zmq

        self._socket.setsockopt(option, min(value, LISTEN_MS) if option == zmq.RCVTIMEO else value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


@contextmanager
def _quick_listener() -> Iterator[None]:
    """Stock's side channel looks once a second whether it is to end, and ending a scheduler waits for it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler

    stock = base_scheduler.zmq_ctx

    @contextmanager
    def quick(*args: Any) -> Iterator[_QuickSocket]:
        with stock(*args) as socket:
            yield _QuickSocket(socket)

    base_scheduler.zmq_ctx = quick
    try:
        yield
    finally:
        base_scheduler.zmq_ctx = stock


@contextmanager
def silent_registry() -> Iterator[str]:
    """HOST:PORT of something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
