# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Marks ignored labels and counts the valid ones, in one launch.

Legend: T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import ANY_LENGTH, Backend, dense, launch, runs_triton
from .launches import LABEL_FACTS

_SMALLEST, _LARGEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)


class LabelFacts(NamedTuple):
    """Labels, and count and range of those that are not ignored; on the device of the labels."""

    labels_T: Tensor
    """``[T]`` int64, -1 for an ignored token"""
    range_3: Tensor
    """int64: the number of labels that are not ignored, the smallest and the largest of them (without any, the largest
    and the smallest int64)"""
    is_in_range: Tensor
    """0-d bool: True if all of them lie in ``[0, vocab_size)``"""
    divisor: Tensor
    """0-d fp32: their number, but at least 1, for a mean over the tokens"""


@triton.jit(**ANY_LENGTH)
def _label_facts_kernel(
    labels_ptr, marked_ptr, range_ptr, is_in_range_ptr, divisor_ptr, T, ignore_index, vocab_size, BLOCK: tl.constexpr
):
    count = tl.zeros((BLOCK,), tl.int64)
    smallest = tl.full((BLOCK,), _LARGEST, tl.int64)
    largest = tl.full((BLOCK,), _SMALLEST, tl.int64)
    # 0, as a value on the device: there is one program, and Triton would unroll a loop that begins with a constant.
    start = tl.program_id(0)
    while start < T:
        offs = start + tl.arange(0, BLOCK)
        label = tl.load(labels_ptr + offs, mask=offs < T, other=0).to(tl.int64)
        is_valid = (offs < T) & (label != ignore_index)
        tl.store(marked_ptr + offs, tl.where(is_valid, label, -1), mask=offs < T)
        count += is_valid.to(tl.int64)
        smallest = tl.where(is_valid & (label < smallest), label, smallest)
        largest = tl.where(is_valid & (label > largest), label, largest)
        start += BLOCK
    total, lowest, highest = tl.sum(count), tl.min(smallest), tl.max(largest)
    tl.store(range_ptr, total)
    tl.store(range_ptr + 1, lowest)
    tl.store(range_ptr + 2, highest)
    tl.store(is_in_range_ptr, (total == 0) | ((lowest >= 0) & (highest < vocab_size)))
    tl.store(divisor_ptr, tl.where(total == 0, 1, total).to(tl.float32))


def label_facts(
    labels_T: Tensor, *, ignore_index: int, vocab_size: int = 2**31 - 1, backend: Backend = "auto"
) -> LabelFacts:
    """Marks ignored labels, counts the valid ones and finds their range.

    Args:
        labels_T: ``[T]``, any integers. Compared as int64: an unsigned label may equal ``ignore_index`` only in
            its dtype.
        vocab_size: for ``is_in_range``.
    """
    if not runs_triton(labels_T, backend):
        return label_facts_reference(labels_T, ignore_index=ignore_index, vocab_size=vocab_size)
    marked_T = torch.empty(labels_T.shape, dtype=torch.int64, device=labels_T.device)
    range_3 = torch.empty(3, dtype=torch.int64, device=labels_T.device)
    is_in_range = torch.empty((), dtype=torch.bool, device=labels_T.device)
    divisor = torch.empty((), dtype=torch.float32, device=labels_T.device)
    # One program reads all of them: 128 KiB for 16,384 tokens.
    launch(
        _label_facts_kernel,
        (1,),
        dense(labels_T),
        marked_T,
        range_3,
        is_in_range,
        divisor,
        labels_T.numel(),
        ignore_index,
        vocab_size,
        **LABEL_FACTS,
    )
    return LabelFacts(marked_T, range_3, is_in_range, divisor)


def label_facts_reference(labels_T: Tensor, *, ignore_index: int, vocab_size: int) -> LabelFacts:
    """Computes :func:`label_facts` in plain torch: the path on CPU."""
    labels_T = labels_T.long()
    valid_T = labels_T != ignore_index
    limits = torch.iinfo(torch.int64)
    count = valid_T.sum()
    # Appends one value each, for the case without any label.
    smallest = torch.cat([torch.where(valid_T, labels_T, limits.max), labels_T.new_full((1,), limits.max)]).min()
    largest = torch.cat([torch.where(valid_T, labels_T, limits.min), labels_T.new_full((1,), limits.min)]).max()
    return LabelFacts(
        torch.where(valid_T, labels_T, -1),
        torch.stack([count, smallest, largest]),
        (count == 0) | ((smallest >= 0) & (largest < vocab_size)),
        count.clamp_min(1).to(torch.float32),
    )
