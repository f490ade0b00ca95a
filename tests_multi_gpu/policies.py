"""Checkpoints of tiny policies for RL frameworks, and the comparison of their updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from models import HIDDEN_SIZE, VOCAB_SIZE, make_config
from torch import Tensor

ROWS = 8
"""rows of logits that the memory budget has room for"""
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8}


def config_of(family: str) -> Any:
    from transformers import GraniteConfig, Qwen3Config, Qwen3MoeConfig
    from vision_models import make_config as make_config_with_images

    if family == "qwen2_5_vl":
        return make_config_with_images(family)
    if family == "granite":
        return GraniteConfig(**SIZES, logits_scaling=4.0)
    if family == "qwen3":
        return Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return make_config(family)


def save_checkpoint(folder: Path, family: str) -> Path:
    """Saves a model of the family; returns its folder. Later calls find it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    path = folder / family
    if not path.exists():
        torch.manual_seed(0)
        kind = AutoModelForImageTextToText if family == "qwen2_5_vl" else AutoModelForCausalLM
        kind.from_config(config_of(family), dtype=torch.float32).save_pretrained(path)
    return path


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields the largest difference of each pair of tensors, relative to the largest entry where that is above 1."""
    assert type(a) is type(b), path
    if isinstance(a, Tensor):
        assert a.shape == b.shape, path
        if a.is_floating_point():
            yield path, float((a.double() - b.double()).abs().max() / max(1.0, float(b.abs().max())))
        else:
            assert torch.equal(a, b), path
    elif isinstance(a, dict | list):
        assert len(a) == len(b), path
        for key in a if isinstance(a, dict) else range(len(a)):
            yield from differences(a[key], b[key], f"{path}.{key}")
    else:
        assert a == b, path
