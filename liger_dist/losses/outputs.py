"""Outputs of the losses' autograd functions, and the :class:`LossOutput` for callers.

Legend: T tokens, K chosen classes of each token. A function that returns None in a place cannot be compiled, because
Dynamo fails at its backward: so only requested outputs are returned, in the order of :func:`tensor_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_dist_kernels import ChosenLogProbs, TokenGradients, TokenTerms

from .spec import LossSpec
from .support import on_support


class TopK(NamedTuple):
    """The k most likely classes of each token, in descending order."""

    ids: Tensor
    """int64, the labels' shape and k"""
    log_prob: Tensor
    """fp32 (fp64 for fp64 inputs), the labels' shape and k"""
    remainder: Tensor
    """probability of all other classes, in [0, 1], the labels' shape"""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Loss and requested outputs (None otherwise).

    ``log_prob``, ``log_prob_at``, ``entropy`` and ``sum_sq_prob`` carry gradients; the rest carry
    none. Tokens without a target have 0 (False) everywhere.
    """

    loss: Tensor
    """0-d for "mean" and "sum", the labels' shape for "none"; fp32, or fp64 for fp64 inputs"""
    log_prob: Tensor | None = None
    """log-probability of each label, the labels' shape"""
    entropy: Tensor | None = None
    """entropy of each token's distribution in nats, the labels' shape"""
    is_top1: Tensor | None = None
    """bool, the labels' shape: True if no class has a larger logit than the label"""
    z_loss: Tensor | None = None
    """z-loss part of ``loss``, reduced as ``loss``"""
    mean_logit: Tensor | None = None
    """mean of each token's transformed logits over the vocabulary, the labels' shape"""
    log_sum_exp: Tensor | None = None
    """log-sum-exp of each token's transformed logits, the labels' shape"""
    log_prob_at: Tensor | None = None
    """log-probabilities of ``token_ids`` or ``support_ids``, their shape; 0 where the id is negative"""
    sum_sq_prob: Tensor | None = None
    """sum of the squared probabilities over the vocabulary, the labels' shape"""
    top_k: TopK | None = None
    """most likely classes of each token"""
    divergence: Tensor | None = None
    """of a distillation loss: the divergence from the teacher, reduced as ``loss``"""
    hard_loss: Tensor | None = None
    """of a distillation loss: the cross entropy of the labels; 0 where it has no weight"""


_ALWAYS = ("loss", "log_prob", "is_top1")
_ASKED_FOR = ("z_loss", "entropy", "mean_logit", "log_sum_exp", "sum_sq_prob", "log_prob_at")
_TOP_K = ("top_k_ids", "top_k_log_prob", "top_k_remainder")


def tensor_names(spec: LossSpec) -> tuple[str, ...]:
    """Lists names of the tensors that an autograd function returns."""
    asked = tuple(name for name in _ASKED_FOR if name in spec.outputs)
    return _ALWAYS + asked + (_TOP_K if "top_k" in spec.outputs else ())


def saved_terms(terms: TokenTerms) -> tuple[Tensor | None, ...]:
    """Returns the fields of ``terms`` that a backward reads, for :func:`terms_of_saved`. Fields that callers get too
    are copied, because callers may change them in place."""
    returned = (None if field is None else field.clone() for field in (terms.entropy_T, terms.sum_sq_prob_T))
    return terms.max_T, terms.log_total_T, terms.miss_T, *returned


def terms_of_saved(
    max_T: Tensor, log_total_T: Tensor, miss_T: Tensor, entropy_T: Tensor | None, sum_sq_prob_T: Tensor | None
) -> TokenTerms:
    """Rebuilds the terms for a backward; fields that it does not read are empty."""
    unread_T = max_T.new_empty(0)
    return TokenTerms(
        cross_entropy_T=unread_T,
        z_loss_T=unread_T,
        log_prob_T=unread_T,
        is_top1_T=unread_T,
        entropy_T=entropy_T,
        max_T=max_T,
        log_total_T=log_total_T,
        miss_T=miss_T,
        mean_logit_T=None,
        sum_sq_prob_T=sum_sq_prob_T,
    )


def returned_tensors(
    value: Tensor,
    z_loss: Tensor | None,
    terms: TokenTerms,
    chosen: ChosenLogProbs,
    spec: LossSpec,
    labels_T: Tensor,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Returns the tensors in the order of :func:`tensor_names`, and those among them without gradients."""
    log_sum_exp_T = None
    if z_loss is None and "z_loss" in spec.outputs:
        z_loss = torch.zeros_like(value)
    if "log_sum_exp" in spec.outputs:
        # Ignored tokens are 0 here only: the backward reads ``terms`` of all tokens.
        log_sum_exp_T = torch.where(labels_T >= 0, terms.lse_T, 0.0)
    available = {
        "loss": value,
        "log_prob": terms.log_prob_T,
        "is_top1": terms.is_top1_T,
        "z_loss": z_loss,
        "entropy": terms.entropy_T,
        "mean_logit": terms.mean_logit_T,
        "log_sum_exp": log_sum_exp_T,
        "sum_sq_prob": terms.sum_sq_prob_T,
        "log_prob_at": chosen.at_TK,
        "top_k_ids": chosen.top_ids_Tk,
        "top_k_log_prob": chosen.top_Tk,
        "top_k_remainder": chosen.remainder_T,
    }
    found: list[Tensor] = []
    constants: list[Tensor] = []
    carries = {"loss", "log_prob", *spec.differentiable_outputs} if spec.differentiable else {"loss"}
    for name in tensor_names(spec):
        tensor = available[name]
        assert tensor is not None
        found.append(tensor)
        if name not in carries:
            constants.append(tensor)
    return tuple(found), constants


def with_gradients_of_outputs(
    upstream: TokenGradients, gradients: Sequence[Tensor | None], spec: LossSpec
) -> TokenGradients:
    """Adds the upstream gradients of the outputs to ``upstream`` of the loss."""
    given = dict(zip(tensor_names(spec), gradients, strict=True))
    return upstream._replace(
        log_prob_T=given["log_prob"],
        entropy_T=given.get("entropy"),
        sum_sq_prob_T=given.get("sum_sq_prob"),
        at_TK=given.get("log_prob_at"),
    )


def as_loss_output(
    tensors: Sequence[Tensor], spec: LossSpec, spread: Callable[[Tensor], Tensor], labels: Tensor
) -> LossOutput:
    """Builds the outputs in ``spec``; ``spread`` scatters per-token values to the shape of ``labels``."""
    given = dict(zip(tensor_names(spec), tensors, strict=True))
    per_token = spec.reduction == "none"
    value, z_loss = given.pop("loss"), given.pop("z_loss", None)
    top = [spread(given.pop(name)) for name in _TOP_K if name in given]
    named = {name: spread(values_T) for name, values_T in given.items() if name in spec.outputs}
    if z_loss is not None:
        named["z_loss"] = spread(z_loss) if per_token else z_loss
    if spec.support_ids is not None:
        named = on_support(named, spec.support_ids, (labels != spec.ignore_index).to(value.device))
    return LossOutput(loss=spread(value) if per_token else value, top_k=TopK(*top) if top else None, **named)
