"""Checkpoints of a run: written by all ranks, published when they are whole, and never taken for whole before."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from liger_dist import LigerDistError

from .engine import Engine, Writing
from .process import as_one, on_rank_zero

PUBLISHED = "published.json"
DESCRIPTION = "description.json"


class Checkpoints:
    """The folder ``checkpoints`` of a run: one folder a step, and a file that lists the whole ones, oldest first.

    A step is written beside its final name. When every rank is done, the sizes of all files are noted in it, it gets
    its name, and then its place in the list.
    """

    def __init__(self, folder: Path, description: dict[str, Any], *, keep: int, anew: bool) -> None:
        """``keep`` of the newest stay, 0 for all. ``anew``: the list of an earlier run is replaced by the first
        checkpoint of this one."""
        self._folder = folder
        self._description = description
        self._keep = keep
        self._anew = anew
        self._begun: tuple[int, Path, Writing] | None = None

    def newest(self) -> int | None:
        """The newest whole checkpoint's step, alike on every rank; None when there is none. One that was damaged since
        it was published is passed over, with a sentence.

        Raises:
            LigerDistError: it belongs to another model, tokenizer or seed, or it is of a format that cannot be read.
        """
        return on_rank_zero(self._read_newest)

    def clear_partial(self) -> None:
        """Removes what an earlier run began and did not end."""
        on_rank_zero(self._remove_partial)

    def save(self, step: int, engine: Engine, *, in_background: bool) -> None:
        """Writes the state after ``step`` optimiser steps; in the background until :meth:`finish`.

        Raises:
            LigerDistError: on every rank, when one of them could not write.
        """
        self.finish()
        partial = self._path(step).with_suffix(".partial")
        on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
        with self._writing(step, partial):
            self._begun = step, partial, engine.save(partial, in_background=in_background)
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
        on_rank_zero(lambda: self._publish(step, partial))

    def load(self, step: int, engine: Engine) -> None:
        engine.load(self._path(step))

    @contextmanager
    def _writing(self, step: int, partial: Path) -> Iterator[None]:
        newest = (self._listed() or ["none"])[-1]
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

    def _listed(self) -> list[str]:
        path = self._folder / PUBLISHED
        names: list[str] = json.loads(path.read_text()) if path.is_file() and not self._anew else []
        return names

    def _publish(self, step: int, partial: Path) -> None:
        path = self._path(step)
        sizes = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
        (partial / DESCRIPTION).write_text(json.dumps(self._description | {"step": step, "files": sizes}, indent=2))
        listed = [name for name in self._listed() if name != path.name]
        if path.exists():
            self._list(listed)
            shutil.rmtree(path)
        partial.rename(path)
        listed.append(path.name)
        surplus = listed[: -self._keep] if self._keep else []
        self._list(listed[len(surplus) :])
        for name in surplus:
            # Out of the list first: one that is half removed is in no list.
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _list(self, names: list[str]) -> None:
        written = self._folder / f"{PUBLISHED}.partial"
        written.write_text(json.dumps(names))
        os.replace(written, self._folder / PUBLISHED)
        self._anew = False

    def _remove_partial(self) -> None:
        for path in self._folder.glob("step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def _read_newest(self) -> int | None:
        for name in reversed(self._listed()):
            path = self._folder / name
            damage = damage_of(path)
            if damage is None:
                found = json.loads((path / DESCRIPTION).read_text())
                self._check(path, found)
                step: int = found["step"]
                return step
            print(f"{path} is not whole ({damage}); it is passed over", flush=True)
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


def damage_of(path: Path) -> str | None:
    """What is missing of a published checkpoint; None for nothing."""
    try:
        sizes: dict[str, int] = json.loads((path / DESCRIPTION).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{DESCRIPTION}: {error}"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is not there"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    return None


def _difference(name: str, found: Any, expected: Any) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
        return "another model: " + ", ".join(f"{k} {found.get(k)} instead of {expected.get(k)}" for k in keys[:4])
    return f"{name} {found} instead of {expected}"


def describe_run(config: Any, tokenizer_fingerprint: str, seed: int, format: str) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it."""
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text = config.get_text_config()
    return {
        "format": format,
        "model": {name: getattr(text, name, None) for name in names},
        "tokenizer": tokenizer_fingerprint,
        "seed": seed,
    }
