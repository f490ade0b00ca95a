"""Which tests run in which tier: a mark beside the case says it.

A case without a mark runs in ``make test``.

- ``@pytest.mark.smoke`` adds the first of a test's cases to ``make smoke``; on a parameter, every case with it.
- ``@pytest.mark.nightly`` leaves a test to ``make test-all``; on a parameter, every case with it.
- ``@pytest.mark.nightly(strategy=["fsdp1"])`` leaves the cases in which a parameter has one of these values.
- ``@pytest.mark.cover("values")`` keeps as few cases in ``make test`` as have every value of every parameter,
  ``cover("pairs")`` as have every pair of values of two parameters; the others are nightly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

SMOKE, NIGHTLY = "smoke", "nightly"
T = TypeVar("T")


def cover(cases: Sequence[T], parts: Sequence[Iterable[Hashable]]) -> list[T]:
    """A few of ``cases``, in their order, that have every part that any of them has; ``parts`` are those of each."""
    sets = [set(of_case) for of_case in parts]
    missing, chosen = set[Hashable]().union(*sets), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda place: len(sets[place] & missing))
        chosen.add(best)
        missing -= sets[best]
    return [case for place, case in enumerate(cases) if place in chosen]


def pairs(factors: dict[str, Hashable]) -> list[Hashable]:
    """Every pair of values of two factors."""
    return list(combinations(sorted(factors.items(), key=lambda item: item[0]), 2))


def mark_tiers(items: list[pytest.Item]) -> None:
    """Turns the marks of tests with several cases into marks of the cases."""
    by_test: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    for cases in by_test.values():
        _apply_values(cases)
        _apply_cover(cases)
        _apply_smoke(cases)


def _apply_values(cases: list[pytest.Item]) -> None:
    """Takes ``nightly(name=values)`` off cases with other values.

    Raises:
        pytest.UsageError: no case, or every case has such a value.
    """
    marks = [mark for mark in cases[0].iter_markers(NIGHTLY) if mark.kwargs]
    if not marks:
        return
    for mark in marks:
        number = 0
        for case in cases:
            values = _values(case)
            if all(str(values[name]) in map(str, listed) for name, listed in mark.kwargs.items()):
                number += 1
            else:
                case.own_markers = [own for own in case.own_markers if own != mark]
        if len(cases) > 1 and number in (0, len(cases)):
            raise pytest.UsageError(f"{cases[0].nodeid}: {mark} leaves {number} of {len(cases)} cases to make test-all")


def _apply_cover(cases: list[pytest.Item]) -> None:
    mark = cases[0].get_closest_marker("cover")
    if mark is None:
        return
    (of,) = mark.args
    usual = [case for case in cases if case.get_closest_marker(NIGHTLY) is None]
    factors = [{name: str(value) for name, value in _values(case).items()} for case in usual]
    parts = {"values": [list(of_case.items()) for of_case in factors], "pairs": [pairs(f) for f in factors]}[of]
    kept = set(cover([case.nodeid for case in usual], parts))
    for case in usual:
        if case.nodeid not in kept:
            case.add_marker(NIGHTLY)


def _apply_smoke(cases: list[pytest.Item]) -> None:
    """Of a marked test, the first case of ``make test`` keeps the mark."""
    is_first = True
    for case in cases:
        on_test = SMOKE in {mark.name for mark in getattr(getattr(case, "function", None), "pytestmark", ())}
        is_nightly = case.get_closest_marker(NIGHTLY) is not None
        if is_nightly or (on_test and not is_first and not _has_marked_parameter(case)):
            case.own_markers = [mark for mark in case.own_markers if mark.name != SMOKE]
        elif on_test:
            is_first = False


def _has_marked_parameter(case: Any) -> bool:
    return any(mark.name == SMOKE for mark in case.callspec.marks)


def _values(case: Any) -> dict[str, Any]:
    """Parameters of a case by name; functions by theirs."""
    return {name: getattr(value, "__name__", value) for name, value in case.callspec.params.items()}
