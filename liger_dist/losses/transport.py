"""How hidden states get to all processes, and the parts of their gradient back, beside the products of other chunks.

Legend: G processes, m tokens of each process in a chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather_single
from .peer_memory import PeerMemory

OwnTokens = Callable[[int], Tensor]
"""``[m, D]``: this process's hidden states in a chunk, filled up"""


class Transport(Protocol):
    """For each chunk, in order: ``everyone``; then, where the gradient is wanted, ``part`` behind the exchange of the
    chunk's softmax statistics, and ``send``. ``received`` waits for what was sent last, and is called before the next
    ``part``."""

    def everyone(self, chunk: int) -> Tensor:
        """``[G, m, D]``: the hidden states of all processes."""
        ...

    def part(self, chunk: int) -> Tensor:
        """``[G, m, D]``, to be written: what this process adds to the gradient of everyone's hidden states."""
        ...

    def send(self, chunk: int) -> None:
        """The part has been written."""
        ...

    def received(self) -> Tensor:
        """``[G, m, D]``: what everyone adds to the gradient of this process's hidden states."""
        ...


class Collectives:
    """All-gathers and all-to-alls on a communicator of their own. On GPUs these are kernels, which take
    multiprocessors from the products, or wait for them."""

    def __init__(self, own: OwnTokens, *, num_chunks: int, group: dist.ProcessGroup) -> None:
        self._own, self._num_chunks, self._group, self._size = own, num_chunks, group, group.size()
        self._buffers: list[Tensor] = []
        self._coming = self._fetch(0)
        self._leaving: Any = None

    def _fetch(self, chunk: int) -> Any:
        own_mD = self._own(chunk).contiguous()
        if len(self._buffers) < 2:
            self._buffers.append(own_mD.new_empty((self._size, *own_mD.shape)))
        # The buffer of the chunk before the last: its products have been issued.
        everyone_RD = self._buffers[chunk % 2].flatten(0, 1)
        return all_gather_single(everyone_RD, own_mD, group=self._group, async_op=True)

    def everyone(self, chunk: int) -> Tensor:
        self._coming.wait()
        if chunk + 1 < self._num_chunks:
            self._coming = self._fetch(chunk + 1)
        return self._buffers[chunk % 2]

    def part(self, chunk: int) -> Tensor:
        if chunk == 0:
            self._part_GmD, self._received_GmD = torch.empty_like(self._buffers[0]), torch.empty_like(self._buffers[0])
        return self._part_GmD

    def send(self, chunk: int) -> None:
        received_RD, part_RD = self._received_GmD.flatten(0, 1), self._part_GmD.flatten(0, 1)
        self._leaving = dist.all_to_all_single(received_RD, part_RD, group=self._group, async_op=True)

    def received(self) -> Tensor:
        self._leaving.wait()
        return self._received_GmD


class PeerCopies:
    """Copies out of the other processes' memory, by the copy engines: the products keep all multiprocessors.

    One barrier a chunk, in front of the weight gradient's product, says that parts and the next chunk's hidden states
    can be read; both are copied behind that product. That they have been read is said by the exchange of the next
    chunk's statistics, which everyone enters only after it has waited for its copies.
    """

    def __init__(self, own: OwnTokens, *, num_chunks: int, rank: int, memory: PeerMemory) -> None:
        self._own, self._num_chunks, self._rank, self._memory = own, num_chunks, rank, memory
        first_mD = own(0)
        shapes = (first_mD.shape, (memory.size, *first_mD.shape))
        self._peers_mD, self._peers_GmD = memory.views(*shapes, dtype=first_mD.dtype)
        part_GmD = self._peers_GmD[rank]
        self._everyone, self._received_GmD = [torch.empty_like(part_GmD)], torch.empty_like(part_GmD)
        if num_chunks > 1:
            self._everyone.append(torch.empty_like(part_GmD))
        self._peers_mD[rank].copy_(first_mD)
        memory.barrier()
        self._coming: Any = memory.copy(self._everyone[0], self._peers_mD)
        self._leaving: Any = None

    # The copies of a chunk's hidden states come behind those of the last chunk's parts, in order.
    def everyone(self, chunk: int) -> Tensor:
        self._memory.wait(self._coming)
        return self._everyone[chunk % 2]

    def part(self, chunk: int) -> Tensor:
        if chunk + 1 < self._num_chunks:
            self._peers_mD[self._rank].copy_(self._own(chunk + 1))
        return self._peers_GmD[self._rank]

    def send(self, chunk: int) -> None:
        self._memory.barrier()
        self._leaving = self._memory.copy(self._received_GmD, [part_GmD[self._rank] for part_GmD in self._peers_GmD])
        if chunk + 1 < self._num_chunks:
            self._coming = self._memory.copy(self._everyone[(chunk + 1) % 2], self._peers_mD)

    def received(self) -> Tensor:
        self._memory.wait(self._leaving)
        return self._received_GmD
