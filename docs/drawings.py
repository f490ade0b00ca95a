"""Draws the pictures of how_it_works.md and vocab_parallel.md: ``python docs/drawings.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle

PLOTS = Path(__file__).parent / "plots"
WEIGHT, TOKENS, STATISTICS = "#0072B2", "#D55E00", "#009E73"
"""the blue is that of benchmarks/plots.py"""
RANKS = 3


def box(
    axes: Any, corner: tuple[float, float], size: tuple[float, float], colour: str, text: str, filled: bool
) -> None:
    face, ink = (colour, "white") if filled else ("none", colour)
    axes.add_patch(Rectangle(corner, *size, facecolor=face, edgecolor=colour, linewidth=1.4))
    x, y = (place + extent / 2 for place, extent in zip(corner, size, strict=True))
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=colour, linewidth=1.1))


def ways() -> None:
    """The all-gather of rows, and the all-gather of tokens."""
    figure, both = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    titles = ("gather: all-gather the rows", "vocab-parallel: all-gather the tokens, chunk by chunk")
    for axes, title in zip(both, titles, strict=True):
        exchanges, size = title == titles[1], (2.1, 0.8)
        axes.set_title(title, fontsize=10)
        for rank in range(RANKS):
            x = rank * 3.0
            axes.text(x + 1.05, 3.75, f"rank {rank}", ha="center", fontsize=8)
            box(axes, (x, 0), size, WEIGHT, f"row shard {rank}: V/G x D", filled=True)
            box(axes, (x, 2.6), size, TOKENS, "its N tokens", filled=True)
            met, colour = ("a chunk of all tokens", TOKENS) if exchanges else ("full weight: V x D", WEIGHT)
            box(axes, (x, 1.3), size, colour, met, filled=False)
            for other in range(RANKS):
                if exchanges:
                    arrow(axes, (x + 1.05, 2.6), (other * 3.0 + 1.05, 2.1), TOKENS)
                else:
                    arrow(axes, (x + 1.05, 0.8), (other * 3.0 + 1.05, 1.3), WEIGHT)
        axes.set_xlim(-0.2, RANKS * 3.0 - 0.7)
        axes.set_ylim(-0.2, 4.1)
        axes.axis("off")
    figure.savefig(PLOTS / "ways_to_the_head.png", dpi=120)
    pyplot.close(figure)


def chunk() -> None:
    """The steps of one chunk on one rank, from left to right."""
    steps = (
        ("all-gather\nhidden states", TOKENS, False),
        ("logits of\nrow shard", WEIGHT, True),
        ("all-gather\nstatistics", STATISTICS, False),
        ("gradient of\nthe logits", STATISTICS, True),
        ("hidden states'\ngradient", WEIGHT, True),
        ("all-to-all,\nsum", TOKENS, False),
        ("gradient of\nrow shard", WEIGHT, True),
    )
    figure, axes = pyplot.subplots(figsize=(10, 1.9), layout="constrained")
    for index, (text, colour, is_computed) in enumerate(steps):
        box(axes, (index * 2.0, 0), (1.6, 1.0), colour, text, filled=is_computed)
        if index:
            arrow(axes, (index * 2.0 - 0.4, 0.5), (index * 2.0, 0.5), "#555555")
    legend = "outlined: a collective    filled: computed    blue: a matrix product"
    axes.text(0, -0.45, legend, fontsize=8, color="#555555")
    axes.set_xlim(-0.2, len(steps) * 2.0 - 0.2)
    axes.set_ylim(-0.7, 1.2)
    axes.axis("off")
    figure.savefig(PLOTS / "one_chunk.png", dpi=120)
    pyplot.close(figure)


Slices = tuple[tuple[float, float], ...]
FULL: Slices = ((0, 1),) * 4
HALVES: Slices = ((0, 0.5), (0.5, 1)) * 2
QUARTERS: Slices = tuple((rank / 4, (rank + 1) / 4) for rank in range(4))
# Halves by the tensor-parallel axis, which is the last; then the first or second half of that.
QUARTERS_OF_HALVES: Slices = ((0, 0.25), (0.5, 0.75), (0.25, 0.5), (0.75, 1))
LAYOUTS: tuple[tuple[str, str, tuple[Slices, Slices, Slices], str], ...] = (
    ("DDP, ZeRO-0 to 2", "ABCD", (FULL, FULL, FULL), ""),
    ("FSDP1, FSDP2, ZeRO-3", "ABCD", (QUARTERS, FULL, QUARTERS), "the framework all-gathers and reduces"),
    ("HSDP: 2 replicas of 2 shards", "ABCD", (HALVES, FULL, HALVES), "all-gathered in a replica, reduced over both"),
    ("FSDP2, vocab-parallel lm_head", "ABCD", (QUARTERS, QUARTERS, QUARTERS), "token exchange"),
    ("TP", "AAAA", (QUARTERS, QUARTERS, QUARTERS), "all-gather of softmax statistics"),
    (
        "FSDP2 x TP, 2 x 2",
        "AABB",
        (QUARTERS_OF_HALVES, HALVES, QUARTERS_OF_HALVES),
        "all-gathered over shards, statistics over TP",
    ),
)
"""name, tokens of each of four ranks, its rows: at rest, in the call, of the gradient; a remark"""


def layouts() -> None:
    """Rows of lm_head on each of four ranks."""
    figure, grid = pyplot.subplots(2, 3, figsize=(10, 5.4), layout="constrained")
    for axes, (name, tokens, moments, remark) in zip(grid.flat, LAYOUTS, strict=True):
        axes.set_title(name, fontsize=10)
        for moment, (title, slices) in enumerate(zip(("at rest", "in the call", "gradient"), moments, strict=True)):
            left = moment * 5.2
            axes.text(left + 2, 4.2, title, ha="center", fontsize=8, color="#555555")
            for rank, (start, end) in enumerate(slices):
                place = (left + rank * 1.05, 4 * (1 - end))
                axes.add_patch(Rectangle((left + rank * 1.05, 0), 0.85, 4, facecolor="none", edgecolor="#bbbbbb"))
                axes.add_patch(Rectangle(place, 0.85, 4 * (end - start), facecolor=WEIGHT))
                axes.text(left + rank * 1.05 + 0.42, -0.55, tokens[rank], ha="center", fontsize=8, color=TOKENS)
        axes.text(7.3, -1.35, remark, ha="center", fontsize=8, color="#555555")
        axes.set_xlim(-0.3, 15)
        axes.set_ylim(-1.6, 4.8)
        axes.axis("off")
    figure.savefig(PLOTS / "head_by_layout.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    layouts()
    ways()
    chunk()
