"""From softmax statistics to per-token losses, and from upstream gradients to gradient coefficients.

Legend: T tokens. Everything here is elementwise on ``[T]`` tensors in the dtype of the statistics; the formulas of
the loss are in :class:`LossOptions`. Tokens with a negative label take no part: all their numbers are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cross_entropy import GradientCoefficients, SoftmaxStatistics
from .options import LossOptions


class TokenTerms(NamedTuple):
    """What the loss is made of, each ``[T]``."""

    cross_entropy_T: Tensor
    """with class weight and label smoothing, without z-loss"""
    z_loss_T: Tensor
    """``z_loss * lse**2``"""
    log_prob_T: Tensor
    """log-probability of the label"""
    is_top1_T: Tensor
    """bool: no class has a larger logit than the label"""
    entropy_T: Tensor | None
    lse_T: Tensor
    miss_T: Tensor
    """``1 - p_y``"""


class TokenGradients(NamedTuple):
    """Upstream gradients of the fields of :class:`TokenTerms` that are differentiable, each ``[T]`` or None for
    zero."""

    cross_entropy_T: Tensor | None
    z_loss_T: Tensor | None
    log_prob_T: Tensor | None = None
    entropy_T: Tensor | None = None


def _class_weights(
    labels_T: Tensor, class_weight_V: Tensor | None, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float]:
    """Weight of each token's label, and the sum over the vocabulary."""
    if class_weight_V is None:
        return 1.0, float(vocab_size)
    weight_V = class_weight_V.to(dtype)
    return weight_V[labels_T.clamp_min(0)], weight_V.sum()


def token_terms(
    statistics: SoftmaxStatistics,
    labels_T: Tensor,
    *,
    options: LossOptions,
    vocab_size: int,
    class_weight_V: Tensor | None = None,
) -> TokenTerms:
    """Per-token terms of the loss from complete (merged over all vocabulary slices) statistics."""
    max_T, sum_other_T, target_T, dot_other_T, weighted_sum_T = statistics
    counts_T = labels_T >= 0
    # Rows without a target: pretend that it is the maximum, which keeps every formula finite.
    target_T = torch.where(counts_T, target_T, max_T)
    e_target_T = torch.exp(target_T - max_T)
    sum_T = sum_other_T + e_target_T
    log_sum_T = sum_T.log()
    lse_T = max_T + log_sum_T
    miss_T = sum_other_T / sum_T
    # log1p keeps the loss exact as p_y nears 1; it would overflow where the label is unlikely.
    likely_T = e_target_T > sum_other_T
    nll_T = torch.where(likely_T, torch.log1p(sum_other_T / e_target_T), log_sum_T + (max_T - target_T))
    label_weight, total_weight = _class_weights(labels_T, class_weight_V, vocab_size, lse_T.dtype)
    cross_entropy_T = nll_T * label_weight
    if weighted_sum_T is not None:
        smooth_T = (total_weight * lse_T - weighted_sum_T) / vocab_size
        cross_entropy_T = (1.0 - options.label_smoothing) * cross_entropy_T + options.label_smoothing * smooth_T
    entropy_T = None
    if dot_other_T is not None:
        entropy_T = log_sum_T - (dot_other_T + e_target_T * (target_T - max_T)) / sum_T
        entropy_T = torch.where(counts_T, entropy_T, 0.0)
    return TokenTerms(
        cross_entropy_T=torch.where(counts_T, cross_entropy_T, 0.0),
        z_loss_T=torch.where(counts_T, options.z_loss * lse_T.square(), 0.0),
        log_prob_T=torch.where(counts_T, -nll_T, 0.0),
        is_top1_T=counts_T & (target_T >= max_T),
        entropy_T=entropy_T,
        lse_T=lse_T,
        miss_T=miss_T,
    )


def gradient_coefficients(
    terms: TokenTerms,
    gradients: TokenGradients,
    labels_T: Tensor,
    *,
    options: LossOptions,
    vocab_size: int,
    class_weight_V: Tensor | None = None,
) -> GradientCoefficients:
    """Coefficients of the logits' gradient for given upstream gradients of the terms."""
    label_weight, total_weight = _class_weights(labels_T, class_weight_V, vocab_size, terms.lse_T.dtype)
    nll_T = torch.zeros_like(terms.lse_T)
    mass_T = entropy_coefficient_T = smoothing_T = None
    if gradients.cross_entropy_T is not None:
        nll_T = nll_T + gradients.cross_entropy_T * ((1.0 - options.label_smoothing) * label_weight)
        if options.label_smoothing > 0:
            smoothing_T = gradients.cross_entropy_T * (options.label_smoothing / vocab_size)
            mass_T = smoothing_T * total_weight
    if gradients.log_prob_T is not None:
        nll_T = nll_T - gradients.log_prob_T
    if gradients.z_loss_T is not None and options.z_loss != 0:
        z_mass_T = gradients.z_loss_T * (2.0 * options.z_loss) * terms.lse_T
        mass_T = z_mass_T if mass_T is None else mass_T + z_mass_T
    if gradients.entropy_T is not None:
        assert terms.entropy_T is not None
        mean_logit_T = terms.lse_T - terms.entropy_T
        entropy_mass_T = gradients.entropy_T * mean_logit_T
        mass_T = entropy_mass_T if mass_T is None else mass_T + entropy_mass_T
        entropy_coefficient_T = -gradients.entropy_T
    return GradientCoefficients(
        lse_T=terms.lse_T,
        miss_T=terms.miss_T,
        nll_T=nll_T,
        mass_T=mass_T,
        entropy_T=entropy_coefficient_T,
        smoothing_T=smoothing_T,
    )
