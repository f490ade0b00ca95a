# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""RMSNorm of rows with a gate, as after gated delta nets, Mamba2 and KDA.

Legend: T rows, D features, G groups of ``D / G`` features that are normalized apart.

``n = h / rms(h)``; the gate comes after the norm, ``h = x`` and ``y = n * weight * activation(gate)`` (Yang et al.
2024, arXiv:2412.06464), or before it, ``h = x * activation(gate)`` and ``y = n * weight`` (Dao and Gu 2024,
arXiv:2405.21060). Arithmetic is fp32 (fp64 for fp64 rows).
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
from .gated_activation import Activation, activate, activated_with_slope
from .norm import resources, sum_of_parts


@dataclass(frozen=True, kw_only=True)
class GatedNormOptions:
    """Options that define a gated RMSNorm, besides its weight."""

    eps: float
    """added to the mean square"""
    activation: Activation = "silu"
    """of the gate"""
    gates_first: bool = False
    """True if ``x`` is gated before it is normalized"""
    groups: int = 1
    round_before_weight: bool = False
    """True if ``n`` is rounded to the rows' dtype, and its product with the weight to the promoted one, which is that
    of ``y`` if ``gates_first``. Otherwise only the result is rounded, to the rows' dtype."""


class GatedNormOutput(NamedTuple):
    """Output of a gated norm, and the statistics that its gradient needs."""

    y: Tensor
    """``[..., D]``"""
    rstd_TG: Tensor


class GatedNormGradients(NamedTuple):
    """Gradients of the inputs."""

    d_x: Tensor
    """``[..., D]``"""
    d_gate: Tensor
    """``[..., D]``"""
    d_weight_D: Tensor | None
    """None if it was not requested"""


@triton.jit(**ANY_LENGTH)
def _gated_norm_fwd_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, rstd_ptr, stride_xt, stride_gt, T,
    D: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr, eps, KIND: tl.constexpr, GATES_FIRST: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr, ROUND_PRODUCT: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    dtype = rstd_ptr.dtype.element_ty
    eps = number(eps, dtype)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    within = tl.arange(0, BLOCK_D)[None, :]
    offs_d = group * SIZE + within
    mask = (row < T)[:, None] & (within < SIZE)
    x = tl.load(x_ptr + row[:, None] * stride_xt + offs_d, mask=mask, other=0.0).to(dtype)
    gate = tl.load(gate_ptr + row[:, None] * stride_gt + offs_d, mask=mask, other=0.0).to(dtype)
    factor, _ = activate(gate, KIND)
    if GATES_FIRST:
        x *= factor
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps)
    tl.store(rstd_ptr + row * G + group, rstd, mask=row < T)
    n = x * rstd[:, None]
    if ROUND_BEFORE_WEIGHT:
        n = n.to(x_ptr.dtype.element_ty).to(dtype)
    n *= tl.load(weight_ptr + offs_d, mask=within < SIZE, other=0.0).to(dtype)
    if ROUND_PRODUCT:
        n = n.to(x_ptr.dtype.element_ty).to(dtype)
    if not GATES_FIRST:
        n *= factor
    tl.store(y_ptr + row[:, None] * D + offs_d, n.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(**ANY_LENGTH)
def _gated_norm_bwd_kernel(
    d_y_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, d_x_ptr, d_gate_ptr, d_weight_ptr,
    stride_yt, stride_xt, stride_gt, T, D: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr, GATES_FIRST: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    dtype = rstd_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    within = tl.arange(0, BLOCK_D)[None, :]
    offs_d = group * SIZE + within
    mask_d = within < SIZE
    weight = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(dtype)
    d_weight = tl.zeros((ROWS, BLOCK_D), dtype)
    # STEPS is 0 where a loop may end at a run-time number.
    for step in tl.range(0, STEPS if STEPS > 0 else tl.cdiv(tl.cdiv(T, ROWS), tl.num_programs(0))):
        row = (program + step * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        mask = (row < T)[:, None] & mask_d
        d_y = tl.load(d_y_ptr + row[:, None] * stride_yt + offs_d, mask=mask, other=0.0).to(dtype)
        x = tl.load(x_ptr + row[:, None] * stride_xt + offs_d, mask=mask, other=0.0).to(dtype)
        gate = tl.load(gate_ptr + row[:, None] * stride_gt + offs_d, mask=mask, other=0.0).to(dtype)
        rstd = tl.load(rstd_ptr + row * G + group, mask=row < T, other=0.0)[:, None]
        factor, slope = activate(gate, KIND)
        n = x * rstd
        if GATES_FIRST:
            n *= factor
        d_n = d_y if GATES_FIRST else d_y * factor
        if NEEDS_WEIGHT:
            if ROUND_BEFORE_WEIGHT:
                d_weight += d_n * n.to(x_ptr.dtype.element_ty).to(dtype)
            else:
                d_weight += d_n * n
        d_n *= weight
        d_h = (d_n - n * (tl.sum(d_n * n, 1) / SIZE)[:, None]) * rstd
        if GATES_FIRST:
            d_gate = d_h * x * slope
            d_h *= factor
        else:
            d_gate = d_y * n * weight * slope
        tl.store(d_x_ptr + row[:, None] * D + offs_d, d_h.to(d_x_ptr.dtype.element_ty), mask=mask)
        tl.store(d_gate_ptr + row[:, None] * D + offs_d, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        column = tl.arange(0, BLOCK_D)
        tl.store(d_weight_ptr + program * D + group * SIZE + column, tl.sum(d_weight, 0), mask=column < SIZE)


def gated_norm_fwd(
    x: Tensor, gate: Tensor, weight_D: Tensor, *, options: GatedNormOptions, backend: Backend = "auto"
) -> GatedNormOutput:
    """Computes the gated norm of each row, and its statistics.

    Args:
        x: ``[..., D]``, floating; D > 0, a multiple of ``options.groups``.
        gate: ``[..., D]``, any floating dtype.
        weight_D: ``[D]``, any floating dtype.
    """
    if not runs_triton(x, backend):
        return gated_norm_fwd_reference(x, gate, weight_D, options=options)
    (x_TD, stride_x), (gate_TD, stride_gate) = rows_of(x), rows_of(gate)
    D, G = x.shape[-1], options.groups
    T = x.numel() // D
    y = x.new_empty(x.shape, dtype=output_dtype(x, weight_D, options))
    rstd_TG = x.new_empty((T, G), dtype=statistics_dtype(x.dtype))
    block = next_power_of_2(D // G)
    rows = max(2048 // block, 1)
    if T > 0:
        launch(
            _gated_norm_fwd_kernel,
            (cdiv(T, rows), G),
            x_TD,
            gate_TD,
            dense(weight_D),
            y,
            rstd_TG,
            stride_x,
            stride_gate,
            T,
            D,
            G,
            D // G,
            host_number(options.eps, rstd_TG.dtype),
            KIND=options.activation,
            GATES_FIRST=options.gates_first,
            ROUND_BEFORE_WEIGHT=options.round_before_weight,
            ROUND_PRODUCT=options.round_before_weight and torch.promote_types(x.dtype, weight_D.dtype) == x.dtype,
            ROWS=rows,
            BLOCK_D=block,
            num_warps=min(max(rows * block // 512, 4), 16),
        )
    return GatedNormOutput(y, rstd_TG)


def gated_norm_bwd(
    d_y: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd_TG: Tensor,
    weight_D: Tensor,
    *,
    needs_weight: bool,
    options: GatedNormOptions,
    backend: Backend = "auto",
) -> GatedNormGradients:
    """Computes the gradients for the gradient ``d_y`` of ``y``, both ``[..., D]``, in the dtypes of the inputs."""
    if not runs_triton(d_y, backend):
        return gated_norm_bwd_reference(d_y, x, gate, rstd_TG, weight_D, needs_weight=needs_weight, options=options)
    (d_y_TD, stride_y), (x_TD, stride_x), (gate_TD, stride_gate) = rows_of(d_y), rows_of(x), rows_of(gate)
    D, G = x.shape[-1], options.groups
    T = x.numel() // D
    block = next_power_of_2(D // G)
    # One program of 16 warps on each processor: smaller ones, and loads ahead in shared memory, were slower on an H100.
    rows = max(8192 // block, 1)
    most, _ = resources(x)
    programs = max(min(2 * most // G if G > 1 else most, cdiv(T, rows)), 1)
    d_x, d_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    d_weight = rstd_TG.new_empty((programs, D)) if needs_weight else None
    launch(
        _gated_norm_bwd_kernel,
        (programs, G),
        d_y_TD,
        x_TD,
        gate_TD,
        dense(weight_D),
        rstd_TG,
        d_x,
        d_gate,
        d_weight,
        stride_y,
        stride_x,
        stride_gate,
        T,
        D,
        G,
        D // G,
        KIND=options.activation,
        GATES_FIRST=options.gates_first,
        NEEDS_WEIGHT=needs_weight,
        ROUND_BEFORE_WEIGHT=options.round_before_weight,
        ROWS=rows,
        BLOCK_D=block,
        STEPS=0 if x.is_cuda else max(cdiv(cdiv(T, rows), programs), 1),
        num_warps=16,
    )
    return GatedNormGradients(d_x, d_gate, None if d_weight is None else sum_of_parts(d_weight, weight_D.dtype))


def output_dtype(x: Tensor, weight: Tensor, options: GatedNormOptions) -> torch.dtype:
    """Returns the dtype of ``y``."""
    if options.round_before_weight and options.gates_first:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


def gated_norm_fwd_reference(
    x: Tensor, gate: Tensor, weight_D: Tensor, *, options: GatedNormOptions
) -> GatedNormOutput:
    """Computes :func:`gated_norm_fwd` in plain torch."""
    dtype = statistics_dtype(x.dtype)
    factor, _ = activated_with_slope(gate.to(dtype), options.activation)
    h = x.to(dtype) * factor if options.gates_first else x.to(dtype)
    h = h.unflatten(-1, (options.groups, -1))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + options.eps)
    n = (h * rstd).flatten(-2)
    n = (n.to(x.dtype) * weight_D).to(dtype) if options.round_before_weight else n * weight_D.to(dtype)
    n = n if options.gates_first else n * factor
    return GatedNormOutput(n.to(output_dtype(x, weight_D, options)), rstd.reshape(-1, options.groups))


def gated_norm_bwd_reference(
    d_y: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd_TG: Tensor,
    weight_D: Tensor,
    *,
    needs_weight: bool,
    options: GatedNormOptions,
) -> GatedNormGradients:
    """Computes :func:`gated_norm_bwd` in plain torch."""
    dtype, D, G = rstd_TG.dtype, x.shape[-1], options.groups
    d_y, s, g = (tensor.to(dtype).reshape(-1, D) for tensor in (d_y, x, gate))
    weight = weight_D.to(dtype)
    factor, slope = activated_with_slope(g, options.activation)
    rstd = rstd_TG.repeat_interleave(D // G, 1)
    n = s * rstd * (factor if options.gates_first else 1.0)
    rounded = n.to(x.dtype).to(dtype) if options.round_before_weight else n
    d_n = d_y if options.gates_first else d_y * factor
    d_weight = (d_n * rounded).sum(0).to(weight_D.dtype) if needs_weight else None
    d_n = d_n * weight
    along = (d_n * n).unflatten(-1, (G, -1)).mean(-1).repeat_interleave(D // G, 1)
    d_h = (d_n - n * along) * rstd
    d_gate = (d_h * s if options.gates_first else d_y * n * weight) * slope
    d_x = d_h * factor if options.gates_first else d_h
    return GatedNormGradients(d_x.to(x.dtype).reshape(x.shape), d_gate.to(gate.dtype).reshape(gate.shape), d_weight)
