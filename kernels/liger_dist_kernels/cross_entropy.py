# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Cross entropy on a block of logits, in two sweeps: softmax statistics, then the gradient.

Legend: T tokens, V vocabulary, N tiles of the vocabulary, K chosen classes of each token. ``z`` are transformed logits
(see :class:`LossOptions`), ``y`` is a token's label.

The two sweeps do not depend on reductions, weights or upstream gradients: their inputs and outputs are per-token
values, which ``token_loss.py`` turns into losses and coefficients. Statistics of slices of the vocabulary can be
merged. If the upstream gradients are known before the loss, ``one_launch.py`` does both in one launch.

[Note: Exponentials of fp32 logits]
The gradient of a 16-bit product needs the probabilities in 16 bits, and the loss needs the logits in fp32. So fp32
logits exist for one tile of the vocabulary at a time. The sweep for the statistics also writes ``exp(z - m)`` in 16
bits, where m is the row's maximum in that tile. The gradient's sweep, which has the statistics of the full row,
multiplies them by ``exp(m - max) / total``. Their relative error is that of rounding the gradient itself, for logits of
any size, while rounded logits would have an error of ``2**-9 * |z|``. A soft-cap's derivative is not in them: those
logits are recomputed instead (:func:`.linear_cross_entropy.recompute_gradients`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    ANY_LENGTH,
    anchor_of,
    cdiv,
    dense,
    exp_of_difference,
    launch,
    log2_of,
    next_power_of_2,
    runs_triton,
    statistics_dtype,
)
from .launches import CROSS_ENTROPY_FWD_EXPONENTIALS, STATISTICS_COLUMNS
from .logit_rows import (
    Coefficients,
    Flags,
    Softmax,
    Sums,
    Terms,
    alignment_arguments,
    class_weights_of,
    counted_logits,
    load_logits,
    num_extra_of,
    row_of,
    slope_of,
    statistics_of_piece,
    store_statistics,
    sum_arguments,
    target_logit,
    tile_arguments,
    tile_offsets,
    transform_arguments,
    transform_of,
    transformed,
    whole_vectors,
    write_gradient_of_piece,
    write_zeros_of_piece,
)
from .options import RowOptions
from .softmax_statistics import GradientCoefficients, SoftmaxStatistics
from .token_chunks import TokenTargets


class Anchors(NamedTuple):
    """Marks logits that are ``exp(z - m)``; see [Note: Exponentials of fp32 logits]."""

    max_NT: Tensor
    """m: maximum of each row in each tile of the vocabulary"""
    columns: int
    """classes of one tile, a power of two; the last one may have fewer"""


@triton.jit(**ANY_LENGTH)
def _cross_entropy_fwd_kernel(
    logits_ptr, stride_t, labels_ptr, first_class, class_weight_ptr, fields_ptr, T,
    V: tl.constexpr, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    FLAGS: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, TRANSFORMS, HAS_SOFTCAP)
    SUMS: tl.constexpr = Sums(WITH_ENTROPY, WITH_SMOOTHING, WITH_SQUARES, HAS_CLASS_WEIGHT)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = row_of(logits_ptr, row, stride_t, FLAGS)
    label = tl.load(labels_ptr + row).to(tl.int32) - first_class
    transform = transform_of(row, scale, softcap, inverse_temperature, PER_TOKEN, FP64)
    target = target_logit(row_ptr, label, (label >= 0) & (label < V), transform, FLAGS)
    row_max, sum_other, dot_other, weighted_sum, square_other = statistics_of_piece(
        row_ptr, label, 0, V, class_weight_ptr, transform, V, FLAGS, SUMS
    )
    store_statistics(fields_ptr, T, row, row_max, sum_other, target, dot_other, weighted_sum, square_other, SUMS)


@triton.jit(**ANY_LENGTH)
def _cross_entropy_fwd_exponentials_kernel(
    logits_ptr, stride_t, labels_ptr, first_class, class_weight_ptr, exponentials_ptr, stride_exponentials_t,
    fields_ptr, T, V, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    # As _cross_entropy_fwd_kernel, for rows of one tile: each logit is read once.
    FLAGS: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, TRANSFORMS, HAS_SOFTCAP)
    SUMS: tl.constexpr = Sums(WITH_ENTROPY, WITH_SMOOTHING, WITH_SQUARES, HAS_CLASS_WEIGHT)
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int32) - first_class
    transform = transform_of(row, scale, softcap, inverse_temperature, PER_TOKEN, FP64)
    offs_v = tile_offsets(FLAGS)
    mask_v = offs_v < whole_vectors(V, FLAGS)
    z, _ = load_logits(row_of(logits_ptr, row, stride_t, FLAGS), offs_v, mask_v, transform, FLAGS)
    if TAIL:
        z = tl.where(offs_v < V, z, float("-inf"))
    row_max = tl.max(tl.max(z, 1))
    anchor = anchor_of(row_max)
    e = exp_of_difference(z, anchor)
    out_row_ptr = row_of(exponentials_ptr, row, stride_exponentials_t, FLAGS)
    tl.store(out_row_ptr + offs_v, e.to(out_row_ptr.dtype.element_ty), mask=mask_v)
    is_target = offs_v == label
    e = tl.where(is_target, 0.0, e)
    target = tl.sum(tl.sum(tl.where(is_target & (offs_v < V), z, 0.0), 1))
    sum_other = tl.sum(tl.sum(e, 1))
    dot_other = sum_other
    weighted_sum = sum_other
    square_other = sum_other
    if WITH_ENTROPY:
        dot_other = tl.sum(tl.sum(e * tl.maximum(z - anchor, -1e4), 1))
    if WITH_SMOOTHING:
        weighted_sum = tl.sum(tl.sum(counted_logits(z, class_weight_ptr, offs_v, offs_v < V, mask_v, SUMS), 1))
    if WITH_SQUARES:
        square_other = tl.sum(tl.sum(e * e, 1))
    store_statistics(fields_ptr, T, row, row_max, sum_other, target, dot_other, weighted_sum, square_other, SUMS)


@triton.jit(**ANY_LENGTH)
def _cross_entropy_bwd_kernel(
    out_ptr, stride_out_t, logits_ptr, stride_t, labels_ptr, first_class, class_weight_ptr,
    max_ptr, log_total_ptr, anchor_ptr, stride_anchor_n, miss_ptr, nll_ptr, mass_ptr, entropy_ptr, square_ptr,
    smoothing_ptr, V, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ANCHOR_COLUMNS: tl.constexpr,
    HAS_MASS: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SQUARE: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    FLAGS: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, TRANSFORMS, HAS_SOFTCAP)
    TERMS: tl.constexpr = Terms(HAS_ENTROPY, HAS_SQUARE, HAS_SMOOTHING, HAS_CLASS_WEIGHT, ANCHOR_COLUMNS > 0)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * LANES * VECTOR
    label = tl.load(labels_ptr + row).to(tl.int32)
    out_row_ptr = row_of(out_ptr, row, stride_out_t, FLAGS)
    if label < 0:
        write_zeros_of_piece(out_row_ptr, first, V, LANES * VECTOR, FLAGS)
    else:
        row_max = tl.load(max_ptr + row)
        anchor = row_max
        mass = tl.zeros_like(row_max)
        entropy = tl.zeros_like(row_max)
        square = tl.zeros_like(row_max)
        smoothing = tl.zeros_like(row_max)
        if ANCHOR_COLUMNS > 0:
            # A program's tile lies in one tile of the anchors.
            anchor = tl.load(anchor_ptr + first // ANCHOR_COLUMNS * stride_anchor_n + row)
        if HAS_MASS:
            mass = tl.load(mass_ptr + row)
        if HAS_ENTROPY:
            entropy = tl.load(entropy_ptr + row)
        if HAS_SQUARE:
            square = tl.load(square_ptr + row)
        if HAS_SMOOTHING:
            smoothing = tl.load(smoothing_ptr + row)
        softmax = Softmax(row_max, log2_of(tl.load(log_total_ptr + row)), anchor)
        coefficients = Coefficients(
            tl.load(miss_ptr + row), tl.load(nll_ptr + row), mass, entropy, square, smoothing
        )  # fmt: skip
        transform = transform_of(row, scale, softcap, inverse_temperature, PER_TOKEN, FP64)
        write_gradient_of_piece(
            out_row_ptr, row_of(logits_ptr, row, stride_t, FLAGS), label - first_class, first,
            tl.minimum(first + LANES * VECTOR, V), class_weight_ptr, softmax, coefficients, transform, LANES * VECTOR,
            FLAGS, TERMS,
        )  # fmt: skip


def statistics_of_fields(fields_FT: Tensor, rows: RowOptions) -> SoftmaxStatistics:
    """Unpacks the fields ``[6, T]`` that a kernel wrote; drops those that were not requested."""
    max_T, sum_other_T, target_T, dot_other_T, weighted_sum_T, square_other_T = fields_FT
    return SoftmaxStatistics(
        max_T,
        sum_other_T,
        target_T,
        dot_other_T if rows.outputs.entropy else None,
        weighted_sum_T if rows.sums_logits else None,
        square_other_T if rows.outputs.sum_sq_prob else None,
    )


def cross_entropy_fwd(
    logits_TV: Tensor, targets: TokenTargets, rows: RowOptions, *, exponentials_TV: Tensor | None = None
) -> SoftmaxStatistics:
    """Computes softmax statistics of each row in one sweep over the logits.

    Args:
        logits_TV: ``[T, V]`` floating, unit stride along V. Raw: the transform of ``rows.options`` is applied here. May
            be a slice of the vocabulary, even an empty one: see :func:`.merge.merge_statistics`.
        targets: the labels, in the full vocabulary, and the temperatures.
        exponentials_TV: ``[T, V]`` of any floating dtype, where ``exp(z - max)`` is written; see [Note: Exponentials of
            fp32 logits]. V is then small enough for one program, :data:`.token_chunks.EXPONENTIAL_COLUMNS`.
    """
    T, V = logits_TV.shape
    if V == 0:
        zeros_6T = logits_TV.new_zeros((6, T), dtype=statistics_dtype(logits_TV.dtype))
        zeros_6T[0] = float("-inf")
        return statistics_of_fields(zeros_6T, rows)
    if not runs_triton(logits_TV, rows.backend):
        return cross_entropy_fwd_reference(logits_TV, targets, rows, exponentials_TV=exponentials_TV)
    fields_6T = logits_TV.new_empty((6, T), dtype=statistics_dtype(logits_TV.dtype))
    if T > 0:
        row: tuple[Any, ...] = logits_TV, logits_TV.stride(0), dense(targets.labels_T), rows.first_class
        row += (class_weights_of(rows, logits_TV) if rows.sums_logits else None,)
        described = sum_arguments(rows) | transform_arguments(rows.options, targets.temperature_T, logits_TV.dtype)
        if exponentials_TV is None:
            described |= tile_arguments(
                logits_TV, is_padded=rows.is_padded, most_columns=STATISTICS_COLUMNS, num_extra=num_extra_of(rows)
            )
            launch(_cross_entropy_fwd_kernel, (T,), *row, fields_6T, T, V, **described)
        else:
            described |= alignment_arguments((logits_TV, exponentials_TV), rows.is_padded)
            lanes = max(next_power_of_2(V) // described["VECTOR"], 1)
            described |= {"LANES": lanes, "FP64": logits_TV.dtype == torch.float64}
            launch(
                _cross_entropy_fwd_exponentials_kernel,
                (T,),
                *row,
                exponentials_TV,
                exponentials_TV.stride(0),
                fields_6T,
                T,
                V,
                **described,
                **CROSS_ENTROPY_FWD_EXPONENTIALS,
            )
    return statistics_of_fields(fields_6T, rows)


def cross_entropy_bwd(
    logits_TV: Tensor,
    targets: TokenTargets,
    coefficients: GradientCoefficients,
    rows: RowOptions,
    *,
    token_logits_TK: Tensor | None = None,
    anchors: Anchors | None = None,
    out_TV: Tensor,
) -> Tensor:
    """Computes the gradient by the raw logits into ``out_TV`` (``logits_TV`` itself for an in-place pass) and returns
    it.

    Args:
        logits_TV: ``[T, V]``, as passed to :func:`cross_entropy_fwd`; with ``anchors``, the exponentials that it wrote.
        targets: as for :func:`cross_entropy_fwd`, and the classes of ``coefficients.at_TK``. Rows with a negative label
            get zeros.
        coefficients: see :class:`GradientCoefficients`; with ``anchors`` only those of a scalar loss.
        token_logits_TK: ``z`` of the chosen classes; None to read it from ``logits_TV``. Required with ``anchors``.
        out_TV: ``[T, V]``, any floating dtype, unit stride along V.
    """
    if coefficients.at_TK is not None and logits_TV.numel() > 0:
        entries_TK = entries_of_classes(logits_TV, targets, coefficients, rows, token_logits_TK)
        cross_entropy_bwd(logits_TV, targets, coefficients._replace(at_TK=None), rows, anchors=anchors, out_TV=out_TV)
        return put_entries(out_TV, targets, entries_TK, rows)
    if not runs_triton(logits_TV, rows.backend):
        return cross_entropy_bwd_reference(logits_TV, targets, coefficients, rows, anchors=anchors, out_TV=out_TV)
    T, V = logits_TV.shape
    if T == 0 or V == 0:
        return out_TV
    max_T, log_total_T, miss_T, nll_T, mass_T, entropy_T, square_T, smoothing_T, _ = map(dense, coefficients)
    weight_V = None if smoothing_T is None else class_weights_of(rows, logits_TV)
    num_extra = sum(given is not None for given in (rows.options.softcap, entropy_T, square_T, weight_V))
    tile = tile_arguments(
        logits_TV,
        out_TV,
        is_padded=rows.is_padded,
        most_columns=None if anchors is None else anchors.columns,
        num_extra=num_extra,
        num_classes=rows.vocab_size,
    )
    launch(
        _cross_entropy_bwd_kernel,
        (T, cdiv(V, tile["LANES"] * tile["VECTOR"])),
        out_TV,
        out_TV.stride(0),
        logits_TV,
        logits_TV.stride(0),
        dense(targets.labels_T),
        rows.first_class,
        weight_V,
        max_T,
        log_total_T,
        None if anchors is None else anchors.max_NT,
        0 if anchors is None else anchors.max_NT.stride(0),
        miss_T,
        nll_T,
        mass_T,
        entropy_T,
        square_T,
        smoothing_T,
        V,
        ANCHOR_COLUMNS=0 if anchors is None else anchors.columns,
        HAS_MASS=mass_T is not None,
        HAS_ENTROPY=entropy_T is not None,
        HAS_SQUARE=square_T is not None,
        HAS_SMOOTHING=smoothing_T is not None,
        HAS_CLASS_WEIGHT=weight_V is not None,
        **transform_arguments(rows.options, targets.temperature_T, logits_TV.dtype),
        **tile,
    )
    return out_TV


def _is_target(logits_TV: Tensor, targets: TokenTargets, rows: RowOptions) -> Tensor:
    classes_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    return targets.labels_T[:, None] - rows.first_class == classes_V


def cross_entropy_fwd_reference(
    logits_TV: Tensor, targets: TokenTargets, rows: RowOptions, *, exponentials_TV: Tensor | None = None
) -> SoftmaxStatistics:
    """Computes :func:`cross_entropy_fwd` in plain torch: the path on CPU."""
    z_TV, _ = transformed(logits_TV, rows.options, targets.temperature_T)
    is_target = _is_target(logits_TV, targets, rows)
    max_T = z_TV.amax(-1)
    # Logits that are all -inf would give inf - inf, which is NaN.
    distance_TV = z_TV - torch.where(max_T == float("-inf"), 0.0, max_T)[:, None]
    e_TV = distance_TV.exp()
    if exponentials_TV is not None:
        exponentials_TV.copy_(e_TV)
    e_TV.masked_fill_(is_target, 0.0)
    dot_other_T = weighted_sum_T = None
    if rows.outputs.entropy:
        dot_other_T = (e_TV * distance_TV).masked_fill_(e_TV == 0, 0.0).sum(-1)
    if rows.sums_logits:
        weight_V = rows.class_weights(logits_TV.shape[1])
        weighted_TV = z_TV
        if weight_V is not None:
            # 0 where the weight is 0, whatever the logit.
            weighted_TV = torch.where(weight_V == 0, 0.0, z_TV * weight_V.to(z_TV.dtype))
        weighted_sum_T = weighted_TV.sum(-1)
    target_T = z_TV.masked_fill(~is_target, 0.0).sum(-1)
    square_other_T = e_TV.square().sum(-1) if rows.outputs.sum_sq_prob else None
    return SoftmaxStatistics(max_T, e_TV.sum(-1), target_T, dot_other_T, weighted_sum_T, square_other_T)


def cross_entropy_bwd_reference(
    logits_TV: Tensor,
    targets: TokenTargets,
    coefficients: GradientCoefficients,
    rows: RowOptions,
    *,
    anchors: Anchors | None = None,
    out_TV: Tensor,
) -> Tensor:
    """Computes :func:`cross_entropy_bwd` in plain torch, without chosen classes: the path on CPU."""
    options, temperature_T = rows.options, targets.temperature_T
    if anchors is None:
        z_TV, slope = transformed(logits_TV, options, temperature_T)
        log_p_TV = coefficients.log_probs(z_TV)
        p_TV = log_p_TV.exp()
    else:
        anchor_TV = anchors.max_NT.T.repeat_interleave(anchors.columns, 1)[:, : logits_TV.shape[1]]
        p_TV = log_p_TV = logits_TV.to(anchor_TV.dtype) * coefficients.log_probs(anchor_TV).exp()
        # Without a soft-cap the derivative is that of any logit.
        slope = transformed(logits_TV[:, :1], options, temperature_T)[1]
    nll_T1 = coefficients.nll_T[:, None]
    is_target = _is_target(logits_TV, targets, rows)
    gradient_TV = torch.where(is_target, -nll_T1 * coefficients.miss_T[:, None], nll_T1 * p_TV)
    if coefficients.mass_T is not None:
        gradient_TV += coefficients.mass_T[:, None] * p_TV
    if coefficients.entropy_T is not None:
        gradient_TV += (coefficients.entropy_T[:, None] * p_TV * log_p_TV).masked_fill_(p_TV == 0, 0.0)
    if coefficients.square_T is not None:
        gradient_TV += coefficients.square_T[:, None] * p_TV.square()
    if coefficients.smoothing_T is not None:
        weight_V = rows.class_weights(logits_TV.shape[1])
        weight = 1.0 if weight_V is None else weight_V.to(p_TV.dtype)
        gradient_TV -= coefficients.smoothing_T[:, None] * weight
    gradient_TV *= slope
    return out_TV.copy_(gradient_TV.masked_fill_(targets.labels_T[:, None] < 0, 0.0))


def entries_of_classes(
    logits_TV: Tensor,
    targets: TokenTargets,
    coefficients: GradientCoefficients,
    rows: RowOptions,
    token_logits_TK: Tensor | None = None,
) -> Tensor:
    """Computes the gradient by the raw logits at the chosen classes, ``[T, K]`` in the dtype of the statistics.
    ``token_logits_TK`` are their ``z`` (None to read them from ``logits_TV``). Adding ``coefficients.at_TK`` to a
    16-bit entry of the gradient would lose the difference of the two as the class's probability nears 1. Entries of
    classes of other blocks are undefined."""
    labels_T, temperature_T, token_ids_TK, *_ = targets
    _, _, miss_T, nll_T, mass_T, entropy_T, square_T, smoothing_T, at_TK = coefficients
    assert at_TK is not None
    assert token_ids_TK is not None
    local_ids_TK = (token_ids_TK - rows.first_class).clamp(0, logits_TV.shape[1] - 1)
    if token_logits_TK is None:
        token_logits_TK, _ = transformed(logits_TV.gather(1, local_ids_TK), rows.options, temperature_T)
    is_label_TK = token_ids_TK == labels_T[:, None]
    log_p_TK = coefficients.log_probs(token_logits_TK)
    p_TK = torch.where(is_label_TK, 1.0 - miss_T[:, None], log_p_TK.exp())
    gradient_TK = torch.where(is_label_TK, -miss_T[:, None], p_TK) * nll_T[:, None] + at_TK
    if mass_T is not None:
        gradient_TK += mass_T[:, None] * p_TK
    if entropy_T is not None:
        # exp(log p), which is exactly 0 for a logit of -inf; 1 - miss has the rounding of a division.
        exact_TK = log_p_TK.exp()
        gradient_TK += (entropy_T[:, None] * exact_TK * log_p_TK).masked_fill_(exact_TK == 0, 0.0)
    if square_T is not None:
        gradient_TK += square_T[:, None] * p_TK.square()
    if smoothing_T is not None:
        weight_V = rows.class_weights(logits_TV.shape[1])
        gradient_TK -= smoothing_T[:, None] * (1.0 if weight_V is None else weight_V[local_ids_TK])
    gradient_TK *= slope_of(token_logits_TK, rows.options, temperature_T)
    return gradient_TK.masked_fill_(labels_T[:, None] < 0, 0.0)


def put_entries(out_TV: Tensor, targets: TokenTargets, entries_TK: Tensor, rows: RowOptions) -> Tensor:
    """Writes the ``entries_TK`` of classes in this block into ``out_TV`` and returns it."""
    assert targets.token_ids_TK is not None
    token_ids_TK = targets.token_ids_TK - rows.first_class
    is_here_TK = (token_ids_TK >= 0) & (token_ids_TK < out_TV.shape[1])
    # An id outside this block repeats one of its row that is inside, or else rewrites the value of column 0.
    first_T1 = is_here_TK.to(torch.int8).argmax(1, keepdim=True)
    has_any_T1 = is_here_TK.gather(1, first_T1)
    substitute_T1 = torch.where(has_any_T1, token_ids_TK.gather(1, first_T1), 0)
    entry_T1 = torch.where(has_any_T1, entries_TK.gather(1, first_T1).to(out_TV.dtype), out_TV[:, :1])
    ids_TK = torch.where(is_here_TK, token_ids_TK, substitute_T1)
    return out_TV.scatter_(1, ids_TK, torch.where(is_here_TK, entries_TK.to(out_TV.dtype), entry_T1))
