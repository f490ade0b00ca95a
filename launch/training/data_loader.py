"""Sequences for training and evaluation: packed from token shards in a cache, or from a stream."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from liger_dist import LigerDistError

from .config import TrainConfig
from .dataset import TokenTable, count_labels, token_stream, use_cache
from .distributed import gathered, on_rank_zero, rank
from .model import PRESETS, read_config
from .packing import (
    PACKING_FORMAT,
    Integers,
    Packing,
    PreparedSource,
    pack,
    prepare_source,
    too_long_reason,
)
from .parallel_dims import ParallelDims
from .sources import Part, Source, find_source
from .tokenization import IGNORE_INDEX, Format, Tokenization, load_tokenizer

STREAM_PART = 2**23
"""bytes of a file that are read one after another in a stream; parts are shuffled"""


class Piece(NamedTuple):
    """Tokens of one document in a sequence; the first is predicted from nothing."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]


class Data(Protocol):
    """Sequences that steps take, in an order that the seed decides."""

    @property
    def fingerprint(self) -> str:
        """Changes with the data, its order, and what makes sequences of it."""

    @property
    def num_sequences(self) -> int | None:
        """Of one epoch; None for a stream."""

    def take(self, consumed: int, count: int, rank: int, size: int) -> list[list[Piece]]:
        """Takes the sequences of data rank ``rank`` of ``size``, of the ``count`` after the first ``consumed``."""

    def bad_rows(self) -> list[tuple[str, int, str]]:
        """Lists the rows that this rank has skipped in its stream; none of cached data, whose rows are counted
        before."""

    def state(self) -> dict[str, Any]:
        """Returns the position of this rank's stream, as JSON."""

    def counts(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes the content of ``data.json``, from the states of all data ranks."""


class CachedData:
    """Packed sequences of one split of several sources.

    Args:
        split: of the sources, whose other split is not read.
        weights: how often a sequence is of each source; None for as often as it has sequences.
        settings: all else that makes sequences of the tokens, for the fingerprint.
    """

    def __init__(
        self,
        sources: list[PreparedSource],
        split: str,
        seed: int,
        weights: list[float] | None = None,
        settings: Sequence[Any] = (),
    ) -> None:
        self._sources = sources
        self._tables = [TokenTable(source.shards, source.files) for source in sources]
        packings = [Packing.load(source.packings[split]) for source in sources]
        self._packings = packings
        self.num_sequences: int = sum(len(packing) for packing in packings)
        self._order = Order([len(packing) for packing in packings], seed, weights)
        # Packed from the longest document to the shortest: the first ones are no sample of all.
        self._shuffled = np.random.default_rng(0).permutation(self.num_sequences)
        key = [PACKING_FORMAT, [source.digests for source in sources], settings]
        self.fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def take(self, consumed: int, count: int, rank: int, size: int) -> list[list[Piece]]:
        return [self._sequence(*self._order[consumed + index]) for index in range(rank, count, size)]

    def in_order(self, first: int, count: int) -> list[list[Piece]]:
        """Takes sequences in an order that is the same in every run; fewer at its end."""
        firsts = np.cumsum([0, *map(len, self._packings)])
        places = self._shuffled[first : first + count]
        sources = np.searchsorted(firsts, places, side="right") - 1
        return [self._sequence(int(s), int(p - firsts[s])) for s, p in zip(sources, places, strict=True)]

    def places(self, consumed: int, count: int, rank: int, size: int) -> list[str]:
        """Lists the files of the documents in the sequences that :meth:`take` gives."""
        found = []
        for index in range(rank, count, size):
            source, sequence = self._order[consumed + index]
            rows = {row for row, _, _ in self._packings[source].pieces(sequence)}
            found += [self._tables[source].place(row)[0] for row in sorted(rows)]
        return list(dict.fromkeys(found))

    def bad_rows(self) -> list[tuple[str, int, str]]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def counts(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"sources": [source.counts for source in self._sources]}

    def _sequence(self, source: int, sequence: int) -> list[Piece]:
        pieces = self._packings[source].pieces(sequence)
        return [Piece(*self._tables[source].piece(*piece)) for piece in pieces]


class Order:
    """Maps a position of the run to a source and one of its sequences: a function of the seed, so that a resumed run
    continues."""

    def __init__(self, sizes: list[int], seed: int, weights: list[float] | None) -> None:
        self._sizes, self._seed, self._weights = sizes, seed, weights
        self._epoch = -1

    def __getitem__(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, sum(self._sizes))
        if epoch != self._epoch:
            self._epoch, self._sources, self._indices = epoch, *self._of_epoch(epoch)
        return int(self._sources[place]), int(self._indices[place])

    def _of_epoch(self, epoch: int) -> tuple[Integers, Integers]:
        total = sum(self._sizes)
        if self._weights is None:
            order = np.random.default_rng([self._seed, epoch]).permutation(total)
            firsts = np.cumsum([0, *self._sizes])
            sources = np.searchsorted(firsts, order, side="right") - 1
            return sources, order - firsts[sources]
        # A source is read from its beginning again, in another order, when all of it has been taken.
        taken = sum((self._taken(before) for before in range(epoch)), np.zeros(len(self._sizes), np.int64))
        sources = self._drawn(epoch)
        indices = np.empty(total, np.int64)
        for source, size in enumerate(self._sizes):
            mine = np.flatnonzero(sources == source)
            places = taken[source] + np.arange(len(mine))
            rounds = range(int(taken[source]) // size, (int(taken[source]) + len(mine)) // size + 1)
            orders = [np.random.default_rng([self._seed, source, turn]).permutation(size) for turn in rounds]
            indices[mine] = np.concatenate(orders)[places - rounds[0] * size]
        return sources, indices

    def _drawn(self, epoch: int) -> Integers:
        weights = np.array(self._weights or [1.0])
        weights /= weights.sum()
        return np.random.default_rng([self._seed, epoch]).choice(len(weights), sum(self._sizes), p=weights)

    def _taken(self, epoch: int) -> Integers:
        return np.bincount(self._drawn(epoch), minlength=len(self._sizes))


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
        window: int,
        seed: int,
        rank: int,
        size: int,
    ) -> None:
        use_cache(cache)
        self._encoder = tokenization.encoder()
        self._length, self._window, self._seed = sequence_length, window, seed
        self._weights = weights
        groups = [[source] for source in sources] if weights is not None else [sources]
        self._groups = [_parts(group, size) for group in groups]
        self._rank, self._size = rank, size
        settings = [tokenization.fingerprint(), sequence_length, window, seed, weights, size]
        key = [[source.fingerprint() for source in sources], settings]
        self.fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        self._names = [source.name for source in sources]
        self._source_of = {
            name: i for i, s in enumerate(sources) for f in s.files for name in (str(f), str(f.resolve()))
        }
        self._place: dict[str, Any] = {"epoch": 0, "window": 0, "stream": None, "emitted": 0}
        self._bad: list[tuple[str, int, str]] = []
        self._counts = [Counter[str]() for _ in sources]
        self._num_packed = 0
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._pending: list[list[Piece]] = []
        self._is_started = False

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state` was asked; before the first :meth:`take`."""
        assert not self._is_started
        self._place = dict(state["place"])
        self._bad = [(file, at, reason) for file, at, reason in state["bad"]]
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
        skipped = Counter(self._index(file) for state in states for file, _, _ in state["bad"])
        sequences = sum(state["num_packed"] for state in states)
        tokens = sum(total["tokens"] for total in totals)
        columns = ("documents", "tokens", "labels", "documents_cut")
        return {
            "sequences": sequences,
            "packed_efficiency": round(tokens / max(1, sequences * self._length), 6),
            "sources": [
                {"source": self._names[i], **{column: total[column] for column in columns}, "skipped": skipped[i]}
                for i, total in enumerate(totals)
            ],
        }

    def bad_rows(self) -> list[tuple[str, int, str]]:
        return self._bad

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
            self._bad = list({row[:2]: row for row in [*self._bad, *bad]}.values())
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
        except StopIteration:
            # Of interleave_datasets, too, where one of the sources has no row for this rank.
            self._queue.put(
                LigerDistError(
                    f"--data holds no row to train on for rank {self._rank} of {self._size} of the stream; give more "
                    "files, or leave --streaming out."
                )
            )
        except BaseException as error:
            self._queue.put(error)

    def _stream(self, epoch: int) -> Any:
        from datasets import interleave_datasets

        streams = []
        for group in self._groups:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(group))
            mine: list[Part] = [group[index] for index in order[self._rank :: self._size]]
            streams.append(token_stream(mine, self._encoder))
        if self._weights is None:
            return streams[0]
        shares = np.array(self._weights) / np.sum(self._weights)
        seed = int(np.random.default_rng([self._seed, epoch, self._rank]).integers(2**31))
        return interleave_datasets(streams, probabilities=shares.tolist(), seed=seed, stopping_strategy="all_exhausted")

    def _read_window(self, rows: Iterator[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[str, int, str]]]:
        documents, bad, held = [], [], 0
        for found in rows:
            # Interleaved streams give lists.
            lists = {name: found[name] for name in ("ids", "labels") if found[name] is not None}
            row = found | {name: np.asarray(values, np.int32) for name, values in lists.items()}
            reason = found["reason"]
            if reason is None and row["is_conversation"] and len(row["ids"]) > self._length:
                reason = too_long_reason(len(row["ids"]), self._length)
            if reason is not None:
                bad.append((row["file"], row["at"], reason))
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
                ids, labels = documents[row]["ids"], documents[row]["labels"]
                here = slice(start, start + length)
                pieces.append(Piece(ids[here], ids[here] if labels is None else labels[here]))
            sequences.append(pieces)
        return sequences

    def _counted(self, documents: list[dict[str, Any]]) -> list[Counter[str]]:
        counts = [Counter[str]() for _ in self._names]
        for row in documents:
            tokens = len(row["ids"])
            is_cut = row["begins"] and (tokens > self._length or not row["ends"])
            of_row = {"documents": int(row["begins"]), "tokens": tokens, "labels": count_labels(row)}
            counts[self._index(row["file"])].update(of_row | {"documents_cut": int(is_cut)})
        return counts

    def _index(self, file: str) -> int:
        """Returns the source of a file, whose path a checkpoint may spell in another way."""
        found = self._source_of.get(file)
        return self._source_of[str(Path(file).resolve())] if found is None else found


def _parts(sources: list[Source], ranks: int) -> list[Part]:
    """Divides several sources into parts, at least one for each rank.

    Raises:
        LigerDistError: there are fewer, because the files cannot be divided.
    """
    size = min(STREAM_PART, max(1, sum(source.num_bytes for source in sources) // (4 * ranks)))
    found = [part for source in sources for part in source.parts(size)]
    if len(found) < ranks:
        raise LigerDistError(
            f"--streaming: {', '.join(source.name for source in sources)} can be read in {len(found)} parts and "
            f"{ranks} ranks read different ones; give more files, or leave --streaming out."
        )
    return found


def collate(sequences: Sequence[list[Piece]], rows: int, length: int, pad: int, *, restart: bool) -> dict[str, Tensor]:
    """``input_ids``, ``labels`` and, where positions restart at each document, ``position_ids``: int64 ``[rows,
    length]``. What no sequence fills is padding with labels of -100, in a document apart.

    Where positions restart, the models of transformers attend within documents only (as long as they are given no
    attention mask).
    """
    batch = {
        "input_ids": np.full((rows, length), pad, np.int64),
        "labels": np.full((rows, length), IGNORE_INDEX, np.int64),
        "position_ids": np.tile(np.arange(length), (rows, 1)),
    }
    for row, pieces in enumerate(sequences):
        start = 0
        for ids, labels in pieces:
            here = slice(start, start + len(ids))
            batch["input_ids"][row, here] = ids
            batch["labels"][row, here] = labels
            batch["labels"][row, start] = IGNORE_INDEX
            batch["position_ids"][row, here] = np.arange(len(ids))
            start += len(ids)
        batch["position_ids"][row, start:] = np.arange(length - start)
    if not restart:
        del batch["position_ids"]
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def load_data(config: TrainConfig, tokenization: Tokenization, dims: ParallelDims) -> tuple[Data, CachedData | None]:
    """Loads the data to train on, and what is held out; None where nothing is. Rank 0 tokenises what is cached. With
    ``--eval_only``, returns twice what is held out.

    Raises:
        LigerDistError: on every rank: the data cannot be read or trained on.
    """
    if not config.data and not (config.eval_only and config.eval_data):
        raise LigerDistError("--data names nothing; give files, folders or saved datasets.")
    sources = on_rank_zero(lambda: [find_source(name) for name in config.data])
    eval_sources = on_rank_zero(lambda: [find_source(name) for name in config.eval_data])
    fraction = 0.0 if eval_sources or config.streaming else config.eval_fraction
    held_out, weights = None, config.data_weights or None
    settings = (config.sequence_length, fraction, config.data_weights)
    if eval_sources:
        prepared = on_rank_zero(lambda: [_prepare(config, tokenization, source, 0.0) for source in eval_sources])
        held_out = CachedData(prepared, "train", config.seed)
    if not config.streaming and not (config.eval_only and held_out):
        prepared = on_rank_zero(lambda: [_prepare(config, tokenization, source, fraction) for source in sources])
        if fraction:
            held_out = CachedData(prepared, "held_out", config.seed)
        if not config.eval_only:
            return CachedData(prepared, "train", config.seed, weights, settings), held_out
    if config.eval_only:
        if held_out is None:
            fraction_too = "" if config.streaming else ", or an --eval_fraction above 0"
            raise LigerDistError(f"--eval_only needs held-out data; give --eval_data{fraction_too}.")
        return held_out, held_out
    _check_same_files(sources)
    stream = StreamedData(
        sources,
        weights,
        tokenization,
        Path(config.cache_dir),
        sequence_length=config.sequence_length,
        window=config.shuffle_window,
        seed=config.seed,
        rank=dims.data_rank(rank()),
        size=dims.data_size,
    )
    # Times of the files may differ where each machine has a copy.
    stream.fingerprint = on_rank_zero(lambda: stream.fingerprint)
    return stream, held_out


def _check_same_files(sources: list[Source]) -> None:
    """Raises:
    LigerDistError: on every rank: a rank reads other files than rank 0, and would read other parts of them.
    """
    for source in sources:
        sizes = gathered(_sizes(source))
        for other, found in enumerate(sizes):
            if found != sizes[0]:
                raise LigerDistError(
                    f"--streaming: the files of {source.name} have other sizes on rank {other} than on rank 0; "
                    "expected the same data on all machines."
                )


def _sizes(source: Source) -> list[int]:
    try:
        return [size for _, size, _ in source.fingerprint()]
    except OSError:
        # Of no file; the ranks compare it.
        return [-1]


def _prepare(config: TrainConfig, tokenization: Tokenization, source: Source, eval_fraction: float) -> PreparedSource:
    prepared = prepare_source(
        source,
        tokenization,
        Path(config.cache_dir),
        sequence_length=config.sequence_length,
        eval_fraction=eval_fraction,
        max_bad_rows=config.max_bad_rows,
        num_proc=config.num_proc,
    )
    counts = prepared.counts
    print(
        f"data: {counts['source']}: {counts['documents_read']} documents read, {counts['documents']} with "
        f"{counts['tokens']} tokens, {counts['skipped']} skipped",
        flush=True,
    )
    return prepared


def check_sources(config: TrainConfig) -> None:
    """Refuses sources that do not exist, on every rank: early, as they are read last.

    Raises:
        LigerDistError: as :func:`find_source`.
    """
    on_rank_zero(lambda: [find_source(name).name for name in (*config.data, *config.eval_data)])


def find_tokenization(config: TrainConfig) -> Tokenization:
    """Finds tokenizer and chat template. The size of the model's vocabulary is not known yet, and 0.

    Raises:
        LigerDistError: on every rank: no tokenizer can be loaded from ``--tokenizer``, or from the folder of
            ``--model`` where there is no ``--tokenizer``; or there is no such chat template.
    """
    folder = on_rank_zero(lambda: str(_tokenizer_folder(config)))
    template = on_rank_zero(lambda: None if config.chat_template is None else read_template(Path(config.chat_template)))
    format = Format(config.text_column, config.messages_column, config.train_on_prompts)
    return Tokenization(folder, template, format, vocab_size=0)


def read_template(file: Path) -> str:
    """Raises:
    LigerDistError: it cannot be read as text.
    """
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LigerDistError(f"--chat_template {file} cannot be read: {error}; give a Jinja template.") from error


def _tokenizer_folder(config: TrainConfig) -> Path:
    if config.tokenizer is not None:
        load_tokenizer(Path(config.tokenizer))
        return Path(config.tokenizer)
    # The name of a preset may be that of another folder.
    if config.model not in PRESETS:
        read_config(Path(config.model))
    if config.model in PRESETS or not Path(config.model).is_dir():
        raise LigerDistError(
            f"--model {config.model} has no tokenizer; name one with --tokenizer FOLDER (launch/demo/make_tokenizer.py "
            "trains one on your data)."
        )
    # Pretrained weights know the ids of their own tokenizer only.
    try:
        load_tokenizer(Path(config.model))
    except LigerDistError as error:
        raise LigerDistError(
            f"--model is the folder {config.model}, which has no tokenizer that can be used; name one with --tokenizer "
            f"FOLDER ({error})"
        ) from error
    return Path(config.model)
