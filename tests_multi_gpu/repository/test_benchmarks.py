"""Results of the benchmarks: pages, pictures, the README's table and the overview hold their figures, with dates."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_house import ROOT

from benchmarks import newer_torch, peers
from benchmarks.harness import RESULTS
from benchmarks.overview import WORKLOADS, Comparison, cells, compare, comparisons, problems_of
from benchmarks.pages import PAGES
from benchmarks.plots import LARGEST, digits
from benchmarks.readme import renewed
from benchmarks.report import charts, pages

DOCS = ROOT / "docs"
FILES = sorted(RESULTS.glob("*.json"))
README = (ROOT / "README.md").read_text()
RENEW = "make benchmarks-page"
"""what writes pages and plots anew"""
MOST_WORDS = 25_000
"""of all pages of docs that a program writes as a whole"""
EARLIER = r"\b(before|as it was|earlier|old)\b"


def undated(file: Path) -> list[str]:
    """Tables of a results file with neither a date nor a commit."""
    tables = {name: problem["environment"] for name, problem in problems_of(file).items()}
    return [name for name, of in tables.items() if not of.get("date") and not of.get("commit")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_table_has_a_date_or_a_commit(file: Path) -> None:
    assert undated(file) == []


def test_a_table_without_date_and_commit_is_found(tmp_path: Path) -> None:
    problems = json.loads((RESULTS / "mtp.json").read_text())
    for problem in problems.values():
        problem["environment"] |= {"date": None, "commit": None}
    (tmp_path / "mtp.json").write_text(json.dumps(problems))
    assert undated(tmp_path / "mtp.json") == list(problems)


def written() -> dict[str, str]:
    """Pages of the benchmarks as they are, by their path in docs."""
    files = [DOCS / "benchmarks.md", *sorted((DOCS / "benchmarks").glob("*.md"))]
    return {file.relative_to(DOCS).as_posix(): file.read_text() for file in files}


def test_the_benchmarks_pages_hold_the_results() -> None:
    assert written() == pages(RESULTS), f"run {RENEW}, and remove pages without results"


def test_each_results_file_has_a_page_that_begins_with_its_picture() -> None:
    found = pages(RESULTS)
    for file in FILES:
        assert found[f"benchmarks/{file.stem}.md"].split("\n")[2].endswith(f"](../plots/{file.stem}.png)"), file.stem
        assert f"](benchmarks/{file.stem}.md)" in found["benchmarks.md"], file.stem


def test_generated_pages_have_few_words() -> None:
    names = ["families.md", "packed_families.md", "support_matrix.md", *written()]
    words = {name: len((DOCS / name).read_text().split()) for name in names}
    assert sum(words.values()) <= MOST_WORDS, words


def test_pictures_hold_the_results() -> None:
    for name, chart in charts(RESULTS).items():
        with Image.open(DOCS / "plots" / f"{name}.png") as image:
            assert image.info["Description"] == chart.note(), f"{name}: run {RENEW}"


def test_pictures_have_few_bars_and_none_of_an_earlier_version() -> None:
    for name, chart in charts(RESULTS).items():
        assert 2 <= len(chart.bars()) <= LARGEST, name
        assert not [label for label in chart.labels if re.search(EARLIER, label)], name
        assert any(label.startswith("liger_dist") for label in chart.labels) or name == "overview", name


def test_each_picture_shows_the_rows_that_its_page_names() -> None:
    found = charts(RESULTS)
    for page in PAGES:
        if page.picture is not None and (RESULTS / f"{page.results}.json").exists():
            shown = {page.picture.labels.get(row, row) for row in page.picture.rows}
            assert shown <= set(found[page.results].labels), page.results
            assert len(found[page.results].panels) == len(page.picture.tables) * len(page.picture.figures)


def test_a_number_has_three_digits() -> None:
    found = [digits(value) for value in (0.0, 0.0914, 0.999, 9.996, 56.48, 152.5, 38589, 100268, 1.0)]
    assert found == ["0", "0.091", "0.999", "10.0", "56.5", "152", "38,600", "100,000", "1.00"]


def test_new_results_and_newer_ones_of_a_problem_need_no_change_of_the_generator(tmp_path: Path) -> None:
    problems = json.loads((RESULTS / "mtp.json").read_text())
    (table,) = problems
    problems[table]["environment"] |= {"gpu": "NVIDIA H100", "date": "2026-11-27"}
    (tmp_path / "planted.json").write_text(json.dumps(problems))
    newer = json.loads(json.dumps(problems[table]))
    newer["environment"] |= {"gpu": "NVIDIA H200", "date": "2027-01-01"}
    newer["rows"][3]["median_ms"] = 1.0
    (tmp_path / "mtp.json").write_text(json.dumps(problems | {f"{table}, on an H200": newer}))
    found = pages(tmp_path)
    assert "# Planted" in found["benchmarks/planted.md"]
    assert "](benchmarks/planted.md)" in found["benchmarks.md"]
    assert "H100" not in found["benchmarks/mtp.md"]
    assert "1 H100" in found["benchmarks/archive.md"]
    assert "99 % less time" in found["benchmarks/mtp.md"].split("\n")[4]
    assert set(charts(tmp_path)) >= {"mtp", "planted"}


def test_the_readme_holds_the_results() -> None:
    assert renewed(README, RESULTS) == README, f"run {RENEW}"


def test_figures_of_the_readme_without_results_are_found() -> None:
    line = next(line for line in README.splitlines() if line.startswith("| [Llama-3.2-1B, all weights"))
    for changed in (
        line.replace(" ms", "9 ms", 1),
        f"{line}\n| a row that was not measured | 1 | 2 | 3 | 1 | 1 H200 |",
    ):
        text = README.replace(line, changed)
        assert text != README
        assert renewed(text, RESULTS) == README
    with pytest.raises(KeyError, match="a workload that is not there"):
        renewed(README, RESULTS, {"a workload that is not there": "a model"})


def test_the_first_page_fits_two_screens() -> None:
    assert len(README.splitlines()) <= 90


def test_the_overview_shows_all_workloads_with_their_dates() -> None:
    compared, left_out = comparisons(RESULTS)
    assert left_out == []
    present = [workload for workload in WORKLOADS if (RESULTS / f"{workload.results}.json").exists()]
    for workload, each in zip(present, compared, strict=True):
        environment = problems_of(RESULTS / f"{workload.results}.json")[each.table]["environment"]
        assert environment["date"] in cells(each)[-1]
        assert (environment.get("commit") or "") in cells(each)[-1]


def test_a_workload_without_peer_is_left_out_and_without_memory_shows_its_time(tmp_path: Path) -> None:
    workload = next(each for each in WORKLOADS if each.results == "policy_step")
    for name, lacks_peer in (("peer", True), ("memory", False)):
        problems = json.loads((RESULTS / "policy_step.json").read_text())
        rows = problems[workload.table]["rows"]
        for row in rows:
            row["failure"] = "OutOfMemoryError" if lacks_peer and row["name"] == "TRL" else ""
            row["figures"].pop("peak GiB")
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy_step.json").write_text(json.dumps(problems))
        compared = compare(workload, tmp_path / name)
        if lacks_peer:
            assert isinstance(compared, str)
            assert "has no row of another library" in compared
        else:
            assert isinstance(compared, Comparison)
            times = {row["name"]: row["median_ms"] for row in rows}
            assert compared.time == times["liger_dist"] / times["TRL"]
            assert compared.memory is None


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch 2.13 and later have it")
@pytest.mark.parametrize("from_files", [False, True])
def test_torchs_op_is_a_peer(from_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from the files of a newer torch than the one that runs."""
    if from_files:
        monkeypatch.setenv(newer_torch.FILES, str(Path(torch.__file__).parent))
        for name in (newer_torch.OP, newer_torch.OPTIONS):
            installed = newer_torch.module_of(name, None)
            monkeypatch.setitem(sys.modules, installed.__name__, installed)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((32, 16), (53, 16)))
    labels = torch.arange(32).masked_fill(torch.arange(32) % 5 == 0, -100)
    truth = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    expected = torch.autograd.grad(truth, (hidden, weight))
    ways = peers.torch_op()
    assert [accuracy for _, _, accuracy in ways] == ["bf16 sum", "bf16 sum"]
    for _, loss, _ in ways:
        found = loss(hidden, weight, labels)
        torch.testing.assert_close(found, truth)
        torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), expected)
