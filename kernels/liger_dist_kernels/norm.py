# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""RMSNorm and LayerNorm of rows, with an addition in front of them if asked for.

Legend: T rows, D features.

``s = x + residual``, ``n = (s - mean(s)) * rstd`` (RMSNorm: no mean), ``y = n * (offset + weight) + bias``. RMSNorm:
Zhang and Sennrich 2019, arXiv:1910.07467; LayerNorm: Ba et al. 2016, arXiv:1607.06450. Arithmetic is fp32 (fp64 for
fp64 rows); where a model rounds in between, ``round_before_weight`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import Backend, runs_triton, statistics_dtype


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """What defines a norm beside its parameters."""

    eps: float
    """added to the variance or mean square"""
    subtract_mean: bool = False
    """LayerNorm; otherwise RMSNorm"""
    offset: float = 0.0
    """added to the weight (1 in Gemma)"""
    round_before_weight: bool = False
    """Llama's convention: ``n`` is rounded to the rows' dtype and the product has the promoted one. Otherwise only the
    result is rounded, to the rows' dtype."""


class NormOutput(NamedTuple):
    """What a norm returns and what its gradient needs."""

    y_TD: Tensor
    sum_TD: Tensor
    """the normalised rows themselves: ``x``, or ``x + residual``"""
    mean_T: Tensor | None
    rstd_T: Tensor


class NormGradients(NamedTuple):
    """``d_x_TD`` is the residual's gradient too."""

    d_x_TD: Tensor
    d_weight_D: Tensor | None
    d_bias_D: Tensor | None


def output_dtype(x: Tensor, weight: Tensor | None, options: NormOptions) -> torch.dtype:
    """The dtype of ``y``."""
    if options.round_before_weight and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


# D is a constexpr: a model has few, and the interpreter cannot loop up to a run-time number under numpy >= 2.4.


@triton.jit
def _norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    stride_xt,
    stride_rt,
    D: tl.constexpr,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = rstd_ptr.dtype.element_ty
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    x = tl.load(x_ptr + row * stride_xt + offs_d, mask=mask_d, other=0.0)
    s = x.to(dtype)
    if HAS_RESIDUAL:
        s += tl.load(residual_ptr + row * stride_rt + offs_d, mask=mask_d, other=0.0).to(dtype)
        rounded = s.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + offs_d, rounded, mask=mask_d)
        s = rounded.to(dtype)
    if SUBTRACT_MEAN:
        mean = tl.sum(s) / D
        tl.store(mean_ptr + row, mean)
        s = tl.where(mask_d, s - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(s * s) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    n = s * rstd
    if ROUND_BEFORE_WEIGHT:
        n = n.to(x_ptr.dtype.element_ty).to(dtype)
    if HAS_WEIGHT:
        n *= offset + tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(dtype)
    if HAS_BIAS:
        n += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(dtype)
    tl.store(y_ptr + row * D + offs_d, n.to(y_ptr.dtype.element_ty), mask=mask_d)


@triton.jit
def _norm_bwd_kernel(
    d_y_ptr,
    d_sum_ptr,
    sum_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    d_x_ptr,
    d_weight_ptr,
    d_bias_ptr,
    stride_yt,
    stride_dst,
    stride_st,
    T,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    offset,
    HAS_SUM_GRADIENT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    dtype = rstd_ptr.dtype.element_ty
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    scale = tl.full((BLOCK_D,), 1.0, dtype)
    if HAS_WEIGHT:
        scale = offset + tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(dtype)
    d_weight = tl.zeros((BLOCK_D,), dtype)
    d_bias = tl.zeros((BLOCK_D,), dtype)
    for index in range(ROWS):
        row = block * ROWS + index
        mask = mask_d & (row < T)
        d_y = tl.load(d_y_ptr + row * stride_yt + offs_d, mask=mask, other=0.0).to(dtype)
        s = tl.load(sum_ptr + row * stride_st + offs_d, mask=mask, other=0.0).to(dtype)
        rstd = tl.load(rstd_ptr + row, mask=row < T, other=0.0)
        if SUBTRACT_MEAN:
            s = tl.where(mask, s - tl.load(mean_ptr + row, mask=row < T, other=0.0), 0.0)
        n = s * rstd
        if NEEDS_WEIGHT:
            if ROUND_BEFORE_WEIGHT:
                d_weight += d_y * n.to(sum_ptr.dtype.element_ty).to(dtype)
            else:
                d_weight += d_y * n
        if NEEDS_BIAS:
            d_bias += d_y
        d_n = d_y * scale
        d_s = d_n - n * (tl.sum(d_n * n) / D)
        if SUBTRACT_MEAN:
            d_s -= tl.sum(d_n) / D
        d_s *= rstd
        if HAS_SUM_GRADIENT:
            d_s += tl.load(d_sum_ptr + row * stride_dst + offs_d, mask=mask, other=0.0).to(dtype)
        tl.store(d_x_ptr + row * D + offs_d, d_s.to(d_x_ptr.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        tl.store(d_weight_ptr + block * D + offs_d, d_weight, mask=mask_d)
    if NEEDS_BIAS:
        tl.store(d_bias_ptr + block * D + offs_d, d_bias, mask=mask_d)


def norm_fwd(
    x_TD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    residual_TD: Tensor | None,
    *,
    options: NormOptions,
    backend: Backend = "auto",
) -> NormOutput:
    """Args:
    x_TD: ``[T, D]``, floating, the last dim contiguous.
    weight_D, bias_D: ``[D]``, any floating dtype.
    residual_TD: ``[T, D]``, the dtype of ``x_TD``; added first.
    """
    if not runs_triton(x_TD, backend):
        return reference_fwd(x_TD, weight_D, bias_D, residual_TD, options=options)
    T, D = x_TD.shape
    statistics = statistics_dtype(x_TD.dtype)
    y_TD = x_TD.new_empty((T, D), dtype=output_dtype(x_TD, weight_D, options))
    sum_TD = x_TD if residual_TD is None else x_TD.new_empty((T, D))
    mean_T = x_TD.new_empty(T, dtype=statistics) if options.subtract_mean else None
    rstd_T = x_TD.new_empty(T, dtype=statistics)
    block, warps = _launch(D)
    if T > 0:
        _norm_fwd_kernel[(T,)](
            x_TD,
            residual_TD,
            weight_D,
            bias_D,
            y_TD,
            sum_TD,
            mean_T,
            rstd_T,
            x_TD.stride(0),
            0 if residual_TD is None else residual_TD.stride(0),
            D,
            options.eps,
            options.offset,
            HAS_RESIDUAL=residual_TD is not None,
            HAS_WEIGHT=weight_D is not None,
            HAS_BIAS=bias_D is not None,
            SUBTRACT_MEAN=options.subtract_mean,
            ROUND_BEFORE_WEIGHT=options.round_before_weight,
            BLOCK_D=block,
            num_warps=warps,
        )
    return NormOutput(y_TD, sum_TD, mean_T, rstd_T)


def norm_bwd(
    d_y_TD: Tensor,
    d_sum_TD: Tensor | None,
    saved: NormOutput,
    weight_D: Tensor | None,
    *,
    needs_weight: bool,
    needs_bias: bool,
    options: NormOptions,
    backend: Backend = "auto",
) -> NormGradients:
    """Gradients from those of ``y`` and, where the sum went on as well, of ``sum``; of ``saved``, ``y_TD`` is not read.
    The parameters' gradients are fp32 (fp64 for fp64 rows)."""
    if not runs_triton(d_y_TD, backend):
        return reference_bwd(
            d_y_TD, d_sum_TD, saved, weight_D, needs_weight=needs_weight, needs_bias=needs_bias, options=options
        )
    sum_TD, rstd_T = saved.sum_TD, saved.rstd_T
    T, D = sum_TD.shape
    # A power of two: it is compiled in, and lengths of batches vary.
    rows = triton.next_power_of_2(max(1, triton.cdiv(T, _programs(sum_TD))))
    blocks = triton.cdiv(T, rows)
    d_x_TD = sum_TD.new_empty((T, D))
    d_weight = rstd_T.new_empty((blocks, D)) if needs_weight else None
    d_bias = rstd_T.new_empty((blocks, D)) if needs_bias else None
    block, warps = _launch(D)
    if T > 0:
        _norm_bwd_kernel[(blocks,)](
            d_y_TD,
            d_sum_TD,
            sum_TD,
            weight_D,
            saved.mean_T,
            rstd_T,
            d_x_TD,
            d_weight,
            d_bias,
            d_y_TD.stride(0),
            0 if d_sum_TD is None else d_sum_TD.stride(0),
            sum_TD.stride(0),
            T,
            ROWS=rows,
            D=D,
            offset=options.offset,
            HAS_SUM_GRADIENT=d_sum_TD is not None,
            HAS_WEIGHT=weight_D is not None,
            NEEDS_WEIGHT=needs_weight,
            NEEDS_BIAS=needs_bias,
            SUBTRACT_MEAN=options.subtract_mean,
            ROUND_BEFORE_WEIGHT=options.round_before_weight,
            BLOCK_D=block,
            num_warps=warps,
        )
    return NormGradients(
        d_x_TD, None if d_weight is None else d_weight.sum(0), None if d_bias is None else d_bias.sum(0)
    )


def _launch(D: int) -> tuple[int, int]:
    """A row in one block, and its warps."""
    block = triton.next_power_of_2(D)
    return block, min(max(block // 512, 1), 16)


def _programs(tensor: Tensor) -> int:
    """How many programs share the rows of a backward; each keeps a sum of the parameters' gradients."""
    return 4 * torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 4


def reference_fwd(
    x_TD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, residual_TD: Tensor | None, *, options: NormOptions
) -> NormOutput:
    """:func:`norm_fwd` in plain torch."""
    dtype = statistics_dtype(x_TD.dtype)
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    s = sum_TD.to(dtype)
    mean_T = s.mean(-1) if options.subtract_mean else None
    if mean_T is not None:
        s = s - mean_T[:, None]
    rstd_T = torch.rsqrt(s.square().mean(-1) + options.eps)
    n = s * rstd_T[:, None]
    if options.round_before_weight:
        n = n.to(x_TD.dtype).to(dtype)
    if weight_D is not None:
        n = n * (options.offset + weight_D.to(dtype))
    if bias_D is not None:
        n = n + bias_D.to(dtype)
    return NormOutput(n.to(output_dtype(x_TD, weight_D, options)), sum_TD, mean_T, rstd_T)


def reference_bwd(
    d_y_TD: Tensor,
    d_sum_TD: Tensor | None,
    saved: NormOutput,
    weight_D: Tensor | None,
    *,
    needs_weight: bool,
    needs_bias: bool,
    options: NormOptions,
) -> NormGradients:
    """:func:`norm_bwd` in plain torch."""
    sum_TD, mean_T, rstd_T = saved.sum_TD, saved.mean_T, saved.rstd_T
    dtype = rstd_T.dtype
    d_y, s = d_y_TD.to(dtype), sum_TD.to(dtype)
    n = (s if mean_T is None else s - mean_T[:, None]) * rstd_T[:, None]
    rounded = n.to(sum_TD.dtype).to(dtype) if options.round_before_weight else n
    d_n = d_y if weight_D is None else d_y * (options.offset + weight_D.to(dtype))
    d_s = d_n - n * (d_n * n).mean(-1, keepdim=True)
    if options.subtract_mean:
        d_s = d_s - d_n.mean(-1, keepdim=True)
    d_s = d_s * rstd_T[:, None]
    if d_sum_TD is not None:
        d_s = d_s + d_sum_TD.to(dtype)
    return NormGradients(
        d_s.to(sum_TD.dtype),
        (d_y * rounded).sum(0) if needs_weight else None,
        d_y.sum(0) if needs_bias else None,
    )
