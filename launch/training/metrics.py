"""What a run leaves to look at: a progress bar, ``metrics.jsonl`` and ``loss.png``. Rank 0 only."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm


class Metrics:
    """One object a step in ``metrics.jsonl``; a resumed run continues the file from its step."""

    def __init__(self, folder: Path, *, total_steps: int, first_step: int, is_writer: bool) -> None:
        self._path = folder / "metrics.jsonl"
        self._is_writer = is_writer
        self.rows: list[dict[str, Any]] = []
        if not is_writer:
            return
        if first_step > 0 and self._path.is_file():
            # What was written after the checkpoint is written again, a line that was cut off too.
            lines = self._path.read_text().splitlines()[:first_step]
            self.rows = [row for row in map(json.loads, lines) if row["step"] <= first_step]
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = self._path.open("a")
        self._bar = tqdm(total=total_steps, initial=first_step, desc="training", unit=" steps", mininterval=1)

    def add(self, row: dict[str, Any]) -> None:
        """Writes one step's numbers and shows them."""
        if not self._is_writer:
            return
        self.rows.append(row)
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

    def usual_speed(self) -> float | None:
        """Tokens per second: the median of the steps after the third, which compile and warm up."""
        speeds = [row["tokens_per_second"] for row in self.rows if row["step"] > 3]
        return median(speeds) if speeds else None

    def close(self) -> None:
        """Draws the losses of all steps."""
        if not self._is_writer:
            return
        self._bar.close()
        self._file.close()
        if self.rows:
            self._plot()

    def _plot(self) -> None:
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


def peak_memory_bytes() -> int:
    """Largest memory of this process so far: the GPU allocator's, or the resident set on a CPU machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
