"""Process pools of the tests: what happens where a rank ends within a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from harness import Workers
from training_runs import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="calls are repeated over gloo alone")


def end_by(number: int, marker: Path, times: int) -> int:
    """Rank 1 ends by a signal in the first calls, and counts them in a file."""
    # Empty while the other rank writes it.
    calls = int((marker.read_text() if marker.exists() else "") or 0)
    if os.environ["RANK"] == "1" and calls < times:
        marker.write_text(str(calls + 1))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return calls


@pytest.fixture
def counted() -> list[str]:
    """Calls repeated by a test, which the summary of this run leaves out."""
    return harness.REPEATED


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_call_is_made_once_more(number: int, counted: list[str], workers_2: Workers, tmp_path: Path) -> None:
    assert workers_2.run(end_by, number, tmp_path / "calls", 1) == [1, 1]
    assert counted == [f"end_by: rank 1 failed: the process died, exit code {-number}"]
    counted.clear()


def test_a_second_signal_is_an_error(counted: list[str], workers_2: Workers, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed:\nthe process died, exit code -11"):
        workers_2.run(end_by, signal.SIGSEGV, tmp_path / "calls", 2)
    assert len(counted) == 1
    counted.clear()


def test_other_signals_are_no_signals_of_gloo(counted: list[str], workers_2: Workers, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code -9"):
        workers_2.run(end_by, signal.SIGKILL, tmp_path / "calls", 1)
    assert not counted


def fail_with(words: str, marker: Path, times: int) -> int:
    """Rank 1 raises in the first calls, and counts them in a file."""
    calls = int((marker.read_text() if marker.exists() else "") or 0)
    if os.environ["RANK"] == "1" and calls < times:
        marker.write_text(str(calls + 1))
        raise RuntimeError(words)
    return calls


@pytest.mark.parametrize("words", harness.OF_MEMORY)
def test_an_error_of_memory_is_like_a_signal(
    words: str, counted: list[str], workers_2: Workers, tmp_path: Path
) -> None:
    assert workers_2.run(fail_with, words, tmp_path / "calls", 1) == [1, 1]
    assert counted == [f"fail_with: rank 1 failed: RuntimeError: {words}"]
    counted.clear()
    with pytest.raises(RuntimeError, match=words):
        workers_2.run(fail_with, words, tmp_path / "twice", 2)
    assert len(counted) == 1
    counted.clear()


def test_other_errors_are_raised_at_once(counted: list[str], workers_2: Workers, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="one"):
        workers_2.run(fail_with, "one", tmp_path / "calls", 1)
    assert not counted


PROGRAM = """
import signal

import pytest
from test_harness import end_by


@pytest.mark.parametrize("number", range(NUMBER))
def test_it(number, workers_2, tmp_path):
    workers_2.run(end_by, signal.SIGSEGV, tmp_path / "calls", 1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "status"), [(1, 0), (3, 1)])
def test_the_summary_names_repeated_calls_and_many_fail(number: int, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_repeated.py").write_text(PROGRAM.replace("NUMBER", str(number)))
    folders = [ROOT / "tests_multi_gpu", Path(__file__).parent, *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--numprocesses", "1"],
        cwd=tmp_path,
        # Not a worker of this run.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTEST_XDIST_WORKER": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{number} calls that were repeated; more than 2 fail" in done.stdout
    assert "test_repeated.py::test_it[0]: end_by: rank 1 failed: the process died, exit code -11" in done.stdout
    assert f"{number} passed" in done.stdout
