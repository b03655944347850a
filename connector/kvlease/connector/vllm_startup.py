"""What an engine says about itself when it starts to lend or borrow: its fingerprint, its terms, its stock parameters.

Reads vLLM's configuration once; nothing here runs in a step.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvlease.connector import digests, engine_facts
from kvlease.connector.borrower import BorrowTerms
from kvlease.connector.lending import Pool
from kvlease.connector.loan import LenderTerms, RankTable
from kvlease.connector.seal_table import SealTable
from kvlease.connector.settings import ConnectorSettings, Mode
from kvlease.registry.values import Engine, EngineId, Fingerprint, Incarnation
from vllm.version import __version__ as vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """What digests and block references of this engine rest on."""

    fingerprint: Fingerprint
    pool: Pool
    block_tokens: int
    hash_tokens: int
    stride_tokens: int
    reprefillable_tokens: int
    """Trailing tokens whose KV the engine may compute once more (multi-module MTP)."""


def identify(
    config: VllmConfig, settings: ConnectorSettings, manager: Any, block_tokens: int, weights_version: str
) -> EngineIdentity:
    """Called once the engine's cache manager exists."""
    hash_tokens = int(manager.block_pool.hash_block_size)
    return EngineIdentity(
        fingerprint=digests.fingerprint(
            engine_facts.fingerprint_fields(
                config,
                settings,
                weights_version=weights_version,
                block_tokens=block_tokens,
                hash_tokens=hash_tokens,
                version=vllm_version,
            )
        ),
        pool=manager.block_pool,
        block_tokens=block_tokens,
        hash_tokens=hash_tokens,
        stride_tokens=digests.stride_for(block_tokens, hash_tokens, settings.stride_tokens),
        reprefillable_tokens=int(manager.coordinator.num_reprefillable_tokens),
    )


def with_weights(identity: EngineIdentity, weights_version: str) -> EngineIdentity:
    """The same engine with other weights."""
    fields = {**dict(identity.fingerprint.fields), engine_facts.WEIGHTS_FIELD: weights_version}
    return replace(identity, fingerprint=digests.fingerprint(fields))


def borrow_terms(
    scheduler: NixlPullConnectorScheduler, identity: EngineIdentity, settings: ConnectorSettings
) -> BorrowTerms:
    return BorrowTerms(
        engine_id=EngineId(scheduler.engine_id),
        fingerprint_hash=identity.fingerprint.hash,
        block_tokens=identity.block_tokens,
        stride_tokens=identity.stride_tokens,
        wait_ms=settings.resolve_wait_ms,
        threshold_tokens=scheduler.kv_recompute_threshold,
    )


def lender_terms(
    scheduler: NixlPullConnectorScheduler,
    identity: EngineIdentity,
    settings: ConnectorSettings,
    tables: Mapping[tuple[int, int], SealTable],
) -> LenderTerms:
    """Terms of a new incarnation. `tables`: by (pp rank, tp rank)."""
    max_blocks = max(1, int(identity.pool.num_gpu_blocks * settings.lease_share))
    return LenderTerms(
        engine_id=EngineId(scheduler.engine_id),
        incarnation=Incarnation(secrets.token_bytes(16)),
        fingerprint_hash=identity.fingerprint.hash,
        block_tokens=identity.block_tokens,
        stride_tokens=identity.stride_tokens,
        block_bytes=_block_bytes(scheduler),
        tables=tuple(
            RankTable(pp_rank=pp_rank, tp_rank=tp_rank, address=table.address)
            for (pp_rank, tp_rank), table in tables.items()
        ),
        slots=min(table.slots for table in tables.values()),
        max_blocks=max_blocks,
        ttl_ms=settings.lease_ttl_ms,
        max_lifetime_ms=settings.max_lifetime_ms,
        on_deadline=settings.on_deadline,
        renewable=settings.renewable,
        self_renewing=settings.mode is Mode.ELASTIC,
        keep_free_blocks=int(identity.pool.num_gpu_blocks * settings.keep_free),
        tenant_blocks=max(1, int(max_blocks * settings.tenant_share)),
        blocks_of_tenants={tenant: max(1, int(max_blocks * share)) for tenant, share in settings.tenant_shares.items()},
    )


def lender(
    scheduler: NixlPullConnectorScheduler, terms: LenderTerms, identity: EngineIdentity, settings: ConnectorSettings
) -> Engine:
    """How this lender introduces itself to the registry."""
    return Engine(
        engine_id=terms.engine_id,
        incarnation=terms.incarnation,
        api_url=settings.api_url,
        version=f"kvlease {version('kvlease')}, vllm {vllm_version}, nixl {_nixl_version()}",
        fingerprint=identity.fingerprint,
        labels=(
            ("mode", settings.mode.value),
            ("lease_ttl_ms", str(terms.ttl_ms)),
            ("on_deadline", terms.on_deadline.value),
            ("recompute_threshold", str(scheduler.kv_recompute_threshold)),
            ("stride_tokens", str(terms.stride_tokens)),
            ("side_channel", f"{scheduler.side_channel_host}:{scheduler.side_channel_port}"),
            ("shutdown_timeout_s", str(getattr(scheduler.vllm_config, "shutdown_timeout", ""))),
        ),
    )


def stock_params(scheduler: NixlPullConnectorScheduler) -> dict[str, object]:
    """What stock's prefill side needs to read from this engine; the request id and the blocks differ by lease."""
    parallel = scheduler.vllm_config.parallel_config
    return {
        "remote_engine_id": scheduler.engine_id,
        "remote_host": scheduler.side_channel_host,
        "remote_port": scheduler.side_channel_port,
        "tp_size": scheduler.transfer_tp_size,
        "dcp_size": parallel.decode_context_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "transfer_mode": scheduler._TRANSFER_MODE,
    }


def _nixl_version() -> str:
    for package in ("nixl-cu12", "nixl-cu13", "nixl"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return "unknown"


def _block_bytes(scheduler: NixlPullConnectorScheduler) -> int:
    """KV bytes of one block over all layers and ranks."""
    group = scheduler.kv_cache_config.kv_cache_groups[0]
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names) * int(scheduler.transfer_tp_size)
