"""Writes docs/benchmarks.md, the pages of docs/benchmarks, their pictures and the table of README.md, from the files in
``benchmarks/results``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .harness import RESULTS
from .overview import (
    HEADER,
    MEMORY,
    OF_A_CARD,
    card_of,
    cards_of,
    cells,
    comparisons,
    figure_of,
    newest_first,
    overview_chart,
    pictured,
    problems_of,
    same_problem,
    sentence,
)
from .pages import PAGES, Group, Page, Picture
from .plots import LARGEST, Chart, Panel, digits, draw
from .readme import renewed

ROOT = Path(__file__).parent.parent
DOCS, README = ROOT / "docs", ROOT / "README.md"
Problems = dict[str, dict[str, Any]]
FIRST = """# Benchmarks

![Time and memory of five workloads, divided by those of the fastest other library](plots/overview.png)

Time and peak memory of liger_dist, with its default options, beside the fastest other library that computes the same.
`time` and `memory` are ratios to it: below 1, liger_dist is faster or needs less. `memory, to the leanest` is the ratio
to the way that needs least memory, where that is another one. † is memory above the weights, and of a loss above inputs
and gradients. The picture shows five workloads; a name leads to its page, and `benchmarks/results` has all rows.

TABLE
LINKSOlder results, which newer ones of the same problem replace, are in the [archive](benchmarks/archive.md).

## Conditions

Implementations run in turn, call by call, in an order that each round draws anew, the losses behind 20 ms of GEMMs; a
time is the median of the rounds, whose spread (p20, p80) and clocks are in `benchmarks/results`. Ratios are to what was
measured in the same rounds. Weights are random, and layers are compiled where a name says so. Rows in which the
documents of a packed row read each other compute something else, and are left out of this table. `make benchmarks-age`
lists the commits that changed the measured code since.

## Run them

On a GPU, with the other libraries installed:

```text
pip install --editable ".[benchmarks]"
python -m benchmarks.linear_cross_entropy   # a page has the name of its file; --help lists its options
make benchmarks-page                        # writes these pages and pictures from benchmarks/results
```

```{toctree}
:hidden:
:glob:

benchmarks/*
```
"""
ARCHIVE = """# Archive of benchmarks

Results of older cards and older runs, which a newer result of the same problem replaces on [the other
pages](../benchmarks.md).

"""
RELEASES = ("torch", "transformers", "liger-kernel")
"""packages whose versions stand on a page"""
TITLES = {
    "GiB above the weights": "GiB",
    "extra MiB": "MiB",
    "peak MiB": "MiB",
    "GPU busy ms": "GPU ms",
    "computing ms": "computing",
    "communicating ms": "communicating",
    "waiting ms": "waiting",
    "of 4 bytes %": "% of a copy",
}
"""columns whose titles are not the names of their figures"""
AXES = {
    "ms": "time, ms",
    "ratio": "time divided by bare GEMMs",
    "peak GiB": "peak memory, GiB",
    "GiB above the weights": "memory above the weights, GiB",
    "GiB": "memory above the weights, GiB",
    "extra MiB": "memory beyond inputs and gradients, MiB",
    "peak MiB": "memory beyond inputs and weights, MiB",
    "waiting ms": "time without a kernel, ms",
    "forward and backward ms": "ms",
}
"""titles of axes"""


def read(name: str, directory: Path) -> Problems:
    """Reads the tables of one results file, newest first; none when it is not there."""
    problems = problems_of(directory / f"{name}.json")
    return {table: problems[table] for table in newest_first(problems)}


def is_archived(page: Page, problems: Problems, table: str) -> bool:
    """True if a newer table of the same problem, or one of another file, replaces a table."""
    return bool(re.search(page.archived, table)) or same_problem(problems, table)[0] != table


def failure_of(row: dict[str, Any]) -> str:
    """Returns a failure in two words."""
    if "OutOfMemory" in row["failure"]:
        return "out of memory"
    return "" if row["failure"].startswith("ModuleNotFound") else "not supported"


def cell(row: dict[str, Any] | None, figure: str) -> str:
    """Formats a figure; empty for what was not measured."""
    value = None if row is None else figure_of(row, figure)
    if value is None or isinstance(value, str):
        return value or ""
    if figure.endswith(("error", "difference")):
        return f"{value:.1e}"
    return f"{value:.0%}" if figure == "utilisation" else digits(value)


def joined(row: dict[str, Any] | None, figures: Sequence[str]) -> str:
    """Formats several figures in one cell."""
    if row is not None and row["failure"]:
        return failure_of(row)
    return " · ".join(filter(None, (cell(row, figure) for figure in figures)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table without the columns that have no cell."""
    kept = [index for index in range(len(header)) if index == 0 or any(row[index] for row in rows)]
    first, *rest = ("| " + " | ".join(line[index] for index in kept) + " |" for line in (header, *rows))
    return "\n".join([first, "|---" * len(kept) + "|", *rest]) + "\n"


def measured(name: str, problem: dict[str, Any]) -> str:
    """Says on which cards and when a table was measured."""
    environment = problem["environment"]
    commit = f", {environment['commit']}" if environment.get("commit") else ""
    return f"{cards_of(name, environment)}, {environment['date']}{commit}"


def heading(name: str) -> str:
    """Returns the name of a table without its card, which stands below."""
    return re.sub(r" on (\d+)$", r" on \1 GPUs", OF_A_CARD.sub("", name)).replace(" 1 GPUs", " one GPU")


def shown(page: Page, problem: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the rows of a table that its page shows, by name."""
    rows = {re.sub(r"^three GEMMs,.*", "three GEMMs", row["name"]): row for row in problem["rows"]}
    return {name: row for name, row in rows.items() if not re.search(page.skipped, name)}


def each_table(page: Page, group: Group, problems: Problems) -> Iterator[str]:
    """Yields a heading and a table for each problem."""
    for name, problem in problems.items():
        rows = []
        for way, row in shown(page, problem).items():
            first, *rest = group.figures
            rows.append([way, failure_of(row) if row["failure"] else cell(row, first)])
            rows[-1] += ["" if row["failure"] else cell(row, figure) for figure in rest]
        yield f"## {heading(name)}\n"
        yield f"{measured(name, problem)}:\n"
        yield table(("", *(TITLES.get(figure, figure) for figure in group.figures)), rows)


def joint_table(page: Page, group: Group, problems: Problems) -> Iterator[str]:
    """Yields a heading and one table of several problems."""
    by_problem = {name: shown(page, problem) for name, problem in problems.items()}
    ways = list(dict.fromkeys(way for rows in by_problem.values() for way in rows))
    lines = [[way, *(joined(rows.get(way), group.figures) for rows in by_problem.values())] for way in ways]
    lines = [["", *(heading(name) for name in problems)], *(line for line in lines if any(line[1:]))]
    notes = ["measured", *(measured(name, problem).split(" ", 1)[1] for name, problem in problems.items())]
    is_one = len(set(notes)) == 2
    if not is_one:
        lines.append(notes)
    if group.layout == "problems":
        lines = [list(column) for column in zip(*lines, strict=True)]
    yield f"## {group.title}\n"
    if is_one:
        yield f"{notes[1]}:\n"
    yield table(lines[0], lines[1:])


def tables(page: Page, problems: Problems) -> Iterator[str]:
    """Yields the tables of all groups; tables of no group come last, in the form of the first group."""
    rest = dict(problems)
    for group in page.groups:
        of_group = {name: problem for name, problem in problems.items() if re.search(group.of, name)}
        rest = {name: problem for name, problem in rest.items() if name not in of_group}
        if of_group:
            yield from (each_table if group.layout == "each" else joint_table)(page, group, of_group)
    yield from each_table(page, Group(page.groups[0].figures), rest)


def conditions(problems: Problems) -> str:
    """Names the releases that a page was measured with, and the spread of the rounds of its rows."""
    found: dict[str, set[str]] = {}
    for problem in problems.values():
        for name, version in problem["environment"]["versions"].items():
            found.setdefault(name, set()).add(version)
    releases = ", ".join(f"{name} {' and '.join(sorted(found[name]))}" for name in RELEASES if name in found)
    rows = [row for problem in problems.values() for row in problem["rows"] if not row["failure"]]
    wide = sorted(row["p80_ms"] / row["p20_ms"] - 1 for row in rows if row["p20_ms"] > 0)
    spread = f"; p20 to p80 within {wide[len(wide) // 2]:.0%} (median row), {wide[-1]:.0%} at most" if wide else ""
    return f"Measured with {releases}{spread}.\n"


def page_of(results: str, directory: Path) -> Page:
    """Returns what a page shows; a table for each problem if nothing is said of its results."""
    named = {page.results: page for page in PAGES}
    figures = {
        name: None
        for problem in read(results, directory).values()
        for row in problem["rows"]
        for name in row["figures"]
    }
    default = Page(results, results.replace("_", " ").capitalize(), "", (Group(("ms", *figures)),))
    return named.get(results, default)


def current(page: Page, directory: Path) -> Problems:
    """Returns the tables that a page shows."""
    problems = read(page.results, directory)
    kept = {name: problem for name, problem in problems.items() if not is_archived(page, problems, name)}
    return {name: problem for name, problem in kept.items() if not re.search(page.hidden, name)}


def chart_of(page: Page, directory: Path) -> Chart | None:
    """Returns the picture of a page; None if its tables lack the rows."""
    problems = current(page, directory)
    first = next(iter(problems), "")
    memory = next((name for name in MEMORY for row in problems[first]["rows"] if name in row["figures"]), None)
    picture = page.picture or Picture(f"{page.title}: {first}", (first,), ("ms", *([memory] if memory else [])))
    newest = [next(iter(same_problem(problems, name)), "") for name in picture.tables]
    by_table = {name: shown(page, problems[name]) for name in newest if name}
    if not by_table:
        return None
    panels = [(name, figure) for name in by_table for figure in picture.figures]
    present = next(iter(by_table.values()))
    rows = [way for way in picture.rows or present if way in present][: LARGEST // len(panels)]
    values = []
    for name, figure in panels:
        axis = AXES.get(figure, figure)
        of = [by_table[name].get(way) for way in rows]
        found = [failure_of(row) if row and row["failure"] else figure_of(row, figure) if row else None for row in of]
        title = f"{name}, {axis}" if len(by_table) > 1 else axis
        values.append(Panel(title, tuple("not measured" if value in (None, "") else value for value in found)))
    is_speed = picture.figures[0].endswith("TB/s")
    place = measured(newest[0], problems[newest[0]])
    note = f"{place}. {'Longer' if is_speed else 'Shorter'} is better."
    labels = tuple(picture.labels.get(way, way) for way in rows)
    return Chart(picture.title, labels, tuple(values), note).sorted(descending=is_speed)


def charts(directory: Path) -> dict[str, Chart]:
    """Returns all pictures of the results, by the name of their file."""
    compared, _ = comparisons(directory)
    found = {"overview": overview_chart(compared)} if any(pictured(compared)) else {}
    for results in names(directory):
        chart = chart_of(page_of(results, directory), directory)
        if chart is not None:
            found[results] = chart
    return found


def names(directory: Path) -> list[str]:
    """Lists the results that there are, in the order of the pages; unknown ones come last."""
    known = [page.results for page in PAGES if (directory / f"{page.results}.json").exists()]
    return known + [path.stem for path in sorted(directory.glob("*.json")) if path.stem not in known]


def gain(page: Page, directory: Path) -> str:
    """Says in a sentence what a reader gains; of results without another library, what their last rows take."""
    compared = next((each for each in comparisons(directory)[0] if each.results == page.results), None)
    if compared is not None:
        return sentence(compared)
    problems = current(page, directory)
    name, problem = next(iter(problems.items()))
    row = next(
        (row for row in problem["rows"] if row["name"].startswith(("liger_dist", "distillation"))), problem["rows"][0]
    )
    ratio = figure_of(row, "ratio")
    beside = f", {digits(ratio)} times what it is compared with" if isinstance(ratio, float) else ""
    where = f"{heading(name)} ({card_of(problem['environment'])})"
    return f"{where}: {row['name']} takes {digits(row['median_ms'])} ms{beside}."


def workload_page(page: Page, directory: Path) -> str:
    """Returns one page: picture, gain, text, tables, versions."""
    problems = current(page, directory)
    chart = chart_of(page, directory)
    parts = [f"# {page.title}\n"]
    parts += [f"![{chart.title}](../plots/{page.results}.png)\n"] if chart else []
    parts += [gain(page, directory) + "\n", page.text + "\n", *tables(page, problems)]
    return "\n".join([*parts, conditions(problems)])


def archive_page(directory: Path) -> str:
    """Returns the page of results that newer ones replace."""
    parts = []
    for results in names(directory):
        page, problems = page_of(results, directory), read(results, directory)
        old = {name: problem for name, problem in problems.items() if is_archived(page, problems, name)}
        if old:
            parts += [f"## {page.title}\n", f"Replaced by [newer results]({results}.md).\n"]
            parts += [re.sub(r"^## ", "### ", part) for part in tables(page, old)]
    return ARCHIVE + "\n".join(parts)


def first_page(directory: Path) -> str:
    """Returns docs/benchmarks.md."""
    compared, _ = comparisons(directory)
    linked = {each.results for each in compared}
    others = [page_of(name, directory) for name in names(directory) if name not in linked]
    links = ", ".join(f"[{page.title}](benchmarks/{page.results}.md)" for page in others)
    text = f"Without another library: {links}. " if others else ""
    return FIRST.replace("TABLE", table(HEADER, [cells(each) for each in compared])).replace("LINKS", text)


def pages(directory: Path) -> dict[str, str]:
    """Returns all pages of the results, by their path in docs."""
    found = {"benchmarks.md": first_page(directory), "benchmarks/archive.md": archive_page(directory)}
    for name in names(directory):
        found[f"benchmarks/{name}.md"] = workload_page(page_of(name, directory), directory)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder that the pages are written to")
    given = parser.parse_args()
    for folder in ("plots", "benchmarks"):
        (given.docs / folder).mkdir(parents=True, exist_ok=True)
    for name, chart in charts(given.results).items():
        draw(chart, given.docs / "plots" / f"{name}.png", is_ours=name == "overview")
    for line in comparisons(given.results)[1]:
        print("not in the overview:", line, file=sys.stderr)
    for path, text in pages(given.results).items():
        (given.docs / path).write_text(text)
    if given.results == RESULTS and given.docs == DOCS:
        README.write_text(renewed(README.read_text(), given.results))


if __name__ == "__main__":
    main()
