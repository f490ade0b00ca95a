"""Soft labels of K classes for each token, against dense target probabilities on full logits in fp64."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from loss_inputs import BACKENDS, DEFAULTS, DEVICE, assert_gradients, fused, make_inputs, truth_of
from test_policy_outputs import upstream_of
from torch import Tensor
from truth import cross_entropy_truth, relative_error, weighted_sum

import liger_dist
from liger_dist.losses.cross_entropy import fused_cross_entropy
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec

T, D, V, K = 19, 10, 331, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "drop": {},
    "renormalize": {"remainder": "renormalize"},
    "spread": {"remainder": "spread"},
    "mixed": {"soft_weight": 0.7},
    "all": {
        "soft_weight": 0.3,
        "remainder": "spread",
        "temperature": True,
        "softcap": 4.0,
        "logit_scale": -1.2,
        "z_loss": 1e-2,
        "label_smoothing": 0.1,
        "token_weight": True,
        "reduction": "sum",
    },
    "each token": {"soft_weight": 0.6, "reduction": "none", "remainder": "spread"},
}
BUDGETS = {"three tiles": T * 128 * 4, "chunks of two tokens": 2 * V * 4, "one chunk": None}


def soft_labels_for(labels: Tensor, sizes: tuple[int, int] = (K, V)) -> tuple[Tensor, Tensor]:
    """Probabilities that sum to at most 1: of the label itself, of one class twice, of none at all, and of padding."""
    (k, classes), generator = sizes, torch.Generator().manual_seed(11)
    ids = on_device.randint(classes, (*labels.shape, k), generator=generator)
    probs = on_device.randn((*labels.shape, k), generator=generator).softmax(-1) * 0.9
    ids[..., 1] = labels.clamp(0, classes - 1).cpu()
    ids[..., 3] = ids[..., 2]
    ids[::3, ..., 4] = -1
    ids[::7] = -100
    return ids.to(DEVICE), probs.to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("remainder", ["drop", "spread"])
def test_the_gradient_may_take_the_memory_of_given_logits(remainder: Any, backend: Any) -> None:
    """Which are read at the named classes before; one of 32 KiB pieces of a row, and on a GPU several."""
    classes = 50257 if torch.cuda.is_available() else V
    logits = on_device.randn(T, classes, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(T, device=DEVICE).masked_fill_(torch.arange(T, device=DEVICE) % 5 == 0, -100)
    soft = soft_labels_for(labels, (K, classes))
    loss = LossSpec(**(DEFAULTS | {"soft_labels": soft, "soft_weight": 0.7, "remainder": remainder}), outputs=())
    found = []
    for overwrites in (False, True):
        leaf = logits.clone().requires_grad_()
        given = leaf * 1.0
        execution = Execution(backend=backend, overwrite_logits=overwrites)
        value = fused_cross_entropy(given, labels, spec=loss, execution=execution).loss
        (gradient,) = torch.autograd.grad(value, leaf)
        assert torch.equal(given, leaf) != overwrites
        found.append((value, gradient))
    wide = logits.double().requires_grad_()
    truth = cross_entropy_truth(wide, labels, soft_labels=soft, soft_weight=0.7, remainder=remainder).loss
    (want,) = torch.autograd.grad(truth, wide)
    for value, gradient in found:
        assert relative_error(value, truth) < 1e-5
        assert relative_error(gradient, want) < 1e-5


def given_for(labels: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    given = options | {"soft_labels": soft_labels_for(labels)}
    for name in ("temperature", "token_weight"):
        if options.get(name) is True:
            given[name] = (0.5 + on_device.rand(labels.shape, generator=generator)).to(DEVICE)
    return given


@pytest.mark.cover("values")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients(name: str, budget: str, backend: str) -> None:
    hidden, weight, bias, labels = make_inputs(T, D, V)
    options = given_for(labels, OPTIONS[name])
    result = fused(hidden, weight, bias, labels, backend=backend, memory_budget=BUDGETS[budget], **options)
    truth, leaves = truth_of(hidden, weight, bias, labels, **options)
    assert relative_error(result.loss, truth.loss) < 2e-6
    upstream = on_device.randn(truth.loss.shape, generator=torch.Generator().manual_seed(9))
    total, true_total = (result.loss * upstream).sum(), (truth.loss * upstream).sum()
    assert_gradients(total, [hidden, weight, bias], true_total, leaves, 3e-6)


@pytest.mark.nightly(backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_beside_outputs_that_carry_gradients(backend: str) -> None:
    """Classes of log_prob_at and of soft labels, some of them the same."""
    hidden, weight, bias, labels = make_inputs(T, D, V)
    options = given_for(labels, OPTIONS["all"])
    ids = options["soft_labels"][0]
    names = ("log_prob", "log_prob_at", "top_k", "entropy", "sum_sq_prob")
    options |= {"token_ids": torch.cat([ids[:, 2:4], (ids[:, :1] + 1) % V], 1), "top_k": 3}
    result = fused(
        hidden, weight, bias, labels, backend=backend, outputs=names, memory_budget=BUDGETS["three tiles"], **options
    )
    truth, leaves = truth_of(hidden, weight, bias, labels, **options)
    for name in ("loss", "log_prob_at", "entropy"):
        assert relative_error(getattr(result, name), getattr(truth, name)) < 3e-6, name
    upstream = upstream_of(truth)
    total, true_total = weighted_sum(result, names, upstream), weighted_sum(truth, names, upstream)
    assert_gradients(total, [hidden, weight, bias], true_total, leaves, 4e-6)


@pytest.mark.nightly(name=["mixed", "renormalize", "drop"], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_given_logits(name: str, backend: str) -> None:
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False)
    logits = (hidden @ weight.T).detach().requires_grad_()
    options = given_for(labels, OPTIONS[name])
    loss = LossSpec(**(DEFAULTS | options), outputs=())
    result = fused_cross_entropy(logits, labels, spec=loss, execution=Execution(backend=backend))  # type: ignore[arg-type]
    leaf = logits.detach().double().requires_grad_()
    truth = cross_entropy_truth(leaf, labels, **options)
    assert relative_error(result.loss, truth.loss) < 2e-6
    upstream = on_device.randn(truth.loss.shape, generator=torch.Generator().manual_seed(9))
    (got,) = torch.autograd.grad((result.loss * upstream).sum(), logits)
    (want,) = torch.autograd.grad((truth.loss * upstream).sum(), leaf)
    assert relative_error(got, want) < 3e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
def test_16_bits(logits_dtype: Any, backend: str) -> None:
    """A teacher that agrees: the gradient is a difference of nearly equal probabilities, which 16 bits must not
    round before they are subtracted."""
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False, dtype=torch.bfloat16)
    labels = labels.clamp_min(0)
    teacher = (hidden.detach().double() @ weight.detach().double().T).softmax(-1)
    probs, ids = teacher.topk(V // 2)
    options = {"soft_labels": (ids, probs.float())}
    loss = LossSpec(**(DEFAULTS | options), outputs=())
    execution = Execution(backend=backend, logits_dtype=logits_dtype, memory_budget=5 * V * 2)  # type: ignore[arg-type]
    result = fused_linear_cross_entropy(hidden, weight, None, labels, spec=loss, execution=execution)
    truth, leaves = truth_of(hidden, weight, None, labels, **options)
    got = torch.autograd.grad(result.loss, [hidden, weight])
    want = torch.autograd.grad(truth.loss, [leaf for leaf in leaves if leaf is not None])
    # torch's own: logits in bf16, softmax in fp32.
    own_logits = (hidden @ weight.T).float()
    own = (
        -(torch.zeros(T, V, device=DEVICE).scatter_(1, ids, probs.float()) * own_logits.log_softmax(-1)).sum(-1).mean()
    )
    reference = torch.autograd.grad(own, [hidden, weight])
    for g, w, r in zip(got, want, reference, strict=True):
        assert relative_error(g, w) < 1.5 * relative_error(r, w)


@pytest.mark.smoke
def test_class_probabilities_of_torch() -> None:
    """All classes named: torch's own cross entropy with class probabilities."""
    hidden, weight, _, _ = make_inputs(T, D, V, bias=False)
    labels = torch.zeros(T, dtype=torch.int64, device=DEVICE)
    probs = on_device.randn(T, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    ids = torch.arange(V, device=DEVICE).expand(T, V)
    for remainder in ("drop", "renormalize", "spread"):
        loss = liger_dist.linear_cross_entropy(hidden, weight, labels, soft_labels=(ids, probs), remainder=remainder)  # type: ignore[arg-type]
        assert isinstance(loss, Tensor)
        torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, probs), rtol=1e-5, atol=1e-6)


IDS, PROBS = torch.zeros(T, K, dtype=torch.int64, device="cpu"), torch.full((T, K), 0.1, device="cpu")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"soft_labels": IDS}, "soft_labels are Tensor; expected two tensors"),
        ({"soft_labels": (IDS, PROBS.tolist())}, "soft_labels are Tensor, list; expected two tensors"),
        ({"soft_labels": (IDS.float(), PROBS)}, r"ids of shape \(19, 6\) and dtype torch.float32"),
        ({"soft_labels": (IDS[:, 0], PROBS[:, 0])}, r"shape \(19, 'K'\)"),
        ({"soft_labels": (IDS[:-1], PROBS[:-1])}, r"ids of shape \(18, 6\)"),
        ({"soft_labels": (IDS, PROBS[:, :3])}, r"probabilities of shape \(19, 3\)"),
        ({"soft_labels": (IDS[:, :0], PROBS[:, :0])}, "expected K > 0 class indices"),
        ({"soft_labels": (IDS, PROBS.bfloat16())}, "probabilities of dtype torch.bfloat16; expected fp32 or fp64"),
        ({"soft_labels": (IDS, PROBS.clone().requires_grad_())}, "soft_labels require a gradient"),
        ({"soft_labels": (IDS + V, PROBS)}, f"soft_labels have an id of {V} or more"),
        ({"soft_labels": (IDS, -PROBS)}, "a probability that is negative or not finite"),
        ({"soft_labels": (IDS, PROBS * float("nan"))}, "a probability that is negative or not finite"),
        ({"soft_labels": (IDS, PROBS + 0.1)}, "sum to more than 1.001; divide them by their sum"),
        ({"soft_labels": (IDS, PROBS), "soft_weight": 1.5}, "soft_weight is 1.5; expected a number in"),
        ({"soft_labels": (IDS, PROBS), "remainder": "keep"}, "remainder is 'keep'; expected one of 'drop', 'renorm"),
        ({"soft_weight": 0.5}, "soft_weight is 0.5 and soft_labels are missing"),
        ({"remainder": "drop"}, "remainder is 'drop' and soft_labels are missing"),
        (
            {"soft_labels": (IDS, PROBS), "class_weight": torch.ones(V, device="cpu")},
            "soft_labels and class_weight were given",
        ),
    ],
)
def test_refused(given: dict[str, Any], sentence: str) -> None:
    hidden, weight, _, labels = (None if t is None else t.detach().cpu() for t in make_inputs(T, D, V, bias=False))
    assert hidden is not None
    assert weight is not None
    assert labels is not None
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        liger_dist.linear_cross_entropy(hidden, weight, labels, **given)
