"""What :func:`liger_dist.wrap` found and did: the record that it keeps on the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .config import WrapConfig
from .errors import LigerDistError
from .fused_head.model_loss import FusedLoss
from .fused_head.recipe import LossRecipe
from .fused_layers import LayerReport
from .fused_layers.attention_selection import AttentionSelection
from .fused_layers.packed_calls import PackedCalls
from .model.peft import base_model_of
from .model.structure import Structure
from .model.undo import Undo
from .sharding.base import Strategy

RECORD = "_liger_dist"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a model consists of, and what :func:`liger_dist.wrap` can do with it."""

    structure: Structure
    recipe: LossRecipe | None
    """None if the loss is not fused"""
    unfused_reason: str | None
    packing: PackedCalls
    """how packed documents are kept apart"""
    not_compiled: str | None
    """why FSDP's layers are not compiled; None where they are, or could not be"""
    rows: dict[str, str]
    """what the strategy says of the model, by the name of its row in ``explain``"""


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """What :func:`liger_dist.wrap` did to a model; kept on the instance."""

    found: Findings
    strategy: Strategy
    config: WrapConfig
    loss: FusedLoss
    layers: LayerReport
    attention: AttentionSelection
    owner: str
    """id of this ``wrap`` call, which the layers that it swapped have too"""
    undo: Undo
    """what ``unwrap`` runs"""


def is_wrapped(model: nn.Module) -> bool:
    """True if :func:`wrap` has been called on the model, also inside DDP, FSDP1 or a DeepSpeed engine."""
    return isinstance(getattr(inner_model(model), RECORD, None), Wrapped)


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the wrapped model, also inside DDP, FSDP1 or a DeepSpeed engine, which all call it ``module``, and inside
    a ``PeftModel``."""
    while RECORD not in vars(model):
        inner = base_model_of(model)
        inner = getattr(model, "module", None) if inner is model else inner  # type: ignore[assignment]
        if not isinstance(inner, nn.Module) or inner is model:
            break
        model = inner
    return model


def record_of(inner: nn.Module) -> Wrapped:
    """Returns the record that :func:`wrap` left on the model.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    record = getattr(inner, RECORD, None)
    if not isinstance(record, Wrapped):
        raise LigerDistError(f"this {type(inner).__name__} is not wrapped; call liger_dist.wrap(model) first.")
    return record
