# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What a mixture of experts computes beside its products and its gate: the order of tokens by expert, their rows in
that order, the sum over the experts of a token, and gradients of biases and of LoRA.

Legend: T tokens, K experts of a token, S = T * K rows sorted by expert, E experts, D hidden, r rank. Arithmetic is
fp32 (fp64 for fp64 rows), rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    Backend,
    add_product,
    cdiv,
    host_number,
    launch,
    number,
    runs_triton,
    statistics_dtype,
)
from .grouped_products import grouped_outer_product
from .launches import expert_row_sizes, outer_product_sizes, sum_of_expert_sizes


class Routing(NamedTuple):
    """Order of the pairs of token and expert by expert."""

    pair_S: Tensor
    """int32: pair of each row, ``token * K + k``; S, or as many as there are pairs with an expert"""
    row_TK: Tensor
    """int32: row of each pair; that of a pair without an expert is beyond the last end"""
    ends_E: Tensor
    """int32: number of rows of the experts up to each one"""
    expert_S: Tensor
    """int16 or int32: expert of each row; the number of experts or more for none"""


def expert_dtype(num_experts: int) -> torch.dtype:
    """Returns the dtype in which experts are sorted: the fewer bytes, the fewer passes."""
    return torch.int16 if num_experts < torch.iinfo(torch.int16).max else torch.int32


def route(index_TK: Tensor, num_experts: int, num_rows: int | None = None) -> Routing:
    """Sorts the pairs of token and expert by expert, in the order of tokens for each, without synchronizing the host.

    Args:
        index_TK: integers; an index of ``num_experts`` or more names no expert, as of pairs whose expert is on another
            rank.
        num_rows: upper bound of the pairs with an expert, where the host knows one: rows of pairs are cut to it.
            Default: ``T * K``.
    """
    dtype = expert_dtype(num_experts)
    expert_S, pair_S = torch.sort(index_TK.reshape(-1).clamp(max=num_experts).to(dtype), stable=True)
    experts = torch.arange(num_experts, device=index_TK.device, dtype=dtype)
    ends_E = torch.searchsorted(expert_S, experts, right=True, out_int32=True)
    row_TK = torch.empty(index_TK.shape, dtype=torch.int32, device=index_TK.device)
    rows = torch.arange(pair_S.shape[0], device=index_TK.device, dtype=torch.int32)
    row_TK.view(-1)[pair_S] = rows
    return Routing(pair_S.int()[:num_rows], row_TK, ends_E, expert_S[:num_rows])


@triton.jit
def _gather_kernel(
    x_ptr, row_ptr, ends_ptr, y_ptr, stride_xt, D, E: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr
):
    # A token is read once, and written to the rows of its experts.
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    end = tl.load(ends_ptr + E - 1)
    x = tl.load(x_ptr + token * stride_xt + offs_d, mask=mask_d, other=0.0)
    for k in tl.range(0, K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        tl.store(y_ptr + row * D + offs_d, x, mask=mask_d & (row < end))


def weights_of_rows(weight_TK: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Returns the router's weights of the rows of experts."""
    return weight_TK.reshape(-1)[routing.pair_S[: int(routing.ends_E[-1])].long()].to(dtype)


def gather_rows(x_TD: Tensor, routing: Routing, *, backend: Backend = "auto") -> Tensor:
    """Returns the rows of the tokens sorted by expert, ``[S, D]``; those without an expert are not initialised."""
    T, K = routing.row_TK.shape
    if not runs_triton(x_TD, backend):
        return x_TD[routing.pair_S.long() // K]
    D = x_TD.shape[1]
    y_SD = x_TD.new_empty(len(routing.pair_S), D)
    if y_SD.numel() > 0:
        sizes = expert_row_sizes(D)
        launch(
            _gather_kernel,
            (T, cdiv(D, sizes["BLOCK_D"])),
            x_TD,
            routing.row_TK,
            routing.ends_E,
            y_SD,
            x_TD.stride(0),
            D,
            E=routing.ends_E.shape[0],
            K=K,
            **sizes,
        )
    return y_SD


@dataclass(frozen=True)
class LowRank:
    """A low-rank product that is added to the one of the weights, ``product + scale * product_low``."""

    product: Tensor
    scale: float


@triton.jit
def _combine_kernel(
    y_ptr, low_ptr, bias_ptr, row_ptr, expert_ptr, weight_ptr, ends_ptr, sum_ptr, low_scale, D,
    E: tl.constexpr, K: tl.constexpr, FP64: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if FP64 else tl.float32
    low_scale = number(low_scale, dtype)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    end = tl.load(ends_ptr + E - 1)
    total = tl.zeros((BLOCK_D,), dtype)
    for k in tl.range(0, K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        mask = mask_d & (row < end)
        total += tl.load(y_ptr + row * D + offs_d, mask=mask, other=0.0).to(dtype)
        if HAS_LOW:
            total += low_scale * tl.load(low_ptr + row * D + offs_d, mask=mask, other=0.0).to(dtype)
        if HAS_BIAS:
            expert = tl.load(expert_ptr + token * K + k).to(tl.int64)
            weight = tl.load(weight_ptr + token * K + k).to(dtype)
            total += weight * tl.load(bias_ptr + expert * D + offs_d, mask=mask, other=0.0).to(dtype)
    tl.store(sum_ptr + token * D + offs_d, total.to(sum_ptr.dtype.element_ty), mask=mask_d)


@dataclass(frozen=True)
class WeightedBias:
    """A bias of each expert, which is added to the sum of a token with the weight of the router."""

    bias_ED: Tensor
    expert_TK: Tensor
    weight_TK: Tensor


def combine_rows(
    y_SD: Tensor,
    routing: Routing,
    *,
    low: LowRank | None = None,
    bias: WeightedBias | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Sums the rows of each token, ``[T, D]``, in the order of its experts: the result is the same in each run."""
    (T, K), D = routing.row_TK.shape, y_SD.shape[1]
    dtype = statistics_dtype(y_SD.dtype)
    if not runs_triton(y_SD, backend):
        if len(y_SD) == 0:
            return y_SD.new_zeros(T, D)
        has_expert_TK1 = (routing.row_TK < routing.ends_E[-1])[..., None]
        y = y_SD.to(dtype) if low is None else y_SD.to(dtype) + low.scale * low.product.to(dtype)
        rows_TKD = y[routing.row_TK.long().clamp(max=len(y) - 1)]
        if bias is not None:
            expert_TK = bias.expert_TK.clamp(max=len(bias.bias_ED) - 1)
            rows_TKD = rows_TKD + bias.weight_TK.to(dtype)[..., None] * bias.bias_ED.to(dtype)[expert_TK]
        return rows_TKD.where(has_expert_TK1, 0.0).sum(1).to(y_SD.dtype)
    sum_TD = y_SD.new_empty(T, D)
    if sum_TD.numel() > 0:
        sizes = expert_row_sizes(D)
        launch(
            _combine_kernel,
            (T, cdiv(D, sizes["BLOCK_D"])),
            y_SD,
            y_SD if low is None else low.product,
            y_SD if bias is None else bias.bias_ED,
            routing.row_TK,
            routing.row_TK if bias is None else bias.expert_TK,
            y_SD if bias is None else bias.weight_TK,
            routing.ends_E,
            sum_TD,
            host_number(0.0 if low is None else low.scale, dtype),
            D,
            E=routing.ends_E.shape[0],
            K=K,
            FP64=y_SD.dtype == torch.float64,
            HAS_LOW=low is not None,
            HAS_BIAS=bias is not None,
            **sizes,
        )
    return sum_TD


@triton.jit
def _sum_of_expert_kernel(
    y_ptr, weight_ptr, pair_ptr, ends_ptr, sum_ptr, D,
    FP64: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    dtype: tl.constexpr = tl.float64 if FP64 else tl.float32
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros((BLOCK_S, BLOCK_D), dtype)
    while start < end:
        rows = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        mask = (rows < end)[:, None] & (offs_d < D)[None, :]
        y = tl.load(y_ptr + rows[:, None] * D + offs_d[None, :], mask=mask, other=0.0).to(dtype)
        if HAS_WEIGHT:
            pairs = tl.load(pair_ptr + rows, mask=rows < end, other=0)
            y *= tl.load(weight_ptr + pairs, mask=rows < end, other=0.0).to(dtype)[:, None]
        total += y
        start += BLOCK_S
    y = tl.sum(total, 0).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + expert.to(tl.int64) * D + offs_d, y, mask=offs_d < D)


def sum_of_experts(
    y_SD: Tensor, routing: Routing, *, weight_TK: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Sums the rows of each expert, ``[E, D]``, each times the weight of the router where it is given."""
    E, D = routing.ends_E.shape[0], y_SD.shape[1]
    dtype = statistics_dtype(y_SD.dtype)
    if not runs_triton(y_SD, backend):
        end = int(routing.ends_E[-1])
        y = y_SD[:end].to(dtype)
        if weight_TK is not None:
            y = y * weights_of_rows(weight_TK, routing, dtype)[:, None]
        sums = y.new_zeros(E, D).index_add_(0, routing.expert_S[:end].long(), y)
        return sums.to(y_SD.dtype)
    sum_ED = y_SD.new_empty(E, D)
    sizes = sum_of_expert_sizes(D)
    launch(
        _sum_of_expert_kernel,
        (E, cdiv(D, sizes["BLOCK_D"])),
        y_SD,
        y_SD if weight_TK is None else weight_TK,
        routing.pair_S,
        routing.ends_E,
        sum_ED,
        D,
        FP64=y_SD.dtype == torch.float64,
        HAS_WEIGHT=weight_TK is not None,
        **sizes,
    )
    return sum_ED


@triton.jit
def _outer_product_kernel(
    low_ptr, x_ptr, pair_ptr, ends_ptr, product_ptr, scale, stride_xt, D,
    K: tl.constexpr, RANK: tl.constexpr, FP64: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if FP64 else tl.float32
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros((BLOCK_R, BLOCK_D), dtype)
    while start < end:
        rows = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        is_row = rows < end
        token = (tl.load(pair_ptr + rows, mask=is_row, other=0) // K).to(tl.int64)
        at, mask = rows[None, :] * RANK + offs_r[:, None], (offs_r < RANK)[:, None] & is_row[None, :]
        low = tl.load(low_ptr + at, mask=mask, other=0.0)
        at, mask = token[:, None] * stride_xt + offs_d[None, :], is_row[:, None] & (offs_d < D)[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        total = add_product(total, low, x)
        start += BLOCK_S
    product = (total * number(scale, dtype)).to(product_ptr.dtype.element_ty)
    at = (expert * RANK + offs_r)[:, None] * D + offs_d[None, :]
    tl.store(product_ptr + at, product, mask=(offs_r < RANK)[:, None] & (offs_d < D)[None, :])


def outer_products_with_tokens(
    low_Sr: Tensor, x_TD: Tensor, routing: Routing, *, scale: float, backend: Backend = "auto"
) -> Tensor:
    """Sums the outer products of the rows of each expert and their tokens, times ``scale``: ``[E, r, D]``, zeros for
    experts without rows. The tokens are read where they are, most of them from the cache of the GPU."""
    if not runs_triton(x_TD, backend):
        x_SD = gather_rows(x_TD, routing, backend="reference")
        return grouped_outer_product(low_Sr, x_SD, routing.ends_E) * scale
    E, (_, rank), D = routing.ends_E.shape[0], low_Sr.shape, x_TD.shape[1]
    product_ErD = x_TD.new_empty(E, rank, D)
    is_fp64 = x_TD.dtype == torch.float64
    sizes = outer_product_sizes(rank, D, is_fp64=is_fp64)
    launch(
        _outer_product_kernel,
        (E, cdiv(D, sizes["BLOCK_D"]), cdiv(rank, sizes["BLOCK_R"])),
        low_Sr,
        x_TD,
        routing.pair_S,
        routing.ends_E,
        product_ErD,
        host_number(scale, x_TD.dtype),
        x_TD.stride(0),
        D,
        K=routing.row_TK.shape[1],
        RANK=rank,
        FP64=is_fp64,
        **sizes,
    )
    return product_ErD


@triton.jit
def _product_with_bias_kernel(
    d_y_ptr, bias_ptr, expert_ptr, row_ptr, ends_ptr, product_ptr, stride_yt, D,
    E: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = token * K + tl.program_id(1)
    dtype = product_ptr.dtype.element_ty
    has_expert = tl.load(row_ptr + pair) < tl.load(ends_ptr + E - 1)
    expert = tl.load(expert_ptr + pair).to(tl.int64)
    total = tl.zeros((BLOCK_D,), dtype)
    start = 0
    while start < D:
        offs_d = start + tl.arange(0, BLOCK_D)
        mask = (offs_d < D) & has_expert
        d_y = tl.load(d_y_ptr + token * stride_yt + offs_d, mask=mask, other=0.0).to(dtype)
        total += d_y * tl.load(bias_ptr + expert * D + offs_d, mask=mask, other=0.0).to(dtype)
        start += BLOCK_D
    tl.store(product_ptr + pair, tl.sum(total, 0))


def product_with_bias(d_y_TD: Tensor, bias: WeightedBias, routing: Routing, *, backend: Backend = "auto") -> Tensor:
    """Computes the part of the gradient of the router's weights ``[T, K]`` that comes from the biases: the product of
    the gradient of a token's sum and the bias of each of its experts. fp32 (fp64 for fp64 rows)."""
    T, K = routing.row_TK.shape
    dtype = statistics_dtype(d_y_TD.dtype)
    if not runs_triton(d_y_TD, backend):
        of_pairs_TKD = bias.bias_ED.to(dtype)[bias.expert_TK.clamp(max=len(bias.bias_ED) - 1)]
        product_TK = (d_y_TD.to(dtype)[:, None] * of_pairs_TKD).sum(2)
        return product_TK.where(routing.row_TK < routing.ends_E[-1], 0.0)
    product_TK = d_y_TD.new_empty(T, K, dtype=dtype)
    if T > 0:
        launch(
            _product_with_bias_kernel,
            (T, K),
            d_y_TD,
            bias.bias_ED,
            bias.expert_TK,
            routing.row_TK,
            routing.ends_E,
            product_TK,
            d_y_TD.stride(0),
            d_y_TD.shape[1],
            E=routing.ends_E.shape[0],
            K=K,
            **expert_row_sizes(d_y_TD.shape[1]),
        )
    return product_TK
