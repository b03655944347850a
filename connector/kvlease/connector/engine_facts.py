"""What the connector relies on in vLLM, and which engines it refuses: the one file to read when vLLM changes.

Each refusal is a sentence that says what to change. The facts themselves are pinned by tests/engines/test_contract.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvlease.connector.settings import LOOPBACK, ConnectorSettings, SettingsInvalid

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TESTED_VLLM: Final = ("0.32",)
"""Minor versions of vLLM that this release was tested with."""
WEIGHTS_FIELD: Final = "weights_version"
"""The one field of a fingerprint that may change while an engine runs."""
_SOUND_HASHES: Final = frozenset({"sha256", "sha256_cbor"})

_NO_MEANING: Final = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Of a model's configuration: paths and versions, and the dtype, which has a field of its own."""
_ROPE: Final = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "partial_rotary_factor")
_READABLE_CHARS: Final = 512


class EngineUnsupported(SettingsInvalid):
    """This engine cannot lend or borrow safely; the message says what to change."""


def check_version(version: str, settings: ConnectorSettings) -> None:
    """Raises EngineUnsupported for a vLLM that this release was not tested with, unless told to try."""
    minor = re.match(r"(\d+\.\d+)", version)
    if (minor is None or minor[1] not in TESTED_VLLM) and not settings.allow_untested_engine:
        raise EngineUnsupported(
            f"kvlease was tested with vLLM {', '.join(TESTED_VLLM)}, this is {version}. Install a tested version, "
            'a kvlease that supports yours, or set "allow_untested_engine": true in the kvlease settings of the engine'
        )


def check_engine(config: VllmConfig, kv_cache: KVCacheConfig, settings: ConnectorSettings, version: str) -> None:
    """Raises EngineUnsupported, with what to change, for every combination whose seals are not proven."""
    check_version(version, settings)
    transfer = config.kv_transfer_config
    assert transfer is not None
    parallel = config.parallel_config
    extra = transfer.kv_connector_extra_config
    problems: list[str] = []
    if transfer.kv_load_failure_policy != "recompute":
        problems.append(
            'kv_load_failure_policy must be "recompute" in --kv-transfer-config: a READ that is not proven is computed'
        )
    if extra.get("bidirectional_kv_xfer"):
        problems.append("remove bidirectional_kv_xfer from kv_connector_extra_config: kvlease takes its place")
    if parallel.pipeline_parallel_size > 1:
        problems.append("--pipeline-parallel-size must be 1: seals of pipeline stages are not proven")
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        problems.append("context parallelism (PCP, DCP) must be off: positions of its shards are not proven")
    if transfer.kv_buffer_device == "cpu" and config.device_config.device_type != "cpu":
        problems.append('kv_buffer_device must be the accelerator\'s: the host buffer ("cpu") is not proven')
    problems += _attention_problems(config, kv_cache)
    if config.attention_config.hisparse_config is not None:
        problems.append("HiSparse is not supported: it watches the same blocks")
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm not in _SOUND_HASHES:
        problems.append(
            f"--prefix-caching-hash-algo must be sha256 or sha256_cbor, not {algorithm}: digests rest on it"
        )
    if problems:
        raise EngineUnsupported("kvlease cannot run in this engine:\n" + "\n".join(f"  - {p}" for p in problems))


def _attention_problems(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Sound: KV that is written once, stays while its block is referenced, and depends on the tokens before it only."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    problems: list[str] = []
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    # By exact type: vLLM derives others from full attention, such as one that gives blocks up while the request runs.
    if len(specs) != 1 or type(specs[0]) not in (FullAttentionSpec, MLAAttentionSpec):
        found = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "none"
        problems.append(
            "hybrid, Mamba and sliding-window models are not supported: their blocks can be written to in place. This "
            f"model's attention must be of one kind, full or MLA; it is {found}"
        )
    elif getattr(specs[0], "sliding_window", None):
        problems.append("sliding-window attention is not supported: its blocks are given up while the request runs")
    if any(getattr(spec, "non_causal", False) for spec in specs):
        problems.append("non-causal attention is not supported: the KV of a prompt depends on what comes after it")
    if config.model_config.is_diffusion:
        problems.append("diffusion models are not supported: they write the KV of a token more than once")
    return problems


def check_side_channel(host: str, settings: ConnectorSettings) -> None:
    """Raises EngineUnsupported if others could not reach this lender at the address it would publish."""
    if host in LOOPBACK and not settings.registry_is_local:
        raise EngineUnsupported(
            f"this engine would lend under the side channel address {host!r}, which other hosts cannot reach. Set "
            "VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this host that the prefill engines can reach"
        )


def roles(config: VllmConfig, settings: ConnectorSettings) -> tuple[bool, bool]:
    """(lends, borrows): as the settings say, else as the engine's kv_role does."""
    assert config.kv_transfer_config is not None
    role = config.kv_transfer_config.kv_role
    lend = role in ("kv_consumer", "kv_both") if settings.lend is None else settings.lend
    borrow = role in ("kv_producer", "kv_both") if settings.borrow is None else settings.borrow
    return lend, borrow


def fingerprint_fields(
    config: VllmConfig,
    settings: ConnectorSettings,
    *,
    weights_version: str,
    block_tokens: int,
    hash_tokens: int,
    version: str,
) -> dict[str, str]:
    """What two engines must agree on before a digest means anything."""
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed

    model, cache = config.model_config, config.cache_config
    return {
        "model": settings.model_id or str(model.model),
        "revision": str(model.revision or ""),
        WEIGHTS_FIELD: weights_version,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "kv_dtype": str(cache.cache_dtype),
        "layers": str(model.get_total_num_hidden_layers()),
        "kv_heads": str(model.get_total_num_kv_heads()),
        "head_size": str(model.get_head_size()),
        "block_tokens": str(block_tokens),
        "hash_tokens": str(hash_tokens),
        "kv_layout": "" if model.use_mla else str(cache.kv_cache_layout or ""),
        "speculator": _speculator(config),
        "kv_dtype_skip_layers": ",".join(sorted(cache.kv_cache_dtype_skip_layers)),
        "rope": _short(_rope(model.hf_text_config.to_dict())),
        "config": _digest(_meaning(model.hf_config.to_dict())),
        "mm_processor": _short(getattr(model.multimodal_config, "mm_processor_kwargs", None) or {}),
        "hash": str(cache.prefix_caching_hash_algo),
        "hash_seed": get_none_hash_seed(),
        "engine": ".".join(version.split(".")[:2]),
    }


def _speculator(config: VllmConfig) -> str:
    """A draft model that works on the model's own states has layers of its own in each block."""
    speculative = config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return ""
    draft = speculative.draft_model_config
    kv_dtype = speculative.kv_cache_dtype or config.cache_config.cache_dtype
    return f"{speculative.method} {draft.model} {draft.revision or ''} {kv_dtype}"


def _meaning(value: object) -> object:
    """A model's configuration, overrides of the operator's included, without what two hosts may write differently."""
    if isinstance(value, dict):
        return {str(name): _meaning(item) for name, item in value.items() if name not in _NO_MEANING}
    return value


def _rope(config: Mapping[str, object]) -> dict[str, object]:
    """How positions get into keys: apart from the rest of the configuration, since people change it by flags."""
    return {name: config[name] for name in _ROPE if config.get(name) is not None}


def _short(value: object) -> str:
    """Readable where that is short, else a digest: operators read fingerprints when two differ."""
    text = json.dumps(value, sort_keys=True, default=str) if value else ""
    return text if len(text) <= _READABLE_CHARS else _digest(value)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def real_tokens(request: Any, reprefillable_tokens: int) -> int:
    """Tokens of a finished request whose KV is final: computed, not in flight, not beyond the tokens that exist."""
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, int(min(computed, request.num_tokens)) - reprefillable_tokens)
