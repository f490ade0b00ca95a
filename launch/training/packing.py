"""From documents to packed sequences: one stream of tokens, cut into blocks, with positions that restart at each
document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from liger_dist import LigerDistError

from .corpus import IGNORED, Columns, Corpus, RowCount, tokenize
from .whole import write_whole

HELD_OUT_EVERY = 20
"""every so many-th document is held out; with fewer documents, the last part of all tokens"""
DOCUMENTS_AT_ONCE = 512
COUNTS = "data.json"
CACHE_FORMAT = 2
"""part of a cache's key: caches before format 2 have no counts, and may lack all documents after the first 512 or
1,024"""


@dataclass(frozen=True)
class Counts:
    """Numbers of documents and tokens, as ``data.json`` holds them."""

    documents_read: int
    """rows of all files, a text file being one"""
    documents_kept: int
    """documents of at least one token"""
    tokens: int
    """of all documents, before the split"""
    train_tokens: int
    held_out_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.documents_read} documents read, {self.documents_kept} with tokens; {self.tokens} tokens, "
            f"{self.train_tokens} to train on and {self.held_out_tokens} held out"
        )

    def write(self, folder: Path) -> None:
        """Writes ``data.json`` into ``folder``."""
        (folder / COUNTS).write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Stream:
    """Tokens of one split, one document after another."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    starts: NDArray[np.int64]
    """position of each document's first token"""


class Blocks:
    """A stream cut into sequences of ``length`` tokens; what remains at the end is left out."""

    def __init__(self, stream: Stream, length: int, *, restart: bool = True) -> None:
        self._stream = stream
        self._length = length
        self._restart = restart

    def __len__(self) -> int:
        return len(self._stream.ids) // self._length

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """``input_ids``, ``labels`` and, unless documents are to be one text (``restart`` is false), ``position_ids``,
        each int64 ``[len(indices), length]``.

        A document's first token is not learnt: nothing before it belongs to it. Where positions restart, the models of
        transformers attend within documents only (as long as they are given no attention mask).
        """
        ids, labels, positions = [], [], []
        for index in indices:
            here = slice(index * self._length, (index + 1) * self._length)
            place = np.arange(here.start, here.stop)
            newest = np.searchsorted(self._stream.starts, place, side="right") - 1
            start = np.maximum(self._stream.starts[newest], here.start)
            ids.append(self._stream.ids[here])
            labels.append(np.where(place == start, IGNORED, self._stream.labels[here]))
            positions.append(place - start)
        stacked = {"input_ids": ids, "labels": labels} | ({"position_ids": positions} if self._restart else {})
        return {name: torch.from_numpy(np.stack(rows).astype(np.int64)) for name, rows in stacked.items()}


class Order:
    """Which sequences every step reads: a function of the seed and the step alone, so that a resumed run reads on."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self._num_blocks = num_blocks
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self._num_blocks)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._permutation = torch.randperm(self._num_blocks, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[place]


def prepare(
    corpus: Corpus, tokenizer: Any, tokenizer_fingerprint: str, columns: Columns, vocab_size: int, cache: Path
) -> Path:
    """Tokenises the corpus once; returns the folder that :func:`load` and :func:`load_counts` read. An interrupted one
    is never taken for whole.

    Raises:
        LigerDistError: no document has a token, or a document or a token was lost on the way to the cache.
    """
    key = json.dumps([CACHE_FORMAT, corpus.fingerprint(), tokenizer_fingerprint, vocab_size, HELD_OUT_EVERY])
    folder = cache / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    read = RowCount()
    documents = list(_documents(corpus, read, tokenizer, columns, vocab_size))
    if not any(len(ids) for ids, _ in documents):
        raise LigerDistError("the data holds no token; give files with text in them.")
    streams = _split(documents)
    counts = _count(read, documents, streams)

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        counts.write(partial)
        for split, stream in streams.items():
            for name in ("ids", "labels", "starts"):
                np.save(partial / f"{split}.{name}.npy", getattr(stream, name))

    write_whole(folder, write)
    return folder


def load(folder: Path, split: str) -> Stream:
    """A split ("train" or "held_out"), mapped from disk."""
    ids, labels, starts = (
        np.load(folder / f"{split}.{name}.npy", mmap_mode="r") for name in ("ids", "labels", "starts")
    )
    return Stream(ids, labels, starts)


def load_counts(folder: Path) -> Counts:
    """Counts of the run that wrote the folder."""
    return Counts(**json.loads((folder / COUNTS).read_text()))


def _documents(
    corpus: Corpus, read: RowCount, tokenizer: Any, columns: Columns, vocab_size: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    # One iterator for all batches, beside the bar: each iter() of a tqdm object is a new generator, which closes the
    # bar when it is dropped; that of a closed bar closes the rows.
    rows = corpus.rows(read)
    with tqdm(total=corpus.num_documents(), desc="tokenising", unit=" documents", mininterval=1) as bar:
        while batch := list(islice(rows, DOCUMENTS_AT_ONCE)):
            # Plain text goes to the tokenizer together, which then uses all cores.
            plain = [index for index, (_, row) in enumerate(batch) if _is_plain_text(row, columns)]
            texts = [batch[index][1][columns.text] for index in plain]
            encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
            ready = {index: [*ids, tokenizer.eos_token_id] for index, ids in zip(plain, encoded, strict=True)}
            for index, (where, row) in enumerate(batch):
                if index in ready:
                    ids = labels = ready[index]
                else:
                    ids, labels = tokenize(where, row, tokenizer, columns, vocab_size)
                yield np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)
            bar.update(len(batch))


def _count(
    read: RowCount, documents: list[tuple[NDArray[np.int32], NDArray[np.int32]]], streams: dict[str, Stream]
) -> Counts:
    """Raises:
    LigerDistError: what goes into the cache is not all that was read.
    """
    lengths = [len(ids) for ids, _ in documents]
    kept, empty = sum(length > 0 for length in lengths), lengths.count(0)
    counts = Counts(read.documents, kept, sum(lengths), len(streams["train"].ids), len(streams["held_out"].ids))
    if kept + empty != read.documents or not read.is_complete:
        extent = "all files" if read.is_complete else "the files opened before reading stopped"
        raise LigerDistError(
            f"{kept + empty} documents were tokenised but {extent} have {read.documents}; expected every document of "
            "every file. No cache was written; report this with the kind of data and the versions of tqdm and datasets."
        )
    if counts.train_tokens + counts.held_out_tokens != counts.tokens:
        raise LigerDistError(
            f"{counts.train_tokens} tokens to train on and {counts.held_out_tokens} held out were taken from "
            f"{counts.tokens}; expected all of them. No cache was written; report this."
        )
    return counts


def _is_plain_text(row: dict[str, Any], columns: Columns) -> bool:
    others = (row.get("input_ids"), row.get(columns.messages))
    return isinstance(row.get(columns.text), str) and all(value is None for value in others)


def _split(documents: list[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> dict[str, Stream]:
    if len(documents) >= HELD_OUT_EVERY:
        held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [document for index, document in enumerate(documents) if (index + 1) % HELD_OUT_EVERY]
        return {"train": _join(train), "held_out": _join(held_out)}
    whole = _join(documents)
    cut = len(whole.ids) - len(whole.ids) // HELD_OUT_EVERY
    later = whole.starts[whole.starts > cut] - cut
    return {
        "train": Stream(whole.ids[:cut], whole.labels[:cut], whole.starts[whole.starts < cut]),
        "held_out": Stream(whole.ids[cut:], whole.labels[cut:], np.concatenate([[0], later]).astype(np.int64)),
    }


def _join(documents: list[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> Stream:
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    return Stream(
        ids=np.concatenate([ids for ids, _ in documents]),
        labels=np.concatenate([labels for _, labels in documents]),
        starts=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
    )
