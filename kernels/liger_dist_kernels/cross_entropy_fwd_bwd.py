# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Softmax statistics and the gradient of each row of logits in one launch, for upstream gradients known beforehand.

Legend: T tokens, V vocabulary.

A row is read from memory once. It is cut into pieces of about 16000 logits, one program each. The programs of a row
exchange the statistics of their pieces through memory, and each writes the gradient of its piece, which is still in the
L2 cache.

[Note: Progress and memory order of the ticketed kernel]
Programs of a row wait for each other in a loop, and CUDA does not promise that all programs of a launch run at once. So
a program takes its piece by an atomic ticket instead of its program id: pieces are taken in the order in which programs
start, row by row. The first unfinished row then has all its programs running or next to start, none of which waits for
a later row, so the launch always makes progress. A program publishes its statistics by a release on the row's counter;
the others spin on an acquire of the same counter, after which those stores are visible. Their loads are volatile, so
that the compiler neither moves them before the loop nor reuses a value from an earlier line of the cache. After its
release each program reads the logits of one piece only, so that it may overwrite them.

That holds while all programs of one row can be resident at once, which :func:`_is_resident` asks; rows of more pieces
take two launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    Backend,
    dense,
    exp_of_difference,
    host_number,
    log2_of,
    number,
    on_its_device,
    runs_triton,
    statistics_dtype,
)
from .cross_entropy import (
    SoftmaxStatistics,
    cross_entropy_bwd,
    cross_entropy_fwd,
    statistics_of_fields,
)
from .logit_rows import (
    extra_of_statistics,
    inverse_temperature_of,
    merged,
    padded_weight,
    row_of,
    statistics_of_piece,
    target_logit,
    tile_arguments,
    transform_arguments,
    write_gradient_of_piece,
    write_zeros_of_piece,
)
from .options import NO_OUTPUTS, LossOptions, TokenOutputs
from .token_loss import TokenGradients, gradient_coefficients, token_terms

PIECE_BYTES = 32 * 2**10


@triton.jit
def _kernel(
    out_ptr, stride_out_t, logits_ptr, stride_t, labels_ptr, class_weight_ptr, class_weight_sum_ptr,
    d_cross_entropy_ptr, d_z_loss_ptr, max_ptr, sum_other_ptr, target_ptr, dot_other_ptr, weighted_sum_ptr,
    square_other_ptr, piece_ptr, arrived_ptr, ticket_ptr,
    V: tl.constexpr, label_smoothing, z_loss, scale, softcap, inverse_temperature,
    PIECES: tl.constexpr, PIECES_POWER: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr, PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_Z_LOSS: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SMOOTHING: tl.constexpr,
    WITH_SQUARES: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
):  # fmt: skip
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed") if PIECES > 1 else tl.program_id(0)
    row = (ticket // PIECES).to(tl.int64)
    piece = ticket % PIECES
    label = tl.load(labels_ptr + row).to(tl.int32)
    row_ptr = row_of(logits_ptr, row, stride_t, VECTOR, ALIGNED)
    first = piece * PIECE
    end = tl.minimum(first + PIECE, V)
    # A token that counts nothing stays out even when its logits are not finite: they are not read.
    last = tl.where(label < 0, first, end)
    inverse = inverse_temperature_of(row, inverse_temperature, PER_TOKEN, FP64)
    target = target_logit(
        row_ptr, label, (label >= 0) & (label < V), scale, softcap, inverse, FP64, TRANSFORMS, HAS_SOFTCAP
    )
    row_max, sum_other, dot_other, weighted_sum, square_other = statistics_of_piece(
        row_ptr, label, first, last, class_weight_ptr, scale, softcap, inverse, PIECE, LANES, VECTOR, ALIGNED, TAIL,
        FP64, TRANSFORMS, HAS_SOFTCAP, WITH_ENTROPY, WITH_SMOOTHING, WITH_SQUARES, HAS_CLASS_WEIGHT,
    )  # fmt: skip
    if PIECES > 1:
        piece_ptr += row * (PIECES * 5)
        tl.store(piece_ptr + piece, row_max)
        tl.store(piece_ptr + PIECES + piece, sum_other)
        if WITH_ENTROPY:
            tl.store(piece_ptr + 2 * PIECES + piece, dot_other)
        if WITH_SMOOTHING:
            tl.store(piece_ptr + 3 * PIECES + piece, weighted_sum)
        if WITH_SQUARES:
            tl.store(piece_ptr + 4 * PIECES + piece, square_other)
        # See [Note: Progress and memory order of the ticketed kernel].
        tl.atomic_add(arrived_ptr + row, 1, sem="release")
        while tl.atomic_add(arrived_ptr + row, 0, sem="acquire") < PIECES:
            pass
        offs = tl.arange(0, PIECES_POWER)
        mask = offs < PIECES
        max_x = tl.load(piece_ptr + offs, mask=mask, other=float("-inf"), volatile=True)
        sum_x = tl.load(piece_ptr + PIECES + offs, mask=mask, other=0.0, volatile=True)
        dot_x = tl.zeros_like(sum_x)
        if WITH_ENTROPY:
            dot_x = tl.load(piece_ptr + 2 * PIECES + offs, mask=mask, other=0.0, volatile=True)
        if WITH_SMOOTHING:
            weighted_sum = tl.sum(tl.load(piece_ptr + 3 * PIECES + offs, mask=mask, other=0.0, volatile=True))
        square_x = tl.zeros_like(sum_x)
        if WITH_SQUARES:
            square_x = tl.load(piece_ptr + 4 * PIECES + offs, mask=mask, other=0.0, volatile=True)
        row_max, sum_other, dot_other, square_other = merged(max_x, sum_x, dot_x, square_x)
    if piece == 0:
        tl.store(max_ptr + row, row_max)
        tl.store(sum_other_ptr + row, sum_other)
        tl.store(target_ptr + row, target)
        if WITH_ENTROPY:
            tl.store(dot_other_ptr + row, dot_other)
        if WITH_SMOOTHING:
            tl.store(weighted_sum_ptr + row, weighted_sum)
        if WITH_SQUARES:
            tl.store(square_other_ptr + row, square_other)
    out_row_ptr = row_of(out_ptr, row, stride_out_t, VECTOR, ALIGNED)
    if label < 0:
        write_zeros_of_piece(out_row_ptr, first, end, PIECE, LANES, VECTOR, ALIGNED)
    else:
        # As token_loss.py computes the coefficients of these two upstream gradients.
        total = sum_other + exp_of_difference(target, row_max)
        log_total = tl.log(total)
        lse = row_max + log_total
        nll = tl.load(d_cross_entropy_ptr + row)
        mass = tl.zeros_like(lse)
        smoothing = tl.zeros_like(lse)
        if WITH_SMOOTHING:
            smoothed = number(label_smoothing, nll.dtype)
            smoothing = nll * (smoothed / V)
            nll *= 1.0 - smoothed
            mass = smoothing * (tl.load(class_weight_sum_ptr) if HAS_CLASS_WEIGHT else V)
        if HAS_CLASS_WEIGHT:
            nll *= tl.load(class_weight_ptr + label).to(nll.dtype)
        if HAS_Z_LOSS:
            mass += tl.load(d_z_loss_ptr + row) * (2.0 * number(z_loss, nll.dtype)) * lse
        write_gradient_of_piece(
            out_row_ptr, row_ptr, label, first, end, class_weight_ptr, row_max, log2_of(log_total), row_max,
            sum_other / total, nll, mass, mass, mass, smoothing, scale, softcap, inverse, PIECE, LANES, VECTOR, ALIGNED,
            FP64, TRANSFORMS, HAS_SOFTCAP, False, False, False, WITH_SMOOTHING, HAS_CLASS_WEIGHT,
        )  # fmt: skip


@on_its_device
def cross_entropy_fwd_bwd(
    logits_TV: Tensor,
    labels_T: Tensor,
    gradients: TokenGradients,
    *,
    options: LossOptions,
    temperature_T: Tensor | None = None,
    class_weight_V: Tensor | None = None,
    outputs: TokenOutputs = NO_OUTPUTS,
    out_TV: Tensor,
    is_padded: bool = False,
    backend: Backend = "auto",
) -> SoftmaxStatistics:
    """Softmax statistics of each row, and in ``out_TV`` the gradient by the raw logits.

    Args:
        logits_TV: ``[T, V]`` floating, unit stride along V, V > 0. Full rows, not a slice of the vocabulary.
        labels_T: ``[T]`` int64 in ``[0, V)``; negative for an ignored token. Its gradient is 0, its
            statistics mean nothing.
        gradients: upstream gradients of the cross entropy and of the z-loss, ``[T]`` in the dtype of the statistics.
        temperature_T: ``[T]`` floating, instead of the one in ``options``.
        class_weight_V: ``[V]`` floating.
        outputs: also sum what these need. They get no gradient here.
        out_TV: as ``logits_TV``, or ``logits_TV`` itself.
        is_padded: True if both are of :func:`.products.logits_buffer`.
        backend: see :func:`runs_triton`.
    """
    if not runs_triton(logits_TV, backend) or not _is_resident(logits_TV):
        return in_two_sweeps(
            logits_TV,
            labels_T,
            gradients,
            options=options,
            temperature_T=temperature_T,
            class_weight_V=class_weight_V,
            outputs=outputs,
            out_TV=out_TV,
            is_padded=is_padded,
            backend=backend,
        )
    T, V = logits_TV.shape
    dtype = statistics_dtype(logits_TV.dtype)
    fields_6T = logits_TV.new_empty((6, T), dtype=dtype)
    if T > 0:
        labels_T, class_weight_V = dense(labels_T), padded_weight(class_weight_V, logits_TV)
        pieces = _num_pieces(logits_TV)
        piece = triton.cdiv(triton.cdiv(V, pieces), 128) * 128
        counters = torch.zeros(T + 1 if pieces > 1 else 1, dtype=torch.int32, device=logits_TV.device)
        _kernel[(T * pieces,)](
            out_TV,
            out_TV.stride(0),
            logits_TV,
            logits_TV.stride(0),
            labels_T,
            class_weight_V,
            None if class_weight_V is None else class_weight_V.to(dtype).sum(),
            dense(gradients.cross_entropy_T),
            dense(gradients.z_loss_T),
            *fields_6T,
            logits_TV.new_empty((T, pieces, 5) if pieces > 1 else 1, dtype=dtype),
            counters,
            counters[-1:],
            V,
            host_number(options.label_smoothing, dtype),
            host_number(options.z_loss, dtype),
            PIECES=pieces,
            PIECES_POWER=triton.next_power_of_2(pieces),
            PIECE=piece,
            HAS_Z_LOSS=options.z_loss != 0,
            WITH_ENTROPY=outputs.entropy,
            WITH_SMOOTHING=outputs.sums_logits(options),
            WITH_SQUARES=outputs.sum_sq_prob,
            HAS_CLASS_WEIGHT=class_weight_V is not None,
            **transform_arguments(options, temperature_T, logits_TV.dtype),
            **tile_arguments(
                logits_TV, out_TV, is_padded=is_padded, num_extra=extra_of_statistics(options, outputs, class_weight_V)
            ),
        )
    return statistics_of_fields(fields_6T, options, outputs)


def _num_pieces(logits_TV: Tensor) -> int:
    # Programs wait for each other, and the interpreter runs them one after another.
    if not logits_TV.is_cuda:
        return 1
    return -(-logits_TV.shape[1] * logits_TV.element_size() // PIECE_BYTES)


def _is_resident(logits_TV: Tensor) -> bool:
    """True if all pieces of one row run at once for certain: one on each multiprocessor, which holds four.

    CUDA's Multi-Process Service and partitions of a GPU (MIG) report the multiprocessors that this process may use.
    """
    if not logits_TV.is_cuda:
        return True
    return _num_pieces(logits_TV) <= torch.cuda.get_device_properties(logits_TV.device).multi_processor_count


def in_two_sweeps(
    logits_TV: Tensor,
    labels_T: Tensor,
    gradients: TokenGradients,
    *,
    options: LossOptions,
    temperature_T: Tensor | None = None,
    class_weight_V: Tensor | None = None,
    outputs: TokenOutputs = NO_OUTPUTS,
    out_TV: Tensor,
    is_padded: bool = False,
    backend: Backend = "auto",
) -> SoftmaxStatistics:
    """:func:`cross_entropy_fwd_bwd` by its two halves: on CPUs, and for rows whose pieces cannot all be resident."""
    loss: dict[str, Any] = {"options": options, "class_weight_V": class_weight_V}
    swept: dict[str, Any] = {"temperature_T": temperature_T, "is_padded": is_padded, "backend": backend, **loss}
    V = logits_TV.shape[1]
    statistics = cross_entropy_fwd(logits_TV, labels_T, outputs=outputs, **swept)
    terms = token_terms(statistics, labels_T, vocab_size=V, backend=backend, **loss)
    coefficients = gradient_coefficients(terms, gradients, labels_T, vocab_size=V, **loss)
    cross_entropy_bwd(logits_TV, labels_T, coefficients, out_TV=out_TV, **swept)
    return statistics
