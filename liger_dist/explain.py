"""The verb explain: what was found in a wrapped model, and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .fused_layers import LayerReport
from .model.peft import active_head, base_head
from .model.structure import tied_modules
from .sharding import collect_facts
from .sharding.base import Facts
from .sharding.fsdp2 import FSDP2
from .sharding.head_cost import HeadShapes, head_costs
from .wrap import Wrapped, inner_model, record_of

TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What :func:`wrap` found and chose. ``print(explanation)`` shows it as a table."""

    facts: Facts
    fused: str
    """the fused loss with the transform of its logits, or why it is not fused"""
    adapter: str | None
    """the sharding adapter for the storage of the weight; None when the loss is not fused, or the adapter refuses it"""
    declined: tuple[str, ...]
    """why the adapter refuses; empty if it does not"""
    costs: tuple[tuple[str, str], ...]
    """bytes that a gathered and a vocab-parallel lm_head send and hold under FSDP2, per rank and micro-batch"""
    layers: LayerReport
    """which layers are computed by kernels, and why others are not"""
    attention: str
    """the implementation of attention, and why it is the model's own"""
    packing: str | None = None
    """how documents cannot be packed, and why; None if layers keep them apart"""

    def __str__(self) -> str:
        rows = [*self.facts.lines(), ("loss", self.fused), ("adapter", self.adapter or "none")]
        rows += [("refused", "; ".join(self.declined))] if self.declined else []
        rows += [(f"lm_head={name!r}", cost) for name, cost in self.costs]
        rows += [*self.layers.lines(), ("attention", self.attention)]
        rows += [] if self.packing is None else [("packed documents", self.packing)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def explain(model: nn.Module, *, tokens: int = TOKENS) -> Explanation:
    """What is known of a wrapped model's lm_head, and which sharding adapter that gives, at any time after
    :func:`wrap`. No collectives.

    Args:
        tokens: tokens with a label in one rank's micro-batch, for the costs of lm_head under FSDP2.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    inner = inner_model(model)
    record = record_of(inner)
    structure = record.structure
    in_use = active_head(inner.get_submodule(structure.head_name))
    base = base_head(in_use)
    head = base if isinstance(base, nn.Linear) else structure.head
    facts = collect_facts(
        inner,
        head,
        strategy=record.strategy.name,
        tied_to=structure.tied_to if head is structure.head else tied_modules(inner, head),
        has_lora=in_use is not base,
        config=record.config,
    )
    packing = None if record.packed is None else str(record.packed)
    if record.recipe is None:
        words = f"not fused: {record.unfused_reason}"
        return Explanation(
            facts=facts,
            fused=words,
            adapter=None,
            declined=(),
            costs=(),
            layers=record.layers,
            attention=str(record.attention),
            packing=packing,
        )
    adapter = facts.storage.adapter
    reasons = tuple(adapter.not_supported_reasons(facts))
    return Explanation(
        facts=facts,
        fused=str(record.recipe),
        adapter=None if reasons else adapter.name,
        declined=reasons,
        costs=_costs(facts, record, tokens),
        layers=record.layers,
        attention=str(record.attention),
        packing=packing,
    )


def _costs(facts: Facts, record: Wrapped, tokens: int) -> tuple[tuple[str, str], ...]:
    """The costs of both layouts of lm_head under FSDP2; empty for others."""
    storage = facts.storage
    if storage.adapter.name not in ("fsdp2-gathered", "fsdp2-vocab-parallel") or storage.mesh_shape is None:
        return ()
    strategy = record.strategy
    dtype = (strategy.param_dtype if isinstance(strategy, FSDP2) else None) or storage.weight_dtype
    vocab_size, hidden_size = storage.weight_shape
    shapes = HeadShapes(
        tokens=tokens,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        ranks=storage.mesh_shape[-1],
        tied=facts.tied,
        trains=storage.trains,
        itemsize=dtype.itemsize,
        memory_budget=record.config.memory_budget,
    )
    return tuple((name, str(cost)) for name, cost in head_costs(shapes).items())
