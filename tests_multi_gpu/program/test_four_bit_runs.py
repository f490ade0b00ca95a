"""Runs of the training program on a base of 4 bits: losses, resuming by another strategy, exports, and the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Workers
from peft import PeftModel
from test_lora_runs import ALONE, SHORT, bytes_of, engine_of
from torch import nn
from training_runs import config_for, metrics_of, write_base
from transformers import AutoModelForCausalLM

from liger_dist import LigerDistError
from liger_dist.model.quantized import four_bit_stacks
from liger_dist_train.distributed import world_size
from liger_dist_train.export import export
from liger_dist_train.memory_plan import plan
from liger_dist_train.model import add_lora, find_config, shell
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train

bitsandbytes = pytest.importorskip("bitsandbytes")
FOUR_BITS: dict[str, Any] = SHORT | {"load_in_4bit": True}
MIXTURE: dict[str, Any] = FOUR_BITS | {"layer_kernels": True}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_exports(family: str, data: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Merged into what the 4 bits stand for, the model has the loss of the run; PEFT reads the adapter's files."""
    base = write_base(cache, tmp_path / "base", family=family)
    changes: dict[str, Any] = {"model": str(base), "learning_rate": 0.05} | MIXTURE
    config = config_for(data, cache, tmp_path / "run", **ALONE, **changes)
    train(config)
    last = metrics_of(tmp_path / "run")[-1]["eval_loss"]
    export(tmp_path / "run", tmp_path / "merged", step=None)
    assert "(relative L2) from the pretrained ones" in capsys.readouterr().out
    ids = torch.arange(1, 33)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    alone = replace(config, model=str(tmp_path / "merged"), lora_rank=0, load_in_4bit=False, eval_only=True)
    train(replace(alone, output_dir=str(tmp_path / "evaluated")))
    assert f'"eval_loss": {last:.4f}'[:18] in (tmp_path / "evaluated" / "eval.json").read_text()
    export(tmp_path / "run", tmp_path / "adapter", step=None, adapter=True)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {f.name for f in (tmp_path / "adapter").iterdir()}
    from liger_dist_train.model import read_weights

    quantised: Any = read_weights(base, None, four_bit_on=torch.device("cpu"), experts=False)
    for name, stack in (named for named in merged_experts(base) if family == "qwen3_moe"):
        quantised.get_parameter(name).data.copy_(stack)
    # In evaluation bitsandbytes computes in bf16 on some CPUs.
    loaded = PeftModel.from_pretrained(quantised, str(tmp_path / "adapter")).train()
    assert torch.allclose(loaded(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-4)


def merged_experts(base: Path) -> list[tuple[str, torch.Tensor]]:
    """Names of experts, and what their 4 bits stand for."""
    from liger_dist_train.model import read_weights

    quantised = read_weights(base, None, four_bit_on=torch.device("cpu"))
    return [(name, getattr(module, stack.name)) for name, module, stack in four_bit_stacks(quantised)]


@pytest.mark.nightly
def test_a_mixture_by_strategy(workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    """LoRA on experts of 4 bits, and on linear layers: losses of one process, under FSDP2 loaded shard by shard."""
    base = write_base(cache, tmp_path / "base", family="qwen3_moe")
    changes: dict[str, Any] = MIXTURE | {"model": str(base), "learning_rate": 0.05, "steps": 4, "checkpoint_every": 4}
    train(config_for(data, cache, tmp_path / "none", **ALONE, **changes))
    expected = [entry["loss"] for entry in metrics_of(tmp_path / "none")]
    assert len(expected) > 2
    assert expected[-1] < expected[0]
    for strategy in ("fsdp2", "ddp"):
        workers_2.run(train, config_for(data, cache, tmp_path / strategy, strategy=strategy, **changes))
        found = [entry["loss"] for entry in metrics_of(tmp_path / strategy)]
        assert found == pytest.approx(expected, rel=1e-4), strategy


def test_lora_on_experts_of_4_bits_by_name(data: Path, cache: Path, tmp_path: Path) -> None:
    base = write_base(cache, tmp_path / "base", family="qwen3_moe")
    changes: dict[str, Any] = {"model": str(base), "lora_targets": ["q_proj", "down_proj"]} | MIXTURE
    trained = [
        name
        for name, p in engine_of(config_for(data, cache, tmp_path, **ALONE, **changes)).model.named_parameters()
        if p.requires_grad
    ]
    assert {name.split(".lora_")[0].split(".")[-2] for name in trained} == {"self_attn", "mlp"}


def bytes_of_4_bits(config: Any) -> tuple[int, int]:
    """Bytes of weights and scales on this rank, and the plan's."""
    model: nn.Module = engine_of(config).model
    model_config = find_config(config, 601)
    meta = add_lora(shell(config, model_config), config, has_weights=True)
    (found, *_) = plan(config, parallel_dims_of(config, world_size()), meta, model_config).plans
    states = [m.quant_state for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    states += [stack.state for _, _, stack in four_bit_stacks(model)]
    scales = sum(bytes_of((state.absmax, state.state2.absmax)) for state in states)
    weights = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        weights += bytes_of([getattr(local, "packed", local)])
    return weights + scales, found.parameters


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("strategy", "frozen"), [("fsdp2", "shard"), ("fsdp2", "replicate"), ("ddp", "shard")])
def test_a_dry_run_knows_4_bits(
    strategy: str, frozen: str, family: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    base = write_base(cache, tmp_path / "base", family=family)
    changes: dict[str, Any] = {"model": str(base), "frozen": frozen} | MIXTURE
    for held, planned in workers_2.run(
        bytes_of_4_bits, config_for(data, cache, tmp_path, strategy=strategy, **changes)
    ):
        assert held == pytest.approx(planned, rel=0.05)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lora_rank": 0}, "weights of 4 bits do not train"),
    ({"strategy": "deepspeed"}, "use none, ddp, fsdp2, or fsdp1 with --frozen replicate"),
    ({"strategy": "fsdp1"}, "use none, ddp, fsdp2, or fsdp1 with --frozen replicate"),
    ({"cpu_offload": True}, "none of which works on weights of 4 bits"),
    ({"compile": True}, "none of which works on weights of 4 bits"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_refusals(changes: dict[str, Any], sentence: str, data: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(LigerDistError, match=sentence):
        config_for(data, cache, tmp_path, **{"strategy": "fsdp2"} | FOUR_BITS | changes)
