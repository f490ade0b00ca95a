"""Disks that are full: for checkpoints, data, metrics and exports, on all ranks or on one; each is one sentence."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked_programs import run_program
from harness import Workers
from training_runs import (
    LAUNCH,
    as_options,
    config_for,
    losses_of,
    published,
    write_limited_program,
)

import liger_dist
from liger_dist_train.checkpoint import Checkpoints
from liger_dist_train.config import TrainConfig
from liger_dist_train.distributed import rank
from liger_dist_train.run import train

ON_CPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="programs that meet on CPUs")


def fill(folder: Path, *, keep: int) -> None:
    """Leaves ``keep`` bytes of room."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        filler.write(bytes(max(0, free - keep)))


def run_until_full(config: TrainConfig, folder: Path, *, keep: int) -> str:
    """The refusal of a run whose disk is full from the start."""
    fill(folder, keep=keep)
    with pytest.raises(liger_dist.LigerDistError) as refused:
        train(config)
    return str(refused.value)


@pytest.mark.nightly
@ON_CPUS
def test_a_disk_that_is_full_of_everything_else(data: Path, cache: Path, tmp_path: Path, small_disk: Path) -> None:
    """Each place where a run writes is refused with its name, and nothing incomplete stays."""
    alone: dict[str, Any] = {"strategy": "none", "steps": 2, "checkpoint_every": 0}
    config = config_for(data, small_disk, tmp_path / "run", **alone, num_proc=1)
    config = replace(config, tokenizer=str(cache / "tokenizer"))
    said = run_until_full(config, small_disk, keep=200_000)
    assert re.search(
        r"tokens-\w+/\d+-of-\d+.arrow cannot be written: .*No space left.*choose another --cache_dir", said
    ), said
    assert not list(small_disk.rglob("*.partial"))
    kept = len(list(small_disk.rglob("*.arrow")))
    (small_disk / "filler").unlink()
    train(config)
    assert len(list(small_disk.rglob("*.arrow"))) > kept
    for packed in small_disk.glob("tokens-*/packed-*"):
        shutil.rmtree(packed)
    said = run_until_full(config, small_disk, keep=8192)
    assert re.search(r"packed-\S+ cannot be written: .*(No space left|requested and)", said), said
    (small_disk / "filler").unlink()


@pytest.mark.nightly
@ON_CPUS
def test_metrics_on_a_full_disk(data: Path, cache: Path, small_disk: Path) -> None:
    """``metrics.jsonl``, TensorBoard's file, ``config.yaml`` and ``data.json`` are in the output folder."""
    config = config_for(
        data, cache, small_disk / "run", strategy="none", steps=2000, checkpoint_every=0, eval_every=5000
    )
    config = replace(config, batch_size=1, global_batch_size=1)
    (small_disk / "run").mkdir()
    said = run_until_full(config, small_disk, keep=40_000)
    assert re.search(r"step \d+ cannot be written to .*metrics.jsonl: .*No space left.*--resume true", said), said
    (small_disk / "filler").unlink()
    said = run_until_full(replace(config, output_dir=str(small_disk / "other")), small_disk, keep=0)
    assert "No space left" in said


@pytest.mark.nightly(in_background=[True])
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


@pytest.mark.nightly
def test_a_disk_that_becomes_full(data: Path, cache: Path, small_disk: Path, trained: Path) -> None:
    """The first checkpoint fits, the second does not; and the run goes on from the first where there is room."""
    settings: dict[str, Any] = {"strategy": "none", "eval_every": 50}
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


ZERO3 = {"strategy": "deepspeed", "deepspeed": str(LAUNCH / "deepspeed" / "zero3.json")}


@pytest.mark.nightly(way=[ZERO3])
@pytest.mark.parametrize("way", [{"strategy": "fsdp2"}, ZERO3], ids=["fsdp2", "zero3"])
def test_a_disk_that_is_full_for_one_rank(
    way: dict[str, Any], workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    config = config_for(data, cache, tmp_path, checkpoint_every=2, **way)
    said = workers_2.run(refused_with_a_full_disk, config)
    assert said[0] == said[1]
    assert said[0].startswith(f"the checkpoint of step 2 cannot be written to {tmp_path}/checkpoints: on rank 1 ")
    assert "File too large" in said[0]
    assert published(tmp_path) == []
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def refused_with_a_full_disk(config: TrainConfig) -> str:
    """The kernel lets no file of rank 1 grow beyond 100 kB, from the first checkpoint on: what is compiled before
    is larger."""
    before, own = resource.getrlimit(resource.RLIMIT_FSIZE), Checkpoints.save

    def save(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        if rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        own(self, *arguments, **options)

    try:
        with mock.patch.object(Checkpoints, "save", save), pytest.raises(liger_dist.LigerDistError) as caught:
            train(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(caught.value)


def test_an_export_to_a_full_disk_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    program = write_limited_program(tmp_path)
    ended = run_program(["python", str(program), "export", str(trained), "--to", str(tmp_path / "to")], tmp_path)
    assert ended.codes == [1], ended.all_said
    program.unlink()
    (said,) = [line for line in ended.all_said.splitlines() if "error:" in line]
    assert f"{tmp_path}/to cannot be written" in said
    assert "File too large" in said
    assert list(tmp_path.iterdir()) == []
