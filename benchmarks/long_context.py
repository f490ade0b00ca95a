"""One long sequence over all GPUs: a Llama of 8 billion parameters by the launch files, beside Accelerate's context
parallelism (ring attention of torch) and DeepSpeed's ALST (Ulysses with tiled MLP), both with Liger's kernels.

    python -m benchmarks.long_context

Every way is a process group of its own, for it fills the GPUs: fp32 masters and bf16 compute, AdamW with 8-bit states,
layers computed again in the backward, random weights. The ways run in turn, length by length.
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
from .launched import ROOT, failure_of, make_text, torchrun

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
    common = [str(ROOT / "launch" / "train.py"), "launch/llama_8b_long.yaml", "--sp", str(torch.cuda.device_count())]
    common += [*text, "--attend_across_documents", "true", "--sequence_length", str(length), *options]
    common += [
        "--steps",
        str(steps),
        "--eval_every",
        "1000",
        "--eval_batches",
        "1",
        "--checkpoint_every",
        "0",
        "--warmup_steps",
        "1",
    ]
    common += ["--cache_dir", str(folder / "cache"), "--output_dir", str(folder / "run"), "--overwrite", "true"]
    finished = torchrun(common, **ALLOCATOR)
    if finished.returncode:
        return finished, []
    seen = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    before = [0, *(step["tokens"] for step in seen)]
    return finished, [
        {
            "ms": (step["tokens"] - earlier) / step["tokens_per_second"] * 1e3,
            "peak GiB": step["peak_memory_bytes"] / 2**30,
            "utilisation": step.get("mfu", 0.0),
            "loss": step["loss"],
        }
        for earlier, step in zip(before, seen, strict=False)
    ]


def run_peer(name: str, length: int, steps: int) -> tuple[Any, list[dict[str, Any]]]:
    finished = torchrun(["-m", "benchmarks.long_context_peers", name, str(length), str(steps)], **ALLOCATOR)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    return finished, [json.loads(line) for line in lines] if not finished.returncode else []


def row_of(way: str, length: int, steps: int, folder: Path, text: list[str]) -> Row:
    """Median of the steps after the first."""
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
    row.figures = {name: timed[-1][name] for name in ("utilisation", "loss") if name in timed[-1]}
    row.figures |= {
        "peak GiB": max(step["peak GiB"] for step in timed),
        "tokens/s": length / row.median_ms * 1e3,
    }
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
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
                    show(rows[-1:], ("tokens/s", "utilisation", "peak GiB", "loss"))
                    save("long_context", rows, given.results)


if __name__ == "__main__":
    main()
