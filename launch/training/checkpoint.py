"""Sharded checkpoints: whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from liger_dist import LigerDistError

from .process import on_rank_zero

LATEST = "latest"
DESCRIPTION = "description.json"


class Checkpoints:
    """The folder ``checkpoints`` of a run: one folder a step, and a file that names the newest whole one.

    A step is written beside its final name and renamed when every rank is done, and only then named as the latest.
    """

    def __init__(self, folder: Path, description: dict[str, Any]) -> None:
        self._folder = folder
        self._description = description

    def latest(self) -> int | None:
        """The newest whole checkpoint's step, alike on every rank; None when there is none.

        Raises:
            LigerDistError: it belongs to another model, tokenizer or seed, or the folder that is named is not there.
        """
        return on_rank_zero(self._read_latest)

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        """Writes the state after ``step`` optimiser steps."""
        path = self._path(step)
        partial = path.with_name(f"{path.name}.partial")
        on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
        weights, moments = get_state_dict(model, optimizer)
        state_dict_saver.save(
            {"model": weights, "optimizer": moments}, checkpoint_id=str(partial), no_dist=not dist.is_initialized()
        )
        if dist.is_initialized():
            dist.barrier()
        on_rank_zero(lambda: self._publish(step, partial))
        return path

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Restores the state after ``step`` steps, written by any number of ranks. Hyperparameters stay as they are."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        state_dict_loader.load(state, checkpoint_id=str(self._path(step)), no_dist=not dist.is_initialized())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _publish(self, step: int, partial: Path) -> None:
        path = self._path(step)
        (partial / DESCRIPTION).write_text(json.dumps(self._description | {"step": step}, indent=2))
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        pointer = self._folder / f"{LATEST}.partial"
        pointer.write_text(path.name)
        os.replace(pointer, self._folder / LATEST)

    def _read_latest(self) -> int | None:
        pointer = self._folder / LATEST
        if not pointer.is_file():
            return None
        path = self._folder / pointer.read_text().strip()
        if not (path / DESCRIPTION).is_file():
            raise LigerDistError(
                f"{pointer} names {path.name}, which is not there or not whole; write the name of another folder into "
                "it, or remove it to start anew."
            )
        found = json.loads((path / DESCRIPTION).read_text())
        for name, value in self._description.items():
            if found.get(name) != value:
                raise LigerDistError(
                    f"the checkpoint {path} was written with {_difference(name, found.get(name), value)}. Resume with "
                    "the same model, tokenizer and seed, or choose another --output_dir."
                )
        step: int = found["step"]
        return step


def _difference(name: str, found: Any, expected: Any) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
        return "another model: " + ", ".join(f"{k} {found.get(k)} instead of {expected.get(k)}" for k in keys[:4])
    return f"{name} {found} instead of {expected}"


def describe_run(config: Any, tokenizer_fingerprint: str, seed: int) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it."""
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text = config.get_text_config()
    return {
        "model": {name: getattr(text, name, None) for name in names},
        "tokenizer": tokenizer_fingerprint,
        "seed": seed,
    }
