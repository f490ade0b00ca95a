"""A full weight on every rank: the strategies "none" and "auto", which shard nothing, and the sharding adapter for one
rank, DDP, ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.model.structure import Structure, stored_parameter

from .base import DataParallel, Facts, FullWeight, Initializer, Storage
from .materialize import materialize
from .process_groups import compute_device


class Unsharded:
    """Base of strategies that leave the parameters full: gives a meta model storage, and refuses nothing."""

    name: ClassVar[str]
    has_collectives: ClassVar[bool] = False
    shards_parameters: ClassVar[bool] = False

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        """Refuses nothing."""

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        """Refuses nothing."""

    def shard(
        self,
        outer: nn.Module,
        model: nn.Module,
        structure: Structure,
        *,
        initialize: Initializer | None,
        undo: ExitStack,
    ) -> nn.Module:
        if initialize is not None:
            materialize(model, initialize, layers=structure.all_layers, device=compute_device())
        return outer


@dataclass(frozen=True, kw_only=True)
class Auto(Unsharded):
    """Fuses only; another framework shards the model afterwards, before its first forward."""

    name: ClassVar[str] = "auto"

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        if on_meta:
            raise LigerDistError(
                f"the model is on the meta device and strategy={self.name!r} does not give it storage; name a strategy "
                "that does, or materialise it first."
            )


@dataclass(frozen=True, kw_only=True)
class LoadedByHost(Auto):
    """Fuses only; all ranks of the host wrap together, and it materializes models on the meta device and broadcasts the
    values of rank 0."""

    has_collectives: ClassVar[bool] = True

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        """Refuses nothing."""


@dataclass(frozen=True, kw_only=True)
class Single(Unsharded):
    """Fuses only, for one process."""

    name: ClassVar[str] = "none"

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        if world_size is not None and world_size > 1:
            raise LigerDistError(
                f"strategy='none' is for one process but {world_size} are running, whose gradients would not be "
                "averaged; use 'ddp' or 'fsdp2', or 'auto' when another framework shards the model."
            )


class Replicated(FullWeight):
    """Fused loss on the full weight. Collectives in the loss: none."""

    name: ClassVar[str] = "replicated"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        weight = stored_parameter(head)
        return Storage.of(self, head, weight, "every rank has the full weight", apart_from_embedding=not tied_to)

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.token_mean == "global" and facts.strategy != "ddp" and facts.world_size > 1:
            return [
                f"token_mean='global' needs to know what averages the gradients of {facts.world_size} ranks; wrap with "
                "strategy='ddp', or pass num_items_in_batch to the model"
            ]
        return []

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None:
            return DataParallel(groups=(), divide_factor=1.0)
        return DataParallel(groups=(world,), divide_factor=float(world.size()))
