"""The worked examples of the documentation: the files of a page, made as they stand in a copy of the project, and the
page's own test run there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import BLOCK, FILE_BLOCK

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page",
    [
        "adding_a_kernel",
        *(pytest.param(page, marks=pytest.mark.nightly) for page in ("adding_a_host", "adding_a_layout")),
    ],
)
def test_the_files_of_a_page_work(page: str, tmp_path: Path) -> None:
    for folder in ("liger_dist", "kernels", "launch", "tests_multi_gpu"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = made_from((ROOT / "docs" / f"{page}.md").read_text(), tmp_path)
    tests = [str(file) for file in files if file.name.startswith("test_")]
    assert tests
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'kernels'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    finished = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-2000:]
    checked = [str(file) for file in files]
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", *checked]
    linted = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


def made_from(page: str, root: Path) -> list[Path]:
    """Writes the files of a page and applies its diffs."""
    files = []
    for language, text in BLOCK.findall(page):
        name = FILE_BLOCK.match(text)
        if language == "diff":
            subprocess.run(["git", "apply", "-"], cwd=root, input=text, text=True, check=True)
        elif language == "python" and name is not None:
            file = root / name[1]
            file.write_text(text[name.end() :])
            files.append(file)
    return files
