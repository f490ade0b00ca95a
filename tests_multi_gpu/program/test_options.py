"""Options of the training program that people expect, each by what it does to a run."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import Workers
from models import make_model
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from training_runs import ROOT, config_for, losses_of, metrics_of, published, write_base
from transformers import AutoModelForCausalLM, LlamaConfig

import liger_dist
from liger_dist_train.config import RATIO_OF, TrainConfig, parse
from liger_dist_train.export import export
from liger_dist_train.model import add_lora
from liger_dist_train.optimizer import check_schedule, decayed_parameters, make_optimizer, make_schedule
from liger_dist_train.options import ELSEWHERE, ONE_TIME, usable_cores
from liger_dist_train.parser import to_yaml
from liger_dist_train.run import train
from liger_dist_train.scoring import ScoreConfig
from liger_dist_train.state_files import load_state, save_state

ALONE: dict[str, Any] = {"strategy": "none"}


def test_the_configuration_is_printed_and_reruns(data: Path, cache: Path, tmp_path: Path, capsys: Any) -> None:
    config = config_for(data, cache, tmp_path / "run", **ALONE, steps=2, learning_rate=3e-3, no_weight_decay=["q_proj"])
    train(config)
    said = capsys.readouterr().out
    assert "optimizer: learning_rate 0.003, warmup_steps 3, no_weight_decay q_proj\n" in said
    assert f"all options: {tmp_path}/run/config.yaml\n" in said
    again = parse([str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")])
    assert replace(again, output_dir=config.output_dir) == replace(config, global_batch_size=8)
    train(again)
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "run")


def test_every_option_survives_a_file(tmp_path: Path) -> None:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        value = getattr(TrainConfig(), field.name)
        if isinstance(value, bool):
            changed[field.name] = not value
        elif isinstance(value, int) and field.name not in ("eval_every",):
            changed[field.name] = value + 3
    changed |= {"data": ["a b", "c"], "data_weights": [0.5, 2.0], "lr_scheduler_kwargs": '{"power": 2.0}'}
    changed |= {
        "resume": False,
        "allow_changed_data": False,
        "shuffle_window": 256,
        "streaming": False,
        "dora": False,
        "load_in_4bit": False,
        "lora_rank": 0,
        "async_checkpoints": True,
        "dry_run": True,
        "world_size": 4,
        "top_k": 0,
        "sample_prompts": ["def f(", "null"],
    }
    config = TrainConfig(**changed)
    (tmp_path / "a.yaml").write_text(to_yaml(config))
    once = {field.name: getattr(TrainConfig(), field.name) for field in dataclasses.fields(config)}
    once = {name: value for name, value in once.items() if name in ONE_TIME}
    assert parse([str(tmp_path / "a.yaml")]) == replace(config, **once)
    (tmp_path / "b.yaml").write_text("steps: 7\nlr_scheduler_kwargs: {power: 2.0}\nlr_scheduler: polynomial\n")
    found = parse([str(tmp_path / "b.yaml"), "--steps", "9", "--learning_rate", "0.5"])
    assert (found.steps, found.learning_rate, found.lr_kwargs) == (9, 0.5, {"power": 2.0})


def test_what_a_run_was_asked_for_once_is_not_in_its_file(tmp_path: Path) -> None:
    """A rerun of config.yaml would otherwise remove the checkpoints that it has written."""
    (tmp_path / "a.yaml").write_text(to_yaml(TrainConfig(overwrite=True, stop_at_step=3, profile_step=2)))
    assert parse([str(tmp_path / "a.yaml")]) == TrainConfig()


def test_threads_and_processes_are_what_the_environment_and_the_cpu_set_allow(data: Path) -> None:
    """As on a node where Slurm gives a job some of the cores."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no CPU sets here")
    program = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import torch; "
        "from liger_dist_train import config, distributed\n"
        "for threads in (None, '2'):\n"
        "    os.environ |= {} if threads is None else {'OMP_NUM_THREADS': threads}\n"
        "    torch.set_num_threads(3)\n"
        "    distributed.start()\n"
        "    print(config.TrainConfig().num_proc, torch.get_num_threads())\n"
    )
    launch = Path(__file__).parents[2] / "launch"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(launch)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-2:] == ["1 1", "1 3"], ended.stderr[-2000:]
    assert TrainConfig().num_proc == usable_cores()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lerning_rate", "1"], "--lerning_rate is no option; the nearest is --learning_rate"),
        (["--xyzzy", "1"], "--xyzzy is no option; expected those that --help-all lists"),
        (["--gradient_accumulation_steps", "2"], "is no option: it follows from --global_batch_size"),
        (["--load-in-8bit", "true"], "--load_in_4bit true keeps frozen weights in 4 bits, under LoRA"),
        (["--load_in_4bit", "true"], "give the rank of the LoRA layers"),
        (["--neftune_noise_alpha", "5"], "belongs into a training loop"),
        (["--push_to_hub", "true"], "nothing is sent to a hub"),
        (["--pipeline_parallel_degree", "2"], "it shards with --strategy fsdp2"),
        (["--steps", "3", "--epochs", "1"], "give one of them"),
        (["--streaming", "true"], "give --steps"),
        (["--streaming", "true", "--steps", "3", "--keep_best", "true"], "need held-out data"),
        (["--dora", "true"], "give the rank of the LoRA layers"),
        (["--data", "a", "b", "--data_weights", "1"], "--data_weights has 1 numbers and --data 2 sources"),
        (["--data", "a", "--data_weights", "0"], "expected finite numbers above 0"),
        (["--global_batch_tokens", "1000"], "expected a multiple of --sequence_length, 512"),
        (["--global_batch_tokens", "512", "--global_batch_size", "1"], "give one of them"),
        (["--lr_scheduler", "cosin"], "expected one of linear, cosine"),
        (["--lr_scheduler", "reduce_lr_on_plateau"], "expected one of linear"),
        (["--lr_scheduler_kwargs", "[1]"], "expected a JSON object"),
        (["--early_stopping_patience", "2", "--eval_fraction", "0"], "need held-out data"),
        (["--keep_best", "true", "--checkpoint_every", "0"], "leave one out"),
        (["--epochs", "0"], "expected a number above 0"),
        (["--eval_fraction", "1"], "expected less than 1"),
        (["--grace_seconds", "-1"], "expected 0 or more"),
        (["--eval_data", "a", "--eval_every", "0"], "--eval_data is a, but --eval_every is 0"),
        (["--run_name", "a"], "--trackers names none"),
        (["--run_name", ""], "--run_name is '', an empty text"),
        (["--cache_dir", ""], "--cache_dir is '', an empty text"),
        (["--eval_data", ""], "--eval_data is '', an empty text"),
        (["--no_weight_decay", "embed", "--weight_decay", "0"], "--weight_decay is 0"),
        (["--lr_scheduler", "constant", "--warmup_steps", "2"], "--lr_scheduler is constant"),
        (["--data", "a", "--data_weights", "2"], "--data names one source"),
        (["--data", "a", "b", "--data_weights", "1", "nan"], "holds nan; expected finite"),
        (["--allow_changed_data", "true"], "--resume is false"),
        (["--steps", "3", "--stop_at_step", "4"], "expected a step of the run"),
        (["--steps", "3", "--stop_at_step", "2", "--profile_step", "3"], "expected a step of the run"),
        (["--teacher", "a", "--hard_weight", "1"], "would not count"),
        (["--top_k", "4", "--soft_weight", "0"], "would not count"),
        (["--layers_per_unit", "0"], "expected 1 or more"),
        (["--seed", "9999999999999999999"], "expected less than 2"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
)
def test_options_that_cannot_be_are_refused(options: list[str], words: str) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        parse(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lr_scheduler_kwargs", '{"last_epoch": 2}'], "does not take last_epoch"),
        (["--lr_scheduler_kwargs", '{"num_warmup_steps": 2}'], "--warmup_steps"),
        (["--min_learning_rate_ratio", "0.2", "--lr_scheduler_kwargs", '{"min_lr_rate": 0.5}'], "which is the same"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_arguments_of_schedules_that_cannot_be_are_refused(options: list[str], words: str) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        check_schedule(parse(options))


def test_options_of_other_programs_are_no_options_here() -> None:
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    assert known.isdisjoint(ELSEWHERE)
    for name, reason in ELSEWHERE.items():
        with pytest.raises(liger_dist.LigerDistError, match=f"--{name} is no option: {re.escape(reason)}"):
            parse([f"--{name}", "1"])
        for option in re.findall(r"--(\w+)", reason):
            assert option in known, option


def test_garbage_is_collected_on_all_ranks_together(data: Path, cache: Path, tmp_path: Path) -> None:
    automatic: list[bool] = []
    gc.callbacks.append(lambda *_: automatic.append(gc.isenabled()))
    try:
        train(config_for(data, cache, tmp_path / "run", **ALONE, steps=4, gc_every=2, checkpoint_every=0))
    finally:
        gc.callbacks.clear()
    first = automatic.index(False)
    last = len(automatic) - automatic[::-1].index(False)
    # Of each collection, its start and its end: before the first step and the third.
    assert automatic[first:last].count(False) >= 4
    assert not any(automatic[first:last])
    assert gc.isenabled()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_is_frozen_before_a_run_is_frozen_after_it(
    is_frozen: bool, data: Path, cache: Path, tmp_path: Path
) -> None:
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        train(config_for(data, cache, tmp_path / "run", **ALONE, steps=2, checkpoint_every=0))
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.freeze()


def test_a_file_with_an_unknown_name(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sequence_lenght: 3\n")
    with pytest.raises(
        liger_dist.LigerDistError, match="'sequence_lenght', which is no option; the nearest is --sequence_l"
    ):
        parse([str(tmp_path / "a.yaml")])


def test_epochs_are_passes_over_the_data(data: Path, cache: Path, tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 7 + 3) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train(config_for(tmp_path / "a.jsonl", cache, tmp_path / "run", **ALONE, steps=None, epochs=2, checkpoint_every=0))
    (source,) = json.loads((tmp_path / "run" / "data.json").read_text())["sources"]
    split = source["splits"]["train"]
    rows = metrics_of(tmp_path / "run")
    assert len(rows) == -(-2 * split["sequences"] // 8)
    assert rows[-1]["epoch"] == pytest.approx(len(rows) * 8 / split["sequences"])
    whole = [row for row in rows if row["epoch"] == 2]
    assert not whole or whole[0]["tokens"] == 2 * split["tokens"]


def test_a_step_has_the_same_sequences_on_any_number_of_ranks(
    workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Also where they do not divide: what is left of a micro-batch is padding."""
    changes = {"global_batch_size": 5, "batch_size": 2, "steps": 3, "checkpoint_every": 0}
    train(config_for(data, cache, tmp_path / "one", **ALONE, **changes))
    workers_2.run(train, config_for(data, cache, tmp_path / "two", **changes))
    for name in ("loss", "grad_norm", "tokens"):
        one, two = ([row[name] for row in metrics_of(tmp_path / way)] for way in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-4)


def test_a_resume_on_another_number_of_ranks_keeps_the_global_batch(
    workers_2: Workers, trained: Path, data: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000012")
    config = config_for(data, cache, tmp_path / "run", **ALONE, resume=True, global_batch_size=None, batch_size=1)
    train(config)
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(trained), rel=1e-4)
    tokens = [[row["tokens"] for row in metrics_of(folder)] for folder in (trained, tmp_path / "run")]
    assert tokens[0] == tokens[1]


def test_a_run_goes_on_from_the_step_that_is_named(trained: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    config = config_for(data, cache, tmp_path / "run", **ALONE, resume=True, resume_step=6, deterministic=True)
    with pytest.raises(liger_dist.LigerDistError, match=r"no checkpoint of it; there is step-00000006, step-00000012"):
        train(replace(config, resume_step=7))
    train(config)
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(trained), rel=1e-4)
    torch.use_deterministic_algorithms(False)


def test_changed_data_is_refused_unless_allowed(trained: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "moved").mkdir()
    config = config_for(tmp_path / "data", cache, tmp_path / "run", **ALONE, resume=True, steps=13)
    with (tmp_path / "data" / "ast0.txt").open("a") as file:
        file.write("one more word")
    with pytest.raises(
        liger_dist.LigerDistError, match=r"is not that of the checkpoint of step 12 .*--allow_changed_data"
    ):
        train(config)
    for changes in ({"sequence_length": 32}, {"eval_fraction": 0.1}, {"eval_data": [str(data / "ast1.txt")]}):
        with pytest.raises(liger_dist.LigerDistError, match="is not that of the checkpoint"):
            train(replace(config, data=[str(data)], **changes))
    train(replace(config, allow_changed_data=True))
    assert published(tmp_path / "run")[-1] == "step-00000013"


def test_a_copy_of_the_data_is_the_same_data(trained: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(data, tmp_path / "copied", copy_function=shutil.copyfile)
    train(config_for(tmp_path / "copied", cache, tmp_path / "run", **ALONE, resume=True, steps=13))


@pytest.mark.nightly(ranks=[1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_streamed_run_goes_on_exactly_or_is_refused(
    ranks: int, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"streaming": True, "shuffle_window": 4, "eval_data": [str(data / "ast0.txt")]}
    changes |= {"steps": 12, "checkpoint_every": 5}
    straight = config_for(data, cache, tmp_path / "straight", **changes)
    stopped = config_for(data, cache, tmp_path / "stopped", **changes, stop_at_step=5)
    go_on = replace(stopped, stop_at_step=None, resume=True)
    if ranks == 2:
        for config in (straight, stopped, go_on):
            workers_2.run(train, config)
    else:
        for config in (straight, stopped, go_on):
            train(replace(config, **ALONE))
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "straight")
    counted = [json.loads((tmp_path / way / "data.json").read_text()) for way in ("straight", "stopped")]
    assert counted[0] == counted[1]
    if ranks == 2:
        with pytest.raises(
            liger_dist.LigerDistError, match=r"2 ranks read the streams .* and 1 would go on; start as many"
        ):
            train(replace(go_on, **ALONE, steps=20))


def test_lora_trains_exports_merged_and_resumes(workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    base = write_base(cache, tmp_path / "base")
    lora: dict[str, Any] = {"model": str(base), "lora_rank": 4, "dora": True, "steps": 6, "checkpoint_every": 3}
    losses = {}
    for strategy in ("fsdp2", "ddp"):
        workers_2.run(train, config_for(data, cache, tmp_path / strategy, strategy=strategy, **lora))
        losses[strategy] = losses_of(tmp_path / strategy)
    assert losses["fsdp2"] == pytest.approx(losses["ddp"], rel=1e-5)
    stored = HuggingFaceStorageReader(str(tmp_path / "fsdp2" / "checkpoints" / "step-00000006")).read_metadata()
    names = [name for name in stored.state_dict_metadata if name.startswith("model.")]
    assert names
    assert all("lora_" in name for name in names), "frozen weights are in the checkpoint"
    shutil.rmtree(tmp_path / "fsdp2" / "checkpoints" / "step-00000006")
    train(config_for(data, cache, tmp_path / "fsdp2", **ALONE, **lora, resume=True))
    assert losses_of(tmp_path / "fsdp2") == pytest.approx(losses["ddp"], rel=1e-4)
    export(tmp_path / "fsdp2", tmp_path / "merged", step=None)
    export(tmp_path / "ddp", tmp_path / "other", step=None)
    weights = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("merged", "other", "base")
    ]
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-5)
    assert not torch.equal(weights[0][name], weights[2][name])
    assert torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])
    assert not [key for key in weights[0] if "lora" in key]


def test_a_dry_run_of_all_ranks_ends(workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    assert workers_2.run(train, config_for(data, cache, tmp_path / "run", dry_run=True)) == [None, None]
    assert not (tmp_path / "run").exists()


def test_lora_needs_weights_and_layers(data: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(liger_dist.LigerDistError, match="has no pretrained weights, which LoRA keeps"):
        train(config_for(data, cache, tmp_path / "run", **ALONE, lora_rank=4))
    base = write_base(cache, tmp_path / "base")
    with pytest.raises(liger_dist.LigerDistError, match="--lora_targets is"):
        train(config_for(data, cache, tmp_path / "run", **ALONE, lora_rank=4, model=str(base), lora_targets=["none"]))


def test_evaluation_alone(trained: Path, data: Path, cache: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(trained, tmp_path / "run")
    before = published(tmp_path / "run")
    train(config_for(data, cache, tmp_path / "run", **ALONE, eval_only=True, resume=True, eval_batches=4))
    found = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert found["step"] == 12
    assert found["eval_loss"] == pytest.approx(metrics_of(trained)[-1]["eval_loss"], rel=1e-5)
    assert "(perplexity " in capsys.readouterr().out
    for name in ("config.yaml", "data.json"):
        assert (tmp_path / "run" / name).read_text() == (trained / name).read_text(), name
    assert published(tmp_path / "run") == before
    assert len(metrics_of(tmp_path / "run")) == 12
    # With --eval_data, the data to train on is neither tokenised nor streamed.
    alone = config_for(data, cache, tmp_path / "run", **ALONE, eval_only=True, resume=True, streaming=True)
    train(replace(alone, data=[], eval_data=[str(data / "ast0.txt")]))
    with pytest.raises(liger_dist.LigerDistError, match="nowhere has no checkpoint; leave --resume out"):
        train(config_for(data, cache, tmp_path / "nowhere", **ALONE, eval_only=True, resume=True))
    with pytest.raises(liger_dist.LigerDistError, match="--eval_only needs held-out data"):
        train(config_for(data, cache, tmp_path / "run", **ALONE, eval_only=True, eval_fraction=0.0))


def test_all_held_out_data_is_evaluated_once(data: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text((data / "ast0.txt").read_text()[:3000])
    losses = []
    for batch_size, batches in ((2, 0), (3, 0), (2, 1000)):
        changes = {"eval_data": [str(tmp_path / "held_out.txt")], "eval_only": True, "eval_batches": batches}
        train(config_for(data, cache, tmp_path / "run", **ALONE, **changes, batch_size=batch_size))
        losses.append(json.loads((tmp_path / "run" / "eval.json").read_text())["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_the_best_checkpoint_stays_and_a_run_stops_early(data: Path, cache: Path, tmp_path: Path) -> None:
    """With a learning rate that rises until the loss does."""
    changes: dict[str, Any] = {
        "learning_rate": 3.0,
        "warmup_steps": 60,
        "steps": 60,
        "eval_every": 2,
        "max_grad_norm": 0.0,
    }
    changes |= {"keep_best": True, "early_stopping_patience": 3, "keep_checkpoints": 1, "checkpoint_every": 7}
    train(config_for(data, cache, tmp_path / "run", **ALONE, **changes))
    rows = metrics_of(tmp_path / "run")
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert len(rows) < 60
    assert [step for step in evaluated if step > best] == sorted(evaluated)[-3:]
    assert f"step-{best:08d}" in published(tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "best", step=None, best=True) == best


def test_losses_of_other_held_out_data_are_not_compared(data: Path, cache: Path, tmp_path: Path) -> None:
    texts = {name: tmp_path / f"{name}.txt" for name in ("easy", "hard")}
    texts["easy"].write_text((data / "ast0.txt").read_text()[:1500])
    texts["hard"].write_text("".join(chr(33 + i * 7 % 90) for i in range(1500)))
    changes: dict[str, Any] = {"steps": 6, "eval_every": 2, "checkpoint_every": 2, "keep_best": True}
    of_easy = config_for(data, cache, tmp_path / "run", **ALONE, **changes, eval_data=[str(texts["easy"])])
    train(replace(of_easy, stop_at_step=4))
    of_hard = replace(of_easy, eval_data=[str(texts["hard"])], resume=True)
    with pytest.raises(liger_dist.LigerDistError, match="held-out data is not that of the checkpoint of step 4, whose"):
        train(of_hard)
    train(replace(of_hard, allow_changed_data=True))
    losses = {row["step"]: row["eval_loss"] for row in metrics_of(tmp_path / "run") if "eval_loss" in row}
    assert losses[6] > losses[4], "of another text"
    assert export(tmp_path / "run", tmp_path / "best", step=None, best=True) == 6


def test_states_of_another_optimizer_are_refused(data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path / "run", **ALONE, steps=2, checkpoint_every=1, eval_every=0)
    train(replace(config, stop_at_step=1))
    with pytest.raises(liger_dist.LigerDistError, match="has the states of --optimizer adamw and --optimizer is muon"):
        train(replace(config, resume=True, optimizer="muon"))
    train(replace(config, resume=True))


def test_tensorboard_has_the_numbers(data: Path, cache: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(config_for(data, cache, tmp_path / "run", **ALONE, trackers=["tensorboard"], steps=5, log_every=2))
    seen = EventAccumulator(str(tmp_path / "run" / "liger_dist"))
    seen.Reload()
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 4, 5]
    for name in ("loss", "eval_loss", "learning_rate", "tokens"):
        expected = [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows if name in row]
        assert [(event.step, event.value) for event in seen.Scalars(name)] == expected
    with pytest.raises(liger_dist.LigerDistError, match="names 'tensorbord'; expected some of"):
        train(config_for(data, cache, tmp_path / "other", **ALONE, trackers=["tensorbord"]))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", ["linear", "cosine", "constant_with_warmup", "warmup_stable_decay", "cosine_with_min_lr"]
)
def test_schedules_are_those_of_transformers(name: str) -> None:
    ratio: dict[str, Any] = {"min_learning_rate_ratio": 0.25} if name in RATIO_OF else {}
    config = TrainConfig(lr_scheduler=name, warmup_steps=4, learning_rate=2.0, **ratio)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule, rates = make_schedule(optimizer, config, 20), []
    for _ in range(20):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates[3] == pytest.approx(2.0)
    share = make_schedule(optimizer, replace(config, warmup_steps=0.2), 20)
    assert share.get_last_lr() == make_schedule(optimizer, config, 20).get_last_lr()
    # That of transformers begins at the least.
    assert rates[0] == pytest.approx(0.875 if name == "warmup_stable_decay" else 0.5)
    ends = {"linear": 0.0, "cosine": 0.0, "constant_with_warmup": 2.0}
    assert rates[-1] == pytest.approx(ends.get(name, 0.5), abs=1e-6)
    with pytest.raises(liger_dist.LigerDistError, match="does not take"):
        make_schedule(optimizer, replace(config, lr_scheduler_kwargs='{"slope": 1}'), 20)


def test_weight_decay_is_of_matrices_that_are_not_named() -> None:
    model = make_model("llama")
    config = TrainConfig(weight_decay=0.3, no_weight_decay=["embed_tokens"], adam_beta1=0.8, adam_epsilon=1e-6)
    optimizer = make_optimizer(model, config, decayed_parameters(model, config))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = 0.3 if parameter.dim() == 2 and "embed_tokens" not in name else 0.0
        assert decay[id(parameter)] == expected, name
    lora = add_lora(model, replace(config, lora_rank=2, dora=True, no_weight_decay=["lora_B"]), has_weights=True)
    adapted = make_optimizer(lora, replace(config, no_weight_decay=["lora_B"]), frozenset())
    decay = {id(p): group["weight_decay"] for group in adapted.param_groups for p in group["params"]}
    trained = {name: decay[id(p)] for name, p in lora.named_parameters() if p.requires_grad}
    assert {value for name, value in trained.items() if "lora_A" in name} == {0.3}
    assert {value for name, value in trained.items() if "lora_A" not in name} == {0.0}
    assert {(*group["betas"], group["eps"]) for group in optimizer.param_groups} == {(0.8, 0.95, 1e-6)}


@pytest.mark.smoke
@pytest.mark.nightly(strategy=["none"])
@pytest.mark.parametrize("strategy", ["none", "fsdp2"])
def test_states_of_eight_bits(strategy: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    changes: dict[str, Any] = {"optimizer": "adamw_8bit", "steps": 4, "checkpoint_every": 2, "strategy": strategy}
    config = config_for(data, cache, tmp_path / "run", **changes)
    if strategy == "fsdp2":
        with pytest.raises(RuntimeError, match=r"shape \[601, 128\] has uneven shards over 2 ranks"):
            workers_2.run(train, config)
        return
    train(config)
    exact = replace(config, optimizer="adamw", output_dir=str(tmp_path / "exact"))
    train(exact)
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "exact"), rel=0.02)
    train(replace(config, resume=True, steps=6))
    assert len(losses_of(tmp_path / "run")) == 6


@pytest.mark.nightly
def test_states_of_eight_bits_resume(workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    """Bit for bit; and in one process, where k_proj has 4096 numbers, enough for 8 bits, and again in two."""
    pytest.importorskip("torchao")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 640}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "architectures": ["LlamaForCausalLM"]}
    LlamaConfig(**sizes, **heads).save_pretrained(tmp_path)
    changes: dict[str, Any] = {"optimizer": "adamw_8bit", "checkpoint_every": 2, "strategy": "fsdp2"}
    changes |= {"model": str(tmp_path / "config.json"), "steps": 6}
    config = config_for(data, cache, tmp_path / "whole", **changes)
    workers_2.run(train, config)
    halves = replace(config, output_dir=str(tmp_path / "halves"))
    workers_2.run(train, replace(halves, stop_at_step=2))
    train(replace(halves, strategy="none", resume=True, stop_at_step=4))
    stored = [HuggingFaceStorageReader(str(tmp_path / "halves" / "checkpoints" / f"step-0000000{n}")) for n in (2, 4)]
    name = "optimizer.model.layers.0.self_attn.k_proj.weight.exp_avg"
    found = [reader.read_metadata().state_dict_metadata for reader in stored]
    assert [name in names for names in found] == [True, False]
    assert f"{name}.codes" in found[1]
    workers_2.run(train, replace(halves, resume=True))
    assert losses_of(tmp_path / "halves") == pytest.approx(losses_of(tmp_path / "whole"), rel=2e-3)
    shutil.rmtree(tmp_path / "halves")
    workers_2.run(train, replace(halves, stop_at_step=2))
    workers_2.run(train, replace(halves, resume=True))
    assert losses_of(tmp_path / "halves") == losses_of(tmp_path / "whole")


@pytest.mark.smoke
def test_states_of_eight_bits_are_read_as_fp32_and_the_other_way_round(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    def state(*, is_8_bit: bool) -> dict[str, Any]:
        kinds = {"exp_avg": True, "exp_avg_sq": False}
        if not is_8_bit:
            return {"optimizer": {"weight": {kind: torch.zeros(16, 512) for kind in kinds}}}
        return {"optimizer": {"weight": {k: OptimState8bit.zeros((16, 512), signed) for k, signed in kinds.items()}}}

    torch.manual_seed(0)
    values = {"exp_avg": torch.randn(16, 512), "exp_avg_sq": torch.rand(16, 512)}
    for is_8_bit in (True, False):
        written = state(is_8_bit=is_8_bit)
        for kind, value in values.items():
            written["optimizer"]["weight"][kind].copy_(value)
        folder = tmp_path / str(is_8_bit)
        save_state(written, folder, in_background=False)
        for is_read_as_8_bit in (True, False):
            expected, found = (state(is_8_bit=is_read_as_8_bit) for _ in range(2))
            load_state(found, folder)
            for kind, value in written["optimizer"]["weight"].items():
                own, other = found["optimizer"]["weight"][kind], expected["optimizer"]["weight"][kind]
                other.copy_(value)
                for name in ("codes", "scale") if is_read_as_8_bit else ("data",):
                    assert torch.equal(getattr(own, name), getattr(other, name)), (is_8_bit, is_read_as_8_bit, kind)
    with pytest.raises(liger_dist.LigerDistError, match=r"which shards of \[1, 100\] cut through"):
        load_state({"optimizer": {"weight": {"exp_avg": torch.zeros(1, 100)}}}, tmp_path / "True")


def test_a_resumed_run_continues_its_row_at_wandb(
    data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the package, which asks a service."""
    begun: list[dict[str, Any]] = []
    service = types.ModuleType("wandb")
    service.__spec__ = ModuleSpec("wandb", None)
    service.init = lambda **options: begun.append(options) or mock.MagicMock()  # type: ignore[attr-defined, func-returns-value]
    service.config = mock.MagicMock()  # type: ignore[attr-defined]
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["wandb"])
    monkeypatch.setitem(sys.modules, "wandb", service)
    config = config_for(data, cache, tmp_path / "run", **ALONE, trackers=["wandb"], steps=4, checkpoint_every=2)
    train(dataclasses.replace(config, stop_at_step=2))
    train(dataclasses.replace(config, resume=True))
    train(dataclasses.replace(config, overwrite=True, steps=1))
    first, second, third = begun
    assert first == second == {"project": "liger_dist", "name": "run", "id": first["id"], "resume": "allow"}
    assert third["id"] != first["id"]


def test_help_names_every_option() -> None:
    whole = said_by("train", "--help-all")
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name}" in whole
    whole = said_by("score", "--help")
    for field in dataclasses.fields(ScoreConfig):
        assert f"--{field.name}" in whole


def test_help_is_a_screen_and_needs_no_torch() -> None:
    shown = said_by("train", "--help")
    assert len(shown.splitlines()) <= 32
    assert "--data " in shown
    assert "--adam_beta2" not in shown
    look = "import sys; from liger_dist_train.command import main; main({words}); assert 'torch' not in sys.modules"
    for words in (["train", "--help"], ["train", "--help-all"], ["score", "--help"], ["--help"]):
        subprocess.run([sys.executable, "-c", look.format(words=words)], check=True, capture_output=True, cwd=ROOT)


def test_z_loss_is_in_the_trained_loss_alone(data: Path, cache: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = ALONE | {"steps": 1, "eval_every": 1, "learning_rate": 0.0, "checkpoint_every": 0}
    for name, factor in (("without", 0.0), ("with", 1e-2)):
        train(config_for(data, cache, tmp_path / name, **changes, z_loss=factor))
    (without,), (with_,) = (metrics_of(tmp_path / name) for name in ("without", "with"))
    assert with_["eval_loss"] == without["eval_loss"]
    # A random model's logits are nearly even: the log-sum-exp of 601 of them is about log 601.
    assert with_["loss"] - without["loss"] == pytest.approx(1e-2 * math.log(601) ** 2, rel=0.02)
    with pytest.raises(liger_dist.LigerDistError, match=r"--z_loss is 0\.01, which needs the fused loss"):
        TrainConfig(z_loss=0.01, fused_loss=False)


@functools.cache
def said_by(*words: str) -> str:
    command = [sys.executable, "-m", "liger_dist_train", *words]
    wide = os.environ | {"COLUMNS": "120"}
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=wide).stdout
