"""Outputs of a model that torch's pytrees do not know, so that no tensor is found in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from full_tensors import full_gradients
from harness import Workers
from models import make_batch, make_model, relative_errors, true_loss_sum
from test_passes import BY_CALLER, FSDP1_OPTIONS, FSDP2_OPTIONS, shard
from torch import Tensor

REPLICATED = "frozen replicated"
STRATEGIES = [name for name in (*FSDP1_OPTIONS, *FSDP2_OPTIONS) if not name.endswith(REPLICATED)]


class Slots:
    """Without a ``__dict__``."""

    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def in_slots(output: Any) -> Any:
    return Slots(output.loss)


def in_namespace(output: Any) -> Any:
    return SimpleNamespace(loss=output.loss)


def beside_a_detached_tensor(output: Any) -> Any:
    return {"metric": output.loss.detach(), "answer": SimpleNamespace(loss=output.loss)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wraps", [in_slots, in_namespace, beside_a_detached_tensor])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *BY_CALLER])
def test_the_memory_of_a_graph_is_kept(
    strategy: str, wraps: Callable[[Any], Any], tied: bool, workers_2: Workers
) -> None:
    for errors in workers_2.run(gradient_errors, strategy, wraps, tied):
        if strategy in FSDP1_OPTIONS:
            # FSDP1 hooks tensors of the root's output to begin its backward.
            assert errors == "expected to be in states [<TrainingState.FORWARD_BACKWARD: 2>]"
        else:
            assert max(errors.values()) < 1e-9, errors


def gradient_errors(strategy: str, wraps: Callable[[Any], Any], tied: bool) -> Any:
    model: Any = make_model("llama", tied=tied)
    reference = copy.deepcopy(model)
    model.register_forward_hook(lambda module, args, output: wraps(output))
    root = shard(model, strategy)
    output = root(**make_batch(dist.get_rank()))
    output = output.get("answer") if isinstance(output, dict) else output
    try:
        output.loss.backward()
    except ValueError as error:
        return str(error).partition(" but ")[0]
    for rank in range(2):
        total, count = true_loss_sum(reference, make_batch(rank))
        (total / count / 2).backward()
    return relative_errors(full_gradients(root), {name: p.grad for name, p in reference.named_parameters()})
