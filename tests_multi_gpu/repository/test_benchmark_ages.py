"""Age of the benchmarks' results: each file names the code it measures, and a warning lists the rows of the README and
of the overview that are older than this code."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_house import ROOT

from benchmarks import age
from benchmarks.harness import RESULTS
from benchmarks.overview import comparisons, problems_of
from benchmarks.readme import CLAIMS, SENTENCES

FILES = sorted(RESULTS.glob("*.json"))


def shown_tables() -> list[tuple[str, str]]:
    """Results file and table of each row of the README and of the overview."""
    shown = [(each.results, each.table) for each in (*comparisons(RESULTS)[0], *CLAIMS)]
    return list(dict.fromkeys([*shown, *((results, table) for _, results, table, *_ in SENTENCES)]))


def missing(names: set[str]) -> list[str]:
    """Lists results files without an entry, entries without a benchmark, and paths that do not exist."""
    unmeasured = {name for name in age.CODE if (ROOT / "benchmarks" / f"{name}.py").exists()}
    found = [f"{name}.json and CODE differ" for name in (names | unmeasured) ^ set(age.CODE)]
    for name in names & set(age.CODE):
        for table in problems_of(RESULTS / f"{name}.json"):
            included, _ = age.paths_of(name, table)
            found += [f"{name}.json measures {path}" for path in included if not (ROOT / path).exists()]
    return found + [path for paths in age.PARTS.values() for path in paths if not (ROOT / path).exists()]


def test_each_results_file_names_code_that_exists() -> None:
    assert missing({file.stem for file in FILES}) == []


def test_results_without_an_entry_and_paths_that_are_gone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(age.PARTS, "norm", ("liger_dist/fused_layers/planted.py",))
    found = missing({*(file.stem for file in FILES), "planted"})
    assert "planted.json and CODE differ" in found
    assert "norm_widths.json measures liger_dist/fused_layers/planted.py" in found


def test_code_of_other_parts_is_not_measured() -> None:
    included, excluded = age.paths_of("norm_widths", "RMSNorm 8192x4096")
    assert "kernels/liger_dist_kernels/norm.py" in included
    assert "liger_dist/losses" not in included
    included, excluded = age.paths_of("small_models", "Llama-3.2-1B, 8192 tokens, FSDP2 on 2 GPUs")
    assert "liger_dist/sharding/fsdp2" in included
    assert {"liger_dist/fused_layers/lora.py", "kernels/liger_dist_kernels/expert_gate.py"} <= set(excluded)


def ages_of_shown() -> list[age.Age]:
    """Ages of the tables in the README and the overview; skips the test in a checkout without history."""
    try:
        return [
            age.age_of(results, table, problems_of(RESULTS / f"{results}.json")[table]["environment"])
            for results, table in shown_tables()
        ]
    except age.HistoryError as error:
        pytest.skip(str(error))


def test_shown_rows_that_are_older_than_their_code_are_listed() -> None:
    """Warns and does not fail: each later commit makes some row older."""
    older = [age.line_of(each) for each in ages_of_shown() if each.commits]
    if older:
        lines = "\n  ".join(older)
        warnings.warn(f"older than the code that they measure (make benchmarks-age):\n  {lines}", stacklevel=1)


@pytest.fixture
def other_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder whose history counts."""
    caches = (age.check_history, age.is_known, age.log)
    monkeypatch.setattr(age, "ROOT", tmp_path)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_a_checkout_without_history_skips_the_ages(other_root: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="no checkout of git"):
        ages_of_shown()
    try:
        subprocess.run(["git", "clone", "-q", "--depth", "1", ROOT.as_uri(), str(other_root)], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("this folder cannot be cloned")
    with pytest.raises(pytest.skip.Exception, match="is shallow"):
        ages_of_shown()


@pytest.fixture
def history(other_root: Path) -> list[str]:
    """Hashes of four commits, a day apart: three that change the norm kernel, and one that changes its test."""
    subprocess.run(["git", "init", "-q", str(other_root)], check=True)
    hashes = []
    names = ("kernels/liger_dist_kernels/norm.py",) * 3 + ("tests_multi_gpu/test_norm.py",)
    for day, name in enumerate(names, start=1):
        file = other_root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(day))
        stamp = f"2026-01-0{day}T12:00:00+00:00"
        author = {"GIT_COMMITTER_DATE": stamp, "GIT_AUTHOR_DATE": stamp, "GIT_CONFIG_GLOBAL": "/dev/null"}
        author |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        for command in (["add", "."], ["commit", "-q", "-m", f"change {day}"]):
            subprocess.run(["git", *command], cwd=other_root, env=os.environ | author, check=True)
        hashes.append(
            subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=other_root, text=True).strip()
        )
    return hashes


@pytest.mark.parametrize(
    ("environment", "titles", "same_day"),
    [
        ({"date": "2026-01-02", "commit": 1}, ["change 3"], 0),
        ({"date": "2026-01-01"}, ["change 3", "change 2"], 1),
        ({"date": "2026-01-02", "commit": "0000000"}, ["change 3"], 1),
        ({"date": "2026-01-03"}, [], 1),
        ({"date": "2026-01-04", "commit": 3}, [], 0),
    ],
    ids=["commit", "date", "unknown_commit", "last_day", "newer_than_the_code"],
)
def test_commits_since_a_measurement(
    history: list[str], environment: dict[str, str | int], titles: list[str], same_day: int
) -> None:
    commit = environment.get("commit")
    given = {**environment, "commit": history[commit] if isinstance(commit, int) else commit}
    seen = age.age_of("norm_widths", "RMSNorm 8192x4096", given)
    assert [one.split(" ", 2)[2] for one in seen.commits] == titles
    assert seen.same_day == same_day
    with pytest.raises(ValueError, match="neither a commit nor a date"):
        age.age_of("norm_widths", "RMSNorm 8192x4096", {})
