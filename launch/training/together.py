"""What only rank 0 does, and what every rank does or none: refusals are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from liger_dist import LigerDistError

from .process import rank, world_size

T = TypeVar("T")
on_sign_of_life: list[Callable[[], object]] = []
"""called whenever rank 0 has said that it is still at work"""
SIGN_OF_LIFE = 5.0
"""seconds between two words of rank 0 to those that wait for it"""


def on_rank_zero(function: Callable[[], T]) -> T:
    """Runs ``function`` on rank 0 and gives its (picklable) result, or its refusal, to every rank.

    It may take hours: the others hear every few seconds that it goes on, within the time limits of the process group
    and of the watchdog.
    """
    pool = ThreadPoolExecutor(1)
    try:
        work = pool.submit(function) if rank() == 0 else None
        answer = _Answer(has_ended=False)
        while not answer.has_ended:
            said = [None if work is None else _answer(work)]
            if dist.is_initialized():
                dist.broadcast_object_list(said, src=0)
            assert said[0] is not None
            answer = said[0]
            for note in on_sign_of_life:
                note()
    finally:
        # An interrupted program does not wait for it.
        pool.shutdown(wait=False)
    if answer.refusal is not None:
        raise LigerDistError(answer.refusal)
    result: T = answer.result
    return result


def gathered(value: T) -> list[T]:
    """That of every rank, in their order."""
    if not dist.is_initialized():
        return [value]
    everyone = [value] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@dataclass(frozen=True)
class _Answer:
    has_ended: bool
    result: Any = None
    refusal: str | None = None


def _answer(work: Future[Any]) -> _Answer:
    wait([work], SIGN_OF_LIFE)
    if not work.done():
        return _Answer(has_ended=False)
    try:
        return _Answer(has_ended=True, result=work.result())
    except (LigerDistError, OSError) as error:
        return _Answer(has_ended=True, refusal=str(error))


class UnwrittenError(Exception):
    """A file that this rank could not write, raised where every rank has come to the same place."""


@contextmanager
def as_one(what: str, way_out: str, reproduce: Callable[[], object]) -> Iterator[None]:
    """What a rank cannot write inside is refused on every rank alike: ``what``, the reason, ``way_out``.

    Torch's archives hide why a file cannot be written: ``reproduce`` tries the like, and its OSError is the reason.
    Any other exception is this rank's own, and goes on: where it is raised the others may be inside a collective.
    """
    reasons: dict[int, str] = {}
    try:
        yield
    except CheckpointException as error:
        # Every rank has it, with what all of them say.
        reasons = {failed: repr(why) for failed, (why, _) in error.failures.items()}
    except UnwrittenError as error:
        reasons = {rank(): repr(error.__cause__)}
    clear: dict[int, str] = {}
    if reasons:
        try:
            reproduce()
        except OSError as error:
            clear = {rank(): str(error)}
    everyone = gathered((reasons, clear))
    found = {rank: reason for said, _ in everyone for rank, reason in said.items()}
    found = {rank: reason for _, said in everyone for rank, reason in said.items()} or found
    if found:
        where = "" if len(found) == world_size() else f"on rank {', '.join(map(str, sorted(found)))} "
        raise LigerDistError(f"{what}: {where}{next(iter(found.values()))}. {way_out}.")
