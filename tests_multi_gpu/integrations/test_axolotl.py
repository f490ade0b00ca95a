"""Axolotl's plugin interface and trainer, where Axolotl is installed (its versions are not this project's: it needs
another environment)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hosts import printed_by
from models import VOCAB_SIZE, make_model
from trainers import (
    Sequences,
    assert_same_weights,
    forget_earlier_trainers,
    full_weights,
    make_tokenizer,
    sgd_arguments,
    train_watched,
)

import liger_dist

axolotl = pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed")
PLUGIN = "liger_dist.integrations.axolotl.LigerDistPlugin"
HAS_ENTRY_POINTS = hasattr(axolotl, "get_builtin_plugins")
needs_entry_points = pytest.mark.skipif(
    not HAS_ENTRY_POINTS, reason="Axolotl before 0.21 loads only the plugins of the configuration"
)
ROWS = 8
COUNTING = """
import json
from pathlib import Path

import torch
from axolotl.integrations.base import BasePlugin
from hosts import watched

class Counting(BasePlugin):
    def pre_model_load(self, cfg):
        self.watching = watched()
        self.seen = self.watching.__enter__()

    def post_model_load(self, cfg, model):
        # The seed of the configuration comes after LoRA's initial values.
        torch.manual_seed(0)

    def post_train(self, cfg, model):
        seen = {"calls": self.seen.fused_calls, "rows": self.seen.most_logits}
        Path(cfg.output_dir, "seen").write_text(json.dumps(seen))
"""


PACKING = {"sample_packing": True, "eval_sample_packing": False, "attn_implementation": "sdpa"}
"""Axolotl drops the mask, so that transformers makes a dense one from positions"""


@pytest.mark.parametrize(
    ("options", "plugins"),
    [({}, [PLUGIN]), (PACKING, [PLUGIN]), pytest.param({}, [], marks=needs_entry_points)],
    ids=["padded", "packed", "by its section alone"],
)
def test_its_own_command(options: dict[str, Any], plugins: list[str], tmp_path: Path) -> None:
    """Chat data, of which the assistant's turns are learnt; a second plugin counts. In the run without this plugin
    Axolotl loads it from 0.21 on, as an installed one, and nothing asks for it."""
    make_model("llama", dtype=torch.float32).cpu().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    make_tokenizer().save_pretrained(tmp_path / "model")
    turns = [("abc"[: 1 + row % 3], "hello world"[: 3 + row % 8]) for row in range(64)]
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "counting.py").write_text(COUNTING)
    losses = []
    for name, listed in (("fused", [*plugins, "counting.Counting"]), ("own", ["counting.Counting"])):
        settings = settings_of_a_run(tmp_path, listed, has_section=name == "fused") | options
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        found, seen = run_of(tmp_path, name)
        assert seen["calls"] == 3 * (name == "fused")
        losses.append(found["loss"])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def run_of(folder: Path, name: str) -> tuple[dict[str, list[float]], dict[str, int]]:
    """What Axolotl's command logs for ``name``.yaml, and what the second plugin counted."""
    command = [sys.executable, "-m", "axolotl.cli.main", "train", f"{name}.yaml", "--launcher", "python"]
    printed = printed_by(command, folder, HF_HUB_OFFLINE="1", AXOLOTL_DO_NOT_TRACK="1")
    logged: dict[str, list[float]] = {}
    for key, value in re.findall(r"'([a-z_/]+)': '([-+0-9.e]+)'", printed):
        logged.setdefault(key, []).append(float(value))
    return logged, json.loads((folder / "out" / "seen").read_text())


PAIRS = {"type": {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}}
KTO = {"rl": "kto", "remove_unused_columns": False}
RATED = {"type": {"field_prompt": "prompt", "field_completion": "chosen", "field_label": "label"}}
LORA = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"rl": "dpo"}, 6),
        ({"rl": "dpo", "dpo_use_weighting": True, **LORA}, 6),
        ({"rl": "ipo"}, 6),
        (KTO, 12),
        (KTO | LORA, 12),
        ({"rl": "simpo", "rl_beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 0.2}, 3),
        ({"rl": "orpo", "orpo_alpha": 0.1}, 3),
    ],
    ids=lambda options: " ".join(map(str, options.values())) if isinstance(options, dict) else str(options),
)
def test_preferences(options: dict[str, Any], calls: int, tmp_path: Path) -> None:
    """Policy and reference, in two calls each for KTO: every number that is logged, and no full logits."""
    make_model("llama", dtype=torch.float32).cpu().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [
        {"prompt": "abc"[: 1 + n % 3], "chosen": "hello you"[: 3 + n % 6], "rejected": "no"[: 1 + n % 2]}
        | {"label": n % 3 > 0}
        for n in range(64)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "counting.py").write_text(COUNTING)
    logs = []
    for name, plugins in (("fused", [PLUGIN, "counting.Counting"]), ("own", ["counting.Counting"])):
        settings = settings_of_a_run(tmp_path, plugins, has_section=name == "fused") | options
        data = {"path": str(tmp_path / "data.jsonl"), "ds_type": "json", "split": "train"}
        settings["datasets"] = [data | (RATED if options["rl"] == "kto" else PAIRS)]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        logged, seen = run_of(tmp_path, name)
        assert seen["calls"] == calls * (name == "fused")
        assert (seen["rows"] <= ROWS) == (name == "fused")
        logs.append(logged)
    # Of ORPO and SimPO those of padding too, which attention without a mask leaves undefined.
    others = ("runtime", "per_second", "memory", *(("logits/",) if options["rl"] in ("orpo", "simpo") else ()))
    compared = [key for key in logs[1] if not any(part in key for part in others)]
    assert len(compared) > 5
    for key in compared:
        assert logs[0][key] == pytest.approx(logs[1][key], rel=1e-3, abs=1e-5), key


def settings_of_a_run(folder: Path, plugins: list[str], *, has_section: bool) -> dict[str, Any]:
    data = {
        "path": str(folder / "data.jsonl"),
        "ds_type": "json",
        "type": "chat_template",
        "field_messages": "messages",
    }
    return {
        "base_model": str(folder / "model"),
        "plugins": plugins,
        "datasets": [data],
        "chat_template": "tokenizer_default",
        "special_tokens": {"pad_token": "<pad>"},
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "learning_rate": 0.01,
        "optimizer": "sgd",
        "lr_scheduler": "constant",
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        "logging_steps": 1,
        "bf16": False,
        "fp16": False,
    } | ({"liger_dist": {"memory_budget": ROWS * VOCAB_SIZE * 4}} if has_section else {})


def manager(cfg: dict[str, Any]) -> Any:
    """Axolotl's own, with the plugin."""
    from axolotl.utils.dict import DictDefault

    axolotl.PluginManager._instance = None
    found = axolotl.PluginManager.get_instance()
    found.plugins.clear()
    found.cfg = DictDefault(cfg)
    found.register(PLUGIN)
    # As Axolotl's prepare_plugins does.
    for plugin in found.plugins.values():
        plugin.register(cfg)
    return found


def test_three_steps_as_without_the_plugin(tmp_path: Any) -> None:
    fused, own = (trained(str(tmp_path), has_plugin) for has_plugin in (True, False))
    assert fused["fused calls"] == 3
    assert own["fused calls"] == 0
    assert fused["most logits"] <= ROWS
    assert fused["losses"] == pytest.approx(own["losses"], rel=1e-5)
    assert_same_weights(fused["weights"], own["weights"], atol=1e-6)


def three_steps(folder: str, **changes: Any) -> Any:
    """Axolotl's training arguments."""
    from axolotl.core.training_args import AxolotlTrainingArguments

    usual: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 0.05}
    usual |= {"use_cpu": True, "save_strategy": "no"}
    return AxolotlTrainingArguments(**sgd_arguments(folder, **(usual | changes)))


def trained(folder: str, has_plugin: bool) -> dict[str, Any]:
    from axolotl.core.trainers.base import AxolotlTrainer
    from datasets import Dataset

    forget_earlier_trainers()
    cfg = {"plugins": [PLUGIN], "liger_dist": {"memory_budget": ROWS * VOCAB_SIZE * 4}}
    model = make_model("llama", dtype=torch.float32).cpu()
    arguments = three_steps(folder)
    data = Dataset.from_list([{name: column.tolist() for name, column in row.items()} for row in Sequences().rows])
    trainer = AxolotlTrainer(model=model, args=arguments, train_dataset=data.with_format("torch"))
    if has_plugin:
        found = manager(cfg)
        found.post_trainer_create(found.cfg, trainer)
    return train_watched(trainer) | {"weights": full_weights(model)}


@pytest.mark.parametrize(
    "options",
    [{"kd_alpha": 0.9, "kd_ce_alpha": 0.1}, {"kd_alpha": 1.0, "kd_temperature": 2.0}, {"kd_alpha": 0.5}],
    ids=str,
)
def test_knowledge_distillation(options: dict[str, Any], tmp_path: Path) -> None:
    """Losses and weights of Axolotl's own trainer. Its own loss compares row p with the logits at p, which predict the
    token after p, and its gradient is that of the loss over the square of the temperature: it gets rows that are moved
    to their logits, and the learning rate of the square."""
    fused, own = (distilled(str(tmp_path), options, has_plugin) for has_plugin in (True, False))
    assert fused["fused calls"] == 3
    assert fused["most logits"] <= ROWS
    assert len(own["losses"]) == 3
    assert fused["losses"] == pytest.approx(own["losses"], rel=1e-4)
    assert_same_weights(fused["weights"], own["weights"], atol=1e-6)


def distilled(folder: str, options: dict[str, Any], has_plugin: bool) -> dict[str, Any]:
    from axolotl.integrations.kd.collator import DataCollatorForKD
    from axolotl.integrations.kd.trainer import AxolotlKDTrainer
    from datasets import Dataset

    forget_earlier_trainers()
    model = make_model("llama", dtype=torch.float32).cpu()
    rate = 0.05 * (1.0 if has_plugin else options.get("kd_temperature", 1.0) ** 2)
    arguments = three_steps(folder, learning_rate=rate, remove_unused_columns=False)
    defaults = {"kd_ce_alpha": 0.0, "kd_temperature": 1.0, "kd_beta": 0.0, "kd_normalize_topk": False}
    for name, value in (defaults | options).items():
        setattr(arguments, name, value)
    rows = [scored({name: column.tolist() for name, column in row.items()}, has_plugin) for row in Sequences().rows]
    tokenizer = make_tokenizer()
    collator = DataCollatorForKD(tokenizer=tokenizer)
    trainer = AxolotlKDTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), data_collator=collator
    )
    trainer._kd_loss_fn.compiled = False
    if has_plugin:
        found = manager(
            {"plugins": [PLUGIN], "kd_trainer": True, "liger_dist": {"memory_budget": ROWS * VOCAB_SIZE * 4}} | options
        )
        found.post_trainer_create(found.cfg, trainer)
    return train_watched(trainer) | {"weights": full_weights(model)}


def scored(row: dict[str, Any], as_written: bool) -> dict[str, Any]:
    """Adds probabilities of five classes, as Axolotl's strategies write them, or moved to the logits before them."""
    generator = torch.Generator().manual_seed(sum(row["input_ids"]))
    length = len(row["input_ids"])
    ids = torch.stack([torch.randperm(VOCAB_SIZE, generator=generator)[:5] for _ in range(length)])
    log_probs = torch.randn(length, 5, generator=generator).log_softmax(-1)
    mask = torch.tensor([[int(label != -100)] * 5 for label in row["labels"]])
    mask[0] = 0
    if not as_written:
        ids, log_probs, mask = (values.roll(-1, 0) for values in (ids, log_probs, mask))
    return row | {
        "target_token_ids": ids.tolist(),
        "target_logprobs": log_probs.tolist(),
        "target_mask": mask.tolist(),
    }


@pytest.mark.parametrize(
    ("cfg", "sentence"),
    [
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, "LigerPlugin"),
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, "CutCrossEntropyPlugin"),
        ({"chunked_cross_entropy": True}, "chunked_cross_entropy is True"),
        ({"use_dft": True}, "use_dft is True"),
        ({"rl": "grpo"}, "rl is 'grpo'"),
        ({"orpo_alpha": 0.1}, "orpo_alpha is 0.1"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2, under which Axolotl shards labels"),
        ({"sequence_parallel_degree": 4}, "sequence_parallel_degree is 4, under which Axolotl shards labels"),
        ({"context_parallel": {"size": 2}}, r"context_parallel\.size is 2, under which Axolotl shards labels"),
        ({"expert_parallel_size": 2}, "expert_parallel_size is 2, under which Axolotl replaces the experts"),
        ({"kd_trainer": True, "kd_alpha": 1.0, "kd_beta": 0.5}, "kd_beta is 0.5; expected 0"),
        ({"kd_trainer": True, "kd_alpha": 1.0, "kd_normalize_topk": True}, "kd_normalize_topk is true"),
        ({"kd_trainer": True, "kd_ce_alpha": 0.1, "kd_temperature": 2.0}, "kd_temperature is 2.0 and kd_ce_alpha 0.1"),
        ({"kd_trainer": True}, "kd_alpha and kd_ce_alpha are 0"),
        ({"kd_trainer": True, "kd_alpha": 1.5, "kd_ce_alpha": -0.5}, "kd_ce_alpha is -0.5; expected 0 or more"),
        (
            {"kd_trainer": True, "kd_alpha": 1.0, "kd_temperature": 0.0},
            "kd_temperature is 0.0; expected a number above 0",
        ),
        (
            {"kd_trainer": True, "kd_alpha": 1.0, "kd_online_server_base_url": "http://teacher"},
            "kd_online_server_base_url is 'http://teacher'; expected probabilities in the dataset",
        ),
    ],
)
def test_other_losses_are_refused(cfg: dict[str, Any], sentence: str) -> None:
    listed = cfg | {"plugins": [PLUGIN, *cfg.get("plugins", ())]}
    for asking in (listed, cfg | {"liger_dist": {}}):
        with pytest.raises(liger_dist.LigerDistError, match=sentence):
            manager(asking)
    manager(listed | {"liger_dist": {"enabled": False}})
    manager(cfg)


@needs_entry_points
def test_an_installed_plugin_does_nothing_unless_asked(tmp_path: Path) -> None:
    """Axolotl loads it beside its own plugins in every run."""
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.utils.config import prepare_plugins
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset

    assert PLUGIN in axolotl.get_builtin_plugins()
    rows = [{name: column.tolist() for name, column in row.items()} for row in Sequences().rows]
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"chunked_cross_entropy": True}, False),
        ({"rl": "grpo"}, False),
        ({"liger_dist": {"enabled": False}}, False),
        ({"liger_dist": {}}, True),
        ({"plugins": [PLUGIN]}, True),
        ({"plugins": [PLUGIN.replace(".LigerDist", ":LigerDist")]}, True),
    ]
    for cfg, is_fused in cases:
        axolotl.PluginManager._instance = None
        prepare_plugins(DictDefault(cfg))
        found = axolotl.PluginManager.get_instance()
        others = {name.rsplit(".", 1)[-1] for name in found.plugins}
        assert others == {"LigerDistPlugin", "ContextParallelPlugin", "ExpertParallelPlugin"}
        forget_earlier_trainers()
        model = make_model("llama", dtype=torch.float32).cpu()
        data = Dataset.from_list(rows).with_format("torch")
        trainer = AxolotlTrainer(model=model, args=three_steps(str(tmp_path)), train_dataset=data)
        found.post_model_load(DictDefault(cfg), model)
        found.post_trainer_create(DictDefault(cfg), trainer)
        assert liger_dist.is_wrapped(model) == is_fused, cfg


def test_the_section_is_part_of_axolotls_configuration() -> None:
    from axolotl.integrations.config import merge_input_args

    found = manager({})
    assert found.get_input_args() == ["liger_dist.integrations.axolotl.LigerDistArgs"]
    config, _ = merge_input_args()
    assert "liger_dist" in config.model_fields
