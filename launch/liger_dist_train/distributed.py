"""The process group: which rank this is, how ranks meet, sums over all of them, and what only rank 0 does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.checkpoint.api import CheckpointException

from liger_dist import LigerDistError

from .options import usable_cores

T = TypeVar("T")
STORE_LIMIT = 20.0
"""seconds for the store, which rank 0 may hold, to answer"""
on_sign_of_life: list[Callable[[], object]] = []
"""called whenever rank 0 has said that it is still at work"""
KILL_AFTER = 10
"""seconds that torchrun has to end after SIGTERM"""
SIGN_OF_LIFE = 5.0
"""seconds between two words of rank 0 to those that wait for it"""


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """Returns the device of this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def speaks_for_machine() -> bool:
    """True for one rank of each machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def start() -> None:
    """Joins the process group that torchrun announces; without torchrun there is none."""
    if torch.cuda.is_available():
        # Of the machine, and not of the process: all of them refuse.
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
            raise LigerDistError(
                f"torchrun started more processes than this machine has GPUs ({torch.cuda.device_count()}); lower "
                "--nproc-per-node."
            )
        torch.cuda.set_device(device())
    else:
        # Processes on one machine share its cores, unless the environment says how many threads each has.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cores() // local))
    if "RANK" in os.environ:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = _store_of_this_attempt()
        where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank(), "world_size": world_size()}
        dist.init_process_group(backend, timeout=timedelta(minutes=30), **where)


def _store_of_this_attempt() -> Any:
    """Makes a prefix of torchrun's store for each attempt: the store lives through restarts, and with it the addresses
    of processes that have ended. None for a new store, or none of torchrun's.

    Raises:
        LigerDistError: several machines restart; they count attempts each by itself.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        if attempt > 0:
            raise LigerDistError(
                "torchrun started this again on several machines with a store that it shares between attempts, where "
                "processes would look for those that are gone; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before "
                "torchrun, as launch/torchrun_multi_node.sh does."
            )
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(f"attempt_{attempt}", TCPStore(host, port, is_master=False))


@cache
def checkpoint_group() -> Any:
    """Makes a gloo group for what is written in the background, once; None for one process."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def launcher() -> str | None:
    """Identifies the torchrun that started this process, which starts it again after a failure or when machines come
    and go (the latter without counting it); None for none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    # Ids of processes are given away again; the 22nd field is when this one began.
    status = Path(f"/proc/{parent}/stat")
    began = status.read_text().rpartition(")")[2].split()[19] if status.is_file() else ""
    return f"{socket.gethostname()} {parent} {began}"


def own_store() -> Any:
    """Opens a second connection to the store where the ranks met; None for one process."""
    if not dist.is_initialized():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def total(*values: float) -> list[float]:
    """Sums each value over all ranks, in one all-reduce."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return [float(value) for value in numbers]


def total_on_device(value: Tensor) -> Tensor:
    """Sums a tensor over all ranks in place, without a wait of the host."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def from_rank_zero(value: Tensor) -> Tensor:
    """Broadcasts a tensor of rank 0 in place."""
    if dist.is_initialized():
        dist.broadcast(value, src=0)
    return value


def on_rank_zero(function: Callable[[], T]) -> T:
    """Runs ``function`` on rank 0 and gives its (picklable) result, or its refusal, to every rank.

    It may take hours: every few seconds rank 0 broadcasts that it goes on, within the time limits of the process group
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
    """All-gathers a picklable value, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


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
    """Refuses on every rank what one of them cannot write inside: ``what``, the reason, ``way_out``.

    Torch's archives hide why a file cannot be written: ``reproduce`` tries the like, and its OSError is the reason.
    Any other exception is raised on this rank alone: the other ranks may be inside a collective.
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
    of_ranks = gathered((reasons, clear))
    found = {rank: reason for said, _ in of_ranks for rank, reason in said.items()}
    found = {rank: reason for _, said in of_ranks for rank, reason in said.items()} or found
    if found:
        where = "" if len(found) == world_size() else f"on rank {', '.join(map(str, sorted(found)))} "
        raise LigerDistError(f"{what}: {where}{next(iter(found.values()))}. {way_out}.")


def say(message: str) -> None:
    """Prints on stderr, on a new line: a progress bar may hold the terminal's current one."""
    where = "" if world_size() == 1 else f"[rank {rank()}] "
    print(f"\n{where}{message}", file=sys.stderr, flush=True)


def say_error(message: str) -> None:
    """Prints an error of one sentence."""
    say(f"error: {message}")


def is_first_to_report() -> bool:
    """True for the rank that prints an error: rank 0 where all ranks have it, otherwise the rank that fails alone.
    Where the store does not answer, one rank of each machine."""
    if rank() != 0:
        time.sleep(2.0)
    if not dist.is_initialized():
        return True
    claim = answer_of(lambda: own_store().compare_set("liger_dist/first_error", "", str(rank())), STORE_LIMIT)
    return speaks_without_store() if claim is None else bool(claim.decode() == str(rank()))


def speaks_without_store() -> bool:
    """True for one rank of each machine; on that of rank 0, which may be what does not answer, also for the next
    rank."""
    return speaks_for_machine() or rank() == 1


def answer_of(ask: Callable[[], T], limit: float) -> T | None:
    """Asks the store for at most ``limit`` seconds: the store's time limits do not help where its process is frozen.
    None for no answer."""
    answers: list[T] = []

    def keep() -> None:
        # Torch's DistStoreError and DistNetworkError, where the store is closed.
        with suppress(RuntimeError):
            answers.append(ask())

    asking = threading.Thread(target=keep, daemon=True)
    asking.start()
    asking.join(limit)
    return answers[0] if answers else None


def stop_launcher() -> None:
    """Ends the torchrun that started this process, which would start it again; nothing without torchrun.

    Torchrun handles no signal while it waits for a store that does not answer: it is killed where it has not ended
    after :data:`KILL_AFTER` seconds, with the processes that it started, which nothing else would end.
    """
    if launcher() is None:
        return
    parent = os.getppid()
    began = f"cut -d' ' -f22 /proc/{parent}/stat"
    kill = f"kill -9 {parent} $(cat /proc/{parent}/task/*/children)"
    script = f'was=$({began}); sleep {KILL_AFTER}; [ "$({began})" = "$was" ] && {kill}'
    quiet = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", script], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    os.kill(parent, signal.SIGTERM)


def stop_launcher_without(nodes: int) -> None:
    """Ends torchrun where too few nodes remain without so many: it would wait minutes for new ones.

    ``MIN_NODES``, which launch/torchrun_multi_node.sh sets, says how many a run needs; default: all.
    """
    all_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes and all_nodes - nodes < int(os.environ.get("MIN_NODES") or all_nodes):
        stop_launcher()
