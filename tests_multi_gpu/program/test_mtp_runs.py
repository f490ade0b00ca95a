"""Runs of the training program with multi-token prediction: losses of each depth, checkpoints, exports and plans."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import config_for, metrics_of
from transformers import AutoModelForCausalLM

from liger_dist import LigerDistError
from liger_dist.mtp import MultiTokenPrediction
from liger_dist_train.config import TrainConfig
from liger_dist_train.export import export
from liger_dist_train.memory_plan import plan
from liger_dist_train.metrics import Flops
from liger_dist_train.model import add_mtp, find_config, shell
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train

ALONE: dict[str, Any] = {"strategy": "none"}
SHORT: dict[str, Any] = {
    "sequence_length": 32,
    "global_batch_size": 4,
    "eval_batches": 1,
    "eval_every": 2,
    "layer_kernels": False,
    "steps": 4,
    "checkpoint_every": 2,
    "warmup_steps": 0,
    "mtp": '{"depth": 2, "weight": 0.4}',
}


def run(config: TrainConfig) -> None:
    train(config)


@pytest.mark.nightly
def test_mtp_run_reports_each_depth_and_exports_the_modules(data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path / "run", **ALONE, **SHORT)
    train(config)
    rows = metrics_of(tmp_path / "run")
    assert all({"mtp_loss/1", "mtp_loss/2"} <= row.keys() for row in rows)
    assert rows[-1]["mtp_loss/1"] < rows[0]["mtp_loss/1"]
    # The loss is that of the next token and 0.2 times each of the others; held out it is the first alone.
    assert rows[0]["loss"] == pytest.approx(1.4 * rows[0]["eval_loss"], rel=0.1)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 0
    export(tmp_path / "run", tmp_path / "exported", step=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert MultiTokenPrediction.from_pretrained(model).depth == 2
    # A run from the export goes on with its modules.
    changes: dict[str, Any] = {"model": str(tmp_path / "exported"), "learning_rate": 1e-4, "steps": 2}
    train(config_for(data, cache, tmp_path / "second", **ALONE, **(SHORT | changes)))
    assert metrics_of(tmp_path / "second")[0]["mtp_loss/1"] < rows[0]["mtp_loss/1"]
    other = {"model": str(tmp_path / "exported"), "mtp": '{"depth": 1}'}
    third = config_for(data, cache, tmp_path / "third", **ALONE, **(SHORT | other))
    with pytest.raises(LigerDistError, match="predicts 2 further tokens; give that depth"):
        train(third)


def test_losses_of_depths_are_means_of_their_labels(cache: Path, tmp_path: Path) -> None:
    """In rows of eight tokens, which have seven labels of the next token, six of the one after, and five more."""
    rows = torch.randint(3, 600, (8, 8), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    changes = SHORT | {"steps": 1, "checkpoint_every": 0, "eval_fraction": 0.0, "batch_size": 1}
    train(config_for(path, cache, tmp_path / "run", **ALONE, **changes | {"global_batch_size": 2}))
    (row,) = metrics_of(tmp_path / "run")
    # Weights are random and the logits nearly alike: each label costs the logarithm of the vocabulary.
    for name in ("mtp_loss/1", "mtp_loss/2"):
        assert row[name] == pytest.approx(math.log(601), rel=0.02)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mtp": "2"}, "expected depth, weight and main_weight"),
        ({"mtp": '{"depth": 0}'}, "expected depth, weight and main_weight"),
        ({"mtp": '{"depth": 1, "lambda": 0.1}'}, "expected depth, weight and main_weight"),
        ({"mtp": "{"}, "expected depth, weight and main_weight"),
        ({"mtp": '{"depth": 1}', "sp": 2}, "with which this program trains no further tokens"),
    ],
)
def test_wrong_mtp_options_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LigerDistError, match=sentence):
        TrainConfig(**changes)


@pytest.mark.smoke
def test_a_plan_and_utilisation_know_mtp(data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path, **ALONE, **SHORT)
    plain = replace(config, mtp=None)
    model_config = find_config(config, 601)
    models = [shell(one, model_config) for one in (plain, config)]
    add_mtp(models[1], config)
    flops = [Flops.of(model, model_config, config) for model in models]
    further = sum(p.numel() for p in models[1].mtp.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    head = models[0].lm_head.weight.numel()  # type: ignore[union-attr, operator]
    assert flops[1].per_token - flops[0].per_token == 6 * (further + 2 * head)
    assert (
        flops[1].per_pair / flops[0].per_pair == (model_config.num_hidden_layers + 2) / model_config.num_hidden_layers
    )
    plans = [
        plan(one, parallel_dims_of(one, 1), model, model_config).plans[0]
        for one, model in zip((plain, config), models, strict=True)
    ]
    modules = sum(p.numel() for p in models[1].mtp.parameters())  # type: ignore[union-attr]
    assert plans[1].parameters - plans[0].parameters == 4 * modules
    assert plans[1].activations > plans[0].activations
    assert json.loads(str(config.mtp))["depth"] == 2
    assert torch.is_grad_enabled()
