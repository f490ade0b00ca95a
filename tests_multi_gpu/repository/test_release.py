"""Checks of ``make release-check``: each passes on a copy of the project, and fails on a planted mistake."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Iterable
from email.message import Message
from pathlib import Path

import pytest
import yaml
from programs import release_check
from test_house import ROOT

VERSION = "9.8.7"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the checks read of the project, as a git repository in which version 9.8.7 is ready to be released."""
    for name in ("setup.cfg", "CITATION.cff", "CHANGELOG.md", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "liger_dist").mkdir()
    (tmp_path / "liger_dist" / "_version.py").write_text(f'__version__ = "{VERSION}"\n')
    replace(tmp_path / "CITATION.cff", r"^version: .*$", f"version: {VERSION}")
    replace(tmp_path / "CHANGELOG.md", r"^## [^\n]*", f"## {VERSION} ({datetime.date.today()})")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def replace(file: Path, pattern: str, by: str) -> None:
    text, count = re.subn(pattern, by, file.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, pattern
    file.write_text(text)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "[a] b")


def only(failures: Iterable[str]) -> str:
    (sentence,) = failures
    assert "expected" in sentence
    return sentence


def test_release_check_passes_on_a_version_that_is_ready(project: Path) -> None:
    for check in (release_check.check_version, release_check.check_changelog, release_check.check_git):
        assert list(check(project, VERSION)) == []


def test_release_check_compares_the_versions(project: Path) -> None:
    replace(project / "liger_dist" / "_version.py", re.escape(VERSION), "9.8.6")
    sentence = only(release_check.check_version(project, VERSION))
    assert sentence.startswith("liger_dist/_version.py has 9.8.6; expected 9.8.7")
    replace(project / "CITATION.cff", "^version: .*$", "")
    assert len(list(release_check.check_version(project, VERSION))) == 2


@pytest.mark.parametrize("in_parentheses", ["(unreleased)", "", "(2026-02-30)", "(2026-11-22, unreleased)"])
def test_release_check_wants_a_day_in_the_changelog(project: Path, in_parentheses: str) -> None:
    replace(project / "CHANGELOG.md", "^## .*$", f"## {VERSION} {in_parentheses}")
    assert "expected the day of the release" in only(release_check.check_changelog(project, VERSION))


def test_release_check_wants_a_section_of_the_changelog(project: Path) -> None:
    assert "expected one '## 9.9.9 (" in only(release_check.check_changelog(project, "9.9.9"))


def test_release_notes_are_the_section_of_the_changelog(project: Path) -> None:
    (project / "CHANGELOG.md").write_text(
        f"# Changes\n\n## {VERSION} (2026-12-01)\n\n- a gain\n\n## 0.1.0 (2026-11-22)\n"
    )
    assert release_check.notes(project, VERSION) == "- a gain"
    with pytest.raises(SystemExit, match=r"no section of 9\.9\.9"):
        release_check.notes(project, "9.9.9")


def test_release_check_wants_a_clean_tree(project: Path) -> None:
    replace(project / "README.md", "^# .*$", "# changed")
    assert "README.md is not committed (1 in all)" in only(release_check.check_git(project, VERSION))


def test_release_check_refuses_the_tag_of_another_commit(project: Path) -> None:
    git(project, "tag", f"v{VERSION}")
    assert list(release_check.check_git(project, VERSION)) == []
    commit(project)
    assert f"the tag v{VERSION} is on " in only(release_check.check_git(project, VERSION))


def test_release_check_wants_one_wheel_and_one_sdist(project: Path) -> None:
    assert "dist/ holds nothing" in only(release_check.check_dist(project, VERSION))
    (project / "dist").mkdir()
    for name in (f"liger_dist-{VERSION}-py3-none-any.whl", f"liger_dist-{VERSION}.tar.gz"):
        (project / "dist" / name).touch()
    assert list(release_check.check_dist(project, VERSION)) == []
    (project / "dist" / "liger_dist-0.1.0.tar.gz").touch()
    assert "dist/ holds liger_dist-0.1.0.tar.gz" in only(release_check.check_dist(project, VERSION))


def complete_wheel() -> set[str]:
    """Names of the files that a wheel of the project has."""
    folders = {"liger_dist": ROOT, "liger_dist_kernels": ROOT / "kernels", "liger_dist_train": ROOT / "launch"}
    files = {
        str(file.relative_to(folder)) for name, folder in folders.items() for file in (folder / name).rglob("*.py")
    }
    licenses = f"liger_dist-{VERSION}.dist-info/licenses/LICENSE"
    return files | {"liger_dist/py.typed", "liger_dist_kernels/py.typed", licenses}


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("liger_dist/losses/spec.py", "the wheel lacks spec.py of liger_dist.losses (1 of "),
        ("liger_dist_kernels/norm.py", "the wheel lacks norm.py of liger_dist_kernels (1 of "),
        ("liger_dist_train/run.py", "the wheel lacks run.py of liger_dist_train (1 of "),
        ("liger_dist_kernels/py.typed", "the wheel has no liger_dist_kernels/py.typed"),
        (f"liger_dist-{VERSION}.dist-info/licenses/LICENSE", "the wheel has no LICENSE"),
    ],
)
def test_release_check_finds_files_that_the_wheel_lacks(missing: str, sentence: str) -> None:
    names = complete_wheel()
    assert list(release_check.check_wheel(ROOT, names)) == []
    assert sentence in only(release_check.check_wheel(ROOT, names - {missing}))


@pytest.mark.parametrize("foreign", ["benchmarks/report.py", "tests_multi_gpu/cells.py", "liger_dist/test_wrap.py"])
def test_release_check_finds_files_that_no_wheel_should_hold(foreign: str) -> None:
    assert f"the wheel holds {foreign};" in only(release_check.check_wheel(ROOT, complete_wheel() | {foreign}))


METADATA = {
    "Name": "liger_dist",
    "Version": VERSION,
    "License": "Apache-2.0",
    "Requires-Python": ">=3.10",
    "Description-Content-Type": "text/markdown",
    "Home-page": "https://example.org",
}


def metadata(urls: Iterable[str] = release_check.URLS, **fields: str | None) -> Message:
    message = Message()
    for name, value in (METADATA | {name.replace("_", "-"): value for name, value in fields.items()}).items():
        if value is not None:
            message[name] = value
    for label in urls:
        message["Project-URL"] = f"{label}, https://example.org/{label}"
    message.set_payload((ROOT / "README.md").read_text())
    return message


def test_release_check_reads_the_metadata() -> None:
    pytest.importorskip("readme_renderer.markdown")
    assert list(release_check.check_metadata(metadata(), VERSION)) == []
    for field, wrong in (("Name", "liger"), ("Version", "0.1.0"), ("Requires_Python", None), ("License", "MIT")):
        assert str(wrong) in only(release_check.check_metadata(metadata(**{field: wrong}), VERSION))
    assert "write url in setup.cfg" in only(release_check.check_metadata(metadata(Home_page=None), VERSION))
    sentence = only(release_check.check_metadata(metadata(urls=("Documentation", "Source")), VERSION))
    assert "no URL of Changelog, Issues" in sentence


def test_release_check_renders_the_readme() -> None:
    pytest.importorskip("readme_renderer.markdown")
    as_rst = metadata(Description_Content_Type="text/x-rst")
    assert "has no title or no code" in only(release_check.check_description(as_rst))
    empty = metadata()
    empty.set_payload("# A title\n")
    assert "has no title or no code" in only(release_check.check_description(empty))


def test_release_check_lists_all_failures_and_exits_with_1(project: Path) -> None:
    program = Path(release_check.__file__)
    (project / "tests_multi_gpu" / "programs").mkdir(parents=True)
    copied = project / "tests_multi_gpu" / "programs" / program.name
    copied.write_text(program.read_text())
    finished = subprocess.run([sys.executable, str(copied), "v9.9.9"], capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stdout == "liger_dist 9.9.9: 5 checks failed\n"
    for words in (
        "_version.py has 9.8.7",
        "CITATION.cff has 9.8.7",
        "one '## 9.9.9 (",
        "is not committed",
        "dist/ holds",
    ):
        assert words in finished.stderr
    refused = subprocess.run([sys.executable, str(copied), ""], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "VERSION=0.3.0" in refused.stderr


def test_citation_has_what_its_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= citation.keys()
    assert all("name" in author for author in citation["authors"])
    assert list(release_check.check_version(ROOT, citation["version"])) == []


BY_NAME = re.compile(r"pip install [^\n`]*liger[-_]dist\b(?!\S*(/|\.whl))")


def test_no_page_installs_the_package_by_name() -> None:
    """It is not on a package index, where a package of the same name would be another one."""
    for line in ('pip install "liger_dist[train]"', "pip install -U liger-dist"):
        assert BY_NAME.search(line)
    for line in ('pip install ".[train]"', "pip install dist/liger_dist-0.3.0-py3-none-any.whl"):
        assert not BY_NAME.search(line)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
    assert len(pages) > 40
    assert [str(page) for page in pages if BY_NAME.search(page.read_text())] == []
