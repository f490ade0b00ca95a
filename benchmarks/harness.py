"""How everything here is measured.

All implementations of one problem run in turn, one call each, round after round, in an order drawn anew: what the
clocks and the temperature do then happens to all of them. A figure is the median over rounds, with the 20th and 80th
percentile. What is published is a ratio to something measured in the same rounds.

A GPU at its power limit lowers its clocks under GEMMs, and has not done so yet behind something lighter: what runs in
front of a call decides up to 10 % of its time. Losses are therefore timed behind products, as in a model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "triton",
    "torchao",
    "deepspeed",
    "transformers",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "liger-cute-kernels",
    "nvidia-cutlass-dsl",
    "trl",
    "quack-kernels",
    "cut-cross-entropy",
)


@dataclass(frozen=True)
class Candidate:
    """One implementation of a problem."""

    name: str
    run: Callable[[], object]
    """one call; what it returns is dropped"""
    accuracy: str = ""
    """what its rounding is comparable to"""


@dataclass
class Row:
    """What was seen of one candidate."""

    problem: str
    name: str
    accuracy: str
    median_ms: float = float("nan")
    p20_ms: float = float("nan")
    p80_ms: float = float("nan")
    extra_mib: float = float("nan")
    """peak memory of a call beyond what was there before it"""
    figures: dict[str, float] = field(default_factory=dict)
    """errors, ratios and whatever else belongs to it"""
    failure: str = ""


def pause() -> None:
    """Keeps the GPU busy while the host issues the next call, as the layers before it would."""
    torch.cuda._sleep(500_000)


def products(milliseconds: float = 20.0) -> Callable[[], None]:
    """GEMMs for about as long (at 700 TFLOP/s), as the layers before a loss."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    calls = round(milliseconds * 1e-3 * 700e12 / (2 * size**3))

    def run() -> None:
        for _ in range(calls):
            torch.mm(a, b, out=out)

    return run


def measure(
    problem: str,
    candidates: Sequence[Candidate],
    *,
    rounds: int = 20,
    warmups: int = 3,
    before: Callable[[], object] = pause,
) -> list[Row]:
    """Medians over ``rounds``, with ``before`` called before each timed call. A candidate that raises is reported with
    its sentence, and the others go on."""
    rows = {c.name: Row(problem, c.name, c.accuracy) for c in candidates}
    alive = []
    for candidate in tqdm(candidates, desc=f"{problem}: warm-up", leave=False):
        try:
            for _ in range(warmups):
                candidate.run()
            torch.cuda.synchronize()
            rows[candidate.name].extra_mib = peak_mib(candidate.run)
            alive.append(candidate)
        except Exception as error:  # Another library's refusal is a result of the table.
            sentence = " ".join(str(error).split())
            rows[candidate.name].failure = f"{type(error).__name__}: {sentence[:160]}"
            print(f"{problem}: {candidate.name}: {rows[candidate.name].failure}", file=sys.stderr)
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {c.name: [] for c in alive}
    draw = random.Random(0)
    for _ in tqdm(range(rounds), desc=problem, leave=False):
        for candidate in draw.sample(alive, len(alive)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            start.record()
            candidate.run()
            end.record()
            times[candidate.name].append((start, end))
        torch.cuda.synchronize()
    for name, events in times.items():
        seen = sorted(start.elapsed_time(end) for start, end in events)
        rows[name].median_ms = statistics.median(seen)
        rows[name].p20_ms, rows[name].p80_ms = seen[len(seen) // 5], seen[-1 - len(seen) // 5]
    return list(rows.values())


def peak_mib(run: Callable[[], object]) -> float:
    """Peak allocation of a call beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def host_us(run: Callable[[], object], calls: int = 50) -> float:
    """Time the host needs to issue a call, in microseconds: median, with an empty queue before each."""
    import time

    seen = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        seen.append((time.perf_counter() - start) * 1e6)
    return statistics.median(seen)


def captured(run: Callable[[int], object], sets: int) -> Callable[[], None]:
    """``sets`` calls, the i-th of them ``run(i)``, as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):
            run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            run(index)
    return graph.replay


def environment() -> dict[str, Any]:
    """Machine, versions, clocks and date, for the head of a results file."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    query = "clocks.sm,clocks.mem,power.limit,temperature.gpu"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "clocks after the run (SM, memory, power limit, temperature)": smi.stdout.strip(),
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": command(),
    }


def command() -> str:
    """Returns the command that runs, without the folder of its results."""
    words = [word for before, word in pairwise(["", *sys.argv[1:]]) if "--results" not in (before, word)]
    return " ".join(["python", "-m", f"{Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem}", *words])


def commit() -> str | None:
    """Returns the commit that runs; None outside of a checkout without ``LIGER_DIST_COMMIT``."""
    given = os.environ.get("LIGER_DIST_COMMIT")
    if given:
        return given
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return git.stdout.strip() or None


def save(name: str, rows: Sequence[Row], directory: Path) -> None:
    """Writes the rows of one problem into ``<directory>/<name>.json``, beside those of other problems."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    problems = json.loads(path.read_text()) if path.exists() else {}
    problems[rows[0].problem] = {"environment": environment(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(problems, indent=1) + "\n")


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=20, help="calls of each implementation that are timed")
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    return parser


def show(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """A short table on the terminal."""
    for row in rows:
        if row.failure:
            print(f"  {row.name:<28} {row.failure}")
            continue
        figures = "  ".join(f"{name} {row.figures[name]:.3g}" for name in columns if name in row.figures)
        print(f"  {row.name:<28} {row.median_ms:8.3f} ms ({row.p20_ms:.3f}-{row.p80_ms:.3f})  {figures}", flush=True)
