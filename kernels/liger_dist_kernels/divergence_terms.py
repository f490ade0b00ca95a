# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Sweeps that compute the terms of a divergence: its statistics, and the sums that need those. See :mod:`.divergence`.

Legend: T tokens, V classes, G slices of the vocabulary, F fields.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    ANY_LENGTH,
    Backend,
    dense,
    host_number,
    launch,
    number,
    runs_triton,
    statistics_dtype,
)
from .divergence import (
    Divergence,
    DivergenceOptions,
    DivergenceTerms,
    LogPartition,
    log_probabilities,
    pair_arguments,
)
from .divergence_rows import (
    Pair,
    PairFlags,
    load_pair_softmax,
    mixture_of_piece,
    pair_statistics_of_piece,
)
from .logit_rows import (
    Flags,
    row_of,
    transform_of,
    transformed,
)

OF_PROBABILITIES: tuple[Divergence, ...] = ("jsd", "total_variation")
"""divergences that need both models' probabilities, and :func:`divergence_mixture` for them"""


@triton.jit(**ANY_LENGTH)
def _divergence_statistics_kernel(
    student_ptr, stride_student_t, teacher_ptr, stride_teacher_t, fields_ptr, T, V: tl.constexpr,
    student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    STUDENT_TRANSFORMS: tl.constexpr, STUDENT_SOFTCAP: tl.constexpr, TEACHER_TRANSFORMS: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    VARIATION: tl.constexpr,
):  # fmt: skip
    STUDENT: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, STUDENT_TRANSFORMS, STUDENT_SOFTCAP)
    TEACHER: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, TEACHER_TRANSFORMS, TEACHER_SOFTCAP)
    FLAGS: tl.constexpr = PairFlags(FORWARD, REVERSE, VARIATION, STUDENT, TEACHER)
    row = tl.program_id(0).to(tl.int64)
    pair = Pair(
        row_of(student_ptr, row, stride_student_t, STUDENT),
        row_of(teacher_ptr, row, stride_teacher_t, TEACHER),
        transform_of(row, student_scale, student_softcap, inverse_temperature, False, FP64),
        transform_of(row, teacher_scale, teacher_softcap, inverse_temperature, False, FP64),
    )
    student_max, student_sum, teacher_max, teacher_sum, dot, mean = pair_statistics_of_piece(pair, 0, V, V, FLAGS)
    tl.store(fields_ptr + row, student_max)
    tl.store(fields_ptr + T + row, student_sum)
    tl.store(fields_ptr + 2 * T + row, teacher_max)
    tl.store(fields_ptr + 3 * T + row, teacher_sum)
    tl.store(fields_ptr + 4 * T + row, dot)
    tl.store(fields_ptr + 5 * T + row, mean)


@triton.jit(**ANY_LENGTH)
def _divergence_mixture_kernel(
    student_ptr, stride_student_t, teacher_ptr, stride_teacher_t, student_max_ptr, student_log_total_ptr,
    teacher_max_ptr, teacher_log_total_ptr, fields_ptr, T, V: tl.constexpr, beta, student_scale, student_softcap,
    teacher_scale, teacher_softcap, inverse_temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    STUDENT_TRANSFORMS: tl.constexpr, STUDENT_SOFTCAP: tl.constexpr, TEACHER_TRANSFORMS: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    VARIATION: tl.constexpr,
):  # fmt: skip
    STUDENT: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, STUDENT_TRANSFORMS, STUDENT_SOFTCAP)
    TEACHER: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, TEACHER_TRANSFORMS, TEACHER_SOFTCAP)
    FLAGS: tl.constexpr = PairFlags(FORWARD, REVERSE, VARIATION, STUDENT, TEACHER)
    row = tl.program_id(0).to(tl.int64)
    pair = Pair(
        row_of(student_ptr, row, stride_student_t, STUDENT),
        row_of(teacher_ptr, row, stride_teacher_t, TEACHER),
        transform_of(row, student_scale, student_softcap, inverse_temperature, False, FP64),
        transform_of(row, teacher_scale, teacher_softcap, inverse_temperature, False, FP64),
    )
    softmax = load_pair_softmax(student_max_ptr, student_log_total_ptr, teacher_max_ptr, teacher_log_total_ptr, row)
    beta = number(beta, tl.float64 if FP64 else tl.float32)
    of_student, of_teacher = mixture_of_piece(pair, 0, V, softmax, beta, V, FLAGS)
    tl.store(fields_ptr + row, of_student)
    tl.store(fields_ptr + T + row, of_teacher)


def divergence_terms(
    student_TV: Tensor,
    teacher_TV: Tensor,
    *,
    options: DivergenceOptions,
    gather_slices: Any = None,
    is_padded: bool = False,
    backend: Backend = "auto",
) -> DivergenceTerms:
    """Computes the divergence of each token, and the values that its gradient needs.

    Args:
        student_TV: ``[T, V]`` raw logits, floating, unit stride along V.
        teacher_TV: ``[T, V']`` raw logits of the first V' of these classes, V' at most V; possibly none.
        gather_slices: with slices of the vocabulary, a function from ``[F, T]`` of this slice to ``[G, F, T]`` of all
            slices.
        is_padded: True if both are of :func:`.products.logits_buffer`.
        backend: see :func:`runs_triton`.
    """
    common_TV = student_TV[:, : teacher_TV.shape[1]]
    fields_6T = divergence_statistics(common_TV, teacher_TV, options, backend, is_padded=is_padded)
    if gather_slices is not None:
        fields_6T = _merged(gather_slices(fields_6T), options.divergence)
    student, teacher = partitions_of(fields_6T)
    fields_2T = None
    if options.divergence in OF_PROBABILITIES:
        fields_2T = divergence_mixture(common_TV, teacher_TV, student, teacher, options, backend, is_padded=is_padded)
        fields_2T = fields_2T if gather_slices is None else gather_slices(fields_2T).sum(0)
    return terms_of_fields(fields_6T, fields_2T, options)


def partitions_of(fields_6T: Tensor) -> tuple[LogPartition, LogPartition]:
    """Returns the log-sum-exps of student and teacher from the fields of :func:`divergence_statistics`."""
    return LogPartition(fields_6T[0], fields_6T[1].log()), LogPartition(fields_6T[2], fields_6T[3].log())


def terms_of_fields(fields_6T: Tensor, fields_2T: Tensor | None, options: DivergenceOptions) -> DivergenceTerms:
    """Computes the terms from the fields of :func:`divergence_statistics`, and for ``OF_PROBABILITIES``
    those of :func:`divergence_mixture`."""
    student, teacher = partitions_of(fields_6T)
    _, student_sum_T, _, teacher_sum_T, dot_T, mean_T = fields_6T
    entropy_T = student.log_total_T - mean_T / student_sum_T
    if fields_2T is not None:
        of_student_T, of_teacher_T = fields_2T
        divergence_T = of_teacher_T
        if options.divergence == "jsd":
            divergence_T = options.beta * of_teacher_T + (1.0 - options.beta) * of_student_T
        return DivergenceTerms(divergence_T, student, teacher, of_student_T, entropy_T)
    if options.divergence == "forward_kl":
        divergence_T = dot_T / teacher_sum_T + (student.log_total_T - teacher.log_total_T)
    else:
        divergence_T = dot_T / student_sum_T + (teacher.log_total_T - student.log_total_T)
    return DivergenceTerms(divergence_T, student, teacher, divergence_T, entropy_T)


def divergence_statistics(
    common_TV: Tensor, teacher_TV: Tensor, options: DivergenceOptions, backend: Backend, *, is_padded: bool
) -> Tensor:
    """Computes ``[6, T]``: maximum and sum of exponentials of the student and of the teacher, and two sums of products.
    The first multiplies ``exp(z - max)`` of one model by the difference of ``z - max`` (0 for ``OF_PROBABILITIES``),
    the second the student's ``exp(z - max)`` by its ``z - max``. Where all logits are -inf, 0 stands for the maximum in
    ``z - max``.
    """
    dtype = statistics_dtype(torch.promote_types(common_TV.dtype, teacher_TV.dtype))
    T, V = common_TV.shape
    fields_6T = common_TV.new_zeros((6, T), dtype=dtype)
    if V == 0 or T == 0:
        fields_6T[0] = fields_6T[2] = float("-inf")
        return fields_6T
    if runs_triton(common_TV, backend):
        launch(
            _divergence_statistics_kernel,
            (T,),
            common_TV,
            common_TV.stride(0),
            teacher_TV,
            teacher_TV.stride(0),
            fields_6T,
            T,
            V,
            **pair_arguments(common_TV, teacher_TV, options, is_padded),
        )
        return fields_6T
    student_TV, _ = transformed(common_TV.to(dtype), options.student, None)
    teacher_TV, _ = transformed(teacher_TV.to(dtype), options.teacher, None)
    distances = []
    for place, z_TV in ((0, student_TV), (2, teacher_TV)):
        fields_6T[place] = z_TV.amax(1)
        distances.append(z_TV - _anchor(fields_6T[place])[:, None])
        fields_6T[place + 1] = distances[-1].exp().sum(1)
    student_TV, teacher_TV = distances
    e_TV = student_TV.exp()
    fields_6T[5] = torch.where(e_TV == 0, 0.0, e_TV * student_TV).sum(1)
    if options.divergence not in OF_PROBABILITIES:
        is_forward = options.divergence == "forward_kl"
        own_TV, other_TV = (teacher_TV, student_TV) if is_forward else (student_TV, teacher_TV)
        e_TV = own_TV.exp()
        fields_6T[4] = torch.where(e_TV == 0, 0.0, e_TV * (own_TV - other_TV)).sum(1)
    return fields_6T


def _anchor(max_T: Tensor) -> Tensor:
    """Returns the maximum, or 0 where all logits are -inf, because inf - inf is NaN."""
    return torch.where(max_T == float("-inf"), 0.0, max_T)


def _merged(fields_G6T: Tensor, divergence: Divergence) -> Tensor:
    """Merges the fields of slices of the vocabulary into those of full rows; a slice may be empty."""
    merged_6T = fields_G6T[0].clone()
    shifts, shrinks = [], []
    for place in (0, 2):
        merged_6T[place] = fields_G6T[:, place].amax(0)
        shifts.append(_anchor(fields_G6T[:, place]) - _anchor(merged_6T[place]))
        shrinks.append(torch.where(fields_G6T[:, place + 1] == 0, 0.0, shifts[-1].exp()))
        merged_6T[place + 1] = (shrinks[-1] * fields_G6T[:, place + 1]).sum(0)

    def moved(field: int, model: int, shift_GT: Tensor) -> Tensor:
        sum_GT, shrink_GT = fields_G6T[:, 2 * model + 1], shrinks[model]
        total_GT = shrink_GT * (fields_G6T[:, field] + shift_GT * sum_GT)
        return torch.where(shrink_GT * sum_GT == 0, 0.0, total_GT).sum(0)

    merged_6T[5] = moved(5, 0, shifts[0])
    if divergence == "forward_kl":
        merged_6T[4] = moved(4, 1, shifts[1] - shifts[0])
    if divergence == "reverse_kl":
        merged_6T[4] = moved(4, 0, shifts[0] - shifts[1])
    return merged_6T


def divergence_mixture(
    common_TV: Tensor,
    teacher_TV: Tensor,
    student: LogPartition,
    teacher: LogPartition,
    options: DivergenceOptions,
    backend: Backend,
    *,
    is_padded: bool,
) -> Tensor:
    """Computes ``[2, T]`` over these classes: ``sum q log(q / m)`` and ``sum p log(p / m)``; for "total_variation"
    ``sum q sign(q - p) / 2`` and ``sum |q - p| / 2``."""
    T, V = common_TV.shape
    fields_2T = student.max_T.new_zeros((2, T))
    if V == 0 or T == 0:
        return fields_2T
    if runs_triton(common_TV, backend):
        launch(
            _divergence_mixture_kernel,
            (T,),
            common_TV,
            common_TV.stride(0),
            teacher_TV,
            teacher_TV.stride(0),
            *map(dense, (*student, *teacher)),
            fields_2T,
            T,
            V,
            beta=host_number(options.beta, fields_2T.dtype),
            **pair_arguments(common_TV, teacher_TV, options, is_padded),
        )
        return fields_2T
    log_q_TV, log_p_TV, log_m_TV = log_probabilities(common_TV, teacher_TV, student, teacher, options)
    if options.divergence == "total_variation":
        q_TV, difference_TV = log_q_TV.exp(), log_q_TV.exp() - log_p_TV.exp()
        fields_2T[0], fields_2T[1] = 0.5 * (q_TV * difference_TV.sign()).sum(1), 0.5 * difference_TV.abs().sum(1)
        return fields_2T
    for place, log_TV in ((0, log_q_TV), (1, log_p_TV)):
        e_TV = log_TV.exp()
        fields_2T[place] = torch.where(e_TV == 0, 0.0, e_TV * (log_TV - log_m_TV)).sum(1)
    return fields_2T
