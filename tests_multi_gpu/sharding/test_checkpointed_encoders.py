"""Encoders that run more than once before a backward, with and without activation checkpointing: exact or refused."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collectives import recorded_collectives
from full_tensors import full_gradients, full_parameters
from harness import Workers
from models import assert_below, relative_errors
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from vision_models import add_unused_parameter, make_batch, make_model, true_loss

import liger_dist
from liger_dist.model.peft import without_fsdp1
from liger_dist.sharding.base import Strategy

TIME_LIMIT = 40.0
LEARNING_RATE = 0.1

Inputs = tuple[str, ...]
"""encoder inputs of one forward: "image", "video", both or none"""
NONE: Inputs = ()
IMAGE: Inputs = ("image",)
BOTH: Inputs = ("image", "video")


EVERY_SECOND = "reentrant on every second layer"
AROUND, AROUND_NOT_REENTRANT = "reentrant around FSDP's units", "not reentrant around FSDP's units"
TRAINED = ("visual", "blocks.1", "merger", "language_model", "lm_head", "patch_embed")
"""parts of the names of the parameters that require gradients"""


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str = "qwen2_5_vl"
    strategy: str = "fsdp2"
    ranks: tuple[tuple[Inputs, ...], ...]
    """for each rank the inputs of its forwards before the one backward"""
    checkpointing: str = "reentrant"
    """"none", "reentrant" or "not reentrant" by transformers, or one of the constants above"""
    trains: str = ""

    @property
    def is_reentrant(self) -> bool:
        return self.checkpointing.startswith("reentrant")

    def __str__(self) -> str:
        ranks = " beside ".join(", ".join("+".join(inputs) or "text" for inputs in rank) for rank in self.ranks)
        trains = [f"trains {self.trains}"] if self.trains else []
        return ", ".join([self.family, self.strategy, ranks, self.checkpointing, *trains])


ONE_PASS: list[tuple[tuple[Inputs, ...], ...]] = [((IMAGE,), (NONE,)), ((NONE,), (IMAGE,))]
SEVERAL: list[tuple[tuple[Inputs, ...], ...]] = [
    ((BOTH,), (NONE,)),
    ((NONE,), (BOTH,)),
    ((BOTH,), (BOTH,)),
    ((IMAGE, IMAGE), (NONE, NONE)),
    ((NONE, NONE), (IMAGE, IMAGE)),
    ((IMAGE, NONE), (NONE, IMAGE)),
    ((IMAGE, NONE), (NONE, NONE)),
    ((NONE, IMAGE), (NONE, NONE)),
    ((IMAGE, IMAGE), (IMAGE, NONE)),
    ((IMAGE, IMAGE), (IMAGE, IMAGE)),
    ((BOTH, IMAGE), (NONE, NONE)),
]
UNLIKE: tuple[tuple[Inputs, ...], ...] = ((BOTH,), (IMAGE,))
FAMILIES, STRATEGIES = ("qwen2_5_vl", "qwen3_vl"), ("fsdp1", "fsdp2")
QUICK = [
    *(Case(ranks=ranks, strategy=s) for s in STRATEGIES for ranks in (*ONE_PASS[::2], *SEVERAL[::2])),
    *(Case(ranks=UNLIKE, strategy=s) for s in STRATEGIES),
    *(
        Case(ranks=ranks, strategy=s, checkpointing=checkpointing)
        for s in STRATEGIES
        for ranks in SEVERAL[:1]
        for checkpointing in ("none", "not reentrant", EVERY_SECOND, AROUND)
    ),
    *(Case(family="qwen3_vl", ranks=ranks) for ranks in (SEVERAL[0], SEVERAL[3])),
]
ALL = [
    *(
        Case(family=family, strategy=s, ranks=ranks, checkpointing=checkpointing)
        for family in FAMILIES
        for s in STRATEGIES
        for ranks in (*ONE_PASS, *SEVERAL, UNLIKE)
        for checkpointing in ("none", "not reentrant", "reentrant")
    ),
    *(Case(strategy=s, ranks=SEVERAL[0], trains=trains) for s in STRATEGIES for trains in TRAINED),
    *(Case(strategy="fsdp2, vocab-parallel", ranks=ranks) for ranks in SEVERAL),
    *(Case(strategy="fsdp2, not resharded", ranks=ranks) for ranks in SEVERAL),
    *(Case(ranks=ranks, checkpointing=AROUND_NOT_REENTRANT, strategy=s) for s in STRATEGIES for ranks in SEVERAL),
]
REST = [case for case in dict.fromkeys(ALL) if case not in QUICK]


def expected_refusal(case: Case) -> str:
    """Words of the refusal; empty for a case that is exact."""
    if case.ranks == UNLIKE:
        return "ranks were called with different encoder inputs"
    if case.checkpointing == AROUND:
        return "around the hooks of FSDP's units"
    if case.strategy != "fsdp1" or not case.is_reentrant or case.ranks in ONE_PASS:
        return ""
    if any(BOTH in forwards[:1] for forwards in case.ranks):
        return "has several inputs for one encoder"
    return "calls the model again before the backward of its last call"


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.nightly) for case in REST)], ids=str)
def test_encoders_that_run_several_times_before_a_backward(case: Case, workers_2: Workers) -> None:
    if case.checkpointing == EVERY_SECOND and not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers checkpoints all layers or none")
    results = workers_2.run(train_with_encoders, case, time_limit=TIME_LIMIT)
    for rank, (refusal, errors, collectives) in enumerate(results):
        assert expected_refusal(case) in refusal
        assert bool(refusal) == bool(expected_refusal(case))
        assert (refusal, collectives) == (results[0][0], results[0][2])
        if not refusal:
            assert_below(errors, 1e-6, f"rank {rank}")


def test_layers_that_checkpoint_their_call_with_its_hooks_are_refused(workers_2: Workers) -> None:
    """As earlier releases of transformers do."""
    for refusal in workers_2.run(refusal_of_checkpointed_calls, time_limit=TIME_LIMIT):
        assert "around the hooks of FSDP's units" in refusal


def refusal_of_checkpointed_calls() -> str:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(nn.Module.__call__, self, **kwargs), *args, use_reentrant=True)

    with mock.patch.object(Qwen2_5_VLVisionBlock, "__call__", call):
        refusal, _, _ = train_with_encoders(Case(ranks=((IMAGE,), (NONE,))))
    return refusal


@pytest.mark.cover("values")
@pytest.mark.smoke
@pytest.mark.parametrize("reduces_each", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        Case(ranks=((BOTH, IMAGE), (NONE, NONE))),
        Case(ranks=((IMAGE, NONE), (NONE, BOTH))),
        Case(ranks=((IMAGE, NONE), (NONE, IMAGE)), strategy="fsdp1"),
    ],
    ids=str,
)
def test_accumulation_with_a_backward_for_each_micro_batch(case: Case, reduces_each: bool, workers_2: Workers) -> None:
    results = workers_2.run(accumulate, case, reduces_each, time_limit=TIME_LIMIT)
    for errors, collectives in results:
        assert_below(errors, 1e-6)
        assert collectives == results[0][1]


def accumulate(case: Case, reduces_each: bool) -> tuple[dict[str, float], list[tuple[str, int]]]:
    """The relative error of each gradient after micro-batches with a backward each, and the collectives."""
    rank = dist.get_rank()
    model, reference, root = built(case)
    before = full_parameters(root)
    with recorded_collectives() as collectives:
        for index, inputs in enumerate(case.ranks[rank]):
            reduces = reduces_each or index == len(case.ranks[rank]) - 1
            waiting: Any = nullcontext()
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(reduces)
            elif isinstance(root, FullyShardedDataParallel) and not reduces:
                waiting = root.no_sync()
            with waiting:
                root(**make_batch(case.family, rank, seed=index, inputs=inputs)).loss.backward()
    return errors_of_gradients(case, model, reference, root, before), collectives


@pytest.mark.smoke
def test_fsdp1_refuses_a_second_reentrant_call_only_while_the_first_waits(workers_2: Workers) -> None:
    """After the refusal the first call's backward is exact, and calls without a backward are not waited for."""
    case = Case(strategy="fsdp1", ranks=((IMAGE,), (NONE,)))
    for refusal, errors in workers_2.run(refused_in_between, case, time_limit=TIME_LIMIT):
        assert "calls the model again before the backward" in refusal
        assert max(errors.values()) < 1e-6


def refused_in_between(case: Case) -> tuple[str, dict[str, float]]:
    rank = dist.get_rank()
    model, reference, root = built(case)
    batch = make_batch(case.family, rank, seed=0, inputs=case.ranks[rank][0])
    before = full_parameters(root)
    root(**batch)
    with torch.no_grad():
        root(**batch)
    loss = root(**batch).loss
    with pytest.raises(liger_dist.LigerDistError) as refusal:
        root(**batch)
    loss.backward()
    return str(refusal.value), errors_of_gradients(case, model, reference, root, before)


def train_with_encoders(case: Case) -> tuple[str, dict[str, float], list[tuple[str, int]]]:
    """A refusal or "", the relative error of each gradient and loss, and this rank's collectives in order."""
    rank = dist.get_rank()
    model, reference, root = built(case)
    before = full_parameters(root)
    losses: list[Tensor] = []
    with recorded_collectives() as collectives:
        for index, inputs in enumerate(case.ranks[rank]):
            try:
                losses.append(root(**make_batch(case.family, rank, seed=index, inputs=inputs)).loss)
            except liger_dist.LigerDistError as refusal:
                return str(refusal), {}, collectives
        torch.stack(losses).sum().backward()
    errors = errors_of_gradients(case, model, reference, root, before)
    for index, inputs in enumerate(case.ranks[rank]):
        errors[f"loss {index}"] = abs(
            float(losses[index]) - float(true_loss(reference, make_batch(case.family, rank, seed=index, inputs=inputs)))
        )
    return "", errors, collectives


def built(case: Case) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The model that is wrapped, a copy of it, and what is called."""
    model = make_model(case.family, vision_layers=2)
    add_unused_parameter(model.model.visual.blocks[0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.trains in name)
    reference = copy.deepcopy(model)
    is_around = case.checkpointing in (AROUND, AROUND_NOT_REENTRANT)
    if case.checkpointing != "none" and not is_around:
        kwargs = {"use_reentrant": case.is_reentrant}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(kwargs, every_n_layers=2 if case.checkpointing == EVERY_SECOND else 1)
        else:
            model.gradient_checkpointing_enable(kwargs)
    strategies: dict[str, Strategy] = {
        "fsdp2, vocab-parallel": liger_dist.FSDP2(lm_head="vocab_parallel"),
        "fsdp2, not resharded": liger_dist.FSDP2(reshard_after_forward=False),
    }
    root = liger_dist.wrap(model, strategies.get(case.strategy, case.strategy))
    if is_around:
        implementation = CheckpointImpl.REENTRANT if case.is_reentrant else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            root,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
            check_fn=lambda module: (
                module is not root
                and isinstance(module, FSDPModule | FullyShardedDataParallel)
                and any(word in type(without_fsdp1(module)).__name__ for word in ("VisionBlock", "DecoderLayer"))
            ),
        )
    return model, reference, root


def errors_of_gradients(
    case: Case, model: nn.Module, reference: nn.Module, root: nn.Module, before: dict[str, Tensor]
) -> dict[str, float]:
    """The relative error of each gradient, after the backward."""
    gradients = full_gradients(model)
    if isinstance(root, FullyShardedDataParallel):
        torch.optim.SGD(root.parameters(), lr=LEARNING_RATE).step()
        after = full_parameters(root)
        gradients = {name: (before[name] - after[name]) / LEARNING_RATE for name in before}
    for rank, forwards in enumerate(case.ranks):
        for index, inputs in enumerate(forwards):
            truth = true_loss(reference, make_batch(case.family, rank, seed=index, inputs=inputs)) / len(case.ranks)
            if truth.requires_grad:
                truth.backward()
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    return {f"gradient of {name}": error for name, error in relative_errors(gradients, truths).items()}
