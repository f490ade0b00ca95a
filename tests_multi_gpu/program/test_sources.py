"""Rows of every kind of file: each is read once, however the file is cut, and becomes the tokens and labels that it
should."""

from __future__ import annotations

import copy
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import liger_dist
from liger_dist_train.sources import TEXT_PART, Row, find_source, read_rows, split_text, where
from liger_dist_train.tokenization import Encoder, Format, fingerprint, load_tokenizer
from liger_dist_train.tokenizer_training import train_tokenizer

TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "I am fine."},
    {"role": "user", "content": "how?"},
    {"role": "assistant", "content": "you are"},
]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in TURNS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text("hello there, how are you? I am fine, and so are you.\n\tdef f(x): return x\n")
    train_tokenizer([str(folder / "a.txt")], 320, folder / "tokenizer")
    return load_tokenizer(folder / "tokenizer")


def encoded(tokenizer: Any, values: dict[str, Any] | None, format: Format | None = None, **row: Any) -> dict[str, Any]:
    """Ids, labels and reason of one row."""
    fields = Row("file", 0, values, **row)._asdict()
    columns = Encoder(tokenizer, format or Format(), len(tokenizer))({name: [value] for name, value in fields.items()})
    return {name: column[0] for name, column in columns.items()}


def learned(tokenizer: Any, values: dict[str, Any], format: Format | None = None) -> str:
    row = encoded(tokenizer, values, format)
    assert row["reason"] is None, row["reason"]
    labels = row["ids"] if row["labels"] is None else row["labels"]
    return str(tokenizer.decode(labels[labels >= 0]))


@pytest.mark.parametrize("size", [7, 100, 10**6])
def test_rows_are_read_once_however_a_file_is_cut(size: int, tmp_path: Path) -> None:
    from datasets import Dataset
    from pyarrow import parquet

    rows = [{"text": f"row {i}: " + "x" * (i * 7 % 50)} for i in range(60)]
    lines = [json.dumps(row) for row in rows]
    lines.insert(5, "")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(rows)
    table = Dataset.from_list(rows)
    parquet.write_table(table.data.table, tmp_path / "e.parquet", row_group_size=13)
    table.save_to_disk(str(tmp_path / "saved"))
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.csv", "e.parquet", "saved"):
        parts = find_source(str(tmp_path / name)).parts(size)
        found = [row["values"] for row in read_rows(parts)]
        assert found == rows, name
        assert len(parts) > 1 or size > 100 or name in ("b.json", "c.jsonl.gz", "d.csv")
    found = [row["values"]["text"] for part in find_source(str(tmp_path)).parts(size) for row in read_rows([part])]
    assert len(found) == 6 * len(rows), "a folder has all of its files, and saved datasets"


@pytest.mark.smoke
def test_what_of_a_folder_is_data(tmp_path: Path) -> None:
    """As a hub, an editor, Python and macOS leave it: splits and hidden names as ``datasets`` reads them; what is not
    read is listed."""
    from datasets import Dataset
    from pyarrow import parquet

    table = Dataset.from_list([{"text": "a"}]).data.table
    for name in ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "more/validation/b.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, tmp_path / name)
    texts = ("README.md", ".gitattributes", ".git/x.txt", ".ipynb_checkpoints/a.jsonl", "__pycache__/x.py", "._a.jsonl")
    for name in (*texts, "b.JSONL", "c.ndjson", "d.tsv", "notes/e.txt", "src/test/f.py", "empty.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.jsonl" else '{"text": "a"}\n')
    Dataset.from_list([{"text": "b"}]).save_to_disk(str(tmp_path / "saved"))
    outside = tmp_path.parent / f"{tmp_path.name}-linked"
    outside.mkdir()
    (outside / "g.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "linked").symlink_to(outside)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    source = find_source(str(tmp_path))
    read = {str(file.relative_to(tmp_path)) for file in source.files}
    assert read == {
        *("data/train-00000-of-00001.parquet", "b.JSONL", "c.ndjson", "notes/e.txt", "src/test/f.py", "saved"),
        "linked/g.jsonl",
    }
    assert dict(source.left_out) == {
        "data/test-00000-of-00001.parquet": "split test",
        "more/validation/b.parquet": "split validation",
        "README.md": "the card of the dataset",
        **dict.fromkeys((".gitattributes", ".git", ".ipynb_checkpoints", "__pycache__", "._a.jsonl"), "hidden"),
        "d.tsv": "of an unknown kind",
        "empty.jsonl": "empty",
        "gone.jsonl": "a link to nothing",
    }
    said = source.described()
    assert f"data: {tmp_path}: files that are read (7): " in said
    assert f"data: {tmp_path}: not read, split test (1): data/test-00000-of-00001.parquet" in said
    only = find_source(str(tmp_path / "more"))
    assert [file.name for file in only.files] == ["b.parquet"], "a split that is named is read"


def test_the_place_of_a_row_is_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": "b"}\n{broken\n[1]\n')
    single = tmp_path / "one.json"
    single.write_text('{"text": "a"}\n{\n')
    (_, broken) = [Row(**row) for row in read_rows(find_source(str(single)).parts(100))]
    assert where(broken.file, broken.at) == f"{single} line 2"
    rows = [Row(**row) for part in find_source(str(file)).parts(6) for row in read_rows([part])]
    assert [where(row.file, row.at) for row in rows] == [f"{file} line {line}" for line in (1, 3, 4, 5)]
    assert rows[2].reason is not None
    assert "is no JSON" in rows[2].reason
    assert rows[3].reason is not None
    assert "holds list instead of an object" in rows[3].reason


@pytest.mark.nightly
def test_a_long_text_has_the_tokens_of_the_whole(tokenizer: Any, tmp_path: Path) -> None:
    text = "".join(f"def f{i}(x):\n\n    return x + {i}\n" for i in range(20000)) + "ÄÖ€😀 " * 100000
    assert len(text) > 3 * TEXT_PART
    (tmp_path / "a.txt").write_text(text)
    rows = [Row(**row) for row in read_rows(find_source(str(tmp_path / "a.txt")).parts(100))]
    assert len(rows) > 3
    assert "".join(row.text or "" for row in rows) == text
    assert [row.begins for row in rows] == [True] + [False] * (len(rows) - 1)
    assert [row.ends for row in rows] == [False] * (len(rows) - 1) + [True]
    ids = np.concatenate([encoded(tokenizer, None, text=r.text, begins=r.begins, ends=r.ends)["ids"] for r in rows])
    expected = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert ids.tolist() == expected
    assert encoded(tokenizer, {"text": text})["ids"].tolist() == expected
    assert max(map(len, split_text("nobreak" * TEXT_PART))) == TEXT_PART


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": "hello there"}, "hello there<|end|>"),
        ({"messages": TURNS}, "I am fine.<|end|>you are<|end|>"),
        ({"conversations": SHAREGPT}, "I am fine.<|end|>you are<|end|>"),
        ({"messages": SHAREGPT, "text": None}, "I am fine.<|end|>you are<|end|>"),
        ({"messages": [{"role": "assistant", "content": "I am"}]}, "<|assistant|>I am<|end|>"),
        ({"prompt": "hello", "completion": " there"}, " there<|end|>"),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, "you are<|end|>"),
        ({"instruction": "how", "input": "are you?", "output": "I am fine."}, "I am fine.<|end|>"),
        ({"instruction": "how?", "input": "", "output": "fine.", "text": "how? fine."}, "fine.<|end|>"),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, None),
        ({"input_ids": [5, 6, 7]}, None),
    ],
    ids=[
        "text",
        "chat",
        "sharegpt",
        "sharegpt in messages",
        "only",
        "completion",
        "turns",
        "alpaca",
        "with text",
        "labels",
        "ids",
    ],
)
def test_what_is_predicted_of_every_format(values: dict[str, Any], expected: str | None, tokenizer: Any) -> None:
    row = encoded(tokenizer, values)
    assert row["reason"] is None
    assert row["is_conversation"] == (set(values) not in ({"text"}, {"input_ids"}))
    if expected is None:
        assert row["ids"].tolist() == [5, 6, 7]
        assert (row["labels"] is None) == ("labels" not in values)
    else:
        assert learned(tokenizer, values) == expected
    assert encoded(tokenizer, values, Format(train_on="all"))["labels"] is None or expected is None


UNLEARNED = [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]
CALLS = [{"name": "weather", "arguments": {"city": "Paris"}}]
TABLE = [{"name": "weather", "arguments": {"city": "Paris", "place": None, "days": [{"n": 1, "m": None}]}, "id": None}]
TOOL_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"messages": UNLEARNED}, "you are<|end|>"),
        ({"messages": [TURNS[0], TURNS[1] | {"train": False}, TURNS[2], TURNS[3] | {"train": True}]}, "you are<|end|>"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": None}]}, "I am fine.<|end|>"),
        ({"conversations": [*SHAREGPT[:1], SHAREGPT[1] | {"weight": 0}, *SHAREGPT[2:]]}, "you are<|end|>"),
    ],
    ids=["weight", "train", "null", "sharegpt"],
)
def test_turns_that_are_marked_are_not_learned(values: dict[str, Any], expected: str, tokenizer: Any) -> None:
    assert learned(tokenizer, values) == expected
    everything = encoded(tokenizer, values)["ids"].tolist()
    turns = values.get("messages") or values["conversations"]
    plain = [{name: value for name, value in turn.items() if name not in ("weight", "train")} for turn in turns]
    assert everything == encoded(tokenizer, {"messages": plain})["ids"].tolist(), "and stay in the text"


@pytest.mark.smoke
def test_a_system_prompt_and_a_history_are_read(tokenizer: Any) -> None:
    system = [{"role": "system", "content": "how are you"}]
    for values, turns in (
        ({"conversations": SHAREGPT}, TURNS),
        ({"instruction": "how?", "output": "you are"}, TURNS[2:]),
        ({"instruction": "how?", "output": "you are", "history": [["hello", "I am fine."]]}, TURNS),
    ):
        for given, expected in (("how are you", [*system, *turns]), ("", turns), (None, turns)):
            row = encoded(tokenizer, values | {"system": given})
            want = encoded(tokenizer, {"messages": expected})
            assert row["reason"] is None
            assert row["ids"].tolist() == want["ids"].tolist()
            assert row["labels"].tolist() == want["labels"].tolist()


def test_padding_of_token_ids_is_left_out(tokenizer: Any) -> None:
    for ids, mask in (([5, 6, 0, 0], [1, 1, 0, 0]), ([0, 5, 6], [0, 1, 1]), ([5, 6], [1, 1])):
        labels = [-100 if position == 0 else token for position, token in enumerate(ids)]
        row = encoded(tokenizer, {"input_ids": ids, "attention_mask": mask, "labels": labels})
        assert row["ids"].tolist() == [5, 6]
        assert row["labels"].tolist()[1:] == [6]


def test_keys_of_other_rows_are_not_learned_as_null(tokenizer: Any) -> None:
    """Tables give every row the keys of all of them, in tool calls and tools too."""
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = TOOL_TEMPLATE
    plain = [{"name": "weather", "arguments": {"city": "Paris", "days": [{"n": 1}]}}]
    for calls, expected in ((CALLS, CALLS), (TABLE, plain)):
        turns = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": calls}]
        of_function = expected[0].get("function", expected[0])
        assert (
            learned(shown, {"messages": turns}) == json.dumps({"type": "function", "function": of_function}) + "<|end|>"
        )


def test_a_completion_is_encoded_after_its_prompt(tokenizer: Any) -> None:
    """Tokenizers of the Llama 2 kind put a space before each text; a completion keeps its own spaces alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "<|end|>"])
    backend.train_from_iterator(["hello there, how are you? def f(x): return x " * 3], trainer)
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", unk_token="<unk>")
    prompts = (("x): ", "return x"), ("x):", " return x"), ("how are", " you?"))
    for own in (tokenizer, spaced):
        for prompt, completion in prompts:
            row = encoded(own, {"prompt": prompt, "completion": completion})
            expected = own(prompt + completion, add_special_tokens=False)["input_ids"]
            assert row["ids"].tolist() == [*expected, own.eos_token_id]
            learned_ids = row["labels"][row["labels"] >= 0].tolist()
            assert learned_ids == row["ids"].tolist()[-len(learned_ids) :]
            assert completion.strip() in own.decode(learned_ids)


def test_a_fingerprint_has_what_a_template_can_read(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ bos_token }}" + str(own.chat_template)
    own.bos_token = "<|user|>"
    before = fingerprint(own)
    own.bos_token = "<|assistant|>"
    assert fingerprint(own) != before


def test_labels_are_the_ids_where_a_turn_is_predicted(tokenizer: Any) -> None:
    row = encoded(tokenizer, {"messages": TURNS})
    text = "<|user|>hello<|end|><|assistant|>I am fine.<|end|><|user|>how?<|end|><|assistant|>you are<|end|>"
    assert row["ids"].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = row["labels"] != -100
    assert (row["labels"][shown] == row["ids"][shown]).all()


@pytest.mark.smoke
def test_columns_have_the_names_that_options_say(tokenizer: Any) -> None:
    format = Format(text_column="body", messages_column="chat")
    assert learned(tokenizer, {"body": "hello"}, format) == "hello<|end|>"
    assert learned(tokenizer, {"chat": TURNS, "body": "hello"}, format) == "I am fine.<|end|>you are<|end|>"
    assert "its columns: text" in encoded(tokenizer, {"text": "hello"}, format)["reason"]
    one = Format(text_column="body")
    assert learned(tokenizer, {"messages": TURNS, "body": "hello"}, one) == "hello<|end|>", "what was named"
    assert learned(tokenizer, {"messages": TURNS}, one) == "I am fine.<|end|>you are<|end|>"


def test_a_tokenizers_own_first_token_is_kept(tokenizer: Any, tmp_path: Path) -> None:
    """Llama's begin with one, and only once in a document."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.save_pretrained(tmp_path)
    own = load_tokenizer(tmp_path)
    own.bos_token = "<|user|>"
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", own.bos_token_id)]
    )
    for values in ({"text": "hello"}, {"prompt": "hello", "completion": " there"}):
        ids = encoded(own, values)["ids"].tolist()
        assert ids[0] == own.bos_token_id
        assert ids.count(own.bos_token_id) == 1
        assert ids[-1] == own.eos_token_id
    assert encoded(own, {"messages": TURNS})["ids"].tolist().count(own.bos_token_id) == 2, "the template's alone"


def test_all_special_tokens_before_a_text_are_kept(tokenizer: Any, tmp_path: Path) -> None:
    """As GLM's tokenizers write two, of which none is the beginning of a sequence."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.save_pretrained(tmp_path)
    own = load_tokenizer(tmp_path)
    first = [own.convert_tokens_to_ids(name) for name in ("<|user|>", "<|system|>")]
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> <|system|> $A <|end|>",
        special_tokens=[(name, own.convert_tokens_to_ids(name)) for name in ("<|user|>", "<|system|>", "<|end|>")],
    )
    for values in ({"text": "hello"}, {"prompt": "hello", "completion": " there"}):
        ids = encoded(own, values)["ids"].tolist()
        assert ids[:2] == first
        assert own.eos_token_id not in ids[:-1]
    encoder = Encoder(own, Format(), len(own))
    assert encoder.prompt("hello", as_turn=False) == [*first, *own("hello", add_special_tokens=False)["input_ids"]]


SYSTEM = {"role": "system", "content": "are you there?"}


def test_what_stands_beside_a_conversation_is_in_it(tokenizer: Any) -> None:
    prompt, completion = TURNS[:1], TURNS[1:2]
    expected = encoded(tokenizer, {"messages": [SYSTEM, *prompt, *completion]})
    for given in (
        {"prompt": prompt, "completion": completion},
        {"prompt": "hello", "completion": completion},
        {"prompt": prompt, "completion": "I am fine."},
        {"instruction": "hello", "output": "I am fine."},
    ):
        found = encoded(tokenizer, given | {"system": SYSTEM["content"]})
        assert found["reason"] is None
        assert (found["ids"].tolist(), found["labels"].tolist()) == (
            expected["ids"].tolist(),
            expected["labels"].tolist(),
        )
    tools = [{"type": "function", "function": {"name": "there", "parameters": {}}}]
    with_tools = encoded(tokenizer, {"messages": TURNS[:2], "tools": tools})["ids"].tolist()
    assert (
        with_tools
        == encoded(tokenizer, {"instruction": "hello", "output": "I am fine.", "tools": tools})["ids"].tolist()
    )


@pytest.mark.parametrize("name", ["weight", "train"])
def test_all_is_learned_but_what_is_marked(name: str, tokenizer: Any) -> None:
    turns = [TURNS[0], TURNS[1] | {name: 0}, *TURNS[2:]]
    found = learned(tokenizer, {"messages": turns}, Format(train_on="all"))
    full = learned(tokenizer, {"messages": TURNS}, Format(train_on="all"))
    assert full.count("I am fine.<|end|>") == 1
    assert found == full.replace("I am fine.<|end|>", "")
    for mark, train_on in ((1, "assistant"), (1, "last_turn"), (0, "all")):
        marked = [TURNS[0] | {name: mark}, TURNS[1]]
        assert f"of turn 0 (user), which --train_on {train_on}" in str(
            encoded(tokenizer, {"messages": marked}, Format(train_on=train_on))["reason"]
        )
    assert learned(tokenizer, {"messages": [TURNS[0] | {name: 0}, TURNS[1]]}) == "I am fine.<|end|>"


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_masks_of_labels(name: str, tokenizer: Any) -> None:
    """Of rows that TRL and others have tokenized."""
    row: dict[str, Any] = {"input_ids": [5, 6, 7, 8], name: [0, 1, 0, 1]}
    assert encoded(tokenizer, row)["labels"].tolist() == [-100, 6, -100, 8]
    assert encoded(tokenizer, row | {"labels": [5, 6, 7, -100]})["labels"].tolist() == [-100, 6, -100, -100]
    assert encoded(tokenizer, row | {"attention_mask": [1, 1, 0, 1]})["labels"].tolist() == [-100, 6, 8]
    both = encoded(tokenizer, {"completion_mask": [0, 1, 1, 1]} | row | {"loss_mask": [1, 1, 1, 0]})
    assert both["labels"].tolist()[3] == -100
    assert f"{name} of 2 numbers for 4 input_ids" in encoded(tokenizer, row | {name: [0, 1]})["reason"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"input_ids": [True, False]}, "has input_ids of type bool"),
        ({"prompt": "a", "completion": "b", "tools": "[1]"}, "has 'tools' beside 'prompt' and 'completion'"),
        ({"messages": TURNS, "tools": '[{"name": "a", "name": "b"}]'}, "has the name 'name' twice"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "has 'system' beside 'prompt' and 'completion'"),
        (
            {"messages": [TURNS[0], TURNS[1] | {"reasoning_content": "one", "thinking": "two"}]},
            "has 2 texts for the reasoning of turn 1",
        ),
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "2 labels for 3 input_ids"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 900]}, "900 in labels"),
        ({"input_ids": [1, 2, 3], "labels": [1.0, 2.0, 3.0]}, "labels of type float"),
        ({"input_ids": [1, -1], "labels": [1, 1]}, "-1 in input_ids"),
        ({"input_ids": []}, "has no label"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "has no label"),
        ({"body": "text"}, "its columns: body"),
        ({"text": None}, "has None in 'text'"),
        ({"text": ""}, "has an empty 'text'"),
        ({"text": 3}, "has 3 in 'text'"),
        ({"messages": "hello"}, "has 'hello' for its turns"),
        ({"messages": []}, "expected a list of at least one"),
        ({"messages": [{"role": "user"}]}, "for turn 0; expected a content"),
        ({"messages": TURNS[:1]}, "has no label"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "a turn 0 from 'narrator'"),
        ({"text": "half \ud83d"}, "that are no Unicode"),
        ({"prompt": "half \ud83d", "completion": "a"}, "in 'prompt' that are no Unicode"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": "\ud83d"}]}, "that are no Unicode"),
        ({"input_ids": 5}, "has 5 in 'input_ids'; expected a list"),
        ({"messages": TURNS, "tools": "{"}, "has tools that are no JSON"),
        ({"prompt": "a", "completion": 3}, "has 3 in 'completion'"),
        ({"prompt": "a", "response": "b"}, "has 'prompt' and no 'completion' (its columns: prompt, response)"),
        ({"instruction": "a", "answer": "b"}, "has 'instruction' and no 'output'"),
        ({"input_ids": torch.tensor([1, 2])}, "in 'input_ids'; expected a list of integers"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0.5}]}, "has 0.5 for 'weight' of turn 1; expected 0 or 1"),
        ({"messages": [TURNS[0], TURNS[1] | {"train": "no"}]}, "has 'no' for 'train' of turn 1"),
        ({"messages": [{"role": "system", "content": "a"}, *TURNS], "system": "b"}, "expected one of them"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "expected a list of [question, answer]"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, "attention_mask of 2 numbers for 3 input_ids"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "expected 0 or 1 for each token"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_row_says_what_is_wrong(values: dict[str, Any], words: str, tokenizer: Any) -> None:
    row = encoded(tokenizer, values)
    assert words in row["reason"]
    assert len(row["ids"]) == 0


@pytest.mark.smoke
def test_a_template_that_rewrites_history_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    own = load_tokenizer(tmp_path)
    own.chat_template = "{{ messages | length }}" + own.chat_template
    assert "writes differently" in encoded(own, {"messages": TURNS})["reason"]
    own.chat_template = "{{ raise_exception('no user turn') }}"
    assert "is refused by the chat template: no user turn" in encoded(own, {"messages": TURNS})["reason"]
    own.chat_template = None
    assert "--chat_template FILE" in encoded(own, {"messages": TURNS})["reason"]


def test_tools_reach_the_template(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    own = load_tokenizer(tmp_path)
    own.chat_template = "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" + own.chat_template
    tools = [{"type": "function", "function": {"name": "there", "parameters": {}}}]
    assert own.decode(encoded(own, {"messages": TURNS, "tools": ""})["ids"]).startswith("<|user|>")
    for given in (tools, json.dumps(tools)):
        text = own.decode(encoded(own, {"messages": TURNS, "tools": given})["ids"])
        assert text.startswith("there<|system|>[{")
        assert '"name": "there"' in text


def test_arguments_beside_a_function_are_read(tokenizer: Any) -> None:
    inside = {"function": {"name": "there", "arguments": {"how": "fine"}}}
    outside = {"function": {"name": "there"}, "arguments": {"how": "fine"}}
    texts = [
        learned(tokenizer, {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [call]}]})
        for call in (inside, outside)
    ]
    assert "fine" in texts[0]
    assert texts[0] == texts[1]


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    """JSON's and Arrow's readers would keep one of the two."""
    import pyarrow
    from pyarrow import parquet

    lines = write(
        tmp_path / "a.jsonl", '{"text": "a", "meta": {"x": 1, "x": 2}}\n{"text": "a", "text": "b"}\n{"text": "c"}\n'
    )
    rows = [Row(**row) for row in read_rows(find_source(str(lines)).parts(1000))]
    assert [row.reason for row in rows] == [
        "is no JSON (it has the name 'x' twice; expected each once)",
        "is no JSON (it has the name 'text' twice; expected each once)",
        None,
    ]
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "b.parquet")
    listed = write(tmp_path / "c.json", '[{"text": "a", "text": "b"}]')
    for path in (tmp_path / "b.parquet", listed):
        with pytest.raises(liger_dist.LigerDistError, match="'text' twice; expected each once"):
            list(read_rows(find_source(str(path)).parts(1000)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none.txt", "does not exist; give a file or a folder, or a dataset of the hub as"),
        (lambda folder: folder, "holds no data"),
        (lambda folder: write(folder / "a.xyz", "text"), "is of an unknown kind"),
        (lambda folder: write(folder / "a.txt", ""), "is empty"),
        (
            lambda folder: write(folder / "dataset_dict.json", '{"splits": ["train", "test"]}').parent,
            "the splits train",
        ),
    ],
    ids=["missing", "empty folder", "unknown", "empty", "splits"],
)
def test_data_that_is_none_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        find_source(str(make(tmp_path)))


@pytest.mark.smoke
def test_files_of_other_programs_are_read_as_they_are(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "a.csv").write_bytes(f'\ufefftext,other\n"{long}",1\n'.encode())
    (tmp_path / "b.txt").write_bytes("\ufeffhello".encode())
    (tmp_path / "c.jsonl").write_bytes('\ufeff{"text": "hello"}\n'.encode())
    (tmp_path / "d.json").write_bytes('\ufeff[{"text": "hello"}]'.encode())
    with gzip.open(tmp_path / "e.json.gz", "wb") as file:
        file.write(b'{"text": "hello"}\n')
    assert [row.values for row in rows_of(tmp_path / "d.json")] == [{"text": "hello"}]
    assert [row.values for row in rows_of(tmp_path / "e.json.gz")] == [{"text": "hello"}]
    (found,) = rows_of(tmp_path / "a.csv")
    assert found.values == {"text": long, "other": "1"}
    assert [row.text for row in rows_of(tmp_path / "b.txt")] == ["hello"]
    assert [row.values for row in rows_of(tmp_path / "c.jsonl")] == [{"text": "hello"}]


def test_a_tokenizer_is_not_trained_on_broken_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.jsonl").write_text('{"text": "half \\ud83d"}\n')
    for name, words in (("a.txt", "a.txt is not UTF-8"), ("b.jsonl", "b.jsonl line 1 has characters in")):
        with pytest.raises(liger_dist.LigerDistError, match=words):
            train_tokenizer([str(tmp_path / name)], 300, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


@pytest.mark.smoke
def test_bytes_that_are_not_utf8_make_bad_rows(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 10**6 + b"caf\xe9 au lait")
    (found,) = rows_of(tmp_path / "a.txt")
    assert found.reason == "is not UTF-8 (invalid continuation byte, byte 0xe9)"
    (tmp_path / "a.csv").write_bytes(b"text\nhello\ncaf\xe9\n")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "hello"}\n{"text": "caf\xe9"}\n')
    good, bad = rows_of(tmp_path / "a.csv")
    assert where(bad.file, bad.at) == f"{tmp_path / 'a.csv'} line 3"
    assert encoded(tokenizer, good.values or {})["reason"] is None
    assert "no UTF-8" in encoded(tokenizer, bad.values or {})["reason"]
    good, bad = rows_of(tmp_path / "a.jsonl")
    assert good.reason is None
    assert bad.reason is not None
    assert "is no JSON" in bad.reason


def rows_of(file: Path) -> list[Row]:
    return [Row(**row) for row in read_rows(find_source(str(file)).parts(100))]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.json", "a.csv"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    from datasets import Dataset

    file, rows = tmp_path / name, [{"text": f"row {i}" * 50} for i in range(500)]
    if name == "a.parquet":
        Dataset.from_list(rows).to_parquet(str(file))
    elif name == "a.csv":
        file.write_text('text\nhello\n"no end\n')
    else:
        text = "\n".join(map(json.dumps, rows)) if name == "a.jsonl.gz" else json.dumps(rows)
        with gzip.open(file, "wb") if name == "a.jsonl.gz" else file.open("wb") as stream:
            stream.write(text.encode())
    if name != "a.csv":
        content = file.read_bytes()
        file.write_bytes(content[:-10] if name == "a.parquet" else content[: len(content) // 2])
    with pytest.raises(liger_dist.LigerDistError, match=f"{file} cannot be read: .*; correct it, or get it again"):
        rows_of(file)


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file
