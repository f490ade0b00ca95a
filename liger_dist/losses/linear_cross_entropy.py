"""Fused linear cross entropy with gradients, for lm_head rows on this rank.

Legend: T tokens with a label, D hidden, V vocabulary.

A scalar loss makes its gradients in the forward and only scales them in the backward. When per-token outputs carry
gradients (``reduction="none"``, log-probabilities, entropies) their coefficients are unknown in the forward, and the
backward recomputes the logits chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError, refuse_second_order
from liger_dist_kernels import GradientNeeds, LinearCrossEntropyResult, TokenGradients, TokenTerms
from liger_dist_kernels import linear_cross_entropy as linear_cross_entropy_kernel

from .arguments import Execution, LossArguments, LossOutput, Reduction, loss_arguments
from .labels import Targets, check_labels, select_targets
from .outputs import as_loss_output, reports_of, returned_tensors, with_gradients_of_outputs
from .scales import Scales, scaled, token_scales


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
        """Weight and bias for the products, under autocast in its ``dtype``.

        Raises:
            LigerDistError: they and ``hidden_states`` differ in dtype.
        """
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        _check_dtypes(hidden_states, weight, bias)
        return weight, bias

    def run(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        problem: Problem,
        gradients: TokenGradients | None,
    ) -> LinearCrossEntropyResult:
        """The terms of this rank's tokens, and with upstream ``gradients`` the gradients of the inputs."""
        return linear_cross_entropy_kernel(
            hidden_TD,
            weight_VD,
            problem.labels_T,
            gradients=gradients,
            bias_V=bias_V,
            class_weight_V=problem.loss.class_weight,
            options=problem.loss.options,
            needs=problem.needs if gradients is not None else GradientNeeds(),
            with_entropy="entropy" in problem.loss.outputs,
            memory_budget=problem.execution.memory_budget,
            backend=problem.execution.backend,
        )

    def common_divisor(self, num_tokens: int) -> float | None:
        """A divisor that is the same on all ranks, where the gradients of several ranks' tokens are summed; None where
        each rank may have its own."""
        return None

    def check_upstream(self, gradient: Tensor) -> None:
        """Refuses the upstream gradient of a scalar loss for which :meth:`run` did not make the gradients."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything the autograd function needs that carries no gradient."""

    labels_T: Tensor
    scales: Scales
    loss: LossArguments
    execution: Execution
    needs: GradientNeeds
    rows: HeadRows

    @property
    def gradients_in_forward(self) -> bool:
        """True for a scalar loss whose gradients are made in the forward."""
        return self.needs.any and self.loss.reduction != "none" and not self.loss.differentiable_outputs

    def run(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, gradients: TokenGradients | None
    ) -> tuple[TokenTerms, tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """The terms, and the gradients of hidden states, weight and bias."""
        result = self.rows.run(hidden_TD, weight_VD, bias_V, self, gradients)
        return result.terms, (result.d_hidden_TD, result.d_weight_VD, result.d_bias_V)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, problem: Problem
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.problem = problem
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        in_forward = problem.gradients_in_forward
        terms, gradients = problem.run(hidden_TD, weight_VD, bias_V, problem.scales.upstream() if in_forward else None)
        if in_forward:
            ctx.save_for_backward(*gradients)
        elif problem.needs.any:
            ctx.save_for_backward(hidden_TD, weight_VD, bias_V)
        loss, z_loss = problem.scales.reduce(terms, problem.loss.reduction)
        ctx.mark_non_differentiable(*reports_of(terms, z_loss, problem.loss))
        return returned_tensors(loss, z_loss, terms)

    @staticmethod
    def backward(
        ctx: Any, *gradients_of_outputs: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_second_order("this fused loss", "use torch.nn.functional.cross_entropy on the logits for them")
        problem: Problem = ctx.problem
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
            hidden_TD, weight_VD, bias_V = ctx.saved_tensors
            unscaled = problem.run(hidden_TD, weight_VD, bias_V, upstream)[1]
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
    _check_tensors(hidden_states, weight, bias)
    check_labels(
        labels,
        tokens_of="hidden states",
        shape=hidden_states.shape[:-1],
        ignore_index=loss.options.ignore_index,
    )
    if loss.logit_bias is not None:
        added = loss.logit_bias[rows.start : rows.start + weight.shape[0]].to(weight.device, weight.dtype)
        bias = added if bias is None else bias + added
    dtype = _autocast_dtype(hidden_states)
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
    grad = torch.is_grad_enabled()
    needs = GradientNeeds(
        hidden=grad and hidden_states.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    scales = _scales(targets, hidden_TD, rows, loss, execution)
    problem = Problem(labels_T=targets.labels_T, scales=scales, loss=loss, execution=execution, needs=needs, rows=rows)
    with torch.autocast(hidden_states.device.type, enabled=False):
        results = _LinearCrossEntropy.apply(hidden_TD, weight, bias, problem)  # type: ignore[no-untyped-call]
    return as_loss_output(results, loss, partial(targets.spread, shape=labels.shape))


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


def _check_tensors(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight), ("bias", bias)):
        if tensor is not None and hasattr(tensor, "placements"):
            raise LigerDistError(
                f"{name} is a DTensor with placements {tensor.placements}; this function takes full local tensors. "
                "Wrap the model with liger_dist.wrap, which computes the loss inside lm_head."
            )
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


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items_in_batch: Tensor | float | None = None,
    outputs: Sequence[str] = (),
    memory_budget: int | None = None,
    max_valid_tokens: int | None = None,
) -> Tensor | LossOutput:
    """Cross entropy of ``hidden_states @ weight.T + bias`` without the full logits.

    A logit is first transformed to ``softcap * tanh(logit_scale * raw / softcap) / temperature``. Labels are not
    shifted.

    Args:
        hidden_states: ``[..., D]``, fp64, fp32, bf16 or fp16, any strides.
        weight: ``[V, D]``, the same dtype (under autocast both are cast).
        labels: ``[...]`` integers in ``[0, V)`` or ``ignore_index``. On the CPU they are checked at no cost and ignored
            tokens are skipped; on the GPU an assertion on the device guards their range.
        bias: ``[V]``.
        ignore_index: label of tokens that are ignored.
        label_smoothing: mass of the uniform distribution, in [0, 1], as :func:`torch.nn.functional.cross_entropy`.
        z_loss: factor of the squared log-sum-exp added to each token's loss (PaLM, arXiv:2204.02311).
        softcap: bound of the logits' magnitude (Gemma 2, arXiv:2408.00118).
        logit_scale: factor of the raw logits.
        temperature: divisor of the transformed logits.
        class_weight: ``[V]``; weighs each token by its label, and the mean with it.
        token_weight: ``[...]``, the labels' shape; multiplies each token's loss, not the divisor.
        reduction: "none" (each token's loss), "sum", or "mean": divided by ``num_items_in_batch`` or the number of
            valid tokens (the sum of their class weights); the mean of no token is 0.
        num_items_in_batch: divisor of the mean, a number or a tensor of one element (never read by the host).
        outputs: names among "log_prob", "entropy", "is_top1", "z_loss", "mean_logit" to return beside the loss.
        memory_budget: bytes of the buffer for one chunk of logits; None for 1 GiB, 256 MiB without gradients.
        max_valid_tokens: in a CUDA graph, for labels on the GPU: the number of tokens to compute, those with a label
            among them; an assertion on the device fails when more have one.

    Returns:
        The loss, fp32 or, for fp64 inputs, fp64; 0-d, or the labels' shape for "none". With ``outputs``, a
        :class:`LossOutput`.

    Raises:
        LigerDistError: shapes, dtypes, devices, labels or options that do not fit; nothing has been computed then.
    """
    _refuse_zero3(weight)
    loss = loss_arguments(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        class_weight=class_weight,
        token_weight=token_weight,
        reduction=reduction,
        num_items_in_batch=num_items_in_batch,
        outputs=outputs,
    )
    _check_tensors(hidden_states, weight, bias)
    loss.check(vocab_size=weight.shape[0], labels_shape=labels.shape)
    execution = Execution(memory_budget=memory_budget, max_valid_tokens=max_valid_tokens)
    result = fused_linear_cross_entropy(hidden_states, weight, bias, labels, loss=loss, execution=execution)
    return result if loss.outputs else result.loss


def _refuse_zero3(weight: Tensor) -> None:
    if hasattr(weight, "ds_id") and weight.requires_grad and torch.is_grad_enabled():
        raise LigerDistError(
            "the weight belongs to DeepSpeed ZeRO-3, which frees it before the backward of a loss that its own module "
            "has not computed. Wrap the model with liger_dist.wrap and call the engine with labels."
        )
