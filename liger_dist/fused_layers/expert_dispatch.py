"""Dispatch of tokens to the ranks of their experts and back.

Each rank sends a token once to every rank that has some of its experts, with the indices and the router's weights of
these experts. That rank returns one row for it: the weighted sum over its experts, which the sender adds up over the
ranks in a fixed order. The backward returns gradients by the reverse all-to-alls. transformers sends a row for each
pair of token and expert instead, both ways: with 8 experts of a token on 2 ranks about four times as many.

Legend: T tokens of this rank, K experts of a token, R ranks that share the experts, N rows that this rank sends, M rows
that it receives, P pairs of a received row and an expert of this rank, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist.model.torch_modes import untraced
from liger_dist_kernels import Routing, combine_rows, gather_rows, route

_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}
"""integers with as many bits as a router's weight"""


class _Plan(NamedTuple):
    """Rows and counts of the all-to-alls of one call."""

    routing: Routing
    """rows ``[N]`` of this rank's tokens, sorted by the rank that they are sent to"""
    owner_TK: Tensor
    """rank of each expert; of an index that names none, a number that no rank has"""
    sent: list[int]
    """rows for each rank"""
    received: list[int]
    """rows of each rank"""
    pairs: int
    """P"""
    group: dist.ProcessGroup

    @property
    def token_N(self) -> Tensor:
        """Token of each row that is sent."""
        return self.routing.pair_S.long() // self.routing.row_TK.shape[1]

    def send(self, x_N: Tensor) -> Tensor:
        """Sends rows ``[N, ...]`` to the ranks of their experts by an all-to-all; returns ``[M, ...]``."""
        return _exchanged(x_N, self.received, self.sent, self.group)

    def send_back(self, x_M: Tensor) -> Tensor:
        """Sends rows ``[M, ...]`` to the ranks of their tokens by an all-to-all; returns ``[N, ...]``."""
        return _exchanged(x_M, self.sent, self.received, self.group)


def _exchanged(x: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(out_sizes), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), out_sizes, in_sizes, group=group)
    return out


def _plan(index_TK: Tensor, num_experts: int, group: dist.ProcessGroup) -> _Plan:
    """Counts the rows for each rank and sorts tokens by rank. The host waits for the counts, one all-to-all.

    Args:
        index_TK: experts of all ranks.
        num_experts: of this rank.
    """
    R = group.size()
    ranks = torch.arange(R, device=index_TK.device)
    owner_TK = index_TK // num_experts
    pairs_TR = (owner_TK[..., None] == ranks).sum(1)
    has_pairs_TR = pairs_TR > 0
    counts_R2 = torch.stack([has_pairs_TR.sum(0), pairs_TR.sum(0)], 1)
    received_R2 = torch.empty_like(counts_R2)
    dist.all_to_all_single(received_R2, counts_R2, group=group)
    routing = route(torch.where(has_pairs_TR, ranks, R), R)
    sent, received = torch.stack([counts_R2, received_R2]).tolist()
    rows = sum(rows for rows, _ in sent)
    routing = routing._replace(pair_S=routing.pair_S[:rows], expert_S=routing.expert_S[:rows])
    return _Plan(
        routing=routing,
        owner_TK=owner_TK,
        sent=[rows for rows, _ in sent],
        received=[rows for rows, _ in received],
        pairs=sum(pairs for _, pairs in received),
        group=group,
    )


def _refuse_second_order() -> None:
    refuse_second_order("expert parallelism", "keep all experts on each rank")


class _Dispatch(torch.autograd.Function):
    """Sends hidden states and the router's weights of each row to the ranks of its experts."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, hidden_TD: Tensor, weight_TK: Tensor, index_TK: Tensor) -> Any:
        ctx.plan = plan
        hidden_MD = plan.send(gather_rows(hidden_TD, plan.routing))
        # In one message.
        token_N = plan.token_N
        numbers_NK = weight_TK[token_N].to(torch.promote_types(weight_TK.dtype, torch.float32))
        bits = _BITS[numbers_NK.dtype]
        indices, numbers = plan.send(torch.cat([index_TK[token_N].to(bits), numbers_NK.view(bits)], 1)).chunk(2, 1)
        index_MK = indices.long()
        ctx.mark_non_differentiable(index_MK)
        return hidden_MD, numbers.contiguous().view(numbers_NK.dtype).to(weight_TK.dtype), index_MK

    @staticmethod
    def backward(ctx: Any, d_hidden_MD: Tensor, d_weight_MK: Tensor, _: None) -> Any:
        _refuse_second_order()
        plan: _Plan = ctx.plan
        d_hidden_TD = combine_rows(plan.send_back(d_hidden_MD), plan.routing)
        d_weight_NK = plan.send_back(d_weight_MK)
        if len(d_weight_NK) == 0:
            return None, d_hidden_TD, d_weight_NK.new_zeros(plan.owner_TK.shape), None
        # The rank of each expert has its gradient.
        R = plan.routing.row_TK.shape[1]
        owner_TK = plan.owner_TK.long().clamp(0, R - 1)
        row_TK = plan.routing.row_TK.long().gather(1, owner_TK)
        d_weight_TK = d_weight_NK.gather(0, row_TK.clamp(max=len(d_weight_NK) - 1))
        return None, d_hidden_TD, d_weight_TK.where(owner_TK == plan.owner_TK, 0.0), None


class _Combine(torch.autograd.Function):
    """Returns the rows of experts to the ranks of their tokens, and adds up those of each token."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, y_MD: Tensor) -> Tensor:
        ctx.plan = plan
        return combine_rows(plan.send_back(y_MD), plan.routing)

    @staticmethod
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[None, Tensor]:
        _refuse_second_order()
        return None, ctx.plan.send(gather_rows(d_y_TD.contiguous(), ctx.plan.routing))


class ComputesExperts(Protocol):
    """Computes the experts of this rank."""

    def __call__(self, hidden_MD: Tensor, index_MK: Tensor, weight_MK: Tensor, num_pairs: int) -> Tensor:
        """
        Args:
            index_MK: experts of this rank, and the number of them where an expert is on another rank.
            num_pairs: number of the others.
        """


@untraced
def sent_to_experts(
    compute: ComputesExperts,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Computes the weighted sum of each token's experts, ``[T, D]``, on the ranks that have them. All ranks of
    ``group`` call it; the host waits once, for counts.

    Args:
        index_TK: experts of all ranks, those of rank r from ``r * num_experts`` on.
        num_experts: of each rank.
    """
    plan = _plan(index_TK, num_experts, group)
    received = _Dispatch.apply(plan, hidden_TD.contiguous(), weight_TK, index_TK)  # type: ignore[no-untyped-call]
    hidden_MD, weight_MK, index_MK = received
    local_MK = index_MK - group.rank() * num_experts
    local_MK = local_MK.where((local_MK >= 0) & (local_MK < num_experts), num_experts)
    if len(hidden_MD) == 0:
        # A row of zeros for expert 0, so that every parameter has a gradient, which FSDP2 reduces, and the result one
        # to send back.
        hidden_MD, weight_MK = (torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in (hidden_MD, weight_MK))
        local_MK = local_MK.new_zeros(1, local_MK.shape[1])
        y_MD = compute(hidden_MD, local_MK, weight_MK, local_MK.numel())[:0]
    else:
        y_MD = compute(hidden_MD, local_MK, weight_MK, plan.pairs)
    return _Combine.apply(plan, y_MD)  # type: ignore[no-any-return, no-untyped-call]
