# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Computes per-token losses from softmax statistics, and gradient coefficients from upstream gradients.

Legend: T tokens. Everything here is elementwise on ``[T]`` tensors in the dtype of the statistics; the formulas of
the loss are in :class:`LossOptions`. Tokens with a negative label are ignored: all their values are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import ANY_LENGTH, cdiv, dense, host_number, launch, number, runs_triton
from .chosen_logits import ChosenLogits, sum_of_same_ids
from .launches import TOKEN_TERMS
from .options import RowOptions
from .softmax_statistics import GradientCoefficients, SoftmaxStatistics
from .token_chunks import TokenTargets


class TokenTerms(NamedTuple):
    """Per-token terms of the loss, each ``[T]``."""

    cross_entropy_T: Tensor
    """with class weight and label smoothing, without z-loss"""
    z_loss_T: Tensor
    """``z_loss * lse**2``"""
    log_prob_T: Tensor
    """log-probability of the label"""
    is_top1_T: Tensor
    """bool: no class has a larger logit than the label"""
    entropy_T: Tensor | None
    max_T: Tensor
    """largest transformed logit"""
    log_total_T: Tensor
    """``log(sum_v exp(z_v - max))``"""
    miss_T: Tensor
    """``1 - p_y``"""
    mean_logit_T: Tensor | None
    """mean of the transformed logits over the vocabulary"""
    sum_sq_prob_T: Tensor | None
    """sum of the squared probabilities"""

    @property
    def lse_T(self) -> Tensor:
        """log-sum-exp of the transformed logits"""
        return self.max_T + self.log_total_T

    def log_probs(self, z_TK: Tensor) -> Tensor:
        """Computes the log-probabilities ``[T, K]`` of classes whose transformed logits are ``z_TK``."""
        return (z_TK - self.max_T[:, None]) - self.log_total_T[:, None]


class TokenGradients(NamedTuple):
    """Upstream gradients of the differentiable fields of :class:`TokenTerms`, each ``[T]`` or None for zero."""

    cross_entropy_T: Tensor | None
    z_loss_T: Tensor | None
    log_prob_T: Tensor | None = None
    entropy_T: Tensor | None = None
    sum_sq_prob_T: Tensor | None = None
    at_TK: Tensor | None = None
    """``[T, K]``, of the log-probabilities of chosen classes"""

    def scaled(self, factor: float) -> TokenGradients:
        """Multiplies all gradients by ``factor``."""
        return TokenGradients(*(None if field is None else field * factor for field in self))


class LossCoefficients(NamedTuple):
    """Coefficients of the gradient of a loss that need upstream gradients alone, not the softmax; fields as in
    :class:`GradientCoefficients`."""

    nll_T: Tensor | None
    mass_T: Tensor | None
    d_lse_T: Tensor | None
    """upstream gradient of the log-sum-exp: times the log-sum-exp itself, a further part of ``mass``"""
    smoothing_T: Tensor | None
    at_TK: Tensor | None

    def of_softmax(self, max_T: Tensor, log_total_T: Tensor, miss_T: Tensor) -> GradientCoefficients:
        """Adds the coefficients that need the softmax."""
        mass_T = self.mass_T
        if self.d_lse_T is not None:
            mass_T = _plus(mass_T, self.d_lse_T * (max_T + log_total_T))
        return GradientCoefficients(
            max_T=max_T,
            log_total_T=log_total_T,
            miss_T=miss_T,
            nll_T=torch.zeros_like(max_T) if self.nll_T is None else self.nll_T,
            mass_T=mass_T,
            entropy_T=None,
            square_T=None,
            smoothing_T=self.smoothing_T,
            at_TK=self.at_TK,
        )

    def of_statistics(self, statistics: SoftmaxStatistics) -> GradientCoefficients:
        """Computes :meth:`of_softmax` from statistics; NaN or Inf for ignored tokens."""
        total_T = statistics.sum_other_T + torch.exp(statistics.target_T - statistics.max_T)
        return self.of_softmax(statistics.max_T, total_T.log(), statistics.sum_other_T / total_T)


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _label_weights(targets: TokenTargets, rows: RowOptions, dtype: torch.dtype) -> Tensor | None:
    """Gathers the class weight of each label, ``[T]``."""
    if rows.class_weight_V is None:
        return None
    return rows.class_weight_V[targets.labels_T.clamp_min(0)].to(dtype)


def _total_weight(rows: RowOptions, dtype: torch.dtype) -> Tensor | float:
    """Sums the class weights over the vocabulary."""
    return float(rows.vocab_size) if rows.class_weight_V is None else rows.class_weight_V.to(dtype).sum()


@triton.jit(**ANY_LENGTH)
def _token_terms_kernel(
    max_ptr, sum_other_ptr, target_ptr, dot_other_ptr, weighted_sum_ptr, square_other_ptr, labels_ptr,
    class_weight_ptr, class_weight_sum_ptr, cross_entropy_ptr, z_loss_ptr, log_prob_ptr, entropy_ptr, row_max_ptr,
    log_total_ptr, miss_ptr, sum_sq_prob_ptr, is_top1_ptr, T, vocab_size, label_smoothing, z_loss,
    WITH_ENTROPY: tl.constexpr, WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < T
    label = tl.load(labels_ptr + offs, mask=mask, other=-1)
    counts = label >= 0
    dtype = log_total_ptr.dtype.element_ty
    vocab_size = number(vocab_size, dtype)
    label_smoothing, z_loss = number(label_smoothing, dtype), number(z_loss, dtype)
    # An ignored token may have statistics of no logits: any finite values do.
    row_max = tl.where(counts, tl.load(max_ptr + offs, mask=mask, other=0.0), 0.0)
    sum_other = tl.where(counts, tl.load(sum_other_ptr + offs, mask=mask, other=0.0), 0.0)
    target = tl.where(counts, tl.load(target_ptr + offs, mask=mask, other=0.0), 0.0)
    e_target = tl.exp(target - row_max)
    total = sum_other + e_target
    log_total = tl.log(total)
    lse = row_max + log_total
    # log(1 + x) for small x, after Kahan: the rounding of 1 + x cancels between its logarithm and the quotient.
    ratio = sum_other / tl.where(e_target > sum_other, e_target, 1.0)
    rounded = 1.0 + ratio
    lost = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    log1p = tl.where(rounded == 1.0, ratio, tl.log(rounded) * (ratio / lost))
    nll = tl.where(e_target > sum_other, log1p, log_total + (row_max - target))
    cross_entropy = nll
    if HAS_CLASS_WEIGHT:
        weight = tl.load(class_weight_ptr + label, mask=mask & counts, other=0.0).to(nll.dtype)
        cross_entropy = tl.where(weight == 0.0, 0.0, nll * weight)
    if WITH_SMOOTHING:
        weighted_sum = tl.load(weighted_sum_ptr + offs, mask=mask, other=0.0)
        total_weight = tl.load(class_weight_sum_ptr) if HAS_CLASS_WEIGHT else vocab_size
        smooth = (total_weight * lse - weighted_sum) / vocab_size
        cross_entropy = (1.0 - label_smoothing) * cross_entropy + label_smoothing * smooth
    tl.store(cross_entropy_ptr + offs, tl.where(counts, cross_entropy, 0.0), mask=mask)
    tl.store(z_loss_ptr + offs, tl.where(counts, z_loss * lse * lse, 0.0), mask=mask)
    tl.store(log_prob_ptr + offs, tl.where(counts, -nll, 0.0), mask=mask)
    tl.store(is_top1_ptr + offs, counts & (target >= row_max), mask=mask)
    tl.store(row_max_ptr + offs, row_max, mask=mask)
    tl.store(log_total_ptr + offs, log_total, mask=mask)
    tl.store(miss_ptr + offs, sum_other / total, mask=mask)
    if WITH_ENTROPY:
        dot_other = tl.load(dot_other_ptr + offs, mask=mask, other=0.0)
        distance = tl.where(e_target == 0.0, 0.0, target - row_max)
        entropy = log_total - (dot_other + e_target * distance) / total
        tl.store(entropy_ptr + offs, tl.where(counts, entropy, 0.0), mask=mask)
    if WITH_SQUARES:
        square_other = tl.load(square_other_ptr + offs, mask=mask, other=0.0)
        sum_sq_prob = (square_other + e_target * e_target) / (total * total)
        tl.store(sum_sq_prob_ptr + offs, tl.where(counts, sum_sq_prob, 0.0), mask=mask)


def token_terms(statistics: SoftmaxStatistics, targets: TokenTargets, rows: RowOptions) -> TokenTerms:
    """Computes per-token terms of the loss from complete statistics (merged over all vocabulary slices), without soft
    labels: see :func:`with_soft_labels`."""
    max_T = statistics.max_T
    if not runs_triton(max_T, rows.backend):
        return token_terms_reference(statistics, targets, rows)
    T, dtype, options = max_T.numel(), max_T.dtype, rows.options
    # New tensors, never views, because callers may change them in place.
    cross_entropy_T, z_loss_T, log_prob_T, entropy_T, row_max_T, log_total_T, miss_T, sum_sq_prob_T = (
        max_T.new_empty(T) for _ in range(8)
    )
    is_top1_T = max_T.new_empty(T, dtype=torch.bool)
    with_smoothing = options.label_smoothing > 0
    with_entropy, with_squares = statistics.dot_other_T is not None, statistics.square_other_T is not None
    if T > 0:
        launch(
            _token_terms_kernel,
            (cdiv(T, TOKEN_TERMS["BLOCK"]),),
            *map(dense, (*statistics, targets.labels_T, rows.class_weight_V)),
            _total_weight(rows, dtype) if with_smoothing and rows.class_weight_V is not None else None,
            cross_entropy_T,
            z_loss_T,
            log_prob_T,
            entropy_T,
            row_max_T,
            log_total_T,
            miss_T,
            sum_sq_prob_T,
            is_top1_T,
            T,
            float(rows.vocab_size),
            host_number(options.label_smoothing, dtype),
            host_number(options.z_loss, dtype),
            WITH_ENTROPY=with_entropy,
            WITH_SMOOTHING=with_smoothing,
            WITH_SQUARES=with_squares,
            HAS_CLASS_WEIGHT=rows.class_weight_V is not None,
            **TOKEN_TERMS,
        )
    return TokenTerms(
        cross_entropy_T=cross_entropy_T,
        z_loss_T=z_loss_T,
        log_prob_T=log_prob_T,
        is_top1_T=is_top1_T,
        entropy_T=entropy_T if with_entropy else None,
        max_T=row_max_T,
        log_total_T=log_total_T,
        miss_T=miss_T,
        mean_logit_T=_mean_logit(statistics, targets, rows),
        sum_sq_prob_T=sum_sq_prob_T if with_squares else None,
    )


def _mean_logit(statistics: SoftmaxStatistics, targets: TokenTargets, rows: RowOptions) -> Tensor | None:
    """Computes the mean logit ``[T]``, also where the sum was computed for label smoothing alone."""
    if statistics.weighted_sum_T is None:
        return None
    return torch.where(targets.labels_T >= 0, statistics.weighted_sum_T / rows.vocab_size, 0.0)


def token_terms_reference(statistics: SoftmaxStatistics, targets: TokenTargets, rows: RowOptions) -> TokenTerms:
    """Computes :func:`token_terms` in plain torch: the path on CPU."""
    labels_T, options = targets.labels_T, rows.options
    max_T, sum_other_T, target_T, dot_other_T, weighted_sum_T, square_other_T = statistics
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
    cross_entropy_T, label_weight_T = nll_T, _label_weights(targets, rows, lse_T.dtype)
    if label_weight_T is not None:
        # A label of weight 0 has no part in the loss, though its logit may be -inf.
        cross_entropy_T = torch.where(label_weight_T == 0, 0.0, nll_T * label_weight_T)
    if options.label_smoothing > 0:
        assert weighted_sum_T is not None
        smooth_T = (_total_weight(rows, lse_T.dtype) * lse_T - weighted_sum_T) / rows.vocab_size
        cross_entropy_T = (1.0 - options.label_smoothing) * cross_entropy_T + options.label_smoothing * smooth_T
    entropy_T = None
    if dot_other_T is not None:
        distance_T = torch.where(e_target_T == 0, 0.0, target_T - max_T)
        entropy_T = log_sum_T - (dot_other_T + e_target_T * distance_T) / sum_T
        entropy_T = torch.where(counts_T, entropy_T, 0.0)
    sum_sq_prob_T = None
    if square_other_T is not None:
        sum_sq_prob_T = torch.where(counts_T, (square_other_T + e_target_T.square()) / sum_T.square(), 0.0)
    return TokenTerms(
        cross_entropy_T=torch.where(counts_T, cross_entropy_T, 0.0),
        z_loss_T=torch.where(counts_T, options.z_loss * lse_T * lse_T, 0.0),
        log_prob_T=torch.where(counts_T, -nll_T, 0.0),
        is_top1_T=counts_T & (target_T >= max_T),
        entropy_T=entropy_T,
        max_T=max_T,
        log_total_T=log_sum_T,
        miss_T=miss_T,
        mean_logit_T=_mean_logit(statistics, targets, rows),
        sum_sq_prob_T=sum_sq_prob_T,
    )


def coefficients_of_loss(gradients: TokenGradients, targets: TokenTargets, rows: RowOptions) -> LossCoefficients:
    """Computes coefficients of the logits' gradient from upstream gradients of the cross entropy, of the z-loss, and of
    the log-probabilities of the classes of ``targets``."""
    options, cross_entropy_T = rows.options, gradients.cross_entropy_T
    nll_T = mass_T = d_lse_T = smoothing_T = None
    if cross_entropy_T is not None:
        hard_weight = 1.0 - options.soft_weight
        factor = hard_weight * (1.0 - options.label_smoothing)
        nll_T = cross_entropy_T if factor == 1.0 else cross_entropy_T * factor
        label_weight_T = _label_weights(targets, rows, nll_T.dtype)
        if label_weight_T is not None:
            nll_T = nll_T * label_weight_T
        if options.label_smoothing > 0:
            smoothing_T = cross_entropy_T * (hard_weight * options.label_smoothing / rows.vocab_size)
            mass_T = smoothing_T * _total_weight(rows, nll_T.dtype)
        if targets.uniform_T is not None:
            smoothing_T = _plus(smoothing_T, cross_entropy_T * targets.uniform_T)
            mass_T = smoothing_T * rows.vocab_size
    if gradients.z_loss_T is not None and options.z_loss != 0:
        d_lse_T = gradients.z_loss_T * (2.0 * options.z_loss)
    at_TK = _gradients_of_classes(gradients, targets)
    if at_TK is not None:
        assert targets.token_ids_TK is not None
        mass_T = _plus(mass_T, -at_TK.sum(1))
        at_TK = sum_of_same_ids(at_TK, targets.token_ids_TK)
    return LossCoefficients(nll_T, mass_T, d_lse_T, smoothing_T, at_TK)


def gradient_coefficients(
    terms: TokenTerms, gradients: TokenGradients, targets: TokenTargets, rows: RowOptions
) -> GradientCoefficients:
    """Computes coefficients of the logits' gradient from upstream gradients of the terms."""
    known = coefficients_of_loss(gradients, targets, rows)
    coefficients = known.of_softmax(terms.max_T, terms.log_total_T, terms.miss_T)
    nll_T, mass_T = coefficients.nll_T, coefficients.mass_T
    entropy_T = square_T = None
    if gradients.log_prob_T is not None:
        nll_T = nll_T - gradients.log_prob_T
    if gradients.entropy_T is not None:
        assert terms.entropy_T is not None
        # d entropy / d z_v = -p_v (log(p_v) + entropy)
        entropy_T = -gradients.entropy_T
        mass_T = _plus(mass_T, entropy_T * terms.entropy_T)
    if gradients.sum_sq_prob_T is not None:
        assert terms.sum_sq_prob_T is not None
        square_T = 2.0 * gradients.sum_sq_prob_T
        mass_T = _plus(mass_T, -square_T * terms.sum_sq_prob_T)
    return coefficients._replace(nll_T=nll_T, mass_T=mass_T, entropy_T=entropy_T, square_T=square_T)


def _gradients_of_classes(gradients: TokenGradients, targets: TokenTargets) -> Tensor | None:
    """Returns upstream gradients ``[T, K]`` of the log-probabilities of all classes of ``targets``; None where all are
    0."""
    if targets.token_ids_TK is None:
        return None
    asked_TK = soft_TK = None
    if gradients.at_TK is not None and targets.asked_ids_TK is not None:
        asked_TK = gradients.at_TK.masked_fill(targets.asked_ids_TK < 0, 0.0)
    if targets.soft_TK is not None and gradients.cross_entropy_T is not None:
        soft_TK = -gradients.cross_entropy_T[:, None] * targets.soft_TK
    if asked_TK is None and soft_TK is None:
        return None
    like_TK = soft_TK if asked_TK is None else asked_TK
    assert like_TK is not None
    if asked_TK is None:
        asked_TK = like_TK.new_zeros((len(like_TK), targets.token_ids_TK.shape[1] - targets.num_soft))
    if soft_TK is None:
        soft_TK = like_TK.new_zeros((len(like_TK), targets.num_soft))
    return torch.cat([asked_TK, soft_TK], 1)


def with_soft_labels(terms: TokenTerms, chosen: ChosenLogits, targets: TokenTargets, rows: RowOptions) -> TokenTerms:
    """Adds the cross entropy of soft labels to ``terms``; ``chosen`` are complete logits of the classes of
    ``targets``."""
    if targets.soft_TK is None:
        return terms
    assert chosen.at_TK is not None
    z_TK = chosen.at_TK[:, chosen.at_TK.shape[1] - targets.num_soft :]
    # A class with factor 0 may have a logit of -inf.
    soft_T = torch.where(targets.soft_TK == 0, 0.0, -targets.soft_TK * terms.log_probs(z_TK)).sum(1)
    if targets.uniform_T is not None:
        assert terms.mean_logit_T is not None
        soft_T += targets.uniform_T * rows.vocab_size * (terms.lse_T - terms.mean_logit_T)
    soft_T = torch.where(targets.labels_T >= 0, soft_T, 0.0)
    soft_weight = rows.options.soft_weight
    if soft_weight == 1.0:
        # The hard label has no part in the loss, though its logit may be -inf.
        return terms._replace(cross_entropy_T=soft_T)
    return terms._replace(cross_entropy_T=(1.0 - soft_weight) * terms.cross_entropy_T + soft_T)
