"""Features of the training program under each strategy. A cell is a run that is stopped half-way and resumed; its
metrics are those of one process, which the cells of a feature share."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import InThisProcess, Workers
from training_runs import LAUNCH, config_for, metrics_of, write_base, write_teacher
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist_train.config import TrainConfig
from liger_dist_train.export import export
from liger_dist_train.run import train

LORA: dict[str, Any] = {"lora_rank": 4}
FOUR_BITS = LORA | {"load_in_4bit": True}
TEACHER = {"divergence": "jsd", "distillation_beta": 0.3, "distillation_temperature": 2.0, "hard_weight": 0.25}
LEAN = {"activation_checkpointing": True, "offload_checkpoints": True, "mlp_tile_tokens": 48}
NOT_LEAN = {
    "activation_checkpointing": False,
    "offload_checkpoints": False,
    "mlp_tile_tokens": None,
    "attention": "sdpa",
}


@dataclass(frozen=True)
class Feature:
    """Options of the runs; of the run in one process, where they differ; and what is compared."""

    changes: dict[str, Any] = field(default_factory=dict)
    of_reference: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    """model whose weights are loaded"""
    entries: tuple[str, ...] = ("loss", "grad_norm", "eval_loss", "tokens")
    tolerance: float = 1e-5
    """relative, of losses; ten times that of norms"""
    is_exported: bool = False
    """exports are compared, too"""


LOADS = ("experts/max_load", "experts/min_load", "experts/router_entropy", "experts/dropped")
FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "loss that is not fused": Feature({"fused_loss": False}, {"fused_loss": True}),
    "bf16": Feature({"dtype": "bfloat16"}, {"dtype": "float32"}, entries=("loss", "tokens"), tolerance=1e-2),
    "tiles and offloaded checkpoints": Feature(LEAN, NOT_LEAN),
    "Muon": Feature({"optimizer": "muon"}),
    "moving average": Feature({"ema_decay": 0.5}, entries=("loss", "eval_loss", "ema_eval_loss")),
    "teacher": Feature(TEACHER),
    "MTP": Feature(
        {"mtp": '{"depth": 2, "weight": 0.4}'},
        base="llama",
        entries=("loss", "mtp_loss/1", "mtp_loss/2"),
        tolerance=1e-4,
    ),
    "LoRA": Feature(LORA, base="llama"),
    "DoRA": Feature(LORA | {"dora": True}, base="llama"),
    "LoRA on a bf16 base": Feature(
        LORA | {"dtype": "bfloat16"}, {"dtype": "float32"}, base="llama", entries=("loss", "tokens"), tolerance=1e-2
    ),
    "4 bits": Feature(FOUR_BITS, base="llama"),
    "DoRA on 4 bits": Feature(FOUR_BITS | {"dora": True}, base="llama"),
    "experts": Feature(base="qwen3_moe", entries=("loss", "grad_norm", *LOADS), tolerance=2e-4, is_exported=True),
    "tied experts": Feature(base="qwen3_moe, tied", entries=("loss", "grad_norm"), tolerance=2e-4, is_exported=True),
    "LoRA beside experts": Feature(LORA, base="qwen3_moe", entries=("loss", "experts/router_entropy"), tolerance=2e-4),
    "LoRA on experts": Feature(
        LORA | {"lora_targets": ["q_proj", "gate_up_proj", "down_proj"]},
        base="qwen3_moe",
        entries=("loss", "grad_norm", "experts/router_entropy"),
        tolerance=2e-4,
    ),
    "experts and a teacher": Feature(TEACHER, base="qwen3_moe", entries=("loss",), tolerance=2e-4),
    "experts and MTP": Feature(
        {"mtp": '{"depth": 1, "weight": 0.4}'}, base="qwen3_moe", entries=("loss", "mtp_loss/1"), tolerance=2e-4
    ),
    "hybrid": Feature({"model": "qwen3_5_tiny"}),
}


@dataclass(frozen=True)
class Way:
    """Ranks and options of a run, and options that change when it is resumed."""

    ranks: int
    changes: dict[str, Any]
    then: dict[str, Any] = field(default_factory=dict)


def deepspeed(name: str) -> Way:
    return Way(2, {"strategy": "deepspeed", "deepspeed": str(LAUNCH / "deepspeed" / f"{name}.json")})


WAYS: dict[str, Way] = {
    "one process": Way(1, {"strategy": "none"}),
    "ddp": Way(2, {"strategy": "ddp"}),
    "fsdp1": Way(2, {"strategy": "fsdp1"}),
    "fsdp1, replicated": Way(2, {"strategy": "fsdp1", "frozen": "replicate"}),
    "fsdp2": Way(2, {"strategy": "fsdp2"}),
    "fsdp2, replicated": Way(2, {"strategy": "fsdp2", "frozen": "replicate"}),
    "vocab_parallel": Way(2, {"strategy": "fsdp2", "lm_head": "vocab_parallel"}),
    "replicas": Way(2, {"strategy": "fsdp2", "dp_replicate": 2}),
    "sp": Way(2, {"strategy": "fsdp2", "sp": 2}),
    "tp": Way(2, {"strategy": "tp"}),
    "ep": Way(2, {"strategy": "fsdp2", "ep": 2}),
    "zero1": deepspeed("zero1"),
    "zero2": deepspeed("zero2"),
    "zero3": deepspeed("zero3"),
    "zero3, offloaded": deepspeed("zero3_offload"),
    "fsdp2, then one process": Way(2, {"strategy": "fsdp2"}, {"strategy": "none"}),
    "fsdp2, replicated, then one process": Way(
        2, {"strategy": "fsdp2", "frozen": "replicate"}, {"strategy": "none", "frozen": "shard"}
    ),
    "ddp, then fsdp2": Way(2, {"strategy": "ddp"}, {"strategy": "fsdp2"}),
    "ep, then one process": Way(2, {"strategy": "fsdp2", "ep": 2}, {"strategy": "none", "ep": 1}),
    "shards and replicas": Way(4, {"strategy": "fsdp2", "dp_replicate": 2, "dp_shard": 2}),
    "shards and tp": Way(4, {"strategy": "fsdp2", "dp_shard": 2, "tp": 2}),
    "shards and sp": Way(4, {"strategy": "fsdp2", "dp_shard": 2, "sp": 2}),
    "fsdp1, shards and replicas": Way(4, {"strategy": "fsdp1", "dp_replicate": 2}),
    "shards and ep": Way(4, {"strategy": "fsdp2", "ep": 2}),
    "replicas and ep": Way(4, {"strategy": "fsdp2", "ep": 2, "dp_replicate": 2}),
    "sp and ep": Way(2, {"strategy": "fsdp2", "ep": 2, "sp": 2}),
    "tp and ep": Way(4, {"strategy": "fsdp2", "ep": 2, "dp_shard": 2, "tp": 2}),
    "vocab_parallel and ep": Way(2, {"strategy": "fsdp2", "ep": 2, "lm_head": "vocab_parallel"}),
    "ep, replicated": Way(2, {"strategy": "fsdp2", "ep": 2, "frozen": "replicate"}),
}


class Runs:
    """Makes the runs of this file's cells; what they share is made once."""

    def __init__(self, data: Path, cache: Path, folder: Path) -> None:
        self._data, self._cache, self._folder = data, cache, folder
        self._held_out = folder / "held_out.txt"
        self._held_out.write_text((data / "ast0.txt").read_text()[:1500])
        self._teacher = write_teacher(folder / "teacher")
        self.base = functools.cache(self._base)
        self.alone = functools.cache(self._alone)

    def _base(self, name: str) -> Path:
        family, _, tied = name.partition(", ")
        return write_base(self._cache, self._folder / name, family=family, tied=bool(tied))

    def _alone(self, name: str) -> Path:
        """The folder of a feature's run in one process."""
        output = self._folder / f"{name} alone"
        with InThisProcess() as here:
            here.run(train, self.config(name, output, strategy="none", **FEATURES[name].of_reference))
        rows = metrics_of(output)
        assert rows[-1]["eval_loss"] < rows[0]["eval_loss"] - 1e-4, name
        return output

    def config(self, name: str, output: Path, **changes: Any) -> TrainConfig:
        feature = FEATURES[name]
        settings: dict[str, Any] = {
            "steps": 4,
            "sequence_length": 64 if feature.base is None else 32,
            "eval_every": 2,
            "eval_data": [str(self._held_out)],
            "eval_batches": 0,
            "checkpoint_every": 2,
            "warmup_steps": 0,
            "learning_rate": 1e-3,
        } | feature.changes
        if feature.base is not None:
            settings["model"] = str(self.base(feature.base))
        if feature.changes is TEACHER:
            settings["teacher"] = str(self._teacher)
        return config_for(self._data, self._cache, output, **(settings | changes))


@pytest.fixture(scope="module")
def runs(data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(data, cache, tmp_path_factory.mktemp("runs"))


CHOSEN = {
    ("plain", "fsdp1"),
    ("plain", "shards and sp"),
    ("loss that is not fused", "zero2"),
    ("bf16", "ddp"),
    ("tiles and offloaded checkpoints", "fsdp2"),
    ("Muon", "shards and tp"),
    ("moving average", "fsdp2, then one process"),
    ("teacher", "fsdp2"),
    ("MTP", "vocab_parallel"),
    ("MTP", "one process"),
    ("LoRA", "fsdp1, replicated"),
    ("LoRA", "zero3"),
    ("DoRA", "ddp, then fsdp2"),
    ("LoRA on a bf16 base", "vocab_parallel"),
    ("4 bits", "fsdp2, replicated, then one process"),
    ("DoRA on 4 bits", "fsdp2"),
    ("experts", "ep, then one process"),
    ("LoRA beside experts", "replicas"),
    ("LoRA on experts", "shards and ep"),
    ("experts and a teacher", "ep"),
    ("experts and MTP", "vocab_parallel and ep"),
    ("hybrid", "fsdp2"),
}
"""cells of ``make test``: every feature, and every kind of strategy"""
CELLS = [
    pytest.param(name, way, marks=() if (name, way) in CHOSEN else pytest.mark.nightly)
    for name in FEATURES
    for way in WAYS
]


def refusal(name: str, way: str) -> str | None:
    """Words of the sentence that refuses a cell; None for one that trains."""
    feature, changes = FEATURES[name], WAYS[way].changes
    strategy, is_replicated = changes["strategy"], changes.get("frozen") == "replicate"
    is_packed = "load_in_4bit" in feature.changes
    of_way = {
        "frozen": is_replicated and "lora_rank" not in feature.changes and "no weight is frozen",
        "sp": {
            "loss that is not fused": "needs the fused loss",
            "teacher": "has no distillation",
            "experts and a teacher": "has no distillation",
            "MTP": "trains no further tokens",
            "experts and MTP": "trains no further tokens",
            "hybrid": "cannot be computed on a mesh with an axis 'sp'",
        }.get(name),
        "lm_head": name == "loss that is not fused" and "is 'vocab_parallel' but the loss",
        "ep": "experts" not in name and ("--ep is 2 with --load_in_4bit" if is_packed else "has experts in one"),
    }
    for option, words in of_way.items():
        if option in changes and words:
            return words
    if name == "LoRA beside experts" and strategy == "fsdp1":
        return "which PEFT merges into the parameter in each forward"
    if feature.changes.get("load_in_4bit") and (
        strategy in ("deepspeed", "tp") or (strategy == "fsdp1" and not is_replicated)
    ):
        return "--load_in_4bit is true but --strategy is"
    if name in ("Muon", "moving average") and strategy in ("fsdp1", "deepspeed"):
        return "--optimizer is muon" if name == "Muon" else "--ema_decay is 0.5 and --strategy"
    return None


@pytest.mark.parametrize(("name", "way"), CELLS)
def test_a_feature_by_strategy(
    name: str, way: str, runs: Runs, workers_2: Workers, workers_4: Workers, tmp_path: Path
) -> None:
    if WAYS[way].ranks == 4 and torch.cuda.device_count() in (1, 2, 3):
        pytest.skip("four processes, of GPUs or of CPUs")
    if WAYS[way].changes["strategy"] == "deepspeed":
        pytest.importorskip("deepspeed")
    if FEATURES[name].changes.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
    workers = {1: InThisProcess(), 2: workers_2, 4: workers_4}[WAYS[way].ranks]
    words = refusal(name, way)
    if words is None:
        trains_as_one_process(name, way, runs, workers, tmp_path)
        return
    # Workers put what a rank raises into a RuntimeError.
    with pytest.raises((liger_dist.LigerDistError, RuntimeError), match=words) as caught:
        workers.run(train, runs.config(name, tmp_path / "run", **WAYS[way].changes, stop_at_step=2))
    assert "LigerDistError" in str(caught.value) or isinstance(caught.value, liger_dist.LigerDistError)


def trains_as_one_process(name: str, way: str, runs: Runs, workers: Any, folder: Path) -> None:
    feature, changes, then = FEATURES[name], WAYS[way].changes, WAYS[way].then
    if "experts" in name:
        # One micro-batch a step, as loads of experts are averaged over micro-batches.
        changes = changes | {"batch_size": 8 // WAYS[way].ranks}
    workers.run(train, runs.config(name, folder / "run", **changes, stop_at_step=2))
    last = InThisProcess() if then.get("strategy") == "none" else workers
    last.run(train, runs.config(name, folder / "run", **(changes | then), resume=True))
    found, expected = metrics_of(folder / "run"), metrics_of(runs.alone(name))
    if way == "one process" and not feature.of_reference and "experts" not in name:
        feature = replace(feature, tolerance=0.0)
    assert len(found) == len(expected) == 4
    for mine, right in zip(found, expected, strict=True):
        for entry in feature.entries:
            is_loss = entry in ("loss", "eval_loss")
            tolerance = feature.tolerance if is_loss else 10 * feature.tolerance
            assert (entry in mine) == (entry in right), f"{entry} of step {mine['step']}"
            if entry in right:
                assert mine[entry] == pytest.approx(
                    right[entry], rel=tolerance, abs=0.0 if feature.tolerance == 0 else 1e-9
                ), (entry, mine["step"])
    if feature.is_exported:
        settings = (folder / "run" / "checkpoints" / "step-00000004" / "model" / "config.json").read_text()
        assert "distributed_config" not in json.loads(settings)
        ours, theirs = exported(folder / "run", folder / "exported"), exported(runs.alone(name), folder / "right")
        assert ours.keys() == theirs.keys()
        for parameter, value in theirs.items():
            assert float((ours[parameter] - value).abs().max()) < 2e-3, parameter


def test_4_bits_are_not_the_base(runs: Runs) -> None:
    """Otherwise their cells would compare a base with itself."""
    pytest.importorskip("bitsandbytes")
    losses = [row["loss"] for row in metrics_of(runs.alone("4 bits"))]
    assert losses != pytest.approx([row["loss"] for row in metrics_of(runs.alone("LoRA"))], rel=1e-4)


def test_a_run_of_4_bits_does_not_go_on_without_them(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    train(runs.config("4 bits", tmp_path / "run", strategy="none", stop_at_step=2))
    with pytest.raises(liger_dist.LigerDistError, match="load_in_4bit True instead of None"):
        train(runs.config("4 bits", tmp_path / "run", strategy="none", resume=True, load_in_4bit=False))


def test_a_run_does_not_go_on_with_fewer_further_tokens(runs: Runs, tmp_path: Path) -> None:
    train(runs.config("MTP", tmp_path / "run", strategy="none", stop_at_step=2))
    with pytest.raises(liger_dist.LigerDistError, match="mtp_depth"):
        train(runs.config("MTP", tmp_path / "run", strategy="none", resume=True, mtp='{"depth": 1}'))


def exported(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    export(run, folder, step=None)
    weights: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return weights
