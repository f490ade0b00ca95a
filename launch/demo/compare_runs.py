"""Draws the held-out losses of several runs into one plot.

python launch/demo/compare_runs.py losses.png runs/one runs/another
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def read_losses(folder: Path) -> dict[int, float]:
    """Reads the held-out losses of a run, by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", type=Path, help="PNG that is written")
    parser.add_argument("runs", type=Path, nargs="+", help="folders that liger-dist train wrote")
    options = parser.parse_args()
    for folder in options.runs:
        if not (folder / "metrics.jsonl").is_file():
            parser.error(f"{folder} has no metrics.jsonl; expected a folder that liger-dist train wrote")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for folder in options.runs:
        losses = read_losses(folder)
        axes.plot(list(losses), list(losses.values()), marker=".", label=folder.name)
        step, loss = next(reversed(losses.items()), (0, float("nan")))
        print(f"{folder}: held-out loss {loss:.3f} after step {step}")
    axes.set(xlabel="step", ylabel="held-out loss (nats per token)")
    axes.legend()
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
