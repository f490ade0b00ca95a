# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What a mixture of experts computes beside its products: the order of tokens by expert, their rows in that order, the
gated activation times the weight of the router, and the sum over the experts of a token.

The weight of the router is applied before the down projection, which is linear: its outputs need not be kept for the
gradient of the router (Guo et al. 2025, SonicMoE, arXiv:2512.14080).

Legend: T tokens, K experts of a token, S = T * K rows sorted by expert, E experts, D hidden, F features of an expert.
Arithmetic is fp32 (fp64 for fp64 rows), rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    Backend,
    cdiv,
    host_number,
    launch,
    next_power_of_2,
    number,
    runs_triton,
    statistics_dtype,
)
from .gated_activation import Activation, activate, activated_with_slope

_MOST_COLUMNS = 2048
"""columns that a program reads at once"""
_MOST_FEATURES = 1024
"""features of an expert that a program of the gate reads at once"""


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Options that define the activation of an expert: ``activation(gate) * up``, or that of ``up`` alone."""

    activation: Activation
    is_gated: bool = True
    """False for ``activation(up)``"""
    is_interleaved: bool = False
    """True if gate and up alternate in the features of their projection; otherwise gate is the first half"""
    limit: float | None = None
    """the gate is at most this, and up between plus and minus this"""
    limits_activation: bool = False
    """True if the activation of the gate is limited, instead of the gate"""
    slope: float = 1.0
    """``activation(slope * gate) / slope``, as in gpt-oss"""
    offset: float = 0.0
    """added to up, after its limit"""

    def features(self, projected: int) -> int:
        """Returns F for a projection of so many features."""
        return projected // 2 if self.is_gated else projected


class Routing(NamedTuple):
    """Order of the pairs of token and expert by expert."""

    pair_S: Tensor
    """int32: pair of each row, ``token * K + k``"""
    row_TK: Tensor
    """int32: row of each pair; that of a pair without an expert is beyond the last end"""
    ends_E: Tensor
    """int32: number of rows of the experts up to each one"""
    expert_S: Tensor
    """int16 or int32: expert of each row; the number of experts or more for none"""


def expert_dtype(num_experts: int) -> torch.dtype:
    """Returns the dtype in which experts are sorted: the fewer bytes, the fewer passes."""
    return torch.int16 if num_experts < torch.iinfo(torch.int16).max else torch.int32


def route(index_TK: Tensor, num_experts: int) -> Routing:
    """Sorts the pairs of token and expert by expert, in the order of tokens for each, without synchronizing the host.

    Args:
        index_TK: integers; an index of ``num_experts`` or more names no expert, as of pairs whose expert is on another
            rank.
    """
    dtype = expert_dtype(num_experts)
    expert_S, pair_S = torch.sort(index_TK.reshape(-1).clamp(max=num_experts).to(dtype), stable=True)
    experts = torch.arange(num_experts, device=index_TK.device, dtype=dtype)
    ends_E = torch.searchsorted(expert_S, experts, right=True, out_int32=True)
    row_TK = torch.empty(index_TK.shape, dtype=torch.int32, device=index_TK.device)
    rows = torch.arange(pair_S.shape[0], device=index_TK.device, dtype=torch.int32)
    row_TK.view(-1)[pair_S] = rows
    return Routing(pair_S.int(), row_TK, ends_E, expert_S)


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


def gather_rows(x_TD: Tensor, routing: Routing, *, backend: Backend = "auto") -> Tensor:
    """Returns the rows of the tokens sorted by expert, ``[S, D]``; those without an expert are not initialised."""
    T, K = routing.row_TK.shape
    if not runs_triton(x_TD, backend):
        return x_TD[routing.pair_S.long() // K]
    D = x_TD.shape[1]
    y_SD = x_TD.new_empty(T * K, D)
    if y_SD.numel() > 0:
        block = min(next_power_of_2(D), _MOST_COLUMNS)
        launch(
            _gather_kernel,
            (T, cdiv(D, block)),
            x_TD,
            routing.row_TK,
            routing.ends_E,
            y_SD,
            x_TD.stride(0),
            D,
            E=routing.ends_E.shape[0],
            K=K,
            BLOCK_D=block,
            num_warps=4,
        )
    return y_SD


@triton.jit
def _gate(g, u, limit, slope, offset, KIND: tl.constexpr, LIMITS: tl.constexpr, IS_GATED: tl.constexpr):
    """Computes the activation, its derivative by the gate, and the factor up with its derivative."""
    within = g
    if LIMITS == "gate":
        within = tl.minimum(g, limit)
    activated, d_gate = activate(slope * within, KIND)
    activated = activated / slope
    if LIMITS == "gate":
        d_gate = tl.where(g <= limit, d_gate, 0.0)
    if LIMITS == "activation":
        d_gate = tl.where(activated <= limit, d_gate, 0.0)
        activated = tl.minimum(activated, limit)
    factor = u + offset
    d_up = tl.full(u.shape, 1.0, u.dtype)
    if IS_GATED and LIMITS != "none":
        factor = tl.minimum(tl.maximum(u, -limit), limit) + offset
        d_up = tl.where((u >= -limit) & (u <= limit), 1.0, 0.0).to(u.dtype)
    return activated, d_gate, factor, d_up


@triton.jit
def _add_to(h, h_ptr, low_ptr, bias_ptr, at, at_bias, mask, low_scale, HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Adds a low-rank product to a projection, in memory too, which the backward reads, and rounded there; and a bias
    to what is returned."""
    if HAS_LOW:
        h += low_scale * tl.load(low_ptr + at, mask=mask, other=0.0).to(h.dtype)
        rounded = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, rounded, mask=mask)
        h = rounded.to(h.dtype)
    if HAS_BIAS:
        h += tl.load(bias_ptr + at_bias, mask=mask, other=0.0).to(h.dtype)
    return h


@triton.jit
def _gate_and_up(
    h_ptr, low_ptr, bias_ptr, row, expert, low_scale, start, dtype: tl.constexpr,
    F: tl.constexpr, LAYOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Loads gate and up; without a gate, the one projection as both."""
    if LAYOUT == "interleaved":
        # Loaded as it lies in memory: single elements would take an instruction each.
        offs = 2 * start + tl.arange(0, 2 * BLOCK_F)
        mask = offs < 2 * F
        at, at_bias = row * (2 * F) + offs, expert * (2 * F) + offs
        h = tl.load(h_ptr + at, mask=mask, other=0.0).to(dtype)
        h = _add_to(h, h_ptr, low_ptr, bias_ptr, at, at_bias, mask, low_scale, HAS_LOW, HAS_BIAS)
        g, u = tl.split(tl.reshape(h, (BLOCK_F, 2)))
    else:
        WIDTH: tl.constexpr = 2 * F if LAYOUT == "halves" else F
        offs = start + tl.arange(0, BLOCK_F)
        mask = offs < F
        at, at_bias = row * WIDTH + offs, expert * WIDTH + offs
        g = tl.load(h_ptr + at, mask=mask, other=0.0).to(dtype)
        g = _add_to(g, h_ptr, low_ptr, bias_ptr, at, at_bias, mask, low_scale, HAS_LOW, HAS_BIAS)
        u = g
        if LAYOUT == "halves":
            u = tl.load(h_ptr + at + F, mask=mask, other=0.0).to(dtype)
            u = _add_to(u, h_ptr, low_ptr, bias_ptr, at + F, at_bias + F, mask, low_scale, HAS_LOW, HAS_BIAS)
    return g, u


@triton.jit
def _store_gate_and_up(d_h_ptr, d_gate, d_up, row, start, F: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_F: tl.constexpr):
    dtype = d_h_ptr.dtype.element_ty
    if LAYOUT == "interleaved":
        offs = 2 * start + tl.arange(0, 2 * BLOCK_F)
        both = tl.reshape(tl.join(d_gate, d_up), (2 * BLOCK_F,))
        tl.store(d_h_ptr + row * (2 * F) + offs, both.to(dtype), mask=offs < 2 * F)
    else:
        WIDTH: tl.constexpr = 2 * F if LAYOUT == "halves" else F
        offs = start + tl.arange(0, BLOCK_F)
        tl.store(d_h_ptr + row * WIDTH + offs, d_gate.to(dtype), mask=offs < F)
        if LAYOUT == "halves":
            tl.store(d_h_ptr + row * WIDTH + F + offs, d_up.to(dtype), mask=offs < F)


@triton.jit
def _gate_fwd_kernel(
    h_ptr, low_ptr, bias_ptr, expert_ptr, weight_ptr, pair_ptr, ends_ptr, y_ptr,
    low_scale, limit, slope, offset,
    E: tl.constexpr, F: tl.constexpr, LAYOUT: tl.constexpr, FP64: tl.constexpr,
    KIND: tl.constexpr, LIMITS: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if FP64 else tl.float32
    limit, slope, offset = number(limit, dtype), number(slope, dtype), number(offset, dtype)
    low_scale = number(low_scale, dtype)
    if row < tl.load(ends_ptr + E - 1):
        weight = tl.load(weight_ptr + tl.load(pair_ptr + row)).to(dtype)
        expert = tl.load(expert_ptr + row).to(tl.int64)
        start = tl.program_id(1) * BLOCK_F
        g, u = _gate_and_up(
            h_ptr, low_ptr, bias_ptr, row, expert, low_scale, start, dtype, F, LAYOUT, HAS_LOW, HAS_BIAS, BLOCK_F
        )
        activated, _, factor, _ = _gate(g, u, limit, slope, offset, KIND, LIMITS, LAYOUT != "one")
        if LAYOUT != "one":
            activated = activated * factor
        offs_f = start + tl.arange(0, BLOCK_F)
        tl.store(y_ptr + row * F + offs_f, (activated * weight).to(y_ptr.dtype.element_ty), mask=offs_f < F)


@triton.jit
def _gate_bwd_kernel(
    h_ptr, d_y_ptr, low_ptr, bias_ptr, expert_ptr, weight_ptr, pair_ptr, ends_ptr, d_h_ptr, y_ptr, d_weight_ptr,
    low_scale, limit, slope, offset,
    E: tl.constexpr, F: tl.constexpr, LAYOUT: tl.constexpr, FP64: tl.constexpr,
    KIND: tl.constexpr, LIMITS: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr, NEEDS_Y: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = tl.float64 if FP64 else tl.float32
    limit, slope, offset = number(limit, dtype), number(slope, dtype), number(offset, dtype)
    low_scale = number(low_scale, dtype)
    if row < tl.load(ends_ptr + E - 1):
        pair = tl.load(pair_ptr + row)
        weight = tl.load(weight_ptr + pair).to(dtype)
        expert = tl.load(expert_ptr + row).to(tl.int64)
        total = tl.zeros((BLOCK_F,), dtype)
        for start in tl.range(0, F, BLOCK_F):
            offs_f = start + tl.arange(0, BLOCK_F)
            mask_f = offs_f < F
            g, u = _gate_and_up(
                h_ptr, h_ptr, bias_ptr, row, expert, low_scale, start, dtype, F, LAYOUT, False, HAS_BIAS, BLOCK_F
            )
            d_y = tl.load(d_y_ptr + row * F + offs_f, mask=mask_f, other=0.0).to(dtype)
            if HAS_LOW:
                d_y += low_scale * tl.load(low_ptr + row * F + offs_f, mask=mask_f, other=0.0).to(dtype)
            activated, d_gate, factor, d_up = _gate(g, u, limit, slope, offset, KIND, LIMITS, LAYOUT != "one")
            y = activated
            if LAYOUT != "one":
                y = activated * factor
            total += tl.where(mask_f, d_y * y, 0.0)
            d_y *= weight
            d_up *= d_y * activated
            if LAYOUT != "one":
                d_y *= factor
            _store_gate_and_up(d_h_ptr, d_y * d_gate, d_up, row, start, F, LAYOUT, BLOCK_F)
            if NEEDS_Y:
                tl.store(y_ptr + row * F + offs_f, (y * weight).to(y_ptr.dtype.element_ty), mask=mask_f)
        tl.store(d_weight_ptr + pair, tl.sum(total, 0).to(d_weight_ptr.dtype.element_ty))


def _gate_arguments(h_SH: Tensor, options: GateOptions, low_scale: float) -> tuple[list[Any], dict[str, Any]]:
    """Returns what both kernels of the gate get after their tensors, by position and by name."""
    dtype, F = h_SH.dtype, options.features(h_SH.shape[1])
    values = (low_scale, options.limit or 0.0, options.slope, options.offset)
    limits = "none" if options.limit is None else "activation" if options.limits_activation else "gate"
    constants: dict[str, Any] = {
        "F": F,
        "LAYOUT": "one" if not options.is_gated else "interleaved" if options.is_interleaved else "halves",
        "FP64": dtype == torch.float64,
        "KIND": options.activation,
        "LIMITS": limits,
        "BLOCK_F": min(next_power_of_2(F), _MOST_FEATURES),
        "num_warps": 4,
    }
    return [host_number(value, dtype) for value in values], constants


@dataclass(frozen=True)
class LowRank:
    """A low-rank product that is added to the one of the weights, ``product + scale * product_low``."""

    product: Tensor
    scale: float


def gate_fwd(
    h_SH: Tensor,
    weight_TK: Tensor,
    routing: Routing,
    *,
    options: GateOptions,
    bias_EH: Tensor | None = None,
    low: LowRank | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Computes ``activation(gate) * up`` times the weight of the router, ``[S, F]``.

    Args:
        h_SH: gate and up, in the layout of ``options``; a product ``low`` is added to it in place.
        weight_TK: weights of the router.
    """
    F = options.features(h_SH.shape[1])
    y_SF = h_SH.new_empty(h_SH.shape[0], F)
    if not runs_triton(h_SH, backend):
        end = int(routing.ends_E[-1])
        if low is not None:
            h_SH += low.product * low.scale
        g, u = _gate_and_up_in_torch(h_SH, routing, bias_EH, options)
        activated, _, factor, _ = gate_in_torch(g, u, options)
        y_SF[:end] = (activated * factor * _weights_of_rows(weight_TK, routing, g.dtype)[:, None]).to(y_SF.dtype)
        return y_SF
    if y_SF.numel() > 0:
        values, constants = _gate_arguments(h_SH, options, 0.0 if low is None else low.scale)
        launch(
            _gate_fwd_kernel,
            (h_SH.shape[0], cdiv(F, constants["BLOCK_F"])),
            h_SH,
            h_SH if low is None else low.product,
            h_SH if bias_EH is None else bias_EH,
            routing.expert_S,
            weight_TK,
            routing.pair_S,
            routing.ends_E,
            y_SF,
            *values,
            E=routing.ends_E.shape[0],
            HAS_LOW=low is not None,
            HAS_BIAS=bias_EH is not None,
            **constants,
        )
    return y_SF


class GateGradients(NamedTuple):
    """Gradients of the gate's inputs."""

    d_h_SH: Tensor
    d_weight_TK: Tensor
    """of the weights of the router, fp32 (fp64 for fp64 rows); zeros for pairs without an expert"""
    y_SF: Tensor | None
    """result of the forward, where it was requested"""


def gate_bwd(
    d_y_SF: Tensor,
    h_SH: Tensor,
    weight_TK: Tensor,
    routing: Routing,
    *,
    options: GateOptions,
    needs_y: bool,
    bias_EH: Tensor | None = None,
    low: LowRank | None = None,
    backend: Backend = "auto",
) -> GateGradients:
    """Computes the gradients of :func:`gate_fwd`.

    Args:
        low: is added to ``d_y_SF``.
        needs_y: True to compute the result of the forward again.
    """
    d_h_SH = torch.empty_like(h_SH)
    d_weight_TK = weight_TK.new_zeros(weight_TK.shape, dtype=statistics_dtype(h_SH.dtype))
    y_SF = torch.empty_like(d_y_SF) if needs_y else None
    if not runs_triton(h_SH, backend):
        end = int(routing.ends_E[-1])
        g, u = _gate_and_up_in_torch(h_SH, routing, bias_EH, options)
        activated, d_gate, factor, d_up = gate_in_torch(g, u, options)
        weight = _weights_of_rows(weight_TK, routing, g.dtype)[:, None]
        d_y = d_y_SF[:end].to(g.dtype)
        if low is not None:
            d_y = d_y + low.scale * low.product[:end].to(g.dtype)
        d_weight_TK.view(-1)[routing.pair_S[:end].long()] = (d_y * activated * factor).sum(1)
        of_gate, of_up = d_y * weight * factor * d_gate, d_y * weight * activated * d_up
        d_h_SH[:end] = _joined(of_gate, of_up, options).to(h_SH.dtype)
        if y_SF is not None:
            y_SF[:end] = (activated * factor * weight).to(y_SF.dtype)
        return GateGradients(d_h_SH, d_weight_TK, y_SF)
    if d_y_SF.numel() > 0:
        values, constants = _gate_arguments(h_SH, options, 0.0 if low is None else low.scale)
        launch(
            _gate_bwd_kernel,
            (h_SH.shape[0],),
            h_SH,
            d_y_SF,
            d_y_SF if low is None else low.product,
            h_SH if bias_EH is None else bias_EH,
            routing.expert_S,
            weight_TK,
            routing.pair_S,
            routing.ends_E,
            d_h_SH,
            d_h_SH if y_SF is None else y_SF,
            d_weight_TK,
            *values,
            E=routing.ends_E.shape[0],
            HAS_LOW=low is not None,
            HAS_BIAS=bias_EH is not None,
            NEEDS_Y=needs_y,
            **constants,
        )
    return GateGradients(d_h_SH, d_weight_TK, y_SF)


def _gate_and_up_in_torch(
    h_SH: Tensor, routing: Routing, bias_EH: Tensor | None, options: GateOptions
) -> tuple[Tensor, Tensor]:
    """Returns gate and up of the rows of experts in the dtype of arithmetic."""
    end = int(routing.ends_E[-1])
    h = h_SH[:end].to(statistics_dtype(h_SH.dtype))
    if bias_EH is not None:
        h = h + bias_EH.to(h.dtype)[routing.expert_S[:end].long()]
    if not options.is_gated:
        return h, h
    return (h[:, ::2], h[:, 1::2]) if options.is_interleaved else tuple(h.chunk(2, 1))  # type: ignore[return-value]


def _joined(gate: Tensor, up: Tensor, options: GateOptions) -> Tensor:
    if not options.is_gated:
        return gate
    return torch.stack([gate, up], 2).flatten(1) if options.is_interleaved else torch.cat([gate, up], 1)


def _weights_of_rows(weight_TK: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    return weight_TK.reshape(-1)[routing.pair_S[: int(routing.ends_E[-1])].long()].to(dtype)


def gate_in_torch(g: Tensor, u: Tensor, options: GateOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the activation, its derivative by the gate, and the factor up with its derivative."""
    limit, is_before = options.limit, options.limit is not None and not options.limits_activation
    activated, d_gate = activated_with_slope(
        options.slope * (g.clamp(max=limit) if is_before else g), options.activation
    )
    activated = activated / options.slope
    if limit is not None:
        d_gate = d_gate * ((g if is_before else activated) <= limit)
        activated = activated if is_before else activated.clamp(max=limit)
    ones = torch.ones_like(u)
    if not options.is_gated:
        return activated, d_gate, ones, ones
    if limit is None:
        return activated, d_gate, u + options.offset, ones
    return activated, d_gate, u.clamp(-limit, limit) + options.offset, (u.abs() <= limit).to(u.dtype)


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
        has_expert_TK1 = (routing.row_TK < routing.ends_E[-1])[..., None]
        y = y_SD.to(dtype) if low is None else y_SD.to(dtype) + low.scale * low.product.to(dtype)
        rows_TKD = y[routing.row_TK.long()]
        if bias is not None:
            expert_TK = bias.expert_TK.clamp(max=len(bias.bias_ED) - 1)
            rows_TKD = rows_TKD + bias.weight_TK.to(dtype)[..., None] * bias.bias_ED.to(dtype)[expert_TK]
        return rows_TKD.where(has_expert_TK1, 0.0).sum(1).to(y_SD.dtype)
    sum_TD = y_SD.new_empty(T, D)
    if sum_TD.numel() > 0:
        block = min(next_power_of_2(D), _MOST_COLUMNS)
        launch(
            _combine_kernel,
            (T, cdiv(D, block)),
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
            BLOCK_D=block,
            num_warps=4,
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
            y = y * _weights_of_rows(weight_TK, routing, dtype)[:, None]
        sums = y.new_zeros(E, D).index_add_(0, routing.expert_S[:end].long(), y)
        return sums.to(y_SD.dtype)
    sum_ED = y_SD.new_empty(E, D)
    block = min(next_power_of_2(D), 128)
    launch(
        _sum_of_expert_kernel,
        (E, cdiv(D, block)),
        y_SD,
        y_SD if weight_TK is None else weight_TK,
        routing.pair_S,
        routing.ends_E,
        sum_ED,
        D,
        FP64=y_SD.dtype == torch.float64,
        HAS_WEIGHT=weight_TK is not None,
        BLOCK_S=16,
        BLOCK_D=block,
        num_warps=4,
    )
    return sum_ED


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
            BLOCK_D=min(next_power_of_2(d_y_TD.shape[1]), _MOST_COLUMNS),
            num_warps=4,
        )
    return product_TK
