"""Compares liger_dist with the best other library in workloads of the results: the table and plot of the overview.

A ratio is a figure of liger_dist divided by that of another library in the same table, below 1 is better. Nothing is
typed here but names of tables and rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MEMORY = {"peak GiB": False, "GiB above the weights": True, "GiB": True}
"""figures of memory, the first that a row has counts; True: weights and inputs are not in it"""
BETTER, WORSE = "#0072B2", "#D55E00"
"""colours of Okabe and Ito, told apart by colour-blind readers"""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    """One table of the results, and the rows in it that compute the same."""

    label: str
    results: str
    table: str
    way: str
    """row of liger_dist: default options, with compiled layers where the peers have them"""
    peers: str
    """regular expression, matched at the beginning of the names of rows of other libraries"""


WORKLOADS = (
    Workload("Llama 8B, training program", "large_model", "Llama 8B, on 2", "fsdp2", "Liger"),
    Workload("Llama 8B, wrap() in a loop", "training_step", "Llama 8B, on 2", "liger_dist, gather", "Liger|Hugging"),
    Workload(
        "Llama-3.2-1B, FSDP2",
        "small_models",
        "Llama-3.2-1B, 8192 tokens, FSDP2 on 2 GPUs",
        "liger_dist, layers compiled",
        "Liger|Hugging",
    ),
    Workload(
        "Qwen3-0.6B, FSDP2",
        "small_models",
        "Qwen3-0.6B, 8192 tokens, FSDP2 on 2 GPUs",
        "liger_dist, layers compiled",
        "Liger|Hugging",
    ),
    Workload(
        "8 layers of 2048, ZeRO-3",
        "training_step",
        "8 layers of 2048, untied, ZeRO-3, on 2",
        "liger_dist",
        "Liger|Hugging",
    ),
    Workload(
        "LoRA, 16-bit Llama 8B",
        "adapters",
        "LoRA on 32 layers of Llama 8B, 2 x 2048 tokens, one GPU",
        "liger_dist",
        "PEFT(?!.*(4 bits|fp32))",
    ),
    Workload(
        "LoRA, 4-bit Llama 8B",
        "adapters",
        "LoRA on 32 layers of Llama 8B, 2 x 2048 tokens, one GPU, 4 bits",
        "liger_dist, 4 bits",
        "PEFT(?!.*fp32).*4 bits",
    ),
    Workload(
        "packed documents, 4 layers of 8B",
        "packed_documents",
        "4 layers of Llama-3.1-8B, 8192 tokens in 12 documents",
        "liger_dist, packed",
        "Hugging",
    ),
    Workload(
        "packed hybrid, 8 layers of Qwen3.5-4B",
        "hybrids",
        "8 layers of Qwen3.5-4B, 8192 tokens in 12 documents, with fla",
        "liger_dist, packed",
        "Hugging(?!.*(documents mix|one text))",
    ),
    Workload(
        "experts, 4 layers of Qwen3-30B-A3B",
        "experts",
        "Qwen3-30B-A3B, 4 layers, sdpa, 8192 tokens",
        "liger_dist, layers compiled",
        "Liger|Hugging|transformers",
    ),
    Workload(
        "Llama 8B, a text of 65,536 tokens",
        "long_context",
        "65536 tokens, on 2",
        "liger_dist",
        "Accelerate|DeepSpeed",
    ),
    Workload(
        "Llama 8B, a text of 131,072 tokens",
        "long_context",
        "131072 tokens, on 2",
        "liger_dist",
        "Accelerate|DeepSpeed",
    ),
    Workload(
        "multi-token prediction, Llama-3.2-1B",
        "mtp",
        "Llama-3.2-1B, tied, 2 x 4096 tokens",
        "depth 1, liger_dist",
        "depth 1, full logits",
    ),
    Workload("GRPO, 12 layers of 8B", "policy_step", "GRPO under fsdp2, 12 layers, 1 GPUs", "liger_dist", "TRL"),
)


@dataclass(frozen=True)
class Comparison:
    """Ratios of one workload."""

    label: str
    cards: str
    """such as ``2 H200``"""
    date: str
    commit: str | None
    way: str
    fastest: str
    time: float
    memory: float | None
    """to the fastest row of another library; None if either has no figure"""
    leanest: str | None
    """row of another library with less memory than the fastest one; None if there is none"""
    least_memory: float | None
    """to the leanest row"""
    is_above_weights: bool
    """True if the memory is measured above the weights"""


@cache
def problems_of(path: Path) -> dict[str, dict[str, Any]]:
    """Reads one results file; an empty dict if there is none."""
    problems: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return problems


def cards_of(table: str, environment: dict[str, Any]) -> str:
    """Names number and kind of the GPUs of a table, such as ``2 H200``."""
    found = re.search(r"on (\d+)$|\b(\d+) GPUs$", table)
    kind = re.search(r"\b[A-Z]+\d+\b", environment["gpu"])
    return f"{next(filter(None, found.groups())) if found else 1} {kind[0] if kind else environment['gpu']}"


def memory_of(row: dict[str, Any]) -> tuple[float, bool] | None:
    """Returns the memory of a row, and whether it is measured above the weights; None without a figure."""
    for name, is_above_weights in MEMORY.items():
        value = row["figures"].get(name)
        if value is not None and not math.isnan(value):
            return value, is_above_weights
    return None


def compare(workload: Workload, directory: Path) -> Comparison | str:
    """Compares liger_dist's row of a workload with the other libraries' rows; returns why that is not possible
    otherwise."""
    problem = problems_of(directory / f"{workload.results}.json").get(workload.table)
    if problem is None:
        return f"{workload.label}: {workload.results}.json has no table {workload.table!r}"
    measured = [row for row in problem["rows"] if not row["failure"] and not math.isnan(row["median_ms"])]
    own = next((row for row in measured if row["name"] == workload.way), None)
    peers = [row for row in measured if re.match(workload.peers, row["name"])]
    if own is None or not peers:
        lacking = f"row {workload.way!r}" if own is None else "row of another library"
        return f"{workload.label}: {workload.table!r} of {workload.results}.json has no {lacking}"
    fastest = min(peers, key=lambda row: float(row["median_ms"]))
    own_memory, memories = memory_of(own), [(found[0], row) for row in peers if (found := memory_of(row))]
    leanest = min(memories, key=lambda item: item[0], default=(math.nan, fastest))[1]
    is_other = leanest is not fastest
    environment = problem["environment"]
    return Comparison(
        workload.label,
        cards_of(workload.table, environment),
        environment["date"],
        environment.get("commit"),
        workload.way,
        name_of(fastest),
        own["median_ms"] / fastest["median_ms"],
        quotient(own_memory, memory_of(fastest)),
        name_of(leanest) if is_other else None,
        quotient(own_memory, memory_of(leanest)) if is_other else None,
        own_memory is not None and own_memory[1],
    )


def name_of(row: dict[str, Any]) -> str:
    """Returns the name of a row without the depth that all compared rows have."""
    return re.sub(r"^depth \d+, ", "", row["name"])


def quotient(own: tuple[float, bool] | None, other: tuple[float, bool] | None) -> float | None:
    """Divides two memories of one kind."""
    if own is None or other is None or own[1] != other[1]:
        return None
    return own[0] / other[0]


def comparisons(directory: Path) -> tuple[list[Comparison], list[str]]:
    """Compares all workloads; the second list says which ones are left out, and why."""
    compared = [compare(workload, directory) for workload in WORKLOADS]
    return [each for each in compared if isinstance(each, Comparison)], [
        one for one in compared if isinstance(one, str)
    ]


def cells(compared: Comparison) -> list[str]:
    """The cells of a workload in the table."""
    memory, least = ("" if ratio is None else f"{ratio:.2f}" for ratio in (compared.memory, compared.least_memory))
    sign = "†" if compared.is_above_weights else ""
    measured = f"{compared.date}, {compared.commit}" if compared.commit else compared.date
    figures = [compared.fastest, f"{compared.time:.2f}", memory + sign]
    rest = [compared.leanest or "", least + sign if least else "", measured]
    return [compared.label, compared.cards, compared.way, *figures, *rest]


HEADER = (
    "workload",
    "GPUs",
    "liger_dist",
    "fastest other",
    "time",
    "memory",
    "leanest other",
    "memory, to the leanest",
    "measured",
)


def caption(compared: Sequence[Comparison]) -> str:
    """Names the cards and dates of all workloads."""
    kinds = sorted({each.cards.split()[-1] for each in compared})
    dates = sorted({each.date for each in compared})
    measured = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{' and '.join(kinds)}, {measured}"


def plot(compared: Sequence[Comparison], path: Path, description: str) -> None:
    """Draws time and memory ratios as bars, and notes ``description`` in the file."""
    import matplotlib.pyplot as plt

    height = 0.5 * len(compared) + 1.4
    figure, (times, memories) = plt.subplots(1, 2, figsize=(8.6, height), sharey=True, width_ratios=(1, 1.4))
    for place, each in enumerate(compared):
        times.text(-0.03, place - 0.14, each.label, ha="right", va="center", fontsize=10)
        beside = f"{each.cards}, {each.date}, vs. {each.fastest}"
        times.text(-0.03, place + 0.22, beside, ha="right", va="center", fontsize=8, color="#444444")
        bar(times, place, each.time, 0.56, f"{each.time:.2f}")
        sign, has_two = "†" if each.is_above_weights else "", each.least_memory is not None
        if each.memory is not None:
            bar(memories, place - 0.17 * has_two, each.memory, 0.3 if has_two else 0.56, f"{each.memory:.2f}{sign}")
        else:
            memories.text(0.02, place, "not measured", va="center", fontsize=8, color="#555555")
        if each.least_memory is not None:
            text = f"{each.least_memory:.2f}{sign}  {each.leanest}"
            bar(memories, place + 0.17, each.least_memory, 0.3, text, is_filled=False)
    ratios = [ratio for each in compared for ratio in (each.memory, each.least_memory) if ratio is not None]
    style(times, "time of a step", max([1.0, *(each.time for each in compared)]) + 0.2)
    style(memories, "peak memory", max([1.0, *ratios]) + 0.6)
    times.set_ylim(len(compared) - 0.4, -0.6)
    figure.suptitle("liger_dist divided by the fastest other library: below 1 is better", fontsize=12)
    legend(figure)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    note = {"Description": description}
    figure.savefig(path, dpi=120, metadata=note, facecolor="white", bbox_inches="tight", pad_inches=0.12)
    plt.close(figure)


def bar(axis: Any, place: float, value: float, height: float, text: str, *, is_filled: bool = True) -> None:
    """Draws one bar with its text."""
    colour = WORSE if round(value, 2) > 1 else BETTER
    axis.barh(place, value, height, facecolor=colour if is_filled else "white", edgecolor=colour, linewidth=1.2)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axis.text(value + 0.025, place, text, va="center", fontsize=9, bbox=background)


def style(axis: Any, title: str, end: float) -> None:
    """Draws the line at 1, and removes what says nothing."""
    axis.axvline(1, color="#333333", linewidth=1, zorder=0.5)
    axis.set_title(title, fontsize=10.5)
    axis.set_xlim(0, end)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"], fontsize=8)
    axis.set_yticks([])
    axis.spines[["top", "right"]].set_visible(False)


def legend(figure: Any) -> None:
    """Explains colours, outlines and the sign."""
    from matplotlib.patches import Patch

    handles = [
        Patch(color=BETTER, label="not worse"),
        Patch(color=WORSE, label="worse"),
        Patch(facecolor="white", edgecolor="#333333", label="vs. the library with least memory"),
        Patch(facecolor="none", edgecolor="none", label="† memory above the weights"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, fontsize=8.5, columnspacing=1.2, frameon=False)
