"""Checkpoints that can be trusted: damage of every kind is found before anything is loaded, and a pickle that somebody
plants is refused before it runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Workers
from training_runs import LAUNCH, config_for, losses_of

import liger_dist
from liger_dist_train.checkpoint import checksum_of_file, checksum_of_text, read_description
from liger_dist_train.config import TrainConfig
from liger_dist_train.export import export
from liger_dist_train.run import train

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
    for name in ("__0_0.distcp", ".metadata", "model/tokenizer.json", "description.json")
    # These are the same in every step.
    if damage is not swapped or name in ("__0_0.distcp", "description.json")
]


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
    (tmp_path / "run" / "checkpoints" / "step-00000012" / "__0.metadata").write_bytes(b"x")
    train(config_for(data, cache, tmp_path / "run", **ALONE, steps=7, checkpoint_every=0))
    assert "__0.metadata was not there when it was written" in capfd.readouterr().out


def sign(folder: Path) -> None:
    """Checksums of what is there now, as whoever plants a file would write them."""
    description = json.loads((folder / "description.json").read_text())
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "description.json"]
    description["files"] = {str(file.relative_to(folder)): checksum_of_file(file) for file in files}
    text = json.dumps(description | {"checksum": checksum_of_text(description)})
    (folder / "description.json").write_text(text)
    read_description(folder)


def evil_metadata(folder: Path, flag: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Command(flag)))


def evil_fallback(folder: Path, flag: Path) -> None:
    """Torch looks there where ``.metadata`` cannot be read."""
    (folder / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x04Size\x93\x8c\x01x\x85R.")
    for rank in range(2):
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(Command(flag)))


def evil_item(folder: Path, flag: Path) -> None:
    """A weight that is said to be a pickled object."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    found = FileSystemReader(str(folder)).read_metadata()
    for name in [name for name in found.state_dict_metadata if name.startswith("model.")]:
        found.state_dict_metadata[name] = BytesStorageMetadata()
    for index, info in (found.storage_data or {}).items():
        buffer = io.BytesIO()
        torch.save(Command(flag), buffer)
        (folder / info.relative_path).write_bytes(buffer.getvalue())
        found.storage_data[index] = replace(info, offset=0, length=len(buffer.getvalue()))  # type: ignore[index]
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def evil_tensor(folder: Path, flag: Path) -> None:
    """A pickle where a tensor is."""
    from torch.distributed.checkpoint import FileSystemReader

    found = FileSystemReader(str(folder)).read_metadata()
    buffer = io.BytesIO()
    torch.save(Command(flag), buffer)
    for index, info in (found.storage_data or {}).items():
        (folder / info.relative_path).write_bytes(buffer.getvalue())
        found.storage_data[index] = replace(info, offset=0, length=len(buffer.getvalue()))  # type: ignore[index]
    (folder / ".metadata").write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("plant", [evil_metadata, evil_fallback, evil_item, evil_tensor])
def test_a_planted_command_does_not_run(
    plant: Callable[[Path, Path], None], trained: Path, data: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    newest, flag = tmp_path / "run" / "checkpoints" / "step-00000012", tmp_path / "it-ran"
    plant(newest, flag)
    sign(newest)
    with pytest.raises(liger_dist.LigerDistError, match=r"asks for|cannot be read|pickled object"):
        train(config_for(data, cache, tmp_path / "run", **ALONE, steps=13))
    with pytest.raises(liger_dist.LigerDistError, match=r"asks for|cannot be read|pickled object"):
        export(tmp_path / "run", tmp_path / "exported", step=None)
    assert not flag.exists(), "the command ran"
    assert not (tmp_path / "exported").exists()


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
    settings = {"strategy": "deepspeed", "deepspeed": str(folder / "deepspeed.json"), "dtype": "bfloat16"}
    return config_for(data, cache, folder / "run", **(settings | changes))


def refusal(config: TrainConfig) -> str:
    """What the run is refused with, in a process of a pool."""
    try:
        train(config)
    except liger_dist.LigerDistError as error:
        return str(error)
    return ""


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
