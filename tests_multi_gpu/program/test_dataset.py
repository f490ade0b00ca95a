"""The data of the training program, counted: every document and token of the files is in the cache, in the sequences
and in ``data.json``, once, whether a run was killed before, streams, or weighs its sources."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_programs import TORCHRUN, run_program
from models import make_model
from training_runs import CPU, as_options, config_for, ends_within

import liger_dist
from liger_dist_train.config import TrainConfig
from liger_dist_train.data_loader import CachedData, Order, collate, find_tokenization, load_data
from liger_dist_train.dataset import SMALL, Piece
from liger_dist_train.packing import Integers, best_fit, pack
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train
from liger_dist_train.sources import find_source
from liger_dist_train.stream import StreamedData
from liger_dist_train.tokenization import Tokenization, load_tokenizer
from liger_dist_train.tokenizer_training import train_tokenizer

TEXTS = [f"row {row}: " + "a few words, " * (1 + row % 7) for row in range(2000)]
CHATS = [
    [
        {"role": "user", "content": f"what is {row}?"},
        {"role": "assistant", "content": f"{row} is " + "a number " * (row % 9)},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "the same."},
    ]
    for row in range(300)
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:200]))
    train_tokenizer([str(folder / "texts.jsonl")], 300, folder / "tokenizer")
    return folder / "tokenizer"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files before, between and after files of rows."""
    folder = tmp_path_factory.mktemp("many")
    for name in ("a", "c", "e"):
        (folder / f"{name}.txt").write_text(f"text of {name}")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "d.jsonl").write_text(
        "".join(json.dumps({"input_ids": [3, 4, 5] * (i % 5 + 1)}) + "\n" for i in range(40))
    )
    return folder


@pytest.fixture(scope="module")
def documents(tokenizer_folder: Path) -> list[list[int]]:
    """Token ids of every document of ``many``, without the program."""
    tokenizer = load_tokenizer(tokenizer_folder)

    def ids(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    rows = [[3, 4, 5] * (i % 5 + 1) for i in range(40)]
    return [ids("text of a"), *map(ids, TEXTS), ids("text of c"), *rows, ids("text of e")]


def short(data: Path | list[Path], tokenizer: Path, folder: Path, **changes: Any) -> TrainConfig:
    """One step, with a cache in ``folder``."""
    settings: dict[str, Any] = {"tokenizer": str(tokenizer), "steps": 1, "global_batch_size": None, "eval_batches": 1}
    sources = data if isinstance(data, list) else [data]
    config = config_for(sources[0], folder / "cache", folder / "run", checkpoint_every=0, **settings)
    return replace(config, **{"data": [str(path) for path in sources], **changes})


def loaded(config: TrainConfig, vocab_size: int = 300, processes: int = 1) -> tuple[Any, CachedData | None]:
    """The data of a run, without a model."""
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    tokenization: Tokenization = replace(find_tokenization(config), vocab_size=vocab_size)
    strategy = "ddp" if processes > 1 else "none"
    return load_data(config, tokenization, parallel_dims_of(replace(config, strategy=strategy), processes))


def counts_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "data.json").read_text())
    return found


def tokens_of(sequences: list[list[Piece]]) -> Counter[int]:
    return Counter(token for sequence in sequences for ids, *_ in sequence for token in ids.tolist())


@pytest.mark.nightly(processes=[1])
@pytest.mark.parametrize("processes", [1, 2])
def test_counts_agree_with_an_independent_count(
    processes: int, many: Path, documents: list[list[int]], tokenizer_folder: Path, tmp_path: Path
) -> None:
    config = short(many, tokenizer_folder, tmp_path)
    ranks = [TORCHRUN, "--nproc-per-node", str(processes)]
    ended = run_program([*ranks, "-m", "liger_dist_train", *as_options(config)], tmp_path)
    output = ended.all_said
    assert not ended.failed, output
    held_out = documents[19::20]
    (source,) = counts_in(tmp_path / "run")["sources"]
    assert (source["documents_read"], source["documents"], source["skipped"]) == (2043, 2043, 0)
    assert source["tokens"] == sum(map(len, documents))
    assert source["labels"] == sum(len(ids) - 1 for ids in documents)
    train_split, out = source["splits"]["train"], source["splits"]["held_out"]
    assert (out["documents"], out["tokens"]) == (len(held_out), sum(map(len, held_out)))
    assert train_split["documents"] + out["documents"] == len(documents)
    assert train_split["tokens"] + out["tokens"] == source["tokens"]
    assert train_split["documents_cut"] == sum(len(d) > 64 for i, d in enumerate(documents) if (i + 1) % 20)
    assert output.count(" documents read") == 1, output


def test_sequences_hold_every_token_once(
    many: Path, documents: list[list[int]], tokenizer_folder: Path, tmp_path: Path
) -> None:
    train_data, held_out = loaded(short(many, tokenizer_folder, tmp_path))
    assert held_out is not None
    sequences = train_data.in_order(0, 10**9)
    assert len(sequences) == train_data.num_sequences
    both = sequences + held_out.in_order(0, 10**9)
    assert tokens_of(both) == Counter(token for ids in documents for token in ids)
    pieces = Counter(tuple(ids.tolist()) for sequence in both for ids, *_ in sequence)
    assert all(pieces[tuple(ids)] >= 1 for ids in documents if len(ids) <= 64), "a document that fits was cut"
    assert max(sum(len(ids) for ids, *_ in sequence) for sequence in both) <= 64
    # An epoch takes every sequence once, on any number of ranks.
    taken = [train_data.take(0, train_data.num_sequences, rank, 3) for rank in range(3)]
    assert tokens_of([sequence for of_rank in taken for sequence in of_rank]) == tokens_of(sequences)


@pytest.mark.nightly
def test_a_killed_run_keeps_its_finished_shards(tokenizer_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    with data.open("w") as file:
        for copy in range(4):
            file.writelines(json.dumps({"text": f"{copy} {10 * text}"}) + "\n" for text in TEXTS)
    assert data.stat().st_size > SMALL, "a single process would tokenise it"
    config = short(data, tokenizer_folder, tmp_path, num_proc=2)
    command = [sys.executable, "-m", "liger_dist_train", *as_options(config)]
    with ends_within(200, tmp_path):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=CPU, start_new_session=True) as program:
            while len(list((tmp_path / "cache").glob("tokens-*/*.arrow"))) < 10:
                assert program.poll() is None
                time.sleep(0.02)
            os.killpg(program.pid, signal.SIGKILL)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("tokens-*/*.arrow")}
        subprocess.run(command, check=True, env=CPU, capture_output=True)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("tokens-*/*.arrow")}
    assert len(after) >= 20
    assert len(before) < len(after)
    assert {path: after[path] for path in before} == before, "a finished shard was written again"
    assert not list((tmp_path / "cache").glob("tokens-*/*.partial")) or len(before) < len(after)
    assert counts_in(tmp_path / "run")["sources"][0]["documents_read"] == 4 * len(TEXTS)


@pytest.mark.nightly
def test_processes_that_tokenise_end_with_their_parent(tokenizer_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"{c} {10 * text}"}) + "\n" for c in range(8) for text in TEXTS))
    command = [
        sys.executable,
        *("-m", "liger_dist_train"),
        *as_options(short(data, tokenizer_folder, tmp_path, num_proc=2)),
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=CPU) as program:
        while not list((tmp_path / "cache").glob("tokens-*/*.arrow")):
            assert program.poll() is None
            time.sleep(0.05)
        tasks = Path(f"/proc/{program.pid}/task").glob("*/children")
        pids = [int(pid) for children in tasks for pid in children.read_text().split()]
        program.kill()
    assert len(pids) >= 2
    deadline = time.monotonic() + 20
    while any(
        Path(f"/proc/{pid}/status").exists() and "Z (" not in Path(f"/proc/{pid}/status").read_text() for pid in pids
    ):
        assert time.monotonic() < deadline, "a process stays"
        time.sleep(0.2)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_stop_a_run_or_are_counted(streaming: bool, tokenizer_folder: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in TEXTS[:100]]
    rows[3:3] = [
        '{"text": null}',
        "{broken",
        json.dumps({"messages": CHATS[8]}),
        json.dumps({"messages": CHATS[0][:1]}),
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(rows))
    config = short(data, tokenizer_folder, tmp_path, sequence_length=40, streaming=streaming)
    with pytest.raises(liger_dist.LigerDistError, match=r"data.jsonl line 4 has None in 'text'"):
        train(config)
    with pytest.raises(liger_dist.LigerDistError, match=r"the first of \d such rows.*it is 3"):
        train(replace(config, max_bad_rows=3))
    allowed = replace(config, max_bad_rows=4 if not streaming else 40)
    train(allowed)
    (source,) = counts_in(tmp_path / "run")["sources"]
    assert source["skipped"] == 4
    assert type(source["documents"]) is int
    if not streaming:
        assert (source["documents_read"], source["documents"], source["skipped"]) == (104, 100, 4)
        assert source["tokens"] == sum(split["tokens"] for split in source["splits"].values())
        assert sum(split["documents"] for split in source["splits"].values()) == 100
        # What was skipped is known to the cache: fewer are allowed again.
        with pytest.raises(liger_dist.LigerDistError, match="line 4 has None"):
            train(replace(config, output_dir=str(tmp_path / "again")))


def test_a_stream_counts_documents_of_any_size(tokenizer_folder: Path, tmp_path: Path) -> None:
    """A long text, read in several rows, is one document that is cut; a path may be spelled in another way."""
    (tmp_path / "book.txt").write_text(" ".join(TEXTS) * 20)
    config = short(tmp_path / "book.txt", tokenizer_folder, tmp_path, streaming=True)
    stream, _ = loaded(config)
    stream.take(0, 300, 0, 1)
    state = json.loads(json.dumps(stream.state()))
    (source,) = stream.counts([state])["sources"]
    assert (source["documents"], source["documents_cut"], source["skipped"]) == (1, 1, 0)
    again, _ = loaded(replace(config, data=[str(tmp_path / "cache" / ".." / "book.txt")]))
    again.load_state(state)
    again.take(0, 600, 0, 1)
    assert again.fingerprint == stream.fingerprint


@pytest.mark.smoke
def test_weighted_streams_without_a_row_are_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "b.jsonl").write_text('{"text": "hello"}\n' * 50)
    sources = [tmp_path / "a.csv", tmp_path / "b.jsonl"]
    config = short(sources, tokenizer_folder, tmp_path, streaming=True, data_weights=[1.0, 1.0])
    with pytest.raises(liger_dist.LigerDistError, match="--data holds no row to train on for rank 0 of 1"):
        train(config)


def test_a_stream_of_bad_rows_ends(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": null}\n' * 50)
    config = short(tmp_path / "data.jsonl", tokenizer_folder, tmp_path, streaming=True)
    with pytest.raises(
        liger_dist.LigerDistError, match=r"data.jsonl line \d+ has None in 'text'.*\(the first of 50 such"
    ):
        train(config)
    with pytest.raises(liger_dist.LigerDistError, match="--data holds no row to train on for rank 0 of 1"):
        train(replace(config, max_bad_rows=100))


def test_few_documents_hold_out_their_ends(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(" ".join(TEXTS[:200]))
    train_data, held_out = loaded(short(tmp_path / "notes.txt", tokenizer_folder, tmp_path))
    assert held_out is not None
    tokens = [sum(len(ids) for s in data.in_order(0, 10**9) for ids, *_ in s) for data in (train_data, held_out)]
    assert tokens[1] == sum(tokens) // 20
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS[:5]))
    _, held_out = loaded(short(tmp_path / "chats.jsonl", tokenizer_folder, tmp_path, sequence_length=128))
    assert held_out is not None
    assert len(held_out.in_order(0, 9)) == 1
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": CHATS[0]}))
    one = short(tmp_path / "one.jsonl", tokenizer_folder, tmp_path, sequence_length=128)
    with pytest.raises(liger_dist.LigerDistError, match=r"one.jsonl has no token for the split 'train'.*--eval_data"):
        loaded(one)
    assert loaded(replace(one, eval_fraction=0.0))[1] is None


def test_weights_decide_how_often_a_source_is_read(tokenizer_folder: Path, tmp_path: Path) -> None:
    sources = []
    for name, first in (("a", 10), ("b", 20)):
        ids = [{"input_ids": [first + i % 5] * 64} for i in range(100 if name == "a" else 300)]
        sources.append(tmp_path / f"{name}.jsonl")
        sources[-1].write_text("".join(json.dumps(row) + "\n" for row in ids))
    config = short(sources, tokenizer_folder, tmp_path, data_weights=[3.0, 1.0], eval_fraction=0.0)
    data, _ = loaded(config)
    taken = [int(sequence[0].ids[0]) for sequence in data.take(0, 2000, 0, 1)]
    share = sum(token < 20 for token in taken) / len(taken)
    assert abs(share - 0.75) < 0.05
    # A source that ends begins again when all of it was read, in another order.
    order = Order([100, 300], 0, [3.0, 1.0])
    places = [order[position] for position in range(2000)]
    first = [index for source, index in places if source == 0]
    assert sorted(first[:100]) == sorted(first[100:200]) == list(range(100))
    assert first[:100] != first[100:200]
    assert [order[position] for position in (5, 1500, 700)] == [places[position] for position in (5, 1500, 700)]


@pytest.mark.nightly
@pytest.mark.nightly(shares=["(0.5, 0.5)", "(0.2, 0.8)"])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1), (0.2, 0.8)], ids=str)
def test_weights_of_a_stream_are_shares_of_the_tokens(
    shares: tuple[float, float], tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Of documents of 14 and of 400 tokens, whichever ends first: cached data takes sequences by these shares."""
    sources = []
    for name, first, length, count in (("short", 10, 14, 3000), ("long", 20, 400, 100)):
        rows = [{"input_ids": [first + i % 5] * length} for i in range(count)]
        sources.append(tmp_path / f"{name}.jsonl")
        sources[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = short(sources, tokenizer_folder, tmp_path, streaming=True, shuffle_window=16, data_weights=[*shares])
    data, _ = loaded(replace(config, sequence_length=512))
    tokens = Counter[int]()
    while tokens.total() < 1_000_000:
        tokens += tokens_of(data.take(0, 32, 0, 1))
    share = sum(count for token, count in tokens.items() if token < 20) / tokens.total()
    assert abs(share - shares[0]) < 0.02


@pytest.mark.smoke
def test_a_pass_over_weighted_streams_reads_every_document(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The source that ends last once, the other one at least once."""
    sources, numbers = [], (300, 40)
    for name, first, length, count in (("short", 10, 14, numbers[0]), ("long", 20, 400, numbers[1])):
        sources.append(tmp_path / f"{name}.jsonl")
        sources[-1].write_text((json.dumps({"input_ids": [first] * length}) + "\n") * count)
    config = short(sources, tokenizer_folder, tmp_path, streaming=True, shuffle_window=4, data_weights=[0.5, 0.5])
    data, _ = loaded(replace(config, sequence_length=512))
    tokens = Counter[int]()
    while True:
        sequences = data.take(0, 1, 0, 1)
        if data.state()["place"]["epoch"] > 0:
            break
        tokens += tokens_of(sequences)
        state = data.state()
    counted = data.counts([state])["sources"]
    assert [source["tokens"] for source in counted] == [tokens[10], tokens[20]]
    assert counted[1]["documents"] == numbers[1]
    assert counted[0]["documents"] >= numbers[0]
    assert tokens[10] == pytest.approx(tokens[20], rel=0.05)


def test_streams_of_all_ranks_hold_every_document_once(
    many: Path, documents: list[list[int]], tokenizer_folder: Path, tmp_path: Path
) -> None:
    config = short(many, tokenizer_folder, tmp_path, streaming=True, shuffle_window=20)
    first_epoch: Counter[int] = Counter()
    tokenization = replace(find_tokenization(config), vocab_size=300)
    options: dict[str, Any] = {"sequence_length": 64, "truncate": False, "window": 20, "seed": 0, "size": 2}
    states = []
    for rank in range(2):
        stream = StreamedData([find_source(str(many))], None, tokenization, tmp_path / "cache", rank=rank, **options)
        while stream.state()["place"]["epoch"] == 0:
            sequences = stream.take(0, 1, 0, 1)
            if stream.state()["place"]["epoch"] == 0:
                first_epoch += tokens_of(sequences)
                state = stream.state()
        states.append(state)
    (counted,) = stream.counts(states)["sources"]
    assert (counted["documents"], counted["tokens"]) == (len(documents), sum(map(len, documents)))
    assert counted["labels"] == sum(len(ids) - 1 for ids in documents)
    assert counted["documents_cut"] == sum(len(ids) > 64 for ids in documents)
    assert first_epoch == Counter(token for ids in documents for token in ids)
    assert not list((tmp_path / "cache").rglob("*.arrow")), "a stream writes nothing"


@pytest.mark.parametrize("weights", [[], [1.0, 2.0]])
@pytest.mark.parametrize("after", [3, 40, 300])
def test_a_stream_goes_on_where_it_was(
    after: int, weights: list[float], many: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    sources = [many / "b.jsonl", many / "d.jsonl"] if weights else [many]
    config = short(sources, tokenizer_folder, tmp_path, streaming=True, shuffle_window=16, data_weights=weights)
    stream, _ = loaded(config)
    before = stream.take(0, after, 0, 1)
    noted = stream.state()
    state = json.loads(json.dumps(noted))
    expected = [[ids.tolist() for ids, *_ in sequence] for sequence in stream.take(0, 60, 0, 1)]
    assert json.loads(json.dumps(noted)) == state, "a state that was noted changes with the stream"
    again, _ = loaded(config)
    again.load_state(state)
    assert [[ids.tolist() for ids, *_ in sequence] for sequence in again.take(0, 60, 0, 1)] == expected
    # Once more from a state of the same window: the stream has not been asked for its own place in between.
    third, _ = loaded(config)
    second, _ = loaded(config)
    second.load_state(state)
    second.take(0, 2, 0, 1)
    third.load_state(json.loads(json.dumps(second.state())))
    assert [[ids.tolist() for ids, *_ in sequence] for sequence in third.take(0, 58, 0, 1)] == expected[2:]
    assert third.counts([third.state()]) == again.counts([again.state()])
    places = [data.state()["place"] for data in (again, stream)]
    assert [(p["epoch"], p["window"], p["emitted"]) for p in places[:1]] == [
        (p["epoch"], p["window"], p["emitted"]) for p in places[1:]
    ]
    assert again.counts([again.state()]) == stream.counts([stream.state()])
    assert [[ids.tolist() for ids, *_ in sequence] for sequence in before[:60]] != expected


def test_packing_is_best_fit_and_loses_nothing() -> None:
    """Against best-fit decreasing, one document at a time."""

    def plain(lengths: Integers, capacity: int) -> list[int]:
        room: list[int] = []
        for size in sorted(lengths.tolist(), reverse=True):
            fits = [left for left in room if left >= size]
            if fits:
                room[room.index(min(fits))] -= size
            else:
                room.append(capacity - size)
        return sorted(room)

    rng = np.random.default_rng(0)
    for _ in range(100):
        capacity = int(rng.integers(2, 40))
        lengths = rng.integers(1, capacity + 1, int(rng.integers(1, 80)))
        order, bounds = best_fit(lengths, capacity)
        assert sorted(order.tolist()) == list(range(len(lengths)))
        held = [int(lengths[order[a:b]].sum()) for a, b in itertools.pairwise(bounds)]
        assert sorted(capacity - tokens for tokens in held) == plain(lengths, capacity)
        long = lengths * 7
        packing = pack(np.arange(len(long)), long, capacity)
        spans = sorted(piece for i in range(len(packing)) for piece in packing.pieces(i))
        for document, size in enumerate(long.tolist()):
            mine = [(start, start + length) for of, start, length in spans if of == document]
            assert [a for a, _ in mine] == [0, *(b for _, b in mine)][:-1]
            assert mine[-1][1] == size


def test_conversations_are_whole_masked_and_alone(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Fine-tuning on chats: none is cut, prompts are not predicted, and the loss of each conversation in a packed
    sequence is its loss alone, in the model without this library."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    data, held_out = loaded(short(tmp_path / "chats.jsonl", tokenizer_folder, tmp_path, sequence_length=256))
    tokenizer = load_tokenizer(tokenizer_folder)
    (source,) = data.counts([])["sources"]
    assert source["splits"]["train"]["documents_cut"] == source["splits"]["held_out"]["documents_cut"] == 0
    assert source["splits"]["train"]["packed_efficiency"] >= 0.95
    assert held_out is not None
    sequences = data.in_order(0, 10**9) + held_out.in_order(0, 10**9)
    texts = sorted(tokenizer.decode(ids) for sequence in sequences for ids, *_ in sequence)
    assert texts == sorted(tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS)
    for sequence in sequences:
        for ids, labels, *_ in sequence:
            turns = tokenizer.decode(ids).split("<|assistant|>")[1:]
            assert tokenizer.decode(labels[labels >= 0]) == "".join(
                turn.split("<|end|>")[0] + "<|end|>" for turn in turns
            )
    model = make_model("llama").cpu()
    model.resize_token_embeddings(300)
    model.config._attn_implementation = "sdpa"
    batch = collate(sequences[:2], 2, 256, tokenizer.eos_token_id, restart=True)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        for row, sequence in enumerate(sequences[:2]):
            start = 0
            for ids, labels, *_ in sequence:
                alone = model(
                    input_ids=torch.tensor(ids[None].astype(int)), labels=torch.tensor(labels[None].astype(int))
                ).loss
                here = slice(start, start + len(ids))
                shifted = batch["labels"][row, here][1:]
                packed = torch.nn.functional.cross_entropy(logits[row, here][:-1].double(), shifted)
                torch.testing.assert_close(packed, alone.double(), rtol=1e-5, atol=1e-6)
                start += len(ids)


def test_padding_and_first_tokens_are_not_predicted() -> None:
    ids = [np.arange(1, 6, dtype=np.int32), np.arange(6, 10, dtype=np.int32)]
    batch = collate([[Piece(i, i) for i in ids]], 2, 12, 99, restart=True)
    assert batch["input_ids"][0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 99, 99, 99]
    assert batch["labels"][0].tolist() == [-100, 2, 3, 4, 5, -100, 7, 8, 9, -100, -100, -100]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch["labels"][1].tolist() == [-100] * 12
    assert "position_ids" not in collate([], 1, 12, 99, restart=False)


def test_a_cache_that_lost_a_token_is_an_error(many: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    config = short(many, tokenizer_folder, tmp_path)
    loaded(config)
    for file in (tmp_path / "cache").glob("tokens-*/packed-*-train/length.npy"):
        lengths = np.load(file)
        lengths[0] -= 1
        np.save(file, lengths)
    with pytest.raises(
        liger_dist.LigerDistError, match=r"tokens of .*many\d* were packed, of \d+, and 2043 of 2043 documents"
    ):
        loaded(config)


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_pretrained_folder_without_a_tokenizer_is_refused(family: str, data: Path, tmp_path: Path) -> None:
    """Transformers makes an empty tokenizer from the config of a Qwen2 model."""
    make_model(family, dtype=torch.float32).save_pretrained(tmp_path / "model")
    words = r"the folder .*model, which has no tokenizer that can be used; name one with --tokenizer FOLDER"
    for changes in ({}, {"dry_run": True}):
        config = replace(short(data, tmp_path, tmp_path, **changes), tokenizer=None, model=str(tmp_path / "model"))
        with pytest.raises(liger_dist.LigerDistError, match=words):
            train(config)
    assert not list(tmp_path.glob("cache/tokens-*"))
    with pytest.raises(liger_dist.LigerDistError, match="--model tiny has no tokenizer"):
        train(replace(short(data, tmp_path, tmp_path), tokenizer=None))


def test_a_pretrained_folder_brings_its_tokenizer(data: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    model.resize_token_embeddings(601)
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(tokenizer_folder).save_pretrained(tmp_path / "model")
    config = replace(short(data, tmp_path, tmp_path, checkpoint_every=1), tokenizer=None, model=str(tmp_path / "model"))
    train(replace(config, dry_run=True))
    train(config)
    kept = load_tokenizer(tmp_path / "run" / "checkpoints" / "step-00000001" / "model")
    assert kept.get_vocab() == load_tokenizer(tokenizer_folder).get_vocab()
