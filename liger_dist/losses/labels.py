"""Shifts labels to the logits that they belong to, checks them, and selects the tokens that have one.

Legend: T all tokens, K tokens that are computed. Ignored tokens are dropped before the first GEMM wherever the host
knows the number of valid ones without waiting for the GPU: labels on the CPU, or a :class:`LabelSummary` started at the
model's entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist.model.torch_modes import is_captured
from liger_dist_kernels import Backend, label_facts

from .collectives import device_assert


class LabelSummary:
    """Number of valid labels with their smallest and largest value, copied to the host while the model runs.

    Started at the model's entry and read in its lm_head, when the copy has usually finished.
    """

    def __init__(self, labels: Tensor, ignore_index: int, backend: Backend = "auto") -> None:
        facts = label_facts(labels.reshape(-1), ignore_index=ignore_index, backend=backend)
        self._host = torch.empty(3, dtype=torch.int64, pin_memory=True)
        self._host.copy_(facts.range_3, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    @staticmethod
    def start(labels: Tensor, ignore_index: int, backend: Backend = "auto") -> LabelSummary | None:
        """Starts the copy for labels on a GPU; returns None for labels on the CPU, and in a CUDA graph."""
        if not labels.is_cuda or is_captured():
            return None
        if labels.numel() == 0 or labels.is_floating_point():
            return None
        return LabelSummary(labels, ignore_index, backend)

    def read(self) -> tuple[int, int, int]:
        """Waits for the copy and returns ``(count, smallest, largest)``."""
        self._done.synchronize()
        count, smallest, largest = self._host.tolist()
        return count, smallest, largest


@dataclass(frozen=True)
class Targets:
    """Tokens of a loss, with their labels."""

    labels_T: Tensor
    """int64, on the device of the hidden states; -1 for an ignored token"""
    index_T: Tensor | None
    """positions of these tokens among all tokens, negative for padding to a fixed number; None for all tokens"""
    divisor: Tensor | int
    """number of labels that are not ignored, but at least 1; 0-d fp32 where only the device knows it"""

    def take(self, values_T: Tensor) -> Tensor:
        """Selects the rows of these tokens, ``[K, ...]``; differentiable."""
        return values_T if self.index_T is None else take_rows(values_T, self.index_T)

    def of_tokens(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Selects the values of these tokens, ``[K, ...]``, from values in the labels' ``shape`` (and further dims)."""
        values = values.to(self.labels_T.device)
        return self.take(values.reshape(shape.numel(), *values.shape[len(shape) :]))

    def spread(self, values_K: Tensor, shape: torch.Size) -> Tensor:
        """Scatters ``values_K`` ``[K, ...]`` to the labels' ``shape``, zero for all other tokens."""
        if self.index_T is not None:
            values_K = put_rows(values_K, self.index_T, shape.numel())
        return values_K.reshape((*shape, *values_K.shape[1:]))


@dataclass(frozen=True)
class AlignedLabels:
    """Labels of a call that belong to the logits at their positions."""

    labels: Tensor
    """``[B, S]``"""
    of_next: Tensor | None
    """the same labels before they were shifted; None for labels that were aligned already"""

    def shift(self, values: Tensor) -> Tensor:
        """Moves ``values`` ``[B, S]``, one for each label of the call, along with the labels."""
        return values if self.of_next is None else F.pad(values[..., 1:], (0, 1))


def align_labels(
    labels: Tensor,
    *,
    are_aligned: bool,
    mask: Tensor | None,
    shape: torch.Size,
    ignore_index: int,
    vocab_size: int | None,
) -> AlignedLabels:
    """Checks the labels of a call and shifts them to the logits that score them.

    Args:
        are_aligned: True for labels that belong to the logits at their positions already.
        mask: ``[B, S]``; labels where it is 0 are ignored. None for all. Not for aligned labels.
        shape: of the tokens.
        vocab_size: checks that labels on the CPU are classes; None for no check.

    Raises:
        LigerDistError: they are not one class for each token.
    """
    check_labels(labels, tokens_of="inputs", shape=shape, ignore_index=ignore_index)
    aligned = AlignedLabels(labels, None)
    if not are_aligned:
        labels = labels.long() if mask is None else labels.long().masked_fill(mask.to(labels.device) == 0, ignore_index)
        aligned = AlignedLabels(F.pad(labels[..., 1:], (0, 1), value=ignore_index), labels)
    if vocab_size is not None and labels.device.type == "cpu":
        check_range(aligned.labels, vocab_size=vocab_size, ignore_index=ignore_index)
    return aligned


def shifted_further(labels: Tensor, ahead: int, *, ignore_index: int) -> Tensor:
    """Shifts aligned labels ``[B, S]`` to the left by ``ahead`` tokens."""
    return F.pad(labels[:, ahead:], (0, min(ahead, labels.shape[1])), value=ignore_index)


def cut_at_documents(labels: Tensor, position_ids: Tensor | None, distance: int, *, ignore_index: int) -> Tensor:
    """Ignores the labels ``[B, S]`` of tokens whose document ends within ``distance`` tokens: documents begin where
    ``position_ids`` are 0. Unchanged without ``position_ids``."""
    if position_ids is None or distance == 0:
        return labels
    while position_ids.dim() > 2:
        position_ids = position_ids[0]  # Those of the text, before those of images.
    documents = (position_ids == 0).cumsum(-1).expand(labels.shape).to(labels.device)
    later = F.pad(documents[:, distance:], (0, min(distance, labels.shape[1])), value=-1)
    return torch.where(later == documents, labels, ignore_index)


def check_labels(labels: Tensor, *, tokens_of: str, shape: torch.Size, ignore_index: int) -> None:
    """Refuses labels that are not one integer for each of ``shape`` tokens, before anything is computed.

    Raises:
        LigerDistError: labels are not integers, or not of ``shape``.
    """
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise LigerDistError(
            f"labels have dtype {labels.dtype}; expected class indices of dtype torch.int64. Convert them with "
            "labels.long(); class probabilities are not supported."
        )
    if labels.shape != shape:
        raise LigerDistError(
            f"labels have shape {tuple(labels.shape)}; expected one label for each token of the {tokens_of}, shape "
            f"{tuple(shape)}. Pad or cut the labels to the input's length and give tokens without a target the label "
            f"{ignore_index}."
        )


def select_targets(
    labels: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    device: torch.device,
    summary: LabelSummary | None = None,
    max_valid_tokens: int | None = None,
    may_drop: bool = True,
    backend: Backend = "auto",
) -> Targets:
    """Flattens the labels of valid tokens (with ``may_drop=False``: of all tokens), and checks that they lie in ``[0,
    vocab_size)``.

    The host does not read labels on a GPU without a ``summary``: a device-side assertion checks their range. None of
    them is dropped without ``max_valid_tokens``. With it, that many are kept for any labels, so that a CUDA graph can
    be replayed with different ones; another assertion checks their number.
    """
    labels_T = labels.reshape(-1).long()
    if labels_T.device.type == "cpu" and not torch.compiler.is_compiling():
        valid_T = labels_T != ignore_index
        index_T = valid_T.nonzero()[:, 0]
        kept_T = labels_T[index_T]
        check_range(kept_T, vocab_size=vocab_size, ignore_index=ignore_index)
        divisor = max(kept_T.numel(), 1)
        if not may_drop or kept_T.numel() == labels_T.numel():
            return Targets(torch.where(valid_T, labels_T, -1).to(device, non_blocking=True), None, divisor)
        return Targets(kept_T.to(device, non_blocking=True), index_T.to(device, non_blocking=True), divisor)
    labels_T = labels_T.to(device)
    if summary is None:
        facts = label_facts(labels_T, ignore_index=ignore_index, vocab_size=vocab_size, backend=backend)
        device_assert(
            facts.is_in_range, f"a label lies outside [0, {vocab_size}) and is not ignore_index {ignore_index}"
        )
        if max_valid_tokens is None or max_valid_tokens >= labels_T.numel() or not may_drop:
            return Targets(facts.labels_T, None, facts.divisor)
        device_assert(
            facts.range_3[0] <= max_valid_tokens, f"more than max_valid_tokens {max_valid_tokens} labels are valid"
        )
        index_T = torch.nonzero_static(facts.labels_T >= 0, size=max_valid_tokens, fill_value=-1)[:, 0]
        kept_T = torch.where(index_T < 0, -1, labels_T[index_T.clamp_min(0)])
        return Targets(kept_T, index_T, facts.divisor)
    count, smallest, largest = summary.read()
    if count > 0:
        _check_range(smallest, largest, vocab_size, ignore_index)
    valid_T = labels_T != ignore_index
    if not may_drop or count == labels_T.numel():
        return Targets(torch.where(valid_T, labels_T, -1), None, max(count, 1))
    index_T = torch.nonzero_static(valid_T, size=count)[:, 0]
    return Targets(labels_T[index_T], index_T, max(count, 1))


def check_range(labels: Tensor, *, vocab_size: int, ignore_index: int) -> None:
    """Refuses labels, on the CPU, that are neither in ``[0, vocab_size)`` nor ``ignore_index``."""
    valid = labels[labels != ignore_index]
    if valid.numel() > 0:
        _check_range(int(valid.min()), int(valid.max()), vocab_size, ignore_index)


def _check_range(smallest: int, largest: int, vocab_size: int, ignore_index: int) -> None:
    if smallest < 0 or largest >= vocab_size:
        value = smallest if smallest < 0 else largest
        raise LigerDistError(
            f"a label is {value} but lm_head has {vocab_size} rows: expected labels in [0, "
            f"{vocab_size}), or {ignore_index} for tokens without a target. Usually the tokenizer is larger than the "
            "model: call model.resize_token_embeddings(len(tokenizer)), or use the tokenizer that belongs to the "
            "model."
        )


class _TakeRows(torch.autograd.Function):
    """Indexing whose backward writes each row once; torch's index_select sorts the indices to accumulate."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, index_K: Tensor) -> Tensor:
        ctx.save_for_backward(index_K)
        ctx.num_rows = x_TD.shape[0]
        return x_TD.index_select(0, index_K.clamp_min(0))

    @staticmethod
    def backward(ctx: Any, d_KD: Tensor) -> tuple[Tensor, None]:
        (index_K,) = ctx.saved_tensors
        return put_rows(d_KD, index_K, ctx.num_rows), None


def take_rows(x_TD: Tensor, index_K: Tensor) -> Tensor:
    """Selects the rows ``index_K`` of ``x_TD``: ``[K, ...]``; differentiable."""
    taken: Tensor = _TakeRows.apply(x_TD, index_K)  # type: ignore[no-untyped-call]
    return taken


def put_rows(values_K: Tensor, index_K: Tensor, num_rows: int) -> Tensor:
    """Writes ``values_K`` to the rows ``index_K``, zeros elsewhere: ``[num_rows, ...]``; differentiable."""
    # The last row is for padding.
    rows = values_K.new_zeros((num_rows + 1, *values_K.shape[1:]))
    return rows.index_copy_(0, torch.where(index_K < 0, num_rows, index_K), values_K)[:num_rows]
