"""On which device this process computes, and on which its collectives run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_backend_config


def compute_device() -> torch.device:
    """This process's GPU where there is one that its process group (if any) can talk from; the CPU otherwise."""
    if not torch.cuda.is_available() or (dist.is_initialized() and "nccl" not in get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def collective_device() -> torch.device:
    """Where a small tensor must live to take part in a collective of the default group: the CPU if it can."""
    has_cpu_backend = "gloo" in get_backend_config() or "mpi" in get_backend_config()
    return torch.device("cpu") if has_cpu_backend else compute_device()
