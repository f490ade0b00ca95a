"""Axolotl's plugin interface and trainer, where Axolotl is installed (its versions are not this project's: it has an
environment of its own)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hosts import watched
from models import VOCAB_SIZE, make_model
from test_trainer import Sequences, forget_earlier_trainers

import liger_dist

axolotl = pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed")
PLUGIN = "liger_dist.integrations.axolotl.LigerDistPlugin"
ROWS = 8


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
    assert fused["calls"] == 3
    assert own["calls"] == 0
    assert fused["rows"] <= ROWS
    assert fused["losses"] == pytest.approx(own["losses"], rel=1e-5)
    for name, weight in own["weights"].items():
        assert torch.allclose(fused["weights"][name], weight, rtol=1e-4, atol=1e-6), name


def trained(folder: str, has_plugin: bool) -> dict[str, Any]:
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from datasets import Dataset

    forget_earlier_trainers()
    cfg = {"plugins": [PLUGIN], "liger_dist": {"memory_budget": ROWS * VOCAB_SIZE * 4}}
    model = make_model("llama", dtype=torch.float32).cpu()
    arguments = AxolotlTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=0.05,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    data = Dataset.from_list([{name: column.tolist() for name, column in row.items()} for row in Sequences().rows])
    trainer = AxolotlTrainer(model=model, args=arguments, train_dataset=data.with_format("torch"))
    if has_plugin:
        found = manager(cfg)
        found.post_trainer_create(found.cfg, trainer)
    with watched() as seen:
        trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "calls": seen.fused_calls,
        "rows": seen.most_logits,
    }


@pytest.mark.parametrize(
    ("cfg", "sentence"),
    [
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, "LigerPlugin"),
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, "CutCrossEntropyPlugin"),
        ({"chunked_cross_entropy": True}, "chunked_cross_entropy is True"),
        ({"rl": "dpo"}, "rl is 'dpo'"),
    ],
)
def test_other_losses_are_refused(cfg: dict[str, Any], sentence: str) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        manager(cfg)
    manager(cfg | {"liger_dist": {"enabled": False}})


def test_the_section_is_part_of_axolotls_configuration() -> None:
    from axolotl.integrations.config import merge_input_args

    found = manager({"plugins": [PLUGIN]})
    assert found.get_input_args() == ["liger_dist.integrations.axolotl.LigerDistArgs"]
    config, _ = merge_input_args()
    assert "liger_dist" in config.model_fields
