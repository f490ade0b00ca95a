"""Every method of PEFT under every strategy: exact, or refused with a sentence. Writes the table of its page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from harness import Workers
from peft_methods import LEFT_OUT, METHODS, STRATEGIES, outcomes

peft = pytest.importorskip("peft")

PAGE = Path(__file__).parents[2] / "docs" / "hosts" / "peft.md"
BEGIN, END = "<!-- methods: written by make peft -->\n", "<!-- end of methods -->\n"
CELLS = {
    "exact": "✓",
    "as unwrapped: ": "also fails unwrapped",
    "refused: AdaLoRA's regularizer": "refused: regularizer",
    " shards each layer by itself": "refused: shared",
    "(Tensor.register_hook)": "refused: hook",
}
"""cells of the table by a part of an outcome; any other outcome is a failure"""
OF_THEIR_KIND = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT", "LORA"),
    *("ADALORA", "IA3", "LN_TUNING", "TRAINABLE_TOKENS", "LILY", "VBLORA", "OSF"),
)
"""methods that no other one resembles; the rest is slow"""


def test_every_method_has_a_row_or_a_reason() -> None:
    assert {method.name for method in peft.PeftType} == METHODS.keys() | LEFT_OUT.keys()


@pytest.mark.nightly
def test_methods_are_exact_or_refused(workers_2: Workers) -> None:
    strategies = [name for name in STRATEGIES if not name.startswith("ZeRO")]
    _compare(_cells(OF_THEIR_KIND, strategies, workers_2))


@pytest.mark.nightly
def test_all_methods_are_exact_or_refused(workers_2: Workers, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("deepspeed")
    cells = _cells(METHODS, STRATEGIES, workers_2)
    if request.config.getoption("--write-pages"):
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + _table(cells) + END + rest.split(END)[1])
    _compare(cells)


def _cells(methods: Iterable[str], strategies: Iterable[str], workers: Workers) -> dict[tuple[str, str], str]:
    cells, failures = {}, []
    for method in methods:
        found = [outcomes(method, ["none"])] if "none" in strategies else []
        found += workers.run(outcomes, method, [strategy for strategy in strategies if strategy != "none"])
        for strategy, words in (place for of_rank in found for place in of_rank.items()):
            cell = next(
                (cell for part, cell in CELLS.items() if words == part or (part != "exact" and part in words)), None
            )
            if cell is None:
                failures.append(f"{method} under {strategy}: {words}")
            else:
                cells[method, strategy] = cell
    assert not failures, "\n".join(failures)
    return cells


def _table(cells: dict[tuple[str, str], str]) -> str:
    lines = [
        f"PEFT {peft.__version__}:\n",
        f"| method | {' | '.join(STRATEGIES)} |",
        "|---" * (1 + len(STRATEGIES)) + "|",
    ]
    for method in METHODS:
        lines.append(f"| {method} | {' | '.join(cells[method, strategy] for strategy in STRATEGIES)} |")
    left_out = "; ".join(f"{method} ({reason})" for method, reason in LEFT_OUT.items())
    return "\n".join([*lines, "", f"Not run: {left_out}.", ""])


def _compare(cells: dict[tuple[str, str], str]) -> None:
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    if f"PEFT {peft.__version__}:" not in table:
        pytest.skip("the table was written with another release of PEFT")
    if torch.cuda.is_available():
        pytest.skip("the table is of a run without a GPU")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    written = {
        (row[0], strategy): cell for row in rows[2:] for strategy, cell in zip(rows[0][1:], row[1:], strict=True)
    }
    differing = {place: cell for place, cell in cells.items() if written.get(place) != cell}
    assert not differing, "docs/hosts/peft.md is not what this run saw; `make peft` writes it"
