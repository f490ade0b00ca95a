"""Cross entropy on full logits, which are not overwritten unless the caller allows it.

Legend: T tokens, V vocabulary. The forward computes the gradient of a scalar loss together with the loss, in one pass
over the logits; the backward only scales it. Where per-token outputs carry gradients, the backward reads the logits
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError, refuse_second_order
from liger_dist_kernels import (
    RowOptions,
    SoftmaxStatistics,
    TokenGradients,
    TokenTargets,
    choose_logits,
    chosen_log_probs,
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_fwd_bwd,
    gradient_coefficients,
    statistics_dtype,
    token_terms,
    with_soft_labels,
)

from .compiled_logits import compiled_bwd, compiled_fwd, compiled_fwd_bwd
from .execution import Execution
from .labels import check_labels, select_targets
from .normalization import Scales, scaled, token_scales
from .outputs import (
    LossOutput,
    as_loss_output,
    returned_tensors,
    saved_terms,
    terms_of_saved,
    with_gradients_of_outputs,
)
from .rows import check_not_dtensor
from .spec import LossSpec
from .support import check_support


@dataclass(frozen=True, kw_only=True)
class _Problem:
    targets: TokenTargets
    rows: RowOptions
    scales: Scales
    spec: LossSpec
    execution: Execution
    gradient_in_forward: bool


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, problem: _Problem) -> tuple[Tensor, ...]:
        spec, targets, rows = problem.spec, problem.targets, problem.rows
        chosen = choose_logits(logits_TV, targets, spec.top_k or 0, rows)
        ctx.set_materialize_grads(False)
        ctx.problem = problem
        if problem.gradient_in_forward:
            statistics, d_logits_TV = _with_gradient(logits_TV, problem, chosen.at_TK)
        elif torch.compiler.is_compiling():
            statistics = compiled_fwd(logits_TV, targets, rows)
        else:
            statistics = cross_entropy_fwd(logits_TV, targets, rows)
        terms = with_soft_labels(token_terms(statistics, targets, rows), chosen, targets, rows)
        if problem.gradient_in_forward:
            ctx.save_for_backward(d_logits_TV)
        else:
            ctx.save_for_backward(logits_TV, *saved_terms(terms))
        value, z_loss = problem.scales.reduce(terms, spec.reduction)
        log_probs = chosen_log_probs(chosen, terms.log_probs, targets)
        tensors, constants = returned_tensors(value, z_loss, terms, log_probs, spec, targets.labels_T)
        ctx.mark_non_differentiable(*constants)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        refuse_second_order("this fused loss", "use torch.nn.functional.cross_entropy on the logits for them")
        problem: _Problem = ctx.problem
        d_loss = gradients[0]
        if d_loss is not None and problem.scales.factor is not None:
            d_loss = d_loss * problem.scales.factor
        if problem.gradient_in_forward:
            (d_logits_TV,) = ctx.saved_tensors
            if d_loss is None:
                return None, None
            return scaled(d_logits_TV, d_loss, d_logits_TV.dtype, backend=problem.execution.backend), None
        logits_TV, *terms = ctx.saved_tensors
        upstream = TokenGradients(None, None)
        if d_loss is not None:
            upstream = problem.scales.upstream(problem.targets.labels_T, d_loss)
        upstream = with_gradients_of_outputs(upstream, gradients, problem.spec)
        coefficients = gradient_coefficients(terms_of_saved(*terms), upstream, problem.targets, problem.rows)
        if torch.compiler.is_compiling():
            return compiled_bwd(logits_TV, problem.targets, coefficients, problem.rows), None
        d_logits_TV = torch.empty(logits_TV.shape, dtype=logits_TV.dtype, device=logits_TV.device)
        return cross_entropy_bwd(logits_TV, problem.targets, coefficients, problem.rows, out_TV=d_logits_TV), None


def _with_gradient(
    logits_TV: Tensor, problem: _Problem, token_logits_TK: Tensor | None
) -> tuple[SoftmaxStatistics, Tensor]:
    """Computes the statistics and the gradient of a scalar loss, which overwrites the logits if the caller allows
    it."""
    targets, rows, overwrites = problem.targets, problem.rows, problem.execution.overwrite_logits
    upstream = problem.scales.upstream(targets.labels_T)
    if torch.compiler.is_compiling():
        return compiled_fwd_bwd(
            logits_TV, targets, upstream, rows, token_logits_TK=token_logits_TK, overwrites=overwrites
        )
    d_logits_TV = logits_TV if overwrites else torch.empty_like(logits_TV)
    statistics = cross_entropy_fwd_bwd(
        logits_TV, targets, upstream, rows, token_logits_TK=token_logits_TK, out_TV=d_logits_TV
    )
    if overwrites:
        # Autograd then refuses the backward of anything else computed from these logits.
        torch.autograd.graph.increment_version(logits_TV)
    return statistics, d_logits_TV


def fused_cross_entropy(logits: Tensor, labels: Tensor, *, spec: LossSpec, execution: Execution) -> LossOutput:
    """Computes :func:`liger_dist.cross_entropy` with its arguments as records."""
    check_not_dtensor("logits", logits)
    if logits.dim() < 1 or not logits.is_floating_point():
        raise LigerDistError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}; expected [..., V] of a floating dtype."
        )
    vocab_size = logits.shape[-1]
    check_labels(labels, tokens_of="logits", shape=logits.shape[:-1], ignore_index=spec.options.ignore_index)
    spec.check(vocab_size=vocab_size, labels_shape=labels.shape)
    if spec.support_ids is not None:
        check_support(spec.support_ids, labels, spec.ignore_index)
    targets = select_targets(
        labels,
        vocab_size=vocab_size,
        ignore_index=spec.options.ignore_index,
        device=logits.device,
        summary=execution.label_summary,
        may_drop=False,
        backend=execution.backend,
    )
    token_weight_T = None if spec.token_weight is None else spec.token_weight.reshape(-1).to(logits.device)
    problem = _Problem(
        targets=spec.token_targets(targets, labels.shape, vocab_size=vocab_size, dtype=statistics_dtype(logits.dtype)),
        rows=RowOptions(
            vocab_size=vocab_size,
            options=spec.options,
            outputs=spec.token_outputs,
            class_weight_V=spec.class_weight,
            backend=execution.backend,
        ),
        scales=token_scales(targets, token_weight_T, spec, execution, logits.dtype),
        spec=spec,
        execution=execution,
        gradient_in_forward=torch.is_grad_enabled()
        and logits.requires_grad
        and spec.reduction != "none"
        and not spec.differentiable_outputs
        and vocab_size > 0,
    )
    logits_TV = logits.reshape(-1, vocab_size)
    if logits_TV.stride(-1) != 1:
        logits_TV = logits_TV.contiguous()
    if execution.overwrite_logits and len(logits_TV) > 1 and logits_TV.stride(0) < vocab_size:
        raise LigerDistError(
            f"overwrite_logits is True but rows of the logits share memory (shape {tuple(logits.shape)}, strides "
            f"{logits.stride()}); expected one place for each of them. Pass logits.contiguous(), or leave "
            "overwrite_logits out."
        )
    with torch.autocast(logits.device.type, enabled=False):
        results = _CrossEntropy.apply(logits_TV, problem)  # type: ignore[no-untyped-call]
    return as_loss_output(results, spec, partial(targets.spread, shape=labels.shape), labels)
