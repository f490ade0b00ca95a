"""Bytes that a gathered and a vocab-parallel lm_head send and hold per micro-batch, from shapes alone.

Legend: N tokens of a rank, D hidden, V vocabulary, G ranks of the shard axis. Weights and hidden states have
``itemsize`` bytes per element, gradients are reduced in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from liger_dist_kernels import DEFAULT_MEMORY_BUDGET, default_budget

FP32 = 4
LABEL, SCALES, STATISTICS = 8, 8, 12
"""bytes of a token"""


@dataclass(frozen=True, kw_only=True)
class HeadShapes:
    """Everything the costs depend on; the same on every rank."""

    tokens: int
    hidden_size: int
    vocab_size: int
    ranks: int
    tied: bool
    trains: bool
    """True if the weight requires a gradient"""
    itemsize: int
    memory_budget: int | None

    @property
    def weight_bytes(self) -> int:
        return self.vocab_size * self.hidden_size * self.itemsize


@dataclass(frozen=True, kw_only=True)
class HeadCost:
    """Bytes of one rank and micro-batch."""

    sent_bytes: int
    """sent to other ranks, forward and backward"""
    held_bytes: int
    """held at the peak, in addition to the shards of the weight and its gradient"""

    def __str__(self) -> str:
        return f"sends {self.sent_bytes / 2**20:.0f} MiB, holds {self.held_bytes / 2**20:.0f} MiB"


def head_costs(shapes: HeadShapes) -> dict[str, HeadCost]:
    """Of both layouts, by the value of ``FSDP2.lm_head``."""
    return {"gather": gathered(shapes), "vocab_parallel": vocab_parallel(shapes)}


def gathered(shapes: HeadShapes) -> HeadCost:
    """The weight is gathered once, and its gradient, if it has one, is reduced in fp32. Full tensors are the weight,
    its gradient, and what the reduction starts from."""
    full, full_fp32 = shapes.weight_bytes, shapes.weight_bytes // shapes.itemsize * FP32
    if not shapes.trains:
        budget = default_budget(trains_weight=False)
        logits, _ = _buffer(shapes, tokens=shapes.tokens, numbers=shapes.vocab_size, default=budget)
        return HeadCost(sent_bytes=full * (shapes.ranks - 1) // shapes.ranks, held_bytes=full + logits)
    peers = shapes.ranks - 1
    logits, chunks = _buffer(shapes, tokens=shapes.tokens, numbers=shapes.vocab_size)
    in_loss = logits + (full if chunks <= 2 else full_fp32)
    return HeadCost(
        sent_bytes=(full + full_fp32) * peers // shapes.ranks,
        held_bytes=full + max(in_loss, full + full_fp32),
    )


def vocab_parallel(shapes: HeadShapes) -> HeadCost:
    """Hidden states are sent to the other ranks and their gradients back; for a tied embedding
    once more."""
    peers = shapes.ranks - 1
    token = shapes.hidden_size * shapes.itemsize
    rows = -(-shapes.vocab_size // shapes.ranks)
    all_tokens = shapes.tokens * shapes.ranks
    # Of a token in a chunk: its logits; hidden states of this chunk and the next; their gradient, sent and received.
    chunk, _ = _buffer(shapes, tokens=all_tokens, numbers=rows + 4 * shapes.hidden_size)
    numbers = shapes.tokens * (LABEL + SCALES) + all_tokens * STATISTICS
    exchanged = shapes.tokens * token * 2 * (2 if shapes.tied else 1)
    return HeadCost(
        sent_bytes=(exchanged + numbers) * peers,
        held_bytes=chunk + rows * token,
    )


def _buffer(shapes: HeadShapes, *, tokens: int, numbers: int, default: int = DEFAULT_MEMORY_BUDGET) -> tuple[int, int]:
    """Bytes of a chunk with so many ``numbers`` for each token, and how many chunks there are."""
    budget = shapes.memory_budget or default
    full = tokens * numbers * shapes.itemsize
    chunks = -(-full // budget)
    return (-(-full // chunks), chunks) if chunks else (0, 0)
