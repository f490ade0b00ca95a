"""Turns rows into token ids and labels: plain text, prompt and completion, chat messages, ShareGPT conversations,
instructions, or token ids with or without a teacher's probabilities."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from liger_dist import LigerDistError

from .chat_template import ChatTemplate, read_variables
from .conversations import BadRowError, check_messages, check_text, is_unicode, read_tools, with_system
from .sources import split_text

IGNORE_INDEX = -100
TOP_K_COLUMNS = ("top_k_ids", "top_k_log_probs")
"""of a row with ``input_ids``: for each token K classes and their log-probabilities, which predict the next token"""
MOST_LOG_SUM = 1e-3
"""of a token's probabilities, with room for rounding"""
LABEL_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""of a row with ``input_ids``: 1 where a token has a label"""
PAIRS = (("prompt", "completion"), ("completion", "prompt"), ("instruction", "output"), ("output", "instruction"))
"""columns that make a row together"""
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Format:
    """What of a row is trained on, and where it is."""

    text_column: str = "text"
    messages_column: str = "messages"
    train_on: str = "assistant"
    """labels of a conversation: "assistant" for every answer, "last_turn" for the last one, "all" for prompts too"""
    template_variables: str | None = None
    """what the chat template is given beside the conversation, as JSON"""
    split_special_tokens: bool = False
    """True: a special token in a text is its characters"""
    top_k: int = 0
    """classes that are read of :data:`TOP_K_COLUMNS`, the most likely ones; 0: the columns are not read"""
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    """columns that are read as if they had these names"""


@dataclass(frozen=True)
class Tokenization:
    """How rows become tokens; processes that tokenise get this."""

    tokenizer: str
    """its folder"""
    chat_template: str | None
    """instead of the tokenizer's template"""
    format: Format
    vocab_size: int

    def load_tokenizer(self) -> Any:
        tokenizer = load_tokenizer(Path(self.tokenizer))
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    def fingerprint(self) -> str:
        """Hashes everything that could change a token."""
        usual = asdict(Format())
        format = {name: value for name, value in asdict(self.format).items() if value != usual[name]}
        key = [fingerprint(self.load_tokenizer()), format, self.vocab_size]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def end_of_turn(self, tokenizer: Any) -> int | None:
        """The token that ends an answer; None without a chat template, or with one that has no special token there."""
        if tokenizer.chat_template is None:
            return None
        end = ChatTemplate(tokenizer, variables=read_variables(self.format.template_variables)).end_of_turn()
        return None if end is None else tokenizer.convert_tokens_to_ids(end)

    def encoder(self) -> Encoder:
        return Encoder(self.load_tokenizer(), self.format, self.vocab_size)


class Document(NamedTuple):
    """Tokens of one row."""

    ids: Ids
    labels: Ids | None
    """-100 where nothing is predicted; None where labels are the ids"""
    is_conversation: bool
    """True for a conversation, which is never cut"""
    top_k_ids: Ids | None = None
    """``[tokens, K]``, negative for none"""
    top_k_log_probs: NDArray[np.float32] | None = None
    """``[tokens, K]``"""


class Encoder:
    """Turns rows into documents with one tokenizer.

    Args:
        vocab_size: of the model; token ids of the data must be below it.
    """

    def __init__(self, tokenizer: Any, format: Format, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self._vocab_size = vocab_size
        self._bos = prefix_of(tokenizer)
        self._fast = tokenizer.backend_tokenizer
        cuts = (("a", " a"), ("a\n", "a"))
        self._prepends = any(self._ids_of(a) + self._ids_of(b) != self._ids_of(a + b) for a, b in cuts)
        """a text begins with a token that its parts must not begin with, as those of Llama 2 do with a space"""
        self._breaks_are_spaces = self._prepends and self._ids_of("a\na") == self._ids_of("a a")
        """a line break is the space that a text begins with, as in T5"""
        self._template = ChatTemplate(tokenizer, format.train_on, read_variables(format.template_variables))

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Encodes a batch of ``map(batched=True)`` into the columns of :class:`Document`, each of one dimension, and
        ``reason``, which is None for a good row."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        for row in rows:
            try:
                row["values"] = self._renamed(row["values"])
            except BadRowError as error:
                row["reason"] = str(error)
        texts = {index: text for index, row in enumerate(rows) if (text := self._text_of(row)) is not None}
        is_cut = [(not rows[index]["begins"], not rows[index]["ends"]) for index in texts]
        encoded = dict(zip(texts, self._encode_texts(list(texts.values()), is_cut), strict=True))
        out: dict[str, list[Any]] = {name: [] for name in (*Document._fields, "reason")}
        for index, row in enumerate(rows):
            try:
                document, reason = self._document(row, encoded.get(index)), None
            except BadRowError as error:
                document, reason = Document(np.zeros(0, np.int32), None, False), str(error)
            for name, value in zip(out, (*document, reason), strict=True):
                out[name].append(value.reshape(-1) if isinstance(value, np.ndarray) else value)
        return out

    def prompt(self, text: str, *, as_turn: bool) -> list[int]:
        """Encodes the beginning of a text, or with ``as_turn`` a user's turn up to where the answer begins.

        Raises:
            BadRowError: the chat template refuses it, or there is none.
        """
        if not as_turn:
            return [*self._bos, *self._encode([text])[0].tolist()]
        rendered = self._template.render([{"role": "user", "content": text}], None, prompt=True)
        self._fast.encode_special_tokens = False
        ids: list[int] = self._fast.encode(rendered, add_special_tokens=False).ids
        return ids

    def _renamed(self, values: dict[str, Any] | None) -> dict[str, Any] | None:
        """Gives prompt and completion their usual names."""
        keys = {"prompt": self._format.prompt_column, "completion": self._format.completion_column}
        if values is None or not any(name != usual and name in values for usual, name in keys.items()):
            return values
        missing = next((usual for usual, name in keys.items() if name not in values), None)
        if missing is not None:
            raise BadRowError(
                f"has no {keys[missing]!r}, which --{missing}_column names (its columns: {', '.join(map(str, values))})"
            )
        # What was named is read, whatever else the row has.
        kept = {name: values[name] for name in ("system", "tools") if name in values}
        return kept | {usual: values[name] for usual, name in keys.items()}

    def _text_of(self, row: dict[str, Any]) -> str | None:
        """Returns the plain text of a row; None for a row that holds something else."""
        values, format = row["values"], self._format
        if values is None or not isinstance(values.get(format.text_column), str):
            found: str | None = row["text"]
            return found
        if not is_unicode(values[format.text_column]):
            return None
        text: str = values[format.text_column]
        if format.text_column != Format.text_column and format.messages_column == Format.messages_column:
            # What was named is read, whatever else the row has.
            return text
        formats = (("input_ids",), (format.messages_column,), ("conversations",), ("prompt", "completion"))
        has_others = any(
            all(values.get(name) is not None for name in names) for names in (*formats, ("instruction", "output"))
        )
        return None if has_others else text

    def _document(self, row: dict[str, Any], encoded: Ids | None) -> Document:
        """Raises:
        BadRowError: a row of another shape, or one without a label.
        """
        if row["reason"] is not None:
            raise BadRowError(row["reason"])
        if self._format.top_k:
            check_has_top_k(row["values"])
        elif encoded is not None:
            if row["begins"] and row["ends"] and len(encoded) == 0:
                raise BadRowError(f"has an empty {self._format.text_column!r}")
            ends = [self._tokenizer.eos_token_id] if row["ends"] else []
            ids = np.concatenate([self._bos if row["begins"] else [], encoded, ends]).astype(np.int32)
            return Document(ids, None, False)
        document = self._structured(row["values"])
        if self._format.top_k:
            document = self._with_top_k(document, row["values"])
        learned = document.ids if document.labels is None else document.labels
        if not (learned[1:] != IGNORE_INDEX).any():
            raise BadRowError("has no label: nothing in it is predicted")
        return document

    def _structured(self, values: dict[str, Any]) -> Document:
        format = self._format
        if values.get("input_ids") is not None:
            return self._token_ids(values)
        turns = values.get(format.messages_column)
        turns = values.get("conversations") if turns is None else turns
        if turns is not None:
            return self._chat(with_system(values, check_messages(turns)), values.get("tools"))
        if values.get("instruction") is not None and values.get("output") is not None:
            return self._instruction(values)
        if values.get("prompt") is not None and values.get("completion") is not None:
            beside = [name for name in ("system", "tools") if values.get(name)]
            if beside and not any(isinstance(values[name], list) for name in ("prompt", "completion")):
                raise BadRowError(
                    f"has {beside[0]!r} beside 'prompt' and 'completion' that are texts, which no chat template joins; "
                    "give turns: 'messages', or a list of turns as 'prompt'"
                )
            return self._prompt_and_completion(values["prompt"], values["completion"], values)
        if values.get("chosen") is not None and values.get("rejected") is not None:
            raise BadRowError(
                "has 'chosen' and 'rejected', a preference, which this program does not train on; TRL does, with "
                "liger_dist (docs/hosts/trl.md)"
            )
        for name, other in PAIRS:
            if values.get(name) is not None and values.get(other) is None:
                raise BadRowError(
                    f"has {name!r} and no {other!r} (its columns: {', '.join(map(str, values))}); rename the column "
                    "that belongs to it"
                )
        for name in (format.text_column, format.messages_column, "prompt", "completion", "conversations"):
            if isinstance(values.get(name), str):
                check_text(name, values[name])
            if name in values:
                raise BadRowError(f"has {values[name]!r} in {name!r}; expected text or turns")
        raise BadRowError(
            f"has no {format.text_column!r}, {format.messages_column!r}, 'conversations', 'prompt' and 'completion', "
            f"'instruction' and 'output', or 'input_ids' (its columns: {', '.join(map(str, values))}); name yours with "
            "--text_column, --messages_column, or --prompt_column and --completion_column"
        )

    def _encode_texts(self, texts: list[str], is_cut: list[tuple[bool, bool]]) -> list[Ids]:
        """Encodes without special tokens; a long text in parts, for an encoding takes about 150 bytes a token.

        Args:
            is_cut: whether other parts of the text precede and follow.
        """
        parts = [split_text(text) for text in texts]
        if not any(map(any, is_cut)) and all(len(pieces) == 1 for pieces in parts):
            return self._encode(texts)
        return [
            np.concatenate(
                [
                    self._part(piece, follows=before or index > 0, goes_on=after or index < len(pieces) - 1)
                    for index, piece in enumerate(pieces)
                ]
            )
            for pieces, (before, after) in zip(parts, is_cut, strict=True)
        ]

    def _ids_of(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def _part(self, text: str, *, follows: bool, goes_on: bool) -> Ids:
        """Encodes a part of a long text. One that follows another one has the tokens that it has after a line break."""
        if self._breaks_are_spaces and goes_on:
            # The one that the next part begins with.
            text = text.removesuffix("\n")
        if not follows or not self._prepends or self._breaks_are_spaces:
            return self._encode([text])[0]
        self._fast.encode_special_tokens = self._format.split_special_tokens
        encoding = self._fast.encode(f"\n{text}", add_special_tokens=False)
        ids = [id for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True) if stop > 1 and start >= 1]
        if len(ids) + len(self._ids_of("\n")) != len(encoding.ids) or any(a < 1 < b for a, b in encoding.offsets):
            raise LigerDistError(
                "a text has more characters than are tokenised at once, and the tokenizer joins a line break with the "
                "word after it, so that its parts cannot be tokenised one by one; give shorter texts, as a row each."
            )
        return np.array(ids, dtype=np.int32)

    def _encode(self, texts: list[str]) -> list[Ids]:
        self._fast.encode_special_tokens = self._format.split_special_tokens
        found = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in found]

    def _instruction(self, values: dict[str, Any]) -> Document:
        """An instruction with its input and output, after a system prompt and earlier pairs of texts in ``history``."""
        parts = [check_text("instruction", values["instruction"]), check_text("input", values.get("input") or "")]
        prompt = "\n".join(part for part in parts if part)
        history = values.get("history") or []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise BadRowError(f"has {history!r} in 'history'; expected a list of [question, answer]")
        if self._tokenizer.chat_template is None:
            beside = next((name for name in ("history", "tools") if values.get(name)), None)
            if beside is not None:
                raise BadRowError(f"has {beside!r} but the tokenizer has no chat template; give --chat_template FILE")
            system = check_text("system", values.get("system") or "")
            return self._prompt_and_completion("\n".join(filter(None, [system, prompt])), values["output"], values)
        turns = []
        for question, answer in (*history, (prompt, values["output"])):
            turns.append({"role": "user", "content": check_text("instruction", question)})
            turns.append({"role": "assistant", "content": check_text("output", answer)})
        return self._chat(with_system(values, turns), values.get("tools"))

    def _prompt_and_completion(self, prompt: Any, completion: Any, values: dict[str, Any]) -> Document:
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        elif isinstance(prompt, str) and isinstance(completion, list):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) or isinstance(completion, list):
            messages = with_system(values, [*check_messages(prompt), *check_messages(completion)])
            return self._chat(messages, values.get("tools"), first=len(messages) - len(completion))
        check_text("prompt", prompt), check_text("completion", completion)
        # Encoded together: tokenizers of the Llama 2 kind put a space before each text.
        self._fast.encode_special_tokens = self._format.split_special_tokens
        encoding = self._fast.encode(prompt + completion, add_special_tokens=False)
        learned = np.array([stop > len(prompt) for _, stop in encoding.offsets], dtype=bool)
        ids = np.concatenate([self._bos, encoding.ids, [self._tokenizer.eos_token_id]]).astype(np.int32)
        learned = np.concatenate([[False] * len(self._bos), learned, [True]])
        labels = np.where(learned, ids, IGNORE_INDEX).astype(np.int32)
        return Document(ids, None if self._format.train_on == "all" else labels, True)

    def _token_ids(self, row: dict[str, Any]) -> Document:
        ids, labels = row["input_ids"], row.get("labels")
        for name in ("input_ids", "labels", "attention_mask", *LABEL_MASKS):
            if row.get(name) is not None and not isinstance(row[name], list):
                raise BadRowError(f"has {row[name]!r} in {name!r}; expected a list of integers")
        marks = _mask_of(row, "attention_mask")
        learned = [mask for name in LABEL_MASKS if (mask := _mask_of(row, name)) is not None]
        if learned and labels is None:
            labels = ids
        found: list[Ids] = []
        for name, values, extra in (("input_ids", ids, None), ("labels", labels, IGNORE_INDEX)):
            if values is None:
                continue
            numbers = as_numbers(values, "iu")
            if numbers is None:
                bad = next((value for value in values if not isinstance(value, int) or isinstance(value, bool)), None)
                raise BadRowError(f"has {name} of type {type(bad).__name__} ({bad}); expected integers")
            outside = numbers[((numbers < 0) | (numbers >= self._vocab_size)) & (numbers != extra)]
            if outside.size:
                raise BadRowError(
                    f"has {outside[0]} in {name} but the model's vocabulary has {self._vocab_size} entries; expected "
                    f"numbers in [0, {self._vocab_size}). Tokenise with the model's own tokenizer"
                )
            found.append(numbers.astype(np.int32))
        if labels is not None and len(labels) != len(ids):
            raise BadRowError(
                f"has {len(labels)} labels for {len(ids)} input_ids; expected one label for each token, {IGNORE_INDEX} "
                "where nothing is predicted"
            )
        for mask in learned:
            found[1] = np.where(mask, found[1], IGNORE_INDEX).astype(np.int32)
        if marks is not None:
            # Rows that were padded to a length.
            found = [values[marks] for values in found]
            if self._format.top_k and not marks.all():
                raise BadRowError("has padding in attention_mask beside top_k_ids; expected the tokens alone")
        return Document(found[0], found[1] if labels is not None else None, labels is not None)

    def _with_top_k(self, document: Document, values: dict[str, Any]) -> Document:
        """Adds the most likely classes of each token."""
        ids, log_probs = read_top_k(*(values[name] for name in TOP_K_COLUMNS))
        if len(ids) != len(document.ids):
            raise BadRowError(f"has top_k_ids of {len(ids)} tokens and {len(document.ids)} input_ids; expected as many")
        count = self._format.top_k
        if ids.shape[1] < count:
            raise BadRowError(
                f"has {ids.shape[1]} classes for each token in top_k_ids and --top_k is {count}; expected at most "
                f"{ids.shape[1]}"
            )
        if ids.max(initial=-1) >= self._vocab_size:
            raise BadRowError(
                f"has {ids.max()} in top_k_ids but the model's vocabulary has {self._vocab_size} entries; expected the "
                "model's own tokenizer"
            )
        labels = document.ids if document.labels is None else document.labels
        without = int(((labels[1:] != IGNORE_INDEX) & np.isneginf(log_probs[:-1]).all(1)).sum())
        if without:
            raise BadRowError(f"has no classes in top_k_ids for {without} of its labels; expected some for each")
        if ids.shape[1] > count:
            most_likely = np.argsort(-log_probs, axis=1, kind="stable")[:, :count]
            ids, log_probs = np.take_along_axis(ids, most_likely, 1), np.take_along_axis(log_probs, most_likely, 1)
        return document._replace(top_k_ids=ids.astype(np.int32), top_k_log_probs=log_probs)

    def _chat(self, messages: list[dict[str, Any]], tools: Any, first: int = 0) -> Document:
        """Makes labels of the answers from turn ``first`` on, or of all that is not left out of them."""
        tools, is_all = read_tools(tools), self._format.train_on == "all"
        text, spans = self._template.answers(messages, tools, first)
        check_text(self._format.messages_column, text)
        if self._format.split_special_tokens:
            self._template.refuse_special_tokens(messages, tools)
        self._fast.encode_special_tokens = False
        encoding = self._fast.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        begins = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        learned = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            learned |= (begins >= start) & (begins < stop)
        learned = ~learned if is_all else learned
        return Document(ids, None if learned.all() else np.where(learned, ids, IGNORE_INDEX).astype(np.int32), True)


def _mask_of(row: dict[str, Any], name: str) -> NDArray[np.bool_] | None:
    """Reads a mask of ``input_ids``; None for a row without it."""
    mask, ids = row.get(name), row["input_ids"]
    if mask is None:
        return None
    marks = as_numbers(mask, "biuf")
    if len(mask) != len(ids) or marks is None or not np.isin(marks, (0, 1)).all():
        raise BadRowError(
            f"has the {name} of {len(mask)} numbers for {len(ids)} input_ids; expected 0 or 1 for each token"
        )
    return marks.astype(bool)


def as_numbers(values: list[Any], kinds: str) -> NDArray[Any] | None:
    """Makes an array ``[tokens]`` of a list of integers, of any size, or of numpy's ``kinds``; None for a list of
    something else."""
    try:
        found = np.array(values)
    except ValueError:
        # Lists of several lengths.
        return None
    if found.size == 0 and found.ndim == 1:
        return found.astype(np.int64)
    if found.ndim == 1 and found.dtype.kind in kinds:
        return found
    # Beyond 64 bits, where numpy makes objects or floats of them.
    are_integers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return np.array(values, dtype=object) if are_integers else None


def check_has_top_k(values: dict[str, Any] | None) -> None:
    """Raises:
    BadRowError: the row has no token ids with a teacher's probabilities.
    """
    missing = [name for name in ("input_ids", *TOP_K_COLUMNS) if (values or {}).get(name) is None]
    if missing:
        raise BadRowError(
            f"has no {missing[0]!r}, which --top_k reads; give what liger-dist score has written, or leave --top_k out"
        )


def read_top_k(ids: Any, log_probs: Any) -> tuple[NDArray[np.integer[Any]], NDArray[np.float32]]:
    """Reads lists of K class ids, negative for none, and log-probabilities for each token, with -inf for none.

    Raises:
        BadRowError: lists of other shapes, or numbers that are no log-probabilities.
    """
    try:
        found_ids, found = np.asarray(ids), np.asarray(log_probs, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRowError(f"has top_k columns that are no lists of as many numbers for each token ({error})") from error
    if found_ids.ndim != 2 or found_ids.shape != found.shape:
        raise BadRowError(
            f"has top_k_ids of shape {list(found_ids.shape)} and top_k_log_probs of shape {list(found.shape)}; "
            "expected K numbers for each token in both"
        )
    if not np.issubdtype(found_ids.dtype, np.integer):
        raise BadRowError(f"has {found_ids.reshape(-1)[0]!r} in top_k_ids; expected integers")
    found_ids = np.where(found_ids < 0, -1, found_ids)
    found = np.where(found_ids < 0, -np.inf, found).astype(np.float32)
    if np.isnan(found).any() or not (found <= MOST_LOG_SUM).all():
        raise BadRowError(f"has {found.max()} in top_k_log_probs; expected logarithms of probabilities, 0 or less")
    sums = np.exp(found, dtype=np.float64).sum(1)
    if sums.max(initial=0.0) > 1.0 + MOST_LOG_SUM:
        raise BadRowError(f"has probabilities of one token that sum to {sums.max():.4f}; expected 1 or less")
    return found_ids, found


def load_tokenizer(folder: Path) -> Any:
    """Loads a fast tokenizer from a folder, never from the network.

    Raises:
        LigerDistError: no such folder, no tokenizer in it, or one without a vocabulary or an end-of-sequence token.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise LigerDistError(
            f"the tokenizer folder {folder} does not exist; give a folder that holds tokenizer.json, or leave "
            "--tokenizer out for the one in the folder of --model."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # The tokenizers library and damaged files raise anything.
        raise LigerDistError(f"no tokenizer can be loaded from {folder}: {error!r}; give another folder.") from error
    if not tokenizer.is_fast:
        raise LigerDistError(
            f"the tokenizer in {folder} is a {type(tokenizer).__name__} without tokenizer.json; convert it to a "
            "fast one."
        )
    # Transformers makes an empty tokenizer for some kinds of models where a folder has only their config.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise LigerDistError(f"{folder} has no vocabulary of a tokenizer; give a folder that holds tokenizer.json.")
    if tokenizer.eos_token_id is None:
        raise LigerDistError(
            f"the tokenizer in {folder} has no end-of-sequence token; set eos_token and save it again."
        )
    return tokenizer


def prefix_of(tokenizer: Any) -> list[int]:
    """Returns the special tokens that a tokenizer puts before a text, such as that of the beginning of a sequence."""
    ids: list[int] = tokenizer("a")["input_ids"]
    plain = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids
    for count in range(len(ids) - len(plain) + 1):
        if ids[count : count + len(plain)] == plain:
            return ids[:count]
    return []


def fingerprint(tokenizer: Any) -> str:
    """Hashes everything of a tokenizer that could change a token, what its template can read among it."""
    serialized = f"{tokenizer.backend_tokenizer.to_str()}{tokenizer.chat_template}{tokenizer.eos_token}"
    read = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "eos_token"}
    if tokenizer.chat_template is not None and any(name in str(tokenizer.chat_template) for name in read):
        serialized += json.dumps(read, sort_keys=True)
    return hashlib.sha256(serialized.encode()).hexdigest()[:16]
