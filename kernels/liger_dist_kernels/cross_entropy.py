# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Cross entropy on a block of logits, in two sweeps: softmax statistics, then the gradient.

Legend: T tokens, V vocabulary. ``z`` are transformed logits (see :class:`LossOptions`), ``y`` is a token's label.

The two sweeps know nothing of reductions, weights or upstream gradients: per-token numbers go in and come out, and
``token_loss.py`` turns them into losses and coefficients. Statistics of slices of the vocabulary can be merged. Where
the upstream gradients are known beforehand, ``cross_entropy_fwd_bwd.py`` does both in one launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import Backend, capped, dense, exp_of_difference, number, runs_triton, statistics_dtype
from .options import LossOptions


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


class GradientCoefficients(NamedTuple):
    """Per-token coefficients, each ``[T]``, of the gradient by z:

    ``nll * (p_v - [v = y]) + mass * p_v + entropy * p_v * z_v - smoothing * w_v``
    """

    lse_T: Tensor
    """log-sum-exp of z, so that ``p_v = exp(z_v - lse)``"""
    miss_T: Tensor
    """``1 - p_y``, computed from the other classes"""
    nll_T: Tensor
    mass_T: Tensor | None
    entropy_T: Tensor | None
    smoothing_T: Tensor | None


# V is a constexpr: a model has one, and the interpreter cannot loop up to a run-time number under numpy >= 2.4.
#
# A tile is [LANES, VECTOR]: VECTOR logits are the 16 bytes that a thread loads at once, so that maxima and sums over a
# lane stay in one thread, and a row's threads synchronise only once, after its last tile.


@triton.jit
def load_logits(
    row_ptr, offs_v, mask_v, scale, softcap, inverse_temperature, FP64: tl.constexpr, TRANSFORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """``z`` and its derivative by the raw logit. What lies outside the vocabulary is -inf, never 0."""
    dtype = tl.float64 if FP64 else tl.float32
    raw = tl.load(row_ptr + offs_v, mask=mask_v, other=float("-inf")).to(dtype)
    if TRANSFORMS:
        scale, inverse_temperature = number(scale, dtype), number(inverse_temperature, dtype)
        capped_logit, slope = capped(raw, scale, number(softcap, dtype), HAS_SOFTCAP)
        return tl.where(mask_v, capped_logit * inverse_temperature, float("-inf")), slope * scale * inverse_temperature
    return raw, raw * 0.0 + 1.0


@triton.jit
def merged(max_x, sum_x, dot_x):
    """Maximum, sum and dot product of parts whose own ones are relative to their own maxima."""
    total_max = tl.max(max_x)
    # Parts, or a row, whose logits are all -inf must not turn into inf - inf.
    anchor = tl.where(total_max == float("-inf"), 0.0, total_max)
    shrink = exp_of_difference(max_x, anchor)
    moved = tl.where(shrink == 0.0, 0.0, (max_x - anchor) * sum_x)
    return total_max, tl.sum(shrink * sum_x), tl.sum(shrink * (dot_x + moved))


@triton.jit
def statistics_of_piece(
    row_ptr, label, first, last, class_weight_ptr, scale, softcap, inverse_temperature,
    PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, FP64: tl.constexpr, TRANSFORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Fields of :class:`SoftmaxStatistics`, but the target, of the columns ``[first, last)``, at most PIECE of them."""
    dtype = tl.float64 if FP64 else tl.float32
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    max_l = tl.full((LANES,), float("-inf"), dtype)
    sum_l = tl.zeros((LANES,), dtype)
    dot_l = tl.zeros((LANES,), dtype)
    weighted_l = tl.zeros((LANES,), dtype)
    for start in range(0, PIECE, LANES * VECTOR):
        offs_v = first + start + offs
        mask_v = offs_v < last
        z, _ = load_logits(row_ptr, offs_v, mask_v, scale, softcap, inverse_temperature, FP64, TRANSFORMS, HAS_SOFTCAP)
        new_max = tl.maximum(max_l, tl.max(z, 1))
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = exp_of_difference(max_l, anchor)
        e = exp_of_difference(z, anchor[:, None])
        if (label >= first + start) & (label < first + start + LANES * VECTOR):
            e = tl.where(offs == label - first - start, 0.0, e)
        if WITH_ENTROPY:
            moved = tl.where(max_l == float("-inf"), 0.0, (max_l - anchor) * sum_l)
            dot_l = shrink * (dot_l + moved) + tl.sum(tl.where(e > 0.0, e * (z - anchor[:, None]), 0.0), 1)
        if WITH_SMOOTHING:
            counted = tl.where(mask_v, z, 0.0)
            if HAS_CLASS_WEIGHT:
                counted *= tl.load(class_weight_ptr + offs_v, mask=mask_v, other=0.0).to(dtype)
            weighted_l += tl.sum(counted, 1)
        sum_l = shrink * sum_l + tl.sum(e, 1)
        max_l = new_max
    row_max, sum_other, dot_other = merged(max_l, sum_l, dot_l)
    return row_max, sum_other, dot_other, tl.sum(weighted_l)


@triton.jit
def target_logit(
    row_ptr, label, is_here, scale, softcap, inverse_temperature, FP64: tl.constexpr, TRANSFORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """``z`` of the label, and 0 where it is not here."""
    z, _ = load_logits(row_ptr, label, is_here, scale, softcap, inverse_temperature, FP64, TRANSFORMS, HAS_SOFTCAP)
    return tl.where(is_here, z, 0.0)


@triton.jit
def write_gradient_of_piece(
    out_row_ptr, row_ptr, label, first, last, class_weight_ptr, lse, miss, nll, mass, entropy, smoothing, scale,
    softcap, inverse_temperature,
    PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, FP64: tl.constexpr, TRANSFORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The gradient of :class:`GradientCoefficients` in the columns ``[first, last)``, at most PIECE of them."""
    dtype = tl.float64 if FP64 else tl.float32
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    is_here = (label >= first) & (label < last)
    # The label's own entry is written last, over what the loop has put there: it differs by 1 - p_y being exact.
    target, target_slope = load_logits(
        row_ptr, label, is_here, scale, softcap, inverse_temperature, FP64, TRANSFORMS, HAS_SOFTCAP
    )
    target_gradient = mass * (1.0 - miss) - nll * miss
    if HAS_ENTROPY:
        target_gradient += tl.where(miss < 1.0, entropy * (1.0 - miss) * target, 0.0)
    if HAS_SMOOTHING:
        if HAS_CLASS_WEIGHT:
            target_gradient -= smoothing * tl.load(class_weight_ptr + label, mask=is_here, other=0.0).to(dtype)
        else:
            target_gradient -= smoothing
    if TRANSFORMS:
        target_gradient *= target_slope
    for start in range(0, PIECE, LANES * VECTOR):
        offs_v = first + start + offs
        mask_v = offs_v < last
        z, slope = load_logits(
            row_ptr, offs_v, mask_v, scale, softcap, inverse_temperature, FP64, TRANSFORMS, HAS_SOFTCAP
        )
        p = exp_of_difference(z, lse)
        gradient = (nll + mass) * p
        if HAS_ENTROPY:
            gradient += tl.where(p > 0.0, entropy * p * z, 0.0)
        if HAS_SMOOTHING:
            if HAS_CLASS_WEIGHT:
                gradient -= smoothing * tl.load(class_weight_ptr + offs_v, mask=mask_v, other=0.0).to(dtype)
            else:
                gradient -= smoothing
        if TRANSFORMS:
            gradient *= slope
        tl.store(out_row_ptr + offs_v, gradient.to(out_row_ptr.dtype.element_ty), mask=mask_v)
    tl.debug_barrier()
    tl.store(out_row_ptr + label, target_gradient.to(out_row_ptr.dtype.element_ty), mask=is_here)


@triton.jit
def write_zeros_of_piece(
    out_row_ptr, first, last, PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """The gradient of a token that counts nothing, whose logits need not be finite: they are not read."""
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    zeros = tl.zeros((LANES, VECTOR), out_row_ptr.dtype.element_ty)
    for start in range(0, PIECE, LANES * VECTOR):
        offs_v = first + start + offs
        tl.store(out_row_ptr + offs_v, zeros, mask=offs_v < last)


@triton.jit
def _statistics_kernel(
    logits_ptr, stride_t, labels_ptr, class_weight_ptr,
    max_ptr, sum_other_ptr, target_ptr, dot_other_ptr, weighted_sum_ptr,
    V: tl.constexpr, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, FP64: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr, WITH_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_t
    label = tl.load(labels_ptr + row).to(tl.int32)
    target = target_logit(
        row_ptr, label, (label >= 0) & (label < V), scale, softcap, inverse_temperature, FP64, TRANSFORMS, HAS_SOFTCAP
    )
    row_max, sum_other, dot_other, weighted_sum = statistics_of_piece(
        row_ptr, label, 0, V, class_weight_ptr, scale, softcap, inverse_temperature, V, LANES, VECTOR, FP64,
        TRANSFORMS, HAS_SOFTCAP, WITH_ENTROPY, WITH_SMOOTHING, HAS_CLASS_WEIGHT,
    )  # fmt: skip
    tl.store(max_ptr + row, row_max)
    tl.store(sum_other_ptr + row, sum_other)
    tl.store(target_ptr + row, target)
    if WITH_ENTROPY:
        tl.store(dot_other_ptr + row, dot_other)
    if WITH_SMOOTHING:
        tl.store(weighted_sum_ptr + row, weighted_sum)


@triton.jit
def _gradient_kernel(
    out_ptr, stride_out_t, logits_ptr, stride_t, labels_ptr, class_weight_ptr,
    lse_ptr, miss_ptr, nll_ptr, mass_ptr, entropy_ptr, smoothing_ptr,
    V: tl.constexpr, scale, softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, FP64: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_MASS: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * LANES * VECTOR
    label = tl.load(labels_ptr + row).to(tl.int32)
    out_row_ptr = out_ptr + row * stride_out_t
    if label < 0:
        write_zeros_of_piece(out_row_ptr, first, V, LANES * VECTOR, LANES, VECTOR)
    else:
        lse = tl.load(lse_ptr + row)
        mass = lse * 0.0
        entropy = lse * 0.0
        smoothing = lse * 0.0
        if HAS_MASS:
            mass = tl.load(mass_ptr + row)
        if HAS_ENTROPY:
            entropy = tl.load(entropy_ptr + row)
        if HAS_SMOOTHING:
            smoothing = tl.load(smoothing_ptr + row)
        write_gradient_of_piece(
            out_row_ptr, logits_ptr + row * stride_t, label, first, V, class_weight_ptr, lse,
            tl.load(miss_ptr + row), tl.load(nll_ptr + row), mass, entropy, smoothing, scale, softcap,
            inverse_temperature, LANES * VECTOR, LANES, VECTOR, FP64, TRANSFORMS, HAS_SOFTCAP, HAS_ENTROPY,
            HAS_SMOOTHING, HAS_CLASS_WEIGHT,
        )  # fmt: skip


def transform_arguments(options: LossOptions) -> dict[str, Any]:
    """What :func:`load_logits` needs to know of ``options``."""
    return {
        "scale": options.logit_scale,
        "softcap": options.softcap or 1.0,
        "inverse_temperature": 1.0 / options.temperature,
        "HAS_SOFTCAP": options.softcap is not None,
        "TRANSFORMS": options.softcap is not None or options.logit_scale != 1.0 or options.temperature != 1.0,
    }


def tile_arguments(logits_TV: Tensor) -> dict[str, Any]:
    """Tiles of at most 16 KiB, and the launch that suits them."""
    vector = 16 // logits_TV.element_size()
    columns = min(triton.next_power_of_2(logits_TV.shape[1]), 2**14 // logits_TV.element_size())
    return {
        "VECTOR": vector,
        "LANES": max(columns // vector, 1),
        "FP64": logits_TV.dtype == torch.float64,
        "num_warps": 8 if columns * logits_TV.element_size() >= 2**13 else 4,
        # Four programs of eight warps on a multiprocessor, which hide each other's reductions. Triton has this option
        # for NVIDIA's GPUs alone.
        **({"maxnreg": 64} if logits_TV.device.type != "xpu" and torch.version.hip is None else {}),
    }


def named_statistics(fields_5T: Tensor, *, with_entropy: bool, with_smoothing: bool) -> SoftmaxStatistics:
    """The fields as a kernel wrote them, without those that were not asked for."""
    max_T, sum_other_T, target_T, dot_other_T, weighted_sum_T = fields_5T
    return SoftmaxStatistics(
        max_T,
        sum_other_T,
        target_T,
        dot_other_T if with_entropy else None,
        weighted_sum_T if with_smoothing else None,
    )


def cross_entropy_fwd(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    options: LossOptions,
    class_weight_V: Tensor | None = None,
    with_entropy: bool = False,
    backend: Backend = "auto",
) -> SoftmaxStatistics:
    """Softmax statistics of each row, in one sweep over the logits.

    Args:
        logits_TV: ``[T, V]`` floating, unit stride along V. Raw: the transform of ``options`` is applied here. May be
            a slice of the vocabulary, even an empty one: see :func:`.merge.merge_statistics`.
        labels_T: ``[T]`` int64. A negative label marks an ignored token, one of V or more a label in
            another slice.
        class_weight_V: ``[V]`` floating, used for label smoothing.
        with_entropy: also sum what the entropy needs.
        backend: see :func:`runs_triton`.
    """
    T, V = logits_TV.shape
    with_smoothing = options.sums_logits
    if V == 0:
        return _statistics_of_nothing(logits_TV, with_entropy=with_entropy, with_smoothing=with_smoothing)
    if not runs_triton(logits_TV, backend):
        return cross_entropy_fwd_reference(
            logits_TV, labels_T, options=options, class_weight_V=class_weight_V, with_entropy=with_entropy
        )
    dtype = statistics_dtype(logits_TV.dtype)
    fields_5T = logits_TV.new_empty((5, T), dtype=dtype)
    labels_T, class_weight_V = dense(labels_T), dense(class_weight_V)
    if T > 0:
        _statistics_kernel[(T,)](
            logits_TV,
            logits_TV.stride(0),
            labels_T,
            class_weight_V if class_weight_V is not None else logits_TV,
            *fields_5T,
            V,
            WITH_ENTROPY=with_entropy,
            WITH_SMOOTHING=with_smoothing,
            HAS_CLASS_WEIGHT=class_weight_V is not None,
            **transform_arguments(options),
            **tile_arguments(logits_TV),
        )
    return named_statistics(fields_5T, with_entropy=with_entropy, with_smoothing=with_smoothing)


def cross_entropy_bwd(
    logits_TV: Tensor,
    labels_T: Tensor,
    coefficients: GradientCoefficients,
    *,
    options: LossOptions,
    class_weight_V: Tensor | None = None,
    out_TV: Tensor,
    backend: Backend = "auto",
) -> Tensor:
    """Gradient by the raw logits, written to ``out_TV`` (``logits_TV`` itself for an in-place pass) and returned.

    Args:
        logits_TV: ``[T, V]``, as given to :func:`cross_entropy_fwd`.
        labels_T: ``[T]`` int64; rows with a negative label get zeros.
        coefficients: see :class:`GradientCoefficients`.
        out_TV: ``[T, V]``, any floating dtype, unit stride along V.
    """
    if not runs_triton(logits_TV, backend):
        return cross_entropy_bwd_reference(
            logits_TV, labels_T, coefficients, options=options, class_weight_V=class_weight_V, out_TV=out_TV
        )
    T, V = logits_TV.shape
    if T == 0 or V == 0:
        return out_TV
    tile = tile_arguments(logits_TV)
    labels_T, class_weight_V = dense(labels_T), dense(class_weight_V)
    lse_T, mass_T, entropy_T = dense(coefficients.lse_T), dense(coefficients.mass_T), dense(coefficients.entropy_T)
    smoothing_T, unused = dense(coefficients.smoothing_T), lse_T
    _gradient_kernel[(T, triton.cdiv(V, tile["LANES"] * tile["VECTOR"]))](
        out_TV,
        out_TV.stride(0),
        logits_TV,
        logits_TV.stride(0),
        labels_T,
        class_weight_V if class_weight_V is not None else logits_TV,
        lse_T,
        dense(coefficients.miss_T),
        dense(coefficients.nll_T),
        mass_T if mass_T is not None else unused,
        entropy_T if entropy_T is not None else unused,
        smoothing_T if smoothing_T is not None else unused,
        V,
        HAS_MASS=mass_T is not None,
        HAS_ENTROPY=entropy_T is not None,
        HAS_SMOOTHING=smoothing_T is not None,
        HAS_CLASS_WEIGHT=class_weight_V is not None,
        **transform_arguments(options),
        **tile,
    )
    return out_TV


def _statistics_of_nothing(logits_TV: Tensor, *, with_entropy: bool, with_smoothing: bool) -> SoftmaxStatistics:
    """Of a slice of the vocabulary without a class."""
    zeros_T = logits_TV.new_zeros(logits_TV.shape[0], dtype=statistics_dtype(logits_TV.dtype))
    return SoftmaxStatistics(
        torch.full_like(zeros_T, float("-inf")),
        zeros_T,
        zeros_T,
        zeros_T if with_entropy else None,
        zeros_T if with_smoothing else None,
    )


def _transformed(logits_TV: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | float]:
    """Transformed logits and the derivative of the soft-cap, in the dtype of the statistics."""
    scaled = logits_TV.to(statistics_dtype(logits_TV.dtype)) * options.logit_scale
    slope: Tensor | float = 1.0
    if options.softcap is not None:
        tanh = torch.tanh(scaled / options.softcap)
        scaled, slope = options.softcap * tanh, 1.0 - tanh * tanh
    return scaled / options.temperature, slope


def _is_target(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return labels_T[:, None] == torch.arange(logits_TV.shape[1], device=logits_TV.device)


def cross_entropy_fwd_reference(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    options: LossOptions,
    class_weight_V: Tensor | None = None,
    with_entropy: bool = False,
) -> SoftmaxStatistics:
    """:func:`cross_entropy_fwd` in plain torch: the path on CPU."""
    z_TV, _ = _transformed(logits_TV, options)
    is_target = _is_target(logits_TV, labels_T)
    max_T = z_TV.amax(-1)
    # A slice whose logits are all -inf must not turn into inf - inf.
    distance_TV = z_TV - torch.where(max_T == float("-inf"), 0.0, max_T)[:, None]
    e_TV = distance_TV.exp().masked_fill_(is_target, 0.0)
    dot_other_T = weighted_sum_T = None
    if with_entropy:
        dot_other_T = (e_TV * distance_TV).masked_fill_(e_TV == 0, 0.0).sum(-1)
    if options.sums_logits:
        weighted_sum_T = z_TV.sum(-1) if class_weight_V is None else z_TV @ class_weight_V.to(z_TV.dtype)
    target_T = z_TV.masked_fill(~is_target, 0.0).sum(-1)
    return SoftmaxStatistics(max_T, e_TV.sum(-1), target_T, dot_other_T, weighted_sum_T)


def cross_entropy_bwd_reference(
    logits_TV: Tensor,
    labels_T: Tensor,
    coefficients: GradientCoefficients,
    *,
    options: LossOptions,
    class_weight_V: Tensor | None = None,
    out_TV: Tensor,
) -> Tensor:
    """:func:`cross_entropy_bwd` in plain torch: the path on CPU."""
    z_TV, slope = _transformed(logits_TV, options)
    p_TV = (z_TV - coefficients.lse_T[:, None]).exp_()
    nll_T1 = coefficients.nll_T[:, None]
    gradient_TV = torch.where(_is_target(logits_TV, labels_T), -nll_T1 * coefficients.miss_T[:, None], nll_T1 * p_TV)
    if coefficients.mass_T is not None:
        gradient_TV += coefficients.mass_T[:, None] * p_TV
    if coefficients.entropy_T is not None:
        gradient_TV += (coefficients.entropy_T[:, None] * p_TV * z_TV).masked_fill_(p_TV == 0, 0.0)
    if coefficients.smoothing_T is not None:
        weight = 1.0 if class_weight_V is None else class_weight_V.to(z_TV.dtype)
        gradient_TV -= coefficients.smoothing_T[:, None] * weight
    gradient_TV *= slope * (options.logit_scale / options.temperature)
    return out_TV.copy_(gradient_TV.masked_fill_(labels_T[:, None] < 0, 0.0))
