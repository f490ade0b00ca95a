"""One style for all pictures of results: horizontal bars, liger_dist in blue and the others in grey.

``python -m benchmarks.plots`` puts all pictures of docs/plots on one contact sheet.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS, PEER, REFERENCE, INK = "#0072B2", "#8c8c8c", "#d0d0d0", "#333333"
REFERENCES = ("three GEMMs", "bare GEMMs", "copy")
"""beginnings of the labels of bars that are no library's"""
LARGEST = 10
"""bars of a picture, at most"""
WIDTH, BAR, DPI = 9.0, 0.42, 120
"""width of a picture and height of a bar, in inches"""


def digits(value: float) -> str:
    """Formats a number with three digits, and without an exponent."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.{max(0, min(3, 2 - math.floor(math.log10(abs(rounded))))) if rounded else 0}f}"


@dataclass(frozen=True)
class Panel:
    """Values of all bars in one unit."""

    axis: str
    """what is measured, with its unit"""
    values: tuple[float | str, ...]
    """in the order of the labels; a text, such as ``out of memory``, where nothing was measured"""


@dataclass(frozen=True)
class Chart:
    """Panels beside each other that share their labels."""

    title: str
    labels: tuple[str, ...]
    panels: tuple[Panel, ...]
    caption: str
    """card and date, and which direction is better"""
    line: float | None = None
    """value at which a line is drawn, such as 1 for ratios"""

    def sorted(self, *, descending: bool = False) -> Chart:
        """Returns the chart with its bars in the order of the first panel's values, best first; texts come last."""

        def place(index: int) -> float:
            value = self.panels[0].values[index]
            return math.inf if isinstance(value, str) else -value if descending else value

        order = sorted(range(len(self.labels)), key=place)
        panels = tuple(Panel(panel.axis, tuple(panel.values[index] for index in order)) for panel in self.panels)
        return Chart(self.title, tuple(self.labels[index] for index in order), panels, self.caption, self.line)

    def bars(self) -> list[str]:
        """Lists all bars: axis, label and value."""
        return [
            f"{panel.axis}: {label}: {value if isinstance(value, str) else digits(value)}"
            for panel in self.panels
            for label, value in zip(self.labels, panel.values, strict=True)
        ]

    def note(self) -> str:
        """Returns what the picture shows as text, which its file holds too."""
        return "\n".join([self.title, *self.bars(), self.caption])


def colour_of(label: str) -> str:
    """Returns the colour of a bar."""
    return OURS if label.startswith("liger_dist") else REFERENCE if label.startswith(REFERENCES) else PEER


def draw(chart: Chart, path: Path, *, is_ours: bool = False) -> None:
    """Draws a chart into a PNG; ``is_ours``: all bars are liger_dist's."""
    import matplotlib.pyplot as plt

    height = BAR * len(chart.labels) + 1.35
    figure, line = plt.subplots(1, len(chart.panels), figsize=(WIDTH, height), squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06)
    for place, (axes, panel) in enumerate(zip(line[0], chart.panels, strict=True)):
        numbers = [0.0 if isinstance(value, str) else value for value in panel.values]
        colours = [OURS if is_ours else colour_of(label) for label in chart.labels]
        axes.barh(range(len(numbers)), numbers, 0.7, color=colours)
        end = 1.2 * max([*numbers, chart.line or 0.0])
        for index, value in enumerate(panel.values):
            text = value if isinstance(value, str) else digits(value)
            place_x, box = numbers[index] + end * 0.015, {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.text(place_x, index, text, va="center", fontsize=9, color=INK, bbox=box)
        if chart.line is not None:
            axes.axvline(chart.line, color=INK, linewidth=0.9)
        axes.set(xlim=(0, end), ylim=(len(numbers) - 0.45, -0.55))
        axes.set_xlabel(panel.axis, fontsize=9.5, color=INK)
        axes.set_yticks(range(len(numbers)), chart.labels if place == 0 else [""] * len(numbers), fontsize=9.5)
        axes.locator_params(axis="x", nbins=5)
        axes.tick_params(length=0, labelcolor=INK)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(axis="x", color="#e8e8e8")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(chart.title, fontsize=11, x=0.01, ha="left", color=INK)
    figure.supxlabel(chart.caption, fontsize=8.5, x=0.01, ha="left", color="#666666")
    figure.savefig(path, dpi=DPI, metadata={"Description": chart.note()}, facecolor="white")
    plt.close(figure)


def contact_sheet(pictures: Sequence[Path], path: Path, *, columns: int = 3, width: int = 900) -> None:
    """Puts pictures beside each other, scaled to one width, with their names."""
    from PIL import Image, ImageDraw

    margin, scaled = 24, []
    for path_of_one in pictures:
        with Image.open(path_of_one) as opened:
            size = (width, round(opened.height * width / opened.width))
            scaled.append((path_of_one.name, opened.convert("RGB").resize(size)))
    heights = [0] * columns
    places = []
    for _, image in scaled:
        column = heights.index(min(heights))
        places.append((column * (width + margin), heights[column]))
        heights[column] += image.height + 2 * margin
    sheet = Image.new("RGB", (columns * (width + margin), max(heights)), "#bbbbbb")
    for (name, image), (left, top) in zip(scaled, places, strict=True):
        ImageDraw.Draw(sheet).text((left + 4, top + 6), name, fill="black")
        sheet.paste(image, (left, top + margin))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=contact_sheet.__doc__)
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "plots", help="folder of the pictures")
    parser.add_argument("--sheet", type=Path, default=ROOT / "build" / "contact_sheet.png", help="PNG that is written")
    given = parser.parse_args()
    contact_sheet(sorted(given.plots.glob("*.png")), given.sheet)
    print(given.sheet)


if __name__ == "__main__":
    main()
