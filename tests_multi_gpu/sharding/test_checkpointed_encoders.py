"""Encoders that run more than once before a backward, with and without activation checkpointing: exact or refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import HIDDEN_SIZE, full
from test_vision_language import IMAGE_TOKEN, TEXT, VIDEO_TOKEN, recorded_collectives, true_loss
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import liger_dist
from liger_dist.model.peft import without_fsdp1
from liger_dist.sharding.base import Strategy
from liger_dist.sharding.process_groups import compute_device

TIME_LIMIT = 40.0
PIXELS = 16
"""patches of an image, and of a video of one frame"""
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN_SIZE,
    "initializer_range": 0.3,
}
LEARNING_RATE = 0.1

Inputs = tuple[str, ...]
"""encoder inputs of one forward: "image", "video", both or none"""
NONE: Inputs = ()
IMAGE: Inputs = ("image",)
BOTH: Inputs = ("image", "video")


def make_model(family: str) -> Any:
    """The same weights on every rank."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen3VLConfig

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = TEXT | {"rope_parameters": rope, "max_position_embeddings": 64}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    tokens |= {"vision_start_token_id": 95, "vision_end_token_id": 96}
    if family == "qwen2_5_vl":
        vision = VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
        config: Any = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    else:
        vision = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        config = Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config)
    # A parameter without a gradient in a layer that has gradients.
    model.model.visual.blocks[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model.to(compute_device(), torch.float64)


def make_batch(rank: int, forward: int, inputs: Inputs) -> dict[str, Tensor]:
    """Two sequences of one rank, each with the encoder inputs that are named."""
    generator = torch.Generator().manual_seed(10 * forward + rank)
    ids = torch.randint(1, 90, (2, 16), generator=generator)
    batch: dict[str, Tensor] = {}
    grid = torch.tensor([[1, 4, 4]] * 2)
    pixels = [torch.randn(2 * PIXELS, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    if "image" in inputs:
        ids[:, 1], ids[:, 2:6], ids[:, 6] = 95, IMAGE_TOKEN, 96
        batch |= {"pixel_values": pixels[0], "image_grid_thw": grid}
    if "video" in inputs:
        ids[:, 7], ids[:, 8:12], ids[:, 12] = 95, VIDEO_TOKEN, 96
        batch |= {"pixel_values_videos": pixels[1], "video_grid_thw": grid}
    labels = ids.clone()
    labels[:, : 13 + rank] = -100
    batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    batch |= {"input_ids": ids, "labels": labels}
    return {name: tensor.to(compute_device()) for name, tensor in batch.items()}


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
    *(Case(ranks=ranks, strategy=s) for s in STRATEGIES for ranks in (*ONE_PASS, *SEVERAL)),
    *(Case(ranks=UNLIKE, strategy=s) for s in STRATEGIES),
    *(
        Case(ranks=ranks, strategy=s, checkpointing=checkpointing)
        for s in STRATEGIES
        for ranks in (SEVERAL[0], SEVERAL[3])
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


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)], ids=str)
def test_encoders_that_run_several_times_before_a_backward(case: Case, workers_2: Workers) -> None:
    if case.checkpointing == EVERY_SECOND and not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers checkpoints all layers or none")
    results = workers_2.run(train, case, time_limit=TIME_LIMIT)
    for rank, (refusal, errors, collectives) in enumerate(results):
        assert expected_refusal(case) in refusal
        assert bool(refusal) == bool(expected_refusal(case))
        assert (refusal, collectives) == (results[0][0], results[0][2])
        if not refusal:
            worst = max(errors, key=lambda name: errors[name])
            assert errors[worst] < 1e-6, f"rank {rank}: {worst} is off by {errors[worst]:.2e}"


def test_layers_that_checkpoint_their_call_with_its_hooks_are_refused(workers_2: Workers) -> None:
    """As earlier releases of transformers do."""
    for refusal in workers_2.run(refusal_of_checkpointed_calls, time_limit=TIME_LIMIT):
        assert "around the hooks of FSDP's units" in refusal


def refusal_of_checkpointed_calls() -> str:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(nn.Module.__call__, self, **kwargs), *args, use_reentrant=True)

    with mock.patch.object(Qwen2_5_VLVisionBlock, "__call__", call):
        refusal, _, _ = train(Case(ranks=((IMAGE,), (NONE,))))
    return refusal


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
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < 1e-6, f"{worst} is off by {errors[worst]:.2e}"
        assert collectives == results[0][1]


def accumulate(case: Case, reduces_each: bool) -> tuple[dict[str, float], list[tuple[str, int]]]:
    """The relative error of each gradient after micro-batches with a backward each, and the collectives."""
    rank = dist.get_rank()
    model, reference, root = built(case)
    before = parameters_of(root)
    with recorded_collectives() as collectives:
        for index, inputs in enumerate(case.ranks[rank]):
            reduces = reduces_each or index == len(case.ranks[rank]) - 1
            waiting: Any = nullcontext()
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(reduces)
            elif isinstance(root, FullyShardedDataParallel) and not reduces:
                waiting = root.no_sync()
            with waiting:
                root(**make_batch(rank, index, inputs)).loss.backward()
    return errors_of(case, model, reference, root, before), collectives


def test_fsdp1_refuses_a_second_reentrant_call_only_while_the_first_waits(workers_2: Workers) -> None:
    """After the refusal the first call's backward is exact, and calls without a backward are not waited for."""
    case = Case(strategy="fsdp1", ranks=((IMAGE,), (NONE,)))
    for refusal, errors in workers_2.run(refused_in_between, case, time_limit=TIME_LIMIT):
        assert "calls the model again before the backward" in refusal
        assert max(errors.values()) < 1e-6


def refused_in_between(case: Case) -> tuple[str, dict[str, float]]:
    rank = dist.get_rank()
    model, reference, root = built(case)
    batch = make_batch(rank, 0, case.ranks[rank][0])
    before = parameters_of(root)
    root(**batch)
    with torch.no_grad():
        root(**batch)
    loss = root(**batch).loss
    with pytest.raises(liger_dist.LigerDistError) as refusal:
        root(**batch)
    loss.backward()
    return str(refusal.value), errors_of(case, model, reference, root, before)


def train(case: Case) -> tuple[str, dict[str, float], list[tuple[str, int]]]:
    """A refusal or "", the relative error of each gradient and loss, and this rank's collectives in order."""
    rank = dist.get_rank()
    model, reference, root = built(case)
    before = parameters_of(root)
    losses: list[Tensor] = []
    with recorded_collectives() as collectives:
        for index, inputs in enumerate(case.ranks[rank]):
            try:
                losses.append(root(**make_batch(rank, index, inputs)).loss)
            except liger_dist.LigerDistError as refusal:
                return str(refusal), {}, collectives
        torch.stack(losses).sum().backward()
    errors = errors_of(case, model, reference, root, before)
    for index, inputs in enumerate(case.ranks[rank]):
        errors[f"loss {index}"] = abs(
            float(losses[index]) - float(true_loss(reference, make_batch(rank, index, inputs)))
        )
    return "", errors, collectives


def built(case: Case) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The model that is wrapped, a copy of it, and what is called."""
    model = make_model(case.family)
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


def errors_of(
    case: Case, model: nn.Module, reference: nn.Module, root: nn.Module, before: dict[str, Tensor]
) -> dict[str, float]:
    """The relative error of each gradient, after the backward."""
    gradients = {name: full(p.grad) for name, p in named_parameters(model) if p.grad is not None}
    if isinstance(root, FullyShardedDataParallel):
        torch.optim.SGD(root.parameters(), lr=LEARNING_RATE).step()
        after = parameters_of(root)
        gradients = {name: (before[name] - after[name]) / LEARNING_RATE for name in before}
    for rank, forwards in enumerate(case.ranks):
        for index, inputs in enumerate(forwards):
            truth = true_loss(reference, make_batch(rank, index, inputs)) / len(case.ranks)
            if truth.requires_grad:
                truth.backward()
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert truths.keys() <= gradients.keys()
    largest = max(float(truth.abs().max()) for truth in truths.values())
    errors = {}
    for name, gradient in gradients.items():
        truth = truths.get(name, torch.zeros_like(gradient))
        scale = max(float(truth.abs().max()), 1e-4 * largest)
        errors[f"gradient of {name}"] = float((gradient - truth).abs().max()) / scale
    return errors


def parameters_of(root: nn.Module) -> dict[str, Tensor]:
    """Full parameters under FSDP1, which shows gradients in few of its modes."""
    if not isinstance(root, FullyShardedDataParallel):
        return {}
    with FullyShardedDataParallel.summon_full_params(root):
        return {name: p.detach().clone() for name, p in named_parameters(root)}


def named_parameters(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """With the names of the unwrapped model."""
    for name, parameter in root.named_parameters():
        yield name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""), parameter
