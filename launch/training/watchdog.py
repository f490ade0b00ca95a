"""Finds out when no step ends any more, names the rank that the others wait for, and ends the program."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from .distributed import (
    STORE_LIMIT,
    answer_of,
    is_first_to_report,
    on_sign_of_life,
    own_store,
    rank,
    say_error,
    speaks_without_store,
    stop_launcher_without,
    world_size,
)

T = TypeVar("T")
PHASES = (
    "preparing",
    "loading a checkpoint",
    "reading data",
    "computing",
    "evaluating",
    "writing a checkpoint",
)
"""of a step, in their order"""
SETUP = ("preparing", "loading a checkpoint")
LEAST_FOR_SETUP = 60.0
"""seconds that these have, however short the limit"""
NOTHING: dict[str, Any] = {"beats": -1, "place": [0, 0], "stack": [], "node": -1}
"""of a rank that has not begun"""
ANSWER_LIMIT = 5.0
"""seconds for the store to answer, where it is asked again and again"""
BEAT = 1.0
"""seconds between two signs of life, or a quarter of the limit if that is shorter"""
KEY = "liger_dist/watchdog"
"""of the store: what each rank told last"""


class Watchdog:
    """A thread that tells the others through torchrun's store where this rank is. Collectives would not do: they are
    what a stuck rank keeps the others in."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._place = (0, 0)
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        # The main thread may be waiting on the other one.
        self._store = own_store()

    def at(self, step: int, phase: str) -> None:
        """Notes where this rank is."""
        self._place = (step, PHASES.index(phase))
        self._note_progress()

    def _note_progress(self) -> None:
        self._since = time.monotonic()

    def _is_late(self) -> bool:
        is_setup = PHASES[self._place[1]] in SETUP
        return time.monotonic() - self._since > (max(self._limit, LEAST_FOR_SETUP) if is_setup else self._limit)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, a rank that makes no progress for ``limit`` seconds ends the program; 0 seconds for never."""
        if self._limit == 0:
            yield
            return
        self._note_progress()
        self._tell(0)
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        on_sign_of_life.append(self._note_progress)
        try:
            yield
        finally:
            on_sign_of_life.remove(self._note_progress)
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        beats, pause = 0, min(BEAT, self._limit / 4)
        while not self._ended.wait(pause):
            beats += 1
            self._tell(beats)
            if self._is_late():
                self._end(beats, pause)

    def _ask(self, ask: Callable[[], T]) -> T | None:
        """None where the store does not answer in time: rank 0 may be frozen, or the link to its host cut."""
        return answer_of(ask, min(ANSWER_LIMIT, self._limit))

    def _tell(self, beats: int) -> None:
        if self._store is not None:
            node = int(os.environ.get("GROUP_RANK", "0"))
            told = json.dumps({"beats": beats, "place": self._place, "stack": self._stack(), "node": node})
            self._ask(lambda: self._set(told))

    def _set(self, told: str) -> bool:
        self._store.set(f"{KEY}/{rank()}", told)
        return True

    def _end(self, beats: int, pause: float) -> None:
        before = self._all_ranks()
        # Long enough for every rank that lives to have told more.
        for _ in range(3):
            time.sleep(pause)
            beats += 1
            self._tell(beats)
        # At the end of a run the store may be gone.
        if self._ended.is_set() or not self._is_late():
            return
        after = self._all_ranks()
        if before is None or after is None:
            if speaks_without_store():
                say_error(
                    f"no progress for {self._limit:.0f} s: the store of all ranks, which rank 0 may hold, does not "
                    f"answer; the link to its host may be cut. This rank was in {_place(self._place)}"
                )
            stop_launcher_without(1)
            os._exit(1)
        # It asks the store, within a limit of its own.
        if is_first_to_report():
            say_error(f"no progress for {self._limit:.0f} s: {named(before, after)}")
        stop_launcher_without(len(silent_nodes(before, after)))
        os._exit(1)

    def _all_ranks(self) -> dict[int, dict[str, Any]] | None:
        if self._store is None:
            return {0: {"beats": 0, "place": self._place, "stack": self._stack(), "node": 0}}
        return self._ask(lambda: {other: self._told(other) for other in range(world_size())})

    def _told(self, other: int) -> dict[str, Any]:
        """By a rank; of one that has told nothing a value would never come."""
        key = f"{KEY}/{other}"
        told: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else NOTHING
        return told

    def _stack(self) -> list[str]:
        """Where the main thread is, innermost first."""
        frame = sys._current_frames().get(self._main or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        return [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in reversed(frames)][:6]


def silent_ranks(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> list[int]:
    """Ranks that told nothing new between two looks."""
    return [other for other in after if after[other]["beats"] == before[other]["beats"]]


def silent_nodes(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> set[int]:
    """Nodes of which no rank told anything new."""
    silent = set(silent_ranks(before, after))
    nodes = {told["node"] for told in after.values()}
    return {node for node in nodes if silent >= {other for other, told in after.items() if told["node"] == node}}


def gone_ranks() -> list[int]:
    """Ranks that do not tell anything any more, by two looks at the store; none where it does not answer."""
    store = own_store()

    def look() -> dict[int, dict[str, Any]]:
        keys = {other: f"{KEY}/{other}" for other in range(world_size())}
        return {other: json.loads(store.get(key)) if store.check([key]) else NOTHING for other, key in keys.items()}

    before = answer_of(look, STORE_LIMIT)
    time.sleep(2.5 * BEAT)
    after = answer_of(look, STORE_LIMIT)
    return [] if before is None or after is None else silent_ranks(before, after)


def named(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> str:
    """Who is stuck, by two looks at what every rank told."""
    absent = [other for other, told in after.items() if told["beats"] < 0]
    if absent:
        return f"rank {', '.join(map(str, absent))} has not begun; the others wait for it"
    frozen = silent_ranks(before, after) if len(after) > 1 else []
    least = min(told["place"] for told in after.values())
    behind = [other for other, told in after.items() if told["place"] == least]
    stuck, why = (frozen, "does not answer, last seen") if frozen else (behind, "is stuck")
    if len(stuck) == len(after) > 1:
        lines = "; ".join(f"rank {other} at {told['stack'][0]}" for other, told in after.items())
        return f"all ranks are in {_place(least)}: {lines}"
    told = after[stuck[0]]
    ranks = f"rank {', '.join(map(str, stuck))}"
    others = "" if len(after) == 1 else f"; the others wait in {_place(max(t['place'] for t in after.values()))}"
    return f"{ranks} {why} in {_place(told['place'])}, at {' < '.join(told['stack'][:3])}{others}"


def _place(place: Sequence[int]) -> str:
    step, phase = place
    return f"step {step} ({PHASES[phase]})"
