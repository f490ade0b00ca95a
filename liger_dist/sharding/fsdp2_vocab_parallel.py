"""A head whose rows stay where they are while the rest of the model is sharded by FSDP2.

Collectives of the loss, on the shard group: two all-gathers of two numbers on the hosts (at the model's entry, under
HSDP over all ranks, and at the loss), one of labels, one of upstream gradients, one of a checksum of class weights if
there are any, and for each chunk of tokens an all-gather of hidden states, one of softmax statistics, and an all-to-all
of the hidden states' gradient. In the backward one all-gather of one number; under HSDP an all-reduce of the rows'
gradient over the replicas. Nothing has the size of the weight.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy

from .base import DataParallel, Facts, Head
from .split_head import SplitRows, rows_of


class FSDP2VocabParallel:
    """Every process scores all processes' tokens against its own rows."""

    name: ClassVar[str] = "fsdp2-vocab-parallel"

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.engine != "fsdp2-rows":
            return [facts.storage + "; WrapConfig(head='vocab_parallel') with strategy='fsdp2' splits its rows"]
        if facts.head_choice == "gather":
            return ["WrapConfig(head='gather') asks for a gathered weight, and its rows have been split"]
        if facts.adapted:
            return [
                "an adapter (LoRA) on a head whose rows are split is not supported; leave the head out of its "
                "target_modules, or use WrapConfig(head='gather')"
            ]
        return []

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        return _rows(head).data_parallel()

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, loss: LossArguments, execution: Execution
    ) -> LossOutput:
        rows = _rows(head)
        return fused_linear_cross_entropy(
            hidden_states,
            rows.local(head.weight),
            None if head.bias is None else rows.local(head.bias),
            labels,
            loss=loss,
            execution=execution,
            split=rows.shard(head.weight),
        )


def _rows(head: object) -> SplitRows:
    rows = rows_of(head)
    if rows is None:
        raise LigerDistError("the rows of the output embedding are not split; wrap the model before its forward.")
    return rows
