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
from liger_dist_train.distributed import world_size
from liger_dist_train.export import export
from liger_dist_train.memory_plan import plan
from liger_dist_train.model import add_lora, find_config, shell
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train

bitsandbytes = pytest.importorskip("bitsandbytes")
FOUR_BITS: dict[str, Any] = SHORT | {"load_in_4bit": True}


def test_exports(data: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Merged into what the 4 bits stand for, the model has the loss of the run; PEFT reads the adapter's files."""
    base = write_base(cache, tmp_path / "base")
    changes: dict[str, Any] = {"model": str(base), "learning_rate": 0.05} | FOUR_BITS
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

    quantised: Any = read_weights(base, None, four_bit_on=torch.device("cpu"))
    # In evaluation bitsandbytes computes in bf16 on some CPUs.
    loaded = PeftModel.from_pretrained(quantised, str(tmp_path / "adapter")).train()
    assert torch.allclose(loaded(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-4)


def bytes_of_4_bits(config: Any) -> tuple[int, int]:
    """Bytes of weights and scales on this rank, and the plan's."""
    model: nn.Module = engine_of(config).model
    model_config = find_config(config, 601)
    meta = add_lora(shell(config, model_config), config, has_weights=True)
    (found, *_) = plan(config, parallel_dims_of(config, world_size()), meta, model_config).plans
    scales = 0
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.quant_state
            scales += bytes_of((state.absmax, state.state2.absmax))
    weights = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        weights += bytes_of([getattr(local, "packed", local)])
    return weights + scales, found.parameters


@pytest.mark.smoke
@pytest.mark.parametrize(("strategy", "frozen"), [("fsdp2", "shard"), ("fsdp2", "replicate"), ("ddp", "shard")])
def test_a_dry_run_knows_4_bits(
    strategy: str, frozen: str, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"model": str(write_base(cache, tmp_path / "base")), "frozen": frozen} | FOUR_BITS
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
