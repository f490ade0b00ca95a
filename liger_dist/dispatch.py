"""From facts to the first adapter that has no reason against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .config import WrapConfig
from .errors import NoAdapterError
from .sharding.base import Engine, Facts, ShardingAdapter
from .sharding.fsdp2 import FSDP2Gathered, fsdp_param_of
from .sharding.replicated import Replicated

ADAPTERS: tuple[ShardingAdapter, ...] = (FSDP2Gathered(), Replicated())
"""In order of preference."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The chosen adapter, and why each other one was not."""

    adapter: ShardingAdapter
    declined: tuple[tuple[str, tuple[str, ...]], ...]
    """name and reasons; an adapter that could have served as well says so"""


def collect_facts(model: nn.Module, head: nn.Linear, *, strategy: str, tied: bool, config: WrapConfig) -> Facts:
    """What every rank knows alike of ``head`` inside ``model``. No collectives; valid at rest and inside a forward."""
    fsdp_param = fsdp_param_of(head, model)
    weight = head.weight
    engine: Engine = "ddp" if strategy == "ddp" else "plain"
    placements = mesh_shape = mesh_axes = None
    if fsdp_param is not None:
        engine = "fsdp2"
        weight = fsdp_param.sharded_param
    elif isinstance(weight, DTensor):
        engine = "dtensor"
    if isinstance(weight, DTensor):
        placements = tuple(str(placement) for placement in weight.placements)
        mesh_shape = tuple(weight.device_mesh.shape)
        mesh_axes = weight.device_mesh.mesh_dim_names
    return Facts(
        strategy=strategy,
        engine=engine,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        weight_shape=tuple(weight.shape),
        weight_dtype=str(weight.dtype),
        placements=placements,
        mesh_shape=mesh_shape,
        mesh_axes=mesh_axes,
        has_bias=head.bias is not None,
        tied=tied,
        head_choice=config.head,
        token_mean=config.token_mean,
    )


def choose(facts: Facts) -> Decision:
    """The first adapter of :data:`ADAPTERS` that serves these facts.

    Raises:
        NoAdapterError: none does; the message lists the facts and every reason.
    """
    reasons = {adapter.name: adapter.not_supported_reasons(facts) for adapter in ADAPTERS}
    for adapter in ADAPTERS:
        if not reasons[adapter.name]:
            others = tuple(
                (name, tuple(why) or ("would serve too; comes later in the order",))
                for name, why in reasons.items()
                if name != adapter.name
            )
            return Decision(adapter=adapter, declined=others)
    table = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in reasons.items())
    known = ", ".join(f"{name}={value}" for name, value in facts.lines())
    raise NoAdapterError(f"no adapter can compute the loss of this output embedding ({known}):\n{table}")
