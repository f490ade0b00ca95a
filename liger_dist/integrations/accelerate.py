"""Accelerate: ``prepare(accelerator, model, optimizer, …)`` instead of ``accelerator.prepare(model, optimizer, …)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from liger_dist.config import WrapConfig
from liger_dist.wrap import wrap


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any, config: WrapConfig | None = None) -> Any:
    """``accelerator.prepare(model, *others)`` of a model that computes its loss fused, under whatever the accelerator
    was set to: one process, DDP, FSDP1, FSDP2 or DeepSpeed.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`.
    """
    wrap_for(accelerator.state, model, config)
    return accelerator.prepare(model, *others)


def wrap_for(state: AcceleratorState, model: nn.Module, config: WrapConfig | None = None) -> None:
    """Wraps a model that an accelerator is going to prepare, and lets its loss keep fp32 under FSDP2."""
    is_deepspeed = state.distributed_type == DistributedType.DEEPSPEED
    wrap(model, "deepspeed" if is_deepspeed else "auto", config=config)
    if state.distributed_type == DistributedType.FSDP:
        plugin: Any = state.fsdp_plugin
        if isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
            # Accelerate's default rounds everything that the model returns, the loss too.
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)
