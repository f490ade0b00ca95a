"""Steps of a pipeline beside the usual ones: optimizers, evaluation, collectives, checkpoints, clipping."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collectives import recorded_collectives
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE, assert_below, full, relative_errors, true_loss_sum
from pipelined import (
    OTHER_SCHEDULES,
    SCHEDULES,
    SPLIT,
    Pipeline,
    errors_of_step,
    make_rows,
    make_uncut,
    run_or_refused,
    true_step,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor

import liger_dist
from liger_dist.fused_layers import norm, recompute
from liger_dist.versions import numbers

TRAINED = [(schedule, data) for schedule in ("1F1B", "InterleavedZeroBubble") for data in ("none", "fsdp2")]


@pytest.mark.smoke
@pytest.mark.parametrize(("schedule", "data"), TRAINED)
def test_pipeline_trains_and_evaluates_as_the_uncut_model(schedule: str, data: str, workers_4: Workers) -> None:
    """Three steps of AdamW, with clipped gradients, and an evaluation before each: no weight is stale."""
    for found in run_or_refused(workers_4, trained, schedule, data):
        assert_below(found, 1e-6)


def trained(schedule: str, data: str) -> dict[str, float]:
    uncut = make_uncut("llama")
    pipeline = Pipeline(copy.deepcopy(uncut), schedule, data=data)
    ranks = range(2) if data == "fsdp2" else [pipeline.data_rank]
    optimizer = torch.optim.AdamW(pipeline.parameters.values(), lr=1e-2)
    reference = torch.optim.AdamW(uncut.parameters(), lr=1e-2)
    errors: dict[str, float] = {}
    for number in range(3):
        batches = [make_rows(rank, seed=number) for rank in ranks]
        place = pipeline.data_rank if data == "fsdp2" else 0
        mine = batches[place]
        with torch.no_grad():
            evaluated = pipeline.step(mine)
        loss = pipeline.step(mine)
        losses = true_step(uncut, batches)
        if loss is not None:
            errors |= {f"loss {number}": abs(loss - losses[place])}
            errors |= {f"evaluation {number}": abs(evaluated - losses[place])}
        norm = liger_dist.clip_grad_norm_(pipeline.parameters.values(), 0.1, group=pipeline.mesh.get_group("pp"))
        true_norm = torch.nn.utils.clip_grad_norm_(uncut.parameters(), 0.1)
        errors[f"norm {number}"] = abs(float(norm) - float(true_norm))
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    with torch.no_grad():
        pipeline.step(mine)
    # An evaluation leaves no unsharded parameters.
    assert data == "none" or all(isinstance(parameter, DTensor) for parameter in pipeline.parameters.values())
    truths = dict(uncut.named_parameters())
    changed = {name: full(parameter) for name, parameter in pipeline.parameters.items()}
    return errors | relative_errors(changed, {name: truths[name].detach() for name in changed})


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_first_step_after_evaluations(schedule: str, workers_2: Workers) -> None:
    """torch 2.11 allocates memory for received hidden states in the first of them, here in inference mode."""
    for errors in workers_2.run(evaluated_first, schedule):
        assert_below(errors, 1e-9)


def evaluated_first(schedule: str) -> dict[str, float]:
    uncut, batch = make_uncut("llama"), make_rows(0)
    pipeline = Pipeline(copy.deepcopy(uncut), schedule)
    losses = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            losses.append(pipeline.step(batch))
    (truth,) = true_step(uncut, [batch])
    truths = {name: p.grad for name, p in uncut.named_parameters() if name in pipeline.parameters}
    errors = {f"loss {number}": abs(loss - truth) for number, loss in enumerate(losses) if loss is not None}
    return errors | relative_errors(pipeline.gradients(), truths)


def test_num_items_in_batch_divides_the_sum_of_all_micro_batches(workers_2: Workers) -> None:
    for given in (7, 7.0, torch.tensor(7, device="cpu")):
        (_, last) = workers_2.run(divided, given)
        assert abs(last) < 1e-9


def divided(items: Any) -> float:
    uncut = make_uncut("llama")
    pipeline, batch = Pipeline(copy.deepcopy(uncut), "GPipe"), make_rows(0)
    loss = pipeline.step(batch | {"num_items_in_batch": items})
    return 0.0 if loss is None else loss - float(true_loss_sum(uncut, batch)[0]) / 7


def test_a_batch_without_labels_has_a_loss_of_zero(workers_2: Workers) -> None:
    for loss, norms in workers_2.run(without_labels):
        assert loss in (None, 0.0)
        assert norms == 0.0


def without_labels() -> tuple[float | None, float]:
    pipeline, batch = Pipeline(make_uncut("llama"), "1F1B"), make_rows(0)
    batch["labels"][:] = -100
    loss = pipeline.step(batch)
    return loss, float(sum(gradient.norm() for gradient in pipeline.gradients().values()))


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fsdp2_reduces_each_gradient_once_in_a_step(schedule: str, reshards: bool, workers_4: Workers) -> None:
    """Of four micro-batches; without resharding it gathers each weight once, too."""
    for expected, gathered, reduced in run_or_refused(
        workers_4, communicated, schedule, reshards and schedule not in SPLIT
    ):
        assert reduced == expected
        assert (gathered == expected) is not (reshards and schedule not in SPLIT)


def communicated(schedule: str, reshards: bool) -> tuple[int, int, int]:
    """Elements of the unsharded parameters, padded to the ranks, and elements that were all-gathered and reduced in the
    second step: the first one infers shapes."""
    pipeline = Pipeline(make_uncut("llama"), schedule, data="fsdp2", reshard_after_forward=reshards)
    batch = make_rows(pipeline.data_rank)
    pipeline.step(batch)
    with recorded_collectives() as seen:
        pipeline.step(batch)
    padded = sum(2 * (-(-p.shape[0] // 2)) * (p.numel() // p.shape[0]) for p in pipeline.parameters.values())
    gathered, reduced = (sum(n for name, n in seen if name.startswith(kind)) for kind in ("all_gather", "reduce_sc"))
    return padded, gathered, reduced


@pytest.mark.smoke
@pytest.mark.cover("pairs")
@pytest.mark.parametrize("size", ["any size", "large"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3_moe"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_computes_layers_by_kernels(schedule: str, family: str, size: str, workers_4: Workers) -> None:
    """In fp32; outputs of any size, or large ones, are recomputed, and saved for a backward of weights alone: gpt_neox
    has the norms first, so that their backward would free what an output is recomputed from."""
    for number, errors in run_or_refused(workers_4, by_kernels, schedule, family, size):
        assert number > 0
        assert_below(errors, 2e-4)


def by_kernels(schedule: str, family: str, size: str) -> tuple[int, dict[str, float]]:
    with (
        mock.patch.object(recompute, "MIN_BYTES", 1 if size == "any size" else recompute.MIN_BYTES),
        mock.patch.object(norm, "norm", wraps=norm.norm) as called,
    ):
        errors = errors_of_step(family, schedule, "fsdp2", dtype=torch.float32)
    return called.call_count, errors


@pytest.mark.parametrize("schedule", ["1F1B", *SPLIT])
def test_pipeline_with_checkpointed_layers(schedule: str, workers_4: Workers) -> None:
    for errors in run_or_refused(workers_4, checkpointed, schedule):
        assert_below(errors, 1e-9)


def checkpointed(schedule: str) -> dict[str, float]:
    own = make_uncut

    def made(family: str) -> Any:
        model = own(family)
        model.gradient_checkpointing_enable()
        return model

    with mock.patch("pipelined.make_uncut", made):
        return errors_of_step("llama", schedule, "fsdp2")


TRAINED_PARTS = {"head": "lm_head", "last layers": r"layers\.[23]|norm|lm_head", "first layers": r"embed|layers\.[01]"}


PARTLY_FROZEN = [(schedule, part) for schedule in ("1F1B", "Interleaved1F1B") for part in TRAINED_PARTS]


@pytest.mark.parametrize(("schedule", "part"), [*PARTLY_FROZEN, ("ZBVZeroBubble", "first layers")])
def test_pipeline_of_frozen_weights(schedule: str, part: str, workers_4: Workers) -> None:
    if part == "head" and numbers(torch.__version__)[:2] == (2, 12):
        with pytest.raises(
            RuntimeError, match=r"all stages before it are frozen, but torch 2\.12\..*install torch 2\.13"
        ):
            workers_4.run(partly_frozen, schedule, TRAINED_PARTS[part])
        return
    for errors in run_or_refused(workers_4, partly_frozen, schedule, TRAINED_PARTS[part]):
        assert_below(errors, 1e-9)


def partly_frozen(schedule: str, trained: str) -> dict[str, float]:
    uncut = make_uncut("llama")
    for name, parameter in uncut.named_parameters():
        parameter.requires_grad_(re.search(trained, name) is not None)
    pipeline = Pipeline(copy.deepcopy(uncut), schedule, data="fsdp2")
    batches = [make_rows(rank) for rank in range(dist.get_world_size() // 2)]
    loss, found = pipeline.step(batches[pipeline.data_rank]), pipeline.gradients()
    truth = true_step(uncut, batches)[pipeline.data_rank]
    truths = {name: p.grad for name, p in uncut.named_parameters() if name in pipeline.parameters and p.requires_grad}
    errors = relative_errors(found, truths) if truths else dict.fromkeys(found, 1.0)
    return errors | {"loss": 0.0 if loss is None else abs(loss - truth) / truth}


@pytest.mark.parametrize("name", ["CPU offload", "units of two layers"])
def test_pipeline_with_options_of_fsdp2(name: str, workers_4: Workers) -> None:
    for errors in workers_4.run(with_option, name):
        assert_below(errors, 1e-9)


def with_option(name: str) -> dict[str, float]:
    options = {"CPU offload": {"cpu_offload": True}, "units of two layers": {"layers_per_unit": 2}}[name]
    return errors_of_step("llama", "1F1B", "fsdp2", **options)


def test_pipeline_in_bf16_is_close(workers_4: Workers) -> None:
    """Hidden states go from stage to stage in ``param_dtype``."""
    for errors in workers_4.run(errors_of_step_in_bf16):
        assert_below(errors, 0.2)


def errors_of_step_in_bf16() -> dict[str, float]:
    return errors_of_step("llama", "1F1B", "fsdp2", param_dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_pipeline_keeps_documents_of_recurrent_layers_apart(family: str, workers_2: Workers) -> None:
    for errors in workers_2.run(recurrent, family):
        assert_below(errors, 2e-5)


def recurrent(family: str) -> dict[str, float]:
    return errors_of_step(family, "1F1B", "none", rows="packed")


def test_stages_have_the_names_and_parameters_of_the_uncut_model() -> None:
    """Parameters are shared, modules are not; a stage may have any layers."""
    model = make_uncut("llama")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    stages = [
        liger_dist.pipeline_stage(model, index, 3, layers=layers)
        for index, layers in enumerate(((0, 1), (1, 2), (2, 4)))
    ]
    after = {name: id(parameter) for stage in stages for name, parameter in stage.named_parameters()}
    assert after == before == {name: id(parameter) for name, parameter in model.named_parameters()}
    modules = [{id(module) for module in part.modules()} for part in (model, *stages)]
    assert sum(map(len, modules)) == len(set().union(*modules))
    assert all(type(stage).__name__ == "LlamaForCausalLM" for stage in stages)
    divided = [liger_dist.pipeline_stage(model, index, 3) for index in range(3)]
    assert [len({n.split(".")[2] for n, _ in s.named_parameters() if "layers" in n}) for s in divided] == [2, 1, 1]


def test_explain_and_unwrap_of_stages() -> None:
    first, last = (liger_dist.wrap(liger_dist.pipeline_stage(make_uncut("llama"), index, 2)) for index in range(2))
    text = str(liger_dist.explain(first))
    assert "pipeline          stage 0 of 2: embedding, layers 0 to 1\n" in text
    assert "not fused: stage 0 of 2 of a pipeline, whose loss is in the last one" in text
    assert "weight_shape" not in text
    assert "4 x LlamaRMSNorm" in text
    text = str(liger_dist.explain(last))
    assert "stage 1 of 2: layers 2 to 3, final norm, lm_head and loss\n" in text
    assert f"({VOCAB_SIZE}, {HIDDEN_SIZE})" in text
    ids = torch.arange(1, 11, device=last.device).view(2, 5)
    given: dict[str, Any] = {"labels": ids, "num_items_in_batch": 4}
    losses = [last(first(ids, position_ids=None), **given)]
    # Both are tensors that a PipelineStage can send.
    assert losses[0].shape == (1,)
    for stage in (first, last):
        liger_dist.unwrap(stage)
    losses.append(last(first(ids), **given))
    assert torch.allclose(*(loss.double() for loss in losses), rtol=1e-6)
    assert last(first(ids)).shape == (2, 5, VOCAB_SIZE)


def test_a_schedule_alone_gets_labels_and_their_number_as_keywords(workers_2: Workers) -> None:
    for error in workers_2.run(by_hand):
        assert error < 1e-9


def by_hand() -> float:
    uncut, rank, batch = make_uncut("llama"), dist.get_rank(), make_rows(0)
    stage = liger_dist.wrap(liger_dist.pipeline_stage(copy.deepcopy(uncut), rank, 2))
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, 2, batch["labels"].device), 4, loss_fn=liger_dist.pipeline_loss, scale_grads=False
    )
    total, count = true_loss_sum(uncut, batch)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(batch["input_ids"])
        return 0.0
    labels = batch["labels"]
    schedule.step(labels=labels, num_items_in_batch=count, target=labels, losses=losses)
    return abs(float(sum(losses)) - float(total) / count)


def test_every_schedule_of_torch_is_tried() -> None:
    made = {name.removeprefix("Schedule") for name in dir(torch_schedules) if name.startswith("Schedule")}
    assert made == {*SCHEDULES, *OTHER_SCHEDULES}


@pytest.mark.parametrize("schedule", OTHER_SCHEDULES)
def test_other_schedules(schedule: str, workers_4: Workers) -> None:
    for errors in run_or_refused(workers_4, errors_of_step, "llama", schedule, "fsdp2"):
        assert_below(errors, 1e-9)
