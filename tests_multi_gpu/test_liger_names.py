"""Liger's names: the same signatures as the real ones, and results against fp64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear_cross_entropy import DEVICE
from torch import Tensor
from truth import cross_entropy_truth, relative_error

import liger_dist
from liger_dist.integrations import liger

T, D, V = 23, 16, 41
NAMES = {
    "transformers.functional": (
        "liger_fused_linear_cross_entropy",
        "liger_cross_entropy",
        "liger_rms_norm",
        "liger_fused_add_rms_norm",
        "liger_layer_norm",
        "liger_swiglu",
        "liger_geglu",
    ),
    "transformers.fused_linear_cross_entropy": ("LigerFusedLinearCrossEntropyLoss",),
    "transformers.cross_entropy": ("LigerCrossEntropyLoss",),
    "transformers.rms_norm": ("LigerRMSNorm",),
}


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in NAMES.items() for name in names])
def test_signatures_are_those_of_liger(place: str, name: str) -> None:
    theirs = pytest.importorskip(f"liger_kernel.{place}", reason="Liger-Kernel is not installed")

    def parameters(thing: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(thing).parameters.values()]

    assert parameters(getattr(liger, name)) == parameters(getattr(theirs, name))
    if name.endswith("Loss"):
        forwards = (getattr(module, name).forward for module in (liger, theirs))
        assert len({tuple(parameters(forward)) for forward in forwards}) == 1


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "options": {"lse_square_scale": 1e-2, "label_smoothing": 0.1, "softcap": 5.0, "ignore_index": 7},
    "weights": {"ce_weight": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses(name: str) -> None:
    options = dict(OPTIONS[name])
    hidden, weight, bias = random(T, D, seed=0), random(V, D, seed=1), random(V, seed=2)
    labels = torch.randint(V, (T,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    labels[::5] = options.get("ignore_index", -100)
    if "ce_weight" in options:
        options["ce_weight"] = random(V, seed=4).abs()
    own = {
        "reduction": options.get("reduction", "mean"),
        "ignore_index": options.get("ignore_index", -100),
        "label_smoothing": options.get("label_smoothing", 0.0),
        "z_loss": options.get("lse_square_scale", 0.0),
        "softcap": options.get("softcap"),
        "class_weight": options.get("ce_weight"),
    }
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    truth = cross_entropy_truth(leaves[0] @ leaves[1].T + leaves[2], labels, **own)
    want = torch.autograd.grad(truth.loss.sum(), leaves)
    mine = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    module = liger.LigerFusedLinearCrossEntropyLoss(**options, return_z_loss=True, return_token_accuracy=True)
    got = module(mine[1], mine[0], labels, mine[2])
    alone = liger.liger_fused_linear_cross_entropy(mine[0], mine[1], labels, mine[2], **options)
    assert torch.equal(alone, got.loss)
    valid = labels != own["ignore_index"]
    accuracy = truth.is_top1.double() if name == "none" else truth.is_top1[valid].double().mean()
    assert relative_error(got.token_accuracy, accuracy) < 1e-6
    assert relative_error(got.z_loss, truth.z_loss) < 1e-6
    assert relative_error(got.loss, truth.loss) < 1e-6
    for gradient, expected in zip(torch.autograd.grad(got.loss.sum(), mine), want, strict=True):
        assert relative_error(gradient, expected) < 1e-6
    logits = (hidden @ weight.T + bias).requires_grad_()
    options["weight"] = options.pop("ce_weight", None)
    loss = liger.LigerCrossEntropyLoss(**options)(logits, labels)
    assert relative_error(loss, truth.loss) < 1e-6


def test_token_scaling_is_by_the_probability_of_the_label() -> None:
    hidden, weight = random(T, D, seed=0).requires_grad_(), random(V, D, seed=1)
    labels = torch.randint(V, (T,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    losses = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    truth = (losses * (-losses).exp().detach()).mean()
    (want,) = torch.autograd.grad(truth, hidden)
    loss = liger.liger_fused_linear_cross_entropy(hidden, weight, labels, use_token_scaling=True)
    (got,) = torch.autograd.grad(loss, hidden)
    assert relative_error(loss, truth) < 1e-6
    assert relative_error(got, want) < 1e-6


def test_layers() -> None:
    x, r, w, b = random(5, D, seed=0), random(5, D, seed=1), random(D, seed=2), random(D, seed=3)

    def rms(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    assert relative_error(liger.liger_rms_norm(x, w, 1e-6, 1.0, "gemma"), rms(x) * (1 + w)) < 1e-6
    y, total = liger.liger_fused_add_rms_norm(x, r, w, 1e-6)
    assert relative_error(y, rms(x + r) * w) < 1e-6
    assert relative_error(total, x + r) < 1e-12
    assert relative_error(liger.liger_layer_norm(x, w, b, 1e-5), F.layer_norm(x, (D,), w, b, 1e-5)) < 1e-6
    assert relative_error(liger.liger_swiglu(x, r), F.silu(x) * r) < 1e-6
    assert relative_error(liger.liger_geglu(x, r), F.gelu(x, approximate="tanh") * r) < 1e-6
    module = liger.LigerRMSNorm(D, offset=1.0, init_fn="zeros").to(DEVICE, torch.float64)
    assert relative_error(module(x), rms(x)) < 1e-6


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(liger_dist.LigerDistError, match="return_predicted_tokens is True"):
        liger.liger_cross_entropy(random(T, V, seed=0), torch.zeros(T, dtype=torch.long), return_predicted_tokens=True)
    with pytest.raises(liger_dist.LigerDistError, match="casting_mode is 'none'"):
        liger.liger_rms_norm(random(5, D, seed=0), None, 1e-6, casting_mode="none")
