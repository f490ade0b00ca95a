"""Every method of PEFT under every strategy: exact, or refused with a sentence. Writes the table of its page."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
from documents import alone, assert_equal, packed, trained
from harness import Workers
from models import make_model
from peft_methods import LEFT_OUT, METHODS, STRATEGIES, adapted, outcomes

import liger_dist
from liger_dist.fused_layers.packed_calls import packing_objection

peft = pytest.importorskip("peft")

PAGE = Path(__file__).parents[2] / "docs" / "hosts" / "peft.md"
HEAD = f"PEFT {peft.__version__}. Exact under every strategy:"
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


MIXING_TOKENS = {
    "LILY": "its router averages over all tokens of a micro-batch, in separate rows as well",
    "PVERA": "it draws random numbers for each token",
    "POLY": "it needs task_ids, without which its model cannot be tried",
}
"""methods whose documents cannot be compared with each alone"""
USUAL = ("LORA", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT")
PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CARTRIDGE", "CPT")


@pytest.mark.nightly(method=[method for method in METHODS if method not in USUAL])
@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_are_apart_or_refused(method: str) -> None:
    """A method puts prompts before a row and not before its documents, or reads each token alone."""
    if method in MIXING_TOKENS:
        pytest.skip(MIXING_TOKENS[method])
    settings = METHODS[method]
    by_positions: dict[str, Any] = packed([5, 1, 4, 2])
    ends = on_device.tensor([0, 5, 6, 10, 12]).int()
    by_lengths = {name: value for name, value in by_positions.items() if name != "position_ids"}
    by_lengths |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(method)
        further = settings.batch(by_positions)
        is_prompt = method in PROMPTS
        truth = None if is_prompt else alone(model, by_positions, **further)
        assert (packing_objection(model) is None) != is_prompt
        liger_dist.wrap(model, "none")
        assert ("refused:" in liger_dist.explain(model).packing) == is_prompt
        for batch in (by_positions, by_lengths):
            if is_prompt:
                with pytest.raises(liger_dist.LigerDistError, match="PEFT puts its prompts before the first document"):
                    model(**batch, **further)
            else:
                assert truth is not None
                assert_equal(trained(model, batch | further), truth, 2e-4)
                with pytest.raises(liger_dist.LigerDistError, match="the logits of this call were never computed"):
                    model(**batch, **further).logits.sum()


def test_invocations_of_packed_documents_are_refused() -> None:
    """aLoRA trains what follows the last invocation of a row."""
    options = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", alora_invocation_tokens=[3])
    model = liger_dist.wrap(peft.get_peft_model(make_model("llama"), options), "none")
    with pytest.raises(liger_dist.LigerDistError, match="aLoRA begins at the last invocation of a row"):
        model(**packed([5, 4]))


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
    """Writes a sentence with the methods that are exact everywhere, and a row for each of the remaining ones."""
    exact = [method for method in METHODS if all(cells[method, strategy] == "✓" for strategy in STRATEGIES)]
    lines = [
        *textwrap.wrap(f"{HEAD} {', '.join(exact)}.", 120, break_on_hyphens=False),
        "",
        f"| method | {' | '.join(STRATEGIES)} |",
        "|---" * (1 + len(STRATEGIES)) + "|",
    ]
    for method in METHODS:
        if method not in exact:
            lines.append(f"| {method} | {' | '.join(cells[method, strategy] for strategy in STRATEGIES)} |")
    left_out = "; ".join(f"{method} ({reason})" for method, reason in LEFT_OUT.items())
    return "\n".join([*lines, "", f"Not run: {left_out}.", ""])


def _written(table: str) -> dict[tuple[str, str], str]:
    """Reads what :func:`_table` wrote."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    strategies = rows[0][1:]
    found = {(row[0], strategy): cell for row in rows[2:] for strategy, cell in zip(strategies, row[1:], strict=True)}
    sentence = " ".join(table.split("\n\n")[0].split()).removeprefix(HEAD)
    return found | {(method, strategy): "✓" for method in re.findall(r"\w+", sentence) for strategy in strategies}


def test_the_table_is_read_as_it_is_written() -> None:
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    written = _written(table)
    assert {method for method, _ in written} == METHODS.keys()
    assert written["LORA", "fsdp2"] == "✓"
    assert written["OSF", "fsdp2"] == "refused: hook"
    if HEAD in table:
        assert _table(written) == table


def _compare(cells: dict[tuple[str, str], str]) -> None:
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    if HEAD not in table:
        pytest.skip("the table was written with another release of PEFT")
    if torch.cuda.is_available():
        pytest.skip("the table is of a run without a GPU")
    written = _written(table)
    differing = {place: cell for place, cell in cells.items() if written.get(place) != cell}
    assert not differing, "docs/hosts/peft.md is not what this run saw; `make peft` writes it"
