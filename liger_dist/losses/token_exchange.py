"""Token exchange: the collectives of a vocab-parallel loss whose ranks have different tokens, and its autograd
functions.

Legend: T tokens of this rank with a label, G ranks, K chunks, m tokens of each rank in one chunk, c = G * m, D hidden.

Per chunk the hidden states are all-gathered, every rank scores all c tokens against its rows, and an all-to-all sends
each rank the parts of its tokens' gradient, which it sums in fp32. A rank sends ``2 * T * D * (G - 1)`` bytes of 16-bit
hidden states and as many of their gradient, and 12 to 24 bytes per token of labels and upstream gradients; neither the
weight nor its gradient is sent.

All ranks cut their tokens into the same number of chunks and pad them to ``m``.

[Note: Streams and communicators of the token exchange]
Two communicators are in flight at once. The large collectives (all-gather of the next chunk's hidden states, all-to-all
of the last chunk's gradient) run asynchronously on ``tokens_group``, overlapped with the products of the current chunk.
The small all-gather of a chunk's softmax statistics runs on the group of FSDP2's mesh, because on ``tokens_group``
it would queue after the next chunk's hidden states. NCCL requires that all ranks enqueue collectives of both
communicators in the same order on the host, which holds because every rank runs the same loop over the same number of
chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist_kernels import DEFAULT_MEMORY_BUDGET, TokenGradients, TokenTargets, bytes_of_class

from .collectives import agree, all_gather_single, gather, require
from .rows import Gradients, Problem
from .tensor_parallel import RowShard


@dataclass(frozen=True)
class ExchangePlan:
    """Chunks of the tokens of all ranks, from counts that all ranks know."""

    counts: tuple[int, ...]
    """tokens of each rank"""
    num_chunks: int

    @staticmethod
    def of(counts: Sequence[int], *, bytes_of_token: int, memory_budget: int) -> ExchangePlan:
        """Plans as few chunks as fit ``memory_budget``."""
        rows = max(memory_budget // max(bytes_of_token, 1) // len(counts), 1)
        return ExchangePlan(counts=tuple(counts), num_chunks=-(-max(counts) // rows))

    @property
    def rows(self) -> int:
        """m"""
        return -(-max(self.counts) // self.num_chunks) if self.num_chunks else 0

    def share(self, rank: int, chunk: int) -> tuple[int, int]:
        """Returns the range of a rank's tokens in a chunk, end excluded."""
        count = self.counts[rank]
        return count * chunk // self.num_chunks, count * (chunk + 1) // self.num_chunks


def numbers_of_token(num_rows: int, hidden_size: int) -> int:
    """Counts the values that a rank holds per token of a chunk: logits of ``num_rows``; hidden states of this chunk and
    the next; parts of their gradient, sent and received."""
    return num_rows + 4 * hidden_size


class ExchangedTokens:
    """Tokens of all ranks of ``group``; implements :class:`liger_dist_kernels.TokenChunks`.

    The all-gather of the next chunk's hidden states starts before a chunk is computed, and the all-to-all of its
    gradient overlaps the next chunk. See [Note: Streams and communicators of the token exchange].
    """

    def __init__(
        self,
        hidden_TD: Tensor,
        targets: TokenTargets,
        gradients: Gradients | None,
        *,
        plan: ExchangePlan,
        group: dist.ProcessGroup,
        gradient_scale: float,
    ) -> None:
        """Scales the upstream gradients that are sent by ``gradient_scale``, and divides the hidden states' gradient by
        it again: it remains in the gradients of the rows."""
        self.num_chunks, self._plan, self._group, self._scale = plan.num_chunks, plan, group, gradient_scale
        self._rank, self._size = group.rank(), group.size()
        self.rows = self._size * plan.rows
        self._hidden_TD = hidden_TD
        self._places_Km = self._padded_places(hidden_TD.device)
        # Padding is an ignored token without classes, with a harmless temperature.
        fields: list[Any] = list(map(self._gathered, targets, (-1, 1, -1, 0, 0)))
        self._targets = TokenTargets(*fields)
        self._gradients: Gradients | None = None
        if gradients is not None:
            self._gradients = self._all_gathered(gradients.scaled(gradient_scale))
        self._buffers: list[Tensor] = []
        self._arriving: Any = self._fetch(0) if self.num_chunks > 0 else None
        self._leaving: Any = None
        self._sent: int | None = None
        self._part_GmD: Tensor | None = None
        self._d_hidden_TD: Tensor | None = None

    def _padded_places(self, device: torch.device) -> Tensor | None:
        """Computes positions ``[K, m]`` of this rank's tokens, -1 for padding; None where they are ``0, 1, 2, …``."""
        K, m = self.num_chunks, self._plan.rows
        if self._plan.counts[self._rank] == K * m:
            return None
        places_Km = torch.full((K, m), -1, device="cpu")
        for chunk in range(K):
            start, end = self._plan.share(self._rank, chunk)
            places_Km[chunk, : end - start] = torch.arange(start, end, device="cpu")
        return places_Km.to(device, non_blocking=True)

    def _padded(self, values_T: Tensor, fill: int) -> Tensor:
        """Pads and splits ``[T, ...]`` into chunks ``[K, m, ...]``."""
        if self._places_Km is None:
            return values_T.view(self.num_chunks, self._plan.rows, *values_T.shape[1:])
        if len(values_T) == 0:
            return values_T.new_full((*self._places_Km.shape, *values_T.shape[1:]), fill)
        is_padding_Km = (self._places_Km < 0).reshape(*self._places_Km.shape, *[1] * (values_T.dim() - 1))
        return torch.where(is_padding_Km, fill, values_T[self._places_Km.clamp_min(0)])

    def _gathered(self, values_T: Tensor | None, fill: int) -> Tensor | None:
        """All-gathers ``[T, ...]`` to ``[G, K, m, ...]``."""
        if values_T is None or not self.num_chunks:
            return values_T
        return gather(self._padded(values_T, fill), self._group)

    def _all_gathered(self, gradients: Gradients) -> Gradients:
        """All-gathers each field to ``[G, K, m, ...]``; fields of one value per token in one all-gather."""
        fields: list[Any] = list(gradients)
        places = [place for place, field in enumerate(fields) if field is not None and field.dim() == 1]
        if places and self.num_chunks:
            stacked = torch.stack([self._padded(fields[place], 0) for place in places])
            gathered = gather(stacked, self._group).unbind(1)
            for place, values_GKm in zip(places, gathered, strict=True):
                fields[place] = values_GKm
        for place, field in enumerate(fields):
            if place not in places:
                fields[place] = self._gathered(field, 0)
        return type(gradients)(*fields)

    def _local_hidden(self, chunk: int) -> Tensor:
        """Returns this rank's hidden states of a chunk, ``[m, D]``, padded with zeros."""
        start, end = self._plan.share(self._rank, chunk)
        if end - start == self._plan.rows:
            return self._hidden_TD[start:end].contiguous()
        local_mD = self._hidden_TD.new_zeros((self._plan.rows, self._hidden_TD.shape[1]))
        local_mD[: end - start] = self._hidden_TD[start:end]
        return local_mD

    def _fetch(self, chunk: int) -> Any:
        local_mD = self._local_hidden(chunk)
        if len(self._buffers) < 2:
            self._buffers.append(local_mD.new_empty((self._size, *local_mD.shape)))
        # The buffer of the chunk before the last: its products have been enqueued.
        gathered_cD = self._buffers[chunk % 2].flatten(0, 1)
        return all_gather_single(gathered_cD, local_mD, group=self._group, async_op=True)

    def _of_chunk(self, fields: Any, chunk: int) -> Any:
        if not self.num_chunks:
            return fields
        return type(fields)(*(None if field is None else field[:, chunk].flatten(0, 1) for field in fields))

    def hidden(self, chunk: int) -> Tensor:
        if not self.num_chunks:
            return self._hidden_TD[:0]
        self._arriving.wait()
        if chunk + 1 < self.num_chunks:
            self._arriving = self._fetch(chunk + 1)
        return self._buffers[chunk % 2].flatten(0, 1)

    def targets(self, chunk: int) -> TokenTargets:
        targets: TokenTargets = self._of_chunk(self._targets, chunk)
        return targets

    def gradients(self, chunk: int) -> Any:
        return self._of_chunk(self._gradients, chunk)

    def local_rows(self, chunk: int) -> slice:
        if not self.num_chunks:
            return slice(None)
        start, end = self._plan.share(self._rank, chunk)
        first = self._rank * self._plan.rows
        return slice(first, first + end - start)

    def gradient_buffer(self, chunk: int) -> Tensor:
        if not self.num_chunks:
            return self._hidden_TD.new_empty((0, self._hidden_TD.shape[1]))
        self._add_received()
        if self._part_GmD is None:
            self._part_GmD, self._received_GmD = torch.empty_like(self._buffers[0]), torch.empty_like(self._buffers[0])
        return self._part_GmD.flatten(0, 1)

    def gradient_written(self, chunk: int) -> None:
        if self._part_GmD is None:
            return
        received_cD, part_cD = self._received_GmD.flatten(0, 1), self._part_GmD.flatten(0, 1)
        self._leaving = dist.all_to_all_single(received_cD, part_cD, group=self._group, async_op=True)
        self._sent = chunk

    def _add_received(self) -> None:
        """Sums the parts of the chunk that was sent last into the gradient of this rank's tokens."""
        if self._sent is None:
            return
        self._leaving.wait()
        start, end = self._plan.share(self._rank, self._sent)
        self._sent = None
        if self._d_hidden_TD is None:
            self._d_hidden_TD = self._hidden_TD.new_empty(self._hidden_TD.shape)
        dtype = torch.float64 if self._hidden_TD.dtype == torch.float64 else torch.float32
        self._d_hidden_TD[start:end] = self._received_GmD[:, : end - start].sum(0, dtype=dtype) / self._scale

    def hidden_gradient(self) -> Tensor:
        self._add_received()
        return torch.zeros_like(self._hidden_TD) if self._d_hidden_TD is None else self._d_hidden_TD


@dataclass(frozen=True, kw_only=True)
class ExchangedRowShard(RowShard):
    """Row shard of lm_head on this rank, for ranks with different tokens.

    The gradient of the rows is the sum over all ranks' tokens, each with its rank's upstream gradient, divided by
    ``divide_factor``. For a scalar loss the forward computes it, so all ranks must scale their losses alike.
    """

    tokens_group: dist.ProcessGroup
    """process group of the same ranks, for hidden states and their gradients"""
    counting_group: dist.ProcessGroup
    """process group of the same ranks on their hosts, for token counts"""
    divide_factor: float

    def tokens(self, hidden_TD: Tensor, problem: Problem, gradients: Gradients | None) -> ExchangedTokens:
        budget = problem.execution.memory_budget or DEFAULT_MEMORY_BUDGET
        plan = ExchangePlan.of(
            self.agree(len(hidden_TD), _described(problem, gradients, hidden_TD.dtype, budget)),
            bytes_of_token=numbers_of_token(self.largest, hidden_TD.shape[1]) * hidden_TD.element_size(),
            memory_budget=budget,
        )
        if problem.spec.class_weight is not None:
            self._check_same(_checksum(problem.spec.class_weight), "have different class weights; make them the same")
        return ExchangedTokens(
            hidden_TD,
            problem.targets,
            gradients,
            plan=plan,
            group=self.tokens_group,
            gradient_scale=1.0 / self.divide_factor,
        )

    def token_pairs(
        self, hidden_TD: Tensor, teacher_TE: Tensor, problem: Problem, gradients: TokenGradients | None
    ) -> tuple[ExchangedTokens, ExchangedTokens]:
        budget = problem.execution.memory_budget or DEFAULT_MEMORY_BUDGET
        sizes = (hidden_TD.shape[1], teacher_TE.shape[1])
        assert problem.distillation is not None
        asked = f"{_described(problem, gradients, hidden_TD.dtype, budget)}, {problem.distillation}"
        of_logits = self.largest * bytes_of_class(hidden_TD.dtype, teacher_TE.dtype, problem.scoring)
        of_hidden = 4 * sizes[0] * hidden_TD.element_size() + 2 * sizes[1] * teacher_TE.element_size()
        plan = ExchangePlan.of(
            self.agree(len(hidden_TD), asked), bytes_of_token=of_logits + of_hidden, memory_budget=budget
        )
        group: dict[str, Any] = {"plan": plan, "group": self.tokens_group}
        labels = TokenTargets(problem.targets.labels_T)
        return (
            ExchangedTokens(hidden_TD, problem.targets, gradients, gradient_scale=1.0 / self.divide_factor, **group),
            ExchangedTokens(teacher_TE, labels, None, gradient_scale=1.0, **group),
        )

    def agree(self, count: int, asked: str) -> list[int]:
        """Calls :func:`.collectives.agree` for the ranks that share the rows."""
        return agree(self.counting_group, count, asked)

    def common_divisor(self, num_tokens: int) -> float:
        return float(max(1, *self.agree(num_tokens, "the number of tokens")))

    def check_upstream(self, gradient: Tensor) -> None:
        """Refuses upstream gradients that differ between ranks; on a GPU by a device-side assertion."""
        self._check_same(
            gradient.detach(),
            "scale their losses differently; give num_items_in_batch or token_weight to the model instead",
        )

    def _check_same(self, number: Tensor, difference: str) -> None:
        gathered_G = gather(number.reshape(1), self.group)
        same = ((gathered_G == gathered_G[0]) | (gathered_G.isnan() & gathered_G[0].isnan())).all()
        sentence = f"ranks of the vocab-parallel lm_head {difference}, or use FSDP2(lm_head='gather')"
        require(same, sentence, lambda: f"The numbers: {gathered_G[:, 0].tolist()}.")


def _described(problem: Problem, gradients: Gradients | None, dtype: torch.dtype, memory_budget: int) -> str:
    """Describes the next computation of one loss, for the ranks to compare."""
    spec, needs, targets = problem.spec, problem.needs, problem.targets
    given = None if gradients is None else [name for name, g in gradients._asdict().items() if g is not None]
    classes = None if targets.token_ids_TK is None else targets.token_ids_TK.shape[1]
    return (
        f"a loss of {replace(spec.options, ignore_index=0)}, outputs {sorted(spec.outputs)} (top_k {spec.top_k}, "
        f"{classes} classes of each token, {targets.num_soft} soft labels, spread: {targets.uniform_T is not None}), "
        f"temperatures of tokens: {targets.temperature_T is not None}, {dtype}, logits "
        f"{problem.scoring.logits_dtype}, class weights: {spec.class_weight is not None}, memory budget "
        f"{memory_budget}, {needs}, upstream gradients {given}"
    )


def _checksum(values_V: Tensor) -> Tensor:
    places_V = torch.arange(1, len(values_V) + 1, dtype=torch.float64, device=values_V.device)
    return (values_V.double() * places_V.sqrt()).sum()
