"""Gradients of micro-batches that are not reduced yet: what comes between them and the last one loses none of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from full_tensors import full_gradients
from harness import Workers
from models import make_batch, make_model, relative_errors, true_loss_sum
from test_passes import FSDP1_OPTIONS, FSDP2_OPTIONS, shard
from torch import Tensor

import liger_dist

TOLERANCE = 1e-9
BEFORE_WRAP = "sharded before wrap"
OF_FSDP2 = (*(name for name in FSDP2_OPTIONS if "frozen" not in name), BEFORE_WRAP)
OF_FSDP1 = tuple(name for name in FSDP1_OPTIONS if "frozen" not in name)


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
        assert max(errors.values()) < TOLERANCE, errors


def gradients_around_verify(strategy: str, accumulate: Callable[[Any], None]) -> tuple[str, dict[str, float]]:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    root = shard(model, strategy)
    accumulate(root)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.verify(root, batch(1))
    (root(**batch(2)).loss / 2).backward()
    return str(caught.value), relative_errors(full_gradients(root), true_gradients(reference, 0, 2))
