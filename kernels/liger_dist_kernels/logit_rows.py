# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Device functions that the kernels of the cross entropy share: statistics and gradients over a piece of one row.

Legend: V vocabulary, T tokens. ``z`` are transformed logits (see :class:`LossOptions`). V is a constexpr where a
program loops over it: a model has one, and the interpreter cannot loop up to a run-time number under numpy >= 2.4.

A tile is [LANES, VECTOR]: VECTOR logits are the 16 bytes that a thread loads at once, so that maxima and sums over a
lane stay in one thread, and a row's threads synchronise only once, after its last tile.

[Note: Whole vectors]
A thread loads and stores 16 bytes at once only where Triton knows that rows begin and masks end at multiples of them;
otherwise it loads two bytes at a time, and the addresses need registers that the logits need. Triton detects multiples
of 16 elements itself. ALIGNED promises row strides of whole vectors, and that a row may be read and written up to the
next whole vector: V is a multiple of one, or the buffer's rows are padded (:func:`.products.logits_buffer`). With TAIL,
V is no multiple: the columns beyond it are read, and replaced by -inf.

[Note: Named tuples in kernels]
Device functions have named tuples for the constants and values of a launch. A kernel has one parameter for each:
Inductor passes no tuple to a kernel. Constants stay constants only in a tuple that is annotated as constexpr.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    anchor_of,
    exp_of_difference,
    host_number,
    log2_of,
    next_power_of_2,
    number,
    probability,
    rounded_product,
    shrunk,
    statistics_dtype,
)
from .launches import REGISTERS, TILE_BYTES, UNALIGNED_COLUMNS, UNALIGNED_REGISTERS
from .options import LossOptions, RowOptions

_LN_2 = tl.constexpr(0.6931471805599453)


class Flags(NamedTuple):
    """Constants of a launch over logits: the tile, and which parts the transform has."""

    LANES: tl.constexpr
    VECTOR: tl.constexpr
    ALIGNED: tl.constexpr
    TAIL: tl.constexpr
    FP64: tl.constexpr
    TRANSFORMS: tl.constexpr
    HAS_SOFTCAP: tl.constexpr


class Sums(NamedTuple):
    """Sums over a row, besides that of its exponentials."""

    ENTROPY: tl.constexpr
    LOGITS: tl.constexpr
    SQUARES: tl.constexpr
    CLASS_WEIGHT: tl.constexpr


class Terms(NamedTuple):
    """Flags of the gradient's non-zero terms, and of a pass that reads exponentials instead of logits."""

    ENTROPY: tl.constexpr
    SQUARE: tl.constexpr
    SMOOTHING: tl.constexpr
    CLASS_WEIGHT: tl.constexpr
    EXPONENTIALS: tl.constexpr


class Transform(NamedTuple):
    """Values of the transform of a row, in the dtype of the statistics: what does not depend on the logit is computed
    once."""

    slope: Any
    """derivative of ``z`` by the raw logit, without the soft-cap's part"""
    bound: Any
    """largest magnitude of ``z`` under a soft-cap"""
    exponent: Any
    """factor of the raw logit, so that ``tanh(scale * raw / softcap)`` is ``2 / (1 + exp2(exponent * raw)) - 1``"""


class Softmax(NamedTuple):
    """Softmax of a full row: its maximum, the logarithm to base 2 of its sum, and the anchor of this piece's
    exponentials where the pass reads exponentials."""

    row_max: Any
    log2_total: Any
    anchor: Any


class Coefficients(NamedTuple):
    """Coefficients of the gradient of a row: see :class:`.GradientCoefficients`."""

    miss: Any
    nll: Any
    mass: Any
    entropy: Any
    square: Any
    smoothing: Any


@triton.jit
def row_of(ptr, row, stride, FLAGS: tl.constexpr):
    """Returns the pointer to a row; see [Note: Whole vectors]."""
    return ptr + row * ((stride // FLAGS.VECTOR) * FLAGS.VECTOR if FLAGS.ALIGNED else stride)


@triton.jit
def whole_vectors(last, FLAGS: tl.constexpr):
    """Returns the end of the columns that may be read of a row that ends at ``last``."""
    return (last + FLAGS.VECTOR - 1) // FLAGS.VECTOR * FLAGS.VECTOR if FLAGS.ALIGNED else last


@triton.jit
def tile_offsets(FLAGS: tl.constexpr):
    """Computes the columns of the first tile, ``[LANES, VECTOR]``."""
    return tl.arange(0, FLAGS.LANES)[:, None] * FLAGS.VECTOR + tl.arange(0, FLAGS.VECTOR)[None, :]


@triton.jit
def transform_of(row, scale, softcap, inverse_temperature, PER_TOKEN: tl.constexpr, FP64: tl.constexpr):
    """Builds the transform of a row; ``inverse_temperature`` is a value, or with PER_TOKEN a vector of one per row."""
    dtype = tl.float64 if FP64 else tl.float32
    inverse = tl.load(inverse_temperature + row).to(dtype) if PER_TOKEN else number(inverse_temperature, dtype)
    scale, softcap = number(scale, dtype), number(softcap, dtype)
    return Transform(scale * inverse, softcap * inverse, log2_of(-2.0 * scale / softcap))


@triton.jit
def load_logits(row_ptr, offs_v, mask_v, transform, FLAGS: tl.constexpr):
    """Loads ``z`` and its derivative by the raw logit. Columns outside the vocabulary are -inf, never 0."""
    dtype = tl.float64 if FLAGS.FP64 else tl.float32
    raw = tl.load(row_ptr + offs_v, mask=mask_v, other=float("-inf")).to(dtype)
    slope = tl.full(raw.shape, 1.0, dtype)
    z = raw
    if FLAGS.HAS_SOFTCAP:
        # The interpreter has no tanh.
        tanh = 2.0 / (1.0 + tl.exp2(raw * transform.exponent)) - 1.0
        z = rounded_product(tanh, tl.zeros_like(raw) + transform.bound)
        slope = (1.0 - tanh * tanh) * transform.slope
    elif FLAGS.TRANSFORMS:
        z = rounded_product(raw, tl.zeros_like(raw) + transform.slope)
        slope *= transform.slope
    if FLAGS.TRANSFORMS:
        z = tl.where(mask_v, z, float("-inf"))
    return z, slope


@triton.jit
def load_probabilities(row_ptr, offs_v, mask_v, softmax, transform, FLAGS: tl.constexpr, EXPONENTIALS: tl.constexpr):
    """Computes ``p``, ``z`` and its derivative by the raw logit, from logits or, with EXPONENTIALS, from ``exp(z -
    anchor)`` without a soft-cap: ``z`` is then unused."""
    dtype = tl.float64 if FLAGS.FP64 else tl.float32
    if EXPONENTIALS:
        e = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0).to(dtype)
        p = e * probability(softmax.anchor, softmax.row_max, softmax.log2_total)
        z, slope = p, tl.zeros_like(p) + transform.slope
    else:
        z, slope = load_logits(row_ptr, offs_v, mask_v, transform, FLAGS)
        p = probability(z, softmax.row_max, softmax.log2_total)
    return p, z, slope


@triton.jit
def merged(max_x, sum_x, dot_x, square_x):
    """Merges maxima and sums of parts, each relative to the part's maximum."""
    total_max = tl.max(max_x)
    anchor = anchor_of(total_max)
    shrink = exp_of_difference(max_x, anchor)
    dot = tl.sum(shrunk(shrink, dot_x, sum_x, max_x - anchor))
    return total_max, tl.sum(shrink * sum_x), dot, tl.sum(shrink * shrink * square_x)


@triton.jit
def statistics_of_piece(
    row_ptr, label, first, last, class_weight_ptr, transform, PIECE: tl.constexpr, FLAGS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Computes the fields of :class:`SoftmaxStatistics`, except the target, over the columns ``[first, last)``, at most
    PIECE."""
    dtype = tl.float64 if FLAGS.FP64 else tl.float32
    offs = tile_offsets(FLAGS)
    columns: tl.constexpr = FLAGS.LANES * FLAGS.VECTOR
    max_l = tl.full((FLAGS.LANES,), float("-inf"), dtype)
    sum_l = tl.zeros((FLAGS.LANES,), dtype)
    dot_l = tl.zeros((FLAGS.LANES,), dtype)
    square_l = tl.zeros((FLAGS.LANES,), dtype)
    weighted_l = tl.zeros((FLAGS.LANES,), dtype)
    end = whole_vectors(last, FLAGS)
    for start in range(0, PIECE, columns):
        offs_v = first + start + offs
        mask_v = offs_v < end
        z, _ = load_logits(row_ptr, offs_v, mask_v, transform, FLAGS)
        if FLAGS.TAIL:
            z = tl.where(offs_v < last, z, float("-inf"))
        # Online softmax, after Milakov and Gimelshein 2018.
        new_max = tl.maximum(max_l, tl.max(z, 1))
        anchor = anchor_of(new_max)
        shrink = exp_of_difference(max_l, anchor)
        e = exp_of_difference(z, anchor[:, None])
        if (label >= first + start) & (label < first + start + columns):
            e = tl.where(offs == label - first - start, 0.0, e)
        if SUMS.ENTROPY:
            # exp(-1e4) is 0 in every dtype: the bound keeps a logit of -inf from turning into 0 * inf.
            distances = tl.sum(e * tl.maximum(z - anchor[:, None], -1e4), 1)
            dot_l = shrunk(shrink, dot_l, sum_l, max_l - anchor) + distances
        if SUMS.SQUARES:
            square_l = shrink * shrink * square_l + tl.sum(e * e, 1)
        if SUMS.LOGITS:
            weighted_l += tl.sum(counted_logits(z, class_weight_ptr, offs_v, offs_v < last, mask_v, SUMS), 1)
        sum_l = shrink * sum_l + tl.sum(e, 1)
        max_l = new_max
    row_max, sum_other, dot_other, square_other = merged(max_l, sum_l, dot_l, square_l)
    return row_max, sum_other, dot_other, tl.sum(weighted_l), square_other


@triton.jit
def counted_logits(z, class_weight_ptr, offs_v, is_class, mask_v, SUMS: tl.constexpr):
    """Multiplies ``z`` by the class weights; 0 where the weight is 0, whatever the logit."""
    counted = tl.where(is_class, z, 0.0)
    if SUMS.CLASS_WEIGHT:
        weight = tl.load(class_weight_ptr + offs_v, mask=mask_v, other=0.0).to(z.dtype)
        counted = tl.where(weight == 0.0, 0.0, counted * weight)
    return counted


@triton.jit
def target_logit(row_ptr, label, is_here, transform, FLAGS: tl.constexpr):
    """Loads ``z`` of the label; 0 where the label is in another block."""
    z, _ = load_logits(row_ptr, label, is_here, transform, FLAGS)
    return tl.where(is_here, z, 0.0)


@triton.jit
def store_statistics(
    fields_ptr, stride_f, row, row_max, sum_other, target, dot_other, weighted_sum, square_other, SUMS: tl.constexpr
):
    """Stores the fields of :class:`SoftmaxStatistics` of a row."""
    tl.store(fields_ptr + row, row_max)
    tl.store(fields_ptr + stride_f + row, sum_other)
    tl.store(fields_ptr + 2 * stride_f + row, target)
    if SUMS.ENTROPY:
        tl.store(fields_ptr + 3 * stride_f + row, dot_other)
    if SUMS.LOGITS:
        tl.store(fields_ptr + 4 * stride_f + row, weighted_sum)
    if SUMS.SQUARES:
        tl.store(fields_ptr + 5 * stride_f + row, square_other)


@triton.jit
def write_gradient_of_piece(
    out_row_ptr, row_ptr, label, first, last, class_weight_ptr, softmax, coefficients, transform,
    PIECE: tl.constexpr, FLAGS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of :class:`GradientCoefficients` in the columns ``[first, last)``, at most PIECE of them."""
    dtype = tl.float64 if FLAGS.FP64 else tl.float32
    offs = tile_offsets(FLAGS)
    miss, nll, mass, entropy, square, smoothing = coefficients
    is_here = (label >= first) & (label < last)
    # The label's entry is written last, over the loop's value: it differs by 1 - p_y being exact.
    p_target, target, target_slope = load_probabilities(
        row_ptr, label, is_here, softmax, transform, FLAGS, TERMS.EXPONENTIALS
    )
    if FLAGS.TRANSFORMS or TERMS.ENTROPY:
        # Every thread reads the label's logit, over which another warp may write its gradient in the loop below.
        tl.debug_barrier()
    target_gradient = mass * (1.0 - miss) - nll * miss
    log_total = softmax.log2_total * _LN_2
    if TERMS.ENTROPY:
        # p itself, which is exactly 0 for a logit of -inf; 1 - miss has the rounding of a division.
        target_gradient += entropy * p_target * tl.maximum(target - softmax.row_max - log_total, -1e4)
    if TERMS.SQUARE:
        target_gradient += square * (1.0 - miss) * (1.0 - miss)
    if TERMS.SMOOTHING:
        if TERMS.CLASS_WEIGHT:
            target_gradient -= smoothing * tl.load(class_weight_ptr + label, mask=is_here, other=0.0).to(dtype)
        else:
            target_gradient -= smoothing
    if FLAGS.TRANSFORMS:
        target_gradient *= target_slope
    end = whole_vectors(last, FLAGS)
    for start in range(0, PIECE, FLAGS.LANES * FLAGS.VECTOR):
        offs_v = first + start + offs
        mask_v = offs_v < end
        p, z, slope = load_probabilities(row_ptr, offs_v, mask_v, softmax, transform, FLAGS, TERMS.EXPONENTIALS)
        gradient = (nll + mass) * p
        if TERMS.ENTROPY:
            gradient += entropy * p * tl.maximum(z - softmax.row_max - log_total, -1e4)
        if TERMS.SQUARE:
            gradient += square * p * p
        if TERMS.SMOOTHING:
            if TERMS.CLASS_WEIGHT:
                gradient -= smoothing * tl.load(class_weight_ptr + offs_v, mask=mask_v, other=0.0).to(dtype)
            else:
                gradient -= smoothing
        if FLAGS.TRANSFORMS:
            gradient *= slope
        tl.store(out_row_ptr + offs_v, gradient.to(out_row_ptr.dtype.element_ty), mask=mask_v)
    tl.debug_barrier()
    tl.store(out_row_ptr + label, target_gradient.to(out_row_ptr.dtype.element_ty), mask=is_here)


@triton.jit
def write_zeros_of_piece(out_row_ptr, first, last, PIECE: tl.constexpr, FLAGS: tl.constexpr):
    """Writes a zero gradient for an ignored token; its logits are not read, because they need not be finite."""
    offs = tile_offsets(FLAGS)
    zeros = tl.zeros((FLAGS.LANES, FLAGS.VECTOR), out_row_ptr.dtype.element_ty)
    end = whole_vectors(last, FLAGS)
    for start in range(0, PIECE, FLAGS.LANES * FLAGS.VECTOR):
        offs_v = first + start + offs
        tl.store(out_row_ptr + offs_v, zeros, mask=offs_v < end)


def transform_arguments(options: LossOptions, temperature_T: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    """Builds the arguments of :func:`load_logits` from ``options`` and each token's temperature, for logits of
    ``dtype``."""
    is_identity = options.softcap is None and options.logit_scale == 1.0 and options.temperature == 1.0
    dtype = statistics_dtype(dtype)
    inverse: Any = host_number(1.0 / options.temperature, dtype)
    if temperature_T is not None:
        inverse = temperature_T.to(dtype).reciprocal()
    return {
        "scale": host_number(options.logit_scale, dtype),
        "softcap": host_number(options.softcap or 1.0, dtype),
        "inverse_temperature": inverse,
        "PER_TOKEN": temperature_T is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "TRANSFORMS": not is_identity or temperature_T is not None,
    }


def sum_arguments(rows: RowOptions) -> dict[str, bool]:
    """Builds the flags of :class:`Sums`."""
    return {
        "WITH_ENTROPY": rows.outputs.entropy,
        "WITH_SMOOTHING": rows.sums_logits,
        "WITH_SQUARES": rows.outputs.sum_sq_prob,
        "HAS_CLASS_WEIGHT": rows.class_weight_V is not None and rows.sums_logits,
    }


def class_weights_of(rows: RowOptions, logits_TV: Tensor) -> Tensor | None:
    """Returns class weights of the block's columns, padded to whole vectors; see [Note: Whole vectors]."""
    weight_V = rows.class_weights(logits_TV.shape[1])
    if weight_V is None:
        return None
    missing = -len(weight_V) % (16 // logits_TV.element_size())
    return torch.nn.functional.pad(weight_V, (0, missing)) if missing else weight_V.contiguous()


def alignment_arguments(rows: tuple[Tensor, ...], is_padded: bool) -> dict[str, Any]:
    """Computes VECTOR, ALIGNED and TAIL for tensors ``[T, V]`` that are read and written together, the first of them
    logits; a teacher may have fewer classes. See [Note: Whole vectors]."""
    vector = 16 // rows[0].element_size()
    has_tail = any(tensor.shape[1] % vector != 0 for tensor in rows)
    is_aligned = (is_padded or not has_tail) and all(tensor.stride(0) % vector == 0 for tensor in rows)
    return {"VECTOR": vector, "ALIGNED": is_aligned, "TAIL": is_aligned and has_tail}


def num_extra_of(rows: RowOptions) -> int:
    """Counts the values besides probabilities that a sweep for statistics computes of each logit."""
    extra = (rows.options.softcap is not None, *sum_arguments(rows).values())
    return sum(extra)


def tile_arguments(
    logits_TV: Tensor,
    *others_TV: Tensor,
    is_padded: bool,
    most_columns: int | None = None,
    num_extra: int = 0,
    num_classes: int | None = None,
) -> dict[str, Any]:
    """Chooses the largest tile whose logits and values computed from them fit the registers, and its launch options.

    Args:
        num_extra: number of values that are computed of each logit besides probabilities: soft-caps, entropies,
            squares, sums, class weights
        num_classes: classes of a row, fixed for blocks of any width so that one compilation serves them; None for those
        of ``logits_TV``
    """
    alignment = alignment_arguments((logits_TV, *others_TV), is_padded)
    vector, itemsize = alignment["VECTOR"], logits_TV.element_size()
    # With TAIL the comparisons need registers too.
    num_extra += 1 if alignment["TAIL"] else 0
    columns = logits_TV.shape[1] if num_classes is None else num_classes
    columns = min(next_power_of_2(columns), TILE_BYTES // 2 ** min(num_extra, 2) // itemsize)
    columns = columns if most_columns is None else min(columns, most_columns)
    if not alignment["ALIGNED"]:
        columns = min(columns, UNALIGNED_COLUMNS)
    is_large = columns * itemsize >= TILE_BYTES // (4 if num_extra > 1 else 2)
    launch = {"num_warps": 8 if is_large and alignment["ALIGNED"] else 4}
    if logits_TV.device.type != "xpu" and torch.version.hip is None:
        # Triton has this option for NVIDIA's GPUs alone.
        launch["maxnreg"] = REGISTERS if alignment["ALIGNED"] else UNALIGNED_REGISTERS
    return {
        **alignment,
        "LANES": max(columns // vector, 1),
        "FP64": logits_TV.dtype == torch.float64,
        **launch,
    }


def transformed(logits_TV: Tensor, options: LossOptions, temperature_T: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """Transforms raw logits ``[T, ...]`` to ``z``; returns it and its derivative, in the dtype of the statistics."""
    scaled = logits_TV.to(statistics_dtype(logits_TV.dtype)) * options.logit_scale
    if options.softcap is not None:
        scaled = options.softcap * torch.tanh(scaled / options.softcap)
    z_TV = scaled / _temperature(scaled, options, temperature_T)
    return z_TV, slope_of(z_TV, options, temperature_T)


def slope_of(z_TV: Tensor, options: LossOptions, temperature_T: Tensor | None) -> Tensor | float:
    """Computes the derivative of ``z`` ``[T, ...]`` by the raw logit."""
    temperature = _temperature(z_TV, options, temperature_T)
    if options.softcap is None:
        return options.logit_scale / temperature
    tanh = z_TV * temperature / options.softcap
    return (1.0 - tanh * tanh) * (options.logit_scale / temperature)


def _temperature(z: Tensor, options: LossOptions, temperature_T: Tensor | None) -> Tensor | float:
    if temperature_T is None:
        return options.temperature
    return temperature_T.to(z.dtype).reshape(-1, *(1 for _ in z.shape[1:]))
