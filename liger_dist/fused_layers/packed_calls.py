"""Reads the documents of a call from its arguments, once for all layers."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError

from .document_mask import notes_on
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

    The rule of transformers and of the "liger_dist" attention: lengths of more documents than rows, otherwise positions
    that restart without a 2-D mask.
    """
    shape = _shape_of(named)
    seq_idx, mask = named.get(SEQ_IDX), named.get("attention_mask")
    found = []
    if sum(length > 0 for length in _lengths_in(named)) > (1 if shape is None else shape[0]):
        found.append(LENGTHS)
    if isinstance(seq_idx, Tensor) and _beginnings(seq_idx, step=0):
        found.append(SEQ_IDX)
    has_mask = isinstance(mask, Tensor) and mask.dim() == 2
    if not found and not has_mask and _restarts(named.get(POSITIONS)):
        found.append(POSITIONS)
    return tuple(found)


def documents_of(named: dict[str, Any]) -> DocumentRows | None:
    """Returns the documents of a call that is packed, or whose rows have padding before or within their text; None for
    rows of one text each. The host waits for a 2-D mask, and without one for the arguments that may separate documents.

    Args:
        named: the arguments of the model by name.

    Raises:
        LigerDistError: the lengths do not add up to the tokens.
    """
    shape = _shape_of(named)
    if shape is None or 0 in shape:
        return None
    mask = named.get("attention_mask")
    if isinstance(mask, Tensor) and tuple(mask.shape) == shape:
        notes = notes_on(mask)
        if "valid" not in notes:
            notes["valid"] = mask.bool().cpu()
        if not notes["valid"].all():
            # As in attention, which ignores lengths beside a mask with padding.
            return _padded(notes["valid"])
    way = packed_by(named)
    return _packed(named, way, shape) if way else None


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
        if documents.is_of_tokens(value):
            rows[name] = documents.padded(value.expand(*documents.shape, *value.shape[2:]), fill)
        elif isinstance(value, Tensor) and value.dim() == 3 and tuple(value.shape[1:]) == documents.shape:
            rows[name] = torch.stack([documents.padded(part, fill) for part in value])
        elif name not in OF_DOCUMENTS:
            rows[name] = value
    lengths = torch.tensor(documents.lengths, device=device)
    longest = torch.arange(max(documents.lengths), device=device)
    return rows | {"attention_mask": (longest < lengths[:, None]).long()}


def _padded(valid: Tensor) -> DocumentRows | None:
    """Returns one document for each row of a mask ``[B, S]`` with a token; None if all padding follows the texts."""
    lengths = valid.sum(1)
    is_text_first = torch.arange(valid.shape[1]) < lengths[:, None]
    if torch.equal(valid, is_text_first):
        return None
    places = valid.flatten().nonzero()[:, 0]
    return DocumentRows(places, lengths[lengths > 0].tolist(), (valid.shape[0], valid.shape[1]), is_packed=False)


def _packed(named: dict[str, Any], way: tuple[str, ...], shape: tuple[int, int]) -> DocumentRows:
    rows, length = shape
    begins = {row * length for row in range(rows)}
    if LENGTHS in way:
        lengths = _lengths_in(named)
        if sum(lengths) != rows * length or min(lengths) < 0:
            raise LigerDistError(
                f"cu_seq_lens_q ends at {sum(lengths)} but the micro-batch has {rows * length} tokens; expected the "
                "sums of the lengths of all documents, from 0 to the number of tokens, padding included."
            )
        begins |= set(accumulate(lengths))
    for name, beginnings in ((SEQ_IDX, partial(_beginnings, step=0)), (POSITIONS, _restarts)):
        if name in way:
            # One row of positions holds for all rows.
            copies = rows if named[name].shape[-2] == 1 else 1
            found = beginnings(named[name])
            begins |= {(row + copy) * length + place for row, place in found for copy in range(copies)}
    ends = sorted(begins | {rows * length})
    lengths = [end - first for first, end in pairwise(ends)]
    return DocumentRows(torch.arange(rows * length), lengths, shape, is_packed=True)


def _shape_of(named: dict[str, Any]) -> tuple[int, int] | None:
    inputs = next((named[name] for name in INPUTS if isinstance(named.get(name), Tensor)), None)
    return None if inputs is None or inputs.dim() < 2 else (inputs.shape[0], inputs.shape[1])


def _lengths_in(named: dict[str, Any]) -> list[int]:
    """Reads the lengths of the documents, some of which may be 0; empty if they cannot be of more documents than
    rows."""
    ends, shape = named.get(LENGTHS), _shape_of(named)
    ends = named.get("cu_seq_lens_k") if ends is None else ends
    # The shape is known to the host; only lengths that look packed are read.
    if not isinstance(ends, Tensor) or ends.numel() - 1 <= (1 if shape is None else shape[0]):
        return []
    notes = notes_on(ends)
    if "lengths" not in notes:
        notes["lengths"] = ends.diff().tolist()
    lengths: list[int] = notes["lengths"]
    return lengths


def _restarts(position_ids: Any) -> list[tuple[int, int]]:
    """Lists the row and the place of tokens whose position does not follow that of the token before."""
    if not isinstance(position_ids, Tensor) or position_ids.is_meta:
        return []
    if position_ids.dim() == 3 and position_ids.shape[0] == 4:
        # Those of the text, before the three of images.
        return _beginnings(position_ids[0], step=1)
    return _beginnings(position_ids, step=1) if position_ids.dim() == 2 else []


def _beginnings(numbers: Tensor, *, step: int) -> list[tuple[int, int]]:
    """Lists the row and the place of tokens whose number ``[B, S]`` is not that of the token before plus ``step``."""
    notes = notes_on(numbers)
    if step not in notes:
        begins = (numbers.diff() != step).cpu().nonzero()
        notes[step] = [(row, place + 1) for row, place in begins.tolist()]
    found: list[tuple[int, int]] = notes[step]
    return found
