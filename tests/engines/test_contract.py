"""What the connector relies on inside vLLM, pinned: fails with the fact's name when a new vLLM changes it.

Uses vLLM's real block pool and reads the real sources; starts no engine. The facts are those of DESIGN.md section 7.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the contract is vLLM's: install the engines (make engines-venv)")

import torch
from kvlease.connector.vllm_cache import blocks_of
from kvlease.connector.weights import HARMLESS
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import abstract, multiproc_executor, uniproc_executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

pytestmark = pytest.mark.engines


def pool(blocks: int = 8) -> BlockPool:
    return BlockPool(num_gpu_blocks=blocks, enable_caching=False, hash_block_size=32)


def cache_manager() -> tuple[KVCacheManager, BlockPool]:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=spec)]
    )
    manager = KVCacheManager(
        config, max_model_len=256, scheduler_block_size=32, hash_block_size=32, enable_caching=False
    )
    return manager, manager.block_pool


def in_order(source: str, names: Sequence[str]) -> bool:
    places = [source.index(name) for name in names]
    return places == sorted(places)


def test_reuse_is_told_inside_the_hand_out_before_the_block_has_an_owner() -> None:
    pages = pool()
    blocks = pages.get_new_blocks(7)
    seen: list[tuple[int, int]] = []
    pages.unpin_blocks(reversed(blocks), lambda block: seen.append((block.block_id, block.ref_cnt)))
    assert pages.get_num_free_blocks() == 7, "unpinned blocks count as free"
    handed = pages.get_new_blocks(2)
    assert seen == [(block.block_id, 0) for block in handed], "on_reuse fires within get_new_blocks, reference 0"


def test_the_pool_keeps_one_callback_per_block() -> None:
    pages = pool()
    blocks = pages.get_new_blocks(3)
    pages.touch(blocks)
    told: list[str] = []
    pages.unpin_blocks(blocks, lambda _: told.append("first"))
    pages.unpin_blocks(blocks, lambda _: told.append("second"))
    pages.get_new_blocks(7)
    assert told == ["second"] * 3, "a later unpin replaces the callback: ours must be one and the same"


def test_unpinned_blocks_go_last_and_a_touch_takes_them_back() -> None:
    pages = pool()
    blocks = pages.get_new_blocks(3)
    reused: list[KVCacheBlock] = []
    pages.unpin_blocks(blocks, reused.append)
    others = pages.get_new_blocks(4)
    assert not reused, "blocks that nobody unpinned are handed out first"
    assert not {block.block_id for block in others} & {block.block_id for block in blocks}
    pages.touch(blocks)
    assert pages.get_num_free_blocks() == 0


def test_reset_tells_every_lapsed_block_and_refuses_while_one_is_held() -> None:
    pages = pool()
    blocks = pages.get_new_blocks(3)
    reused: list[KVCacheBlock] = []
    assert not pages.reset_prefix_cache(), "held blocks refuse a reset"
    pages.unpin_blocks(blocks, reused.append)
    assert pages.reset_prefix_cache()
    assert {block.block_id for block in reused} == {block.block_id for block in blocks}


def test_nothing_but_the_hand_out_takes_blocks_from_the_free_queue() -> None:
    source = inspect.getsource(BlockPool)
    takers = re.findall(r"free_block_queue\.(popleft\w*)\(", source)
    assert sorted(takers) == ["popleft", "popleft_n"], "once for the null block, once in get_new_blocks"
    assert "popleft_n" in inspect.getsource(BlockPool.get_new_blocks)


def test_what_is_taken_out_of_a_requests_list_is_not_given_back_with_it() -> None:
    """A lease takes a finished request's references over instead of taking as many of its own."""
    manager, pages = cache_manager()
    held = pages.get_new_blocks(5)
    (group,) = manager.coordinator.single_type_managers
    group.req_to_blocks["r"] = list(held)
    (listed,) = blocks_of(manager, "r")
    del listed[:3]
    free = pages.get_num_free_blocks()
    manager.free(SimpleNamespace(request_id="r"))
    assert [block.ref_cnt for block in held] == [1, 1, 1, 0, 0]
    assert pages.get_num_free_blocks() == free + 2
    assert blocks_of(manager, "r") == ([],), "nothing is left to be freed twice"
    pages.free_blocks(held[:3])
    assert pages.get_num_free_blocks() == free + 5


def test_a_finished_request_is_told_of_right_before_its_blocks_are_freed() -> None:
    source = inspect.getsource(Scheduler._free_request)
    assert in_order(
        source, ["_connector_finished(", "delay_free_blocks |= connector_delay_free_blocks", "_free_blocks("]
    )
    for freeing in (KVCacheManager.free, KVCacheManager.pop_blocks_for_free):
        assert "self.coordinator." in inspect.getsource(freeing)
    assert "req_to_blocks.pop(request_id" in inspect.getsource(SingleTypeKVCacheManager.pop_blocks_for_free)


def test_a_worker_learns_of_a_block_only_after_its_hand_out() -> None:
    """The scheduler allocates in schedule(); the worker acts on that step's output: breaking there is early enough."""
    step = inspect.getsource(GPUModelRunner.execute_model)
    assert in_order(step, ["handle_preemptions", "_update_states(", "maybe_get_kv_connector_output"])
    assert "_zero_block_ids" in inspect.getsource(GPUModelRunner._update_states), "zeroing is part of the step"


def test_reports_are_taken_before_blocks_of_failed_loads_are_given_back() -> None:
    """Quarantine takes its references in update_connector_output: before anything of the load is freed."""
    finished = inspect.getsource(Scheduler._update_from_kv_xfer_finished)
    assert in_order(finished, ["update_connector_output", "_free_blocks"])
    output = inspect.getsource(Scheduler.update_from_output)
    assert in_order(output, ["_handle_failed_recving", "_update_from_kv_xfer_finished"])
    assert "num_computed_tokens = 0" in inspect.getsource(Scheduler._handle_failed_recving), "failed loads start over"


def test_blocks_go_into_the_prefix_cache_by_one_method_of_the_coordinator_and_not_before_a_load() -> None:
    source = inspect.getsource(KVCacheManager)
    assert source.count(".cache_blocks(") == source.count("self.coordinator.cache_blocks(") == 2
    assert "cache_full_blocks" not in source
    assert in_order(inspect.getsource(KVCacheManager.allocate_slots), ["if delay_cache_blocks:", "cache_blocks("])
    assert in_order(
        inspect.getsource(Scheduler.schedule), ["delay_cache_blocks=load_kv_async", "update_state_after_alloc("]
    )


def test_hooks_and_fields_that_are_built_upon_exist() -> None:
    for hook in (
        "bind_kv_cache_manager",
        "build_connector_worker_meta",
        "get_transfer_results",
        "has_pending_block_frees",
        "on_new_request",
        "request_finished_all_groups"
        if hasattr(KVConnectorBase_V1, "request_finished_all_groups")
        else "request_finished",
        "reset_cache",
        "set_xfer_handshake_metadata_pp_aware",
        "update_connector_output",
    ):
        assert hasattr(KVConnectorBase_V1, hook), f"KVConnectorBase_V1.{hook} is gone"
    assert {"finished_recving", "failed_recving"} <= set(KVConnectorTransferResults.__dataclass_fields__)
    worker = inspect.getsource(NixlBaseConnectorWorker)
    for name in ("_recving_transfers", "_recving_metadata", "_recv_failures", "_remote_agents", "_registered_descs"):
        assert name in worker, f"NixlBaseConnectorWorker.{name} is gone"
    for name in ("_read_blocks_for_req", "start_load_kv"):
        assert hasattr(NixlPullConnectorWorker, name)
    for name in ("_cleanup_remote_engines", "_evict_stale_engines", "_try_release_xfer_handle"):
        assert hasattr(NixlBaseConnectorWorker, name)
    metadata = inspect.signature(NixlConnectorMetadata.add_new_req_to_recv).parameters
    assert set(metadata) >= {"request_id", "local_block_ids", "kv_transfer_params", "awaiting_kvs"}
    for hook in ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished"):
        assert hasattr(NixlPullConnectorScheduler, hook)


def test_a_blocks_hash_covers_an_adapters_name_and_path() -> None:
    """By these the engine's own cache finds KV: a version that changes under them is a change until it is reset."""
    source = inspect.getsource(kv_cache_utils._gen_lora_extra_hash_keys)
    assert "lora_request.lora_name, lora_request.lora_path" in source
    assert "lora_int_id" not in source


def test_an_adapter_is_loaded_from_its_folder_when_it_is_not_there_or_in_place() -> None:
    source = inspect.getsource(LRUCacheWorkerLoRAManager.add_adapter)
    assert in_order(
        source, ["lora_int_id not in self.list_adapters()", "or lora_request.load_inplace", "_load_adapter"]
    )


def test_the_module_path_wins_over_the_built_in_name() -> None:
    config = KVTransferConfig(
        kv_connector="NixlConnector", kv_connector_module_path="kvlease.connector", kv_role="kv_consumer"
    )
    loaded = KVConnectorFactory.get_connector_class(config)
    assert loaded.__module__ == "kvlease.connector.plugin"


def test_every_call_to_workers_has_a_kind() -> None:
    """A call that is not known ends all leases: right, but dear if the engine makes it while it serves."""
    called = re.compile(r"""collective_rpc\(\s*"(\w+)\"""")
    names = {
        name
        for module in (abstract, multiproc_executor, uniproc_executor, inspect.getmodule(EngineCore))
        for name in called.findall(inspect.getsource(module))  # type: ignore[arg-type]
    }
    assert {"execute_model", "sample_tokens", "sleep", "discard"} <= names
    assert names - HARMLESS == {"sleep", "discard"}, "decide each of them in weights.py"


def test_what_changes_weights_goes_through_the_executor_and_a_name_through_the_engine() -> None:
    assert "self.model_executor.collective_rpc" in inspect.getsource(EngineCore.collective_rpc)
    for update in ("start_weight_update", "update_weights", "finish_weight_update"):
        assert "self.collective_rpc(" in inspect.getsource(getattr(AsyncLLM, update))
    assert "self.collective_rpc(" in inspect.getsource(abstract.Executor.sleep)
    assert "self.collective_rpc(" in inspect.getsource(abstract.Executor.discard)
    assert list(inspect.signature(EngineCore.set_weight_version).parameters) == ["self", "weight_version"]
    for executor in (multiproc_executor.MultiprocExecutor, uniproc_executor.UniProcExecutor):
        names = list(inspect.signature(executor.collective_rpc).parameters)
        assert names[:5] == ["self", "method", "timeout", "args", "kwargs"]
