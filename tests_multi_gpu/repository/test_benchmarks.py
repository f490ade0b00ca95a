"""Results of the benchmarks: the page, the README's table and the overview hold their figures, with dates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_house import ROOT

from benchmarks import peers
from benchmarks.harness import RESULTS
from benchmarks.overview import WORKLOADS, Comparison, cells, compare, comparisons, problems_of
from benchmarks.readme import CLAIMS, renewed
from benchmarks.report import overview_table, page

FILES = sorted(RESULTS.glob("*.json"))
README = (ROOT / "README.md").read_text()
RENEW = "make benchmarks-page"
"""what writes pages and plots anew"""


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


def test_the_benchmarks_page_holds_the_results() -> None:
    assert page(RESULTS) == (ROOT / "docs" / "benchmarks.md").read_text(), f"run {RENEW}"


def test_the_readme_holds_the_results() -> None:
    assert renewed(README, RESULTS) == README, f"run {RENEW}"


def test_figures_of_the_readme_without_results_are_found() -> None:
    line = next(line for line in README.splitlines() if line.startswith("| time of a 1B training step"))
    for changed in (line.replace(" ms", "9 ms", 1), f"{line}\n| a row that was not measured | 1 | 2 | 3 | 1 H200 |"):
        text = README.replace(line, changed)
        assert text != README
        assert renewed(text, RESULTS) == README
    claim = replace(CLAIMS[0], ways=("a row that is not there", None, None))
    with pytest.raises(KeyError, match=r"README\.md shows 'a row that is not there'"):
        renewed(README, RESULTS, (claim,))


def test_the_overview_shows_all_workloads_with_their_dates() -> None:
    compared, left_out = comparisons(RESULTS)
    assert left_out == []
    for workload, each in zip(WORKLOADS, compared, strict=True):
        environment = problems_of(RESULTS / f"{workload.results}.json")[workload.table]["environment"]
        assert environment["date"] in cells(each)[-1]
        assert (environment.get("commit") or "") in cells(each)[-1]


def test_the_overview_plot_holds_the_results() -> None:
    with Image.open(ROOT / "docs" / "plots" / "overview.png") as image:
        noted = image.info["Description"]
    assert noted == overview_table(comparisons(RESULTS)[0]), f"run {RENEW}"


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
        monkeypatch.setenv(peers.TORCH_FILES, str(Path(torch.nn.modules.__file__).parent))
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((32, 16), (53, 16)))
    labels = torch.arange(32).masked_fill(torch.arange(32) % 5 == 0, -100)
    truth = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    expected = torch.autograd.grad(truth, (hidden, weight))
    ways = peers.torch_op()
    assert [accuracy for _, _, accuracy in ways] == ["bf16 sum", "fp32 sum"]
    for _, loss, _ in ways:
        found = loss(hidden, weight, labels)
        torch.testing.assert_close(found, truth)
        torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), expected)
