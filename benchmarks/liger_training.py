"""``launch/train.py`` with Liger's kernels instead of ours: the same data, loop and optimiser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))

import training.engine
from training.config import TrainConfig, parse
from training.distributed import device, start
from training.fault_tolerance import run
from training.parallel_dims import ParallelDims
from training.run import train

from .training_ways import by_hand


def build(config: TrainConfig, dims: ParallelDims, model: Any, wrapping: Any = None) -> nn.Module:
    """As Liger's documentation has it: patched, and sharded by layers and root; under DeepSpeed patched alone."""
    torch.manual_seed(config.seed)
    model.to_empty(device=device())
    model.init_weights()
    # What is computed from the config, and not stored, is computed again.
    with device():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    patched: nn.Module = by_hand("zero3" if dims.strategy == "deepspeed" else "fsdp2", liger=True)(model)
    return patched


def main() -> None:
    config = parse(sys.argv[1:])
    start()
    with mock.patch.object(training.engine, "build", build):
        train(config)


if __name__ == "__main__":
    run(main)
