"""From a checkpoint of any strategy to one folder that transformers loads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from transformers import AutoConfig, AutoModelForCausalLM

from liger_dist import LigerDistError

from .checkpoint import DESCRIPTION, PUBLISHED, damage_of
from .tokens import load_tokenizer

DTYPES = ("float32", "bfloat16", "float16")


def export(run: Path, to: Path, *, step: int | None, dtype: str) -> int:
    """Writes config, weights and tokenizer of a run's checkpoint into ``to``; returns its step.

    Raises:
        LigerDistError: there is no such whole checkpoint, or ``to`` exists.
    """
    if to.exists():
        raise LigerDistError(f"{to} exists; give another folder with --to, or remove it.")
    path = _checkpoint(run, step)
    description = json.loads((path / DESCRIPTION).read_text())
    config = AutoConfig.from_pretrained(run / "model", local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # What is computed from the config is not stored, and not exported either.
    model.to_empty(device="cpu")
    model.tie_weights()
    weights = _weights(path, description["format"], model)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise LigerDistError(
            f"the checkpoint {path} has no values for {', '.join(missing[:5])}; it is of another model."
        )
    model.to(getattr(torch, dtype))
    partial = to.with_name(f"{to.name}.partial")
    model.save_pretrained(partial, max_shard_size="5GB")
    load_tokenizer(run / "model").save_pretrained(partial)
    partial.rename(to)
    found: int = description["step"]
    return found


def _checkpoint(run: Path, step: int | None) -> Path:
    folder = run / "checkpoints"
    listed = json.loads((folder / PUBLISHED).read_text()) if (folder / PUBLISHED).is_file() else []
    if not listed:
        raise LigerDistError(f"{run} has no whole checkpoint; expected the --output_dir of a run that wrote one.")
    name = listed[-1] if step is None else f"step-{step:08d}"
    if name not in listed:
        raise LigerDistError(f"{run} has no checkpoint of step {step}; there are {', '.join(listed)}.")
    damage = damage_of(folder / name)
    if damage is not None:
        raise LigerDistError(f"{folder / name} is not whole ({damage}); choose another --step of {', '.join(listed)}.")
    path: Path = folder / name
    return path


def _weights(path: Path, format: str, model: Any) -> dict[str, Any]:
    """By parameter name, in fp32."""
    if not format.startswith("DeepSpeed"):
        state: dict[str, Any] = {"model": model.state_dict()}
        state_dict_loader.load(state, checkpoint_id=str(path), no_dist=True)
        weights: dict[str, Any] = state["model"]
        return weights
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = path / "state" / "mp_rank_00_model_states.pt"
    if "stage 0" in format:
        module: dict[str, Any] = torch.load(whole, map_location="cpu", weights_only=False)["module"]
        return module
    found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(path), tag="state")
    return found
