"""Cross entropy of ``hidden @ weight.T + bias`` in chunks of tokens: the full logits never exist.

Legend: T tokens, D hidden, V vocabulary, c tokens of a chunk.

The GEMMs are cuBLAS (or the CPU's BLAS); between them one pass turns a ``[c, V]`` buffer of logits into their gradient
in place. For a scalar loss the gradients are made beside the loss (three GEMM passes); with per-token upstream
gradients the logits are recomputed in the backward (four). The chunked loop with gradients in the forward follows Hsu
et al. 2024, "Liger Kernel", section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._triton_utils import Backend, statistics_dtype
from .cross_entropy import SoftmaxStatistics, cross_entropy_bwd, cross_entropy_fwd
from .cross_entropy_fwd_bwd import cross_entropy_fwd_bwd
from .options import LossOptions
from .products import WeightGradient, write_hidden_gradient, write_logits
from .token_loss import TokenGradients, TokenTerms, gradient_coefficients, token_terms

DEFAULT_MEMORY_BUDGET = 2**30
FORWARD_MEMORY_BUDGET = 2**28
"""Without gradients there is no sum over tokens, and larger chunks gain nothing."""


@dataclass(frozen=True)
class ChunkPlan:
    """How the tokens are cut: ``num_chunks`` chunks of ``rows`` tokens, the last one possibly shorter."""

    rows: int
    num_chunks: int


def plan_chunks(num_tokens: int, vocab_size: int, itemsize: int, memory_budget: int | None = None) -> ChunkPlan:
    """As few equal chunks as there can be with their logits in ``memory_budget`` bytes (default 1 GiB; a single token
    may exceed it). A function of shapes alone.

    Few, because every chunk reads the weight again and, from the third on, an fp32 sum of weight gradients as well,
    which is larger than the buffer: two chunks of 1 GiB take less memory than four of 512 MiB.
    """
    if num_tokens == 0:
        return ChunkPlan(rows=0, num_chunks=0)
    budget = DEFAULT_MEMORY_BUDGET if memory_budget is None else memory_budget
    num_chunks = -(-num_tokens // max(1, budget // (vocab_size * itemsize)))
    rows = -(-num_tokens // num_chunks)
    return ChunkPlan(rows=rows, num_chunks=-(-num_tokens // rows))


class LinearCrossEntropyResult(NamedTuple):
    """Per-token terms, and the gradients that were asked for (None otherwise)."""

    terms: TokenTerms
    d_hidden_TD: Tensor | None
    d_weight_VD: Tensor | None
    """in the weight's dtype, or fp32 for fp16 weights; the caller's own sum where one was given"""
    d_bias_V: Tensor | None
    """fp32 (fp64 for fp64 weights)"""


@dataclass(frozen=True, kw_only=True)
class GradientNeeds:
    """Which gradients to compute. What is not needed costs neither a GEMM nor a buffer."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


def _chunks(plan: ChunkPlan, num_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, max(plan.rows, 1)):
        yield slice(start, min(start + plan.rows, num_tokens))


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
    weight_gradient_VD: Tensor | None = None,
    memory_budget: int | None = None,
    backend: Backend = "auto",
) -> LinearCrossEntropyResult:
    """Per-token terms of the loss and, for given upstream gradients of those terms, the gradients of the inputs.

    No autograd, no reduction and no host sync: the caller decides what a token counts (``gradients``).

    Args:
        hidden_TD: ``[T, D]``, floating.
        weight_VD: ``[V, D]``, the dtype of ``hidden_TD``.
        labels_T: ``[T]`` int64 in ``[0, V)``, or negative for a token that takes no part (the caller checks).
        gradients: upstream gradient of each term, ``[T]``; required when ``needs`` names a gradient.
        bias_V: ``[V]``, the dtype of ``hidden_TD``.
        class_weight_V: ``[V]``, floating.
        needs: the gradients to compute.
        with_entropy: also return each token's entropy.
        weight_gradient_VD: ``[V, D]``, a sum (usually fp32) to which the weight's gradient is added, instead of a
            gradient of its own: no further memory, and nothing is rounded between micro-batches.
        memory_budget: bytes of the logits buffer; see :func:`plan_chunks`. By default a quarter without gradients.
        backend: Triton kernels or the plain-torch reference; see :func:`runs_triton`.
    """
    if needs.any and gradients is None:
        raise ValueError(f"{needs} was asked for without upstream gradients; pass gradients=TokenGradients(...).")
    T, _ = hidden_TD.shape
    V = weight_VD.shape[0]
    if memory_budget is None and not needs.any:
        memory_budget = FORWARD_MEMORY_BUDGET
    plan = plan_chunks(T, V, hidden_TD.element_size(), memory_budget)
    buffer_cV = hidden_TD.new_empty((plan.rows, V))
    d_hidden_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=hidden_TD.device) if needs.hidden else None
    d_weight = WeightGradient(weight_VD, plan.num_chunks, weight_gradient_VD) if needs.weight else None
    d_bias_V = weight_VD.new_zeros(V, dtype=statistics_dtype(weight_VD.dtype)) if needs.bias else None
    described: dict[str, Any] = {"options": options, "vocab_size": V, "class_weight_V": class_weight_V}
    is_scalar = gradients is not None and gradients.log_prob_T is None and gradients.entropy_T is None
    parts: list[SoftmaxStatistics] = []
    for rows in _chunks(plan, T) if T > 0 else (slice(0, 0),):
        hidden_cD, labels_c = hidden_TD[rows], labels_T[rows]
        logits_cV = write_logits(hidden_cD, weight_VD, bias_V, buffer_cV[: hidden_cD.shape[0]])
        if needs.any and is_scalar and T > 0:
            assert gradients is not None
            parts.append(
                cross_entropy_fwd_bwd(
                    logits_cV,
                    labels_c,
                    _cut(gradients, rows),
                    options=options,
                    class_weight_V=class_weight_V,
                    with_entropy=with_entropy,
                    out_TV=logits_cV,
                    backend=backend,
                )
            )
        else:
            statistics = cross_entropy_fwd(
                logits_cV,
                labels_c,
                options=options,
                class_weight_V=class_weight_V,
                with_entropy=with_entropy,
                backend=backend,
            )
            parts.append(statistics)
            if gradients is None or not needs.any or T == 0:
                continue
            cross_entropy_bwd(
                logits_cV,
                labels_c,
                gradient_coefficients(
                    token_terms(statistics, labels_c, **described, backend=backend),
                    _cut(gradients, rows),
                    labels_c,
                    **described,
                ),
                options=options,
                class_weight_V=class_weight_V,
                out_TV=logits_cV,
                backend=backend,
            )
        if d_hidden_TD is not None:
            write_hidden_gradient(logits_cV, weight_VD, d_hidden_TD[rows])
        if d_weight is not None:
            d_weight.add(logits_cV, hidden_cD)
        if d_bias_V is not None:
            d_bias_V += logits_cV.sum(0, dtype=d_bias_V.dtype)
    del buffer_cV, logits_cV
    return LinearCrossEntropyResult(
        terms=token_terms(join_statistics(parts), labels_T, **described, backend=backend),
        d_hidden_TD=d_hidden_TD,
        d_weight_VD=None if d_weight is None else d_weight.total(),
        d_bias_V=d_bias_V,
    )


def join_statistics(parts: list[SoftmaxStatistics]) -> SoftmaxStatistics:
    """Those of all tokens from those of one chunk after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    joined: list[Any] = [None if column[0] is None else torch.cat(column) for column in columns]
    return SoftmaxStatistics(*joined)
