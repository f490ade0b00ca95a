# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The gated activation of experts times the weight of the router, with biases and LoRA's low-rank products.

The weight of the router is applied before the down projection, which is linear: its outputs need not be kept for the
gradient of the router (Guo et al. 2025, SonicMoE, arXiv:2512.14080).

A low-rank product is computed in the kernel, for a tile of rows and the few experts that they belong to: written and
read again, it would take as long as the gate itself.

Legend: T tokens, K experts of a token, S = T * K rows sorted by expert, E experts, F features of an expert, H features
of its first projection (2 * F with a gate), r rank. Arithmetic is fp32 (fp64 for fp64 rows), rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from .expert_activation import GateOptions, gate_in_torch, join_projection, split_projection
from .experts import Routing, weights_of_rows
from .gated_activation import activate
from .grouped_products import grouped_product
from .launches import EXPERT_GATE, expert_gate_blocks


class LowRankFactors(NamedTuple):
    """Factors of a low-rank product of the rows of each expert, ``scale * low @ matrix[expert]``."""

    low_Sr: Tensor
    matrix_ErO: Tensor
    """contiguous"""
    scale: float


class _Flags(NamedTuple):
    """Constants of a launch."""

    FP64: tl.constexpr
    E: tl.constexpr
    F: tl.constexpr
    WIDTH: tl.constexpr
    """H"""
    LAYOUT: tl.constexpr
    KIND: tl.constexpr
    LIMITS: tl.constexpr
    RANK: tl.constexpr
    """0 without a low-rank product"""
    HAS_BIAS: tl.constexpr
    BLOCK_S: tl.constexpr
    BLOCK_F: tl.constexpr
    BLOCK_R: tl.constexpr


class _Projection(NamedTuple):
    """Pointers to the first projection and to what is added to it."""

    h_ptr: Any
    low_ptr: Any
    matrix_ptr: Any
    bias_ptr: Any
    low_scale: Any


class _Numbers(NamedTuple):
    """Numbers of the activation."""

    limit: Any
    slope: Any
    offset: Any


class _Tile(NamedTuple):
    """Rows of a program."""

    rows: Any
    is_row: Any
    expert: Any
    first: Any
    """first of the experts that the rows belong to"""
    last: Any


@triton.jit
def _load_tile(expert_ptr, start, end, FLAGS: tl.constexpr):
    rows = (start + tl.arange(0, FLAGS.BLOCK_S)).to(tl.int64)
    is_row = rows < end
    expert = tl.load(expert_ptr + rows, mask=is_row, other=0).to(tl.int64)
    first = tl.load(expert_ptr + start).to(tl.int64)
    last = tl.load(expert_ptr + tl.minimum(start + FLAGS.BLOCK_S, end) - 1).to(tl.int64)
    return _Tile(rows, is_row, expert, first, last)


@triton.jit
def _add_low_rank(
    h, low_ptr, matrix_ptr, scale, tile, offs, WIDTH: tl.constexpr, RANK: tl.constexpr, FLAGS: tl.constexpr
):
    """Adds the columns ``offs`` of a low-rank product."""
    total = tl.zeros(h.shape, h.dtype)
    expert = tile.first
    while expert <= tile.last:
        is_of_expert = tile.is_row & (tile.expert == expert)
        for start in tl.range(0, RANK, FLAGS.BLOCK_R):
            offs_r = start + tl.arange(0, FLAGS.BLOCK_R)
            is_rank = offs_r < RANK
            at = tile.rows[:, None] * RANK + offs_r[None, :]
            low = tl.load(low_ptr + at, mask=is_of_expert[:, None] & is_rank[None, :], other=0.0)
            at = (expert * RANK + offs_r)[:, None] * WIDTH + offs[None, :]
            matrix = tl.load(matrix_ptr + at, mask=is_rank[:, None] & (offs < WIDTH)[None, :], other=0.0)
            total = add_product(total, low, matrix)
        expert += 1
    return h + scale * total


@triton.jit
def _load_projection(projection, tile, offs, mask, FLAGS: tl.constexpr):
    """Loads columns of the first projection, and adds LoRA and bias."""
    dtype: tl.constexpr = tl.float64 if FLAGS.FP64 else tl.float32
    at = tile.rows[:, None] * FLAGS.WIDTH + offs[None, :]
    h = tl.load(projection.h_ptr + at, mask=mask, other=0.0).to(dtype)
    WIDTH: tl.constexpr = FLAGS.WIDTH
    RANK: tl.constexpr = FLAGS.RANK
    if RANK > 0:
        low_ptr, matrix_ptr, scale = projection.low_ptr, projection.matrix_ptr, number(projection.low_scale, dtype)
        h = _add_low_rank(h, low_ptr, matrix_ptr, scale, tile, offs, WIDTH, RANK, FLAGS)
    if FLAGS.HAS_BIAS:
        at = tile.expert[:, None] * FLAGS.WIDTH + offs[None, :]
        h += tl.load(projection.bias_ptr + at, mask=mask, other=0.0).to(dtype)
    return h


@triton.jit
def _load_gate_and_up(projection, tile, start, FLAGS: tl.constexpr):
    """Loads gate and up; without a gate, the one projection as both."""
    if FLAGS.LAYOUT == "interleaved":
        # Loaded as it lies in memory: single elements would take an instruction each.
        offs = 2 * start + tl.arange(0, 2 * FLAGS.BLOCK_F)
        mask = tile.is_row[:, None] & (offs < FLAGS.WIDTH)[None, :]
        h = _load_projection(projection, tile, offs, mask, FLAGS)
        g, u = tl.split(tl.reshape(h, (FLAGS.BLOCK_S, FLAGS.BLOCK_F, 2)))
    else:
        offs = start + tl.arange(0, FLAGS.BLOCK_F)
        mask = tile.is_row[:, None] & (offs < FLAGS.F)[None, :]
        g = _load_projection(projection, tile, offs, mask, FLAGS)
        u = g
        if FLAGS.LAYOUT == "halves":
            u = _load_projection(projection, tile, offs + FLAGS.F, mask, FLAGS)
    return g, u


@triton.jit
def _gate(g, u, numbers, FLAGS: tl.constexpr):
    """Computes the activation, its derivative by the gate, and the factor up with its derivative."""
    limit, slope = number(numbers.limit, g.dtype), number(numbers.slope, g.dtype)
    offset = number(numbers.offset, g.dtype)
    within = g
    if FLAGS.LIMITS == "gate":
        within = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
    KIND: tl.constexpr = FLAGS.KIND
    activated, d_gate = activate(slope * within, KIND)
    activated = activated / slope
    if FLAGS.LIMITS == "gate":
        d_gate = tl.where(g <= limit, d_gate, 0.0)
    if FLAGS.LIMITS == "activation":
        d_gate = tl.where(activated <= limit, d_gate, 0.0)
        activated = tl.minimum(activated, limit, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.full(u.shape, 1.0, u.dtype)
    d_up = factor
    if FLAGS.LAYOUT != "one":
        factor = u + offset
        if FLAGS.LIMITS != "none":
            factor = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
            factor = tl.minimum(factor, limit, propagate_nan=tl.PropagateNan.ALL) + offset
            d_up = tl.where((u >= -limit) & (u <= limit), 1.0, 0.0).to(u.dtype)
    return activated, d_gate, factor, d_up


@triton.jit
def _store_gate_and_up(d_h_ptr, d_gate, d_up, tile, start, FLAGS: tl.constexpr):
    dtype = d_h_ptr.dtype.element_ty
    if FLAGS.LAYOUT == "interleaved":
        offs = 2 * start + tl.arange(0, 2 * FLAGS.BLOCK_F)
        both = tl.reshape(tl.join(d_gate, d_up), (FLAGS.BLOCK_S, 2 * FLAGS.BLOCK_F))
        mask = tile.is_row[:, None] & (offs < FLAGS.WIDTH)[None, :]
        tl.store(d_h_ptr + tile.rows[:, None] * FLAGS.WIDTH + offs[None, :], both.to(dtype), mask=mask)
    else:
        offs = start + tl.arange(0, FLAGS.BLOCK_F)
        mask = tile.is_row[:, None] & (offs < FLAGS.F)[None, :]
        at = tile.rows[:, None] * FLAGS.WIDTH + offs[None, :]
        tl.store(d_h_ptr + at, d_gate.to(dtype), mask=mask)
        if FLAGS.LAYOUT == "halves":
            tl.store(d_h_ptr + at + FLAGS.F, d_up.to(dtype), mask=mask)


@triton.jit
def _gate_fwd_kernel(
    h_ptr, low_ptr, matrix_ptr, bias_ptr, expert_ptr, weight_ptr, pair_ptr, ends_ptr,
    low_scale, limit, slope, offset, y_ptr, FLAGS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * FLAGS.BLOCK_S
    end = tl.load(ends_ptr + FLAGS.E - 1)
    if first_row < end:
        projection = _Projection(h_ptr, low_ptr, matrix_ptr, bias_ptr, low_scale)
        tile = _load_tile(expert_ptr, first_row, end, FLAGS)
        start = tl.program_id(1) * FLAGS.BLOCK_F
        g, u = _load_gate_and_up(projection, tile, start, FLAGS)
        activated, _, factor, _ = _gate(g, u, _Numbers(limit, slope, offset), FLAGS)
        pair = tl.load(pair_ptr + tile.rows, mask=tile.is_row, other=0)
        weight = tl.load(weight_ptr + pair).to(g.dtype)[:, None]
        offs_f = start + tl.arange(0, FLAGS.BLOCK_F)
        mask = tile.is_row[:, None] & (offs_f < FLAGS.F)[None, :]
        y = (activated * factor * weight).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + tile.rows[:, None] * FLAGS.F + offs_f[None, :], y, mask=mask)


@triton.jit
def _gate_bwd_kernel(
    h_ptr, low_ptr, matrix_ptr, bias_ptr, expert_ptr, weight_ptr, pair_ptr, ends_ptr,
    low_scale, limit, slope, offset,
    d_y_ptr, d_low_ptr, d_matrix_ptr, d_low_scale, d_h_ptr, y_ptr, d_weight_ptr,
    FLAGS: tl.constexpr, D_RANK: tl.constexpr, NEEDS_Y: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * FLAGS.BLOCK_S
    dtype: tl.constexpr = tl.float64 if FLAGS.FP64 else tl.float32
    end = tl.load(ends_ptr + FLAGS.E - 1)
    if first_row < end:
        projection = _Projection(h_ptr, low_ptr, matrix_ptr, bias_ptr, low_scale)
        tile = _load_tile(expert_ptr, first_row, end, FLAGS)
        pair = tl.load(pair_ptr + tile.rows, mask=tile.is_row, other=0)
        weight = tl.load(weight_ptr + pair).to(dtype)[:, None]
        total = tl.full((FLAGS.BLOCK_S, FLAGS.BLOCK_F), 0.0, dtype)
        for start in tl.range(0, FLAGS.F, FLAGS.BLOCK_F):
            g, u = _load_gate_and_up(projection, tile, start, FLAGS)
            offs_f = start + tl.arange(0, FLAGS.BLOCK_F)
            mask = tile.is_row[:, None] & (offs_f < FLAGS.F)[None, :]
            at = tile.rows[:, None] * FLAGS.F + offs_f[None, :]
            d_y = tl.load(d_y_ptr + at, mask=mask, other=0.0).to(dtype)
            if D_RANK > 0:
                scale = number(d_low_scale, dtype)
                F: tl.constexpr = FLAGS.F
                d_y = _add_low_rank(d_y, d_low_ptr, d_matrix_ptr, scale, tile, offs_f, F, D_RANK, FLAGS)
            activated, d_gate, factor, d_up = _gate(g, u, _Numbers(limit, slope, offset), FLAGS)
            y = activated * factor
            total += tl.where(mask, d_y * y, 0.0)
            d_y *= weight
            _store_gate_and_up(d_h_ptr, d_y * factor * d_gate, d_y * activated * d_up, tile, start, FLAGS)
            if NEEDS_Y:
                tl.store(y_ptr + at, (y * weight).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(d_weight_ptr + pair, tl.sum(total, 1).to(d_weight_ptr.dtype.element_ty), mask=tile.is_row)


def _launch(
    kernel: Any,
    h_SH: Tensor,
    weight_TK: Tensor,
    routing: Routing,
    options: GateOptions,
    bias_EH: Tensor | None,
    low: LowRankFactors | None,
    *arguments: Any,
    all_features: bool,
    other_rank: int = 0,
    **constants: Any,
) -> None:
    """Launches a kernel of the gate.

    Args:
        arguments: further ones of the kernel, after those of the forward.
        all_features: True if a program computes all features of its rows.
        other_rank: rank of another low-rank product that it computes.
    """
    dtype, F, is_fp64 = h_SH.dtype, options.features(h_SH.shape[1]), h_SH.dtype == torch.float64
    rank = 0 if low is None else low.low_Sr.shape[1]
    flags = _Flags(
        FP64=is_fp64,
        E=routing.ends_E.shape[0],
        F=F,
        WIDTH=h_SH.shape[1],
        LAYOUT="one" if not options.is_gated else "interleaved" if options.is_interleaved else "halves",
        KIND=options.activation,
        LIMITS="none" if options.limit is None else "activation" if options.limits_activation else "gate",
        RANK=rank,
        HAS_BIAS=bias_EH is not None,
        **expert_gate_blocks(F, max(rank, other_rank), is_fp64=is_fp64, is_interleaved=options.is_interleaved),
    )
    numbers = (0.0 if low is None else low.scale, options.limit or 0.0, options.slope, options.offset)
    launch(
        kernel,
        (cdiv(h_SH.shape[0], flags.BLOCK_S), 1 if all_features else cdiv(F, flags.BLOCK_F)),
        h_SH,
        h_SH if low is None else low.low_Sr,
        h_SH if low is None else low.matrix_ErO,
        h_SH if bias_EH is None else bias_EH,
        routing.expert_S,
        weight_TK,
        routing.pair_S,
        routing.ends_E,
        *(host_number(value, dtype) for value in numbers),
        *arguments,
        FLAGS=flags,
        **EXPERT_GATE,
        **constants,
    )


def gate_fwd(
    h_SH: Tensor,
    weight_TK: Tensor,
    routing: Routing,
    *,
    options: GateOptions,
    bias_EH: Tensor | None = None,
    low: LowRankFactors | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Computes ``activation(gate) * up`` times the weight of the router, ``[S, F]``.

    Args:
        h_SH: gate and up, in the layout of ``options``, without bias.
        weight_TK: weights of the router.
        low: is added to ``h_SH``.
    """
    F = options.features(h_SH.shape[1])
    y_SF = h_SH.new_empty(h_SH.shape[0], F)
    if not runs_triton(h_SH, backend):
        end = int(routing.ends_E[-1])
        g, u = _gate_and_up_in_torch(h_SH, routing, bias_EH, low, options)
        activated, _, factor, _ = gate_in_torch(g, u, options)
        y_SF[:end] = (activated * factor * weights_of_rows(weight_TK, routing, g.dtype)[:, None]).to(y_SF.dtype)
        return y_SF
    if y_SF.numel() > 0:
        _launch(_gate_fwd_kernel, h_SH, weight_TK, routing, options, bias_EH, low, y_SF, all_features=False)
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
    low: LowRankFactors | None = None,
    d_low: LowRankFactors | None = None,
    backend: Backend = "auto",
) -> GateGradients:
    """Computes the gradients of :func:`gate_fwd`.

    Args:
        needs_y: True to compute the result of the forward again.
        low: is added to ``h_SH``, as in the forward.
        d_low: is added to ``d_y_SF``.
    """
    d_h_SH = torch.empty_like(h_SH)
    d_weight_TK = weight_TK.new_zeros(weight_TK.shape, dtype=statistics_dtype(h_SH.dtype))
    y_SF = torch.empty_like(d_y_SF) if needs_y else None
    if not runs_triton(h_SH, backend):
        end = int(routing.ends_E[-1])
        g, u = _gate_and_up_in_torch(h_SH, routing, bias_EH, low, options)
        activated, d_gate, factor, d_up = gate_in_torch(g, u, options)
        weight = weights_of_rows(weight_TK, routing, g.dtype)[:, None]
        d_y = _with_low_rank(d_y_SF, d_low, routing)
        d_weight_TK.view(-1)[routing.pair_S[:end].long()] = (d_y * activated * factor).sum(1)
        of_gate, of_up = d_y * weight * factor * d_gate, d_y * weight * activated * d_up
        d_h_SH[:end] = join_projection(of_gate, of_up, options).to(h_SH.dtype)
        if y_SF is not None:
            y_SF[:end] = (activated * factor * weight).to(y_SF.dtype)
        return GateGradients(d_h_SH, d_weight_TK, y_SF)
    if d_y_SF.numel() > 0:
        d_rank = 0 if d_low is None else d_low.low_Sr.shape[1]
        _launch(
            _gate_bwd_kernel,
            h_SH,
            weight_TK,
            routing,
            options,
            bias_EH,
            low,
            d_y_SF,
            d_y_SF if d_low is None else d_low.low_Sr,
            d_y_SF if d_low is None else d_low.matrix_ErO,
            host_number(0.0 if d_low is None else d_low.scale, h_SH.dtype),
            d_h_SH,
            d_h_SH if y_SF is None else y_SF,
            d_weight_TK,
            all_features=True,
            other_rank=d_rank,
            D_RANK=d_rank,
            NEEDS_Y=needs_y,
        )
    return GateGradients(d_h_SH, d_weight_TK, y_SF)


def _with_low_rank(x_SO: Tensor, low: LowRankFactors | None, routing: Routing) -> Tensor:
    """Returns the rows of experts in the dtype of arithmetic, with the low-rank product."""
    end = int(routing.ends_E[-1])
    x = x_SO[:end].to(statistics_dtype(x_SO.dtype))
    if low is None:
        return x
    return x + low.scale * grouped_product(low.low_Sr[:end].to(x.dtype), low.matrix_ErO.to(x.dtype), routing.ends_E)


def _gate_and_up_in_torch(
    h_SH: Tensor, routing: Routing, bias_EH: Tensor | None, low: LowRankFactors | None, options: GateOptions
) -> tuple[Tensor, Tensor]:
    """Returns gate and up of the rows of experts in the dtype of arithmetic."""
    h = _with_low_rank(h_SH, low, routing)
    if bias_EH is not None:
        h = h + bias_EH.to(h.dtype)[routing.expert_S[: len(h)].long()]
    return split_projection(h, options)
