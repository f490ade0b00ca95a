"""Mixtures balanced by the biases of their routers: the rule by hand on two ranks, runs, exports and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import make_model
from training_runs import config_for, metrics_of
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist.sharding.process_groups import compute_device
from liger_dist_train.expert_biases import ExpertBiases
from liger_dist_train.expert_loads import ExpertLoads
from liger_dist_train.export import export
from liger_dist_train.run import train

EXPERTS = 8
RATE = 0.25


def biased_config(**changes: Any) -> Any:
    from transformers import Glm4MoeConfig

    sizes = {"vocab_size": 601, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
    sizes |= {"topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 64}
    return Glm4MoeConfig(**sizes, initializer_range=0.3, **changes)


def made() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(biased_config()).to(compute_device())


def rows_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, 600, (2, 24), generator=generator, device="cpu").to(compute_device())


def biases_of(model: Any) -> list[torch.Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def expected_biases() -> list[torch.Tensor]:
    """After two steps, the first of two micro-batches: counted by what the routers of an unwrapped model select."""
    model, counts = made(), []

    def count(module: Any, args: Any) -> None:
        counts.append(torch.bincount(args[1].flatten(), minlength=EXPERTS).double())

    experts = [module for module in model.modules() if hasattr(module, "is_transposed")]
    for module in experts:
        module.register_forward_pre_hook(count)
    for seeds in ((0, 1, 2, 3), (4, 5)):
        counts.clear()
        with torch.no_grad():
            for seed in seeds:
                model(input_ids=rows_of(seed))
        for layer, bias in enumerate(b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")):
            of_layer = torch.stack(counts[layer :: len(experts)]).sum(0)
            bias += (RATE * (of_layer.mean() - of_layer).sign()).to(bias)
    return biases_of(model)


def found_biases(strategy: str, read: bool, checkpointing: bool) -> list[torch.Tensor]:
    model = made()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = liger_dist.wrap(model, strategy).train()
    loads = ExpertLoads(wrapped)
    biases = ExpertBiases(wrapped, loads, RATE)
    for seeds in ((0, 2), (6,), (4,)):
        for seed in seeds:
            rows = rows_of(seed + dist.get_rank())
            wrapped(input_ids=rows, labels=rows).loss.backward()
        biases.update(skipped=seeds == (6,))
        if read:  # Lines of metrics.jsonl read and clear the counts.
            loads.read()
    return biases_of(wrapped)


@pytest.mark.parametrize(
    ("strategy", "read", "checkpointing"),
    [("fsdp2", False, False), ("fsdp2", True, True), ("ddp", True, False), ("fsdp1", False, True)],
)
def test_biases_move_by_the_counts_of_all_ranks(
    strategy: str, read: bool, checkpointing: bool, workers_2: Workers
) -> None:
    expected = expected_biases()
    assert any(bias.abs().max() > RATE for bias in expected)
    for found in workers_2.run(found_biases, strategy, read, checkpointing):
        for bias, truth in zip(found, expected, strict=True):
            assert torch.equal(bias.cpu(), truth.cpu())


@pytest.mark.nightly
def test_a_run_is_balanced_resumed_and_exported(data: Path, cache: Path, tmp_path: Path) -> None:
    """Also the average of the weights, which has no buffers."""
    base = made()
    for name, bias in base.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias[0] = 1.0  # Every token selects the first expert.
    base.save_pretrained(tmp_path / "base")
    changes: dict[str, Any] = {"model": str(tmp_path / "base"), "tokenizer": str(cache / "tokenizer")}
    changes |= {"strategy": "none", "checkpoint_every": 6, "ema_decay": 0.5, "layer_kernels": False}
    changes |= {"sequence_length": 32, "global_batch_size": 4, "eval_batches": 1}
    loads = []
    for rate in (0.0, 0.1):
        train(config_for(data, cache, tmp_path / f"run {rate}", router_bias_rate=rate, **changes))
        loads.append([row["experts/max_load"] for row in metrics_of(tmp_path / f"run {rate}")])
    assert loads[0] == [4.0] * 12  # All of a layer's tokens, of which each has two of eight experts.
    assert loads[1][0] == 4.0
    assert loads[1][-1] < 2.5
    whole = tmp_path / "run 0.1"
    cut = config_for(data, cache, tmp_path / "cut", router_bias_rate=0.1, stop_at_step=6, **changes)
    train(cut)
    train(config_for(data, cache, tmp_path / "cut", router_bias_rate=0.1, resume=True, **changes))
    exported = []
    for index, (run, ema) in enumerate(((whole, False), (tmp_path / "cut", False), (whole, True))):
        export(run, tmp_path / f"model {index}", step=None, ema=ema)
        exported.append(biases_of(AutoModelForCausalLM.from_pretrained(tmp_path / f"model {index}")))
    assert any(bias.abs().max() > 0.2 for bias in exported[0])
    for biases in exported[1:]:
        for bias, truth in zip(biases, exported[0], strict=True):
            assert torch.equal(bias, truth)


@pytest.mark.nightly
def test_frozen_biases_are_in_an_export_of_the_average(data: Path, cache: Path, tmp_path: Path) -> None:
    """Ernie has them as parameters, which are not averaged."""
    from transformers import Ernie4_5_MoeConfig

    sizes = {"vocab_size": 601, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_layer_start_index": 0, "max_position_embeddings": 64}
    AutoModelForCausalLM.from_config(Ernie4_5_MoeConfig(**sizes)).save_pretrained(tmp_path / "base")
    changes: dict[str, Any] = {"model": str(tmp_path / "base"), "tokenizer": str(cache / "tokenizer")}
    changes |= {"strategy": "none", "ema_decay": 0.5, "layer_kernels": False, "router_bias_rate": 0.1}
    train(config_for(data, cache, tmp_path / "run", sequence_length=32, **changes))
    found = []
    for ema in (False, True):
        export(tmp_path / "run", tmp_path / f"model {ema}", step=None, ema=ema)
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / f"model {ema}").state_dict()
        found.append(next(value for name, value in weights.items() if name.endswith("e_score_correction_bias")))
    assert found[0].abs().max() > 0.05
    assert torch.equal(*found)


def refused_in_a_run(data: Path, cache: Path, folder: Path, **changes: Any) -> str:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        train(config_for(data, cache, folder, router_bias_rate=0.01, **changes))
    return str(caught.value)


def test_models_without_such_biases_are_refused(data: Path, cache: Path, tmp_path: Path) -> None:
    sentence = refused_in_a_run(data, cache, tmp_path / "run", model="qwen3_moe_tiny", strategy="none")
    assert "of which model.layers.0.mlp has 0; expected one, as in DeepSeek-V3" in sentence
    sentence = refused_in_a_run(data, cache, tmp_path / "other", strategy="none")
    assert "has no experts whose tokens are counted" in sentence
    with pytest.raises(liger_dist.LigerDistError, match="whose checkpoints have no biases of routers"):
        config_for(data, cache, tmp_path, router_bias_rate=0.01, lora_rank=2)
    with pytest.raises(liger_dist.LigerDistError, match="router_bias_rate"):
        config_for(data, cache, tmp_path, router_bias_rate=-1.0)


def test_biases_in_bf16_are_refused() -> None:
    model: Any = made()
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:
            module.e_score_correction_bias = module.e_score_correction_bias.bfloat16()
    with pytest.raises(liger_dist.LigerDistError, match="in fp32 on every rank, 8 numbers, and it is"):
        ExpertBiases(model, ExpertLoads(model), RATE)
    dense = make_model("llama")
    with pytest.raises(liger_dist.LigerDistError, match="has no experts whose tokens are counted"):
        ExpertBiases(dense, ExpertLoads(dense), RATE)
