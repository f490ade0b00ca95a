"""Collectives of torch whose names changed, and where their tensors live."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_backend_config

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The former where there is one, from torch 2.13 on; the latter warns there."""


def device_for(group: dist.ProcessGroup) -> torch.device:
    """Where a small tensor must live to take part in a collective of ``group``: the CPU if it can."""
    has_cpu_backend = "gloo" in get_backend_config(group) or "mpi" in get_backend_config(group)
    return torch.device("cpu") if has_cpu_backend else torch.device("cuda", torch.cuda.current_device())
