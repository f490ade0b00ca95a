"""Names of strategies, and the choice of a sharding adapter. One file per framework holds its strategy, its adapter and
every private name of it that is used."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

from torch import nn
from torch.distributed.tensor import DTensor

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError, NoAdapterError
from liger_dist.structure import head_shape

from .base import Facts, ShardingAdapter, Storage, Strategy
from .ddp import DDP
from .deepspeed import DeepSpeed, Zero3
from .fsdp1 import FSDP1, FSDP1Adapter
from .fsdp2 import FSDP2, FSDP2Gathered, FSDP2TensorParallel
from .mesh import Mesh
from .process_groups import world_size
from .single import Auto, Replicated, Single
from .tensor_parallel import NOT_SPLIT, TensorParallel, TensorParallelAdapter, tensor_parallel_axis
from .vocab_parallel import VocabParallel

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (Auto(), Single(), DDP(), FSDP1(), FSDP2(), TensorParallel(), DeepSpeed())
}
"""Strategies by name, with default options."""

ADAPTERS: tuple[ShardingAdapter, ...] = (
    VocabParallel(),
    FSDP2Gathered(),
    FSDP2TensorParallel(),
    TensorParallelAdapter(),
    Zero3(),
    FSDP1Adapter(),
    Replicated(),
)
"""The first adapter that recognises a storage describes it; the first without a reason against the facts is used."""


STRATEGY_MEMBERS = ("name", "has_collectives", "shards_parameters", "check", "check_model", "shard")
"""of the protocol :class:`.base.Strategy`"""


def as_strategy(strategy: str | Strategy, mesh: Mesh | None) -> Strategy:
    """The strategy object for a name, with ``mesh`` as its option; an object itself.

    Raises:
        LigerDistError: an unknown name, or a mesh that the strategy does not take.
    """
    names = ", ".join(map(repr, STRATEGIES))
    if not isinstance(strategy, str):
        missing = [name for name in STRATEGY_MEMBERS if not hasattr(strategy, name)]
        if missing or isinstance(strategy, type):
            raise LigerDistError(
                f"strategy is {strategy!r}; expected one of {names}, or an object such as liger_dist.FSDP2(...)"
                + (f" that has {', '.join(missing)}." if missing else ", not a class.")
            )
        if mesh is not None:
            raise LigerDistError(
                f"a mesh was given beside the strategy {type(strategy).__name__}; give it to the strategy: "
                f"{type(strategy).__name__}(mesh=...)."
            )
        return strategy
    if strategy not in STRATEGIES:
        raise LigerDistError(f"strategy is {strategy!r}; expected one of {names}, or an object such as FSDP2(...).")
    found = STRATEGIES[strategy]
    if mesh is None:
        return found
    if "mesh" not in {field.name for field in fields(found)}:  # type: ignore[arg-type]
        raise LigerDistError(
            f"a mesh was given but strategy={strategy!r} takes none; use strategy='fsdp1', 'fsdp2' or 'tp'."
        )
    return replace(found, mesh=mesh)  # type: ignore[type-var]


def storage_of(head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage:
    """How ``head.weight`` is stored. No collectives; valid at rest and inside a forward."""
    found = (adapter.storage(head, model, tied_to) for adapter in ADAPTERS)
    return next(storage for storage in found if storage is not None)


def collect_facts(
    model: nn.Module,
    head: nn.Linear,
    *,
    strategy: str,
    tied_to: tuple[nn.Module, ...],
    has_lora: bool,
    config: WrapConfig,
) -> Facts:
    """What every rank knows alike of ``head`` inside ``model``. No collectives; valid at rest and inside a forward.

    Args:
        tied_to: the embeddings whose weight is the parameter of ``head``.
    """
    storage = storage_of(head, model, tied_to)
    weight = storage.weight
    axis, axis_size = tensor_parallel_axis(weight, data_parallel_axes=storage.data_parallel_axes)
    distributed = weight if isinstance(weight, DTensor) else None
    return Facts(
        strategy=strategy,
        engine=storage.engine,
        storage=storage.clause,
        world_size=world_size(),
        weight_shape=head_shape(head),
        weight_dtype=weight.dtype,
        placements=None if distributed is None else tuple(map(str, distributed.placements)),
        mesh_shape=None if distributed is None else tuple(distributed.device_mesh.shape),
        mesh_axes=None if distributed is None else distributed.device_mesh.mesh_dim_names,
        tensor_parallel=axis,
        tensor_parallel_size=axis_size,
        has_bias=head._parameters.get("bias") is not None,
        tied=bool(tied_to),
        apart_from_embedding=storage.apart_from_embedding,
        padded_in_two_groups=storage.padded_in_two_groups,
        has_lora=has_lora,
        trains=weight.requires_grad,
        zero_quantized=storage.zero_quantized,
        token_mean=config.token_mean,
    )


def reasons_against(facts: Facts) -> dict[str, list[str]]:
    """Every adapter's reasons against these facts, by name, in the order of :data:`ADAPTERS`."""
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
        f"no sharding adapter can compute the loss of this lm_head: {'; '.join(reasons[nearest])}.\nAll adapters and "
        f"their reasons:\n{table}\nThe facts: {known}."
    )


def _is_of_another_storage(facts: Facts, reason: str) -> bool:
    """True if the reason only says that the adapter is for another storage."""
    return reason.startswith(facts.storage) or reason == NOT_SPLIT
