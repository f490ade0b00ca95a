"""Device selection, small object collectives and host groups."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_backend_config

from liger_dist.losses.collectives import device_for

T = TypeVar("T")


def compute_device() -> torch.device:
    """Returns the GPU of this rank, if its process group (if any) can use it; the CPU otherwise."""
    if not torch.cuda.is_available() or (dist.is_initialized() and "nccl" not in get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def collective_device() -> torch.device:
    """Returns the device of small tensors in collectives of the default group: the CPU if the group can use it."""
    return device_for(None)


def world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: T) -> list[T]:
    """All-gathers one object per rank, in the order of ranks. Without a process group, returns this rank's alone."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sentences_of_all_ranks(sentences: list[str]) -> list[str]:
    """All-gathers sentences, each once, in the order of ranks."""
    return list(dict.fromkeys(sentence for of_rank in gathered(sentences) for sentence in of_rank))


def host_group(ranks: list[int]) -> dist.ProcessGroup:
    """Creates a gloo group of ``ranks``, which may differ between ranks. Every rank of the default group takes part: a
    group created by its members alone has a name that is reused after it is destroyed, and finds stale addresses in the
    store."""
    local: Any = None
    for members in dict.fromkeys(map(tuple, gathered(ranks))):
        group = dist.new_group(list(members), backend="gloo")
        local = group if dist.get_rank() in members else local
    return cast(dist.ProcessGroup, local)
