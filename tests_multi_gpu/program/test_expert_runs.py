"""Runs of the training program with mixtures of experts: presets, experts on several ranks, utilisation."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Workers
from models import make_batch, make_model
from training_runs import config_for, losses_of, metrics_of, write_base
from transformers import AutoConfig, AutoModelForCausalLM

import liger_dist
from liger_dist import LigerDistError
from liger_dist_train.config import TrainConfig
from liger_dist_train.expert_loads import ExpertLoads
from liger_dist_train.memory_plan import needs_of_layers, plan
from liger_dist_train.metrics import Flops
from liger_dist_train.model import add_lora, find_config, shell
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train

SHORT: dict[str, Any] = {
    "sequence_length": 32,
    "global_batch_size": 8,
    "eval_batches": 1,
    "eval_every": 2,
    "steps": 4,
    "checkpoint_every": 2,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
}


def run(config: TrainConfig) -> None:
    train(config)


@pytest.fixture(scope="module")
def alone(data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    base = write_base(cache, folder / "base", family="qwen3_moe")
    config = config_for(data, cache, folder / "run", strategy="none", **SHORT, model=str(base))
    train(config)
    return config


def test_loads_are_counted_and_drawn(alone: TrainConfig) -> None:
    folder = Path(alone.output_dir)
    loads = torch.tensor(json.loads((folder / "experts.json").read_text())["loads"])
    assert loads.shape == (2, 6)
    assert torch.allclose(loads.mean(1), torch.ones(2))
    assert (folder / "experts.png").stat().st_size > 0
    for row in metrics_of(folder):
        assert row["experts/min_load"] <= 1 <= row["experts/max_load"] <= 3
        assert 0 < row["experts/router_entropy"] <= torch.tensor(6.0).log() + 1e-3


@pytest.mark.smoke
def test_loads_without_a_forward_are_no_numbers() -> None:
    model = liger_dist.wrap(make_model("qwen3_moe"))
    loads = ExpertLoads(model)
    assert loads.read() == {}
    model(**make_batch(0)).loss.backward()
    read = loads.read()
    assert all(math.isfinite(number) for number in read.values())
    assert len(read) == 4
    assert loads.read() == {}


def test_a_run_ends_well_where_loads_cannot_be_written(
    alone: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where matplotlib is missing or a disk is full; what was trained is there."""
    folder = tmp_path / "run"
    (folder / "experts.json").mkdir(parents=True)
    train(replace(alone, output_dir=str(folder), steps=2))
    assert f"the loads of experts are not written to {folder}" in capsys.readouterr().err
    assert len(metrics_of(folder)) == 2


def test_loads_do_not_depend_on_checkpointing(alone: TrainConfig, tmp_path: Path) -> None:
    train(replace(alone, output_dir=str(tmp_path / "run"), activation_checkpointing=True))
    for mine, expected in zip(metrics_of(tmp_path / "run"), metrics_of(Path(alone.output_dir)), strict=True):
        for name in (name for name in expected if name.startswith("experts/")):
            assert mine[name] == pytest.approx(expected[name], rel=1e-4), name


def test_random_experts_on_several_ranks_learn(workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    changes = {"model": "qwen3_moe_tiny", "strategy": "fsdp2", "ep": 2, "learning_rate": 1e-2}
    config = config_for(data, cache, tmp_path / "run", **(SHORT | changes))
    workers_2.run(run, config)
    losses = losses_of(tmp_path / "run")
    assert losses[0] == pytest.approx(torch.tensor(601.0).log().item(), abs=0.3)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ep": 2, "lora_rank": 4, "load_in_4bit": True}, "--ep is 2 with --load_in_4bit true"),
        ({"ep": 2, "layer_kernels": False}, "--ep is 2 with --layer_kernels false"),
        ({"ep": 0}, "--ep is 0; expected 1 or more"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LigerDistError, match=sentence):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ep": 2, "strategy": "fsdp1"}, "--ep is 2 with --strategy fsdp1"),
        ({"ep": 4, "tp": 2}, "--ep is 4 but 2 ranks share the parameters; choose one of their divisors"),
        ({"ep": 3}, "--ep is 3 but 4 ranks share the parameters; choose one of their divisors"),
    ],
)
def test_wrong_sizes_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LigerDistError, match=sentence):
        parallel_dims_of(TrainConfig(**changes), 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "no decoder layer of this LlamaForCausalLM has experts in one parameter"),
        ({"model": "experts", "ep": 4}, "a Qwen3MoeExperts has 6 experts; choose a divisor of 6"),
    ],
)
def test_models_without_fitting_experts_are_refused(
    changes: dict[str, Any], sentence: str, workers_4: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    if changes.get("model") == "experts":
        changes = changes | {"model": str(write_base(cache, tmp_path / "base", family="qwen3_moe"))}
    config = config_for(data, cache, tmp_path / "run", **{"ep": 2, "strategy": "fsdp2", **SHORT, **changes})
    with pytest.raises(RuntimeError, match=sentence) as caught:
        workers_4.run(run, config)
    assert "LigerDistError" in str(caught.value)
    with pytest.raises(LigerDistError, match=sentence):
        train(replace(config, dry_run=True, world_size=4))


def test_the_preset_is_the_released_shape_and_its_active_parameters_count(tmp_path: Path) -> None:
    config = TrainConfig(model="qwen3_30b_a3b", sequence_length=4096)
    model_config = find_config(config, 151936)
    model = shell(config, model_config)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers == pytest.approx(30.5e9, rel=0.01)
    flops = Flops.of(model, model_config, config)
    embedding = 151936 * 2048
    assert flops.per_token / 6 + embedding == pytest.approx(3.35e9, rel=0.01)
    assert AutoConfig.for_model("qwen3_moe").num_experts == 128


@pytest.mark.smoke
def test_a_plan_knows_experts(data: Path, cache: Path, tmp_path: Path) -> None:
    config = config_for(data, cache, tmp_path, model="qwen3_moe_tiny", strategy="fsdp2")
    model_config = find_config(config, 601)
    model = shell(config, model_config)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    found = {}
    for name, changes in {"plain": {}, "ep": {"ep": 2}, "own": {"layer_kernels": False}}.items():
        one = replace(config, **changes)
        found[name] = plan(one, parallel_dims_of(one, 2), model, model_config).plans[0]
        assert found[name].parameters == pytest.approx(4 * numbers / 2, rel=1e-3)
    # Half of the experts of two gathered layers, and of the gradient of one as computed and as reduced, in fp32.
    layers = 4
    assert found["plain"].gathered - found["ep"].gathered == 4 * 4 * of_experts // layers // 2
    # Of a token with two experts on two ranks.
    copies = 1.5
    assert (
        found["ep"].activations - found["plain"].activations == layers * 2 * 64 * 4 * copies * model_config.hidden_size
    )
    assert found["plain"].activations < found["own"].activations
    tokens, wider = 2 * 64, replace(config)
    more = model_config.to_dict() | {"num_experts_per_tok": 3}
    of_three = plan(wider, parallel_dims_of(wider, 2), model, type(model_config)(**more)).plans[0]
    assert of_three.activations - found["plain"].activations == layers * tokens * 4 * 3 * 96


@pytest.mark.parametrize(
    ("targets", "parameters"),
    [
        (["q_proj", "gate_up_proj", "down_proj"], {"gate_up_proj", "down_proj"}),
        (["gate_up_proj"], {"gate_up_proj"}),
        (["gate_proj", "up_proj"], {"gate_up_proj"}),
        (["all-linear"], {"gate_up_proj", "down_proj", "weight"}),
        (["q_proj"], set()),
    ],
)
def test_every_target_of_lora_gets_a_layer(
    targets: list[str], parameters: set[str], data: Path, cache: Path, tmp_path: Path
) -> None:
    """Stacks of experts by their names, and by those of what they are made of; "weight" is that of the router."""
    base = write_base(cache, tmp_path / "base", family="qwen3_moe")
    config = config_for(data, cache, tmp_path / "run", model=str(base), lora_rank=4, lora_targets=targets)
    model = add_lora(shell(config, find_config(config, 601)), config, has_weights=True)
    found = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert {module.parameter_name for module in found if hasattr(module, "parameter_name")} == parameters
    assert any("q_proj" in name for name, _ in model.named_parameters() if "lora_A" in name) == (
        "q_proj" in targets or targets == ["all-linear"]
    )


def test_a_target_without_a_layer_is_refused(data: Path, cache: Path, tmp_path: Path) -> None:
    base = write_base(cache, tmp_path / "base", family="qwen3_moe")
    changes: dict[str, Any] = {"model": str(base), "lora_rank": 4, "lora_targets": ["q_proj", "qkv_proj"]}
    config = config_for(data, cache, tmp_path / "run", **changes)
    with pytest.raises(LigerDistError, match="is all-linear embed_tokens; expected all-linear alone"):
        replace(config, lora_targets=["all-linear", "embed_tokens"])
    with pytest.raises(LigerDistError, match="--lora_targets has qkv_proj, of which PEFT makes no LoRA layer"):
        add_lora(shell(config, find_config(config, 601)), config, has_weights=True)


@pytest.mark.parametrize("frozen", ["shard", "replicate"])
def test_a_plan_of_lora_knows_experts_of_other_ranks(frozen: str, data: Path, cache: Path, tmp_path: Path) -> None:
    base = write_base(cache, tmp_path / "base", family="qwen3_moe")
    config = config_for(data, cache, tmp_path / "run", model=str(base), strategy="fsdp2", lora_rank=4, frozen=frozen)
    model_config = find_config(config, 601)
    model = add_lora(shell(config, model_config), config, has_weights=True)
    of_experts = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 3)
    found = {}
    for ep in (1, 2):
        one = replace(config, ep=ep)
        found[ep] = plan(one, parallel_dims_of(one, 2), model, model_config).plans[0]
    layers, gathered_units = 2, 2
    if frozen == "replicate":
        assert found[1].parameters - found[2].parameters == 4 * of_experts // 2
        assert found[1].gathered == found[2].gathered > 0
    else:
        assert found[1].parameters == found[2].parameters
        assert found[1].gathered - found[2].gathered == gathered_units * 4 * of_experts // layers // 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_balance_of_experts_counts_once_in_a_step(
    size: int, data: Path, cache: Path, tmp_path: Path, router_truth: tuple[Path, float, float]
) -> None:
    """Whatever the number of micro-batches; held-out losses are without it."""
    folder, tokens, balance = router_truth
    changes: dict[str, Any] = {"model": str(folder), "tokenizer": str(cache / "tokenizer"), "batch_size": size}
    changes |= {"steps": 1, "global_batch_size": 4, "eval_every": 1, "checkpoint_every": 0, "warmup_steps": 0}
    changes |= {"eval_data": [str(folder / "rows.jsonl")], "eval_batches": 0, "learning_rate": 0.0}
    output = tmp_path / "run"
    train(config_for(folder / "rows.jsonl", cache, output, **changes))
    (row,) = metrics_of(output)
    assert row["eval_loss"] == pytest.approx(tokens, rel=1e-5)
    # Each micro-batch has its balance, and few tokens are less balanced than many.
    assert balance * 0.99 < row["router_loss"] < balance * 1.25
    assert row["loss"] == pytest.approx(tokens + row["router_loss"], rel=1e-5)
    if size == 4:
        assert row["router_loss"] == pytest.approx(balance, rel=1e-4)


@pytest.fixture(scope="module")
def router_truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """A mixture that balances its experts, four rows, and its losses of tokens and of balance."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    sizes = {"vocab_size": 601, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    config = Qwen3MoeConfig(**sizes, output_router_logits=True, router_aux_loss_coef=0.5, initializer_range=0.2)
    model: Any = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    rows = torch.randint(3, 600, (4, 64), generator=torch.Generator().manual_seed(0), device="cpu")
    lines = [json.dumps({"input_ids": row}) for row in rows.tolist()]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with torch.no_grad():
        output = model(input_ids=rows, labels=rows)
    balance = 0.5 * float(output.aux_loss)
    return folder, float(output.loss) - balance, balance


def test_padding_is_not_counted(
    data: Path, cache: Path, tmp_path: Path, router_truth: tuple[Path, float, float]
) -> None:
    """In loads, entropies and the balance of experts: rows of 40 to 61 tokens, which fill no sequence of 64."""
    folder = router_truth[0]
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 600, (40 + 7 * i,), generator=generator, device="cpu") for i in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    output.loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    logits = torch.stack(output.router_logits)[:, mask.flatten().bool()].double()
    counts = torch.stack([torch.bincount(one.topk(2).indices.flatten(), minlength=8) for one in logits]).double()
    loads = counts / counts.mean(1, keepdim=True)
    probabilities = logits.softmax(-1)
    changes: dict[str, Any] = {"model": str(folder), "tokenizer": str(cache / "tokenizer"), "batch_size": 4}
    changes |= {"steps": 1, "global_batch_size": 4, "checkpoint_every": 0, "warmup_steps": 0, "eval_fraction": 0.0}
    train(config_for(path, cache, tmp_path / "run", **changes, strategy="none"))
    (row,) = metrics_of(tmp_path / "run")
    expected = {
        "loss": float(output.loss),
        "router_loss": 0.5 * float(output.aux_loss),
        "grad_norm": float(norm),
        "experts/max_load": float(loads.max()),
        "experts/min_load": float(loads.min()),
        "experts/router_entropy": float(-(probabilities * probabilities.log()).sum(-1).mean()),
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    written = json.loads((tmp_path / "run" / "experts.json").read_text())["loads"]
    assert torch.allclose(torch.tensor(written).double(), loads)


def test_a_shard_of_padding_has_no_balance(router_truth: tuple[Path, float, float]) -> None:
    """Of a sequence on several ranks, of which one has padding alone."""
    from liger_dist_train.trainer import router_loss

    model: Any = AutoModelForCausalLM.from_pretrained(router_truth[0], dtype=torch.float32)
    output = model(input_ids=torch.arange(3, 19)[None])
    balance = router_loss(model, output, torch.zeros(1, 16, dtype=torch.bool))
    balance.backward()
    assert balance == 0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("deepseek_v3", {**LATENT, "first_k_dense_replace": 2}),
        ("deepseek_v3", {**LATENT, "first_k_dense_replace": 0}),
    ],
    ids=["llama", "latent attention", "latent attention and experts"],
)
def test_a_layer_keeps_what_is_planned(kind: str, more: dict[str, Any]) -> None:
    """Bytes that autograd saves for one decoder layer more, in bf16; heads of one size, so that SDPA is fused here."""
    tokens = 512
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    config = AutoConfig.for_model(kind, max_position_embeddings=tokens, **sizes, **more)
    one, two = (kept_bytes(config, number, tokens) for number in (1, 2))
    options = TrainConfig(sequence_length=tokens, batch_size=1, dtype="bfloat16")
    config.num_hidden_layers = 2
    layers = AutoModelForCausalLM.from_config(config).model.layers
    planned = needs_of_layers(options, "fsdp2", config, layers)[-1].kept
    assert planned == pytest.approx(two - one, rel=0.1)


def kept_bytes(config: Any, layers: int, tokens: int) -> int:
    """Counts the bytes of activations that a forward saves."""
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    model = liger_dist.wrap(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(saved.values())
