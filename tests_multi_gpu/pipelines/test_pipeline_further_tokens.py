"""Multi-token prediction in pipelines: the last stage gets the embeddings of the tokens beside the hidden states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import assert_below, full, relative_errors
from mtp_models import add_mtp, true_mtp_losses
from pipelined import PIPELINE, SCHEDULES, Pipeline, make_rows, make_uncut, run_or_refused
from torch import Tensor, nn

import liger_dist

WEIGHTS = (0.3, 0.2)


def make_predicting(family: str = "llama", *, depth: int = 2, **options: Any) -> Any:
    options = {"weight": WEIGHTS[:depth]} | options
    return add_mtp(make_uncut(family), depth=depth, dtype=torch.float64, **options).train()


def true_losses(uncut: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Losses of the data-parallel ranks: all divided by the number of labels of the next token."""
    losses = []
    for batch in batches:
        (main, count), *further = true_mtp_losses(uncut, batch)
        weighted = [weight * total for weight, (total, _) in zip(uncut.mtp.weights, further, strict=True)]
        total = uncut.mtp.main_weight * main + sum(weighted if uncut.training or not uncut.mtp.main_weight else [])
        losses.append(total / count)
    return losses


def errors(
    family: str,
    schedule: str,
    data: str,
    rows: str,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    **sharding: Any,
) -> dict[str, float]:
    """Of the loss and every gradient on this rank, relative to the uncut model in fp64."""
    uncut = make_predicting(family, **options)
    pipeline = Pipeline(copy.deepcopy(uncut).to(dtype), schedule, data=data, **sharding)
    ranks = 1 if data == "tp" else dist.get_world_size() // PIPELINE
    batches = [make_rows(rank, rows=rows) for rank in range(ranks)]
    loss, place = pipeline.step(batches[pipeline.data_rank]), pipeline.data_rank
    if data == "none":
        batches, place = [batches[place]], 0
    losses = true_losses(uncut, batches)
    (torch.stack(losses).sum() / len(losses)).backward()
    truths = dict(uncut.named_parameters())
    assert set(pipeline.parameters) <= set(truths)
    trained = {name: truths[name].grad for name in pipeline.parameters if truths[name].grad is not None}
    true = float(losses[place].detach())
    gradients = pipeline.gradients()
    assert trained or not gradients
    found = relative_errors(gradients, trained) if trained else {}
    return found | ({} if loss is None else {"loss": abs(loss - true) / abs(true)})


@pytest.mark.smoke
@pytest.mark.cover("pairs")
@pytest.mark.parametrize("rows", ["texts", "padded", "packed"])
@pytest.mark.parametrize("data", ["none", "fsdp2", "hsdp", "tp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_further_tokens_are_those_of_the_uncut_model(schedule: str, data: str, rows: str, workers_4: Workers) -> None:
    """Every rank's errors are rounding of fp64, and some rank has each parameter and the loss."""
    ranks = run_or_refused(workers_4, errors, "llama", schedule, data, rows, {})
    for found in ranks:
        # The truth has each text alone, at other positions, whose rotary embeddings are in fp32.
        assert_below(found, 5e-6 if rows == "padded" else 1e-9)
    names = {name for name, _ in make_predicting().named_parameters()}
    assert not ranks or set().union(*ranks) == names | {"loss"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_other_families(family: str, workers_4: Workers) -> None:
    rows = "texts" if family == "qwen3_5_text" else "packed"
    for found in workers_4.run(errors, family, "1F1B", "fsdp2", rows, {}):
        assert_below(found, 1e-9 if family == "qwen3" else 2e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "without the next token": {"main_weight": 0.0},
    "frozen model": {"main_weight": 0.0, "train_model": False},
    "frozen model, with the next token": {"train_model": False},
}


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, schedule: str, workers_4: Workers) -> None:
    if schedule == "ZBVZeroBubble" and "frozen" in name:
        with pytest.raises(RuntimeError, match="Schedule1F1B"):
            workers_4.run(errors, "llama", schedule, "fsdp2", "texts", OPTIONS[name])
        return
    for found in run_or_refused(workers_4, errors, "llama", schedule, "fsdp2", "texts", OPTIONS[name]):
        # Stages before the last one of a frozen model have no gradients.
        assert "frozen" in name or found
        assert_below(found or {"none": 0.0}, 1e-9)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_kernels_of_layers(schedule: str, workers_4: Workers) -> None:
    for found in run_or_refused(workers_4, errors, "llama", schedule, "fsdp2", "packed", {}, torch.float32):
        assert_below(found, 2e-4)


def test_bf16_is_close(workers_4: Workers) -> None:
    for found in workers_4.run(errors_in_bf16):
        assert_below(found, 0.25)


def errors_in_bf16() -> dict[str, float]:
    return errors("llama", "1F1B", "fsdp2", "texts", {}, param_dtype=torch.bfloat16)


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_training_and_evaluation(schedule: str, workers_4: Workers) -> None:
    """Three steps of AdamW with clipped gradients; an evaluation before each, which has the loss of the next token."""
    for found in workers_4.run(trained, schedule):
        assert_below(found, 1e-6)


def trained(schedule: str) -> dict[str, float]:
    uncut = make_predicting()
    pipeline = Pipeline(copy.deepcopy(uncut), schedule, data="fsdp2")
    optimizer = torch.optim.AdamW(pipeline.parameters.values(), lr=1e-2)
    reference = torch.optim.AdamW(uncut.parameters(), lr=1e-2)
    found: dict[str, float] = {}
    for number in range(3):
        batches = [make_rows(rank, seed=number) for rank in range(2)]
        for trains in (False, True):
            for module in (uncut, *pipeline.modules):
                module.train(trains)
            with torch.set_grad_enabled(trains):
                loss, losses = pipeline.step(batches[pipeline.data_rank]), true_losses(uncut, batches)
            if loss is not None:
                found[f"loss {number}, {trains}"] = abs(loss - float(losses[pipeline.data_rank].detach()))
        (torch.stack(losses).sum() / 2).backward()
        norm = liger_dist.clip_grad_norm_(pipeline.parameters.values(), 0.1, group=pipeline.mesh.get_group("pp"))
        true_norm = torch.nn.utils.clip_grad_norm_(uncut.parameters(), 0.1)
        found[f"norm {number}"] = abs(float(norm) - float(true_norm))
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    truths = dict(uncut.named_parameters())
    changed = {name: full(parameter) for name, parameter in pipeline.parameters.items()}
    return found | relative_errors(changed, {name: truths[name].detach() for name in changed})


def test_stages_together_are_the_uncut_model() -> None:
    uncut = make_predicting()
    stages = [liger_dist.pipeline_stage(uncut, index, 3) for index in range(3)]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in uncut.named_parameters())
    assert all("mtp" not in name for stage in stages[:2] for name in stage.state_dict())
    assert "modules of further tokens" in str(liger_dist.explain(liger_dist.wrap(stages[2])))
    # By hand, with hidden states and embeddings beside each other.
    ids = torch.arange(1, 11, device=stages[0].device).view(2, 5)
    liger_dist.unwrap(stages[2])
    hidden = stages[1](stages[0](ids))
    loss = stages[2](hidden, labels=ids, num_items_in_batch=8)
    (main, _), *further = true_mtp_losses(uncut, {"input_ids": ids, "labels": ids})
    total = main + sum(weight * one for weight, (one, _) in zip(WEIGHTS, further, strict=True))
    torch.testing.assert_close(loss[0].double(), total / 8, rtol=1e-6, atol=0.0)


def made_stages(uncut: Any) -> Any:
    """A first and a last stage, by hand."""
    stages = [liger_dist.pipeline_stage(uncut, index, 2) for index in range(2)]
    ids = torch.arange(1, 11, device=stages[0].device).view(2, 5)
    return ids, lambda: stages[1](stages[0](ids), labels=ids, num_items_in_batch=8), stages


def test_hooks_of_the_embedding() -> None:
    """Noise that a hook adds later is in the hidden states alone, as in the uncut model."""
    uncut = make_predicting()
    uncut.model.embed_tokens.register_forward_hook(lambda _, args, output: output + 0.1 * output.cos())
    ids, step, _ = made_stages(uncut)
    truth = uncut(ids, labels=ids, num_items_in_batch=8, use_cache=False).loss
    torch.testing.assert_close(step()[0], truth, rtol=1e-6, atol=0.0)


def test_another_model_in_the_call_of_a_stage() -> None:
    other = make_predicting()
    ids, step, stages = made_stages(copy.deepcopy(other))
    more = torch.arange(20, 26, device=ids.device).view(1, 6)
    call = lambda: float(other(more, labels=more, num_items_in_batch=4, use_cache=False).loss)  # noqa: E731
    expected, alone, found = step(), call(), []
    stages[1].model.norm.register_forward_hook(lambda *_: found.append(call()))
    stages[0].model.embed_tokens.register_forward_hook(lambda *_: found.append(call()))
    assert torch.equal(step(), expected)
    assert found == [alone, alone]


def test_tensors_of_another_pipeline() -> None:
    uncut, plain = make_predicting(), make_uncut("llama")
    ids, _, stages = made_stages(uncut)
    first, last = (liger_dist.pipeline_stage(plain, index, 2) for index in range(2))
    for stage, before in ((stages[1], first), (last, stages[0])):
        with pytest.raises(liger_dist.LigerDistError, match="Cut all stages from the same model"):
            stage(before(ids), labels=ids, num_items_in_batch=8)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        stages[0](ids, inputs_embeds=torch.zeros(2, 5, 16, device=ids.device))
    uncut.set_input_embeddings(copy.deepcopy(plain.get_input_embeddings()))
    with pytest.raises(liger_dist.LigerDistError, match="was replaced after MultiTokenPrediction was added"):
        liger_dist.pipeline_stage(uncut, 0, 2)


def test_stages_of_different_models_are_refused_on_all_ranks(workers_2: Workers) -> None:
    with pytest.raises(RuntimeError, match="stages with modules of further tokens"):
        workers_2.run(step_of_different_models)


def step_of_different_models() -> None:
    uncut = make_predicting()
    if dist.get_rank() == 0:
        del uncut.mtp
    Pipeline(uncut, "1F1B").step(make_rows(0))


def test_a_last_stage_without_softmax_attention() -> None:
    hybrid = make_predicting("qwen3_5_text")
    hybrid.model.layers = nn.ModuleList(sorted(hybrid.model.layers, key=lambda layer: hasattr(layer, "linear_attn")))
    # On all ranks, if the layers are divided evenly.
    for index, layers in ((0, None), (1, None), (1, (3, 4))):
        with pytest.raises(liger_dist.LigerDistError, match="but the last stage begins with layer"):
            liger_dist.pipeline_stage(hybrid, index, 2, layers=layers)
