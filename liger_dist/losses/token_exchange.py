"""Tokens that travel to the rows of a head: each process has its own tokens and its own rows.

Legend: T tokens of this process that count, G processes, K chunks, m tokens of one process in one chunk, R = G * m, D
hidden.

For each chunk the hidden states are gathered from all processes, and the parts of their gradient go back: every process
sends each of the others what its rows give to their tokens, and adds up in fp32 what it receives. The next chunk
arrives while one is computed, and a gradient leaves while the next one is computed (:mod:`.transport`). Bytes that a
process sends, of ``T * D`` 16-bit hidden states: ``2 * T * D * (G - 1)`` on the way there and as many on the way back;
of labels and upstream gradients 12 to 24 a token, once. Neither the weight nor its gradient travels.

All processes cut their tokens into the same number of chunks, and fill up what is short of ``m``. Where that would be
more than a tenth of a chunk, because processes have different numbers of tokens, the fillers are taken out again
before the products.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist_kernels import DEFAULT_MEMORY_BUDGET, LinearCrossEntropyResult, SoftmaxStatistics, TokenGradients

from .collectives import device_for
from .linear_cross_entropy import Problem
from .peer_memory import PeerMemory
from .transport import Collectives, OwnTokens, PeerCopies, Transport
from .vocab_parallel import VocabularyShard, gather, score


@dataclass(frozen=True)
class ExchangePlan:
    """How the tokens of all processes are cut, from numbers that all of them know."""

    counts: tuple[int, ...]
    """tokens of each process"""
    num_chunks: int

    @staticmethod
    def of(counts: Sequence[int], *, bytes_of_token: int, memory_budget: int) -> ExchangePlan:
        """As few chunks as fit ``memory_budget``."""
        rows = max(memory_budget // max(bytes_of_token, 1) // len(counts), 1)
        return ExchangePlan(counts=tuple(counts), num_chunks=-(-max(counts) // rows))

    @property
    def rows(self) -> int:
        """m: of the largest share of a chunk."""
        return -(-max(self.counts) // self.num_chunks) if self.num_chunks else 0

    def share(self, process: int, chunk: int) -> tuple[int, int]:
        """First token of a process in a chunk, and the one behind the last."""
        count = self.counts[process]
        return count * chunk // self.num_chunks, count * (chunk + 1) // self.num_chunks

    def sizes(self, chunk: int) -> list[int]:
        """Tokens of each process in a chunk."""
        bounds = (self.share(process, chunk) for process in range(len(self.counts)))
        return [end - start for start, end in bounds]


def numbers_of_token(num_rows: int, hidden_size: int) -> int:
    """Numbers that a process holds for each token of a chunk: logits of ``num_rows``; hidden states of this chunk and
    the next; parts of their gradient that leave, and that arrive."""
    return num_rows + 4 * hidden_size


class ExchangedTokens:
    """The tokens of all processes of ``group``, of which this one has its own share."""

    def __init__(
        self,
        hidden_TD: Tensor,
        labels_T: Tensor,
        gradients: TokenGradients | None,
        *,
        plan: ExchangePlan,
        group: dist.ProcessGroup,
        transport: Callable[[OwnTokens, int], Transport],
        gradient_scale: float,
    ) -> None:
        """``transport`` is made of this process's tokens and the number of chunks. ``gradient_scale`` multiplies the
        upstream gradients that travel, and is taken out of the hidden states' gradient again: what is left of it is in
        the gradients of the rows."""
        self.num_chunks, self._plan, self._group, self._scale = plan.num_chunks, plan, group, gradient_scale
        self._rank, self._size = group.rank(), group.size()
        self.rows = self._size * plan.rows
        self._hidden_TD = hidden_TD
        self._places_Km = self._padded_places(hidden_TD.device)
        self._kept = [self._kept_places(chunk) for chunk in range(self.num_chunks)]
        (self._labels_GKm,) = self._gathered([labels_T], fill=-1)
        self._gradients: list[Tensor | None] = []
        if gradients is not None:
            fields = [g * gradient_scale for g in gradients if g is not None]
            gathered = iter(self._gathered(fields, fill=0) if fields else ())
            self._gradients = [None if g is None else next(gathered) for g in gradients]
        # Nothing of self, so that all of it is gone with the last reference.
        own = functools.partial(_own_tokens, hidden_TD, plan, self._rank)
        self._transport = transport(own, self.num_chunks) if self.num_chunks > 0 else None
        self._sent: int | None = None
        self._d_hidden_TD: Tensor | None = None

    def _padded_places(self, device: torch.device) -> Tensor | None:
        """``[K, m]``: places of this process's tokens, -1 for a filler; None where they are ``0, 1, 2, …``."""
        K, m = self.num_chunks, self._plan.rows
        if self._plan.counts[self._rank] == K * m:
            return None
        places_Km = torch.full((K, m), -1, device="cpu")
        for chunk in range(K):
            start, end = self._plan.share(self._rank, chunk)
            places_Km[chunk, : end - start] = torch.arange(start, end, device="cpu")
        return places_Km.to(device, non_blocking=True)

    def _padded(self, values_T: Tensor, fill: int) -> Tensor:
        if self._places_Km is None:
            return values_T.view(self.num_chunks, self._plan.rows)
        if len(values_T) == 0:
            return values_T.new_full(self._places_Km.shape, fill)
        return torch.where(self._places_Km < 0, fill, values_T[self._places_Km.clamp_min(0)])

    def _gathered(self, fields: Sequence[Tensor], *, fill: int) -> Sequence[Tensor]:
        """``[G, K, m]`` of each field ``[T]``, in one collective."""
        if not self.num_chunks:
            return fields
        return gather(torch.stack([self._padded(field_T, fill) for field_T in fields]), self._group).unbind(1)

    def _kept_places(self, chunk: int) -> Tensor | None:
        """Places among ``[G, m]`` that hold tokens; None where nearly all do."""
        sizes, m = self._plan.sizes(chunk), self._plan.rows
        if sum(sizes) >= 0.9 * len(sizes) * m:
            return None
        starts = range(0, len(sizes) * m, m)
        places = torch.cat([torch.arange(s, s + size, device="cpu") for s, size in zip(starts, sizes, strict=True)])
        return places.to(self._hidden_TD.device, non_blocking=True)

    def _of_chunk(self, values_GKm: Tensor, chunk: int) -> Tensor:
        if not self.num_chunks:
            return values_GKm.reshape(-1)
        values_R, kept = values_GKm[:, chunk].reshape(-1), self._kept[chunk]
        return values_R if kept is None else values_R[kept]

    def hidden(self, chunk: int) -> Tensor:
        if self._transport is None:
            return self._hidden_TD[:0]
        everyone_RD, kept = self._transport.everyone(chunk).flatten(0, 1), self._kept[chunk]
        return everyone_RD if kept is None else everyone_RD[kept]

    def labels(self, chunk: int) -> Tensor:
        return self._of_chunk(self._labels_GKm, chunk)

    def gradients(self, chunk: int) -> TokenGradients:
        return TokenGradients(*(None if g is None else self._of_chunk(g, chunk) for g in self._gradients))

    def own(self, statistics: SoftmaxStatistics, chunk: int) -> SoftmaxStatistics:
        if not self.num_chunks:
            return statistics
        sizes = self._plan.sizes(chunk)
        first = self._rank * self._plan.rows if self._kept[chunk] is None else sum(sizes[: self._rank])
        rows = slice(first, first + sizes[self._rank])
        fields: list[Any] = [None if field is None else field[rows] for field in statistics]
        return SoftmaxStatistics(*fields)

    def gradient_buffer(self, chunk: int) -> Tensor:
        if self._transport is None:
            return self._hidden_TD.new_empty((0, self._hidden_TD.shape[1]))
        self._add_received()
        self._part_RD, kept = self._transport.part(chunk).flatten(0, 1), self._kept[chunk]
        self._kept_RD = self._part_RD if kept is None else self._part_RD.new_empty((len(kept), self._part_RD.shape[1]))
        return self._kept_RD

    def take_gradient(self, chunk: int) -> None:
        if self._transport is None:
            return
        kept = self._kept[chunk]
        if kept is not None:
            self._part_RD.zero_().index_copy_(0, kept, self._kept_RD)
        self._transport.send(chunk)
        self._sent = chunk

    def _add_received(self) -> None:
        """Adds up the parts of the chunk that was sent last, into the rows of this process's tokens."""
        if self._transport is None or self._sent is None:
            return
        received_GmD, (start, end) = self._transport.received(), self._plan.share(self._rank, self._sent)
        self._sent = None
        if self._d_hidden_TD is None:
            self._d_hidden_TD = self._hidden_TD.new_empty(self._hidden_TD.shape)
        dtype = torch.float64 if received_GmD.dtype == torch.float64 else torch.float32
        self._d_hidden_TD[start:end] = received_GmD[:, : end - start].sum(0, dtype=dtype) / self._scale

    def hidden_gradient(self) -> Tensor:
        self._add_received()
        return torch.zeros_like(self._hidden_TD) if self._d_hidden_TD is None else self._d_hidden_TD


def _own_tokens(hidden_TD: Tensor, plan: ExchangePlan, process: int, chunk: int) -> Tensor:
    """``[m, D]``: the hidden states of one process in a chunk, zeros behind them."""
    start, end = plan.share(process, chunk)
    if end - start == plan.rows:
        return hidden_TD[start:end]
    own_mD = hidden_TD.new_zeros((plan.rows, hidden_TD.shape[1]))
    own_mD[: end - start] = hidden_TD[start:end]
    return own_mD


@dataclass(frozen=True, kw_only=True)
class ExchangingShard(VocabularyShard):
    """This process's rows of a head, for tokens of which every process of the group has its own.

    The gradient of the rows is the sum over all processes' tokens, each with its own upstream gradient, divided by
    ``divide_factor``. For a scalar loss it is made in the forward, so all processes must scale their losses alike.
    """

    tokens_group: dist.ProcessGroup
    """the same processes, for hidden states and their gradients: behind these the statistics would wait"""
    counting_group: dist.ProcessGroup
    """the same processes on their hosts, for numbers of tokens"""
    divide_factor: float
    peer_memory: PeerMemory | None = None
    """of the same processes, for hidden states and their gradients instead of ``tokens_group``"""

    def run(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        problem: Problem,
        gradients: TokenGradients | None,
    ) -> LinearCrossEntropyResult:
        budget = problem.execution.memory_budget or DEFAULT_MEMORY_BUDGET
        plan = ExchangePlan.of(
            self.agree(len(hidden_TD), _described(problem, gradients, hidden_TD.dtype, budget)),
            bytes_of_token=numbers_of_token(self.largest, hidden_TD.shape[1]) * hidden_TD.element_size(),
            memory_budget=budget,
        )
        if problem.loss.class_weight is not None:
            self._check_same(_checksum(problem.loss.class_weight), "have different class weights; make them the same")
        # Copies are hidden behind the products of a gradient; without one, an all-gather is behind those of logits.
        copies = self.peer_memory if gradients is not None and problem.needs.hidden else None

        def transport(own: OwnTokens, num_chunks: int) -> Transport:
            if copies is None:
                return Collectives(own, num_chunks=num_chunks, group=self.tokens_group)
            return PeerCopies(own, num_chunks=num_chunks, rank=self.group.rank(), memory=copies)

        tokens = ExchangedTokens(
            hidden_TD,
            problem.labels_T,
            gradients,
            plan=plan,
            group=self.tokens_group,
            transport=transport,
            gradient_scale=1.0 / self.divide_factor,
        )
        return score(tokens, hidden_TD, weight_VD, bias_V, problem, shard=self, has_gradients=gradients is not None)

    def agree(self, count: int, asked: str) -> list[int]:
        """:func:`agree` among the ranks that share the rows."""
        return agree(self.counting_group, count, asked)

    def common_divisor(self, num_tokens: int) -> float:
        return float(max(1, *self.agree(num_tokens, "the number of tokens")))

    def check_upstream(self, gradient: Tensor) -> None:
        """Refuses upstream gradients that differ between processes, on a GPU by an assertion on the device."""
        self._check_same(
            gradient.detach(),
            "scale their losses differently; give num_items_in_batch or token_weight to the model instead",
        )

    def _check_same(self, number: Tensor, difference: str) -> None:
        everyone_G = gather(number.reshape(1), self.group)
        same = ((everyone_G == everyone_G[0]) | (everyone_G.isnan() & everyone_G[0].isnan())).all()
        sentence = (
            f"the processes that share the output embedding's rows {difference}, or use WrapConfig(head='gather')"
        )
        if number.is_cuda:
            # At most 254 characters.
            torch._assert_async(same, sentence)
        elif not bool(same):
            raise LigerDistError(f"{sentence}. The numbers: {everyone_G[:, 0].tolist()}.")


def agree(group: dist.ProcessGroup, count: int, asked: str) -> list[int]:
    """All-gathers the number of tokens of every rank of ``group`` on the hosts. All of them have to be at the same
    place: ``asked`` says what this one is about to do.

    Raises:
        LigerDistError: on every rank alike, where they are not.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LigerDistError(
            f"{asked} cannot be captured in a CUDA graph: the processes that share the output embedding's rows "
            "compare their numbers of tokens on the hosts. Use WrapConfig(head='gather')."
        )
    digest = int.from_bytes(hashlib.sha256(asked.encode()).digest()[:7], "big")
    own = torch.tensor([count, digest], device=device_for(group))
    everyone = gather(own, group).tolist()
    if any(numbers[1] != digest for numbers in everyone):
        answers: list[Any] = [None] * len(everyone)
        dist.all_gather_object(answers, asked, group=group)
        raise LigerDistError(
            "the processes that share the output embedding's rows do not ask for the same: "
            + "; ".join(f"process {place} for {answer}" for place, answer in enumerate(answers))
            + ". Call the model on all of them, with the same kind of arguments, loss options, frozen parameters "
            "and torch.no_grad()."
        )
    return [numbers[0] for numbers in everyone]


def _described(problem: Problem, gradients: TokenGradients | None, dtype: torch.dtype, memory_budget: int) -> str:
    """What one loss is about to do, for the processes to compare."""
    loss, needs = problem.loss, problem.needs
    upstream = None if gradients is None else [name for name, g in gradients._asdict().items() if g is not None]
    return (
        f"a loss of {replace(loss.options, ignore_index=0)}, outputs {sorted(loss.outputs)}, {dtype}, class weights: "
        f"{loss.class_weight is not None}, memory budget {memory_budget}, {needs}, upstream gradients {upstream}"
    )


def _checksum(values_V: Tensor) -> Tensor:
    places_V = torch.arange(1, len(values_V) + 1, dtype=torch.float64, device=values_V.device)
    return (values_V.double() * places_V.sqrt()).sum()
