"""The table of README.md, what a reader gains: some workloads of the overview, with its figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .overview import Comparison, comparisons

COLUMNS = ("you train", "liger_dist", "fastest other library", "time", "memory", "measured on")
SHOWN: Mapping[str, str] = {
    "Llama 8B, wrap() in a loop": "Llama 8B, all weights, FSDP2",
    "Llama-3.2-1B, FSDP2": "Llama-3.2-1B, all weights, FSDP2",
    "Qwen3-0.6B, FSDP2": "Qwen3-0.6B, all weights, FSDP2",
    "LoRA, 16-bit Llama 8B": "Llama 8B, LoRA",
    "LoRA, 4-bit Llama 8B": "Llama 8B, QLoRA",
    "packed documents, 4 layers of 8B": "packed documents, 4 layers of Llama 8B",
    "packed hybrid, 8 layers of Qwen3.5-4B": "packed documents, 8 layers of Qwen3.5-4B (hybrid)",
    "experts, 4 layers of Qwen3-30B-A3B": "mixture of experts, 4 layers of Qwen3-30B-A3B",
    "multi-token prediction, Llama-3.2-1B": "multi-token prediction, Llama-3.2-1B",
    "GRPO, 12 layers of 8B": "an update of GRPO, 12 layers of Llama 8B",
    "Llama 8B, a text of 131,072 tokens": "Llama 8B, one text of 131,072 tokens",
}
"""labels of workloads, and what README.md calls them"""


def line(what: str, each: Comparison) -> str:
    """Returns a line of the table."""
    memory = "–" if each.memory is None else f"{each.memory:.2f}" + "†" * each.is_above_weights
    link = f"[{what}](docs/benchmarks/{each.results}.md)"
    cells = (link, each.figures, f"{each.beside}: {each.fastest}", f"{each.time:.2f}", memory)
    return "| " + " | ".join((*cells, f"{each.cards}, {each.date}")) + " |\n"


def renewed(text: str, directory: Path, shown: Mapping[str, str] = SHOWN) -> str:
    """Returns README.md with the figures of the results.

    Raises:
        ValueError: the text has no such table.
        KeyError: the results lack a workload.
    """
    head = "| " + " | ".join(COLUMNS) + " |\n"
    if head not in text:
        raise ValueError(f"README.md has no table with the columns {', '.join(COLUMNS)}")
    compared = {each.label: each for each in comparisons(directory)[0]}
    before, after = text.split(head)
    rest = re.sub(r"\A(\|.*\n)*", "", after)
    lines = "".join(line(what, compared[label]) for label, what in shown.items())
    return before + head + "|---" * len(COLUMNS) + "|\n" + lines + rest
