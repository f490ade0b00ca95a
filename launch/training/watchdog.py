"""Finds out when no step ends any more, names the rank that the others wait for, and ends the program."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from .process import is_first_to_report, rank, world_size

T = TypeVar("T")
PHASES = ("reading data", "computing", "evaluating", "writing a checkpoint")
"""of a step, in their order"""
BEAT = 5.0
"""seconds between two signs of life, or a quarter of the limit if that is shorter"""
STORE_LIMIT = 20.0
"""seconds for the store, which rank 0 may hold, to answer"""


class Watchdog:
    """A thread that tells the others through torchrun's store where this rank is. Collectives would not do: they are
    what a stuck rank keeps the others in."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._place = (0, 0)
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        # A connection of its own: the main thread may be waiting on the other one.
        store: Any = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        self._store: Any = None if store is None else store.clone()

    def at(self, step: int, phase: str) -> None:
        """Notes where this rank is."""
        self._place, self._since = (step, PHASES.index(phase)), time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, a rank that makes no progress for ``limit`` seconds ends the program; 0 seconds for never."""
        if self._limit == 0:
            yield
            return
        self._since = time.monotonic()
        self._tell(0)
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        beats, pause = 0, min(BEAT, self._limit / 4)
        while not self._ended.wait(pause):
            beats += 1
            self._tell(beats)
            if time.monotonic() - self._since > self._limit:
                self._end(beats, pause)

    def _within_limit(self, ask: Callable[[], T]) -> T:
        """Asks the store. Where it is frozen its own time limits do not help: the program ends then, too."""
        answers: list[T] = []

        def keep() -> None:
            # Of a store that is gone: torch's DistStoreError and DistNetworkError.
            with suppress(RuntimeError):
                answers.append(ask())

        asking = threading.Thread(target=keep, daemon=True)
        asking.start()
        limit = min(STORE_LIMIT, self._limit)
        asking.join(limit)
        # At the end of a run the store may be gone.
        if not answers and not self._ended.wait(limit):
            if rank() == 1:
                print("error: rank 0 does not answer, which holds the store of all ranks", file=sys.stderr, flush=True)
            os._exit(1)
        if not answers:
            sys.exit()
        return answers[0]

    def _tell(self, beats: int) -> None:
        if self._store is not None:
            told = json.dumps({"beats": beats, "place": self._place, "stack": self._stack()})
            self._within_limit(lambda: self._store.set(f"liger_dist/watchdog/{rank()}", told))

    def _end(self, beats: int, pause: float) -> None:
        before = self._everyone()
        # Long enough for every rank that lives to have told more.
        for _ in range(3):
            time.sleep(pause)
            beats += 1
            self._tell(beats)
        if self._ended.is_set() or time.monotonic() - self._since < self._limit:
            return
        after = self._everyone()
        if is_first_to_report():
            print(f"error: no step for {self._limit:.0f} s: {named(before, after)}", file=sys.stderr, flush=True)
        os._exit(1)

    def _everyone(self) -> dict[int, dict[str, Any]]:
        if self._store is None:
            return {0: {"beats": 0, "place": self._place, "stack": self._stack()}}
        keys = {other: f"liger_dist/watchdog/{other}" for other in range(world_size())}
        return self._within_limit(lambda: {other: json.loads(self._store.get(key)) for other, key in keys.items()})

    def _stack(self) -> list[str]:
        """Where the main thread is, innermost first."""
        frame = sys._current_frames().get(self._main or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        return [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in reversed(frames)][:6]


def named(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> str:
    """Who is stuck, by two looks at what every rank told."""
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


def _place(place: list[int]) -> str:
    step, phase = place
    return f"step {step} ({PHASES[phase]})"
