# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Depthwise causal convolution of a few taps, with an activation, as before gated delta nets and Mamba.

``y[t] = activation(bias + sum_j weight[K - 1 - j] * x[t - j])`` for each channel (Gu and Dao 2023, arXiv:2312.00752,
section 3.4), where tokens of other documents count as 0. The backward computes the sum again.
Arithmetic is fp32 (fp64 for fp64 inputs).

Legend: B rows, S tokens of a row, C channels, K taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import ANY_LENGTH, Backend, cdiv, dense, launch, next_power_of_2, runs_triton, statistics_dtype
from .gated_activation import Activation, activate, activated_with_slope
from .norm import sum_of_parts


class CausalConvolutionGradients(NamedTuple):
    """Gradients of the inputs."""

    d_x: Tensor
    """``[B, C, S]``, the channels of a token side by side"""
    d_weight_CK: Tensor | None
    """None if gradients of weight and bias were not requested"""
    d_bias_C: Tensor | None
    """None as well without a bias"""


@triton.jit
def _reads(seq_idx_ptr, offs_s, mask_s, j, HAS_DOCUMENTS: tl.constexpr):
    """True for the tokens that read the one j before them."""
    mask = mask_s & (offs_s >= j)
    if HAS_DOCUMENTS:
        own = tl.load(seq_idx_ptr + offs_s, mask=mask, other=0)
        mask &= own == tl.load(seq_idx_ptr + offs_s - j, mask=mask, other=0)
    return mask


@triton.jit
def _tokens_before(
    x_ptr, seq_idx_ptr, stride_xs, offs_s, mask_s, offs_c, mask_c, j, HAS_DOCUMENTS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Loads the tokens j before, 0 where they are not read."""
    mask = _reads(seq_idx_ptr, offs_s, mask_s, j, HAS_DOCUMENTS)[:, None] & mask_c[None, :]
    at = (offs_s - j).to(tl.int64)[:, None] * stride_xs + offs_c[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(dtype)


@triton.jit
def _tap(weight_ptr, offs_c, mask_c, k, C: tl.constexpr, dtype: tl.constexpr):
    return tl.load(weight_ptr + k * C + offs_c, mask=mask_c, other=0.0).to(dtype)[None, :]


@triton.jit
def _sum_at(
    x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, stride_xs, offs_s, mask_s, offs_c, mask_c,
    C: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Computes the convolution at the tokens ``offs_s`` of a row, without the activation."""
    z = tl.zeros((offs_s.shape[0], offs_c.shape[0]), dtype)
    if HAS_BIAS:
        z += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(dtype)[None, :]
    for j in tl.static_range(K):
        x = _tokens_before(x_ptr, seq_idx_ptr, stride_xs, offs_s, mask_s, offs_c, mask_c, j, HAS_DOCUMENTS, dtype)
        z += x * _tap(weight_ptr, offs_c, mask_c, K - 1 - j, C, dtype)
    return z


@triton.jit(**ANY_LENGTH)
def _causal_convolution_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, y_ptr, stride_xb, stride_xs, tokens, C: tl.constexpr, K: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, FP64: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    dtype = tl.float64 if FP64 else tl.float32
    row = tl.program_id(1).to(tl.int64)
    offs_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    offs_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_s, mask_c = offs_s < tokens, offs_c < C
    if HAS_DOCUMENTS:
        seq_idx_ptr += row * tokens
    z = _sum_at(
        x_ptr + row * stride_xb, weight_ptr, bias_ptr, seq_idx_ptr, stride_xs, offs_s, mask_s, offs_c, mask_c,
        C, K, HAS_BIAS, HAS_DOCUMENTS, dtype,
    )  # fmt: skip
    if KIND != "none":
        z, _ = activate(z, KIND)
    at = (row * tokens + offs_s)[:, None] * C + offs_c[None, :]
    tl.store(y_ptr + at, z.to(y_ptr.dtype.element_ty), mask=mask_s[:, None] & mask_c[None, :])


@triton.jit(**ANY_LENGTH)
def _causal_convolution_bwd_kernel(
    d_y_ptr, x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, d_x_ptr, d_parts_ptr,
    stride_yb, stride_ys, stride_xb, stride_xs, tokens, C: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, FP64: tl.constexpr,
    SUMS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    dtype = tl.float64 if FP64 else tl.float32
    row = tl.program_id(1).to(tl.int64)
    offs_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    x_ptr += row * stride_xb
    d_y_ptr += row * stride_yb
    if HAS_DOCUMENTS:
        seq_idx_ptr += row * tokens
    # The sums of the taps' gradients, and of the bias's after them.
    of_sum = tl.arange(0, SUMS)[:, None]
    sums = tl.zeros((SUMS, BLOCK_C), dtype)
    for step in tl.range(0, STEPS):
        offs_s = (tl.program_id(0) * STEPS + step) * BLOCK_S + tl.arange(0, BLOCK_S)
        d_x = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        # A token is read by itself and the next ones.
        for j in tl.static_range(K):
            reader = offs_s + j
            mask_r = reader < tokens
            at = reader.to(tl.int64)[:, None] * stride_ys + offs_c[None, :]
            d_z = tl.load(d_y_ptr + at, mask=mask_r[:, None] & mask_c[None, :], other=0.0).to(dtype)
            if KIND != "none":
                z = _sum_at(
                    x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, stride_xs, reader, mask_r, offs_c, mask_c,
                    C, K, HAS_BIAS, HAS_DOCUMENTS, dtype,
                )  # fmt: skip
                _, slope = activate(z, KIND)
                d_z *= slope
            d_read = d_z * _tap(weight_ptr, offs_c, mask_c, K - 1 - j, C, dtype)
            if HAS_DOCUMENTS:
                d_read = tl.where(_reads(seq_idx_ptr, reader, mask_r, j, HAS_DOCUMENTS)[:, None], d_read, 0.0)
            d_x += d_read
            if NEEDS_WEIGHT and j == 0:
                for i in tl.static_range(K):
                    x = _tokens_before(
                        x_ptr, seq_idx_ptr, stride_xs, offs_s, mask_r, offs_c, mask_c, i, HAS_DOCUMENTS, dtype
                    )
                    sums += tl.where(of_sum == K - 1 - i, tl.sum(d_z * x, 0)[None, :], 0.0)
                if HAS_BIAS:
                    sums += tl.where(of_sum == K, tl.sum(d_z, 0)[None, :], 0.0)
        at = (row * tokens + offs_s)[:, None] * C + offs_c[None, :]
        tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=(offs_s < tokens)[:, None] & mask_c[None, :])
    if NEEDS_WEIGHT:
        part = row * tl.num_programs(0) + tl.program_id(0)
        kept = K + 1 if HAS_BIAS else K
        at = (part * kept + of_sum) * C + offs_c[None, :]
        tl.store(d_parts_ptr + at, sums, mask=(of_sum < kept) & mask_c[None, :])


def causal_convolution_fwd(
    x: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    seq_idx_BS: Tensor | None,
    *,
    activation: Activation | None,
    backend: Backend = "auto",
) -> Tensor:
    """Convolves each channel of each row.

    Args:
        x: ``[B, C, S]``, floating, usually with the channels of a token side by side, as a projection writes them; a
            copy is made otherwise.
        weight_CK: ``[C, K]``, any floating dtype; K > 0. The last tap is that of the token itself.
        bias_C: ``[C]``, any floating dtype.
        seq_idx_BS: integers ``[B, S]``, contiguous: the number of each token's document, whose tokens lie side by side;
            as of transformers and causal-conv1d. None: each row is one document.

    Returns:
        ``[B, C, S]`` in the dtype of ``x``, the channels of a token side by side.
    """
    if not runs_triton(x, backend):
        return causal_convolution_fwd_reference(x, weight_CK, bias_C, seq_idx_BS, activation=activation)
    x, weight_KC = _channels_last(x), dense(weight_CK.t())
    (B, C, S), K = x.shape, weight_CK.shape[1]
    y = x.new_empty(B, S, C)
    block_s, block_c = 32, 128
    if y.numel() > 0:
        launch(
            _causal_convolution_fwd_kernel,
            (cdiv(S, block_s), B, cdiv(C, block_c)),
            x,
            weight_KC,
            dense(bias_C),
            seq_idx_BS,
            y,
            x.stride(0),
            x.stride(2),
            S,
            C,
            K,
            KIND=activation or "none",
            HAS_BIAS=bias_C is not None,
            HAS_DOCUMENTS=seq_idx_BS is not None,
            FP64=x.dtype == torch.float64,
            BLOCK_S=block_s,
            BLOCK_C=block_c,
            num_warps=4,
        )
    return y.transpose(1, 2)


def causal_convolution_bwd(
    d_y: Tensor,
    x: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    seq_idx_BS: Tensor | None,
    *,
    needs_weight: bool,
    activation: Activation | None,
    backend: Backend = "auto",
) -> CausalConvolutionGradients:
    """Computes the gradients for the gradient ``d_y`` ``[B, C, S]`` of :func:`causal_convolution_fwd`, in the dtypes of
    the inputs; those of weight and bias together."""
    if not runs_triton(d_y, backend):
        return causal_convolution_bwd_reference(
            d_y, x, weight_CK, bias_C, seq_idx_BS, needs_weight=needs_weight, activation=activation
        )
    d_y, x, weight_KC = _channels_last(d_y), _channels_last(x), dense(weight_CK.t())
    (B, C, S), K = x.shape, weight_CK.shape[1]
    block_s, block_c = 32, 64
    steps = min(next_power_of_2(cdiv(S, block_s)), 8)
    parts = cdiv(S, block_s * steps)
    sums = K if bias_C is None else K + 1
    d_x = x.new_empty(B, S, C)
    d_parts = x.new_zeros(B * parts, sums * C, dtype=statistics_dtype(x.dtype)) if needs_weight else None
    if d_x.numel() > 0:
        launch(
            _causal_convolution_bwd_kernel,
            (parts, B, cdiv(C, block_c)),
            d_y,
            x,
            weight_KC,
            dense(bias_C),
            seq_idx_BS,
            d_x,
            d_parts,
            d_y.stride(0),
            d_y.stride(2),
            x.stride(0),
            x.stride(2),
            S,
            C,
            K,
            KIND=activation or "none",
            HAS_BIAS=bias_C is not None,
            HAS_DOCUMENTS=seq_idx_BS is not None,
            NEEDS_WEIGHT=needs_weight,
            FP64=x.dtype == torch.float64,
            SUMS=next_power_of_2(sums),
            BLOCK_S=block_s,
            BLOCK_C=block_c,
            STEPS=steps,
            num_warps=4,
        )
    if d_parts is None:
        return CausalConvolutionGradients(d_x.transpose(1, 2), None, None)
    total = sum_of_parts(d_parts, d_parts.dtype).view(sums, C)
    d_bias = None if bias_C is None else total[K].to(bias_C.dtype)
    return CausalConvolutionGradients(d_x.transpose(1, 2), total[:K].t().to(weight_CK.dtype), d_bias)


def _channels_last(x: Tensor) -> Tensor:
    """Returns ``[B, C, S]`` with the channels of a token side by side."""
    return x if x.stride(1) == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def causal_convolution_fwd_reference(
    x: Tensor, weight_CK: Tensor, bias_C: Tensor | None, seq_idx_BS: Tensor | None, *, activation: Activation | None
) -> Tensor:
    """Computes :func:`causal_convolution_fwd` in plain torch."""
    dtype = statistics_dtype(x.dtype)
    z = _sum_of_taps(x.to(dtype), weight_CK.to(dtype), bias_C, seq_idx_BS)
    y = z if activation is None else activated_with_slope(z, activation)[0]
    return y.to(x.dtype)


def causal_convolution_bwd_reference(
    d_y: Tensor,
    x: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    seq_idx_BS: Tensor | None,
    *,
    needs_weight: bool,
    activation: Activation | None,
) -> CausalConvolutionGradients:
    """Computes :func:`causal_convolution_bwd` in plain torch."""
    dtype, (K, S) = statistics_dtype(x.dtype), (weight_CK.shape[1], x.shape[2])
    d_z, values, weight = d_y.to(dtype), x.to(dtype), weight_CK.to(dtype)
    if activation is not None:
        d_z = d_z * activated_with_slope(_sum_of_taps(values, weight, bias_C, seq_idx_BS), activation)[1]
    d_x = torch.zeros_like(values)
    d_taps: list[Tensor] = []
    for j in reversed(range(K)):
        reads = _where_read(d_z, seq_idx_BS, j)
        d_x += F.pad((reads * weight[:, K - 1 - j, None])[..., j:], (0, min(j, S)))
        if needs_weight:
            d_taps.append((reads * _before(values, j)).sum((0, 2)))
    if not needs_weight:
        return CausalConvolutionGradients(d_x.to(x.dtype), None, None)
    d_bias = None if bias_C is None else d_z.sum((0, 2)).to(bias_C.dtype)
    return CausalConvolutionGradients(d_x.to(x.dtype), torch.stack(d_taps, 1).to(weight_CK.dtype), d_bias)


def _sum_of_taps(x: Tensor, weight_CK: Tensor, bias_C: Tensor | None, seq_idx_BS: Tensor | None) -> Tensor:
    K = weight_CK.shape[1]
    taps = (_where_read(_before(x, j), seq_idx_BS, j) * weight_CK[:, K - 1 - j, None] for j in range(K))
    z = sum(taps, torch.zeros_like(x))
    return z if bias_C is None else z + bias_C.to(x.dtype)[:, None]


def _before(x: Tensor, j: int) -> Tensor:
    """Returns the values of j tokens before, 0 before the row."""
    S = x.shape[-1]
    return F.pad(x, (j, 0))[..., :S]


def _where_read(x: Tensor, seq_idx_BS: Tensor | None, j: int) -> Tensor:
    """Returns ``x`` with zeros at the tokens that do not read the one j before them."""
    if seq_idx_BS is None or j == 0:
        return x
    is_read = F.pad(seq_idx_BS[:, j:] == seq_idx_BS[:, :-j], (min(j, x.shape[-1]), 0))
    return torch.where(is_read[:, None], x, 0.0)
