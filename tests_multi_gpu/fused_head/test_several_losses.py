"""Several losses of one model before one backward, as preference losses, epochs of PPO and several objectives ask for
them: right gradients in every order of backwards, and at most one gradient of lm_head's weight held at a time."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
from models import gradient_errors, make_batch, make_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from truth import relative_error

import liger_dist

COUNT = 3
BATCHES = [make_batch(0, seed=seed) for seed in range(COUNT)]


def plainly(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def checkpointed(model: nn.Module, batch: dict[str, Tensor], *, use_reentrant: bool = False) -> Tensor:
    """The loss is inside of what is computed again in the backward, and so is an operation after it."""
    # A reentrant checkpoint needs an input with a gradient.
    anchor = torch.zeros((), device=batch["labels"].device, requires_grad=True)

    def loss(added: Tensor) -> Tensor:
        return plainly(model, batch).square() + added

    return checkpoint(loss, anchor, use_reentrant=use_reentrant)  # type: ignore[no-any-return]


def reentrant(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return checkpointed(model, batch, use_reentrant=True)


def weighted(losses: list[Tensor]) -> Tensor:
    return sum((weight * loss for weight, loss in zip((1.0, -0.5, 2.0), losses, strict=True)), on_device.zeros(()))


def together(losses: list[Tensor]) -> None:
    weighted([loss.cpu() for loss in losses]).backward()


def last_first(losses: list[Tensor]) -> None:
    for loss, weight in reversed(list(zip(losses, (1.0, -0.5, 2.0), strict=True))):
        (weight * loss).backward()


def first_first(losses: list[Tensor]) -> None:
    for loss, weight in zip(losses, (1.0, -0.5, 2.0), strict=True):
        (weight * loss).backward()


@pytest.mark.parametrize("ask", [plainly, checkpointed, reentrant])
@pytest.mark.parametrize("backward", [together, last_first, first_first])
def test_gradients_in_every_order(
    backward: Callable[[list[Tensor]], None], ask: Callable[[nn.Module, dict[str, Tensor]], Tensor]
) -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    for _ in range(2):  # a second step begins as the first did
        losses, expected = ([ask(one, batch) for batch in BATCHES] for one in (model, reference))
        for loss, truth in zip(losses, expected, strict=True):
            assert relative_error(loss, truth) < 1e-6
        backward(losses)
        backward(expected)
        assert max(gradient_errors(model, reference).values()) < 1e-6


@pytest.mark.parametrize("dropped", range(COUNT))
def test_a_loss_without_its_backward(dropped: int) -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    for one in (model, reference):
        losses = [plainly(one, batch) for batch in BATCHES]
        del losses[dropped]
        gc.collect()
        sum(losses, torch.zeros((), device=losses[0].device)).backward()
    assert max(gradient_errors(model, reference).values()) < 1e-6


def held_gradients(model: nn.Module, ask: Callable[[], Any]) -> tuple[int, Any]:
    """How many tensors as large as lm_head's weight ``ask`` saves for a backward beside that weight; its result."""
    weight: Tensor = model.lm_head.weight  # type: ignore[assignment,union-attr]
    held: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        if tensor.numel() >= weight.numel() and tensor.data_ptr() != weight.data_ptr():
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = ask()
    return len(held), result


@pytest.mark.smoke
def test_one_gradient_of_the_weight_is_held() -> None:
    """A batch has fewer logits than the weight has elements, and no other tensor of the model is as large."""
    model = liger_dist.wrap(make_model("llama"))
    counts, losses = [], []
    for batch in BATCHES:
        count, loss = held_gradients(model, lambda given=batch: plainly(model, given))
        counts.append(count)
        losses.append(loss)
    assert counts == [1, 0, 0]
    together(losses)
    # The next step's first loss holds again; outputs with gradients never do.
    assert held_gradients(model, lambda: plainly(model, BATCHES[0]))[0] == 1
    asked = {"outputs": ("log_prob",), "differentiable": True}
    for _ in range(2):
        assert held_gradients(model, lambda: model(**BATCHES[0], **asked).log_prob)[0] == 0
