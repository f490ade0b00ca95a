"""Models with recurrent or convolution layers, or with attention or masks of their own, on packed and padded rows, in
every layout: gradients and values equal those of the unwrapped model on each document alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cells import MODEL, ONE, PRINCIPAL, Cell, Model
from harness import InThisProcess, Workers
from models import HYBRIDS, OWN_ATTENTION, assert_below
from test_conformance import train

ROWS = ("packed", "packed, by lengths", "padded")
USES = ("checkpointing", "MLP tiles", "two forwards")
WITH_KERNELS = ("qwen3_5_text, fp32", "lfm2, fp32")
"""models that kernels compute, their convolutions included"""
UNDER_FSDP2 = (("lfm2, fp32", "packed"), ("falcon_h1", "packed"))
"""families and rows that ``make test`` runs under FSDP2 too"""
HYBRID_MODELS = {family: Model(family=family) for family in HYBRIDS}
HYBRID_MODELS |= {name: Model(family=name.split(",")[0], single=True) for name in WITH_KERNELS}
"""as models of cells; their mixers compute in fp32 in fp64 models, too"""
OF_ATTENTION = {family: Model(family=family) for family in (*OWN_ATTENTION, "gpt_oss", "gemma2")}
KEPT_OF_ATTENTION = (("gpt_oss", "packed"), ("bloom", "packed, by lengths"))
"""of those, families and rows that ``make test`` runs under DDP and FSDP2"""
TOLERANCE, IN_FP32 = 2e-4 if torch.cuda.is_available() else 2e-5, 5e-3
"""relative; on a GPU 7e-5 was seen in the second step of one process. Under DeepSpeed the whole model computes in fp32,
and a recurrence amplifies its rounding: up to 2e-3 in the second step, where the convolution alone agrees within
1e-7"""


def cells() -> list[Any]:
    """Every family and kind of rows in every principal layout. ``make test`` runs Qwen3.5 in fp32 packed in the first
    layout of each adapter, every kind of its rows on one process, and two other families under FSDP2."""
    found = []
    first = {layout.factors["adapter"]: layout for layout in reversed((ONE, *PRINCIPAL))}.values()
    for layout in (ONE, *PRINCIPAL):
        for family in HYBRID_MODELS:
            for rows in ROWS:
                cell = replace(layout, model=family, data=rows)
                is_first = family == WITH_KERNELS[0] and rows == "packed" and layout in first
                is_alone = layout is ONE and family.startswith("qwen3_5_text")
                is_kept = is_first or is_alone or (layout == PRINCIPAL[4] and (family, rows) in UNDER_FSDP2)
                found.append(pytest.param(cell, marks=[pytest.mark.nightly] * (not is_kept), id=str(cell)))
        for family in OF_ATTENTION:
            for rows in ROWS[:2]:  # Masks of padding add up to -inf in fp64, in their own code.
                cell = replace(layout, model=family, data=rows)
                is_kept = layout in (PRINCIPAL[0], PRINCIPAL[4]) and (family, rows) in KEPT_OF_ATTENTION
                found.append(pytest.param(cell, marks=[pytest.mark.nightly] * (not is_kept), id=str(cell)))
        for use in USES:
            cell = replace(layout, model="qwen3_5_text", data="packed", use=use)
            if use != "MLP tiles" or layout.engine in ("none", "ddp", "fsdp2", "zero"):
                is_kept = layout in (ONE, PRINCIPAL[4])
                found.append(pytest.param(cell, marks=[pytest.mark.nightly] * (not is_kept), id=str(cell)))
    return found


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in (HYBRID_MODELS | OF_ATTENTION).items():
        monkeypatch.setitem(MODEL, name, model)


@pytest.mark.smoke
@pytest.mark.parametrize("cell", cells())
def test_documents_are_apart_in_every_layout(cell: Cell, request: pytest.FixtureRequest) -> None:
    reason = cell.obstacle()
    if reason is not None:
        pytest.skip(reason)
    if cell.world == 1:
        with InThisProcess() as here:
            results = here.run(train_hybrid, cell)
    else:
        workers: Workers = request.getfixturevalue(f"workers_{cell.world}")
        results = workers.run(train_hybrid, cell)
    for errors in results:
        is_in_fp32 = cell.engine == "zero" or cell.model in WITH_KERNELS
        assert_below(errors, IN_FP32 if is_in_fp32 else TOLERANCE)


def train_hybrid(cell: Cell) -> dict[str, float]:
    MODEL.update(HYBRID_MODELS | OF_ATTENTION)
    return train(cell)
