# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""RMSNorm and LayerNorm of rows.

Legend: T rows, D features.

``n = (x - mean(x)) * rstd`` (RMSNorm: no mean), ``y = n * (offset + weight) + bias``. RMSNorm: Zhang and Sennrich 2019,
arXiv:1910.07467; LayerNorm: Ba et al. 2016, arXiv:1607.06450. Arithmetic is fp32 (fp64 for fp64 rows); where a model
rounds in between, ``round_before_weight`` is True.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    ANY_LENGTH,
    Backend,
    cdiv,
    dense,
    host_number,
    launch,
    next_power_of_2,
    number,
    rows_of,
    runs_triton,
    statistics_dtype,
)
from .launches import NORM_BWD_SUM


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Options that define a norm, besides its parameters."""

    eps: float
    """added to the variance or mean square"""
    subtract_mean: bool = False
    """True for LayerNorm, False for RMSNorm"""
    offset: float = 0.0
    """added to the weight (1 in Gemma)"""
    round_before_weight: bool = False
    """Llama's convention: ``n`` is rounded to the rows' dtype and the product has the promoted one. Otherwise only the
    result is rounded, to the rows' dtype."""


class NormOutput(NamedTuple):
    """Output of a norm, and the statistics that its gradient needs."""

    y: Tensor
    """``[..., D]``"""
    mean_T: Tensor | None
    rstd_T: Tensor


class NormGradients(NamedTuple):
    """Gradients of a norm's inputs; None for parameters whose gradient was not requested."""

    d_x: Tensor
    """``[..., D]``"""
    d_weight_D: Tensor | None
    d_bias_D: Tensor | None


def output_dtype(x: Tensor, weight: Tensor | None, options: NormOptions) -> torch.dtype:
    """Returns the dtype of ``y``."""
    if options.round_before_weight and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


# D is a constexpr: a model has few, and the interpreter cannot loop up to a run-time number under numpy >= 2.4.


@triton.jit(**ANY_LENGTH)
def _norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xt, T,
    D: tl.constexpr, eps, offset, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ROUND_BEFORE_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    dtype = rstd_ptr.dtype.element_ty
    eps, offset = number(eps, dtype), number(offset, dtype)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < T)[:, None] & (offs_d < D)
    x = tl.load(x_ptr + row[:, None] * stride_xt + offs_d, mask=mask, other=0.0).to(dtype)
    if SUBTRACT_MEAN:
        mean = tl.sum(x, 1) / D
        tl.store(mean_ptr + row, mean, mask=row < T)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < T)
    n = x * rstd[:, None]
    if ROUND_BEFORE_WEIGHT:
        n = n.to(x_ptr.dtype.element_ty).to(dtype)
    if HAS_WEIGHT:
        n *= offset + tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(dtype)
    if HAS_BIAS:
        n += tl.load(bias_ptr + offs_d, mask=offs_d < D, other=0.0).to(dtype)
    tl.store(y_ptr + row[:, None] * D + offs_d, n.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(**ANY_LENGTH)
def _norm_bwd_kernel(
    d_y_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, d_x_ptr, d_weight_ptr, d_bias_ptr,
    stride_yt, stride_xt, T, D: tl.constexpr, offset,
    HAS_WEIGHT: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, NEEDS_BIAS: tl.constexpr, SUBTRACT_MEAN: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, LOADS_TWICE: tl.constexpr,
    STAGES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    dtype = rstd_ptr.dtype.element_ty
    offset = number(offset, dtype)
    program = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask_d = offs_d < D
    scale = tl.full((1, BLOCK_D), 1.0, dtype)
    if HAS_WEIGHT:
        scale = offset + tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(dtype)
    d_weight = tl.zeros((ROWS, BLOCK_D), dtype)
    d_bias = tl.zeros((ROWS, BLOCK_D), dtype)
    # STEPS is 0 where a loop may end at a run-time number.
    for step in tl.range(0, STEPS if STEPS > 0 else tl.cdiv(tl.cdiv(T, ROWS), tl.num_programs(0)), num_stages=STAGES):
        row = (program + step * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        mask = (row < T)[:, None] & mask_d
        d_y = tl.load(d_y_ptr + row[:, None] * stride_yt + offs_d, mask=mask, other=0.0).to(dtype)
        x = tl.load(x_ptr + row[:, None] * stride_xt + offs_d, mask=mask, other=0.0).to(dtype)
        rstd = tl.load(rstd_ptr + row, mask=row < T, other=0.0)[:, None]
        mean = tl.load(mean_ptr + row, mask=row < T, other=0.0)[:, None] if SUBTRACT_MEAN else 0.0
        if LOADS_TWICE:
            d_n = d_y * scale
            along_n, along_one = tl.sum(d_n * ((x - mean) * rstd), 1), tl.sum(d_n, 1)
            # From the cache. With another policy, because the compiler would otherwise keep the row in registers, which
            # are scarce.
            again: tl.constexpr = "evict_first"
            d_y = tl.load(d_y_ptr + row[:, None] * stride_yt + offs_d, mask=mask, other=0.0, eviction_policy=again)
            x = tl.load(x_ptr + row[:, None] * stride_xt + offs_d, mask=mask, other=0.0, eviction_policy=again)
            d_y, x = d_y.to(dtype), x.to(dtype)
            if HAS_WEIGHT:
                scale = offset + tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(dtype)
        # Beyond the row n is not 0, but d_y is.
        n = (x - mean) * rstd
        if NEEDS_WEIGHT:
            if ROUND_BEFORE_WEIGHT:
                d_weight += d_y * n.to(x_ptr.dtype.element_ty).to(dtype)
            else:
                d_weight += d_y * n
        if NEEDS_BIAS:
            d_bias += d_y
        d_n = d_y * scale
        if not LOADS_TWICE:
            along_n, along_one = tl.sum(d_n * n, 1), tl.sum(d_n, 1)
        d_x = d_n - n * (along_n / D)[:, None]
        if SUBTRACT_MEAN:
            d_x -= (along_one / D)[:, None]
        d_x *= rstd
        tl.store(d_x_ptr + row[:, None] * D + offs_d, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, BLOCK_D)
    if NEEDS_WEIGHT:
        tl.store(d_weight_ptr + program * D + column, tl.sum(d_weight, 0), mask=column < D)
    if NEEDS_BIAS:
        tl.store(d_bias_ptr + program * D + column, tl.sum(d_bias, 0), mask=column < D)


@triton.jit(**ANY_LENGTH)
def _norm_bwd_sum_kernel(parts_ptr, total_ptr, num_parts, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros((BLOCK_P, BLOCK_D), parts_ptr.dtype.element_ty)
    # 0, as a value on the device: Triton would unroll a loop that begins with a constant.
    start = tl.program_id(1)
    while start < num_parts:
        part = start + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(parts_ptr + part * D + offs_d, mask=(part < num_parts) & (offs_d < D), other=0.0)
        start += BLOCK_P
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    tl.store(total_ptr + column, tl.sum(total, 0).to(total_ptr.dtype.element_ty), mask=column < D)


def norm_fwd(
    x: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    *,
    options: NormOptions,
    backend: Backend = "auto",
) -> NormOutput:
    """Computes the norm of each row, and its statistics.

    Args:
        x: ``[..., D]``, floating; D > 0.
        weight_D, bias_D: ``[D]``, any floating dtype.
    """
    if not runs_triton(x, backend):
        return norm_fwd_reference(x, weight_D, bias_D, options=options)
    rows_TD, stride = rows_of(x)
    D = x.shape[-1]
    T = x.numel() // D
    weight_D, bias_D = dense(weight_D), dense(bias_D)
    statistics = statistics_dtype(x.dtype)
    y = x.new_empty(x.shape, dtype=output_dtype(x, weight_D, options))
    mean_T = x.new_empty(T, dtype=statistics) if options.subtract_mean else None
    rstd_T = x.new_empty(T, dtype=statistics)
    if T > 0:
        block = next_power_of_2(D)
        rows = max(2048 // block, 1)
        launch(
            _norm_fwd_kernel,
            (cdiv(T, rows),),
            rows_TD,
            weight_D,
            bias_D,
            y,
            mean_T,
            rstd_T,
            stride,
            T,
            D,
            host_number(options.eps, rstd_T.dtype),
            host_number(options.offset, rstd_T.dtype),
            HAS_WEIGHT=weight_D is not None,
            HAS_BIAS=bias_D is not None,
            SUBTRACT_MEAN=options.subtract_mean,
            ROUND_BEFORE_WEIGHT=options.round_before_weight,
            ROWS=rows,
            BLOCK_D=block,
            num_warps=_power_of_2_below(rows * D // (1024 if options.subtract_mean else 512), most=32),
        )
    return NormOutput(y, mean_T, rstd_T)


def norm_bwd(
    d_y: Tensor,
    x: Tensor,
    mean_T: Tensor | None,
    rstd_T: Tensor,
    weight_D: Tensor | None,
    *,
    needs_weight: bool,
    needs_bias: bool,
    options: NormOptions,
    backend: Backend = "auto",
) -> NormGradients:
    """Computes the gradients for the gradient ``d_y`` of ``y``, both ``[..., D]``. Those of the parameters have the
    weight's dtype (without a weight, that of the statistics)."""
    if not runs_triton(d_y, backend):
        return norm_bwd_reference(
            d_y, x, mean_T, rstd_T, weight_D, needs_weight=needs_weight, needs_bias=needs_bias, options=options
        )
    (d_y_TD, stride_y), (x_TD, stride_x) = rows_of(d_y), rows_of(x)
    D = x.shape[-1]
    T = x.numel() // D
    weight_D = dense(weight_D)
    block = next_power_of_2(D)
    # From 513 to 768 columns much of a block is empty: two smaller programs then hide each other's loads.
    is_wide, is_sparse = block >= 16384, 512 < D <= 768
    # By the block, not by D: a thread holds elements of the block.
    rows = max((4096 if is_sparse else 8192) // block, 1)
    bytes_of_step = rows * block * (d_y_TD.element_size() + x_TD.element_size())
    most, shared = resources(x)
    programs = max(min(most * (2 if is_sparse else 1), cdiv(T, rows)), 1)
    d_x = x.new_empty(x.shape)
    d_weight = rstd_T.new_empty((programs, D)) if needs_weight else None
    d_bias = rstd_T.new_empty((programs, D)) if needs_bias else None
    launch(
        _norm_bwd_kernel,
        (programs,),
        d_y_TD,
        x_TD,
        weight_D,
        mean_T,
        rstd_T,
        d_x,
        d_weight,
        d_bias,
        stride_y,
        stride_x,
        T,
        D,
        host_number(options.offset, rstd_T.dtype),
        HAS_WEIGHT=weight_D is not None,
        NEEDS_WEIGHT=needs_weight,
        NEEDS_BIAS=needs_bias,
        SUBTRACT_MEAN=options.subtract_mean,
        ROUND_BEFORE_WEIGHT=options.round_before_weight,
        ROWS=rows,
        BLOCK_D=block,
        LOADS_TWICE=is_wide and options.subtract_mean,
        # As many steps load at once as the shared memory holds.
        STAGES=1 if is_wide else min(max(shared // bytes_of_step, 1), 3),
        STEPS=0 if x.is_cuda else max(cdiv(cdiv(T, rows), programs), 1),
        # A row that is loaded twice: 8 warps took 8 % less time than 16 (16384 features, H200).
        num_warps=8 if is_wide and options.subtract_mean else min(max(rows * block // 1024, 4), 16),
    )
    parameter_dtype = rstd_T.dtype if weight_D is None else weight_D.dtype
    return NormGradients(
        d_x,
        None if d_weight is None else sum_of_parts(d_weight, parameter_dtype),
        None if d_bias is None else sum_of_parts(d_bias, parameter_dtype),
    )


def sum_of_parts(parts_PD: Tensor, dtype: torch.dtype) -> Tensor:
    P, D = parts_PD.shape
    total_D = parts_PD.new_empty(D, dtype=dtype)
    launch(_norm_bwd_sum_kernel, (cdiv(D, NORM_BWD_SUM["BLOCK_D"]),), parts_PD, total_D, P, D, **NORM_BWD_SUM)
    return total_D


def _power_of_2_below(number: int, *, most: int) -> int:
    return min(1 << (max(number, 1).bit_length() - 1), most)


def resources(tensor: Tensor) -> tuple[int, int]:
    """Returns the number of programs that share the rows of a backward, each of which keeps a sum of the parameters'
    gradients, and the bytes of shared memory of one, less 8 KiB for the reductions of a row."""
    if not tensor.is_cuda:
        return 4, 0
    properties = torch.cuda.get_device_properties(tensor.device)
    # AMD's GPUs have no larger limit to opt in to, nor a property for it.
    limit = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return properties.multi_processor_count, int(limit) - 8192


def norm_fwd_reference(
    x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, *, options: NormOptions
) -> NormOutput:
    """Computes :func:`norm_fwd` in plain torch."""
    dtype = statistics_dtype(x.dtype)
    s = x.to(dtype)
    mean = s.mean(-1, keepdim=True) if options.subtract_mean else None
    s = s if mean is None else s - mean
    rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + options.eps)
    n = s * rstd
    if options.round_before_weight:
        n = n.to(x.dtype).to(dtype)
    if weight_D is not None:
        n = n * (options.offset + weight_D.to(dtype))
    if bias_D is not None:
        n = n + bias_D.to(dtype)
    mean_T = None if mean is None else mean.flatten()
    return NormOutput(n.to(output_dtype(x, weight_D, options)), mean_T, rstd.flatten())


def norm_bwd_reference(
    d_y: Tensor,
    x: Tensor,
    mean_T: Tensor | None,
    rstd_T: Tensor,
    weight_D: Tensor | None,
    *,
    needs_weight: bool,
    needs_bias: bool,
    options: NormOptions,
) -> NormGradients:
    """Computes :func:`norm_bwd` in plain torch."""
    dtype = rstd_T.dtype
    parameter_dtype = dtype if weight_D is None else weight_D.dtype
    d_y, s = (tensor.to(dtype).reshape(-1, x.shape[-1]) for tensor in (d_y, x))
    n = (s if mean_T is None else s - mean_T[:, None]) * rstd_T[:, None]
    rounded = n.to(x.dtype).to(dtype) if options.round_before_weight else n
    d_n = d_y if weight_D is None else d_y * (options.offset + weight_D.to(dtype))
    d_s = d_n - n * (d_n * n).mean(-1, keepdim=True)
    if options.subtract_mean:
        d_s = d_s - d_n.mean(-1, keepdim=True)
    d_s = d_s * rstd_T[:, None]
    return NormGradients(
        d_s.to(x.dtype).reshape(x.shape),
        (d_y * rounded).sum(0).to(parameter_dtype) if needs_weight else None,
        d_y.sum(0).to(parameter_dtype) if needs_bias else None,
    )
