"""Fixtures: devices, process pools, and a skip with a reason for GPUs that are not there."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes share the cores; so do the programs that they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# MKL then rounds alike on every processor.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# oneDNN's bf16 products for AMX read beyond the end of a matrix: unwrapped models have NaN gradients, too (torch 2.13).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Before the first import of Triton: without a GPU the kernels run in its interpreter.
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import affected
import pytest
import recording
from harness import MOST_REPEATED, REPEATED, Workers, shared_buffers
from policies import save_checkpoint
from tiers import mark_tiers
from training_runs import config_for, write_corpus, write_tokenizer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-pages", action="store_true", help="write the pages of docs that show what a run saw")
    parser.addoption(
        "--tests-from", metavar="FILE", help="run the files, tests and cases that FILE names, one per line"
    )


OTHERS = shared_buffers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        for path in shared_buffers() - OTHERS:
            path.unlink(missing_ok=True)
        if len(repeated_calls(session.config)) > MOST_REPEATED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report: Any = yield
    report.user_properties += [("repeated", call) for call in REPEATED]
    REPEATED.clear()
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    calls = repeated_calls(config)
    if calls:
        terminalreporter.section(f"{len(calls)} calls that were repeated; more than {MOST_REPEATED} fail")
        for call in calls:
            terminalreporter.write_line(call)


def repeated_calls(config: pytest.Config) -> list[str]:
    """Tests of this run and their calls that were made once more."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    reports = [report for kind in reporter.stats.values() for report in kind if hasattr(report, "user_properties")]
    found = ((report.nodeid, *named) for report in reports for named in report.user_properties)
    return sorted(f"{test}: {call}" for test, name, call in found if name == "repeated")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_tiers(items)
    listed = config.getoption("--tests-from")
    if listed:
        keep_listed(config, items, Path(listed).read_text().splitlines())
    # Files that take longest are begun first, so that no worker waits for the last one.
    seconds = affected.read_map()["seconds"]
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.kwargs.get("n", 1)
        found = torch.cuda.device_count()
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, this machine has {found}"))


def keep_listed(config: pytest.Config, items: list[pytest.Item], listed: list[str]) -> None:
    """Deselects what no line of a list names: a file, a test or a case. Names that are not there are passed over."""
    names = set(listed)

    def is_listed(item: pytest.Item) -> bool:
        test = item.nodeid.partition("[")[0]
        is_whole = test in names or test.partition("::")[0] in names
        return item.nodeid in names or (is_whole and item.get_closest_marker("nightly") is None)

    left_out = [item for item in items if not is_listed(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_listed(item)]


def pytest_collection_finish() -> None:
    # Modules and tests stay: the garbage collector need not look at them again in each of thousands of collections.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if recording.FOLDER is None:
        return (yield)
    if recording.current():
        recording.switch(item.nodeid)
    else:
        recording.start(item.nodeid)
    started = time.monotonic()
    try:
        return (yield)
    finally:
        recording.note_duration(item.nodeid, time.monotonic() - started)
        recording.save()


@pytest.fixture(scope="module")
def workers_2() -> Iterator[Workers]:
    """Two processes in one process group, started once per file."""
    with Workers(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def workers_4() -> Iterator[Workers]:
    """Four processes in one process group, started once per file."""
    with Workers(4) as workers:
        yield workers


@pytest.fixture(scope="module")
def workers_on_all(request: pytest.FixtureRequest) -> Workers:
    """Four processes; two where the machine has no more GPUs."""
    workers: Workers = request.getfixturevalue("workers_2" if torch.cuda.device_count() in (2, 3) else "workers_4")
    return workers


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny policies, by family."""
    return partial(save_checkpoint, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real corpus for the training program."""
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Its tokenizer, and its tokens once a run has prepared them."""
    folder = tmp_path_factory.mktemp("cache")
    write_tokenizer(data, folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def trained(data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of the training program on two ranks under FSDP2."""
    from liger_dist_train.run import train

    output = tmp_path_factory.mktemp("trained")
    with Workers(2) as workers:
        workers.run(train, config_for(data, cache, output))
    return output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB, which a test fills."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
