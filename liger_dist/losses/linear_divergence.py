"""Divergence of a student from a teacher, whose forward computes the student's gradients, while both weights are
unsharded; the backward needs no teacher and only scales them.

Legend: T tokens with a label, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError, refuse_second_order
from liger_dist.model.torch_modes import in_checkpoint

from .outputs import LossOutput
from .rows import Problem, scaled_gradients


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # The backward would keep the teacher's tensors.
        ctx.problem = replace(problem, distillation=None, spec=replace(problem.spec, distillation=None))
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        result = problem.rows.diverge(hidden_TD, weight_VD, bias_V, problem)
        ctx.save_for_backward(result.d_hidden_TD, result.d_weight_VD, result.d_bias_V)
        assert problem.distillation is not None
        hard_weight, scales = problem.distillation.hard_weight, problem.scales
        divergence = scales.total(result.divergence_T)
        hard = torch.zeros_like(divergence)
        if result.cross_entropy_T is not None:
            hard = scales.total(result.cross_entropy_T)
        # With a weight of 1 the divergence has no part in the loss, though it may be infinite. A copy: the hard loss is
        # an output without a gradient.
        loss = hard.clone() if hard_weight == 1.0 else (1.0 - hard_weight) * divergence + hard_weight * hard
        ctx.mark_non_differentiable(divergence, hard, result.entropy_T)
        return loss, divergence, hard, result.entropy_T

    @staticmethod
    def backward(
        ctx: Any, d_loss: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_second_order("the distillation loss", "use full logits of both models for them")
        d_hidden, d_weight, d_bias = scaled_gradients(ctx.problem, ctx.saved_tensors, d_loss, ctx.dtypes)
        return d_hidden, d_weight, d_bias, None


def linear_divergence_loss(
    hidden_TD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    *,
    spread: Callable[[Tensor], Tensor],
) -> LossOutput:
    """Computes the loss of ``problem.distillation``; ``spread`` scatters per-token values to the labels' shape.

    Raises:
        LigerDistError: inside ``torch.utils.checkpoint``, whose second forward has no teacher.
    """
    if problem.needs.any and in_checkpoint():
        raise LigerDistError(
            "a distillation loss was asked for inside torch.utils.checkpoint, whose second forward would need the "
            "teacher again. Checkpoint the student's layers (model.gradient_checkpointing_enable()), not the whole "
            "student."
        )
    loss, divergence, hard_loss, entropy_T = _LinearDivergence.apply(hidden_TD, weight, bias, problem)  # type: ignore[no-untyped-call]
    return LossOutput(loss=loss, divergence=divergence, hard_loss=hard_loss, entropy=spread(entropy_T))
