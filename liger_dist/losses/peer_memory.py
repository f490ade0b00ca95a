"""Memory that the processes of one node read of each other, without a kernel on either side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 256
"""bytes"""


class PeerMemory:
    """The same number of bytes on every process of a group, kept from one use to the next.

    It is torch's symmetric memory, ``torch.distributed._symmetric_memory``, with copies on a stream of their own.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> None:
        """``host_group``: the same processes, on their hosts."""
        self.size, self._rank, self._device = group.size(), group.rank(), device
        self._group, self._host_group = group, host_group
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream()
        self._arenas: Sequence[Tensor] = [torch.empty(0, dtype=torch.uint8, device=device)] * self.size
        self._handle: Any = None

    @property
    def num_bytes(self) -> int:
        """of this process"""
        return len(self._arenas[self._rank])

    def views(self, *shapes: Sequence[int], dtype: torch.dtype) -> list[list[Tensor]]:
        """For each shape every process's tensor of it, in the order of the group. All processes have to ask for the
        same; on the current stream, everyone is done with what was asked for before."""
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        if starts[-1] > self.num_bytes:
            self._grow(starts[-1])
        # Copies that an exception left behind, too.
        self._module.current_stream().wait_stream(self._stream)
        self.barrier()
        return [
            [arena[start : start + size].view(dtype).view(*shape) for arena in self._arenas]
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]

    def _grow(self, num_bytes: int) -> None:
        self._module.synchronize()
        # Nobody reads the old memory any more.
        dist.barrier(self._host_group)
        # First, so that both are not there at once.
        self._arenas, self._handle = [torch.empty(0, dtype=torch.uint8, device=self._device)] * self.size, None
        self._arenas, self._handle = self._allocated(num_bytes)

    def _allocated(self, num_bytes: int) -> tuple[Sequence[Tensor], Any]:
        """Every process's bytes, and what has a ``barrier()`` for all of them."""
        import torch.distributed._symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
        handle = symmetric_memory.rendezvous(own, self._group)
        arenas = [handle.get_buffer(rank, own.shape, own.dtype) for rank in range(self.size)]
        arenas[self._rank] = own
        return arenas, handle

    def barrier(self) -> None:
        """On the current stream: what comes behind it follows all that is in front of everyone's."""
        self._handle.barrier()

    def copy(self, targets: Sequence[Tensor] | Tensor, sources: Sequence[Tensor]) -> Any:
        """Copies one source of each process behind what the current stream has been given, but not in its way.

        Returns:
            What :meth:`wait` takes.
        """
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            # Everyone begins with another process, so that no link is everybody's.
            for step in range(self.size):
                process = (self._rank + step) % self.size
                targets[process].copy_(sources[process], non_blocking=True)
                if targets[process].is_cuda:
                    targets[process].record_stream(self._stream)
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """The current stream goes on when the copies have arrived."""
        self._module.current_stream().wait_event(copied)
