"""Names of strategies, and the choice of a sharding adapter. One file per framework (FSDP2: a package) holds its
strategy, its adapter and all private names of the framework that are used."""

from __future__ import annotations

from dataclasses import fields, replace

from torch import nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError, NoAdapterError

from .base import Facts, ShardingAdapter, Strategy
from .ddp import DDP
from .deepspeed import DeepSpeed, Zero3
from .fsdp1 import FSDP1, FSDP1Adapter
from .fsdp2.strategy import FSDP2, FSDP2Frozen, FSDP2Gathered, FSDP2TensorParallel
from .mesh import Mesh
from .process_groups import world_size
from .single import Auto, Replicated, Single
from .tensor_parallel import TensorParallel, TensorParallelAdapter
from .vocab_parallel import VocabParallel

_DEFAULTS: tuple[Strategy, ...] = (
    Auto(),
    Single(),
    DDP(),
    FSDP1(),
    FSDP2(),
    TensorParallel(),
    DeepSpeed(),
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _DEFAULTS}
"""Strategies by name, with default options."""

ADAPTERS: tuple[ShardingAdapter, ...] = (
    VocabParallel(),
    FSDP2TensorParallel(),
    FSDP2Gathered(),
    FSDP2Frozen(),
    TensorParallelAdapter(),
    Zero3(),
    FSDP1Adapter(),
    Replicated(),
)
"""Sharding adapters; the first that recognises a weight's storage computes its loss. The last one recognises all."""


def as_strategy(strategy: str | Strategy, mesh: Mesh | None) -> Strategy:
    """Returns the strategy object for a name, with ``mesh`` as its option; returns an object as it is.

    Raises:
        LigerDistError: an unknown name, or a mesh for a strategy without that option.
    """
    names = ", ".join(map(repr, STRATEGIES))
    if not isinstance(strategy, str):
        if not isinstance(strategy, Strategy) or isinstance(strategy, type):
            members = (*Strategy.__annotations__, "check", "check_model", "shard")
            missing = [name for name in members if not hasattr(strategy, name)]
            raise LigerDistError(
                f"strategy is {strategy!r}; expected one of {names}, or an object such as liger_dist.FSDP2(...)"
                + (f" that has {', '.join(missing)}." if missing else ", not a class.")
            )
        if mesh is not None:
            raise LigerDistError(
                f"a mesh was given in addition to the strategy {type(strategy).__name__}; give it to the strategy: "
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


def has_collectives(strategy: str | Strategy) -> bool:
    """True for a strategy under which all ranks call wrap together; an unknown one is refused on each rank alone."""
    try:
        return as_strategy(strategy, None).has_collectives
    except LigerDistError:
        return False


def collect_facts(
    model: nn.Module,
    head: nn.Linear,
    *,
    strategy: str,
    tied_to: tuple[nn.Module, ...],
    has_lora: bool,
    config: WrapConfig,
) -> Facts:
    """Collects the facts about ``head`` inside ``model`` that are equal on all ranks. No collectives; valid at rest and
    inside a forward.

    Args:
        tied_to: embeddings that share the weight of ``head``.
    """
    found = (adapter.storage(head, model, tied_to) for adapter in ADAPTERS)
    return Facts(
        strategy=strategy,
        storage=next(storage for storage in found if storage is not None),
        world_size=world_size(),
        has_bias=head._parameters.get("bias") is not None,
        tied=bool(tied_to),
        has_lora=has_lora,
        token_mean=config.token_mean,
    )


def choose(facts: Facts) -> ShardingAdapter:
    """Chooses the sharding adapter for the storage of the weight.

    Raises:
        NoAdapterError: it cannot compute the loss with these facts; the message has the reasons and all facts.
    """
    adapter = facts.storage.adapter
    reasons = adapter.not_supported_reasons(facts)
    if reasons:
        known = ", ".join(f"{name}={value}" for name, value in facts.lines())
        raise NoAdapterError(
            f"no sharding adapter can compute the loss of this lm_head: {'; '.join(reasons)}.\nThe facts: {known}."
        )
    return adapter
