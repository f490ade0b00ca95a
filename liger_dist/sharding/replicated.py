"""A weight that every process holds whole: one process, DDP, ZeRO-1 and 2."""

from __future__ import annotations

import sys
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy

from .base import DataParallel, Facts, Head


class Replicated:
    """Local fused loss. Collectives in the loss: none."""

    name: ClassVar[str] = "replicated"

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        reasons = []
        if facts.engine not in ("plain", "ddp"):
            reasons.append(facts.storage)
        if facts.token_mean == "global" and facts.engine == "plain" and facts.world_size > 1:
            reasons.append(
                f"token_mean='global' needs to know who averages the gradients of {facts.world_size} processes; wrap "
                "with strategy='ddp', or pass num_items_in_batch to the model"
            )
        return reasons

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        if not dist.is_initialized():
            return DataParallel(groups=(), divide_factor=1.0)
        return DataParallel(
            groups=(dist.distributed_c10d._get_default_group(),), divide_factor=float(dist.get_world_size())
        )

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, loss: LossArguments, execution: Execution
    ) -> LossOutput:
        return fused_linear_cross_entropy(hidden_states, head.weight, head.bias, labels, loss=loss, execution=execution)


def is_averaged() -> bool:
    """True if one rank runs alone, or gradients will be averaged as far as can be told: the forward of a DDP is running
    (its reducer in Python does not say so), or DeepSpeed has started, whose engine averages."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    deepspeed, dynamo = sys.modules.get("deepspeed.comm.comm"), sys.modules.get("torch._dynamo.config")
    if getattr(deepspeed, "cdb", None) is not None:
        return True
    is_in_python = str(getattr(dynamo, "optimize_ddp", "")).startswith("python_reducer")
    return is_in_python or DistributedDataParallel._get_active_ddp_module() is not None


def replicate(model: nn.Module) -> DistributedDataParallel:
    """Wraps ``model``, already on its device, in DDP."""
    return DistributedDataParallel(model)
