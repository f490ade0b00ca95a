"""Rows of the tokens that count, taken out of all rows and put back.

Legend: T all tokens, K tokens that are kept. A negative index marks a row that was only added to fill a fixed number:
it is a copy of some row, and goes back nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _TakeRows(torch.autograd.Function):
    """Indexing, with a backward that writes each row once where torch's own sorts the indices to add them up."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, index_K: Tensor) -> Tensor:
        ctx.save_for_backward(index_K)
        ctx.num_rows = x_TD.shape[0]
        return x_TD.index_select(0, index_K.clamp_min(0))

    @staticmethod
    def backward(ctx: Any, d_KD: Tensor) -> tuple[Tensor, None]:
        (index_K,) = ctx.saved_tensors
        return put_rows(d_KD, index_K, ctx.num_rows), None


def take_rows(x_TD: Tensor, index_K: Tensor) -> Tensor:
    """``[K, ...]``: the rows ``index_K`` of ``x_TD``; differentiable."""
    taken: Tensor = _TakeRows.apply(x_TD, index_K)  # type: ignore[no-untyped-call]
    return taken


def put_rows(values_K: Tensor, index_K: Tensor, num_rows: int) -> Tensor:
    """``[num_rows, ...]``: ``values_K`` in the rows ``index_K``, zeros elsewhere; differentiable."""
    # One more row takes what goes nowhere.
    rows = values_K.new_zeros((num_rows + 1, *values_K.shape[1:]))
    return rows.index_copy(0, torch.where(index_K < 0, num_rows, index_K), values_K)[:num_rows]
