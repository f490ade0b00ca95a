"""How a run ends: by itself, by a signal, or by an error that is said once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from liger_dist import LigerDistError

from .process import own_store, rank, speaks_for_machine, world_size

T = TypeVar("T")
LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "ncclRemoteError")
"""in messages of gloo and NCCL"""
SAME_SIGNAL = 2.0
"""seconds within which a second signal is the first one, handed on"""
STORE_LIMIT = 20.0
"""seconds for the store, which rank 0 may hold, to answer"""


def run(main: Callable[[], None]) -> None:
    """Calls ``main``; an error is printed by one rank, and every rank ends with a non-zero status.

    A refusal (LigerDistError) or a file that cannot be read or written is one sentence, anything else a traceback.
    torchrun ends the ranks that still wait for the one that failed.
    """
    try:
        main()
        if dist.is_initialized():
            # Together: a rank that leaves early closes connections that the others may still be using.
            dist.barrier()
            dist.destroy_process_group()
            sys.stdout.flush()
            # Meshes and models still hold their groups; gloo can abort while the interpreter takes them down.
            os._exit(0)
    except (LigerDistError, OSError) as error:
        _report(f"error: {error}", is_refusal=True)
    except KeyboardInterrupt:
        _report("error: interrupted", is_refusal=True)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        if dist.is_initialized() and any(sign in str(error) for sign in LOST):
            _report(f"error: another process is gone, its own output says why: {lines[0]}", is_refusal=True)
        _report(traceback.format_exc(), is_refusal=False)


def _report(message: str, *, is_refusal: bool) -> None:
    # Before they meet, a machine's processes find the same things wrong.
    if is_first_to_report() if dist.is_initialized() else speaks_for_machine() or not is_refusal:
        where = "" if world_size() == 1 else f"[rank {rank()}] "
        print(f"{where}{message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # No clean-up: another rank may be inside a collective, and leaving the group would wait for it.
    os._exit(1)


def is_first_to_report() -> bool:
    """Rank 0 speaks for an error that all ranks have; a rank that fails alone speaks for itself. Where the store does
    not answer, one rank of each machine does."""
    if rank() != 0:
        time.sleep(2.0)
    if not dist.is_initialized():
        return True
    claim = answer_of(lambda: own_store().compare_set("liger_dist/first_error", "", str(rank())), STORE_LIMIT)
    return speaks_without_store() if claim is None else bool(claim.decode() == str(rank()))


def speaks_without_store() -> bool:
    """One process of each machine; on that of rank 0, which may be what does not answer, also the next."""
    return speaks_for_machine() or rank() == 1


def answer_of(ask: Callable[[], T], limit: float) -> T | None:
    """What the store says, within ``limit`` seconds: its own time limits do not help where its process is frozen. None
    for nothing."""
    answers: list[T] = []

    def keep() -> None:
        # Of a store that is gone: torch's DistStoreError and DistNetworkError.
        with suppress(RuntimeError):
            answers.append(ask())

    asking = threading.Thread(target=keep, daemon=True)
    asking.start()
    asking.join(limit)
    return answers[0] if answers else None


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into a flag; a second Ctrl-C ends the process at once. The same signal comes
    twice where torchrun hands on what the whole process group was sent already."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0

    @contextmanager
    def watched(self) -> Any:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and time.monotonic() - self._since > SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._since = self._since or time.monotonic()
        self.requested = True
