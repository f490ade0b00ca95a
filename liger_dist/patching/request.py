"""One call's labels on their way to the head, and its loss on the way back beside the graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_dist.losses.labels import LabelSummary, check_labels
from liger_dist.sharding.tensor_parallel import placed_like

if TYPE_CHECKING:
    from .seam import Seam

IGNORE_INDEX = -100


@dataclass
class LossRequest:
    """One call's labels on their way in, and its loss on the way out."""

    seam: Seam
    labels: Tensor
    is_shifted: bool
    num_items_in_batch: Tensor | float | None
    ignore_index: int
    summary: LabelSummary | None
    value: Tensor | None = None
    """the finished loss, outside the graph"""
    upstream: Tensor | None = field(default=None, repr=False)
    delivered: bool = False

    def compute(self, head: nn.Linear, hidden_states: Tensor) -> Tensor:
        """Computes the loss; the logits without width that carry it are returned."""
        check_labels(
            self.labels,
            tokens_of="hidden states",
            shape=hidden_states.shape[:-1],
            ignore_index=self.ignore_index,
        )
        output = self.seam.compute(self, head, hidden_states)
        self.value = output.loss.detach()
        shape, dtype = hidden_states.shape[:-1], hidden_states.dtype
        carried: Tensor = _LossToLogits.apply(output.loss, self, shape, dtype)  # type: ignore[no-untyped-call]
        return placed_like(hidden_states, carried)

    def shifted_labels(self) -> Tensor:
        """Each token's next label, the last one's ignored."""
        if self.is_shifted:
            return self.labels
        return nn.functional.pad(self.labels[..., 1:].long(), (0, 1), value=self.ignore_index)

    def differences(self, given: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        """Whether the model hands its loss function other arguments than this loss was computed with. Tensors may have
        been moved on the way, so only their presence is compared."""
        return (
            ("num_items_in_batch", (given.get("num_items_in_batch") is None) != (self.num_items_in_batch is None)),
            ("shift_labels", (given.get("shift_labels") is None) == self.is_shifted),
            ("ignore_index", given.get("ignore_index", IGNORE_INDEX) != self.ignore_index),
        )


class _LossToLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, request: LossRequest, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.request = request
        return loss.new_empty((*shape, 0), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None, None, None]:
        upstream, ctx.request.upstream = ctx.request.upstream, None
        return upstream, None, None, None


class LogitsToLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: LossRequest) -> Tensor:
        assert request.value is not None
        ctx.request = request
        ctx.save_for_backward(logits)
        return request.value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        ctx.request.upstream = upstream
        return torch.zeros_like(logits), None


def start_summary(labels: Tensor, is_shifted: bool, ignore_index: int) -> LabelSummary | None:
    """The count and range of the labels that will count, fetched from the GPU beside the model's run; None on the
    CPU."""
    if not labels.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    if not is_shifted:
        labels = labels[..., 1:]
    return LabelSummary(labels, ignore_index) if labels.numel() > 0 and not labels.is_floating_point() else None
