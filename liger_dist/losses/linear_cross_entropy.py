"""Fused linear cross entropy with gradients, for lm_head rows on this rank.

Legend: T tokens with a label, D hidden, V vocabulary.

A scalar loss computes its gradients in the forward and only scales them in the backward. When per-token outputs carry
gradients (``reduction="none"``, log-probabilities, entropies), their coefficients are unknown in the forward. The
logits are kept for the backward if all of them fit the memory budget, and recomputed otherwise. A scalar loss also
recomputes if an earlier loss of its model still holds gradients, see :class:`.spec.PendingGradients`; and inside a
checkpoint, which would drop the gradients of its first forward.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist.model.torch_modes import in_checkpoint, untraced
from liger_dist_kernels import (
    GradientNeeds,
    Scoring,
    TokenGradients,
    statistics_dtype,
)

from .execution import Execution
from .labels import Targets, check_labels, select_targets
from .linear_divergence import linear_divergence_loss
from .normalization import Scales, token_scales
from .outputs import (
    LossOutput,
    as_loss_output,
    returned_tensors,
    saved_terms,
    terms_of_saved,
    with_gradients_of_outputs,
)
from .rows import HeadRows, Problem, check_tensors, operand_dtype, scaled_gradients
from .spec import LossSpec


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        anchor: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.problem = problem
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        labels_T = problem.targets.labels_T
        ctx.of_anchor = None if anchor is None else torch.empty_like(anchor)
        upstream = problem.scales.upstream(labels_T, problem.coefficient) if problem.gradients_in_forward else None
        result, logits_TV = problem.rows.score(hidden_TD, weight_VD, bias_V, problem, upstream)
        if problem.gradients_in_forward:
            ctx.save_for_backward(result.d_hidden_TD, result.d_weight_VD, result.d_bias_V)
        elif problem.needs.any:
            given, terms = problem.spec.tensors(), saved_terms(result.terms)
            # Options are saved for their versions: one that is written to before the backward raises torch's error.
            ctx.number_given = len(given)
            ctx.save_for_backward(hidden_TD, weight_VD, bias_V, logits_TV, *given, *terms)
        loss, z_loss = problem.scales.reduce(result.terms, problem.spec.reduction)
        tensors, constants = returned_tensors(loss, z_loss, result.terms, result.chosen, problem.spec, labels_T)
        ctx.mark_non_differentiable(*constants)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients_of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("this fused loss", "use torch.nn.functional.cross_entropy on the logits for them")
        problem: Problem = ctx.problem
        if problem.execution.pending is not None:
            problem.execution.pending.has_begun_backward(problem.number)
        d_loss, shared = gradients_of_outputs[0], problem.shared
        if problem.gradients_in_forward:
            # A loss with the coefficient 0 has added zeros to the sum, and its other gradients are zeros already.
            if shared is not None and d_loss is not None and problem.coefficient:
                d_loss = d_loss / problem.coefficient
                shared.scale(d_loss)
            gradients = scaled_gradients(problem, ctx.saved_tensors, d_loss, ctx.dtypes)
        else:
            if d_loss is not None and problem.scales.factor is not None:
                d_loss = d_loss * problem.scales.factor
            upstream = TokenGradients(None, None)
            if d_loss is not None:
                upstream = problem.scales.upstream(problem.targets.labels_T, d_loss)
            upstream = with_gradients_of_outputs(upstream, gradients_of_outputs, problem.spec)
            hidden_TD, weight_VD, bias_V, logits_TV, *remaining = ctx.saved_tensors
            terms = remaining[ctx.number_given :]
            if shared is not None:
                shared.begin_backward()
            coefficients = problem.coefficients(terms_of_saved(*terms), upstream)
            unscaled = problem.rows.recompute(hidden_TD, weight_VD, bias_V, problem, coefficients, logits_TV)
            gradients = [None if g is None else g.to(dtype) for g, dtype in zip(unscaled, ctx.dtypes, strict=True)]
        return *gradients, ctx.of_anchor, None


_apply_untraced = untraced(_LinearCrossEntropy.apply)
"""for row shards, whose kernels and collectives are no ops of a compiled graph"""


def fused_linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    spec: LossSpec,
    execution: Execution,
    rows: HeadRows | None = None,
) -> LossOutput:
    """Computes :func:`linear_cross_entropy` with its arguments as records, checked by the caller, for sharding
    adapters.

    Args:
        rows: rows of ``weight`` and ``bias`` in lm_head; None for all rows. A row shard may have any floating dtype:
            products round it to that of ``hidden_states``, its gradient is not rounded.
    """
    rows = HeadRows(vocab_size=weight.shape[0]) if rows is None else rows
    check_tensors(hidden_states, weight, bias)
    if spec.logit_bias is not None:
        added = spec.logit_bias[rows.start : rows.start + weight.shape[0]].to(weight.device, weight.dtype)
        bias = added if bias is None else bias + added
    anchor = None
    if execution.shared is not None and torch.is_grad_enabled() and weight.requires_grad:
        # Of the weight before a cast: its gradient is not rounded to the dtype of the products.
        anchor = execution.shared.anchor(weight)
    dtype = operand_dtype(hidden_states, execution)
    hidden_states = hidden_states if dtype is None else hidden_states.to(dtype)
    weight, bias = rows.with_dtype(weight, bias, dtype, hidden_states)
    check_labels(
        labels,
        tokens_of="hidden states",
        shape=hidden_states.shape[:-1],
        ignore_index=spec.options.ignore_index,
    )
    targets = select_targets(
        labels,
        vocab_size=rows.vocab_size,
        ignore_index=spec.options.ignore_index,
        device=hidden_states.device,
        summary=execution.label_summary,
        max_valid_tokens=execution.max_valid_tokens,
        backend=execution.backend,
    )
    hidden_TD = targets.take(hidden_states.reshape(-1, hidden_states.shape[-1]))
    problem = _problem(targets, hidden_TD, weight, bias, labels.shape, rows=rows, spec=spec, execution=execution)
    if spec.distillation is not None:
        teacher = spec.distillation.teacher
        teacher.check(labels.shape, hidden_states.device)
        teacher_TE = targets.of_tokens(teacher.hidden, labels.shape)
        teacher = teacher.with_operands(teacher_TE, operand_dtype(teacher.hidden, execution))
        problem = replace(problem, distillation=replace(spec.distillation, teacher=teacher))
    spread = partial(targets.spread, shape=labels.shape)
    with torch.autocast(hidden_states.device.type, enabled=False):
        if spec.distillation is not None:
            return linear_divergence_loss(hidden_TD, weight, bias, problem, spread=spread)
        apply = _LinearCrossEntropy.apply if rows.is_full else _apply_untraced
        results = apply(hidden_TD, weight, bias, anchor, problem)  # type: ignore[no-untyped-call]
    return as_loss_output(results, spec, spread, labels)


def _problem(
    targets: Targets,
    hidden_TD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: torch.Size,
    *,
    rows: HeadRows,
    spec: LossSpec,
    execution: Execution,
) -> Problem:
    grad = torch.is_grad_enabled()
    needs = GradientNeeds(
        hidden=grad and hidden_TD.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    dtype, trains = statistics_dtype(hidden_TD.dtype), needs.any
    is_scalar = spec.reduction != "none" and not spec.differentiable_outputs and spec.distillation is None
    scoring = Scoring(
        options=spec.options,
        outputs=spec.token_outputs,
        top_k=spec.top_k or 0,
        class_weight_V=spec.class_weight,
        logits_dtype=torch.float32 if execution.logits_dtype == torch.float32 else None,
        memory_budget=execution.memory_budget,
        backend=execution.backend,
    )
    may_hold, number = trains and not in_checkpoint(), 0
    in_forward = may_hold and is_scalar and not scoring.needs_recomputation(hidden_TD)
    may_keep = may_hold and not is_scalar and spec.distillation is None
    shared = execution.shared if needs.weight and spec.distillation is None else None
    if shared is not None:
        is_possible = in_forward and hidden_TD.dtype != torch.float16
        number, in_forward = shared.holds(execution.coefficient, is_possible=is_possible)
        may_keep = False
    elif execution.pending is not None and ((in_forward and needs.weight) or may_keep):
        number, may_hold = execution.pending.begin()
        in_forward, may_keep = in_forward and may_hold, may_keep and may_hold
    return Problem(
        targets=spec.token_targets(targets, shape, vocab_size=rows.vocab_size, dtype=dtype),
        scales=_scales(targets, hidden_TD, rows, spec, execution),
        spec=spec,
        execution=execution,
        scoring=scoring,
        needs=needs,
        rows=rows,
        number=number,
        gradients_in_forward=in_forward,
        may_keep_logits=may_keep,
        shared=shared,
        coefficient=None if shared is None else execution.coefficient,
    )


def _scales(targets: Targets, hidden_TD: Tensor, rows: HeadRows, spec: LossSpec, execution: Execution) -> Scales:
    token_weight_T = spec.token_weight
    if token_weight_T is not None:
        token_weight_T = targets.take(token_weight_T.reshape(-1).to(hidden_TD.device))
    divisor = None
    if hidden_TD.dtype == torch.float16 and spec.reduction == "mean":
        divisor = rows.common_divisor(len(hidden_TD))
    return token_scales(targets, token_weight_T, spec, execution, hidden_TD.dtype, common_divisor=divisor)
