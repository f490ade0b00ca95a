"""Floating-point operations of a model, and how much of the GPU's peak they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .arguments import TrainArguments

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""dense bf16 operations per second by the vendor's data sheets, by a part of the device's name"""


@dataclass(frozen=True)
class Flops:
    """As in the appendix of PaLM (Chowdhery et al. 2022): six for each weight of a linear layer that a token meets, and
    those of attention, here of its causal half. What is computed again for activation checkpointing does not count."""

    per_token: float
    peak: float | None
    """of one device; None where it is not known, and in fp32"""

    @classmethod
    def of(cls, model: nn.Module, config: Any, arguments: TrainArguments) -> Flops:
        weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        width = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1))
        attention = 6 * getattr(text, "num_hidden_layers", 0) * width * arguments.sequence_length
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        known = [peak for part, peak in PEAKS.items() if part in name and arguments.dtype == "bfloat16"]
        return cls(6.0 * weights + attention, known[0] if known else None)

    def utilisation(self, tokens_per_second: float) -> dict[str, float]:
        """For ``metrics.jsonl``, from the tokens per second of one device."""
        return {} if self.peak is None else {"mfu": tokens_per_second * self.per_token / self.peak}

    def in_words(self, tokens_per_second: float) -> str:
        if self.peak is None:
            return ""
        achieved = tokens_per_second * self.per_token
        return f", {achieved / 1e12:.0f} TFLOP/s of the model on each GPU, utilisation {achieved / self.peak:.1%}"
