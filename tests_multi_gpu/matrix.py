"""The support matrix of the documentation, from the outcomes of a run and from the adapters' own reasons."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cells import (
    CELLS,
    DATAS,
    EXPERT_PARALLEL,
    EXPERTS,
    EXPERTS_ON_RANKS,
    FROZEN,
    FROZEN_MODELS,
    FURTHER,
    MODELS,
    MTP,
    NAMES,
    PRECISION,
    PRINCIPAL,
    REFUSED_MODELS,
    USES,
    Cell,
)

from liger_dist.sharding import ADAPTERS
from liger_dist.sharding.base import Facts, Storage

HEAD = """# Support matrix

Written by `make matrix` from a run of `tests_multi_gpu/conformance/test_conformance.py` on CPU (gloo) and from the
adapters' own reasons; the suite fails when this file is not what it saw.

✓ two optimiser steps in which every parameter's gradient and value equal those of the unwrapped fp64 model on the
tokens of all ranks. Number: refused before anything is lost, with the sentence below. GPU: needs one, and runs there
alone. –: not a combination of the suite. [Two features together](combinations.md) have a table of their pairs, and
[pairs of a student and a teacher](distillation.md#pairs-of-layouts) one of layouts.
"""


@dataclass
class Outcomes:
    """What became of each cell, by its name."""

    exact: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)

    @property
    def missing(self) -> list[str]:
        seen = self.exact | self.refused.keys() | self.skipped
        return [str(cell) for cell in (*CELLS, *PRECISION) if str(cell) not in seen]


class Matrix:
    """Renders outcomes; refusals are numbered in the order they are met."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._sentences: list[str] = []

    def render(self) -> str:
        layouts = list({(cell.where, cell.world): cell for cell in CELLS if _is_plain(cell)}.values())
        layouts.sort(key=lambda cell: list(NAMES).index(cell.engine))
        principal, of_two = PRINCIPAL, [cell for cell in EXPERTS_ON_RANKS if cell.layout["ep"] == 2]
        sections = [
            HEAD,
            "## Every layout\n",
            self._table(
                layouts,
                {
                    "untied": lambda c: c,
                    "tied": lambda c: replace(c, model="tied"),
                    "accumulation": _accumulating,
                    "bf16 compute": lambda c: replace(c, layout={**c.layout, "bf16": True}),
                },
            ),
            "bf16 compute is held to 1.5 times the error of the same layout with the model's own loss.\n",
            "## Models\n",
            self._table(
                principal, {m: lambda c, m=m: replace(c, model=m) for m in (*MODELS, *FURTHER, *MTP, *REFUSED_MODELS)}
            ),
            "FSDP1 itself takes no frozen and trained parameters into one flat one. A saved head is PEFT's\n"
            '`modules_to_save=["lm_head"]` beside LoRA on the layers.\n',
            "## Experts\n",
            self._table([*principal, *of_two, *EXPERT_PARALLEL], EXPERT_COLUMNS),
            "Experts are computed by [grouped products](experts.md); those with biases are gpt-oss's. Experts on\n"
            "2 ranks: `FSDP2(expert_parallel=2)`; a mixture with eight experts is also exact with them on four.\n"
            "Rows of transformers are models that it loads with a `DistributedConfig`, with experts on two ranks;\n"
            'tokens once per rank: with `ep_implementation="liger_dist"`, under TP by transformers.\n',
            "## Replicated frozen weights\n",
            self._table(FROZEN, FROZEN_COLUMNS),
            "The rows meet every kind of data and use below with a saved head, and with LoRA on the head where that\n"
            "is not refused.\n",
            "## Data\n",
            self._table(principal, {d: lambda c, d=d: replace(c, data=d) for d in DATAS}),
            "Ranks have different numbers of valid tokens in every cell.\n",
            "## Uses\n",
            self._table(principal, {u: lambda c, u=u: replace(c, use=u) for u in USES}),
            "## Refusals\n",
            "".join(f"{number}. {sentence}\n" for number, sentence in enumerate(self._sentences, 1)),
            "## The adapter for each storage, and what it refuses\n",
            _reasons(),
        ]
        return "\n".join(sections)

    def _table(self, rows: Iterable[Cell], columns: dict[str, object]) -> str:
        """Rows that are alike are one, and columns that are exact in every row are named below the table."""
        rows = list(rows)
        names = [f"{row.where} ({row.world})" for row in rows]
        marks = [[self._mark(str(column(row))) for column in columns.values()] for row in rows]  # type: ignore[operator]
        is_exact = [{of_row[place] for of_row in marks} == {"✓"} for place in range(len(columns))]
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, of_row in zip(names, marks, strict=True):
            alike.setdefault(tuple(itertools.compress(of_row, [not one for one in is_exact])), []).append(name)
        heads = [name for name, one in zip(columns, is_exact, strict=True) if not one]
        lines = [["layout (ranks)", *heads], ["---"] * (1 + len(heads))]
        lines += [["<br>".join(found), *of_rows] for of_rows, found in alike.items()]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        exact = "; ".join(itertools.compress(columns, is_exact))
        return table + (f"\nAnd ✓ in every row: {exact}.\n" if exact else "")

    def _mark(self, name: str) -> str:
        if name in self._outcomes.exact:
            return "✓"
        if name in self._outcomes.skipped:
            return "GPU"
        sentence = self._outcomes.refused.get(name)
        if sentence is None:
            return "–"
        if sentence not in self._sentences:
            self._sentences.append(sentence)
        return str(self._sentences.index(sentence) + 1)


EXPERT_USES = ("checkpointing", "two forwards", "replayed routing", "replayed routing, checkpointing")
EXPERT_COLUMNS = {
    **{m: lambda c, m=m: replace(c, model=m) for m in EXPERTS},
    **{d: lambda c, d=d: replace(c, model="experts", data=d) for d in ("empty rank", "packed")},
    **{u: lambda c, u=u: replace(c, model="experts", use=u) for u in EXPERT_USES},
    "accumulation": lambda c: replace(c, model="experts", accumulation=2),
}
FROZEN_COLUMNS = {
    **{m: lambda c, m=m: replace(c, model=m) for m in ("untied", *FROZEN_MODELS)},
    "accumulation": lambda c: replace(c, model="LoRA on the head", accumulation=2),
    "global mean": lambda c: replace(c, model="saved head", data="global mean"),
}


def _is_plain(cell: Cell) -> bool:
    if "frozen" in cell.layout:
        return False
    accumulation = max(cell.accumulation, cell.layout.get("accumulation", 1))
    return (cell.model, cell.data, cell.use, accumulation) == ("untied", "uneven", "training", 1)


def _accumulating(cell: Cell) -> Cell:
    """DeepSpeed's engine counts micro-batches itself."""
    if cell.engine == "zero":
        return replace(cell, layout={**cell.layout, "accumulation": 2})
    return replace(cell, accumulation=2)


BY_NAME = {adapter.name: adapter for adapter in ADAPTERS}


def stored(adapter: str, clause: str = "", *, tied: bool = False, token_mean: str = "local", **facts: Any) -> Facts:
    """The facts of an lm_head that is stored as ``adapter`` expects."""
    storage = Storage(
        adapter=BY_NAME[adapter], clause=clause, weight_shape=(32000, 2048), weight_dtype=torch.float32, **facts
    )
    return Facts(strategy="auto", storage=storage, world_size=4, tied=tied, token_mean=token_mean)


SITUATIONS = {
    "full on every rank (DDP, ZeRO-0 to 2)": stored("replicated"),
    "the same, global mean, averaged by nothing that is known": stored("replicated", token_mean="global"),
    "FSDP1": stored("fsdp1"),
    "FSDP1, tied, in a separate unit": stored("fsdp1", tied=True, apart_from_embedding=True),
    "FSDP2": stored("fsdp2-gathered"),
    "FSDP2, tied, apart from the embedding": stored("fsdp2-gathered", tied=True, apart_from_embedding=True),
    "FSDP2, tied, in two groups, with rows that the ranks do not divide": stored(
        "fsdp2-gathered", tied=True, padded_in_two_groups=True
    ),
    "frozen, full on every rank, under FSDP2": stored("fsdp2-frozen", trains=False),
    "FSDP2 x TP": stored("fsdp2-tensor-parallel", tensor_parallel="S(0)", tensor_parallel_size=2),
    "TP": stored("tensor-parallel", tensor_parallel="S(0)", tensor_parallel_size=4),
    "a DTensor sharded by columns": stored("tensor-parallel", tensor_parallel="S(1)", tensor_parallel_size=4),
    "vocab-parallel under FSDP2": stored("fsdp2-vocab-parallel"),
    "ZeRO-3": stored("zero3"),
    "ZeRO-3, quantised": stored("zero3", zero_quantized=True),
    "ZeRO-3, global mean": stored("zero3", token_mean="global"),
}


def _reasons() -> str:
    lines = ["| weight of lm_head | adapter | refused, because |\n", "| --- | --- | --- |\n"]
    for situation, facts in SITUATIONS.items():
        adapter = facts.storage.adapter
        lines.append(f"| {situation} | {adapter.name} | {'; '.join(adapter.not_supported_reasons(facts)) or '–'} |\n")
    return "".join(lines)
