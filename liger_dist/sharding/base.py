"""What an adapter is, and the facts it decides by."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from liger_dist.losses.arguments import Execution, LossArguments, LossOutput

Engine = Literal["plain", "ddp", "fsdp1", "fsdp2", "fsdp2-rows", "dtensor", "zero3"]
STORAGE: dict[Engine, str] = {
    "plain": "the weight is whole on every process",
    "ddp": "the weight is whole on every process",
    "fsdp1": "FSDP1 shards the weight",
    "fsdp2": "FSDP2 shards the weight",
    "fsdp2-rows": "the weight's rows stay split over FSDP2's shard axis, and are never gathered for the loss",
    "dtensor": "the weight is a DTensor that no engine gathers",
    "zero3": "ZeRO-3 partitions the weight",
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What every rank knows alike of the output embedding. Nothing here may differ between ranks."""

    strategy: str
    engine: Engine
    """who stores the weight: "plain" for a whole tensor, "fsdp2-rows" for rows beside FSDP2's groups, "dtensor" for
    another DTensor that no engine gathers"""
    world_size: int
    weight_shape: tuple[int, ...]
    """of the full weight, ``(V, D)``"""
    weight_dtype: str
    placements: tuple[str, ...] | None
    """of the weight at rest, one for each mesh axis"""
    mesh_shape: tuple[int, ...] | None
    mesh_axes: tuple[str, ...] | None
    tensor_parallel: str | None
    """the weight's placement over the tensor-parallel mesh; None without one"""
    tensor_parallel_size: int
    has_bias: bool
    tied: bool
    """whether the input embedding is the same parameter"""
    apart_from_embedding: bool
    """whether the engine stores the weight apart from the input embedding's; must not be where they are one"""
    padded_in_two_groups: bool
    """True where two FSDP2 groups hold the weight, for head and embedding, and the ranks do not divide its rows"""
    adapted: bool
    """whether an adapter (LoRA) makes the weight that is used out of this one and its own"""
    trains: bool
    """whether the weight requires a gradient"""
    zero_quantized: bool
    """ZeRO-3: whether DeepSpeed sends weights or gradients quantised"""
    head_choice: str
    """``WrapConfig.head``"""
    token_mean: str
    """``WrapConfig.token_mean``"""

    @property
    def storage(self) -> str:
        """Who stores the weight, as a clause for reasons."""
        return STORAGE[self.engine]

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each fact, for tables and messages."""
        return [(field.name, str(getattr(self, field.name))) for field in fields(self)]


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """How an engine averages gradients over processes with different tokens."""

    groups: tuple[dist.ProcessGroup, ...]
    """one for each mesh axis, none when nobody else has other tokens; a sum over all of them in turn is a sum over all
    processes"""
    divide_factor: float
    """what the engine divides summed gradients by"""


class Head(Protocol):
    """What scores hidden states: an ``nn.Linear``, or the weight that an adapter makes of one."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class ShardingAdapter(Protocol):
    """One way to compute the loss of a head whose weight is stored in one layout."""

    name: ClassVar[str]

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        """Why this adapter cannot serve a head with these facts; empty when it can. No collectives."""
        ...

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        """Who shares a global token mean. No collectives."""
        ...

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, loss: LossArguments, execution: Execution
    ) -> LossOutput:
        """The loss, called inside the head's own forward."""
        ...
