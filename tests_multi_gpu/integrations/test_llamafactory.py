"""LLaMA-Factory's own training function, where it is installed (its versions are not this project's: it needs
another environment)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hosts import watched
from models import VOCAB_SIZE, make_model
from trainers import assert_same_weights, forget_earlier_trainers, make_tokenizer

import liger_dist

tuner = pytest.importorskip("llamafactory.train.tuner", reason="LLaMA-Factory is not installed")
collator = pytest.importorskip("llamafactory.data.collator", reason="LLaMA-Factory is not installed")
ROWS = 8


@pytest.mark.parametrize("stage", ["sft", "pt"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_three_steps_as_without_it(stage: str, tuning: str, tmp_path: Path) -> None:
    fused, own = (trained(tmp_path, stage, tuning, fused=fused) for fused in (True, False))
    assert fused["calls"] == 3
    assert own["calls"] == 0
    assert fused["rows"] <= ROWS
    assert fused["losses"] == pytest.approx(own["losses"], rel=1e-5)
    assert len(set(own["losses"])) == 3
    assert_same_weights(fused["weights"], own["weights"], atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "tuning", "options", "calls"),
    [
        ("dpo", "full", {}, 6),
        ("dpo", "lora", {"pref_loss": "ipo", "pref_ftx": 0.2}, 6),
        ("dpo", "full", {"pref_loss": "sigmoid", "ld_alpha": 0.5}, 6),
        ("dpo", "full", {"pref_loss": "simpo"}, 3),
        ("dpo", "lora", {"pref_loss": "orpo"}, 3),
        ("kto", "full", {}, 12),
        ("kto", "lora", {}, 12),
    ],
)
def test_preferences(stage: str, tuning: str, options: dict[str, Any], calls: int, tmp_path: Path) -> None:
    """Policy and reference, in two calls each for KTO; losses, weights and every metric. The means of logits have
    padding in them, which attention without a mask leaves undefined."""
    wrap = {"varlen_attention": False} if tuning == "full" else {}
    fused, own = (trained(tmp_path, stage, tuning, fused=fused, wrap=wrap, **options) for fused in (True, False))
    assert (fused["calls"], own["calls"]) == (calls, 0)
    assert fused["rows"] <= ROWS < own["rows"]
    assert len(own["metrics"]) > 8
    for name, values in own["metrics"].items():
        if name.startswith("logits/") and not wrap:
            continue
        assert fused["metrics"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert_same_weights(fused["weights"], own["weights"], atol=1e-6)


def trained(
    folder: Path, stage: str, tuning: str, *, fused: bool, wrap: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    from safetensors.torch import load_file

    from liger_dist.integrations.llamafactory import run_exp

    output = folder / f"{stage} {tuning} {fused}"
    options |= {"finetuning_type": tuning}
    torch.manual_seed(0)
    dense = mock.patch.object(collator, "prepare_4d_attention_mask", wraps=collator.prepare_4d_attention_mask)
    with watched() as seen, dense as dense_masks:
        if fused:
            run_exp(arguments(folder, output, stage, **options), memory_budget=ROWS * VOCAB_SIZE * 4, **(wrap or {}))
        else:
            tuner.run_exp(arguments(folder, output, stage, **options))
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "loss" in entry]
    name = "model.safetensors" if tuning == "full" else "adapter_model.safetensors"
    return {
        "losses": [entry["loss"] for entry in steps],
        # A batch of KTO may have no rejected text.
        "metrics": {name: [entry.get(name, 0.0) for entry in steps] for name in set().union(*steps)},
        "weights": load_file(output / name),
        "calls": seen.fused_calls,
        "rows": seen.most_logits,
        "dense masks": dense_masks.call_count,
    }


def test_packed_documents_stay_apart(tmp_path: Path) -> None:
    """As with LLaMA-Factory's own dense mask, and no mask reaches the model."""
    options = {"neat_packing": True, "packing": True, "cutoff_len": 48, "per_device_train_batch_size": 1}
    fused, own = (trained(tmp_path, "sft", "full", fused=fused, **options) for fused in (True, False))
    assert fused["losses"] == pytest.approx(own["losses"], rel=1e-5)
    assert_same_weights(fused["weights"], own["weights"], atol=1e-6)
    assert fused["dense masks"] == 0 < own["dense masks"]


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_its_command_with_two_processes(stage: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = []
    for module in ("liger_dist.integrations.llamafactory", "llamafactory.launcher"):
        output = tmp_path / module
        settings = tmp_path / f"{module}.yaml"
        settings.write_text(json.dumps(arguments(tmp_path, output, stage)))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launch, "-m", module, str(settings)], check=True, timeout=200, cwd=tmp_path)
        weights.append(load_file(output / "model.safetensors"))
    assert_same_weights(weights[0], weights[1], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stage": "ppo", "reward_model": "none", "reward_model_type": "full"}, "stage is 'ppo'"),
        ({"stage": "rm"}, "stage is 'rm'"),
        ({"enable_liger_kernel": True}, "enable_liger_kernel is true"),
        ({"use_dft_loss": True}, "compute_loss_func is given"),
    ],
)
def test_other_losses_are_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    from liger_dist.integrations.llamafactory import run_exp

    given = {"stage": "sft", **options}
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        run_exp(arguments(tmp_path, tmp_path / "out", given.pop("stage"), **given))


def arguments(folder: Path, output: Path, stage: str, **options: Any) -> dict[str, Any]:
    forget_earlier_trainers()
    if not (folder / "model").exists():
        make_model("llama", dtype=torch.float32).save_pretrained(folder / "model")  # type: ignore[operator]
        make_tokenizer().save_pretrained(folder / "model")
        rows = [{"instruction": "abc"[: 1 + n % 3], "input": "", "output": "hello world"[: 3 + n]} for n in range(8)]
        (folder / "chats.json").write_text(json.dumps(rows))
        (folder / "texts.json").write_text(json.dumps([{"text": "a few words"[: 5 + n]} for n in range(8)]))
        pairs = [
            {
                "instruction": "abc"[: 1 + n % 3],
                "input": "",
                "chosen": "hello you"[: 3 + n],
                "rejected": "no"[: 1 + n % 2],
            }
            for n in range(8)
        ]
        (folder / "pairs.json").write_text(json.dumps(pairs))
        (folder / "rated.json").write_text(json.dumps([row | {"kto_tag": n % 3 > 0} for n, row in enumerate(rows)]))
        described: dict[str, Any] = {
            "chats": {"file_name": "chats.json"},
            "texts": {"file_name": "texts.json", "columns": {"prompt": "text"}},
            "pairs": {
                "file_name": "pairs.json",
                "ranking": True,
                "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
            },
            "rated": {
                "file_name": "rated.json",
                "columns": {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "kto_tag"},
            },
        }
        (folder / "dataset_info.json").write_text(json.dumps(described))
    return {
        "model_name_or_path": str(folder / "model"),
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        "lora_rank": 2,
        "dataset": {"pt": "texts", "dpo": "pairs", "kto": "rated"}.get(stage, "chats"),
        "dataset_dir": str(folder),
        "template": "empty",
        "cutoff_len": 32,
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "overwrite_cache": True,
        **options,
    }
