"""Refuses models that a failed :func:`liger_dist.wrap` has left half sharded."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from liger_dist.errors import LigerDistError

_FAILED = "_liger_dist_failed"


def storage_state(model: nn.Module) -> tuple[int, int, int]:
    """Counts FSDP units, DTensor parameters and parameters on the meta device."""
    units = sum(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    parameters = list(model.parameters())
    return units, sum(isinstance(p, DTensor) for p in parameters), sum(p.is_meta for p in parameters)


def refuse_half_sharded(
    model: nn.Module, before: tuple[int, int, int], kind: object, error: BaseException | None, trace: object
) -> None:
    """Makes a half sharded model refuse to be wrapped or called. Push it on an ``ExitStack``: after a failure in the
    middle of sharding or initialising, sharded or initialised parameters cannot be restored.

    Args:
        before: :func:`storage_state` before sharding.
    """
    if storage_state(model) == before:
        return
    sentence = (
        f"liger_dist.wrap failed while it sharded this {type(model).__name__} ({type(error).__name__}: {error}), and "
        "some of its parameters are sharded or initialised already; build the model anew."
    )

    def refuse(*_: Any) -> None:
        raise LigerDistError(sentence)

    vars(model)[_FAILED] = sentence
    model.register_forward_pre_hook(refuse, prepend=True)


def check_not_failed(model: nn.Module) -> None:
    """Refuses a model that a failed wrap has left half sharded.

    Raises:
        LigerDistError: with the cause of the failure.
    """
    if _FAILED in vars(model):
        raise LigerDistError(vars(model)[_FAILED])
