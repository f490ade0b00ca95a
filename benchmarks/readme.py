"""The measured figures of README.md: each names the results that it is written from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .overview import cards_of, problems_of

COLUMNS = ("measurement", "liger_dist", "Liger-Kernel", "torch.compile", "measured on")
WITHOUT = "–"
"""cell of a library that was not measured"""


@dataclass(frozen=True)
class Claim:
    """A row of the table, from one table of the results."""

    measurement: str
    results: str
    table: str
    ways: tuple[str | None, str | None, str | None]
    """rows of liger_dist, Liger-Kernel and torch.compile"""
    form: str
    """format of a cell, with ``ms`` and the names of figures"""
    conditions: str
    """what follows the GPUs in the last column"""
    remarks: tuple[str, str, str] = ("", "", "")
    """what follows a figure, such as ``(not compiled)``"""


SMALL = "Llama-3.2-1B, 8192 tokens, FSDP2 on 2 GPUs"
SMALL_WAYS = ("liger_dist, layers compiled", "Liger, all kernels", "Hugging Face, layers compiled")
CLAIMS = (
    Claim(
        "time and peak memory of an 8B training step",
        "training_step",
        "Llama 8B, on 2",
        ("liger_dist, gather", "Liger, all kernels", "Hugging Face, layers compiled"),
        "{ms:.0f} ms, {peak GiB:.1f} GiB",
        "FSDP2, 8192 tokens per GPU",
    ),
    Claim(
        "time of a 1B training step with compiled layers",
        "small_models",
        SMALL,
        SMALL_WAYS,
        "{ms:.0f} ms",
        "FSDP2, 8192 tokens per GPU",
        ("", " (not compiled)", ""),
    ),
    Claim("peak memory of that step", "small_models", SMALL, SMALL_WAYS, "{peak GiB:.1f} GiB", "the same run"),
    Claim(
        "time and peak memory of a LoRA step with PEFT's fp32 adapters, 8 layers of 8B's shape",
        "adapters",
        "LoRA on 8 layers of Llama 8B, 2 x 2048 tokens, one GPU",
        ("liger_dist, fp32 adapters", "PEFT + Liger, fp32 adapters", None),
        "{ms:.0f} ms, {peak GiB:.1f} GiB",
        "4096 tokens, bf16",
    ),
    Claim(
        "time of the fused loss (forward and backward), relative to its three matrix products in cuBLAS",
        "linear_cross_entropy",
        "8192x4096x128256",
        ("liger_dist 1024 MiB", "Liger default", "torch.compile"),
        "{ratio:.2f}",
        "8192 tokens × 4096 features × 128256 classes, bf16",
        ("", " (default options)", ""),
    ),
    Claim(
        "time of the fused loss with 128257 classes, relative to three matrix products with 128320 classes (padded "
        "vocabulary)",
        "vocabularies",
        "128257",
        ("liger_dist", "Liger x8", "torch.compile"),
        "{ratio:.2f}",
        "8192 tokens × 2048 features, bf16",
    ),
)
SENTENCES = (
    (
        r"(?<=With 128257 classes TRL's fused head takes )[\d.]+(?= times)",
        "vocabularies",
        "128257",
        "TRL",
        "{ratio:.1f}",
    ),
)
"""figures in the text: where, and what they are written from"""


def figure(directory: Path, results: str, table: str, way: str, form: str) -> str:
    """Formats figures of one row of the results.

    Raises:
        KeyError: the results have no such table or row, or it lacks a figure.
    """
    problem = problems_of(directory / f"{results}.json").get(table, {"rows": []})
    rows = {row["name"]: row for row in problem["rows"] if not row["failure"]}
    if way not in rows:
        raise KeyError(f"README.md shows {way!r}, which {table!r} of {results}.json lacks")
    return form.format_map({"ms": rows[way]["median_ms"], **rows[way]["figures"]})


def row(claim: Claim, directory: Path) -> str:
    """Returns a line of the table."""
    cells = [claim.measurement]
    for way, remark in zip(claim.ways, claim.remarks, strict=True):
        shown = figure(directory, claim.results, claim.table, way, claim.form) if way else WITHOUT
        cells.append(shown + remark)
    environment: dict[str, Any] = problems_of(directory / f"{claim.results}.json")[claim.table]["environment"]
    measured = f"{cards_of(claim.table, environment)}, {claim.conditions}; {environment['date']}"
    return "| " + " | ".join([*cells, measured]) + " |\n"


def renewed(text: str, directory: Path, claims: Sequence[Claim] = CLAIMS) -> str:
    """Returns README.md with all measured figures from the results.

    Raises:
        ValueError: the text has no such table or sentence.
        KeyError: the results lack a row or a figure.
    """
    head = "| " + " | ".join(COLUMNS) + " |\n"
    if head not in text:
        raise ValueError(f"README.md has no table with the columns {', '.join(COLUMNS)}")
    before, after = text.split(head)
    rest = re.sub(r"\A(\|.*\n)*", "", after)
    text = before + head + "|---" * len(COLUMNS) + "|\n" + "".join(row(claim, directory) for claim in claims) + rest
    for pattern, results, table, way, form in SENTENCES:
        text, found = re.subn(pattern, figure(directory, results, table, way, form), text)
        if found != 1:
            raise ValueError(f"README.md has {found} places that match {pattern}")
    return text
