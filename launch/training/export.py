"""From a checkpoint of any strategy to one folder that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig, AutoModelForCausalLM

from liger_dist import LigerDistError

from .checkpoint import DESCRIPTION, MODEL, damage_of, reason_of, steps_in
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
    config = AutoConfig.from_pretrained(path / MODEL, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # What is computed from the config is not stored, and not exported either.
    model.to_empty(device="cpu")
    model.tie_weights()
    try:
        weights = _weights(path, description["format"], model)
    except (Exception, CheckpointException) as error:
        raise LigerDistError(
            f"the checkpoint {path} cannot be read: {reason_of(error)}; choose another --step."
        ) from error
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise LigerDistError(
            f"the checkpoint {path} has no values for {', '.join(missing[:5])}; it is of another model."
        )
    model.to(getattr(torch, dtype))
    _let_it_end(model, load_tokenizer(path / MODEL))
    partial = to.with_name(f"{to.name}.partial")
    if partial.exists():
        raise LigerDistError(f"{partial} is in the way, perhaps of an export that was cut off; remove it.")
    try:
        model.save_pretrained(partial, max_shard_size="5GB")
        shutil.copytree(path / MODEL, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json"))
        partial.rename(to)
    except (OSError, SafetensorError) as error:
        # It would take the room that is missing.
        shutil.rmtree(partial, ignore_errors=True)
        raise LigerDistError(
            f"{to} cannot be written: {error}; make room, or give another folder with --to."
        ) from error
    found: int = description["step"]
    return found


def _let_it_end(model: Any, tokenizer: Any) -> None:
    """``generate`` stops at the tokenizer's end-of-sequence token, where the model's config has none."""
    for settings in (model.config.get_text_config(), model.generation_config):
        if settings.eos_token_id is None:
            settings.eos_token_id = tokenizer.eos_token_id
    if model.generation_config.pad_token_id is None:
        # Not in the config, where it would take the token's row of the embedding out of training.
        model.generation_config.pad_token_id = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )


def _checkpoint(run: Path, step: int | None) -> Path:
    folder = run / "checkpoints"
    listed = steps_in(folder)
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
        state = torch.load(whole, map_location="cpu", weights_only=False)
        module: dict[str, Any] = state["module"]
        masters = (state["optimizer"] or {}).get("fp32_groups")
        return module if masters is None else _named_masters(model, masters)
    found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(path), tag="state")
    return found


def _named_masters(model: Any, masters: list[list[torch.Tensor]]) -> dict[str, Any]:
    """Those of DeepSpeed without ZeRO in bf16, in the order of the optimiser's groups: matrices, then vectors, or the
    other way round, as the model begins."""
    groups: dict[bool, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(parameter.dim() >= 2, []).append((name, parameter))
    found = {}
    for group, values in zip(groups.values(), masters, strict=True):
        for (name, parameter), value in zip(group, values, strict=True):
            if value.shape != parameter.shape:
                raise LigerDistError(f"{name} is {list(parameter.shape)} and its fp32 master {list(value.shape)}")
            found[parameter] = value
    # Under both names of one that is tied.
    return {name: found[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
