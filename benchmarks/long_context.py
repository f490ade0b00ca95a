"""One long sequence over all GPUs: a Llama of 8 billion parameters by the launch files, beside Accelerate's context
parallelism (ring attention of torch) and DeepSpeed's ALST (Ulysses with tiled MLP), both with Liger's kernels.

    python -m benchmarks.long_context

Every way runs in separate processes, because it fills the GPUs: fp32 masters and bf16 compute, AdamW with 8-bit states,
activation checkpointing of every layer, random weights. The ways run in turn, length by length. Peaks are what torch
has allocated: of the first rank for ours, of the rank with most for the others. No way but one of ours keeps
checkpoints in host memory, which ALST can do too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .harness import Row, arguments, save, show
from .large_model import ONE_TEXT
from .launched import failure_of, make_text, torchrun

OURS: dict[str, tuple[str, ...]] = {
    "liger_dist": (),
    "liger_dist, vocab_parallel": ("--lm_head", "vocab_parallel"),
    "liger_dist, offload_checkpoints": ("--offload_checkpoints", "true"),
}
PEERS = {"Accelerate, cp_size, Liger": "cp", "DeepSpeed ALST, Liger": "alst"}
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
WARM_UP = 1
"""steps"""


def run_ours(
    options: tuple[str, ...], length: int, steps: int, folder: Path, text: list[str]
) -> tuple[Any, list[dict[str, Any]]]:
    command = ["-m", "liger_dist_train", "launch/llama_8b_long.yaml", *ONE_TEXT, *text, *options]
    command += ["--sp", str(torch.cuda.device_count()), "--sequence_length", str(length), "--steps", str(steps)]
    command += ["--warmup_steps", "1", "--checkpoint_every", "0", "--overwrite", "true"]
    command += ["--cache_dir", str(folder / "cache"), "--output_dir", str(folder / "run")]
    finished = torchrun(command, ALLOCATOR)
    if finished.returncode:
        return finished, []
    seen = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    before = [0, *(step["tokens"] for step in seen)]
    return finished, [
        {
            "ms": (step["tokens"] - earlier) / step["tokens_per_second"] * 1e3,
            "peak GiB": step["peak_memory_bytes"] / 2**30,
            "utilisation": step["mfu"],
        }
        for earlier, step in zip(before, seen, strict=False)
    ]


def run_peer(name: str, length: int, steps: int) -> tuple[Any, list[dict[str, Any]]]:
    finished = torchrun(["-m", "benchmarks.long_context_peers", name, str(length), str(steps)], ALLOCATOR)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    return finished, [json.loads(line) for line in lines] if not finished.returncode else []


def row_of(way: str, length: int, steps: int, folder: Path, text: list[str]) -> Row:
    """Runs a way; the median of its steps after the first, beside the fastest and the slowest."""
    row = Row(f"{length} tokens, on {torch.cuda.device_count()}", way, "")
    if way in OURS:
        finished, seen = run_ours(OURS[way], length, steps, folder, text)
    else:
        finished, seen = run_peer(PEERS[way], length, steps)
    if finished.returncode:
        row.failure = failure_of(finished)
        return row
    timed = seen[min(WARM_UP, len(seen) - 1) :]
    times = sorted(step["ms"] for step in timed)
    row.median_ms, row.p20_ms, row.p80_ms = statistics.median(times), times[0], times[-1]
    row.figures = {"peak GiB": max(step["peak GiB"] for step in timed), "tokens/s": length / row.median_ms * 1e3}
    if way in OURS:
        row.figures["utilisation"] = timed[-1]["utilisation"]
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(rounds=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65_536, 131_072], help="tokens of a sequence")
    parser.add_argument("--ways", help="implementations to run, separated by semicolons; default: all")
    given = parser.parse_args()
    chosen = given.ways.split(";") if given.ways else [*OURS, *PEERS]
    with tempfile.TemporaryDirectory() as folder:
        text = make_text(Path(folder), one_document=True)
        for length in given.lengths:
            rows: list[Row] = []
            for way in tqdm(chosen, desc=f"{length} tokens"):
                if given.only in way:
                    rows.append(row_of(way, length, WARM_UP + given.rounds, Path(folder), text))
                    show(rows[-1:], ("tokens/s", "utilisation", "peak GiB"))
                    save("long_context", rows, given.results)


if __name__ == "__main__":
    main()
