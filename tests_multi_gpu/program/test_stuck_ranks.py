"""Ranks that die, freeze or never begin, and signals between micro-batches: which rank is named, and what goes on."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked_programs import TWO_RANKS, run_program
from harness import Workers
from training_runs import (
    CPU,
    LAUNCH,
    abort_all,
    as_options,
    config_for,
    ends_within,
    losses_of,
    metrics_of,
    published,
    torchrun,
    wait_for,
    workers_of,
)

from liger_dist_train.config import TrainConfig
from liger_dist_train.distributed import rank
from liger_dist_train.fault_tolerance import NO_HEARTBEAT, PHASES, describe_stall
from liger_dist_train.run import train
from liger_dist_train.trainer import Trainer

ZERO_2 = {"strategy": "deepspeed", "deepspeed": str(LAUNCH / "deepspeed" / "zero2.json")}


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="processes that meet on CPUs")
def test_two_nodes_survive_a_killed_worker(data: Path, cache: Path, tmp_path: Path, workers_2: Workers) -> None:
    """Two agents of one process meet by c10d's rendezvous and train as one job of two. One worker is killed; the
    agents start both again from the newest checkpoint. The curve is that of a run nobody disturbed."""
    changes: dict[str, Any] = {"strategy": "fsdp2", "steps": 12, "checkpoint_every": 3}
    changes |= {"eval_every": 12, "keep_checkpoints": 2}
    workers_2.run(train, config_for(data, cache, tmp_path / "calm", **changes))
    # Not one that the system gives to others.
    endpoint = f"127.0.0.1:{20_000 + os.getpid() % 10_000}"
    disturbed = config_for(data, cache, tmp_path / "disturbed", resume=True, **changes)
    variables = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV_ENDPOINT": endpoint, "MAX_RESTARTS": "2"}
    variables |= {"LOG_DIR": str(tmp_path / "logs"), "PYTHON": sys.executable}
    agents = [
        subprocess.Popen(
            ["bash", str(LAUNCH / "torchrun_multi_node.sh"), *as_options(disturbed)],
            env=CPU | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        metrics = tmp_path / "disturbed" / "metrics.jsonl"
        wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > 4, 100, *agents)
        assert published(tmp_path / "disturbed")
        # The script replaces itself by torchrun.
        os.kill(workers_of(agents[1].pid)[0], signal.SIGKILL)
        with ends_within(120, tmp_path):
            said = [agent.communicate()[0] for agent in agents]
            print(*said)
        assert [agent.returncode for agent in agents] == [0, 0], said
    finally:
        abort_all(tmp_path)
    assert "2 nodes of 1 process" in said[0]
    assert any("continues after step" in text for text in said)
    assert losses_of(tmp_path / "disturbed") == losses_of(tmp_path / "calm")
    assert len(published(tmp_path / "disturbed")) == 2


FROZEN = """
import os, signal, sys, time
from liger_dist_train import data_loader
from liger_dist_train.distributed import rank

own = data_loader.CachedData.take

def take(self, consumed, count, *ranks):
    if consumed == 3 * count and rank() == {frozen}:
        with open({file!r}, "w") as file:
            file.write(str(os.getpid()))
        # Long enough for the others to have heard where it is.
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    return own(self, consumed, count, *ranks)

data_loader.CachedData.take = take
import runpy
runpy.run_module("liger_dist_train", run_name="__main__")
"""


def has_ended(pid: int, seconds: float) -> bool:
    """True if the process ends, or is a zombie, within `seconds`: a killed process needs time to free its memory."""
    status = Path(f"/proc/{pid}/status")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.nightly
@pytest.mark.parametrize("frozen", [1, 0])
def test_a_frozen_rank_is_named(frozen: int, data: Path, cache: Path, tmp_path: Path) -> None:
    """Rank 0 with the store that all ranks talk through, as on several machines."""
    program, pid = tmp_path / "stuck.py", tmp_path / "pid"
    program.write_text(FROZEN.format(frozen=frozen, file=str(pid)))
    config = config_for(data, cache, tmp_path / "run", strategy="ddp", stall_timeout=2.0)
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(1 - frozen)}
    process = torchrun(*as_options(config), program=program, env=CPU | variables)
    lines: list[str] = []
    with ends_within(90, tmp_path):
        for line in process.stderr:
            lines.append(line)
            if frozen == 1 and "error: " in line and "does not answer" in line:
                # torchrun would wait half a minute for it to end by itself.
                os.kill(int(pid.read_text()), signal.SIGCONT)
        process.communicate()
        print("".join(lines))
    assert process.returncode != 0
    assert has_ended(int(pid.read_text()), 30), "the frozen process is left behind"
    (said,) = [line for line in lines if "error: " in line and "does not answer" in line]
    # On a separate line: the progress bar does not end its line.
    assert re.match(r"(\[rank \d\] )?error: ", said), said
    if frozen == 1:
        assert "no progress for 2 s: rank 1 does not answer, last seen in step 4 (reading data)" in said
        assert re.search(r"at stuck\.py:\d+ in take < trainer\.py:\d+ in ", said)
    else:
        assert (
            said.count(
                "[rank 1] error: no progress for 2 s: the store of all ranks, which rank 0 may hold, does not answer"
            )
            == 1
        )
    assert len(metrics_of(tmp_path / "run")) == 3


LATE = """
import sys, time
from liger_dist_train import fault_tolerance, run
from liger_dist_train.distributed import rank

own, fault_tolerance.LEAST_FOR_SETUP = run.{stuck}, 2.0

def late(*arguments, **options):
    if rank() == 1:
        time.sleep(1000)
    return own(*arguments, **options)

run.{stuck} = late
import runpy
runpy.run_module("liger_dist_train", run_name="__main__")
"""


@pytest.mark.nightly(stuck=["shell"])
@pytest.mark.parametrize(
    ("stuck", "words"),
    [
        ("parallel_dims_of", "rank 1 has not begun; the other ranks wait for it"),
        ("shell", "all ranks are in step 0 (preparing): rank 0 at "),
    ],
)
def test_a_rank_that_is_stuck_before_the_first_step_is_named(
    stuck: str, words: str, data: Path, cache: Path, tmp_path: Path
) -> None:
    program = tmp_path / "late.py"
    program.write_text(LATE.format(stuck=stuck))
    config = config_for(data, cache, tmp_path / "run", strategy="ddp", stall_timeout=2.0)
    ended = run_program([*TWO_RANKS, str(program), *as_options(config)], tmp_path)
    assert ended.failed
    assert ended.all_said.count(f"error: no progress for 2 s: {words}") == 1
    assert stuck == "parallel_dims_of" or "; rank 1 at late.py:" in ended.all_said


def test_a_signal_between_micro_batches_of_deepspeed_gives_the_step_up(
    trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    config = config_for(data, cache, tmp_path, **ZERO_2)
    assert workers_2.run(train_until_a_signal, config) == [5, 5]
    assert published(tmp_path) == ["step-00000002"]
    workers_2.run(train, dataclasses.replace(config, resume=True, stop_at_step=4))
    assert losses_of(tmp_path) == pytest.approx(losses_of(trained)[:4], rel=1e-5)


def train_until_a_signal(config: TrainConfig) -> int:
    """Rank 1 gets a signal in the first micro-batch of step 3; how many were begun."""
    own, begun = Trainer._loss, []

    def loss(self: Trainer, *arguments: Any) -> Any:
        if torch.is_grad_enabled():
            begun.append(arguments)
            if rank() == 1 and len(begun) == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
        return own(self, *arguments)

    with mock.patch.object(Trainer, "_loss", loss):
        train(config)
    return len(begun)


def test_a_signal_in_an_evaluation_saves_the_step_before_it(
    workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "held_out.txt").write_text((data / "ast0.txt").read_text()[:3000])
    settings: dict[str, Any] = {"strategy": "fsdp2", "eval_every": 3, "eval_data": [str(tmp_path / "held_out.txt")]}
    config = config_for(data, cache, tmp_path / "run", **settings, eval_batches=0)
    assert workers_2.run(evaluate_until_a_signal, config) == [2, 2]
    assert published(tmp_path / "run") == ["step-00000003"]
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows if "eval_loss" in row] == [1]
    workers_2.run(train, dataclasses.replace(config, resume=True, eval_batches=1))
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 13))


def evaluate_until_a_signal(config: TrainConfig) -> int:
    """Rank 1 gets a signal in the second held-out batch after step 3; how many were begun then."""
    own, begun = Trainer._loss, []

    def loss(self: Trainer, *arguments: Any) -> Any:
        if not torch.is_grad_enabled() and self.progress.step == 3:
            begun.append(arguments)
            if rank() == 1 and len(begun) == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
        return own(self, *arguments)

    with mock.patch.object(Trainer, "_loss", loss):
        train(config)
    return len(begun)


def test_who_is_stuck() -> None:
    def heartbeat(beats: int, *place: int) -> dict[str, Any]:
        return {"beats": beats, "place": list(place), "stack": [f"a.py:{place[0]} in f"]}

    computing, writing = PHASES.index("computing"), PHASES.index("writing a checkpoint")
    here = heartbeat(2, 4, computing)
    before = {other: heartbeat(1, 4, computing) for other in range(3)}
    assert describe_stall(before, {0: here, 1: before[1], 2: here}).startswith("rank 1 does not answer")
    assert describe_stall(before, {0: here, 1: here, 2: heartbeat(2, 3, writing)}).startswith(
        "rank 2 is stuck in step 3 (writing a checkpoint), at a.py:3 in f; the other ranks wait in step 4 (computing)"
    )
    absent = {0: here, 1: NO_HEARTBEAT, 2: here}
    assert describe_stall(absent, absent) == "rank 1 has not begun; the other ranks wait for it"
    assert describe_stall(before, dict.fromkeys(range(3), here)).startswith("all ranks are in step 4 (computing)")
