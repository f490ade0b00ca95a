"""Checkpoints that can be trusted: they hold every tensor to the bit and no pickle, damage of every kind is found
before anything is loaded, and a planted pickle is refused before it runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import Workers
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training_runs import LAUNCH, config_for, losses_of
from transformers import GPT2Config

import liger_dist
from liger_dist_train import checkpoint, state_files
from liger_dist_train.checkpoint import checksum_of_file, checksum_of_text, read_description
from liger_dist_train.config import TrainConfig
from liger_dist_train.export import export
from liger_dist_train.run import train

SHARD = "shard-00001-model-00001-of-00001.safetensors"
ALONE: dict[str, Any] = {"strategy": "none", "resume": True}


class Command:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._file}",)


def flip_64_bytes(file: Path, _: Path) -> None:
    content = bytearray(file.read_bytes())
    for index in range(64):
        content[(index * 7919 + len(content) // 2) % len(content)] ^= 0xFF
    file.write_bytes(content)


def zeros(file: Path, _: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def swapped(file: Path, other: Path) -> None:
    """The same file of another step."""
    shutil.copy(other, file)


def cut_off(file: Path, _: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def missing(file: Path, _: Path) -> None:
    file.unlink()


DAMAGES = [
    (damage, name)
    for damage in (flip_64_bytes, zeros, swapped, cut_off, missing)
    for name in (SHARD, "model/tokenizer.json", "description.json")
    # These are the same in every step.
    if damage is not swapped or name in (SHARD, "description.json")
]


@pytest.mark.nightly
@pytest.mark.cover("values")
@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(
    damage: Callable[[Path, Path], None], name: str, trained: Path, data: Path, cache: Path, tmp_path: Path, capfd: Any
) -> None:
    output = tmp_path / "run"
    shutil.copytree(trained, output)
    newest, before = (output / "checkpoints" / f"step-{step:08d}" for step in (12, 6))
    damage(newest / name, before / name)
    train(config_for(data, cache, output, **ALONE, eval_every=50, checkpoint_every=0))
    said = capfd.readouterr().out
    assert f"{newest} is not complete (" in said
    # A whole description of another step does not fit the other files.
    named = "checksum" if damage is swapped and name == "description.json" else name
    assert named in said.split("is not complete (")[1].split(")")[0]
    assert "continues after step 6" in said
    assert losses_of(output)[:6] == losses_of(trained)[:6]
    # What it goes on from is what the uninterrupted run had there.
    assert losses_of(output)[6:] == pytest.approx(losses_of(trained)[6:], rel=1e-4)
    shutil.copytree(trained, tmp_path / "other")
    damaged = tmp_path / "other" / "checkpoints" / newest.name
    damage(damaged / name, before / name)
    with pytest.raises(liger_dist.LigerDistError, match=r"is not complete|description"):
        export(tmp_path / "other", tmp_path / "exported", step=12)
    assert not (tmp_path / "exported").exists()
    assert export(tmp_path / "other", tmp_path / "exported", step=None) == 6
    assert f"{damaged} is not complete (" in capfd.readouterr().out


def test_a_file_that_was_added_is_noticed(trained: Path, data: Path, cache: Path, tmp_path: Path, capfd: Any) -> None:
    """DeepSpeed loads whatever its patterns find."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000012" / "shard-00003.safetensors").write_bytes(b"x")
    train(config_for(data, cache, tmp_path / "run", **ALONE, steps=7, checkpoint_every=0))
    assert "shard-00003.safetensors was not there when it was written" in capfd.readouterr().out


def sign(folder: Path) -> None:
    """Checksums of what is there now, as whoever plants a file would write them."""
    description = json.loads((folder / "description.json").read_text())
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "description.json"]
    description["files"] = {str(file.relative_to(folder)): checksum_of_file(file) for file in files}
    text = json.dumps(description | {"checksum": checksum_of_text(description)})
    (folder / "description.json").write_text(text)
    read_description(folder)


def evil_metadata(folder: Path, flag: Path) -> None:
    """What torch reads of its other format."""
    for name in (".metadata", "__0.metadata", "__0_0.distcp", "shard.pt"):
        (folder / name).write_bytes(pickle.dumps(Command(flag)))
    (folder / SHARD).unlink()


def evil_tensors(folder: Path, flag: Path) -> None:
    for file in folder.glob("*.safetensors"):
        torch.save(Command(flag), file)


@pytest.mark.parametrize("plant", [evil_metadata, evil_tensors])
def test_a_planted_command_does_not_run(
    plant: Callable[[Path, Path], None], trained: Path, data: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    newest, flag = tmp_path / "run" / "checkpoints" / "step-00000012", tmp_path / "it-ran"
    plant(newest, flag)
    sign(newest)
    with pytest.raises(liger_dist.LigerDistError, match=r"cannot be read|lack a part"):
        train(config_for(data, cache, tmp_path / "run", **ALONE, steps=13))
    with pytest.raises(liger_dist.LigerDistError, match=r"cannot be read|lack a part"):
        export(tmp_path / "run", tmp_path / "exported", step=None)
    assert not flag.exists(), "the command ran"
    assert not (tmp_path / "exported").exists()


def test_no_file_is_a_pickle(trained: Path) -> None:
    """Every file is safetensors or JSON; the template of chats is text."""
    files = [file for file in (trained / "checkpoints" / "step-00000012").rglob("*") if file.is_file()]
    assert sum(len(load_file(file)) for file in files if file.suffix == ".safetensors") > 0
    for file in files:
        if file.suffix not in (".safetensors", ".jinja"):
            json.loads(file.read_text())


def test_a_checkpoint_of_an_earlier_version_is_refused(trained: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000012"
    description = read_description(newest) | {"format": "torch.distributed.checkpoint, LoRA"}
    (newest / "description.json").write_text(json.dumps(description))
    sign(newest)
    said = r"step-00000012 has the pickles and \.distcp files of an earlier version .* reads safetensors\. Export its"
    with pytest.raises(liger_dist.LigerDistError, match=said):
        train(config_for(data, cache, tmp_path / "run", **ALONE, steps=13))
    with pytest.raises(liger_dist.LigerDistError, match=said):
        export(tmp_path / "run", tmp_path / "exported", step=None)


@pytest.mark.nightly
def test_one_process_is_continued_by_two(
    trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    train(config_for(data, cache, tmp_path, strategy="none", stop_at_step=6))
    workers_2.run(train, config_for(data, cache, tmp_path, strategy="fsdp2", resume=True, stop_at_step=9))
    assert losses_of(tmp_path) == pytest.approx(losses_of(trained)[:9], rel=2e-5)


@pytest.mark.nightly
@pytest.mark.nightly(strategy=["fsdp1", "ddp"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "ddp"])
def test_tied_weights_are_read_by_every_strategy(
    strategy: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 601, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0).save_pretrained(
        tmp_path / "model"
    )
    settings: dict[str, Any] = {"model": str(tmp_path / "model" / "config.json"), "steps": 6, "checkpoint_every": 2}
    train(config_for(data, cache, tmp_path / "whole", strategy="none", **settings))
    train(config_for(data, cache, tmp_path / "parts", strategy="none", stop_at_step=2, **settings))
    two = config_for(data, cache, tmp_path / "parts", strategy=strategy, resume=True, **settings)
    workers_2.run(train, replace(two, stop_at_step=4))
    export(tmp_path / "parts", tmp_path / "exported", step=4)
    train(replace(two, strategy="none"))
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "whole"), rel=2e-5)


def state_on(placements: Callable[[str], Any] | None) -> dict[str, Any]:
    """Tensors of every kind, sharded over a grid of 2 x 2; None for whole ones. Of 3 rows one rank has none."""
    generator = torch.Generator().manual_seed(1)
    values = {
        "even": torch.randn(8, 6, generator=generator),
        "uneven": torch.randn(5, 7, generator=generator),
        "empty": torch.randn(3, 4, generator=generator),
        "one": torch.randn(1, generator=generator),
        "bf16": torch.randn(6, 2, generator=generator).bfloat16(),
        "codes": torch.randint(0, 256, (9, 2), generator=generator, dtype=torch.uint8),
        "count": torch.arange(2**40, 2**40 + 6),
        "mask": torch.arange(12).view(6, 2) % 3 == 0,
    }
    weights: dict[str, Any] = values
    if placements is not None:
        mesh = init_device_mesh("cpu", (2, 2))
        weights = {name: distribute_tensor(value, mesh, placements(name)) for name, value in values.items()}
    step = {"step": torch.tensor(7.0), "of.no.rank": torch.empty(0, 3), "turned": torch.arange(6.0).view(2, 3).t()}
    return {"model": weights, "optimizer": {"layers.0.weight": {**step, "exp_avg": weights["uneven"]}}}


def by_rows(_: str) -> Any:
    return [Shard(0), Shard(0)]


def by_columns(name: str) -> Any:
    return [Replicate(), Shard(0) if name in ("one", "count") else Shard(1)]


def saved_by_four(folder: Path, in_background: bool) -> None:
    with mock.patch.object(state_files, "FILE_SIZE", 50):
        state = state_on(by_rows)
        writing = state_files.save_state(state, folder, in_background=in_background)
        if writing is not None:
            # What was copied is written.
            state["optimizer"]["layers.0.weight"]["step"].zero_()
            writing.result()
    read_back(folder, by_columns)


def read_back(folder: Path, placements: Callable[[str], Any] | None) -> None:
    expected, found = dict(state_files._named(state_on(placements))), state_on(placements)
    for _, value in state_files._named(found):
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    state_files.load_state(found, folder)
    for name, value in state_files._named(found):
        own, other = (v.full_tensor() if isinstance(v, DTensor) else v for v in (value, expected[name]))
        assert own.dtype == other.dtype, name
        assert torch.equal(own, other), name


@pytest.mark.parametrize("in_background", [False, True])
def test_every_tensor_is_stored_to_the_bit(in_background: bool, workers_4: Workers, tmp_path: Path) -> None:
    """Four ranks write; four with other shards and one process read, and of the floats torch's own tool."""
    workers_4.run(saved_by_four, tmp_path / "state", in_background)
    files = sorted(file.name for file in (tmp_path / "state").iterdir())
    assert len({name.split("-")[1] for name in files}) == 4, files
    assert len(files) > 8, "a rank's state is in several files"
    read_back(tmp_path / "state", None)
    floats = {
        name: v
        for name, v in state_files._named(state_on(None))
        if v.is_floating_point() and v.dim() > 0 and v.numel() > 0
    }
    (tmp_path / "whole").mkdir()
    consolidate_safetensors_files(str(tmp_path / "state"), str(tmp_path / "whole"), dict.fromkeys(floats, 1))
    whole = load_file(tmp_path / "whole" / "model-00001-of-00001.safetensors")
    for name, value in floats.items():
        assert torch.equal(whole[name], value), name


def names_that_are_read(config: TrainConfig) -> list[str]:
    """Files whose checksums this rank computes as they are written."""
    found: list[str] = []

    def noted(file: Path) -> str:
        found.append(file.name)
        return checksum_of_file(file)

    with mock.patch.object(checkpoint, "checksum_of_file", noted):
        train(config)
    return found


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])
def test_ranks_compute_checksums_of_their_own_files(
    strategy: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    changes: dict[str, Any] = {"steps": 1, "checkpoint_every": 1, "eval_every": 9}
    config = deepspeed_config(data, cache, tmp_path, **changes)
    if strategy == "fsdp2":
        config = config_for(data, cache, tmp_path / "run", **changes)
    own = workers_2.run(names_that_are_read, config)
    assert own[1]
    assert all(("shard-00002-" if strategy == "fsdp2" else "zero_pp_rank_1_") in name for name in own[1])
    assert not any("shard-00002-" in name or "zero_pp_rank_1_" in name for name in own[0])
    files = read_description(tmp_path / "run" / "checkpoints" / "step-00000001")["files"]
    assert list(files) == sorted(files)
    assert sorted(Path(name).name for name in files) == sorted(own[0] + own[1])


def rewrite_pickle(file: Path, content: bytes, *, beside: bool) -> None:
    """Puts a pickle into an archive of torch.save, or beside it under a name that torch takes for the same."""
    with zipfile.ZipFile(file) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            if beside and name.endswith("data.pkl"):
                archive.writestr(name.replace("data.pkl", "DATA.PKL"), content)
            archive.writestr(name, content if name.endswith("data.pkl") and not beside else data)


def evil_names(flag: Path) -> bytes:
    return pickle.dumps(Command(flag), protocol=2)


@pytest.fixture(scope="module")
def with_deepspeed(
    workers_2: Workers, data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Runs of two steps on two ranks, by ZeRO stage."""
    found = {}
    for stage in (0, 3):
        folder = tmp_path_factory.mktemp(f"zero{stage}")
        settings = {"zero_optimization": {"stage": stage}}
        (folder / "deepspeed.json").write_text(json.dumps(settings))
        workers_2.run(train, deepspeed_config(data, cache, folder, steps=2, checkpoint_every=2))
        found[stage] = folder
    return found


def deepspeed_config(data: Path, cache: Path, folder: Path, **changes: Any) -> TrainConfig:
    # Which of two names that differ in case alone torch reads depends on the number of tensors: here the planted one.
    settings = {"strategy": "deepspeed", "model": "tiny", "deepspeed": str(folder / "deepspeed.json")}
    return config_for(data, cache, folder / "run", **(settings | {"dtype": "bfloat16"} | changes))


def refusal(config: TrainConfig) -> str:
    """What the run is refused with, in a process of a pool."""
    try:
        train(config)
    except liger_dist.LigerDistError as error:
        return str(error)
    return ""


@pytest.mark.cover("values")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("beside", [False, True])
def test_a_planted_command_in_deepspeeds_files_does_not_run(
    beside: bool,
    stage: int,
    with_deepspeed: dict[int, Path],
    workers_2: Workers,
    data: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(with_deepspeed[stage], tmp_path / "zero")
    newest, flag = tmp_path / "zero" / "run" / "checkpoints" / "step-00000002", tmp_path / "it-ran"
    for file in (newest / "state").glob("*.pt"):
        rewrite_pickle(file, evil_names(flag), beside=beside)
    sign(newest)
    said = workers_2.run(refusal, deepspeed_config(data, cache, tmp_path / "zero", steps=3, resume=True))
    assert all("is a pickle that" in words or "cannot be read" in words for words in said), said
    with pytest.raises(liger_dist.LigerDistError):
        export(tmp_path / "zero" / "run", tmp_path / "exported", step=None)
    assert not flag.exists(), "the command ran"


@pytest.mark.smoke
@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeeds_own_files_are_read(
    stage: int, with_deepspeed: dict[int, Path], workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(with_deepspeed[stage], tmp_path / "zero")
    workers_2.run(train, deepspeed_config(data, cache, tmp_path / "zero", steps=3, resume=True, checkpoint_every=3))
    assert len(losses_of(tmp_path / "zero" / "run")) == 3
    assert export(tmp_path / "zero" / "run", tmp_path / "exported", step=None) == 3
    names = {file.suffix for file in (tmp_path / "exported").iterdir()}
    assert ".safetensors" in names
    assert not names & {".pt", ".bin", ".pkl"}
    assert (LAUNCH / "deepspeed" / "zero3.json").is_file()
