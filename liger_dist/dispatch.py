"""From facts to the first adapter that has no reason against it."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .config import WrapConfig
from .errors import NoAdapterError
from .sharding.base import Engine, Facts, ShardingAdapter
from .sharding.fsdp1 import FSDP1, has_own_unit, is_stored_by_fsdp1
from .sharding.fsdp2 import FSDP2Gathered, stored_weight
from .sharding.fsdp2_vocab_parallel import FSDP2VocabParallel
from .sharding.head_cost import HeadShapes, head_costs
from .sharding.replicated import Replicated
from .sharding.split_head import rows_of
from .sharding.tensor_parallel import NOT_SPLIT, TensorParallel, tensor_parallel_axis
from .sharding.zero3 import Zero3, is_quantized, is_stored_by_zero3

ADAPTERS: tuple[ShardingAdapter, ...] = (
    TensorParallel(),
    FSDP2VocabParallel(),
    FSDP2Gathered(),
    FSDP1(),
    Zero3(),
    Replicated(),
)
"""In order of preference."""


SERVES_TOO = "would serve too; comes later in the order"


def collect_facts(
    model: nn.Module,
    head: nn.Linear,
    *,
    strategy: str,
    tied_to: tuple[nn.Module, ...],
    adapted: bool,
    config: WrapConfig,
) -> Facts:
    """What every rank knows alike of ``head`` inside ``model``. No collectives; valid at rest and inside a forward.

    Args:
        tied_to: the embeddings whose weight is the head's own parameter.
    """
    fsdp2 = stored_weight(head, model)
    weight = head.weight
    engine: Engine = "ddp" if strategy == "ddp" else "plain"
    placements = mesh_shape = mesh_axes = None
    data_parallel_axes = 0
    is_apart = not tied_to
    if fsdp2 is not None:
        engine = "fsdp2"
        weight, is_apart, data_parallel_axes = fsdp2.weight, fsdp2.is_apart, fsdp2.data_parallel_axes
    elif (rows := rows_of(head)) is not None:
        engine = "fsdp2-rows"
        data_parallel_axes = rows.mesh.ndim
        is_apart = False
    elif isinstance(weight, DTensor):
        engine = "dtensor"
    elif is_stored_by_zero3(weight):
        engine = "zero3"
    elif is_stored_by_fsdp1(weight):
        engine = "fsdp1"
        is_apart = has_own_unit(head, model, tied_to)
    if isinstance(weight, DTensor):
        placements = tuple(str(placement) for placement in weight.placements)
        mesh_shape = tuple(weight.device_mesh.shape)
        mesh_axes = weight.device_mesh.mesh_dim_names
    tensor_parallel, tensor_parallel_size = tensor_parallel_axis(weight, data_parallel_axes=data_parallel_axes)
    return Facts(
        strategy=strategy,
        engine=engine,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        weight_shape=(head.out_features, head.in_features),
        weight_dtype=str(weight.dtype),
        placements=placements,
        mesh_shape=mesh_shape,
        mesh_axes=mesh_axes,
        tensor_parallel=tensor_parallel,
        tensor_parallel_size=tensor_parallel_size,
        has_bias=head.bias is not None,
        tied=bool(tied_to),
        apart_from_embedding=is_apart,
        padded_in_two_groups=fsdp2 is not None and fsdp2.padded_in_two_groups,
        adapted=adapted,
        trains=weight.requires_grad,
        zero_quantized=engine == "zero3" and is_quantized(weight),
        head_choice=config.head,
        token_mean=config.token_mean,
    )


def costs_of_heads(facts: Facts, config: WrapConfig) -> tuple[tuple[str, str], ...]:
    """What the ways to a head under FSDP2 cost; nothing for other layouts."""
    if facts.engine not in ("fsdp2", "fsdp2-rows") or facts.tensor_parallel is not None or facts.mesh_shape is None:
        return ()
    dtype = config.param_dtype or getattr(torch, facts.weight_dtype.removeprefix("torch."))
    shapes = HeadShapes(
        tokens=config.expected_tokens,
        hidden_size=facts.weight_shape[1],
        vocab_size=facts.weight_shape[0],
        processes=facts.mesh_shape[-1],
        tied=facts.tied,
        trains=facts.trains,
        itemsize=dtype.itemsize,
        memory_budget=config.memory_budget,
    )
    return tuple((name, str(cost)) for name, cost in head_costs(shapes).items())


def reasons_against(facts: Facts) -> dict[str, list[str]]:
    """Every adapter's reasons, by name, in the order of :data:`ADAPTERS`."""
    return {adapter.name: adapter.not_supported_reasons(facts) for adapter in ADAPTERS}


def choose(facts: Facts) -> ShardingAdapter:
    """The first adapter of :data:`ADAPTERS` that has no reason against these facts.

    Raises:
        NoAdapterError: none does; the message begins with the reasons of the adapter for this storage, and lists all
            reasons and facts.
    """
    reasons = reasons_against(facts)
    for adapter in ADAPTERS:
        if not reasons[adapter.name]:
            return adapter
    is_of_another = partial(_is_of_another_storage, facts)
    nearest = next((name for name, why in reasons.items() if not any(map(is_of_another, why))), ADAPTERS[-1].name)
    table = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in reasons.items())
    known = ", ".join(f"{name}={value}" for name, value in facts.lines())
    raise NoAdapterError(
        f"no adapter can compute the loss of this output embedding: {'; '.join(reasons[nearest])}.\nAll adapters and "
        f"their reasons:\n{table}\nThe facts: {known}."
    )


def _is_of_another_storage(facts: Facts, reason: str) -> bool:
    """True if the reason only says that the adapter is for another storage."""
    return reason.startswith(facts.storage) or reason == NOT_SPLIT
