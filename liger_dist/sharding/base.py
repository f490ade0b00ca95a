"""Protocols of the package: a strategy shards a model, a sharding adapter computes the loss of an lm_head that is
stored in one way, and facts decide between adapters."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from liger_dist.config import WrapConfig
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.outputs import LossOutput
from liger_dist.losses.spec import LossSpec
from liger_dist.model.structure import Structure, head_shape

Initializer = Callable[[nn.Module], None]
"""initialises the parameters and buffers that a module itself has"""
Wrapper = DistributedDataParallel | FullyShardedDataParallel


@runtime_checkable
class Strategy(Protocol):
    """Strategy of :func:`liger_dist.wrap` for sharding a model. Its options are the fields of the object."""

    name: ClassVar[str]
    has_collectives: ClassVar[bool]
    """True if all ranks call ``wrap`` together: they then exchange refusals first"""
    shards_parameters: ClassVar[bool]
    """True if the parameters are sharded when ``wrap`` returns"""

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        """Refuses options that do not fit. No collectives.

        Args:
            world_size: None without a process group.

        Raises:
            LigerDistError: with the way out.
        """
        ...

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        """Refuses a model that this strategy cannot shard. No collectives.

        Args:
            outer: the module that :meth:`shard` shards: ``model``, or the ``PeftModel`` around it if that has further
                parameters.
            unfused: why the loss of the model is not fused; None if it is.

        Raises:
            LigerDistError: with the way out.
        """
        ...

    def shard(
        self,
        outer: nn.Module,
        model: nn.Module,
        structure: Structure,
        *,
        initialize: Initializer | None,
        undo: ExitStack,
    ) -> nn.Module:
        """Shards ``outer``, after lm_head has been fused, and returns the module that the caller trains.

        Args:
            outer: ``model``, or the ``PeftModel`` around it.
            initialize: rule that initialises a model on the meta device, which gets storage here; None otherwise.
            undo: callbacks that undo the changes after a later failure.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Storage layout of ``lm_head.weight``; equal on all ranks."""

    adapter: ShardingAdapter
    """adapter that computes the loss for this storage"""
    clause: str
    """storage in words, for messages"""
    weight_shape: tuple[int, int]
    """``(V, D)`` of the full weight"""
    weight_dtype: torch.dtype
    trains: bool = True
    """True if the weight requires a gradient"""
    placements: tuple[str, ...] | None = None
    """placements of the weight at rest, one for each mesh axis"""
    mesh_shape: tuple[int, ...] | None = None
    mesh_axes: tuple[str, ...] | None = None
    tensor_parallel: str | None = None
    """placement of the weight over the mesh axes after the data-parallel ones; None without any"""
    tensor_parallel_size: int = 1
    """number of ranks on those axes"""
    apart_from_embedding: bool = False
    """True if the framework stores the weight separately from the input embedding's, which is wrong for tied ones"""
    padded_in_two_groups: bool = False
    """True if two FSDP2 groups hold the weight, for lm_head and embedding, and the ranks do not divide its rows"""
    zero_quantized: bool = False
    """True if ZeRO-3 sends weights or gradients quantised"""

    @staticmethod
    def of(
        adapter: ShardingAdapter,
        head: nn.Module,
        weight: Tensor,
        clause: str,
        *,
        data_parallel_axes: int = 0,
        **facts: Any,
    ) -> Storage:
        """Describes the ``weight`` of ``head`` at rest, sharded or full.

        Args:
            data_parallel_axes: number of leading mesh axes over which the weight is sharded or replicated by data
                parallelism.
            facts: further fields.
        """
        on_mesh: dict[str, Any] = {}
        if isinstance(weight, DTensor):
            mesh, placements = weight.device_mesh, tuple(map(str, weight.placements))
            further = slice(data_parallel_axes, None)
            on_mesh = {
                "placements": placements,
                "mesh_shape": tuple(mesh.shape),
                "mesh_axes": mesh.mesh_dim_names,
                "tensor_parallel": " ".join(placements[further]) or None,
                "tensor_parallel_size": math.prod(mesh.shape[further]),
            }
        return Storage(
            adapter=adapter,
            clause=clause,
            weight_shape=head_shape(head),
            weight_dtype=weight.dtype,
            trains=weight.requires_grad,
            **on_mesh,
            **facts,
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Storage and options of lm_head; equal on all ranks."""

    strategy: str
    storage: Storage
    world_size: int
    has_bias: bool = False
    tied: bool = False
    """True if an input embedding is the same parameter"""
    has_lora: bool = False
    """True if a LoRA layer computes the logits"""
    token_mean: str = "local"
    """``WrapConfig.token_mean``"""

    def lines(self) -> list[tuple[str, str]]:
        """Lists name and value of each fact, for tables and messages."""
        storage = {f.name: getattr(self.storage, f.name) for f in fields(self.storage)}
        storage["storage"] = storage.pop("clause")
        del storage["adapter"]
        remaining = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "storage"}
        return [(name, str(value)) for name, value in (remaining | storage).items()]


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Groups and divisor with which a framework averages gradients over ranks with different tokens."""

    groups: tuple[dist.ProcessGroup, ...]
    """one group for each mesh axis; a sum over each of them in turn is a sum over all ranks"""
    divide_factor: float
    """divisor that the framework applies to summed gradients"""


class Head(Protocol):
    """Weight and bias of lm_head, or the effective weight and bias of a LoRA layer."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class FullHead(NamedTuple):
    """An lm_head and its input, unsharded."""

    hidden_states: Tensor
    """``[..., D]``"""
    weight: Tensor
    """``[V, D]``"""
    bias: Tensor | None
    """``[V]``"""


class ShardingAdapter(Protocol):
    """Computes the loss for one storage layout of ``lm_head.weight``, whichever framework sharded it."""

    name: ClassVar[str]

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        """Describes how the weight is stored; None for a storage layout of another adapter. No collectives;
        at rest and in a forward.

        Args:
            tied_to: embeddings that share the weight of ``head``.
        """
        ...

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        """Lists the reasons why this adapter cannot compute the loss with these facts; empty if it can. No
        collectives."""
        ...

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        """Returns the ranks that share a global token mean. No collectives."""
        ...

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, spec: LossSpec, execution: Execution
    ) -> LossOutput:
        """Computes the loss; called inside the forward of lm_head."""
        ...

    def full_head(self, hidden_states: Tensor, head: Head) -> FullHead:
        """Returns input, weight and bias in full, without gradients; called inside the forward of a teacher's
        lm_head."""
        ...


class FullWeight:
    """Base of adapters for a weight that the framework's hooks have unsharded before lm_head's forward."""

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        """Returns no ranks: the mean is over this rank's tokens."""
        return DataParallel(groups=(), divide_factor=1.0)

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, spec: LossSpec, execution: Execution
    ) -> LossOutput:
        """Computes the loss on the full weight. Collectives: those of ``execution.mean_groups``."""
        weight = head.weight
        self.check_unsharded(weight)
        return fused_linear_cross_entropy(hidden_states, weight, head.bias, labels, spec=spec, execution=execution)

    def full_head(self, hidden_states: Tensor, head: Head) -> FullHead:
        """Returns the operands unchanged."""
        self.check_unsharded(head.weight)
        return FullHead(hidden_states, head.weight, head.bias)

    def check_unsharded(self, weight: Tensor) -> None:
        """Refuses a weight that is still sharded in lm_head's forward.

        Raises:
            LigerDistError: the framework's hooks have not run.
        """
