"""A weight that DeepSpeed ZeRO-3 partitions over all processes.

ZeRO-3's own module hooks gather it for the head's forward and again for its backward, and reduce its gradient. The
loss adds no collective. ``GatheredParameters`` is not used: inside a forward it takes the weight from the backward.
ZeRO-0, 1 and 2 keep the weight whole: :mod:`liger_dist.sharding.replicated` serves them.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy

from .base import DataParallel, Facts, Head


class Zero3:
    """ZeRO-3's hooks gather the weight for the head's forward; the loss runs inside it on the whole weight."""

    name: ClassVar[str] = "zero3"

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        reasons = []
        if facts.engine != "zero3":
            reasons.append(facts.storage)
        if facts.zero_quantized:
            reasons.append(
                "DeepSpeed quantises weights or gradients on their way (zero_quantized_weights, "
                "zero_quantized_nontrainable_weights, zero_quantized_gradients), with which this loss has not been "
                "shown to be right; turn them off"
            )
        if facts.token_mean == "global":
            reasons.append(
                "token_mean='global' is not available under DeepSpeed, whose engine scales the loss itself; pass "
                "num_items_in_batch to the model"
            )
        return reasons

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        raise LigerDistError(
            "token_mean='global' is not available under DeepSpeed; pass num_items_in_batch to the model."
        )

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, loss: LossArguments, execution: Execution
    ) -> LossOutput:
        if head.weight.dim() != 2:
            raise LigerDistError(
                f"the output embedding's weight has shape {tuple(head.weight.shape)} in its own forward: ZeRO-3 has "
                "not gathered it. Call the engine that deepspeed.initialize returned rather than the model inside."
            )
        return fused_linear_cross_entropy(hidden_states, head.weight, head.bias, labels, loss=loss, execution=execution)


def is_stored_by_zero3(weight: object) -> bool:
    """Whether DeepSpeed has partitioned ``weight``."""
    return hasattr(weight, "ds_id") and hasattr(weight, "ds_shape")


def is_quantized(weight: object) -> bool:
    """Whether DeepSpeed's ZeRO-3 sends ``weight`` or its gradient quantised (ZeRO++)."""
    optimizer = getattr(weight, "_z3_optimizer", None)
    offload = getattr(optimizer, "parameter_offload", None)
    return (
        bool(getattr(offload, "zero_quantized_weights", False))
        or bool(getattr(offload, "zero_quantized_nontrainable_weights", False))
        or getattr(optimizer, "all2all_process_group", None) is not None
    )
