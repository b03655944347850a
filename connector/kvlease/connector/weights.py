"""Which weights an engine's KV was computed with, as far as the engine's calls to its workers tell.

Pure. Every call that an engine makes to its workers is one of three kinds; a call that nobody here knows may write to
the weights, so it counts as one that does. Weights that changed in place have no name that another engine could share,
so nothing matches until somebody names them (vLLM's `/update_weight_version`).

Invariant: two engines with the same version hold the same weights, or an operator gave different ones the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final

HARMLESS: Final = frozenset(
    {
        "add_lora",  # adapters have versions of their own
        "check_health",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_cache_block_size_bytes",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "set_kv_cache_layout",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
        "wake_up",  # what it wakes up was put to sleep by a call that counts
    }
)
"""Calls of vLLM 0.32 to its workers that leave weights and KV alone."""


class CallKind(StrEnum):
    HARMLESS = "harmless"
    FORGETS_KV = "forgets_kv"
    CHANGES_WEIGHTS = "changes_weights"


def call_kind(
    method: object, args: Sequence[object], kwargs: Mapping[str, object], harmless: Collection[str] = ()
) -> CallKind:
    """What a call to the workers does. `harmless`: names of an operator's own methods that write to no weights."""
    name = call_name(method)
    if (isinstance(method, str) and name in HARMLESS) or name in harmless:
        return CallKind.HARMLESS
    if name == "sleep":
        level = kwargs.get("level", args[0] if args else 1)
        return CallKind.FORGETS_KV if level in (0, 1) else CallKind.CHANGES_WEIGHTS
    if name == "discard":
        tags = kwargs.get("tags", args[0] if args else ())
        only_kv = isinstance(tags, Collection) and set(tags) <= {"kv_cache"}
        return CallKind.FORGETS_KV if only_kv else CallKind.CHANGES_WEIGHTS
    return CallKind.CHANGES_WEIGHTS


def call_name(method: object) -> str:
    """The name of a worker's method, or of a function that workers are to run."""
    return method if isinstance(method, str) else str(getattr(method, "__name__", type(method).__name__))


class Weights:
    """The version of one engine's weights, and whether the engine may still hold KV of earlier ones."""

    def __init__(self, declared: str) -> None:
        """`declared`: what the settings say of the weights that the engine starts with."""
        self._declared = declared
        self.version = declared
        self.unnamed = False
        """They changed in place and nobody has said to what."""
        self.mixed = False
        """KV computed with earlier weights may be in the cache or in running requests."""

    def changed(self, unique: str, *, empty: bool) -> bool:
        """They changed in place; whether that makes the version another one.

        `unique`: a text that no engine has used before. `empty`: the engine holds no KV at all at this moment.
        """
        self.mixed = not empty
        if self.unnamed:
            return False
        self.unnamed = True
        self.version = f"{self._declared}, changed in place ({unique})"
        return True

    def named(self, name: str) -> None:
        """An operator says which weights these are: the same name on another engine means the same weights."""
        self.unnamed = False
        self.version = f"{self._declared}, {name}"

    def forgotten(self) -> None:
        """The engine holds no KV of earlier weights any more."""
        self.mixed = False
