# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""``activation(gate) * up`` of gated MLPs (Shazeer 2020, arXiv:2002.05202), its gradient, and the known activations.

Legend: T rows, F features. Arithmetic is fp32 (fp64 for fp64 inputs), rounded once.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import Backend, cdiv, launch, rows_of, runs_triton, statistics_dtype
from .launches import GATED_ACTIVATION

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""``gelu`` is the exact one, by the error function; ``gelu_tanh`` its approximation (Hendrycks and Gimpel 2016);
``relu_squared`` the square of ``relu`` (So et al. 2021, arXiv:2109.08668)"""

_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_SQRT_2_OVER_PI = tl.constexpr(math.sqrt(2.0 / math.pi))
_INVERSE_SQRT_2_PI = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_CUBIC = tl.constexpr(0.044715)
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _sigmoid(x):
    """Computes the sigmoid in four instructions; ``tl.sigmoid`` has six more, to keep results below 1e-38."""
    return 1.0 / (1.0 + tl.exp2(-x * _LOG2_E))


@triton.jit
def activate(g, KIND: tl.constexpr):
    """Computes the activation and its derivative; tanh is written with a sigmoid, which the interpreter supports
    too."""
    if KIND == "sigmoid":
        sigmoid = _sigmoid(g)
        return sigmoid, sigmoid * (1.0 - sigmoid)
    if KIND == "silu":
        sigmoid = _sigmoid(g)
        return g * sigmoid, sigmoid * (1.0 + g * (1.0 - sigmoid))
    if KIND == "gelu":
        share = 0.5 * (1.0 + tl.erf(g * _SQRT_HALF))
        return g * share, share + g * _INVERSE_SQRT_2_PI * tl.exp(-0.5 * g * g)
    if KIND == "gelu_tanh":
        inner = _SQRT_2_OVER_PI * (g + _CUBIC * g * g * g)
        share = _sigmoid(2.0 * inner)
        slope = 2.0 * share * (1.0 - share) * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * g * g)
        return g * share, share + g * slope
    # As torch's: 0 for -inf, NaN for NaN.
    positive = tl.where(g <= 0.0, 0.0, g)
    if KIND == "relu_squared":
        return positive * positive, 2.0 * positive
    return positive, (g > 0.0).to(g.dtype)


@triton.jit
def _gated_activation_fwd_kernel(
    gate_ptr, up_ptr, y_ptr, stride_gt, stride_ut, F, FP64: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs_f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_f = offs_f < F
    dtype = tl.float64 if FP64 else tl.float32
    g = tl.load(gate_ptr + row * stride_gt + offs_f, mask=mask_f, other=0.0).to(dtype)
    u = tl.load(up_ptr + row * stride_ut + offs_f, mask=mask_f, other=0.0).to(dtype)
    activated, _ = activate(g, KIND)
    tl.store(y_ptr + row * F + offs_f, (activated * u).to(y_ptr.dtype.element_ty), mask=mask_f)


@triton.jit
def _gated_activation_bwd_kernel(
    d_y_ptr,
    gate_ptr,
    up_ptr,
    d_gate_ptr,
    d_up_ptr,
    stride_yt,
    stride_gt,
    stride_ut,
    stride_dgt,
    stride_dut,
    F,
    FP64: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_f = offs_f < F
    dtype = tl.float64 if FP64 else tl.float32
    d_y = tl.load(d_y_ptr + row * stride_yt + offs_f, mask=mask_f, other=0.0).to(dtype)
    g = tl.load(gate_ptr + row * stride_gt + offs_f, mask=mask_f, other=0.0).to(dtype)
    u = tl.load(up_ptr + row * stride_ut + offs_f, mask=mask_f, other=0.0).to(dtype)
    activated, slope = activate(g, KIND)
    tl.store(d_gate_ptr + row * stride_dgt + offs_f, (d_y * u * slope).to(d_gate_ptr.dtype.element_ty), mask=mask_f)
    tl.store(d_up_ptr + row * stride_dut + offs_f, (d_y * activated).to(d_up_ptr.dtype.element_ty), mask=mask_f)


def gated_activation_fwd(gate: Tensor, up: Tensor, *, activation: Activation, backend: Backend = "auto") -> Tensor:
    """Computes ``activation(gate) * up`` in the inputs' dtype; both inputs are ``[..., F]`` and have one dtype."""
    if not runs_triton(gate, backend):
        dtype = statistics_dtype(gate.dtype)
        return (activated_with_slope(gate.to(dtype), activation)[0] * up.to(dtype)).to(gate.dtype)
    num_features = gate.shape[-1]
    y = gate.new_empty(gate.shape)
    if y.numel() > 0:
        (gate_TF, stride_gate), (up_TF, stride_up) = rows_of(gate), rows_of(up)
        launch(
            _gated_activation_fwd_kernel,
            (y.numel() // num_features, cdiv(num_features, GATED_ACTIVATION["BLOCK"])),
            gate_TF,
            up_TF,
            y,
            stride_gate,
            stride_up,
            num_features,
            FP64=gate.dtype == torch.float64,
            KIND=activation,
            **GATED_ACTIVATION,
        )
    return y


def gated_activation_bwd(
    d_y: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    activation: Activation,
    backend: Backend = "auto",
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of gate and up; all ``[..., F]``.

    Args:
        overwrite: may write them over ``gate`` and ``up``.
    """
    if not runs_triton(gate, backend):
        dtype = statistics_dtype(gate.dtype)
        activated, slope = activated_with_slope(gate.to(dtype), activation)
        slope = d_y.to(dtype) * up.to(dtype) * slope
        of_gate, of_up = slope.to(gate.dtype), (d_y.to(dtype) * activated).to(up.dtype)
        return (gate.copy_(of_gate), up.copy_(of_up)) if overwrite else (of_gate, of_up)
    (d_y_TF, stride_y), (gate_TF, stride_gate), (up_TF, stride_up) = rows_of(d_y), rows_of(gate), rows_of(up)
    num_features = gate.shape[-1]
    if overwrite:
        d_gate, d_up, stride_d_gate, stride_d_up = gate_TF, up_TF, stride_gate, stride_up
    else:
        d_gate, d_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
        stride_d_gate = stride_d_up = num_features
    if d_gate.numel() > 0:
        launch(
            _gated_activation_bwd_kernel,
            (gate.numel() // num_features, cdiv(num_features, GATED_ACTIVATION["BLOCK"])),
            d_y_TF,
            gate_TF,
            up_TF,
            d_gate,
            d_up,
            stride_y,
            stride_gate,
            stride_up,
            stride_d_gate,
            stride_d_up,
            num_features,
            FP64=gate.dtype == torch.float64,
            KIND=activation,
            **GATED_ACTIVATION,
        )
    return _shaped(d_gate, gate), _shaped(d_up, up)


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor in the other one's shape; a view costs as much host time as an allocation."""
    return rows if rows.shape == like.shape else rows.view(like.shape)


def activated_with_slope(g: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Computes the activation and its derivative in plain torch."""
    if activation == "sigmoid":
        sigmoid = torch.sigmoid(g)
        return sigmoid, sigmoid * (1.0 - sigmoid)
    if activation == "silu":
        sigmoid = torch.sigmoid(g)
        return F.silu(g), sigmoid * (1.0 + g * (1.0 - sigmoid))
    if activation == "relu":
        return F.relu(g), (g > 0).to(g.dtype)
    if activation == "relu_squared":
        return F.relu(g).square(), 2.0 * F.relu(g)
    if activation == "gelu":
        density = torch.exp(-0.5 * g * g) / math.sqrt(2.0 * math.pi)
        return F.gelu(g), 0.5 * (1.0 + torch.erf(g * math.sqrt(0.5))) + g * density
    tanh = torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g * g * g))
    inner_slope = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * g * g)
    slope = 0.5 * (1.0 + tanh) + 0.5 * g * (1.0 - tanh * tanh) * inner_slope
    return F.gelu(g, approximate="tanh"), slope
