"""Rows of single documents for layers with a batch dimension: the tokens ``[B, S]`` of a micro-batch, gathered into
rows that hold one document each, or into one row of all for layers that read lengths.

A recurrence or causal convolution starts anew in every row and never reads what follows, so that the padding at the end
of a row changes nothing before it. Rows of similar lengths are computed together, in as few calls as keep the padding
small.

Legend: B rows, S tokens of a row, T tokens of the documents, L tokens of a row of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from liger_dist.model.documents import INPUTS, OF_DOCUMENTS, Documents, moved
from liger_dist.model.torch_modes import is_transformed

MOST_PADDING = 1.15
"""computed tokens for each token of the documents, at most"""
LEADING_BITS = 5
"""binary digits that the length of a row keeps when it is rounded up, by at most 1/16: kernels and allocations meet few
lengths"""


Layout = Literal["few calls", "one call", "one row"]
"""rows of single documents, in as few calls as keep the padding below :data:`MOST_PADDING`, or in a single call, for
layers whose parts have collectives; or one row ``[1, T]`` of all documents, for layers that read their lengths"""


class DocumentsOfRow(NamedTuple):
    """Documents of a row ``[1, T]``, by the names of arguments of causal-conv1d, mamba-ssm and fla."""

    seq_idx: Tensor
    """int32 ``[1, T]``: the number of each token's document"""
    cu_seqlens: Tensor
    """int64 ``[N + 1]``: 0 and the end of each of the N documents"""
    cu_seqlens_cpu: Tensor
    """the same on the CPU"""


@dataclass(frozen=True)
class _Gather:
    """Rearrangement of tokens."""

    index: Tensor
    """int64: for each result its token"""
    zeros: Tensor | None
    """int64: results that are 0 instead; None for none"""

    def of(self, x_TD: Tensor) -> Tensor:
        result: Tensor = x_TD.index_select(0, self.index)
        return result if self.zeros is None else result.index_fill(0, self.zeros, 0)


class _Gathered(torch.autograd.Function):
    """Gathers tokens; its backward gathers as well, because every token is in one place and padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gather: _Gather, transposed: _Gather) -> Tensor:
        ctx.gather, ctx.transposed = gather, transposed
        return gather.of(x_TD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _gathered(gradient, ctx.transposed, ctx.gather), None, None


def _gathered(x_TD: Tensor, gather: _Gather, transposed: _Gather) -> Tensor:
    if is_transformed() or not (x_TD.requires_grad and torch.is_grad_enabled()):
        return gather.of(x_TD)
    result: Tensor = _Gathered.apply(x_TD, gather, transposed)  # type: ignore[no-untyped-call]
    return result


class _Calls:
    """Rows of all documents, in calls of rows of one length each.

    Args:
        shapes: rows and their length for each call.
        source: int64: for each token of those rows its place among ``B * S``.
        places: int64 ``[T]``: places of the documents' tokens among ``B * S``, one document after another.
        slots: int64 ``[T]``: their places among the tokens of the calls.
        shape: ``(B, S)``.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        source: Tensor,
        places: Tensor,
        slots: Tensor,
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.shapes = shapes
        self._is_view = torch.equal(source, torch.arange(shape[0] * shape[1]))
        slot_of = torch.zeros(shape[0] * shape[1], dtype=torch.int64).index_copy_(0, places, slots)
        to_slots = _Gather(moved(source, device), None)
        to_slots_0 = _Gather(to_slots.index, _complement(len(source), slots, device))
        to_places = _Gather(moved(slot_of, device), _complement(len(slot_of), places, device))
        self._into, self._back = (to_slots, to_places), (to_places, to_slots_0)

    @classmethod
    def of_rows(
        cls,
        shapes: list[tuple[int, int]],
        places: Tensor,
        lengths: Sequence[int],
        shape: tuple[int, int],
        device: torch.device,
    ) -> _Calls:
        """Makes one row for each document; the longest documents are in the first call.

        Args:
            lengths: of the documents.
        """
        of_documents = torch.tensor(lengths)
        of_rows = torch.tensor([length for rows, length in shapes for _ in range(rows)])
        order = of_documents.argsort(descending=True, stable=True)
        begins = of_documents.cumsum(0) - of_documents
        first_slots = torch.empty_like(begins).index_copy_(0, order, of_rows.cumsum(0) - of_rows)
        slots = torch.arange(len(places)) + (first_slots - begins).repeat_interleave(of_documents)
        # Padding repeats the first token of its row [B, S] that no mask excludes: only causal layers do not read it.
        row = places[begins] // shape[1]
        first_of_row = torch.full(shape[:1], shape[0] * shape[1]).scatter_reduce(0, row, places[begins], "amin")
        source = first_of_row[row[order]].repeat_interleave(of_rows).index_copy_(0, slots, places)
        return cls(shapes, source, places, slots, shape, device)

    @classmethod
    def of_one_row(cls, places: Tensor, shape: tuple[int, int], device: torch.device) -> _Calls:
        """Makes one row ``[1, T]`` with all documents."""
        return cls([(1, len(places))], places, places, torch.arange(len(places)), shape, device)

    def into_rows(self, x: Tensor) -> list[Tensor]:
        """Gathers ``[B, S, ...]`` into ``[rows, L, ...]`` for each call."""
        rows = x.flatten(0, 1) if self._is_view else _gathered(x.flatten(0, 1), *self._into)
        parts = rows.split([n * length for n, length in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def from_rows(self, results: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        """Gathers the results ``[rows, L, ...]`` of all calls into ``[B, S, ...]``; tokens of no document are 0."""
        flat = [result.flatten(0, 1) for result in results]
        tokens = flat[0] if len(flat) == 1 else torch.cat(flat)
        tokens = tokens if self._is_view else _gathered(tokens, *self._back)
        return tokens.view(*shape, *tokens.shape[1:])


def _complement(total: int, indices: Tensor, device: torch.device) -> Tensor | None:
    """Returns the numbers below ``total`` that are no ``indices``; None if there are none."""
    if len(indices) == total:
        return None
    is_outside = torch.ones(total, dtype=torch.bool).index_fill_(0, indices, 0)
    return moved(is_outside.nonzero()[:, 0], device)


class DocumentRows:
    """Documents of one micro-batch.

    Args:
        places: int64 ``[T]`` on the CPU: places of the documents' tokens among the ``B * S`` of all rows, one document
            after another.
        lengths: tokens of each document, which lies within one row; none is 0.
        shape: ``(B, S)``.
        is_packed: True if rows hold several documents; False for a text with padding in each row.
    """

    def __init__(self, places: Tensor, lengths: Sequence[int], shape: tuple[int, int], *, is_packed: bool) -> None:
        self.shape, self.is_packed = shape, is_packed
        self.lengths = tuple(lengths)
        self._places = places
        self._calls: dict[tuple[torch.device, Layout], _Calls] = {}
        self._in_one_row: dict[torch.device, DocumentsOfRow] = {}

    def calls(self, device: torch.device, layout: Layout) -> _Calls:
        """Returns the rows on ``device``, made once."""
        if (device, layout) not in self._calls:
            if layout == "one row":
                calls = _Calls.of_one_row(self._places, self.shape, device)
            else:
                shapes = grouped(self.lengths) if layout == "few calls" else [(len(self.lengths), max(self.lengths))]
                calls = _Calls.of_rows(shapes, self._places, self.lengths, self.shape, device)
            self._calls[device, layout] = calls
        return self._calls[device, layout]

    def in_one_row(self, device: torch.device) -> DocumentsOfRow:
        """Returns the documents of the layout "one row" on ``device``, made once: functions cache what they derive from
        these tensors."""
        if device not in self._in_one_row:
            lengths = torch.tensor(self.lengths)
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]
            self._in_one_row[device] = DocumentsOfRow(moved(numbers, device), moved(ends, device), ends)
        return self._in_one_row[device]

    def padded(self, x: Tensor, value: float) -> Tensor:
        """Returns ``[documents, L, ...]`` of ``x`` ``[B, S, ...]``: a row for each document in order, padded at its
        end."""
        parts = x.flatten(0, 1)[self._places.to(x.device)].split(self.lengths)
        return pad_sequence(list(parts), batch_first=True, padding_value=value)

    def compute(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        device: torch.device,
        layout: Layout,
    ) -> Any:
        """Computes a layer on rows of single documents, or on one row of all.

        Args:
            args, kwargs: arguments of ``forward``. Tensors ``[B, S, ...]``, also in tuples and dicts, become rows;
                masks ``[B, 1, S, S]`` become None.

        Returns:
            What ``forward`` returns, with tensors ``[B, S, ...]``; None for states and other tensors.
        """
        calls = self.calls(device, layout)
        leaves, structure = tree_flatten((args, kwargs))
        by_call = zip(*(self._split(leaf, calls) for leaf in leaves), strict=True)
        outputs = []
        for of_call in by_call:
            call_args, call_kwargs = tree_unflatten(list(of_call), structure)
            outputs.append(tree_flatten(forward(*call_args, **call_kwargs)))
        joined = [self._join(parts, calls) for parts in zip(*(found for found, _ in outputs), strict=True)]
        return tree_unflatten(joined, outputs[0][1])

    def _split(self, leaf: Any, calls: _Calls) -> list[Any]:
        if self.is_of_tokens(leaf):
            return calls.into_rows(leaf.expand(*self.shape, *leaf.shape[2:]))
        is_dense_mask = getattr(leaf, "ndim", 0) == 4 and tuple(leaf.shape[1:]) == (1, self.shape[1], self.shape[1])
        return [None if is_dense_mask else leaf] * len(calls.shapes)

    def is_of_tokens(self, leaf: Any) -> bool:
        """True for a tensor ``[B, S, ...]``, or ``[1, S, ...]`` for all rows."""
        length = self.shape[1]
        return isinstance(leaf, Tensor) and leaf.dim() > 1 and tuple(leaf.shape[:2]) in (self.shape, (1, length))

    def _join(self, parts: Sequence[Any], calls: _Calls) -> Any:
        first = parts[0]
        is_of_rows = isinstance(first, Tensor) and tuple(first.shape[:2]) == calls.shapes[0]
        return calls.from_rows(parts, self.shape) if is_of_rows else None


def rows_of(documents: Documents) -> DocumentRows | None:
    """Returns the documents of a call that is packed, or whose rows have padding before or within their text; None for
    rows of one text each. The host waits for a 2-D mask."""
    rows, length = documents.shape
    if documents.is_packed:
        return DocumentRows(torch.arange(rows * length), documents.lengths, documents.shape, is_packed=True)
    lengths = documents.valid.sum(1)
    is_text_first = torch.arange(length) < lengths[:, None]
    if not lengths.any() or torch.equal(documents.valid, is_text_first):
        return None
    places = documents.valid.flatten().nonzero()[:, 0]
    return DocumentRows(places, lengths[lengths > 0].tolist(), documents.shape, is_packed=False)


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


def as_packed_row(batch: dict[str, Any], ignore_index: int) -> tuple[dict[str, Any] | None, str]:
    """Returns the arguments of a call with the texts of all rows in one row, told apart by positions, and the same mean
    loss; or None and why there is no such row, as a clause.

    Args:
        batch: the arguments of a call with one text in each row, which tensors ``[B, S, ...]`` are of.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) < 2:
        return None, "the batch has no two texts"
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(ids.shape)):
        return None, "the batch has a dense attention_mask"
    place = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    lengths = ids.new_full((len(ids), 1), ids.shape[1]) if mask is None else (mask != 0).sum(1, keepdim=True)
    is_text = place < lengths
    if mask is not None and not torch.equal(is_text, mask != 0):
        return None, "padding is before a text or within it"
    positions = batch.get("position_ids")
    if positions is not None and not (
        tuple(positions.shape[-2:]) in (tuple(ids.shape), (1, ids.shape[1]))
        and positions.dim() == 2
        and bool((positions == place)[is_text].all())
    ):
        return None, "its position_ids do not count from 0 in every row"
    row: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            row[name] = value
        elif tuple(value.shape[:2]) != tuple(ids.shape):
            if name != "position_ids":
                return None, f"{name} {list(value.shape)} is not of tokens"
        else:
            row[name] = value[is_text][None]
    for name in ("labels", "shift_labels"):
        value = batch.get(name)
        if isinstance(value, Tensor) and bool((value[~is_text] != ignore_index).any()):
            return None, f"{name} of padding are not {ignore_index}"
    row.pop("attention_mask", None)
    row["position_ids"] = place[is_text][None]
    if isinstance(row.get("labels"), Tensor):
        # No text predicts the first token of the next one.
        row["labels"] = row["labels"].masked_fill(row["position_ids"] == 0, ignore_index)
    return row, ""


def grouped(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Divides rows of these lengths into calls: the fewest with at most :data:`MOST_PADDING` tokens for each token, and
    among those the division with the fewest tokens.

    Returns:
        For each call its number of rows and their length, the longest rows first.
    """
    rounded = sorted(map(rounded_up, lengths), reverse=True)
    kinds = sorted(set(rounded), reverse=True)
    # How many rows are at least as long as each kind, after 0.
    ends = [0, *(len(rounded) - rounded[::-1].index(kind) for kind in kinds)]

    def tokens(first: int, last: int) -> int:
        """Tokens of one call with the rows of the kinds from ``first`` to before ``last``."""
        return kinds[first] * (ends[last] - ends[first])

    # The fewest tokens of the rows of the first kinds, and the kind at which their last call begins.
    best = [tokens(0, last) for last in range(len(ends))]
    beginnings = [[0] * len(ends)]
    while best[-1] > MOST_PADDING * sum(lengths) and len(beginnings) < len(kinds):
        begins = []
        for last in range(len(ends)):
            costs = [best[first] + tokens(first, last) for first in range(max(last, 1))]
            begins.append(costs.index(min(costs)))
        best = [best[first] + tokens(first, last) for last, first in enumerate(begins)]
        beginnings.append(begins)
    shapes: list[tuple[int, int]] = []
    last = len(kinds)
    for begins in reversed(beginnings):
        first = begins[last]
        if last > first:
            shapes.append((ends[last] - ends[first], kinds[first]))
        last = first
    return shapes[::-1]


def rounded_up(length: int) -> int:
    """Rounds up to :data:`LEADING_BITS` binary digits."""
    step = 1 << max(0, (length - 1).bit_length() - LEADING_BITS)
    return -(-length // step) * step
