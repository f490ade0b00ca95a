"""Sequences of one rank from a stream of documents, tokenised while the training runs."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from liger_dist import LigerDistError

from .dataset import LISTS, Piece, count_labels, join_rows, make_piece, token_stream, use_cache
from .packing import has_label, pack, too_long_reason
from .sources import Part, Source
from .tokenization import Encoder, Tokenization

STREAM_FORMAT = 3
"""part of a stream's key; 1 packed the rows of a long text apart"""
STREAM_PART = 2**23
"""bytes of a file that are read one after another in a stream; parts are shuffled"""


class EmptyStreamError(Exception):
    """A stream has no row for this rank."""


class DocumentStream:
    """Documents of parts of files: the rows of a long text are joined, so that its tokens are held (8 bytes each, as
    those of a row of JSONL). Has the interface of an ``IterableDataset``; every place is one between two documents."""

    def __init__(self, parts: list[Part], encoder: Encoder) -> None:
        self._rows = token_stream(parts, encoder)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._rows.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for row in self._rows:
            rows.append(row | {name: _numbers(name, row) for name in LISTS if row[name] is not None})
            if row["ends"]:
                yield join_rows(rows)
                rows = []


class WeightedStreams:
    """Rows of several streams by their shares of the tokens: each row is of the stream that is furthest behind. A
    stream that ends begins again, until all of them have ended once. Has the interface of an ``IterableDataset``.

    Args:
        make: makes each stream, for a first or another pass.
        shares: of the tokens; they sum to 1.
        count: the tokens of a row that are taken.
    """

    def __init__(
        self, make: Sequence[Callable[[], Any]], shares: list[float], count: Callable[[dict[str, Any]], int]
    ) -> None:
        self._make, self._shares, self._count = make, shares, count
        self._streams = [make_one() for make_one in make]
        self._tokens = [0] * len(make)
        self._has_ended = [False] * len(make)
        self._loaded: list[Any] = [None] * len(make)
        """where each stream was, until a row of it is read"""
        self._has_read = [False] * len(make)

    def state_dict(self) -> dict[str, Any]:
        positions = [
            stream.state_dict() if has_read else loaded
            for stream, has_read, loaded in zip(self._streams, self._has_read, self._loaded, strict=True)
        ]
        return {"tokens": [*self._tokens], "has_ended": [*self._has_ended], "positions": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tokens, self._has_ended = [*state["tokens"]], [*state["has_ended"]]
        self._loaded = [*state["positions"]]
        for stream, position in zip(self._streams, self._loaded, strict=True):
            if position is not None:
                stream.load_state_dict(position)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = [iter(stream) for stream in self._streams]
        while not all(self._has_ended):
            total = sum(self._tokens) + 1
            behind = [share * total - tokens for share, tokens in zip(self._shares, self._tokens, strict=True)]
            index = behind.index(max(behind))
            row = next(rows[index], None)
            if row is None:
                if not self._has_read[index] and self._loaded[index] is None:
                    raise EmptyStreamError
                self._has_ended[index], self._has_read[index], self._loaded[index] = True, False, None
                self._streams[index] = self._make[index]()
                rows[index] = iter(self._streams[index])
                continue
            self._has_read[index] = True
            # A row that is skipped counts a little, too: a stream of them alone comes to its end.
            self._tokens[index] += max(self._count(row), 1)
            yield row


class StreamedData:
    """Sequences of one data rank, tokenised while the training runs: nothing is written and little is held.

    The parts of the files are shuffled; documents of ``window`` sequences are packed and shuffled together. Where the
    files end they are read again, in another order.

    Args:
        window: sequences.
    """

    num_sequences = None

    def __init__(
        self,
        sources: list[Source],
        weights: list[float] | None,
        tokenization: Tokenization,
        cache: Path,
        *,
        sequence_length: int,
        truncate: bool,
        window: int,
        seed: int,
        rank: int,
        size: int,
    ) -> None:
        use_cache(cache)
        self._encoder = tokenization.encoder()
        self._length, self._window, self._seed = sequence_length, window, seed
        self._truncates = truncate
        self._weights = weights
        numbered = list(enumerate(sources))
        groups = [[source] for source in numbered] if weights is not None else [numbered]
        self._groups = [_parts(group, size) for group in groups]
        self._rank, self._size = rank, size
        shares = None if weights is None else ["of tokens", *weights]
        truncates = ["truncate"] if truncate else []
        settings = [STREAM_FORMAT, tokenization.fingerprint(), sequence_length, window, seed, shares, size, *truncates]
        key = [[source.fingerprint() for source in sources], settings]
        self.fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        self._names = [source.name for source in sources]
        self._place: dict[str, Any] = {"epoch": 0, "window": 0, "stream": None, "emitted": 0}
        self._bad: list[tuple[str, int, str, int]] = []
        """file, place and reason of every bad row, and the number of its source"""
        self._counts = [Counter[str]() for _ in sources]
        self._num_packed = 0
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._pending: list[list[Piece]] = []
        self._is_started = False

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state` was asked; before the first :meth:`take`."""
        assert not self._is_started
        self._place = dict(state["place"])
        self._bad = [(file, at, reason, source) for file, at, reason, source in state["bad"]]
        self._counts = [Counter(counts) for counts in state["counts"]]
        self._num_packed = state["num_packed"]

    def state(self) -> dict[str, Any]:
        counts = [dict(counts) for counts in self._counts]
        return {"place": dict(self._place), "bad": self._bad, "counts": counts, "num_packed": self._num_packed}

    def counts(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        totals = [Counter[str]() for _ in self._counts]
        for state in states:
            for total, counts in zip(totals, state["counts"], strict=True):
                total.update(counts)
        skipped = Counter(source for state in states for *_, source in state["bad"])
        sequences = sum(state["num_packed"] for state in states)
        tokens = sum(total["tokens"] for total in totals)
        columns = ("documents", "tokens", "labels", "documents_cut", "documents_truncated")
        return {
            "sequences": sequences,
            "packed_efficiency": round(tokens / max(1, sequences * self._length), 6),
            "sources": [
                {"source": self._names[i], **{column: total[column] for column in columns}, "skipped": skipped[i]}
                for i, total in enumerate(totals)
            ],
        }

    def bad_rows(self) -> list[tuple[str, int, str]]:
        return [bad[:3] for bad in self._bad]

    def take(self, consumed: int, count: int, rank: int, size: int) -> list[list[Piece]]:
        if not self._is_started:
            self._start()
        wanted = len(range(rank, count, size))
        taken: list[list[Piece]] = []
        while len(taken) < wanted:
            if not self._pending:
                self._next_window(is_new=True)
            part = self._pending[: wanted - len(taken)]
            self._pending = self._pending[len(part) :]
            self._place["emitted"] += len(part)
            taken += part
        return taken

    def _start(self) -> None:
        self._is_started = True
        emitted = self._place["emitted"]
        threading.Thread(target=self._produce, args=(dict(self._place),), daemon=True).start()
        self._next_window(is_new=emitted == 0)
        self._pending, self._place["emitted"] = self._pending[emitted:], emitted

    def _next_window(self, *, is_new: bool) -> None:
        """Takes the next window from the thread. ``is_new`` is False for one that was counted before the run was
        resumed."""
        made = self._queue.get()
        if isinstance(made, BaseException):
            raise made
        self._place, self._pending, bad, counts = made
        if is_new:
            # A stream that begins again meets the same rows.
            self._bad = list({(file, at, of): (file, at, why, of) for file, at, why, of in [*self._bad, *bad]}.values())
            for total, seen in zip(self._counts, counts, strict=True):
                total.update(seen)
            self._num_packed += len(self._pending)

    def _produce(self, place: dict[str, Any]) -> None:
        try:
            while True:
                stream = self._stream(place["epoch"])
                if place["stream"] is not None:
                    stream.load_state_dict(place["stream"])
                rows = iter(stream)
                # Not asked before a row was read: datasets applies a loaded state with the first row only.
                state = place["stream"]
                has_documents = state is not None
                while True:
                    here = {"epoch": place["epoch"], "window": place["window"], "stream": state, "emitted": 0}
                    documents, bad = self._read_window(rows)
                    if not documents and not bad:
                        break
                    has_documents = has_documents or bool(documents)
                    sequences = self._packed(documents, place["epoch"], place["window"])
                    self._queue.put((here, sequences, bad, self._counted(documents)))
                    place["window"] += 1
                    state = stream.state_dict()
                if not has_documents:
                    raise StopIteration
                place |= {"epoch": place["epoch"] + 1, "stream": None}
        except (StopIteration, EmptyStreamError):
            self._queue.put(
                LigerDistError(
                    f"--data holds no row to train on for rank {self._rank} of {self._size} of the stream; give more "
                    "files, or leave --streaming out."
                )
            )
        except BaseException as error:
            self._queue.put(error)

    def _stream(self, epoch: int) -> Any:
        make = []
        for group in self._groups:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(group))
            mine: list[Part] = [group[index] for index in order[self._rank :: self._size]]
            make.append(partial(DocumentStream, mine, self._encoder))
        if self._weights is None:
            return make[0]()
        return WeightedStreams(make, [weight / sum(self._weights) for weight in self._weights], self._taken)

    def _taken(self, row: dict[str, Any]) -> int:
        """Counts the tokens of a row that are packed: of a conversation that is too long, those before the cut."""
        if not row["is_conversation"] or len(row["ids"]) <= self._length:
            return len(row["ids"])
        return self._length if self._truncates else 0

    def _read_window(
        self, rows: Iterator[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[tuple[str, int, str, int]]]:
        documents, bad, held = [], [], 0
        for row in rows:
            reason, tokens = row["reason"], len(row["ids"])
            if reason is None and row["is_conversation"] and tokens > self._length:
                if self._truncates:
                    row = _cut(row, slice(0, self._length)) | {"truncated": True}
                if not self._truncates or not has_label(make_piece(row, is_conversation=True)):
                    reason = too_long_reason(tokens, self._length, truncate=self._truncates)
            if reason is not None:
                bad.append((row["file"], row["at"], reason, row["source"]))
                continue
            documents.append(row)
            held += len(row["ids"])
            if held >= self._window * self._length:
                break
        return documents, bad

    def _packed(self, documents: list[dict[str, Any]], epoch: int, window: int) -> list[list[Piece]]:
        lengths = np.array([len(document["ids"]) for document in documents], dtype=np.int64)
        packing = pack(np.arange(len(documents)), lengths, self._length)
        order = np.random.default_rng([self._seed, epoch, window, self._rank]).permutation(len(packing))
        sequences = []
        for index in order.tolist():
            pieces = []
            for row, start, length in packing.pieces(index):
                document = _cut(documents[row], slice(start, start + length))
                pieces.append(make_piece(document, is_conversation=document["is_conversation"]))
            sequences.append(pieces)
        return sequences

    def _counted(self, documents: list[dict[str, Any]]) -> list[Counter[str]]:
        counts = [Counter[str]() for _ in self._names]
        for row in documents:
            tokens = len(row["ids"])
            labels = count_labels(row["ids"] if row["labels"] is None else row["labels"], self._length)
            of_row = {"documents": 1, "tokens": tokens, "labels": labels, "documents_cut": int(tokens > self._length)}
            of_row["documents_truncated"] = int(row.get("truncated", False))
            counts[row["source"]].update(of_row)
        return counts


def _cut(row: dict[str, Any], here: slice) -> dict[str, Any]:
    """The tokens of a row that the slice has."""
    return row | {name: row[name][here] for name in LISTS if row[name] is not None}


def _numbers(name: str, row: dict[str, Any]) -> NDArray[Any]:
    """``[tokens]``, or ``[tokens, K]`` of a column with K numbers for each token."""
    values = np.asarray(row[name], np.float32 if name == "top_k_log_probs" else np.int32)
    return values.reshape(len(row["ids"]), -1) if name.startswith("top_k") else values


def _parts(numbered: list[tuple[int, Source]], ranks: int) -> list[Part]:
    """Divides several sources, given with their numbers, into parts, at least one for each rank.

    Raises:
        LigerDistError: there are fewer, because the files cannot be divided.
    """
    size = min(STREAM_PART, max(1, sum(source.num_bytes for _, source in numbered) // (4 * ranks)))
    found = [part._replace(source=number) for number, source in numbered for part in source.parts(size, ranks)]
    if len(found) < ranks:
        raise LigerDistError(
            f"--streaming: {', '.join(source.name for _, source in numbered)} can be read in {len(found)} parts and "
            f"{ranks} ranks read different ones; give more files, or leave --streaming out."
        )
    return found
