"""Where texts begin in the rows of a call: read once, when the call begins, by one rule.

[Note: how documents are told apart]

A document begins at each row's first token, and within a row

- where ``cu_seq_lens_q`` (or ``cu_seq_lens_k``) says so;
- otherwise where ``seq_idx`` changes;
- otherwise, in a call with ``position_ids``, where a 2-D ``attention_mask`` goes from one number to another, as hosts
  number the documents of a row (1, 1, 1, 2, 2, 0);
- otherwise, without a 2-D ``attention_mask``, at a position that does not follow its neighbour: ``position_ids``
  ``[B, S]``, or those of the text in ``[4, B, S]``. Of the three positions of an image's tokens, ``[3, B, S]``, (time,
  height, width) do not increase there.

Two of them that contradict each other are refused. Lengths on the CPU are not compared with positions on a GPU, for
which the host would have to wait.

Legend: B rows, S tokens of a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LigerDistError

POSITIONS, LENGTHS, SEQ_IDX, MASK = "position_ids", "cu_seq_lens_q", "seq_idx", "attention_mask"
LENGTHS_OF_KEYS = "cu_seq_lens_k"
OF_DOCUMENTS = (LENGTHS, LENGTHS_OF_KEYS, "max_length_q", "max_length_k", SEQ_IDX)
"""keywords of packed documents, which rows of single documents do not have"""
INPUTS = ("input_ids", "inputs_embeds")
SEEN = {
    POSITIONS: "position_ids restart without a 2-D attention_mask",
    LENGTHS: "cu_seq_lens_q has more documents than rows",
    SEQ_IDX: "seq_idx changes within a row",
    MASK: "attention_mask numbers the documents of a row",
}
"""condition under which a call is packed by each argument"""
RESTARTS_BESIDE_MASK = (
    "position_ids restart inside a row that has a 2-D attention_mask: transformers takes the row for one text, so that "
    "its documents attend to each other. Leave attention_mask out where documents are packed."
)


class Documents:
    """Documents of one call.

    Args:
        begins: bool ``[B, S]`` on the CPU: True at the first token of each document, and of each row.
        told_by: the argument that separates documents within a row; None for one text in each row.
        mask: the 2-D ``attention_mask`` of the call; None without one.
        valid: the same as bool on the CPU, if it has been read.
        positions_restart: True if ``position_ids`` restart at every document; None if they have not been read.
    """

    def __init__(
        self,
        begins: Tensor,
        told_by: str | None,
        *,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
        positions_restart: bool | None = None,
    ) -> None:
        self.begins, self.told_by, self.mask = begins, told_by, mask
        self.positions_restart = positions_restart
        self.shape: tuple[int, int] = (begins.shape[0], begins.shape[1])
        self._valid = valid
        self._numbers: dict[torch.device, Tensor] = {}

    @property
    def is_packed(self) -> bool:
        """True if a row holds several documents."""
        return self.told_by is not None

    @property
    def valid(self) -> Tensor:
        """Bool ``[B, S]`` on the CPU: the 2-D mask. The host waits for it when it is asked for the first time."""
        if self._valid is None:
            has_mask = self.mask is not None and tuple(self.mask.shape) == self.shape
            self._valid = self.mask.bool().cpu() if has_mask else torch.ones(self.shape, dtype=torch.bool)  # type: ignore[union-attr]
        return self._valid

    def valid_on(self, device: torch.device) -> Tensor:
        """Returns the same on ``device``."""
        return self.valid.to(device) if self.mask is None else self.mask.bool().to(device)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, row after row."""
        rows, length = self.shape
        starts = self.begins.flatten().nonzero()[:, 0].tolist()
        return [end - start for start, end in pairwise([*starts, rows * length])]

    def numbers(self, device: torch.device) -> Tensor:
        """Returns the number of each token's document within its row, int64 ``[B, S]`` on ``device``; made once."""
        if device not in self._numbers:
            self._numbers[device] = moved(self.begins.cumsum(1) - 1, device)
        return self._numbers[device]

    def positions(self, device: torch.device) -> Tensor:
        """Returns positions ``[B, S]`` on ``device`` that begin at 0 in each document."""
        place = torch.arange(self.shape[1]).expand(self.shape)
        return moved(place - torch.where(self.begins, place, 0).cummax(1).values, device)


def read_documents(named: dict[str, Any]) -> Documents | None:
    """Reads the documents of a call, see [Note: how documents are told apart]; None for a call without tokens.

    Args:
        named: the arguments of the model by name.

    Raises:
        LigerDistError: lengths do not add up to the tokens, or two arguments contradict each other.
    """
    shape = shape_of(named)
    if shape is None or 0 in shape:
        return None
    mask = named.get(MASK)
    mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    found = {LENGTHS: _begins_by_lengths(named, shape), SEQ_IDX: _changes(named.get(SEQ_IDX), shape)}
    positions = named.get(POSITIONS)
    has_host_lengths = isinstance(named.get(LENGTHS), Tensor) and not named[LENGTHS].is_cuda
    if not (has_host_lengths and isinstance(positions, Tensor) and positions.is_cuda):
        found[POSITIONS] = _restarts(positions, shape)
    if mask is not None and tuple(mask.shape) == shape and not mask.is_meta and found.get(POSITIONS) is not None:
        found[MASK], valid = _numbered(mask), mask.bool()
        *begins, is_valid = _on_host([*found.values(), valid])
        read = dict(zip(found, begins, strict=True))
    else:
        read, is_valid = dict(zip(found, _on_host(list(found.values())), strict=True)), None
    documents = _by_one_rule(read, shape, mask, is_valid)
    restarts = read.get(POSITIONS)
    if documents.is_packed:
        _refuse_contradictions(documents, read)
    elif mask is not None and restarts is not None:
        valid = documents.valid
        if (restarts[:, 1:] & valid[:, 1:] & valid[:, :-1]).any():
            warnings.warn(RESTARTS_BESIDE_MASK, stacklevel=2)
    return documents


def _by_one_rule(
    read: dict[str, Tensor | None], shape: tuple[int, int], mask: Tensor | None, valid: Tensor | None
) -> Documents:
    restarts = read.get(POSITIONS)
    for name in (LENGTHS, SEQ_IDX, MASK, POSITIONS):
        begins = read.get(name)
        if begins is None or (name == POSITIONS and mask is not None):
            continue
        if begins[:, 1:].any():
            if name == MASK and valid is not None:
                begins = begins | _changes_of(valid)  # Padding counts as a document.
            is_restart = None if restarts is None else not bool((_without_padding(restarts, begins) != begins).any())
            return Documents(begins, name, mask=mask, valid=valid, positions_restart=is_restart)
    begins = torch.zeros(shape, dtype=torch.bool)
    begins[:, 0] = True
    return Documents(begins, None, mask=mask, valid=valid)


def _numbered(mask: Tensor) -> Tensor:
    """True where a mask goes from one document's number to another one, ``[B, S]``."""
    is_text = mask != 0
    return _with_first((mask.diff() != 0) & is_text[:, 1:] & is_text[:, :-1])


def _changes_of(valid: Tensor) -> Tensor:
    return F.pad(valid[:, 1:] != valid[:, :-1], (1, 0), value=False)


def _without_padding(restarts: Tensor, begins: Tensor) -> Tensor:
    """Leaves out restarts at the end of a row that begin no documents: positions of padding are zeros."""
    further = restarts & ~begins
    return restarts & ~further.flip(1).cumprod(1).flip(1).bool()


def _refuse_contradictions(documents: Documents, read: dict[str, Tensor | None]) -> None:
    told_by, begins, mask = documents.told_by, documents.begins, documents.mask
    assert told_by is not None
    for name in (SEQ_IDX, LENGTHS, POSITIONS):
        other = read.get(name)
        if other is None or name == told_by or (name == POSITIONS and mask is not None and told_by != MASK):
            continue
        if name == POSITIONS:
            # They may run on where other arguments separate documents.
            other = _without_padding(other, begins) if other[:, 1:].any() else begins
        if not torch.equal(other, begins):
            raise LigerDistError(
                f"{told_by} begins documents of a row at {_places(begins)}, and {name} at {_places(other)}; expected "
                f"the same documents. Leave out {name}, or let both begin them at the same tokens."
            )
    if told_by != MASK and mask is not None and not documents.valid.all():
        valid = documents.valid
        if (begins[:, 1:] & (valid[:, 1:] == valid[:, :-1])).any():
            raise LigerDistError(
                f"{told_by} separates documents at {_places(begins)} beside a 2-D attention_mask with padding, which "
                f"makes a row one text ({int((~valid).sum())} of {valid.numel()} tokens are padding). Leave the mask "
                "out and count padding as a document, or give each document a separate row."
            )
        # It only says what the mask says: texts, and their padding.
        documents.told_by = None


def _places(begins: Tensor) -> str:
    """Lists the first tokens of documents of the first row that has several."""
    row = int(begins.sum(1).argmax())
    places = begins[row].nonzero()[:, 0].tolist()
    return f"{places[:8]}{' and further' if len(places) > 8 else ''} of row {row}"


def _begins_by_lengths(named: dict[str, Any], shape: tuple[int, int]) -> Tensor | None:
    ends = named.get(LENGTHS)
    ends = named.get(LENGTHS_OF_KEYS) if ends is None else ends
    if not isinstance(ends, Tensor) or ends.is_meta:
        return None
    read = read_lengths(ends, shape[0] * shape[1])
    begins = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
    begins[[end for end in read if end < len(begins)]] = True
    begins = begins.view(shape)
    begins[:, 0] = True
    return begins


def read_lengths(ends: Tensor, total: int) -> list[int]:
    """Reads cumulative lengths of documents: from 0 to the number of tokens.

    Raises:
        LigerDistError: they are not.
    """
    read: list[int] = ends.tolist()
    if read[:1] != [0] or read[-1] != total or sorted(read) != read:
        raise LigerDistError(
            f"cu_seq_lens_q ends at {read[-1] if read else None} but the micro-batch has {total} tokens; expected the "
            "sums of the lengths of all documents, from 0 to the number of tokens, padding included."
        )
    return read


def _changes(numbers: Any, shape: tuple[int, int]) -> Tensor | None:
    """True where numbers of documents change, ``[B, S]`` on their device; None if there are none."""
    if not isinstance(numbers, Tensor) or numbers.is_meta or numbers.dim() > 2 or numbers.shape[-1:] != shape[1:]:
        return None
    changes: Tensor = numbers.reshape(-1, shape[1]).diff() != 0
    return _with_first(changes).expand(shape)


def _restarts(positions: Any, shape: tuple[int, int]) -> Tensor | None:
    """True at positions that do not follow their neighbour, ``[B, S]`` on their device; None for others than those of
    tokens."""
    if not isinstance(positions, Tensor) or positions.is_meta or tuple(positions.shape[-1:]) != shape[1:]:
        return None
    if positions.dim() == 3 and positions.shape[0] == 3:
        return _with_first(~_increase(positions)).expand(shape)
    if positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # Those of the text, before the three of images.
    if positions.dim() > 2:
        return None
    return _with_first(positions.reshape(-1, shape[1]).diff() != 1).expand(shape)


def _increase(positions: Tensor) -> Tensor:
    """True where (time, height, width) ``[3, B, S]`` are after those of the token before, in lexical order."""
    time, height, width = positions.diff()
    is_after: Tensor = (time > 0) | ((time == 0) & ((height > 0) | ((height == 0) & (width > 0))))
    return is_after


def _with_first(changes: Tensor) -> Tensor:
    return F.pad(changes, (1, 0), value=True)


def _on_host(found: list[Tensor | None]) -> list[Tensor | None]:
    """Copies what is on a device to the host, in one copy."""
    is_away = [one is not None and one.device.type != "cpu" for one in found]
    away = [one for one, away in zip(found, is_away, strict=True) if away and one is not None]
    if not away:
        return found
    copied = iter(torch.stack(away).cpu())
    return [next(copied) if away else one for one, away in zip(found, is_away, strict=True)]


def shape_of(named: dict[str, Any]) -> tuple[int, int] | None:
    """Returns rows and tokens of a row of a call; None without tokens."""
    inputs = next((named[name] for name in INPUTS if isinstance(named.get(name), Tensor)), None)
    return None if inputs is None or inputs.dim() < 2 else (inputs.shape[0], inputs.shape[1])


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies to ``device`` from pinned memory, for which the host does not wait."""
    if torch.device(device).type != "cuda":
        return numbers.to(device)
    return numbers.contiguous().pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class RunningCall:
    """One call of a wrapped model."""

    documents: Documents | None


_CALL: ContextVar[RunningCall | None] = ContextVar("liger_dist_call", default=None)


@contextmanager
def call_of(documents: Documents | None) -> Iterator[None]:
    """Within, a call of a wrapped model with these documents runs."""
    token = _CALL.set(RunningCall(documents))
    try:
        yield
    finally:
        _CALL.reset(token)


def current_call() -> RunningCall | None:
    """Returns the innermost call that runs in this context."""
    return _CALL.get()
