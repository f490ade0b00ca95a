"""``unwrap`` and ``wrap`` once more, with the sharding that stays: losses and gradients are those of the first wrap, of
texts and of packed documents, and ``explain`` says the same of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients
from harness import Workers
from models import make_model
from mtp_models import add_mtp
from torch.distributed.device_mesh import init_device_mesh

import liger_dist
from liger_dist.sharding.process_groups import compute_device


def with_axis(name: str) -> Any:
    return init_device_mesh(compute_device().type, (1, 2), mesh_dim_names=("shard", name))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": liger_dist.DDP,
    "fsdp2": liger_dist.FSDP2,
    "replicas": lambda: liger_dist.FSDP2(mesh=(2, 1)),
    "units of two layers": lambda: liger_dist.FSDP2(layers_per_unit=2),
    "weights stay gathered": lambda: liger_dist.FSDP2(reshard_after_forward=False),
    "offloaded": lambda: liger_dist.FSDP2(cpu_offload=True),
    "vocab-parallel": lambda: liger_dist.FSDP2(lm_head="vocab_parallel"),
    "tp": liger_dist.TensorParallel,
    "fsdp2 x tp": lambda: liger_dist.FSDP2(mesh=with_axis("tp")),
    "experts on two ranks": lambda: liger_dist.FSDP2(expert_parallel=2),
    "experts on two ranks, vocab-parallel": lambda: liger_dist.FSDP2(expert_parallel=2, lm_head="vocab_parallel"),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "qwen3_moe, MTP", "qwen3_5_text"])
def test_a_second_wrap_computes_as_the_first(family: str, tied: bool, workers_2: Workers) -> None:
    for differences in workers_2.run(differences_of, family, tied):
        assert not differences


def differences_of(family: str, tied: bool) -> dict[str, str]:
    found = {}
    for name, make in STRATEGIES.items():
        if "experts" in name and "moe" not in family:
            continue
        model: Any = make_model(family.partition(",")[0], tied=tied)
        model = add_mtp(model, depth=1, dtype=torch.float64) if "MTP" in family else model
        # Ranks of a tensor-parallel group see the same tokens.
        rank = 0 if "tp" in name else dist.get_rank()
        ids = on_device.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(rank))
        texts = {"input_ids": ids, "labels": ids}
        batches = [texts, texts | {"position_ids": on_device.tensor([*range(3), *range(5)]).expand(2, 8)}]
        model = liger_dist.wrap(model, make())
        first = [results(model, batch) for batch in batches], said(model)
        model = liger_dist.wrap(liger_dist.unwrap(model), make() if name == "ddp" else "auto")
        second = [results(model, batch) for batch in batches], said(model)
        if first[1] != second[1]:
            found[name] = f"{first[1]}, then {second[1]}"
        for before, after in zip(first[0], second[0], strict=True):
            worst = max(float((before[n] - after[n]).abs().max()) for n in before)
            if before.keys() != after.keys() or worst > 1e-6:
                found[name] = f"{worst:.1e}"
    return found


def said(model: Any) -> tuple[str, str | None]:
    """What ``explain`` says of packed documents and of experts."""
    found = liger_dist.explain(model)
    return found.packing, found.sharding.get("experts")


def results(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return full_gradients(model) | {"loss": loss.detach()}
