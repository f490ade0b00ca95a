"""Fused linear cross entropy of row shards, for ranks that have the same tokens (tensor parallelism).

Legend: T tokens of this rank with a label, V rows of this rank, D hidden, G ranks.

Every rank scores the same tokens against its row shard. One all-gather of the softmax statistics per chunk (three
values per token; five with entropy and label smoothing) makes the loss exact and the gradient of the row shard
complete. This is the vocabulary-parallel loss of Shoeybi et al. 2019, "Megatron-LM", section 3, without full logits.

The tokens are the same on all ranks (tensor parallelism; :class:`RowShard`), or each rank has different ones, which are
exchanged (:class:`.token_exchange.ExchangedRowShard`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist_kernels import (
    Backend,
    ChosenLogits,
    HeadSlice,
    SoftmaxStatistics,
    merge_chosen,
    merge_statistics,
)

from .collectives import device_assert, gather
from .execution import Execution
from .linear_cross_entropy import fused_linear_cross_entropy
from .outputs import LossOutput
from .rows import HeadRows, Problem
from .spec import LossSpec


@dataclass(frozen=True, kw_only=True)
class RowShard(HeadRows):
    """Row shard of lm_head on this rank, for tokens that every rank of the group has."""

    group: dist.ProcessGroup

    @property
    def largest(self) -> int:
        return -(-self.vocab_size // self.group.size())

    def with_dtype(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns them unchanged: products round row shards themselves."""
        return weight, bias

    @property
    def is_full(self) -> bool:
        return False

    def keeps_logits(self, hidden_TD: Tensor, weight_VD: Tensor, problem: Problem) -> bool:
        """Returns False: the decision would depend on a rank's number of tokens, but all ranks must issue the same
        collectives."""
        return False

    def head(self, weight_VD: Tensor, bias_V: Tensor | None, problem: Problem) -> HeadSlice:
        return HeadSlice(
            weight_VD=weight_VD,
            bias_V=bias_V,
            vocab_size=self.vocab_size,
            start=self.start,
            complete_statistics=partial(complete_statistics, group=self.group, backend=problem.execution.backend),
            complete_chosen=partial(complete_chosen, group=self.group),
            gather_slices=partial(gather, group=self.group),
            weight_sum=problem.weight_sum,
        )


def complete_statistics(local: SoftmaxStatistics, *, group: dist.ProcessGroup, backend: Backend) -> SoftmaxStatistics:
    """All-gathers the statistics of each rank's slice of the logits and merges them to those of full rows."""
    if local.max_T.numel() == 0:
        return local
    fields = [field for field in local if field is not None]
    gathered = iter(gather(torch.stack(fields), group).unbind(1))
    slices: list[Any] = [None if field is None else next(gathered) for field in local]
    return merge_statistics(SoftmaxStatistics(*slices), backend)


def complete_chosen(local: ChosenLogits, *, group: dist.ProcessGroup) -> ChosenLogits:
    """All-gathers the chosen logits of each rank's slice of the logits and merges them to those of full rows."""
    if all(field is None or field.numel() == 0 for field in local):
        return local
    slices_GF = [[None] * group.size() if field is None else gather(field, group).unbind(0) for field in local]
    return merge_chosen([ChosenLogits(*fields) for fields in zip(*slices_GF, strict=True)])


class SumGradient(torch.autograd.Function):
    """Identity; its backward all-reduces the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.to(gradient.dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def vocab_parallel_linear_cross_entropy(
    hidden_states: Tensor,
    weight_local: Tensor,
    bias_local: Tensor | None,
    labels: Tensor,
    *,
    shard: RowShard,
    spec: LossSpec,
    execution: Execution,
    sums_gradient: bool = True,
) -> LossOutput:
    """Computes the loss over the rows of all ranks, equal on every rank of ``shard.group``.

    Args:
        hidden_states: ``[..., D]``, the same on every rank of the group.
        weight_local: ``[V_local, D]``, this rank's rows, possibly none.
        bias_local: ``[V_local]``.
        labels: ``[...]`` in ``[0, V)`` or ``ignore_index``, the same on every rank of the group.
        sums_gradient: True to all-reduce the hidden states' gradient over the group; otherwise it stays a partial sum.
    """
    if sums_gradient:
        hidden_states = SumGradient.apply(hidden_states, shard.group)  # type: ignore[no-untyped-call]
    return fused_linear_cross_entropy(
        hidden_states, weight_local, bias_local, labels, spec=spec, execution=execution, rows=shard
    )


def check_same_tokens(
    hidden_states: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup,
    *,
    spec: LossSpec,
    waits: bool,
    compares_hidden: bool = True,
) -> None:
    """Refuses tokens that differ between ranks of a tensor-parallel group: labels, temperatures, token_ids, soft labels
    and outputs exactly, hidden states beyond rounding. One all-gather of twelve values.

    Args:
        waits: True to read the result now; otherwise, on a GPU, a device-side assertion fails.
        compares_hidden: False to compare the other arguments only.

    Raises:
        LigerDistError: on every rank of the group.
    """
    gathered_GF = gather(
        torch.cat([_fingerprint(hidden_states, labels), _checksums(spec, hidden_states.device)]), group
    )
    differences_GF = (gathered_GF - gathered_GF[0]).abs()
    other_labels = (differences_GF[:, :2] > 0).any()
    other_hidden = (differences_GF[:, 2:7] > 0.05 * gathered_GF[0, 2]).any() & compares_hidden
    other_arguments = (differences_GF[:, 7:] > 0).any()
    sentence = (
        f"the {group.size()} ranks of the tensor-parallel group of lm_head see different tokens; expected one batch "
        "for all of them. Give the data loader's sampler, and the seeds of dropout, the rank of the data-parallel axis "
        "and not the global rank"
    )
    if not waits and hidden_states.is_cuda:
        device_assert(~(other_labels | other_hidden | other_arguments), sentence)
    elif bool(other_labels):
        raise LigerDistError(f"{sentence}. Their labels: (tokens, checksum) {gathered_GF[:, :2].long().tolist()}.")
    elif bool(other_hidden):
        raise LigerDistError(f"{sentence}. Their labels agree and their hidden states do not.")
    elif bool(other_arguments):
        given = "temperature, token_ids, soft_labels or outputs"
        raise LigerDistError(f"{sentence}. Their labels agree, and their {given} do not.")


def _checksums(spec: LossSpec, device: torch.device) -> Tensor:
    """Computes checksums ``[5]`` of the options and outputs, the temperatures, the token ids and the soft labels of a
    loss."""
    soft = spec.soft
    given = (spec.token_temperature, spec.token_ids, *((None, None) if soft is None else (soft.ids, soft.probs)))
    shapes = [None if values is None else tuple(values.shape) for values in given]
    asked = f"{spec.options} {spec.reduction} {sorted(spec.outputs)} {spec.differentiable} {spec.top_k} {shapes}"
    asked += f"{None if soft is None else soft.remainder} {spec.distillation}"
    sums = [torch.full((), float(zlib.crc32(asked.encode())), dtype=torch.float64, device=device)]
    for values in given:
        if values is None:
            sums.append(torch.zeros((), dtype=torch.float64, device=device))
            continue
        positions = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
        sums.append((values.detach().reshape(-1).double() * positions.sqrt()).sum().to(device))
    return torch.stack(sums)


def _fingerprint(hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Computes ``[7]``: number and checksum of the labels; norm and four projections of the hidden states."""
    hidden_TD = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
    device = hidden_TD.device
    positions = torch.arange(1, labels.numel() + 1, device=labels.device)
    # Filled on the device: copying a value to it would synchronise the host.
    count = torch.full((), labels.numel(), dtype=torch.int64, device=labels.device)
    counted = torch.stack([count, (labels.reshape(-1) * positions).sum()])

    def waves(size: int) -> Tensor:
        steps_4 = 1.1 + 1.3 * torch.arange(4, dtype=torch.float64, device=device)
        return torch.cos(steps_4[:, None] * torch.arange(1, size + 1, dtype=torch.float64, device=device))

    projected_T4 = hidden_TD @ waves(hidden_TD.shape[1]).T.to(hidden_TD.dtype)
    projections_4 = (projected_T4.double() * waves(hidden_TD.shape[0]).T).sum(0)
    norm = torch.linalg.vector_norm(hidden_TD, dtype=torch.float32 if hidden_TD.dtype != torch.float64 else None)
    return torch.cat([counted.double().to(device, non_blocking=True), norm.double()[None], projections_4])
