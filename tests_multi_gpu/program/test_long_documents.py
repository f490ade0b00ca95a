"""Documents longer than the parts in which files are read: one document each, with the pieces, labels and counts of the
same text in JSONL; and the work that reading long files takes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_dataset import counts_in, loaded, short
from test_dataset import tokenizer_folder as tokenizer_folder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from liger_dist_train import dataset
from liger_dist_train.data_loader import find_tokenization
from liger_dist_train.dataset import Piece
from liger_dist_train.run import train
from liger_dist_train.sources import TEXT_PART, find_source, read_rows
from liger_dist_train.stream import StreamedData
from liger_dist_train.tokenization import Encoder, Format

CHARACTERS = 1_700_000


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A long text between short ones, as files of text and as rows."""
    folder = tmp_path_factory.mktemp("books")
    book = "".join(f"chapter {i}: a few words, and so on, row after row.\n" for i in range(CHARACTERS // 40))[
        :CHARACTERS
    ]
    texts = ["a short one", "another", book, "the last one"]
    for kind in ("txt", "jsonl"):
        (folder / kind).mkdir()
    for index, text in enumerate(texts):
        (folder / "txt" / f"{index}.txt").write_text(text)
        (folder / "jsonl" / f"{index}.jsonl").write_text(json.dumps({"text": text}))
    assert len(book) > 6 * TEXT_PART
    return {"txt": folder / "txt", "jsonl": folder / "jsonl", "one": folder / "txt" / "2.txt"}


def as_lists(sequences: list[list[Piece]]) -> list[list[bytes]]:
    return [[piece.ids.tobytes() + b"|" + piece.labels.tobytes() for piece in sequence] for sequence in sequences]


def without_names(counts: dict[str, Any]) -> dict[str, Any]:
    (source,) = counts["sources"]
    return {name: value for name, value in source.items() if name not in ("source", "files")}


@pytest.mark.nightly
@pytest.mark.parametrize("eval_fraction", [pytest.param(0.0, marks=pytest.mark.nightly), 0.05])
def test_a_long_text_file_is_one_document_in_the_cache(
    eval_fraction: float,
    books: dict[str, Path],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokenised by two processes, at sequence lengths below and above that of the text."""
    monkeypatch.setattr(dataset, "SMALL", 0)
    lengths = []
    for sequence_length in (1000, 2**18, 2**21):
        found = {}
        for kind in ("txt", "jsonl"):
            config = short(books[kind], tokenizer_folder, tmp_path, eval_fraction=eval_fraction, num_proc=2)
            data, held_out = loaded(replace(config, sequence_length=sequence_length))
            splits = [data] if held_out is None else [data, held_out]
            found[kind] = [as_lists(split.in_order(0, 10**9)) for split in splits], without_names(data.counts([]))
        assert found["txt"] == found["jsonl"]
        counts = found["txt"][1]
        pieces = [piece for split in splits for sequence in split.in_order(0, 10**9) for piece in sequence]
        lengths.append(max(len(piece.ids) for piece in pieces))
        assert counts["documents"] == 4
        assert counts["splits"]["train"]["documents_cut"] == int(sequence_length < 2**20)
        assert counts["labels"] == sum(len(piece.ids) - 1 for piece in pieces)
    assert lengths[:2] == [1000, 2**18]
    assert lengths[2] > 2**18, "a sequence that is longer than a text has all of it"


@pytest.mark.nightly
@pytest.mark.nightly(sequence_length=[1000])
@pytest.mark.parametrize(("sequence_length", "weights"), [(1000, None), (1000, [1.0]), (2**21, None)])
def test_a_long_text_file_is_one_document_of_a_stream(
    sequence_length: int, weights: list[float] | None, books: dict[str, Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    config = short(books["txt"], tokenizer_folder, tmp_path, streaming=True)
    tokenization = replace(find_tokenization(config), vocab_size=300)
    found = {}
    for kind in ("txt", "jsonl"):
        pieces, states = Counter[bytes](), []
        for rank in range(2):
            stream = StreamedData(
                [find_source(str(books[kind]))],
                weights,
                tokenization,
                tmp_path / "cache",
                **{"sequence_length": sequence_length, "window": 20, "seed": 0, "rank": rank, "size": 2},
                truncate=False,
            )
            while True:
                (sequence,) = stream.take(0, 1, 0, 1)
                if stream.state()["place"]["epoch"] > 0:
                    break
                pieces.update(*as_lists([sequence]))
                states[rank:] = [stream.state()]
        counts = without_names(stream.counts(states))
        assert counts["labels"] == sum(len(piece) // 8 - 1 for piece in pieces.elements())
        assert (counts["documents"], counts["documents_cut"]) == (4, int(sequence_length == 1000))
        found[kind] = pieces, counts
    assert found["txt"] == found["jsonl"]


@pytest.mark.nightly(after=[5])
@pytest.mark.parametrize("after", [5, 1300])
def test_a_stream_goes_on_within_a_long_text(
    after: int, books: dict[str, Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    config = short(books["txt"], tokenizer_folder, tmp_path, streaming=True, shuffle_window=16)
    stream, _ = loaded(replace(config, sequence_length=1000))
    stream.take(0, after, 0, 1)
    state = json.loads(json.dumps(stream.state()))
    again, _ = loaded(replace(config, sequence_length=1000))
    again.load_state(state)
    assert as_lists(again.take(0, 900, 0, 1)) == as_lists(stream.take(0, 900, 0, 1))
    assert again.counts([again.state()]) == stream.counts([stream.state()])


@pytest.mark.nightly
def test_a_run_trains_on_one_long_text(books: dict[str, Path], tokenizer_folder: Path, tmp_path: Path) -> None:
    train(short(books["one"], tokenizer_folder, tmp_path, sequence_length=512, batch_size=1, eval_fraction=0.0))
    (source,) = counts_in(tmp_path / "run")["sources"]
    split = source["splits"]["train"]
    assert (split["documents"], split["documents_cut"]) == (1, 1)
    assert split["packed_efficiency"] > 0.999
    # The first token of every piece is predicted from nothing.
    assert source["labels"] == source["tokens"] - split["sequences"]


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_are_those_of_the_sequences(streaming: bool, tokenizer_folder: Path, tmp_path: Path) -> None:
    """Of documents that are cut, and of rows with labels of their own."""
    rows = [{"input_ids": [5 + i % 7 for i in range(150 + row)]} for row in range(10)]
    rows += [{"input_ids": [5] * 64, "labels": [-100] * 60 + [5] * 4}, {"input_ids": [5] * 9, "labels": [5] * 9}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = short(tmp_path / "a.jsonl", tokenizer_folder, tmp_path, streaming=streaming, eval_fraction=0.0)
    data, _ = loaded(replace(config, sequence_length=64))
    if streaming:
        sequences = []
        while data.state()["place"]["epoch"] == 0:
            state = data.state()
            sequences += data.take(0, 1, 0, 1)
        sequences, counts = sequences[:-1], data.counts([state])
    else:
        sequences, counts = data.in_order(0, 10**9), data.counts([])
    expected = sum(int((piece.labels[1:] >= 0).sum()) for sequence in sequences for piece in sequence)
    assert counts["sources"][0]["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert counts["sources"][0]["labels"] == expected


@pytest.mark.smoke
def test_a_file_of_two_sources_counts_for_the_one_that_reads_it(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    good = [json.dumps({"input_ids": [5] * 50})] * 40
    (folder / "a.jsonl").write_text("\n".join([*good, "{broken"]))
    (folder / "b.jsonl").write_text("\n".join(good))
    for weights in ([], [0.4, 0.3, 0.3]):
        sources = [folder / "a.jsonl", folder / "b.jsonl", folder]
        config = short(sources, tokenizer_folder, tmp_path, streaming=True, shuffle_window=4, data_weights=weights)
        data, _ = loaded(replace(config, sequence_length=64, max_bad_rows=9))
        while data.state()["place"]["epoch"] == 0:
            state = data.state()
            data.take(0, 1, 0, 1)
        counts = data.counts([state])["sources"]
        assert [source["skipped"] for source in counts] == [1, 0, 1]
        assert counts[0]["documents"] >= 40
        assert counts[1]["documents"] >= 40
        assert counts[2]["documents"] >= 40
        if not weights:
            assert [source["documents"] for source in counts] == [40, 40, 80]
        assert [bad[:2] for bad in data.bad_rows()] == [(str(folder / "a.jsonl"), data.bad_rows()[0][1])] * 2
        resumed, _ = loaded(replace(config, sequence_length=64, max_bad_rows=9))
        resumed.load_state(json.loads(json.dumps(state)))
        assert resumed.counts([resumed.state()]) == data.counts([state])


@pytest.mark.smoke
def test_a_row_group_of_parquet_is_decoded_a_few_times(tmp_path: Path) -> None:
    """Whatever the size of the parts: each decodes its row group from the start to its own end."""
    rows = [{"text": f"row {row}"} for row in range(3000)]
    for group in (3000, 700, 10):
        file = tmp_path / f"{group}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=group)
        source = find_source(str(file))
        parts = source.parts(source.num_bytes // 64)
        assert [row["values"] for row in read_rows(parts)] == rows
        assert sum(part.stop - part.start // group * group for part in parts) <= 4.6 * len(rows)
        assert len(parts) >= 8
        assert len(source.parts(10**9)) == 1
    # A stream has a part for every rank.
    assert len(find_source(str(tmp_path / "3000.parquet")).parts(1, ranks=24)) == 24


@pytest.mark.nightly
@pytest.mark.smoke
@pytest.mark.parametrize(
    "kind", ["prepended", "metaspace_first", "metaspace_always", "byte_level", "line_breaks_are_spaces"]
)
def test_parts_of_a_long_text_have_its_tokens(kind: str) -> None:
    """Of tokenizers that put a space before a text, too, as those of Llama 2 do."""
    tokens = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeĠĊ", "▁a", "▁b", "Ġa", "Ġb"]
    tokens += ["ab", "▁ab", "Ġab"]
    merges = [("▁", "a"), ("▁", "b"), ("Ġ", "a"), ("Ġ", "b"), ("▁a", "b"), ("Ġa", "b"), ("a", "b")]
    words = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    if kind == "prepended":
        words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "line_breaks_are_spaces":
        words.normalizer = normalizers.Replace("\n", " ")
        words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    elif kind == "byte_level":
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.removeprefix("metaspace_"), split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    encoder = Encoder(tokenizer, Format(), len(tokens))
    text = "ab c a\nb d ab e\n" * (TEXT_PART // 5)
    middle = len(text) // 2
    values = {"values": [None] * 3, "text": [text, text[:middle], text[middle:]], "reason": [None] * 3}
    found = encoder(values | {"begins": [True, True, False], "ends": [True, False, True]})
    whole = np.array([*words.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id])
    assert np.array_equal(found["ids"][0], whole)
    assert np.array_equal(np.concatenate(found["ids"][1:]), whole)
