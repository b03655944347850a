"""The model that all engine tests run: the same bytes each time, and text that comes back as the same tokens.

No engine is started here. What greedy answers look like is checked on a real one, in `test_fleet.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.engines.model import REPOSITORY, SPECIAL_TOKENS, TURN_END, WORDS, model_dir

MAKING_BOUND_S = 240


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder that two processes made at once in an empty cache, and the cache."""
    cache = tmp_path_factory.mktemp("cache")
    makers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.model"],
            env={**os.environ, "KVLEASE_TEST_CACHE": str(cache)},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    first, second = (Path(maker.communicate(timeout=MAKING_BOUND_S)[0].strip()) for maker in makers)
    assert first == second
    return first, cache


@pytest.mark.timeout(2 * MAKING_BOUND_S)
def test_two_makers_at_once_leave_one_model(made: tuple[Path, Path]) -> None:
    folder, cache = made
    assert [path.name for path in (cache / "models").iterdir()] == [folder.name]


@pytest.mark.timeout(2 * MAKING_BOUND_S)
def test_model_is_the_same_each_time(made: tuple[Path, Path]) -> None:
    again, ours = made[0], model_dir()
    assert again != ours
    names = sorted(path.name for path in ours.iterdir())
    assert "model.safetensors" in names
    assert sorted(path.name for path in again.iterdir()) == names
    assert [name for name in names if (again / name).read_bytes() != (ours / name).read_bytes()] == []


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


@given(before=st.lists(st.sampled_from(WORDS)), answer=st.lists(st.sampled_from(WORDS), min_size=1))
def test_answers_become_the_same_tokens_in_any_history(
    tokenizer: Tokenizer, before: list[str], answer: list[str]
) -> None:
    """Whole words with a space in front are one token each, whatever stands around them."""
    prompt = "".join(f" {word}" for word in before) + TURN_END + "\n"
    text = "".join(f" {word}" for word in answer)
    written = tokenizer.encode(prompt).ids + [tokenizer.encode(f" {word}").ids[0] for word in answer]
    assert tokenizer.encode(prompt + text + TURN_END).ids[:-1] == written


@given(st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    if not any(special in text for special in SPECIAL_TOKENS):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
