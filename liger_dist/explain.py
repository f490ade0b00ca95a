"""Explains a wrapped model. Why a layer was left alone is said in the file of its kind, in ``fused_layers``."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any

from torch import nn

from .fused_head.fused_model import original_forward_of
from .fused_layers import LayerReport
from .model.compile import compiled_call
from .model.peft import active_head, base_head
from .model.stages import Stage, stage_of
from .model.structure import tied_modules
from .record import Wrapped, inner_model, record_of
from .sharding import collect_facts
from .sharding.base import Facts
from .sharding.fsdp2.expert_parallel import describe_experts


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Facts about a wrapped model, and the choices of :func:`wrap`. ``print(explanation)`` shows it as a table."""

    facts: Facts
    fused: str
    """fused loss with the transform of its logits, or the reason why it is not fused"""
    adapter: str | None
    """sharding adapter for the storage of the weight; None when the loss is not fused, or the adapter refuses it"""
    declined: tuple[str, ...]
    """reasons why the adapter refuses; empty if it does not"""
    layers: LayerReport
    """layers that kernels compute, and reasons why further ones are not"""
    attention: str
    """implementation of attention, and the reason if it is the model's original one"""
    packing: str
    """how attention, recurrent and convolution layers keep packed documents apart, or why such a call is refused"""
    compiled: str | None = None
    """number of compiled decoder layers, or under FSDP on GPUs the reason why none is; None if neither applies"""
    sharding: dict[str, str] = field(default_factory=dict)
    """what FSDP says of the model, by row: "frozen weights", their memory, sharded and replicated; "units", the number
    of FSDP2's units of decoder layers, where they have several, and what one holds unsharded"""
    router_loss: str | None = None
    """how the model adds the loss of its routers to that of the tokens; None if it does not"""
    stage: Stage | None = None
    """place in a pipeline; None for any other model"""
    labels: str | None = None
    """how the loss differs from the mean of the next tokens over ``num_items_in_batch``; None if it does not"""

    @property
    def frozen(self) -> str | None:
        """Memory of frozen parameters under FSDP, sharded and replicated; None without any, or for one rank."""
        return self.sharding.get("frozen weights")

    def __str__(self) -> str:
        rows = [] if self.stage is None else [("pipeline", self.stage.described())]
        # Most facts are of lm_head, which only the last stage of a pipeline has.
        has_head = self.stage is None or self.stage.is_last
        rows += [line for line in self.facts.lines() if has_head or line[0] in ("strategy", "world_size")]
        rows += [("loss", self.fused), ("adapter", self.adapter or "none")]
        rows += [("refused", "; ".join(self.declined))] if self.declined else []
        rows += [*self.layers.lines(), ("attention", self.attention)]
        rows.append(("packed documents", self.packing))
        rows += [] if self.compiled is None else [("compiled layers", self.compiled)]
        rows += self.sharding.items()
        rows += [] if self.router_loss is None else [("router loss", self.router_loss)]
        rows += [] if self.labels is None else [("labels", self.labels)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def explain(model: nn.Module) -> Explanation:
    """Returns the facts about a wrapped model's lm_head and their sharding adapter, at any time after :func:`wrap`. No
    collectives.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    inner = inner_model(model)
    record = record_of(inner)
    structure, stage = record.found.structure, stage_of(inner)
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
    reasons = () if record.found.recipe is None else tuple(facts.storage.adapter.not_supported_reasons(facts))
    is_computed = record.found.recipe is not None and not reasons
    experts = describe_experts(structure)
    return Explanation(
        facts=facts,
        fused=_described(record),
        adapter=facts.storage.adapter.name if is_computed else None,
        declined=reasons,
        layers=record.layers,
        attention=str(record.attention),
        packing=str(record.found.packing),
        compiled=_compiled(record),
        sharding=record.found.rows | ({} if experts is None else {"experts": experts}),
        router_loss=_router_loss(inner),
        stage=stage,
        labels=_labels(inner, record),
    )


def _described(record: Wrapped) -> str:
    depth = len(record.found.structure.prediction_layers)
    further = f"; multi-token prediction of depth {depth}" if depth else ""
    return (
        f"not fused: {record.found.unfused_reason}" if record.found.recipe is None else str(record.found.recipe)
    ) + further


def _labels(model: nn.Module, record: Wrapped) -> str | None:
    recipe, stage = record.found.recipe, stage_of(model)
    if stage is not None and not stage.is_last:
        return None
    if recipe is not None and recipe.targets == "same":
        return "the forward does not shift them: each token is scored against its own label"
    # A loss that is not fused divides where it is transformers' loss.
    code: Any = getattr(unwrap(original_forward_of(model)), "__code__", None)
    calls_original = code is None or "loss_function" in code.co_names
    if calls_original if recipe is None else recipe.takes_num_items:
        return None
    return "the forward computes the mean over those of the call and ignores num_items_in_batch"


def _router_loss(model: nn.Module) -> str | None:
    """Describes the term of the routers, by the config that the model reads in each call."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "output_router_logits", False):
        return None
    coefficient = getattr(model, "router_aux_loss_coef", getattr(text, "router_aux_loss_coef", None))
    return (
        f"{coefficient} times the balance of experts, added in full in each call: num_items_in_batch does not divide "
        "it, so that k micro-batches of a step count it k times (docs/experts.md)"
    )


def _compiled(record: Wrapped) -> str | None:
    layers = record.found.structure.layers
    number = sum(compiled_call(layer) is not None for layer in layers)
    if number > 0:
        return f"{number} of {len(layers)}"
    return None if record.found.not_compiled is None else f"none: {record.found.not_compiled}"
