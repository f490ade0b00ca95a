"""Held-out losses of packed documents: the same for any length of rows, with every preset and many families."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from training_runs import LAUNCH, config_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_dist_train import options
from liger_dist_train.config import TrainConfig
from liger_dist_train.model import find_config, read_config
from liger_dist_train.run import train

FILES = sorted(path.name for path in (LAUNCH / "models").glob("*.json"))
NAMES = """
    afmoe bloom cohere2 deepseek_v3 falcon falcon_h1 gemma2 gemma3_text gpt2 gpt_oss lfm2 llama mamba2 mpt nemotron
    olmoe opt phi3 qwen2 qwen3_next stablelm
"""
FAMILIES = NAMES.split()
USUAL = ("gpt_oss", "bloom", "qwen3_5_tiny", "qwen3_moe_tiny")
ROWS = (24, 64)
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 601,
    "layer_types": None,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "moe_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), 2),
}
"""sizes of the shapes that the launch files name"""


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Documents that are shorter than a row."""
    lines = (data / "ast0.txt").read_text().splitlines()
    path = tmp_path_factory.mktemp("held-out") / "lines.jsonl"
    rows = [json.dumps({"text": line[:24]}) for line in lines if len(line) > 20]
    path.write_text("\n".join(rows[:40]) + "\n")
    return path


@pytest.mark.nightly(name=[name for name in (*options.PRESETS, *FILES, *FAMILIES) if name not in USUAL])
@pytest.mark.parametrize("name", [*options.PRESETS, *FILES, *FAMILIES])
def test_a_held_out_loss_does_not_depend_on_the_length_of_rows(
    name: str, held_out: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(name, monkeypatch)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(cache / "tokenizer").save_pretrained(tmp_path / "model")
    losses = [held_out_loss(held_out, cache, tmp_path, sequence_length=length) for length in ROWS]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_held_out_loss_of_documents_that_attend_to_each_other_does(
    held_out: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model("tiny", monkeypatch).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(cache / "tokenizer").save_pretrained(tmp_path / "model")
    losses = [
        held_out_loss(held_out, cache, tmp_path, sequence_length=length, attend_across_documents=True)
        for length in ROWS
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def held_out_loss(held_out: Path, cache: Path, folder: Path, **changes: Any) -> float:
    """Of the model in ``folder``, by the training program."""
    output = folder / f"rows of {changes['sequence_length']}"
    changes |= {"eval_data": [str(held_out)], "eval_only": True, "eval_batches": 0}
    changes |= {"model": str(folder / "model"), "tokenizer": None}
    train(replace(config_for(held_out, cache, output, **changes), data=[]))
    loss: float = json.loads((output / "eval.json").read_text())["eval_loss"]
    return loss


def small_model(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    if name in FAMILIES:
        family = next(one for one in families.families() if one.mapping == "causal" and one.name == name)
        model: Any = families.build(family).float()
        model.resize_token_embeddings(608)
        return model
    if name in FILES:
        config = read_config(LAUNCH / "models" / name)
        for size, value in SMALL.items():
            if hasattr(config, size):
                setattr(config, size, value)
        config = type(config)(**config.to_dict())
    else:
        # Layers and heads as they are, and every preset as small as the smallest.
        monkeypatch.setitem(options.PRESETS, name, options.PRESETS["tiny"])
        if name in options.MIXTURES:
            monkeypatch.setitem(options.MIXTURES, name, options.MIXTURES["qwen3_moe_tiny"])
        config = find_config(TrainConfig(model=name, sequence_length=max(ROWS)), 601)
    config.initializer_range = 0.3
    return AutoModelForCausalLM.from_config(config)
