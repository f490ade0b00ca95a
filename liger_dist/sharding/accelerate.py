"""Accelerate: all of its private names that are used. Refuses calls that sequence and context parallelism of Accelerate
and DeepSpeed compute wrongly without an error; undoes the rounding of outputs; and marks prepared models."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from liger_dist.errors import LigerDistError

from .deepspeed import is_stored_by_zero3, sequence_parallel_group
from .fsdp2.forward import keep_output_dtype

_PREPARED = "_is_accelerate_prepared"


@dataclass(frozen=True)
class HostSequences:
    """Ranks on which a host shards sequences."""

    option: str
    group: dist.ProcessGroup

    def is_true_anywhere(self, value: Tensor) -> bool:
        """All-reduces one value, so that all ranks of the group decide alike."""
        number = value.any().int()
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        return bool(number)


def size_in_accelerate(option: str) -> int:
    """Returns ``cp_size`` or ``sp_size`` of the accelerator of this process; 1 without one."""
    size = getattr(_accelerate("parallelism_config"), option, 1)
    return size if isinstance(size, int) else 1


def active() -> HostSequences | None:
    """Returns the ranks over which a host shards sequences in this process; None without sequence sharding."""
    if size_in_accelerate("cp_size") > 1 and _accelerate("device_mesh") is not None:
        return HostSequences("cp_size", _accelerate("device_mesh")["cp"].get_group())
    group = sequence_parallel_group()
    return None if group is None else HostSequences("sp_size", group)


def check(model: nn.Module, weight: object, positions: object) -> None:
    """Refuses a call whose result would be wrong: documents or left padding, which the attention of both hosts does not
    separate ("sdpa", whose mask they drop), and ZeRO-1 and 2 under Accelerate's ``sp_size``, where gradients are
    ``sp_size`` times too large.

    Args:
        weight: lm_head's.
        positions: ``position_ids`` ``[B, S]`` of this rank's tokens.

    Raises:
        LigerDistError: in training on all ranks that share the sequences.
    """
    host = active()
    if host is None:
        return
    trains = model.training and torch.is_grad_enabled()
    sp_size = size_in_accelerate("sp_size")
    if trains and sp_size > 1 and not is_stored_by_zero3(weight):
        raise LigerDistError(
            f"sp_size is {sp_size} with a ZeRO stage below 3, where DeepSpeed and the averaged "
            "loss of transformers make all gradients sp_size times too large; expected ZeRO-3. Set the stage to 3, or "
            'use a mesh axis "sp" under FSDP2.'
        )
    is_masked = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa") == "sdpa"
    if is_masked and isinstance(positions, Tensor) and _restart(positions, host, trains):
        raise LigerDistError(
            f"position_ids start again within a sequence under {host.option}, whose attention of "
            "attn_implementation='sdpa' has no mask: a document would attend to the one before it, and a text to the "
            "padding on its left. Train on one text per row, padded on the right, with positions that count on; or "
            'shard packed sequences over a mesh axis "sp" under FSDP2.'
        )


def _restart(positions: Tensor, host: HostSequences, trains: bool) -> bool:
    """True if a document begins inside a full sequence. Accelerate's ``sp_size`` does not shard evaluation, and
    ranks may have different numbers of batches: each decides by itself."""
    inside = positions[:, 1:] <= positions[:, :-1]
    if not trains:
        return bool(inside.any())
    is_first = dist.get_rank(host.group) == 0
    return host.is_true_anywhere(inside if is_first else torch.cat([positions[:, :1] == 0, inside], 1))


def return_losses_unrounded(model: nn.Module) -> None:
    """Undoes the rounding of a model's outputs that Accelerate's policy asks FSDP2 for, so that losses and
    log-probabilities stay fp32. Call it within the forward."""
    policy = getattr(_accelerate("fsdp_plugin"), "mixed_precision_policy", None)
    if isinstance(policy, MixedPrecisionPolicy) and policy.output_dtype is not None:
        keep_output_dtype(model, policy)


@dataclass(frozen=True)
class RefusesPrepare:
    """Value of the attribute that marks a model as prepared for Accelerate. Refuses under settings with which
    ``prepare`` would put DistributedDataParallel or DeepSpeed around the shards."""

    strategy: str

    def __bool__(self) -> bool:
        state = sys.modules.get("accelerate.state")
        kinds = None if state is None else state.DistributedType
        if kinds is None or _accelerate("distributed_type") in (None, kinds.FSDP, kinds.NO):
            return False
        raise LigerDistError(
            f"accelerator.prepare was given a model that liger_dist.wrap has sharded by {self.strategy!r}; prepare the "
            "optimizer and the data loader alone, or wrap and prepare at once with "
            "liger_dist.integrations.accelerate.prepare(accelerator, model, ...) under Accelerate's own FSDP settings."
        )


def mark_sharded(model: nn.Module, strategy: str) -> None:
    """Makes Accelerate's ``prepare`` refuse to wrap the shards."""
    vars(model)[_PREPARED] = RefusesPrepare(strategy)


def unmark_sharded(model: nn.Module) -> None:
    """Undoes :func:`mark_sharded`."""
    if isinstance(vars(model).get(_PREPARED), RefusesPrepare):
        del vars(model)[_PREPARED]


def _accelerate(name: str) -> Any:
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return None if state is None else state._shared_state.get(name)
