"""Chooses the tests that a change needs, from a map of what each test ran.

    python tests_multi_gpu/affected.py read FOLDER     write affected.json from a recording (make record)
    python tests_multi_gpu/affected.py choose          list tests for the changes of the working tree
    python tests_multi_gpu/affected.py choose REVISION list tests for the changes since a commit

The map holds, for each function of the code, some tests that ran its lines: a function is told by its name, so a map
stays useful when lines move. Names that are no longer there are passed over. A new or unknown function gets the tests
of its file.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MAP = Path(__file__).parent / "affected.json"
BUDGET = 150.0
"""core-seconds of chosen tests: two minutes on two cores, with the start of both workers"""
COVERS = 3
"""tests kept for each line of a function, of different test functions where there are as many"""
KEPT = 12
"""tests kept for a function beside those"""
OWN_FILES = 3
"""test files kept for a file: those whose tests run little else"""
MODULE = "<module>"
"""name of a file's lines outside of functions"""
CELLS = "tests_multi_gpu/conformance/test_conformance.py::"
ENGINES = {
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "vocab_parallel": "vocab-parallel head",
    "tensor_parallel": "TP",
    "deepspeed": "ZeRO",
    "ddp": "DDP",
    "single": "one process",
}
"""a module or package of liger_dist/sharding, and words of the names of its cells"""


# --- the map, from a recording ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """What one run saw."""

    seconds: dict[str, float]
    """by test"""
    lines: dict[str, dict[str, set[int]]]
    """by file of the repository and test"""
    reads: dict[str, set[str]]
    """by file that is no Python, its readers"""


def read_recording(folder: Path) -> Recorded:
    """Reads what ``recording.py`` wrote."""
    import coverage

    seconds: dict[str, float] = {}
    for path in folder.glob("durations.*"):
        for line in path.read_text().splitlines():
            test, duration = json.loads(line)
            seconds[test] = duration
    reads: defaultdict[str, set[str]] = defaultdict(set)
    for path in folder.glob("opened.*"):
        for line in path.read_text().splitlines():
            test, file = json.loads(line)
            if test in seconds:
                reads[file].add(test)
    lines: dict[str, dict[str, set[int]]] = {}
    for path in folder.glob("lines*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            if not name.endswith(".py") or not Path(name).is_relative_to(ROOT):
                continue  # A block of a page, or a copy of the code that a test has made.
            of_file = lines.setdefault(str(Path(name).relative_to(ROOT)), {})
            for line, tests in data.contexts_by_lineno(name).items():
                for test in tests:
                    if test in seconds:
                        of_file.setdefault(test, set()).add(line)
    return Recorded(seconds, lines, dict(reads))


def functions_of(source: str) -> dict[str, tuple[int, int]]:
    """First and last line of the body of each outermost function and method, by its qualified name."""
    found: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                body = child.body[1:] if ast.get_docstring(child) is not None and len(child.body) > 1 else child.body
                found[prefix + child.name] = (body[0].lineno, child.end_lineno or child.lineno)
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def write_map(recorded: Recorded) -> None:
    breadth = dict.fromkeys(recorded.seconds, 0)
    for by_test in recorded.lines.values():
        for test, lines in by_test.items():
            breadth[test] += len(lines)

    def cost(test: str) -> float:
        """Cheap and specific tests first."""
        return max(recorded.seconds[test], 0.05) + breadth[test] / 2000

    functions: dict[str, dict[str, list[str]]] = {}
    own: dict[str, list[str]] = {}
    for file, by_test in sorted(recorded.lines.items()):
        if file.startswith("tests_multi_gpu/") and Path(file).name.startswith("test_"):
            continue
        own[file] = _own_files(by_test, breadth)
        of_file = {
            name: tests
            for name, (first, last) in functions_of((ROOT / file).read_text()).items()
            if (tests := _keep(by_test, first, last, cost))
        }
        if of_file:
            functions[file] = of_file
    reads = {
        file: sorted(tests, key=cost)[:KEPT]
        for file, tests in sorted(recorded.reads.items())
        if (ROOT / file).is_file()
    }
    by_test_file: defaultdict[str, float] = defaultdict(float)
    for test, duration in recorded.seconds.items():
        by_test_file[test.partition("::")[0]] += duration
    kept = sorted({test for of_file in functions.values() for tests in of_file.values() for test in tests}
                  | {test for tests in reads.values() for test in tests})  # fmt: skip
    number = {test: place for place, test in enumerate(kept)}
    numbered = {file: {name: [number[t] for t in tests] for name, tests in names.items()}
                for file, names in functions.items()}  # fmt: skip
    content = {
        "seconds": {file: round(duration, 1) for file, duration in sorted(by_test_file.items())},
        "own": {file: own[file] for file in functions},
        "functions": numbered,
        "reads": {file: [number[test] for test in tests] for file, tests in reads.items()},
        "tests": [[test, round(recorded.seconds[test], 2)] for test in kept],
    }
    MAP.write_text(_one_line_each(content))


def _keep(by_test: dict[str, set[int]], first: int, last: int, cost: Any) -> list[str]:
    """Some tests of a function: each of its lines is run by :data:`COVERS` of them, the cheapest first."""
    ran = {
        test: lines for test, all_lines in by_test.items() if (lines := {n for n in all_lines if first <= n <= last})
    }
    covered: defaultdict[int, int] = defaultdict(int)
    kept: list[str] = []
    seen: set[str] = set()
    ordered = sorted(ran, key=cost)
    for is_second_pass in (False, True):
        for test in ordered:
            name = test.partition("[")[0]
            if test in kept or (name in seen and not is_second_pass):
                continue
            if any(covered[line] < COVERS for line in ran[test]) or (len(kept) < KEPT and not is_second_pass):
                kept.append(test)
                seen.add(name)
                for line in ran[test]:
                    covered[line] += 1
    return kept


def _own_files(by_test: dict[str, set[int]], breadth: dict[str, int]) -> list[str]:
    """The test files whose tests run little else than one file: those with the largest shares of its lines."""
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for test, lines in by_test.items():
        shares[test.partition("::")[0]].append(len(lines) / breadth[test])
    return sorted(shares, key=lambda file: -sum(shares[file]) / len(shares[file]))[:OWN_FILES]


def _one_line_each(content: dict[str, Any]) -> str:
    """JSON with a line for each test, file or function, so that a diff shows what has changed."""
    parts = []
    for section, value in content.items():
        if isinstance(value, list):
            body = ",\n".join("  " + json.dumps(entry) for entry in value)
            parts.append(f' "{section}": [\n{body}\n ]')
            continue
        entries = []
        for key, entry in value.items():
            if isinstance(entry, dict):
                inner = ",\n".join(f"   {json.dumps(name)}: {json.dumps(tests)}" for name, tests in entry.items())
                entries.append(f"  {json.dumps(key)}: {{\n{inner}\n  }}")
            else:
                entries.append(f"  {json.dumps(key)}: {json.dumps(entry)}")
        parts.append(f' "{section}": {{\n' + ",\n".join(entries) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_map() -> dict[str, Any]:
    if not MAP.is_file():
        return {"seconds": {}, "own": {}, "functions": {}, "reads": {}, "tests": []}
    content: dict[str, Any] = json.loads(MAP.read_text())
    return content


# --- the tests of a change ----------------------------------------------------------------------------------------


def changed_lines(since: str) -> dict[str, set[int] | None]:
    """Lines of the working tree that differ from a commit, by file; None for a file that is new or not Python."""
    changes: dict[str, set[int] | None] = {}
    file = ""
    for line in _git("diff", "--unified=0", "--no-renames", "--no-color", since):
        if line.startswith("+++ "):
            file = line[6:] if line != "+++ /dev/null" else ""
            if file:
                changes[file] = set() if file.endswith(".py") else None
        elif line.startswith("--- ") and line != "--- /dev/null":
            file = line[6:]
        elif line.startswith("@@") and file in changes and changes[file] is not None:
            start, _, count = line.split()[2][1:].partition(",")
            # Lines that are gone count as the one before them.
            changed = range(int(start), int(start) + max(int(count or 1), 1))
            changes[file].update(changed)  # type: ignore[union-attr]
    for new in _git("ls-files", "--others", "--exclude-standard"):
        changes[new] = None
    return changes


def changed_functions(file: str, lines: set[int] | None) -> set[str]:
    """Names of functions with a changed line; :data:`MODULE` for lines outside of all."""
    if not (ROOT / file).is_file():
        return {MODULE}
    found = functions_of((ROOT / file).read_text())
    if lines is None:
        return {*found, MODULE}
    names = set()
    for line in lines:
        inside = [name for name, (first, last) in found.items() if first - 8 <= line <= last]
        # Of those whose signature or body may hold the line, the one that ends first.
        names.add(min(inside, key=lambda name: found[name][1]) if inside else MODULE)
    return names


def tests_of(changes: dict[str, set[int] | None], known: dict[str, Any]) -> list[str]:
    """Names of tests and test files, the most specific first, within :data:`BUDGET`; what is left of it goes to further
    tests of the test files that run little else than the changed files."""
    listed = known["tests"]
    queues: list[list[str]] = []
    further: list[list[str]] = []
    chosen: list[str] = []
    for file, lines in changes.items():
        stem = Path(file).stem
        if file.startswith("tests_multi_gpu/") and stem.startswith("test_"):
            names = changed_functions(file, lines)
            if (ROOT / file).is_file():
                tests = {name for name in names if name.startswith("test_")}
                chosen += [f"{file}::{name}" for name in sorted(tests)] if tests and tests == names else [file]
            continue
        if file in known["reads"]:
            queues.append([listed[number][0] for number in known["reads"][file]])
        functions = known["functions"].get(file)
        if functions is None:
            continue
        names = changed_functions(file, lines)
        known_names = [name for name in sorted(names) if name in functions]
        if len(known_names) < len(names):
            # A module's own lines, and functions that are new: some tests of every function.
            queues += [[listed[number][0] for number in numbers[:2]] for numbers in functions.values()]
        queues += [[listed[number][0] for number in functions[name]] for name in known_names]
        further += [
            [test for test, _ in listed if test.startswith(f"{own}::")] for own in known.get("own", {}).get(file, ())
        ]
        engine = file.removeprefix("liger_dist/sharding/").removesuffix(".py").partition("/")[0]
        if engine in ENGINES:
            queues.append([test for test, _ in listed if test.startswith(CELLS) and ENGINES[engine] in test])
    seconds = dict(map(tuple, listed))
    left = BUDGET
    for test in (*_in_turn(queues), *_in_turn(further)):
        if test not in chosen and left - seconds[test] >= 0:
            chosen.append(test)
            left -= seconds[test]
    return chosen


def _in_turn(queues: list[list[str]]) -> Iterator[str]:
    """One of each queue, then the next of each."""
    for place in range(max(map(len, queues), default=0)):
        for queue in queues:
            if place < len(queue):
                yield queue[place]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def main(arguments: Iterable[str]) -> None:
    command, *rest = arguments
    if command == "read":
        write_map(read_recording(Path(rest[0])))
        return
    since = rest[0] if rest else "HEAD"
    for test in tests_of(changed_lines(since), read_map()):
        print(test)


if __name__ == "__main__":
    main(sys.argv[1:])
