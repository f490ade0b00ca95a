"""Trainer and Accelerate with the model's loss fused, against the same run without."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from hosts import watched
from models import VOCAB_SIZE, make_batch, make_model
from trainers import (
    Sequences,
    assert_same_weights,
    forget_earlier_trainers,
    full_weights,
    gpus_for,
    logged_losses,
    pretended_gpus,
    sgd_arguments,
    train_watched,
)

import liger_dist
from liger_dist.record import is_wrapped

ROWS = 8
CONFIG = liger_dist.WrapConfig(memory_budget=ROWS * VOCAB_SIZE * 4)
ENGINES = ("ddp", "fsdp1", "fsdp2", "zero2", "zero3")


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("engine", "head", "how"),
    [
        *((engine, "gather", how) for engine in ENGINES for how in ("fuse", "wrapped first")),
        ("fsdp2", "vocab_parallel", "fuse"),
    ],
)
def test_a_trainer_trains_and_evaluates_as_before(engine: str, head: str, how: str, workers_2: Workers) -> None:
    """Metrics and predictions too, also of a model that was wrapped before the trainer was made."""
    with tempfile.TemporaryDirectory() as folder:
        for fused, unfused in workers_2.run(trained_twice, engine, head, folder, how):
            assert unfused["fused calls"] == 0
            # Two steps of three micro-batches, and evaluation of two; metrics and predictions are from logits.
            assert fused["fused calls"] == 6 + 2
            assert fused["most logits"] <= ROWS < unfused["most logits"]
            # No rank computes full logits of a vocab-parallel lm_head.
            assert (fused["most logits"] == 0) == (head == "vocab_parallel")
            assert fused["losses"] == pytest.approx(unfused["losses"], rel=1e-5)
            assert len(set(unfused["losses"])) == 2
            assert fused["eval_loss"] == pytest.approx(unfused["eval_loss"], rel=1e-5)
            assert fused["metrics"] == pytest.approx(unfused["metrics"], rel=1e-5)
            np.testing.assert_allclose(fused["predictions"], unfused["predictions"], rtol=1e-3, atol=1e-4)


def trained_twice(engine: str, head: Any, folder: str, how: str) -> list[dict[str, Any]]:
    return [trained(engine, head, folder, how), trained_as_before(engine)]


@functools.cache
def trained_as_before(engine: str) -> dict[str, Any]:
    """The run that several tests compare with, once for a process."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(engine, "gather", folder, "as before")


def trained(engine: str, head: Any, folder: str, how: str) -> dict[str, Any]:
    from liger_dist.integrations.trainer import fuse

    trainer = make_trainer(engine, folder, wraps=how == "wrapped first")
    if how == "fuse":
        assert fuse(trainer, CONFIG, lm_head=head) is trainer
    with watched() as seen:
        trainer.train()
        found: dict[str, Any] = {"eval_loss": trainer.evaluate()["eval_loss"]}
    found |= {"fused calls": seen.fused_calls, "most logits": seen.most_logits}
    trainer.compute_metrics = lambda prediction: {
        "accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())
    }
    found["metrics"] = [trainer.evaluate()[name] for name in ("eval_loss", "eval_accuracy")]
    found["predictions"] = trainer.predict(trainer.eval_dataset).predictions
    found["losses"] = logged_losses(trainer)
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_a_checkpoint_goes_on_where_it_was(engine: str, workers_2: Workers) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for straight, resumed in workers_2.run(resumed_from_the_first_step, engine, folder):
            assert resumed == pytest.approx(straight, rel=1e-6)


def resumed_from_the_first_step(engine: str, folder: str) -> tuple[float, float]:
    """Losses of the second step."""
    from liger_dist.integrations.trainer import fuse

    losses = []
    for checkpoint in (None, f"{folder}/checkpoint-1"):
        trainer = fuse(make_trainer(engine, folder, save_strategy="steps", save_steps=1), CONFIG)
        trainer.train(resume_from_checkpoint=checkpoint)
        losses.append([entry["loss"] for entry in trainer.state.log_history if entry["step"] == 2 and "loss" in entry])
    return losses[0][-1], losses[1][-1]


def test_a_section_in_the_trainers_deepspeed_json(workers_2: Workers) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for calls, rows in workers_2.run(trained_by_a_section, folder):
            assert calls == 6
            assert 0 < rows <= ROWS


def trained_by_a_section(folder: str) -> tuple[int, int]:
    trainer = make_trainer("zero2", folder, section={"memory_budget": CONFIG.memory_budget})
    from liger_dist.integrations.deepspeed import install, uninstall

    install()
    try:
        found = train_watched(trainer)
    finally:
        uninstall()
    return found["fused calls"], found["most logits"]


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("version", "head"), [(1, "gather"), (2, "gather"), (2, "vocab_parallel"), (1, None), (2, None)]
)
def test_accelerate_keeps_the_loss_in_fp32(version: int, head: str | None, workers_2: Workers) -> None:
    """bf16 layers, fp32 masters; loss and gradients against the same without the fused loss. Without a ``head``
    Accelerate itself prepares a model that was wrapped first."""
    if (version, head) == (1, "vocab_parallel"):
        pytest.skip("FSDP1 has no vocab-parallel lm_head")
    for fused, unfused in workers_2.run(accelerated_twice, version, head):
        assert fused["dtype"] == torch.float32
        assert fused["fused calls"] == 3
        assert unfused["fused calls"] == 0
        assert fused["losses"] == pytest.approx(unfused["losses"], rel=2e-2)
        assert_same_weights(fused["weights"], unfused["weights"], rtol=0.05, atol=0.01)


def accelerated_twice(version: int, head: Any) -> list[dict[str, Any]]:
    return [accelerated(version, head, fused=fused) for fused in (True, False)]


def accelerated(version: int, head: Any, *, fused: bool) -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FullyShardedDataParallel

    from liger_dist.integrations.accelerate import prepare

    forget_earlier_trainers()
    with pretended_gpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
            use_orig_params=True,
            **({"sync_module_states": False} if version == 1 else {}),
        )
        accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = make_model("llama", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched() as seen:
        if fused and head is None:
            model, optimizer = accelerator.prepare(liger_dist.wrap(model, config=CONFIG), optimizer)
        elif fused:
            model, optimizer = prepare(accelerator, model, optimizer, config=CONFIG, lm_head=head)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for number in range(3):
            loss = model(**make_batch(dist.get_rank(), seed=number), use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    weights = full_weights(model) if not isinstance(model, FullyShardedDataParallel) else {}
    return {
        "losses": [float(loss) for loss in losses],
        "dtype": losses[0].dtype,
        "weights": weights,
        "fused calls": seen.fused_calls,
    }


def test_settings_that_do_not_fit_a_vocab_parallel_lm_head(workers_2: Workers) -> None:
    for sentences in workers_2.run(refused_settings):
        for name, sentence in sentences.items():
            assert sentence.startswith(f"fsdp_{name} is set")


def refused_settings() -> dict[str, str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from liger_dist.integrations.accelerate import prepare

    found = {}
    for name, value in (
        ("activation_checkpointing", True),
        ("ignored_modules", "mlp"),
        ("cpu_ram_efficient_loading", True),
    ):
        forget_earlier_trainers()
        with pretended_gpus():
            settings = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, name: value}
            accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**settings))
        model = make_model("llama", dtype=torch.float32)
        with pytest.raises(liger_dist.LigerDistError) as caught:
            prepare(accelerator, model, config=CONFIG, lm_head="vocab_parallel")
        assert not is_wrapped(model)
        found[name] = str(caught.value)
    return found


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel is True"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1"),
        ({"compute_loss_func": lambda *_: None}, "compute_loss_func is given"),
        ({"model_init": lambda: make_model("llama").cpu()}, "model_init is given"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_trainer_that_gives_its_loss_to_somebody_else(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    from liger_dist.integrations.trainer import fuse

    # Set later: the Trainer of transformers 5.0 patches the model's classes for the whole process.
    uses_liger = options.get("use_liger_kernel", False)
    trainer = make_trainer(None, str(tmp_path), **({} if uses_liger else options))
    trainer.args.use_liger_kernel = uses_liger
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        fuse(trainer)
    assert not is_wrapped(trainer.model)


def test_packed_rows_of_a_model_that_mixes_documents(tmp_path: Path) -> None:
    """Before data is read: by a setting, by the collator of a Trainer, and by that of a data loader."""
    from accelerate import Accelerator
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    from liger_dist.integrations.accelerate import prepare
    from liger_dist.integrations.trainer import fuse

    forget_earlier_trainers()
    model, data = make_model("ernie", dtype=torch.float32).cpu(), ["is not read"]
    arguments = TrainingArguments(**sgd_arguments(str(tmp_path), None))
    trainer = Trainer(model=model, args=arguments, data_collator=DataCollatorWithFlattening(), train_dataset=data)
    with pytest.raises(liger_dist.LigerDistError, match="data_collator packs documents into rows, which ErnieFor"):
        fuse(trainer)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.args.sample_packing = True
    with pytest.raises(liger_dist.LigerDistError, match="sample_packing packs documents into rows"):
        fuse(trainer)
    loader = torch.utils.data.DataLoader(data, collate_fn=DataCollatorWithFlattening())
    forget_earlier_trainers()
    with pytest.raises(liger_dist.LigerDistError, match="DataCollatorWithFlattening packs documents"):
        prepare(Accelerator(cpu=True), model, loader)
    assert not is_wrapped(model)


def test_a_vocab_parallel_lm_head_is_for_fsdp2(tmp_path: Path) -> None:
    from liger_dist.integrations.trainer import fuse

    trainer = make_trainer(None, str(tmp_path))
    with pytest.raises(liger_dist.LigerDistError, match="expected FSDP with fsdp_version=2"):
        fuse(trainer, lm_head="vocab_parallel")
    with pytest.raises(liger_dist.LigerDistError, match="lm_head is 'vocab-parallel'; expected one of"):
        fuse(trainer, lm_head="vocab-parallel")  # type: ignore[arg-type]
    assert not is_wrapped(trainer.model)


def make_trainer(
    engine: str | None, folder: str, *, section: dict[str, Any] | None = None, wraps: bool = False, **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    forget_earlier_trainers()
    others = {name: options.pop(name) for name in ("compute_loss_func", "model_init") if name in options}
    arguments = sgd_arguments(
        folder,
        engine,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=3,
        max_steps=2,
        learning_rate=0.05,
        **options,
    )
    if section is not None:
        arguments["deepspeed"]["liger_dist"] = section
    if "model_init" not in others:
        model = make_model("llama", dtype=torch.float32).cpu()
        others["model"] = liger_dist.wrap(model, config=CONFIG) if wraps else model
    data = Sequences()
    with gpus_for(engine):
        trainer = Trainer(args=TrainingArguments(**arguments), train_dataset=data, eval_dataset=data, **others)
    kinds = {"fsdp": "FSDP", "zero": "DEEPSPEED", "ddp": "MULTI_GPU" if torch.cuda.is_available() else "MULTI_CPU"}
    assert engine is None or trainer.accelerator.distributed_type.value == kinds[engine.rstrip("123")]
    return trainer


def test_predictions_that_are_generated(tmp_path: Path) -> None:
    """Seq2SeqTrainer's prediction step calls generate, with what it is given."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from liger_dist.integrations.trainer import fuse

    forget_earlier_trainers()
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        predict_with_generate=True,
        generation_max_length=6,
        per_device_eval_batch_size=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    predictions = []
    for fused in (True, False):
        model = make_model("t5", dtype=torch.float32).cpu()
        trainer = Seq2SeqTrainer(model=model, args=arguments, eval_dataset=Sequences())
        if fused:
            fuse(trainer)
        predictions.append(trainer.predict(trainer.eval_dataset).predictions)
    np.testing.assert_array_equal(*predictions)


def test_a_model_that_stays_unfused_still_gives_its_logits(tmp_path: Path) -> None:
    from liger_dist.integrations.trainer import fuse

    trainer = make_trainer(None, str(tmp_path))
    fuse(trainer, liger_dist.WrapConfig(fused_loss=False))
    assert trainer.predict(trainer.eval_dataset).predictions.shape[-1] == VOCAB_SIZE
