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

from .fault_tolerance import STORE_LIMIT, answer_of, is_first_to_report, speaks_without_store
from .distributed import on_sign_of_life, own_store, rank, world_size

T = TypeVar("T")
PHASES = (
    "preparing",
    "loading a checkpoint",
    "reading data",
    "computing",
    "evaluating",
    "writing a checkpoint",
    "sampling",
)
"""of a step, in their order"""
SETUP = ("preparing", "loading a checkpoint")
LEAST_FOR_SETUP = 60.0
"""seconds that these have, however short the limit"""
NOTHING: dict[str, Any] = {"beats": -1, "place": [0, 0], "stack": []}
"""of a rank that has not begun"""
BEAT = 5.0
"""seconds between two signs of life, or a quarter of the limit if that is shorter"""


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

    def _within_limit(self, ask: Callable[[], T]) -> T:
        """Asks the store; the program ends where that does not answer."""
        limit = min(STORE_LIMIT, self._limit)
        answer = answer_of(ask, limit)
        # At the end of a run the store may be gone.
        if answer is None and not self._ended.wait(limit):
            if speaks_without_store():
                where = f"[rank {rank()}] error: the store of all ranks, which rank 0 may hold, does not answer"
                print(f"{where}; it was in {_place(self._place)} here", file=sys.stderr, flush=True)
            os._exit(1)
        if answer is None:
            sys.exit()
        return answer

    def _tell(self, beats: int) -> None:
        if self._store is not None:
            told = json.dumps({"beats": beats, "place": self._place, "stack": self._stack()})
            self._within_limit(lambda: self._set(told))

    def _set(self, told: str) -> bool:
        self._store.set(f"liger_dist/watchdog/{rank()}", told)
        return True

    def _end(self, beats: int, pause: float) -> None:
        before = self._everyone()
        # Long enough for every rank that lives to have told more.
        for _ in range(3):
            time.sleep(pause)
            beats += 1
            self._tell(beats)
        if self._ended.is_set() or not self._is_late():
            return
        after = self._everyone()
        # It asks the store, within a limit of its own.
        if is_first_to_report():
            print(f"error: no progress for {self._limit:.0f} s: {named(before, after)}", file=sys.stderr, flush=True)
        os._exit(1)

    def _everyone(self) -> dict[int, dict[str, Any]]:
        if self._store is None:
            return {0: {"beats": 0, "place": self._place, "stack": self._stack()}}
        return self._within_limit(lambda: {other: self._told(other) for other in range(world_size())})

    def _told(self, other: int) -> dict[str, Any]:
        """By a rank; of one that has told nothing a value would never come."""
        key = f"liger_dist/watchdog/{other}"
        told: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else NOTHING
        return told

    def _stack(self) -> list[str]:
        """Where the main thread is, innermost first."""
        frame = sys._current_frames().get(self._main or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        return [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in reversed(frames)][:6]


def named(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> str:
    """Who is stuck, by two looks at what every rank told."""
    absent = [other for other, told in after.items() if told["beats"] < 0]
    if absent:
        return f"rank {', '.join(map(str, absent))} has not begun; the others wait for it"
    frozen = [other for other in after if len(after) > 1 and after[other]["beats"] == before[other]["beats"]]
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
