"""Autograd functions that carry a finished loss from lm_head to the loss function, and its upstream gradient back.

[Note: Zero-width logits and the upstream side channel]
The output of lm_head must stay in the autograd graph, because FSDP, DDP and ZeRO hang backward hooks on it, and no
transform between lm_head and loss may change the loss. So the loss leaves lm_head as logits of shape ``[..., 0]``
(:class:`LossToLogits`), and the loss function turns them back into the loss (:class:`LogitsToLoss`). Neither the value
nor the upstream gradient fits into a tensor of width 0: the value is kept on the :class:`.loss_call.PendingLoss`, and
in the backward :class:`LogitsToLoss` leaves the upstream gradient there for :class:`LossToLogits`, which autograd runs
next for these logits. Both functions belong to one pending loss, so calls may nest and run in several threads.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A loss on its way."""

    upstream: tuple[Tensor | None, ...]
    """gradients of :meth:`values`"""

    def values(self) -> list[Tensor]:
        """Returns the finished loss and the outputs that carry gradients."""
        ...


class LossToLogits(torch.autograd.Function):
    """See [Note: Zero-width logits and the upstream side channel]."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, shape: torch.Size, dtype: torch.dtype, *values: Tensor) -> Tensor:
        ctx.pending, ctx.nothing = pending, (None,) * len(values)
        return values[0].new_empty((*shape, 0), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Nothing was left where only the logits themselves were asked for a gradient.
        upstream, ctx.pending.upstream = ctx.pending.upstream or ctx.nothing, ()
        return None, None, None, *upstream


class LogitsToLoss(torch.autograd.Function):
    """See [Note: Zero-width logits and the upstream side channel]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, pending: Pending) -> tuple[Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        return tuple(value.clone() for value in pending.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        ctx.pending.upstream = upstream
        return torch.zeros_like(logits), None
