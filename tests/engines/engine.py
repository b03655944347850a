"""How one vLLM engine is started on CPUs: typed settings in, command line and environment out.

Nothing is run here. The flags and variables are those that vLLM's CPU build and NIXL need to share a small machine;
DESIGN.md section 7 says why each is there. Invariant: without kvlease in the settings the engine runs vLLM's stock
NixlConnector, so a test can compare the two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from tests.engines.children import python_module
from tests.engines.model import MODEL_NAME, model_dir

Json: TypeAlias = "str | int | float | bool | list[Json] | Mapping[str, Json] | None"

BLOCK_TOKENS: Final = 32
"""vLLM's CPU attention wants a multiple of 32."""
CONNECTOR_MODULE: Final = "kvlease.connector"

ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # small functions of the sampler would need a C++ compiler and 20 s at first use
    "TOKENIZERS_PARALLELISM": "false",
}


class Role(StrEnum):
    """What an engine does in a disaggregated fleet."""

    PREFILL = "prefill"
    DECODE = "decode"


KV_ROLES: Final[Mapping[Role, str]] = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One engine. Everything has a default that works on two cores."""

    engine_id: str
    role: Role
    kvlease: Mapping[str, Json] | None = None
    """Settings of kvlease's connector (the harness adds the registry); None runs the stock connector."""
    connector_module: str = CONNECTOR_MODULE
    """Where the connector is loaded from; tests put faulty ones here."""
    connector_extra: Mapping[str, Json] = field(default_factory=dict)
    """More of vLLM's `kv_connector_extra_config`, for example stock's `bidirectional_kv_xfer`."""
    kv_blocks: int | None = None
    """Size of the block pool; None takes what 1 GiB gives. At least one request of `max_model_len` must fit."""
    max_model_len: int = 16_384
    """Tokens."""
    prefix_caching: bool = True
    cores: frozenset[int] = frozenset(os.sched_getaffinity(0))
    """CPU numbers. Unless it is told, stock's worker moves its thread to the last core, the same for every engine: two
    busy engines then share one core, and one of them was seen to get nothing for a minute and a half."""
    shutdown_timeout_s: int = 0
    """vLLM's own default, 0, kills the engine core at once; hooks of the connector run only with more."""
    transports: str = "sm,tcp,self"
    """UCX_TLS."""
    arguments: tuple[str, ...] = ()
    """Further vLLM flags."""
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kv_blocks is not None and self.kv_blocks * BLOCK_TOKENS < self.max_model_len:
            raise ValueError(
                f"{self.engine_id}: {self.kv_blocks} blocks of {BLOCK_TOKENS} tokens hold less than one request of "
                f"max_model_len {self.max_model_len}"
            )


def kv_transfer_config(settings: EngineSettings, registry: str | None) -> dict[str, Json]:
    """The value of `--kv-transfer-config`. `registry` is host:port; raises ValueError if kvlease needs one."""
    extra: dict[str, Json] = {"num_threads": 0, **settings.connector_extra}
    config: dict[str, Json] = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[settings.role],
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "engine_id": settings.engine_id,
    }
    if settings.kvlease is not None:
        if registry is None:
            raise ValueError(f"{settings.engine_id} runs kvlease, but the fleet has no registry")
        config["kv_connector_module_path"] = settings.connector_module
        extra["kvlease"] = {"registry": registry, **settings.kvlease}
    return {**config, "kv_connector_extra_config": extra}


def engine_command(settings: EngineSettings, *, port: int, registry: str | None) -> tuple[str, ...]:
    """Command line of an engine that serves on loopback `port`. Makes the model if need be."""
    optional: list[str] = []
    if settings.kv_blocks is not None:
        optional += ["--num-gpu-blocks-override", str(settings.kv_blocks)]
    if settings.shutdown_timeout_s:
        optional += ["--shutdown-timeout", str(settings.shutdown_timeout_s)]
    return python_module(
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model_dir()), "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK_TOKENS)),
        *("--distributed-executor-backend", "uni", "--max-model-len", str(settings.max_model_len)),
        "--enable-prompt-tokens-details",
        "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching",
        *("--kv-transfer-config", json.dumps(kv_transfer_config(settings, registry))),
        *optional,
        *settings.arguments,
    )


def engine_environment(settings: EngineSettings, *, side_channel_port: int) -> dict[str, str]:
    """Environment variables on top of ours."""
    return {
        **ENVIRONMENT,
        "UCX_TLS": settings.transports,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        **settings.env,
    }
