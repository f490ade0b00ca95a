# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""From softmax statistics to per-token losses, and from upstream gradients to gradient coefficients.

Legend: T tokens. Everything here is elementwise on ``[T]`` tensors in the dtype of the statistics; the formulas of
the loss are in :class:`LossOptions`. Tokens with a negative label are ignored: all their numbers are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import Backend, dense, host_number, number, on_its_device, runs_triton
from .chosen_logits import ChosenLogits, sum_of_same_ids
from .cross_entropy import GradientCoefficients, SoftmaxStatistics
from .options import LossOptions
from .token_chunks import TokenTargets


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
        """``[T, K]``: log-probabilities of classes whose transformed logits are ``z_TK``."""
        return (z_TK - self.max_T[:, None]) - self.log_total_T[:, None]


class TokenGradients(NamedTuple):
    """Upstream gradients of the fields of :class:`TokenTerms` that are differentiable, each ``[T]`` or None for
    zero."""

    cross_entropy_T: Tensor | None
    z_loss_T: Tensor | None
    log_prob_T: Tensor | None = None
    entropy_T: Tensor | None = None
    sum_sq_prob_T: Tensor | None = None
    at_TK: Tensor | None = None
    """``[T, K]``, of the log-probabilities of chosen classes"""

    def scaled(self, factor: float) -> TokenGradients:
        """Times ``factor``."""
        return TokenGradients(*(None if field is None else field * factor for field in self))


def _class_weights(
    labels_T: Tensor, class_weight_V: Tensor | None, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float]:
    """Weight of each token's label, and the sum over the vocabulary."""
    if class_weight_V is None:
        return 1.0, float(vocab_size)
    weight_V = class_weight_V.to(dtype)
    return weight_V[labels_T.clamp_min(0)], weight_V.sum()


@triton.jit
def _terms_kernel(
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
    # A token that counts nothing may have statistics of no logits: any finite ones do.
    row_max = tl.where(counts, tl.load(max_ptr + offs, mask=mask, other=0.0), 0.0)
    sum_other = tl.where(counts, tl.load(sum_other_ptr + offs, mask=mask, other=0.0), 0.0)
    target = tl.where(counts, tl.load(target_ptr + offs, mask=mask, other=0.0), 0.0)
    e_target = tl.exp(target - row_max)
    total = sum_other + e_target
    log_total = tl.log(total)
    lse = row_max + log_total
    # log(1 + x) for small x, after Kahan: what is lost in 1 + x is lost in its logarithm and in the quotient alike.
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
    tl.store(is_top1_ptr + offs, (counts & (target >= row_max)).to(tl.uint8), mask=mask)
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


@on_its_device
def token_terms(
    statistics: SoftmaxStatistics,
    labels_T: Tensor,
    *,
    options: LossOptions,
    vocab_size: int,
    class_weight_V: Tensor | None = None,
    backend: Backend = "auto",
) -> TokenTerms:
    """Per-token terms of the loss from complete (merged over all vocabulary slices) statistics."""
    max_T = statistics.max_T
    if not runs_triton(max_T, backend):
        return token_terms_reference(
            statistics, labels_T, options=options, vocab_size=vocab_size, class_weight_V=class_weight_V
        )
    T, dtype = max_T.numel(), max_T.dtype
    # Tensors of their own, which callers may change in place; none is a view.
    cross_entropy_T, z_loss_T, log_prob_T, entropy_T, row_max_T, log_total_T, miss_T, sum_sq_prob_T = (
        max_T.new_empty(T) for _ in range(8)
    )
    is_top1_T = max_T.new_empty(T, dtype=torch.bool)
    with_smoothing = options.label_smoothing > 0
    with_entropy, with_squares = statistics.dot_other_T is not None, statistics.square_other_T is not None
    if T > 0:
        _terms_kernel[(triton.cdiv(T, 128),)](
            *map(dense, (*statistics, labels_T, class_weight_V)),
            None if class_weight_V is None or not with_smoothing else class_weight_V.to(dtype).sum(),
            cross_entropy_T,
            z_loss_T,
            log_prob_T,
            entropy_T,
            row_max_T,
            log_total_T,
            miss_T,
            sum_sq_prob_T,
            is_top1_T.view(torch.uint8),
            T,
            float(vocab_size),
            host_number(options.label_smoothing, dtype),
            host_number(options.z_loss, dtype),
            WITH_ENTROPY=with_entropy,
            WITH_SMOOTHING=with_smoothing,
            WITH_SQUARES=with_squares,
            HAS_CLASS_WEIGHT=class_weight_V is not None,
            BLOCK=128,
            num_warps=4,
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
        mean_logit_T=_mean_logit(statistics, labels_T, vocab_size),
        sum_sq_prob_T=sum_sq_prob_T if with_squares else None,
    )


def _mean_logit(statistics: SoftmaxStatistics, labels_T: Tensor, vocab_size: int) -> Tensor | None:
    """Also where the sum was made for label smoothing alone."""
    if statistics.weighted_sum_T is None:
        return None
    return torch.where(labels_T >= 0, statistics.weighted_sum_T / vocab_size, 0.0)


def token_terms_reference(
    statistics: SoftmaxStatistics,
    labels_T: Tensor,
    *,
    options: LossOptions,
    vocab_size: int,
    class_weight_V: Tensor | None = None,
) -> TokenTerms:
    """:func:`token_terms` in plain torch: the path on CPU."""
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
    label_weight, total_weight = _class_weights(labels_T, class_weight_V, vocab_size, lse_T.dtype)
    # A label of weight 0 has no part in the loss, though its logit may be -inf.
    cross_entropy_T = nll_T
    if isinstance(label_weight, Tensor):
        cross_entropy_T = torch.where(label_weight == 0, 0.0, nll_T * label_weight)
    if options.label_smoothing > 0:
        assert weighted_sum_T is not None
        smooth_T = (total_weight * lse_T - weighted_sum_T) / vocab_size
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
        mean_logit_T=_mean_logit(statistics, labels_T, vocab_size),
        sum_sq_prob_T=sum_sq_prob_T,
    )


def gradient_coefficients(
    terms: TokenTerms,
    gradients: TokenGradients,
    labels_T: Tensor,
    *,
    options: LossOptions,
    vocab_size: int,
    class_weight_V: Tensor | None = None,
    targets: TokenTargets | None = None,
) -> GradientCoefficients:
    """Coefficients of the logits' gradient for given upstream gradients of the terms; ``targets`` name the classes of
    ``gradients.at_TK`` and of soft labels."""
    label_weight, total_weight = _class_weights(labels_T, class_weight_V, vocab_size, terms.max_T.dtype)
    hard_weight = 1.0 - options.soft_weight
    nll_T = torch.zeros_like(terms.max_T)
    mass_T = entropy_coefficient_T = square_T = smoothing_T = None
    if gradients.cross_entropy_T is not None:
        nll_T = nll_T + gradients.cross_entropy_T * (hard_weight * (1.0 - options.label_smoothing) * label_weight)
        if options.label_smoothing > 0:
            smoothing_T = gradients.cross_entropy_T * (hard_weight * options.label_smoothing / vocab_size)
            mass_T = smoothing_T * total_weight
        if targets is not None and targets.uniform_T is not None:
            uniform_T = gradients.cross_entropy_T * targets.uniform_T
            smoothing_T = uniform_T if smoothing_T is None else smoothing_T + uniform_T
            mass_T = smoothing_T * vocab_size
    if gradients.log_prob_T is not None:
        nll_T = nll_T - gradients.log_prob_T
    if gradients.z_loss_T is not None and options.z_loss != 0:
        z_mass_T = gradients.z_loss_T * (2.0 * options.z_loss) * terms.lse_T
        mass_T = z_mass_T if mass_T is None else mass_T + z_mass_T
    if gradients.entropy_T is not None:
        assert terms.entropy_T is not None
        # d entropy / d z_v = -p_v (log(p_v) + entropy)
        entropy_mass_T = -gradients.entropy_T * terms.entropy_T
        mass_T = entropy_mass_T if mass_T is None else mass_T + entropy_mass_T
        entropy_coefficient_T = -gradients.entropy_T
    if gradients.sum_sq_prob_T is not None:
        assert terms.sum_sq_prob_T is not None
        square_T = 2.0 * gradients.sum_sq_prob_T
        square_mass_T = -square_T * terms.sum_sq_prob_T
        mass_T = square_mass_T if mass_T is None else mass_T + square_mass_T
    at_TK = _gradients_of_classes(gradients, targets)
    if at_TK is not None:
        assert targets is not None
        assert targets.token_ids_TK is not None
        at_mass_T = -at_TK.sum(1)
        at_TK = sum_of_same_ids(at_TK, targets.token_ids_TK)
        mass_T = at_mass_T if mass_T is None else mass_T + at_mass_T
    return GradientCoefficients(
        max_T=terms.max_T,
        log_total_T=terms.log_total_T,
        miss_T=terms.miss_T,
        nll_T=nll_T,
        mass_T=mass_T,
        entropy_T=entropy_coefficient_T,
        square_T=square_T,
        smoothing_T=smoothing_T,
        at_TK=at_TK,
    )


def _gradients_of_classes(gradients: TokenGradients, targets: TokenTargets | None) -> Tensor | None:
    """``[T, K]``: upstream gradients of the log-probabilities of all classes of ``targets``; None where all are 0."""
    if targets is None or targets.token_ids_TK is None:
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


def with_soft_labels(
    terms: TokenTerms, chosen: ChosenLogits, targets: TokenTargets, *, options: LossOptions, vocab_size: int
) -> TokenTerms:
    """``terms`` with the cross entropy of soft labels; ``chosen`` are complete logits of the classes of ``targets``."""
    if targets.soft_TK is None:
        return terms
    assert chosen.at_TK is not None
    z_TK = chosen.at_TK[:, chosen.at_TK.shape[1] - targets.num_soft :]
    # A class with factor 0 may have a logit of -inf.
    soft_T = torch.where(targets.soft_TK == 0, 0.0, -targets.soft_TK * terms.log_probs(z_TK)).sum(1)
    if targets.uniform_T is not None:
        assert terms.mean_logit_T is not None
        soft_T += targets.uniform_T * vocab_size * (terms.lse_T - terms.mean_logit_T)
    soft_T = torch.where(targets.labels_T >= 0, soft_T, 0.0)
    if options.soft_weight == 1.0:
        # The hard label has no part in the loss, though its logit may be -inf.
        return terms._replace(cross_entropy_T=soft_T)
    return terms._replace(cross_entropy_T=(1.0 - options.soft_weight) * terms.cross_entropy_T + soft_T)
