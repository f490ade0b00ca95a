"""Checkpoints of a run: written by all ranks, published when they are complete, with a checksum of every file."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from liger_dist import LigerDistError

from .config import TrainConfig
from .distributed import UnwrittenError, as_one, gathered, on_rank_zero, rank, world_size
from .engine import Engine

DESCRIPTION = "description.json"
MODEL = "model"
"""config and tokenizer, in a checkpoint's folder"""
NO_PART_OF_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""settings that may differ between the run that wrote a checkpoint and the one that resumes it"""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    description: dict[str, Any]

    @property
    def progress(self) -> dict[str, Any]:
        """What :meth:`Checkpoints.save` was given."""
        found: dict[str, Any] = self.description["progress"]
        return found


class Checkpoints:
    """The folder ``checkpoints`` of a run, with one folder for each step.

    A step is written beside its final name. When every rank is done, the checksums of all files are noted in it, and
    then it gets its name.
    """

    def __init__(self, folder: Path, write_model: Callable[[Path], None], *, keep: int) -> None:
        """``keep`` of the newest stay, 0 for all. ``write_model`` leaves config and tokenizer in a folder."""
        self._folder = folder
        self._description: dict[str, Any] = {}
        self._write_model = write_model
        self._keep = keep
        self._begun: tuple[int, Path, Future[Any] | None, dict[str, Any]] | None = None
        self._best: int | None = None
        self.published_step = 0
        """of the newest checkpoint that is complete; 0 for none"""

    def newest(self, step: int | None = None) -> Saved | None:
        """Finds the newest complete checkpoint (with ``step`` that one), the same on every rank; None when there is
        none.

        One that was damaged since it was published is passed over, with a sentence that names the file. Every rank
        reads a part of the files.

        Raises:
            LigerDistError: none of several is complete, or there is none of that step.
        """
        listed, damages = on_rank_zero(lambda: steps_in(self._folder)), list[str]()
        names = [name for name in listed if step is None or _step_of(name) == step]
        if step is not None and not names:
            raise LigerDistError(
                f"--resume_step is {step}, but {self._folder} has no checkpoint of it; there is "
                f"{', '.join(listed) or 'none'}."
            )
        for name in reversed(names):
            path = self._folder / name
            damage = damage_of(path)
            if damage is None:
                description = on_rank_zero(lambda path=path: read_description(path))  # type: ignore[misc]
                return Saved(description["step"], description)
            damages.append(damage)
            if rank() == 0:
                print(f"{path} is not complete ({damage}); it is skipped", flush=True)
        if names:
            raise LigerDistError(
                f"no checkpoint in {self._folder} is complete, the newest {names[-1]} ({damages[0]}). Repair one, "
                "choose another --output_dir, or begin anew with --overwrite true instead of --resume true."
            )
        return None

    def describe(self, description: dict[str, Any], saved: Saved | None) -> None:
        """Sets what checkpoints of this run must share with those that resume them.

        Raises:
            LigerDistError: ``saved`` belongs to another model, tokenizer or seed, or its format cannot be read.
        """
        self._description = description
        if saved is not None:
            self._check(self._path(saved.step), saved.description)

    def clear(self, after: int) -> None:
        """Makes room for steps after ``after``: what an earlier run began and did not end is removed, and so is
        everything where the run starts anew, at 0; a checkpoint that was passed over gets another name."""
        on_rank_zero(lambda: self._clear(after))
        self.published_step = after

    def save(
        self, step: int, engine: Engine, progress: dict[str, Any], *, in_background: bool, best: int | None
    ) -> None:
        """Writes the state after ``step`` optimizer steps; in the background until :meth:`finish`.

        Args:
            progress: kept in the description.
            best: step of a checkpoint that stays, however many there are.

        Raises:
            LigerDistError: on every rank, when one of them could not write.
        """
        self.finish()
        self._best = best
        partial = self._path(step).with_suffix(".partial")
        on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
        with self._writing(step, partial):
            writing = engine.save(partial, in_background=in_background)
        self._begun = step, partial, writing, progress
        if not in_background:
            self.finish()

    def is_written(self) -> bool:
        """True where this rank has done its part of what :meth:`save` began."""
        writing = None if self._begun is None else self._begun[2]
        return writing is not None and writing.done()

    def finish(self) -> None:
        """Waits for what :meth:`save` began, and publishes it."""
        if self._begun is None:
            return
        (step, partial, writing, progress), self._begun = self._begun, None
        if writing is not None:
            with self._writing(step, partial):
                writing.result()
        with self._writing(step, partial), _as_unwritten():
            if rank() == 0:
                self._write_model(partial / MODEL)
        with self._writing(step, partial), _as_unwritten():
            checksums = checksums_of(partial, as_written=True)
        with self._writing(step, partial), _as_unwritten():
            if rank() == 0:
                self._publish(step, partial, progress, checksums)
        self.published_step = step
        on_rank_zero(self._remove_surplus)

    def load(self, step: int, engine: Engine, *, weights_only: bool = False) -> None:
        """Raises:
        LigerDistError: it cannot be read, though every file has its checksum.
        """
        try:
            engine.load(self._path(step), weights_only=weights_only)
        except LigerDistError:
            raise
        except (Exception, CheckpointException) as error:
            raise LigerDistError(
                f"the checkpoint {self._path(step)} cannot be read ({reason_of(error)}); move it away to continue from "
                "the one before."
            ) from error

    @contextmanager
    def _writing(self, step: int, partial: Path) -> Iterator[None]:
        newest = (["none", *steps_in(self._folder)])[-1]
        together = as_one(
            f"the checkpoint of step {step} cannot be written to {self._folder}",
            f"Make room and go on with --resume true; the newest complete checkpoint is {newest}",
            self._write_probe,
        )
        try:
            with together:
                yield
        except LigerDistError:
            # It would take the room that is missing.
            on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise

    def _write_probe(self) -> None:
        """Writes as much as the smallest file of a checkpoint has."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(bytes(2**20))

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _publish(self, step: int, partial: Path, progress: dict[str, Any], checksums: dict[str, str]) -> None:
        description = self._description | {"step": step, "progress": progress, "files": checksums}
        text = json.dumps(description | {"checksum": checksum_of_text(description)}, indent=1)
        (partial / DESCRIPTION).write_text(text)
        partial.rename(self._path(step))

    def _remove_surplus(self) -> None:
        names = [name for name in steps_in(self._folder) if _step_of(name) != self._best]
        for name in names[: -self._keep] if self._keep else []:
            _remove(self._folder / name)

    def _clear(self, after: int) -> None:
        # The newest first: what is left of an interrupted removal is older.
        for name in reversed(steps_in(self._folder)):
            if after == 0:
                _remove(self._folder / name)
            elif _step_of(name) > after:
                path = self._folder / name
                path.rename(path.with_suffix(f".damaged-{time.time():.0f}"))
        for path in self._folder.glob("step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def _check(self, path: Path, found: dict[str, Any]) -> None:
        refuse_pickles(path, found)
        if found.get("format") != self._description["format"]:
            raise LigerDistError(
                f"the checkpoint {path} is of {found.get('format')}, and this run reads {self._description['format']}. "
                f"Export its weights (liger-dist export {self._folder.parent}) and start from them with --model, "
                "or go on with the strategy that wrote it."
            )
        expected, found = _without_place(self._description, found)
        for name, value in expected.items():
            if found.get(name) != value:
                raise LigerDistError(
                    f"the checkpoint {path} was written with {difference(name, found.get(name), value)}. Resume with "
                    f"the same model, tokenizer and seed{', with --ema_decay or without' * (name == 'ema')}, or choose "
                    "another --output_dir."
                )


def steps_in(folder: Path) -> list[str]:
    """Lists the names of published checkpoints, oldest first."""
    found = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=_step_of)


def refuse_earlier(folder: Path) -> None:
    """Raises:
    LigerDistError: a run that starts anew would remove checkpoints.
    """
    names = steps_in(folder)
    if names:
        raise LigerDistError(
            f"{folder} holds checkpoints of an earlier run, the newest {names[-1]}; continue from it with --resume "
            "true, choose another --output_dir, or remove them with --overwrite true."
        )


@contextmanager
def _as_unwritten() -> Iterator[None]:
    """Turns an OSError of this rank into one that all ranks refuse together."""
    try:
        yield
    except OSError as error:
        raise UnwrittenError from error


def checksums_of(folder: Path, *, as_written: bool = False) -> dict[str, str]:
    """Computes XXH3 (128 bits) of every file in a folder, by its name there; every rank reads a part of the files.

    Args:
        as_written: each rank reads those that it wrote, which its page cache holds.

    Raises:
        OSError: a file of this rank cannot be read; the other ranks wait for it no longer.
    """
    names = on_rank_zero(lambda: sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()))
    found: dict[str, str | OSError] = {}
    for index, name in enumerate(names):
        if (writer_of(name) if as_written else index % world_size()) != rank():
            continue
        try:
            found[name] = checksum_of_file(folder / name)
        except OSError as error:
            found[name] = error
    merged = {name: sum_ for of_rank in gathered(found) for name, sum_ in of_rank.items()}
    for value in merged.values():
        if isinstance(value, OSError):
            raise value
    return {name: str(merged[name]) for name in names}


def writer_of(name: str) -> int:
    """Returns the rank that wrote a file of a checkpoint, by its name: torch counts ranks from 1, DeepSpeed from 0.
    What has no rank in its name is of rank 0."""
    of_torch, of_deepspeed = re.match(r"shard-(\d+)-", name), re.search(r"zero_pp_rank_(\d+)_", name)
    if of_torch:
        return int(of_torch[1]) - 1
    return int(of_deepspeed[1]) if of_deepspeed else 0


def checksum_of_file(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def checksum_of_text(description: dict[str, Any]) -> str:
    """Computes the checksum of a description, without its field for the checksum."""
    values = {name: value for name, value in description.items() if name != "checksum"}
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_description(path: Path) -> dict[str, Any]:
    """Raises:
    ValueError: it is not as it was written.
    """
    found: dict[str, Any] = json.loads((path / DESCRIPTION).read_text())
    if not isinstance(found, dict) or found.get("checksum") != checksum_of_text(found):
        raise ValueError("its content is not what was written")
    return found


def refuse_pickles(path: Path, description: dict[str, Any]) -> None:
    """Raises:
    LigerDistError: a version before safetensors wrote the checkpoint.
    """
    if str(description.get("format")).startswith("torch.distributed.checkpoint"):
        raise LigerDistError(
            f"the checkpoint {path} has the pickles and .distcp files of an earlier version of liger-dist, and this "
            "one reads safetensors. Export its weights by the version that wrote it (liger-dist export "
            f"{path.parent.parent}) and start from them with --model, or end the run with that version."
        )


def damage_of(path: Path) -> str | None:
    """Says what is wrong with a published checkpoint, the same on every rank; None for nothing.

    Raises:
        LigerDistError: the disk does not say.
    """
    expected = on_rank_zero(lambda: _described(path))
    if isinstance(expected, str):
        return expected
    try:
        found = checksums_of(path)
    except OSError as error:
        raise LigerDistError(f"{path} cannot be read: {error}.") from error
    for name, checksum in expected["files"].items():
        if name not in found:
            return f"{name} is not there"
        if found[name] != checksum:
            return f"{name} has another content than was written: checksum {found[name]} instead of {checksum}"
    unknown = sorted(found.keys() - expected["files"].keys() - {DESCRIPTION})
    if unknown:
        return f"{unknown[0]} was not there when it was written"
    if expected["step"] != _step_of(path.name):
        return f"it is of step {expected['step']}"
    return None


def _described(path: Path) -> dict[str, Any] | str:
    try:
        return read_description(path)
    except (FileNotFoundError, ValueError, KeyError) as error:
        return f"{DESCRIPTION}: {error}"


def reason_of(error: BaseException) -> str:
    """Returns the message of an error in one line; of torch's CheckpointException, which has one of each rank, the
    first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


FOUR_BIT_EXPERTS = "four_bit_experts"
"""entry of a description of LoRA: True if experts of a base of 4 bits were, too; those of earlier versions were not"""
MTP_DEPTH = "mtp_depth"
"""entry of a model's description: number of further tokens that it predicts"""


def describe_model(model_config: Any, tokenization: str, config: TrainConfig, format: str) -> dict[str, Any]:
    """Collects what a checkpoint must share with the run that resumes it."""
    model = settings_of(model_config)
    if config.mtp_options is not None:
        model[MTP_DEPTH] = config.mtp_options["depth"]
    lora: dict[str, Any] = {}
    if config.lora_rank:
        lora = {name: value for name, value in vars(config).items() if name.startswith("lora") or name == "dora"}
        lora |= {"load_in_4bit": True, "dtype": config.dtype, FOUR_BIT_EXPERTS: True} if config.load_in_4bit else {}
        lora |= on_rank_zero(lambda: describe_base(Path(config.model)))
    return {
        "format": format,
        "model": model,
        "tokenizer": tokenization,
        "seed": config.seed,
        "lora": lora or None,
        "ema": True if config.ema_decay else None,
    }


def settings_of(model_config: Any) -> dict[str, Any]:
    """Returns the settings that make a model, as they are when they are read again."""
    settings = model_config.get_text_config().to_diff_dict()
    kept = {name: value for name, value in settings.items() if name not in NO_PART_OF_THE_MODEL}
    found: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return found


def describe_base(folder: Path) -> dict[str, Any]:
    """Identifies the frozen base of LoRA: where it is, and size and XXH3 (128 bits) of each file with its weights."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    with ThreadPoolExecutor() as pool:
        checksums = list(pool.map(checksum_of_file, files))
    weights = {file.name: f"{file.stat().st_size} {sum_}" for file, sum_ in zip(files, checksums, strict=True)}
    return {"model": str(folder.resolve()), "weights": weights}


def difference_of_bases(written: dict[str, str], found: dict[str, str]) -> str | None:
    """Names the first file of weights that differs, with both contents; None where all are the same."""
    for name in sorted(written.keys() | found.keys()):
        if written.get(name) != found.get(name):
            is_, was = (x.get(name, "not there") for x in (found, written))
            return f"{name} is {is_} (bytes, XXH3) and was {was} when the LoRA layers were trained"
    return None


def _without_place(expected: dict[str, Any], found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leaves out where the base of LoRA is, for both know its weights; of a checkpoint that does not know them, the
    weights.

    Raises:
        LigerDistError: the base has other weights.
    """
    mine, theirs = expected.get("lora"), found.get("lora")
    if not mine or not theirs:
        return expected, found
    written = theirs.get("weights")
    difference = None if written is None else difference_of_bases(written, mine["weights"])
    if difference is not None:
        raise LigerDistError(
            f"--model {mine['model']} is not the base of the checkpoint, which was {theirs['model']}: {difference}. "
            "Give the folder with the weights that the LoRA layers were trained on, or choose another --output_dir."
        )
    ignored = {"weights"} if written is None else {"weights", "model"}
    if written is None:
        theirs = theirs | {"model": str(Path(theirs["model"]).resolve())}
    kept = [{name: value for name, value in of.items() if name not in ignored} for of in (mine, theirs)]
    return expected | {"lora": kept[0]}, found | {"lora": kept[1]}


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _remove(path: Path) -> None:
    """Renames the folder before its files are removed: one that is half removed is no checkpoint."""
    partial = path.with_suffix(".partial")
    path.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


def difference(name: str, found: Any, expected: Any) -> str:
    """Says what two descriptions have for a name."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
        return "another model: " + ", ".join(f"{k} {found.get(k)} instead of {expected.get(k)}" for k in keys[:4])
    return f"{name} {found} instead of {expected}"
