# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Divergence of a student's distribution from a teacher's, on a block of logits of each, and its gradient.

Legend: T tokens, V classes of the student, G slices of the vocabulary, F fields. ``z`` are transformed logits (see
:class:`LossOptions`), q the student's probabilities and p the teacher's, over the classes that both have: the teacher's
block may have fewer columns, and further classes have no part in the divergence.

- "forward_kl": ``sum p log(p / q)`` (Hinton et al. 2015, arXiv:1503.02531); gradient by z of the student: ``q - p``.
- "reverse_kl": ``sum q log(q / p)`` (Gu et al. 2024, "MiniLLM", arXiv:2306.08543); ``q (log(q / p) - divergence)``.
- "jsd": ``beta sum p log(p / m) + (1 - beta) sum q log(q / m)`` with ``m = beta p + (1 - beta) q`` (Agarwal et al.
  2024, "GKD", arXiv:2306.13649, equation 1); ``(1 - beta) q (log(q / m) - sum q log(q / m))``.
- "total_variation": ``sum |p - q| / 2``, 1 minus the probability that speculative sampling accepts a token of the
  student (Leviathan et al. 2023, arXiv:2211.17192, section 3.2); with ``s = sign(q - p) / 2``: ``q (s - sum q s)``.

Two sweeps over the logits for a KL divergence: the statistics, then the gradient. A third one in between for the
remaining ones, which need both log-sum-exps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import (
    ANY_LENGTH,
    Backend,
    cdiv,
    dense,
    host_number,
    launch,
    number,
    runs_triton,
    statistics_dtype,
)
from .divergence_rows import (
    Pair,
    PairFlags,
    divergence_gradient,
    hard_of,
    load_pair_softmax,
)
from .launches import DIVERGENCE_COLUMNS
from .logit_rows import (
    Flags,
    row_of,
    tile_arguments,
    tile_offsets,
    transform_arguments,
    transform_of,
    transformed,
    whole_vectors,
)
from .options import LossOptions

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "total_variation"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions:
    """Kind of divergence and transform of raw logits to z."""

    divergence: Divergence = "forward_kl"
    beta: float = 0.5
    """weight of the teacher in the mixture of "jsd", in (0, 1)"""
    student: LossOptions = LossOptions()
    """soft-cap, scale and temperature of the student's logits"""
    teacher: LossOptions = LossOptions()

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence is {self.divergence!r}; expected one of {', '.join(map(repr, DIVERGENCES))}.")
        if self.divergence == "jsd" and not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"beta is {self.beta!r}; expected a number between 0 and 1 for 'jsd'. Its limits are 'forward_kl' (0) "
                "and 'reverse_kl' (1)."
            )


class LogPartition(NamedTuple):
    """The log-sum-exp of each row of z, ``[T]``, in two parts: see :class:`.GradientCoefficients`."""

    max_T: Tensor
    log_total_T: Tensor

    def log_probs(self, z_TV: Tensor) -> Tensor:
        """Computes ``log(p)`` of ``z``."""
        return (z_TV - self.max_T[:, None]) - self.log_total_T[:, None]


class DivergenceTerms(NamedTuple):
    """Per-token values that the gradient needs, ``[T]`` in the dtype of the statistics."""

    divergence_T: Tensor
    student: LogPartition
    teacher: LogPartition
    expectation_T: Tensor
    """what the gradient subtracts in the brackets of the module's formulas"""
    entropy_T: Tensor
    """of the student"""


class HardTerms(NamedTuple):
    """The cross entropy of the labels, at temperature 1 over all classes of the student; ``[T]``."""

    max_T: Tensor
    log_total_T: Tensor
    miss_T: Tensor
    """``1 - p_y``"""
    factor_T: Tensor
    """upstream gradient"""


@triton.jit(**ANY_LENGTH)
def _divergence_bwd_kernel(
    out_ptr, stride_out_t, student_ptr, stride_student_t, teacher_ptr, stride_teacher_t, labels_ptr, first_class,
    factor_ptr, student_max_ptr, student_log_total_ptr, teacher_max_ptr, teacher_log_total_ptr, expectation_ptr,
    hard_max_ptr, hard_log_total_ptr, hard_miss_ptr, hard_factor_ptr,
    V, TEACHER_V, beta, student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
    temperature,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, FP64: tl.constexpr,
    STUDENT_TRANSFORMS: tl.constexpr, STUDENT_SOFTCAP: tl.constexpr, TEACHER_TRANSFORMS: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    VARIATION: tl.constexpr, HAS_HARD: tl.constexpr,
):  # fmt: skip
    STUDENT: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, STUDENT_TRANSFORMS, STUDENT_SOFTCAP)
    TEACHER: tl.constexpr = Flags(LANES, VECTOR, ALIGNED, TAIL, FP64, TEACHER_TRANSFORMS, TEACHER_SOFTCAP)
    FLAGS: tl.constexpr = PairFlags(FORWARD, REVERSE, VARIATION, STUDENT, TEACHER)
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * LANES * VECTOR + tile_offsets(STUDENT)
    mask_v = offs_v < whole_vectors(V, STUDENT)
    label = tl.load(labels_ptr + row).to(tl.int32)
    out_row_ptr = row_of(out_ptr, row, stride_out_t, STUDENT)
    if label < 0:
        tl.store(out_row_ptr + offs_v, tl.zeros((LANES, VECTOR), out_row_ptr.dtype.element_ty), mask=mask_v)
    else:
        pair = Pair(
            row_of(student_ptr, row, stride_student_t, STUDENT),
            row_of(teacher_ptr, row, stride_teacher_t, TEACHER),
            transform_of(row, student_scale, student_softcap, inverse_temperature, False, FP64),
            transform_of(row, teacher_scale, teacher_softcap, inverse_temperature, False, FP64),
        )
        softmax = load_pair_softmax(student_max_ptr, student_log_total_ptr, teacher_max_ptr, teacher_log_total_ptr, row)
        factor = tl.load(factor_ptr + row)
        hard = hard_of(
            row, hard_max_ptr, hard_log_total_ptr, hard_miss_ptr, hard_factor_ptr, temperature, HAS_HARD, factor
        )
        gradient = divergence_gradient(
            pair, offs_v, V, TEACHER_V, label - first_class, softmax, factor, tl.load(expectation_ptr + row),
            number(beta, factor.dtype), hard, FLAGS, HAS_HARD,
        )  # fmt: skip
        tl.store(out_row_ptr + offs_v, gradient.to(out_row_ptr.dtype.element_ty), mask=mask_v)


def divergence_bwd(
    student_TV: Tensor,
    teacher_TV: Tensor,
    labels_T: Tensor,
    terms: DivergenceTerms,
    factor_T: Tensor,
    *,
    options: DivergenceOptions,
    hard: HardTerms | None = None,
    first_class: int = 0,
    out_TV: Tensor,
    is_padded: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Computes the gradient of ``factor`` times the divergence, plus that of the labels' cross entropy, by the
    student's raw logits, into ``out_TV`` (``student_TV`` itself for an in-place pass) and returns it.

    Args:
        student_TV: as for :func:`divergence_terms`.
        teacher_TV: as for :func:`divergence_terms`.
        labels_T: ``[T]`` int64 in the full vocabulary; rows with a negative label get zeros.
        terms: complete ones, of full rows.
        factor_T: ``[T]`` upstream gradient of the divergence.
        hard: None without the labels' cross entropy.
        first_class: vocabulary index of the first column.
        out_TV: ``[T, V]``, any floating dtype, unit stride along V.
        is_padded: True if logits and gradient are of :func:`.products.logits_buffer`.
    """
    if not runs_triton(student_TV, backend):
        gradient_TV = divergence_bwd_reference(
            student_TV, teacher_TV, labels_T - first_class, terms, factor_T, options, hard
        )
        return out_TV.copy_(gradient_TV.masked_fill_(labels_T[:, None] < 0, 0.0))
    T, V = student_TV.shape
    if T == 0 or V == 0:
        return out_TV
    described = pair_arguments(student_TV, teacher_TV, options, is_padded, out_TV)
    max_T = dense(terms.student.max_T)
    launch(
        _divergence_bwd_kernel,
        (T, cdiv(V, described["LANES"] * described["VECTOR"])),
        out_TV,
        out_TV.stride(0),
        student_TV,
        student_TV.stride(0),
        teacher_TV,
        teacher_TV.stride(0),
        dense(labels_T),
        first_class,
        dense(factor_T),
        max_T,
        dense(terms.student.log_total_T),
        *map(dense, terms.teacher),
        dense(terms.expectation_T),
        *((None, None, None, None) if hard is None else map(dense, hard)),
        V=V,
        TEACHER_V=teacher_TV.shape[1],
        beta=host_number(options.beta, max_T.dtype),
        temperature=host_number(options.student.temperature, max_T.dtype),
        HAS_HARD=hard is not None,
        **described,
    )
    return out_TV


def pair_arguments(
    student_TV: Tensor, teacher_TV: Tensor, options: DivergenceOptions, is_padded: bool, out_TV: Tensor | None = None
) -> dict[str, Any]:
    """Builds the arguments that every kernel here has."""
    dtype = torch.promote_types(student_TV.dtype, teacher_TV.dtype)
    student = transform_arguments(options.student, None, dtype)
    teacher = transform_arguments(options.teacher, None, dtype)
    # Their transforms share the temperature, so one that is not 1 makes both transform.
    tensors = (teacher_TV,) if out_TV is None else (teacher_TV, out_TV)
    # Logits and exponentials of both models need eight warps.
    tile = tile_arguments(student_TV, *tensors, is_padded=is_padded, most_columns=DIVERGENCE_COLUMNS, num_extra=2)
    return tile | {
        "FP64": statistics_dtype(dtype) == torch.float64,
        "FORWARD": options.divergence == "forward_kl",
        "REVERSE": options.divergence == "reverse_kl",
        "VARIATION": options.divergence == "total_variation",
        "inverse_temperature": student["inverse_temperature"],
        "student_scale": student["scale"],
        "student_softcap": student["softcap"],
        "teacher_scale": teacher["scale"],
        "teacher_softcap": teacher["softcap"],
        "STUDENT_TRANSFORMS": student["TRANSFORMS"],
        "STUDENT_SOFTCAP": student["HAS_SOFTCAP"],
        "TEACHER_TRANSFORMS": teacher["TRANSFORMS"],
        "TEACHER_SOFTCAP": teacher["HAS_SOFTCAP"],
    }


def log_probabilities(
    common_TV: Tensor, teacher_TV: Tensor, student: LogPartition, teacher: LogPartition, options: DivergenceOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-probabilities ``[T, V]`` of the student, the teacher and the mixture of "jsd" (undefined for other
    divergences)."""
    dtype = student.max_T.dtype
    log_q_TV = student.log_probs(transformed(common_TV.to(dtype), options.student, None)[0])
    log_p_TV = teacher.log_probs(transformed(teacher_TV.to(dtype), options.teacher, None)[0])
    mixture_TV = options.beta * log_p_TV.exp() + (1.0 - options.beta) * log_q_TV.exp()
    return log_q_TV, log_p_TV, mixture_TV.clamp_min(1e-37).log()


def divergence_bwd_reference(
    student_TV: Tensor,
    teacher_TV: Tensor,
    labels_T: Tensor,
    terms: DivergenceTerms,
    factor_T: Tensor,
    options: DivergenceOptions,
    hard: HardTerms | None,
) -> Tensor:
    """Computes :func:`divergence_bwd` in plain torch, with labels relative to these columns: the path on CPU."""
    dtype, common = terms.student.max_T.dtype, teacher_TV.shape[1]
    z_TV, slope = transformed(student_TV.to(dtype), options.student, None)
    log_q_TV, log_p_TV, log_m_TV = log_probabilities(
        student_TV[:, :common], teacher_TV, terms.student, terms.teacher, options
    )
    q_TV = log_q_TV.exp()
    if options.divergence == "forward_kl":
        common_TV = q_TV - log_p_TV.exp()
    elif options.divergence == "total_variation":
        common_TV = q_TV * (0.5 * torch.sign(q_TV - log_p_TV.exp()) - terms.expectation_T[:, None])
    else:
        other_TV = log_p_TV if options.divergence == "reverse_kl" else log_m_TV
        common_TV = torch.where(q_TV == 0, 0.0, q_TV * (log_q_TV - other_TV - terms.expectation_T[:, None]))
        if options.divergence == "jsd":
            common_TV *= 1.0 - options.beta
    gradient_TV = torch.zeros_like(z_TV)
    # A divergence that has no part in the loss may be infinite.
    gradient_TV[:, :common] = torch.where(factor_T[:, None] == 0, 0.0, factor_T[:, None] * common_TV)
    if hard is not None:
        temperature = options.student.temperature
        is_label_TV = labels_T[:, None] == torch.arange(z_TV.shape[1], device=z_TV.device)
        p_TV = LogPartition(hard.max_T, hard.log_total_T).log_probs(z_TV * temperature).exp()
        own_TV = torch.where(is_label_TV, -hard.miss_T[:, None], p_TV)
        gradient_TV += temperature * hard.factor_T[:, None] * own_TV
    return gradient_TV * slope
