"""Checkpoints of a run: written by all ranks, published when they are whole, and never taken for whole before."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from liger_dist import LigerDistError

from .engine import Engine, Writing
from .process import rank
from .together import UnwrittenError, as_one, on_rank_zero

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


class Checkpoints:
    """The folder ``checkpoints`` of a run, with one folder for each step.

    A step is written beside its final name. When every rank is done, the sizes of all files are noted in it, and then
    it gets its name.
    """

    def __init__(
        self, folder: Path, description: dict[str, Any], write_model: Callable[[Path], None], *, keep: int
    ) -> None:
        """``keep`` of the newest stay, 0 for all. ``write_model`` leaves config and tokenizer in a folder."""
        self._folder = folder
        self._description = description
        self._write_model = write_model
        self._keep = keep
        self._begun: tuple[int, Path, Writing] | None = None

    def newest(self) -> int | None:
        """The newest whole checkpoint's step, alike on every rank; None when there is none. One that was damaged since
        it was published is passed over, with a sentence.

        Raises:
            LigerDistError: it belongs to another model, tokenizer or seed, or it is of a format that cannot be read.
        """
        return on_rank_zero(self._read_newest)

    def clear(self, after: int) -> None:
        """Makes room for steps after ``after``: what an earlier run began and did not end is removed, and so is
        everything where the run starts anew, at 0; a checkpoint that was passed over gets another name."""
        on_rank_zero(lambda: self._clear(after))

    def save(self, step: int, engine: Engine, *, in_background: bool) -> None:
        """Writes the state after ``step`` optimiser steps; in the background until :meth:`finish`.

        Raises:
            LigerDistError: on every rank, when one of them could not write.
        """
        self.finish()
        partial = self._path(step).with_suffix(".partial")
        on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
        with self._writing(step, partial):
            writing = engine.save(partial, in_background=in_background)
        self._begun = step, partial, writing
        if not in_background:
            self.finish()

    def is_written(self) -> bool:
        """Whether this rank has done its part of what :meth:`save` began."""
        return self._begun is not None and self._begun[2].done()

    def finish(self) -> None:
        """Waits for what :meth:`save` began, and publishes it."""
        if self._begun is None:
            return
        (step, partial, writing), self._begun = self._begun, None
        with self._writing(step, partial):
            writing.result()
        with self._writing(step, partial):
            try:
                if rank() == 0:
                    self._publish(step, partial)
            except OSError as error:
                raise UnwrittenError from error
        on_rank_zero(self._remove_surplus)

    def load(self, step: int, engine: Engine) -> None:
        """Raises:
        LigerDistError: it cannot be read, though every file has its size.
        """
        try:
            engine.load(self._path(step))
        except (Exception, CheckpointException) as error:
            raise LigerDistError(
                f"the checkpoint {self._path(step)} cannot be read ({reason_of(error)}); move it away to go on from "
                "the one before."
            ) from error

    @contextmanager
    def _writing(self, step: int, partial: Path) -> Iterator[None]:
        newest = (["none", *steps_in(self._folder)])[-1]
        together = as_one(
            f"the checkpoint of step {step} cannot be written to {self._folder}",
            f"Make room and go on with --resume true; the newest whole checkpoint is {newest}",
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
        """As much as the smallest file of a checkpoint has."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(bytes(2**20))

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _publish(self, step: int, partial: Path) -> None:
        self._write_model(partial / MODEL)
        sizes = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
        (partial / DESCRIPTION).write_text(json.dumps(self._description | {"step": step, "files": sizes}, indent=2))
        partial.rename(self._path(step))

    def _remove_surplus(self) -> None:
        names = steps_in(self._folder)
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

    def _read_newest(self) -> int | None:
        names, damage = steps_in(self._folder), None
        for name in reversed(names):
            path = self._folder / name
            damage = damage_of(path)
            if damage is None:
                found = json.loads((path / DESCRIPTION).read_text())
                self._check(path, found)
                step: int = found["step"]
                return step
            print(f"{path} is not whole ({damage}); it is passed over", flush=True)
        if names:
            raise LigerDistError(
                f"no checkpoint in {self._folder} is whole, the newest {names[-1]} ({damage}). Repair one, choose "
                "another --output_dir, or begin anew with --overwrite true in the place of --resume true."
            )
        return None

    def _check(self, path: Path, found: dict[str, Any]) -> None:
        if found.get("format") != self._description["format"]:
            raise LigerDistError(
                f"the checkpoint {path} is of {found.get('format')}, and this run reads {self._description['format']}. "
                f"Export its weights (python launch/export.py {self._folder.parent}) and start from them with --model, "
                "or go on with the strategy that wrote it."
            )
        for name, value in self._description.items():
            if found.get(name) != value:
                raise LigerDistError(
                    f"the checkpoint {path} was written with {_difference(name, found.get(name), value)}. Resume with "
                    "the same model, tokenizer and seed, or choose another --output_dir."
                )


def steps_in(folder: Path) -> list[str]:
    """Names of published checkpoints, oldest first."""
    found = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=_step_of)


def refuse_earlier(folder: Path) -> None:
    """Raises:
    LigerDistError: a run that starts anew would remove checkpoints.
    """
    names = steps_in(folder)
    if names:
        raise LigerDistError(
            f"{folder} holds checkpoints of an earlier run, the newest {names[-1]}; go on from it with --resume true, "
            "choose another --output_dir, or remove them with --overwrite true."
        )


def damage_of(path: Path) -> str | None:
    """What is missing of a published checkpoint; None for nothing.

    Raises:
        OSError: the disk does not say.
    """
    try:
        sizes: dict[str, int] = json.loads((path / DESCRIPTION).read_text())["files"]
    except (FileNotFoundError, ValueError, KeyError) as error:
        return f"{DESCRIPTION}: {error}"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is not there"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    return None


def reason_of(error: BaseException) -> str:
    """In one line; of torch's exception, which has a traceback of each rank, the first one's."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def describe_run(config: Any, tokenizer_fingerprint: str, seed: int, format: str) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it."""
    settings = config.get_text_config().to_diff_dict()
    model = {name: value for name, value in settings.items() if name not in NO_PART_OF_THE_MODEL}
    return {
        "format": format,
        # As it is when it is read again.
        "model": json.loads(json.dumps(model, default=str)),
        "tokenizer": tokenizer_fingerprint,
        "seed": seed,
    }


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _remove(path: Path) -> None:
    """Out of sight first: one that is half removed is no checkpoint."""
    partial = path.with_suffix(".partial")
    path.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


def _difference(name: str, found: Any, expected: Any) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
        return "another model: " + ", ".join(f"{k} {found.get(k)} instead of {expected.get(k)}" for k in keys[:4])
    return f"{name} {found} instead of {expected}"
