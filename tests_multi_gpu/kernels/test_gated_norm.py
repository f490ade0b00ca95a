"""Gated RMSNorm: the kernels against fp64 autograd of its definition, and the modules of transformers that have one."""

from __future__ import annotations

import importlib
import warnings
from itertools import product
from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from loss_inputs import BACKENDS, DEVICE
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from truth import relative_error

import liger_dist
from liger_dist.fused_layers import recompute
from liger_dist.fused_layers.gated_norm import gated_norm
from liger_dist.fused_layers.norm import norm
from liger_dist_kernels import GatedNormOptions, NormOptions

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}
SHAPES = [(3, 2, 32), (70, 48), (2, 3000), (0, 16)]
"""two groups divide each width"""
WITH_GATE = [
    ("bailing_hybrid", "BailingHybridRMSNormGated", {}),
    ("bamba", "BambaRMSNormGated", {"group_size": 32}),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 2, "norm_before_gate": True}),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4, "norm_before_gate": False}),
    ("glm5_next", "Glm5NextTextRMSNormGated", {}),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", {"group_size": 64}),
    ("kimi_linear", "KimiLinearRMSNormGated", {}),
    ("lara_mini", "LaraMiniRMSNormGated", {}),
    ("mamba2", "MambaRMSNormGated", {"group_size": 16}),
    ("nemotron_h", "NemotronHRMSNormGated", {"group_size": 32}),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", {}),
    ("qwen3_5", "Qwen3_5RMSNormGated", {}),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", {}),
    ("qwen3_next", "Qwen3NextRMSNormGated", {}),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 64}),
]
"""modelling file, class and further arguments, of transformers 5.24"""


def truth(x: Tensor, gate: Tensor, weight: Tensor, options: GatedNormOptions) -> Tensor:
    factor = F.silu(gate) if options.activation == "silu" else torch.sigmoid(gate)
    h = (x * factor if options.gates_first else x).unflatten(-1, (options.groups, -1))
    n = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + options.eps)).flatten(-2) * weight
    return n if options.gates_first else n * factor


@pytest.mark.nightly(shape=[(70, 48)], dtype=[torch.float64, torch.float32], backend=["triton"])
@pytest.mark.nightly(shape=[(2, 3000)], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_norms(shape: tuple[int, ...], dtype: torch.dtype, backend: Any) -> None:
    for activation, gates_first, groups, rounds in product(["silu", "sigmoid"], [False, True], [1, 2], [False, True]):
        options = GatedNormOptions(
            eps=1e-5, activation=activation, gates_first=gates_first, groups=groups, round_before_weight=rounds
        )
        # Rows of a wider tensor, as a projection splits them.
        both = on_device.leaf(*shape[:-1], 2 * shape[-1], dtype=dtype)
        weight = on_device.leaf(shape[-1], dtype=dtype, seed=1)
        x, gate = both.chunk(2, -1)
        y = gated_norm(x, gate, weight, options=options, backend=backend)
        leaves = [tensor.detach().double().requires_grad_() for tensor in (both, weight)]
        want = truth(*leaves[0].chunk(2, -1), leaves[1], options)
        assert y.dtype == dtype
        assert relative_error(y, want) <= 2 * TOLERANCE[dtype]
        upstream = on_device.leaf(*shape, dtype=dtype, seed=2).detach()
        gradients = torch.autograd.grad((y * upstream).sum(), [both, weight])
        for got, expected in zip(gradients, torch.autograd.grad((want * upstream.double()).sum(), leaves), strict=True):
            assert relative_error(got, expected) <= 4 * TOLERANCE[dtype], options


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_of_several_dtypes_and_a_frozen_weight(backend: Any) -> None:
    x, gate = on_device.leaf(9, 64, dtype=torch.float32), on_device.leaf(9, 64, dtype=torch.bfloat16, seed=1)
    weight = on_device.leaf(64, dtype=torch.bfloat16, seed=2).detach()
    for gates_first in (False, True):
        options = GatedNormOptions(eps=1e-6, gates_first=gates_first, round_before_weight=True)
        y = gated_norm(x, gate, weight, options=options, backend=backend)
        assert y.dtype == torch.float32
        want = truth(x.double(), gate.double(), weight.double(), options)
        assert relative_error(y, want) <= 2e-6
        got = torch.autograd.grad(y.sum(), [x, gate])
        assert [gradient.dtype for gradient in got] == [torch.float32, torch.bfloat16]
        assert relative_error(got[0], torch.autograd.grad(want.sum(), x)[0]) <= 1e-5


@pytest.mark.parametrize(("file", "name", "given"), WITH_GATE, ids=str)
def test_modules_of_transformers_are_matched_and_agree(file: str, name: str, given: dict[str, Any]) -> None:
    try:
        modelling = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    except ImportError as error:
        pytest.skip(f"another transformers: {error}")
    for dtype in (torch.float32, torch.bfloat16):
        own, model = (Model(getattr(modelling, name)(128, eps=1e-4, **given)).to(DEVICE, dtype) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(fused_loss=False))
        assert any(what.startswith(f"{name}: GatedRMSNorm") for what, _ in liger_dist.explain(model).layers.swapped)
        results = []
        for one in (own, model):
            x, gate = on_device.leaf(2, 7, 128, dtype=dtype), on_device.leaf(2, 7, 128, dtype=dtype, seed=1)
            y = one.norm(x, gate)
            upstream = on_device.leaf(2, 7, 128, dtype=y.dtype, seed=2).detach()
            results.append([y, *torch.autograd.grad(y, [x, gate, one.norm.weight], upstream)])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for want, got in zip(*results, strict=True):
            assert got.dtype == want.dtype
            assert relative_error(got, want.double()) <= tolerance


class Model(torch.nn.Module):
    """A norm in a model with an lm_head, as wrap expects one."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm: Any = norm
        torch.nn.init.normal_(self.norm.weight)
        self.lm_head = torch.nn.Linear(8, 8)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


@pytest.mark.smoke
def test_the_output_is_recomputed_instead_of_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "MIN_BYTES", 1)
    options, after = GatedNormOptions(eps=1e-5), NormOptions(eps=1e-5)
    leaves = [
        on_device.leaf(*shape, dtype=torch.float64, seed=i)
        for i, shape in enumerate([(5, 16), (5, 16), (16,), (8, 16)])
    ]
    x, gate, weight, projection = leaves
    y = gated_norm(x, gate, weight, options=options)
    memory = StorageWeakRef(y.untyped_storage())
    projected = F.linear(y, projection)
    del y
    z = norm(projected, None, options=after)
    assert memory.expired()
    upstream = on_device.leaf(5, 8, dtype=torch.float64, seed=9).detach()
    own = F.linear(truth(x, gate, weight, options), projection)
    want = torch.autograd.grad(own * torch.rsqrt(own.square().mean(-1, keepdim=True) + 1e-5), leaves, upstream)
    for got, expected in zip(torch.autograd.grad(z, leaves, upstream), want, strict=True):
        assert relative_error(got, expected) <= 1e-11
