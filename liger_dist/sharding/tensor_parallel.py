"""Tensor parallelism: the strategy "tp", and the sharding adapter for an lm_head whose rows are sharded over a
tensor-parallel mesh axis, by transformers' plan, by torch's ``parallelize_module``, or by :func:`parallelize_heads`.

Collectives of the loss, on the tensor-parallel group: one all-gather of twelve values that checks that all ranks have
the same tokens (blocking the first time), one all-gather of softmax statistics per chunk of tokens, one
all-reduce of the hidden states' gradient. Neither logits nor weight are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.losses.execution import Execution
from liger_dist.losses.outputs import LossOutput
from liger_dist.losses.spec import LossSpec
from liger_dist.losses.tensor_parallel import RowShard, check_same_tokens, vocab_parallel_linear_cross_entropy
from liger_dist.model.peft import heads_at
from liger_dist.model.structure import Structure, read_output_last, stored_parameter, weight_of

from .base import DataParallel, Facts, FullHead, Head, Initializer, Storage
from .fsdp_options import refuse_overlaps, refuse_sharded
from .gradient_checks import check_hooks
from .materialize import materialize
from .mesh import TENSOR_PARALLEL, Mesh, check_mesh, make_mesh, require_process_group
from .process_groups import compute_device


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Shards the rows of lm_head over all ranks, which have the same tokens; the layers stay full, or keep the plan
    that the model was loaded with. Broadcasts the values of rank 0."""

    name: ClassVar[str] = "tp"
    has_collectives: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = True

    mesh: Mesh | None = None
    """A DeviceMesh of one axis or its shape; None: all ranks."""

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        check_mesh(self.mesh, require_process_group(self.name, world_size), strategy=self.name)

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        refuse_sharded(outer)
        refuse_overlaps(outer, self.name)
        head = structure.head_name
        check_hooks(((f"{head}.{name}", p) for name, p in structure.head.named_parameters()), self.name)

    def shard(
        self,
        outer: nn.Module,
        model: nn.Module,
        structure: Structure,
        *,
        initialize: Initializer | None,
        undo: ExitStack,
    ) -> nn.Module:
        device = compute_device()
        mesh = make_mesh(self.mesh, dist.get_world_size(), device_type=device.type, names=(TENSOR_PARALLEL,))
        parallelize_heads(outer, model, structure, mesh=mesh, has_storage=initialize is None)
        if initialize is not None:
            materialize(model, initialize, layers=structure.all_layers, device=device)
        return outer


class TensorParallelAdapter:
    """Adapter in which every rank of the tensor-parallel group scores all tokens against its row shard of lm_head."""

    name: ClassVar[str] = "tensor-parallel"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        weight = stored_parameter(head)
        if not isinstance(weight, DTensor):
            return None
        clause = "the weight is a DTensor that no framework unshards"
        return Storage.of(self, head, weight, clause, apart_from_embedding=not tied_to)

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        reasons = row_shard_reasons(facts)
        if facts.token_mean == "global" and facts.world_size > facts.storage.tensor_parallel_size:
            reasons.append(
                "token_mean='global' needs to know what averages the gradients of the replicas; pass "
                "num_items_in_batch to the model"
            )
        return reasons

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        # All ranks have the same tokens, and gradients are not averaged.
        return DataParallel(groups=(), divide_factor=1.0)

    def full_head(self, hidden_states: Tensor, head: Head) -> FullHead:
        weight = _row_shard_of(head)
        mesh = weight.device_mesh
        if isinstance(hidden_states, DTensor):
            hidden_states = hidden_states.redistribute(mesh, [Replicate()]).to_local()
        no_labels = torch.zeros(hidden_states.shape[:-1], dtype=torch.int64, device=hidden_states.device)
        check_same_tokens(hidden_states, no_labels, mesh.get_group(), spec=LossSpec(), waits=False)
        bias = head.bias.full_tensor() if isinstance(head.bias, DTensor) else head.bias
        return FullHead(hidden_states, weight.full_tensor(), bias)

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, spec: LossSpec, execution: Execution
    ) -> LossOutput:
        weight = _row_shard_of(head)
        mesh = weight.device_mesh
        group = mesh.get_group()
        is_distributed = isinstance(hidden_states, DTensor)
        if isinstance(hidden_states, DTensor):
            # All-gathers sequence-parallel input; DTensor reduce-scatters its gradient in the backward.
            hidden_states = hidden_states.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        check_same_tokens(
            hidden_states,
            labels,
            group,
            spec=spec,
            waits=execution.is_first,
            compares_hidden=execution.has_real_hidden,
        )
        return vocab_parallel_linear_cross_entropy(
            hidden_states,
            weight.to_local(),
            head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias,
            labels,
            shard=RowShard(group=group, start=first_row(weight), vocab_size=weight.shape[0]),
            spec=spec,
            execution=execution,
            sums_gradient=not is_distributed,
        )


def _row_shard_of(head: Head) -> DTensor:
    """Returns the weight inside the forward of ``head``.

    Raises:
        LigerDistError: it is not sharded over one tensor-parallel axis.
    """
    weight = head.weight
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1:
        stored = f"placed {weight.placements}" if isinstance(weight, DTensor) else f"full ({tuple(weight.shape)})"
        raise LigerDistError(
            f"lm_head.weight is {stored} in its own forward; expected the row shard of one tensor-parallel axis, "
            "so FSDP2's hooks have not run. Call the wrapped model itself rather than its parts."
        )
    return weight


def row_shard_reasons(facts: Facts) -> list[str]:
    """Lists the reasons why the rows of a tensor-parallel weight cannot be scored on each rank."""
    reasons = []
    if facts.storage.tensor_parallel != "S(0)":
        reasons.append(
            f"the weight is placed {facts.storage.tensor_parallel} over the tensor-parallel mesh; expected its rows on "
            "one axis, S(0), as ColwiseParallel or the plan 'colwise_gather_output' put them"
        )
    if facts.has_lora:
        reasons.append("LoRA on a tensor-parallel lm_head is not supported; leave the head out of its target_modules")
    return reasons


def first_row(weight: DTensor) -> int:
    """Returns the index of this rank's first row on the last mesh axis: DTensor gives every rank ``ceil(V / G)`` rows,
    and the last ones fewer."""
    mesh = weight.device_mesh
    rows = -(-weight.shape[0] // mesh.shape[-1])
    return min(mesh.get_local_rank(mesh.ndim - 1) * rows, weight.shape[0])


def parallelize_heads(
    outer: nn.Module, model: nn.Module, structure: Structure, *, mesh: DeviceMesh, has_storage: bool
) -> None:
    """Shards the rows of lm_head, and of embeddings tied to it, over the 1-D ``mesh``; all other parameters of
    ``outer`` stay full. Broadcasts the values of the mesh's first rank. Skips an lm_head that is sharded.
    """
    if isinstance(weight_of(structure.head), DTensor):
        return
    if has_storage:
        outer.to(compute_device())
    group = mesh.get_group()
    for tensor in (*outer.parameters(), *outer.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
    heads = [head for head in linear_heads(model, structure) if weight_of(head) is not None]
    holds = {head.weight: head for head in heads}
    tied = [(embedding, holds[embedding.weight]) for embedding in structure.tied_to]  # type: ignore[index]
    for head in heads:
        # A call for logits all-gathers them.
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    for embedding, head in tied:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
        read_output_last(embedding)
        embedding.weight = head.weight


def linear_heads(model: nn.Module, structure: Structure) -> Sequence[nn.Linear]:
    """Returns every ``nn.Linear`` that may be called as lm_head."""
    return [head for head in heads_at(model.get_submodule(structure.head_name)) if isinstance(head, nn.Linear)]


def placed_like(hidden_states: Tensor, tensor: Tensor) -> Tensor:
    """Converts ``tensor``, equal on all ranks, to a DTensor if ``hidden_states`` are one: hooks on lm_head expect
    outputs of the kind of its inputs."""
    if not isinstance(hidden_states, DTensor):
        return tensor
    mesh = hidden_states.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
