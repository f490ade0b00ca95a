# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Cross entropy on a block of logits, in two sweeps: softmax statistics, then the gradient.

Legend: T tokens, V vocabulary, N tiles of the vocabulary, K chosen classes of each token. ``z`` are transformed logits
(see :class:`LossOptions`), ``y`` is a token's label.

The two sweeps know nothing of reductions, weights or upstream gradients: per-token numbers go in and come out, and
``token_loss.py`` turns them into losses and coefficients. Statistics of slices of the vocabulary can be merged. Where
the upstream gradients are known beforehand, ``cross_entropy_fwd_bwd.py`` does both in one launch.

[Note: Exponentials of fp32 logits]
The gradient of a 16-bit product needs the probabilities in 16 bits, and the loss needs the logits in fp32. So fp32
logits exist for one tile of the vocabulary at a time: the sweep for the statistics also writes ``exp(z - m)`` in 16
bits, where m is the row's maximum in that tile, and the gradient's sweep, which knows all of the row, multiplies them
by ``exp(m - max) / total``. Their relative error is that of rounding the gradient itself, whatever the size of the
logits, while rounded logits would have an error of ``2**-9 * |z|``. A soft-cap's derivative is not in them: those
logits are computed again instead (:func:`.linear_cross_entropy.recompute_gradients`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    Backend,
    dense,
    exp_of_difference,
    log2_of,
    on_its_device,
    runs_triton,
    statistics_dtype,
)
from .logit_rows import (
    alignment_arguments,
    extra_of_statistics,
    inverse_temperature_of,
    load_logits,
    padded_weight,
    row_of,
    slope_of,
    statistics_of_piece,
    target_logit,
    tile_arguments,
    transform_arguments,
    transformed,
    weighted_logits,
    whole_vectors,
    write_gradient_of_piece,
    write_zeros_of_piece,
)
from .options import NO_OUTPUTS, LossOptions, TokenOutputs

STATISTICS_COLUMNS = 2048
"""Logits that a program of the statistics' sweep holds at once. With 8192 of them, 64 registers do not hold both the
logits and their exponentials, which the entropy needs: 1.8 ms instead of 0.8 for 2**30 logits (H200)."""


class SoftmaxStatistics(NamedTuple):
    """Softmax statistics of each row of logits, from which loss and gradient are computed. All ``[T]``, fp32 (fp64 for
    fp64 logits)."""

    max_T: Tensor
    """``max_v z_v``"""
    sum_other_T: Tensor
    """``sum over v != y of exp(z_v - max)``. Without the target, so that ``1 - p_y`` is exact as p_y nears 1."""
    target_T: Tensor
    """``z_y``; 0 where the label is negative"""
    dot_other_T: Tensor | None
    """``sum over v != y of exp(z_v - max) * (z_v - max)``, for the entropy"""
    weighted_sum_T: Tensor | None
    """``sum_v w_v * z_v`` with class weights w (or ones), for label smoothing"""
    square_other_T: Tensor | None
    """``sum over v != y of exp(z_v - max)**2``, for the sum of squared probabilities"""


class GradientCoefficients(NamedTuple):
    """Per-token coefficients, each ``[T]``, of the gradient by z:

    ``nll * (p_v - [v = y]) + mass * p_v + entropy * p_v * log(p_v) + square * p_v**2 - smoothing * w_v``
    """

    max_T: Tensor
    """``max_v z_v``"""
    log_total_T: Tensor
    """``log(sum_v exp(z_v - max))``, so that ``log(p_v) = z_v - max - log_total``. Apart from the maximum, whose
    rounding at large logits would be a common factor of all probabilities."""
    miss_T: Tensor
    """``1 - p_y``, computed from the other classes"""
    nll_T: Tensor
    mass_T: Tensor | None
    entropy_T: Tensor | None
    square_T: Tensor | None
    smoothing_T: Tensor | None
    at_TK: Tensor | None = None
    """``[T, K]``: added to the entries of K chosen classes; of a class that is chosen twice, the total for both"""

    def scaled(self, factor: float) -> GradientCoefficients:
        """Those of ``factor`` times the gradient."""
        fields: list[Any] = [None if field is None else field * factor for field in self]
        unscaled = {"max_T": self.max_T, "log_total_T": self.log_total_T, "miss_T": self.miss_T}
        return GradientCoefficients(*fields)._replace(**unscaled)

    def log_probs(self, z: Tensor) -> Tensor:
        """``log(p)`` of ``z`` ``[T, ...]``."""
        return (z - self.max_T[:, None]) - self.log_total_T[:, None]


class Anchors(NamedTuple):
    """Marks logits that are ``exp(z - m)``; see [Note: Exponentials of fp32 logits]."""

    max_NT: Tensor
    """m: maximum of each row in each tile of the vocabulary"""
    columns: int
    """classes of one tile, a power of two; the last one may have fewer"""


@triton.jit
def _statistics_kernel(
    logits_ptr, stride_t, labels_ptr, first_class, class_weight_ptr,
    max_ptr, sum_other_ptr, target_ptr, dot_other_ptr, weighted_sum_ptr, square_other_ptr,
    V: tl.constexpr, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = row_of(logits_ptr, row, stride_t, VECTOR, ALIGNED)
    label = tl.load(labels_ptr + row).to(tl.int32) - first_class
    inverse = inverse_temperature_of(row, inverse_temperature, PER_TOKEN, FP64)
    target = target_logit(
        row_ptr, label, (label >= 0) & (label < V), scale, softcap, inverse, FP64, TRANSFORMS, HAS_SOFTCAP
    )
    row_max, sum_other, dot_other, weighted_sum, square_other = statistics_of_piece(
        row_ptr, label, 0, V, class_weight_ptr, scale, softcap, inverse, V, LANES, VECTOR, ALIGNED, TAIL, FP64,
        TRANSFORMS, HAS_SOFTCAP, WITH_ENTROPY, WITH_SMOOTHING, WITH_SQUARES, HAS_CLASS_WEIGHT,
    )  # fmt: skip
    tl.store(max_ptr + row, row_max)
    tl.store(sum_other_ptr + row, sum_other)
    tl.store(target_ptr + row, target)
    if WITH_ENTROPY:
        tl.store(dot_other_ptr + row, dot_other)
    if WITH_SMOOTHING:
        tl.store(weighted_sum_ptr + row, weighted_sum)
    if WITH_SQUARES:
        tl.store(square_other_ptr + row, square_other)


@triton.jit
def _exponentials_kernel(
    logits_ptr, stride_t, labels_ptr, first_class, class_weight_ptr, exponentials_ptr, stride_exponentials_t,
    max_ptr, sum_other_ptr, target_ptr, dot_other_ptr, weighted_sum_ptr, square_other_ptr,
    V, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    # As _statistics_kernel, for rows of one tile: each logit is read once.
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int32) - first_class
    inverse = inverse_temperature_of(row, inverse_temperature, PER_TOKEN, FP64)
    offs_v = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    mask_v = offs_v < whole_vectors(V, VECTOR, ALIGNED)
    row_ptr = row_of(logits_ptr, row, stride_t, VECTOR, ALIGNED)
    z, _ = load_logits(row_ptr, offs_v, mask_v, scale, softcap, inverse, FP64, TRANSFORMS, HAS_SOFTCAP)
    if TAIL:
        z = tl.where(offs_v < V, z, float("-inf"))
    row_max = tl.max(tl.max(z, 1))
    anchor = tl.where(row_max == float("-inf"), 0.0, row_max)
    e = exp_of_difference(z, anchor)
    out_row_ptr = row_of(exponentials_ptr, row, stride_exponentials_t, VECTOR, ALIGNED)
    tl.store(out_row_ptr + offs_v, e.to(out_row_ptr.dtype.element_ty), mask=mask_v)
    is_target = offs_v == label
    e = tl.where(is_target, 0.0, e)
    tl.store(max_ptr + row, row_max)
    tl.store(sum_other_ptr + row, tl.sum(tl.sum(e, 1)))
    tl.store(target_ptr + row, tl.sum(tl.sum(tl.where(is_target & (offs_v < V), z, 0.0), 1)))
    if WITH_ENTROPY:
        tl.store(dot_other_ptr + row, tl.sum(tl.sum(e * tl.maximum(z - anchor, -1e4), 1)))
    if WITH_SMOOTHING:
        counted = tl.where(offs_v < V, z, 0.0)
        if HAS_CLASS_WEIGHT:
            counted = weighted_logits(counted, class_weight_ptr, offs_v, mask_v)
        tl.store(weighted_sum_ptr + row, tl.sum(tl.sum(counted, 1)))
    if WITH_SQUARES:
        tl.store(square_other_ptr + row, tl.sum(tl.sum(e * e, 1)))


@triton.jit
def _gradient_kernel(
    out_ptr, stride_out_t, logits_ptr, stride_t, labels_ptr, first_class, class_weight_ptr,
    max_ptr, log_total_ptr, anchor_ptr, stride_anchor_n, miss_ptr, nll_ptr, mass_ptr, entropy_ptr, square_ptr,
    smoothing_ptr, V, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ANCHOR_COLUMNS: tl.constexpr,
    HAS_MASS: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SQUARE: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * LANES * VECTOR
    label = tl.load(labels_ptr + row).to(tl.int32)
    out_row_ptr = row_of(out_ptr, row, stride_out_t, VECTOR, ALIGNED)
    if label < 0:
        write_zeros_of_piece(out_row_ptr, first, V, LANES * VECTOR, LANES, VECTOR, ALIGNED)
    else:
        row_max = tl.load(max_ptr + row)
        anchor = row_max
        mass = tl.zeros_like(row_max)
        entropy = tl.zeros_like(row_max)
        square = tl.zeros_like(row_max)
        smoothing = tl.zeros_like(row_max)
        if ANCHOR_COLUMNS > 0:
            anchor = tl.load(anchor_ptr + (first // ANCHOR_COLUMNS) * stride_anchor_n + row)
        if HAS_MASS:
            mass = tl.load(mass_ptr + row)
        if HAS_ENTROPY:
            entropy = tl.load(entropy_ptr + row)
        if HAS_SQUARE:
            square = tl.load(square_ptr + row)
        if HAS_SMOOTHING:
            smoothing = tl.load(smoothing_ptr + row)
        last = tl.minimum(first + LANES * VECTOR, V)
        write_gradient_of_piece(
            out_row_ptr, row_of(logits_ptr, row, stride_t, VECTOR, ALIGNED), label - first_class, first, last,
            class_weight_ptr, row_max, log2_of(tl.load(log_total_ptr + row)), anchor, tl.load(miss_ptr + row),
            tl.load(nll_ptr + row), mass, entropy, square, smoothing, scale, softcap,
            inverse_temperature_of(row, inverse_temperature, PER_TOKEN, FP64),
            LANES * VECTOR, LANES, VECTOR, ALIGNED, FP64, TRANSFORMS, HAS_SOFTCAP, ANCHOR_COLUMNS > 0, HAS_ENTROPY,
            HAS_SQUARE, HAS_SMOOTHING, HAS_CLASS_WEIGHT,
        )  # fmt: skip


def statistics_of_fields(fields_FT: Tensor, options: LossOptions, outputs: TokenOutputs) -> SoftmaxStatistics:
    """The fields as a kernel wrote them, ``[6, T]`` or ``[6, G, T]``, without those that were not asked for."""
    max_T, sum_other_T, target_T, dot_other_T, weighted_sum_T, square_other_T = fields_FT
    return SoftmaxStatistics(
        max_T,
        sum_other_T,
        target_T,
        dot_other_T if outputs.entropy else None,
        weighted_sum_T if outputs.sums_logits(options) else None,
        square_other_T if outputs.sum_sq_prob else None,
    )


@on_its_device
def cross_entropy_fwd(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    options: LossOptions,
    first_class: int = 0,
    temperature_T: Tensor | None = None,
    class_weight_V: Tensor | None = None,
    outputs: TokenOutputs = NO_OUTPUTS,
    exponentials_TV: Tensor | None = None,
    is_padded: bool = False,
    backend: Backend = "auto",
) -> SoftmaxStatistics:
    """Softmax statistics of each row, in one sweep over the logits.

    Args:
        logits_TV: ``[T, V]`` floating, unit stride along V. Raw: the transform of ``options`` is applied here. May be
            a slice of the vocabulary, even an empty one: see :func:`.merge.merge_statistics`.
        labels_T: ``[T]`` int64 in the full vocabulary; a negative label marks an ignored token.
        first_class: vocabulary index of the first column, of a slice.
        temperature_T: ``[T]`` floating, instead of the one in ``options``.
        class_weight_V: ``[V]`` floating, used for label smoothing.
        outputs: also sum what these need.
        exponentials_TV: ``[T, V]`` of any floating dtype, where ``exp(z - max)`` is written; see [Note: Exponentials of
            fp32 logits]. V is then small enough for one program, :data:`.token_chunks.TILE_COLUMNS`.
        is_padded: True if logits and exponentials are of :func:`.products.logits_buffer`.
        backend: see :func:`runs_triton`.
    """
    T, V = logits_TV.shape
    if V == 0:
        zeros_6T = logits_TV.new_zeros((6, T), dtype=statistics_dtype(logits_TV.dtype))
        zeros_6T[0] = float("-inf")
        return statistics_of_fields(zeros_6T, options, outputs)
    if not runs_triton(logits_TV, backend):
        return cross_entropy_fwd_reference(
            logits_TV,
            labels_T,
            options=options,
            first_class=first_class,
            temperature_T=temperature_T,
            class_weight_V=class_weight_V,
            outputs=outputs,
            exponentials_TV=exponentials_TV,
        )
    fields_6T = logits_TV.new_empty((6, T), dtype=statistics_dtype(logits_TV.dtype))
    if T > 0:
        labels_T, class_weight_V = dense(labels_T), padded_weight(class_weight_V, logits_TV)
        row: tuple[Any, ...] = (logits_TV, logits_TV.stride(0), labels_T, first_class)
        row += (class_weight_V if class_weight_V is not None else logits_TV,)
        described: dict[str, Any] = {
            "WITH_ENTROPY": outputs.entropy,
            "WITH_SMOOTHING": outputs.sums_logits(options),
            "WITH_SQUARES": outputs.sum_sq_prob,
            "HAS_CLASS_WEIGHT": class_weight_V is not None,
            **transform_arguments(options, temperature_T, logits_TV.dtype),
        }
        if exponentials_TV is None:
            described |= tile_arguments(
                logits_TV,
                is_padded=is_padded,
                most_columns=STATISTICS_COLUMNS,
                num_extra=extra_of_statistics(options, outputs, class_weight_V),
            )
            _statistics_kernel[(T,)](*row, *fields_6T, V, **described)
        else:
            described |= alignment_arguments((logits_TV, exponentials_TV), is_padded)
            lanes = max(triton.next_power_of_2(V) // described["VECTOR"], 1)
            described |= {"LANES": lanes, "FP64": logits_TV.dtype == torch.float64, "num_warps": 16}
            out = (exponentials_TV, exponentials_TV.stride(0))
            _exponentials_kernel[(T,)](*row, *out, *fields_6T, V, **described)
    return statistics_of_fields(fields_6T, options, outputs)


@on_its_device
def cross_entropy_bwd(
    logits_TV: Tensor,
    labels_T: Tensor,
    coefficients: GradientCoefficients,
    *,
    options: LossOptions,
    first_class: int = 0,
    temperature_T: Tensor | None = None,
    token_ids_TK: Tensor | None = None,
    token_logits_TK: Tensor | None = None,
    class_weight_V: Tensor | None = None,
    anchors: Anchors | None = None,
    out_TV: Tensor,
    is_padded: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Gradient by the raw logits, written to ``out_TV`` (``logits_TV`` itself for an in-place pass) and returned.

    Args:
        logits_TV: ``[T, V]``, as given to :func:`cross_entropy_fwd`; with ``anchors``, the exponentials that it wrote.
        labels_T: ``[T]`` int64 in the full vocabulary; rows with a negative label get zeros.
        first_class: as for :func:`cross_entropy_fwd`.
        coefficients: see :class:`GradientCoefficients`; with ``anchors`` only those of a scalar loss.
        token_ids_TK: ``[T, K]`` int64, the classes of ``coefficients.at_TK`` in the full vocabulary, negative for none.
        token_logits_TK: ``z`` of these classes; None to read it from ``logits_TV``. Required with ``anchors``.
        out_TV: ``[T, V]``, any floating dtype, unit stride along V.
        is_padded: True if logits and gradient are of :func:`.products.logits_buffer`.
    """
    described: dict[str, Any] = {
        "options": options,
        "temperature_T": temperature_T,
        "class_weight_V": class_weight_V,
    }
    if coefficients.at_TK is not None and logits_TV.numel() > 0:
        assert token_ids_TK is not None
        local_ids_TK = token_ids_TK - first_class
        if token_logits_TK is None:
            raw_TK = logits_TV.gather(1, local_ids_TK.clamp(0, logits_TV.shape[1] - 1))
            token_logits_TK, _ = transformed(raw_TK, options, temperature_T)
        entries = gradient_at(token_logits_TK, labels_T - first_class, local_ids_TK, coefficients, **described)
        entries.masked_fill_(labels_T[:, None] < 0, 0.0)
        described |= {"first_class": first_class, "anchors": anchors, "is_padded": is_padded}
        cross_entropy_bwd(
            logits_TV, labels_T, coefficients._replace(at_TK=None), out_TV=out_TV, backend=backend, **described
        )
        return put_entries(out_TV, local_ids_TK, entries)
    if not runs_triton(logits_TV, backend):
        return cross_entropy_bwd_reference(
            logits_TV,
            labels_T,
            coefficients,
            first_class=first_class,
            anchors=anchors,
            out_TV=out_TV,
            **described,
        )
    T, V = logits_TV.shape
    if T == 0 or V == 0:
        return out_TV
    columns = None if anchors is None else anchors.columns
    extra = (options.softcap, coefficients.entropy_T, coefficients.square_T, class_weight_V)
    num_extra = sum(given is not None for given in extra)
    tile = tile_arguments(logits_TV, out_TV, is_padded=is_padded, most_columns=columns, num_extra=num_extra)
    labels_T, class_weight_V = dense(labels_T), padded_weight(class_weight_V, logits_TV)
    max_T, log_total_T, miss_T, nll_T, mass_T, entropy_T, square_T, smoothing_T, _ = map(dense, coefficients)
    _gradient_kernel[(T, triton.cdiv(V, tile["LANES"] * tile["VECTOR"]))](
        out_TV,
        out_TV.stride(0),
        logits_TV,
        logits_TV.stride(0),
        labels_T,
        first_class,
        class_weight_V if class_weight_V is not None else logits_TV,
        max_T,
        log_total_T,
        max_T if anchors is None else anchors.max_NT,
        0 if anchors is None else anchors.max_NT.stride(0),
        miss_T,
        nll_T,
        *(max_T if given is None else given for given in (mass_T, entropy_T, square_T, smoothing_T)),
        V,
        ANCHOR_COLUMNS=0 if anchors is None else anchors.columns,
        HAS_MASS=mass_T is not None,
        HAS_ENTROPY=entropy_T is not None,
        HAS_SQUARE=square_T is not None,
        HAS_SMOOTHING=smoothing_T is not None,
        HAS_CLASS_WEIGHT=class_weight_V is not None,
        **transform_arguments(options, temperature_T, logits_TV.dtype),
        **tile,
    )
    return out_TV


def _is_target(logits_TV: Tensor, labels_T: Tensor, first_class: int) -> Tensor:
    return labels_T[:, None] - first_class == torch.arange(logits_TV.shape[1], device=logits_TV.device)


def cross_entropy_fwd_reference(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    options: LossOptions,
    first_class: int = 0,
    temperature_T: Tensor | None = None,
    class_weight_V: Tensor | None = None,
    outputs: TokenOutputs = NO_OUTPUTS,
    exponentials_TV: Tensor | None = None,
) -> SoftmaxStatistics:
    """:func:`cross_entropy_fwd` in plain torch: the path on CPU."""
    z_TV, _ = transformed(logits_TV, options, temperature_T)
    is_target = _is_target(logits_TV, labels_T, first_class)
    max_T = z_TV.amax(-1)
    # A slice whose logits are all -inf must not turn into inf - inf.
    distance_TV = z_TV - torch.where(max_T == float("-inf"), 0.0, max_T)[:, None]
    e_TV = distance_TV.exp()
    if exponentials_TV is not None:
        exponentials_TV.copy_(e_TV)
    e_TV.masked_fill_(is_target, 0.0)
    dot_other_T = weighted_sum_T = None
    if outputs.entropy:
        dot_other_T = (e_TV * distance_TV).masked_fill_(e_TV == 0, 0.0).sum(-1)
    if outputs.sums_logits(options):
        weighted_TV = z_TV
        if class_weight_V is not None:
            weight_V = class_weight_V.to(z_TV.dtype)
            # 0 where the weight is 0, whatever the logit.
            weighted_TV = torch.where(weight_V == 0, 0.0, z_TV * weight_V)
        weighted_sum_T = weighted_TV.sum(-1)
    target_T = z_TV.masked_fill(~is_target, 0.0).sum(-1)
    square_other_T = e_TV.square().sum(-1) if outputs.sum_sq_prob else None
    return SoftmaxStatistics(max_T, e_TV.sum(-1), target_T, dot_other_T, weighted_sum_T, square_other_T)


def cross_entropy_bwd_reference(
    logits_TV: Tensor,
    labels_T: Tensor,
    coefficients: GradientCoefficients,
    *,
    options: LossOptions,
    first_class: int = 0,
    temperature_T: Tensor | None = None,
    class_weight_V: Tensor | None = None,
    anchors: Anchors | None = None,
    out_TV: Tensor,
) -> Tensor:
    """:func:`cross_entropy_bwd` in plain torch: the path on CPU."""
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
    is_target = _is_target(logits_TV, labels_T, first_class)
    gradient_TV = torch.where(is_target, -nll_T1 * coefficients.miss_T[:, None], nll_T1 * p_TV)
    if coefficients.mass_T is not None:
        gradient_TV += coefficients.mass_T[:, None] * p_TV
    if coefficients.entropy_T is not None:
        gradient_TV += (coefficients.entropy_T[:, None] * p_TV * log_p_TV).masked_fill_(p_TV == 0, 0.0)
    if coefficients.square_T is not None:
        gradient_TV += coefficients.square_T[:, None] * p_TV.square()
    if coefficients.smoothing_T is not None:
        weight = 1.0 if class_weight_V is None else class_weight_V.to(p_TV.dtype)
        gradient_TV -= coefficients.smoothing_T[:, None] * weight
    gradient_TV *= slope
    return out_TV.copy_(gradient_TV.masked_fill_(labels_T[:, None] < 0, 0.0))


def gradient_at(
    z_TK: Tensor,
    labels_T: Tensor,
    token_ids_TK: Tensor,
    coefficients: GradientCoefficients,
    *,
    options: LossOptions,
    temperature_T: Tensor | None,
    class_weight_V: Tensor | None,
) -> Tensor:
    """``[T, K]``: the entries of the gradient by the raw logits at ``token_ids_TK``, whose transformed logits are
    ``z_TK``, in the dtype of the statistics; labels and ids are relative to the columns of ``class_weight_V``. An entry
    of the gradient in 16 bits plus its part from ``coefficients.at_TK`` would have lost the difference of the two as
    the class's probability nears 1. Entries of classes whose ``z`` is not known here mean nothing."""
    slope = slope_of(z_TK, options, temperature_T)
    _, _, miss_T, nll_T, mass_T, entropy_T, square_T, smoothing_T, at_TK = coefficients
    assert at_TK is not None
    is_label_TK = token_ids_TK == labels_T[:, None]
    log_p_TK = coefficients.log_probs(z_TK)
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
        weight: Tensor | float = 1.0
        if class_weight_V is not None:
            weight = class_weight_V[token_ids_TK.clamp(0, len(class_weight_V) - 1)]
        gradient_TK -= smoothing_T[:, None] * weight
    return gradient_TK * slope


def put_entries(out_TV: Tensor, token_ids_TK: Tensor, entries_TK: Tensor) -> Tensor:
    """Writes ``entries_TK`` at those of ``token_ids_TK`` that are in ``[0, V)``, into ``out_TV``, which is returned."""
    is_here_TK = (token_ids_TK >= 0) & (token_ids_TK < out_TV.shape[1])
    # A class that is not here repeats one of its row that is, or else what column 0 holds.
    first_T1 = is_here_TK.to(torch.int8).argmax(1, keepdim=True)
    has_any_T1 = is_here_TK.gather(1, first_T1)
    substitute_T1 = torch.where(has_any_T1, token_ids_TK.gather(1, first_T1), 0)
    entry_T1 = torch.where(has_any_T1, entries_TK.gather(1, first_T1).to(out_TV.dtype), out_TV[:, :1])
    ids_TK = torch.where(is_here_TK, token_ids_TK, substitute_T1)
    return out_TV.scatter_(1, ids_TK, torch.where(is_here_TK, entries_TK.to(out_TV.dtype), entry_T1))
