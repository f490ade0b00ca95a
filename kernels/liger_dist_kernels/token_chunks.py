"""Chunks of tokens with their targets, and tiles of a block of logits.

Legend: T tokens, D hidden, V vocabulary, c tokens of a chunk, K chosen classes of each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

DEFAULT_MEMORY_BUDGET = 2**30
DEFAULT_FROZEN_BUDGET = 2**28
"""Bytes for an lm_head whose weight has no gradient: chunks of 1024 tokens of 128256 classes take as long as larger
ones (H100, D = 2048 and 4096)."""
TILE_ROWS, TILE_COLUMNS = 4096, 16384
"""Tokens and classes whose logits exist at once without gradients: 128 MiB of bf16. Products of this size are
as fast as one over all classes; with fewer classes the kernels' starts and ends show (H200, D = 2048 and 4096)."""
EXPONENTIAL_COLUMNS = 8192
"""Classes of a tile whose exponentials are kept: as many as one program holds."""
SMALLEST_TILE = 128


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of tokens: ``num_chunks`` chunks of ``rows`` tokens, the last one possibly shorter."""

    rows: int
    num_chunks: int


def plan_chunks(
    num_tokens: int, vocab_size: int, itemsize: int, memory_budget: int | None = None, *, trains_weight: bool = True
) -> ChunkPlan:
    """Plans as few equal chunks as possible with their logits in ``memory_budget`` bytes (a single token may exceed it;
    default 1 GiB, for a weight without gradient 256 MiB). Depends on shapes alone.

    Few, because every chunk reads the weight again and, from the third on, an fp32 sum of weight gradients as well,
    which is larger than the buffer: two chunks of 1 GiB take less memory than four of 512 MiB.
    """
    if num_tokens == 0:
        return ChunkPlan(rows=0, num_chunks=0)
    budget = default_budget(trains_weight) if memory_budget is None else memory_budget
    num_chunks = -(-num_tokens // max(1, budget // (vocab_size * itemsize)))
    rows = -(-num_tokens // num_chunks)
    return ChunkPlan(rows=rows, num_chunks=-(-num_tokens // rows))


def default_budget(trains_weight: bool) -> int:
    """Returns the default bytes of the logits of one chunk."""
    return DEFAULT_MEMORY_BUDGET if trains_weight else DEFAULT_FROZEN_BUDGET


@dataclass(frozen=True)
class TilePlan:
    """Tiles of a block of logits: ``rows`` tokens and ``columns`` classes."""

    rows: int
    columns: int

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        """Yields the tokens of each tile; one empty slice without any token."""
        return (slice(start, min(start + self.rows, num_rows)) for start in range(0, max(num_rows, 1), self.rows))

    def column_slices(self, num_columns: int) -> list[slice]:
        """Returns the classes of each tile; one empty slice without any class."""
        starts = range(0, max(num_columns, 1), self.columns)
        return [slice(start, min(start + self.columns, num_columns)) for start in starts]


def plan_tiles(num_rows: int, num_columns: int, itemsize: int, memory_budget: int | None, *, rows: int) -> TilePlan:
    """Plans equal tiles of at most ``rows`` tokens and ``TILE_COLUMNS`` classes, fewer where they would exceed
    ``memory_budget`` bytes (a tile of one token and ``SMALLEST_TILE`` classes may)."""
    rows, most = max(1, min(rows, num_rows)), TILE_COLUMNS
    if memory_budget is not None:
        rows = max(1, min(rows, memory_budget // (SMALLEST_TILE * itemsize)))
        most = min(most, max(memory_budget // (rows * itemsize), SMALLEST_TILE))
    num_tiles = -(-num_columns // most) or 1
    columns = -(-num_columns // (num_tiles * SMALLEST_TILE)) * SMALLEST_TILE
    return TilePlan(rows=rows, columns=max(columns, SMALLEST_TILE))


def plan_exponentials(num_rows: int, num_columns: int, memory_budget: int | None) -> TilePlan:
    """Plans tiles of fp32 logits, a power of two of classes wide, at most as many as one program holds."""
    columns = min(EXPONENTIAL_COLUMNS, max(2 ** max(num_columns - 1, 0).bit_length(), SMALLEST_TILE))
    most = TILE_ROWS if memory_budget is None else max(memory_budget // (4 * columns), 1)
    return TilePlan(rows=max(1, min(TILE_ROWS, most, num_rows)), columns=columns)


class TokenTargets(NamedTuple):
    """Targets of each token: labels, temperatures, soft labels and chosen classes."""

    labels_T: Tensor
    """``[T]`` int64 in ``[0, V)``, or negative for an ignored token (the caller checks)"""
    temperature_T: Tensor | None = None
    """``[T]`` floating, above 0; None for the one in the options"""
    token_ids_TK: Tensor | None = None
    """``[T, K]`` int64 in ``[0, V)``, or negative: classes of the requested log-probabilities, then those of soft
    labels"""
    soft_TK: Tensor | None = None
    """``[T, k]`` floating: factors of ``lse - z`` of the last k classes in the cross entropy; 0 for negative ones"""
    uniform_T: Tensor | None = None
    """``[T]`` floating: factor of ``lse - z`` of every class, in addition"""

    @property
    def num_soft(self) -> int:
        """k"""
        return 0 if self.soft_TK is None else self.soft_TK.shape[1]

    @property
    def asked_ids_TK(self) -> Tensor | None:
        """Classes of the requested log-probabilities, ``[T, K - k]`` or None."""
        if self.token_ids_TK is None or self.token_ids_TK.shape[1] == self.num_soft:
            return None
        return self.token_ids_TK[:, : self.token_ids_TK.shape[1] - self.num_soft]

    def rows(self, rows: slice) -> TokenTargets:
        """Slices every field along the tokens."""
        return TokenTargets(*(None if field is None else field[rows] for field in self))  # type: ignore[arg-type]


class TokenChunks(Protocol):
    """Tokens to score, chunk by chunk (c tokens each), and the caller's share of them (T tokens).

    For each chunk in order: :meth:`hidden`, :meth:`targets`; with gradients :meth:`gradients`, then
    :meth:`gradient_buffer` and, when it has been written, :meth:`gradient_written`.
    """

    num_chunks: int
    rows: int
    """tokens of the largest chunk"""

    def hidden(self, chunk: int) -> Tensor:
        """Returns the hidden states ``[c, D]``."""
        ...

    def targets(self, chunk: int) -> TokenTargets:
        """Returns labels and classes in the full vocabulary."""
        ...

    def gradients(self, chunk: int) -> Any:
        """Returns the chunk's upstream gradients of the terms, or coefficients of the gradient, each ``[c, ...]``."""
        ...

    def local_rows(self, chunk: int) -> slice:
        """Returns the rows of a chunk that are the caller's tokens."""
        ...

    def gradient_buffer(self, chunk: int) -> Tensor:
        """Returns the buffer ``[c, D]`` of the chunk's hidden gradient."""
        ...

    def gradient_written(self, chunk: int) -> None:
        """Consumes the gradient buffer of the chunk; called after it has been written."""
        ...

    def hidden_gradient(self) -> Tensor:
        """Returns the hidden states' gradient ``[T, D]``, after the last chunk."""
        ...


class LocalTokens:
    """Tokens that are all on this rank: slices of ``hidden_TD``."""

    def __init__(
        self, hidden_TD: Tensor, targets: TokenTargets, gradients: Any = None, rows: int | None = None
    ) -> None:
        """Slices ``hidden_TD`` into chunks of ``rows`` tokens (None for one chunk); ``gradients`` is a named tuple of
        tensors ``[T, ...]``."""
        T = len(hidden_TD)
        self.rows = T if rows is None else rows
        self.num_chunks = 0 if T == 0 else -(-T // self.rows)
        self._hidden_TD, self._targets, self._gradients = hidden_TD, targets, gradients
        self._d_hidden_TD: Tensor | None = None

    @staticmethod
    def planned(
        hidden_TD: Tensor,
        targets: TokenTargets,
        gradients: Any,
        memory_budget: int | None,
        columns: int,
        *,
        trains: bool,
    ) -> LocalTokens:
        """Plans chunks whose logits of ``columns`` classes fit the budget: see :func:`plan_chunks`."""
        shape = len(hidden_TD), columns, hidden_TD.element_size()
        plan = plan_chunks(*shape, memory_budget, trains_weight=trains)
        return LocalTokens(hidden_TD, targets, gradients, plan.rows)

    def _rows(self, chunk: int) -> slice:
        return slice(chunk * self.rows, min((chunk + 1) * self.rows, len(self._hidden_TD)))

    def hidden(self, chunk: int) -> Tensor:
        return self._hidden_TD[self._rows(chunk)]

    def targets(self, chunk: int) -> TokenTargets:
        return self._targets.rows(self._rows(chunk))

    def gradients(self, chunk: int) -> Any:
        rows = self._rows(chunk)
        return type(self._gradients)(*(None if field is None else field[rows] for field in self._gradients))

    def local_rows(self, chunk: int) -> slice:
        return slice(None)

    def gradient_buffer(self, chunk: int) -> Tensor:
        if self._d_hidden_TD is None:
            hidden_TD = self._hidden_TD
            self._d_hidden_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=hidden_TD.device)
        return self._d_hidden_TD[self._rows(chunk)]

    def gradient_written(self, chunk: int) -> None:
        pass

    def hidden_gradient(self) -> Tensor:
        return torch.zeros_like(self._hidden_TD) if self._d_hidden_TD is None else self._d_hidden_TD
