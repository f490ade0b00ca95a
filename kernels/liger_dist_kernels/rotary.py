# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its gradient.

Legend: D features of a head, R of which are rotated in pairs. A pair (a, b) becomes
``(a cos_a - b sin_a, b cos_b + a sin_b)``. Arithmetic is fp32 (fp64 for fp64 inputs), rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import Backend, runs_triton, statistics_dtype

Pairing = Literal["halves", "neighbours"]


@dataclass(frozen=True, kw_only=True)
class RotaryLayout:
    """Where the pairs of R features are: feature p and p + R/2 ("halves", GPT-NeoX), or 2p and 2p + 1 ("neighbours",
    GPT-J)."""

    reads: Pairing = "halves"
    writes: Pairing = "halves"
    tables: Pairing | Literal["shared"] = "halves"
    """where a pair's two numbers of cos and sin are; "shared": both are number p, and a second half is not read"""


@triton.jit
def _places(pair, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr):
    if NEIGHBOURS:
        return 2 * pair, 2 * pair + 1
    return pair, pair + HALF


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    size_1,
    size_2,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_c0,
    stride_c1,
    stride_c2,
    stride_s0,
    stride_s1,
    stride_s2,
    stride_y0,
    stride_y1,
    stride_y2,
    D: tl.constexpr,
    HALF: tl.constexpr,
    READS_NEIGHBOURS: tl.constexpr,
    WRITES_NEIGHBOURS: tl.constexpr,
    TABLE_NEIGHBOURS: tl.constexpr,
    TABLE_SHARED: tl.constexpr,
    BACKWARD: tl.constexpr,
    FP64: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index_2 = row % size_2
    index_1 = (row // size_2) % size_1
    index_0 = row // (size_2 * size_1)
    x_row = x_ptr + index_0 * stride_x0 + index_1 * stride_x1 + index_2 * stride_x2
    cos_row = cos_ptr + index_0 * stride_c0 + index_1 * stride_c1 + index_2 * stride_c2
    sin_row = sin_ptr + index_0 * stride_s0 + index_1 * stride_s1 + index_2 * stride_s2
    y_row = y_ptr + index_0 * stride_y0 + index_1 * stride_y1 + index_2 * stride_y2
    dtype = tl.float64 if FP64 else tl.float32
    pair = tl.arange(0, BLOCK_HALF)
    mask = pair < HALF
    read_a, read_b = _places(pair, HALF, READS_NEIGHBOURS)
    write_a, write_b = _places(pair, HALF, WRITES_NEIGHBOURS)
    table_a, table_b = _places(pair, HALF, TABLE_NEIGHBOURS)
    if TABLE_SHARED:
        table_b = table_a
    a = tl.load(x_row + read_a, mask=mask, other=0.0).to(dtype)
    b = tl.load(x_row + read_b, mask=mask, other=0.0).to(dtype)
    cos_a = tl.load(cos_row + table_a, mask=mask, other=0.0).to(dtype)
    cos_b = tl.load(cos_row + table_b, mask=mask, other=0.0).to(dtype)
    sin_a = tl.load(sin_row + table_a, mask=mask, other=0.0).to(dtype)
    sin_b = tl.load(sin_row + table_b, mask=mask, other=0.0).to(dtype)
    if BACKWARD:
        rotated_a = a * cos_a + b * sin_b
        rotated_b = b * cos_b - a * sin_a
    else:
        rotated_a = a * cos_a - b * sin_a
        rotated_b = b * cos_b + a * sin_b
    tl.store(y_row + write_a, rotated_a.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_row + write_b, rotated_b.to(y_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest = tl.load(x_row + offs_rest, mask=offs_rest < D, other=0.0)
        tl.store(y_row + offs_rest, rest.to(y_ptr.dtype.element_ty), mask=offs_rest < D)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_rotated: int,
    layout: RotaryLayout,
    backward: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """``x`` rotated, or with ``backward`` its gradient from that of the result; dtype and strides of ``x``.

    Args:
        x: ``[A, B, C, D]``, the last dim contiguous.
        cos, sin: ``[A, B, C, R]`` (expanded dims cost nothing), or ``[A, B, C, R / 2]`` for "shared" tables, the last
            dim contiguous.
        num_rotated: R, even and at most D. Features from R on pass as they are.
    """
    if not runs_triton(x, backend):
        return reference(x, cos, sin, num_rotated=num_rotated, layout=layout, backward=backward)
    D, R = x.shape[-1], num_rotated
    y = torch.empty_like(x)
    reads, writes = (layout.writes, layout.reads) if backward else (layout.reads, layout.writes)
    if y.numel() > 0:
        _rotate_kernel[(y.numel() // D,)](
            x,
            cos,
            sin,
            y,
            x.shape[1],
            x.shape[2],
            *x.stride()[:3],
            *cos.stride()[:3],
            *sin.stride()[:3],
            *y.stride()[:3],
            D=D,
            HALF=R // 2,
            READS_NEIGHBOURS=reads == "neighbours",
            WRITES_NEIGHBOURS=writes == "neighbours",
            TABLE_NEIGHBOURS=layout.tables == "neighbours",
            TABLE_SHARED=layout.tables == "shared",
            BACKWARD=backward,
            FP64=x.dtype == torch.float64,
            BLOCK_HALF=triton.next_power_of_2(R // 2),
            BLOCK_REST=triton.next_power_of_2(D - R) if D > R else 0,
            num_warps=1,
        )
    return y


def reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, num_rotated: int, layout: RotaryLayout, backward: bool = False
) -> Tensor:
    """:func:`rotate` in plain torch."""
    dtype, R = statistics_dtype(x.dtype), num_rotated
    reads, writes = (layout.writes, layout.reads) if backward else (layout.reads, layout.writes)
    a, b = _pairs(x[..., :R].to(dtype), reads)
    if layout.tables == "shared":
        cos_a = cos_b = cos[..., : R // 2].to(dtype)
        sin_a = sin_b = sin[..., : R // 2].to(dtype)
    else:
        (cos_a, cos_b), (sin_a, sin_b) = _pairs(cos.to(dtype), layout.tables), _pairs(sin.to(dtype), layout.tables)
    if backward:
        rotated = (a * cos_a + b * sin_b, b * cos_b - a * sin_a)
    else:
        rotated = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    joined = torch.stack(rotated, -1).flatten(-2) if writes == "neighbours" else torch.cat(rotated, -1)
    # In the layout of x, as arithmetic would give it: models look at it with other shapes.
    y = torch.empty_like(x)
    y[..., :R], y[..., R:] = joined, x[..., R:]
    return y


def _pairs(x: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    if pairing == "neighbours":
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
