"""DeepSpeed: strategy, sharding adapter for ZeRO-3, and its private names.

ZeRO-3's hooks all-gather the weight for lm_head's forward and again for its backward, and reduce its gradient; the loss
adds no collective. ``GatheredParameters`` is not used: inside a forward it frees the weight before the backward. Under
ZeRO-0, 1 and 2 every rank keeps the full weight, as for :class:`.single.Replicated`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.model.quantized import four_bit_layers, store_as_bytes
from liger_dist.model.structure import Structure, stored_parameter

from .base import Facts, FullWeight, Initializer, Storage
from .fsdp_options import refuse_overlaps
from .single import Unsharded


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(Unsharded):
    """Fuses only; ``deepspeed.initialize`` shards the model afterwards, at any ZeRO stage."""

    name: ClassVar[str] = "deepspeed"

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        refuse_overlaps(outer, self.name)

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        if config.token_mean == "global":
            raise LigerDistError(
                "token_mean is 'global' but DeepSpeed's engine scales the loss itself; pass num_items_in_batch to the "
                "model."
            )

    def shard(
        self,
        outer: nn.Module,
        model: nn.Module,
        structure: Structure,
        *,
        initialize: Initializer | None,
        undo: ExitStack,
    ) -> nn.Module:
        # With bf16 or fp16 the engine casts every floating parameter.
        for _, layer in four_bit_layers(outer):
            store_as_bytes(layer)
        return super().shard(outer, model, structure, initialize=initialize, undo=undo)


class Zero3(FullWeight):
    """ZeRO-3's hooks all-gather the weight for lm_head's forward; the loss runs inside it on the full weight."""

    name: ClassVar[str] = "zero3"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        weight = stored_parameter(head)
        if not is_stored_by_zero3(weight):
            return None
        is_quantized = _is_quantized(weight)
        clause = "ZeRO-3 partitions the weight"
        return Storage.of(self, head, weight, clause, apart_from_embedding=not tied_to, zero_quantized=is_quantized)

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        reasons = []
        if facts.storage.zero_quantized:
            reasons.append(
                "DeepSpeed sends weights or gradients quantised (zero_quantized_weights, "
                "zero_quantized_nontrainable_weights, zero_quantized_gradients), with which this loss has not been "
                "shown to be right; turn them off"
            )
        if facts.token_mean == "global":
            reasons.append(
                "token_mean='global' is not available under DeepSpeed, whose engine scales the loss itself; pass "
                "num_items_in_batch to the model"
            )
        return reasons

    def check_unsharded(self, weight: Tensor) -> None:
        if weight.dim() != 2:
            raise LigerDistError(
                f"lm_head.weight has shape {tuple(weight.shape)} in its own forward: ZeRO-3 has not all-gathered it. "
                "Call the engine that deepspeed.initialize returned rather than the model inside."
            )


def is_stored_by_zero3(weight: object) -> bool:
    """True if ZeRO-3 has partitioned ``weight``."""
    return hasattr(weight, "ds_id") and hasattr(weight, "ds_shape")


def _is_quantized(weight: object) -> bool:
    """True if ZeRO-3 communicates ``weight`` or its gradient quantised (ZeRO++)."""
    optimizer = getattr(weight, "_z3_optimizer", None)
    offload = getattr(optimizer, "parameter_offload", None)
    return (
        bool(getattr(offload, "zero_quantized_weights", False))
        or bool(getattr(offload, "zero_quantized_nontrainable_weights", False))
        or getattr(optimizer, "all2all_process_group", None) is not None
    )


def has_gradients_in_engine(parameter: object) -> bool:
    """True for a parameter whose gradient an engine keeps until its step, instead of ``.grad``: ZeRO-1, 2 and 3, and
    bf16 with gradients of fp32."""
    return is_stored_by_zero3(parameter) or hasattr(parameter, "_hp_mapping")


def has_started() -> bool:
    """True if DeepSpeed has started in this process: its engine averages gradients."""
    return getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None


def sequence_parallel_group() -> dist.ProcessGroup | None:
    """Returns the ranks over which DeepSpeed shards sequences; None without sequence parallelism."""
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    if groups is None or not has_started() or groups._get_sequence_parallel_world_size() == 1:
        return None
    group: dist.ProcessGroup = groups._get_sequence_parallel_group()
    return group


def is_engine(root: nn.Module) -> bool:
    """True if ``deepspeed.initialize`` returned ``root``."""
    return callable(getattr(root, "set_gradient_accumulation_boundary", None))


def backward(engine: Any, loss: Tensor) -> None:
    """Runs the backward of a micro-batch after which the engine reduces gradients."""
    before = engine._is_gradient_accumulation_boundary
    engine.set_gradient_accumulation_boundary(True)
    try:
        engine.backward(loss)
    finally:
        engine._is_gradient_accumulation_boundary = before


def full_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Returns the full gradient of a parameter of an engine (a collective under ZeRO)."""
    from deepspeed.utils import safe_get_full_grad

    gradient: Tensor | None = safe_get_full_grad(parameter)
    return gradient


def clear_gradients(engine: Any) -> None:
    """Clears the reduced gradients that ZeRO and the bf16 optimizer keep until the step, without the step."""
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if hasattr(optimizer, "clear_hp_grads"):
        optimizer.clear_hp_grads()
    if hasattr(optimizer, "averaged_gradients"):
        optimizer.averaged_gradients.clear()
    if hasattr(optimizer, "micro_step_id"):
        optimizer.micro_step_id = _first_micro_step(optimizer)


def has_unfinished_step(engine: Any) -> bool:
    """True if gradients wait for ``engine.step()``."""
    optimizer = engine.optimizer
    in_window = engine.micro_steps % engine.gradient_accumulation_steps() != 0
    counted = getattr(optimizer, "micro_step_id", -1) > _first_micro_step(optimizer)
    reduced = _is_stage_3(optimizer) and bool(getattr(optimizer, "_epilogue_ran_this_backward", False))
    kept = (getattr(parameter, "_hp_grad", None) for parameter in engine.parameters())
    return in_window or counted or reduced or any(g is not None and bool((g != 0).any()) for g in kept)


def _first_micro_step(optimizer: Any) -> int:
    """Returns the counter before the first micro-step: -1 under ZeRO-1 and 2, where a backward makes it 0; 0 under
    ZeRO-3, which keeps a flag until the next forward."""
    return 0 if _is_stage_3(optimizer) else -1


def _is_stage_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "parameter_offload")
