# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its gradient.

Legend: B batch, T tokens, H heads, D features of a head, R of which are rotated in pairs. A pair (a, b) becomes
``(a cos_a - b sin_a, b cos_b + a sin_b)``. Arithmetic is fp32 (fp64 for fp64 inputs), rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import ANY_LENGTH, Backend, cdiv, launch, next_power_of_2, runs_triton, statistics_dtype

Pairing = Literal["halves", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class RotaryLayout:
    """Where the pairs of R features are: feature p and p + R/2 ("halves", GPT-NeoX), or 2p and 2p + 1 ("interleaved",
    GPT-J)."""

    reads: Pairing = "halves"
    writes: Pairing = "halves"
    tables: Pairing | Literal["shared"] = "halves"
    """columns of a pair's two values of cos and sin; "shared": both are column p, and a second half is not read"""


@triton.jit
def _places(pair, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    return pair, pair + HALF


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, cos_ptr, sin_ptr, first, heads, stride_xh, stride_yh, stride_ch, stride_sh, D: tl.constexpr,
    HALF: tl.constexpr, READS_INTERLEAVED: tl.constexpr, WRITES_INTERLEAVED: tl.constexpr,
    TABLE_INTERLEAVED: tl.constexpr, TABLE_SHARED: tl.constexpr, BACKWARD: tl.constexpr, FP64: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotates HEADS heads of one token, from ``first`` on; the pointers are those of the token's first head."""
    dtype = tl.float64 if FP64 else tl.float32
    # The heads of [B, H, T, D] are T * D elements apart.
    head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < heads) & (pair < HALF)
    read_a, read_b = _places(pair, HALF, READS_INTERLEAVED)
    write_a, write_b = _places(pair, HALF, WRITES_INTERLEAVED)
    table_a, table_b = _places(pair, HALF, TABLE_INTERLEAVED)
    if TABLE_SHARED:
        table_b = table_a
    a = tl.load(x_ptr + head * stride_xh + read_a, mask=mask, other=0.0).to(dtype)
    b = tl.load(x_ptr + head * stride_xh + read_b, mask=mask, other=0.0).to(dtype)
    cos_a = tl.load(cos_ptr + head * stride_ch + table_a, mask=mask, other=0.0).to(dtype)
    cos_b = tl.load(cos_ptr + head * stride_ch + table_b, mask=mask, other=0.0).to(dtype)
    sin_a = tl.load(sin_ptr + head * stride_sh + table_a, mask=mask, other=0.0).to(dtype)
    sin_b = tl.load(sin_ptr + head * stride_sh + table_b, mask=mask, other=0.0).to(dtype)
    if BACKWARD:
        rotated_a = a * cos_a + b * sin_b
        rotated_b = b * cos_b - a * sin_a
    else:
        rotated_a = a * cos_a - b * sin_a
        rotated_b = b * cos_b + a * sin_b
    tl.store(y_ptr + head * stride_yh + write_a, rotated_a.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + head * stride_yh + write_b, rotated_b.to(y_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < heads) & (rest < D)
        value = tl.load(x_ptr + head * stride_xh + rest, mask=mask, other=0.0)
        tl.store(y_ptr + head * stride_yh + rest, value.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(**ANY_LENGTH)
def _rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, y_q_ptr, y_k_ptr, tokens, heads_q, heads_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_cb, stride_ct, stride_ch,
    stride_sb, stride_st, stride_sh, stride_yqb, stride_yqt, stride_yqh, stride_ykb, stride_ykt, stride_ykh,
    blocks_q, D: tl.constexpr, HALF: tl.constexpr, READS_INTERLEAVED: tl.constexpr, WRITES_INTERLEAVED: tl.constexpr,
    TABLE_INTERLEAVED: tl.constexpr, TABLE_SHARED: tl.constexpr, BACKWARD: tl.constexpr, FP64: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    batch = row // tokens
    token = row % tokens
    cos_ptr += batch * stride_cb + token * stride_ct
    sin_ptr += batch * stride_sb + token * stride_st
    if block < blocks_q:
        _rotate_heads(
            q_ptr + batch * stride_qb + token * stride_qt, y_q_ptr + batch * stride_yqb + token * stride_yqt,
            cos_ptr, sin_ptr, block * HEADS, heads_q, stride_qh, stride_yqh, stride_ch, stride_sh, D, HALF,
            READS_INTERLEAVED, WRITES_INTERLEAVED, TABLE_INTERLEAVED, TABLE_SHARED, BACKWARD, FP64, HEADS, BLOCK_HALF,
            BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_ptr + batch * stride_kb + token * stride_kt, y_k_ptr + batch * stride_ykb + token * stride_ykt,
            cos_ptr, sin_ptr, (block - blocks_q) * HEADS, heads_k, stride_kh, stride_ykh, stride_ch, stride_sh, D, HALF,
            READS_INTERLEAVED, WRITES_INTERLEAVED, TABLE_INTERLEAVED, TABLE_SHARED, BACKWARD, FP64, HEADS, BLOCK_HALF,
            BLOCK_REST,
        )  # fmt: skip


def rotate(
    tensors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    num_rotated: int,
    layout: RotaryLayout,
    heads_dim: int = 2,
    backward: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """Rotates each of ``tensors``, or with ``backward`` turns the result's gradient into the input's, in one launch.
    The outputs have dtype and strides of the inputs.

    Args:
        tensors: one or two (queries and keys), each ``[B, T, H, D]`` with possibly different H and with any
            strides but the last, which is 1.
        cos, sin: ``[B, T, H, R]``, or R / 2 columns for "shared" tables, the last dim contiguous; any other dim may be
            1, and ``[B, T, R]`` is the same for all heads. For two tensors the same for all heads.
        num_rotated: R, even and at most D. Features from R on are copied.
        heads_dim: 1 if all of these have the dims of T and H exchanged.
    """
    q, k = tensors[0], tensors[-1]
    if not runs_triton(q, backend):
        return tuple(
            rotate_reference(
                x, cos, sin, num_rotated=num_rotated, layout=layout, heads_dim=heads_dim, backward=backward
            )
            for x in tensors
        )
    D, R = q.shape[-1], num_rotated
    rotated = tuple(torch.empty_like(x) for x in tensors)
    reads, writes = (layout.writes, layout.reads) if backward else (layout.reads, layout.writes)
    batch, tokens, heads_q = q.shape[0], q.shape[3 - heads_dim], q.shape[heads_dim]
    half = next_power_of_2(R // 2)
    heads = min(16, next_power_of_2(heads_q))
    blocks_q = cdiv(heads_q, heads)
    blocks_k = cdiv(k.shape[heads_dim], heads) if len(tensors) > 1 else 0
    if rotated[0].numel() > 0 or rotated[-1].numel() > 0:
        launch(
            _rotate_kernel,
            (batch * tokens, blocks_q + blocks_k),
            q,
            k,
            cos,
            sin,
            rotated[0],
            rotated[-1],
            tokens,
            heads_q,
            k.shape[heads_dim],
            *_strides(q, heads_dim),
            *_strides(k, heads_dim),
            *_strides(cos, heads_dim),
            *_strides(sin, heads_dim),
            *_strides(rotated[0], heads_dim),
            *_strides(rotated[-1], heads_dim),
            blocks_q,
            D=D,
            HALF=R // 2,
            READS_INTERLEAVED=reads == "interleaved",
            WRITES_INTERLEAVED=writes == "interleaved",
            TABLE_INTERLEAVED=layout.tables == "interleaved",
            TABLE_SHARED=layout.tables == "shared",
            BACKWARD=backward,
            FP64=q.dtype == torch.float64,
            HEADS=heads,
            BLOCK_HALF=half,
            BLOCK_REST=next_power_of_2(D - R) if D > R else 0,
            num_warps=max(heads * half // 256, 1),
        )
    return rotated


def _strides(x: Tensor, heads_dim: int) -> tuple[int, int, int]:
    """Returns the strides of batch, tokens and heads; 0 along dims of size 1, which broadcast."""
    shape, strides = x.shape, x.stride()
    batch = 0 if shape[0] == 1 else strides[0]
    if len(shape) == 3:
        return batch, 0 if shape[1] == 1 else strides[1], 0
    first, second = 0 if shape[1] == 1 else strides[1], 0 if shape[2] == 1 else strides[2]
    return (batch, second, first) if heads_dim == 1 else (batch, first, second)


def rotate_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_rotated: int,
    layout: RotaryLayout,
    heads_dim: int = 2,
    backward: bool = False,
) -> Tensor:
    """Computes :func:`rotate` of one tensor in plain torch."""
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
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
    joined = torch.stack(rotated, -1).flatten(-2) if writes == "interleaved" else torch.cat(rotated, -1)
    # In the layout of x, as the result of arithmetic: models view it with other shapes.
    y = torch.empty_like(x)
    y[..., :R], y[..., R:] = joined, x[..., R:]
    return y


def _pairs(x: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    if pairing == "interleaved":
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
