"""``liger-dist train`` with Liger's kernels instead of ours: the same data, loop and optimiser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))

import liger_dist_train.engine
from liger_dist_train.config import TrainConfig, parse
from liger_dist_train.distributed import device, start
from liger_dist_train.fault_tolerance import run
from liger_dist_train.parallel_dims import ParallelDims
from liger_dist_train.run import train

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
    with mock.patch.object(liger_dist_train.engine, "build", build):
        train(config)


if __name__ == "__main__":
    run(main)
