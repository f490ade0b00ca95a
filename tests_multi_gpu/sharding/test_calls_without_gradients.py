"""Evaluation, hidden states and generate around the training steps of a model that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import full, make_batch, make_model, true_loss_sum
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import liger_dist

LEARNING_RATE = 0.1


def by_hand(model: Any) -> None:
    """As a host shards, before it is wrapped."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    liger_dist.wrap(model, "auto")


def wrapped(**options: Any) -> Callable[[nn.Module], object]:
    return lambda model: liger_dist.wrap(model, liger_dist.FSDP2(reduce_dtype=torch.float64, **options))


LAYOUTS: dict[str, Callable[[nn.Module], object]] = {
    "gather": wrapped(),
    "vocab_parallel": wrapped(lm_head="vocab_parallel"),
    "without resharding": wrapped(reshard_after_forward=False),
    "vocab_parallel without resharding": wrapped(lm_head="vocab_parallel", reshard_after_forward=False),
    "replicas": wrapped(mesh=(2, 1)),
    "sharded before wrap": by_hand,
}


def evaluate(model: Any) -> None:
    assert model(**make_batch(dist.get_rank(), seed=7)).loss > 0


def hidden_states(model: Any) -> None:
    model.model(input_ids=make_batch(dist.get_rank(), seed=7)["input_ids"])


def generate(model: Any) -> None:
    ids = make_batch(dist.get_rank(), seed=7)["input_ids"]
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


MOMENTS = ("before the optimizer", "before backward", "before step", "after step")


@pytest.mark.cover("values")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_without_gradients_change_no_training_step(layout: str, tied: bool, workers_2: Workers) -> None:
    for errors in workers_2.run(errors_after_steps, layout, tied):
        assert max(errors.values()) < 1e-9, errors


def errors_after_steps(layout: str, tied: bool) -> dict[str, float]:
    """The largest error of a parameter after two steps, for each call."""
    cases = [(evaluate, MOMENTS)]
    if not tied and layout in ("gather", "without resharding", "replicas"):
        # FSDP2's root holds nothing of the decoder, which can be called alone after the first call of the model.
        cases.append((hidden_states, MOMENTS[1:]))
    return {f"{call.__name__} {moments}": error_after_steps(layout, tied, call, moments) for call, moments in cases}


def error_after_steps(layout: str, tied: bool, call: Callable[[Any], None], moments: tuple[str, ...]) -> float:
    model, reference = make_model("llama", tied=tied), make_model("llama", tied=tied)
    LAYOUTS[layout](model)
    is_inside = torch.no_grad()

    def at(now: str) -> None:
        if now in moments:
            with is_inside:
                call(model)

    at("before the optimizer")
    # Torch's updates of many tensors at once do not mix DTensors of two meshes.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    own = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    for step in range(2):
        loss = model(**make_batch(dist.get_rank(), seed=step)).loss
        at("before backward")
        loss.backward()
        at("before step")
        optimizer.step()
        optimizer.zero_grad()
        at("after step")
        for rank in range(2):
            total, count = true_loss_sum(reference, make_batch(rank, seed=step))
            (total / count / 2).backward()
        own.step()
        own.zero_grad()
    with is_inside:
        evaluate(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    truth = dict(reference.named_parameters())
    return max(float((full(p) - truth[name]).abs().max()) for name, p in model.named_parameters())


@pytest.mark.smoke
def test_generate_gathers_what_stays_unsharded_once(workers_2: Workers) -> None:
    """Not once for each token: lm_head and final norm stay for the tokens of a call."""
    for gathers in workers_2.run(gathers_of_lm_head):
        assert gathers == {"for generate": 1, "for two evaluations": 2, "of a frozen model": 2}


def gathers_of_lm_head() -> dict[str, int]:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    counted: list[int] = []
    own = FSDPParamGroup.unshard

    def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not group.is_unsharded and any(p._module_info.module is head for p in group.fsdp_params):
            counted.append(1)
        return own(group, *args, **kwargs)

    FSDPParamGroup.unshard = unshard  # type: ignore[method-assign]
    found = {}
    try:
        model: Any = liger_dist.wrap(make_model("llama"), "fsdp2")
        head = model.lm_head
        with torch.no_grad():
            generate(model)
            found["for generate"] = len(counted)
            counted.clear()
            evaluate(model)
            evaluate(model)
            found["for two evaluations"] = len(counted)
            counted.clear()
            model.requires_grad_(False)
            evaluate(model)
            evaluate(model)
            found["of a frozen model"] = len(counted)
    finally:
        FSDPParamGroup.unshard = own  # type: ignore[method-assign]
    return found
