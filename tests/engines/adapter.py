"""Small LoRA adapters for the test model, with seeded random weights: each changes keys and values of every layer.

Invariant: the files depend on the seed and the model's shape alone, so two calls write the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tests.engines.model import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS

RANK: Final = 8
SPREAD: Final = 0.2
"""Standard deviation. Large enough that KV of another adapter moves log-probs by much more than the tolerance."""


def write_adapter(folder: Path, seed: int) -> Path:
    """Writes the adapter, over an earlier one if there is one; returns the folder."""
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn((RANK, HIDDEN), generator=source) * SPREAD
            weights[f"{name}.lora_B.weight"] = torch.randn((KV_HEADS * HEAD_DIM, RANK), generator=source) * SPREAD
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
