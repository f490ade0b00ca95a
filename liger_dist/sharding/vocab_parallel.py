"""Vocab-parallel lm_head outside FSDP2's groups: every rank keeps its row shard, and the tokens are exchanged.

Collectives of the loss, on the shard group: two all-gathers of two values on the hosts (at the model's entry, under
HSDP over all ranks, and at the loss), one of labels, one of upstream gradients, one of a checksum of class weights if
there are any; per chunk of tokens an all-gather of hidden states, one of softmax statistics, and an all-to-all of the
hidden states' gradient. In the backward one all-gather of one value; under HSDP an all-reduce of the row shard's
gradient over the replicas. No message has the size of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from liger_dist.errors import LigerDistError
from liger_dist.losses.collectives import agree, device_for
from liger_dist.losses.embedding import exchanged_embedding
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.outputs import LossOutput
from liger_dist.losses.spec import LossSpec
from liger_dist.losses.token_exchange import ExchangedRowShard
from liger_dist.model.class_swap import SameLinearMap, with_base
from liger_dist.model.peft import active_head, has_lora
from liger_dist.model.structure import Structure

from .base import DataParallel, Facts, FullHead, Head, Storage
from .tensor_parallel import first_row

ROW_SHARDS = "_liger_dist_row_shards"
"""on lm_head and on embeddings tied to it: :class:`RowSharding`; None while the weight is full"""


@dataclass(frozen=True, kw_only=True)
class RowSharding:
    """Mesh, process groups and dtypes of a vocab-parallel lm_head; an attribute of it and of its tied embeddings."""

    mesh: DeviceMesh
    """mesh of FSDP2, ``(shard,)`` or ``(replicate, shard)``"""
    tokens_group: dist.ProcessGroup
    counting_group: dist.ProcessGroup
    """the shard group, on the hosts"""
    calling_group: dist.ProcessGroup
    """all ranks of the mesh, on their hosts under HSDP"""
    compute_dtype: torch.dtype | None
    """dtype that parameters are rounded to for computing; None for their dtype"""
    reduce_dtype: torch.dtype
    """dtype in which gradients of replicas are summed"""
    divide_factor: Callable[[], float]
    """divisor that FSDP2 applies to summed gradients"""
    syncs_replicas: Callable[[], bool]
    """True if a backward that runs now reduces gradients over replicas"""
    unreduced: dict[int, Tensor] = field(default_factory=dict)
    """gradients of no-sync micro-batches, not summed over replicas yet, by the id of the parameter"""

    def shard(self, weight: Tensor) -> ExchangedRowShard:
        """Returns the row shard of ``weight`` for the losses."""
        assert isinstance(weight, DTensor)
        return ExchangedRowShard(
            group=self.mesh.get_group(self.mesh.ndim - 1),
            tokens_group=self.tokens_group,
            counting_group=self.counting_group,
            start=first_row(weight),
            vocab_size=weight.shape[0],
            divide_factor=self.divide_factor(),
        )

    def agree_on_call(self, asked: str) -> None:
        """Checks that all ranks of FSDP2's mesh call the model with the same arguments, described by ``asked``.

        Raises:
            LigerDistError: on every rank, if they differ.
        """
        agree(self.calling_group, 0, asked)

    def local(self, parameter: Tensor) -> Tensor:
        """Returns the row shard; its gradient is summed over the replicas."""
        assert isinstance(parameter, DTensor)
        rows = parameter.to_local()
        if self.mesh.ndim == 2:
            rows = _SumOverReplicas.apply(rows, self, id(parameter))  # type: ignore[no-untyped-call]
        if rows.requires_grad:
            rows.register_hook(partial(self._check_factor, self.divide_factor()))
        return rows

    def _check_factor(self, divided_by: float, gradient: Tensor) -> None:
        """Refuses a backward of a loss that was computed with another divide factor.

        Raises:
            LigerDistError: on every rank that has changed it.
        """
        if self.divide_factor() != divided_by:
            raise LigerDistError(
                f"the gradient divide factor was {divided_by} in the forward and is {self.divide_factor()} in its "
                "backward, and the loss of a vocab-parallel lm_head reads it in the forward; call "
                "set_gradient_divide_factor before the forward."
            )

    def full(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """All-gathers all rows in ``dtype``; the gradient is reduced as FSDP2 does. Without a gradient the shards are
        converted before the all-gather, which saves communication and memory."""
        if torch.is_inference_mode_enabled():
            # DTensors of inference mode have no version, which some of their operations set.
            with torch.inference_mode(False), torch.no_grad():
                return self.full(parameter, dtype)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            parameter = parameter.detach().to(dtype)
        assert isinstance(parameter, DTensor)
        mesh = self.mesh
        if mesh.ndim == 2 and parameter.requires_grad:
            # With the replicas' sum of :meth:`local`, which has the gradients of earlier no-sync micro-batches.
            rows = _SumOverReplicas.apply(parameter.to_local(), self, id(parameter))  # type: ignore[no-untyped-call]
            mesh, shape, stride = self._shard_mesh, parameter.shape, parameter.stride()
            parameter = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        gathered = parameter.redistribute(mesh, [Replicate()] * mesh.ndim)
        full = gathered.to_local(grad_placements=[Partial()] * mesh.ndim)
        scaled: Tensor = _DivideGradient.apply(full, self.divide_factor)  # type: ignore[no-untyped-call]
        return scaled.to(dtype)

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.tokens_group, self.mesh.device_type)

    def logits(self, head: nn.Linear, hidden_states: Tensor) -> Tensor:
        """Computes full logits ``[..., V]`` of ``hidden_states`` ``[..., D]``; the weight is all-gathered and freed
        afterwards. All ranks have to call it together."""
        self.shard(head.weight).agree(0, "full logits")
        dtype = hidden_states.dtype
        bias = None if head.bias is None else self.full(head.bias, dtype)
        return nn.functional.linear(hidden_states, self.full(head.weight, dtype), bias)


class _SumOverReplicas(torch.autograd.Function):
    """Identity; its backward all-reduces the gradient over the replicas, or accumulates it under no-sync until the next
    backward that reduces, as FSDP2 does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: RowSharding, parameter: int) -> Tensor:
        ctx.shards, ctx.parameter = shards, parameter
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        shards: RowSharding = ctx.shards
        unreduced = shards.unreduced.pop(ctx.parameter, None)
        total = gradient.to(shards.reduce_dtype, copy=True, memory_format=torch.contiguous_format)
        if unreduced is not None:
            total += unreduced
        if not shards.syncs_replicas():
            shards.unreduced[ctx.parameter] = total
            return None, None, None
        dist.all_reduce(total, group=shards.mesh.get_group(0))
        return total.to(gradient.dtype), None, None


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: Callable[[], float]) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.divisor(), None


class VocabParallelLinear(SameLinearMap, nn.Linear):
    """An lm_head with a row shard; full logits all-gather the weight. The loss does not call it."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes logits ``[..., V]`` of ``[..., D]``."""
        shards = row_shards_of(self)
        return super().forward(input) if shards is None else shards.logits(self, input)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding that shares the row shard of lm_head."""

    def forward(self, input: Tensor) -> Tensor:
        """Looks up ids ``[...]``: ``[..., D]``."""
        shards, weight = row_shards_of(self), self._parameters["weight"]
        if shards is None:
            return super().forward(input)
        assert weight is not None
        return exchanged_embedding(
            input,
            shards.local(weight),
            shard=shards.shard(weight),
            dtype=shards.compute_dtype or weight.dtype,
            padding_idx=self.padding_idx,
        )


_LOOKING_UP: ContextVar[nn.Module | None] = ContextVar("liger_dist_looking_up", default=None)
"""embedding whose forward runs in this context"""


class _ShowsComputeDtype(nn.Module):
    """Makes ``self.weight.dtype`` the compute dtype while the forward of the model's embedding class runs: Gemma casts
    its scale to it. The parameter itself stays, because another thread may take a state dict."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        token = _LOOKING_UP.set(self)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _LOOKING_UP.reset(token)

    @property
    def weight(self) -> Tensor:
        shards, master = row_shards_of(self), self._parameters["weight"]
        assert master is not None
        if shards is not None and _LOOKING_UP.get() is self and shards.compute_dtype is not None:
            return torch.empty(0, dtype=shards.compute_dtype, device=master.device)
        return master


class VocabParallel:
    """Adapter in which every rank scores the tokens of all ranks against its row shard."""

    name: ClassVar[str] = "fsdp2-vocab-parallel"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        shards = row_shards_of(head)
        if shards is None:
            return None
        clause = "the weight is vocab-parallel: its row shards are never all-gathered for the loss"
        return Storage.of(self, head, head.weight, clause, data_parallel_axes=shards.mesh.ndim)

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.has_lora:
            return [
                "LoRA on a vocab-parallel lm_head is not supported; leave the head out of its target_modules, or use "
                "FSDP2(lm_head='gather')"
            ]
        return []

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        shards: RowSharding = vars(head)[ROW_SHARDS]
        groups = tuple(shards.mesh.get_group(axis) for axis in range(shards.mesh.ndim))
        return DataParallel(groups=groups, divide_factor=shards.divide_factor())

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, spec: LossSpec, execution: Execution
    ) -> LossOutput:
        shards: RowSharding = vars(head)[ROW_SHARDS]
        return fused_linear_cross_entropy(
            hidden_states,
            shards.local(head.weight),
            None if head.bias is None else shards.local(head.bias),
            labels,
            spec=spec,
            execution=execution,
            rows=shards.shard(head.weight),
        )

    def full_head(self, hidden_states: Tensor, head: Head) -> FullHead:
        def full(shards: Tensor) -> Tensor:
            rounded = shards.detach().to(hidden_states.dtype)
            return rounded.full_tensor() if isinstance(rounded, DTensor) else rounded

        return FullHead(hidden_states, full(head.weight), None if head.bias is None else full(head.bias))


def check_row_shards(model: nn.Module, structure: Structure, *, unfused: str | None) -> None:
    """Refuses a model whose lm_head cannot be vocab-parallel.

    Raises:
        LigerDistError: with the way out.
    """
    objection = None
    if row_shards_of(structure.head) is not None:
        objection = "its rows are sharded already; use strategy='auto'"
    elif structure.unfusable is not None or unfused is not None:
        objection = f"the loss of {type(model).__name__} is not fused ({structure.unfusable or unfused})"
    elif has_lora(active_head(model.get_submodule(structure.head_name))):
        objection = "LoRA is on lm_head; leave the head out of its target_modules"
    for module in structure.tied_to:
        objection = objection or _embedding_objection(module)
    if objection is not None:
        raise LigerDistError(f"lm_head is 'vocab_parallel' but {objection}, or use lm_head='gather'.")


def _embedding_objection(module: nn.Module) -> str | None:
    """Says why a module tied to lm_head cannot look up in row shards, as a clause; None if it can."""
    if not isinstance(module, nn.Embedding):
        return f"the module tied to it is a {type(module).__name__}, not an nn.Embedding"
    options = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    changed = [f"{name}={getattr(module, name)}" for name, usual in options.items() if getattr(module, name) != usual]
    return f"the embedding tied to it has {', '.join(changed)}" if changed else None


def shard_rows(
    model: nn.Module,
    heads: Sequence[nn.Linear],
    *,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    divide_factor: Callable[[], float],
    syncs_replicas: Callable[[], bool],
    undo: ExitStack,
) -> frozenset[nn.Parameter]:
    """Shards the rows of ``heads``, and of every embedding tied to one of them, over the last axis of ``mesh``. Every
    rank keeps its values, without a broadcast, as FSDP2 does. Call it before FSDP2 shards the rest.

    Returns:
        The parameters that FSDP2 has to ignore.
    """
    counting_group = _new_communicator(mesh, "gloo")
    shards = RowSharding(
        mesh=mesh,
        tokens_group=_new_communicator(mesh, None),
        counting_group=counting_group,
        calling_group=counting_group if mesh.ndim == 1 else _all_ranks_on_hosts(),
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        divide_factor=divide_factor,
        syncs_replicas=syncs_replicas,
    )
    undo.callback(_destroy, shards)
    full = {parameter for head in heads for parameter in head.parameters(recurse=False)}
    sharded = {parameter: _row_shard(parameter, mesh, device) for parameter in full}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter not in sharded:
                continue
            undo.callback(partial(module._parameters.__setitem__, name, parameter))
            module._parameters[name] = sharded[parameter]
            vars(module)[ROW_SHARDS] = shards
            undo.callback(vars(module).pop, ROW_SHARDS, None)
            if name == "weight":
                undo.callback(setattr, module, "__class__", type(module))
                module.__class__ = _sharded_class(type(module))
    return frozenset(sharded.values())


def _sharded_class(cls: Any) -> Any:
    """Builds the class of a module with row shards; a fused lm_head's class, or the model's embedding class, stays
    before it in the MRO."""
    if issubclass(cls, nn.Linear):
        return with_base(cls, nn.Linear, VocabParallelLinear)
    if cls is nn.Embedding:
        return VocabParallelEmbedding
    return type(cls.__name__, (_ShowsComputeDtype, cls, VocabParallelEmbedding), {})


def release_communicators(model: nn.Module) -> None:
    """Destroys the process groups that :func:`shard_rows` created; FSDP2's group replaces them."""
    for module in model.modules():
        shards = row_shards_of(module)
        if shards is not None:
            group = shards.mesh.get_group(shards.mesh.ndim - 1)
            vars(module)[ROW_SHARDS] = replace(shards, tokens_group=group, counting_group=group, calling_group=group)
            _destroy(shards)


def _destroy(shards: RowSharding) -> None:
    """Destroys the groups that are neither the mesh's nor destroyed already."""
    of_mesh = shards.mesh.get_group(shards.mesh.ndim - 1)
    for group in {shards.tokens_group, shards.counting_group, shards.calling_group} - {of_mesh, dist.group.WORLD}:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def row_shards_of(module: object) -> RowSharding | None:
    """Returns the row shards of lm_head, or of an embedding tied to it; None where it is not vocab-parallel."""
    return vars(module).get(ROW_SHARDS)


def _row_shard(parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    size, rank = mesh.shape[-1], mesh.get_local_rank(mesh.ndim - 1)
    rows = -(-parameter.shape[0] // size)
    local = parameter.detach()[rank * rows : (rank + 1) * rows].clone()
    if not parameter.is_meta:
        local = local.to(device)
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    placements.append(Shard(0))
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _all_ranks_on_hosts() -> dist.ProcessGroup:
    """Returns a group of all ranks with a CPU backend: the default one if it has one."""
    world = dist.group.WORLD
    assert world is not None
    return world if device_for(world).type == "cpu" else dist.new_group(backend="gloo")


def _new_communicator(mesh: DeviceMesh, backend: str | None) -> dist.ProcessGroup:
    """Creates a process group of the ranks of this rank's shard group; on CPUs returns the mesh's."""
    axis = mesh.ndim - 1
    if mesh.device_type == "cpu":
        return mesh.get_group(axis)
    local: Any = None
    for ranks in mesh.mesh.reshape(-1, mesh.shape[-1]).tolist():
        group = dist.new_group(ranks, backend=backend)
        local = group if dist.get_rank() in ranks else local
    assert local is not None
    return local  # type: ignore[no-any-return]
