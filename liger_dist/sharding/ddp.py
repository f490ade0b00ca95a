"""DistributedDataParallel: the strategy "ddp", and a check for a running one. The weight is full on every rank, so the
adapter is :class:`.single.Replicated`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.model.structure import Structure

from .base import Initializer
from .fsdp_options import refuse_overlaps, refuse_sharded
from .mesh import require_process_group
from .process_groups import compute_device
from .single import Unsharded

_AVERAGED = "_liger_dist_averaged"


@dataclass(frozen=True, kw_only=True)
class DDP(Unsharded):
    """Replicates the model on every rank and averages its gradients. The options are those of
    :class:`torch.nn.parallel.DistributedDataParallel`."""

    find_unused_parameters: bool = False
    """True for forwards that leave trained parameters unused, such as the embedding with ``inputs_embeds``"""
    static_graph: bool = False
    """True if the parameters that are used never change"""
    name: ClassVar[str] = "ddp"
    has_collectives: ClassVar[bool] = True

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        require_process_group(self.name, world_size)

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        refuse_sharded(outer)
        if not any(parameter.requires_grad for parameter in outer.parameters()):
            raise LigerDistError(
                f"no parameter of this {type(outer).__name__} requires a gradient, so there is nothing for DDP to "
                "average; use strategy='auto' for evaluation."
            )
        if any(parameter.device != compute_device() for parameter in outer.parameters()):
            refuse_overlaps(outer, self.name, f"move the model to {compute_device()} before PEFT adds the adapter")

    def shard(
        self,
        outer: nn.Module,
        model: nn.Module,
        structure: Structure,
        *,
        initialize: Initializer | None,
        undo: ExitStack,
    ) -> nn.Module:
        super().shard(outer, model, structure, initialize=initialize, undo=undo)
        wrapper = DistributedDataParallel(
            outer.to(compute_device()),
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )
        wrapper.training = outer.training
        vars(wrapper)[_AVERAGED] = tuple(parameter for parameter in outer.parameters() if parameter.requires_grad)
        return wrapper


def averaged_parameters(root: nn.Module) -> tuple[nn.Parameter, ...]:
    """Returns the parameters whose gradients DDP averages, if :func:`liger_dist.wrap` built ``root``: those that
    required a gradient then."""
    averaged: tuple[nn.Parameter, ...] = vars(root).get(_AVERAGED, ())
    return averaged


def may_be_running() -> bool:
    """True inside the forward of a DDP, and where its reducer runs in Python (torch.compile) and cannot be queried."""
    dynamo = sys.modules.get("torch._dynamo.config")
    if str(getattr(dynamo, "optimize_ddp", "")).startswith("python_reducer"):
        return True
    ask = getattr(DistributedDataParallel, "_get_active_ddp_module", None)
    return ask is None or ask() is not None
