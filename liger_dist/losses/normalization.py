"""What a reduced loss is divided by.

Legend: T tokens. All of it stays on the device: no number is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.errors import LigerDistError

Reduction = Literal["mean", "sum", "none"]


def check_reduction(reduction: str, num_items_in_batch: Tensor | float | None) -> None:
    """Refuses an unknown reduction, and a count of items that the reduction would not use."""
    if reduction not in ("mean", "sum", "none"):
        raise LigerDistError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'.")
    if num_items_in_batch is None:
        return
    if reduction != "mean":
        raise LigerDistError(
            f"num_items_in_batch was given with reduction={reduction!r}, which divides by nothing. Use "
            "reduction='mean', which divides by num_items_in_batch, or leave it out."
        )
    if isinstance(num_items_in_batch, Tensor):
        if num_items_in_batch.numel() != 1:
            raise LigerDistError(
                f"num_items_in_batch has shape {tuple(num_items_in_batch.shape)}; expected one number. Sum it over "
                "processes or micro-batches first."
            )
    elif not (isinstance(num_items_in_batch, Real) or getattr(num_items_in_batch, "shape", None) == ()) or (
        num_items_in_batch <= 0
    ):
        raise LigerDistError(
            f"num_items_in_batch is {num_items_in_batch!r}; expected a count above 0, a number or a tensor of one "
            "element. A batch without any token that counts has no mean: leave it out, or divide by 1."
        )


def denominator(
    weights_T: Tensor | None,
    labels_T: Tensor,
    *,
    reduction: Reduction,
    num_items_in_batch: Tensor | float | None,
    dtype: torch.dtype,
    groups: Sequence[dist.ProcessGroup] = (),
    divide_factor: float = 1.0,
) -> Tensor:
    """0-d tensor that the sum of token losses is divided by.

    A mean divides by ``num_items_in_batch`` when given, otherwise by the weights of the valid tokens (1 each without
    ``weights_T``, as :func:`torch.nn.functional.cross_entropy`). A mean over nothing divides by 1: its loss is 0, not
    NaN, so that one empty rank does not poison the others.

    With ``groups``, the tokens of all their processes are counted (an all-reduce of one number for each), and the
    count is divided by ``divide_factor``, the number by which the framework divides summed gradients afterwards.
    """
    device = labels_T.device
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=device)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(device=device, dtype=dtype, non_blocking=True).reshape(())
    if num_items_in_batch is not None:
        return torch.full((), float(num_items_in_batch), dtype=dtype, device=device)
    valid_T = labels_T >= 0
    count = valid_T.sum(dtype=dtype) if weights_T is None else torch.where(valid_T, weights_T, 0).sum(dtype=dtype)
    for group in groups:
        dist.all_reduce(count, group=group)
    count = count / divide_factor
    return torch.where(count == 0, 1.0, count)
