"""Processes: which one this is, how they meet, and sums over all of them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from liger_dist import LigerDistError


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """This process's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def speaks_for_machine() -> bool:
    """Whether this process says what all of its machine would say."""
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


@cache
def checkpoint_group() -> Any:
    """A process group on CPUs for what is written in the background; None for one process."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def launcher() -> str | None:
    """The torchrun that started this process, which starts it again after a failure or when machines come and go (the
    latter without counting it); None for none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    # Ids of processes are given away again; the 22nd field is when this one began.
    status = Path(f"/proc/{parent}/stat")
    began = status.read_text().rpartition(")")[2].split()[19] if status.is_file() else ""
    return f"{socket.gethostname()} {parent} {began}"


def own_store() -> Any:
    """A connection to the store where the processes met, beside that of the main thread; None for one process."""
    if not dist.is_initialized():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


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
