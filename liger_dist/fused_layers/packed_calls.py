"""Reads the documents of a call from its arguments, once for all layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError

from .document_rows import DocumentRows

POSITIONS, LENGTHS, SEQ_IDX = "position_ids", "cu_seq_lens_q", "seq_idx"
"""arguments of a model that separate packed documents; :data:`LENGTHS` comes with three more of FlashAttention"""
WAYS: tuple[tuple[str, ...], ...] = ((POSITIONS,), (LENGTHS,), (SEQ_IDX,), (LENGTHS, SEQ_IDX))
"""arguments that may separate documents; positions in addition to lengths add nothing"""
OF_DOCUMENTS = (LENGTHS, "cu_seq_lens_k", "max_length_q", "max_length_k", SEQ_IDX)
"""keywords of packed documents, which rows of single documents do not have"""
INPUTS = ("input_ids", "inputs_embeds")
SEEN = {
    POSITIONS: "position_ids restart without a 2-D attention_mask",
    LENGTHS: "cu_seq_lens_q has more documents than rows",
    SEQ_IDX: "seq_idx changes within a row",
}
"""condition under which a call is packed by each argument"""


def packed_by(named: dict[str, Any]) -> tuple[str, ...]:
    """Returns the arguments of a call that separate documents of a row, as in :data:`WAYS`; empty if each row is one
    text.

    The rule of the "liger_dist" attention: lengths whose documents are not the rows, otherwise positions that restart
    without a 2-D mask.
    """
    return tuple(name for name, _ in _boundaries(named))


def documents_of(named: dict[str, Any]) -> DocumentRows | None:
    """Returns the documents of a call that is packed, or whose rows have padding before or within their text; None for
    rows of one text each. The host waits for a 2-D mask and for the arguments that may separate documents.

    Args:
        named: the arguments of the model by name.

    Raises:
        LigerDistError: the lengths do not add up to the tokens.
    """
    shape = _shape_of(named)
    if shape is None or 0 in shape:
        return None
    found = _boundaries(named)
    mask = named.get("attention_mask")
    valid = mask.bool().cpu() if isinstance(mask, Tensor) and tuple(mask.shape) == shape else None
    if valid is not None and not valid.all():
        # As in attention, which ignores lengths beside a mask with padding.
        return _padded(valid, is_packed=bool(found))
    if not found:
        return None
    begins = {row * shape[1] for row in range(shape[0])}.union(*(places for _, places in found))
    lengths = [end - first for first, end in pairwise([*sorted(begins), shape[0] * shape[1]])]
    return DocumentRows(torch.arange(shape[0] * shape[1]), lengths, shape, is_packed=True)


def as_padded_rows(batch: dict[str, Any], documents: DocumentRows, ignore_index: int) -> dict[str, Any]:
    """Returns the arguments of a call with each document in a row padded at its end, which every model keeps apart.

    Args:
        batch: the arguments that ``documents`` were read from; tensors ``[B, S, ...]``, and positions ``[n, B, S]``,
            become rows.
    """
    device = next(batch[name] for name in INPUTS if isinstance(batch.get(name), Tensor)).device
    rows: dict[str, Any] = {}
    for name, value in batch.items():
        fill = ignore_index if name in ("labels", "shift_labels") else 0
        if name in OF_DOCUMENTS:
            continue
        if documents.is_of_tokens(value):
            rows[name] = documents.padded(value.expand(*documents.shape, *value.shape[2:]), fill)
        elif isinstance(value, Tensor) and value.dim() == 3 and tuple(value.shape[1:]) == documents.shape:
            rows[name] = torch.stack([documents.padded(part, fill) for part in value])
        else:
            rows[name] = value
    lengths = torch.tensor(documents.lengths, device=device)
    longest = torch.arange(max(documents.lengths), device=device)
    return rows | {"attention_mask": (longest < lengths[:, None]).long()}


def _padded(valid: Tensor, *, is_packed: bool) -> DocumentRows | None:
    """Returns one document for each row of a mask ``[B, S]`` with a token; None if all padding follows the texts and
    the call has no lengths, which layers would read."""
    lengths = valid.sum(1)
    is_text_first = torch.arange(valid.shape[1]) < lengths[:, None]
    if not lengths.any() or (torch.equal(valid, is_text_first) and not is_packed):
        return None
    places = valid.flatten().nonzero()[:, 0]
    return DocumentRows(places, lengths[lengths > 0].tolist(), (valid.shape[0], valid.shape[1]), is_packed=False)


def _boundaries(named: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Lists the arguments that separate documents, with the places among ``B * S`` where they begin a document within a
    row. Not kept from call to call: the host cannot know whether a tensor has been written to since."""
    shape, mask = _shape_of(named), named.get("attention_mask")
    if shape is None or 0 in shape:
        return []
    found = [(LENGTHS, _ends_within_rows(named, shape)), (SEQ_IDX, _changes(named.get(SEQ_IDX), shape, step=0))]
    found = [(name, places) for name, places in found if places]
    has_mask = isinstance(mask, Tensor) and mask.dim() == 2
    if found or has_mask:
        return found
    positions = named.get(POSITIONS)
    if isinstance(positions, Tensor) and positions.dim() == 3 and positions.shape[0] == 4:
        # Those of the text, before the three of images.
        positions = positions[0]
    places = _changes(positions, shape, step=1)
    return [(POSITIONS, places)] if places else []


def _ends_within_rows(named: dict[str, Any], shape: tuple[int, int]) -> list[int]:
    ends = named.get(LENGTHS)
    ends = named.get("cu_seq_lens_k") if ends is None else ends
    if not isinstance(ends, Tensor) or ends.is_meta:
        return []
    read: list[int] = ends.tolist()
    total = shape[0] * shape[1]
    if read[:1] != [0] or read[-1] != total or sorted(read) != read:
        raise LigerDistError(
            f"cu_seq_lens_q ends at {read[-1] if read else None} but the micro-batch has {total} tokens; expected the "
            "sums of the lengths of all documents, from 0 to the number of tokens, padding included."
        )
    return [end for end in read if end % shape[1]]


def _changes(numbers: Any, shape: tuple[int, int], *, step: int) -> list[int]:
    """Lists the places of tokens whose number, ``[B, S]`` or ``[1, S]`` for all rows, is not that of the token before
    plus ``step``."""
    if not isinstance(numbers, Tensor) or numbers.is_meta or tuple(numbers.shape[-1:]) != shape[1:]:
        return []
    numbers = numbers[None] if numbers.dim() == 1 else numbers
    if numbers.dim() != 2:
        return []
    begins = (numbers.diff() != step).cpu().expand(shape[0], -1).nonzero().tolist()
    return [row * shape[1] + place + 1 for row, place in begins]


def _shape_of(named: dict[str, Any]) -> tuple[int, int] | None:
    inputs = next((named[name] for name in INPUTS if isinstance(named.get(name), Tensor)), None)
    return None if inputs is None or inputs.dim() < 2 else (inputs.shape[0], inputs.shape[1])
