"""What goes wrong on clusters, each tried: a killed worker, damaged checkpoints, a full disk, numbers that are none, a
rank that is stuck."""

from __future__ import annotations

import dataclasses
import gc
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
import torch.distributed as dist
from forked_programs import TWO_RANKS, run_program
from harness import Workers
from torch.distributed.tensor import DTensor
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
    write_limited_program,
)

import liger_dist
from liger_dist_train.config import TrainConfig
from liger_dist_train.distributed import rank
from liger_dist_train.engine import TorchEngine
from liger_dist_train.fault_tolerance import NO_HEARTBEAT, PHASES, describe_stall
from liger_dist_train.model import shell
from liger_dist_train.run import train
from liger_dist_train.trainer import Trainer

ZERO_2 = {"strategy": "deepspeed", "deepspeed": str(LAUNCH / "deepspeed" / "zero2.json")}


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


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_one_sentence(
    in_background: bool, data: Path, cache: Path, trained: Path, tmp_path: Path
) -> None:
    """The kernel refuses to let files grow beyond 100 kB; what was complete before is complete after."""
    config = config_for(
        data, cache, tmp_path / "run", checkpoint_every=2, async_checkpoints=in_background, stop_at_step=4
    )
    program = write_limited_program(tmp_path)
    ended = run_program(["python", str(program), *as_options(config)], tmp_path)
    assert ended.codes == [1], ended.all_said
    (said,) = [line for line in ended.all_said.splitlines() if "error:" in line]
    assert "the checkpoint of step 2 cannot be written to" in said
    assert "File too large" in said
    assert "the newest complete checkpoint is none" in said
    assert published(tmp_path / "run") == []
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))


def test_a_disk_that_becomes_full(data: Path, cache: Path, small_disk: Path, trained: Path) -> None:
    """The first checkpoint fits, the second does not; and the run goes on from the first where there is room."""
    settings: dict[str, Any] = {"strategy": "none", "model": "tiny", "eval_every": 50}
    config = config_for(data, cache, small_disk, checkpoint_every=2, stop_at_step=4, **settings)
    free = os.statvfs(small_disk)
    size = sum(file.stat().st_size for file in (trained / "checkpoints" / "step-00000012").iterdir())
    (small_disk / "ballast").write_bytes(b"0" * max(0, free.f_bavail * free.f_bsize - int(1.5 * size)))
    with pytest.raises(liger_dist.LigerDistError, match=r"step 4 cannot be written .* No space left .* step-00000002"):
        train(config)
    assert published(small_disk) == ["step-00000002"]
    (small_disk / "ballast").unlink()
    train(dataclasses.replace(config, resume=True, keep_checkpoints=1))
    assert losses_of(small_disk) == pytest.approx(losses_of(trained)[:4], rel=1e-4)


@pytest.mark.parametrize("way", [{"strategy": "fsdp2"}, {"strategy": "ddp"}], ids=["fsdp2", "ddp"])
def test_numbers_that_are_none_are_named(
    way: dict[str, Any], workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Under DDP gradients are spoilt after they were averaged: by a bad device, of which the others see nothing."""
    config = config_for(data, cache, tmp_path / "run", checkpoint_every=2, overwrite=True, **way)
    for loss, gradient in workers_2.run(broken_on_rank_one, config):
        said = "the loss of step 3 is not finite; rank 1 has loss nan from sequences with documents of "
        assert loss.startswith(said)
        files = re.split(r"; gradients that are not: |\. No checkpoint", loss.removeprefix(said))[0].split(", ")
        assert 1 <= len(files) <= 3
        assert {Path(file).parent for file in files} == {data}
        assert all(Path(file).is_file() for file in files)
        assert "rank 0" not in loss
        # The only one: clipping by a norm that is no number would break the others, too.
        assert gradient.startswith(
            "the gradient norm of step 3 is not finite; gradients that are not: model.norm.weight. "
        )
    assert published(tmp_path / "run") == ["step-00000002"]


def broken_on_rank_one(config: TrainConfig) -> list[str]:
    """A loss, then a gradient, that is no number in the third step."""
    own_loss, own_update = Trainer._loss, TorchEngine.update
    sentences: list[str] = []
    updates = 0

    def broken_loss(self: Trainer, batch: Any, num_items: Any, *rest: Any) -> Any:
        loss = own_loss(self, batch, num_items, *rest)
        is_third = self.progress.step == 2 and torch.is_grad_enabled()
        return loss * float("nan") if is_third and rank() == 1 else loss

    def broken_update(self: TorchEngine, *accepts: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 3 and rank() == 1:
            ((_, weight),) = [
                named for named in self.model.named_parameters() if named[0].endswith("model.norm.weight")
            ]
            gradient = weight.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(float("nan"))
        return own_update(self, *accepts)

    for place, name, broken in ((Trainer, "_loss", broken_loss), (TorchEngine, "update", broken_update)):
        with (
            mock.patch.object(place, name, broken),
            pytest.raises(liger_dist.LigerDistError) as caught,
        ):
            train(config)
        sentences.append(str(caught.value))
        dist.barrier()
    return sentences


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
    # On a line of its own: the progress bar does not end its line.
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
    config = config_for(data, cache, tmp_path, strategy="fsdp2", eval_every=3, eval_batches=0)
    assert workers_2.run(evaluate_until_a_signal, config) == [2, 2]
    assert published(tmp_path) == ["step-00000003"]
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows if "eval_loss" in row] == [1]
    workers_2.run(train, dataclasses.replace(config, resume=True, eval_batches=1))
    assert [row["step"] for row in metrics_of(tmp_path)] == list(range(1, 13))


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


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_accumulation_holds_sharded_gradients_alone(
    strategy: Any, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Without --accumulate_unsharded: the losses are the same, and a rank holds its shard of the gradients."""
    settings: dict[str, Any] = {"strategy": strategy, "steps": 1, "batch_size": 1, "global_batch_size": 12}
    settings |= {"checkpoint_every": 0, "eval_fraction": 0.0}
    held, losses = {}, {}
    for unsharded in (False, True):
        config = config_for(data, cache, tmp_path / str(unsharded), accumulate_unsharded=unsharded, **settings)
        held[unsharded] = workers_2.run(bytes_before_each_micro_batch, config)
        losses[unsharded] = losses_of(tmp_path / str(unsharded))
    assert losses[False] == pytest.approx(losses[True], rel=1e-5)
    for (own, parameters), (others, _) in zip(held[False], held[True], strict=True):
        # In the first micro-batch there is no gradient.
        first, *rest = own
        assert max(rest) - first < 1.1 * parameters / 2
        first, *rest = others
        assert max(rest) - first > 0.9 * parameters


def bytes_before_each_micro_batch(config: TrainConfig) -> tuple[list[int], int]:
    """Bytes of all tensors that this rank holds, and those of all parameters in fp32."""
    own: Any = Trainer._loss
    held, numbers = [], 0

    def loss(self: Trainer, *arguments: Any) -> Any:
        nonlocal numbers
        numbers = numbers or sum(p.numel() for p in shell(config, self.engine.model.config).parameters())
        gc.collect()
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if issubclass(type(tensor), torch.Tensor) and type(tensor) is not DTensor and tensor.device.type == "cpu"
        }
        held.append(sum(storages.values()))
        return own(self, *arguments)

    with mock.patch.object(Trainer, "_loss", loss):
        train(config)
    return held, 4 * numbers


def test_a_tracker_that_fails_is_left_out(data: Path, cache: Path, tmp_path: Path) -> None:
    from accelerate.tracking import TensorBoardTracker

    own, logged = TensorBoardTracker.log, []

    def log(self: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        logged.append(step)
        if step == 2:
            raise ConnectionError("the service is gone")
        own(self, values, step, **options)

    config = config_for(data, cache, tmp_path, strategy="none", steps=4, trackers=["tensorboard"], log_every=1)
    with (
        mock.patch.object(TensorBoardTracker, "log", log),
        pytest.warns(RuntimeWarning, match="tensorboard failed: ConnectionError.*goes on without it"),
    ):
        train(config)
    assert logged == [1, 2]
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4]
    assert published(tmp_path)[-1] == "step-00000004"


def test_the_learning_rate_of_a_row_is_that_of_its_step(data: Path, cache: Path, tmp_path: Path) -> None:
    train(config_for(data, cache, tmp_path, strategy="none", steps=4, warmup_steps=2, checkpoint_every=0))
    rates = [row["learning_rate"] for row in metrics_of(tmp_path)]
    assert rates[:3] == pytest.approx([0.0, 0.005, 0.01])
    assert rates[3] < rates[2]


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


def test_a_profiler_trace_on_request(data: Path, cache: Path, tmp_path: Path) -> None:
    train(config_for(data, cache, tmp_path, strategy="none", steps=3, stop_at_step=2, profile_step=2))
    assert "traceEvents" in (tmp_path / "trace-rank0.json").read_text()
    with pytest.raises(liger_dist.LigerDistError, match="--profile_step is 5000; the run has"):
        train(config_for(data, cache, tmp_path / "b", strategy="none", steps=None, epochs=0.1, profile_step=5000))
