"""Cross entropy of ``hidden @ weight.T + bias`` in chunks of tokens and tiles of the vocabulary: the full logits never
exist.

Legend: T tokens, D hidden, V vocabulary, c tokens of a chunk, v classes of a tile, K chosen classes of each token.

The GEMMs are cuBLAS (or the CPU's BLAS); between them a pass turns a buffer of logits into their gradient in place.
There are three loops, and a fourth way where all logits fit the memory budget:

- :func:`score_with_gradients`: the loss and its gradients, for upstream gradients known before the loss, over chunks of
  tokens (three GEMM passes), after Hsu et al. 2024, "Liger Kernel", section 3.2.
- :func:`score`: softmax statistics alone, over tiles of the vocabulary small enough for the L2 cache.
- :func:`recompute_gradients`: the gradients for per-token upstream gradients, from logits computed again (four passes
  with those of :func:`score`). The log-sum-exp is known by then, so this loop has tiles of the vocabulary too: a tile's
  rows of the weight's gradient are complete at once, and no sum over chunks is needed.
- :func:`score_and_keep`, which keeps the logits for :func:`gradients_of_logits`: three passes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._triton_utils import Backend, statistics_dtype
from .chosen_logits import ChosenLogits, ChosenLogProbs, choose_logits, chosen_log_probs, merge_chosen
from .cross_entropy import Anchors, cross_entropy_bwd, cross_entropy_fwd
from .merge import merge_statistics
from .one_launch import cross_entropy_fwd_bwd
from .options import LossOptions, RowOptions, TokenOutputs
from .products import (
    HiddenGradient,
    WeightGradient,
    WeightSum,
    logits_buffer,
    logits_view,
    row_stride,
    write_hidden_gradient,
    write_logits,
)
from .softmax_statistics import GradientCoefficients, SoftmaxStatistics
from .token_chunks import (
    DEFAULT_MEMORY_BUDGET,
    TILE_ROWS,
    TokenChunks,
    TokenTargets,
    plan_exponentials,
    plan_tiles,
)
from .token_loss import TokenGradients, TokenTerms, gradient_coefficients, token_terms, with_soft_labels


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Options of the scoring that are the same for all tokens."""

    options: LossOptions = LossOptions()
    outputs: TokenOutputs = TokenOutputs()
    top_k: int = 0
    """number of largest logits to report for each token"""
    class_weight_V: Tensor | None = None
    """of the full vocabulary, floating"""
    logits_dtype: torch.dtype | None = None
    """``torch.float32`` keeps logits of 16-bit operands as the products' fp32 sums; None rounds them to the operands'
    dtype"""
    memory_budget: int | None = None
    """bytes of the buffer of logits; None for 1 GiB with gradients, 256 MiB with those of the hidden states alone, 128
    MiB (fp32: 256 MiB) without"""
    backend: Backend = "auto"

    def keeps_fp32(self, hidden: Tensor) -> bool:
        """True if the logits of ``hidden`` are wider than it."""
        return self.logits_dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16)

    def row_options(self, vocab_size: int, first_class: int = 0) -> RowOptions:
        """Builds the options of a block of logits in a buffer."""
        return RowOptions(
            vocab_size=vocab_size,
            options=self.options,
            outputs=self.outputs,
            class_weight_V=self.class_weight_V,
            first_class=first_class,
            is_padded=True,
            backend=self.backend,
        )

    def needs_recomputation(self, hidden: Tensor) -> bool:
        """True if :func:`score_with_gradients` refuses these operands; see [Note: Exponentials of fp32 logits]."""
        return self.keeps_fp32(hidden) and self.options.softcap is not None


class LinearCrossEntropyResult(NamedTuple):
    """Per-token terms, and the requested gradients (None otherwise)."""

    terms: TokenTerms
    chosen: ChosenLogProbs
    d_hidden_TD: Tensor | None
    d_weight_VD: Tensor | None
    """in the weight's dtype, or fp32 for fp16 weights; None also where it was added to a :class:`WeightSum`"""
    d_bias_V: Tensor | None
    """fp32 (fp64 for fp64 weights)"""


@dataclass(frozen=True, kw_only=True)
class GradientNeeds:
    """Gradients to compute. Others cost neither a GEMM nor a buffer."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True, kw_only=True)
class HeadSlice:
    """Rows of lm_head on this rank, of any floating dtype: products round them to the dtype of the hidden states; their
    gradients are not rounded."""

    weight_VD: Tensor
    """``[v, D]``, possibly without a row"""
    bias_V: Tensor | None = None
    vocab_size: int
    """rows of the full weight"""
    start: int = 0
    """vocabulary index of the first row"""
    complete_statistics: Callable[[SoftmaxStatistics], SoftmaxStatistics] | None = None
    """completes statistics of this slice to those of full rows of logits; None where all rows of lm_head are here"""
    complete_chosen: Callable[[ChosenLogits], ChosenLogits] | None = None
    gather_slices: Callable[[Tensor], Tensor] | None = None
    """``[F, T]`` of this slice to ``[G, F, T]`` of all slices, in their order; None where all rows are here"""
    weight_sum: WeightSum | None = None
    """sum to which the rows' gradient is added instead of being returned; None for one loss"""

    @staticmethod
    def full(weight_VD: Tensor, bias_V: Tensor | None = None, weight_sum: WeightSum | None = None) -> HeadSlice:
        """Wraps a full lm_head."""
        return HeadSlice(weight_VD=weight_VD, bias_V=bias_V, vocab_size=weight_VD.shape[0], weight_sum=weight_sum)

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Casts weight and bias to the ``dtype`` of the products."""
        return self.weight_VD.to(dtype), None if self.bias_V is None else self.bias_V.to(dtype)

    def row_options(self, scoring: Scoring, first_column: int = 0) -> RowOptions:
        """Builds the options of a block of logits in a buffer that begins at row ``first_column`` of these rows."""
        return scoring.row_options(self.vocab_size, self.start + first_column)


def score_rows(
    hidden_TD: Tensor,
    head: HeadSlice,
    tokens: TokenChunks,
    targets: TokenTargets,
    *,
    scoring: Scoring,
    needs: GradientNeeds,
    keeps_logits: bool,
    has_upstream: bool,
) -> tuple[LinearCrossEntropyResult, Tensor | None]:
    """Scores ``tokens``, the chunks of ``hidden_TD``, by one of the three loops; returns the logits too if they are
    kept."""
    if keeps_logits:
        return score_and_keep(hidden_TD, head, targets, scoring=scoring)
    if not has_upstream:
        return score(tokens, head, targets, scoring=scoring), None
    return score_with_gradients(tokens, head, targets, scoring=scoring, needs=needs), None


def score(tokens: TokenChunks, head: HeadSlice, targets: TokenTargets, *, scoring: Scoring) -> LinearCrossEntropyResult:
    """Computes the terms of the caller's tokens, those of ``targets``, without gradients."""
    parts, operands = [], None
    # Without any token there is still one empty chunk, which gives the statistics their shapes.
    for chunk in range(max(tokens.num_chunks, 1)):
        hidden_cD, targets_c = tokens.hidden(chunk), tokens.targets(chunk)
        operands = operands or head.operands(hidden_cD.dtype)
        statistics, chosen, _ = _score_tiles(hidden_cD, operands, targets_c, head, scoring)
        parts.append(_own(_completed(statistics, chosen, head), tokens.local_rows(chunk)))
    return _result(parts, targets, head, scoring)


def score_and_keep(
    hidden_TD: Tensor, head: HeadSlice, targets: TokenTargets, *, scoring: Scoring
) -> tuple[LinearCrossEntropyResult, Tensor]:
    """Scores as :func:`score` for a full head; also returns all logits ``[T, V]``, in a
    :func:`.products.logits_buffer`."""
    dtype = torch.float32 if scoring.keeps_fp32(hidden_TD) else None
    logits_TV = logits_buffer(hidden_TD, len(hidden_TD), head.vocab_size, dtype)
    write_logits(hidden_TD, *head.operands(hidden_TD.dtype), logits_TV)
    rows = head.row_options(scoring)
    statistics = cross_entropy_fwd(logits_TV, targets, rows)
    chosen = choose_logits(logits_TV, targets, scoring.top_k, rows)
    return _result([(statistics, chosen)], targets, head, scoring), logits_TV


def gradients_of_logits(
    logits_TV: Tensor,
    hidden_TD: Tensor,
    head: HeadSlice,
    targets: TokenTargets,
    coefficients: GradientCoefficients,
    *,
    scoring: Scoring,
    needs: GradientNeeds,
    overwrite: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Computes the gradients as :func:`recompute_gradients`, from the logits of :func:`score_and_keep`; ``overwrite``
    allows writing over them."""
    may_overwrite = overwrite and logits_TV.dtype == hidden_TD.dtype
    out_TV = logits_TV if may_overwrite else logits_buffer(hidden_TD, *logits_TV.shape)
    d_logits_TV = cross_entropy_bwd(logits_TV, targets, coefficients, head.row_options(scoring), out_TV=out_TV)
    sums = GradientSums(head, needs, 1)
    sums.add(d_logits_TV, hidden_TD, 0)
    d_hidden_TD = None
    if needs.hidden:
        weight_VD, _ = head.operands(hidden_TD.dtype)
        d_hidden_TD = write_hidden_gradient(d_logits_TV, weight_VD, torch.empty_like(hidden_TD))
    return d_hidden_TD, sums.weight(), sums.bias


def score_with_gradients(
    tokens: TokenChunks,
    head: HeadSlice,
    targets: TokenTargets,
    *,
    scoring: Scoring,
    needs: GradientNeeds,
) -> LinearCrossEntropyResult:
    """Computes the terms of the caller's tokens, and the gradients for upstream gradients of the loss alone
    (``tokens.gradients`` are :class:`TokenGradients` of the cross entropy and of the z-loss).

    Raises:
        ValueError: fp32 logits of 16-bit operands with a soft-cap.
    """
    weight_VD = head.weight_VD
    sums = GradientSums(head, needs, tokens.num_chunks)
    parts, buffer_cV, operands = [], None, None
    for chunk in range(max(tokens.num_chunks, 1)):
        hidden_cD, targets_c = tokens.hidden(chunk), tokens.targets(chunk)
        operands = operands or head.operands(hidden_cD.dtype)
        if scoring.needs_recomputation(hidden_cD):
            raise ValueError("soft-capped fp32 logits of 16-bit operands need recompute_gradients.")
        if buffer_cV is None:
            buffer_cV = logits_buffer(hidden_cD, max(tokens.rows, len(hidden_cD)), weight_VD.shape[0])
        d_logits_cV = buffer_cV[: len(hidden_cD)]
        upstream = tokens.gradients(chunk) if len(hidden_cD) > 0 else None
        statistics, chosen = _logits_to_gradient(d_logits_cV, hidden_cD, operands, targets_c, upstream, head, scoring)
        parts.append(_own((statistics, chosen), tokens.local_rows(chunk)))
        if needs.hidden:
            write_hidden_gradient(d_logits_cV, operands[0], tokens.gradient_buffer(chunk))
            tokens.gradient_written(chunk)
        sums.add(d_logits_cV, hidden_cD, chunk)
    del buffer_cV, d_logits_cV
    result = _result(parts, targets, head, scoring)
    return result._replace(
        d_hidden_TD=tokens.hidden_gradient() if needs.hidden else None, d_weight_VD=sums.weight(), d_bias_V=sums.bias
    )


def recompute_gradients(
    tokens: TokenChunks, head: HeadSlice, *, scoring: Scoring, needs: GradientNeeds
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Computes gradients of hidden states, weight and bias for known coefficients of the logits' gradient
    (``tokens.gradients`` are :class:`GradientCoefficients`)."""
    sums = GradientSums(head, needs, tokens.num_chunks)
    V, operands = head.weight_VD.shape[0], None
    for chunk in range(tokens.num_chunks):
        hidden_cD, targets_c, coefficients = tokens.hidden(chunk), tokens.targets(chunk), tokens.gradients(chunk)
        weight_VD, bias_V = operands = operands or head.operands(hidden_cD.dtype)
        is_wide = scoring.keeps_fp32(hidden_cD)
        itemsize = hidden_cD.element_size() + (4 if is_wide else 0)
        c = len(hidden_cD)
        plan = plan_tiles(c, V, itemsize, scoring.memory_budget or DEFAULT_MEMORY_BUDGET, rows=c)
        tiles = plan.column_slices(V)
        logits = hidden_cD.new_empty(c * row_stride(plan.columns), dtype=torch.float32 if is_wide else None)
        gradient = torch.empty_like(logits, dtype=hidden_cD.dtype) if is_wide else logits
        d_hidden = HiddenGradient(tokens.gradient_buffer(chunk), len(tiles)) if needs.hidden else None
        for number, columns in enumerate(tiles):
            v = columns.stop - columns.start
            bias_v = None if bias_V is None else bias_V[columns]
            d_logits_cv = cross_entropy_bwd(
                write_logits(hidden_cD, weight_VD[columns], bias_v, logits_view(logits, c, v)),
                targets_c,
                coefficients,
                head.row_options(scoring, columns.start),
                out_TV=logits_view(gradient, c, v),
            )
            if d_hidden is not None:
                d_hidden.add(d_logits_cv, weight_VD[columns], number)
            sums.add(d_logits_cv, hidden_cD, chunk, columns.start)
        if d_hidden is not None:
            d_hidden.finish()
            tokens.gradient_written(chunk)
    return tokens.hidden_gradient() if needs.hidden else None, sums.weight(), sums.bias


def _logits_to_gradient(
    d_logits_cV: Tensor,
    hidden_cD: Tensor,
    operands: tuple[Tensor, Tensor | None],
    targets_c: TokenTargets,
    upstream: TokenGradients | None,
    head: HeadSlice,
    scoring: Scoring,
) -> tuple[SoftmaxStatistics, ChosenLogits]:
    """Computes statistics of full rows and writes the gradient by the raw logits to ``d_logits_cV`` (not for
    ``upstream`` None)."""
    rows, anchors = head.row_options(scoring), None
    if scoring.keeps_fp32(hidden_cD):
        # See [Note: Exponentials of fp32 logits].
        statistics, chosen, anchors = _score_tiles(hidden_cD, operands, targets_c, head, scoring, d_logits_cV)
    else:
        write_logits(hidden_cD, *operands, d_logits_cV)
        chosen = choose_logits(d_logits_cV, targets_c, scoring.top_k, rows)
        if head.complete_statistics is None and upstream is not None:
            statistics = cross_entropy_fwd_bwd(
                d_logits_cV, targets_c, upstream, rows, token_logits_TK=chosen.at_TK, out_TV=d_logits_cV
            )
            return statistics, chosen
        statistics = cross_entropy_fwd(d_logits_cV, targets_c, rows)
    statistics, chosen = _completed(statistics, chosen, head)
    if upstream is not None:
        terms = token_terms(statistics, targets_c, rows)
        coefficients = gradient_coefficients(terms, upstream, targets_c, rows)
        cross_entropy_bwd(
            d_logits_cV,
            targets_c,
            coefficients,
            rows,
            token_logits_TK=chosen.at_TK,
            anchors=anchors,
            out_TV=d_logits_cV,
        )
    return statistics, chosen


def _score_tiles(
    hidden_cD: Tensor,
    operands: tuple[Tensor, Tensor | None],
    targets_c: TokenTargets,
    head: HeadSlice,
    scoring: Scoring,
    exponentials_cV: Tensor | None = None,
) -> tuple[SoftmaxStatistics, ChosenLogits, Anchors]:
    """Computes statistics over the rows of ``head``, tile by tile. Also returns the maxima that the exponentials in
    ``exponentials_cV`` are relative to."""
    (weight_VD, bias_V), (c, V) = operands, (len(hidden_cD), head.weight_VD.shape[0])
    dtype = torch.float32 if scoring.keeps_fp32(hidden_cD) else hidden_cD.dtype
    plan = plan_tiles(c, V, dtype.itemsize, scoring.memory_budget, rows=TILE_ROWS)
    if exponentials_cV is not None:
        plan = plan_exponentials(c, V, scoring.memory_budget)
    buffer = hidden_cD.new_empty(min(plan.rows, c) * row_stride(min(plan.columns, V)), dtype=dtype)
    blocks = []
    for rows in plan.row_slices(c):
        targets_r, tiles = targets_c.rows(rows), []
        r = rows.stop - rows.start
        for columns in plan.column_slices(V):
            v = columns.stop - columns.start
            row_options = head.row_options(scoring, columns.start)
            logits_rv = write_logits(
                hidden_cD[rows],
                weight_VD[columns],
                None if bias_V is None else bias_V[columns],
                logits_view(buffer, r, v),
            )
            exponentials_rv = None if exponentials_cV is None else exponentials_cV[rows, columns]
            statistics = cross_entropy_fwd(logits_rv, targets_r, row_options, exponentials_TV=exponentials_rv)
            chosen = choose_logits(logits_rv, targets_r, scoring.top_k, row_options)
            tiles.append((statistics, chosen))
        stacked = _columns([statistics for statistics, _ in tiles], torch.stack)
        merged = merge_statistics(SoftmaxStatistics(*stacked), scoring.backend) if len(tiles) > 1 else tiles[0][0]
        blocks.append((merged, merge_chosen([chosen for _, chosen in tiles]), stacked[0]))
    statistics, chosen = _joined([(statistics, chosen) for statistics, chosen, _ in blocks])
    return statistics, chosen, Anchors(torch.cat([max_Nr for *_, max_Nr in blocks], 1), plan.columns)


class GradientSums:
    """Gradients of the rows of ``head``, summed over chunks."""

    def __init__(
        self,
        head: HeadSlice,
        needs: GradientNeeds,
        num_chunks: int,
        *,
        direct_chunks: int = 2,
    ) -> None:
        weight_VD, self._weight = head.weight_VD, None
        if needs.weight:
            self._weight = WeightGradient(
                weight_VD, num_chunks, direct_chunks=direct_chunks, over_losses=head.weight_sum
            )
        self.bias: Tensor | None = None
        if needs.bias:
            self.bias = weight_VD.new_zeros(weight_VD.shape[0], dtype=statistics_dtype(weight_VD.dtype))

    def add(self, d_logits_cv: Tensor, hidden_cD: Tensor, chunk: int, first_class: int = 0) -> None:
        """Adds the gradients of a chunk and a tile; nothing for a chunk without a token."""
        if len(hidden_cD) == 0:
            return
        if self._weight is not None:
            self._weight.add(d_logits_cv, hidden_cD, chunk, first_class)
        if self.bias is not None:
            self.bias[first_class : first_class + d_logits_cv.shape[1]] += d_logits_cv.sum(0, dtype=self.bias.dtype)

    def weight(self) -> Tensor | None:
        """Returns ``[V, D]``; see :meth:`WeightGradient.total`."""
        return None if self._weight is None else self._weight.total()


def _completed(
    statistics: SoftmaxStatistics, chosen: ChosenLogits, head: HeadSlice
) -> tuple[SoftmaxStatistics, ChosenLogits]:
    """Completes statistics and chosen logits of this slice to those of full rows."""
    if head.complete_statistics is None or head.complete_chosen is None:
        return statistics, chosen
    return head.complete_statistics(statistics), head.complete_chosen(chosen)


def _own(scored: tuple[SoftmaxStatistics, ChosenLogits], rows: slice) -> tuple[SoftmaxStatistics, ChosenLogits]:
    statistics, chosen = ([None if field is None else field[rows] for field in part] for part in scored)
    return SoftmaxStatistics(*statistics), ChosenLogits(*chosen)  # type: ignore[arg-type]


def _joined(parts: list[tuple[SoftmaxStatistics, ChosenLogits]]) -> tuple[SoftmaxStatistics, ChosenLogits]:
    """Concatenates the results of chunks along the tokens."""
    if len(parts) == 1:
        return parts[0]
    statistics = _columns([statistics for statistics, _ in parts], torch.cat)
    return SoftmaxStatistics(*statistics), ChosenLogits(*_columns([chosen for _, chosen in parts], torch.cat))


def _columns(parts: list[Any], join: Callable[[Any], Tensor]) -> list[Any]:
    """Joins each field of several named tuples to one tensor; None where the field is None."""
    return [None if column[0] is None else join(column) for column in zip(*parts, strict=True)]


def _result(
    parts: list[tuple[SoftmaxStatistics, ChosenLogits]], targets: TokenTargets, head: HeadSlice, scoring: Scoring
) -> LinearCrossEntropyResult:
    statistics, chosen = _joined(parts)
    rows = head.row_options(scoring)
    terms = with_soft_labels(token_terms(statistics, targets, rows), chosen, targets, rows)
    log_probs = chosen_log_probs(chosen, terms.log_probs, targets)
    return LinearCrossEntropyResult(terms, log_probs, None, None, None)
