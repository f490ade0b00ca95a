"""Compares liger_dist with the best other library in workloads of the results: the first page's table and picture, and
the first sentence of each page.

A ratio is a figure of liger_dist divided by that of another library in the same table, below 1 is better. Nothing is
typed here but names of tables and rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .plots import Chart, Panel, digits

MEMORY = {
    "peak GiB": False,
    "GiB above the weights": True,
    "GiB": True,
    "extra MiB": True,
    "peak MiB": True,
}
"""figures of memory, the first that a row has counts; True: weights and inputs are not in it"""
CARDS = ("B300", "B200", "H200", "H100", "A100")
"""newest first; others count as newer"""
OF_A_CARD = re.compile(r", (?:on an )?[A-Z]+\d{2,3}\b")
"""what tells a table of another card from the first one of the same problem"""
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
    is_pictured: bool = False
    """True if the first picture of the README shows it"""
    figure: str = "ms"
    """figure of time"""


WORKLOADS = (
    Workload("Llama 8B, training program", "large_model", "Llama 8B, on 2", "fsdp2", "Liger"),
    Workload(
        "Llama 8B, wrap() in a loop",
        "training_step",
        "Llama 8B, on 2",
        "liger_dist, gather",
        "Liger|Hugging",
        is_pictured=True,
    ),
    Workload(
        "Llama-3.2-1B, FSDP2",
        "small_models",
        "Llama-3.2-1B, 8192 tokens, FSDP2 on 2 GPUs",
        "liger_dist, layers compiled",
        "Liger|Hugging",
        is_pictured=True,
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
        is_pictured=True,
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
        is_pictured=True,
    ),
    Workload(
        "Qwen3-30B-A3B, 12 layers, sharded by transformers",
        "mixture_step",
        "12 layers of Qwen3-30B-A3B, 16384 tokens a GPU, balanced routers, on 2",
        "ep",
        "ep, transformers",
    ),
    Workload(
        "experts of one layer of Qwen3-30B-A3B on two GPUs",
        "expert_parallel",
        "experts of one layer of Qwen3-30B-A3B, 16384 tokens of each rank, on 2",
        "liger_dist",
        "Liger|transformers",
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
        is_pictured=True,
    ),
    Workload(
        "multi-token prediction, Llama-3.2-1B",
        "mtp",
        "Llama-3.2-1B, tied, 2 x 4096 tokens",
        "depth 1, liger_dist",
        "depth 1, full logits",
    ),
    Workload("GRPO, 12 layers of 8B", "policy_step", "GRPO under fsdp2, 12 layers, 1 GPUs", "liger_dist", "TRL"),
    Workload("update of verl's actor, FSDP1", "verl_actor", "fsdp, 12 layers, 16384 tokens", "liger_dist", "verl|use_"),
    Workload("step of OpenRLHF's actor", "openrlhf_actor", "ZeRO-3, 6 layers, 8192 tokens", "liger_dist", "OpenRLHF"),
    Workload("4 layers of 8B, 65,536 tokens", "sequences", "65536 tokens", "liger_dist, tiles of 8192", "Liger"),
    Workload(
        "Llama-3.2-1B, profiled",
        "host_time",
        "Llama-3.2-1B, tied, FSDP2, on 2",
        "liger_dist, gather, layers compiled",
        "Liger|Hugging",
    ),
    Workload(
        "loss alone, lm_head of 8B",
        "linear_cross_entropy",
        "8192x4096x128256",
        "liger_dist 1024 MiB",
        "Liger|TRL|Apple|QuACK|torch",
    ),
    Workload("loss alone, 128,257 classes", "vocabularies", "128257", "liger_dist", "Liger|TRL|QuACK|torch"),
    Workload(
        "vocab-parallel lm_head alone",
        "vocab_parallel",
        "8192x4096x128256 on 2",
        "vocab_parallel, 1024 MiB",
        "gathered, fp32",
    ),
    Workload(
        "log-probabilities with gradients",
        "log_probs",
        "forward and backward 8192x4096x128256",
        "liger_dist",
        "512|Liger|TRL",
    ),
    Workload("forward KL alone", "distillation", "forward_kl 8192x4096x128256", "liger_dist", "Liger|TRL|torch"),
    Workload(
        "divergence of a draft's lm_head",
        "draft_heads",
        "forward_kl 8192x4096x32000x128256",
        "liger_dist",
        "torch",
    ),
    Workload(
        "RMSNorm of 4096 columns",
        "memory_bound",
        "RMSNorm 8192x4096",
        "liger_dist",
        "Liger|torch",
        figure="forward and backward ms",
    ),
    Workload(
        "RMSNorm of 2880 columns",
        "norm_widths",
        "RMSNorm 11650x2880",
        "liger_dist",
        "Liger|torch",
        figure="forward and backward ms",
    ),
)


@dataclass(frozen=True)
class Comparison:
    """Figures of one workload, and their ratios."""

    label: str
    results: str
    table: str
    cards: str
    """such as ``2 H200``"""
    date: str
    commit: str | None
    way: str
    figures: str
    """time and memory of liger_dist, with units"""
    fastest: str
    beside: str
    """time and memory of the fastest row of another library"""
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


def card_of(environment: dict[str, Any]) -> str:
    """Names the kind of GPU, such as ``H200``."""
    kind = re.search(r"\b[A-Z]+\d+\b", environment["gpu"])
    return kind[0] if kind else str(environment["gpu"])


def cards_of(table: str, environment: dict[str, Any]) -> str:
    """Names number and kind of the GPUs of a table, such as ``2 H200``."""
    found = re.search(r"on (\d+)$|\b(\d+) GPUs$", table)
    return f"{next(filter(None, found.groups())) if found else 1} {card_of(environment)}"


def newest_first(problems: dict[str, dict[str, Any]]) -> list[str]:
    """Sorts names of tables by card and date; the order of the file decides between equal ones."""

    def age(name: str) -> tuple[int, int]:
        environment = problems[name]["environment"]
        card = card_of(environment)
        day = int((environment.get("date") or "0").replace("-", ""))
        return CARDS.index(card) if card in CARDS else -1, -day

    return sorted(problems, key=age)


def same_problem(problems: dict[str, dict[str, Any]], table: str) -> list[str]:
    """Lists the tables of one problem, newest first: of its name, with and without another card."""
    problem = OF_A_CARD.sub("", table)
    return [name for name in newest_first(problems) if OF_A_CARD.sub("", name) == problem]


def figure_of(row: dict[str, Any], name: str) -> float | str | None:
    """Returns a figure of a row, or a sum of several; None if it was not measured."""
    figures = row["figures"]
    value: float | str | None
    if name == "ms":
        value = row["median_ms"]
    elif name == "sum":
        value = row["accuracy"].removesuffix(" sum")
    elif name == "host ms":
        parts = [figures.get(f"{part} host ms") for part in ("forward", "backward", "update")]
        value = None if None in parts else sum(parts)
    elif name == "forward and backward ms":
        value = row["median_ms"] + figures.get("backward ms", math.nan)
    elif name == "host":
        shares = {of[6:-2]: share for of, share in figures.items() if of.startswith("host: ") and share >= 20}
        value = ", ".join(f"{of} {share:.0f} %" for of, share in sorted(shares.items(), key=lambda item: -item[1]))
    else:
        value = figures.get(name)
    return None if isinstance(value, float) and math.isnan(value) else value


def memory_of(row: dict[str, Any]) -> tuple[float, str] | None:
    """Returns the memory of a row, and the name of its figure; None without one."""
    for name in MEMORY:
        value = figure_of(row, name)
        if isinstance(value, (int, float)):
            return value, name
    return None


def compare(workload: Workload, directory: Path) -> Comparison | str:
    """Compares liger_dist's row of a workload with the other libraries' rows, in the newest table that has both; says
    why otherwise."""
    problems = problems_of(directory / f"{workload.results}.json")
    lacking = f"{workload.label}: {workload.results}.json has no table {workload.table!r}"
    for table in same_problem(problems, workload.table):
        measured = [row for row in problems[table]["rows"] if not row["failure"] and time_of(row, workload)]
        own = next((row for row in measured if row["name"] == workload.way), None)
        peers = [row for row in measured if re.match(workload.peers, row["name"])]
        if own is not None and peers:
            return ratios(workload, table, problems[table]["environment"], own, peers)
        without = f"row {workload.way!r}" if own is None else "row of another library"
        lacking = f"{workload.label}: {table!r} of {workload.results}.json has no {without}"
    return lacking


def time_of(row: dict[str, Any], workload: Workload) -> float:
    """Returns the time that is compared; 0 if it was not measured."""
    value = figure_of(row, workload.figure)
    return value if isinstance(value, float) else 0.0


def ratios(workload: Workload, table: str, environment: dict[str, Any], own: dict[str, Any], peers: Rows) -> Comparison:
    """Divides the figures of liger_dist by those of the fastest and of the leanest row."""
    fastest = min(peers, key=lambda row: time_of(row, workload))
    own_memory, memories = memory_of(own), [(found[0], row) for row in peers if (found := memory_of(row))]
    leanest = min(memories, key=lambda item: item[0], default=(math.nan, fastest))[1]
    is_other = leanest is not fastest
    return Comparison(
        workload.label,
        workload.results,
        table,
        cards_of(table, environment),
        environment["date"],
        environment.get("commit"),
        workload.way,
        with_units(own, workload),
        name_of(fastest),
        with_units(fastest, workload),
        time_of(own, workload) / time_of(fastest, workload),
        quotient(own_memory, memory_of(fastest)),
        name_of(leanest) if is_other else None,
        quotient(own_memory, memory_of(leanest)) if is_other else None,
        own_memory is not None and MEMORY[own_memory[1]],
    )


def with_units(row: dict[str, Any], workload: Workload) -> str:
    """Formats time and memory of a row."""
    memory = memory_of(row)
    time = f"{digits(time_of(row, workload))} ms"
    return f"{time}, {digits(memory[0])} {re.search('[GM]iB', memory[1])[0]}" if memory else time  # type: ignore[index]


def name_of(row: dict[str, Any]) -> str:
    """Returns the name of a row without the depth that all compared rows have."""
    return re.sub(r"^depth \d+, ", "", row["name"])


def quotient(own: tuple[float, str] | None, other: tuple[float, str] | None) -> float | None:
    """Divides two memories of one kind."""
    if own is None or other is None or own[1] != other[1] or not other[0]:
        return None
    return own[0] / other[0]


def comparisons(directory: Path) -> tuple[list[Comparison], list[str]]:
    """Compares all workloads whose results file exists; the second list says which ones are left out, and why."""
    present = [each for each in WORKLOADS if (directory / f"{each.results}.json").exists()]
    compared = [compare(workload, directory) for workload in present]
    return [each for each in compared if isinstance(each, Comparison)], [
        one for one in compared if isinstance(one, str)
    ]


HEADER = (
    "workload",
    "GPUs",
    "liger_dist",
    "fastest other",
    "time",
    "memory",
    "memory, to the leanest",
    "measured",
)


def cells(compared: Comparison) -> list[str]:
    """Returns the cells of a workload in the table."""
    sign = "†" if compared.is_above_weights else ""
    memory = "" if compared.memory is None else f"{compared.memory:.2f}{sign}"
    least = "" if compared.least_memory is None else f"{digits(compared.least_memory)}{sign}, {compared.leanest}"
    measured = f"{compared.date}, {compared.commit}" if compared.commit else compared.date
    link = f"[{compared.label}](benchmarks/{compared.results}.md)"
    beside = f"{compared.beside}: {compared.fastest}"
    return [link, compared.cards, compared.figures, beside, f"{compared.time:.2f}", memory, least, measured]


def change(ratio: float, what: str) -> str:
    """Says how much less or more a ratio is."""
    percent = round(abs(1 - ratio) * 100)
    return f"{percent} % {'less' if ratio < 1 else 'more'} {what}" if percent else f"as much {what}"


def sentence(compared: Comparison) -> str:
    """Says what a reader gains in a workload."""
    gains = [change(compared.time, "time")]
    gains += [change(compared.memory, "memory")] if compared.memory is not None else []
    label = compared.label[0].upper() + compared.label[1:]
    return f"{label}, on {compared.cards}: {' and '.join(gains)} than {compared.fastest} ({compared.date})."


def pictured(compared: Sequence[Comparison]) -> Iterator[Comparison]:
    """Yields the workloads of the first picture."""
    shown = {each.label for each in WORKLOADS if each.is_pictured}
    yield from (each for each in compared if each.label in shown)


def overview_chart(compared: Sequence[Comparison]) -> Chart:
    """Returns the bars of the README's picture: ratios of time and memory."""
    shown = list(pictured(compared))
    kinds = sorted({each.cards for each in shown})
    dates = sorted({each.date for each in shown})
    memories = tuple("not measured" if each.memory is None else each.memory for each in shown)
    return Chart(
        "liger_dist divided by the fastest other library: below 1 is better",
        tuple(f"{each.label}\n{each.cards}, vs. {each.fastest}" for each in shown),
        (Panel("time of a step", tuple(each.time for each in shown)), Panel("peak memory", memories)),
        f"{', '.join(kinds)}; {dates[0]} to {dates[-1]}. {len(shown)} of {len(compared)} workloads. "
        "Memory of packed documents and experts is above the weights.",
        line=1.0,
    ).sorted()
