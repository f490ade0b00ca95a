"""Every family with experts, on several ranks by FSDP2's ``expert_parallel``: losses and gradients equal those of the
full model in fp64, or the experts are refused because their own code runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from families import Family, batch_for, build, families
from harness import Workers
from models import full

import liger_dist
from liger_dist.fused_layers.experts import EXPERTS

TOLERANCE = 1e-4
SOME = ("deepseek_v4", "gpt_oss", "lfm2_moe", "qwen3_next")
"""buffers that name experts, biases, a tied lm_head and convolutions, a delta net"""
REQUIRED_SHARE = 0.85
"""of all families; the others fail unwrapped in fp64, or have one expert when they are shrunk"""
FEW = 40
"""families that workers compare within their limit of time"""


@pytest.mark.nightly
@pytest.mark.parametrize("names", [SOME, pytest.param((), marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
def test_families_on_two_ranks(names: tuple[str, ...], workers_2: Workers) -> None:
    chosen = [family for family in families() if not names or (family.mapping == "causal" and family.name in names)]
    failed, count = [], 0
    for few in batched(chosen, FEW):
        for outcomes in workers_2.run(outcomes_of, few):
            count += len(outcomes)
            failed += [f"{family}: {errors}" for family, errors in outcomes.items() if isinstance(errors, str)]
            for family, errors in outcomes.items():
                for name, error in errors.items() if isinstance(errors, dict) else ():
                    assert error < TOLERANCE, f"{family}: {name} is off by {error:.2e}"
    print(f"{count} compared, of which not: {failed}")
    assert len(failed) <= (0 if names else (1 - REQUIRED_SHARE) * count), failed
    assert count >= 2 * len(SOME)


def batched(chosen: list[Family], size: int) -> Iterator[list[Family]]:
    for start in range(0, len(chosen), size):
        yield chosen[start : start + size]


def outcomes_of(chosen: list[Family]) -> dict[str, dict[str, float] | str]:
    """Errors by name for each family with experts; what transformers says where its own code fails."""
    found: dict[str, dict[str, float] | str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in chosen:
            try:
                model: Any = build(family).train().float()
            except Exception:  # As in test_families.py: the generic shrinking does not build it.
                continue
            if any(map(EXPERTS.is_candidate, model.modules())):
                found[str(family)] = _errors_of(family, model)
    return found


def _errors_of(family: Family, model: Any) -> dict[str, float] | str:
    batches = [_batch_of(family, model, rank) for rank in range(2)]
    truth = copy.deepcopy(model).double()
    try:
        losses = [truth(**batch).loss for batch in batches]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if losses[0] is None:
        return "its forward returns no loss"
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    alone = liger_dist.wrap(copy.deepcopy(model), "ddp")
    try:
        wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(expert_parallel=2))
    except (liger_dist.LigerDistError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    mine, whole = liger_dist.explain(wrapped), liger_dist.explain(alone)
    assert (mine.attention, mine.packing) == (whole.attention, whole.packing), family
    assert mine.fused == whole.fused, f"{family}: {mine.fused}"
    loss = wrapped(**batches[dist.get_rank()]).loss
    loss.backward()
    errors = {"loss": abs(float(loss.detach()) / float(losses[dist.get_rank()].detach()) - 1)}
    total = float(torch.stack([p.grad.norm() for p in truth.parameters() if p.grad is not None]).norm())
    found = dict(wrapped.named_parameters())
    for name, parameter in truth.named_parameters():
        gradient = found[name].grad
        if gradient is None or parameter.grad is None:
            assert gradient is None or not full(gradient).any(), f"{family}: {name} has a gradient"
            assert parameter.grad is None or not parameter.grad.any(), f"{family}: {name} has no gradient"
            continue
        scale = float(parameter.grad.norm()) + 1e-3 * total
        errors[name] = float((full(gradient) - parameter.grad).norm()) / scale
    return errors


def _batch_of(family: Family, model: Any, rank: int) -> dict[str, Any]:
    """Other tokens for each rank; the ids of images stay."""
    batch = batch_for(family, model)
    ids = batch["input_ids"]
    tokens = on_device.randint(3, 80, ids.shape, generator=torch.Generator().manual_seed(1 + rank))
    batch["input_ids"] = ids.where(ids >= 80, tokens)
    batch["labels"] = batch["labels"].where(batch["labels"] == -100, batch["input_ids"])
    return batch
