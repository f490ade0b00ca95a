"""What one micro-batch costs with a gathered head and with rows that stay where they are, from shapes alone.

Legend: N tokens of a process, D hidden, V vocabulary, G processes of the shard axis. Numbers of the layers are 16 or 32
bits wide (``itemsize``), gradients are reduced in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from liger_dist.losses.token_exchange import numbers_of_token
from liger_dist_kernels import DEFAULT_MEMORY_BUDGET

FP32 = 4
LABEL, SCALES, STATISTICS = 8, 8, 12
"""bytes of a token"""


@dataclass(frozen=True, kw_only=True)
class HeadShapes:
    """Everything the costs depend on; the same on every process."""

    tokens: int
    hidden_size: int
    vocab_size: int
    processes: int
    tied: bool
    trains: bool
    """whether the weight requires a gradient"""
    itemsize: int
    memory_budget: int | None

    @property
    def weight_bytes(self) -> int:
        return self.vocab_size * self.hidden_size * self.itemsize


@dataclass(frozen=True, kw_only=True)
class HeadCost:
    """Of one process and micro-batch."""

    sent_bytes: int
    """to other processes, forward and backward"""
    held_bytes: int
    """at the peak, beside the shards of the weight and its gradient"""

    def __str__(self) -> str:
        return f"sends {self.sent_bytes / 2**20:.0f} MiB, holds {self.held_bytes / 2**20:.0f} MiB"


def head_costs(shapes: HeadShapes) -> dict[str, HeadCost]:
    """Of every way, by the name of ``WrapConfig.head``."""
    return {"gather": gathered(shapes), "vocab_parallel": vocab_parallel(shapes)}


def gathered(shapes: HeadShapes) -> HeadCost:
    """The weight is gathered once, and its gradient, if it has one, is reduced in fp32. Whole are the weight, its
    gradient, and what the reduction starts from."""
    whole, whole_fp32 = shapes.weight_bytes, shapes.weight_bytes // shapes.itemsize * FP32
    if not shapes.trains:
        logits, _ = _buffer(shapes, tokens=shapes.tokens, numbers=shapes.vocab_size)
        return HeadCost(sent_bytes=whole * (shapes.processes - 1) // shapes.processes, held_bytes=whole + logits)
    others = shapes.processes - 1
    logits, chunks = _buffer(shapes, tokens=shapes.tokens, numbers=shapes.vocab_size)
    in_loss = logits + (whole if chunks <= 2 else whole_fp32)
    return HeadCost(
        sent_bytes=(whole + whole_fp32) * others // shapes.processes,
        held_bytes=whole + max(in_loss, whole + whole_fp32),
    )


def vocab_parallel(shapes: HeadShapes) -> HeadCost:
    """Every token's hidden states travel to the other processes, and their gradients back; those of a tied embedding
    once more."""
    others = shapes.processes - 1
    token = shapes.hidden_size * shapes.itemsize
    rows = -(-shapes.vocab_size // shapes.processes)
    everyone = shapes.tokens * shapes.processes
    chunk, _ = _buffer(shapes, tokens=everyone, numbers=numbers_of_token(rows, shapes.hidden_size))
    numbers = shapes.tokens * (LABEL + SCALES) + everyone * STATISTICS
    travels = shapes.tokens * token * 2 * (2 if shapes.tied else 1)
    return HeadCost(
        sent_bytes=(travels + numbers) * others,
        held_bytes=chunk + rows * token,
    )


def _buffer(shapes: HeadShapes, *, tokens: int, numbers: int) -> tuple[int, int]:
    """Bytes of a chunk with so many ``numbers`` for each token, and how many chunks there are."""
    budget = shapes.memory_budget or DEFAULT_MEMORY_BUDGET
    whole = tokens * numbers * shapes.itemsize
    chunks = -(-whole // budget)
    return (-(-whole // chunks), chunks) if chunks else (0, 0)
