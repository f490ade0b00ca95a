"""Cross entropy of ``hidden @ weight.T + bias`` in chunks of tokens: the full logits never exist.

Legend: T tokens, D hidden, V vocabulary, c tokens of a chunk.

The GEMMs are cuBLAS (or the CPU's BLAS); between them one pass turns a ``[c, V]`` buffer of logits into their gradient
in place. For a scalar loss the gradients are made beside the loss (three GEMM passes); with per-token upstream
gradients the logits are recomputed in the backward (four). The chunked loop with gradients in the forward follows Hsu
et al. 2024, "Liger Kernel", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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


@dataclass(frozen=True, kw_only=True)
class VocabSlice:
    """The rows of the weight that are here, out of a vocabulary of ``vocab_size``."""

    start: int
    """vocabulary index of the first row"""
    vocab_size: int
    complete: Callable[[SoftmaxStatistics], SoftmaxStatistics]
    """statistics of full rows of logits from those of this slice of them"""

    def local_labels(self, labels_c: Tensor, num_rows: int) -> Tensor:
        """Labels as rows of this slice; ``num_rows`` for a label outside of it, negative ones unchanged."""
        local_c = labels_c - self.start
        is_local_c = (local_c >= 0) & (local_c < num_rows)
        return torch.where(labels_c < 0, labels_c, torch.where(is_local_c, local_c, num_rows))


class TokenChunks(Protocol):
    """The tokens that are scored, chunk by chunk (c tokens each), and the caller's share of them (T tokens).

    For each chunk in order: :meth:`hidden`, :meth:`labels`, :meth:`own`; with gradients :meth:`gradients`, then
    :meth:`gradient_buffer` and, when it has been written, :meth:`gradient_written`.
    """

    num_chunks: int
    rows: int
    """tokens of the largest chunk"""

    def hidden(self, chunk: int) -> Tensor:
        """``[c, D]``."""
        ...

    def labels(self, chunk: int) -> Tensor:
        """``[c]`` in the full vocabulary, or negative."""
        ...

    def gradients(self, chunk: int) -> TokenGradients:
        """Upstream gradients of the terms, each ``[c]``."""
        ...

    def own(self, statistics: SoftmaxStatistics, chunk: int) -> SoftmaxStatistics:
        """The rows of a chunk's statistics that belong to the caller's tokens."""
        ...

    def gradient_buffer(self, chunk: int) -> Tensor:
        """``[c, D]``: where the hidden states' gradient of the chunk is written."""
        ...

    def gradient_written(self, chunk: int) -> None:
        """The gradient buffer of the chunk has been written."""
        ...

    def hidden_gradient(self) -> Tensor:
        """``[T, D]``, after the last chunk."""
        ...


class LocalTokens:
    """Tokens that are all here: slices of ``hidden_TD``."""

    def __init__(self, hidden_TD: Tensor, labels_T: Tensor, gradients: TokenGradients | None, plan: ChunkPlan) -> None:
        self.rows, self.num_chunks = plan.rows, plan.num_chunks
        self._hidden_TD, self._labels_T, self._gradients = hidden_TD, labels_T, gradients
        self._d_hidden_TD: Tensor | None = None

    def _rows(self, chunk: int) -> slice:
        return slice(chunk * self.rows, min((chunk + 1) * self.rows, self._labels_T.numel()))

    def hidden(self, chunk: int) -> Tensor:
        return self._hidden_TD[self._rows(chunk)]

    def labels(self, chunk: int) -> Tensor:
        return self._labels_T[self._rows(chunk)]

    def gradients(self, chunk: int) -> TokenGradients:
        assert self._gradients is not None
        return TokenGradients(*(None if g is None else g[self._rows(chunk)] for g in self._gradients))

    def own(self, statistics: SoftmaxStatistics, chunk: int) -> SoftmaxStatistics:
        return statistics

    def gradient_buffer(self, chunk: int) -> Tensor:
        if self._d_hidden_TD is None:
            hidden_TD = self._hidden_TD
            self._d_hidden_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=hidden_TD.device)
        return self._d_hidden_TD[self._rows(chunk)]

    def gradient_written(self, chunk: int) -> None:
        pass

    def hidden_gradient(self) -> Tensor:
        assert self._d_hidden_TD is not None
        return self._d_hidden_TD


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
        labels_T: ``[T]`` int64 in ``[0, V)``, or negative for an ignored token (the caller checks).
        gradients: upstream gradient of each term, ``[T]``; required when ``needs`` names a gradient.
        bias_V: ``[V]``, the dtype of ``hidden_TD``.
        class_weight_V: ``[V]``, floating.
        needs: the gradients to compute.
        with_entropy: also return each token's entropy.
        weight_gradient_VD: ``[V, D]``, a sum (usually fp32) to which the weight's gradient is added, instead of a
            separate gradient: no further memory, and nothing is rounded between micro-batches.
        memory_budget: bytes of the logits buffer; see :func:`plan_chunks`. By default a quarter without gradients.
        backend: Triton kernels or the plain-torch reference; see :func:`runs_triton`.
    """
    if needs.any and gradients is None:
        raise ValueError(f"{needs} was asked for without upstream gradients; pass gradients=TokenGradients(...).")
    if memory_budget is None and not needs.any:
        memory_budget = FORWARD_MEMORY_BUDGET
    plan = plan_chunks(len(hidden_TD), weight_VD.shape[0], hidden_TD.element_size(), memory_budget)
    return score_chunks(
        LocalTokens(hidden_TD, labels_T, gradients, plan),
        hidden_TD,
        weight_VD,
        labels_T,
        bias_V=bias_V,
        class_weight_V=class_weight_V,
        options=options,
        needs=needs,
        per_token_gradients=gradients is not None and not gradients.is_scalar,
        with_entropy=with_entropy,
        weight_gradient_VD=weight_gradient_VD,
        backend=backend,
    )


def score_chunks(
    tokens: TokenChunks,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    vocab_slice: VocabSlice | None = None,
    bias_V: Tensor | None,
    class_weight_V: Tensor | None,
    options: LossOptions,
    needs: GradientNeeds,
    per_token_gradients: bool,
    with_entropy: bool,
    weight_gradient_VD: Tensor | None = None,
    backend: Backend,
) -> LinearCrossEntropyResult:
    """The one loop over chunks of tokens: for tokens and a weight that are all here, for tensor parallelism, and for
    tokens that are exchanged between ranks.

    Args:
        tokens: every token that is scored against these rows.
        hidden_TD, labels_T: the caller's own tokens; the terms are theirs.
        weight_VD, bias_V: the rows that are here, possibly none, of any floating dtype: products round them to the
            dtype of ``hidden_TD``, their gradients are not rounded.
        vocab_slice: which rows these are; None for all of them. Logits and gradient are then one pass over the buffer
            for scalar losses; with a slice the statistics are completed in between.
        class_weight_V: of the full vocabulary.
        per_token_gradients: True if gradients of log-probabilities or entropies come from upstream.
    """
    V = weight_VD.shape[0]
    vocab_size = V if vocab_slice is None else vocab_slice.vocab_size
    used_weight_VD = weight_VD.to(hidden_TD.dtype)
    used_bias_V = None if bias_V is None else bias_V.to(hidden_TD.dtype)
    rows_of_slice = slice(None) if vocab_slice is None else slice(vocab_slice.start, vocab_slice.start + V)
    local_class_weight_V = None if class_weight_V is None else class_weight_V[rows_of_slice]
    described: dict[str, Any] = {"options": options, "vocab_size": vocab_size, "class_weight_V": class_weight_V}
    local: dict[str, Any] = {"options": options, "class_weight_V": local_class_weight_V, "backend": backend}
    buffer_cV = hidden_TD.new_empty((tokens.rows, V))
    d_weight = WeightGradient(weight_VD, tokens.num_chunks, weight_gradient_VD) if needs.weight else None
    d_bias_V = weight_VD.new_zeros(V, dtype=statistics_dtype(hidden_TD.dtype)) if needs.bias else None
    parts: list[SoftmaxStatistics] = []
    # Without any token there is still one chunk, of none, which gives the statistics their shapes.
    for chunk in range(max(tokens.num_chunks, 1)):
        hidden_cD, labels_c = tokens.hidden(chunk), tokens.labels(chunk)
        local_labels_c = labels_c if vocab_slice is None else vocab_slice.local_labels(labels_c, V)
        logits_cV = write_logits(hidden_cD, used_weight_VD, used_bias_V, buffer_cV[: len(hidden_cD)])
        has_gradients = needs.any and len(hidden_cD) > 0
        if has_gradients and vocab_slice is None and not per_token_gradients:
            statistics = cross_entropy_fwd_bwd(
                logits_cV, labels_c, tokens.gradients(chunk), out_TV=logits_cV, with_entropy=with_entropy, **local
            )
        else:
            statistics = cross_entropy_fwd(logits_cV, local_labels_c, with_entropy=with_entropy, **local)
            if vocab_slice is not None:
                statistics = vocab_slice.complete(statistics)
            if has_gradients:
                terms = token_terms(statistics, labels_c, **described, backend=backend)
                coefficients = gradient_coefficients(terms, tokens.gradients(chunk), labels_c, **described)
                cross_entropy_bwd(logits_cV, local_labels_c, coefficients, out_TV=logits_cV, **local)
        parts.append(tokens.own(statistics, chunk))
        if needs.hidden:
            write_hidden_gradient(logits_cV, used_weight_VD, tokens.gradient_buffer(chunk))
            tokens.gradient_written(chunk)
        if d_weight is not None and has_gradients:
            d_weight.add(logits_cV, hidden_cD)
        if d_bias_V is not None:
            d_bias_V += logits_cV.sum(0, dtype=d_bias_V.dtype)
    del buffer_cV, logits_cV
    return LinearCrossEntropyResult(
        terms=token_terms(join_statistics(parts), labels_T, **described, backend=backend),
        d_hidden_TD=tokens.hidden_gradient() if needs.hidden else None,
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
