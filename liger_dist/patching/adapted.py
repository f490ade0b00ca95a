"""Output embeddings with an adapter of PEFT on them.

LoRA and DoRA give, for whatever their ranks, scalings and magnitudes, a map that is linear in the hidden states. So its
weight is the map of the identity, made by the adapter's own code: every parameter is reached through its own module's
call, where wrappers have gathered it, and autograd takes the weight's gradient back to each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WAY_OUT = "exclude the head from target_modules, or train it whole with modules_to_save."


def is_adapted(head: nn.Module) -> bool:
    """Whether an adapter of PEFT computes what ``head`` gives."""
    return callable(getattr(head, "get_base_layer", None)) and hasattr(head, "disable_adapters")


TRAINED_ROWS = (
    "PEFT trains some rows of its output embedding (trainable_token_indices on a tied model); train all of "
    "them with modules_to_save to have the loss fused"
)


def under_trained_rows(head: nn.Module) -> nn.Module | None:
    """The output embedding inside of a module of PEFT that trains some of its rows; None for any other module."""
    inside = getattr(head, "token_adapter", None)
    if not isinstance(inside, nn.Module) or not hasattr(inside, "get_merged_weights"):
        return None
    base = getattr(inside, "base_layer", None)
    return base if isinstance(base, nn.Module) else None


def adapter_objection(head: nn.Module) -> str | None:
    """Why the adapter on ``head`` is not linear in the hidden states, as a clause with its way out; None if it is, or
    if there is none."""
    if not is_adapted(head):
        return None
    if not hasattr(head, "lora_A"):
        return f"an adapter of type {type(head).__module__}.{type(head).__qualname__}; expected LoRA or DoRA: {WAY_OUT}"
    variants = getattr(head, "lora_variant", {})
    others = [type(variant).__name__ for variant in variants.values() if not type(variant).__name__.startswith("Dora")]
    return f"LoRA of the variant {others[0]}; expected plain LoRA or DoRA: {WAY_OUT}" if others else None


def has_active_dropout(head: nn.Module) -> bool:
    """Whether the adapter drops other features for every token, so that no one weight gives its logits."""
    return is_adapted(head) and any(
        isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in head.modules()
    )


@dataclass(frozen=True)
class EffectiveHead:
    """What an adapted output embedding amounts to: ``weight`` ``[V, D]`` and ``bias`` ``[V]``, with their graph."""

    weight: Tensor
    bias: Tensor | None


def effective_head(lora: nn.Module, forward: Callable[[Tensor], Tensor], hidden_states: Tensor) -> EffectiveHead:
    """The weight of ``forward``, that of the LoRA layer ``lora``: its outputs for the rows of the identity.

    A bias comes with every row and would round the weight to its own size. So the rows are scaled by a power of two,
    beside which the bias is small, and their outputs are scaled back, both exactly.
    """
    D = hidden_states.shape[-1]
    inputs = torch.eye(D, dtype=hidden_states.dtype, device=hidden_states.device)
    # That of the head, or of lora_B with LoraConfig(lora_bias=True).
    if all(getattr(module, "bias", None) is None for module in lora.modules()):
        return EffectiveHead(forward(inputs).T, None)
    scale = _LARGE[_compute_dtype(hidden_states)]
    outputs = forward(torch.cat([inputs * scale, inputs.new_zeros(1, D)]))
    return EffectiveHead(((outputs[:D] - outputs[D]) / scale).T, outputs[D])


_LARGE = {torch.float64: 2.0**40, torch.float32: 2.0**40, torch.bfloat16: 2.0**40, torch.float16: 2.0**8}
"""of a weight's entries; fp16 ends at 2 ** 16"""


def _compute_dtype(hidden_states: Tensor) -> torch.dtype:
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type) and hidden_states.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return hidden_states.dtype
