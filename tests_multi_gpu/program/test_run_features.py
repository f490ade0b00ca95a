"""What a run does beside its steps: skips broken ones, averages weights, evaluates several sets, samples, cuts chats,
reads names of the hub."""

from __future__ import annotations

import functools
import json
import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from forked_programs import run_program
from harness import Workers
from models import make_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training_runs import ROOT, config_for, losses_of, metrics_of, write_base
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_dist
from liger_dist_train import model as model_module
from liger_dist_train.config import TrainConfig
from liger_dist_train.data_loader import find_tokenization, load_data
from liger_dist_train.dataset import Piece
from liger_dist_train.export import _to_dtype, export
from liger_dist_train.fault_tolerance import bytes_begun
from liger_dist_train.hub import dataset_name
from liger_dist_train.optimizer import (
    Ema,
    ShardedMuon,
    decayed_parameters,
    kinds_of,
    make_optimizer,
    make_schedule,
    matrices_of_layers,
    orthogonal,
)
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train
from liger_dist_train.trainer import Trainer

ALONE: dict[str, Any] = {"strategy": "none"}
SKIPPED = (4, 7)
"""steps whose loss is NaN"""


def train_with_broken_steps(config: TrainConfig) -> None:
    """The labels of two steps are weighed by NaN, as a bad device or an overflow would make of them."""
    own = Trainer._loss

    def broken(trainer: Trainer, *given: Any, **named: Any) -> torch.Tensor:
        is_broken = torch.is_grad_enabled() and trainer.progress.step + 1 in SKIPPED
        return own(trainer, *given, **named) * (math.nan if is_broken else 1.0)

    with mock.patch.object(Trainer, "_loss", broken):
        train(config)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["none", "fsdp1", "fsdp2", "ddp"])
def test_steps_with_nan_are_skipped_and_counted(
    strategy: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path, capsys: Any
) -> None:
    settings: dict[str, Any] = {"steps": 8, "max_skipped_steps": 2, "checkpoint_every": 4}
    config = config_for(data, cache, tmp_path / "run", strategy=strategy, **settings)
    run = train_with_broken_steps if strategy == "none" else functools.partial(workers_2.run, train_with_broken_steps)
    run(config)
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows if "loss" not in row] == [*SKIPPED]
    assert [row.get("skipped_steps") for row in rows if "loss" not in row] == [1, 2]
    assert all(math.isfinite(row["loss"]) for row in rows if "loss" in row)
    if strategy == "none":
        # Whatever the steps between lines.
        train_with_broken_steps(replace(config, log_every=100, output_dir=str(tmp_path / "few")))
        assert [row["step"] for row in metrics_of(tmp_path / "few") if "skipped_steps" in row] == [*SKIPPED]
    assert math.isfinite(rows[-1]["eval_loss"])
    if strategy == "none":
        assert "the loss of step 4 is not finite" in capsys.readouterr().out
        # What was skipped is not forgotten by a resumed run.
        with pytest.raises(liger_dist.LigerDistError, match=r"step 7 is not finite.*--max_skipped_steps N; it is 1"):
            train_with_broken_steps(
                config_for(
                    data, cache, tmp_path / "run", **ALONE, steps=8, max_skipped_steps=1, resume=True, resume_step=4
                )
            )


def test_a_checkpoint_before_the_first_step_changes_nothing(data: Path, cache: Path, tmp_path: Path) -> None:
    """Of AdamW, whose steps were all skipped until then."""
    losses = []
    for every in (2, 0):
        config = config_for(data, cache, tmp_path / str(every), **ALONE, steps=5, max_skipped_steps=2)
        with mock.patch(f"{__name__}.SKIPPED", (1, 2)):
            train_with_broken_steps(replace(config, checkpoint_every=every))
        losses.append([row["loss"] for row in metrics_of(tmp_path / str(every)) if "loss" in row])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


@pytest.mark.nightly
def test_a_moving_average_is_evaluated_saved_and_resumed(
    workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "held_out.txt").write_text((data / "ast0.txt").read_text()[:3000])
    settings: dict[str, Any] = {"strategy": "fsdp2", "steps": 4, "ema_decay": 0.5, "eval_every": 2, "eval_batches": 0}
    # Full weights stay after a forward, and must not be those of the average, or the other way round.
    settings |= {"eval_data": [str(tmp_path / "held_out.txt")], "reshard_after_forward": False}
    whole = config_for(data, cache, tmp_path / "whole", **settings, checkpoint_every=2)
    workers_2.run(train, whole)
    rows = metrics_of(tmp_path / "whole")
    assert [row["step"] for row in rows if "ema_eval_loss" in row] == [1, 2, 4]
    # The weights of the run come back after the average was evaluated.
    plain = config_for(data, cache, tmp_path / "plain", **settings | {"ema_decay": 0.0})
    workers_2.run(train, plain)
    assert losses_of(tmp_path / "plain") == losses_of(tmp_path / "whole")
    part = config_for(data, cache, tmp_path / "whole", **settings, checkpoint_every=2, resume=True, resume_step=2)
    workers_2.run(train, part)
    again = metrics_of(tmp_path / "whole")
    assert [row["ema_eval_loss"] for row in again if "ema_eval_loss" in row] == [
        row["ema_eval_loss"] for row in rows if "ema_eval_loss" in row
    ]
    alone = {"strategy": "none", "reshard_after_forward": True, "eval_only": True, "resume": True}
    for ema_decay, entries in ((0.5, {"eval_loss", "ema_eval_loss"}), (0.0, {"eval_loss"})):
        train(replace(whole, **alone, ema_decay=ema_decay))
        found = json.loads((tmp_path / "whole" / "eval.json").read_text())
        assert found.keys() == {"step", *entries}
        assert {entry: found[entry] for entry in entries} == pytest.approx({e: again[-1][e] for e in entries}, abs=1e-5)
    for ema, entry in ((False, "eval_loss"), (True, "ema_eval_loss")):
        export(tmp_path / "whole", tmp_path / entry, step=None, ema=ema)
        exported = config_for(
            data, cache, tmp_path / "exported", **settings, model=str(tmp_path / entry), eval_only=True
        )
        train(replace(exported, strategy="none", ema_decay=0.0, reshard_after_forward=True))
        loss = json.loads((tmp_path / "exported" / "eval.json").read_text())["eval_loss"]
        assert loss == pytest.approx(again[-1][entry], abs=1e-5)
    with pytest.raises(liger_dist.LigerDistError, match="has no moving average; train with --ema_decay"):
        export(tmp_path / "plain", tmp_path / "none", step=None, ema=True)


@pytest.mark.smoke
def test_the_average_is_that_of_its_definition() -> None:
    model = nn.Linear(3, 2)
    average = Ema(model, 0.75)
    expected = model.weight.detach().clone().double()
    for _ in range(4):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        average.update()
        expected = 0.75 * expected + 0.25 * model.weight.detach().double()
    torch.testing.assert_close(average.state["weight"].double(), expected, rtol=0, atol=1e-6)
    before = model.weight.detach().clone()
    with average.swapped():
        torch.testing.assert_close(model.weight.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(model.weight, before)


def muon_steps() -> None:
    """Three steps on shards are those of the full model; every parameter is compared."""
    config = TrainConfig(model="tiny", optimizer="muon", learning_rate=1e-2)
    models = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        model = make_model("llama")
        decayed, matrices = decayed_parameters(model, config), matrices_of_layers(model, config)
        assert matrices
        assert not any("embed" in name or "lm_head" in name or "norm" in name for name in matrices)
        if is_sharded:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = make_optimizer(model, config, decayed, matrices)
        ids = torch.arange(64).reshape(2, 32) % 61
        for _ in range(3):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
        models.append(model)
    for (name, sharded), full in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert isinstance(sharded, DTensor)
        torch.testing.assert_close(sharded.full_tensor(), full, rtol=0, atol=1e-5, msg=name)


def test_muon_on_shards_is_muon(workers_2: Workers) -> None:
    workers_2.run(muon_steps)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (33, 7)], ids=str)
def test_muon_is_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    own, torchs = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(shape))
    torchs.data.copy_(own.data)
    settings: list[dict[str, Any]] = [{"params": [own], "weight_decay": 0.1}]
    optimizers = ShardedMuon(settings, lr=0.02), torch.optim.Muon([torchs], 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        own.grad = torch.randn(shape)
        torchs.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(own, torchs, rtol=0, atol=1e-6)


def train_in_pieces(config: TrainConfig) -> int:
    """With pretrained weights in pieces of 1,000 bytes; how many there were."""
    with (
        mock.patch.object(model_module, "LOADED_AT_ONCE", 1_000),
        mock.patch.object(model_module, "set_model_state_dict", wraps=model_module.set_model_state_dict) as loaded,
    ):
        train(config)
    return loaded.call_count


@pytest.mark.parametrize("strategy", ["none", "fsdp2"])
def test_weights_in_pieces_are_the_weights(
    strategy: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    base = write_base(cache, tmp_path / "base")
    run: Any = (lambda function, config: function(config)) if strategy == "none" else workers_2.run
    config = config_for(data, cache, tmp_path / "one", strategy=strategy, model=str(base), steps=2, tokenizer=None)
    run(train, config)
    pieces = run(train_in_pieces, replace(config, output_dir=str(tmp_path / "pieces")))
    assert min(pieces if isinstance(pieces, list) else [pieces]) > 2
    assert losses_of(tmp_path / "pieces") == losses_of(tmp_path / "one")


def test_every_held_out_set_has_its_loss(data: Path, cache: Path, tmp_path: Path) -> None:
    for folder, name in (("a", "x.txt"), ("b", "x.txt"), ("b", "y.txt")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(
            (data / f"{'enum0' if name == 'y.txt' else 'ast0'}.txt").read_text()[:4000]
        )
    files = [str(tmp_path / "a" / "x.txt"), str(tmp_path / "b" / "x.txt"), str(tmp_path / "b" / "y.txt")]
    config = config_for(data, cache, tmp_path / "run", **ALONE, steps=2, eval_data=files, eval_batches=0)
    train(config)
    row = metrics_of(tmp_path / "run")[-1]
    each = {name: row[f"eval_loss/{name}"] for name in (files[0], files[1], "y.txt")}
    assert each[files[0]] == each[files[1]] != each["y.txt"]
    only = config_for(
        data, cache, tmp_path / "run", **ALONE, eval_data=files[2:], eval_batches=0, eval_only=True, resume=True
    )
    train(only)
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["eval_loss"] == pytest.approx(
        each["y.txt"], abs=1e-6
    )
    assert min(each.values()) < row["eval_loss"] < max(each.values())


@pytest.mark.nightly(strategy=["fsdp1"])
@pytest.mark.parametrize("strategy", ["none", "fsdp1", "fsdp2"])
def test_prompts_are_continued_as_the_exported_model_does(
    strategy: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    prompts = ["def f(", "import"]
    config = config_for(
        data, cache, tmp_path / "run", strategy=strategy, steps=4, sample_prompts=prompts, sample_tokens=6, eval_every=4
    )
    (train if strategy == "none" else functools.partial(workers_2.run, train))(config)
    rows = samples_of(tmp_path / "run")
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, p) for step in (1, 4) for p in prompts]
    if strategy == "none":
        # Neither twice after a resumed run, nor those of another run.
        train(replace(config, resume=True, resume_step=4, steps=5))
        assert [row["step"] for row in samples_of(tmp_path / "run")] == [1, 1, 4, 4, 5, 5]
        train(replace(config, overwrite=True))
        assert samples_of(tmp_path / "run") == rows
    export(tmp_path / "run", tmp_path / "exported", step=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    for row in rows[2:]:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        found = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(found, skip_special_tokens=True) == row["text"]


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_shares_of_a_stream_count_what_is_left_of_cut_conversations(cache: Path, tmp_path: Path) -> None:
    turns = [("user", "why"), ("assistant", "because " * 500)]
    row = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    (tmp_path / "long.jsonl").write_text(f"{row}\n" * 50)
    (tmp_path / "short.jsonl").write_text(
        "".join(json.dumps({"text": f"def f{i}(): pass"}) + "\n" for i in range(2000))
    )
    settings: dict[str, Any] = {"streaming": True, "truncate": True, "steps": 20, "shuffle_window": 16, **ALONE}
    config = config_for(tmp_path / "short.jsonl", cache, tmp_path / "run", **settings, eval_fraction=0.0)
    train(replace(config, data=[*config.data, str(tmp_path / "long.jsonl")], data_weights=[0.5, 0.5]))
    sources = json.loads((tmp_path / "run" / "data.json").read_text())["sources"]
    tokens = [source["tokens"] for source in sources]
    assert tokens[1] / sum(tokens) == pytest.approx(0.5, abs=0.02), tokens


def chats(folder: Path) -> Path:
    """20 conversations; every fifth one is far longer than a sequence, one of these in its question."""
    rows = []
    for index in range(20):
        words = "why " * (400 if index == 15 else 2), "because " * (400 if index % 5 == 0 and index != 15 else 2)
        rows.append(
            {"messages": [{"role": r, "content": w} for r, w in zip(("user", "assistant"), words, strict=True)]}
        )
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.nightly(streaming=[True])
@pytest.mark.parametrize("streaming", [False, True])
def test_long_conversations_are_cut_or_bad(streaming: bool, cache: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        # As many as meet every conversation of a stream.
        "steps": 12 if streaming else 1,
        "sequence_length": 128,
        "streaming": streaming,
        "eval_fraction": 0.0,
        **ALONE,
    }
    file = chats(tmp_path)

    def run(**changes: Any) -> dict[str, Any]:
        train(config_for(file, cache, tmp_path / "run", **settings | changes, overwrite=True))
        found = json.loads((tmp_path / "run" / "data.json").read_text())["sources"][0]
        return {name: found[name] for name in ("documents", "skipped", "documents_truncated")}

    with pytest.raises(liger_dist.LigerDistError, match=r"and --sequence_length is 128 \(--truncate true cuts it"):
        run()
    with pytest.raises(liger_dist.LigerDistError, match="before which it has no label"):
        run(truncate=True)
    cut = run(truncate=True, max_bad_rows=1)
    left_out = run(max_bad_rows=4)
    if streaming:
        # Two micro-batches a step, of documents that come again in every epoch.
        assert cut["skipped"] == 1
        assert left_out["skipped"] == 4
        assert cut["documents_truncated"] > 0 == left_out["documents_truncated"]
        return
    assert cut == {"documents": 19, "skipped": 1, "documents_truncated": 3}
    assert left_out == {"documents": 16, "skipped": 4, "documents_truncated": 0}
    assert run(max_bad_rows=0.2) == left_out
    with pytest.raises(liger_dist.LigerDistError, match=r"or a share below 1; it is 0\.19"):
        run(max_bad_rows=0.19)


@pytest.mark.smoke
def test_cut_labels_are_those_of_the_whole(cache: Path, tmp_path: Path) -> None:
    """The labels of a cut conversation are the first ones of the same conversation in a longer sequence."""
    config = config_for(chats(tmp_path), cache, tmp_path / "run", **ALONE, eval_fraction=0.0)
    tokenization = replace(find_tokenization(config), vocab_size=601)

    def pieces(**changes: Any) -> list[Piece]:
        data, _ = load_data(replace(config, **changes), tokenization, parallel_dims_of(config, 1))
        sequences = data.take(0, data.num_sequences or 0, 0, 1)
        return [piece for sequence in sequences for piece in sequence]

    whole = pieces(sequence_length=2048)
    cut = pieces(sequence_length=128, truncate=True, max_bad_rows=1)
    firsts = {(tuple(p.ids[:128].tolist()), tuple(p.labels[:128].tolist())) for p in whole}
    assert len(whole) == 20
    assert len(cut) == 19
    assert all((tuple(p.ids.tolist()), tuple(p.labels.tolist())) in firsts for p in cut)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub, without a network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


def put(hub: Path, name: str, files: dict[str, Path], commit: str = "f" * 40) -> None:
    """Leaves files as the hub's library does."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    for file, source in files.items():
        (repository / "snapshots" / commit / file).write_bytes(source.read_bytes())


def test_a_model_of_the_hub_is_trained(hub: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    write_base(cache, tmp_path / "saved")
    put(hub, "org/llama", {file.name: file for file in (tmp_path / "saved").iterdir()})
    settings: dict[str, Any] = {**ALONE, "steps": 2, "tokenizer": None}
    train(config_for(data, cache, tmp_path / "named", model="org/llama", **settings))
    train(config_for(data, cache, tmp_path / "folder", model=str(tmp_path / "saved"), **settings))
    assert losses_of(tmp_path / "named") == losses_of(tmp_path / "folder")
    assert f"snapshots/{'f' * 40}" in (tmp_path / "named" / "config.yaml").read_text()
    assert (
        TrainConfig(model="org/llama").learning_rate == TrainConfig(model=str(tmp_path / "saved")).learning_rate == 2e-5
    )
    with pytest.raises(
        liger_dist.LigerDistError, match="--model is 'org/other', which is no folder here and cannot be"
    ):
        train(config_for(data, cache, tmp_path / "other", model="org/other", **settings))


def test_splits_and_subsets_are_those_of_datasets(data: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "org" / "texts"
    text = (data / "enum0.txt").read_text()
    for subset, split, count in (("code", "train", 12), ("code", "extra", 5), ("prose", "train", 7)):
        (folder / subset).mkdir(parents=True, exist_ok=True)
        rows = {"text": [f"{subset} {split} {i} " + text[i * 300 : i * 300 + 900] for i in range(count)]}
        datasets.Dataset.from_dict(rows).to_parquet(folder / subset / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: code\n  data_files:\n"
        "  - {split: train, path: code/train-*}\n  - {split: extra, path: code/extra-*}\n"
        "- config_name: prose\n  data_files:\n  - {split: train, path: prose/train-*}\n---\n"
    )

    def documents(name: str) -> int:
        config = config_for(Path(name), cache, tmp_path / "run", **ALONE, steps=1, eval_fraction=0.0, overwrite=True)
        train(config)
        (source,) = json.loads((tmp_path / "run" / "data.json").read_text())["sources"]
        assert source["source"] == name
        return int(source["documents"])

    assert documents(f"{folder},code:extra") == 5
    assert documents(f"{folder},code") == 12
    assert documents(f"{folder},prose:train") == 7
    with pytest.raises(liger_dist.LigerDistError, match='cannot be loaded: Unknown split "test"'):
        documents(f"{folder},prose:test")
    with pytest.raises(liger_dist.LigerDistError, match="BuilderConfig 'poems' not found"):
        documents(f"{folder},poems")


def test_names_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    names = {
        "org/name": ("org/name", None, None, "train"),
        "org/name:test": ("org/name", None, None, "test"),
        "org/name@v1.0,en:validation": ("org/name", "v1.0", "en", "validation"),
        "org/name:train[:10%]": None,
        f"{tmp_path}/a": None,
        f"{tmp_path}/a:dev": (f"{tmp_path}/a", None, None, "dev"),
        f"{tmp_path}/b": None,
        "chats.jsonl": None,
        "data/chats.jsonl": None,
        "data/chats.jsonl.gz": None,
        # In a folder that is here.
        "launch/chats": None,
    }
    monkeypatch.chdir(ROOT)
    assert {name: None if (found := dataset_name(name)) is None else tuple(found) for name in names} == names


WRITING = """
import sys, threading, time
from pathlib import Path
from liger_dist_train.fault_tolerance import Watchdog
folder, grows = Path(sys.argv[1]), sys.argv[2] == "grows"
partial = folder / "step-00000001.partial"
partial.mkdir()
watchdog = Watchdog(1.0)
with watchdog.watching():
    watchdog.at(1, "writing a checkpoint", folder)
    for _ in range(25):
        time.sleep(0.2)
        if grows:
            with (partial / "file").open("ab") as file:
                file.write(bytes(1000))
print("done")
"""


@pytest.mark.smoke
def test_a_checkpoint_that_vanishes_is_no_error(tmp_path: Path) -> None:
    """It gets its name, or is removed, while its files are counted."""
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            (tmp_path / "step-00000001.partial" / "model").mkdir(parents=True)
            (tmp_path / "step-00000001.partial" / "model" / "file").write_bytes(bytes(10))
            shutil.rmtree(tmp_path / "step-00000001.partial")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {bytes_begun(tmp_path) for _ in range(3000)} <= {0, 10}
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("how", ["grows", "stays"])
def test_a_checkpoint_that_grows_is_a_sign_of_life(how: str, tmp_path: Path) -> None:
    """5 seconds of writing with a limit of 1."""
    program, folder = tmp_path / "writing.py", tmp_path / "checkpoints"
    program.write_text(WRITING)
    folder.mkdir()
    ended = run_program(["python", str(program), str(folder), how], tmp_path)
    assert ended.failed == (how == "stays"), ended.all_said
    assert ("done" in ended.all_said) == (how == "grows")
    assert ("no progress for 1 s" in ended.all_said) == (how == "stays")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "muon", "lora_rank": 4}, "--optimizer is muon, with --lora_rank 4"),
        ({"optimizer": "muon", "strategy": "fsdp1"}, "and --strategy fsdp1"),
        ({"ema_decay": 0.9, "strategy": "fsdp1"}, "--ema_decay is 0.9 and --strategy fsdp1"),
        ({"ema_decay": 1.0}, "--ema_decay is 1.0; expected less than 1"),
        ({"sample_tokens": 3}, "there are no --sample_prompts"),
        ({"sample_prompts": ["a"], "eval_fraction": 0.0}, "no held-out data"),
        ({"sample_prompts": ["a"], "sp": 2}, "--sp is 2, which generates no text"),
        ({"max_bad_rows": 1.5}, "--max_bad_rows is 1.5; expected a number of rows"),
        ({"max_bad_rows": 0.1, "streaming": True, "steps": 3}, "a share of all rows, and --streaming is true"),
        ({"max_skipped_steps": 1, "strategy": "deepspeed", "deepspeed": "x.json"}, "--strategy deepspeed, whose step"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        TrainConfig(**changes)


def test_the_warm_up_fits_the_run() -> None:
    def peak_step(steps: int) -> int:
        model = nn.Linear(2, 2)
        config = TrainConfig(steps=steps, learning_rate=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        schedule = make_schedule(optimizer, config, steps)
        rates = []
        for _ in range(steps):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return rates.index(max(rates))

    assert [peak_step(steps) for steps in (5, 10, 50, 200, 1000)] == [0, 1, 5, 20, 20]


def small_of(kind: str) -> Any:
    from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, MambaConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    configs = {
        "gpt_oss": lambda: GptOssConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2),
        "mamba": lambda: MambaConfig(**sizes, state_size=8),
        "qwen3_moe": lambda: Qwen3MoeConfig(**sizes, **heads, **experts),
        "glm4_moe": lambda: Glm4MoeConfig(
            **sizes,
            **heads,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        ),
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configs[kind]())


KINDS_OF_PARAMETERS = {
    "gpt_oss": {
        "mlp.experts.gate_up_proj": "matrices",
        "mlp.experts.gate_up_proj_bias": "vector",
        "mlp.router.weight": "matrix",
        "self_attn.sinks": "vector",
        "self_attn.q_proj.weight": "matrix",
    },
    "mamba": {
        "mixer.A_log": "state",
        "mixer.D": "vector",
        "mixer.conv1d.weight": "filter",
        "mixer.in_proj.weight": "matrix",
    },
    "qwen3_moe": {"mlp.experts.gate_up_proj": "matrices", "mlp.gate.weight": "matrix"},
}


@pytest.mark.parametrize("family", KINDS_OF_PARAMETERS)
def test_what_a_parameter_is(family: str) -> None:
    kinds = kinds_of(small_of(family))
    for name, kind in KINDS_OF_PARAMETERS[family].items():
        (found,) = {of for path, of in kinds.items() if path.endswith(f"layers.0.{name}")}
        assert found == kind, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family", ["gpt_oss", "mamba", "qwen3_moe"])
def test_no_vector_or_state_decays_and_experts_are_apart(family: str, optimizer: str) -> None:
    """Without gradients only matrices and filters move; an expert's step does not depend on another's gradient."""
    config = TrainConfig(model="", optimizer=optimizer, learning_rate=0.1)
    steps = []
    for scale in (0.0, 1.0, 100.0):
        model = small_of(family).cpu()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        kinds = kinds_of(model)
        optimizer_of = make_optimizer(
            model, config, decayed_parameters(model, config), matrices_of_layers(model, config)
        )
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, device="cpu") * (1.0 if scale else 0.0)
            parameter.grad[1:] *= scale
        optimizer_of.step()
        moved = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
        steps.append(moved)
    for name, step in steps[0].items():
        assert bool(step.any()) == (kinds[name] not in ("vector", "state")), name
    experts = [name for name in steps[1] if ".experts." in name]
    assert bool(experts) == (family != "mamba")
    for name in experts:
        assert kinds[name] in ("matrices", "vector")
        torch.testing.assert_close(steps[1][name][0], steps[2][name][0], msg=name)


def test_muon_of_a_stack_is_muon_of_each_matrix() -> None:
    stack = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0), device="cpu")
    apart = torch.stack([orthogonal(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonal(stack), apart, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_keeps_in_fp32_what_transformers_does(dtype: str, tmp_path: Path) -> None:
    model = small_of("glm4_moe")
    names = [name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert names
    with torch.no_grad():
        for name in names:
            model.get_buffer(name).copy_(7.13 + torch.rand(4, device="cpu") / 100)
    before = {name: model.get_buffer(name).clone() for name in names}
    _to_dtype(model, getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    for name in names:
        assert torch.equal(loaded.get_buffer(name), before[name])
    others = [p for name, p in loaded.named_parameters() if not name.endswith(("gate.weight", "correction_bias"))]
    assert {parameter.dtype for parameter in others} == {getattr(torch, dtype)}
