"""Plots of docs/benchmarks.md, each of one results file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

OURS = "liger_dist"
PEERS = ("Liger", "Hugging Face", "Accelerate", "DeepSpeed")
GPU_PARTS = ("computing", "communicating", "waiting")
Problems = dict[str, dict[str, Any]]


def plot_time(problems: Problems, path: Path) -> None:
    """The three parts of a profiled step, stacked."""
    parts = {part: f"{part} ms" for part in GPU_PARTS}
    _plot_stacked({f"{name} GPUs": problem for name, problem in problems.items()}, path, parts)


def plot_small(problems: Problems, path: Path) -> None:
    """The host's parts of a step, stacked, with the step's time as a mark."""
    parts = {f"host: {part}": f"{part} host ms" for part in ("forward", "backward", "update")}
    _plot_stacked(problems, path, parts, marks_step=True)


def _plot_stacked(problems: Problems, path: Path, parts: dict[str, str], *, marks_step: bool = False) -> None:
    """Plots the figures of each row as one bar; ``parts`` names them by label."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(problems), 1, figsize=(9, 1.7 * len(problems)), squeeze=False)
    for (axis,), (name, problem) in zip(axes, problems.items(), strict=True):
        names, left = [row["name"] for row in problem["rows"]], [0.0] * len(problem["rows"])
        for (label, of), colour in zip(parts.items(), ("C0", "C1", "C2" if marks_step else "lightgrey"), strict=True):
            values = [row["figures"][of] for row in problem["rows"]]
            axis.barh(names, values, left=left, color=colour, label=label)
            left = [before + value for before, value in zip(left, values, strict=True)]
        if marks_step:
            axis.plot([row["median_ms"] for row in problem["rows"]], names, "k|", markersize=14, label="step")
        axis.set_title(f"{name}: ms", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_sequences(problems: Problems, path: Path, *, memory: str = "GiB above the weights") -> None:
    """Time and memory of every way."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(problems), 2, figsize=(11, 2.2 * len(problems)), squeeze=False, sharey="row")
    for line, (name, problem) in zip(axes, problems.items(), strict=True):
        rows = problem["rows"]
        names = [row["name"] for row in rows]
        values = [[row["median_ms"] for row in rows], [row["figures"][memory] for row in rows]]
        for axis, what, bars in zip(line, ("ms", memory), values, strict=True):
            axis.bar_label(
                axis.barh(names, bars, color=["C7" if "dense" in n or n == "Liger" else "C0" for n in names])
            )
            axis.set_title(f"{name}: {what}", fontsize=9)
            axis.tick_params(labelsize=7)
            axis.margins(x=0.15)
        line[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_ratios(problems: Problems, path: Path) -> None:
    """Time and memory of every implementation; two panels for each problem."""
    import matplotlib.pyplot as plt

    shown = {name: problem for name, problem in problems.items() if not name.startswith(("training", "soft"))}
    figure, axes = plt.subplots(len(shown), 2, figsize=(11, 2.2 * len(shown)), squeeze=False, sharey="row")
    for line, (name, problem) in zip(axes, shown.items(), strict=True):
        rows = [row for row in problem["rows"] if not row["failure"] and row["name"] != "bare GEMMs"]
        names = [row["name"].split(" (")[0] for row in rows]
        values = [[row["figures"]["ratio"] for row in rows], [row["extra_mib"] for row in rows]]
        for axis, what, form, bars in zip(
            line, ("time / bare GEMMs", "extra MiB"), ("%.2f", "%.0f"), values, strict=True
        ):
            drawn = axis.barh(names, bars, color=["C0" if own.startswith(OURS) else "C7" for own in names])
            axis.bar_label(drawn, fmt=form, fontsize=7)
            axis.set_title(f"{name}: {what}", fontsize=9)
            axis.tick_params(labelsize=7)
            axis.margins(x=0.12)
        line[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_vocabularies(problems: Problems, path: Path) -> None:
    """Ratio to the GEMMs of the next multiple of 64 over vocabularies, a line for each implementation."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4))
    names = dict.fromkeys(row["name"] for problem in problems.values() for row in problem["rows"][1:])
    for name in names:
        rows = {size: row for size, problem in problems.items() for row in problem["rows"] if row["name"] == name}
        ratios = [rows[size]["figures"].get("ratio") if size in rows else None for size in problems]
        axis.plot(list(problems), ratios, "o-", label=name, linewidth=2.5 if name.startswith(OURS) else 1.0)
    axis.set(yscale="log", xlabel="vocabulary", ylabel="time / three GEMMs of the next multiple of 64")
    axis.set_yticks([1, 1.5, 2, 3, 5, 8], ["1", "1.5", "2", "3", "5", "8"])
    axis.set_yticks([], minor=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_norm_widths(problems: Problems, path: Path) -> None:
    """TB/s over widths, forward and backward; a line for each implementation."""
    import matplotlib.pyplot as plt

    kernels = list(dict.fromkeys(name.split(" ")[0] for name in problems))
    figure, axes = plt.subplots(len(kernels), 2, figsize=(11, 3.2 * len(kernels)), squeeze=False, sharey=True)
    for line, kernel in zip(axes, kernels, strict=True):
        widths = {int(name.rsplit("x", 1)[1]): each for name, each in problems.items() if name.startswith(kernel)}
        for axis, which in zip(line, ("forward", "backward"), strict=True):
            names = dict.fromkeys(row["name"] for each in widths.values() for row in each["rows"])
            for name in names:
                seen = {w: row["figures"] for w, each in widths.items() for row in each["rows"] if row["name"] == name}
                values = [seen.get(width, {}).get(f"{which} TB/s") for width in widths]
                axis.plot(list(widths), values, "o-", label=name, linewidth=2.5 if name.startswith(OURS) else 1.0)
            axis.set(title=f"{kernel}, {which}", xscale="log", xlabel="width", ylabel="TB/s", ylim=(0, None))
            axis.set_xticks(list(widths), list(map(str, widths)), fontsize=6, rotation=60)
            axis.set_xticks([], minor=True)
            axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_split(problems: Problems, path: Path) -> None:
    """Ratio over peak memory, one panel for each shape."""
    import matplotlib.pyplot as plt

    lines = -(-len(problems) // 2)
    figure, axes = plt.subplots(lines, 2, figsize=(11, 4 * lines), squeeze=False)
    for axis, (name, problem) in zip(axes.flat, problems.items(), strict=True):
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in problem["rows"][1:]:
            kinds.setdefault(row["name"].split(",")[0], []).append(row)
        for kind, rows in kinds.items():
            places = [(row["figures"]["peak MiB"], row["figures"]["ratio"]) for row in rows]
            axis.plot(*zip(*places, strict=True), "o-", label=kind)
            for row, place in zip(rows, places, strict=True):
                axis.annotate(row["name"].split(", ")[1], place, fontsize=6, xytext=(4, 3), textcoords="offset points")
        axis.set(title=f"{name} GPUs", xlabel="peak memory (MiB)", ylabel="time / three GEMMs", ylim=(0.95, 1.45))
        axis.set_xlim(left=0)
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_steps(problems: Problems, path: Path) -> None:
    """Tokens per second and peak memory of every way."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(problems), 2, figsize=(11, 3 * len(problems)), squeeze=False, sharey="row")
    for line, (name, problem) in zip(axes, problems.items(), strict=True):
        names = [row["name"] for row in problem["rows"]]
        colours = ["C7" if way.startswith(PEERS) else "C0" for way in names]
        for axis, figure_name in zip(line, ("tokens/s", "peak GiB"), strict=True):
            values = [row["figures"].get(figure_name, math.nan) for row in problem["rows"]]
            bars = axis.barh(names, values, color=colours)
            axis.bar_label(bars, fmt="%.3g" if figure_name == "peak GiB" else "%.0f", fontsize=7)
            axis.set_title(f"{name} GPUs: {figure_name}", fontsize=9)
            axis.tick_params(labelsize=7)
            axis.margins(x=0.12)
        line[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_linear(problems: Problems, path: Path) -> None:
    """Ratio over extra memory, one panel for each shape."""
    import matplotlib.pyplot as plt

    problems = {name: problem for name, problem in problems.items() if "," not in name}
    names = [row["name"] for problem in problems.values() for row in problem["rows"]]
    colours = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(names)) if not name.startswith(OURS)}
    columns = min(2, len(problems))
    lines = -(-len(problems) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False)
    for axis in axes.flat[len(problems) :]:
        axis.remove()
    for axis, (name, problem) in zip(axes.flat, problems.items(), strict=False):
        measured = [row for row in problem["rows"] if "extra MiB" in row["figures"]]
        places = {row["name"]: (max(row["figures"]["extra MiB"], 1), row["figures"]["ratio"]) for row in measured}
        ours = {of: place for of, place in places.items() if of.startswith(OURS)}
        axis.plot(*zip(*ours.values(), strict=True), "o-", color="black", label=OURS)
        for of, place in ours.items():
            axis.annotate(of.removeprefix(OURS), place, fontsize=6, xytext=(4, 3), textcoords="offset points")
        for of, place in places.items():
            if of not in ours:
                axis.scatter(*place, color=colours[of], s=24, label=of)
        axis.set(title=name, xscale="log", xlabel="extra memory (MiB)", ylabel="time / three GEMMs")
        axis.set_ylim(0.95, 2.0)
    labelled = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(labelled.values(), labelled.keys(), loc="lower center", ncols=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_memory(problems: Problems, path: Path) -> None:
    """Percentages of the copy bandwidth, forward and backward."""
    import matplotlib.pyplot as plt

    shown = {name: problem for name, problem in problems.items() if "cross_entropy" not in name}
    names = list(dict.fromkeys(row["name"] for p in shown.values() for row in p["rows"] if "copy" not in row["name"]))
    figure, axes = plt.subplots(1, 2, figsize=(13, 0.32 * len(shown) + 2), sharey=True)
    height = 0.8 / max(len(names), 1)
    for axis, which in zip(axes, ("forward %", "backward %")):
        for place, name in enumerate(names):
            values = [
                next((row["figures"].get(which, 0.0) for row in p["rows"] if row["name"] == name), 0.0)
                for p in shown.values()
            ]
            axis.barh([index + place * height for index in range(len(shown))], values, height, label=name)
        axis.set(title=which.replace("%", "(% of copy bandwidth)"), xlim=(0, 110))
        axis.axvline(100, color="grey", linewidth=0.5)
    axes[0].set_yticks([index + 0.4 for index in range(len(shown))], list(shown), fontsize=7)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
