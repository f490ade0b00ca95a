"""Fused linear cross entropy of a head whose rows are split over a process group.

Legend: T tokens of this process that count, R tokens that are scored at once, D hidden, V rows of this process, G
processes.

Each process scores the same R tokens against its own rows. One all-gather of the softmax statistics for each chunk
(three numbers a token; five with entropy and label smoothing) makes the loss exact, and the gradient of the own rows
complete. This is the vocabulary-parallel loss of Shoeybi et al. 2019, "Megatron-LM", section 3, without the logits.

The tokens are those of every process alike (tensor parallelism; :class:`ReplicatedTokens`), or each has its own, which
travel to the rows instead of the rows to them (:class:`.token_exchange.ExchangedTokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist_kernels import (
    Backend,
    GradientNeeds,
    LinearCrossEntropyResult,
    SoftmaxStatistics,
    TokenGradients,
    WeightGradient,
    cross_entropy_bwd,
    cross_entropy_fwd,
    gradient_coefficients,
    join_statistics,
    merge_statistics,
    plan_chunks,
    token_terms,
    write_hidden_gradient,
    write_logits,
)

from .arguments import Execution, LossArguments, LossOutput
from .collectives import all_gather_single
from .linear_cross_entropy import Problem, fused_linear_cross_entropy


class Tokens(Protocol):
    """The tokens that all processes score, chunk by chunk, and this process's share of them."""

    num_chunks: int
    rows: int
    """of the largest chunk"""

    def hidden(self, chunk: int) -> Tensor:
        """``[R, D]``. Chunks are asked for in order, once."""
        ...

    def labels(self, chunk: int) -> Tensor:
        """``[R]`` in the whole vocabulary, or negative."""
        ...

    def gradients(self, chunk: int) -> TokenGradients:
        """Upstream gradients, each ``[R]``."""
        ...

    def own(self, statistics: SoftmaxStatistics, chunk: int) -> SoftmaxStatistics:
        """Those of this process's tokens among a chunk's."""
        ...

    def gradient_buffer(self, chunk: int) -> Tensor:
        """``[R, D]``, where the part of the hidden states' gradient that comes from this process's rows is written."""
        ...

    def take_gradient(self, chunk: int) -> None:
        """The buffer has been written."""
        ...

    def hidden_gradient(self) -> Tensor:
        """``[T, D]``, behind the last chunk."""
        ...


class ReplicatedTokens:
    """Every process has them all. The hidden states' gradient stays this process's part of a sum."""

    def __init__(
        self, hidden_TD: Tensor, labels_T: Tensor, gradients: TokenGradients | None, *, rows: int, num_chunks: int
    ) -> None:
        self.rows, self.num_chunks = rows, num_chunks
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
            self._d_hidden_TD = self._hidden_TD.new_empty(self._hidden_TD.shape)
        return self._d_hidden_TD[self._rows(chunk)]

    def take_gradient(self, chunk: int) -> None:
        pass

    def hidden_gradient(self) -> Tensor:
        assert self._d_hidden_TD is not None
        return self._d_hidden_TD


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """This process's rows of a head, for tokens that every process of the group has."""

    group: dist.ProcessGroup
    start: int
    """first row"""
    vocab_size: int
    """rows of the whole head"""

    @property
    def largest(self) -> int:
        """Rows of the largest shard, by which tokens are cut into the same chunks everywhere."""
        return -(-self.vocab_size // self.group.size())

    def run(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        problem: Problem,
        gradients: TokenGradients | None,
    ) -> LinearCrossEntropyResult:
        plan = plan_chunks(len(hidden_TD), self.largest, hidden_TD.element_size(), problem.execution.memory_budget)
        tokens = ReplicatedTokens(hidden_TD, problem.labels_T, gradients, rows=plan.rows, num_chunks=plan.num_chunks)
        return score(tokens, hidden_TD, weight_VD, bias_V, problem, shard=self, has_gradients=gradients is not None)

    def common_divisor(self, num_tokens: int) -> float | None:
        return None

    def check_upstream(self, gradient: Tensor) -> None:
        """Nothing to refuse: every process computes the same loss."""

    def own_labels(self, labels_R: Tensor, num_rows: int) -> Tensor:
        """Labels as rows of this shard; ``num_rows`` for a label in another one, negative ones as they are."""
        own_R = labels_R - self.start
        is_own_R = (own_R >= 0) & (own_R < num_rows)
        return torch.where(labels_R < 0, labels_R, torch.where(is_own_R, own_R, num_rows))

    def complete(self, own: SoftmaxStatistics, backend: Backend) -> SoftmaxStatistics:
        """Statistics of whole rows of logits from those of this process's part of them: one all-gather."""
        if own.max_T.numel() == 0:
            return own
        fields = [field for field in own if field is not None]
        gathered = iter(gather(torch.stack(fields), self.group).unbind(1))
        slices: list[Any] = [None if field is None else next(gathered) for field in own]
        return merge_statistics(SoftmaxStatistics(*slices), backend)


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[G, *shape]`` from every process's tensor of one ``shape``."""
    everyone = tensor.new_empty((group.size(), *tensor.shape))
    all_gather_single(everyone.view(-1), tensor.reshape(-1), group=group)
    return everyone


def score(
    tokens: Tokens,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    problem: Problem,
    *,
    shard: VocabularyShard,
    has_gradients: bool,
) -> LinearCrossEntropyResult:
    """The chunked loop: terms of this process's tokens, and the gradients that ``problem.needs`` names where the
    tokens know their upstream ones.

    Args:
        hidden_TD: this process's tokens.
        weight_VD, bias_V: this process's rows; there may be none. Products round them to the dtype of ``hidden_TD``.
    """
    loss, backend = problem.loss, problem.execution.backend
    needs = problem.needs if has_gradients else GradientNeeds()
    V, vocab_size = weight_VD.shape[0], shard.vocab_size
    used_weight_VD = weight_VD.to(hidden_TD.dtype)
    used_bias_V = None if bias_V is None else bias_V.to(hidden_TD.dtype)
    class_weight_V = None if loss.class_weight is None else loss.class_weight[shard.start : shard.start + V]
    described: dict[str, Any] = {"options": loss.options, "vocab_size": vocab_size, "class_weight_V": loss.class_weight}
    local: dict[str, Any] = {"options": loss.options, "class_weight_V": class_weight_V, "backend": backend}
    logits_RV = hidden_TD.new_empty((tokens.rows, V))
    d_weight = WeightGradient(weight_VD, tokens.num_chunks, None) if needs.weight else None
    d_bias_V = None
    parts: list[SoftmaxStatistics] = []
    # Without any token there is still one chunk, of none, which says what the statistics look like.
    for chunk in range(max(tokens.num_chunks, 1)):
        hidden_RD, labels_R = tokens.hidden(chunk), tokens.labels(chunk)
        own_labels_R = shard.own_labels(labels_R, V)
        logits = write_logits(hidden_RD, used_weight_VD, used_bias_V, logits_RV[: len(hidden_RD)])
        own = cross_entropy_fwd(logits, own_labels_R, with_entropy="entropy" in loss.outputs, **local)
        statistics = shard.complete(own, backend)
        parts.append(tokens.own(statistics, chunk))
        if not needs.any:
            continue
        terms = token_terms(statistics, labels_R, **described, backend=backend)
        coefficients = gradient_coefficients(terms, tokens.gradients(chunk), labels_R, **described)
        if len(hidden_RD) > 0:
            cross_entropy_bwd(logits, own_labels_R, coefficients, out_TV=logits, **local)
        if needs.hidden:
            write_hidden_gradient(logits, used_weight_VD, tokens.gradient_buffer(chunk))
            tokens.take_gradient(chunk)
        if d_weight is not None and len(hidden_RD) > 0:
            d_weight.add(logits, hidden_RD)
        if needs.bias:
            d_bias = logits.sum(0, dtype=statistics.max_T.dtype)
            d_bias_V = d_bias if d_bias_V is None else d_bias_V + d_bias
    del logits_RV, logits
    return LinearCrossEntropyResult(
        terms=token_terms(join_statistics(parts), problem.labels_T, **described, backend=backend),
        d_hidden_TD=tokens.hidden_gradient() if needs.hidden else None,
        d_weight_VD=None if d_weight is None else d_weight.total(),
        d_bias_V=d_bias_V,
    )


class SumGradient(torch.autograd.Function):
    """The tensor itself; in the backward, the sum of its gradients over the group, in ``dtype`` (None: their own)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.to(ctx.dtype or gradient.dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None, None


def vocab_parallel_linear_cross_entropy(
    hidden_states: Tensor,
    weight_local: Tensor,
    bias_local: Tensor | None,
    labels: Tensor,
    *,
    shard: VocabularyShard,
    loss: LossArguments,
    execution: Execution,
    sums_gradient: bool = True,
) -> LossOutput:
    """The loss of all processes' rows together, alike on every process of ``shard.group``.

    Args:
        hidden_states: ``[..., D]``, the same on every process of the group.
        weight_local: ``[V_local, D]``, this process's rows; there may be none.
        bias_local: ``[V_local]``.
        labels: ``[...]`` in ``[0, V)`` or ``ignore_index``, the same on every process of the group.
        sums_gradient: sum the hidden states' gradient over the group; otherwise it is this process's part of the sum.
    """
    if sums_gradient:
        hidden_states = SumGradient.apply(hidden_states, shard.group, None)  # type: ignore[no-untyped-call]
    return fused_linear_cross_entropy(
        hidden_states, weight_local, bias_local, labels, loss=loss, execution=execution, split=shard
    )
