"""The data of the training program: no document is lost between its files and the cache, and pretrained weights keep
their tokenizer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training.packing
from models import make_model
from training.arguments import TrainArguments
from training.corpus import Columns, Corpus, find_corpus
from training.data import find_blocks, find_tokenizer
from training.loop import train
from training.packing import HELD_OUT_EVERY
from training.tokens import fingerprint, load_tokenizer, train_tokenizer
from training_runs import LAUNCH, arguments_for, as_options, ends_within, torchrun

import liger_dist

ENTRIES = 300
TEXTS = [f"row {row}: " + "a few words, " * (1 + row % 7) for row in range(2000)]
"""more than three batches of documents"""
IDS = [[3, 4, 5] * (row % 5) for row in range(1, 41)]
"""some of no token"""


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer(TEXTS[:50], ENTRIES, folder)
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files before, between and after files of rows."""
    folder = tmp_path_factory.mktemp("many")
    for name in ("a", "c", "e"):
        (folder / f"{name}.txt").write_text(f"text of {name}")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "d.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
    return folder


@pytest.fixture(scope="module")
def expected(tokenizer_folder: Path) -> dict[str, int]:
    """``data.json`` of ``many``, from its rows alone."""
    tokenizer = load_tokenizer(tokenizer_folder)

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1

    lengths = [length("text of a"), *map(length, TEXTS), length("text of c"), *map(len, IDS), length("text of e")]
    held_out = sum(lengths[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    return {
        "documents_read": 3 + len(TEXTS) + len(IDS),
        "documents_kept": 3 + len(TEXTS) + len([ids for ids in IDS if ids]),
        "tokens": sum(lengths),
        "train_tokens": sum(lengths) - held_out,
        "held_out_tokens": held_out,
    }


def short(data: Path, tokenizer: Path | None, folder: Path, **changes: Any) -> TrainArguments:
    """One step, with a cache in ``folder``."""
    settings = {"tokenizer": None if tokenizer is None else str(tokenizer), "vocab_size": ENTRIES, "steps": 1}
    settings |= {"accumulation_steps": 1, "eval_batches": 1, "checkpoint_every": 0, "sample_tokens": 0}
    return arguments_for(data, folder / "cache", folder / "run", **(settings | changes))


def counts_in(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "data.json").read_text())
    return found


def cached_tokens(cache: Path) -> dict[str, int]:
    """Of the only folder of tokens there."""
    (folder,) = cache.glob("tokens-*")
    return {f"{split}_tokens": len(np.load(folder / f"{split}.ids.npy")) for split in ("train", "held_out")}


def on_a_terminal(arguments: TrainArguments, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of the program with a pseudo-terminal for its stdout and stderr."""
    ours, theirs = pty.openpty()
    # A new one has no width, and tqdm shows nothing there.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, str(LAUNCH / "train.py"), *as_options(arguments)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b"".join(read_to_end(ours))
    os.close(ours)
    return process.wait(), output.decode()


def read_to_end(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(terminal, 2**16)
        except OSError:
            # Linux says EIO where the last process has closed the other side.
            return
        if not part:
            return
        yield part


@pytest.mark.parametrize("way", ["pipes", "no bar", "terminal"])
def test_every_document_is_tokenised(
    way: str, many: Path, tokenizer_folder: Path, expected: dict[str, int], tmp_path: Path
) -> None:
    arguments = short(many, tokenizer_folder, tmp_path)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | ({"TQDM_DISABLE": "1"} if way == "no bar" else {})
    with ends_within(120, tmp_path):
        if way == "terminal":
            status, output = on_a_terminal(arguments, environment)
        else:
            process = torchrun(*as_options(arguments), processes=2 if way == "pipes" else 1, env=environment)
            output = "".join(process.communicate())
            status = process.returncode
    assert status == 0, output
    assert ("tokenising" in output) == (way != "no bar")
    assert cached_tokens(tmp_path / "cache") == {name: expected[name] for name in ("train_tokens", "held_out_tokens")}
    assert counts_in(tmp_path / "run") == expected
    said = f"data: {expected['documents_read']} documents read, {expected['documents_kept']} with tokens"
    assert output.count(said) == 1, output


def test_a_cache_of_an_old_format_is_not_read(
    many: Path, tokenizer_folder: Path, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new cache is, and brings the same counts."""
    arguments, tokenizer = short(many, tokenizer_folder, tmp_path, strategy="none"), load_tokenizer(tokenizer_folder)
    corpus = find_corpus(arguments.data, Columns("text", "messages"))
    key = json.dumps([corpus.fingerprint(), fingerprint(tokenizer), len(tokenizer), HELD_OUT_EVERY])
    old = tmp_path / "cache" / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    old.mkdir(parents=True)
    for split in ("train", "held_out"):
        for name in ("ids", "labels"):
            np.save(old / f"{split}.{name}.npy", np.full(1000, 7, np.int32))
        np.save(old / f"{split}.starts.npy", np.zeros(1, np.int64))
    train(arguments)
    (new,) = {*(tmp_path / "cache").glob("tokens-*")} - {old}
    assert len(np.load(new / "train.ids.npy")) == expected["train_tokens"]
    assert counts_in(tmp_path / "run") == expected

    def read_again(*_: object) -> None:
        raise AssertionError("the data is read again")

    monkeypatch.setattr(Corpus, "rows", read_again)
    train(replace(arguments, output_dir=str(tmp_path / "again")))
    assert counts_in(tmp_path / "again") == expected


def without_the_first(real: Any) -> Any:
    return lambda *given: list(real(*given))[1:]


def with_less_held_out(real: Any) -> Any:
    return lambda documents: real(documents) | {"held_out": real(documents[:100])["held_out"]}


def with_one_short_batch(real: Any) -> Any:
    sizes = iter([1])
    return lambda rows, _: real(rows, next(sizes, 0))


@pytest.mark.parametrize(
    ("place", "lossy", "words"),
    [
        ("_documents", without_the_first, r"2042 documents were tokenised but all files have 2043"),
        ("_split", with_less_held_out, r"tokens to train on and \d+ held out were taken from"),
        ("islice", with_one_short_batch, r"1 documents were tokenised but the files opened before .* have 1;"),
    ],
    ids=["document", "token", "rest"],
)
def test_what_is_lost_on_the_way_is_an_error(
    place: str, lossy: Any, words: str, many: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(training.packing, place, lossy(getattr(training.packing, place)))
    with pytest.raises(liger_dist.LigerDistError, match=words):
        find_blocks(short(many, tokenizer_folder, tmp_path), load_tokenizer(tokenizer_folder), ENTRIES)
    assert not list((tmp_path / "cache").glob("tokens-*"))
    assert not (tmp_path / "run" / "data.json").exists()


def write_model(folder: Path, tokenizer_folder: Path | None, family: str = "llama") -> Path:
    """A pretrained folder with room for 601 entries."""
    model: Any = make_model(family, dtype=torch.float32)
    model.resize_token_embeddings(601)
    model.save_pretrained(folder)
    if tokenizer_folder is not None:
        load_tokenizer(tokenizer_folder).save_pretrained(folder)
    return folder


def test_pretrained_weights_keep_their_tokenizer(data: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tokenizer_folder)
    own = fingerprint(load_tokenizer(tokenizer_folder))
    arguments = short(data, None, tmp_path, model=str(model), strategy="none", checkpoint_every=1)
    train(arguments)
    assert not list((tmp_path / "cache").glob("tokenizer-*"))
    assert fingerprint(load_tokenizer(tmp_path / "run" / "checkpoints" / "step-00000001" / "model")) == own
    other = tmp_path / "other"
    train_tokenizer(["other words of another text, and other ones"], 280, other)
    for given in ("tiny", str(model)):
        explicit = find_tokenizer(replace(arguments, model=given, tokenizer=str(other)))
        assert fingerprint(explicit) == fingerprint(load_tokenizer(other)) != own
    for given in ("tiny", str(model / "config.json")):
        assert len(find_tokenizer(replace(arguments, model=given, vocab_size=601))) == 601
    assert len(list((tmp_path / "cache").glob("tokenizer-*"))) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_pretrained_folder_without_a_tokenizer_is_refused(
    family: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers makes an empty tokenizer from the config of a Qwen2 model."""
    model = write_model(tmp_path / "model", None, family)

    def read(*_: object) -> None:
        raise AssertionError("the data is read")

    monkeypatch.setattr(Corpus, "rows", read)
    words = r"the folder .*model, which has no tokenizer that can be used; name one with --tokenizer FOLDER"
    for changes in ({}, {"dry_run": True}):
        with pytest.raises(liger_dist.LigerDistError, match=words):
            train(short(data, None, tmp_path, model=str(model), strategy="none", **changes))


def test_a_dry_run_of_a_pretrained_folder_counts_with_its_tokenizer(
    data: Path, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not with the size of one that would be trained, for which the model has no room."""
    model = write_model(tmp_path / "model", tokenizer_folder)
    train(short(data, None, tmp_path, model=str(model), strategy="none", dry_run=True, vocab_size=4096))
    assert "parameters" in capsys.readouterr().out
