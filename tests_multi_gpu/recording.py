"""Records which lines of this repository each test runs, and which other files it reads.

``make record`` sets :data:`FOLDER` in the environment; without it nothing here does anything. A test's processes are
recorded too: forks by :func:`start`, programs that torchrun starts by :func:`environment`. ``affected.py`` reads the
folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VARIABLE = "LIGER_DIST_RECORD"
FOLDER = os.environ.get(VARIABLE)
"""folder of the recording; None if nothing is recorded"""
TEST = "LIGER_DIST_RECORDED_TEST"
"""environment variable with the id of the test that a program belongs to"""
SOURCES = ("liger_dist", "kernels", "launch", "benchmarks", "docs", "tests_multi_gpu")

_coverage: Any = None
_test = ""
_opened: set[tuple[str, str]] = set()
_written: set[tuple[str, str]] = set()


def start(test: str) -> None:
    """Records the lines that this process runs from here on, for ``test``; a fork calls it anew."""
    global _coverage
    if FOLDER is None or not test:
        return
    import coverage

    inherited = coverage.Coverage.current()
    if inherited is not None:
        inherited.stop()
    else:
        sys.addaudithook(_note_opened)
    _opened.clear()
    _written.clear()
    name = f"{FOLDER}/lines.{os.getpid()}.{time.time_ns()}"
    _coverage = coverage.Coverage(data_file=name, config_file=False, source=[str(ROOT / s) for s in SOURCES])
    _coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "already-imported"])
    _coverage.start()
    switch(test)


def switch(test: str) -> None:
    """What runs from here on belongs to ``test``."""
    global _test
    if _coverage is not None and test:
        _test = os.environ[TEST] = test
        _coverage.switch_context(test)


def current() -> str:
    """The id of the running test; empty if nothing is recorded."""
    return _test


def save() -> None:
    """Writes what was recorded so far: a rank is killed when its file ends."""
    if _coverage is None:
        return
    _coverage.save()
    new = _opened - _written
    if new:
        _written.update(new)
        with open(f"{FOLDER}/opened.{os.getpid()}", "a") as file:
            file.writelines(json.dumps(pair) + "\n" for pair in sorted(new))


def note_duration(test: str, seconds: float) -> None:
    """Writes how long a whole test took, with the fixtures that it was the first to ask for."""
    with open(f"{FOLDER}/durations.{os.getpid()}", "a") as file:
        file.write(json.dumps([test, round(seconds, 3)]) + "\n")


def environment() -> dict[str, str]:
    """Variables for a program that is recorded until it ends or gets SIGTERM; empty if nothing is recorded."""
    if FOLDER is None:
        return {}
    settings = Path(FOLDER) / "program.ini"
    sources = "".join(f"\n    {ROOT / source}" for source in SOURCES)
    settings.write_text(
        f"[run]\nparallel = true\nsigterm = true\ncontext = ${{{TEST}}}\ndata_file = {FOLDER}/lines\n"
        f"source ={sources}\ndisable_warnings = no-data-collected,module-not-imported\n"
    )
    return {"COVERAGE_PROCESS_START": str(settings), TEST: _test}


def _note_opened(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(args[0], str) or not args[0].startswith(str(ROOT)):
        return
    name = args[0][len(str(ROOT)) + 1 :]
    if not name.endswith((".py", ".pyc")) and not name.startswith((".", "runs/", "build/")) and ".egg-info" not in name:
        _opened.add((_test, name))
