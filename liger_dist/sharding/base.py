"""Protocols of the package: a strategy shards a model, a sharding adapter computes the loss of an lm_head that is
stored in one way, and facts are what the choice between adapters is made from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from liger_dist.config import WrapConfig
from liger_dist.losses.spec import Execution, LossOutput, LossSpec
from liger_dist.structure import Structure

Engine = Literal["plain", "fsdp1", "fsdp2", "vocab-parallel", "dtensor", "zero3"]
Initializer = Callable[[nn.Module], None]
"""initialises the parameters and buffers that a module itself owns"""
Wrapper = DistributedDataParallel | FullyShardedDataParallel


class Strategy(Protocol):
    """How :func:`liger_dist.wrap` shards a model. Its options are the fields of the object."""

    name: ClassVar[str]
    has_collectives: ClassVar[bool]
    """True if all ranks call ``wrap`` together: they then exchange their refusals first"""
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
            outer: what :meth:`shard` shards: ``model``, or the ``PeftModel`` around it with parameters of its own.
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
        """Shards ``outer``, the lm_head in whose ``model`` is fused already, and returns what the caller trains.

        Args:
            outer: ``model``, or the ``PeftModel`` around it.
            initialize: the rule for a model on the meta device, which gets storage here; None for any other.
            undo: callbacks that undo what can be undone when something fails later.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a framework stores ``lm_head.weight``."""

    engine: Engine
    clause: str
    """the storage as a clause for reasons"""
    weight: Tensor
    """the parameter at rest: sharded, or full"""
    data_parallel_axes: int = 0
    """number of leading mesh axes over which the weight is sharded or replicated by data parallelism"""
    apart_from_embedding: bool
    """True if the framework stores the weight apart from the input embedding's, which is wrong for tied ones"""
    padded_in_two_groups: bool = False
    """True if two FSDP2 groups hold the weight, for lm_head and embedding, and the ranks do not divide its rows"""
    zero_quantized: bool = False
    """True if ZeRO-3 sends weights or gradients quantised"""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Storage and options of lm_head; equal on all ranks."""

    strategy: str
    engine: Engine
    """"plain" for a full tensor, "vocab-parallel" for row shards beside FSDP2's groups, "dtensor" for a DTensor that no
    framework unshards"""
    storage: str
    """:attr:`Storage.clause`"""
    world_size: int
    weight_shape: tuple[int, int]
    """of the full weight, ``(V, D)``"""
    weight_dtype: torch.dtype
    placements: tuple[str, ...] | None
    """of the weight at rest, one for each mesh axis"""
    mesh_shape: tuple[int, ...] | None
    mesh_axes: tuple[str, ...] | None
    tensor_parallel: str | None
    """placement of the weight over the tensor-parallel axes; None without any"""
    tensor_parallel_size: int
    has_bias: bool
    tied: bool
    """True if an input embedding is the same parameter"""
    apart_from_embedding: bool
    """:attr:`Storage.apart_from_embedding`"""
    padded_in_two_groups: bool
    """:attr:`Storage.padded_in_two_groups`"""
    has_lora: bool
    """True if a LoRA layer computes the logits"""
    trains: bool
    """True if the weight requires a gradient"""
    zero_quantized: bool
    """:attr:`Storage.zero_quantized`"""
    token_mean: str
    """``WrapConfig.token_mean``"""

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each fact, for tables and messages."""
        return [(field.name, str(getattr(self, field.name))) for field in fields(self)]


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """How a framework averages gradients over ranks with different tokens."""

    groups: tuple[dist.ProcessGroup, ...]
    """one for each mesh axis; a sum over each of them in turn is a sum over all ranks"""
    divide_factor: float
    """divisor that the framework applies to summed gradients"""


class Head(Protocol):
    """Weight and bias of lm_head, or the effective ones of a LoRA layer."""

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
        """How the weight is stored, if it is stored in this adapter's way. No collectives; at rest and in a forward.

        Args:
            tied_to: the embeddings whose weight is the parameter of ``head``.
        """
        ...

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        """Why this adapter cannot compute the loss with these facts; empty if it can. No collectives."""
        ...

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        """The ranks that share a global token mean. No collectives."""
        ...

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, spec: LossSpec, execution: Execution
    ) -> LossOutput:
        """The loss; called inside the forward of lm_head."""
        ...

    def full_head(self, hidden_states: Tensor, head: Head) -> FullHead:
        """Input, weight and bias in full, without gradients; called inside the forward of a teacher's lm_head."""
        ...
