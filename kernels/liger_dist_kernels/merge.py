# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Softmax statistics of full rows of logits from those of slices of the vocabulary.

Legend: G slices, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import ANY_LENGTH, Backend, anchor_of, cdiv, launch, runs_triton, shrunk
from .launches import MERGE_STATISTICS
from .softmax_statistics import SoftmaxStatistics


@triton.jit(**ANY_LENGTH)
def _merge_statistics_kernel(
    max_ptr, sum_other_ptr, target_ptr, dot_other_ptr, weighted_sum_ptr, square_other_ptr, stride_g, merged_ptr, T,
    G: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < T
    row_max = tl.load(max_ptr + offs, mask=mask, other=0.0)
    for g in tl.static_range(1, G):
        row_max = tl.maximum(row_max, tl.load(max_ptr + g * stride_g + offs, mask=mask, other=0.0))
    anchor = anchor_of(row_max)
    sum_other = tl.zeros_like(row_max)
    target = tl.zeros_like(row_max)
    dot_other = tl.zeros_like(row_max)
    weighted_sum = tl.zeros_like(row_max)
    square_other = tl.zeros_like(row_max)
    for g in tl.static_range(G):
        places = g * stride_g + offs
        distance = tl.load(max_ptr + places, mask=mask, other=0.0) - anchor
        shrink = tl.exp(distance)
        own_sum = tl.load(sum_other_ptr + places, mask=mask, other=0.0)
        sum_other += shrink * own_sum
        target += tl.load(target_ptr + places, mask=mask, other=0.0)
        if WITH_ENTROPY:
            own_dot = tl.load(dot_other_ptr + places, mask=mask, other=0.0)
            dot_other += shrunk(shrink, own_dot, own_sum, distance)
        if WITH_SMOOTHING:
            weighted_sum += tl.load(weighted_sum_ptr + places, mask=mask, other=0.0)
        if WITH_SQUARES:
            square_other += shrink * shrink * tl.load(square_other_ptr + places, mask=mask, other=0.0)
    tl.store(merged_ptr + offs, row_max, mask=mask)
    tl.store(merged_ptr + T + offs, sum_other, mask=mask)
    tl.store(merged_ptr + 2 * T + offs, target, mask=mask)
    if WITH_ENTROPY:
        tl.store(merged_ptr + 3 * T + offs, dot_other, mask=mask)
    if WITH_SMOOTHING:
        tl.store(merged_ptr + 4 * T + offs, weighted_sum, mask=mask)
    if WITH_SQUARES:
        tl.store(merged_ptr + 5 * T + offs, square_other, mask=mask)


def merge_statistics(slices: SoftmaxStatistics, backend: Backend = "auto") -> SoftmaxStatistics:
    """Merges each field ``[G, T]`` to ``[T]``; a row of every field is contiguous, and all fields have the same row
    stride.

    Each slice saw the labels that lie in it; elsewhere its ``target_T`` is 0. A slice may be empty (``max_T`` -inf).
    """
    max_GT = slices.max_T
    if not runs_triton(max_GT, backend):
        return merge_statistics_reference(slices)
    G, T = max_GT.shape
    merged = max_GT.new_empty((6, T))
    if T > 0:
        launch(
            _merge_statistics_kernel,
            (cdiv(T, MERGE_STATISTICS["BLOCK"]),),
            *slices,
            max_GT.stride(0),
            merged,
            T,
            G,
            WITH_ENTROPY=slices.dot_other_T is not None,
            WITH_SMOOTHING=slices.weighted_sum_T is not None,
            WITH_SQUARES=slices.square_other_T is not None,
            **MERGE_STATISTICS,
        )
    kept: list[Any] = [None if field is None else row_T for field, row_T in zip(slices, merged, strict=True)]
    return SoftmaxStatistics(*kept)


def merge_statistics_reference(slices: SoftmaxStatistics) -> SoftmaxStatistics:
    """Computes :func:`merge_statistics` in plain torch: the path on CPU."""
    max_T = slices.max_T.amax(0)
    anchor_T = torch.where(max_T == float("-inf"), 0.0, max_T)
    distance_GT = slices.max_T - anchor_T
    shrink_GT = distance_GT.exp()

    def total(field_GT: Tensor | None) -> Tensor | None:
        return None if field_GT is None else field_GT.sum(0)

    dot_other_GT = slices.dot_other_T
    if dot_other_GT is not None:
        moved_GT = shrink_GT * (dot_other_GT + distance_GT * slices.sum_other_T)
        dot_other_GT = torch.where(shrink_GT * slices.sum_other_T == 0, 0.0, moved_GT)
    return SoftmaxStatistics(
        max_T,
        (shrink_GT * slices.sum_other_T).sum(0),
        slices.target_T.sum(0),
        total(dot_other_GT),
        total(slices.weighted_sum_T),
        None if slices.square_other_T is None else (shrink_GT.square() * slices.square_other_T).sum(0),
    )
