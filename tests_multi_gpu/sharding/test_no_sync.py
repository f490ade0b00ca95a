"""Gradients of micro-batches that are not reduced yet: what comes between them and the last one loses none of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients
from harness import Workers
from models import make_batch, make_model, relative_errors, true_loss_sum
from test_passes import BY_CALLER, FSDP1_OPTIONS, FSDP2_OPTIONS, no_grad, shard
from torch import Tensor

import liger_dist

IN_FP32 = "fsdp2, reduced in fp32"
OF_FSDP2 = (*(name for name in FSDP2_OPTIONS if "frozen" not in name), *BY_CALLER, IN_FP32)
OF_FSDP1 = tuple(name for name in FSDP1_OPTIONS if "frozen" not in name)


def tolerance(strategy: str) -> float:
    return 1e-5 if strategy == IN_FP32 else 1e-9


def sharded(strategy: str) -> tuple[Any, Any]:
    """A wrapped model of fp64, and the same one not wrapped."""
    model = make_model("llama")
    reference = copy.deepcopy(model)
    return liger_dist.wrap(model, "fsdp2") if strategy == IN_FP32 else shard(model, strategy), reference


def batch(seed: int) -> dict[str, Tensor]:
    return make_batch(dist.get_rank(), seed=seed)


@contextmanager
def without_sync(root: Any) -> Iterator[None]:
    if hasattr(root, "no_sync"):
        with root.no_sync():
            yield
        return
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def true_gradients(reference: Any, *seeds: int) -> dict[str, Any]:
    """Of the mean loss of micro-batches, over all ranks."""
    for seed in seeds:
        for rank in range(dist.get_world_size()):
            total, count = true_loss_sum(reference, make_batch(rank, seed=seed))
            (total / count / dist.get_world_size() / len(seeds)).backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters()}


# --- verify ----------------------------------------------------------------------------------------------------------


def once(root: Any) -> None:
    """One micro-batch."""
    with without_sync(root):
        (root(**batch(0)).loss / 2).backward()


def without_all_reduce(root: Any) -> None:
    """Reduces over the shards alone, not over the replicas."""
    root.set_requires_all_reduce(False)
    (root(**batch(0)).loss / 2).backward()
    root.set_requires_all_reduce(True)


CASES = [(strategy, once) for strategy in ("ddp", *OF_FSDP1, *OF_FSDP2)]
CASES += [(strategy, without_all_reduce) for strategy in OF_FSDP2 if strategy.endswith("replicas")]


@pytest.mark.parametrize(("strategy", "accumulate"), CASES)
def test_verify_leaves_gradients_of_earlier_micro_batches(
    strategy: str, accumulate: Callable[[Any], None], workers_2: Workers
) -> None:
    """Where gradients are reduced in the dtype of the parameters, too."""
    for sentence, errors in workers_2.run(gradients_around_verify, strategy, accumulate):
        assert "verify cannot run" in sentence
        assert max(errors.values()) < tolerance(strategy), errors


def gradients_around_verify(strategy: str, accumulate: Callable[[Any], None]) -> tuple[str, dict[str, float]]:
    root, reference = sharded(strategy)
    accumulate(root)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.verify(root, batch(1))
    (root(**batch(2)).loss / 2).backward()
    return str(caught.value), relative_errors(full_gradients(root), true_gradients(reference, 0, 2))


# --- a backward that raises ------------------------------------------------------------------------------------------


def fail(*_: Any) -> None:
    raise InterruptedError


def run_failing(root: Any, *, in_layer: bool) -> None:
    """A micro-batch whose backward raises: at its beginning, or in a layer, after lm_head has got a gradient."""
    layer = root.get_decoder().layers[1].register_full_backward_hook(fail) if in_layer else None
    loss = root(**batch(5)).loss
    hooked = loss.register_hook(fail) if layer is None else layer
    with pytest.raises(InterruptedError):
        loss.backward()
    hooked.remove()


@pytest.mark.parametrize("passed", [None, "no_grad", "verified"])
@pytest.mark.parametrize("strategy", OF_FSDP2)
def test_a_backward_that_raises_at_once_leaves_earlier_micro_batches(
    strategy: str, passed: str | None, workers_2: Workers
) -> None:
    for errors in workers_2.run(gradients_around_a_failure, strategy, passed):
        assert max(errors.values()) < tolerance(strategy), errors


def gradients_around_a_failure(strategy: str, passed: str | None) -> dict[str, float]:
    root, reference = sharded(strategy)
    once(root)
    with without_sync(root):
        run_failing(root, in_layer=False)
    if passed == "no_grad":
        no_grad(root)
    if passed == "verified":
        with pytest.raises(liger_dist.LigerDistError, match="verify cannot run"):
            liger_dist.verify(root, batch(1))
    (root(**batch(2)).loss / 2).backward()
    return relative_errors(full_gradients(root), true_gradients(reference, 0, 2))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("strategy", OF_FSDP2)
def test_a_backward_that_raises_after_it_added_to_earlier_micro_batches_is_refused_once(
    strategy: str, is_last: bool, workers_2: Workers
) -> None:
    """The last micro-batch of a step reduces gradients."""
    for errors in workers_2.run(gradients_of_a_step_begun_anew, strategy, is_last):
        assert max(errors.values()) < tolerance(strategy), errors


def gradients_of_a_step_begun_anew(strategy: str, is_last: bool) -> dict[str, float]:
    root, reference = sharded(strategy)
    once(root)
    with nullcontext() if is_last else without_sync(root):
        run_failing(root, in_layer=True)
    with pytest.raises(liger_dist.LigerDistError, match="a backward has raised, and its gradients cannot be told"):
        root(**batch(2))
    root.zero_grad()
    once(root)
    (root(**batch(2)).loss / 2).backward()
    return relative_errors(full_gradients(root), true_gradients(reference, 0, 2))


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize("strategy", OF_FSDP2)
def test_a_backward_that_raises_without_earlier_micro_batches_leaves_nothing(
    strategy: str, verifies: bool, reduces: bool, workers_2: Workers
) -> None:
    for errors in workers_2.run(gradients_after_a_failure, strategy, verifies, reduces):
        assert max(errors.values()) < tolerance(strategy), errors


def gradients_after_a_failure(strategy: str, verifies: bool, reduces: bool) -> dict[str, float]:
    root, reference = sharded(strategy)
    with nullcontext() if reduces else without_sync(root):
        run_failing(root, in_layer=True)
    root.zero_grad()
    if verifies:
        assert liger_dist.verify(root, batch(1)).ok
    root(**batch(2)).loss.backward()
    return relative_errors(full_gradients(root), true_gradients(reference, 2))


def test_a_backward_that_raises_beside_one_that_waited_is_refused(workers_2: Workers) -> None:
    """Two forwards, then their backwards: the sum of the first came after the second forward."""
    workers_2.run(fail_beside_another)


def fail_beside_another() -> None:
    root, _ = sharded("fsdp2")
    with without_sync(root):
        first, second = root(**batch(0)).loss, root(**batch(1)).loss
        first.backward()
        second.register_hook(fail)
        with pytest.raises(InterruptedError):
            second.backward()
        with pytest.raises(liger_dist.LigerDistError, match="a backward has raised"):
            root(**batch(2))
        assert root(**batch(2)).loss > 0


# --- freezing between micro-batches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", OF_FSDP2)
def test_what_is_frozen_between_micro_batches_loses_no_gradient(strategy: str, workers_2: Workers) -> None:
    """Or is refused before the step: replicas sum gradients of a vocab-parallel lm_head in its backward."""
    for sentence, errors in workers_2.run(gradients_of_a_frozen_head, strategy):
        assert max(errors.values()) < tolerance(strategy), errors
        assert ("that no backward has summed over the replicas" in sentence) == (
            strategy == "vocab-parallel, replicas"
        ), sentence


def gradients_of_a_frozen_head(strategy: str) -> tuple[str, dict[str, float]]:
    """What refuses the step, and errors of the gradients of this step, or of the next one."""
    root, reference = sharded(strategy)
    sentence = ""
    once(root)
    root.lm_head.requires_grad_(False)
    (root(**batch(2)).loss / 2).backward()
    root.lm_head.requires_grad_(True)
    gradients = full_gradients(root)
    true_gradients(reference, 0)
    of_head = reference.lm_head.weight.grad / 2
    reference.zero_grad()
    truth = true_gradients(reference, 0, 2) | {"lm_head.weight": of_head}
    try:
        torch.optim.SGD(root.parameters(), lr=0.1, foreach=False).step()
    except liger_dist.LigerDistError as error:
        sentence = str(error)
        root.zero_grad()
        reference.zero_grad()
        root(**batch(3)).loss.backward()
        gradients, truth = full_gradients(root), true_gradients(reference, 3)
    return sentence, relative_errors(gradients, truth)
