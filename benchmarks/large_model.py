"""A Llama of 8 billion parameters, trained by the launch files alone, beside the same with Liger; and the memory that
``--dry_run`` plans, beside what was measured.

    python -m benchmarks.large_model

Every way runs by itself, for it fills the GPUs: ``liger-dist train launch/llama_8b.yaml`` with the options that stand
in the table, on all GPUs of this machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from .harness import Row, arguments, save, show
from .launched import ROOT, failure_of, make_text, torchrun

LIGER = ("--fused_loss", "false", "--layer_kernels", "false")
ZERO3 = ("--strategy", "deepspeed", "--deepspeed", "launch/deepspeed/zero3.json", "--async_checkpoints", "false")
VOCAB_PARALLEL = ("--strategy", "fsdp2", "--lm_head", "vocab_parallel")
ONE_TEXT = ("--attend_across_documents", "true")
PACKED = ("--strategy", "fsdp2", "--attend_across_documents", "false")
WAYS: dict[str, tuple[str, ...]] = {
    "fsdp2": ("--strategy", "fsdp2"),
    "fsdp2, packed documents": PACKED,
    "fsdp2, packed documents, dense mask": (*PACKED, "--attention", "sdpa"),
    "fsdp2, packed documents, flex_attention": (*PACKED, "--attention", "flex_attention"),
    "fsdp2, vocab-parallel": VOCAB_PARALLEL,
    "fsdp2, vocab-parallel, layers compiled": (*VOCAB_PARALLEL, "--compile", "true"),
    "fsdp2, vocab-parallel, activation checkpointing": (*VOCAB_PARALLEL, "--activation_checkpointing", "true"),
    "fsdp2, layers compiled": ("--strategy", "fsdp2", "--compile", "true"),
    "fsdp2, float8 tensorwise": ("--strategy", "fsdp2", "--float8", "tensorwise"),
    "fsdp2, float8 rowwise": ("--strategy", "fsdp2", "--float8", "rowwise"),
    "zero3": ZERO3,
    "Liger, fsdp2": ("--strategy", "fsdp2", *LIGER),
    "Liger, zero3": (*ZERO3, *LIGER),
}
WARM_UP = 3
"""steps"""


def run(way: str, options: tuple[str, ...], folder: Path, steps: int, text: list[str]) -> Row:
    """One run; the median of its steps after the first ones."""
    gpus = torch.cuda.device_count()
    row = Row(f"Llama 8B, on {gpus}", way, "")
    program = ["-m", "benchmarks.liger_training"] if way.startswith("Liger") else ["-m", "liger_dist_train"]
    common = ["launch/llama_8b.yaml", *ONE_TEXT, *options, *text, "--steps", str(steps), "--checkpoint_every", "0"]
    common += ["--warmup_steps", "2", "--cache_dir", str(folder / "cache"), "--output_dir", str(folder / way)]
    finished = torchrun([*program, *common])
    if finished.returncode != 0:
        row.failure = failure_of(finished)
        return row
    seen = [json.loads(line) for line in (folder / way / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    speeds = sorted(step["tokens_per_second"] for step in seen)
    tokens = gpus * 8192 * 1e3
    row.median_ms, row.p20_ms, row.p80_ms = (
        tokens / speed for speed in (statistics.median(speeds), speeds[-1 - len(speeds) // 5], speeds[len(speeds) // 5])
    )
    peak = max(step["peak_memory_bytes"] for step in seen) / 2**30
    row.figures = {
        "tokens/s": statistics.median(speeds),
        "utilisation": statistics.median(step["mfu"] for step in seen),
        "peak GiB": peak,
        "loss": seen[-1]["loss"],
    }
    if not way.startswith("Liger"):
        planned = planned_peak([*common, "--dry_run", "true", "--world_size", str(gpus)], finished.stdout)
        row.figures["planned GiB"] = planned
    return row


def planned_peak(options: list[str], said: str) -> float:
    """The peak of ``--dry_run``, for the way to the head that the run took."""
    plan = subprocess.run(
        [sys.executable, "-m", "liger_dist_train", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    lines = {line.split("  ")[0]: line.split() for line in plan.stdout.splitlines() if line}
    is_split = "the head: fsdp2-vocab-parallel" in said and len(lines["peak"]) > 2
    return float(lines["peak"][2 if is_split else 1])


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = make_text(Path(folder), one_document=False)
        for way, options in WAYS.items():
            if given.only in way and (find_spec("liger_kernel") or not way.startswith("Liger")):
                rows.append(run(way, options, Path(folder), given.rounds, text))
                show(rows[-1:], ("tokens/s", "utilisation", "peak GiB", "planned GiB", "loss"))
    save("large_model", rows, given.results)


if __name__ == "__main__":
    main()
