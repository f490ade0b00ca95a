"""The verb explain: what was found in a wrapped model, and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .fused_layers import LayerReport
from .peft_layers import active_head, base_head
from .sharding import collect_facts, reasons_against
from .sharding.base import Facts
from .sharding.fsdp2 import FSDP2
from .sharding.head_cost import HeadShapes, head_costs
from .structure import tied_modules
from .wrap import Wrapped, inner_model, record_of

TOKENS = 8192
SERVES_TOO = "would serve too; comes later in the order"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What :func:`wrap` found and chose. ``print(explanation)`` shows it as a table."""

    facts: Facts
    fused: str
    """the fused loss with the transform of its logits, or why it is not fused"""
    adapter: str | None
    """the chosen sharding adapter; None when the loss is not fused, or when every adapter has a reason against it"""
    declined: tuple[tuple[str, tuple[str, ...]], ...]
    """every other adapter with its reasons"""
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
        rows += [(f"not {name}", "; ".join(why)) for name, why in self.declined]
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
    reasons = reasons_against(facts)
    chosen = next((name for name, why in reasons.items() if not why), None)
    return Explanation(
        facts=facts,
        fused=str(record.recipe),
        adapter=chosen,
        declined=tuple((name, tuple(why) or (SERVES_TOO,)) for name, why in reasons.items() if name != chosen),
        costs=_costs(facts, record, tokens),
        layers=record.layers,
        attention=str(record.attention),
        packing=packing,
    )


def _costs(facts: Facts, record: Wrapped, tokens: int) -> tuple[tuple[str, str], ...]:
    """The costs of both layouts of lm_head under FSDP2; empty for others."""
    if facts.engine not in ("fsdp2", "vocab-parallel") or facts.tensor_parallel is not None or facts.mesh_shape is None:
        return ()
    strategy = record.strategy
    dtype = (strategy.param_dtype if isinstance(strategy, FSDP2) else None) or facts.weight_dtype
    vocab_size, hidden_size = facts.weight_shape
    shapes = HeadShapes(
        tokens=tokens,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        ranks=facts.mesh_shape[-1],
        tied=facts.tied,
        trains=facts.trains,
        itemsize=dtype.itemsize,
        memory_budget=record.config.memory_budget,
    )
    return tuple((name, str(cost)) for name, cost in head_costs(shapes).items())
