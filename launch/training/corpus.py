"""Documents: read from text, JSONL, parquet or a saved dataset, or Python's own sources; tokenised with a mask of
what is learnt."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_dist import LigerDistError

IGNORED = -100
SUFFIXES = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Columns:
    """Where a row keeps what."""

    text: str
    messages: str


@dataclass
class RowCount:
    """Rows of a corpus, counted by its reader."""

    documents: int = 0
    """rows of the files that were opened, a text file being one"""
    is_complete: bool = False
    """True once the caller has taken the last row of the last file"""


@dataclass(frozen=True)
class Corpus:
    """Files, or the folder of one saved dataset."""

    files: tuple[Path, ...]
    columns: Columns
    saved_dataset: Path | None = None

    def fingerprint(self) -> str:
        """Changes with the name, size or time of any file."""
        files = self.files if self.saved_dataset is None else sorted(self.saved_dataset.rglob("*"))
        state = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return hashlib.sha256(repr((state, self.columns)).encode()).hexdigest()[:16]

    def num_documents(self) -> int | None:
        """Number of rows; None where only reading a file of JSON or parquet tells."""
        if self.saved_dataset is not None:
            from datasets import load_from_disk

            return len(load_from_disk(str(self.saved_dataset)))
        return len(self.files) if all(SUFFIXES[file.suffix] == "text" for file in self.files) else None

    def rows(self, count: RowCount | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields each document as a row, with the place it came from for messages.

        Args:
            count: updated while rows are read, from the sizes of the files: it does not depend on what the caller does
                with the rows.
        """
        count = RowCount() if count is None else count
        if self.saved_dataset is not None:
            from datasets import load_from_disk

            saved = load_from_disk(str(self.saved_dataset))
            count.documents += len(saved)
            for index, row in enumerate(saved):
                yield f"{self.saved_dataset} row {index}", row
        for file in self.files:
            kind = SUFFIXES[file.suffix]
            if kind == "text":
                count.documents += 1
                yield str(file), {self.columns.text: file.read_text(encoding="utf-8", errors="replace")}
                continue
            from datasets import Dataset

            reader = Dataset.from_json if kind == "json" else Dataset.from_parquet
            try:
                rows = reader(str(file), keep_in_memory=True)
            except Exception as error:
                raise LigerDistError(f"{file} cannot be read as {kind}: {error}") from error
            count.documents += len(rows)
            for index, row in enumerate(rows):
                yield f"{file} row {index}", row
        count.is_complete = True

    def texts(self) -> Iterator[str]:
        """Plain text of every document, to train a tokenizer on."""
        for where, row in self.rows():
            if row.get(self.columns.messages) is not None:
                yield "\n".join(turn["content"] for turn in check_messages(where, row[self.columns.messages]))
            elif isinstance(row.get(self.columns.text), str):
                yield row[self.columns.text]
            else:
                raise LigerDistError(
                    f"{where} has no text in {self.columns.text!r} and no turns in {self.columns.messages!r} (its "
                    "columns: "
                    f"{', '.join(row)}); name them with --text_column or --messages_column, or give --tokenizer for "
                    "data that holds input_ids."
                )


def find_corpus(data: list[str], columns: Columns) -> Corpus:
    """The files that ``data`` names; Python's standard library when it names none.

    Raises:
        LigerDistError: a path that does not exist, is empty, or is of an unknown kind.
    """
    if not data:
        folder = Path(sysconfig.get_path("stdlib"))
        files = [f for f in sorted(folder.rglob("*.py")) if "site-packages" not in f.parts and f.stat().st_size > 0]
        return Corpus(tuple(files), columns)
    found: list[Path] = []
    for name in data:
        path = Path(name)
        if (path / "dataset_info.json").is_file():
            if len(data) > 1:
                raise LigerDistError(f"{path} is a saved dataset and {len(data)} paths were given; give it alone.")
            return Corpus((), columns, saved_dataset=path)
        if path.is_dir():
            inside = [f for f in sorted(path.rglob("*")) if f.suffix in SUFFIXES and f.stat().st_size > 0]
            if not inside:
                raise LigerDistError(f"the folder {path} holds no data; expected files of {', '.join(SUFFIXES)}.")
            found.extend(inside)
        elif not path.is_file():
            raise LigerDistError(f"the data file {path} does not exist.")
        elif path.suffix not in SUFFIXES:
            raise LigerDistError(f"the data file {path} is of an unknown kind; expected one of {', '.join(SUFFIXES)}.")
        elif path.stat().st_size == 0:
            raise LigerDistError(f"the data file {path} is empty; give a file with text in it.")
        else:
            found.append(path)
    return Corpus(tuple(found), columns)


def tokenize(
    where: str, row: dict[str, Any], tokenizer: Any, columns: Columns, vocab_size: int
) -> tuple[list[int], list[int]]:
    """Token ids and labels of one document. Labels equal the ids where they are learnt and -100 elsewhere.

    A row may hold token ids already (``input_ids``, with or without ``labels``), chat turns, or text.

    Raises:
        LigerDistError: a row of another shape, or token ids that do not fit the model.
    """
    if row.get("input_ids") is not None:
        ids = list(row["input_ids"])
        labels = list(row["labels"]) if row.get("labels") is not None else list(ids)
        _check_ids(where, ids, labels, vocab_size)
        return ids, labels
    if row.get(columns.messages) is not None:
        return _tokenize_chat(where, check_messages(where, row[columns.messages]), tokenizer)
    if isinstance(row.get(columns.text), str):
        ids = tokenizer(row[columns.text], add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
        return ids, ids
    raise LigerDistError(
        f"{where} has no {columns.text!r}, {columns.messages!r} or 'input_ids' (its columns: {', '.join(row)}); name "
        "them with --text_column or --messages_column."
    )


def _check_ids(where: str, ids: list[Any], labels: list[Any], vocab_size: int) -> None:
    if len(labels) != len(ids):
        raise LigerDistError(
            f"{where} has {len(labels)} labels for {len(ids)} input_ids; expected one label for each token, {IGNORED} "
            "where nothing is learnt."
        )
    for name, values, extra in (("input_ids", ids, None), ("labels", labels, IGNORED)):
        for value in values:
            if not isinstance(value, int):
                raise LigerDistError(f"{where} has {name} of type {type(value).__name__} ({value}); expected integers.")
            if not 0 <= value < vocab_size and value != extra:
                raise LigerDistError(
                    f"{where} has {value} in {name} but the model's vocabulary has {vocab_size} entries; expected "
                    f"numbers in [0, {vocab_size}). Tokenise with the model's own tokenizer."
                )


def check_messages(where: str, messages: Any) -> list[dict[str, str]]:
    """Chat turns as they must be: a list of objects with a role and a content, both text."""
    if not isinstance(messages, list) or not messages:
        raise LigerDistError(f"{where} has {type(messages).__name__} for its turns; expected a list of at least one.")
    for index, turn in enumerate(messages):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise LigerDistError(f"{where}: turn {index} is {turn!r}; expected a role and a content, both text.")
    return messages


def _tokenize_chat(where: str, messages: list[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Learns what the assistant says: each of its turns beyond the prompt that generation would start from."""
    if tokenizer.chat_template is None:
        raise LigerDistError(f"{where} holds chat turns but the tokenizer has no chat template; set chat_template.")

    def encode(turns: list[dict[str, Any]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    ids: list[int] = []
    labels: list[int] = []
    for index, message in enumerate(messages):
        so_far = encode(messages[: index + 1], prompt=False)
        learnt_from = len(so_far)
        if message["role"] == "assistant" and index == 0:
            # Nothing comes before it that could be a prompt.
            learnt_from = 0
        elif message["role"] == "assistant":
            prompt = encode(messages[:index], prompt=True)
            if so_far[: len(prompt)] != prompt:
                raise LigerDistError(
                    f"{where}: the chat template writes turn {index} differently as a prompt and as history, so its "
                    "learnt part cannot be told; use a template whose prompts are prefixes."
                )
            learnt_from = len(prompt)
        if so_far[: len(ids)] != ids:
            raise LigerDistError(f"{where}: the chat template rewrites earlier turns when turn {index} is added.")
        labels += [IGNORED] * (learnt_from - len(ids)) + so_far[learnt_from:]
        ids = so_far
    return ids, labels
