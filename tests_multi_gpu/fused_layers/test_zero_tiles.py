"""Gradients of MLPs that are computed in tiles under ZeRO, by what trains."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from full_tensors import deepspeed_step
from harness import Workers
from models import assert_below, make_batch, make_model
from torch import Tensor, nn
from truth import relative_error

import liger_dist

TILE = 7
LONG_LIMIT = 150.0
"""seconds; DeepSpeed compiles an extension in its first call on a machine"""


@dataclass(frozen=True, kw_only=True)
class Case:
    trains: str
    lora: tuple[str, ...] = ()
    """LoRA on these projections; otherwise the parameters train whose names hold ``trains``"""
    stage: int = 3
    checkpointing: str = "none"
    """"none", "reentrant" or "not reentrant" """
    tile_tokens: int | None = TILE
    """1000 for a tile as long as the batch"""
    lora_first: bool = True
    """False if adapters are added to a wrapped model"""

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage}", f"trains {self.trains}", f"tiles of {self.tile_tokens}"]
        words += [self.checkpointing] if self.checkpointing != "none" else []
        return ", ".join([*words, *([] if self.lora_first else ["wrapped first"])])


def _lora(*projections: str, **options: Any) -> Case:
    return Case(
        trains=f"LoRA on {' '.join(projections)}", lora=tuple(f"{name}_proj" for name in projections), **options
    )


QUICK = [
    _lora("gate", "up", "down"),
    _lora("down", lora_first=False),
    _lora("q"),
    Case(trains="mlp.down"),
    Case(trains="layers.1"),
]
CASES = [
    *(
        _lora(*projections, stage=stage, checkpointing=checkpointing)
        for projections in (("gate",), ("up",), ("down",), ("gate", "up", "down"), ("q", "down"), ("q",))
        for stage in (2, 3)
        for checkpointing in ("none", "not reentrant", "reentrant")
    ),
    *(
        Case(trains=trains, stage=stage, checkpointing=checkpointing)
        for trains in ("", "mlp", "mlp.down", "self_attn", "layers.1", "layers.1.mlp", "lm_head")
        for stage in (2, 3)
        for checkpointing in ("none", "not reentrant")
    ),
    *(_lora("gate", "up", "down", tile_tokens=tile, stage=stage) for tile in (None, 1000) for stage in (2, 3)),
    *(_lora("gate", "up", "down", lora_first=False, stage=stage) for stage in (2, 3)),
]
REST = [case for case in dict.fromkeys(CASES) if case not in QUICK]


@pytest.mark.smoke
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.nightly) for case in REST)], ids=str)
def test_zero_reduces_the_gradients_of_tiles(case: Case, workers_2: Workers) -> None:
    for rank, errors in enumerate(workers_2.run(errors_under_zero, case, time_limit=LONG_LIMIT)):
        assert_below(errors, 1e-4, f"rank {rank}")


def errors_under_zero(case: Case) -> dict[str, float]:
    """The relative error of each gradient beside those of the unwrapped fp64 model."""
    base: Any = make_model("llama", dtype=torch.float32)
    reference = with_trained_parameters(copy.deepcopy(base), case).double()
    config = liger_dist.WrapConfig(mlp_tile_tokens=case.tile_tokens)
    if case.lora_first:
        model = liger_dist.wrap(with_trained_parameters(base, case), "deepspeed", config=config)
    else:
        model = with_trained_parameters(liger_dist.wrap(base, "deepspeed", config=config), case)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    _, gradients = deepspeed_step(model, [make_batch(rank)], stage=case.stage)
    for other in range(world):
        (reference(**make_batch(other), use_cache=False).loss / world).backward()
    truths: dict[str, Tensor] = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert gradients.keys() == truths.keys()
    return {name: relative_error(gradient, truths[name]) for name, gradient in gradients.items()}


def with_trained_parameters(model: Any, case: Case) -> nn.Module:
    """The model with what trains, or the PeftModel around it."""
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(case.lora), r=2, task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator(parameter.device).manual_seed(1))
            elif "lora_A" in name:
                nn.init.normal_(parameter, generator=torch.Generator(parameter.device).manual_seed(2))
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(case.trains in name)
    if case.checkpointing != "none":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing == "reentrant"}
        )
    return model
