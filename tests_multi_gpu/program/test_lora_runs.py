"""LoRA runs of the training program: how the frozen base is loaded, stored, known again, exported and counted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_tensors import full_parameters
from harness import Workers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from training_runs import config_for, metrics_of, write_base
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from liger_dist import LigerDistError
from liger_dist_train import model as model_module
from liger_dist_train.checkpoint import DESCRIPTION, checksum_of_text
from liger_dist_train.config import TrainConfig
from liger_dist_train.distributed import world_size
from liger_dist_train.engine import TorchEngine
from liger_dist_train.export import export
from liger_dist_train.memory_plan import plan
from liger_dist_train.metrics import Flops
from liger_dist_train.model import add_lora, autocast, find_config, shell
from liger_dist_train.optimizer import make_optimizer
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import Loop, train
from liger_dist_train.teacher import load_frozen
from liger_dist_train.trainer import Trainer

ALONE: dict[str, Any] = {"strategy": "none"}
SIZES: dict[str, Any] = {"sequence_length": 32, "global_batch_size": 4, "eval_batches": 1, "layer_kernels": False}
SHORT: dict[str, Any] = SIZES | {"lora_rank": 4, "steps": 2, "checkpoint_every": 2, "warmup_steps": 0}


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's part of tensors that have storage."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.numel() * x.element_size() for x in local if x.device.type != "meta")


def bytes_held(model: nn.Module) -> int:
    """Bytes of parameters that have storage on this rank."""
    return bytes_of(model.parameters())


def engine_of(config: TrainConfig) -> TorchEngine:
    """The engine that the program would make."""
    model_config = find_config(config, 601)
    model = add_lora(shell(config, model_config), config, has_weights=True)
    return TorchEngine(config, parallel_dims_of(config, world_size()), model)


def stored_of_a_run(config: TrainConfig) -> tuple[int, int, dict[str, tuple[torch.dtype, torch.Tensor]]]:
    """Bytes of parameters with storage at ``wrap`` and after it, and every full parameter."""
    at_wrap = []
    wrap = model_module.wrap

    def note(model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        at_wrap.append(bytes_held(model))
        return wrap(model, *arguments, **options)

    model_module.wrap = note
    try:
        model = engine_of(config).model
    finally:
        model_module.wrap = wrap
    found = {name: (p.dtype, p.float()) for name, p in full_parameters(model).items()}
    return at_wrap[0], bytes_held(model), found


@pytest.mark.nightly(dora=[True])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_fsdp2_holds_no_full_base(
    dora: bool, dtype: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    base = write_base(cache, tmp_path / "base")
    targets = ["q_proj", "v_proj", "down_proj", "lm_head", "embed_tokens"]
    changes: dict[str, Any] = {"model": str(base), "dtype": dtype, "dora": dora, "lora_targets": targets} | SHORT
    config = config_for(data, cache, tmp_path / "run", strategy="fsdp2", **changes)
    # What PEFT itself makes of the folder.
    torch.manual_seed(config.seed)
    expected = dict(
        add_lora(
            model_module.read_weights(base, None, getattr(torch, dtype)), config, has_weights=True
        ).named_parameters()
    )
    all_bytes = sum(p.numel() * p.element_size() for p in expected.values())
    for strategy in ("fsdp2", "ddp", "none"):
        changed = config_for(data, cache, tmp_path / "run", strategy=strategy, **changes)
        results = [stored_of_a_run(changed)] if strategy == "none" else workers_2.run(stored_of_a_run, changed)
        for at_wrap, after, values in results:
            assert at_wrap == 0, f"{strategy}: {at_wrap} bytes are on the device before anything is sharded"
            assert after <= all_bytes / (1.8 if strategy == "fsdp2" else 1)
            assert values.keys() == expected.keys()
            for name, (dtype_, value) in values.items():
                assert dtype_ == expected[name].dtype, name
                assert torch.equal(value, expected[name].detach().float()), name
    kept = {p.dtype for name, p in expected.items() if "lora_" not in name}
    assert kept == {getattr(torch, dtype)}
    assert {p.dtype for name, p in expected.items() if "lora_" in name} == {torch.float32}


def test_a_bf16_teacher_keeps_its_rotary_frequencies(data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path, model=str(write_base(cache, tmp_path / "base")), dtype="bfloat16")
    teacher = load_frozen(config, find_config(config, 601))
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}
    frequencies = [buffer for name, buffer in teacher.named_buffers() if name.endswith("inv_freq")]
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}


def test_lora_knows_its_base_by_its_weights(
    data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, run = write_base(cache, tmp_path / "base"), tmp_path / "run"
    config = config_for(data, cache, run, **ALONE, model=str(base), **SHORT)
    train(config)
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(LigerDistError, match=r"is not at .*base; say where it is with --base FOLDER"):
        export(run, tmp_path / "exported", step=None)
    export(run, tmp_path / "exported", step=None, base=moved)
    settings = (moved / "config.json").read_text()
    (moved / "config.json").write_text(json.dumps(json.loads(settings) | {"rms_norm_eps": 0.5}))
    with pytest.raises(LigerDistError, match=r"config.json is of another model: rms_norm_eps 0.5 instead of"):
        export(run, tmp_path / "again", step=None, base=moved)
    (moved / "config.json").write_text(settings)
    # Another spelling of another place goes on, too.
    monkeypatch.chdir(tmp_path)
    train(replace(config, model="./moved/", resume=True, steps=3))
    weights = load_file(moved / "model.safetensors")
    save_file({name: 1.5 * value for name, value in weights.items()}, moved / "model.safetensors", {"format": "pt"})
    with pytest.raises(LigerDistError, match=r"model.safetensors is \d+ \w+ \(bytes, XXH3\) and was \d+ \w+ when"):
        train(replace(config, model="moved", resume=True, steps=4))
    with pytest.raises(LigerDistError, match=r"is not the base of the LoRA checkpoint .* with --base FOLDER"):
        export(run, tmp_path / "again", step=None, base=moved)


def test_lora_checkpoints_without_checksums_of_the_base_resume_by_its_path(
    data: Path, cache: Path, tmp_path: Path
) -> None:
    base, run = write_base(cache, tmp_path / "base"), tmp_path / "run"
    config = config_for(data, cache, run, **ALONE, model=str(base), **SHORT)
    train(config)
    file = run / "checkpoints" / "step-00000002" / DESCRIPTION
    description = json.loads(file.read_text())
    del description["lora"]["weights"]
    file.write_text(json.dumps(description | {"checksum": checksum_of_text(description)}))
    other = base.rename(tmp_path / "other")
    with pytest.raises(LigerDistError, match=r"another model: model .*base instead of .*other"):
        train(replace(config, model=str(other), resume=True, steps=3))
    other.rename(base)
    train(replace(config, resume=True, steps=3))
    export(run, tmp_path / "exported", step=2)


@pytest.mark.smoke
def test_export_of_full_weights_has_no_base(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(LigerDistError, match=r"--base is .* has all weights of its model"):
        export(trained, tmp_path / "exported", step=None, base=tmp_path)


@pytest.mark.nightly
@pytest.mark.smoke
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_lora_export_unties_what_it_changes(target: str, data: Path, cache: Path, tmp_path: Path) -> None:
    base = write_base(cache, tmp_path / "base", tied=True)
    changes: dict[str, Any] = {"model": str(base), "lora_targets": [target, "q_proj"], "learning_rate": 0.1} | SHORT
    config = config_for(data, cache, tmp_path / "run", **ALONE, **(changes | {"steps": 4, "checkpoint_every": 4}))
    train(config)
    export(tmp_path / "run", tmp_path / "exported", step=None)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert not exported.config.tie_word_embeddings
    assert not torch.equal(exported.lm_head.weight, exported.model.embed_tokens.weight)
    last = metrics_of(tmp_path / "run")[-1]["eval_loss"]
    alone = replace(config, model=str(tmp_path / "exported"), lora_rank=0, lora_targets=["all-linear"], eval_only=True)
    train(replace(alone, output_dir=str(tmp_path / "evaluated")))
    found = json.loads((tmp_path / "evaluated" / "eval.json").read_text())["eval_loss"]
    assert found == pytest.approx(last, rel=1e-5)


L, D, F, Q, V, R = 2, 16, 24, 16, 601, 4
"""layers; hidden, MLP and query widths; classes; rank of the LoRA layers, of the model that write_base writes"""


def test_lora_flops_count_no_gradients_of_frozen_weights(data: Path, cache: Path, tmp_path: Path) -> None:
    base = write_base(cache, tmp_path / "base")
    config = config_for(data, cache, tmp_path, **ALONE, model=str(base), **SHORT)
    model_config = find_config(config, 601)
    KV = model_config.num_key_value_heads * model_config.head_dim
    linear = L * (2 * D * Q + 2 * D * KV + 3 * D * F)
    full = Flops.of(shell(replace(config, lora_rank=0), model_config), model_config, replace(config, lora_rank=0))
    assert full.per_token == 6 * (linear + D * V)
    assert full.per_pair == 12 * L * Q
    lora = Flops.of(add_lora(shell(config, model_config), config, has_weights=True), model_config, config)
    # Of q, o; k, v; gate, up, down: input and output widths.
    trained = L * R * (2 * (D + Q) + 2 * (D + KV) + 3 * (D + F))
    assert lora.per_token == 4 * (linear + D * V) + 6 * trained
    assert lora.per_pair == full.per_pair


@pytest.mark.parametrize("kind", [MixtralConfig, Qwen3MoeConfig])
def test_flops_of_experts_are_those_of_a_token(kind: Any, data: Path, cache: Path, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    experts = {"num_local_experts" if kind is MixtralConfig else "num_experts": 8, "num_experts_per_tok": 2}
    model_config = kind(vocab_size=64, intermediate_size=48, moe_intermediate_size=48, **sizes, **experts)
    config = config_for(data, cache, tmp_path)
    found = Flops.of(shell(config, model_config), model_config, config)
    # Queries and output, keys and values, router, and two of eight experts of three matrices; lm_head.
    layer = 2 * 32 * 16 + 2 * 32 * 8 + 8 * 32 + 2 * 3 * 32 * 48
    assert found.per_token == 6 * (3 * layer + 32 * 64)
    assert found.per_pair == 12 * 3 * 16


@pytest.mark.parametrize("across", [False, True])
def test_flops_of_attention_are_those_of_each_document(
    across: bool, data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against positions of the micro-batches that the model is called with."""
    attended, counted = [], []
    loss, rates = Trainer._loss, Loop._rates

    def note(self: Trainer, batch: dict[str, Any], *arguments: Any) -> Any:
        if self.engine.model.training:
            # A token attends to all positions up to its own; padding begins behind the last document.
            assert ("position_ids" in batch) != across
            positions = torch.arange(32).expand_as(batch["labels"])
            attended.append([batch.get("position_ids", positions), batch["labels"]])
        return loss(self, batch, *arguments)

    def note_rates(self: Loop, *arguments: Any) -> Any:
        counted.append(self._trainer.pairs)
        return rates(self, *arguments)

    monkeypatch.setattr(Trainer, "_loss", note)
    monkeypatch.setattr(Loop, "_rates", note_rates)
    changes: dict[str, Any] = SIZES | {"steps": 1, "attend_across_documents": across, "train_on": "all"}
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "def f(x): return x\n" * (1 + n % 3)}) + "\n" for n in range(200)))
    train(config_for(texts, cache, tmp_path / "run", **ALONE, **changes))
    expected = 0
    for positions, labels in attended:
        for row, of in zip(positions.tolist(), labels.tolist(), strict=True):
            used = max(index for index, label in enumerate(of) if label >= 0) + 1
            expected += sum(position + 1 for position in row[:used])
    assert counted == [expected]


def bytes_of_a_step(config: TrainConfig) -> tuple[int, int, int, Any]:
    """Bytes of parameters, optimizer states and gradients of this rank after a step, and the plan."""
    engine = engine_of(config)
    model_config = find_config(config, 601)
    model = add_lora(shell(config, model_config), config, has_weights=True)
    (found, *_) = plan(config, parallel_dims_of(config, world_size()), model, model_config).plans
    ids = torch.randint(0, 601, (config.batch_size, config.sequence_length))
    with autocast(config, str(config.strategy)):
        engine.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer = make_optimizer(engine.model, config, frozenset())
    optimizer.step()
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return bytes_held(engine.model), bytes_of(states), bytes_of(p.grad for p in trained), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_dry_run_knows_lora(
    strategy: str, dtype: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    base = write_base(cache, tmp_path / "base")
    changes: dict[str, Any] = {"model": str(base), "dtype": dtype, "lora_targets": ["all-linear"]} | SHORT
    config = config_for(data, cache, tmp_path / "run", strategy=strategy, **changes | {"lora_rank": 8})
    for parameters, states, gradients, found in workers_2.run(bytes_of_a_step, config):
        assert parameters == pytest.approx(found.parameters, rel=0.05)
        assert states == pytest.approx(found.optimizer, rel=0.05)
        assert gradients == pytest.approx(found.gradients, rel=0.05)
    whole = replace(config, lora_rank=0, lora_targets=["all-linear"])
    model_config = find_config(whole, 601)
    (full, *_) = plan(whole, parallel_dims_of(whole, 2), shell(whole, model_config), model_config).plans
    assert found.peak < full.peak
