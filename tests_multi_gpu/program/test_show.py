"""Rows as they will be trained (``liger-dist show``), columns with other names, and the cache of tokenised data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_runs import CPU, LAUNCH, as_options, config_for, metrics_of
from transformers import AutoTokenizer

from liger_dist import LigerDistError
from liger_dist_train import command
from liger_dist_train.export import export
from liger_dist_train.launcher import outcome, processes_of
from liger_dist_train.options import TrainOptions
from liger_dist_train.parser import parse_as
from liger_dist_train.run import train
from liger_dist_train.show import ShowConfig, show

ROWS = [
    {"messages": [{"role": "user", "content": "Colour?"}, {"role": "assistant", "content": "It is blue."}]},
    {"text": "a plain text"},
    {"messages": [{"role": "asistant", "content": "Hello"}]},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(capsys: pytest.CaptureFixture[str], cache: Path, data: Path, **options: Any) -> str:
    given: dict[str, Any] = {"data": [str(data)], "tokenizer": str(cache / "tokenizer"), "sequence_length": 64}
    show(ShowConfig(**given | {"cache_dir": str(cache)} | options))
    return capsys.readouterr().out


@pytest.mark.smoke
def test_what_counts_is_marked(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    text = shown(capsys, cache, path)
    assert "<|assistant|>⟦It is blue.<|end|>⟧" in text
    assert "a⟦ plain text<|end|>⟧" in text
    assert f"{path} line 1: conversation" in text
    assert f"{path} line 2: text" in text
    assert f"{path}: of the first 3 rows 2 with" in text
    assert f"1 bad: {path} line 3 has the role 'asistant'" in text
    tokenizer = AutoTokenizer.from_pretrained(cache / "tokenizer")
    marked = sum(len(tokenizer.encode(part)) for part in re.findall(r"⟦(.*?)⟧", text.split("\n", 1)[1]))
    assert marked == int(re.findall(r"(\d+) counted\n", text)[-1])


def test_documents_of_a_row_are_told_apart(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", [{"text": f"number {i}"} for i in range(40)])
    assert shown(capsys, cache, path, rows=1).count(": row ") == 1
    text = shown(capsys, cache, path, rows=100)
    used = [int(number) for number in re.findall(r": row \d+, (\d+) of 64 tokens", text)]
    assert text.count(": text, ") == 40
    assert len(used) == -(-sum(used) // 64)


@pytest.mark.parametrize("truncate", [False, True])
def test_counts_are_those_of_a_run(
    truncate: bool, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of texts in several pieces, and of conversations that are cut."""
    chat = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three " * 40}]
    no_label = [{"role": "user", "content": "many words " * 60}, {"role": "assistant", "content": "Yes."}]
    rows = [{"text": "word " * 300}, {"messages": chat}, {"text": "short"}, {"messages": no_label}]
    path = write(tmp_path / "rows.jsonl", rows)
    text = shown(capsys, cache, path, truncate=truncate, rows=100)
    config = config_for(path, cache, tmp_path / "run", steps=1, truncate=truncate, max_bad_rows=4, eval_every=0)
    train(config)
    counts = json.loads((tmp_path / "run" / "data.json").read_text())["sources"][0]
    found = [int(number) for number in re.findall(r"with (\d+) tokens, (\d+) counted", text)[0]]
    assert found == [counts["splits"]["train"]["tokens"], counts["labels"]]
    assert text.count(" bad: ") == 2 - truncate


@pytest.mark.smoke
def test_columns_with_other_names(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\nWhat is it?, A bird\n")
    assert "name yours with --text_column, --messages_column, or --prompt_column" in shown(capsys, cache, path)
    columns = {"prompt_column": "question", "completion_column": "answer"}
    assert "What is it?⟦ A bird<|end|>⟧" in shown(capsys, cache, path, **columns)
    both = write(tmp_path / "both.jsonl", [{"question": "Q", "answer": "A", "instruction": "I", "output": "O"}])
    assert "Q⟦A<|end|>⟧" in shown(capsys, cache, both, **columns)
    misspelt = shown(capsys, cache, path, **columns | {"prompt_column": "questoin"})
    assert "has no 'questoin', which --prompt_column names (its columns: question, answer)" in misspelt
    given = {"prompt": [{"role": "user", "content": "Hi"}], "completion": "Ho"}
    turns = write(tmp_path / "turns.jsonl", [given, {"prompt": "Hi", "completion": "Ho", "system": "Be brief"}])
    text = shown(capsys, cache, turns)
    assert "<|user|>Hi<|end|><|assistant|>⟦Ho<|end|>⟧" in text
    assert "line 2 has 'system' beside 'prompt' and 'completion' that are texts" in text
    preferences = write(tmp_path / "preferences.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert "a preference, which this program does not train on; TRL does" in shown(capsys, cache, preferences)


def test_bad_rows_are_refused_before_a_model_is_built(
    data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(write(tmp_path / "rows.jsonl", ROWS), cache, tmp_path / "run")
    monkeypatch.setattr("liger_dist_train.run.make_engine", lambda *_: pytest.fail("a model is built"))
    with pytest.raises(LigerDistError, match=r"line 3 has the role 'asistant' in turn 0"):
        train(config)


@pytest.mark.parametrize("text", ["word " * 60_000, "word " * 40_000])
def test_long_rows_are_not_tokenized_twice(
    text: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many characters a run goes on and leaves a bad row to the tokenization."""
    config = config_for(write(tmp_path / "rows.jsonl", [{"text": text}, *ROWS]), cache, tmp_path / "run")
    is_long = len(text) > 2**18
    monkeypatch.setattr("liger_dist_train.run.make_engine", lambda *_: (_ for _ in ()).throw(KeyError("a model")))
    with pytest.raises(KeyError if is_long else LigerDistError, match="a model" if is_long else "line 4 has the role"):
        train(config)


def test_nothing_is_evaluated_or_held_out(data: Path, cache: Path, tmp_path: Path) -> None:
    train(config_for(data, cache, tmp_path / "run", eval_every=0, steps=1))
    assert not any("eval_loss" in row for row in metrics_of(tmp_path / "run"))
    counts = json.loads((tmp_path / "run" / "data.json").read_text())["sources"][0]
    assert "held_out" not in counts["splits"] or not counts["splits"]["held_out"]["tokens"]
    with pytest.raises(LigerDistError, match="need held-out data"):
        config_for(data, cache, tmp_path / "run", eval_every=0, keep_best=True)


@pytest.mark.smoke
def test_paths_beside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "chats.jsonl").write_text("{}")
    (tmp_path / "tiny").mkdir()
    path = tmp_path / "beside" / "run.yaml"
    path.write_text("model: {name: tiny}\ndata: {sources: [chats.jsonl, notes.txt]}\ncheckpoint: {output_dir: runs}\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside" / "tiny").mkdir()
    found = parse_as([str(path)], TrainOptions)
    assert found.data == [str(tmp_path / "beside" / "chats.jsonl"), "notes.txt"]
    assert found.model == "tiny", "a preset"
    assert found.output_dir == "runs"


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["sft", "lora", "qlora"])
def test_files_to_begin_with(name: str) -> None:
    found = parse_as([str(LAUNCH / f"{name}.yaml"), "--data", "chats.jsonl", "--model", "my-model"], TrainOptions)
    assert found.output_dir == f"runs/{name}"
    assert (found.lora_rank > 0) == (name != "sft")
    assert found.load_in_4bit == (name == "qlora")


def test_an_export_has_a_card(data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path / "run", steps=2, checkpoint_every=2)
    train(config)
    export(tmp_path / "run", tmp_path / "exported", step=None)
    card = (tmp_path / "exported" / "README.md").read_text()
    row = metrics_of(tmp_path / "run")[-1]
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| training loss | {row['loss']:.4f} |" in card
    assert f"| held-out loss | {row['eval_loss']:.4f} |" in card
    assert f"| {data.name} | " in card
    assert str(tmp_path) not in card
    modes = {path.stat().st_mode for path in (tmp_path / "exported").iterdir()}
    assert len(modes) == 1


def test_the_cache_is_listed_and_removed(
    data: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "cache"
    config = config_for(data, cache, tmp_path / "run", steps=1)
    train(replace(config, cache_dir=str(own)))
    capsys.readouterr()
    assert command.main(["cache", str(own)]) == 0
    (folder,) = own.glob("tokens-*")
    assert f"{folder}: " in capsys.readouterr().out
    assert command.main(["cache", str(own), "--unused_days", "1", "--remove"]) == 0
    assert folder.is_dir()
    assert command.main(["cache", str(own), "--remove"]) == 0
    assert not folder.exists()


@pytest.mark.smoke
def test_what_is_said_after_a_failure(tmp_path: Path) -> None:
    given = ["run.yaml", "--overwrite", "true", "--output_dir", str(tmp_path), "--steps", "9"]
    assert processes_of(["--nproc_per_node", "2", *given]) == ("2", given)
    assert processes_of(["--nproc-per-node=gpu", *given]) == ("gpu", given)
    (tmp_path / "run.yaml").write_text("{}")
    given[0] = str(tmp_path / "run.yaml")
    began = time.time() - 10
    assert outcome(given, began) == ""
    for step in (4, 2):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    said = f"saved: {tmp_path / 'checkpoints' / 'step-00000004'}; to go on: the same command with --resume true"
    assert outcome(given, began) == f"{said} instead of --overwrite"
    assert outcome([*given[:1], *given[3:]], began) == said
    assert outcome(given, began + 60) == "", "of an earlier run"


@pytest.mark.nightly
def test_a_killed_process_leaves_the_way_on(data: Path, cache: Path, tmp_path: Path) -> None:
    """Below torchrun's words: what is saved, or the error of the process that has failed."""
    config = config_for(data, cache, tmp_path / "run", steps=400, checkpoint_every=2, eval_every=0)
    start = [sys.executable, "-m", "liger_dist_train", "train", "--nproc_per_node", "1"]
    environment = CPU | {"PYTHONPATH": str(LAUNCH)}
    process = subprocess.Popen(
        [*start, *as_options(config)], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for _ in range(600):
        if list((tmp_path / "run" / "checkpoints").glob("step-????????")):
            break
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-f", str(tmp_path / "run")], capture_output=True, text=True).stdout.split()
    os.kill(max(map(int, children)), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert errors.splitlines()[-1].startswith(f"saved: {tmp_path / 'run' / 'checkpoints'}/step-")
    bad = [*start, *as_options(replace(config, output_dir=str(tmp_path / "other"))), "--model", "nowhere"]
    finished = subprocess.run(bad, env=environment, capture_output=True, text=True)
    assert finished.returncode != 0
    assert finished.stderr.splitlines()[-1].startswith("error: --model is 'nowhere', which is neither")
