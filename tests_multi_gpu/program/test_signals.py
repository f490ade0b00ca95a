"""How runs end: by signals inside of a long step, by a rank that dies, by settings that cannot work."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import (
    CPU,
    LAUNCH,
    as_options,
    config_for,
    ends_within,
    losses_of,
    published,
    torchrun,
    wait_for,
    workers_of,
)

from liger_dist_train.fault_tolerance import default_grace
from liger_dist_train.run import train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="programs that meet on CPUs")
LONG_STEP: dict[str, Any] = {"batch_size": 1, "global_batch_size": 2000, "eval_fraction": 0.0, "checkpoint_every": 100}
"""a thousand micro-batches on each of two ranks: a step takes most of a minute"""


def is_computing(process: subprocess.Popen[str], folder: Path) -> bool:
    """Whether the first step has begun."""
    return (folder / "checkpoints" / "begun").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGINT, signal.SIGUSR1))],
    ids=lambda number: number.name,
)
def test_a_signal_inside_a_long_step_saves_and_ends(
    number: signal.Signals, data: Path, cache: Path, trained: Path, tmp_path: Path
) -> None:
    """The step is given up; what the checkpoint has is the state before it, and goes on as if nothing had been."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000012")
    shutil.copytree(tmp_path / "run", tmp_path / "calm")
    config = config_for(data, cache, tmp_path / "run", resume=True, steps=8)
    options = as_options(replace(config, **LONG_STEP, allow_changed_data=True))
    marker = tmp_path / "run" / "checkpoints" / "begun"
    was = marker.stat().st_mtime_ns
    with ends_within(120, tmp_path):
        program = torchrun(*options, env=CPU)
        wait_for(lambda: marker.stat().st_mtime_ns != was, 60, program)
        time.sleep(1)
        since = time.monotonic()
        for pid in workers_of(program.pid):
            os.kill(pid, number)
        output = "".join(program.communicate())
        took = time.monotonic() - since
    assert program.returncode == 0, output
    assert took < 20, output
    assert "stopped after step 6; continue with --resume true" in output
    assert published(tmp_path / "run") == ["step-00000006"]
    train(
        replace(config, strategy="none", global_batch_size=8, resume=True, steps=12, output_dir=str(tmp_path / "run"))
    )
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(trained), rel=1e-4)


def test_the_last_checkpoint_has_the_time_that_torchrun_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert default_grace() == 20.0
    files = (LAUNCH / "resolve.sh", LAUNCH / "kubernetes.yaml")
    given, other = (re.findall(r"SHUTDOWN_TIMEOUT\D*(\d+)\D", file.read_text())[-1] for file in files)
    assert given == other
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", given)
    assert default_grace() == float(given) - 10.0
    (signal_at,) = re.findall(r"--signal=B:USR1@(\d+)", (LAUNCH / "slurm.sbatch").read_text())
    assert float(given) + 60 <= float(signal_at), "Slurm's signal comes early enough to requeue the job afterwards"


@pytest.mark.nightly
@pytest.mark.parametrize("newest", [pytest.param("none", marks=pytest.mark.nightly), "that of step 6"])
def test_a_micro_batch_that_takes_longer_than_the_grace(
    newest: str, data: Path, cache: Path, trained: Path, tmp_path: Path
) -> None:
    """The program ends without waiting any longer, and names the newest checkpoint."""
    if newest != "none":
        shutil.copytree(trained, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000012")
        (tmp_path / "run" / "checkpoints" / "begun").unlink()
    changes: dict[str, Any] = {"batch_size": 256, "global_batch_size": None, "memory_budget": None}
    changes |= {"sequence_length": 512, "resume": newest != "none", "allow_changed_data": True}
    config = config_for(data, cache, tmp_path / "run", **changes, eval_fraction=0.0, grace_seconds=1.0)
    config = replace(config, global_batch_size=512)
    with ends_within(120, tmp_path):
        program = torchrun(*as_options(config), env=CPU)
        wait_for(lambda: is_computing(program, tmp_path / "run"), 60, program)
        time.sleep(1)
        since = time.monotonic()
        for pid in workers_of(program.pid):
            os.kill(pid, signal.SIGTERM)
        output = "".join(program.communicate())
    assert time.monotonic() - since < 10, output
    assert program.returncode != 0
    # At the beginning of a line: the progress bar does not end its line.
    assert re.search(
        r"\n\[rank \d\] error: asked to end by SIGTERM, and neither the micro-batch nor a checkpoint was done after "
        rf"--grace_seconds 1; the newest checkpoint is {newest}\n",
        output,
    ), output


@pytest.mark.nightly
@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_rank_that_died_is_named(dead: int, data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path / "run", **LONG_STEP)
    with ends_within(120, tmp_path):
        program = torchrun(*as_options(config), env=CPU)
        wait_for(lambda: is_computing(program, tmp_path / "run"), 60, program)
        time.sleep(1)
        os.kill(workers_of(program.pid)[dead], signal.SIGKILL)
        output = "".join(program.communicate())
    assert program.returncode != 0
    assert re.search(rf"Root Cause.*\n\[\d\]:\n.*\n.*\n +rank +: {dead} ", output), output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"tp": 3, "strategy": "tp"},
            "--tp 3 needs 3 processes but 2 are running",
            id="layout",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"lr_scheduler_kwargs": '{"slope": 1}'}, "does not take slope of --lr_scheduler_kwargs", id="schedule"
        ),
        pytest.param(
            {"data": ["nowhere.jsonl"]},
            "the data file nowhere.jsonl does not exist",
            id="data",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_cannot_work_is_not_tried_again(
    changes: dict[str, Any], words: str, data: Path, cache: Path, tmp_path: Path
) -> None:
    config = replace(config_for(data, cache, tmp_path / "run"), **changes)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "-m", "liger_dist_train", *as_options(config)]
    with ends_within(90, tmp_path):
        ended = subprocess.run(command, capture_output=True, text=True, env=CPU, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count(words) == 1, ended.stderr
    assert sum("error:" in line for line in ended.stderr.splitlines()) == 1, ended.stderr
