"""One gradient of lm_head's weight for several losses of one call of a model.

[Note: One gradient of several losses]
autograd would add up a full weight gradient for each loss, in the weight's dtype. Here the losses add to one sum in
fp32 (fp64 for fp64 weights), and return none. A tensor without elements, :meth:`SharedGradient.anchor`, is an input of
all of them: autograd runs its backward after those of all losses that a backward reaches, and it returns the sum. So
losses may be left out, or be scaled in any way.

The gradients can be computed in the forward, with three products instead of four, only if the factors of the losses are
known there (``Execution.coefficient``): the sum holds ``sum_k coefficient_k * dL_k/dW``, and the backward scales it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_dist.model.torch_modes import backward_id, keeps_graph
from liger_dist_kernels import Backend, WeightSum, default_budget, scaled

from .spec import PendingGradients


def budget_beside_sum(numel: int) -> int:
    """Returns the memory budget for logits, in bytes, beside a sum in fp32 of ``numel`` elements: the default one, less
    what the sum takes more than a gradient in 16 bits."""
    budget = default_budget(True)
    return max(budget - 2 * numel, budget // 4)


class SharedGradient:
    """Gradient of lm_head's weight, summed over the losses of one call of a model. See [Note: One gradient of several
    losses]."""

    def __init__(self, pending: PendingGradients, backend: Backend = "auto") -> None:
        self._state = _State(backend)
        self._pending = pending
        self._anchor: Tensor | None = None
        self._number = 0

    @property
    def sum(self) -> WeightSum:
        """The sum, for the kernels to add to."""
        return self._state.sum

    def anchor(self, weight: Tensor) -> Tensor:
        """Returns the tensor ``[0]`` that every loss of ``weight`` has as an input."""
        if self._anchor is None:
            self._anchor = _Anchor.apply(weight, self._state)  # type: ignore[no-untyped-call]
        assert self._anchor is not None
        return self._anchor

    def holds(self, coefficient: float | None, *, is_possible: bool) -> tuple[int, bool]:
        """Decides for a loss whether its forward adds its gradient to the sum; the first loss decides for all. Returns
        the number of the loss in :class:`.spec.PendingGradients`, and the decision."""
        state, is_possible = self._state, is_possible and coefficient is not None
        if state.is_held is None:
            state.is_held = False
            if is_possible:
                self._number, state.is_held = self._pending.begin()
        return self._number, is_possible and state.is_held

    def begin_backward(self) -> None:
        """Drops what an earlier backward has left of its sum: it did not reach the weight. Call it in the backward of a
        loss that computes its gradients there."""
        backward = backward_id()
        if backward != self._state.backward:
            self.sum.take()
            self._state.backward = backward

    def scale(self, factor: Tensor) -> None:
        """Sets the factor (0-d) of the sum of the forward: the upstream gradient of a loss by its coefficient, which is
        the same for all of them."""
        self._state.factor = factor


@dataclass
class _State:
    """What the backward of :class:`_Anchor` reads; it refers to no graph."""

    backend: Backend
    sum: WeightSum = field(default_factory=WeightSum)
    is_held: bool | None = None
    """True if the forward computes the sum, False if the backward does; None before the first loss"""
    factor: Tensor | None = None
    """of a sum of the forward, 0-d"""
    backward: int | None = None
    """backward that the sum belongs to, where the backward computes it"""

    def total(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the sum ``[V, D]`` in ``dtype``; None if no loss has added to it."""
        if not self.is_held:
            total = self.sum.take()
            return None if total is None else total.to(dtype)
        held, factor = self.sum.total_VD, self.factor
        if held is None or factor is None:
            return None
        is_last = not keeps_graph()
        if is_last:
            self.sum.take()
        out = held if is_last and held.dtype == dtype else torch.empty_like(held, dtype=dtype)
        return scaled(held, factor, out=out, backend=self.backend)


class _Anchor(torch.autograd.Function):
    """See [Note: One gradient of several losses]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, state: _State) -> Tensor:
        ctx.state, ctx.dtype = state, weight.dtype
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        return ctx.state.total(ctx.dtype), None
