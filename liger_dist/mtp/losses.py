"""Losses of further calls of lm_head that a forward of this library announces: their labels and factors are known, so
that the forward computes the gradient of lm_head's weight for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.fused_head.fused_model import loss_of
from liger_dist.fused_head.logits import FusedLogits
from liger_dist.fused_head.loss_call import LossCall, PendingLoss, current_call


class Announced:
    """Further losses of the running call of a model whose loss is fused. The only loss of the call that carries
    gradients has to be ``coefficient`` times what the model returned for the first one, see :meth:`note_output`, and
    the sum of the further ones with their coefficients."""

    def __init__(self, first: LossCall) -> None:
        self._first = first

    @staticmethod
    def of(model: nn.Module, *, coefficient: float | None) -> Announced | None:
        """Returns the further losses of the running call; None if its loss is not fused.

        Args:
            coefficient: of the first loss; 0 leaves it out, and costs nothing. None if the further losses carry no
                gradients.
        """
        loss = loss_of(model)
        first = None if loss is None else current_call(loss.wrap_id)
        if first is None or first.on_logits:
            return None
        if coefficient is not None:
            first.announce(coefficient)
        return Announced(first)

    def note_output(self, loss: Tensor) -> None:
        """Compares the loss that the model has returned with the first loss of the call. If the model has scaled it,
        the factors differ, and the further losses get a sum of gradients apart from that of the first."""
        if torch.is_grad_enabled() and not self._first.is_term_of(loss):
            self._first.share_separately()

    def loss(
        self, head: nn.Module, hidden_states: Tensor, labels: Tensor, *, coefficient: float, is_last: bool
    ) -> Tensor:
        """Computes the mean of the losses of ``hidden_states`` ``[B, S, D]`` for aligned labels ``[B, S]``, 0-d."""
        self._first.next_loss = self._first.further(labels, coefficient, is_last)
        self._first.next_loss.is_announced = True
        logits: Any = head(hidden_states)
        assert isinstance(logits, FusedLogits)
        pending = logits.carried
        assert isinstance(pending, PendingLoss)
        return pending.take(logits)
