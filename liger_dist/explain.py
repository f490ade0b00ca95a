"""The verb explain: what was found in a wrapped model, and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .dispatch import SERVES_TOO, collect_facts, costs_of_heads, reasons_against
from .patching.layers import LayerReport
from .patching.structure import active_head, base_head
from .sharding.base import Facts
from .wrap import inner_model, record_of


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What :func:`wrap` found and chose. ``print(explanation)`` shows it as a table."""

    facts: Facts
    fused: str
    """the fused loss with the transform of its logits, or why it is not fused"""
    adapter: str | None
    """the chosen adapter; None when the loss is not fused, or when every adapter has a reason against it"""
    declined: tuple[tuple[str, tuple[str, ...]], ...]
    """every other adapter with its reasons"""
    head: str | None
    """under "fsdp2": the way to the head, and why"""
    costs: tuple[tuple[str, str], ...]
    """of the ways to a head under FSDP2, for each micro-batch of ``WrapConfig.expected_tokens`` on each process"""
    layers: LayerReport
    """which layers are computed by kernels, and why others are not"""

    def __str__(self) -> str:
        rows = [*self.facts.lines(), ("loss", self.fused), ("adapter", self.adapter or "none")]
        rows += [(f"not {name}", "; ".join(why)) for name, why in self.declined]
        rows += [("head", self.head)] if self.head is not None else []
        rows += [(f"cost of {name}", cost) for name, cost in self.costs]
        rows += self.layers.lines()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def explain(model: nn.Module) -> Explanation:
    """What the dispatcher sees and chooses for a wrapped model, at any time after :func:`wrap`. No collectives.

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
        strategy=record.strategy,
        tied_to=structure.tied_to if head is structure.head else (),
        adapted=in_use is not base,
        config=record.config,
    )
    if record.plan is None:
        words = f"not fused: {record.unfused_reason}"
        return Explanation(
            facts=facts, fused=words, adapter=None, declined=(), head=record.head_reason, costs=(), layers=record.layers
        )
    reasons = reasons_against(facts)
    chosen = next((name for name, why in reasons.items() if not why), None)
    return Explanation(
        facts=facts,
        fused=str(record.plan),
        adapter=chosen,
        declined=tuple((name, tuple(why) or (SERVES_TOO,)) for name, why in reasons.items() if name != chosen),
        head=record.head_reason,
        costs=costs_of_heads(facts, record.config),
        layers=record.layers,
    )
