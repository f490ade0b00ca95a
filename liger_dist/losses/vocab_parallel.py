"""Fused linear cross entropy of a head whose rows are split over a process group, all of it seeing the same tokens.

Legend: T tokens that count, D hidden, V vocabulary, G processes.

Each process scores all tokens against its own rows. One all-gather of the softmax statistics for each chunk of tokens
(three numbers a token; five with entropy and label smoothing) makes the loss exact and the gradient of the own rows
complete; the hidden states' gradient is summed over the group in the backward. This is the vocabulary-parallel loss
of Shoeybi et al. 2019, "Megatron-LM", section 3, without the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist_kernels import SoftmaxStatistics, VocabularySlice, merge_statistics

from .arguments import Execution, LossArguments, LossOutput
from .linear_cross_entropy import fused_linear_cross_entropy


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """This process's rows of a head."""

    group: dist.ProcessGroup
    start: int
    """first row"""
    vocab_size: int
    """rows of the whole head"""

    def slice(self) -> VocabularySlice:
        """For the kernels, which know nothing of processes."""
        largest = -(-self.vocab_size // self.group.size())
        return VocabularySlice(
            start=self.start, vocab_size=self.vocab_size, largest=largest, complete=self._merge_over_group
        )

    def _merge_over_group(self, own: SoftmaxStatistics) -> SoftmaxStatistics:
        if own.max_T.numel() == 0:
            return own
        fields = [field for field in own if field is not None]
        gathered = iter(_gather(torch.stack(fields), self.group).unbind(1))
        slices: list[Any] = [None if field is None else next(gathered) for field in own]
        return merge_statistics(SoftmaxStatistics(*slices))


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[G, *shape]`` from every process's tensor of one ``shape``."""
    everyone = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather(list(everyone.unbind(0)), tensor, group=group)
    return everyone


class _SumGradient(torch.autograd.Function):
    """The tensor itself; in the backward, the sum of its gradients over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


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
        hidden_states = _SumGradient.apply(hidden_states, shard.group)  # type: ignore[no-untyped-call]
    return fused_linear_cross_entropy(
        hidden_states, weight_local, bias_local, labels, loss=loss, execution=execution, vocabulary=shard.slice()
    )


def check_same_tokens(hidden_states: Tensor, labels: Tensor, group: dist.ProcessGroup, *, waits: bool) -> None:
    """Refuses tokens that differ between processes that have to see the same ones: their labels exactly, their hidden
    states beyond rounding. One all-gather of seven numbers.

    Args:
        waits: read the result now. Otherwise, on a GPU, an assertion on the device ends the program.

    Raises:
        LigerDistError: on every process of the group alike.
    """
    everyone_GF = _gather(_fingerprint(hidden_states, labels), group)
    differences_GF = (everyone_GF - everyone_GF[0]).abs()
    other_labels = (differences_GF[:, :2] > 0).any()
    other_hidden = (differences_GF[:, 2:] > 0.05 * everyone_GF[0, 2]).any()
    sentence = (
        f"the {group.size()} processes that share the output embedding's rows (tensor parallelism) see different "
        "tokens: expected one batch for all of them. Give the data loader's sampler, and the seeds of dropout, the "
        "rank of the data-parallel axis and not that of the world"
    )
    if not waits and hidden_states.is_cuda:
        torch._assert_async(~(other_labels | other_hidden), sentence)
    elif bool(other_labels):
        raise LigerDistError(f"{sentence}. Their labels: (tokens, checksum) {everyone_GF[:, :2].long().tolist()}.")
    elif bool(other_hidden):
        raise LigerDistError(f"{sentence}. Their labels agree and their hidden states do not.")


def _fingerprint(hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Number of labels and a checksum of them; norm of the hidden states and four projections of them, which move by as
    much as the hidden states do."""
    hidden_TD = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
    device = hidden_TD.device
    positions = torch.arange(1, labels.numel() + 1, device=labels.device)
    # Filled on the device: a number sent there would make the host wait.
    count = torch.full((), labels.numel(), dtype=torch.int64, device=labels.device)
    counted = torch.stack([count, (labels.reshape(-1) * positions).sum()])

    def waves(size: int) -> Tensor:
        steps_4 = 1.1 + 1.3 * torch.arange(4, dtype=torch.float64, device=device)
        return torch.cos(steps_4[:, None] * torch.arange(1, size + 1, dtype=torch.float64, device=device))

    projected_T4 = hidden_TD @ waves(hidden_TD.shape[1]).T.to(hidden_TD.dtype)
    projections_4 = (projected_T4.double() * waves(hidden_TD.shape[0]).T).sum(0)
    norm = torch.linalg.vector_norm(hidden_TD, dtype=torch.float32 if hidden_TD.dtype != torch.float64 else None)
    return torch.cat([counted.double().to(device, non_blocking=True), norm.double()[None], projections_4])
