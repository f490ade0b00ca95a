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
from training.arguments import TrainArguments, parse
from training.ending import run
from training.layout import Layout
from training.loop import train
from training.process import device, start

from .training_step import sharded_by_hand


def build(arguments: TrainArguments, layout: Layout, model: Any, config: Any = None) -> nn.Module:
    """As Liger's documentation has it: patched, and sharded by layers and root; under DeepSpeed patched alone."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    torch.manual_seed(arguments.seed)
    model.to_empty(device=device())
    model.init_weights()
    # What is computed from the config, and not stored, is computed again.
    with device():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    apply_liger_kernel_to_llama(model=model)
    patched: nn.Module = model if layout.strategy == "deepspeed" else sharded_by_hand(model)
    return patched


def main() -> None:
    arguments = parse(sys.argv[1:])
    start()
    with mock.patch.object(training.engine, "build", build):
        train(arguments)


if __name__ == "__main__":
    run(main)
