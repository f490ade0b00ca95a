"""Divergence of ``hidden @ weight.T + bias`` of a student from that of a teacher, in chunks of tokens: no full logits
of either exist.

Legend: T tokens, D hidden of the student, E hidden of the teacher, V vocabulary, c tokens of a chunk.

Four GEMMs for each chunk: the logits of both, and the student's two gradients, for upstream gradients known before the
loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .cross_entropy import cross_entropy_fwd
from .divergence import DivergenceOptions, HardTerms, divergence_bwd
from .divergence_terms import divergence_terms
from .linear_cross_entropy import GradientNeeds, GradientSums, HeadSlice, Scoring
from .options import RowOptions
from .products import logits_buffer, write_hidden_gradient, write_logits
from .softmax_statistics import SoftmaxStatistics
from .token_chunks import DEFAULT_MEMORY_BUDGET, ChunkPlan, TokenChunks, TokenTargets, plan_chunks
from .token_loss import TokenTerms, token_terms

_DIRECT_CHUNKS = 4
"""Chunks whose weight gradients are added in the weight's dtype. With logits in bf16 the gradient's error is 1.5 %
already, to which four roundings add nothing that can be seen; with fp32 logits it is 0.29 instead of 0.24 % (8192
tokens, D = 4096, V = 128256)."""


@dataclass(frozen=True, kw_only=True)
class TeacherHead:
    """The full lm_head of a teacher, without gradients."""

    weight_VE: Tensor
    bias_V: Tensor | None = None

    def rows(self, head: HeadSlice) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias of the classes that are in ``head`` too."""
        start, stop = head.start, head.start + head.weight_VD.shape[0]
        return self.weight_VE[start:stop], None if self.bias_V is None else self.bias_V[start:stop]


class LinearDivergenceResult(NamedTuple):
    """Per-token terms, and the requested gradients (None otherwise)."""

    divergence_T: Tensor
    cross_entropy_T: Tensor | None
    """of the labels, at temperature 1; None without them"""
    entropy_T: Tensor
    """of the student"""
    d_hidden_TD: Tensor | None
    d_weight_VD: Tensor | None
    d_bias_V: Tensor | None


def linear_divergence(
    tokens: TokenChunks,
    teacher_tokens: TokenChunks,
    head: HeadSlice,
    teacher: TeacherHead,
    *,
    options: DivergenceOptions,
    hard_weight: float,
    scoring: Scoring,
    needs: GradientNeeds,
) -> LinearDivergenceResult:
    """Computes the terms of the caller's tokens, and the gradients of
    ``(1 - hard_weight) * divergence + hard_weight * cross_entropy``.

    Args:
        tokens: the student's; with gradients, ``tokens.gradients`` are :class:`TokenGradients` of the cross entropy.
        teacher_tokens: the teacher's hidden states of the same tokens in the same chunks.
        head: the student's.
        hard_weight: weight of the cross entropy of the labels; 0 leaves it out.
        scoring: of the cross entropy of the labels; also says how logits are kept.
        needs: the gradients to compute.
    """
    sums = GradientSums(head, needs, tokens.num_chunks, direct_chunks=_DIRECT_CHUNKS)
    rows_of_teacher, parts, operands = teacher.rows(head), [], None
    buffers = _Buffers(max(tokens.rows, 1), head, rows_of_teacher[0].shape[0], scoring, with_gradient=needs.any)
    for chunk in range(max(tokens.num_chunks, 1)):
        hidden_cD, targets_c = tokens.hidden(chunk), tokens.targets(chunk)
        teacher_cE = teacher_tokens.hidden(chunk)
        weight_VD, bias_V = operands = operands or head.operands(hidden_cD.dtype)
        student_cV, teacher_cV, d_logits_cV = buffers.of(hidden_cD, teacher_cE)
        write_logits(hidden_cD, weight_VD, bias_V, student_cV)
        write_logits(teacher_cE, *rows_of_teacher, teacher_cV)
        terms = divergence_terms(
            student_cV,
            teacher_cV,
            options=options,
            gather_slices=head.gather_slices,
            is_padded=True,
            backend=scoring.backend,
        )
        hard = _hard_terms(student_cV, targets_c, head, scoring) if hard_weight > 0 else None
        rows = tokens.local_rows(chunk)
        counts_T = targets_c.labels_T[rows] >= 0
        divergence_T, entropy_T = (
            torch.where(counts_T, values_T[rows], 0.0) for values_T in (terms.divergence_T, terms.entropy_T)
        )
        parts.append((divergence_T, entropy_T, None if hard is None else hard.cross_entropy_T[rows]))
        if not needs.any or len(hidden_cD) == 0:
            continue
        factor_T = tokens.gradients(chunk).cross_entropy_T
        divergence_bwd(
            student_cV,
            teacher_cV,
            targets_c.labels_T,
            terms,
            (1.0 - hard_weight) * factor_T,
            options=options,
            hard=None if hard is None else HardTerms(hard.max_T, hard.log_total_T, hard.miss_T, hard_weight * factor_T),
            first_class=head.start,
            out_TV=d_logits_cV,
            is_padded=True,
            backend=scoring.backend,
        )
        if needs.hidden:
            write_hidden_gradient(d_logits_cV, weight_VD, tokens.gradient_buffer(chunk))
            tokens.gradient_written(chunk)
        sums.add(d_logits_cV, hidden_cD, chunk)
    del buffers
    divergences, entropies, cross_entropies = zip(*parts, strict=True)
    return LinearDivergenceResult(
        divergence_T=torch.cat(divergences),
        cross_entropy_T=None if hard_weight == 0 else torch.cat(cross_entropies),
        entropy_T=torch.cat(entropies),
        d_hidden_TD=tokens.hidden_gradient() if needs.hidden else None,
        d_weight_VD=sums.weight(),
        d_bias_V=sums.bias,
    )


def bytes_of_class(hidden_dtype: torch.dtype, teacher_dtype: torch.dtype, scoring: Scoring) -> int:
    """Returns the bytes of the logits of one token and one class: the student's, the teacher's, and their gradient
    where it does not fit over the student's."""
    if not _is_wide(hidden_dtype, scoring):
        return hidden_dtype.itemsize + teacher_dtype.itemsize
    return 4 + hidden_dtype.itemsize + max(4, teacher_dtype.itemsize)


def plan_pairs(num_tokens: int, head_shape: tuple[int, int], itemsize: int, memory_budget: int | None) -> ChunkPlan:
    """Plans as few equal chunks as possible with both models' logits in ``memory_budget`` bytes (default 1 GiB).
    Without a budget, chunks are larger if four of them take less memory than more chunks plus an fp32 sum of the
    weight's gradient.

    Args:
        head_shape: ``(V, D)`` of the student's rows.
        itemsize: :func:`bytes_of_class`.
    """
    V, D = head_shape
    plan = plan_chunks(num_tokens, V, itemsize, memory_budget)
    rows = -(-num_tokens // _DIRECT_CHUNKS)
    is_larger = plan.num_chunks > _DIRECT_CHUNKS and rows * V * itemsize <= DEFAULT_MEMORY_BUDGET + 4 * V * D
    if memory_budget is None and is_larger:
        return ChunkPlan(rows=rows, num_chunks=-(-num_tokens // rows))
    return plan


def _is_wide(dtype: torch.dtype, scoring: Scoring) -> bool:
    return scoring.logits_dtype == torch.float32 and dtype.itemsize == 2


class _Buffers:
    """Logits of one chunk of both models, and their gradient: over the student's logits where the dtypes allow it."""

    def __init__(
        self, rows: int, head: HeadSlice, teacher_classes: int, scoring: Scoring, *, with_gradient: bool
    ) -> None:
        self._rows, self._scoring, self._with_gradient = rows, scoring, with_gradient
        self._classes, self._teacher_classes = head.weight_VD.shape[0], teacher_classes
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, hidden_cD: Tensor, teacher_cE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views ``[c, V]`` for the student, ``[c, V']`` for the teacher, ``[c, V]`` for the gradient."""
        if self._kept is None:
            rows = max(self._rows, len(hidden_cD))
            is_wide = _is_wide(hidden_cD.dtype, self._scoring)
            teacher_dtype = torch.float32 if _is_wide(teacher_cE.dtype, self._scoring) else teacher_cE.dtype
            student = logits_buffer(hidden_cD, rows, self._classes, torch.float32 if is_wide else None)
            teacher = logits_buffer(teacher_cE, rows, self._teacher_classes, teacher_dtype)
            has_own = is_wide and self._with_gradient
            self._kept = student, teacher, logits_buffer(hidden_cD, rows, self._classes) if has_own else student
        student, teacher, gradient = (buffer[: len(hidden_cD)] for buffer in self._kept)
        return student, teacher, gradient


def _hard_terms(student_cV: Tensor, targets_c: TokenTargets, head: HeadSlice, scoring: Scoring) -> TokenTerms:
    """Computes the cross entropy of the labels."""
    rows = RowOptions(
        vocab_size=head.vocab_size,
        options=scoring.options,
        first_class=head.start,
        is_padded=True,
        backend=scoring.backend,
    )
    statistics: SoftmaxStatistics = cross_entropy_fwd(student_cV, targets_c, rows)
    if head.complete_statistics is not None:
        statistics = head.complete_statistics(statistics)
    return token_terms(statistics, targets_c, rows)
