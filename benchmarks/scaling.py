"""Writes docs/scaling.md: predicted tokens/s of large models on many H100s, and how far predictions of measured steps
are off.

    python -m benchmarks.scaling
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from liger_dist_train.config import TrainConfig
from liger_dist_train.memory_plan import plan
from liger_dist_train.parallel_dims import ParallelDims, parallel_dims_of
from liger_dist_train.time_plan import CARDS, RATES, limit_of, predict, step_shape

from .time_settings import SETTINGS, Setting

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scaling.md"
TABLES = ("predicted", "held out", "fitted")
GPUS = (8, 64, 512)
FITS = 80e9
"""bytes of an H100"""
FASTER_LINKS = replace(RATES, links=0.7, contention=0.859)
"""rates that explain the fitted steps almost as well: the sum of squared errors is 8 % larger"""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("", {}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
}
"""model type and changed defaults of transformers' config; Qwen3's is in launch/models"""


@dataclass(frozen=True)
class Layout:
    """Options of a row."""

    name: str
    options: dict[str, Any]
    least: int = 8
    """GPUs"""


LAYOUTS = (
    Layout("FSDP2", {}),
    Layout("HSDP, 8 shards", {"dp_shard": 8}, least=64),
    Layout("HSDP, 64 shards", {"dp_shard": 64}, least=512),
    Layout("FSDP2 x ep 8", {"ep": 8}),
)


@cache
def model_of(name: str) -> tuple[Any, Any]:
    """Builds a model without storage, and its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = MODELS[name]
    if not model_type:
        settings = json.loads((ROOT / "launch" / "models" / "qwen3_30b_a3b.json").read_text())
        model_type, changes = settings.pop("model_type"), settings
    config = AutoConfig.for_model(model_type, **changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32), config


def row(name: str, layout: Layout, gpus: int) -> str:
    """Predicts one row of the first table."""
    given = dict(layout.options)
    if "dp_shard" in given:
        given["dp_replicate"] = gpus // given["dp_shard"]
    config = TrainConfig(
        strategy="fsdp2",
        dtype="bfloat16",
        batch_size=1,
        sequence_length=8192,
        activation_checkpointing=True,
        **given,
    )
    dims = parallel_dims_of(config, gpus)
    model, model_config = model_of(name)
    gib = memory(config, dims, model, model_config) / 2**30
    cells = [name, str(gpus), layout.name, f"{gib:.0f}"]
    if gib * 2**30 > FITS:
        return "| " + " | ".join([*cells, "–", "memory does not fit"]) + " |"
    shape, card = step_shape(config, dims, model, model_config), CARDS["H100"]
    speeds = sorted(predict(shape, card, rates).tokens_per_second for rates in (RATES, FASTER_LINKS))
    shown = " to ".join(f"{speed:.3g}" if speed < 1000 else f"{round(speed, -2):.0f}" for speed in speeds)
    return "| " + " | ".join([*cells, shown, limit_of(shape, card)]) + " |"


def memory(config: TrainConfig, dims: ParallelDims, model: Any, model_config: Any) -> int:
    return plan(config, dims, model, model_config).plans[0].peak


def predicted() -> list[str]:
    """Makes the rows of large models."""
    head = ["| model | GPUs | layout | GiB planned | tokens/s a GPU | limit |", "|---|---|---|---|---|---|"]
    return head + [
        row(name, layout, gpus) for name in MODELS for gpus in GPUS for layout in LAYOUTS if gpus >= layout.least
    ]


def error_of(setting: Setting) -> float:
    """Computes predicted over measured, minus 1."""
    return setting.predicted().step / setting.seconds - 1


def compared(*, fits: bool) -> list[str]:
    """Makes the rows of measured steps."""
    head = ["| step | GPU | ms measured | predicted | error |", "|---|---|---|---|---|"]
    return head + [
        f"| {setting.name} | {setting.card} | {setting.seconds * 1e3:.0f} | {setting.predicted().step * 1e3:.0f} | "
        f"{error_of(setting) * 100:+.0f} % |"
        for setting in SETTINGS
        if setting.fits == fits
    ]


def tables() -> dict[str, str]:
    """Makes all tables of the page."""
    found = (predicted(), compared(fits=False), compared(fits=True))
    return {name: "\n".join(rows) for name, rows in zip(TABLES, found, strict=True)}


def written(page: str) -> str:
    """Replaces the tables of the page, each after its comment."""
    for name, table in tables().items():
        before, rest = page.split(f"<!-- {name} -->\n\n")
        _, after = rest.split("\n\n", 1)
        page = f"{before}<!-- {name} -->\n\n{table}\n\n{after}"
    return page


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))
    errors = [abs(error_of(setting)) for setting in SETTINGS if not setting.fits]
    print(f"held out: {sum(error < 0.1 for error in errors)} of {len(errors)} within 10 %, median {median(errors):.1%}")


def median(values: list[float]) -> float:
    return sorted(values)[math.floor(len(values) / 2)]


if __name__ == "__main__":
    main()
