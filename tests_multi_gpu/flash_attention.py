"""Stands for FlashAttention, which has no CPU kernels: reads the lengths and masks that transformers gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = ("flash_attention_of_test", "kernels-community/flash-attn-of-test")
"""as of a package, and of a kernel of the hub"""


def select(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Selects the stand-in as ``from_pretrained(attn_implementation=name)`` does; returns the model."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, attend)
    # Of local ones no mask is made.
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, flash_attention_mask)
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    for config in configs.values():
        config._attn_implementation = name
    return model


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention ``[B, S, H, D]`` of ``[B, H, S, D]``, each document or text without padding alone."""
    B, _, S, _ = query.shape
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    numbers = torch.zeros(B, S, dtype=torch.int64, device=query.device)
    if cu_seq_lens_q is not None:
        lengths = cu_seq_lens_q.to(query.device).diff()
        numbers = torch.arange(len(lengths), device=query.device).repeat_interleave(lengths).view(B, S)
    if attention_mask is not None:
        numbers = numbers.masked_fill(attention_mask == 0, -1)
    order = torch.arange(S, device=query.device)
    is_seen = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (order[:, None] >= order)
    attended = F.scaled_dot_product_attention(query, key, value, is_seen, scale=kwargs.get("scaling"))
    return attended.transpose(1, 2).contiguous(), None
