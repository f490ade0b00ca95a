"""What a decoder layer of attention and a gated MLP keeps of a micro-batch for its backward.

Legend: T tokens of a micro-batch, S of a sequence, D hidden, F width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arguments import TrainArguments


@dataclass(frozen=True)
class LayerNeeds:
    """Bytes of one layer."""

    kept: int
    passing: int
    """while its backward runs"""


def needs_of_a_layer(a: TrainArguments, strategy: str, text: Any) -> LayerNeeds:
    """By the config of the model's text part. Numbers that were measured stand in docs/benchmarks.md."""
    size = 4 if a.dtype == "float32" else 2
    S, T = a.sequence_length, a.batch_size * a.sequence_length
    D: int = text.hidden_size
    F: int = text.intermediate_size
    heads: int = text.num_attention_heads
    queries = heads * (getattr(text, "head_dim", None) or D // heads)
    is_masked = not a.attend_across_documents and a.attention in (None, "sdpa")
    # With a mask, SDPA is given keys and values as often as there are queries.
    groups = 1 if is_masked else heads // (text.num_key_value_heads or heads)
    numbers = 2 * queries + 2 * queries // groups + _of_norms_and_mlp(a, D, F)
    if size == 2 and strategy in ("none", "ddp", "tp"):
        # Under autocast the residual stream is fp32, and products get copies in bf16.
        numbers += 4 * D
    square = a.batch_size * S * S
    # A mask of each layer's own, in bf16 and as it was; scores where SDPA has no fused kernel: fp32 with shared keys.
    masks = 3 * square if is_masked else 0
    has_scores = a.attention == "eager" or (size == 4 and a.attention in (None, "sdpa"))
    scores = heads * square * size if has_scores else 0
    return LayerNeeds(kept=T * size * numbers + masks + scores, passing=2 * T * F * size + 3 * scores)


def _of_norms_and_mlp(a: TrainArguments, D: int, F: int) -> int:
    """Numbers of each token, with the residual stream's two."""
    if a.compile:
        # What is no product is fused and computed again; inputs of products are kept.
        return 4 * D + 3 * F
    if a.layer_kernels:
        # Norms and the activation keep their inputs alone.
        return 2 * D + 2 * F
    # Each norm: its input in fp32, normalised, and scaled; the MLP: gate, its activation, up, and their product.
    return 2 * D + 2 * 4 * D + 4 * F
