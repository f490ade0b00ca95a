"""Restarts, files that were cut off, settings that changed, and data that takes long: refused by all ranks, or
survived."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from training_runs import CPU, LAUNCH, MODEL, config_for, losses_of, metrics_of, published, write_tokenizer

import liger_dist
from liger_dist_train import distributed, output_folder
from liger_dist_train.checkpoint import DESCRIPTION, checksum_of_file, checksum_of_text, read_description
from liger_dist_train.config import TrainConfig
from liger_dist_train.distributed import on_rank_zero, rank
from liger_dist_train.engine import TorchEngine
from liger_dist_train.export import export
from liger_dist_train.fault_tolerance import PHASES, WAIT_FOR_SPEAKER, Interruption, Watchdog, run
from liger_dist_train.metrics import Metrics
from liger_dist_train.output_folder import write_folder
from liger_dist_train.run import train
from liger_dist_train.trainer import Trainer

ALONE: dict[str, Any] = {"strategy": "none"}
"""one process that reads what the two of ``trained`` read"""


def test_a_restart_goes_on_and_a_new_run_is_refused(
    data: Path, cache: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same torchrun starts the same line again, also without ``--resume true``, and counts it or not."""
    config = config_for(data, cache, tmp_path, **ALONE, stop_at_step=6, checkpoint_every=3)
    train(config)
    assert published(tmp_path) == ["step-00000003", "step-00000006"]
    with pytest.raises(liger_dist.LigerDistError, match="the newest step-00000006; continue from it with --resume"):
        train(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    # torchrun starts what was refused again all the same.
    for count in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with pytest.raises(liger_dist.LigerDistError, match="continue from it with --resume true"):
            train(config)
    train(dataclasses.replace(config, resume=True, stop_at_step=7))
    train(dataclasses.replace(config, stop_at_step=8))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    train(dataclasses.replace(config, overwrite=True, stop_at_step=9))
    assert published(tmp_path) == ["step-00000007", "step-00000008", "step-00000009"]
    assert losses_of(tmp_path) == pytest.approx(losses_of(trained)[:9], rel=1e-4)
    # Another torchrun, whose first processes ended before they had begun.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr("liger_dist_train.output_folder.launcher", lambda: "another")
    with pytest.raises(liger_dist.LigerDistError, match="continue from it with --resume true"):
        train(config)
    anew = dataclasses.replace(config, overwrite=True, stop_at_step=2)
    with mock.patch("liger_dist_train.run.load_data", side_effect=KeyError("killed")), pytest.raises(KeyError):
        train(anew)
    # Before the earlier checkpoints were removed: the restart removes them, too, and does not go on from them.
    train(anew)
    assert published(tmp_path) == ["step-00000002"]
    assert len(metrics_of(tmp_path)) == 2


@pytest.mark.nightly
def test_a_job_that_its_queue_starts_again_goes_on(
    data: Path, cache: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same line, whatever it says about earlier checkpoints; the first time it counts."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "begun").unlink()
    config = config_for(data, cache, tmp_path / "run", **ALONE, overwrite=True, stop_at_step=3)
    monkeypatch.setenv("STARTED_BY", "job 1")
    with mock.patch("liger_dist_train.run.load_data", side_effect=KeyError("killed")), pytest.raises(KeyError):
        train(config)
    train(config)
    assert published(tmp_path / "run") == ["step-00000003"]
    train(dataclasses.replace(config, stop_at_step=5))
    train(dataclasses.replace(config, overwrite=False, resume=True, resume_step=3, stop_at_step=6))
    assert published(tmp_path / "run")[-2:] == ["step-00000005", "step-00000006"]
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(trained)[:6], rel=1e-4)
    monkeypatch.setenv("STARTED_BY", "job 2")
    with pytest.raises(liger_dist.LigerDistError, match="continue from it with --resume true"):
        train(dataclasses.replace(config, overwrite=False))


@pytest.mark.smoke
def test_what_a_killed_run_left_is_removed(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-00000008.partial").mkdir()
    (folder / "step-00000012" / "description.json").write_text("")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:4], lines[4][:20], *lines[5:8]]) + '\n{"st')
    train(config_for(data, cache, tmp_path / "run", **ALONE, resume=True, stop_at_step=7))
    assert published(tmp_path / "run") == ["step-00000006", "step-00000007"]
    assert not list(folder.glob("*.partial"))
    # What was passed over is kept, beside the others.
    assert len(list(folder.glob("step-00000012.damaged-*"))) == 1
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 6, 7]


@pytest.mark.smoke
def test_content_that_was_lost_is_one_sentence(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    """As where it was lost before its checksum was noted: a file of the right size, with nothing in it."""
    shutil.copytree(trained, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000012"
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(bytes(file.stat().st_size))
    description = read_description(newest)
    description["files"][file.name] = checksum_of_file(file)
    (newest / DESCRIPTION).write_text(json.dumps(description | {"checksum": checksum_of_text(description)}))
    with pytest.raises(liger_dist.LigerDistError, match=r"step-00000012 cannot be read \(.*\); move it away"):
        train(config_for(data, cache, tmp_path / "run", **ALONE, resume=True, steps=13))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "value"), [("tie_word_embeddings", True), ("num_key_value_heads", 4), ("rms_norm_eps", 1e-3)]
)
def test_a_model_that_changed_is_refused(
    name: str, value: Any, data: Path, cache: Path, trained: Path, tmp_path: Path
) -> None:
    model = json.loads((trained / "checkpoints" / "step-00000012" / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {name: value}))
    shutil.copytree(trained, tmp_path / "run")
    changed = config_for(data, cache, tmp_path / "run", **ALONE, resume=True, model=str(tmp_path / "config.json"))
    with pytest.raises(liger_dist.LigerDistError, match=f"another model: {name}"):
        train(changed)
    (tmp_path / "config.json").write_text(json.dumps(model))
    train(dataclasses.replace(changed, model=str(tmp_path / "config.json")))


def test_an_export_has_the_tokenizer_it_was_trained_with(
    data: Path, cache: Path, trained: Path, tmp_path: Path
) -> None:
    """A run that is refused in the same folder, with another tokenizer, changes nothing."""
    shutil.copytree(trained, tmp_path / "run")
    other = str(write_tokenizer(data, tmp_path / "other", 700))
    with pytest.raises(liger_dist.LigerDistError, match="another model: vocab_size 601 instead of 700"):
        train(
            config_for(
                data, cache, tmp_path / "run", **ALONE, resume=True, tokenizer=other, model=str(tmp_path / MODEL)
            )
        )
    export(tmp_path / "run", tmp_path / "model", step=None, dtype="float32")
    words = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) <= 601 == json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]


def test_a_finished_run_stays_finished(
    data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full when only the plot is missing."""

    def plot(self: Metrics) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Metrics, "plot", plot)
    train(config_for(data, cache, tmp_path, **ALONE, steps=2))
    assert published(tmp_path) == ["step-00000002"]
    printed = capsys.readouterr()
    assert "No space left on device" in printed.err
    assert f"written to {tmp_path}: metrics.jsonl, checkpoints/step-00000002" in printed.out


def test_nothing_to_go_on_from_is_not_promised(
    data: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config_for(data, cache, tmp_path, **ALONE, stop_at_step=1, checkpoint_every=0))
    assert "stopped after step 1; no checkpoint, by --checkpoint_every 0" in capsys.readouterr().out


def test_an_infinite_gradient_is_found_without_clipping(data: Path, cache: Path, tmp_path: Path) -> None:
    own, steps = Trainer.step, []

    def step(self: Trainer, *arguments: Any) -> Any:
        steps.append(config)
        if len(steps) == 2:
            next(self.engine.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
        return own(self, *arguments)

    config = config_for(data, cache, tmp_path, **ALONE, max_grad_norm=0.0)
    with (
        mock.patch.object(Trainer, "step", step),
        pytest.raises(liger_dist.LigerDistError, match="norm of step 2 is not"),
    ):
        train(config)
    assert metrics_of(tmp_path)[0]["grad_norm"] > 0


def test_a_long_evaluation_is_no_stall(data: Path, cache: Path, tmp_path: Path) -> None:
    """Many batches, which together take longer than the watchdog waits for any of them."""
    own, is_late, evaluated = Trainer._loss, Watchdog._is_late, []

    def slow(self: Trainer, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            evaluated.append(arguments)
            time.sleep(0.2)
        return own(self, *arguments)

    def is_late_while_evaluating(self: Watchdog) -> bool:
        # A busy machine may take as long for anything else.
        return PHASES[self._place[1]] == "evaluating" and is_late(self)

    with (
        mock.patch.object(Trainer, "_loss", slow),
        mock.patch.object(Watchdog, "_is_late", is_late_while_evaluating),
        mock.patch.object(os, "_exit") as ended,
    ):
        train(config_for(data, cache, tmp_path, **ALONE, steps=1, eval_batches=14, stall_timeout=1.0))
    assert not ended.called
    assert len(evaluated) == 14
    assert "eval_loss" in metrics_of(tmp_path)[0]


def test_rank_zero_may_take_long(workers_2: Workers) -> None:
    assert workers_2.run(after_a_while) == [(7, True), (7, True)]


def after_a_while() -> tuple[int, bool]:
    """A result, and whether the others heard from rank 0 before it."""
    heard = 0
    own = dist.broadcast_object_list

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal heard
        heard += 1
        own(*arguments, **options)

    with mock.patch.object(distributed, "SIGN_OF_LIFE", 0.2), mock.patch.object(dist, "broadcast_object_list", counted):
        result = on_rank_zero(lambda: time.sleep(1.0) or 7)
    return result, heard > 3


@pytest.mark.smoke
def test_errors_before_ranks_meet_are_said_once_on_each_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise liger_dist.LigerDistError("this machine has no data")

    def fail() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setenv("WORLD_SIZE", "16")
    waits: list[float] = []
    monkeypatch.setattr("liger_dist_train.fault_tolerance.time.sleep", waits.append)
    for name, local, program, said in (
        ("8", "0", refuse, "[rank 8] error: this machine has no data"),
        # After the first process of the machine had the time to say it, and to end this one.
        ("9", "1", refuse, "[rank 9] error: this machine has no data"),
        ("9", "1", fail, "KeyError: 'a bug'"),
    ):
        monkeypatch.setenv("RANK", name)
        monkeypatch.setenv("LOCAL_RANK", local)
        run(program)
        assert capsys.readouterr().err.strip().endswith(said)
    assert waits == [WAIT_FOR_SPEAKER]


@pytest.mark.nightly
def test_what_two_processes_refuse_is_the_last_line(tmp_path: Path) -> None:
    """Once, though either may find it first."""
    start = [sys.executable, "-m", "liger_dist_train", "train", "--nproc_per_node", "2", "--learnin_rate", "3"]
    environment = CPU | {"PYTHONPATH": str(LAUNCH)}
    finished = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    said = "error: --learnin_rate is no option; the nearest is --learning_rate"
    assert finished.returncode != 0
    assert finished.stderr.strip().splitlines()[-1].startswith(said)
    assert finished.stderr.count(said) == 2, "by one process, and again below torchrun's words"


@pytest.mark.smoke
def test_folders_are_written_as_a_whole(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        partial.mkdir()
        raise OSError(28, "No space left on device")

    abandoned = tmp_path / "tokens.1.partial"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    (tmp_path / "tokens.2.partial").mkdir()
    with pytest.raises(liger_dist.LigerDistError, match=r"tokens cannot be written: .*No space left"):
        write_folder(tmp_path / "tokens", fail)
    # Another process's, which may still be at it.
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.2.partial"]
    for text in ("first", "second"):
        write_folder(tmp_path / "tokens", lambda partial, text=text: partial.mkdir() or (partial / text).touch())
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["first"]


def test_one_run_at_a_time_has_a_folder(data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path, **ALONE, steps=2)
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(liger_dist.LigerDistError, match="another run writes to"):
            train(config)
    train(config)


@pytest.mark.parametrize("option", ["output_dir", "cache_dir"])
def test_a_disk_that_is_not_shared(option: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    """Each rank has another folder, as where a mount is missing on a machine."""
    (tmp_path / "apart" / "1" / "checkpoints").mkdir(parents=True)
    config = config_for(data, cache, tmp_path, **{option: str(tmp_path / "apart")})
    for said in workers_2.run(refused_without_a_shared_disk, config, option):
        assert said.startswith(f"rank 1: what rank 0 writes to {tmp_path}/apart/1")
        assert said.endswith(f"expected a disk that all machines share; choose another --{option}.")


def refused_without_a_shared_disk(config: TrainConfig, option: str) -> str:
    own = dataclasses.replace(config, **{option: f"{getattr(config, option)}/{rank()}"})
    with mock.patch.object(output_folder, "SHARED_LIMIT", 1.0), pytest.raises(liger_dist.LigerDistError) as caught:
        train(own)
    return str(caught.value)


@pytest.mark.smoke
def test_checkpoints_of_which_none_is_complete(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    """They are neither removed, nor is the run begun anew without a word."""
    shutil.copytree(trained, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    for name in published(trained):
        with (folder / name / "model" / "tokenizer_config.json").open("a") as file:
            file.write("\n")
    with pytest.raises(liger_dist.LigerDistError, match=r"no checkpoint in .* is complete, the newest step-00000012"):
        train(config_for(data, cache, tmp_path / "run", **ALONE, resume=True))
    assert published(tmp_path / "run") == published(trained)


def test_weights_that_are_no_numbers_are_not_written(data: Path, cache: Path, tmp_path: Path) -> None:
    """Made by a step whose own loss and gradient are finite."""
    own, steps = TorchEngine.update, []

    def update(self: TorchEngine, *accepts: Any) -> Any:
        norm = own(self, *accepts)
        steps.append(norm)
        if len(steps) == 2:
            self.model.model.norm.weight.data[3] = float("nan")
        return norm

    config = config_for(data, cache, tmp_path, **ALONE, checkpoint_every=1, keep_checkpoints=1)
    words = r"weights after step 2 are not finite: model\.norm\.weight\."
    with mock.patch.object(TorchEngine, "update", update), pytest.raises(liger_dist.LigerDistError, match=words):
        train(config)
    assert published(tmp_path) == ["step-00000001"]
    assert len(metrics_of(tmp_path)) == 1


def test_a_run_that_is_done_says_so(
    data: Path, cache: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(config_for(data, cache, tmp_path / "run", **ALONE, resume=True))
    assert "has a checkpoint of step 12, --steps is 12" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.smoke
def test_what_is_written_when_numbers_break_is_published(data: Path, cache: Path, tmp_path: Path) -> None:
    own, own_save, steps = Trainer.step, TorchEngine.save, []

    def save(self: TorchEngine, folder: Path, **options: Any) -> Any:
        writing = own_save(self, folder, **options)
        done = threading.Event()
        threading.Timer(1.0, done.set).start()
        return mock.MagicMock(done=done.is_set, result=lambda: done.wait() and writing.result())

    def step(self: Trainer, *arguments: Any) -> Any:
        steps.append(config)
        loss, norm, tokens = own(self, *arguments)
        return (loss * float("nan") if len(steps) == 3 else loss), norm, tokens

    config = config_for(data, cache, tmp_path, **ALONE, checkpoint_every=2, async_checkpoints=True)
    with (
        mock.patch.object(Trainer, "step", step),
        mock.patch.object(TorchEngine, "save", save),
        pytest.raises(liger_dist.LigerDistError, match="the loss of step 3"),
    ):
        train(config)
    assert published(tmp_path) == ["step-00000002"]


@pytest.mark.smoke
def test_a_preset_is_no_folder_of_its_name(
    data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(config_for(data, cache, Path("tiny"), **ALONE, model="tiny", steps=1, checkpoint_every=0))
    assert len(losses_of(Path("tiny"))) == 1


@pytest.mark.smoke
def test_a_model_folder_without_all_weights_is_refused(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    export(trained, tmp_path / "model", step=None, dtype="float32")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    config = config_for(data, cache, tmp_path / "run", **ALONE, steps=1, model=str(tmp_path / "model"))
    with pytest.raises(liger_dist.LigerDistError, match=r"has no weights for model\.layers\.0\.mlp\.up_proj\.weight;"):
        train(config)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(liger_dist.LigerDistError, match="cannot be read"):
        train(config)
    file.unlink()
    with pytest.raises(liger_dist.LigerDistError, match="has no weights; for random ones give its config"):
        train(config)


@pytest.mark.smoke
def test_the_signal_that_torchrun_hands_on_is_no_second_one() -> None:
    """A whole process group is told, torchrun with it, which tells its processes once more."""
    interruption = Interruption(60.0, lambda: 0)
    with interruption.watched():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert interruption.requested


@pytest.mark.smoke
def test_plans_of_what_would_be_refused(data: Path, cache: Path, tmp_path: Path) -> None:
    for changes, words in (
        ({"strategy": "ddp", "lm_head": "vocab_parallel"}, "lm_head is vocab_parallel"),
        ({"strategy": "ddp", "cpu_offload": True}, "cpu_offload is True but strategy='ddp'"),
        ({"strategy": "fsdp1", "lm_head": "vocab_parallel"}, "lm_head is vocab_parallel"),
        ({"strategy": "fsdp1", "dp_replicate": 4}, "does not average gradients"),
    ):
        plan = config_for(data, cache, tmp_path, dry_run=True, world_size=4, **changes)
        with pytest.raises(liger_dist.LigerDistError, match=words):
            train(plan)


@pytest.mark.nightly(strategy=["ddp"])
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_layers_that_are_compiled(
    strategy: str, trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """By Dynamo alone: Inductor's compiler is not everywhere."""
    config = config_for(data, cache, tmp_path, strategy=strategy, compile=True, stop_at_step=3)
    first, second = workers_2.run(train_compiled, config)
    assert first[0] == second[0] == 1
    assert "layers: compiled, in the first step" in first[1]
    assert "layers compiled: 1 of 1; with the compilation the first step took" in first[1]
    assert not second[1]
    assert losses_of(tmp_path) == pytest.approx(losses_of(trained)[:3], rel=1e-4)


def train_compiled(config: TrainConfig) -> tuple[int, str]:
    """How many layers were compiled, and what is printed."""
    own, compiled = torch.nn.Module.compile, []

    def compile(self: torch.nn.Module, **_: object) -> None:
        compiled.append(self)
        own(self, backend="aot_eager")

    with mock.patch.object(torch.nn.Module, "compile", compile), redirect_stdout(io.StringIO()) as said:
        train(config)
    return len(compiled), said.getvalue()
