"""Tiers of tests and the tests of a change: what make smoke, make test and make affected run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import affected
import pytest
from cells import CELLS, PAIRED, PRECISION, Cell, tier
from tiers import NIGHTLY, SMOKE, cover, mark_tiers, pairs

EXACT, REFUSED = ([cell for cell in CELLS if bool(cell.refused) == is_refused] for is_refused in (False, True))


def pairs_of_factors(cell: Cell) -> list[Any]:
    return pairs({name: cell.factors[name] for name in PAIRED})


def layout(cell: Cell) -> list[Any]:
    return [cell.factors["layout"]]


@pytest.mark.smoke
@pytest.mark.parametrize("cells", [EXACT, REFUSED, PRECISION], ids=["exact", "refused", "bf16"])
@pytest.mark.parametrize(
    ("tiers", "parts"),
    [
        (["smoke"], pairs_of_factors),
        (["smoke", "test"], layout),
    ],
    ids=["pairs in smoke", "layouts in test"],
)
def test_tier_has_all_parts_of_the_suite(
    cells: list[Cell], tiers: list[str], parts: Callable[[Cell], Iterable[Any]]
) -> None:
    everything = {part for cell in cells for part in parts(cell)}
    chosen = [cell for cell in cells if tier(cell) in tiers]
    assert {part for cell in chosen for part in parts(cell)} == everything
    # Some cell is needed: without one that has a part alone, a part is missing.
    numbers = Counter(part for cell in chosen for part in parts(cell))
    alone = next(cell for cell in chosen if any(numbers[part] == 1 for part in parts(cell)))
    assert {part for cell in chosen if cell is not alone for part in parts(cell)} != everything


def test_every_refusal_is_in_make_test() -> None:
    assert all(tier(cell) != "nightly" for cell in REFUSED)


def test_a_cover_has_every_part_and_keeps_the_order() -> None:
    cases = [(a, b, c) for a in "xyz" for b in "12" for c in "pq"]
    values = cover(cases, [[*enumerate(case)] for case in cases])
    assert len(values) == 3
    assert {part for case in values for part in enumerate(case)} == {p for case in cases for p in enumerate(case)}
    assert values == sorted(values)
    of_pairs = [pairs(dict(zip("abc", case, strict=True))) for case in cases]
    assert len(cover(cases, of_pairs)) in (6, 7)


MARKED = """
import pytest
@pytest.mark.smoke
@pytest.mark.parametrize("a", ["x", pytest.param("y", marks=pytest.mark.nightly), "z"])
def test_first(a): pass
@pytest.mark.nightly(a=["x"], b=[2])
@pytest.mark.parametrize("a", ["x", "y"])
@pytest.mark.parametrize("b", [1, 2])
def test_values(a, b): pass
@pytest.mark.cover("values")
@pytest.mark.parametrize("a", ["x", "y", "z"])
@pytest.mark.parametrize("b", [1, 2])
def test_cover(a, b): pass
@pytest.mark.parametrize("a", ["x", pytest.param("y", marks=pytest.mark.smoke)])
def test_parameter(a): pass
@pytest.mark.nightly
def test_night(): pass
"""


class Collected:
    """Collects tests, and notes the tiers that their marks give them."""

    def __init__(self) -> None:
        self.marks: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_tiers(items)
        for item in items:
            self.marks[item.name] = {mark.name for mark in item.iter_markers()} & {SMOKE, NIGHTLY}


def collect(folder: Path, text: str) -> Collected:
    (folder / f"test_in_{folder.name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    collected = Collected()
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(folder)], plugins=[collected])
    return collected


def test_marks_decide_the_tier_of_each_case(tmp_path: Path) -> None:
    assert collect(tmp_path, MARKED).marks == {
        "test_first[x]": {SMOKE},
        "test_first[y]": {NIGHTLY},
        "test_first[z]": set(),
        "test_values[1-x]": set(),
        "test_values[1-y]": set(),
        "test_values[2-x]": {NIGHTLY},
        "test_values[2-y]": set(),
        "test_cover[1-x]": set(),
        "test_cover[1-y]": {NIGHTLY},
        "test_cover[1-z]": set(),
        "test_cover[2-x]": {NIGHTLY},
        "test_cover[2-y]": set(),
        "test_cover[2-z]": {NIGHTLY},
        "test_parameter[x]": set(),
        "test_parameter[y]": {SMOKE},
        "test_night": {NIGHTLY},
    }


def test_a_value_that_no_case_has_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    collect(tmp_path, MARKED.replace('a=["x"], b=[2]', 'a=["w"]'))
    assert "leaves 0 of 4 cases to make test-all" in "".join(capfd.readouterr())


FILE = "tests_multi_gpu/tiers.py"
KNOWN: dict[str, Any] = {
    "functions": {FILE: {"cover": [0, 1], "pairs": [2], "a_function_that_is_gone": [3]}},
    "reads": {"README.md": [1]},
    "tests": [["one", 100.0], ["two", 60.0], ["three", 1.0], ["four", 1.0]],
}


def lines_of(name: str) -> set[int]:
    first, _ = affected.functions_of((affected.ROOT / FILE).read_text())[name]
    return {first}


@pytest.mark.smoke
def test_affected_tests_are_those_of_the_changed_functions_within_two_minutes() -> None:
    assert affected.tests_of({FILE: lines_of("pairs")}, KNOWN) == ["three"]
    assert affected.tests_of({FILE: lines_of("cover") | lines_of("pairs")}, KNOWN) == ["one", "three"]
    assert affected.tests_of({"README.md": None}, KNOWN) == ["two"]
    # A function that the map does not know gets tests of the whole file.
    assert affected.tests_of({FILE: lines_of("mark_tiers")}, KNOWN) == ["one", "three", "four"]
    assert affected.tests_of({"a/file/without/tests.py": None}, KNOWN) == []


def test_affected_tests_contain_the_changed_tests() -> None:
    here = str(Path(__file__).relative_to(affected.ROOT))
    name = "test_every_refusal_is_in_make_test"
    first, _ = affected.functions_of(Path(__file__).read_text())[name]
    assert affected.tests_of({here: {first}}, KNOWN) == [f"{here}::{name}"]
    assert affected.tests_of({here: {1}}, KNOWN) == [here]


@pytest.mark.nightly
def test_make_affected_runs_the_listed_cases_and_passes_over_names_that_are_gone(tmp_path: Path) -> None:
    """With the words of the Makefile, of which only the folder is narrowed."""
    (line,) = re.findall(r"-m pytest \$\(PARALLEL\) (--tests-from .*)", (affected.ROOT / "Makefile").read_text())
    option, _, folder = line.split()
    listed = tmp_path / "affected.txt"
    here = f"{folder}/repository/{Path(__file__).name}"
    listed.write_text(f"{here}::test_every_refusal_is_in_make_test\n{here}::test_that_is_gone\n")
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", option, str(listed), here]
    done = subprocess.run([sys.executable, *words], cwd=affected.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row for row in done.stdout.splitlines() if "::" in row] == [f"{here}::test_every_refusal_is_in_make_test"]
