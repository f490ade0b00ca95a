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

from ._triton_utils import ANY_LENGTH, Backend, cdiv, dense, launch, runs_triton, statistics_dtype
from .gated_activation import Activation, activate, activated_with_slope
from .launches import causal_convolution_sizes
from .norm import sum_of_parts

MOST_TAPS = 4
SHORT = 64
"""tokens of a row"""


class CausalConvolutionGradients(NamedTuple):
    """Gradients of the inputs."""

    d_x: Tensor
    """``[B, C, S]``, the channels of a token side by side"""
    d_weight_CK: Tensor | None
    """None if gradients of weight and bias were not requested"""
    d_bias_C: Tensor | None
    """None as well without a bias"""


@triton.jit
def _token(x_ptr, stride_xs, s, is_token, offs_c, mask_c, dtype: tl.constexpr):
    """Loads one token, 0 where there is none."""
    return tl.load(x_ptr + s.to(tl.int64) * stride_xs + offs_c, mask=is_token & mask_c, other=0.0).to(dtype)


@triton.jit
def _document(seq_idx_ptr, s, is_token, HAS_DOCUMENTS: tl.constexpr):
    """Loads the number of a token's document; tokens outside of the row are in one that nothing else is in."""
    if HAS_DOCUMENTS:
        return tl.where(is_token, tl.load(seq_idx_ptr + s, mask=is_token, other=0).to(tl.int64), -(2**62))
    return tl.where(is_token, 0, -1).to(tl.int64)


@triton.jit
def _before(x_ptr, seq_idx_ptr, stride_xs, s, offs_c, mask_c, HAS_DOCUMENTS: tl.constexpr, dtype: tl.constexpr):
    """Loads the tokens 1, 2 and 3 before a token, and their documents."""
    x_1 = _token(x_ptr, stride_xs, s - 1, s >= 1, offs_c, mask_c, dtype)
    x_2 = _token(x_ptr, stride_xs, s - 2, s >= 2, offs_c, mask_c, dtype)
    x_3 = _token(x_ptr, stride_xs, s - 3, s >= 3, offs_c, mask_c, dtype)
    of_1 = _document(seq_idx_ptr, s - 1, s >= 1, HAS_DOCUMENTS)
    of_2 = _document(seq_idx_ptr, s - 2, s >= 2, HAS_DOCUMENTS)
    of_3 = _document(seq_idx_ptr, s - 3, s >= 3, HAS_DOCUMENTS)
    return x_1, x_2, x_3, of_1, of_2, of_3


@triton.jit
def _taps(weight_ptr, bias_ptr, offs_c, mask_c, C: tl.constexpr, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):
    """Loads the weights of a token and of those 1, 2 and 3 before it, and the bias."""
    w_0 = tl.load(weight_ptr + 3 * C + offs_c, mask=mask_c, other=0.0).to(dtype)
    w_1 = tl.load(weight_ptr + 2 * C + offs_c, mask=mask_c, other=0.0).to(dtype)
    w_2 = tl.load(weight_ptr + C + offs_c, mask=mask_c, other=0.0).to(dtype)
    w_3 = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(dtype)
    bias = tl.zeros_like(w_0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(dtype)
    return w_0, w_1, w_2, w_3, bias


@triton.jit(**ANY_LENGTH)
def _causal_convolution_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, y_ptr, stride_xb, stride_xs, tokens, C: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, FP64: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    dtype = tl.float64 if FP64 else tl.float32
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * STRIP
    offs_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    x_ptr += row * stride_xb
    y_ptr += row * tokens * C
    if HAS_DOCUMENTS:
        seq_idx_ptr += row * tokens
    w_0, w_1, w_2, w_3, bias = _taps(weight_ptr, bias_ptr, offs_c, mask_c, C, HAS_BIAS, dtype)
    x_1, x_2, x_3, of_1, of_2, of_3 = _before(
        x_ptr, seq_idx_ptr, stride_xs, begin, offs_c, mask_c, HAS_DOCUMENTS, dtype
    )
    for step in tl.range(0, STRIP):
        s = begin + step
        is_token = s < tokens
        x = _token(x_ptr, stride_xs, s, is_token, offs_c, mask_c, dtype)
        of = _document(seq_idx_ptr, s, is_token, HAS_DOCUMENTS)
        z = bias + w_0 * x
        z += tl.where(of == of_1, w_1 * x_1, 0.0)
        z += tl.where(of == of_2, w_2 * x_2, 0.0)
        z += tl.where(of == of_3, w_3 * x_3, 0.0)
        if KIND != "none":
            z, _ = activate(z, KIND)
        tl.store(y_ptr + s.to(tl.int64) * C + offs_c, z.to(y_ptr.dtype.element_ty), mask=is_token & mask_c)
        x_1, x_2, x_3 = x, x_1, x_2
        of_1, of_2, of_3 = of, of_1, of_2


@triton.jit(**ANY_LENGTH)
def _causal_convolution_bwd_kernel(
    d_y_ptr, x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, d_x_ptr, d_parts_ptr,
    stride_yb, stride_ys, stride_xb, stride_xs, tokens, C: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, FP64: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    dtype = tl.float64 if FP64 else tl.float32
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * STRIP
    offs_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    x_ptr += row * stride_xb
    d_y_ptr += row * stride_yb
    d_x_ptr += row * tokens * C
    if HAS_DOCUMENTS:
        seq_idx_ptr += row * tokens
    w_0, w_1, w_2, w_3, bias = _taps(weight_ptr, bias_ptr, offs_c, mask_c, C, HAS_BIAS, dtype)
    x_1, x_2, x_3, of_1, of_2, of_3 = _before(
        x_ptr, seq_idx_ptr, stride_xs, begin, offs_c, mask_c, HAS_DOCUMENTS, dtype
    )
    # Gradients of the three tokens before, to which the next ones that read them are added.
    d_x_1, d_x_2, d_x_3 = tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0)
    d_w_0, d_w_1, d_w_2, d_w_3 = tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0)
    d_bias = tl.zeros_like(w_0)
    # Three steps more: the last tokens of the strip are read by the first ones of the next.
    for step in tl.range(0, STRIP + 3):
        s = begin + step
        is_token = s < tokens
        x = _token(x_ptr, stride_xs, s, is_token, offs_c, mask_c, dtype)
        d_z = _token(d_y_ptr, stride_ys, s, is_token, offs_c, mask_c, dtype)
        of = _document(seq_idx_ptr, s, is_token, HAS_DOCUMENTS)
        r_1 = tl.where(of == of_1, x_1, 0.0)
        r_2 = tl.where(of == of_2, x_2, 0.0)
        r_3 = tl.where(of == of_3, x_3, 0.0)
        if KIND != "none":
            _, slope = activate(bias + w_0 * x + w_1 * r_1 + w_2 * r_2 + w_3 * r_3, KIND)
            d_z *= slope
        if NEEDS_WEIGHT:
            d_here = tl.where(step < STRIP, d_z, 0.0)
            d_w_0 += d_here * x
            d_w_1 += d_here * r_1
            d_w_2 += d_here * r_2
            d_w_3 += d_here * r_3
            d_bias += d_here
        d_x_1 += tl.where(of == of_1, w_1 * d_z, 0.0)
        d_x_2 += tl.where(of == of_2, w_2 * d_z, 0.0)
        d_x_3 += tl.where(of == of_3, w_3 * d_z, 0.0)
        is_done = (step >= 3) & (s - 3 < tokens)
        at = (s - 3).to(tl.int64) * C + offs_c
        tl.store(d_x_ptr + at, d_x_3.to(d_x_ptr.dtype.element_ty), mask=is_done & mask_c)
        x_1, x_2, x_3 = x, x_1, x_2
        of_1, of_2, of_3 = of, of_1, of_2
        d_x_1, d_x_2, d_x_3 = w_0 * d_z, d_x_1, d_x_2
    if NEEDS_WEIGHT:
        d_parts_ptr += (row * tl.num_programs(0) + tl.program_id(0)) * 5 * C + offs_c
        tl.store(d_parts_ptr, d_w_3, mask=mask_c)
        tl.store(d_parts_ptr + C, d_w_2, mask=mask_c)
        tl.store(d_parts_ptr + 2 * C, d_w_1, mask=mask_c)
        tl.store(d_parts_ptr + 3 * C, d_w_0, mask=mask_c)
        if HAS_BIAS:
            tl.store(d_parts_ptr + 4 * C, d_bias, mask=mask_c)


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
        weight_CK: ``[C, K]``, any floating dtype; 0 < K <= 4. The last tap is that of the token itself.
        bias_C: ``[C]``, any floating dtype.
        seq_idx_BS: integers ``[B, S]``, contiguous: the number of each token's document, whose tokens lie side by side;
            as of transformers and causal-conv1d. None: each row is one document.

    Returns:
        ``[B, C, S]`` in the dtype of ``x``, the channels of a token side by side.
    """
    if not runs_triton(x, backend):
        return causal_convolution_fwd_reference(x, weight_CK, bias_C, seq_idx_BS, activation=activation)
    shape = x.shape
    x, seq_idx_BS = _in_one_row(_channels_last(x), seq_idx_BS)
    B, C, S = x.shape
    # No view: the caller may change the output of an autograd function in place.
    y = torch.empty_strided(shape, _strides(shape), dtype=x.dtype, device=x.device)
    sizes = causal_convolution_sizes(x.numel(), most_tokens=128)
    if y.numel() > 0:
        launch(
            _causal_convolution_fwd_kernel,
            (cdiv(S, sizes["STRIP"]), B, cdiv(C, sizes["BLOCK_C"])),
            x,
            _four_taps(weight_CK),
            dense(bias_C),
            seq_idx_BS,
            y,
            x.stride(0),
            x.stride(2),
            S,
            C,
            KIND=activation or "none",
            HAS_BIAS=bias_C is not None,
            HAS_DOCUMENTS=seq_idx_BS is not None,
            FP64=x.dtype == torch.float64,
            **sizes,
        )
    return y


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
    shape, K = x.shape, weight_CK.shape[1]
    d_y, _ = _in_one_row(_channels_last(d_y), None)
    x, seq_idx_BS = _in_one_row(_channels_last(x), seq_idx_BS)
    B, C, S = x.shape
    sizes = causal_convolution_sizes(x.numel(), most_tokens=64)
    parts = cdiv(S, sizes["STRIP"])
    d_x = torch.empty_strided(shape, _strides(shape), dtype=x.dtype, device=x.device)
    d_parts = x.new_empty(B * parts, 5 * C, dtype=statistics_dtype(x.dtype)) if needs_weight else None
    if d_x.numel() > 0:
        launch(
            _causal_convolution_bwd_kernel,
            (parts, B, cdiv(C, sizes["BLOCK_C"])),
            d_y,
            x,
            _four_taps(weight_CK),
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
            KIND=activation or "none",
            HAS_BIAS=bias_C is not None,
            HAS_DOCUMENTS=seq_idx_BS is not None,
            NEEDS_WEIGHT=needs_weight,
            FP64=x.dtype == torch.float64,
            **sizes,
        )
    if d_parts is None:
        return CausalConvolutionGradients(d_x, None, None)
    total = sum_of_parts(d_parts, d_parts.dtype).view(5, C)
    d_bias = None if bias_C is None else total[4].to(bias_C.dtype)
    return CausalConvolutionGradients(d_x, total[4 - K : 4].t().to(weight_CK.dtype), d_bias)


def _strides(shape: torch.Size) -> tuple[int, int, int]:
    _, C, S = shape
    return (S * C, 1, C)


def _in_one_row(x: Tensor, seq_idx_BS: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns many short rows as one row of several documents: a program computes a strip of one row, and its sums."""
    B, C, S = x.shape
    if B == 1 or S == 0 or S >= SHORT:
        return x, seq_idx_BS
    row = torch.arange(B, device=x.device).repeat_interleave(S)
    if seq_idx_BS is not None:
        row = (row << 32) + seq_idx_BS.flatten()
    return x.transpose(1, 2).reshape(1, B * S, C).transpose(1, 2), row[None]


def _four_taps(weight_CK: Tensor) -> Tensor:
    """Returns ``[4, C]`` with zeros before the first tap."""
    C, K = weight_CK.shape
    taps = weight_CK.new_zeros(4, C) if K < 4 else weight_CK.new_empty(4, C)
    taps[4 - K :] = weight_CK.t()
    return taps


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
            d_taps.append((reads * _earlier(values, j)).sum((0, 2)))
    if not needs_weight:
        return CausalConvolutionGradients(d_x.to(x.dtype), None, None)
    d_bias = None if bias_C is None else d_z.sum((0, 2)).to(bias_C.dtype)
    return CausalConvolutionGradients(d_x.to(x.dtype), torch.stack(d_taps, 1).to(weight_CK.dtype), d_bias)


def _sum_of_taps(x: Tensor, weight_CK: Tensor, bias_C: Tensor | None, seq_idx_BS: Tensor | None) -> Tensor:
    K = weight_CK.shape[1]
    taps = (_where_read(_earlier(x, j), seq_idx_BS, j) * weight_CK[:, K - 1 - j, None] for j in range(K))
    z = sum(taps, torch.zeros_like(x))
    return z if bias_C is None else z + bias_C.to(x.dtype)[:, None]


def _earlier(x: Tensor, j: int) -> Tensor:
    """Returns the values of j tokens before, 0 before the row."""
    S = x.shape[-1]
    return F.pad(x, (j, 0))[..., :S]


def _where_read(x: Tensor, seq_idx_BS: Tensor | None, j: int) -> Tensor:
    """Returns ``x`` with zeros at the tokens that do not read the one j before them."""
    if seq_idx_BS is None or j == 0:
        return x
    is_read = F.pad(seq_idx_BS[:, j:] == seq_idx_BS[:, :-j], (min(j, x.shape[-1]), 0))
    return torch.where(is_read[:, None], x, 0.0)
