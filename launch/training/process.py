"""Processes: their start and end, what only rank 0 does, and errors that everyone hears of once."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.checkpoint.api import CheckpointException

from liger_dist import LigerDistError

T = TypeVar("T")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """This process's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def start() -> None:
    """Joins the process group that torchrun announces; without torchrun there is none."""
    if torch.cuda.is_available():
        if int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
            raise LigerDistError(
                f"torchrun started more processes than this machine has GPUs ({torch.cuda.device_count()}); lower "
                "--nproc-per-node."
            )
        torch.cuda.set_device(device())
    else:
        # Processes on one machine share its cores.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    if "RANK" in os.environ:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = _store_of_this_attempt()
        where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank(), "world_size": world_size()}
        dist.init_process_group(backend, timeout=timedelta(minutes=30), **where)


def _store_of_this_attempt() -> Any:
    """Torchrun's store lives through restarts, and with it the addresses of processes that are gone: each attempt gets
    names of its own there. None for a store that is new, or none of torchrun's.

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


def on_rank_zero(function: Callable[[], T]) -> T:
    """Runs ``function`` on rank 0 and gives its (picklable) result, or its refusal, to every rank."""
    if not dist.is_initialized():
        return function()
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer[0] = function()
        except (LigerDistError, OSError) as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise LigerDistError(answer[1])
    result: T = answer[0]
    return result


@contextmanager
def as_one(what: str, way_out: str, reproduce: Callable[[], object]) -> Iterator[None]:
    """What a rank cannot do inside is refused on every rank alike: ``what``, the reason, ``way_out``.

    Torch's archives hide why a file cannot be written: ``reproduce`` tries the like, and its OSError is the reason.
    """
    reason = None
    try:
        yield
    except CheckpointException as error:
        # Every rank has it, with what all of them say.
        reason = "; ".join(dict.fromkeys(f"{failed!r}" for failed, _ in error.failures.values()))
    except (OSError, RuntimeError) as error:
        reason = repr(error)
    if reason is not None:
        try:
            reproduce()
        except OSError as error:
            reason = str(error)
    reasons = [reason]
    if dist.is_initialized():
        reasons = [None] * world_size()
        dist.all_gather_object(reasons, reason)
    found = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if found:
        where = "" if len(found) == len(reasons) else f"on rank {', '.join(map(str, found))} "
        raise LigerDistError(f"{what}: {where}{next(iter(found.values()))}. {way_out}.")


@cache
def checkpoint_group() -> Any:
    """A process group on CPUs for what is written in the background; None for one process."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def total(*values: float) -> list[float]:
    """Each value summed over all ranks, in one all-reduce."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return [float(value) for value in numbers]


def total_on_device(value: Tensor) -> Tensor:
    """A tensor summed over all ranks, without a wait of the host."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into a flag; a second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def watched(self) -> Any:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True


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
        _report(f"error: {error}")
    except Exception:
        _report(traceback.format_exc())


def _report(message: str) -> None:
    if is_first_to_report():
        where = "" if world_size() == 1 else f"[rank {rank()}] "
        print(f"{where}{message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # No clean-up: another rank may be inside a collective, and leaving the group would wait for it.
    os._exit(1)


def is_first_to_report() -> bool:
    """Rank 0 speaks for an error that all ranks have; a rank that fails alone speaks for itself."""
    if rank() != 0:
        time.sleep(2.0)
    if not dist.is_initialized():
        return rank() == 0
    store: Any = dist.distributed_c10d._get_default_store()
    claim = store.clone().compare_set("liger_dist/first_error", "", str(rank()))
    return bool(claim.decode() == str(rank()))
