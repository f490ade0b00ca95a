# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The transform of raw logits, and device functions over a piece of one row of them, which the kernels of the cross
entropy share.

Legend: V vocabulary, T tokens. ``z`` are transformed logits (see :class:`LossOptions`). V is a constexpr: a model has
one, and the interpreter cannot loop up to a run-time number under numpy >= 2.4.

A tile is [LANES, VECTOR]: VECTOR logits are the 16 bytes that a thread loads at once, so that maxima and sums over a
lane stay in one thread, and a row's threads synchronise only once, after its last tile.

[Note: Whole vectors]
A thread loads and stores 16 bytes at once only where Triton knows that rows begin and masks end at multiples of them;
otherwise it takes two bytes at a time, and the addresses take registers that the logits need. Triton knows of multiples
of 16 numbers by itself. ALIGNED promises row strides of whole vectors, and that a row may be read and written up to the
next whole vector: V is a multiple of one, or the buffer's rows are padded (:func:`.products.logits_buffer`). With TAIL,
V is no multiple: what lies beside it is read, and replaced by -inf.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    capped,
    exp_of_difference,
    host_number,
    number,
    probability,
    rounded_product,
    shrunk,
    statistics_dtype,
)
from .options import LossOptions, TokenOutputs

UNALIGNED_COLUMNS = 1024
"""Logits of a tile whose rows are no whole vectors: each is loaded by itself, and their addresses take registers."""
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_of(ptr, row, stride, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a row begins; see [Note: Whole vectors]."""
    return ptr + row * ((stride // VECTOR) * VECTOR if ALIGNED else stride)


@triton.jit
def whole_vectors(last, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """The end of what may be read of a row that ends at ``last``."""
    return (last + VECTOR - 1) // VECTOR * VECTOR if ALIGNED else last


@triton.jit
def inverse_temperature_of(row, inverse_temperature, PER_TOKEN: tl.constexpr, FP64: tl.constexpr):
    """1 / temperature of a row: a number, or a vector with one for each token."""
    dtype = tl.float64 if FP64 else tl.float32
    return tl.load(inverse_temperature + row).to(dtype) if PER_TOKEN else number(inverse_temperature, dtype)


@triton.jit
def load_logits(
    row_ptr, offs_v, mask_v, scale, softcap, inverse_temperature, FP64: tl.constexpr, TRANSFORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """``z`` and its derivative by the raw logit. What lies outside the vocabulary is -inf, never 0."""
    dtype = tl.float64 if FP64 else tl.float32
    raw = tl.load(row_ptr + offs_v, mask=mask_v, other=float("-inf")).to(dtype)
    if TRANSFORMS:
        scale = number(scale, dtype)
        capped_logit, slope = capped(raw, scale, number(softcap, dtype), HAS_SOFTCAP)
        z = rounded_product(capped_logit, tl.zeros_like(capped_logit) + inverse_temperature)
        return tl.where(mask_v, z, float("-inf")), slope * scale * inverse_temperature
    return raw, tl.full(raw.shape, 1.0, dtype)


@triton.jit
def load_probabilities(
    row_ptr, offs_v, mask_v, row_max, log2_total, anchor, scale, softcap, inverse_temperature, FP64: tl.constexpr,
    TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXPONENTIALS: tl.constexpr,
):  # fmt: skip
    """``p``, ``z`` and its derivative by the raw logit, from logits or, with EXPONENTIALS, from ``exp(z - anchor)``
    without a soft-cap: then ``z`` is not used. ``row_max`` and ``log2_total`` are those of the full row."""
    dtype = tl.float64 if FP64 else tl.float32
    if EXPONENTIALS:
        e = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0).to(dtype)
        p = e * probability(anchor, row_max, log2_total)
        z, slope = p, tl.zeros_like(p) + inverse_temperature * number(scale, dtype)
    else:
        z, slope = load_logits(
            row_ptr, offs_v, mask_v, scale, softcap, inverse_temperature, FP64, TRANSFORMS, HAS_SOFTCAP
        )
        p = probability(z, row_max, log2_total)
    return p, z, slope


@triton.jit
def merged(max_x, sum_x, dot_x, square_x):
    """Maximum and sums of parts whose own ones are relative to their own maxima."""
    total_max = tl.max(max_x)
    # Parts, or a row, whose logits are all -inf must not turn into inf - inf.
    anchor = tl.where(total_max == float("-inf"), 0.0, total_max)
    shrink = exp_of_difference(max_x, anchor)
    dot = tl.sum(shrunk(shrink, dot_x, sum_x, max_x - anchor))
    return total_max, tl.sum(shrink * sum_x), dot, tl.sum(shrink * shrink * square_x)


@triton.jit
def statistics_of_piece(
    row_ptr, label, first, last, class_weight_ptr, scale, softcap, inverse_temperature,
    PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr,
    FP64: tl.constexpr, TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Fields of :class:`SoftmaxStatistics`, but the target, of the columns ``[first, last)``, at most PIECE of them."""
    dtype = tl.float64 if FP64 else tl.float32
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    max_l = tl.full((LANES,), float("-inf"), dtype)
    sum_l = tl.zeros((LANES,), dtype)
    dot_l = tl.zeros((LANES,), dtype)
    square_l = tl.zeros((LANES,), dtype)
    weighted_l = tl.zeros((LANES,), dtype)
    end = whole_vectors(last, VECTOR, ALIGNED)
    for start in range(0, PIECE, LANES * VECTOR):
        offs_v = first + start + offs
        mask_v = offs_v < end
        z, _ = load_logits(row_ptr, offs_v, mask_v, scale, softcap, inverse_temperature, FP64, TRANSFORMS, HAS_SOFTCAP)
        if TAIL:
            z = tl.where(offs_v < last, z, float("-inf"))
        new_max = tl.maximum(max_l, tl.max(z, 1))
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = exp_of_difference(max_l, anchor)
        e = exp_of_difference(z, anchor[:, None])
        if (label >= first + start) & (label < first + start + LANES * VECTOR):
            e = tl.where(offs == label - first - start, 0.0, e)
        if WITH_ENTROPY:
            # exp(-1e4) is 0 in every dtype: the bound keeps a logit of -inf from turning into 0 * inf.
            distances = tl.sum(e * tl.maximum(z - anchor[:, None], -1e4), 1)
            dot_l = shrunk(shrink, dot_l, sum_l, max_l - anchor) + distances
        if WITH_SQUARES:
            square_l = shrink * shrink * square_l + tl.sum(e * e, 1)
        if WITH_SMOOTHING:
            counted = tl.where(offs_v < last, z, 0.0)
            if HAS_CLASS_WEIGHT:
                counted = weighted_logits(counted, class_weight_ptr, offs_v, mask_v)
            weighted_l += tl.sum(counted, 1)
        sum_l = shrink * sum_l + tl.sum(e, 1)
        max_l = new_max
    row_max, sum_other, dot_other, square_other = merged(max_l, sum_l, dot_l, square_l)
    return row_max, sum_other, dot_other, tl.sum(weighted_l), square_other


@triton.jit
def weighted_logits(z, class_weight_ptr, offs_v, mask_v):
    """``z`` times the class weights; 0 where the weight is 0, whatever the logit."""
    weight = tl.load(class_weight_ptr + offs_v, mask=mask_v, other=0.0).to(z.dtype)
    return tl.where(weight == 0.0, 0.0, z * weight)


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
    out_row_ptr, row_ptr, label, first, last, class_weight_ptr, row_max, log2_total, anchor, miss, nll, mass, entropy,
    square, smoothing, scale, softcap, inverse_temperature,
    PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, FP64: tl.constexpr,
    TRANSFORMS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXPONENTIALS: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_SQUARE: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The gradient of :class:`GradientCoefficients` in the columns ``[first, last)``, at most PIECE of them."""
    dtype = tl.float64 if FP64 else tl.float32
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    is_here = (label >= first) & (label < last)
    # The label's own entry is written last, over what the loop has put there: it differs by 1 - p_y being exact.
    p_target, target, target_slope = load_probabilities(
        row_ptr, label, is_here, row_max, log2_total, anchor, scale, softcap, inverse_temperature, FP64, TRANSFORMS,
        HAS_SOFTCAP, EXPONENTIALS,
    )  # fmt: skip
    if TRANSFORMS or HAS_ENTROPY:
        # Every thread reads the label's logit, over which another warp may write its gradient in the loop below.
        tl.debug_barrier()
    target_gradient = mass * (1.0 - miss) - nll * miss
    log_total = log2_total * _LN_2
    if HAS_ENTROPY:
        # p itself, which is exactly 0 for a logit of -inf; 1 - miss has the rounding of a division.
        target_gradient += entropy * p_target * tl.maximum(target - row_max - log_total, -1e4)
    if HAS_SQUARE:
        target_gradient += square * (1.0 - miss) * (1.0 - miss)
    if HAS_SMOOTHING:
        if HAS_CLASS_WEIGHT:
            target_gradient -= smoothing * tl.load(class_weight_ptr + label, mask=is_here, other=0.0).to(dtype)
        else:
            target_gradient -= smoothing
    if TRANSFORMS:
        target_gradient *= target_slope
    end = whole_vectors(last, VECTOR, ALIGNED)
    for start in range(0, PIECE, LANES * VECTOR):
        offs_v = first + start + offs
        mask_v = offs_v < end
        p, z, slope = load_probabilities(
            row_ptr, offs_v, mask_v, row_max, log2_total, anchor, scale, softcap, inverse_temperature, FP64, TRANSFORMS,
            HAS_SOFTCAP, EXPONENTIALS,
        )  # fmt: skip
        gradient = (nll + mass) * p
        if HAS_ENTROPY:
            gradient += entropy * p * tl.maximum(z - row_max - log_total, -1e4)
        if HAS_SQUARE:
            gradient += square * p * p
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
    out_row_ptr, first, last, PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The gradient of a token that counts nothing, whose logits need not be finite: they are not read."""
    offs = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    zeros = tl.zeros((LANES, VECTOR), out_row_ptr.dtype.element_ty)
    end = whole_vectors(last, VECTOR, ALIGNED)
    for start in range(0, PIECE, LANES * VECTOR):
        offs_v = first + start + offs
        tl.store(out_row_ptr + offs_v, zeros, mask=offs_v < end)


def transform_arguments(options: LossOptions, temperature_T: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    """What :func:`load_logits` needs of ``options`` and of each token's temperature, for logits of ``dtype``."""
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


def padded_weight(class_weight_V: Tensor | None, logits_TV: Tensor) -> Tensor | None:
    """Class weights that may be read in whole vectors; see [Note: Whole vectors]."""
    if class_weight_V is None:
        return None
    missing = -len(class_weight_V) % (16 // logits_TV.element_size())
    return torch.nn.functional.pad(class_weight_V, (0, missing)) if missing else class_weight_V.contiguous()


def alignment_arguments(rows: tuple[Tensor, ...], is_padded: bool) -> dict[str, Any]:
    """VECTOR, ALIGNED and TAIL for tensors ``[T, V]`` that are read and written together, the first of them logits; a
    teacher may have fewer classes. See [Note: Whole vectors]."""
    vector = 16 // rows[0].element_size()
    has_tail = any(tensor.shape[1] % vector != 0 for tensor in rows)
    is_aligned = (is_padded or not has_tail) and all(tensor.stride(0) % vector == 0 for tensor in rows)
    return {"VECTOR": vector, "ALIGNED": is_aligned, "TAIL": is_aligned and has_tail}


def extra_of_statistics(options: LossOptions, outputs: TokenOutputs, class_weight_V: Tensor | None) -> int:
    """How many things beside probabilities a sweep computes of each logit."""
    sums = outputs.sums_logits(options)
    extra = (options.softcap is not None, outputs.entropy, outputs.sum_sq_prob, sums)
    return sum(extra) + (1 if sums and class_weight_V is not None else 0)


def tile_arguments(
    logits_TV: Tensor, *others_TV: Tensor, is_padded: bool, most_columns: int | None = None, num_extra: int = 0
) -> dict[str, Any]:
    """The largest tile whose logits and what is computed of them fit the registers, and the launch that suits it.

    Args:
        num_extra: how many things beside probabilities are computed of each logit: soft-caps, entropies, squares,
            sums, class weights
    """
    alignment = alignment_arguments((logits_TV, *others_TV), is_padded)
    vector, itemsize = alignment["VECTOR"], logits_TV.element_size()
    # With TAIL the comparisons take registers as well. Tiles of 16, 8 or 4 KiB.
    num_extra += 1 if alignment["TAIL"] else 0
    columns = min(triton.next_power_of_2(logits_TV.shape[1]), 2 ** (14 - min(num_extra, 2)) // itemsize)
    columns = columns if most_columns is None else min(columns, most_columns)
    if not alignment["ALIGNED"]:
        columns = min(columns, UNALIGNED_COLUMNS)
    is_large = columns * itemsize >= (2**12 if num_extra > 1 else 2**13)
    launch = {"num_warps": 8 if is_large and alignment["ALIGNED"] else 4}
    if logits_TV.device.type != "xpu" and torch.version.hip is None:
        # Four programs of eight warps on a multiprocessor, which hide each other's reductions. Triton has this option
        # for NVIDIA's GPUs alone.
        launch["maxnreg"] = 64 if alignment["ALIGNED"] else 128
    return {
        **alignment,
        "LANES": max(columns // vector, 1),
        "FP64": logits_TV.dtype == torch.float64,
        **launch,
    }


def transformed(logits_TV: Tensor, options: LossOptions, temperature_T: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """``z`` of raw logits ``[T, ...]`` and its derivative, in the dtype of the statistics."""
    scaled = logits_TV.to(statistics_dtype(logits_TV.dtype)) * options.logit_scale
    if options.softcap is not None:
        scaled = options.softcap * torch.tanh(scaled / options.softcap)
    z_TV = scaled / _temperature(scaled, options, temperature_T)
    return z_TV, slope_of(z_TV, options, temperature_T)


def slope_of(z_TV: Tensor, options: LossOptions, temperature_T: Tensor | None) -> Tensor | float:
    """The derivative of ``z`` ``[T, ...]`` by the raw logit."""
    temperature = _temperature(z_TV, options, temperature_T)
    if options.softcap is None:
        return options.logit_scale / temperature
    tanh = z_TV * temperature / options.softcap
    return (1.0 - tanh * tanh) * (options.logit_scale / temperature)


def _temperature(z: Tensor, options: LossOptions, temperature_T: Tensor | None) -> Tensor | float:
    if temperature_T is None:
        return options.temperature
    return temperature_T.to(z.dtype).reshape(-1, *(1 for _ in z.shape[1:]))
