"""What a pipeline cannot compute is refused, on all ranks and before any collective of a schedule."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import make_model
from pipelined import REFUSED_BY_TORCH, SPLIT, Pipeline, make_rows, make_uncut
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import liger_dist
from liger_dist import pipeline as pipeline_module
from liger_dist.mtp import MultiTokenPrediction
from liger_dist.versions import numbers

SHARING = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
REFUSED_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "scaled embeddings": ("granite", {"embedding_multiplier": 2.0}, "with the hidden states unchanged in between"),
    "learned positions": ("gpt2", {}, "parameter transformer.wpe.weight outside"),
    "a state of several layers": ("gemma4_text", SHARING, "share more than hidden states|parameter"),
    "a norm before the layers": ("nanochat", {}, "only call its layers in order and then its final norm"),
    "encoder-decoder": ("t5", {}, "one stack of decoder layers"),
}


@pytest.mark.parametrize("what", REFUSED_MODELS)
def test_pipeline_stage_refuses_a_family_that_cannot_be_cut(what: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    family, options, sentence = REFUSED_MODELS[what]
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    if family == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "tie_word_embeddings": False}
    if family == "t5":
        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        sizes["tie_word_embeddings"] = False
    config = AutoConfig.for_model(family, **sizes, **options)
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        liger_dist.pipeline_stage(auto.from_config(config), 0, 2)


def test_pipeline_stage_refuses_layers_that_share_state() -> None:
    """Keys of an earlier layer, as Gemma's; or the embeddings."""
    model = make_uncut("llama")
    own = type(model.model).forward

    def of_embeddings(self: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return own(self, inputs_embeds=inputs_embeds, first_residual=inputs_embeds, **kwargs)

    def of_keys(self: Any, **kwargs: Any) -> Any:
        return own(self, shared_keys={}, **kwargs)

    for forward, sentence in ((of_keys, "more than hidden states \\(a dict"), (of_embeddings, "\\(a Tensor")):
        with (
            mock.patch.object(type(model.model), "forward", forward),
            pytest.raises(liger_dist.LigerDistError, match=sentence),
        ):
            liger_dist.pipeline_stage(model, 0, 2)


def test_pipeline_stage_refuses_a_model_that_is_not_whole_or_tied() -> None:
    model = make_uncut("llama")
    for given, sentence in (
        ((nn.Linear(2, 2, device="cpu"), 0, 2), "expected a causal language model of transformers"),
        ((make_model("llama", tied=True), 0, 2), "is tied to its embedding"),
        ((model, 2, 2), "expected 0 <= index < num_stages"),
        ((model, 0, 5), "expected at least one layer in each stage"),
        ((liger_dist.pipeline_stage(model, 0, 2), 0, 2), "or a stage, already"),
        ((liger_dist.wrap(copy.deepcopy(model)), 0, 2), "is wrapped"),
        ((copy.deepcopy(model).to("meta"), 0, 2), "meta device"),
    ):
        with pytest.raises(liger_dist.LigerDistError, match=sentence):
            liger_dist.pipeline_stage(*given)
    with pytest.raises(liger_dist.LigerDistError, match=r"layers 3 to 1 of 4"):
        liger_dist.pipeline_stage(model, 0, 2, layers=(3, 2))
    routers = make_uncut("qwen3_moe")
    routers.config.output_router_logits = True
    with pytest.raises(liger_dist.LigerDistError, match="output_router_logits"):
        liger_dist.pipeline_stage(routers, 0, 2)
    peft = pytest.importorskip("peft")
    adapted = make_uncut("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], r=2), adapted)
    with pytest.raises(liger_dist.LigerDistError, match="has adapters of PEFT"):
        liger_dist.pipeline_stage(adapted, 0, 2)
    quantized = make_uncut("llama")
    quantized.is_quantized = True
    with pytest.raises(liger_dist.LigerDistError, match="has quantised weights"):
        liger_dist.pipeline_stage(quantized, 0, 2)
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    mixture = make_uncut("qwen3_moe").float()
    parametrize.replace_parameter_4bit(mixture.model.layers[0].mlp.experts, "down_proj")
    with pytest.raises(liger_dist.LigerDistError, match="has quantised weights"):
        liger_dist.pipeline_stage(mixture, 0, 2)
    shared = make_uncut("llama")
    shared.model.layers[3].mlp = shared.model.layers[0].mlp
    with pytest.raises(liger_dist.LigerDistError, match="share parameters"):
        liger_dist.pipeline_stage(shared, 0, 2)


def test_wrap_refuses_what_a_stage_cannot_have() -> None:
    def stage(index: int = 1) -> nn.Module:
        return liger_dist.pipeline_stage(make_uncut("llama"), index, 2)

    for strategy in ("none", "ddp", "fsdp1", "deepspeed", "tp"):
        with pytest.raises(liger_dist.LigerDistError, match=f"strategy='{strategy}'; expected 'auto'"):
            liger_dist.wrap(stage(), strategy)
    with pytest.raises(liger_dist.LigerDistError, match="expected a DeviceMesh of the ranks"):
        liger_dist.wrap(stage(), "fsdp2")
    for config in (liger_dist.WrapConfig(fused_loss=False), liger_dist.WrapConfig(outputs=("entropy",))):
        with pytest.raises(liger_dist.LigerDistError, match="a pipeline has a loss only"):
            liger_dist.wrap(stage(), config=config)
    with pytest.raises(liger_dist.LigerDistError, match="add MultiTokenPrediction to the uncut model"):
        MultiTokenPrediction(stage(), 1)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(stage(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(liger_dist.LigerDistError, match="expected the stage itself"):
        liger_dist.wrap(adapted)
    hooked = stage()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    with (
        pytest.warns(UserWarning, match="unfused"),
        pytest.raises(liger_dist.LigerDistError, match="the loss of stage 1 of 2 is not fused"),
    ):
        liger_dist.wrap(hooked)


def test_wrap_refuses_the_pipeline_module_of_deepspeed() -> None:
    module = pytest.importorskip("deepspeed.runtime.pipe.module").PipelineModule
    model = module.__new__(module)
    nn.Module.__init__(model)
    with pytest.raises(liger_dist.LigerDistError, match=r"PipelineModule of DeepSpeed.*docs/pipelines.md"):
        liger_dist.wrap(model, "deepspeed")


def test_calls_refuse_what_only_a_whole_model_has() -> None:
    last = liger_dist.wrap(liger_dist.pipeline_stage(make_uncut("llama"), 1, 2))
    hidden = on_device.randn(2, 5, 16, dtype=torch.float64)
    labels = on_device.ones(2, 5, dtype=torch.int64)
    with pytest.raises(liger_dist.LigerDistError, match="num_items_in_batch is None"):
        last(hidden, labels=labels)
    with pytest.raises(liger_dist.LigerDistError, match="routers"):
        last(hidden, labels=labels, num_items_in_batch=8, output_router_logits=True)
    with pytest.raises(liger_dist.LigerDistError, match="a pipeline"):
        liger_dist.verify(last, {"input_ids": labels, "labels": labels})
    with pytest.raises(liger_dist.LigerDistError, match="expected a whole model"):
        liger_dist.distillation_loss(last, make_model("llama"), input_ids=labels, labels=labels)
    with pytest.raises(liger_dist.LigerDistError, match="clipped by different norms"):
        liger_dist.clip_grad_norm_(last, 1.0)
    with pytest.raises(liger_dist.LigerDistError, match="expected the loss of its labels"):
        liger_dist.pipeline_loss(hidden, labels)


REFUSED_STEPS = {
    "gradients that are divided": "scale_grads=True; expected",
    "another loss": "expected loss_fn=liger_dist.pipeline_loss",
    "a stage that is not wrapped": "that are wrapped",
    "another index": "expected the same index and number",
    "rows": "10 rows and the schedule has n_microbatches=4",
    "labels of another shape": "labels is",
    "a label": "a label is",
    "a label of one rank": "with different batches",
    "other documents on one rank": "with different batches",
    "no positions on one rank": "with different batches",
    "a count on one rank": "for different steps",
    "counts of micro-batches": "num_items_in_batch has the shape (4,)",
    "a forward on one rank": "for different steps",
    "a global mean without data parallelism": "token_mean='global'",
    "cumulative lengths": "unexpected keyword",
}


@pytest.mark.smoke
@pytest.mark.parametrize("what", REFUSED_STEPS)
def test_pipeline_step_refuses_on_all_ranks(what: str, workers_2: Workers) -> None:
    for sentence, loss in workers_2.run(refused_step, what, time_limit=60):
        assert re.search(re.escape(REFUSED_STEPS[what]), sentence), sentence
        assert loss is None or loss > 0


def refused_step(what: str) -> tuple[str, float | None]:
    """Returns what was raised, and the loss of the next step, which is right."""
    rank = dist.get_rank()
    config = liger_dist.WrapConfig(token_mean="global") if "global mean" in what else None
    pipeline = Pipeline(make_uncut("llama"), "1F1B", config=config)
    batch: dict[str, Any] = make_rows(0, rows="packed" if "documents" in what or "positions" in what else "texts")
    wrong, schedule = copy.deepcopy(batch), pipeline.schedule
    if what in ("gradients that are divided", "another loss"):
        schedule = Schedule1F1B(
            pipeline.stages[0],
            4,
            loss_fn=liger_dist.pipeline_loss if "divided" in what else nn.functional.cross_entropy,
            scale_grads="divided" in what,
        )
    if what in ("a stage that is not wrapped", "another index"):
        model = liger_dist.pipeline_stage(make_uncut("llama"), 1 - rank if "index" in what else rank, 2)
        model = model if "wrapped" in what else liger_dist.wrap(model)
        stage = PipelineStage(model, rank, 2, pipeline.stages[0].device)
        schedule = Schedule1F1B(stage, 4, loss_fn=liger_dist.pipeline_loss, scale_grads=False)
    if what == "rows":
        wrong = {name: value[:10] for name, value in wrong.items()}
    if what == "labels of another shape":
        wrong["labels"] = wrong["labels"][:, :-1]
    if what == "a label" or (what == "a label of one rank" and rank == 0):
        wrong["labels"][0, -1] = 1000
    if what == "other documents on one rank" and rank == 0:
        wrong["position_ids"][0] = torch.arange(wrong["position_ids"].shape[1])
    if what == "no positions on one rank" and rank == 1:
        del wrong["position_ids"]
    if what == "a count on one rank" and rank == 1:
        wrong["num_items_in_batch"] = 5
    if what == "counts of micro-batches":
        wrong["num_items_in_batch"] = on_device.ones(4)
    if what == "cumulative lengths":
        wrong["cu_seq_lens_q"] = on_device.tensor([0, batch["input_ids"].numel()])
    has_gradients = not (what == "a forward on one rank" and rank == 0)
    expected = TypeError if what == "cumulative lengths" else liger_dist.LigerDistError
    with torch.set_grad_enabled(has_gradients), pytest.raises(expected) as caught:
        liger_dist.pipeline_step(schedule, **wrong)
    return str(caught.value), None if "global mean" in what else pipeline.step(batch)


@pytest.mark.parametrize("schedule", SPLIT)
def test_zero_bubble_is_refused_if_torch_frees_custom_nodes(schedule: str, workers_2: Workers) -> None:
    """On all ranks, before torch 2.13: an evaluation still runs."""
    for sentence, evaluated in workers_2.run(without_custom_nodes, schedule, time_limit=60):
        assert re.search(f"Schedule{schedule} {REFUSED_BY_TORCH}", sentence)
        assert evaluated is None or evaluated > 0


def without_custom_nodes(schedule: str) -> tuple[str, float | None]:
    pipeline, batch = Pipeline(make_uncut("llama"), schedule), make_rows(0)
    with custom_nodes_are_kept(False), pytest.raises(liger_dist.LigerDistError) as caught:
        pipeline.step(batch)
    if schedule != "InterleavedZeroBubble":
        return str(caught.value), None
    with custom_nodes_are_kept(False), torch.no_grad():
        return str(caught.value), pipeline.step(batch)


def custom_nodes_are_kept(are_kept: bool) -> Any:
    return mock.patch.object(pipeline_module, "_keeps_custom_nodes", return_value=are_kept)


def test_torch_keeps_custom_nodes_since_2_13() -> None:
    assert pipeline_module._keeps_custom_nodes() is (numbers(torch.__version__) >= (2, 13))


@pytest.mark.parametrize("schedule", SPLIT)
def test_zero_bubble_refuses_frozen_first_stages(schedule: str, workers_2: Workers) -> None:
    """The stage after them would have no gradients: torch finds products of weights on the way to the stage's input."""
    for sentence in workers_2.run(frozen_at_first, schedule):
        assert re.search("stage [12] trains and all stages before it are frozen.* choose Schedule1F1B", sentence)


def frozen_at_first(schedule: str) -> str:
    uncut = make_uncut("llama")
    uncut.model.embed_tokens.requires_grad_(False)
    uncut.model.layers[:2].requires_grad_(False)
    pipeline = Pipeline(uncut, schedule)
    with custom_nodes_are_kept(True), pytest.raises(liger_dist.LigerDistError) as caught:
        pipeline.step(make_rows(0))
    return str(caught.value)


@pytest.mark.parametrize("by_caller", [False, True], ids=["by wrap", "by the caller"])
def test_zero_bubble_refuses_layers_that_fsdp2_reshards(by_caller: bool, workers_4: Workers) -> None:
    """FSDP2 of torch 2.13 loses the gradients of their weights silently."""
    for sentence in workers_4.run(resharded_layers, "InterleavedZeroBubble", True, by_caller):
        assert "FSDP2(reshard_after_forward=False)" in sentence


def test_evaluation_of_a_v_schedule_is_refused(workers_4: Workers) -> None:
    for sentence in workers_4.run(resharded_layers, "ZBVZeroBubble", False):
        assert "which torch does not evaluate" in sentence


def resharded_layers(schedule: str, is_training: bool, by_caller: bool = False) -> str:
    data = "none" if by_caller else "fsdp2"
    pipeline = Pipeline(make_uncut("llama"), schedule, data=data, reshard_after_forward=is_training)
    for module in pipeline.modules if by_caller else ():
        fully_shard(module, mesh=pipeline.mesh["data"])
    refused = pytest.raises(liger_dist.LigerDistError)
    with torch.set_grad_enabled(is_training), custom_nodes_are_kept(True), refused as caught:
        pipeline.step(make_rows(pipeline.data_rank))
    return str(caught.value)


@pytest.mark.parametrize(
    "what", ["rows of lm_head", "experts on ranks", "another strategy on one rank", "a refusal of one stage"]
)
def test_wrap_refuses_a_stage_on_all_ranks(what: str, workers_4: Workers) -> None:
    expected = {
        "rows of lm_head": "whose collectives a schedule does not know",
        "experts on ranks": "FSDP2 and expert_parallel=2, whose collectives a schedule does not know",
        "another strategy on one rank": "ranks call wrap with different settings",
        "a refusal of one stage": "expected a DeviceMesh",
    }[what]
    for sentence in workers_4.run(refused_wrap, what, time_limit=60):
        assert expected in sentence


def refused_wrap(what: str) -> str:
    rank = dist.get_rank()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp"))
    stage = liger_dist.pipeline_stage(make_uncut("llama"), rank // 2, 2)
    options: dict[str, Any] = {"mesh": mesh["dp"]}
    if what == "rows of lm_head":
        options["lm_head"] = "vocab_parallel"
    if what == "experts on ranks":
        options["expert_parallel"] = 2
    if what == "another strategy on one rank" and rank == 0:
        options["reshard_after_forward"] = False
    if what == "a refusal of one stage" and rank == 3:
        options = {}
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(stage, liger_dist.FSDP2(**options))
    return str(caught.value)
