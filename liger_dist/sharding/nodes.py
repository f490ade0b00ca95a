"""Which processes of the shard axis have one host, and whether their GPUs read each other's memory."""

from __future__ import annotations

import hashlib
import math
import socket
import warnings
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from liger_dist.losses.collectives import all_gather_single
from liger_dist.losses.peer_memory import PeerMemory

from .devices import collective_device


def gathered_digests(*texts: str) -> list[tuple[int, ...]]:
    """Of every process's texts, by rank: equal where these are. One collective."""
    numbers = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") for text in texts]
    own = torch.tensor(numbers, device=collective_device())
    everyone = own.new_empty(dist.get_world_size() * len(texts))
    all_gather_single(everyone, own)
    return [tuple(row) for row in everyone.view(-1, len(texts)).tolist()]


def neighbours_on_a_node(mesh: DeviceMesh, hosts: list[int]) -> int:
    """How many neighbours on the shard axis have one host, everywhere; 1 where hosts take turns. ``hosts`` are digests
    by rank."""
    size = mesh.shape[-1]
    for ranks in mesh.mesh.reshape(-1, size).tolist():
        for _, neighbours in groupby(ranks, key=hosts.__getitem__):
            size = math.gcd(size, len(list(neighbours)))
    return size


def peer_memory(group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    """Memory that the GPUs of ``group`` read of each other, tried out; None where one of them cannot. Collectives of
    host names, device numbers and what went wrong.

    Args:
        host_group: the same processes, on their hosts.
    """
    if device.type != "cuda" or group.size() == 1:
        return None
    places: list[tuple[str, int]] = [("", -1)] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=host_group)
    own = places[group.rank()]
    is_one_node = all(host == own[0] for host, _ in places) and len(set(places)) == len(places)
    sees_all = is_one_node and all(
        place == own or (place[1] < torch.cuda.device_count() and torch.cuda.can_device_access_peer(own[1], place[1]))
        for place in places
    )
    answers: list[bool] = [False] * group.size()
    dist.all_gather_object(answers, sees_all, group=host_group)
    if not all(answers):
        return None
    memory, problem = PeerMemory(group, host_group, device), None
    try:
        memory.views((1,), dtype=torch.uint8)
    except RuntimeError as error:
        # Some containers do not let processes share such memory.
        problem = str(error).splitlines()[0]
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=host_group)
    found = next(filter(None, problems), None)
    if found is not None:
        warnings.warn(
            f"peer_copies is True but GPUs of this node cannot read each other's memory ({found}); tokens travel by "
            "NCCL. Leave peer_copies out to have that without this warning.",
            stacklevel=2,
        )
        return None
    return memory
