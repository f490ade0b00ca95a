"""Draft vocabularies: the classes of a draft's lm_head are some rows of its target's vocabulary.

Legend: C classes of the draft, V vocabulary of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError

from .collectives import require

_WAY_OUT = "Pass the mask t2d as t2d.nonzero()[:, 0], and EAGLE-3's offsets d2t as d2t + torch.arange(len(d2t))."


def draft_labels(labels: Tensor, rows: Tensor, vocab_size: int, *, ignore_index: int = -100) -> Tensor:
    """Maps token ids of a target to the classes of its draft; returns ``[...]`` int64, ``ignore_index`` for tokens that
    are no class of the draft.

    Args:
        labels: ``[...]`` integers in ``[0, vocab_size)`` or ``ignore_index``.
        rows: ``[C]``, the target's token id of each class of the draft, in any order.
        vocab_size: rows of the target's lm_head.
        ignore_index: label of tokens that are ignored.

    Raises:
        LigerDistError: rows that are not different token ids, or labels that are none; on a GPU by a device-side
            assertion.
    """
    check_rows(rows, vocab_size=vocab_size, name="rows")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise LigerDistError(f"labels have dtype {labels.dtype}; expected token ids of dtype torch.int64.")
    ids = labels.long()
    is_ignored = ids == ignore_index
    require(
        (is_ignored | ((ids >= 0) & (ids < vocab_size))).all(),
        f"a label lies outside [0, {vocab_size}) and is not ignore_index {ignore_index}; expected token ids of the "
        "target",
        lambda: f"The smallest is {ids[~is_ignored].min().item()} and the largest {ids[~is_ignored].max().item()}.",
    )
    rows = rows.to(labels.device)
    classes_V = torch.full((vocab_size,), ignore_index, device=labels.device)
    classes_V[rows.long()] = torch.arange(len(rows), device=labels.device)
    return torch.where(is_ignored, ignore_index, classes_V[ids.clamp(0, vocab_size - 1)])


def check_rows(rows: Tensor, *, vocab_size: int, name: str, num_classes: int | None = None) -> None:
    """Refuses ``rows`` that are not different token ids of the target, one for each class of the draft; on a GPU,
    device-side assertions check their values.

    Args:
        num_classes: rows of the draft's lm_head; None for any number.

    Raises:
        LigerDistError: with the value, what was expected and the way out.
    """
    if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
        raise LigerDistError(
            f"{name} has shape {tuple(rows.shape)} and dtype {rows.dtype}; expected one token id of the target for "
            f"each class of the draft, of dtype torch.int64 or torch.int32. {_WAY_OUT}"
        )
    if num_classes is not None and len(rows) != num_classes:
        raise LigerDistError(
            f"{name} has {len(rows)} token ids and the draft's lm_head has {num_classes} rows; expected one token id "
            f"of the target for each. {_WAY_OUT}"
        )
    require(
        ((rows >= 0) & (rows < vocab_size)).all(),
        f"{name} has a token id outside [0, {vocab_size}), the rows of the target's lm_head",
        lambda: f"The smallest is {rows.min().item()} and the largest {rows.max().item()}. {_WAY_OUT}",
    )
    ordered = rows.sort().values
    is_twice = ordered[1:] == ordered[:-1]
    require(
        ~is_twice.any(),
        f"{name} has a token id twice; expected different rows of the target's lm_head",
        lambda: f"The first one is {ordered[1:][is_twice][0].item()}. {_WAY_OUT}",
    )
