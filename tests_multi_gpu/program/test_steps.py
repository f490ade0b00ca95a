"""Steps of a run: numbers that are none, gradients that an accumulation holds, rates, trackers and traces."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from torch.distributed.tensor import DTensor
from training_runs import (
    config_for,
    losses_of,
    metrics_of,
    published,
)

import liger_dist
from liger_dist_train.config import TrainConfig
from liger_dist_train.distributed import rank
from liger_dist_train.engine import TorchEngine
from liger_dist_train.model import shell
from liger_dist_train.run import train
from liger_dist_train.trainer import Trainer


@pytest.mark.parametrize("way", [{"strategy": "fsdp2"}, {"strategy": "ddp"}], ids=["fsdp2", "ddp"])
def test_numbers_that_are_none_are_named(
    way: dict[str, Any], workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Under DDP gradients are spoilt after they were averaged: by a bad device, of which the others see nothing."""
    config = config_for(data, cache, tmp_path / "run", checkpoint_every=2, overwrite=True, **way)
    for loss, gradient in workers_2.run(broken_on_rank_one, config):
        said = "the loss of step 3 is not finite; rank 1 has loss nan from sequences with documents of "
        assert loss.startswith(said)
        files = re.split(r"; parameters with|\. No checkpoint", loss.removeprefix(said))[0].split(", ")
        assert 1 <= len(files) <= 3
        assert {Path(file).parent for file in files} == {data}
        assert all(Path(file).is_file() for file in files)
        assert "rank 0" not in loss
        # The only one: clipping by a NaN norm would break the others, too.
        assert gradient.startswith(
            "the gradient norm of step 3 is not finite; parameters with gradients that are not finite: "
            "model.norm.weight. "
        )
    assert published(tmp_path / "run") == ["step-00000002"]


def broken_on_rank_one(config: TrainConfig) -> list[str]:
    """A loss, then a gradient, that is NaN in the third step."""
    own_loss, own_update = Trainer._loss, TorchEngine.update
    sentences: list[str] = []
    updates = 0

    def broken_loss(self: Trainer, batch: Any, num_items: Any, *rest: Any, **named: Any) -> Any:
        loss = own_loss(self, batch, num_items, *rest, **named)
        is_third = self.progress.step == 2 and torch.is_grad_enabled()
        return loss * float("nan") if is_third and rank() == 1 else loss

    def broken_update(self: TorchEngine, *accepts: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 3 and rank() == 1:
            ((_, weight),) = [
                named for named in self.model.named_parameters() if named[0].endswith("model.norm.weight")
            ]
            gradient = weight.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(float("nan"))
        return own_update(self, *accepts)

    for place, name, broken in ((Trainer, "_loss", broken_loss), (TorchEngine, "update", broken_update)):
        with (
            mock.patch.object(place, name, broken),
            pytest.raises(liger_dist.LigerDistError) as caught,
        ):
            train(config)
        sentences.append(str(caught.value))
        dist.barrier()
    return sentences


@pytest.mark.nightly(strategy=["fsdp1"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_accumulation_holds_sharded_gradients_alone(
    strategy: Any, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Without --accumulate_unsharded: the losses are the same, and a rank holds its shard of the gradients."""
    settings: dict[str, Any] = {"strategy": strategy, "steps": 1, "batch_size": 1, "global_batch_size": 6}
    settings |= {"checkpoint_every": 0, "eval_fraction": 0.0}
    held, losses = {}, {}
    for unsharded in (False, True):
        config = config_for(data, cache, tmp_path / str(unsharded), accumulate_unsharded=unsharded, **settings)
        held[unsharded] = workers_2.run(bytes_before_each_micro_batch, config)
        losses[unsharded] = losses_of(tmp_path / str(unsharded))
    assert losses[False] == pytest.approx(losses[True], rel=1e-5)
    for (own, parameters), (others, _) in zip(held[False], held[True], strict=True):
        # In the first micro-batch there is no gradient.
        first, *rest = own
        assert max(rest) - first < 1.1 * parameters / 2
        first, *rest = others
        assert max(rest) - first > 0.9 * parameters


def bytes_before_each_micro_batch(config: TrainConfig) -> tuple[list[int], int]:
    """Bytes of all tensors that this rank holds, and those of all parameters in fp32."""
    own: Any = Trainer._loss
    held, numbers = [], 0

    def loss(self: Trainer, *arguments: Any) -> Any:
        nonlocal numbers
        numbers = numbers or sum(p.numel() for p in shell(config, self.engine.model.config).parameters())
        gc.collect()
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if issubclass(type(tensor), torch.Tensor) and type(tensor) is not DTensor and tensor.device.type == "cpu"
        }
        held.append(sum(storages.values()))
        return own(self, *arguments)

    with mock.patch.object(Trainer, "_loss", loss):
        train(config)
    return held, 4 * numbers


@pytest.mark.smoke
def test_a_tracker_that_fails_is_left_out(data: Path, cache: Path, tmp_path: Path) -> None:
    from accelerate.tracking import TensorBoardTracker

    own, logged = TensorBoardTracker.log, []

    def log(self: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        logged.append(step)
        if step == 2:
            raise ConnectionError("the service is gone")
        own(self, values, step, **options)

    config = config_for(data, cache, tmp_path, strategy="none", steps=4, trackers=["tensorboard"], log_every=1)
    with (
        mock.patch.object(TensorBoardTracker, "log", log),
        pytest.warns(RuntimeWarning, match="tensorboard failed: ConnectionError.*goes on without it"),
    ):
        train(config)
    assert logged == [1, 2]
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4]
    assert published(tmp_path)[-1] == "step-00000004"


def test_the_learning_rate_of_a_row_is_that_of_its_step(data: Path, cache: Path, tmp_path: Path) -> None:
    train(config_for(data, cache, tmp_path, strategy="none", steps=4, warmup_steps=2, checkpoint_every=0))
    rates = [row["learning_rate"] for row in metrics_of(tmp_path)]
    assert rates[:3] == pytest.approx([0.0, 0.005, 0.01])
    assert rates[3] < rates[2]


@pytest.mark.nightly
def test_a_profiler_trace_on_request(data: Path, cache: Path, tmp_path: Path) -> None:
    train(config_for(data, cache, tmp_path, strategy="none", steps=3, stop_at_step=2, profile_step=2))
    assert "traceEvents" in (tmp_path / "trace-rank0.json").read_text()
    with pytest.raises(liger_dist.LigerDistError, match="--profile_step is 5000; the run has"):
        train(config_for(data, cache, tmp_path / "b", strategy="none", steps=None, epochs=0.1, profile_step=5000))
