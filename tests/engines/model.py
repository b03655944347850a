"""A small Qwen3 model with seeded random weights and a tokenizer, made on the spot: nothing is downloaded.

`model_dir()` is the only door. The files depend on the constants below and on nothing else, so they are made once and
kept under `.cache/`. Invariant: text that the model writes becomes the same tokens again when it is sent back in the
history, because it can only write whole words that start with a space. A conversation's KV is then reused including
the answers, as it is with real models; a test that needs text that does not round-trip edits the history instead.

Run as a module, it makes the model and prints the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
CACHE: Final = Path(os.environ.get("KVLEASE_TEST_CACHE", REPOSITORY / ".cache"))

MODEL_NAME: Final = "small-qwen3"
"""The name under which engines serve it."""

SEED: Final = 20_26
LAYERS: Final = 4
HIDDEN: Final = 256
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
FEED_FORWARD: Final = 768
MAX_POSITIONS: Final = 32_768
"""Tokens."""
WEIGHT_SPREAD: Final = 0.06
"""Standard deviation. Large enough that a wrong KV block moves log-probs by much more than the tolerance."""
KV_BYTES_PER_TOKEN: Final = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
"""Key and value, all layers, fp32."""

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
THINK: Final = ("<think>", "</think>")
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END, *THINK)

_WORD_LIST: Final = Path(__file__).with_name("words.txt")
WORDS: Final = tuple(_WORD_LIST.read_text().split())
"""Each of them is one token when a space comes before it."""

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{%- endif -%}"
)
"""Turns follow each other, so a longer history extends a shorter one. `enable_thinking: false` closes an empty thought
in front of the answer and leaves it out of the history, as Qwen3's own template does: the old prompt is rewritten."""


def _corpus() -> Iterator[str]:
    for word in WORDS:
        yield f" {word} {word} {word.capitalize()}"
    yield "system user assistant tool 0 1 2 3 4 5 6 7 8 9 . , : ; ? ! - \n"


def _make_tokenizer(folder: Path) -> tuple[int, list[int]]:
    """Write the tokenizer; return the vocabulary's size and the ids of the words that the model may write."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words_apart = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words_apart, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    ids = [tokenizer.encode(f" {word}").ids for word in WORDS]
    broken = [word for word, encoded in zip(WORDS, ids, strict=True) if len(encoded) != 1]
    if broken:
        raise RuntimeError(f"words that are not one token: {broken}")
    return tokenizer.get_vocab_size(), [encoded[0] for encoded in ids]


def _make_weights(folder: Path, vocabulary: int, writable: list[int]) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        dtype="float32",
        eos_token_id=SPECIAL_TOKENS.index(TURN_END),
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        bos_token_id=None,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen3ForCausalLM(config).state_dict().items()}  # type: ignore[no-untyped-call]
    source = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=source) * WEIGHT_SPREAD
        for name, shape in sorted(shapes.items())
    }
    # A logit of 0 is never the largest of hundreds of random ones: greedy answers are made of whole words only.
    silent = torch.ones(vocabulary, dtype=torch.bool)
    silent[writable] = False
    weights["lm_head.weight"][silent] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def model_dir() -> Path:
    """The folder of the model, made first if need be. Safe to call from several processes at once."""
    version = hashlib.sha256(Path(__file__).read_bytes() + _WORD_LIST.read_bytes()).hexdigest()[:12]
    wanted = CACHE / "models" / f"{MODEL_NAME}-{version}"
    if wanted.is_dir():
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=wanted.parent))
    try:
        vocabulary, writable = _make_tokenizer(making)
        _make_weights(making, vocabulary, writable)
        making.chmod(0o755)
        try:
            making.rename(wanted)
        except OSError:
            if not wanted.is_dir():  # another process was first: its files are the same as ours
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return wanted


if __name__ == "__main__":
    print(model_dir())
