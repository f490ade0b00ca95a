"""Cross entropy of ``hidden @ weight.T + bias`` in chunks of tokens: the full logits never exist.

Legend: T tokens, D hidden, V vocabulary, c tokens of a chunk.

The GEMMs are cuBLAS (or the CPU's BLAS); what lies between them are the two sweeps of ``cross_entropy.py``, over one
``[c, V]`` buffer that holds a chunk's logits and then, in place, their gradient. For a scalar loss the gradients are
made beside the loss (three GEMM passes); with per-token upstream gradients the logits are recomputed in the backward
(four). The chunked loop with gradients in the forward follows Hsu et al. 2024, "Liger Kernel", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._triton_utils import Backend, statistics_dtype
from .cross_entropy import SoftmaxStatistics, cross_entropy_bwd, cross_entropy_fwd
from .options import LossOptions
from .token_loss import TokenGradients, TokenTerms, gradient_coefficients, token_terms

DEFAULT_MEMORY_BUDGET = 512 * 2**20


@dataclass(frozen=True)
class ChunkPlan:
    """How the tokens are cut: ``num_chunks`` chunks of ``rows`` tokens, the last one possibly shorter."""

    rows: int
    num_chunks: int


def plan_chunks(num_tokens: int, vocab_size: int, itemsize: int, memory_budget: int | None = None) -> ChunkPlan:
    """Equal chunks whose logits fit ``memory_budget`` bytes (default 512 MiB), at least two of them when there are
    two tokens, so that no buffer of tokens x vocabulary is ever made. A function of shapes alone."""
    if num_tokens == 0:
        return ChunkPlan(rows=0, num_chunks=0)
    budget = DEFAULT_MEMORY_BUDGET if memory_budget is None else memory_budget
    largest = max(1, min(budget // (vocab_size * itemsize), (num_tokens + 1) // 2))
    num_chunks = -(-num_tokens // largest)
    rows = -(-num_tokens // num_chunks)
    return ChunkPlan(rows=rows, num_chunks=-(-num_tokens // rows))


class LinearCrossEntropyResult(NamedTuple):
    """Per-token terms, and the gradients that were asked for (None otherwise)."""

    terms: TokenTerms
    d_hidden_TD: Tensor | None
    d_weight_VD: Tensor | None
    """in the weight's dtype, or fp32 when it was accumulated over three or more chunks of a 16-bit dtype"""
    d_bias_V: Tensor | None
    """fp32 (fp64 for fp64 weights)"""


@dataclass(frozen=True, kw_only=True)
class GradientNeeds:
    """Which gradients to compute. What is not needed costs neither a GEMM nor a buffer."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    def __bool__(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True, kw_only=True)
class VocabularySlice:
    """The rows ``[start, start + V)`` of a head whose other rows lie elsewhere."""

    start: int
    vocab_size: int
    """rows of the whole head"""
    largest: int
    """rows of the largest slice, by which tokens are cut into the same chunks everywhere"""
    complete: Callable[[SoftmaxStatistics], SoftmaxStatistics]
    """statistics of whole rows of logits from those of this slice; called once for each chunk of tokens"""

    def own_labels(self, labels_T: Tensor, num_rows: int) -> Tensor:
        """Labels as rows of this slice; ``num_rows`` for a label in another one, negative ones as they are."""
        own_T = labels_T - self.start
        is_own_T = (own_T >= 0) & (own_T < num_rows)
        return torch.where(labels_T < 0, labels_T, torch.where(is_own_T, own_T, num_rows))


class _WeightGradient:
    """``sum over chunks of d_logits.T @ hidden``: added in the weight's own dtype for one or two chunks, otherwise in
    the dtype of the statistics, because a sum of many 16-bit roundings drifts.
    Always so for fp16, which could overflow."""

    def __init__(self, weight_VD: Tensor, num_chunks: int) -> None:
        is_direct = num_chunks <= 2 and weight_VD.dtype != torch.float16
        dtype = weight_VD.dtype if is_direct else statistics_dtype(weight_VD.dtype)
        self.sum_VD = torch.empty(weight_VD.shape, dtype=dtype, device=weight_VD.device)
        if num_chunks == 0:
            self.sum_VD.zero_()
        self._is_first = True

    def add(self, d_logits_cV: Tensor, hidden_cD: Tensor) -> None:
        d_logits_Vc, out = d_logits_cV.T, self.sum_VD
        same_dtype = out.dtype == hidden_cD.dtype
        if not same_dtype and out.is_cuda:
            if self._is_first:
                torch.mm(d_logits_Vc, hidden_cD, out_dtype=out.dtype, out=out)
            else:
                torch.addmm(out, d_logits_Vc, hidden_cD, out_dtype=out.dtype, out=out)
        else:
            # The CPU has no GEMM with a wider output: the chunk's operands are widened instead.
            beta = 0 if self._is_first else 1
            torch.addmm(out, d_logits_Vc.to(out.dtype), hidden_cD.to(out.dtype), beta=beta, out=out)
        self._is_first = False


def _chunks(plan: ChunkPlan, num_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, max(plan.rows, 1)):
        yield slice(start, min(start + plan.rows, num_tokens))


def _logits(hidden_cD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, buffer_cV: Tensor) -> Tensor:
    out = buffer_cV[: hidden_cD.shape[0]]
    if bias_V is None:
        return torch.mm(hidden_cD, weight_VD.T, out=out)
    return torch.addmm(bias_V, hidden_cD, weight_VD.T, out=out)


def _cut(gradients: TokenGradients, rows: slice) -> TokenGradients:
    return TokenGradients(*(None if g is None else g[rows] for g in gradients))


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    gradients: TokenGradients | None = None,
    bias_V: Tensor | None = None,
    class_weight_V: Tensor | None = None,
    options: LossOptions,
    needs: GradientNeeds = GradientNeeds(),
    with_entropy: bool = False,
    vocabulary: VocabularySlice | None = None,
    memory_budget: int | None = None,
    backend: Backend = "auto",
) -> LinearCrossEntropyResult:
    """Per-token terms of the loss and, for given upstream gradients of those terms, the gradients of the inputs.

    No autograd, no reduction and no host sync: the caller decides what a token counts (``gradients``).

    Args:
        hidden_TD: ``[T, D]``, floating.
        weight_VD: ``[V, D]``, the dtype of ``hidden_TD``.
        labels_T: ``[T]`` int64 in ``[0, V)``, or negative for a token that takes no part (the caller checks). With
            ``vocabulary``, of the whole head.
        gradients: upstream gradient of each term, ``[T]``; required when ``needs`` names a gradient.
        bias_V: ``[V]``, the dtype of ``hidden_TD``.
        class_weight_V: ``[V]``, floating; with ``vocabulary``, of the whole head.
        needs: the gradients to compute.
        with_entropy: also return each token's entropy.
        vocabulary: ``weight_VD`` and ``bias_V`` are this slice of a head. The terms and the gradients of both are
            complete, ``d_hidden_TD`` is this slice's part of a sum.
        memory_budget: bytes of the logits buffer; see :func:`plan_chunks`.
        backend: Triton kernels or the plain-torch reference; see :func:`runs_triton`.
    """
    if needs and gradients is None:
        raise ValueError(f"{needs} was asked for without upstream gradients; pass gradients=TokenGradients(...).")
    T, _ = hidden_TD.shape
    V = weight_VD.shape[0]
    plan = plan_chunks(T, V if vocabulary is None else vocabulary.largest, hidden_TD.element_size(), memory_budget)
    buffer_cV = hidden_TD.new_empty((plan.rows, V))
    d_hidden_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=hidden_TD.device) if needs.hidden else None
    d_weight = _WeightGradient(weight_VD, plan.num_chunks) if needs.weight else None
    d_bias_V = weight_VD.new_zeros(V, dtype=statistics_dtype(weight_VD.dtype)) if needs.bias else None
    own_labels_T, own_class_weight_V, vocab_size = labels_T, class_weight_V, V
    if vocabulary is not None:
        own_labels_T, vocab_size = vocabulary.own_labels(labels_T, V), vocabulary.vocab_size
        if class_weight_V is not None:
            own_class_weight_V = class_weight_V[vocabulary.start : vocabulary.start + V]
    terms: list[TokenTerms] = []
    for rows in _chunks(plan, T) if T > 0 else (slice(0, 0),):
        hidden_cD, labels_c, own_labels_c = hidden_TD[rows], labels_T[rows], own_labels_T[rows]
        logits_cV = _logits(hidden_cD, weight_VD, bias_V, buffer_cV)
        statistics = cross_entropy_fwd(
            logits_cV,
            own_labels_c,
            options=options,
            class_weight_V=own_class_weight_V,
            with_entropy=with_entropy,
            backend=backend,
        )
        if vocabulary is not None:
            statistics = vocabulary.complete(statistics)
        terms_c = token_terms(
            statistics, labels_c, options=options, vocab_size=vocab_size, class_weight_V=class_weight_V
        )
        terms.append(terms_c)
        if gradients is None or not needs or T == 0:
            continue
        coefficients = gradient_coefficients(
            terms_c,
            _cut(gradients, rows),
            labels_c,
            options=options,
            vocab_size=vocab_size,
            class_weight_V=class_weight_V,
        )
        d_logits_cV = cross_entropy_bwd(
            logits_cV,
            own_labels_c,
            coefficients,
            options=options,
            class_weight_V=own_class_weight_V,
            out_TV=logits_cV,
            backend=backend,
        )
        if d_hidden_TD is not None:
            torch.mm(d_logits_cV, weight_VD, out=d_hidden_TD[rows])
        if d_weight is not None:
            d_weight.add(d_logits_cV, hidden_cD)
        if d_bias_V is not None:
            d_bias_V += d_logits_cV.sum(0, dtype=d_bias_V.dtype)
    return LinearCrossEntropyResult(
        terms=_join(terms),
        d_hidden_TD=d_hidden_TD,
        d_weight_VD=None if d_weight is None else d_weight.sum_VD,
        d_bias_V=d_bias_V,
    )


def _join(parts: list[TokenTerms]) -> TokenTerms:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    joined: list[Any] = [None if column[0] is None else torch.cat(column) for column in columns]
    return TokenTerms(*joined)
