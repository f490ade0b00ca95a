# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Softmax statistics and the gradient of each row of logits in one launch, for upstream gradients known before the
loss.

Legend: T tokens, V vocabulary, K chosen classes of each token.

A row is read from memory once. It is cut into pieces of about 16000 logits, one program each. The programs of a row
exchange the statistics of their pieces through memory, and each writes the gradient of its piece, which is still in the
L2 cache.

[Note: Progress and memory order of the ticketed kernel]
Programs of a row wait for each other in a loop, and CUDA does not promise that all programs of a launch run at once. So
a program takes its piece by an atomic ticket instead of its program id: pieces are taken in the order in which programs
start, row by row. The first unfinished row then has all its programs running or next to start, none of which waits for
a later row, so the launch always makes progress. A program publishes its statistics by a release on the row's counter;
the rest spin on an acquire of the same counter, after which those stores are visible. Their loads are volatile, so
that the compiler neither moves them before the loop nor reuses a value from an earlier line of the cache. After its
release each program reads the logits of one piece only, so that it may overwrite them.

That holds while all programs of one row can be resident at once, which :func:`_is_resident` checks; rows of more pieces
take two launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    ANY_LENGTH,
    cdiv,
    dense,
    exp_of_difference,
    launch,
    log2_of,
    next_power_of_2,
    runs_triton,
    statistics_dtype,
)
from .chosen_logits import choose_logits
from .cross_entropy import cross_entropy_bwd, cross_entropy_fwd, entries_of_classes, put_entries, statistics_of_fields
from .launches import PIECE_BYTES
from .logit_rows import (
    Coefficients,
    Flags,
    Softmax,
    Sums,
    Terms,
    class_weights_of,
    merged,
    num_extra_of,
    row_of,
    statistics_of_piece,
    store_statistics,
    sum_arguments,
    target_logit,
    tile_arguments,
    transform_arguments,
    transform_of,
    write_gradient_of_piece,
    write_zeros_of_piece,
)
from .options import RowOptions
from .softmax_statistics import SoftmaxStatistics
from .token_chunks import TokenTargets
from .token_loss import TokenGradients, coefficients_of_loss, gradient_coefficients, token_terms


@triton.jit(**ANY_LENGTH)
def _cross_entropy_fwd_bwd_kernel(
    out_ptr, stride_out_t, logits_ptr, stride_t, labels_ptr, class_weight_ptr, nll_ptr, stride_nll, mass_ptr, d_lse_ptr,
    smoothing_ptr, fields_ptr, T, piece_ptr, arrived_ptr, ticket_ptr,
    V: tl.constexpr, scale, softcap, inverse_temperature,
    PIECES: tl.constexpr, PIECES_POWER: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr, PER_TOKEN: tl.constexpr, TRANSFORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SMOOTHING: tl.constexpr, WITH_SQUARES: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr, HAS_MASS: tl.constexpr, HAS_D_LSE: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
):  # fmt: skip
    FLAGS: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, TRANSFORMS, HAS_SOFTCAP)
    SUMS: tl.constexpr = Sums(WITH_ENTROPY, WITH_SMOOTHING, WITH_SQUARES, HAS_CLASS_WEIGHT)
    TERMS: tl.constexpr = Terms(False, False, HAS_SMOOTHING, HAS_CLASS_WEIGHT, False)
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed") if PIECES > 1 else tl.program_id(0)
    row = (ticket // PIECES).to(tl.int64)
    piece = ticket % PIECES
    label = tl.load(labels_ptr + row).to(tl.int32)
    row_ptr = row_of(logits_ptr, row, stride_t, FLAGS)
    first = piece * PIECE
    end = tl.minimum(first + PIECE, V)
    # An ignored token's logits are not read, because they need not be finite.
    last = tl.where(label < 0, first, end)
    transform = transform_of(row, scale, softcap, inverse_temperature, PER_TOKEN, FP64)
    target = target_logit(row_ptr, label, (label >= 0) & (label < V), transform, FLAGS)
    row_max, sum_other, dot_other, weighted_sum, square_other = statistics_of_piece(
        row_ptr, label, first, last, class_weight_ptr, transform, PIECE, FLAGS, SUMS
    )
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
        store_statistics(fields_ptr, T, row, row_max, sum_other, target, dot_other, weighted_sum, square_other, SUMS)
    out_row_ptr = row_of(out_ptr, row, stride_out_t, FLAGS)
    if label < 0:
        write_zeros_of_piece(out_row_ptr, first, end, PIECE, FLAGS)
    else:
        total = sum_other + exp_of_difference(target, row_max)
        log_total = tl.log(total)
        zero = tl.zeros_like(total)
        mass = tl.load(mass_ptr + row) if HAS_MASS else zero
        if HAS_D_LSE:
            mass += tl.load(d_lse_ptr + row) * (row_max + log_total)
        smoothing = tl.load(smoothing_ptr + row) if HAS_SMOOTHING else zero
        softmax = Softmax(row_max, log2_of(log_total), row_max)
        coefficients = Coefficients(sum_other / total, tl.load(nll_ptr + row * stride_nll), mass, zero, zero, smoothing)
        write_gradient_of_piece(
            out_row_ptr, row_ptr, label, first, end, class_weight_ptr, softmax, coefficients, transform, PIECE, FLAGS,
            TERMS,
        )  # fmt: skip


def cross_entropy_fwd_bwd(
    logits_TV: Tensor,
    targets: TokenTargets,
    gradients: TokenGradients,
    rows: RowOptions,
    *,
    token_logits_TK: Tensor | None = None,
    out_TV: Tensor,
) -> SoftmaxStatistics:
    """Computes softmax statistics of each row, and writes the gradient by the raw logits to ``out_TV``.

    Args:
        logits_TV: ``[T, V]`` floating, unit stride along V, V > 0. Full rows, not a slice of the vocabulary.
        targets: labels in ``[0, V)``, negative for an ignored token: its gradient is 0, its statistics are undefined.
            Temperatures, and soft labels.
        gradients: upstream gradients of the cross entropy and of the z-loss, ``[T]`` in the dtype of the statistics.
        token_logits_TK: ``z`` of the classes of soft labels; None to read it from ``logits_TV``.
        out_TV: as ``logits_TV``, or ``logits_TV`` itself.
    """
    pieces = _num_pieces(logits_TV)
    if not runs_triton(logits_TV, rows.backend) or not _is_resident(logits_TV, pieces):
        return in_two_sweeps(logits_TV, targets, gradients, rows, token_logits_TK=token_logits_TK, out_TV=out_TV)
    T, V = logits_TV.shape
    dtype = statistics_dtype(logits_TV.dtype)
    fields_6T = logits_TV.new_empty((6, T), dtype=dtype)
    statistics = statistics_of_fields(fields_6T, rows)
    if T == 0:
        return statistics
    known = coefficients_of_loss(gradients, targets, rows)
    assert known.nll_T is not None
    weight_V = class_weights_of(rows, logits_TV) if rows.sums_logits else None
    counters = torch.zeros(T + 1 if pieces > 1 else 1, dtype=torch.int32, device=logits_TV.device)
    if known.at_TK is not None and token_logits_TK is None:
        token_logits_TK = choose_logits(logits_TV, targets, 0, rows).at_TK
    launch(
        _cross_entropy_fwd_bwd_kernel,
        (T * pieces,),
        out_TV,
        out_TV.stride(0),
        logits_TV,
        logits_TV.stride(0),
        dense(targets.labels_T),
        weight_V,
        known.nll_T,
        known.nll_T.stride(0),
        known.mass_T,
        known.d_lse_T,
        known.smoothing_T,
        fields_6T,
        T,
        logits_TV.new_empty((T, pieces, 5), dtype=dtype) if pieces > 1 else None,
        counters,
        counters[-1:],
        V,
        PIECES=pieces,
        PIECES_POWER=next_power_of_2(pieces),
        PIECE=cdiv(cdiv(V, pieces), 128) * 128,
        HAS_MASS=known.mass_T is not None,
        HAS_D_LSE=known.d_lse_T is not None,
        HAS_SMOOTHING=known.smoothing_T is not None,
        **sum_arguments(rows),
        **transform_arguments(rows.options, targets.temperature_T, logits_TV.dtype),
        **tile_arguments(logits_TV, out_TV, is_padded=rows.is_padded, num_extra=num_extra_of(rows)),
    )
    if known.at_TK is not None:
        coefficients = known.of_statistics(statistics)
        put_entries(out_TV, targets, entries_of_classes(logits_TV, targets, coefficients, rows, token_logits_TK), rows)
    return statistics


def _num_pieces(logits_TV: Tensor) -> int:
    # Programs wait for each other, and the interpreter runs them one after another.
    if not logits_TV.is_cuda:
        return 1
    return -(-logits_TV.shape[1] * logits_TV.element_size() // PIECE_BYTES)


def _is_resident(logits_TV: Tensor, pieces: int) -> bool:
    """True if all pieces of one row are certain to run at once: one on each multiprocessor, which holds four.

    CUDA's Multi-Process Service and partitions of a GPU (MIG) report the multiprocessors that this process may use.
    """
    if not logits_TV.is_cuda:
        return True
    return pieces <= torch.cuda.get_device_properties(logits_TV.device).multi_processor_count


def in_two_sweeps(
    logits_TV: Tensor,
    targets: TokenTargets,
    gradients: TokenGradients,
    rows: RowOptions,
    *,
    token_logits_TK: Tensor | None = None,
    out_TV: Tensor,
) -> SoftmaxStatistics:
    """Computes :func:`cross_entropy_fwd_bwd` in two launches: on CPUs, and for rows whose pieces cannot all be
    resident."""
    statistics = cross_entropy_fwd(logits_TV, targets, rows)
    terms = token_terms(statistics, targets, rows)
    coefficients = gradient_coefficients(terms, gradients, targets, rows)
    cross_entropy_bwd(logits_TV, targets, coefficients, rows, token_logits_TK=token_logits_TK, out_TV=out_TV)
    return statistics
