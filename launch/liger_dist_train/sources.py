"""Reads documents as rows: text, JSON, JSONL, CSV, parquet and saved datasets, in parts that any process can read."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from liger_dist import LigerDistError

from .json_text import parse_json
from .options import COMPRESSED

SUFFIXES = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""words in the path of a table or a file of rows that name its split, as ``datasets`` reads them"""
MOST_NAMED = 5
GROUP_PARTS = 8
"""most parts of a row group of parquet, which is decoded from its start for each: 4.5 times as much as once"""
TEXT_PART = 2**18
"""characters of a text that are tokenised at once: a longer one is read and tokenised in parts"""
BREAK = re.compile(r"(?<=\S)\n(?=\S)|(?<=\S)(?= \S)")
"""after a line break or before a space, where byte-level tokenizers never merge: parts have the tokens of the text"""


class Part(NamedTuple):
    """Rows of one file that one process reads: bytes of a file of lines, rows of a table, or all of it."""

    file: str
    kind: str
    start: int
    stop: int
    """exclusive; -1 for the end"""
    source: int = 0
    """number of the source that it is of, where several are read together"""

    @property
    def size(self) -> int:
        return self.stop - self.start


class Row(NamedTuple):
    """One document, or a part of a long text."""

    file: str
    at: int
    """byte of the first character in a file of lines, (last) line of CSV, otherwise the row"""
    values: dict[str, Any] | None
    """columns; None for a broken row and for text of a file"""
    reason: str | None = None
    """why it is broken"""
    text: str | None = None
    """of a file of text"""
    begins: bool = True
    ends: bool = True
    source: int = 0
    """number of its part"""


@dataclass(frozen=True)
class Source:
    """What one entry of ``--data`` names."""

    name: str
    files: tuple[Path, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """path in a folder and reason of what is not read"""

    def described(self) -> str:
        """Lists what of a folder is read and what is not, in a line each."""
        read = _some([str(file.relative_to(self.name)) for file in self.files])
        lines = [f"data: {self.name}: files that are read ({len(self.files)}): {read}"]
        for reason in dict.fromkeys(reason for _, reason in self.left_out):
            names = [name for name, cause in self.left_out if cause == reason]
            lines.append(f"data: {self.name}: not read, {reason} ({len(names)}): {_some(names)}")
        return "\n".join(lines)

    def parts(self, size: int, ranks: int = 1) -> list[Part]:
        """Divides the files into parts of about ``size`` bytes (tables: rows of about as many bytes), in the order of
        the files. A row group of parquet has at most :data:`GROUP_PARTS` parts, or one for each rank."""
        return list(self.iter_parts(size, ranks))

    def iter_parts(self, size: int, ranks: int = 1) -> Iterator[Part]:
        """Yields :meth:`parts`, looking into a file when its first part is asked for."""
        for file in self.files:
            yield from _parts_of(file, size, max(GROUP_PARTS, ranks))

    @property
    def num_bytes(self) -> int:
        return sum(_size_of(file) for file in self.files)

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Lists path, size and time of every file."""
        files = [f for file in self.files for f in (sorted(file.rglob("*")) if file.is_dir() else [file])]
        return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def find_source(name: str) -> Source:
    """Finds the files of a path: a file, a folder of files, or the folder of a saved dataset.

    Raises:
        LigerDistError: the path does not exist, is empty, or is of an unknown kind.
    """
    path = Path(name)
    known = ", ".join(SUFFIXES)
    if (path / "snapshots").is_dir() and (path / "blobs").is_dir():
        return _find_snapshot(path)
    for found in sorted(path.rglob("dataset_dict.json"))[:1]:
        splits = json.loads(found.read_text())["splits"]
        raise LigerDistError(
            f"--data {found.parent} holds the splits {', '.join(splits)}; name one of them, such as --data "
            f"{found.parent / splits[0]}."
        )
    if (path / "dataset_info.json").is_file():
        return Source(name, (path,))
    if path.is_dir():
        inside, left_out = _files_of(path)
        if not inside:
            raise LigerDistError(f"the folder {path} holds no data; expected files of {known}.")
        return Source(name, inside, left_out)
    if not path.is_file():
        raise LigerDistError(
            f"the data file {path} does not exist; give a file or a folder, or a dataset of the hub as "
            "ORG/NAME[@REVISION][,SUBSET][:SPLIT]."
        )
    if _kind_of(path) is None:
        raise LigerDistError(f"the data file {path} is of an unknown kind; expected one of {known}.")
    if path.stat().st_size == 0:
        raise LigerDistError(f"the data file {path} is empty; give a file with text in it.")
    return Source(name, (path,))


def _find_snapshot(folder: Path) -> Source:
    """Finds the files of a dataset in the cache of a hub, which keeps a folder for each revision.

    Raises:
        LigerDistError: it has none, or several.
    """
    found = sorted(str(snapshot) for snapshot in (folder / "snapshots").iterdir())
    if len(found) != 1:
        way_out = f"name the one to read: {_some(found)}" if found else "get one: hf download NAME --repo-type dataset"
        raise LigerDistError(
            f"--data {folder} is a folder of a hub's cache with {len(found)} snapshots; expected one, so {way_out}."
        )
    return find_source(found[0])


def _files_of(folder: Path) -> tuple[tuple[Path, ...], tuple[tuple[str, str], ...]]:
    """Returns the files and saved datasets of a folder that are read, and those left out with their reasons."""
    found: dict[Path, str | None] = {}
    visited: set[Path] = set()

    def visit(inside: Path) -> None:
        if inside.resolve() in visited:
            return
        visited.add(inside.resolve())
        for entry in sorted(inside.iterdir()):
            if entry.name.startswith(".") or entry.name == "__pycache__":
                found[entry] = "hidden"
            elif entry.is_dir() and not (entry / "dataset_info.json").is_file():
                visit(entry)
            elif not entry.exists():
                found[entry] = "a link to nothing"
            elif _kind_of(entry) is None:
                found[entry] = "of an unknown kind"
            elif entry.is_file() and entry.stat().st_size == 0:
                found[entry] = "empty"
            else:
                found[entry] = None

    visit(folder)
    data = [entry for entry, reason in found.items() if reason is None]
    rows = [entry for entry in data if _kind_of(entry) != "text"]
    # Code and pages have folders of such names, too.
    splits = {e: _split_of(e.relative_to(folder)) for e in data if e in rows or ".txt" in e.suffixes}
    if "train" in splits.values():
        found |= {entry: f"split {split}" for entry, split in splits.items() if split not in (None, "train")}
    if rows and (folder / "README.md") in found:
        found[folder / "README.md"] = "the card of the dataset"
    if rows and (folder / "dataset_infos.json") in found:
        found[folder / "dataset_infos.json"] = "the card of the dataset"
    read = tuple(sorted(entry for entry, reason in found.items() if reason is None))
    return read, tuple((str(entry.relative_to(folder)), reason) for entry, reason in found.items() if reason)


def _split_of(path: Path) -> str | None:
    """Returns the split that a path names: ``data/train-00000-of-00001.parquet``, ``test.jsonl``, ``dev/a.csv``."""
    words = re.split(r"[-._ /0-9]+", str(path).lower())
    return next((split for split, names in SPLITS.items() if any(word in names for word in words)), None)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def read_rows(parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
    """Yields the rows of the parts, as the fields of :class:`Row`.

    Raises:
        LigerDistError: a file is damaged: truncated, no list of JSON, not the table that its name says.
    """
    for part in parts:
        with _readable(part.file):
            yield from (row._replace(source=part.source)._asdict() for row in READERS[part.kind](part))


@contextmanager
def _readable(file: str | Path) -> Iterator[None]:
    """Raises LigerDistError with the file's name for what the libraries that read files raise."""
    try:
        yield
    except (OSError, ValueError, csv.Error) as error:
        raise LigerDistError(f"{file} cannot be read: {error}; correct it, or get it again.") from error


def where(file: str, at: int) -> str:
    """Describes the place of a row for messages: file and line, or file and row."""
    kind = _layout_of(Path(file))
    if kind == "text":
        return file
    if kind == "csv":
        return f"{file} line {at}"
    if kind == "lines":
        line = 1
        with _opened(Path(file)) as stream:
            while at > 0 and (block := stream.read(min(at, 2**22))):
                line, at = line + block.count(b"\n"), at - len(block)
        return f"{file} line {line}"
    return f"{file} row {at}"


def _kind_of(file: Path) -> str | None:
    if file.is_dir():
        return "saved"
    suffix = file.suffixes[-2] if file.suffix in COMPRESSED and len(file.suffixes) > 1 else file.suffix
    kind = SUFFIXES.get(suffix.lower())
    return kind if file.suffix not in COMPRESSED or kind in ("text", "lines", "json", "csv") else None


def _layout_of(file: Path) -> str:
    """Returns the kind of a file; a JSON file that is no list has a row in each line."""
    kind = _kind_of(file)
    assert kind is not None
    if kind == "json":
        with _opened(file) as stream:
            start = stream.read(1024).removeprefix(codecs.BOM_UTF8)
            return "json" if start.lstrip()[:1] == b"[" else "lines"
    return kind


def _size_of(file: Path) -> int:
    return sum(f.stat().st_size for f in file.rglob("*.arrow")) if file.is_dir() else file.stat().st_size


def _parts_of(file: Path, size: int, group_parts: int) -> list[Part]:
    kind = _layout_of(file)
    if kind in ("parquet", "saved"):
        groups = _row_groups(file, kind)
        rows = sum(groups)
        step = max(1, -(-rows * size // max(1, _size_of(file))))
        bounds = [*range(0, rows, step), rows] if kind == "saved" else _bounds(groups, step, group_parts)
        return [Part(str(file), kind, start, stop) for start, stop in itertools.pairwise(bounds)]
    end = file.stat().st_size
    if kind != "lines" or file.suffix in COMPRESSED:
        return [Part(str(file), kind, 0, -1)]
    return [Part(str(file), kind, start, min(start + size, end)) for start in range(0, end, size)]


def _bounds(groups: list[int], step: int, group_parts: int) -> list[int]:
    """Returns the first row of each part of about ``step`` rows, and the end: parts begin where a row group does, and
    in a group that is larger."""
    bounds, at = [0], 0
    for rows in groups:
        if at > bounds[-1] and at + rows - bounds[-1] > step:
            bounds.append(at)
        within = max(step, -(-rows // group_parts))
        bounds += range(at + within, at + rows, within)
        at += rows
    return [*bounds, at] if at > bounds[-1] else bounds


def _row_groups(file: Path, kind: str) -> list[int]:
    """Lists the rows of each row group; a saved dataset is one."""
    with _readable(file):
        if kind == "saved":
            return [len(_saved(file))]
        from pyarrow import parquet

        metadata = parquet.read_metadata(file)
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _saved(folder: str | Path) -> Any:
    """Loads a saved dataset with all columns, as lists of Python, whatever format it was saved with."""
    from datasets import load_from_disk

    return load_from_disk(str(folder)).with_format(None)


def _opened(file: Path) -> Any:
    """Opens a file, decompressed."""
    import pyarrow

    return pyarrow.input_stream(str(file), compression="detect")


def _read_text(part: Part) -> Iterator[Row]:
    """Reads a file as one document; a long one as several rows."""
    invalid = _invalid_utf8(Path(part.file))
    if invalid is not None:
        yield Row(part.file, 0, None, f"is not UTF-8 ({invalid})")
        return
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, begins = "", True
    with _opened(Path(part.file)) as stream:
        while block := stream.read(2**22):
            *pieces, rest = split_text(rest + decoder.decode(block))
            for piece in pieces:
                yield Row(part.file, 0, None, None, piece, begins, ends=False)
                begins = False
    yield Row(part.file, 0, None, None, rest + decoder.decode(b"", final=True), begins)


def _invalid_utf8(file: Path) -> str | None:
    """Says what is wrong with the encoding of a file; None for nothing. It reads all of the file before the first
    row."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _opened(file) as stream:
        try:
            while block := stream.read(2**22):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return f"{error.reason}, byte {error.object[error.start]:#x}"
    return None


def _read_lines(part: Part) -> Iterator[Row]:
    """Reads the lines that begin in the part; blank ones are no rows."""
    with io.BufferedReader(_opened(Path(part.file)), 2**20) as stream:
        at = part.start
        if at > 0:
            # Of the line that holds the byte before, the part before has the beginning.
            stream.seek(at - 1)
            at += len(stream.readline()) - 1
        while part.stop < 0 or at < part.stop:
            line = stream.readline()
            if not line:
                return
            if line.strip():
                yield _json_row(part.file, at, line)
            at += len(line)


def _json_row(file: str, at: int, line: bytes) -> Row:
    try:
        values = parse_json(line)
    except (ValueError, RecursionError) as error:
        return Row(file, at, None, f"is no JSON ({error})")
    return _object_row(file, at, values)


def _object_row(file: str, at: int, values: Any) -> Row:
    if not isinstance(values, dict):
        return Row(file, at, None, f"holds {type(values).__name__} instead of an object with columns")
    return Row(file, at, values)


def _read_json(part: Part) -> Iterator[Row]:
    """Reads a list of objects."""
    with _opened(Path(part.file)) as stream:
        found = parse_json(stream.read())
    yield from (_object_row(part.file, index, values) for index, values in enumerate(found))


def _read_csv(part: Part) -> Iterator[Row]:
    # By default a field has at most 131,072 characters.
    csv.field_size_limit(sys.maxsize)
    with _opened(Path(part.file)) as stream:
        # What is not UTF-8 becomes surrogates, which the encoder refuses row by row.
        lines = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=""), strict=True)
        try:
            names = lines.fieldnames or []
            twice = next((name for name in names if name and names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"its first line has the column {twice!r} twice; expected each once")
            for values in lines:
                reason = "has more fields than the first line" if None in values else None
                yield Row(part.file, lines.line_num, None if reason else values, reason)
        except csv.Error as error:
            raise csv.Error(f"{error}, in line {lines.line_num}") from error


def _read_parquet(part: Part) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(part.file) as file:
        names = file.schema_arrow.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"it has the column {twice!r} twice; expected each once")
        counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends = list(itertools.accumulate(counts))
        groups = [g for g, end in enumerate(ends) if end > part.start and end - counts[g] < part.stop]
        at = ends[groups[0]] - counts[groups[0]]
        for batch in file.iter_batches(256, row_groups=groups):
            first, last = max(part.start - at, 0), min(part.stop - at, len(batch))
            if first < last:
                values = _rows_of(batch.slice(first, last - first))
                yield from (Row(part.file, at + first + index, row) for index, row in enumerate(values))
            at += len(batch)
            if at >= part.stop:
                return


def _rows_of(batch: Any) -> list[dict[str, Any]]:
    """Makes dicts of Python objects; lists of lists of as many numbers are arrays, which are 100 times faster."""
    import pyarrow

    matrices = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        inner = column.type.value_type if pyarrow.types.is_list(column.type) else column.type
        # A row with a null is left to what checks rows.
        if pyarrow.types.is_list(column.type) and pyarrow.types.is_fixed_size_list(inner) and not _has_nulls(column):
            matrices[name] = [scalar.values.flatten().to_numpy().reshape(-1, inner.list_size) for scalar in column]
    rows: list[dict[str, Any]] = batch.drop_columns(list(matrices)).to_pylist()
    return [row | {name: found[index] for name, found in matrices.items()} for index, row in enumerate(rows)]


def _has_nulls(column: Any) -> bool:
    return bool(column.null_count or column.flatten().null_count or column.flatten().flatten().null_count)


def _read_saved(part: Part) -> Iterator[Row]:
    rows = _saved(part.file)
    for start in range(part.start, part.stop, 256):
        batch = rows.select(range(start, min(start + 256, part.stop)))
        yield from (Row(part.file, start + index, values) for index, values in enumerate(batch))


READERS = {
    "text": _read_text,
    "lines": _read_lines,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "saved": _read_saved,
}


def split_text(text: str) -> list[str]:
    """Cuts a text into pieces of at most :data:`TEXT_PART` characters, at line breaks or spaces where there are any."""
    pieces, start = [], 0
    while len(text) - start > TEXT_PART:
        middle = start + TEXT_PART // 2
        breaks = [m.end() for m in BREAK.finditer(text, middle, start + TEXT_PART)]
        cut = breaks[-1] if breaks else start + TEXT_PART
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]
