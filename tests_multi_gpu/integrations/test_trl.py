"""TRL's trainers with this library's head, against the same trainers with TRL's own: losses, metrics and weights."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import tempfile
import types
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import InThisProcess, Workers
from models import VOCAB_SIZE, make_config, make_model
from models import make_model as make_model_of
from torch.distributed.tensor import DTensor
from trainers import (
    assert_same_weights,
    forget_earlier_trainers,
    full_weights,
    gpus_for,
    make_tokenizer,
    sgd_arguments,
    train_watched,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from truth import relative_error

import liger_dist
from liger_dist.hosts.scored_logits import ScoredLogits
from liger_dist.model.keywords import renamed_keywords
from liger_dist.record import is_wrapped
from liger_dist.sharding.fsdp2.strategy import LMHead

HAS_HEAD = importlib.util.find_spec("trl") is not None and version("trl") >= "1.16"
"""Python 3.10 has only earlier releases of TRL, without a fused lm_head"""
pytestmark = pytest.mark.skipif(not HAS_HEAD, reason="TRL 1.16 is not installed")
ROWS = 8
CONFIG = liger_dist.WrapConfig(memory_budget=ROWS * VOCAB_SIZE * 4)
KINDS = (
    "SFT",
    "SFT by dft",
    "SFT packed",
    "SFT padding-free",
    "DPO",
    "DPO weighted",
    "KTO",
    "GRPO",
    "GRPO with an fp32 head",
    "RLOO",
    "CPO",
    "ORPO",
    "OnlineDPO",
)
NO_REFERENCE: dict[str, Any] = {"beta": 0.0}
FURTHER: dict[str, dict[str, Any]] = {
    "GRPO without a reference": NO_REFERENCE,
    "RLOO without a reference": NO_REFERENCE,
    "DPO weighted": {"use_weighting": True},
    "SimPO": {"loss_type": "simpo", "cpo_alpha": 0.0},
    "OnlineDPO": {"max_new_tokens": 6, "eval_strategy": "no"},
    "Distillation": {"max_completion_length": 6, "temperature": 0.9, "beta": 1.0},
    "Distillation by JSD": {"max_completion_length": 6, "beta": 0.3},
    "GKD": {"max_new_tokens": 6, "lmbda": 0.5, "beta": 0.3, "max_length": 24},
    "GOLD": {
        "max_completion_length": 6,
        "lmbda": 0.0,
        "beta": 0.0,
        "max_length": 24,
        "use_uld_loss": False,
        "use_extended_uld": False,
    },
    "GRPO with an fp32 head": NO_REFERENCE | {"cast_lm_head_to_fp32": True},
}
DISTILLERS = ("Distillation", "Distillation by JSD", "GKD", "GOLD")
WITHOUT_A_HEAD = ("CPO", "SimPO", "ORPO", "OnlineDPO")
"""trainers that compute log-probabilities from full logits"""
NOT_WRAPPED_FIRST = ("GRPO", "RLOO", *DISTILLERS)
WRAPPED_FIRST = [kind for kind in dict.fromkeys((*KINDS, *FURTHER, *WITHOUT_A_HEAD)) if kind not in NOT_WRAPPED_FIRST]
PADDING_FREE = {"padding_free": True, "max_length": None}
How = Literal["TRL's own", "fused_heads", "wrapped first"]
UNLIKE = ("runtime", "per_second", "step_time", "epoch", "num_tokens", "kl", "total_flos")
"""in the names of what is no result; the kl of equal models is noise, and Trainer counts no operation under ZeRO-3"""


@pytest.mark.nightly(kind=["DPO"])
@pytest.mark.nightly(
    kind=["GRPO with an fp32 head", "RLOO", "OnlineDPO", "SFT by dft", "SFT packed", "SFT padding-free", "KTO"]
)
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="TRL wants one process for each GPU that it sees")
@pytest.mark.parametrize("kind", KINDS)
def test_one_process(kind: str) -> None:
    with InThisProcess() as here:
        assert_as_trl(here.run(trained_twice, kind, None))


@pytest.mark.nightly(
    kind=[
        "SFT by dft",
        "SFT packed",
        "SFT padding-free",
        "DPO weighted",
        "KTO",
        "GRPO with an fp32 head",
        "CPO",
        "GRPO without a reference",
        "RLOO without a reference",
    ]
)
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="TRL wants one process for each GPU that it sees")
@pytest.mark.parametrize("kind", WRAPPED_FIRST)
def test_wrapped_first(kind: str) -> None:
    """Without another line: the trainer gets a wrapped model. GRPO and RLOO load their references themselves."""
    with InThisProcess() as here:
        assert_as_trl(here.run(functools.partial(trained_twice, kind, None, how="wrapped first")))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="TRL wants one process for each GPU that it sees")
@pytest.mark.parametrize("kind", DISTILLERS)
def test_distillation(kind: str) -> None:
    with InThisProcess() as here:
        assert_as_trl(here.run(trained_twice, kind, None))


@pytest.mark.cover("values")
@pytest.mark.nightly(engine=["ddp"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        # One of them shows a replicated teacher, and JSD is another option of the same trainer.
        pytest.param(
            kind,
            engine,
            marks=[pytest.mark.nightly] * (kind != "Distillation" and (engine == "ddp" or "JSD" in kind)),
        )
        for kind in DISTILLERS
        for engine in ("ddp", "fsdp2", "zero3")
    ],
)
def test_distillation_in_two_processes(kind: str, engine: str, workers_2: Workers) -> None:
    """With a sharded teacher; TRL's own run is replicated, where the teacher is full."""
    results = workers_2.run(trained_twice, kind, engine, "ddp")
    assert_as_trl(results)
    for fused, own in results:
        assert own["teacher's share"] == 1.0
        assert fused["teacher's share"] == 1.0 if engine == "ddp" else fused["teacher's share"] < 0.6


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("SFT", "fsdp1"),
        ("ORPO", "zero3"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                *(("SFT", "ddp"), ("DPO", "fsdp2"), ("GRPO without a reference", "zero3"), ("CPO", "fsdp2")),
                *(("SimPO", "ddp"), ("OnlineDPO", "fsdp2")),
            )
        ),
    ],
)
def test_wrapped_first_in_two_processes(kind: str, engine: str, workers_2: Workers) -> None:
    assert_as_trl(workers_2.run(trained_twice, kind, engine, None, False, "gather", "wrapped first"))


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("SFT", "fsdp1"),
        ("SFT packed", "fsdp2"),
        ("DPO", "zero3"),
        ("GRPO", "ddp"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                *(("SFT", engine) for engine in ("ddp", "fsdp2", "zero3")),
                *(("DPO", engine) for engine in ("ddp", "fsdp2")),
                *(("SFT padding-free", "zero3"), ("KTO", "fsdp2"), ("RLOO", "fsdp2")),
            )
        ),
    ],
)
def test_two_processes(kind: str, engine: str, workers_2: Workers) -> None:
    assert_as_trl(workers_2.run(trained_twice, kind, engine))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="TRL wants one process for each GPU that it sees")
@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text"])
def test_documents_without_padding_are_those_with_padding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same documents in the same steps: attention between them, or a state that runs on, would change every loss
    and weight."""
    if family not in CONFIG_MAPPING:
        pytest.skip("another transformers")
    monkeypatch.setitem(globals(), "make_model", lambda _, **options: make_model_of(family, **options))
    with InThisProcess() as here:
        padded, padding_free = (
            here.run(functools.partial(trained, kind, None, how="fused_heads", adapted=False))[0]
            for kind in ("SFT", "SFT padding-free")
        )
    losses = [name for name in padded["log"] if name.endswith("loss")]
    assert len(losses) >= 3
    for name in losses:
        assert padding_free["log"][name] == pytest.approx(padded["log"][name], rel=1e-5), name
    for name, weight in padded["weights"].items():
        assert relative_error(padding_free["weights"][name], weight) < 1e-5, name


def test_vocab_parallel(workers_2: Workers) -> None:
    assert_as_trl(workers_2.run(trained_twice, "SFT", "fsdp2", None, False, "vocab_parallel"))


def test_adapters_and_a_saved_head(workers_2: Workers) -> None:
    """PEFT's ``modules_to_save`` under FSDP2, where TRL's own head leaves gradients on their processes."""
    assert_as_trl(workers_2.run(trained_twice, "SFT", "fsdp2", "ddp", True))


def test_what_this_head_does_not_have(tmp_path: Path) -> None:
    from trl.trainer import dpo_trainer, utils

    from liger_dist.integrations import trl as trl_plug
    from liger_dist.integrations.trainer import fuse
    from liger_dist.integrations.trl import fused_heads

    own = utils.add_fused_lm_head
    forget_earlier_trainers()
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    with (
        mock.patch.object(trl_plug, "wrap_for", wraps=trl_plug.wrap_for) as wrapping,
        pytest.raises(liger_dist.LigerDistError, match="fused_loss=False"),
        fused_heads(liger_dist.WrapConfig(fused_loss=False)),
    ):
        make_trl_trainer("SFT", dict(arguments), False)
    assert not is_wrapped(wrapping.call_args.args[1])
    assert utils.add_fused_lm_head is dpo_trainer.add_fused_lm_head is own
    trainer_of_cpo = classes_of("CPO")[1]
    with pytest.raises(liger_dist.LigerDistError, match="model is 'a path', which CPOTrainer would"), fused_heads():
        trainer_of_cpo("a path")
    with (
        pytest.raises(liger_dist.LigerDistError, match="'vocab_parallel', which CPOTrainer does not have"),
        fused_heads(lm_head="vocab_parallel"),
    ):
        trainer_of_cpo(make_model("qwen2"))
    model = liger_dist.wrap(make_model("qwen2"))
    with pytest.raises(liger_dist.LigerDistError, match="to which TRL has not added its head"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4).long(), fused_lm_head=True)
    forget_earlier_trainers()
    trainer = make_trl_trainer("DPO", arguments, False)
    with pytest.raises(liger_dist.LigerDistError, match="fused_heads"):
        fuse(trainer)
    assert not is_wrapped(trainer.model)


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("setting", ["packing", "padding_free"])
def test_packed_rows_of_a_model_that_mixes_documents(setting: str, is_loaded: bool, tmp_path: Path) -> None:
    """Of a model, and of one that the trainer loads."""
    from trl import SFTTrainer

    from liger_dist.integrations.trl import fused_heads

    forget_earlier_trainers()
    own = SFTTrainer.__init__
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, setting: True}
    arguments["max_length"] = 24 if setting == "packing" else None
    expected = pytest.raises(liger_dist.LigerDistError, match=f"{setting} packs documents into rows, which ErnieFor")
    if is_loaded:
        make_model("ernie", dtype=torch.float32).cpu().save_pretrained(tmp_path)
        with expected, fused_heads():
            SFTTrainer(
                model=str(tmp_path),
                args=classes_of("SFT")[0](**arguments),
                train_dataset=text_rows(),
                processing_class=make_tokenizer(),
            )
    else:
        with expected, fused_heads(), mock.patch.object(SFTTrainer, "_prepare_dataset") as reading:
            make_trl_trainer("SFT", arguments, False, family="ernie")
        assert not reading.called
    assert SFTTrainer.__init__ is own


def text_rows() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"text": "hello world"}] * 4)


def test_calls_as_trl_makes_them() -> None:
    """With labels that are shifted already, without labels, and without the flag."""
    from liger_dist.integrations.trl import fused_heads

    forget_earlier_trainers()
    arguments = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False}
    ids = torch.arange(3, 13)[None]
    with fused_heads():
        model = make_trl_trainer("SFT", arguments, False).model
    plain = model(input_ids=ids)
    expected = plain.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    next_ids = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    scored = model(input_ids=ids, labels=ids, fused_lm_head=True)
    shifted = model(input_ids=ids, labels=None, shift_labels=next_ids, fused_lm_head=True)
    assert torch.allclose(scored.log_probs, expected, atol=1e-6)
    assert scored.log_probs.requires_grad
    assert torch.allclose(shifted.log_probs[:, :-1], expected, atol=1e-6)
    assert shifted.log_probs[0, -1] == 0
    assert torch.equal(shifted.label_mask, next_ids != -100)
    assert torch.allclose(model(input_ids=ids, labels=ids, fused_lm_head=False).loss, -expected.mean())
    with pytest.raises(liger_dist.LigerDistError, match="without labels"):
        model(input_ids=ids, fused_lm_head=True)
    assert torch.equal(model(input_ids=ids).logits, plain.logits)


def test_a_vision_language_model() -> None:
    """Every output and gradient against TRL's own head, with a temperature."""
    from accelerate import Accelerator
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration
    from trl.trainer import utils

    from liger_dist.integrations.trl import fused_heads

    forget_earlier_trainers()
    Accelerator(cpu=True)
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=make_config("llama"), image_token_id=100)
    ours: Any = LlavaForConditionalGeneration(config)
    own = copy.deepcopy(ours)
    fields = ("log_probs", "entropy", "mean_logits", "is_top1")
    utils.add_fused_lm_head(own, temperature=0.7, outputs=fields)
    with fused_heads(CONFIG):
        utils.add_fused_lm_head(ours, temperature=0.7, outputs=fields)
    ids = torch.randint(3, 99, (2, 12))
    ids[:, 1:5] = 100
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "labels": ids.masked_fill(ids == 100, -100)}
    results = []
    for model in (ours, own):
        scored = model(**batch, fused_lm_head=True)
        (scored.log_probs.sum() + 0.3 * scored.entropy.sum()).backward()
        results.append(scored)
    for name in ("loss", "log_probs", "entropy", "mean_logits"):
        assert relative_error(*(getattr(scored, name) for scored in results)) < 1e-5, name
    for name in ("is_top1", "label_mask"):
        assert torch.equal(*(getattr(scored, name).bool() for scored in results)), name
    trained = dict(own.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (trained[name].grad is None), name
        if parameter.grad is not None:
            assert relative_error(parameter.grad, trained[name].grad) < 1e-4, name


def assert_as_trl(results: list[list[dict[str, Any]]]) -> None:
    for fused, own in results:
        assert own["fused calls"] == 0
        assert fused["fused calls"] > 0
        assert fused["most logits"] <= ROWS
        assert fused["log"].keys() == own["log"].keys()
        for name, value in own["log"].items():
            assert fused["log"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert_same_weights(fused["weights"], own["weights"], atol=1e-5)


def trained_twice(
    kind: str,
    engine: str | None,
    engine_of_truth: str | None = None,
    adapted: bool = False,
    lm_head: LMHead = "gather",
    how: How = "fused_heads",
) -> list[dict[str, Any]]:
    fused = trained(kind, engine, how=how, adapted=adapted, lm_head=lm_head)
    return [fused, trained_by_trl(kind, engine_of_truth or engine, adapted)]


@functools.cache
def trained_by_trl(kind: str, engine: str | None, adapted: bool) -> dict[str, Any]:
    """The run that several tests compare with, once for a process."""
    return trained(kind, engine, how="TRL's own", adapted=adapted)


def trained(kind: str, engine: str | None, *, how: How, adapted: bool, lm_head: LMHead = "gather") -> dict[str, Any]:
    from liger_dist.integrations.trl import fused_heads

    forget_earlier_trainers()
    arguments = sgd_arguments(
        tempfile.mkdtemp(),
        engine,
        "Qwen2DecoderLayer",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=2,
        learning_rate=0.02,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
    )
    with gpus_for(engine):
        with fused_heads(config_for(kind), lm_head=lm_head) if how == "fused_heads" else nullcontext():
            trainer = make_trl_trainer(kind, arguments, adapted, wraps=how == "wrapped first")
        # Generation makes logits of one token for each sequence.
        found = train_watched(trainer)
    log = {
        f"{entry['step']} {name}": value
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if isinstance(value, float) and not any(word in name for word in UNLIKE)
    }
    found |= {"log": log, "weights": full_weights(trainer.model)}
    if getattr(trainer, "teacher_model", None) is not None:
        found["teacher's share"] = share_of(trainer.teacher_model)
    return found


def share_of(model: torch.nn.Module) -> float:
    """The part of a model's numbers that this rank stores."""
    stored = total = 0
    for parameter in model.parameters():
        is_of_zero = hasattr(parameter, "ds_tensor")
        total += parameter.ds_numel if is_of_zero else parameter.numel()  # type: ignore[attr-defined]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        stored += parameter.ds_tensor.numel() if is_of_zero else local.numel()  # type: ignore[attr-defined]
    return stored / total


def config_for(kind: str) -> liger_dist.WrapConfig:
    """Metrics of some average logits of padding, which the library's own attention computes in another way."""
    return replace(CONFIG, varlen_attention=kind not in WITHOUT_A_HEAD)


def classes_of(kind: str) -> tuple[Any, Any]:
    """Settings and trainer; those without TRL's fused head are experimental."""
    import trl

    name = {"SimPO": "CPO"}.get(kind.split()[0], kind.split()[0])
    folders = {"CPO": "cpo", "ORPO": "orpo", "OnlineDPO": "online_dpo", "GKD": "gkd", "GOLD": "gold"}
    folder = folders.get(name)
    module = trl if folder is None else importlib.import_module(f"trl.experimental.{folder}")
    return getattr(module, f"{name}Config"), getattr(module, f"{name}Trainer")


def make_trl_trainer(
    kind: str, arguments: dict[str, Any], adapted: bool, *, wraps: bool = False, family: str = "qwen2"
) -> Any:
    from datasets import Dataset

    model = make_model(family, dtype=torch.float32).cpu()
    extra: dict[str, Any] = {"model": model, "processing_class": make_tokenizer()}
    if adapted:
        import peft

        torch.manual_seed(0)
        extra["peft_config"] = peft.LoraConfig(
            target_modules=["q_proj"], modules_to_save=["lm_head"], r=2, task_type="CAUSAL_LM"
        )
    numbers = range(8)
    if kind.startswith("SFT"):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": "abc"[: 1 + n % 3]},
                    {"role": "assistant", "content": "hello world"[: 3 + n]},
                ]
            }
            for n in numbers
        ]
        arguments |= {"assistant_only_loss": True, "loss_type": "dft" if kind.endswith("dft") else "nll"}
        arguments |= {"SFT packed": {"packing": True, "max_length": 24}, "SFT padding-free": PADDING_FREE}.get(kind, {})
    elif kind.startswith(("DPO", "CPO", "SimPO", "ORPO")):
        rows = [
            {"prompt": "abc"[: 1 + n % 3], "chosen": "hello"[: 3 + n % 2], "rejected": "world!"[: 2 + n % 4]}
            for n in numbers
        ]
    elif kind in DISTILLERS:
        rows = distillation_rows(kind)
        extra["teacher_model"] = make_model("qwen2", dtype=torch.float32, seed=3).cpu()
    elif kind == "KTO":
        rows = [{"prompt": "abc"[: 1 + n % 3], "completion": "hello"[: 2 + n % 4], "label": n < 4} for n in numbers]
    else:
        rows = [{"prompt": "abc"[: 1 + n % 3]} for n in numbers]
        # They read their reference model from where the model came from.
        folders = [arguments["output_dir"]]
        if dist.is_initialized():
            dist.broadcast_object_list(folders)
        model.save_pretrained(folders[0])  # type: ignore[operator]
        if dist.is_initialized():
            dist.barrier()
        extra["model"] = type(model).from_pretrained(folders[0], attn_implementation="eager")  # type: ignore[attr-defined]
        extra["reward_funcs"] = rewards
        # They load it with device_map="auto", which puts one model on all GPUs that a process sees.
        if kind != "OnlineDPO":
            arguments |= {"model_init_kwargs": {"device_map": None}}
            arguments |= {"num_generations": 2, "max_completion_length": 6, "temperature": 0.7, "beta": 0.1}
    if kind.startswith(("DPO", "KTO")):
        extra["ref_model"] = make_model("qwen2", dtype=torch.float32, seed=1).cpu()
    for name in [name for name in ("model", "ref_model") if wraps and name in extra]:
        extra[name] = liger_dist.wrap(extra[name], config=config_for(kind))
    arguments |= FURTHER.get(kind, {})
    data = Dataset.from_list(rows)
    settings, trainer = classes_of(kind)
    return trainer(args=settings(**arguments), train_dataset=data, eval_dataset=data, **extra)


def distillation_rows(kind: str) -> list[dict[str, Any]]:
    """Prompts for the on-policy trainer, and conversations for the others."""
    prompts = ["abc"[: 1 + n % 3] for n in range(8)]
    if kind.startswith("Distillation"):
        return [{"prompt": prompt} for prompt in prompts]
    turns = [("user", prompt, "assistant", "hello world"[: 3 + n]) for n, prompt in enumerate(prompts)]
    return [{"messages": [{"role": a, "content": b}, {"role": c, "content": d}]} for a, b, c, d in turns]


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def test_a_classifier(tmp_path: Path) -> None:
    """RewardTrainer's model has no token loss: wrapping says so before it changes anything, and it trains as before."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    forget_earlier_trainers()
    config = make_config("llama")
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(liger_dist.LigerDistError, match="a classifier has no token loss to fuse"):
        liger_dist.wrap(model)
    rows = {"chosen": ["abcd", "bcd", "ab"], "rejected": ["dcba", "d", "bca"]}
    arguments = RewardConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_steps=1, logging_steps=1
    )
    data = Dataset.from_dict(rows)
    trainer = RewardTrainer(model, arguments, train_dataset=data, processing_class=make_tokenizer())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


def concatenated_forward(model: Any, **call: Any) -> Any:
    return model(**call)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_call_with_a_cache_has_full_logits(name: str) -> None:
    """Inside a trainer's function, whose calls of a whole sequence have logits that stand for what it reads."""
    from transformers import DynamicCache
    from trl.experimental.cpo import cpo_trainer

    of_trainer = types.FunctionType(concatenated_forward.__code__, {"__name__": cpo_trainer.__name__})
    model: Any = make_model("llama")
    if name not in {*inspect.signature(type(model).forward).parameters, *renamed_keywords(type(model).forward)}:
        pytest.skip(f"this transformers has no {name}")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    ids = torch.arange(1, 9)[None]
    assert isinstance(of_trainer(model, input_ids=ids).logits, ScoredLogits)
    given: list[Any] = [DynamicCache(config=model.config) for _ in range(2)]
    for one, cache in zip((model, reference), given, strict=True):
        one(input_ids=ids[:, :5], use_cache=True, **{name: cache})
    logits = of_trainer(model, input_ids=ids[:, 5:], **{name: given[0]}).logits
    assert type(logits) is torch.Tensor
    assert relative_error(logits, reference(input_ids=ids[:, 5:], **{name: given[1]}).logits) < 1e-6
