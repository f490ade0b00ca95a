"""Scores of a teacher on disk, and training from them: every number against the unwrapped models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from harness import InThisProcess, Workers
from models import make_config
from training_runs import LAUNCH, config_for, losses_of, metrics_of
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist.sharding.process_groups import compute_device
from liger_dist_train.config import TrainConfig, parse, parse_as
from liger_dist_train.run import train
from liger_dist_train.scoring import ScoreConfig, score

TOP_K = 16
WAYS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "vocab_parallel": {"strategy": "fsdp2", "lm_head": "vocab_parallel", "remainder": "spread"},
    "fsdp1": {"strategy": "fsdp1", "remainder": "renormalize"},
    "zero3": {"strategy": "deepspeed", "deepspeed": str(LAUNCH / "deepspeed" / "zero3.json")},
    "stream": {"strategy": "ddp", "streaming": True},
    "weighted stream": {"strategy": "ddp", "streaming": True, "data_weights": [1.0, 2.0]},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with its weights, and more classes than the tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    config = make_config("llama")
    config.vocab_size, config.max_position_embeddings = 640, 64
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def settings(data: Path, cache: Path, folder: Path, teacher: Path, **changes: Any) -> ScoreConfig:
    given: dict[str, Any] = {
        "model": str(teacher),
        "tokenizer": str(cache / "tokenizer"),
        "data": [str(data)],
        "cache_dir": str(cache),
        "output_dir": str(folder),
        "top_k": TOP_K,
        "sequence_length": 64,
        "batch_size": 3,
        "dtype": "float32",
        "num_proc": 1,
    }
    return ScoreConfig(**(given | changes))


@pytest.fixture(scope="module")
def sources(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the corpus' smaller files."""
    folder = tmp_path_factory.mktemp("sources")
    for file in sorted(data.glob("*0.txt"), key=lambda file: file.stat().st_size)[:4]:
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def scores(
    teacher: Path, sources: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory, workers_2: Workers
) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    workers_2.run(score, settings(sources, cache, folder, teacher))
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted((folder / "data").glob("*")) for row in pyarrow.parquet.read_table(file).to_pylist()]


def test_every_token_of_the_data_has_scores(scores: Path, teacher: Path, sources: Path, cache: Path) -> None:
    """As many tokens as the tokenizer alone makes, each score that of the unwrapped model in fp64."""
    from liger_dist_train.tokenization import load_tokenizer

    tokenizer = load_tokenizer(cache / "tokenizer")
    encoded = [tokenizer(file.read_text())["input_ids"] for file in sorted(sources.glob("*.txt"))]
    rows = rows_of(scores)
    report = json.loads((scores / "scores.json").read_text())
    assert report["tokens"] == sum(len(ids) + 1 for ids in encoded) == sum(len(row["input_ids"]) for row in rows)
    assert report["labels"] == report["tokens"] - len(rows)
    assert report["shards"] == len(list((scores / "data").glob("*"))) > 4
    assert (scores / "top_k.png").stat().st_size > 0
    assert not (scores / "parts").exists()
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    remainders = []
    for row in rows[:: len(rows) // 20]:
        with torch.no_grad():
            truth = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)[:-1]
        ids, log_probs = np.array(row["top_k_ids"]), np.array(row["top_k_log_probs"])
        assert (ids[-1] == -1).all()
        assert np.isneginf(log_probs[-1]).all()
        assert row["remainder"][-1] == 1.0
        largest, classes = (part.numpy() for part in truth.topk(TOP_K))
        # Classes that the tokenizer does not have.
        largest = np.where(classes < 601, largest, -np.inf)
        np.testing.assert_allclose(log_probs[:-1], largest, atol=1e-5)
        found = np.where(ids[:-1] < 0, -np.inf, truth.gather(1, torch.tensor(ids[:-1]).clamp(min=0)).numpy())
        np.testing.assert_allclose(found, largest, atol=1e-5)
        rest = 1 - np.exp(largest).sum(1)
        assert np.abs(np.array(row["remainder"][:-1]) - rest).max() < 1e-5
        remainders += rest.tolist()
    assert report["mean_remainder"] == pytest.approx(np.mean(remainders), rel=0.1)


def test_a_killed_run_goes_on(scores: Path, teacher: Path, sources: Path, cache: Path, tmp_path: Path) -> None:
    """Finished shards are kept, missing ones are written, on another number of ranks; a complete one is left alone."""
    shutil.copytree(scores / "data", tmp_path / "parts")
    shutil.copy(scores / "scores.json", tmp_path)
    shards = sorted((tmp_path / "parts").glob("*"))
    lost, kept = shards[1::2], shards[::2]
    for shard in lost:
        shard.rename(shard.with_suffix(".parquet.partial"))
    times = [shard.stat().st_mtime_ns for shard in kept]
    with InThisProcess() as here:
        here.run(score, settings(sources, cache, tmp_path, teacher, batch_size=5))
    there = [tmp_path / "data" / shard.name for shard in kept]
    assert [shard.stat().st_mtime_ns for shard in there] == times
    for mine, other in zip(rows_of(tmp_path), rows_of(scores), strict=True):
        assert mine["input_ids"] == other["input_ids"]
        np.testing.assert_allclose(mine["top_k_log_probs"], other["top_k_log_probs"], atol=1e-5)
    before = sorted(file.stat().st_mtime_ns for file in (tmp_path / "data").glob("*"))
    with InThisProcess() as here:
        here.run(score, settings(sources, cache, tmp_path, teacher))
    assert sorted(file.stat().st_mtime_ns for file in (tmp_path / "data").glob("*")) == before
    assert not (tmp_path / "parts").exists()


def test_other_options_are_refused_and_overwrite(teacher: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    """Also without the report: each shard knows what it is of."""
    one = settings(data / "ast0.txt", cache, tmp_path, teacher)
    with InThisProcess() as here:
        here.run(score, one)
        (tmp_path / "scores.json").unlink()
        for changes in ({"top_k": 8}, {"model": "tiny"}):
            with pytest.raises(liger_dist.LigerDistError, match=r"has scores of other data, another model"):
                here.run(score, replace(one, **changes))
        here.run(score, replace(one, top_k=8, overwrite=True))
        times = [file.stat().st_mtime_ns for file in sorted((tmp_path / "data").glob("*"))]
        here.run(score, replace(one, top_k=8, overwrite=True))
    assert times == [file.stat().st_mtime_ns for file in sorted((tmp_path / "data").glob("*"))]
    assert json.loads((tmp_path / "scores.json").read_text())["top_k"] == 8
    assert {len(ids) for row in rows_of(tmp_path) for ids in row["top_k_ids"]} == {8}
    with pytest.raises(liger_dist.LigerDistError, match=r"--top_k is 641 but the model has 640 classes"):
        score(replace(one, top_k=641))
    with pytest.raises(liger_dist.LigerDistError, match=r"--top_k is 0; expected 1 or more"):
        score(replace(one, top_k=0))
    with pytest.raises(liger_dist.LigerDistError, match=r"--top_p is no option; the nearest is --top_k"):
        parse_as(["--top_p", "0.9"], ScoreConfig)


def test_lost_and_damaged_shards(scores: Path, teacher: Path, sources: Path, cache: Path, tmp_path: Path) -> None:
    """A lost shard is written again, also of complete scores; a damaged one is named."""
    shutil.copytree(scores / "data", tmp_path / "data")
    lost, damaged = sorted((tmp_path / "data").glob("*"))[:2]
    lost.unlink()
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100])
    config = settings(sources, cache, tmp_path, teacher)
    with InThisProcess() as here:
        with pytest.raises(liger_dist.LigerDistError, match=rf"{damaged.name} is damaged, or no file that"):
            here.run(score, config)
        damaged.write_bytes(content)
        here.run(score, config)
    assert [row["input_ids"] for row in rows_of(tmp_path)] == [row["input_ids"] for row in rows_of(scores)]
    assert json.loads((tmp_path / "scores.json").read_text()) == json.loads((scores / "scores.json").read_text())


def test_a_last_piece_of_one_token(teacher: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    """It predicts nothing: it is left out and counted, and what is written can be trained on."""
    from liger_dist_train.tokenization import load_tokenizer

    tokenizer = load_tokenizer(cache / "tokenizer")
    text = (data / "ast0.txt").read_text()
    ends = [end for end in range(600, 3000) if len(tokenizer(text[:end])["input_ids"]) % 64 == 0]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "text.txt").write_text(text[: ends[0]])
    with InThisProcess() as here:
        here.run(score, settings(tmp_path / "source", cache, tmp_path, teacher))
        here.run(train, training(tmp_path, cache, tmp_path / "run", strategy="none", steps=1))
    report, counts = (json.loads((tmp_path / name).read_text()) for name in ("scores.json", "run/data.json"))
    tokens = len(tokenizer(text[: ends[0]])["input_ids"]) + 1
    assert (report["tokens"], report["tokens_left_out"]) == (tokens - 1, 1)
    # Of each piece but the first, the first token is not predicted.
    assert report["labels"] == tokens - 1 - (tokens - 1) // 64
    (source,) = counts["sources"]
    assert source["splits"]["train"]["tokens"] == report["tokens"]
    assert source["labels"] == report["labels"]


@pytest.mark.smoke
def test_labels_without_a_class(teacher: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    """The most likely class of some tokens is one that the tokenizer does not have."""
    with InThisProcess() as here, pytest.raises(liger_dist.LigerDistError, match=r"labels of shard .*larger --top_k"):
        here.run(score, settings(data / "ast0.txt", cache, tmp_path, teacher, top_k=1))


@pytest.mark.smoke
def test_a_disk_that_one_rank_cannot_write_to(teacher: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    """The shard's place is taken by a folder."""
    config = settings(data / "ast0.txt", cache, tmp_path, teacher)
    with InThisProcess() as here:
        here.run(score, config)
        first = min((tmp_path / "data").glob("*")).name
        (tmp_path / "parts" / first).mkdir(parents=True)
        (tmp_path / "parts" / first / "file").touch()
        shutil.rmtree(tmp_path / "data")
        with pytest.raises(liger_dist.LigerDistError, match=r"cannot be written: .*finished shards are kept"):
            here.run(score, config)


def training(scores: Path, cache: Path, folder: Path, **changes: Any) -> TrainConfig:
    given = {"steps": 3, "checkpoint_every": 0, "eval_fraction": 0.0, "top_k": TOP_K, "soft_weight": 0.75}
    return config_for(scores / "data", cache, folder, **(given | changes))


@pytest.mark.nightly(way=["vocab_parallel", "fsdp1", "weighted stream"])
@pytest.mark.parametrize("way", WAYS)
def test_every_strategy_draws_the_same_curve(
    way: str, scores: Path, workers_2: Workers, cache: Path, tmp_path: Path
) -> None:
    """The curve of one process with the same options; of a stream its tokens and the first loss alone."""
    options = dict(WAYS[way])
    alone = {"strategy": "none"} | {name: options[name] for name in ("remainder",) if name in options}
    with InThisProcess() as here:
        here.run(train, training(scores, cache, tmp_path / "alone", **alone))
    weights = options.pop("data_weights", [])
    config = training(scores, cache, tmp_path / "run", **options)
    if weights:
        config = replace(config, data=config.data * 2, data_weights=weights)
    workers_2.run(train, config)
    expected = losses_of(tmp_path / "alone")
    if "stream" in way:
        assert losses_of(tmp_path / "run")[0] == pytest.approx(expected[0], rel=0.05)
        assert all(row["tokens"] > 0 for row in metrics_of(tmp_path / "run"))
    else:
        assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_that_of_the_columns(scores: Path, cache: Path, tmp_path: Path) -> None:
    """Of one source with one step over all of its rows, against the formula; and with a smaller ``--top_k``."""
    rows = rows_of(scores)[:40]
    source = tmp_path / "data" / "rows.parquet"
    source.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    torch.manual_seed(0)
    for top_k, soft_weight in ((TOP_K, 0.75), (4, 1.0)):
        folder = tmp_path / f"run{top_k}"
        config = training(
            tmp_path,
            cache,
            folder,
            top_k=top_k,
            soft_weight=soft_weight,
            steps=1,
            strategy="none",
            global_batch_size=40,
            eval_every=1,
        )
        with InThisProcess() as here:
            here.run(train, config)
        found = metrics_of(folder)[0]
        assert found["tokens"] == sum(len(row["input_ids"]) for row in rows)
        assert found["loss"] == pytest.approx(expected_loss(rows, config), rel=1e-5)


def expected_loss(rows: list[dict[str, Any]], config: TrainConfig) -> float:
    """Of the student before its first step."""
    from liger_dist import wrap
    from liger_dist_train.model import find_config, shell

    model = shell(config, find_config(config, 601))
    torch.manual_seed(config.seed)
    model = wrap(model, "none").eval()
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            log_q = model(ids.to(compute_device())).logits[0].cpu().double().log_softmax(-1)[:-1]
        probs, order = torch.tensor(row["top_k_log_probs"], dtype=torch.float64)[:-1].exp().topk(config.top_k)
        top = torch.tensor(row["top_k_ids"])[:-1].gather(1, order).clamp(min=0)
        soft = -(probs * log_q.gather(1, top)).sum()
        hard = F.nll_loss(log_q, ids[0, 1:], reduction="sum")
        total += float(config.soft_weight * soft + (1 - config.soft_weight) * hard)
        count += len(log_q)
    return total / count


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"top_k_ids": None}, "has no 'top_k_ids', which --top_k reads; give what liger-dist score has written"),
    "length": (
        {"top_k_ids": [[1, 2]] * 3, "top_k_log_probs": [[-1.0, -2.0]] * 3},
        "has top_k_ids of 3 tokens and 4 input_ids",
    ),
    "shape": ({"top_k_ids": [[1]] * 4}, r"of shape \[4, 1\] and top_k_log_probs of shape \[4, 2\]"),
    "ragged": ({"top_k_ids": [[1], [1, 2], [1], [1]]}, "no lists of as many numbers for each token"),
    "vocabulary": ({"top_k_ids": [[1, 2000]] * 4}, "has 2000 in top_k_ids but the model's vocabulary has 601"),
    "logarithm": ({"top_k_log_probs": [[0.4, 0.6]] * 4}, "has 0.6.* in top_k_log_probs; expected logarithms"),
    "sum": ({"top_k_log_probs": [[-0.1, -0.1]] * 4}, "probabilities of one token that sum to 1.8097"),
    "none": ({"top_k_ids": [[1, 2], [-1, -1], [1, 2], [-1, -1]]}, "no classes in top_k_ids for 1 of its labels"),
    "-inf": ({"top_k_log_probs": [[float("-inf")] * 2] * 4}, "no classes in top_k_ids for 3 of its labels"),
    "fewer": (
        {"top_k_ids": [[1]] * 4, "top_k_log_probs": [[-1.0]] * 4},
        "has 1 classes for each .* expected at most 1",
    ),
    "fraction": ({"top_k_ids": [[1.7, 2.2]] * 4}, r"has np.float64\(1.7\) in top_k_ids; expected integers"),
    "words": ({"top_k_ids": [["1", "2"]] * 4}, "in top_k_ids; expected integers"),
    "null": ({"top_k_ids": [[1, None]] * 4}, "has 1 in top_k_ids; expected integers"),
    "wide": ({"top_k_ids": [[1, 2**32 + 1]] * 4}, "has 4294967297 in top_k_ids but the model's vocabulary has 601"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", BAD)
def test_bad_rows(case: str, cache: Path, tmp_path: Path) -> None:
    """The row and what is wrong with it are named, and nothing is trained."""
    row = {"input_ids": [5, 6, 7, 8], "top_k_ids": [[1, 2]] * 4, "top_k_log_probs": [[-1.0, -2.0]] * 4}
    changes, sentence = BAD[case]
    file = tmp_path / "data" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(values) + "\n" for values in (row, row | changes)))
    with InThisProcess() as here, pytest.raises(liger_dist.LigerDistError, match=rf"rows.jsonl line 2 .*{sentence}"):
        here.run(train, training(tmp_path, cache, tmp_path / "run", strategy="none", top_k=2))


def test_text_without_scores_is_refused(data: Path, cache: Path, tmp_path: Path) -> None:
    with InThisProcess() as here, pytest.raises(liger_dist.LigerDistError, match="has no 'input_ids', which --top_k"):
        here.run(train, config_for(data / "ast0.txt", cache, tmp_path / "run", strategy="none", top_k=4))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--soft_weight", "0.5"], "--soft_weight is 0.5 and --remainder drop, but --top_k is 0"),
        (["--top_k", "4", "--teacher", "tiny"], "--top_k is 4 and --teacher tiny"),
        (["--top_k", "4", "--fused_loss", "false"], "--fused_loss False; expected the probabilities"),
        (["--top_k", "4", "--soft_weight", "1.5"], "--soft_weight is 1.5; expected at most 1"),
        (["--top_k", "-4"], "--top_k is -4; expected 0 or more"),
    ],
)
def test_refused_options(options: list[str], sentence: str) -> None:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        parse(options)
    assert sentence in str(caught.value)
