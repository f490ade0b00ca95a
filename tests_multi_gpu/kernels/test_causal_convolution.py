"""Causal convolutions: the kernels against fp64 autograd of torch's convolution of each document, and the functions of
transformers that compute one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from loss_inputs import BACKENDS, DEVICE
from torch import Tensor
from truth import relative_error

from liger_dist.fused_layers.convolution import causal_convolution, is_causal_convolution

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}
SHAPES: list[tuple[tuple[int, int, int], torch.dtype]] = [
    ((2, 70, 65), torch.float32),
    ((1, 130, 20), torch.bfloat16),
    ((2, 5, 3), torch.float64),
    ((3, 8, 1), torch.float32),
]
"""B, C, S"""
CASES: list[tuple[int, Any, bool, bool]] = [
    (4, "silu", False, False),
    (4, "silu", True, True),
    (3, None, True, True),
    (3, None, False, False),
    (1, "silu", False, True),
    (2, "silu", True, False),
]
"""taps, activation, with a bias, several documents"""


def documents(rows: int, tokens: int) -> Tensor:
    drawn = on_device.randint(0, 2, (rows, tokens), generator=torch.Generator().manual_seed(3))
    return drawn.cumsum(1).int().to(DEVICE)


def truth(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str | None) -> Tensor:
    K = weight.shape[1]
    rows = []
    for row, x_CS in enumerate(x):
        numbers = on_device.zeros(x.shape[2]) if seq_idx is None else seq_idx[row]
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        parts = [
            F.conv1d(part[None], weight[:, None], bias, padding=K - 1, groups=len(weight))[..., : part.shape[1]]
            for part in x_CS.split(lengths, 1)
        ]
        rows.append(torch.cat(parts, 2))
    z = torch.cat(rows)
    return z if activation is None else F.silu(z)


@pytest.mark.nightly(shape=[(2, 70, 65)], dtype=[torch.float32], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_causal_convolutions(shape: tuple[int, int, int], dtype: torch.dtype, backend: Any) -> None:
    B, C, S = shape
    for taps, activation, has_bias, is_packed in CASES:
        # Channels of a wider tensor, as a projection splits them.
        wide = on_device.leaf(B, S, C + 3, dtype=dtype)
        weight = on_device.leaf(C, taps, dtype=dtype, seed=1)
        bias = on_device.leaf(C, dtype=dtype, seed=2) if has_bias else None
        seq_idx = documents(B, S) if is_packed else None
        leaves = [leaf for leaf in (wide, weight, bias) if leaf is not None]
        y = causal_convolution(
            wide[..., :C].transpose(1, 2), weight, bias, seq_idx, activation=activation, backend=backend
        )
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        want = truth(exact[0][..., :C].transpose(1, 2), exact[1], exact[2] if has_bias else None, seq_idx, activation)
        assert (y.dtype, y.shape) == (dtype, want.shape)
        assert relative_error(y, want) <= 2 * TOLERANCE[dtype]
        upstream = on_device.leaf(*shape, dtype=dtype, seed=4).detach()
        gradients = torch.autograd.grad((y * upstream).sum(), leaves)
        expected = torch.autograd.grad((want * upstream.double()).sum(), exact)
        for got, one in zip(gradients, expected, strict=True):
            assert relative_error(got, one) <= 4 * TOLERANCE[dtype], (taps, activation, has_bias, is_packed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_can_be_changed_in_place(backend: Any) -> None:
    x, weight = on_device.leaf(2, 8, 5, dtype=torch.float32), on_device.leaf(8, 4, dtype=torch.float32)
    expected = 2 * causal_convolution(x, weight, backend="reference")
    assert relative_error(causal_convolution(x, weight, backend=backend).mul_(2), expected) <= 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 8, 0), (0, 8, 3)])
def test_no_tokens(shape: tuple[int, int, int], backend: Any) -> None:
    x, weight = on_device.leaf(*shape, dtype=torch.float32), on_device.leaf(8, 4, dtype=torch.float32)
    y = causal_convolution(x, weight, activation="silu", backend=backend)
    assert y.shape == shape
    d_x, d_weight = torch.autograd.grad(y.sum(), [x, weight])
    assert d_x.shape == shape
    assert torch.equal(d_weight, torch.zeros_like(weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_of_several_dtypes_and_layouts(backend: Any) -> None:
    """A bf16 input with fp32 taps, as with fp32 parameters under autocast, frozen taps, and tokens side by side."""
    x = on_device.leaf(2, 9, 21, dtype=torch.bfloat16)
    weight = on_device.leaf(9, 4, dtype=torch.float32, seed=1)
    y = causal_convolution(x, weight, activation="silu", backend=backend)
    assert y.dtype == torch.bfloat16
    want = truth(x.double(), weight.double(), None, None, "silu")
    assert relative_error(y, want) <= TOLERANCE[torch.bfloat16]
    upstream = on_device.leaf(2, 9, 21, dtype=torch.bfloat16, seed=4).detach()
    got = torch.autograd.grad(y, [x, weight], upstream)
    assert [gradient.dtype for gradient in got] == [torch.bfloat16, torch.float32]
    exact = torch.autograd.grad(want, [x, weight], upstream.double())
    assert relative_error(got[1], exact[1]) <= 2e-5
    frozen = causal_convolution(x, weight.detach(), activation="silu", backend=backend)
    assert torch.equal(torch.autograd.grad(frozen, x, upstream)[0], got[0])


def test_functions_of_transformers_are_matched() -> None:
    models = Path(importlib.import_module("transformers").__file__ or "").parent / "models"
    files = [path for path in models.glob("*/modeling_*.py") if "def causal_conv1d_fn" in path.read_text()]
    if not files:
        pytest.skip("another transformers")
    for path in files:
        modelling = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        assert is_causal_convolution(modelling.causal_conv1d_fn), path.stem
        assert not is_causal_convolution(modelling.causal_conv1d_update), path.stem
    assert len(files) >= 20


@pytest.mark.smoke
def test_other_functions_are_left_alone() -> None:
    def later(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
        """Reads the next token."""
        y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1], groups=len(weight))[..., 2 : 2 + x.shape[2]]
        return y if activation is None else F.silu(y)

    def without_activation(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
        return F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))[..., : x.shape[2]]

    def scaled(x: Tensor, weight: Tensor, bias: Any, activation: Any, scale: float) -> Tensor:
        return x * scale

    for function in (later, without_activation, scaled):
        assert not is_causal_convolution(function)
