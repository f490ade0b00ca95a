"""Fused linear cross entropy with gradients, for lm_head rows on this rank.

Legend: T tokens with a label, D hidden, V vocabulary.

A scalar loss makes its gradients in the forward and only scales them in the backward. When per-token outputs carry
gradients (``reduction="none"``, log-probabilities, entropies) their coefficients are unknown in the forward, and the
backward recomputes the logits. So does a scalar loss whose model has an earlier one that still holds its gradients: see
:class:`.pending_gradients.PendingGradients`; and one inside a checkpoint, which would drop the gradients of its first
forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError, refuse_second_order
from liger_dist.tracing import in_checkpoint
from liger_dist_kernels import (
    SMALLEST_TILE,
    GradientCoefficients,
    GradientNeeds,
    HeadSlice,
    LinearCrossEntropyResult,
    LocalTokens,
    Scoring,
    TokenChunks,
    TokenGradients,
    TokenTargets,
    TokenTerms,
    gradient_coefficients,
    plan_chunks,
    recompute_gradients,
    score,
    score_with_gradients,
    statistics_dtype,
)

from .arguments import Execution, LossArguments, LossOutput, check_not_dtensor
from .labels import Targets, check_labels, select_targets
from .outputs import as_loss_output, returned_tensors, token_outputs, with_gradients_of_outputs
from .scales import Scales, scaled, token_scales

Gradients = TokenGradients | GradientCoefficients


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Which rows of lm_head a rank computes with: here all of them. Subclasses share them over a process group."""

    vocab_size: int
    """rows of the full lm_head"""
    start: int = 0
    """vocabulary index of this rank's first row"""

    def with_dtype(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for the products, in ``dtype`` where it is not None.

        Raises:
            LigerDistError: they and ``hidden_states`` differ in dtype.
        """
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        _check_dtypes(hidden_states, weight, bias)
        return weight, bias

    @property
    def largest(self) -> int:
        """Most rows that a rank has, from which all ranks derive the same chunks."""
        return self.vocab_size

    def head(self, weight_VD: Tensor, bias_V: Tensor | None, problem: Problem) -> HeadSlice:
        """The rows for the kernels."""
        return HeadSlice.full(weight_VD, bias_V)

    def tokens(self, hidden_TD: Tensor, problem: Problem, gradients: Gradients | None) -> TokenChunks:
        """The tokens that are scored against these rows."""
        if gradients is None:
            return LocalTokens(hidden_TD, problem.targets)
        # What is recomputed has all tokens of a chunk in a tile of a few classes.
        columns = self.largest if isinstance(gradients, TokenGradients) else min(self.largest, SMALLEST_TILE)
        plan = plan_chunks(len(hidden_TD), columns, hidden_TD.element_size(), problem.execution.memory_budget)
        return LocalTokens(hidden_TD, problem.targets, gradients, plan.rows)

    def score(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        problem: Problem,
        upstream: TokenGradients | None = None,
    ) -> LinearCrossEntropyResult:
        """The terms of this rank's tokens; with ``upstream`` gradients of a scalar loss also those of the inputs."""
        tokens, head = self.tokens(hidden_TD, problem, upstream), self.head(weight_VD, bias_V, problem)
        if upstream is None:
            return score(tokens, head, problem.targets, scoring=problem.scoring)
        return score_with_gradients(tokens, head, problem.targets, scoring=problem.scoring, needs=problem.needs)

    def recompute(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        problem: Problem,
        coefficients: GradientCoefficients,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias for known ``coefficients`` of the logits' gradient."""
        tokens, head = self.tokens(hidden_TD, problem, coefficients), self.head(weight_VD, bias_V, problem)
        return recompute_gradients(tokens, head, scoring=problem.scoring, needs=problem.needs)

    def common_divisor(self, num_tokens: int) -> float | None:
        """A divisor that is the same on all ranks, where the gradients of several ranks' tokens are summed; None where
        each rank may have its own."""
        return None

    def check_upstream(self, gradient: Tensor) -> None:
        """Refuses the upstream gradient of a scalar loss for which :meth:`score` did not make the gradients."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything the autograd function needs that carries no gradient."""

    targets: TokenTargets
    scales: Scales
    loss: LossArguments
    execution: Execution
    scoring: Scoring
    needs: GradientNeeds
    rows: HeadRows
    number: int
    """of the loss among those of its model"""
    gradients_in_forward: bool
    """True for a scalar loss whose gradients are made in the forward"""

    def coefficients(self, terms: TokenTerms, upstream: TokenGradients) -> GradientCoefficients:
        """Of the logits' gradient, for upstream gradients of the terms."""
        return gradient_coefficients(
            terms,
            upstream,
            self.targets.labels_T,
            options=self.loss.options,
            vocab_size=self.rows.vocab_size,
            class_weight_V=self.loss.class_weight,
            targets=self.targets,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, problem: Problem
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.problem = problem
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        upstream = problem.scales.upstream() if problem.gradients_in_forward else None
        result = problem.rows.score(hidden_TD, weight_VD, bias_V, problem, upstream)
        if problem.gradients_in_forward:
            ctx.save_for_backward(result.d_hidden_TD, result.d_weight_VD, result.d_bias_V)
        elif problem.needs.any:
            ctx.save_for_backward(hidden_TD, weight_VD, bias_V, *result.terms)
        loss, z_loss = problem.scales.reduce(result.terms, problem.loss.reduction)
        tensors, reports = returned_tensors(
            loss, z_loss, result.terms, result.chosen, problem.loss, problem.targets.labels_T
        )
        ctx.mark_non_differentiable(*reports)
        return tensors

    @staticmethod
    def backward(
        ctx: Any, *gradients_of_outputs: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_second_order("this fused loss", "use torch.nn.functional.cross_entropy on the logits for them")
        problem: Problem = ctx.problem
        if problem.execution.pending is not None:
            problem.execution.pending.has_begun_backward(problem.number)
        d_loss = gradients_of_outputs[0]
        if d_loss is not None and problem.scales.factor is not None:
            d_loss = d_loss * problem.scales.factor
        if problem.gradients_in_forward:
            if d_loss is None:
                return None, None, None, None
            problem.rows.check_upstream(d_loss)
            backend = problem.execution.backend
            gradients = [
                None if saved is None else scaled(saved, d_loss, dtype, backend=backend)
                for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
        else:
            upstream = TokenGradients(None, None) if d_loss is None else problem.scales.upstream(d_loss)
            upstream = with_gradients_of_outputs(upstream, gradients_of_outputs, problem.loss)
            hidden_TD, weight_VD, bias_V, *terms = ctx.saved_tensors
            coefficients = problem.coefficients(TokenTerms(*terms), upstream)
            unscaled = problem.rows.recompute(hidden_TD, weight_VD, bias_V, problem, coefficients)
            gradients = [None if g is None else g.to(dtype) for g, dtype in zip(unscaled, ctx.dtypes, strict=True)]
        return gradients[0], gradients[1], gradients[2], None


def fused_linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    loss: LossArguments,
    execution: Execution,
    rows: HeadRows | None = None,
) -> LossOutput:
    """:func:`linear_cross_entropy` with its arguments as records, checked by the caller, for the sharding adapters.

    Args:
        rows: which rows ``weight`` and ``bias`` are; None for all of them. A row shard may have any floating dtype:
            products round it to that of ``hidden_states``, its gradient is not rounded.
    """
    rows = HeadRows(vocab_size=weight.shape[0]) if rows is None else rows
    check_tensors(hidden_states, weight, bias)
    check_labels(
        labels,
        tokens_of="hidden states",
        shape=hidden_states.shape[:-1],
        ignore_index=loss.options.ignore_index,
    )
    if loss.logit_bias is not None:
        added = loss.logit_bias[rows.start : rows.start + weight.shape[0]].to(weight.device, weight.dtype)
        bias = added if bias is None else bias + added
    dtype = _operand_dtype(hidden_states, execution)
    hidden_states = hidden_states if dtype is None else hidden_states.to(dtype)
    weight, bias = rows.with_dtype(weight, bias, dtype, hidden_states)
    targets = select_targets(
        labels,
        vocab_size=rows.vocab_size,
        ignore_index=loss.options.ignore_index,
        device=hidden_states.device,
        summary=execution.label_summary,
        max_valid_tokens=execution.max_valid_tokens,
    )
    hidden_TD = targets.take(hidden_states.reshape(-1, hidden_states.shape[-1]))
    problem = _problem(targets, hidden_TD, weight, bias, labels.shape, rows=rows, loss=loss, execution=execution)
    with torch.autocast(hidden_states.device.type, enabled=False):
        results = _LinearCrossEntropy.apply(hidden_TD, weight, bias, problem)  # type: ignore[no-untyped-call]
    return as_loss_output(results, loss, partial(targets.spread, shape=labels.shape))


def _problem(
    targets: Targets,
    hidden_TD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: torch.Size,
    *,
    rows: HeadRows,
    loss: LossArguments,
    execution: Execution,
) -> Problem:
    grad = torch.is_grad_enabled()
    needs = GradientNeeds(
        hidden=grad and hidden_TD.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    is_scalar = needs.any and loss.reduction != "none" and not loss.differentiable_outputs
    scoring = Scoring(
        options=loss.options,
        outputs=token_outputs(loss),
        top_k=loss.top_k or 0,
        class_weight_V=loss.class_weight,
        logits_dtype=torch.float32 if execution.logits_dtype == torch.float32 else None,
        memory_budget=execution.memory_budget,
        backend=execution.backend,
    )
    in_forward, number = is_scalar and not scoring.needs_recomputation(hidden_TD) and not in_checkpoint(), 0
    if in_forward and needs.weight and execution.pending is not None:
        number, in_forward = execution.pending.begin()
    dtype = statistics_dtype(hidden_TD.dtype)
    return Problem(
        targets=loss.token_targets(targets, shape, vocab_size=rows.vocab_size, dtype=dtype),
        scales=_scales(targets, hidden_TD, rows, loss, execution),
        loss=loss,
        execution=execution,
        scoring=scoring,
        needs=needs,
        rows=rows,
        number=number,
        gradients_in_forward=in_forward,
    )


def _operand_dtype(hidden_states: Tensor, execution: Execution) -> torch.dtype | None:
    """The dtype that operands are converted to: fp32 if that was asked for, or autocast's; None to leave them."""
    if execution.logits_dtype == "fp32_operands" and hidden_states.dtype != torch.float64:
        return torch.float32
    return _autocast_dtype(hidden_states)


def _autocast_dtype(hidden_states: Tensor) -> torch.dtype | None:
    """The dtype of products under autocast; None without it and for fp64."""
    device_type = hidden_states.device.type
    if not torch.is_autocast_enabled(device_type) or hidden_states.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)


def _scales(targets: Targets, hidden_TD: Tensor, rows: HeadRows, loss: LossArguments, execution: Execution) -> Scales:
    token_weight_T = loss.token_weight
    if token_weight_T is not None:
        token_weight_T = targets.take(token_weight_T.reshape(-1).to(hidden_TD.device))
    divisor = None
    if hidden_TD.dtype == torch.float16 and loss.reduction == "mean":
        divisor = rows.common_divisor(len(hidden_TD))
    return token_scales(targets.labels_T, token_weight_T, loss, execution, hidden_TD.dtype, common_divisor=divisor)


def check_tensors(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuses tensors that are no full hidden states, weight and bias on one device.

    Raises:
        LigerDistError: with what does not fit.
    """
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_not_dtensor(name, tensor)
    if weight.dim() != 2 or hidden_states.dim() < 1 or hidden_states.shape[-1] != weight.shape[1]:
        raise LigerDistError(
            f"hidden_states have shape {tuple(hidden_states.shape)} and weight has shape {tuple(weight.shape)}; "
            "expected [..., D] and [V, D]. A weight of one dimension or size 0 is sharded: wrap the model with "
            "liger_dist.wrap."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LigerDistError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), one for each class.")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden_states.device:
            raise LigerDistError(
                f"{name} is on {tensor.device} but hidden_states are on {hidden_states.device}; move them to one "
                "device."
            )


def _check_dtypes(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    dtypes = {tensor.dtype for tensor in (hidden_states, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not hidden_states.is_floating_point():
        raise LigerDistError(
            f"hidden_states have dtype {hidden_states.dtype} and weight has dtype {weight.dtype}"
            + ("" if bias is None else f" and bias has dtype {bias.dtype}")
            + "; expected one floating dtype. Convert them, or run under torch.autocast."
        )
