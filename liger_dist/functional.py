"""Public functions of losses on tensors: :func:`linear_cross_entropy` and :func:`cross_entropy`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .config import LOGITS_DTYPES, LogitsDtype, check_choice, check_count
from .errors import LigerDistError
from .losses.cross_entropy import fused_cross_entropy
from .losses.execution import Execution
from .losses.linear_cross_entropy import fused_linear_cross_entropy
from .losses.outputs import LossOutput
from .losses.rows import check_tensors
from .losses.spec import LossKeywords, LossSpec
from .losses.support import check_support
from .sharding.deepspeed import is_stored_by_zero3


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logits_dtype: LogitsDtype = None,
    memory_budget: int | None = None,
    max_valid_tokens: int | None = None,
    **keywords: Unpack[LossKeywords],
) -> Tensor | LossOutput:
    """Computes the cross entropy of ``hidden_states @ weight.T + bias`` without the full logits.

    A logit is first transformed to ``softcap * tanh(logit_scale * raw / softcap) / temperature``. Labels are not
    shifted.

    Args:
        hidden_states: ``[..., D]``, fp64, fp32, bf16 or fp16, any strides.
        weight: ``[V, D]``, the same dtype (under autocast both are cast).
        labels: ``[...]`` integers in ``[0, V)`` or ``ignore_index``. On the CPU they are checked at no cost and ignored
            tokens are skipped; on the GPU a device-side assertion checks their range.
        bias: ``[V]``.
        ignore_index: label of tokens that are ignored.
        label_smoothing: mass of the uniform distribution, in [0, 1], as :func:`torch.nn.functional.cross_entropy`.
        z_loss: factor of the squared log-sum-exp added to each token's loss (PaLM, arXiv:2204.02311).
        softcap: bound of the logits' magnitude (Gemma 2, arXiv:2408.00118).
        logit_scale: factor of the raw logits.
        temperature: divisor of the transformed logits, above 0: a number, or an fp32 or fp64 tensor of the labels'
            shape or of its first dimensions, without gradient. A list of numbers becomes such a tensor.
        class_weight: ``[V]``; weighs each token by its label, and the mean with it.
        token_weight: ``[...]``, the labels' shape; multiplies each token's loss, not the divisor.
        reduction: "none" (each token's loss), "sum", or "mean": divided by ``num_items_in_batch`` or the number of
            valid tokens (the sum of their class weights); the mean of no token is 0.
        num_items_in_batch: divisor of the mean, a number or a tensor of one element (the host never reads it).
        outputs: names among "log_prob", "log_prob_at", "top_k", "entropy", "sum_sq_prob", "is_top1", "z_loss",
            "mean_logit", "log_sum_exp" to return with the loss.
        token_ids: ``[..., K]``, the labels' shape and K class indices, negative for none; for "log_prob_at".
        support_ids: ``[..., K]``, the labels' shape and K different class indices, negative for none: the classes of
            which each label was sampled (top-p, top-k). "log_prob", "entropy" and "sum_sq_prob" are those of the
            distribution over them, and "log_prob_at" has their log-probabilities. A token without any has the whole
            vocabulary. :func:`liger_dist.pad_support` makes them of compressed rows.
        top_k: number of classes for "top_k".
        soft_labels: ``(ids, probs)``, both ``[..., K]`` (the labels' shape and K), integers and fp32 or fp64:
            probabilities of some classes of each token, for the cross entropy ``sum_k probs_k * (lse - z_k)`` (Hinton
            et al. 2015, arXiv:1503.02531). A negative id means none; probabilities of one id are summed. Tokens with
            ``ignore_index`` have none.
        soft_weight: weight of this cross entropy, in [0, 1]; that of the labels has ``1 - soft_weight``. None for 1.
        remainder: how the probability mass missing from a token's ``probs`` is treated: "drop" (None) drops it,
            "renormalize" divides by the sum, "spread" spreads it evenly over all classes without an id.
        logits_dtype: see :class:`WrapConfig`.
        memory_budget: bytes of the buffer of logits; None for 1 GiB (256 MiB if the weight has no gradient), without
            gradients 128 MiB (256 MiB of fp32).
        max_valid_tokens: in a CUDA graph, for labels on the GPU: number of tokens to compute, including all with a
            label; a device-side assertion fails if more have one.

    Returns:
        The loss, fp32 or, for fp64 inputs, fp64; 0-d, or the labels' shape for "none". With ``outputs``, a
        :class:`LossOutput`.

    Raises:
        LigerDistError: invalid shapes, dtypes, devices, labels or options; nothing has been computed then.
    """
    spec = _spec("linear_cross_entropy", keywords)
    if is_stored_by_zero3(weight) and weight.requires_grad and torch.is_grad_enabled():
        raise LigerDistError(
            "the weight belongs to DeepSpeed ZeRO-3, which frees it before the backward of a loss that its own module "
            "has not computed. Wrap the model with liger_dist.wrap and call the engine with labels."
        )
    check_tensors(hidden_states, weight, bias)
    check_choice("logits_dtype", logits_dtype, LOGITS_DTYPES)
    check_count("memory_budget", memory_budget, "bytes")
    check_count("max_valid_tokens", max_valid_tokens, "tokens")
    spec.check(vocab_size=weight.shape[0], labels_shape=labels.shape)
    if spec.support_ids is not None:
        check_support(spec.support_ids, labels, spec.ignore_index)
    execution = Execution(memory_budget=memory_budget, max_valid_tokens=max_valid_tokens, logits_dtype=logits_dtype)
    result = fused_linear_cross_entropy(hidden_states, weight, bias, labels, spec=spec, execution=execution)
    return result if spec.outputs else result.loss


def cross_entropy(
    logits: Tensor, labels: Tensor, *, overwrite_logits: bool = False, **keywords: Unpack[LossKeywords]
) -> Tensor | LossOutput:
    """Computes the cross entropy of full logits in fp32 (fp64 for fp64 logits), without an fp32 copy of them.

    Args:
        logits: ``[..., V]`` raw logits.
        labels: ``[...]`` integers in ``[0, V)`` or ``ignore_index``.
        overwrite_logits: True to write the gradient over the logits, which saves their size. They must not be read
            again, and the backward of anything else computed from them raises. Only for scalar losses without
            differentiable ``outputs``.

    Other arguments, the result and the errors are as for :func:`linear_cross_entropy`.
    """
    spec = _spec("cross_entropy", keywords)
    result = fused_cross_entropy(logits, labels, spec=spec, execution=Execution(overwrite_logits=overwrite_logits))
    return result if spec.outputs else result.loss


def _spec(function: str, keywords: LossKeywords) -> LossSpec:
    """Raises:
    TypeError: a keyword that is none of a loss, as Python raises it.
    """
    for name in keywords.keys() - LossKeywords.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return LossSpec(**keywords)


def _show_keywords(function: Any) -> None:
    """Gives ``inspect.signature`` and ``help`` the keywords of a loss with their defaults."""
    shown = inspect.signature(function)
    defaults = {field.name: field for field in fields(LossSpec) if field.name in LossKeywords.__annotations__}
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for name, field in defaults.items()
    ]
    named = [p for p in shown.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = shown.replace(parameters=[*named, *keywords])


_show_keywords(linear_cross_entropy)
_show_keywords(cross_entropy)
