"""Tokenises and packs one source into the cache, splits off what is held out, and counts documents and tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from liger_dist import LigerDistError

from .dataset import ShardCounts, TokenCache, Tokenization, TokenTable, count_labels, refuse_bad_rows
from .output_folder import write_folder
from .packing import Integers, Packing, pack
from .sources import Source

PACKING_FORMAT = 1
"""part of a cache's key"""


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
    eval_fraction: float,
    max_bad_rows: int,
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
    too_long = np.flatnonzero(table.is_whole & (table.lengths > sequence_length))
    skipped = [bad for counts in shards for bad in counts.skipped]
    first = too_long[: max_bad_rows + 1].tolist()
    too_long_rows = [(*table.place(row), too_long_reason(int(table.lengths[row]), sequence_length)) for row in first]
    refuse_bad_rows([*skipped, *too_long_rows], max_bad_rows)
    if not table.lengths.sum():
        raise LigerDistError(f"--data {source.name} holds no token; give files with text in them.")
    folders: dict[str, Path] = {}
    said: dict[str, dict[str, Any]] = {}
    for split, selection in split_rows(table, eval_fraction).items():
        keep = ~np.isin(selection.rows, too_long)
        chosen = Selection(*(column[keep] for column in selection))
        folder = tokens.folder / f"packed-{PACKING_FORMAT}-{sequence_length}-{eval_fraction}-{split}"
        if not folder.is_dir():
            packing = pack(chosen.rows, chosen.lengths, sequence_length, chosen.first)
            write_folder(folder, packing.save)
        folders[split] = folder
        said[split] = asdict(_count(table, chosen, Packing.load(folder), sequence_length))
    totals = _totals(shards, table, too_long) | {"skipped": len(skipped) + len(too_long)}
    _check_counts(source, totals, said)
    counts = {"source": source.name, "files": len(source.files), **totals, "splits": said}
    return PreparedSource(tokens.paths, list(tokens.files), [shard.digest for shard in shards], folders, counts)


def too_long_reason(tokens: int, sequence_length: int) -> str:
    """Of a conversation, which is never cut."""
    return f"is a conversation of {tokens} tokens and --sequence_length is {sequence_length}"


class Selection(NamedTuple):
    """Rows of a split, or the part of each from token ``first`` on."""

    rows: Integers
    first: Integers
    lengths: Integers


def split_rows(table: TokenTable, eval_fraction: float) -> dict[str, Selection]:
    """Every 20th document is held out where ``eval_fraction`` is 0.05; of a source with fewer documents, the end of
    each text, or the last conversation."""
    rows = np.arange(len(table))
    first = np.zeros(len(table), np.int64)
    if eval_fraction == 0:
        return {"train": Selection(rows, first, table.lengths)}
    document = np.cumsum(table.begins) - 1
    is_out = np.floor((document + 1) * eval_fraction + 1e-9) > np.floor(document * eval_fraction + 1e-9)
    if is_out.any():
        parts = {"train": rows[~is_out], "held_out": rows[is_out]}
        return {name: Selection(part, first[part], table.lengths[part]) for name, part in parts.items()}
    last = rows == len(rows) - 1
    out = np.where(table.is_whole, np.where(last, table.lengths, 0), (table.lengths * eval_fraction).astype(np.int64))
    kept = table.lengths - out
    return {
        "train": Selection(rows[kept > 0], first[kept > 0], kept[kept > 0]),
        "held_out": Selection(rows[out > 0], kept[out > 0], out[out > 0]),
    }


def _count(table: TokenTable, chosen: Selection, packing: Packing, length: int) -> SplitCounts:
    tokens = int(packing.length.sum())
    document = np.cumsum(table.begins)[chosen.rows]
    sizes = np.bincount(document, weights=chosen.lengths) if len(document) else np.zeros(1)
    return SplitCounts(
        documents=len(np.unique(document)),
        tokens=tokens,
        documents_cut=int((sizes > length).sum()),
        sequences=len(packing),
        packed_efficiency=round(tokens / max(1, len(packing) * length), 6),
    )


def _totals(shards: list[ShardCounts], table: TokenTable, too_long: Integers) -> dict[str, int]:
    """Of the documents in the sequences; ``documents_read`` of all rows."""
    names = ("documents_read", "documents", "tokens", "labels")
    totals = {name: sum(getattr(counts, name) for counts in shards) for name in names}
    for row in too_long.tolist():
        ids, labels = table.piece(row, 0, int(table.lengths[row]))
        totals["documents"] -= 1
        totals["tokens"] -= len(ids)
        totals["labels"] -= count_labels({"ids": ids, "labels": labels, "begins": True})
    return totals


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
