"""A head whose rows stay split over the processes of FSDP2's shard axis, outside FSDP2's own groups."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from liger_dist.layers.exchanged_embedding import exchanged_embedding
from liger_dist.losses.collectives import device_for
from liger_dist.losses.peer_memory import PeerMemory
from liger_dist.losses.token_exchange import ExchangingShard, agree

from .base import DataParallel
from .fsdp2 import divide_factor, reduces_over_replicas
from .nodes import gathered_digests, neighbours_on_a_node, peer_memory
from .tensor_parallel import first_row

_ROWS = "_liger_dist_rows"


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """Who shares the rows, kept on every module that uses them."""

    model: nn.Module
    """sharded by FSDP2, whose convention of averaging is followed"""
    mesh: DeviceMesh
    """``(shard,)`` or ``(replicate, shard)``"""
    tokens_group: dist.ProcessGroup
    counting_group: dist.ProcessGroup
    calling_group: dist.ProcessGroup
    """all ranks of FSDP2's mesh, on their hosts where replicas have rows of their own"""
    peer_memory: PeerMemory | None
    compute_dtype: torch.dtype | None
    """what parameters are rounded to for computing; None for their own dtype"""
    reduce_dtype: torch.dtype
    """in which the gradients of replicas are added up"""
    waiting: dict[int, Tensor] = field(default_factory=dict)
    """by the id of a parameter: gradients of micro-batches without synchronisation, not yet added up over replicas"""

    def shard(self, weight: Tensor) -> ExchangingShard:
        """Of ``weight``, for the losses."""
        assert isinstance(weight, DTensor)
        return ExchangingShard(
            group=self.mesh.get_group(self.mesh.ndim - 1),
            tokens_group=self.tokens_group,
            counting_group=self.counting_group,
            start=first_row(weight),
            vocab_size=weight.shape[0],
            divide_factor=divide_factor(self.model),
            peer_memory=self.peer_memory,
        )

    def agree_on_call(self, asked: str) -> None:
        """Raises:
        LigerDistError: on every rank of FSDP2's mesh, where they do not ask the model for the same.
        """
        agree(self.calling_group, 0, asked)

    def local(self, parameter: Tensor) -> Tensor:
        """This process's rows, whose gradient is summed over the replicas."""
        assert isinstance(parameter, DTensor)
        rows = parameter.to_local()
        if self.mesh.ndim == 2:
            rows = _SumOverReplicas.apply(rows, self, id(parameter))  # type: ignore[no-untyped-call]
        return rows

    def whole(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """All rows in ``dtype``, gathered; the gradient goes back as FSDP2 would reduce it. Rows that are gathered for
        no gradient are converted first, so that they are sent and held in ``dtype``."""
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            parameter = parameter.detach().to(dtype)
        assert isinstance(parameter, DTensor)
        gathered = parameter.redistribute(self.mesh, [Replicate()] * self.mesh.ndim)
        whole = gathered.to_local(grad_placements=[Partial()] * self.mesh.ndim)
        scaled: Tensor = _DivideGradient.apply(whole, divide_factor(self.model))  # type: ignore[no-untyped-call]
        return scaled.to(dtype)

    def data_parallel(self) -> DataParallel:
        groups = tuple(self.mesh.get_group(axis) for axis in range(self.mesh.ndim))
        return DataParallel(groups=groups, divide_factor=divide_factor(self.model))


class _SumOverReplicas(torch.autograd.Function):
    """The rows themselves; in the backward the sum of their gradients over the replicas, which waits, as FSDP2's own
    reduction does, for a backward with gradient synchronisation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SplitRows, parameter: int) -> Tensor:
        ctx.shared, ctx.parameter = shared, parameter
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        shared: SplitRows = ctx.shared
        waiting = shared.waiting.pop(ctx.parameter, None)
        total = gradient.to(shared.reduce_dtype, copy=True, memory_format=torch.contiguous_format)
        if waiting is not None:
            total += waiting
        if not reduces_over_replicas(shared.model):
            shared.waiting[ctx.parameter] = total
            return None, None, None
        dist.all_reduce(total, group=shared.mesh.get_group(0))
        return total.to(gradient.dtype), None, None


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.divisor, None


class PlainLogits:
    """The forward of a split head for whole logits: the weight is gathered for it, and gone afterwards. All processes
    have to ask for logits together."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    def __call__(self, hidden_states: Tensor) -> Tensor:
        rows = rows_of(self.head)
        assert rows is not None
        rows.shard(self.head.weight).agree(0, "whole logits")
        dtype = hidden_states.dtype
        bias = None if self.head.bias is None else rows.whole(self.head.bias, dtype)
        return nn.functional.linear(hidden_states, rows.whole(self.head.weight, dtype), bias)


class SplitEmbedding(nn.Embedding):
    """An embedding that shares the rows of a split head."""

    def forward(self, input: Tensor) -> Tensor:
        """``[...]`` ids to ``[..., D]``."""
        rows: SplitRows = vars(self)[_ROWS]
        weight = self._parameters["weight"]
        assert weight is not None
        return exchanged_embedding(
            input,
            rows.local(weight),
            shard=rows.shard(weight),
            dtype=rows.compute_dtype or weight.dtype,
            padding_idx=self.padding_idx,
        )


_LOOKING_UP: ContextVar[nn.Module | None] = ContextVar("liger_dist_looking_up", default=None)
"""the embedding whose forward runs in this context"""


class _ShowsComputeDtype(nn.Module):
    """In front of what a model's own class adds, such as Gemma's scale, which has the dtype of the weight: under FSDP2
    that is the one it computes in. The parameter itself stays, for a state dict taken by another thread."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        token = _LOOKING_UP.set(self)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _LOOKING_UP.reset(token)

    @property
    def weight(self) -> Tensor:
        rows: SplitRows = vars(self)[_ROWS]
        master = self._parameters["weight"]
        assert master is not None
        if _LOOKING_UP.get() is self and rows.compute_dtype is not None:
            return torch.empty(0, dtype=rows.compute_dtype, device=master.device)
        return master


def rows_mesh(mesh: DeviceMesh, size: int | None) -> DeviceMesh:
    """The mesh of the rows: that of FSDP2, or ``(replicate, shard)`` with ``size`` neighbours of its shard axis in
    every shard group; by default those on one node, or all where each is on a node of its own."""
    hosts = [host for (host,) in gathered_digests(socket.gethostname())] if size is None else []
    size = size or neighbours_on_a_node(mesh, hosts)
    if size in (1, mesh.shape[-1]):
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, size), mesh_dim_names=("replicate", "shard"))


def embedding_objection(module: nn.Module) -> str | None:
    """Why a module that shares the head's weight cannot look up in split rows, as a clause; None if it can."""
    if not isinstance(module, nn.Embedding):
        return f"is a {type(module).__name__}, not an nn.Embedding"
    options = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    changed = [f"{name}={getattr(module, name)}" for name, usual in options.items() if getattr(module, name) != usual]
    return f"has {', '.join(changed)}" if changed else None


def split_heads(
    model: nn.Module,
    heads: Sequence[nn.Linear],
    *,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    peer_copies: bool,
) -> tuple[frozenset[nn.Parameter], Callable[[], None]]:
    """Gives each process its rows of the heads and of every embedding that is tied to one of them. Every process keeps
    its own values, as FSDP2 does. To be called before FSDP2 shards the rest.

    Returns:
        The parameters that FSDP2 has to leave alone, and what undoes it all.
    """
    counting_group = _same_processes(mesh, "gloo")
    rows = SplitRows(
        model=model,
        mesh=mesh,
        tokens_group=_same_processes(mesh, None),
        counting_group=counting_group,
        calling_group=counting_group if mesh.ndim == 1 else _all_ranks(),
        peer_memory=peer_memory(mesh.get_group(mesh.ndim - 1), counting_group, device) if peer_copies else None,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
    )
    whole = {parameter for head in heads for parameter in head.parameters(recurse=False)}
    split = {parameter: _split(parameter, mesh, device) for parameter in whole}
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter in split
    ]
    classes = {module: type(module) for module, _, _ in owners}
    for module, name, parameter in owners:
        module._parameters[name] = split[parameter]
        vars(module)[_ROWS] = rows
    for module, cls in classes.items():
        if module in heads:
            assert isinstance(module, nn.Linear)
            module.forward = PlainLogits(module)  # type: ignore[assignment]
        else:
            usual: Any = cls is nn.Embedding
            module.__class__ = (
                SplitEmbedding if usual else type(cls.__name__, (_ShowsComputeDtype, cls, SplitEmbedding), {})
            )

    def undo() -> None:
        for module, name, parameter in owners:
            module._parameters[name] = parameter
            module.__class__ = classes[module]
            vars(module).pop(_ROWS, None)
            if module in heads:
                vars(module).pop("forward", None)
        _destroy(rows)

    return frozenset(split.values()), undo


def release_communicators(model: nn.Module) -> None:
    """Destroys the process groups that :func:`split_heads` has made; the rows go on with that of FSDP2's mesh."""
    for module in model.modules():
        rows = rows_of(module)
        if rows is not None:
            group = rows.mesh.get_group(rows.mesh.ndim - 1)
            vars(module)[_ROWS] = replace(
                rows, tokens_group=group, counting_group=group, calling_group=group, peer_memory=None
            )
            _destroy(rows)


def _destroy(rows: SplitRows) -> None:
    """Destroys the groups that are not the mesh's own, once."""
    own = rows.mesh.get_group(rows.mesh.ndim - 1)
    for group in {rows.tokens_group, rows.counting_group, rows.calling_group} - {own, dist.group.WORLD}:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def rows_of(head: object) -> SplitRows | None:
    """Who shares the rows of ``head``; None when they are not split here."""
    return vars(head).get(_ROWS)


def _split(parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    size, place = mesh.shape[-1], mesh.get_local_rank(mesh.ndim - 1)
    rows = -(-parameter.shape[0] // size)
    local = parameter.detach()[place * rows : (place + 1) * rows].clone()
    if not parameter.is_meta:
        local = local.to(device)
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    placements.append(Shard(0))
    split = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


def _all_ranks() -> dist.ProcessGroup:
    """A group of all ranks that talks on the hosts: the default one where it can."""
    world = dist.group.WORLD
    assert world is not None
    return world if device_for(world).type == "cpu" else dist.new_group(backend="gloo")


def _same_processes(mesh: DeviceMesh, backend: str | None) -> dist.ProcessGroup:
    """A communicator of its own for this process's shard group; on CPUs the one that there is."""
    axis = mesh.ndim - 1
    if mesh.device_type == "cpu":
        return mesh.get_group(axis)
    mine: Any = None
    for ranks in mesh.mesh.reshape(-1, mesh.shape[-1]).tolist():
        group = dist.new_group(ranks, backend=backend)
        mine = group if dist.get_rank() in ranks else mine
    assert mine is not None
    return mine  # type: ignore[no-any-return]
