"""What a run leaves to look at: a progress bar, ``metrics.jsonl`` and ``loss.png``. Rank 0 only."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from liger_dist import LigerDistError


class Metrics:
    """One object a step in ``metrics.jsonl``; a resumed run continues the file from its step."""

    def __init__(self, folder: Path, *, total_steps: int, first_step: int, is_writer: bool) -> None:
        self._path = folder / "metrics.jsonl"
        self._is_writer = is_writer
        self.rows: list[dict[str, Any]] = []
        if not is_writer:
            return
        if first_step > 0 and self._path.is_file():
            # What was written after the checkpoint is written again.
            self.rows = [row for row in whole_rows(self._path) if row["step"] <= first_step]
        partial = self._path.with_suffix(".partial")
        with self._refusing(first_step):
            partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            os.replace(partial, self._path)
            self._file = self._path.open("a")
        self._bar = tqdm(total=total_steps, initial=first_step, desc="training", unit=" steps", mininterval=1)

    def add(self, row: dict[str, Any]) -> None:
        """Writes one step's numbers and shows them."""
        if not self._is_writer:
            return
        self.rows.append(row)
        with self._refusing(row["step"]):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        shown = {
            "loss": f"{row['loss']:.3f}",
            "eval": next((f"{r['eval_loss']:.3f}" for r in reversed(self.rows) if "eval_loss" in r), "-"),
            "tokens/s": f"{row['tokens_per_second']:.0f}",
            "peak": f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
        }
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(1)

    @contextmanager
    def _refusing(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LigerDistError(
                f"step {step} cannot be written to {self._path}: {error}. Make room and go on with --resume true."
            ) from error

    def usual_speed(self) -> float | None:
        """Tokens per second: the median of the steps after the third, which compile and warm up."""
        speeds = [row["tokens_per_second"] for row in self.rows if row["step"] > 3]
        return median(speeds) if speeds else None

    def close(self) -> None:
        """Ends the bar and the file."""
        if self._is_writer:
            self._bar.close()
            self._file.close()

    def plot(self) -> None:
        """Draws the losses of all steps; no file where there were none."""
        if not self.rows:
            return
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        axes.plot([r["step"] for r in self.rows], [r["loss"] for r in self.rows], linewidth=1, label="training")
        evaluated = [r for r in self.rows if "eval_loss" in r]
        axes.plot([r["step"] for r in evaluated], [r["eval_loss"] for r in evaluated], "o-", label="held out")
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self._path.with_name("loss.png"), dpi=120)
        pyplot.close(figure)


def whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Those of the lines that were not cut off."""
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # Bytes that are no text, too.
            continue
        if isinstance(row, dict) and "step" in row:
            yield row


def peak_memory_bytes() -> int:
    """Largest memory of this process so far: the GPU allocator's, or the resident set on a CPU machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
