"""Models that call lm_head and their loss several times in one forward: every loss and every gradient against the same
model on full logits in fp64, one gradient of the weight, and what is refused."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any, get_args

import pytest
import torch
from allocations import WeightGradients
from models import gradient_errors, make_batch
from predicting import Prediction, Way, as_truth, make_predicting
from torch import Tensor
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device

DEPTHS = {f"depth {depth}": Prediction(depth=depth) for depth in (1, 2, 3)}
WAYS = {way: Prediction(depth=2, way=way) for way in get_args(Way)}
OTHERS = {
    "unused first": Prediction(depth=2, unused="first"),
    "unused last": Prediction(depth=2, unused="last"),
    "first loss last": Prediction(depth=2, first_last=True),
    "checkpointed": Prediction(depth=2, checkpointed=True),
    "checkpointed, shifted": Prediction(depth=3, checkpointed=True, way="shifted labels"),
    "in training only": Prediction(depth=2, in_training_only=True),
}
KINDS = DEPTHS | WAYS | OTHERS
"""kinds of models"""


def wrapped(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(**options))


def compare(model: Any, reference: Any, batch: dict[str, Tensor], **further: Any) -> None:
    outputs = [one(**batch, **further) for one in (model, reference)]
    losses = [output.loss for output in outputs]
    assert relative_error(*losses) < 1e-10
    for loss in losses:
        (1.7 * loss).backward()
    errors = gradient_errors(model, reference)
    assert len(errors) == len([p for p in reference.parameters() if p.grad is not None]) > 0
    assert max(errors.values()) < 1e-9, errors
    for one in (model, reference):
        one.zero_grad()


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("rows", ["texts", "packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_further_losses_and_gradients(kind: str, rows: str, tied: bool) -> None:
    model = make_predicting(KINDS[kind], tied=tied)
    reference = as_truth(copy.deepcopy(model))
    model = wrapped(model)
    explained = liger_dist.explain(model).fused
    assert f"{KINDS[kind].depth} further loss" in explained
    batch = make_batch(0, rows=rows)
    compare(model, reference, batch)
    compare(model, reference, batch, num_items_in_batch=17)
    for one in (model, reference):
        one.eval()
    compare(model, reference, batch)


@pytest.mark.parametrize("kind", ["depth 2", "unused last"])
def test_further_losses_with_a_bias_or_parts_frozen(kind: str) -> None:
    for bias, frozen in ((True, ""), (False, "lm_head"), (False, "model."), (True, "projections")):
        model = make_predicting(KINDS[kind], bias=bias)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        reference = as_truth(copy.deepcopy(model))
        compare(wrapped(model), reference, make_batch(0))


def test_outputs_and_options_are_of_the_first_loss() -> None:
    model = make_predicting(Prediction(depth=2))
    reference = as_truth(copy.deepcopy(model))
    model = wrapped(model)
    batch = make_batch(0)
    output = model(**batch, outputs=("log_prob", "token_accuracy"), z_loss=1e-3)
    assert output.log_prob.shape == batch["labels"].shape
    shifted = batch["labels"][:, 1:]
    mean = -output.log_prob.sum() / (shifted != -100).sum()
    logits = reference(input_ids=batch["input_ids"]).logits
    lse = logits[:, :-1].logsumexp(-1)
    z_loss = 1e-3 * (lse.square() * (shifted != -100)).sum() / (shifted != -100).sum()
    expected = reference(**batch).loss + z_loss
    assert relative_error(output.loss, expected) < 1e-10
    alone = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten())
    assert relative_error(mean, alone) < 1e-10


@pytest.mark.smoke
def test_one_loss_alone_is_differentiated() -> None:
    """A loss that a backward does not reach leaves nothing in the gradient of another."""
    model = make_predicting(Prediction(depth=2))
    reference = as_truth(copy.deepcopy(model))
    model = wrapped(model)
    batch = make_batch(0)
    output, expected = model(**batch), reference(**batch)
    weight = model.lm_head.weight
    hidden_gradient = torch.autograd.grad(output.loss, model.norms[0].weight, retain_graph=True)
    (truth,) = torch.autograd.grad(expected.loss, reference.norms[0].weight, retain_graph=True)
    assert relative_error(hidden_gradient[0], truth) < 1e-9
    for _ in range(2):
        (found,) = torch.autograd.grad(output.loss, weight, retain_graph=True)
        (truth,) = torch.autograd.grad(expected.loss, reference.lm_head.weight, retain_graph=True)
        assert relative_error(found, truth) < 1e-9
    assert output.loss.requires_grad


@pytest.mark.parametrize("depth", [1, 3])
def test_one_gradient_of_the_weight(depth: int) -> None:
    """The forward makes none, and the backward one for all losses."""
    model = make_predicting(Prediction(depth=depth))
    model.model.embed_tokens.weight.requires_grad_(False)  # It has the same shape.
    model = wrapped(model)
    counts = []
    for _ in range(2):
        with WeightGradients(model.lm_head.weight) as made:
            loss = model(**make_batch(0)).loss
        counts.append(made.count)
        with WeightGradients(model.lm_head.weight) as made:
            loss.backward()
        counts.append(made.count)
        model.zero_grad()
    assert counts == [0, 1, 0, 1]


def test_nothing_of_a_call_is_kept() -> None:
    model = wrapped(make_predicting(Prediction(depth=2)))
    gc.collect()
    gc.disable()
    try:
        before = len([one for one in gc.get_objects() if isinstance(one, Tensor)])
        for backward in (True, False, True):
            loss = model(**make_batch(0)).loss
            if backward:
                loss.backward()
            del loss
            model.zero_grad(set_to_none=True)
        assert len([one for one in gc.get_objects() if isinstance(one, Tensor)]) <= before
    finally:
        gc.enable()


def test_a_changed_model_is_refused() -> None:
    model = wrapped(make_predicting(Prediction(depth=2, way="shifted labels")))
    batch = make_batch(0)
    model.prediction = Prediction(depth=2, way="every token")
    if compute_device().type == "cpu":  # On a GPU an assertion on the device ends the process.
        with pytest.raises(liger_dist.LigerDistError, match="changed its labels before its loss"):
            model(**batch)
    # Fewer calls than the probe saw, and more.
    for depth in (1, 2):
        model.prediction = Prediction(depth=depth, way="shifted labels")
        reference = as_truth(make_predicting(Prediction(depth=2)))
        reference.prediction = model.prediction
        outputs = [one(**batch) for one in (model, reference)]
        assert relative_error(*(output.loss for output in outputs)) < 1e-10
