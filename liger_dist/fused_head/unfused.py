"""Refuses options of the loss in calls of a wrapped model whose loss is not fused, instead of dropping them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import nn

from liger_dist.losses.arguments import as_output_names

from .signature import LOSS_KEYWORDS, Call, options_for


class UnfusedCalls:
    """Forward pre-hook of one model whose loss is not fused."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        self._reason = reason
        self._names = frozenset(signature(model.forward).parameters)
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)

    def remove(self) -> None:
        self._hook.remove()

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = {name: kwargs[name] for name in LOSS_KEYWORDS if name in kwargs and name not in self._names}
        if not given:
            return None
        call = Call(
            named={},
            args=args,
            kwargs={name: value for name, value in kwargs.items() if name not in given},
            loss=given,
            outputs=as_output_names(given.get("outputs") or ()),
            model_name=type(model).__name__,
            own_smoothing=getattr(getattr(model, "config", None), "label_smoothing", None) or 0.0,
        )
        loss_function: Any = getattr(model, "loss_function", F.cross_entropy)
        return call.args, call.kwargs | options_for(loss_function, call, reason=self._reason)
