"""Inputs of the losses on tensors, their options, and the comparison with full logits in fp64."""

from __future__ import annotations

from typing import Any

import on_device
import torch
from torch import Tensor
from truth import cross_entropy_truth, relative_error

import liger_dist
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("reference", "triton")
IGNORED = -100
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "z-loss, sum": {"z_loss": 1e-2, "reduction": "sum"},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "temperature": {"temperature": 1.7},
    "softcap, scale, temperature": {"softcap": 2.0, "logit_scale": -1.3, "temperature": 0.6},
    "class weight": {"class_weight": True},
    "class weight, smoothing": {"class_weight": True, "label_smoothing": 0.2},
    "class weight, z-loss, sum": {"class_weight": True, "z_loss": 1e-2, "reduction": "sum"},
    "token weight": {"token_weight": True},
    "token weight, none": {"token_weight": True, "reduction": "none", "z_loss": 1e-2},
    "items": {"num_items_in_batch": 17},
    "items tensor": {"num_items_in_batch": on_device.tensor(17)},
    "everything": {
        "class_weight": True,
        "token_weight": True,
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 5.0,
        "logit_scale": 1.2,
        "temperature": 0.8,
        "num_items_in_batch": on_device.tensor(11.0),
    },
}


def make_inputs(
    T: int = 23, D: int = 10, V: int = 37, *, dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Random inputs with logits of deviation about 1, a third of the tokens ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = on_device.randn(T, D, generator=generator)
    weight = on_device.randn(V, D, generator=generator) / D**0.5
    offset = on_device.randn(V, generator=generator) if bias else None
    labels = on_device.randint(0, V, (T,), generator=generator)
    labels[on_device.rand(T, generator=generator) < 0.3] = IGNORED
    tensors = [None if t is None else t.to(DEVICE, dtype).requires_grad_() for t in (hidden, weight, offset)]
    assert tensors[0] is not None
    assert tensors[1] is not None
    return tensors[0], tensors[1], tensors[2], labels.to(DEVICE)


def fill_weights(options: dict[str, Any], T: int, V: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    filled = dict(options)
    if filled.get("class_weight") is True:
        filled["class_weight"] = on_device.rand(V, generator=generator) + 0.1
    if filled.get("token_weight") is True:
        filled["token_weight"] = on_device.randn(T, generator=generator)
    return filled


DEFAULTS: dict[str, Any] = {
    "ignore_index": IGNORED,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "temperature": 1.0,
    "class_weight": None,
    "token_weight": None,
    "num_items_in_batch": None,
}


def fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    backend: Any = "auto",
    memory_budget: int | None = None,
    outputs: tuple[str, ...] = (),
    **options: Any,
) -> liger_dist.LossOutput:
    """The op with its execution spelled out, which the public function leaves at its defaults."""
    loss = LossSpec(**(DEFAULTS | options), outputs=outputs)
    execution = Execution(backend=backend, memory_budget=memory_budget)
    return fused_linear_cross_entropy(hidden, weight, bias, labels, spec=loss, execution=execution)


def truth_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any) -> Any:
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    logits = leaves[0] @ leaves[1].T  # type: ignore[union-attr]
    truth = cross_entropy_truth(logits if leaves[2] is None else logits + leaves[2], labels, **options)
    return truth, [leaf for leaf in leaves if leaf is not None]


def assert_gradients(
    loss: Tensor, tensors: list[Tensor], truth: Tensor, leaves: list[Tensor], tolerance: float
) -> None:
    expected = torch.autograd.grad(truth, leaves)
    actual = torch.autograd.grad(loss, tensors)
    for name, got, want in zip(("hidden", "weight", "bias"), actual, expected, strict=False):
        assert relative_error(got, want) < tolerance, name
