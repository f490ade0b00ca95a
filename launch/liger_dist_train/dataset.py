"""Tokenises documents with ``datasets``, into memory-mapped shards in a cache folder or as a stream, and counts rows
that cannot be trained on.

A cache folder has a shard for each part of the files (at least 20 where there is enough to divide). A shard gets its
name when it is complete, so a run that was killed goes on after the shards that it finished, and jobs on several
machines may fill the same folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from tqdm import tqdm

from liger_dist import LigerDistError

from .sources import Part, Source, read_rows, where
from .tokenization import Encoder, Tokenization

CACHE_FORMAT = 7
"""part of a cache's key; 2 kept all tokens of a corpus in one file"""
SHARDS = 64
MOST_BYTES = 2**26
"""of the files, for one shard"""
SMALL = 2**22
"""bytes of data that are tokenised here, because starting processes would take longer"""
ROWS_AT_ONCE = 32
NUMBERS_OF_A_BATCH = 2**21
LISTS = ("ids", "labels", "top_k_ids", "top_k_log_probs")
"""columns with numbers of each token"""
FLAGS = ("is_conversation", "begins", "file", "at")
"""columns with one number for each row"""
SCHEMA = pa.schema(
    {
        "ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),
        "top_k_ids": pa.list_(pa.int32()),
        "top_k_log_probs": pa.list_(pa.float32()),
        "is_conversation": pa.bool_(),
        "begins": pa.bool_(),
        "file": pa.int32(),
        "at": pa.int64(),
    }
)


@dataclass(frozen=True)
class ShardCounts:
    """Of one shard, as the JSON file beside it holds them."""

    documents_read: int
    """rows of the files; a text in several rows is one document"""
    documents: int
    tokens: int
    labels: int
    """tokens that are predicted where no document is cut: all but the first one of each"""
    skipped: list[tuple[str, int, str]]
    """file, place and reason of every bad row"""
    digest: str
    """of ids, labels and probabilities"""


def use_cache(cache: Path) -> None:
    """Makes ``datasets`` leave its lock files in ``cache`` and nowhere else."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache / "datasets"


def token_stream(parts: list[Part], encoder: Encoder, read: Callable[..., Any] = read_rows) -> Any:
    """Makes an ``IterableDataset`` of rows with the columns of :class:`~liger_dist_train.tokenization.Document`,
    ``reason``, ``begins``, ``ends``, ``file``, ``at`` and ``source``; a long text is several rows. Its ``state_dict``
    is the position in the parts."""
    from datasets import IterableDataset

    rows = IterableDataset.from_generator(read, gen_kwargs={"parts": parts})
    unused = ["values", "text"]
    return rows.map(encoder, batched=True, batch_size=ROWS_AT_ONCE, remove_columns=unused)


class TokenCache:
    """The shards of one source."""

    def __init__(self, source: Source, tokenization: Tokenization, cache: Path) -> None:
        self.source = source
        self._tokenization, self._cache = tokenization, cache
        use_cache(cache)
        key = [CACHE_FORMAT, source.fingerprint(), tokenization.fingerprint()]
        mark = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        self.folder = cache / f"tokens-{mark}"
        size = min(MOST_BYTES, max(1, source.num_bytes // SHARDS))
        self._shards = _grouped(source.parts(size), size)
        self.paths = [self.folder / f"{i:05d}-of-{len(self._shards):05d}.arrow" for i in range(len(self._shards))]
        files: dict[str, int] = {}
        for part in (part for parts in self._shards for part in parts):
            files.setdefault(part.file, len(files))
        self.files = files

    def prepare(self, max_bad_rows: float, num_proc: int) -> None:
        """Writes the shards that are missing, in ``num_proc`` processes.

        Args:
            max_bad_rows: below 1, a share of all rows.

        Raises:
            LigerDistError: more than ``max_bad_rows`` rows cannot be trained on, a document was lost on the way, or
                nothing can be written.
        """
        # How many rows a share allows is known when all of them were read.
        most = math.inf if 0 < max_bad_rows < 1 else max_bad_rows
        tasks = [
            ShardTask(parts, path, self.files, most)
            for parts, path in zip(self._shards, self.paths, strict=True)
            if not path.is_file()
        ]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LigerDistError(f"{self.folder} cannot be made: {error}; choose another --cache_dir.") from error
        if tasks:
            self._write(tasks, num_proc)
        counts = self.counts()
        rows = sum(shard.documents_read for shard in counts)
        refuse_bad_rows([bad for shard in counts for bad in shard.skipped], max_bad_rows, rows)

    def _write(self, tasks: list[ShardTask], num_proc: int) -> None:
        total = self.source.num_bytes
        with tqdm(total=len(tasks), desc=f"tokenising {self.source.name}", unit=" shards", mininterval=1) as bar:
            if total < SMALL or num_proc == 1:
                encoder = self._tokenization.encoder()
                for task in tasks:
                    write_shard(task, encoder)
                    bar.update()
                return
            # Spawned: a fork would share locks with threads of gloo and tokenizers.
            context = multiprocessing.get_context("spawn")
            workers = min(num_proc, len(tasks))
            with ProcessPoolExecutor(workers, context, _start_worker, (self._tokenization, self._cache)) as pool:
                running = {pool.submit(_write_in_worker, task) for task in tasks}
                try:
                    while running:
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        for future in done:
                            future.result()
                            bar.update()
                except BrokenProcessPool as error:
                    raise LigerDistError(
                        "a process that tokenised was ended, as one that takes too much memory is; lower "
                        "--num_proc. Finished shards are kept."
                    ) from error
                finally:
                    pool.shutdown(cancel_futures=True)

    def counts(self) -> list[ShardCounts]:
        """Of every shard; call :meth:`prepare` first."""
        found = []
        for path in self.paths:
            values = json.loads(path.with_suffix(".json").read_text())
            found.append(ShardCounts(**values | {"skipped": [tuple(bad) for bad in values["skipped"]]}))
        return found

    def table(self) -> TokenTable:
        """Maps all shards; call :meth:`prepare` first."""
        return TokenTable(self.paths, list(self.files))


def _grouped(parts: list[Part], size: int) -> list[list[Part]]:
    """Groups neighbouring parts until they have ``size`` bytes; a part of a table counts as ``size``."""
    groups: list[list[Part]] = [[]]
    held = 0
    for part in parts:
        is_file = part.stop < 0
        held += Path(part.file).stat().st_size if is_file else size if part.kind in ("parquet", "saved") else part.size
        groups[-1].append(part)
        if held >= size:
            groups.append([])
            held = 0
    return [group for group in groups if group]


@dataclass(frozen=True)
class ShardTask:
    """What a process needs to write one shard."""

    parts: list[Part]
    path: Path
    files: dict[str, int]
    """their numbers"""
    max_bad_rows: float


_worker: list[Encoder] = []


def _start_worker(tokenization: Tokenization, cache: Path) -> None:
    # One core for each process; and none stays when the one that started them is killed.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    use_cache(cache)
    _worker.append(tokenization.encoder())


def _write_in_worker(task: ShardTask) -> None:
    write_shard(task, _worker[0])


def write_shard(task: ShardTask, encoder: Encoder) -> None:
    """Tokenises the rows of the parts into ``path``, with its counts in a JSON file beside it.

    Raises:
        LigerDistError: as :meth:`TokenCache.prepare`; nothing of the shard stays.
    """
    # A name that no other job has: in containers, process ids are alike.
    partial = task.path.with_name(f"{task.path.stem}.{uuid.uuid4().hex}.partial")
    try:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            counts = _write_documents(task, encoder, writer)
        counts_file = partial.with_suffix(".counts")
        counts_file.write_text(json.dumps(asdict(counts)) + "\n")
        counts_file.replace(task.path.with_suffix(".json"))
        partial.replace(task.path)
    except OSError as error:
        raise LigerDistError(
            f"{task.path} cannot be written: {error}; make room, or choose another --cache_dir."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
        partial.with_suffix(".counts").unlink(missing_ok=True)


def _write_documents(task: ShardTask, encoder: Encoder, writer: Any) -> ShardCounts:
    batch: list[dict[str, Any]] = []
    skipped: list[tuple[str, int, str]] = []
    documents = tokens = labels = held = documents_read = 0
    digest = xxhash.xxh3_128()

    def read(parts: list[Part]) -> Iterator[dict[str, Any]]:
        nonlocal documents_read
        for row in read_rows(parts):
            documents_read += row["begins"]
            yield row

    for row in token_stream(task.parts, encoder, read):
        if row["reason"] is not None:
            # Once for a text, of which all rows are bad.
            skipped += [(row["file"], row["at"], row["reason"])] * row["begins"]
            refuse_bad_rows(skipped, task.max_bad_rows, documents_read)
            continue
        documents += row["begins"]
        tokens += len(row["ids"])
        found = row["ids"] if row["labels"] is None else row["labels"]
        labels += count_labels(found) if row["begins"] else len(found)
        batch.append(row)
        for name in LISTS:
            if row[name] is not None:
                digest.update(row[name].tobytes())
                held += row[name].size
        if held > NUMBERS_OF_A_BATCH:
            writer.write_batch(_record_batch(batch, task.files))
            batch, held = [], 0
    if batch:
        writer.write_batch(_record_batch(batch, task.files))
    if documents + len(skipped) != documents_read:
        raise LigerDistError(
            f"{documents} documents were tokenised and {len(skipped)} skipped, but the files have {documents_read}; "
            "expected every document. Nothing was written; report this with the kind of data and the version of "
            "datasets."
        )
    return ShardCounts(documents_read, documents, tokens, labels, skipped, digest.hexdigest())


def count_labels(labels: NDArray[np.int32], length: int | None = None) -> int:
    """Counts the labels of a document that are predicted; the first one never is, nor is that of a later piece of
    ``length`` tokens."""
    firsts = labels[:: length or max(1, len(labels))]
    return int((labels >= 0).sum() - (firsts >= 0).sum())


def _record_batch(rows: list[dict[str, Any]], files: dict[str, int]) -> Any:
    columns = {
        **{name: _list_array([row[name] for row in rows], SCHEMA.field(name).type.value_type) for name in LISTS},
        "is_conversation": pa.array([row["is_conversation"] for row in rows], pa.bool_()),
        "begins": pa.array([row["begins"] for row in rows], pa.bool_()),
        "file": pa.array([files[row["file"]] for row in rows], pa.int32()),
        "at": pa.array([row["at"] for row in rows], pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _list_array(rows: list[NDArray[Any] | None], dtype: Any) -> Any:
    offsets = np.concatenate([[0], np.cumsum([0 if row is None else row.size for row in rows])])
    values = [row.reshape(-1) for row in rows if row is not None]
    joined = np.concatenate(values) if values else np.zeros(0, np.int32)
    mask = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(joined, dtype), mask=mask)


def allowed_rows(max_bad_rows: float, rows: int) -> float:
    """Returns how many of ``rows`` may be bad."""
    return max_bad_rows * rows if max_bad_rows < 1 else max_bad_rows


def refuse_bad_rows(skipped: list[tuple[str, int, str]], max_bad_rows: float, rows: int) -> None:
    """Raises:
    LigerDistError: more of ``rows`` than are allowed cannot be trained on; the first one is named.
    """
    if len(skipped) > allowed_rows(max_bad_rows, rows):
        raise LigerDistError(describe_bad_rows(skipped, max_bad_rows))


def describe_bad_rows(skipped: list[tuple[str, int, str]], max_bad_rows: float) -> str:
    """Says what is wrong with the first of the rows, and what to do."""
    file, at, reason = skipped[0]
    more = "" if len(skipped) == 1 else f" (the first of {len(skipped)} such rows)"
    return (
        f"{where(file, at)} {reason}{more}. Correct the data, or let such rows be skipped and counted with "
        f"--max_bad_rows N, or a share below 1; it is {max_bad_rows:g}."
    )


class Piece(NamedTuple):
    """Tokens of one document in a sequence; the first is predicted from nothing."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    is_conversation: bool = False
    top_k: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """a teacher's most likely classes for the token after each, negative for none, and their log-probabilities:
    ``[tokens, K]``"""


def make_piece(columns: Mapping[str, NDArray[Any] | None], *, is_conversation: bool) -> Piece:
    """Makes a piece of the columns :data:`LISTS`; labels are the ids where there are none."""
    ids, labels, top_k_ids, top_k_log_probs = (columns[name] for name in LISTS)
    assert ids is not None
    top_k = None if top_k_ids is None or top_k_log_probs is None else (top_k_ids, top_k_log_probs)
    return Piece(ids, ids if labels is None else labels, is_conversation, top_k)


class TokenTable:
    """The documents of all shards of a source, mapped from disk. A long text is in several rows there, which are joined
    where a piece of it is read."""

    def __init__(self, shards: list[Path], files: list[str]) -> None:
        self._files = files
        self._lists: dict[str, list[tuple[NDArray[Any], NDArray[np.int32]]]] = {name: [] for name in LISTS}
        flags: dict[str, list[Any]] = {name: [np.zeros(0, np.int64)] for name in FLAGS}
        for path in shards:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                for name, lists in self._lists.items():
                    column = batch.column(name)
                    lists.append((column.values.to_numpy(), column.offsets.to_numpy()))
                for name, columns in flags.items():
                    columns.append(batch.column(name).to_numpy(zero_copy_only=False).astype(np.int64))
        self._first_rows = np.cumsum([0, *(len(offsets) - 1 for _, offsets in self._lists["ids"])])
        """of the batches"""
        sizes = [np.diff(offsets).astype(np.int64) for _, offsets in self._lists["ids"]]
        self._tokens_before = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        """of each row, and of the end"""
        is_conversation, begins, file, at = (np.concatenate(flags[name]) for name in FLAGS)
        first = np.flatnonzero(begins)
        self.is_conversation = is_conversation[first].astype(bool)
        self._file, self._at = file[first], at[first]
        self._first_token = self._tokens_before[first]
        """of each document"""
        self.lengths = np.diff(self._first_token, append=self._tokens_before[-1])

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, document: int) -> tuple[str, int]:
        """Returns the file of a document, and its place there."""
        return self._files[self._file[document]], int(self._at[document])

    def piece(self, document: int, start: int, length: int) -> Piece:
        """Returns ``length`` tokens of a document, from token ``start`` on."""
        first = int(self._first_token[document]) + start
        stop = first + length
        row = int(np.searchsorted(self._tokens_before, first, side="right")) - 1
        parts: list[dict[str, NDArray[Any] | None]] = []
        while first < stop:
            before, end = self._tokens_before[row : row + 2].tolist()
            count = min(stop, end) - first
            parts.append({name: self._numbers(name, row, first - before, count) for name in LISTS})
            first, row = first + count, row + 1
        return make_piece(join_rows(parts), is_conversation=bool(self.is_conversation[document]))

    def _numbers(self, name: str, row: int, start: int, length: int) -> NDArray[Any] | None:
        """Returns ``[length]``, or ``[length, K]`` of a column with K numbers for each token; None for a row without
        any."""
        batch = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        values, offsets = self._lists[name][batch]
        begin, end = offsets[row - self._first_rows[batch] :][:2]
        before, after = self._tokens_before[row : row + 2]
        each = int(end - begin) // max(1, int(after - before))
        if each == 0:
            return None
        part = values[begin + start * each : begin + (start + length) * each]
        return part if name in ("ids", "labels") else part.reshape(length, each)


def join_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the columns :data:`LISTS` of the rows of a document; other columns are those of the first row."""
    if len(rows) == 1:
        return rows[0]
    columns = {name: [row[name] for row in rows if row[name] is not None] for name in LISTS}
    return rows[0] | {name: np.concatenate(found) if found else None for name, found in columns.items()}
