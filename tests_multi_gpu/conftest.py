"""Fixtures: devices, process pools, and a skip with a reason for GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes share the cores; so do the programs that they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# MKL then rounds alike on every processor.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Before the first import of Triton: without a GPU the kernels run in its interpreter.
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from harness import Workers, shared_buffers
from policies import save_checkpoint
from repeated import mark_repeated
from training_runs import config_for, write_corpus, write_tokenizer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-pages", action="store_true", help="write the pages of docs that show what a run saw")


OTHERS = shared_buffers()


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for path in shared_buffers() - OTHERS:
            path.unlink(missing_ok=True)


LONGEST = (
    "test_conformance",
    "test_trl",
    "test_docs",
    "test_stuck_ranks",
    "test_families",
    "test_distillation",
    "test_run_features",
    "test_sharded_by_transformers",
    "test_signals",
    "test_options",
    "test_engines",
    "test_train",
    "test_own_chats",
    "test_launchers",
    "test_dataset",
    "test_worked_examples",
    "test_float8",
    "test_extreme_logits",
    "test_registers",
    "test_trainer",
    "test_train_with_teacher",
    "test_scoring",
    "test_long_documents",
    "test_restarts",
    "test_examples",
    "test_checkpoints",
    "test_sharded_peft",
    "test_peft_methods",
)
"""files that take longest, the longest first: begun first, so that no worker waits for the last one"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_repeated(items)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.kwargs.get("n", 1)
        found = torch.cuda.device_count()
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, this machine has {found}"))


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
