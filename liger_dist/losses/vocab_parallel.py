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


def check_same_labels(labels: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuses labels that differ between processes that have to see the same tokens. Waits for the device.

    Raises:
        LigerDistError: on every process of the group alike.
    """
    positions = torch.arange(1, labels.numel() + 1, device=labels.device)
    checksum = (labels.reshape(-1).long() * positions).sum()
    own = torch.stack([torch.tensor(labels.numel(), device=labels.device), checksum]).to(device)
    everyone = _gather(own, group)
    if bool((everyone != everyone[0]).any()):
        raise LigerDistError(
            f"the {group.size()} processes that share the output embedding's rows (tensor parallelism) have different "
            f"labels: (tokens, checksum) {[tuple(row) for row in everyone.tolist()]}; expected one batch for all of "
            "them. Give the data loader's sampler the rank and size of the data-parallel axis, not of the world."
        )
