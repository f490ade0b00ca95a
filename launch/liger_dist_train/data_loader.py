"""Sequences for training and evaluation: packed from token shards in a cache, or from a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from liger_dist import LigerDistError

from .cache import size_of
from .config import TrainConfig
from .dataset import Piece, TokenTable, use_cache
from .distributed import gathered, on_rank_zero, rank
from .hub import dataset_name, load_split
from .model import read_config
from .options import PRESETS
from .packing import (
    PACKING_FORMAT,
    Integers,
    Packing,
    PreparedSource,
    prepare_source,
)
from .parallel_dims import ParallelDims
from .sources import Source, find_source
from .stream import StreamedData
from .tokenization import IGNORE_INDEX, Format, Tokenization, load_tokenizer


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
        self._sources, self._split = sources, split
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

    def by_source(self) -> dict[str, CachedData]:
        """Makes the data of each source, by the last part of its path, or by all of it where two have the same."""
        paths = [source.counts["source"] for source in self._sources]
        lasts = [Path(path).name for path in paths]
        names = [last if lasts.count(last) == 1 else path for last, path in zip(lasts, paths, strict=True)]
        # A source may be given twice.
        names = [f"{name} {i}" if names.count(name) > 1 else name for i, name in enumerate(names)]
        return {name: CachedData([source], self._split, 0) for name, source in zip(names, self._sources, strict=True)}

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
        return [self._tables[source].piece(*piece) for piece in pieces]


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


def collate(
    sequences: Sequence[list[Piece]], rows: int, length: int, pad: int, *, restart: bool, top_k: int = 0
) -> dict[str, Tensor]:
    """``input_ids``, ``labels`` and, where positions restart at each document, ``position_ids``: int64 ``[rows,
    length]``; with ``top_k`` ``top_k_ids``, int32, and ``top_k_probs``, fp32, ``[rows, length, top_k]``. What no
    sequence fills is padding with labels of -100, in a document apart.

    Where positions restart, the models of transformers attend within documents only (as long as they are given no
    attention mask).
    """
    batch: dict[str, NDArray[Any]] = {
        "input_ids": np.full((rows, length), pad, np.int64),
        "labels": np.full((rows, length), IGNORE_INDEX, np.int64),
        "position_ids": np.tile(np.arange(length), (rows, 1)),
        "top_k_ids": np.full((rows, length, top_k), -1, np.int32),
        "top_k_probs": np.zeros((rows, length, top_k), np.float32),
    }
    for row, pieces in enumerate(sequences):
        start = 0
        for piece in pieces:
            here = slice(start, start + len(piece.ids))
            batch["input_ids"][row, here] = piece.ids
            batch["labels"][row, here] = piece.labels
            batch["labels"][row, start] = IGNORE_INDEX
            batch["position_ids"][row, here] = np.arange(len(piece.ids))
            if top_k and piece.top_k is not None:
                batch["top_k_ids"][row, here], log_probs = piece.top_k
                batch["top_k_probs"][row, here] = np.exp(log_probs)
            start += len(piece.ids)
        batch["position_ids"][row, start:] = np.arange(length - start)
    if not restart:
        del batch["position_ids"]
    if not top_k:
        del batch["top_k_ids"], batch["top_k_probs"]
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def token_mask(sequences: Sequence[list[Piece]], rows: int, length: int) -> Tensor | None:
    """Marks what is not padding in the batch of :func:`collate`: bool ``[rows, length]``; None without padding."""
    lengths = torch.tensor([sum(len(piece.ids) for piece in pieces) for pieces in sequences], dtype=torch.int64)
    lengths = torch.nn.functional.pad(lengths, (0, rows - len(lengths)))
    return None if (lengths == length).all() else torch.arange(length) < lengths[:, None]


def load_data(config: TrainConfig, tokenization: Tokenization, dims: ParallelDims) -> tuple[Data, CachedData | None]:
    """Loads the data to train on, and what is held out; None where nothing is. Rank 0 tokenises what is cached. With
    ``--eval_only``, returns twice what is held out.

    Raises:
        LigerDistError: on every rank: the data cannot be read or trained on.
    """
    sources, eval_sources = (
        on_rank_zero(lambda names=names: [found_source(name, config) for name in names])  # type: ignore[misc]
        for names in (config.data, config.eval_data)
    )
    if not config.eval_every and not config.eval_only:
        # Nothing is evaluated, and all of --data is trained on.
        eval_sources = []
    is_split = not (eval_sources or config.streaming) and (config.eval_every or config.eval_only)
    fraction = config.eval_fraction if is_split else 0.0
    held_out, weights = None, config.data_weights or None
    truncates = ("truncate",) if config.truncate else ()
    settings = (config.sequence_length, fraction, config.data_weights, *truncates)
    if eval_sources:
        # The held-out loss is that of the labels.
        of_labels = replace(tokenization, format=replace(tokenization.format, top_k=0))
        prepared = on_rank_zero(lambda: [_prepare(config, of_labels, source, 0.0) for source in eval_sources])
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
        truncate=config.truncate,
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
        truncate=config.truncate,
        eval_fraction=eval_fraction,
        max_bad_rows=config.max_bad_rows,
        num_proc=config.num_proc,
    )
    counts, folder = prepared.counts, prepared.shards[0].parent
    print(
        f"data: {counts['source']}: {counts['documents_read']} documents read, {counts['documents']} with "
        f"{counts['tokens']} tokens, {counts['skipped']} skipped; {size_of(folder) / 2**20:.1f} MiB in {folder} "
        "(liger-dist cache lists and removes such)",
        flush=True,
    )
    return prepared


def found_source(name: str, config: TrainConfig) -> Source:
    """Finds a source; one that ``datasets`` resolves keeps its name."""
    dataset = dataset_name(name)
    if dataset is None:
        return find_source(name)
    cache = Path(config.cache_dir)
    use_cache(cache)
    return replace(find_source(str(load_split(dataset, cache))), name=name)


def check_sources(config: TrainConfig) -> None:
    """Lists what of folders is read, and refuses sources that do not exist, on every rank: early, as they are read
    last.

    Raises:
        LigerDistError: as :func:`find_source`.
    """

    if not config.data and not (config.eval_only and config.eval_data):
        raise LigerDistError("--data names nothing; give files, folders or saved datasets.")

    def found() -> None:
        for source in (found_source(name, config) for name in (*config.data, *config.eval_data)):
            if len(source.files) > 1 or source.left_out:
                print(source.described(), flush=True)

    on_rank_zero(found)


def find_tokenization(config: TrainConfig) -> Tokenization:
    """Finds tokenizer and chat template. The size of the model's vocabulary is not known yet, and 0.

    Raises:
        LigerDistError: on every rank: no tokenizer can be loaded from ``--tokenizer``, or from the folder of
            ``--model`` where there is no ``--tokenizer``; or there is no such chat template.
    """
    folder = on_rank_zero(lambda: str(_tokenizer_folder(config)))
    template = on_rank_zero(lambda: None if config.chat_template is None else read_template(Path(config.chat_template)))
    format = Format(
        config.text_column,
        config.messages_column,
        config.train_on,
        config.chat_template_kwargs,
        config.split_special_tokens,
        config.top_k,
        config.prompt_column,
        config.completion_column,
    )
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
            f"--model {config.model} has no tokenizer; name one with --tokenizer FOLDER (liger-dist tokenizer FOLDER "
            "DATA trains one on your data)."
        )
    # Pretrained weights know only the ids of their tokenizer.
    try:
        load_tokenizer(Path(config.model))
    except LigerDistError as error:
        raise LigerDistError(
            f"--model is the folder {config.model}, which has no tokenizer that can be used; name one with --tokenizer "
            f"FOLDER ({error})"
        ) from error
    return Path(config.model)
