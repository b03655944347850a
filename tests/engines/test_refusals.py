"""Engines that kvlease refuses at start, on vLLM's real configuration: each with a sentence on what to change (D3).

The checks are those that the plug-in makes when an engine loads it; no engine is started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the configuration is vLLM's: install the engines (make engines-venv)")

from kvlease.connector.engine_facts import EngineUnsupported, check_engine
from kvlease.connector.settings import ConnectorSettings

from tests.engines.engine import BLOCK_TOKENS, ENVIRONMENT
from tests.engines.inprocess import environment
from tests.engines.model import model_dir

pytestmark = pytest.mark.engines

SETTINGS = ConnectorSettings.load({"registry": "127.0.0.1:7411"})
TRANSFER: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "kvlease.connector",
    "kv_role": "kv_consumer",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}


def configuration(transfer: dict[str, Any] | None = None, **engine: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 2_048, "enforce_eager": True, **engine}
    with environment(ENVIRONMENT):
        return EngineArgs(
            model=str(model_dir()), kv_transfer_config={**TRANSFER, **(transfer or {})}, **given
        ).create_engine_config()


def caches(*specs: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec([f"layer-{number}"], spec) for number, spec in enumerate(specs or (full_attention(),))]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def full_attention(**more: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32, **more)


def mla() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.float32)


def sliding_window() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=128
    )


def other_kinds() -> list[tuple[Any, str]]:
    """What vLLM derives from full attention and is something else, and what its refusal says."""
    import torch
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, RSWASpec, SinkFullAttentionSpec

    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.float32,
    }
    return [
        (RSWASpec(**shape, rswa_window=128), "it is RSWASpec"),
        (SinkFullAttentionSpec(**shape, sink_len=4), "it is SinkFullAttentionSpec"),
        (HiddenStateCacheSpec(**shape), "it is HiddenStateCacheSpec"),
        (full_attention(non_causal=True), "non-causal attention is not supported"),
    ]


def parallel(**changes: int) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in changes.items():
            setattr(config.parallel_config, name, value)

    return change


def on_an_accelerator(config: Any) -> None:
    config.device_config = dataclasses.replace(config.device_config, device="cpu")
    config.device_config.device_type = "cuda"


def diffusing(config: Any) -> None:
    """The engine looks once for what only such a model's configuration has."""
    config.model_config.hf_config.canvas_length = 32
    del config.model_config.__dict__["is_diffusion"]


def with_hisparse(config: Any) -> None:
    config.attention_config.hisparse_config = object()


@pytest.mark.parametrize(
    ("transfer", "engine", "change", "advice"),
    [
        ({"kv_load_failure_policy": "fail"}, {}, None, 'kv_load_failure_policy must be "recompute"'),
        (
            {"kv_connector_extra_config": {"bidirectional_kv_xfer": True}},
            {},
            None,
            "remove bidirectional_kv_xfer from kv_connector_extra_config",
        ),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, None, "--prefix-caching-hash-algo must be sha256 or sha256_cbor"),
        ({}, {}, parallel(pipeline_parallel_size=2), "--pipeline-parallel-size must be 1"),
        ({}, {}, parallel(prefill_context_parallel_size=2), "context parallelism"),
        ({}, {}, parallel(decode_context_parallel_size=2), "context parallelism"),
        ({}, {}, on_an_accelerator, "kv_buffer_device must be the accelerator's"),
        ({}, {}, with_hisparse, "HiSparse is not supported"),
        ({}, {}, diffusing, "diffusion models are not supported"),
    ],
    ids=["policy", "bidirectional", "hash", "pp", "pcp", "dcp", "host-buffer", "hisparse", "diffusion"],
)
@pytest.mark.matrix(
    group="The engine",
    condition="pipeline or context parallelism, host buffer, weak hash, HiSparse, diffusion, stock read-back",
    lent="refused at start",
    reused="refused at start",
    freed="-",
    recomputed="-",
)
def test_an_unsupported_engine_is_refused_with_what_to_change(
    transfer: dict[str, Any], engine: dict[str, Any], change: Callable[[Any], None] | None, advice: str
) -> None:
    config = configuration(transfer, **engine)
    if change is not None:
        change(config)
    with pytest.raises(EngineUnsupported, match=advice):
        check_engine(config, caches(), SETTINGS, "0.32.0")


@pytest.mark.matrix(
    group="The engine",
    condition="hybrid, Mamba, sliding-window, non-causal models, several KV groups",
    lent="refused at start",
    reused="refused at start",
    freed="-",
    recomputed="-",
)
def test_models_whose_blocks_are_written_in_place_are_refused() -> None:
    config = configuration()
    for specs in ((sliding_window(),), (full_attention(), sliding_window()), (full_attention(), full_attention())):
        with pytest.raises(EngineUnsupported, match="hybrid, Mamba and sliding-window models are not supported"):
            check_engine(config, caches(*specs), SETTINGS, "0.32.0")
    with pytest.raises(EngineUnsupported, match="sliding-window attention is not supported"):
        check_engine(config, caches(full_attention(sliding_window=128)), SETTINGS, "0.32.0")
    for spec, advice in other_kinds():
        with pytest.raises(EngineUnsupported, match=advice):
            check_engine(config, caches(spec), SETTINGS, "0.32.0")


def test_all_that_is_wrong_is_said_at_once_and_a_sound_engine_is_taken() -> None:
    config = configuration({"kv_load_failure_policy": "fail"}, prefix_caching_hash_algo="xxhash")
    with pytest.raises(EngineUnsupported) as refused:
        check_engine(config, caches(), SETTINGS, "0.32.0")
    assert str(refused.value).count("\n  - ") == 2
    for spec in (full_attention(), mla()):
        check_engine(configuration(), caches(spec), SETTINGS, "0.32.0")
