"""What a run would refuse is refused before hours of tokenising, with the way out; and data that other programs leave
is read as they left it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import make_model
from test_dataset import TEXTS, loaded, short
from test_dataset import tokenizer_folder as tokenizer_folder
from test_sources import encoded, rows_of
from test_sources import tokenizer as tokenizer

import liger_dist
from liger_dist_train.config import TrainConfig
from liger_dist_train.fault_tolerance import check_weights, describe_numbers, refuse_numbers
from liger_dist_train.model import add_lora
from liger_dist_train.optimizer import check_no_weight_decay
from liger_dist_train.run import train
from liger_dist_train.sources import find_source


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:50]))
    return file


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trackers": ["foo"]}, "--trackers names 'foo'; expected some of aim.*; installed are "),
        ({"trackers": ["aim"]}, "--trackers names 'aim'; .*Install its package"),
        ({"profile_step": 9, "steps": 5}, "--profile_step is 9 and --steps 5; expected a step of the run"),
        ({"lr_scheduler_kwargs": '{"slope": 1}'}, "cosine_with_min_lr does not take slope"),
        ({"lr_scheduler_kwargs": '{"num_cycles": "two"}'}, "does not take .*'two'.*change --lr_scheduler_kwargs"),
        (
            {"lr_scheduler": "polynomial", "lr_scheduler_kwargs": '{"lr_end": 5.0}'},
            "polynomial does not take .*must be smaller than initial lr",
        ),
        (
            {"no_weight_decay": ["norm", "embd"]},
            "--no_weight_decay has 'embd', which is in no parameter's name.*such as",
        ),
        ({"eval_fraction": 0.1, "eval_data": ["texts.jsonl"]}, "--eval_fraction is 0.1.*but --eval_data names what"),
        ({"eval_fraction": 0.1, "streaming": True}, "--eval_fraction is 0.1.*but --streaming is true"),
        (
            {"min_learning_rate_ratio": 0.2, "lr_scheduler": "linear"},
            "--min_learning_rate_ratio is 0.2, which --lr_scheduler linear does not have; .*warmup_stable_decay",
        ),
        # Of no hub, with a network or without.
        (
            {"model": "liger/none-such"},
            r"(?s)--model is 'liger/none-such', which is no folder.*hf download liger/none-such",
        ),
        ({"model": "liger/none-such", "tokenizer": None, "dry_run": True}, "hf download liger/none-such"),
        ({"tokenizer": "liger/none-such"}, r"(?s)--tokenizer is 'liger/none-such'.*hf download liger/none-such"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_it_is_refused_before_anything_is_tokenised(
    changes: dict[str, Any], words: str, texts: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        train(replace(short(texts, tokenizer_folder, tmp_path), **changes))
    assert not list(tmp_path.rglob("*.arrow"))


def test_what_is_right_runs(texts: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    changes = {"no_weight_decay": ["embed_tokens"], "profile_step": 1, "lr_scheduler_kwargs": '{"num_cycles": 1.5}'}
    train(short(texts, tokenizer_folder, tmp_path, **changes))


@pytest.mark.smoke
def test_names_of_lora_layers_are_parameters() -> None:
    config = TrainConfig(lora_rank=2, dora=True, no_weight_decay=["lora_magnitude_vector"])
    lora = add_lora(make_model("llama", dtype=torch.float32).cpu(), config, has_weights=True)
    check_no_weight_decay(config, lora)
    with pytest.raises(liger_dist.LigerDistError, match="--no_weight_decay has 'lora_C'"):
        check_no_weight_decay(replace(config, no_weight_decay=["lora_C"]), lora)


def test_a_model_in_the_cache_of_a_hub_is_named(texts: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(liger_dist.LigerDistError, match=f"give the snapshot in it, such as {snapshot}"):
        train(short(texts, tokenizer_folder, tmp_path, model=str(tmp_path / "models--a--b")))


@pytest.mark.smoke
def test_a_dataset_in_the_cache_of_a_hub_is_read(texts: Path, tmp_path: Path) -> None:
    """As ``hf download`` leaves it: links from snapshots to blobs."""
    folder = tmp_path / "datasets--a--b"
    for name in ("blobs", "refs", "snapshots/abc", "snapshots/abc/data"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    texts.rename(folder / "blobs" / "0123")
    (folder / "snapshots/abc/data/train.jsonl").symlink_to("../../../blobs/0123")
    source = find_source(str(folder))
    assert source.files == (folder / "snapshots/abc/data/train.jsonl",)
    (folder / "snapshots" / "def").mkdir()
    with pytest.raises(liger_dist.LigerDistError, match=r"with 2 snapshots; expected one, so name .*/snapshots/abc, "):
        find_source(str(folder))


def test_nan_without_a_checkpoint_begins_again(texts: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    config = short(texts, tokenizer_folder, tmp_path, learning_rate=1e30, warmup_steps=0.0, max_grad_norm=0.0, steps=4)
    with pytest.raises(liger_dist.LigerDistError, match="There is no checkpoint yet; begin again with a lower"):
        train(replace(config, steps=4, eval_every=100))
    with pytest.raises(liger_dist.LigerDistError, match="continue from the newest one, of step 3, with --resume true"):
        refuse_numbers(describe_numbers(5, float("nan"), float("nan"), [], []), 3, 0)
    with pytest.raises(liger_dist.LigerDistError, match="continue from the newest one, of step 3, with --resume true"):
        check_weights(5, ["a"], None, lambda: 3)
    with pytest.raises(liger_dist.LigerDistError, match="There is no checkpoint yet"):
        check_weights(5, ["a"], None, lambda: 0)


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_a_saved_dataset_with_a_format_is_read(format: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    """With the columns that the format hides."""
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 30, "labels": [[-100, 6, 7, 8]] * 30, "x": [1] * 30})
    rows.with_format(format).save_to_disk(str(tmp_path / "all"))
    rows.with_format(format, columns=["x"]).save_to_disk(str(tmp_path / "hidden"))
    for name in ("all", "hidden"):
        data, _ = loaded(short(tmp_path / name, tokenizer_folder, tmp_path))
        assert data.counts([])["sources"][0]["tokens"] == 120
        assert data.counts([])["sources"][0]["labels"] == 90


@pytest.mark.smoke
def test_a_csv_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,id,text\na,1,b\n")
    with pytest.raises(liger_dist.LigerDistError, match=r"a.csv cannot be read: .* has the column 'text' twice"):
        rows_of(file)
    # Spreadsheets leave columns without a name.
    file.write_text("text,,\na,,\n")
    assert [(row.values or {})["text"] for row in rows_of(file)] == ["a"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"input_ids": [1, 2.0]}, "has input_ids of type float (2.0); expected integers"),
        ({"input_ids": [1, None]}, "has input_ids of type NoneType (None); expected integers"),
        ({"input_ids": [1, "2"]}, "has input_ids of type str (2); expected integers"),
        ({"input_ids": [[1, 2], [3, 4]]}, "has input_ids of type list ([1, 2]); expected integers"),
        ({"input_ids": [[1, 2], [3]]}, "has input_ids of type list ([1, 2]); expected integers"),
        ({"input_ids": [1, 2**70]}, f"has {2**70} in input_ids but the model's vocabulary"),
        ({"input_ids": [1, 2**63]}, f"has {2**63} in input_ids but the model's vocabulary"),
        ({"input_ids": [1, -2]}, "has -2 in input_ids but"),
        ({"input_ids": [1, -100]}, "has -100 in input_ids but"),
        ({"input_ids": [1, 2], "labels": [-101, 2]}, "has -101 in labels but"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 1 labels for 2 input_ids"),
        ({"input_ids": [1, 2], "attention_mask": [1, None]}, "expected 0 or 1 for each token"),
        ({"input_ids": [1, 2], "attention_mask": [[1], [1]]}, "expected 0 or 1 for each token"),
        ({"input_ids": []}, "has no label"),
        ({"input_ids": np.arange(3)}, "expected a list of integers"),
        ({"input_ids": torch.arange(3)}, "expected a list of integers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_token_ids_that_are_none_are_refused(values: dict[str, Any], words: str, tokenizer: Any) -> None:
    assert words in encoded(tokenizer, values)["reason"]


def test_token_ids_are_read_as_before(tokenizer: Any) -> None:
    row = encoded(tokenizer, {"input_ids": [5, True, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1.0, False]})
    assert row["reason"] is None
    assert (row["ids"].tolist(), row["labels"].tolist()) == ([5, 1], [-100, 6])
    assert row["ids"].dtype == row["labels"].dtype == np.int32
