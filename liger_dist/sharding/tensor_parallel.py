"""A weight whose rows are split over a tensor-parallel mesh axis: by transformers' own plan, by torch's
``parallelize_module``, or by :func:`parallelize_heads`; alone or inside FSDP2.

Collectives of the loss, on the tensor-parallel group: one all-gather of seven numbers, by which the processes make sure
that they see the same tokens (the first time waiting for the result), one all-gather of the softmax statistics for each
chunk of tokens, and one all-reduce of the hidden states' gradient. Logits and weight are never gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.same_tokens import check_same_tokens
from liger_dist.losses.vocab_parallel import VocabularyShard, vocab_parallel_linear_cross_entropy

from .base import DataParallel, Facts, Head
from .fsdp2 import FSDP2Gathered, find_param, tied_weight_reasons

NOT_SPLIT = "the weight is not split over a tensor-parallel axis"


class TensorParallel:
    """Every process of the axis scores all tokens against its own rows of the head."""

    name: ClassVar[str] = "tensor-parallel"

    def __init__(self) -> None:
        self._has_waited: WeakSet[Head] = WeakSet()

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.tensor_parallel is None:
            return [NOT_SPLIT]
        reasons = []
        if facts.engine not in ("dtensor", "fsdp2"):
            reasons.append(f"tensor parallelism is not combined with this storage: {facts.storage}")
        if facts.tensor_parallel != "S(0)":
            reasons.append(
                f"the weight is placed {facts.tensor_parallel} over the tensor-parallel mesh; expected its rows on "
                "one axis, S(0), as ColwiseParallel or the plan 'colwise_gather_output' put them"
            )
        if facts.adapted:
            reasons.append(
                "an adapter (LoRA) on a head that is split over a tensor-parallel axis is not supported; leave the "
                "head out of its target_modules"
            )
        if facts.token_mean == "global" and facts.engine == "dtensor" and facts.world_size > facts.tensor_parallel_size:
            reasons.append(
                "token_mean='global' needs to know who averages the gradients of the replicas; pass "
                "num_items_in_batch to the model"
            )
        if facts.engine == "fsdp2":
            reasons += tied_weight_reasons(facts)
        return reasons

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        if find_param(head, model) is not None:
            return FSDP2Gathered().data_parallel(head, model)
        # All processes see the same tokens, and nobody averages.
        return DataParallel(groups=(), divide_factor=1.0)

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, loss: LossArguments, execution: Execution
    ) -> LossOutput:
        weight = head.weight
        if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1:
            raise LigerDistError(
                f"the output embedding's weight is {_described(weight)} in its own forward; expected the rows of one "
                "tensor-parallel axis, so FSDP2's hooks have not run. Call the wrapped model itself rather than its "
                "parts."
            )
        mesh = weight.device_mesh
        group = mesh.get_group()
        is_distributed = isinstance(hidden_states, DTensor)
        if isinstance(hidden_states, DTensor):
            # Sequence-parallel input is gathered here; its gradient is reduced on the way back by DTensor itself.
            hidden_states = hidden_states.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        check_same_tokens(hidden_states, labels, group, waits=head not in self._has_waited)
        self._has_waited.add(head)
        return vocab_parallel_linear_cross_entropy(
            hidden_states,
            weight.to_local(),
            head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias,
            labels,
            shard=VocabularyShard(group=group, start=first_row(weight), vocab_size=weight.shape[0]),
            loss=loss,
            execution=execution,
            sums_gradient=not is_distributed,
        )


def first_row(weight: DTensor) -> int:
    """Where this process's rows begin, on the last mesh axis: DTensor gives every process ``ceil(V / G)`` rows, and the
    last ones fewer."""
    mesh = weight.device_mesh
    rows = -(-weight.shape[0] // mesh.shape[-1])
    return min(mesh.get_local_rank(mesh.ndim - 1) * rows, weight.shape[0])


def parallelize_heads(
    model: nn.Module, heads: Sequence[nn.Linear], embeddings: Sequence[nn.Module], *, mesh: DeviceMesh
) -> None:
    """Splits the heads' rows over the 1-D ``mesh``, and those of the ``embeddings`` that a single head is tied to.
    Every other parameter stays whole. The values of the mesh's first process count.
    """
    group = mesh.get_group()
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
    # A head that other code has to run as usual still returns whole logits.
    holds = {head.weight: head for head in heads}
    tied = [(embedding, holds[embedding.weight]) for embedding in embeddings]  # type: ignore[index]
    for head in heads:
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    for embedding, head in tied:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
        embedding.weight = head.weight


def placed_like(hidden_states: Tensor, tensor: Tensor) -> Tensor:
    """``tensor``, alike on all processes, as a DTensor when ``hidden_states`` are one: code around the head expects
    of its output what it gave as input."""
    if not isinstance(hidden_states, DTensor):
        return tensor
    mesh = hidden_states.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _described(weight: Tensor) -> str:
    return f"placed {weight.placements}" if isinstance(weight, DTensor) else f"whole ({tuple(weight.shape)})"


def tensor_parallel_axis(weight: Tensor, *, data_parallel_axes: int) -> tuple[str | None, int]:
    """Placement of ``weight`` at rest over the mesh axes behind the data-parallel ones, and their number of processes;
    ``(None, 1)`` when there are none."""
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim == data_parallel_axes:
        return None, 1
    placements = weight.placements[data_parallel_axes:]
    return " ".join(map(str, placements)), math.prod(weight.device_mesh.shape[data_parallel_axes:])
