"""Sequence parallelism: the ranks of a mesh axis named "sp" hold shards of the same sequences.

All layers but attention compute on the rank's tokens. Before attention, an all-to-all of queries, keys and values
turns the sequence shards into head shards (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509); a second one, of
its output, turns them back. The backward has two as well.

Legend: B rows, S tokens of a full row, s = S / n tokens of a rank, H heads, h = H / n heads of a rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from liger_dist.errors import LigerDistError
from liger_dist.model.torch_modes import untraced

from .mesh import SEQUENCE

_AXIS = "_liger_dist_sequence_axis"


@dataclass(frozen=True)
class SequenceAxis:
    """The ranks that hold shards of the same sequences, in the order of the shards."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh) -> SequenceAxis:
        """Returns the axis "sp" of ``mesh``.

        Raises:
            LigerDistError: the mesh has no axis named "sp".
        """
        names = mesh.mesh_dim_names or ()
        if SEQUENCE not in names:
            raise LigerDistError(
                f"the mesh has the axes {names}; expected one named {SEQUENCE!r}: pass it to init_device_mesh in "
                "mesh_dim_names."
            )
        group = mesh.get_group(SEQUENCE)
        return SequenceAxis(group, dist.get_world_size(group), dist.get_rank(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceAxis:
        return self


def attach(layers: Iterable[nn.Module], axis: SequenceAxis) -> None:
    """Makes the attention inside ``layers`` exchange heads over ``axis``."""
    for layer in layers:
        for module in layer.modules():
            vars(module)[_AXIS] = axis


def detach(layers: Iterable[nn.Module]) -> None:
    """Undoes :func:`attach`."""
    for layer in layers:
        for module in layer.modules():
            vars(module).pop(_AXIS, None)


@contextmanager
def detached(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Detaches the axis within the context: attention inside ``layers`` computes on the tokens of this rank."""
    axis = sequence_axis_of(layers[0]) if layers else None
    detach(layers)
    try:
        yield
    finally:
        if axis is not None:
            attach(layers, axis)


def sequence_axis_of(module: nn.Module) -> SequenceAxis | None:
    """Returns the axis over which the attention ``module`` exchanges heads; None without one."""
    axis: SequenceAxis | None = getattr(module, _AXIS, None)
    return axis


class _AllToAll(torch.autograd.Function):
    """All-to-all of ``n`` equal blocks along the first dim. It equals its transpose."""

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


@untraced
def _exchanged(blocks: Tensor, axis: SequenceAxis) -> Tensor:
    """All-to-alls ``blocks``. Not traced: Dynamo of torch 2.11 compiles the collective of an autograd function without
    its gradient."""
    received: Tensor = _AllToAll.apply(blocks.contiguous(), axis.group)  # type: ignore[no-untyped-call]
    return received


def gather_tokens(query: Tensor, key: Tensor, value: Tensor, axis: SequenceAxis) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges sequence shards ``[B, H, s, D]`` for head shards ``[B, h, S, D]`` by an all-to-all. Repeats key and
    value heads first if the ranks do not divide them.

    Raises:
        LigerDistError: the ranks do not divide the query heads, or values have another head size.
    """
    heads, size = query.shape[1], query.shape[3]
    if heads % axis.size:
        raise LigerDistError(
            f"attention has {heads} query heads on a mesh axis {SEQUENCE!r} of {axis.size} ranks; expected a number of "
            "ranks that divides them. Make the axis smaller."
        )
    if value.shape[3] != size:
        raise LigerDistError(
            f"attention has queries of head size {size} and values of {value.shape[3]}; expected one head size on a "
            f"mesh with an axis {SEQUENCE!r}. Leave out the axis."
        )
    repeats = _repeats(heads, key.shape[1], axis.size)
    tensors = [query, *(x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (key, value))]
    # [n, B, s, h, D] each, of which block i goes to rank i.
    blocks = [x.unflatten(1, (axis.size, -1)).permute(1, 0, 3, 2, 4) for x in tensors]
    received = _exchanged(torch.cat(blocks, 3), axis)
    full = received.transpose(0, 1).flatten(1, 2).transpose(1, 2)
    q, k, v = full.split([block.shape[3] for block in blocks], 1)
    return q, k, v


def scatter_tokens(output: Tensor, axis: SequenceAxis) -> Tensor:
    """Exchanges head shards ``[B, S, h, D]`` for sequence shards ``[B, s, H, D]`` by an all-to-all."""
    blocks = output.unflatten(1, (axis.size, -1)).transpose(0, 1)
    received = _exchanged(blocks, axis)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _repeats(heads: int, key_heads: int, ranks: int) -> int:
    """Returns how often each head of keys and values is repeated: as rarely as lets the ranks divide them."""
    group = heads // key_heads
    return next(factor for factor in range(1, group + 1) if group % factor == 0 and key_heads * factor % ranks == 0)


def check_losses(model: nn.Module, unfused: str | None, *, repeats_head: bool) -> None:
    """Refuses sequence shards for a model whose losses they would change.

    Args:
        unfused: why the loss is not fused; None if it is.

    Raises:
        LigerDistError: the mean of the loss would be of each rank's tokens, or further tokens are on other ranks.
    """
    name = type(model).__name__
    if unfused is not None:
        raise LigerDistError(
            f"the mesh has an axis {SEQUENCE!r} but the loss of {name} is not fused ({unfused}), so that its mean "
            "would be of each rank's own tokens; leave out the axis."
        )
    if repeats_head:
        raise LigerDistError(
            f"the mesh has an axis {SEQUENCE!r} but {name} predicts further tokens, which other ranks hold; leave out "
            "the axis."
        )
