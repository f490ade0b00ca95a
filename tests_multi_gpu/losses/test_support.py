"""Log-probabilities, entropies and squared probabilities over the classes that a sampler kept, against full logits in
fp64 that are masked by hand."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
from loss_inputs import BACKENDS, DEVICE, IGNORED, assert_gradients, fused, make_inputs, truth_of
from torch import Tensor
from truth import cross_entropy_truth, relative_error, weighted_sum

import liger_dist

T, D, V = 19, 10, 331
NAMES = ("log_prob", "log_prob_at", "entropy", "sum_sq_prob")
OTHERS = ("is_top1", "log_sum_exp", "mean_logit")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperatures": {"temperature": True},
    "all": {"temperature": True, "softcap": 4.0, "logit_scale": -1.2, "z_loss": 1e-2, "label_smoothing": 0.1},
}


def supports(labels: Tensor, size: int) -> Tensor:
    """Different classes with the label among them, in any order; of every fifth token none, of others fewer."""
    generator = torch.Generator().manual_seed(3)
    ids = on_device.rand((*labels.shape, V), generator=generator).argsort(-1)[..., : size - 1]
    ids = torch.cat([ids.where(ids != labels[..., None], -1), labels[..., None].where(labels[..., None] >= 0, -1)], -1)
    ids = ids.gather(-1, on_device.rand(ids.shape, generator=generator).argsort(-1))
    ids[1::3] = ids[1::3].where(ids[1::3] == labels[1::3, None], -1)
    ids[::5] = -1
    return ids


def filled(labels: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    if options.get("temperature") is not True:
        return options
    generator = torch.Generator().manual_seed(5)
    return options | {"temperature": 0.5 + on_device.rand(labels.shape, generator=generator)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 40])
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_their_gradients(name: str, size: int, backend: str) -> None:
    hidden, weight, bias, labels = make_inputs(T, D, V)
    given = filled(labels, OPTIONS[name]) | {"support_ids": supports(labels, size)}
    result = fused(
        hidden, weight, bias, labels, backend=backend, memory_budget=5 * 128 * 4, outputs=(*NAMES, *OTHERS), **given
    )
    truth, leaves = truth_of(hidden, weight, bias, labels, **given)
    for output in (*NAMES, *OTHERS, "loss"):
        assert relative_error(getattr(result, output), getattr(truth, output)) < 3e-6, output
    assert bool((result.log_prob[labels == IGNORED] == 0).all())
    upstream = {one: on_device.randn(getattr(truth, one).shape).double() for one in ("loss", *NAMES)}
    total, true_total = weighted_sum(result, NAMES, upstream), weighted_sum(truth, NAMES, upstream)
    assert_gradients(total, [hidden, weight, bias], true_total, leaves, 4e-6)


def test_of_full_logits() -> None:
    *_, labels = make_inputs(T, D, V)
    logits = on_device.randn(T, V).requires_grad_()
    ids = supports(labels, 9)
    result = liger_dist.cross_entropy(logits, labels, outputs=("log_prob", "entropy"), support_ids=ids)
    assert isinstance(result, liger_dist.LossOutput)
    leaf = logits.detach().double().requires_grad_()
    truth = cross_entropy_truth(leaf, labels, support_ids=ids)
    (gradient,) = torch.autograd.grad((result.log_prob - result.entropy).sum(), logits)
    (expected,) = torch.autograd.grad((truth.log_prob - truth.entropy).sum(), leaf)
    assert relative_error(result.log_prob, truth.log_prob) < 1e-6
    assert relative_error(gradient, expected) < 1e-5


def test_classes_that_cannot_be() -> None:
    """A support with a class whose logit is -inf, and one of such classes alone."""
    *_, labels = make_inputs(T, D, V)
    logits, ids = on_device.randn(T, V), supports(labels, 9)
    ids[2], ids[3] = -1, -1
    ids[2, 0], ids[3, :2] = labels[2].clamp_min(0), on_device.tensor([7, 8])
    labels[3] = IGNORED
    out = ids.where((ids != labels[:, None]) & (ids >= 0), 0)[:, :1]
    logits = logits.scatter(1, out, -torch.inf)
    logits[3, 7:9] = -torch.inf
    logits.requires_grad_()
    result = liger_dist.cross_entropy(logits, labels, outputs=("entropy", "log_prob", "sum_sq_prob"), support_ids=ids)
    assert isinstance(result, liger_dist.LossOutput)
    (gradient,) = torch.autograd.grad((result.entropy + result.log_prob + result.sum_sq_prob).sum(), logits)
    assert bool(gradient.isfinite().all())
    # The truth: without those classes.
    kept = ids.masked_fill((ids == out) & (ids != labels[:, None]), -1)
    truth = cross_entropy_truth(logits.detach().double().nan_to_num(neginf=-1e4), labels, support_ids=kept)
    has_support = (kept >= 0).any(-1)
    for name in ("entropy", "log_prob", "sum_sq_prob"):
        values, expected = getattr(result, name), getattr(truth, name)
        assert relative_error(values[has_support], expected[has_support]) < 1e-6, name


def test_one_class_is_certain_and_a_recorded_pass_is_repeated_to_the_bit() -> None:
    hidden, weight, _, labels = make_inputs(T, D, V, dtype=torch.bfloat16)
    alone = labels[:, None].clamp_min(-1)
    options: dict[str, Any] = {"outputs": ("log_prob",), "support_ids": alone}
    certain = liger_dist.linear_cross_entropy(hidden, weight, labels, **options)
    assert isinstance(certain, liger_dist.LossOutput)
    assert bool((certain.log_prob == 0).all())
    options["support_ids"] = supports(labels, 30)
    with torch.no_grad():
        recorded = liger_dist.linear_cross_entropy(hidden, weight, labels, **options)
    replayed = liger_dist.linear_cross_entropy(hidden, weight, labels, **options)
    assert isinstance(recorded, liger_dist.LossOutput)
    assert isinstance(replayed, liger_dist.LossOutput)
    assert torch.equal(recorded.log_prob, replayed.log_prob)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "label outside": ({"support_ids": on_device.tensor([[1, 2], [3, 4]])}, "a label is not among its support_ids"),
    "other ids as well": (
        {"support_ids": on_device.tensor([[0], [1]]), "token_ids": on_device.tensor([[0], [1]])},
        "token_ids and support_ids were given; expected one of them",
    ),
    "nothing reads them": (
        {"support_ids": on_device.tensor([[0], [1]]), "outputs": ("is_top1",)},
        "so nothing reads them; add one of log_prob, log_prob_at, entropy, sum_sq_prob",
    ),
    "a class twice": ({"support_ids": on_device.tensor([[0, 3, 3], [1, -1, -1]])}, "has a class twice for one token"),
    "a shape": ({"support_ids": on_device.tensor([0, 1])}, "token_ids have shape"),
    "a class": ({"support_ids": on_device.tensor([[0, 99], [1, 2]])}, "an id of 8 or more"),
    "a list": ({"support_ids": [[0], [1]]}, "support_ids is of type list"),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="ids on a GPU are checked by device-side assertions")
@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    options, sentence = REFUSED[reason]
    hidden, weight, labels = on_device.randn(2, 4), on_device.randn(8, 4), on_device.tensor([0, 1])
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        liger_dist.linear_cross_entropy(hidden, weight, labels, **({"outputs": ("log_prob",)} | options))


def test_compressed_rows() -> None:
    offsets, ids = on_device.tensor([0, 2, 2, 5, 6], dtype=torch.int32), on_device.tensor([7, 3, 1, 9, 4, 2])
    padded = liger_dist.pad_support(offsets, ids, (2, 2))
    assert padded.tolist() == [[[7, 3, -1], [-1, -1, -1]], [[1, 9, 4], [2, -1, -1]]]
    assert liger_dist.pad_support(on_device.tensor([0, 0]), ids[:0], (1,)).tolist() == [[-1]]
    with pytest.raises(liger_dist.LigerDistError, match=r"expected \(5,\), one more than the tokens of \(2, 2\)"):
        liger_dist.pad_support(offsets[1:], ids, (2, 2))
    with pytest.raises(liger_dist.LigerDistError, match="expected ascending ones from 0 to 6"):
        liger_dist.pad_support(offsets.flip(0), ids, (2, 2))
