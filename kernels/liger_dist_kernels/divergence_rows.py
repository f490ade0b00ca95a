# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Device functions over a piece of a row of a student's logits and of its teacher's, which the kernels of the
divergences share.

Legend: V classes that both have. ``z`` are transformed logits, q the student's probabilities and p the teacher's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._triton_utils import anchor_of, exp_of_difference, log2_of, number, probability, rounded_product, shrunk
from .logit_rows import Transform, load_logits, tile_offsets, whole_vectors


class Pair(NamedTuple):
    """Pointers to a row of the student and of the teacher, and their transforms."""

    student_ptr: Any
    teacher_ptr: Any
    student: Transform
    teacher: Transform


class PairFlags(NamedTuple):
    """Constants of a launch over both models' logits: which divergence, and :class:`.logit_rows.Flags` of each."""

    FORWARD: tl.constexpr
    REVERSE: tl.constexpr
    VARIATION: tl.constexpr
    STUDENT: tl.constexpr
    TEACHER: tl.constexpr


class PairSoftmax(NamedTuple):
    """Maximum and logarithm of the sum of a full row of z, of both models."""

    student_max: Any
    student_log_total: Any
    teacher_max: Any
    teacher_log_total: Any


class Hard(NamedTuple):
    """Values of the labels' cross entropy in a row: see :class:`.divergence.HardTerms`."""

    row_max: Any
    log_total: Any
    miss: Any
    factor: Any
    temperature: Any


@triton.jit
def load_pair_softmax(student_max_ptr, student_log_total_ptr, teacher_max_ptr, teacher_log_total_ptr, row):
    """Loads :class:`PairSoftmax` of a row."""
    return PairSoftmax(
        tl.load(student_max_ptr + row),
        tl.load(student_log_total_ptr + row),
        tl.load(teacher_max_ptr + row),
        tl.load(teacher_log_total_ptr + row),
    )


@triton.jit
def load_pair(pair, offs_v, last, FLAGS: tl.constexpr):
    """Loads ``z`` of student and teacher in columns up to ``last``, -inf beyond."""
    mask_v = offs_v < whole_vectors(last, FLAGS.STUDENT)
    student, _ = load_logits(pair.student_ptr, offs_v, mask_v, pair.student, FLAGS.STUDENT)
    teacher, _ = load_logits(pair.teacher_ptr, offs_v, mask_v, pair.teacher, FLAGS.TEACHER)
    if FLAGS.STUDENT.TAIL:
        student = tl.where(offs_v < last, student, float("-inf"))
        teacher = tl.where(offs_v < last, teacher, float("-inf"))
    return student, teacher


@triton.jit
def _moved(max_x, anchor_x, sum_x):
    """Computes how a larger maximum moves sums that are relative to ``anchor_x``: the new anchor, the distance to it,
    and the factor of the sums."""
    anchor = anchor_of(max_x)
    return anchor, anchor_x - anchor, tl.where(sum_x == 0.0, 0.0, exp_of_difference(anchor_x, anchor))


@triton.jit
def _moved_dot(
    dot, student_sum, student_shift, student_shrink, teacher_sum, teacher_shift, teacher_shrink, FLAGS: tl.constexpr
):
    """Moves the sum of exponentials times the difference of both logits to the new maxima; leaves the 0 of other
    divergences than KL."""
    if FLAGS.FORWARD:
        dot = shrunk(teacher_shrink, dot, teacher_sum, teacher_shift - student_shift)
    if FLAGS.REVERSE:
        dot = shrunk(student_shrink, dot, student_sum, student_shift - teacher_shift)
    return dot


@triton.jit
def merged_pair(student_max, student_sum, teacher_max, teacher_sum, dot, mean, FLAGS: tl.constexpr):
    """Merges the fields of the parts of a row, each relative to the part's maxima."""
    row_student_max, row_teacher_max = tl.max(student_max), tl.max(teacher_max)
    _, student_shift, student_shrink = _moved(row_student_max, anchor_of(student_max), student_sum)
    _, teacher_shift, teacher_shrink = _moved(row_teacher_max, anchor_of(teacher_max), teacher_sum)
    dot = _moved_dot(dot, student_sum, student_shift, student_shrink, teacher_sum, teacher_shift, teacher_shrink, FLAGS)
    mean = shrunk(student_shrink, mean, student_sum, student_shift)
    return (
        row_student_max,
        tl.sum(student_shrink * student_sum),
        row_teacher_max,
        tl.sum(teacher_shrink * teacher_sum),
        tl.sum(dot),
        tl.sum(mean),
    )


@triton.jit
def pair_statistics_of_piece(pair, first, last, PIECE: tl.constexpr, FLAGS: tl.constexpr):
    """Computes the fields of :func:`.divergence_terms.divergence_statistics` over the columns ``[first, last)``, at
    most PIECE of them."""
    LANES: tl.constexpr = FLAGS.STUDENT.LANES
    columns: tl.constexpr = LANES * FLAGS.STUDENT.VECTOR
    dtype = tl.float64 if FLAGS.STUDENT.FP64 else tl.float32
    offs = tile_offsets(FLAGS.STUDENT)
    # Sums are relative to the anchors.
    student_max = tl.full((LANES,), float("-inf"), dtype)
    teacher_max = tl.full((LANES,), float("-inf"), dtype)
    student_anchor = tl.zeros((LANES,), dtype)
    teacher_anchor = tl.zeros((LANES,), dtype)
    student_sum = tl.zeros((LANES,), dtype)
    teacher_sum = tl.zeros((LANES,), dtype)
    dot = tl.zeros((LANES,), dtype)
    mean = tl.zeros((LANES,), dtype)
    for start in range(0, PIECE, columns):
        student, teacher = load_pair(pair, first + start + offs, last, FLAGS)
        student_max = tl.maximum(student_max, tl.max(student, 1))
        teacher_max = tl.maximum(teacher_max, tl.max(teacher, 1))
        student_anchor, student_shift, student_shrink = _moved(student_max, student_anchor, student_sum)
        teacher_anchor, teacher_shift, teacher_shrink = _moved(teacher_max, teacher_anchor, teacher_sum)
        # Each model's logits minus their maximum, so that what both logits have in common does not cost digits of the
        # rest.
        student -= student_anchor[:, None]
        teacher -= teacher_anchor[:, None]
        e_student = exp_of_difference(student, 0.0)
        e_teacher = exp_of_difference(teacher, 0.0)
        mean = shrunk(student_shrink, mean, student_sum, student_shift)
        mean += tl.sum(tl.where(e_student == 0.0, 0.0, e_student * student), 1)
        dot = _moved_dot(
            dot, student_sum, student_shift, student_shrink, teacher_sum, teacher_shift, teacher_shrink, FLAGS
        )
        if FLAGS.FORWARD:
            dot += tl.sum(tl.where(e_teacher == 0.0, 0.0, e_teacher * (teacher - student)), 1)
        if FLAGS.REVERSE:
            dot += tl.sum(tl.where(e_student == 0.0, 0.0, e_student * (student - teacher)), 1)
        student_sum = student_shrink * student_sum + tl.sum(e_student, 1)
        teacher_sum = teacher_shrink * teacher_sum + tl.sum(e_teacher, 1)
    return merged_pair(student_max, student_sum, teacher_max, teacher_sum, dot, mean, FLAGS)


@triton.jit
def log_of_mixture(p, q, beta):
    """Computes ``log(beta * p + (1 - beta) * q)``."""
    # Where both underflow the logarithm is multiplied by 0.
    return tl.log(tl.maximum(beta * p + (1.0 - beta) * q, 1e-37))


@triton.jit
def half_sign(x):
    """Computes ``sign(x) / 2``."""
    return tl.where(x > 0.0, 0.5, tl.where(x < 0.0, -0.5, 0.0))


@triton.jit
def mixture_of_piece(pair, first, last, softmax, beta, PIECE: tl.constexpr, FLAGS: tl.constexpr):
    """Computes the two sums of :func:`.divergence_terms.divergence_mixture` over the columns ``[first, last)``, at most
    PIECE of them."""
    LANES: tl.constexpr = FLAGS.STUDENT.LANES
    dtype = tl.float64 if FLAGS.STUDENT.FP64 else tl.float32
    offs = tile_offsets(FLAGS.STUDENT)
    of_student = tl.zeros((LANES,), dtype)
    of_teacher = tl.zeros((LANES,), dtype)
    for start in range(0, PIECE, LANES * FLAGS.STUDENT.VECTOR):
        student, teacher = load_pair(pair, first + start + offs, last, FLAGS)
        q = probability(student, softmax.student_max, log2_of(softmax.student_log_total))
        p = probability(teacher, softmax.teacher_max, log2_of(softmax.teacher_log_total))
        if FLAGS.VARIATION:
            of_student += tl.sum(q * half_sign(q - p), 1)
            of_teacher += tl.sum(tl.abs(q - p), 1) * 0.5
        else:
            log_mixture = log_of_mixture(p, q, beta)
            log_q = student - softmax.student_max - softmax.student_log_total
            log_p = teacher - softmax.teacher_max - softmax.teacher_log_total
            of_student += tl.sum(tl.where(q == 0.0, 0.0, q * (log_q - log_mixture)), 1)
            of_teacher += tl.sum(tl.where(p == 0.0, 0.0, p * (log_p - log_mixture)), 1)
    return tl.sum(of_student), tl.sum(of_teacher)


@triton.jit
def divergence_gradient(
    pair, offs_v, last, teacher_last, label, softmax, factor, expectation, beta, hard, FLAGS: tl.constexpr,
    HAS_HARD: tl.constexpr,
):  # fmt: skip
    """Computes the gradient by the student's raw logits at ``offs_v``; the teacher's row ends at ``teacher_last``."""
    mask_v = offs_v < whole_vectors(last, FLAGS.STUDENT)
    student, slope = load_logits(pair.student_ptr, offs_v, mask_v, pair.student, FLAGS.STUDENT)
    is_common = offs_v < teacher_last
    mask_common = offs_v < whole_vectors(teacher_last, FLAGS.TEACHER)
    teacher, _ = load_logits(pair.teacher_ptr, offs_v, mask_common, pair.teacher, FLAGS.TEACHER)
    if FLAGS.TEACHER.TAIL:
        teacher = tl.where(is_common, teacher, float("-inf"))
    q = probability(student, softmax.student_max, log2_of(softmax.student_log_total))
    q = tl.where(is_common, q, 0.0)
    p = probability(teacher, softmax.teacher_max, log2_of(softmax.teacher_log_total))
    if FLAGS.FORWARD:
        gradient = q - p
    elif FLAGS.VARIATION:
        gradient = q * (half_sign(q - p) - expectation)
    else:
        log_p = teacher - softmax.teacher_max - softmax.teacher_log_total
        other = log_p if FLAGS.REVERSE else log_of_mixture(p, q, beta)
        brackets = student - softmax.student_max - softmax.student_log_total - other - expectation
        gradient = tl.where(q == 0.0, 0.0, q * brackets)
        if not FLAGS.REVERSE:
            gradient *= 1.0 - beta
    # A divergence that has no part in the loss may be infinite.
    gradient = tl.where(factor == 0.0, 0.0, gradient * factor)
    if HAS_HARD:
        at_1 = rounded_product(student, tl.zeros_like(student) + hard.temperature)
        probs = probability(at_1, hard.row_max, log2_of(hard.log_total))
        probs = tl.where(offs_v == label, -hard.miss, probs)
        gradient += hard.temperature * hard.factor * probs
    return gradient * slope


@triton.jit
def hard_of(row, max_ptr, log_total_ptr, miss_ptr, factor_ptr, temperature, HAS_HARD: tl.constexpr, like):
    """Loads :class:`Hard` of a row; without hard labels ``like`` stands for each field."""
    if HAS_HARD:
        return Hard(
            tl.load(max_ptr + row),
            tl.load(log_total_ptr + row),
            tl.load(miss_ptr + row),
            tl.load(factor_ptr + row),
            number(temperature, like.dtype),
        )
    return Hard(like, like, like, like, like)
