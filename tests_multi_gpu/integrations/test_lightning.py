"""Lightning and Fabric with the model's loss fused, against the same run without."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from hosts import watched
from models import VOCAB_SIZE, make_batch, make_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from trainers import assert_same_weights, full_weights

import liger_dist

SIZES: Any = {"data_parallel_size": 2, "tensor_parallel_size": 1}
CONFIG = liger_dist.WrapConfig(memory_budget=8 * VOCAB_SIZE * 4)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "model parallel", "fabric, model parallel", "ddp, wrapped first", "model parallel, wrapped first"],
)
def test_it_trains_as_before(strategy: str, workers_2: Workers) -> None:
    """Wrapped first: by ``liger_dist.wrap(model)`` alone, after which the module's own code shards."""
    for fused, unfused in workers_2.run(trained_twice, strategy):
        assert fused["fused calls"] == 3
        assert unfused["fused calls"] == 0
        assert 0 < fused["most logits"] <= 8 < unfused["most logits"]
        assert fused["losses"] == pytest.approx(unfused["losses"], rel=1e-5)
        assert_same_weights(fused["weights"], unfused["weights"], atol=1e-6)


def trained_twice(strategy: str) -> list[dict[str, Any]]:
    # As torchrun says it.
    elastic = {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, elastic), tempfile.TemporaryDirectory() as folder:
        train = by_fabric if strategy.startswith("fabric") else by_trainer
        return [train(strategy, folder, fused=fused) for fused in (True, False)]


def batches() -> list[dict[str, torch.Tensor]]:
    return [make_batch(dist.get_rank(), seed=seed) for seed in range(3)]


def by_trainer(strategy: str, folder: str, *, fused: bool) -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from liger_dist.integrations.lightning import wrap_in

    is_wrapped_first = strategy.endswith("wrapped first")

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = make_model("llama", dtype=torch.float32)
            if fused and is_wrapped_first:
                liger_dist.wrap(self.model, config=CONFIG)
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if not is_wrapped_first:
                config = CONFIG if fused else liger_dist.WrapConfig(fused_loss=False, layer_kernels=False)
                self.model = wrap_in(self, self.model, config)
            elif strategy.startswith("model parallel"):
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(**batch, use_cache=False).loss
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    module = Module()
    trainer = Trainer(
        accelerator="auto",
        devices=2,
        strategy=DDPStrategy()
        if strategy.startswith("ddp")
        else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    with watched() as seen:
        trainer.fit(module, DataLoader(batches(), batch_size=None))
    return found(module.model, module.losses, seen)


def by_fabric(strategy: str, folder: str, *, fused: bool) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from liger_dist.integrations.lightning import parallelize

    config = CONFIG if fused else liger_dist.WrapConfig(fused_loss=False, layer_kernels=False)
    own = ModelParallelStrategy(
        lambda model, mesh: parallelize(model, mesh, config), data_parallel_size=2, tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="auto", devices=2, strategy=own)
    fabric.launch()
    with watched() as seen:
        model: Any = fabric.setup(make_model("llama", dtype=torch.float32))
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for batch in batches():
            loss = model(**batch, use_cache=False).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return found(model.module, losses, seen)


def found(model: Any, losses: list[float], seen: Any) -> dict[str, Any]:
    weights = full_weights(model)
    return {"losses": losses, "weights": weights, "fused calls": seen.fused_calls, "most logits": seen.most_logits}
