"""What two engines must agree on, from vLLM's real configuration: each difference is named, and what is none is not.

No engine runs: configurations are made as engines make them, and fingerprints are taken of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the configuration is vLLM's: install the engines (make engines-venv)")

from kvlease.connector import digests
from kvlease.connector.engine_facts import fingerprint_fields
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.values import MAX_FINGERPRINT_FIELDS, MAX_TEXT_CHARS, Fingerprint

from tests.engines.engine import ENVIRONMENT
from tests.engines.inprocess import environment
from tests.engines.model import model_dir

pytestmark = pytest.mark.engines


def fingerprint(
    *,
    model: Path | None = None,
    kvlease: dict[str, Any] | None = None,
    block_tokens: int = 32,
    layout: str = "LBHNC",
    drafts: str | None = None,
    **engine: Any,
) -> Fingerprint:
    """`layout`: as the engine's core has resolved it. `drafts`: how its draft model works, if it has one."""
    from vllm.engine.arg_utils import EngineArgs

    settings = ConnectorSettings.load({"registry": "127.0.0.1:7411", "model_id": "m", **(kvlease or {})})
    given = {"dtype": "float32", "block_size": 32, "max_model_len": 2_048, "enforce_eager": True, **engine}
    with environment(ENVIRONMENT):
        config = EngineArgs(model=str(model or model_dir()), **given).create_engine_config()
        config.cache_config.kv_cache_layout = layout
        if drafts is not None:
            config.speculative_config = speculative(drafts, config)
        fields = fingerprint_fields(
            config, settings, weights_version="0", block_tokens=block_tokens, hash_tokens=32, version="0.32.0"
        )
    assert len(fields) <= MAX_FINGERPRINT_FIELDS
    assert all(len(value) <= MAX_TEXT_CHARS for value in fields.values())
    return digests.fingerprint(fields)


def speculative(method: str, target: Any) -> Any:
    """The engine's own kind of configuration, of which no draft model need be at hand."""
    from vllm.config import SpeculativeConfig

    made = object.__new__(SpeculativeConfig)
    made.method, made.draft_model_config, made.kv_cache_dtype = method, target.model_config, None
    return made


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32_768, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hf_overrides": {"rope_parameters": YARN}}, ("config", "rope")),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}, ("config", "rope")),
        ({"hf_overrides": {"rms_norm_eps": 1e-5}}, ("config",)),
        ({"dtype": "bfloat16"}, ("dtype",)),
        ({"kv_cache_dtype": "fp8"}, ("kv_dtype",)),
        ({"block_tokens": 64}, ("block_tokens",)),
        ({"layout": "LBNHC"}, ("kv_layout",)),
        ({"drafts": "eagle3"}, ("speculator",)),
        ({"revision": "abc"}, ("revision",)),
        ({"kvlease": {"model_id": "other"}}, ("model",)),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, ("hash",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.matrix(
    group="The engine",
    condition="engines differ in dtype, KV dtype, layout, rope, block size, revision, draft model",
    lent="-",
    reused="nothing; the difference is named",
    freed="-",
    recomputed="all",
)
def test_a_difference_that_changes_kv_is_named(changed: dict[str, Any], named: tuple[str, ...]) -> None:
    """R6: block size, dtypes, layout, positions, revision, model."""
    plain, other = fingerprint(), fingerprint(**changed)
    assert plain.hash != other.hash
    assert plain.differences(other) == named


def moved(folder: Path) -> Path:
    shutil.copytree(model_dir(), folder)
    return folder


def rewritten(folder: Path) -> Path:
    """As another version of the library would have saved it."""
    config = json.loads((moved(folder) / "config.json").read_text())
    config["transformers_version"] = "0.0.1"
    (folder / "config.json").write_text(json.dumps(config, sort_keys=True))
    return folder


@pytest.mark.parametrize("copy", [moved, rewritten])
def test_what_two_hosts_may_write_differently_is_no_difference(copy: Callable[[Path], Path], tmp_path: Path) -> None:
    assert fingerprint() == fingerprint(model=copy(tmp_path / "model"))


def test_how_an_engine_schedules_is_no_difference() -> None:
    assert fingerprint() == fingerprint(drafts="ngram"), "guesses from the text itself have no KV"
    assert fingerprint() == fingerprint(max_model_len=1_024, max_num_seqs=3, enable_prefix_caching=False)
