"""Prints rows as they will be trained, before any model is built; and looks at the first rows of the data."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from liger_dist import LigerDistError

from .config import TrainConfig
from .conversations import texts_in
from .data_loader import find_tokenization, found_source
from .dataset import LISTS, Piece, count_labels, describe_bad_rows, make_piece
from .distributed import on_rank_zero
from .hub import with_local_models
from .model import find_config
from .options import PRESETS, option
from .packing import has_label, pack, too_long_reason
from .sources import Source, read_rows, where
from .tokenization import Encoder, Tokenization

READ = 256
"""rows of a source that are looked at"""
CHECKED, CHECKED_CHARACTERS = 64, 2**18
"""rows of a source that a run looks at, and their characters: after the row that has the last of these it goes on"""
COUNTED, NOT_COUNTED, BORDER, RESET = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
"""of a terminal"""


@dataclass(frozen=True)
class ShowConfig(TrainConfig):
    """Prints rows as they will be trained: the options of liger-dist train, and --rows."""

    rows: int = option(2, "packed rows of each source that are printed")


@dataclass(frozen=True)
class ShownRow:
    """A row of the data and what it becomes."""

    file: str
    at: int
    piece: Piece | None
    reason: str | None
    """why it is bad"""


def first_rows(
    source: Source, encoder: Encoder, config: TrainConfig, most: int = READ, characters: float = math.inf
) -> Iterator[ShownRow]:
    """Encodes the first rows of a source, ``most`` of them and one with the last of ``characters`` at most. A long text
    is as many as it has parts."""
    read: list[dict[str, Any]] = []
    for row in read_rows(source.iter_parts(2**22)):
        read.append(row)
        characters -= sum(map(len, texts_in([row["text"], row["values"]])))
        if len(read) == most or characters <= 0:
            break
    if not read:
        return
    found = encoder({name: [row[name] for row in read] for name in read[0]})
    for index, row in enumerate(read):
        columns = {name: values[index] for name, values in found.items()}
        reason = columns["reason"]
        piece = None
        if reason is None:
            piece = make_piece({n: columns[n] for n in LISTS}, is_conversation=columns["is_conversation"])
            if piece.is_conversation and len(piece.ids) > config.sequence_length:
                reason = too_long_reason(len(piece.ids), config.sequence_length, truncate=config.truncate)
                cut = _cut(piece, config.sequence_length)
                piece, reason = (cut, None) if config.truncate and has_label(cut) else (piece, reason)
        yield ShownRow(row["file"], row["at"], piece if reason is None else None, reason)


def check_first_rows(config: TrainConfig, tokenization: Tokenization) -> None:
    """Looks at the first rows of each source, so that wrong ones are refused before a model is built; all of them are
    counted later. Nothing with a share in ``max_bad_rows``.

    Raises:
        LigerDistError: on every rank: more of them than are allowed cannot be trained on.
    """
    if 0 < config.max_bad_rows < 1:
        return

    def look() -> None:
        encoder = tokenization.encoder()
        for name in config.data:
            rows = first_rows(found_source(name, config), encoder, config, CHECKED, CHECKED_CHARACTERS)
            bad = [(row.file, row.at, row.reason) for row in rows if row.reason is not None]
            if len(bad) > config.max_bad_rows:
                raise LigerDistError(describe_bad_rows(bad, config.max_bad_rows))

    on_rank_zero(look)


def show(given: ShowConfig) -> None:
    """Prints ``given.rows`` packed rows of each source, and what is wrong with the first :data:`READ` rows."""
    config = with_local_models(given)
    if not config.data:
        raise LigerDistError("--data names nothing; give files, folders or saved datasets.")
    tokenization = find_tokenization(config)
    tokenizer = tokenization.load_tokenizer()
    vocab_size = len(tokenizer)
    if config.model not in PRESETS:
        vocab_size = find_config(config, vocab_size).get_text_config().vocab_size
    encoder = Encoder(tokenizer, tokenization.format, vocab_size)
    is_coloured = sys.stdout.isatty()
    counted = f"{COUNTED}counted{RESET}, {NOT_COUNTED}not counted{RESET}" if is_coloured else "⟦counted⟧, not counted"
    print(f"tokens in the loss: {counted}")
    for name in config.data:
        rows = list(first_rows(found_source(name, config), encoder, config))
        _print_source(name, rows, given, tokenizer, is_coloured=is_coloured)


def _print_source(name: str, rows: list[ShownRow], config: ShowConfig, tokenizer: Any, *, is_coloured: bool) -> None:
    good = [row for row in rows if row.piece is not None and has_label(row.piece)]
    pieces = [row.piece for row in good if row.piece is not None]
    for index, sequence in enumerate(_packed(pieces, config)):
        if index == config.rows:
            break
        used = sum(stop - start for _, start, stop in sequence)
        labels = sum(_labels(pieces[document], start, stop).sum() for document, start, stop in sequence)
        title = f"{name}: row {index + 1}, {used} of {config.sequence_length} tokens, {labels} counted"
        print(_border(title, is_coloured=is_coloured))
        for document, start, stop in sequence:
            row, piece = good[document], pieces[document]
            is_label = _labels(piece, start, stop)
            part = "" if stop - start == len(piece.ids) else f", tokens {start} to {stop} of {len(piece.ids)}"
            kind = "conversation" if piece.is_conversation else "text"
            title = f"  {where(row.file, row.at)}: {kind}, {stop - start} tokens, {is_label.sum()} counted{part}"
            print(_border(title, is_coloured=is_coloured))
            print(_written(piece.ids[start:stop], is_label, tokenizer, is_coloured=is_coloured))
    tokens = sum(len(piece.ids) for piece in pieces)
    labels = sum(count_labels(piece.labels, config.sequence_length) for piece in pieces)
    print(f"{name}: of the first {len(rows)} rows {len(good)} with {tokens} tokens, {labels} counted")
    for reason, count in Counter(row.reason for row in rows if row.reason is not None).most_common(5):
        first = next(row for row in rows if row.reason == reason)
        print(f"{name}: {count} bad: {where(first.file, first.at)} {reason}")


def _cut(piece: Piece, length: int) -> Piece:
    top_k = None if piece.top_k is None else (piece.top_k[0][:length], piece.top_k[1][:length])
    return Piece(piece.ids[:length], piece.labels[:length], piece.is_conversation, top_k)


def _packed(pieces: list[Piece], config: TrainConfig) -> Iterator[list[tuple[int, int, int]]]:
    """Yields the documents of each row, with the first token and the one after the last."""
    if not pieces:
        return
    packing = pack(np.arange(len(pieces)), np.array([len(p.ids) for p in pieces]), config.sequence_length)
    # Packed from the longest to the shortest; those of the first documents come first.
    rows = [[(d, start, start + size) for d, start, size in packing.pieces(i)] for i in range(len(packing))]
    yield from sorted(rows, key=min)


def _labels(piece: Piece, start: int, stop: int) -> Any:
    """True for tokens that are predicted: bool ``[stop - start]``; the first of a document or of a part never is."""
    found = piece.labels[start:stop] >= 0
    found[:1] = False
    return found


def _written(ids: Any, is_label: Any, tokenizer: Any, *, is_coloured: bool) -> str:
    cuts = [0, *(np.flatnonzero(np.diff(is_label)) + 1).tolist(), len(ids)]
    text = ""
    for first, stop in itertools.pairwise(cuts):
        part = tokenizer.decode(ids[first:stop])
        if is_coloured:
            colour = COUNTED if is_label[first] else NOT_COUNTED
            text += "\n".join(f"{colour}{line}{RESET}" for line in part.split("\n"))
        else:
            text += f"⟦{part}⟧" if is_label[first] else part
    return text


def _border(text: str, *, is_coloured: bool) -> str:
    line = f"── {text} ".ljust(100, "─")
    return f"{BORDER}{line}{RESET}" if is_coloured else line
