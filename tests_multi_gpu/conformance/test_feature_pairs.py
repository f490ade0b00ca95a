"""Two features in one model and layout, beside what the other suites combine: as in test_conformance, every gradient
and value of two optimiser steps equal those of the unwrapped fp64 model. docs/combinations.md lists the pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cells import DDP, GRID, HSDP, MODEL, ONE, USE, Cell, Model, Use
from distilled import Pair, errors_of
from harness import InThisProcess, Workers
from models import HYBRIDS, assert_below
from test_conformance import train

ATTENTION = ("q_proj", "v_proj", "o_proj")
MODELS: dict[str, Model] = {
    "untied": MODEL["untied"],
    "experts": MODEL["experts"],
    "LoRA": Model(lora_on_layers=ATTENTION),
    "4 bits": Model(lora_on_layers=ATTENTION, four_bits="linear"),
    "experts of 4 bits": Model(family="qwen3_moe", lora_on_layers=ATTENTION, four_bits="experts"),
    "LoRA beside experts": Model(family="qwen3_moe", lora_on_layers=ATTENTION),
    "LoRA, MTP": Model(lora_on_layers=ATTENTION, mtp=2),
    "4 bits, MTP": Model(lora_on_layers=ATTENTION, four_bits="linear", mtp=2),
    "experts of 4 bits, MTP": Model(family="qwen3_moe", lora_on_layers=ATTENTION, four_bits="experts", mtp=2),
    "experts, MTP": Model(family="qwen3_moe", mtp=2),
    "hybrid": Model(family="qwen3_5_text"),
    "hybrid, LoRA": Model(family="qwen3_5_text", lora_on_layers=ATTENTION),
    "hybrid, 4 bits": Model(family="qwen3_5_text", lora_on_layers=ATTENTION, four_bits="linear"),
}
USES: dict[str, Use] = {
    "checkpointing, MLP tiles": Use(checkpointing=True, mlp_tiles=True),
    "policy outputs, checkpointing, MLP tiles": Use(policy=True, checkpointing=True, mlp_tiles=True),
    "policy outputs, checkpointing, replayed routing": Use(policy=True, checkpointing=True, replays=True),
}
LAYOUTS = {
    "one process": ONE,
    "DDP": DDP,
    "FSDP1": Cell(engine="fsdp1", layout={"by_others": False}),
    "FSDP2": Cell(engine="fsdp2"),
    "units": Cell(engine="fsdp2", layout={"units": 2}),
    "vocab-parallel": Cell(engine="fsdp2", layout={"rows": True}),
    "offload": Cell(engine="fsdp2", layout={"offload": True}),
    "HSDP": Cell(engine="fsdp2", layout={"axes": HSDP}, world=4),
    "FSDP2 x TP": Cell(engine="fsdp2", layout={"axes": GRID}, world=4),
    "TP": Cell(engine="tp"),
    "ZeRO-2": Cell(engine="zero", layout={"stage": 2}),
    "ZeRO-3": Cell(engine="zero", layout={"stage": 3}),
}
MODEL.update(MODELS)
USE.update(USES)


def cells() -> list[Any]:
    """Every model in every layout, on packed documents, with the uses that it can have together. ``make test`` runs
    the models under FSDP2, and one of them in every layout."""
    found = []
    for place, (where, layout) in enumerate(LAYOUTS.items()):
        for number, (name, model) in enumerate(MODELS.items()):
            if model.four_bits and where == "FSDP1":
                continue  # refused: test_four_bit
            use = "checkpointing, MLP tiles" if model.mtp else "policy outputs, checkpointing, MLP tiles"
            if model.family == "qwen3_moe":
                # Its experts are no gated MLPs.
                use = "checkpointing" if model.mtp else "policy outputs, checkpointing, replayed routing"
            cell = replace(layout, model=name, data="packed", use=use)
            is_kept = where == "FSDP2" or number == place % len(MODELS)
            found.append(pytest.param(cell, marks=[pytest.mark.nightly] * (not is_kept), id=str(cell)))
    return found


@pytest.mark.parametrize("cell", cells())
def test_two_features(cell: Cell, request: pytest.FixtureRequest) -> None:
    for errors in results_of(cell, request, trained, cell):
        assert_below(errors, tolerance(cell))


def results_of(cell: Cell, request: pytest.FixtureRequest, function: Any, *args: Any) -> list[dict[str, float]]:
    """Runs ``function`` on the ranks of ``cell``."""
    if cell.obstacle() is not None:
        pytest.skip(str(cell.obstacle()))
    if cell.world == 1:
        with InThisProcess() as here:
            return here.run(function, *args)
    workers: Workers = request.getfixturevalue(f"workers_{cell.world}")
    return workers.run(function, *args)


def students() -> list[Any]:
    """Models that learn from a teacher on packed documents, and layouts beside those of test_distillation."""
    found = []
    for where in ("one process", "FSDP2", "units", "vocab-parallel", "offload", "TP", "ZeRO-3"):
        for name in ("untied", "LoRA", "4 bits", "experts", "experts of 4 bits", "hybrid", "frozen backbone"):
            use = "checkpointing" if MODEL[name].family == "qwen3_moe" else "checkpointing, MLP tiles"
            cell = replace(LAYOUTS[where], model=name, data="packed", use=use)
            is_kept = (where, name) in (("FSDP2", "4 bits"), ("FSDP2", "experts"), ("units", "hybrid"))
            found.append(pytest.param(cell, marks=[pytest.mark.nightly] * (not is_kept), id=str(cell)))
    return found


@pytest.mark.parametrize("cell", students())
def test_distillation(cell: Cell, request: pytest.FixtureRequest) -> None:
    teacher = ONE if cell.engine in ("none", "tp") else LAYOUTS["FSDP2"]
    for errors in results_of(cell, request, distilled, Pair(student=cell, teacher=teacher)):
        assert_below(errors, tolerance(cell))


def distilled(pair: Pair) -> dict[str, float]:
    MODEL.update(MODELS)
    USE.update(USES)
    return errors_of(pair)


def tolerance(cell: Cell) -> float:
    """Mixers of hybrids compute in fp32, and a recurrence amplifies its rounding in the second step."""
    if cell.built.family not in HYBRIDS:
        return max(cell.tolerance, 3e-5 * bool(cell.built.four_bits))
    return 5e-3 if cell.dtype == torch.float32 else 2e-5


def trained(cell: Cell) -> dict[str, float]:
    MODEL.update(MODELS)
    USE.update(USES)
    return train(cell)
