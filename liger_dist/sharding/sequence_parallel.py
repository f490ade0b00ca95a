"""Sequence parallelism: the ranks of a mesh axis named "sp" hold parts of the same sequences.

Everything but attention works on a rank's own tokens. For attention the ranks exchange, all to all, so that each has
all tokens of a part of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509): one exchange of queries,
keys and values before it and one of its output after it, and as many in the backward. Each sends (n-1)/n of its tensor
on n ranks.

Legend: B rows, S tokens of a full row, s = S / n tokens of a rank, H heads, h = H / n heads of a rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from liger_dist.errors import LigerDistError

from .mesh import SEQUENCE

_AXIS = "_liger_dist_sequence_axis"


@dataclass(frozen=True)
class SequenceAxis:
    """The ranks that hold parts of the same sequences, in the order of the parts."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh) -> SequenceAxis:
        """
        Raises:
            LigerDistError: the mesh has no axis named "sp".
        """
        names = mesh.mesh_dim_names or ()
        if SEQUENCE not in names:
            raise LigerDistError(f"the mesh has the axes {names}; expected one named {SEQUENCE!r}.")
        group = mesh.get_group(SEQUENCE)
        return SequenceAxis(group, dist.get_world_size(group), dist.get_rank(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceAxis:
        return self


def attach(layers: Iterable[nn.Module], axis: SequenceAxis, undo: ExitStack) -> None:
    """Makes the attention inside ``layers`` exchange heads over ``axis``."""
    for layer in layers:
        for module in layer.modules():
            vars(module)[_AXIS] = axis
    undo.callback(detach, layers)


def detach(layers: Iterable[nn.Module]) -> None:
    """Undoes :func:`attach`."""
    for layer in layers:
        for module in layer.modules():
            vars(module).pop(_AXIS, None)


def sequence_axis_of(module: nn.Module) -> SequenceAxis | None:
    """The axis over which the attention ``module`` exchanges heads."""
    axis: SequenceAxis | None = getattr(module, _AXIS, None)
    return axis


class _AllToAll(torch.autograd.Function):
    """Sends the i-th of ``n`` equal blocks to rank i. The exchange is its own transpose."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        received: Tensor = _AllToAll.apply(gradient.contiguous(), ctx.group)  # type: ignore[no-untyped-call]
        return received, None


def _exchanged(blocks: Tensor, axis: SequenceAxis) -> Tensor:
    received: Tensor = _AllToAll.apply(blocks.contiguous(), axis.group)  # type: ignore[no-untyped-call]
    return received


def gather_tokens(query: Tensor, key: Tensor, value: Tensor, axis: SequenceAxis) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, from this rank's tokens of all heads: ``[B, h, S, D]`` of ``[B, H, s, D]``, in
    one exchange. Heads of keys and values that the ranks do not divide are repeated first.

    Raises:
        LigerDistError: the ranks do not divide the heads of the queries.
    """
    heads, size = query.shape[1], query.shape[3]
    if heads % axis.size or value.shape[3] != size:
        raise LigerDistError(
            f"attention with {heads} heads of {size} numbers (values: {value.shape[3]}) on a mesh axis {SEQUENCE!r} of "
            f"{axis.size} ranks; expected a number of ranks that divides the heads, and one head size."
        )
    repeats = _repeats(heads, key.shape[1], axis.size)
    tensors = [query, *(x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (key, value))]
    # [n, B, s, h, D] each, of which block i goes to rank i.
    blocks = [x.unflatten(1, (axis.size, -1)).permute(1, 0, 3, 2, 4) for x in tensors]
    received = _exchanged(torch.cat(blocks, 3), axis)
    whole = received.transpose(0, 1).flatten(1, 2).transpose(1, 2)
    q, k, v = whole.split([block.shape[3] for block in blocks], 1)
    return q, k, v


def scatter_tokens(output: Tensor, axis: SequenceAxis) -> Tensor:
    """This rank's tokens of all heads, from all tokens of this rank's heads: ``[B, s, H, D]`` of ``[B, S, h, D]``."""
    blocks = output.unflatten(1, (axis.size, -1)).transpose(0, 1)
    received = _exchanged(blocks, axis)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _repeats(heads: int, key_heads: int, ranks: int) -> int:
    """How often each head of keys and values is repeated: as rarely as lets the ranks divide them."""
    group = heads // key_heads
    return next(factor for factor in range(1, group + 1) if group % factor == 0 and key_heads * factor % ranks == 0)
