"""Packs documents into sequences of one length by best fit, so that none that fits is cut (Ding et al. 2024, "Fewer
Truncations Improve Language Modeling"), and counts the documents and tokens of each source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from liger_dist import LigerDistError

from .dataset import Piece, ShardCounts, TokenCache, TokenTable, count_labels, refuse_bad_rows
from .output_folder import write_folder
from .sources import Source
from .tokenization import Tokenization

PACKING_FORMAT = 2
"""part of a cache's key; 1 packed the rows of a long text apart"""
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Which pieces of which documents every sequence holds: sequence ``i`` has the pieces ``bounds[i]`` to ``bounds[i +
    1]``."""

    document: Integers
    """of each piece"""
    start: Integers
    """first token of the piece in its document"""
    length: Integers
    bounds: Integers

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def pieces(self, sequence: int) -> list[tuple[int, int, int]]:
        """Lists document, start and length of each piece of a sequence."""
        here = slice(self.bounds[sequence], self.bounds[sequence + 1])
        columns = (self.document[here], self.start[here], self.length[here])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, values in vars(self).items():
            np.save(folder / f"{name}.npy", values)

    @classmethod
    def load(cls, folder: Path) -> Packing:
        """Maps what :meth:`save` wrote."""
        names = ("document", "start", "length", "bounds")
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in names))


def pack(documents: Integers, lengths: Integers, length: int, first: Integers | None = None) -> Packing:
    """Cuts documents that are longer than ``length`` into pieces of ``length`` tokens and a rest, and packs all pieces.

    Args:
        documents: number of each document.
        lengths: its tokens.
        first: token at which it begins; default: 0.
    """
    count = -(-lengths // length)
    of = np.repeat(np.arange(len(lengths)), count)
    start = (np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)) * length
    piece = np.minimum(lengths[of] - start, length)
    order, bounds = best_fit(piece, length)
    start = start if first is None else start + first[of]
    return Packing(documents[of][order], start[order], piece[order], bounds)


def best_fit(lengths: Integers, capacity: int) -> tuple[Integers, Integers]:
    """Packs by best-fit decreasing: the longest piece first, each into the fullest bin that has room.

    Bins with the same room are treated together, so the time grows with the number of different lengths.

    Returns:
        Indices of ``lengths`` bin by bin, and the bounds of the bins in them, ``[bins + 1]``.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(lengths), dtype=np.int64)
    open_bins: dict[int, Integers] = {}
    """by their room"""
    is_open = np.zeros(capacity + 1, dtype=bool)
    num_bins = position = 0
    values, counts = np.unique(-lengths, return_counts=True)
    for size, count in zip((-values).tolist(), counts.tolist(), strict=True):
        left = count
        while left > 0:
            offset = int(np.argmax(is_open[size:]))
            room = size + offset if is_open[size + offset] else capacity
            each = room // size
            needed = -(-left // each)
            if is_open[room]:
                bins = open_bins[room]
                needed = min(needed, len(bins))
                open_bins[room] = bins[needed:]
                is_open[room] = needed < len(bins)
                bins = bins[:needed]
            else:
                bins = np.arange(num_bins, num_bins + needed)
                num_bins += needed
            taken = min(left, needed * each)
            bin_of[longest_first[position : position + taken]] = np.repeat(bins, each)[:taken]
            position, left = position + taken, left - taken
            rest = taken - (needed - 1) * each
            for remaining, group in ((room - each * size, bins[:-1]), (room - rest * size, bins[-1:])):
                if remaining > 0 and len(group):
                    there = open_bins[remaining] if is_open[remaining] else bins[:0]
                    open_bins[remaining] = np.concatenate([there, group])
                    is_open[remaining] = True
    order = np.argsort(bin_of, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=num_bins))]).astype(np.int64)
    return order, bounds


@dataclass
class SplitCounts:
    """What ``data.json`` says of one split of one source."""

    documents: int = 0
    tokens: int = 0
    documents_cut: int = 0
    """longer than a sequence, so that they are in several pieces"""
    sequences: int = 0
    packed_efficiency: float = 0.0
    """tokens over places in the sequences"""


@dataclass(frozen=True)
class PreparedSource:
    """Token shards of one source, and its packings, in the cache."""

    shards: list[Path]
    files: list[str]
    digests: list[str]
    """of the shards' tokens"""
    packings: dict[str, Path]
    """folder by split: "train", and "held_out" where documents are held out"""
    counts: dict[str, Any]
    """what ``data.json`` says of it"""


def prepare_source(
    source: Source,
    tokenization: Tokenization,
    cache: Path,
    *,
    sequence_length: int,
    truncate: bool,
    eval_fraction: float,
    max_bad_rows: float,
    num_proc: int,
) -> PreparedSource:
    """Tokenises and packs one source into ``cache``, once.

    Raises:
        LigerDistError: rows that cannot be trained on, or conversations longer than a sequence, more than
            ``max_bad_rows`` together; or nothing can be written.
    """
    tokens = TokenCache(source, tokenization, cache)
    tokens.prepare(max_bad_rows, num_proc)
    shards = tokens.counts()
    table = tokens.table()
    too_long = np.flatnonzero(table.is_conversation & (table.lengths > sequence_length))
    cut = too_long[[truncate and has_label(table.piece(i, 0, sequence_length)) for i in too_long.tolist()]]
    too_long = np.setdiff1d(too_long, cut)
    skipped = [bad for counts in shards for bad in counts.skipped]
    too_long_rows = [
        (*table.place(i), too_long_reason(int(table.lengths[i]), sequence_length, truncate=truncate))
        for i in too_long.tolist()
    ]
    refuse_bad_rows([*skipped, *too_long_rows], max_bad_rows, sum(shard.documents_read for shard in shards))
    totals = _totals(shards, table, too_long, cut, sequence_length)
    table.lengths[cut] = sequence_length
    folders: dict[str, Path] = {}
    packings: dict[str, Packing] = {}
    said: dict[str, dict[str, Any]] = {}
    for split, selection in split_rows(table, eval_fraction).items():
        keep = ~np.isin(selection.documents, too_long)
        chosen = Selection(*(column[keep] for column in selection))
        if not chosen.lengths.sum():
            raise LigerDistError(
                f"--data {source.name} has no token for the split {split!r}: {len(table) - len(too_long)} documents, "
                f"--eval_fraction {eval_fraction}. Give more data, or --eval_data or --eval_fraction 0."
            )
        truncated = "-truncated" * truncate
        folder = tokens.folder / f"packed-{PACKING_FORMAT}-{sequence_length}{truncated}-{eval_fraction}-{split}"
        if not folder.is_dir():
            packing = pack(chosen.documents, chosen.lengths, sequence_length, chosen.first)
            write_folder(folder, packing.save)
        folders[split] = folder
        packings[split] = Packing.load(folder)
        said[split] = asdict(_count(chosen, packings[split], sequence_length))
    totals["skipped"] = len(skipped) + len(too_long)
    # The first token of a later piece is not predicted. What has a list of labels is a conversation, never cut.
    totals["labels"] -= sum(int((packing.start > 0).sum()) for packing in packings.values())
    _check_counts(source, totals, said)
    counts = {"source": source.name, "files": len(source.files), **totals, "splits": said}
    return PreparedSource(tokens.paths, list(tokens.files), [shard.digest for shard in shards], folders, counts)


def too_long_reason(tokens: int, sequence_length: int, *, truncate: bool) -> str:
    """Says why a conversation is too long, which is cut with ``--truncate`` alone."""
    without = ", before which it has no label" if truncate else " (--truncate true cuts it)"
    return f"is a conversation of {tokens} tokens and --sequence_length is {sequence_length}{without}"


def has_label(piece: Piece) -> bool:
    """True where some token is predicted; the first one never is."""
    return bool((piece.labels[1:] >= 0).any())


class Selection(NamedTuple):
    """Documents of a split, or the part of each from token ``first`` on."""

    documents: Integers
    first: Integers
    lengths: Integers


def split_rows(table: TokenTable, eval_fraction: float) -> dict[str, Selection]:
    """Holds out every 20th document where ``eval_fraction`` is 0.05; of a source with fewer documents, the end of each
    text, or the last conversation."""
    documents = np.arange(len(table))
    first = np.zeros(len(table), np.int64)
    if eval_fraction == 0:
        return {"train": Selection(documents, first, table.lengths)}
    is_out = np.floor((documents + 1) * eval_fraction + 1e-9) > np.floor(documents * eval_fraction + 1e-9)
    if is_out.any():
        parts = {"train": documents[~is_out], "held_out": documents[is_out]}
        return {name: Selection(part, first[part], table.lengths[part]) for name, part in parts.items()}
    last = documents == len(documents) - 1
    end_of_text = (table.lengths * eval_fraction).astype(np.int64)
    out = np.where(table.is_conversation, np.where(last, table.lengths, 0), end_of_text)
    kept = table.lengths - out
    return {
        "train": Selection(documents[kept > 0], first[kept > 0], kept[kept > 0]),
        "held_out": Selection(documents[out > 0], kept[out > 0], out[out > 0]),
    }


def _count(chosen: Selection, packing: Packing, length: int) -> SplitCounts:
    tokens = int(packing.length.sum())
    return SplitCounts(
        documents=len(chosen.documents),
        tokens=tokens,
        documents_cut=int((chosen.lengths > length).sum()),
        sequences=len(packing),
        packed_efficiency=round(tokens / max(1, len(packing) * length), 6),
    )


def _totals(
    shards: list[ShardCounts], table: TokenTable, too_long: Integers, cut: Integers, length: int
) -> dict[str, int]:
    """Adds up the documents in the sequences; ``documents_read`` of all rows."""
    names = ("documents_read", "documents", "tokens", "labels")
    totals = {name: sum(getattr(counts, name) for counts in shards) for name in names}
    totals["documents"] -= len(too_long)
    for documents, kept in ((too_long, 0), (cut, length)):
        for document in documents.tolist():
            labels = table.piece(document, 0, int(table.lengths[document])).labels
            totals["tokens"] -= len(labels) - kept
            totals["labels"] -= count_labels(labels) - count_labels(labels[:kept])
    return totals | {"documents_truncated": len(cut)}


def _check_counts(source: Source, totals: dict[str, int], splits: dict[str, dict[str, Any]]) -> None:
    """Raises:
    LigerDistError: what is in the sequences is not all that was tokenised.
    """
    packed = sum(split["tokens"] for split in splits.values())
    rows = totals["documents"] + totals["skipped"]
    if packed != totals["tokens"] or rows != totals["documents_read"]:
        raise LigerDistError(
            f"{packed} tokens of {source.name} were packed, of {totals['tokens']}, and {rows} of "
            f"{totals['documents_read']} documents are counted; expected all of them. Remove its folder in "
            "--cache_dir, and report this."
        )
