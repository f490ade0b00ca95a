"""A weight sharded by FSDP2 and gathered for the head's forward.

Collectives a step, for the group that holds the head: one all-gather before the forward, one reduce-scatter after the
backward (and one all-reduce under HSDP), all of them FSDP's own; one more all-gather in the backward when the group is
resharded after its forward. The loss adds none, or one all-reduce of one number for ``token_mean="global"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy

from .base import DataParallel, Facts, Head

TIED_APART = (
    "the head is tied to the embedding but FSDP2 stores them apart, so each gets one of the two gradients; put both "
    "into one group with fully_shard([embedding, norm, head]), or leave both to the root"
)
TIED_AND_PADDED = (
    "the head is tied to the embedding, the two are in different FSDP2 groups, and the ranks do not divide the rows: "
    "each group keeps a padded copy of the shard, and the optimizer updates only one of the copies; pad the vocabulary "
    "to a multiple of the ranks that shard it (model.resize_token_embeddings(pad_to_multiple_of=…) before saving the "
    "checkpoint), or put both into one group with fully_shard([embedding, norm, head])"
)


class FSDP2Gathered:
    """FSDP2's hooks gather the weight for the head's forward; the loss runs inside it on a plain weight."""

    name: ClassVar[str] = "fsdp2-gathered"

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.engine != "fsdp2":
            return [facts.storage]
        if facts.tensor_parallel is not None:
            return ["the weight stays split over the tensor-parallel axis when FSDP2 has gathered it"]
        return tied_weight_reasons(facts)

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        found = find_param(head, model)
        if found is None:
            raise LigerDistError(
                "the output embedding is not part of an FSDP2 group; shard the model before its forward."
            )
        group, _ = found
        mesh: DeviceMesh = group.mesh_info.mesh
        return DataParallel(
            groups=tuple(mesh.get_group(axis) for axis in range(mesh.ndim)),
            divide_factor=_divide_factor(group),
        )

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, loss: LossArguments, execution: Execution
    ) -> LossOutput:
        if isinstance(head.weight, DTensor):
            raise LigerDistError(
                f"the output embedding's weight is still sharded ({head.weight.placements}) in its own forward, so "
                "FSDP2's hooks have not run. Call the wrapped model itself rather than its parts."
            )
        return fused_linear_cross_entropy(hidden_states, head.weight, head.bias, labels, loss=loss, execution=execution)


def tied_weight_reasons(facts: Facts) -> list[str]:
    """Why FSDP2 does not keep the head and the embedding that it is tied to one parameter."""
    if facts.tied and facts.apart_from_embedding:
        return [TIED_APART]
    return [TIED_AND_PADDED] if facts.padded_in_two_groups and facts.trains else []


@dataclass(frozen=True, kw_only=True)
class ShardingUnits:
    """What becomes a group of its own; everything else falls to the root."""

    layers: Sequence[nn.Module]
    other_stacks: Sequence[Sequence[nn.Module]] = ()
    """the layers of every encoder outside the decoder (vision, audio)"""
    embedding: nn.Module | None
    """the input embedding, when nobody else uses its weight"""
    tail: Sequence[nn.Module]
    """``[final norm, head]``; empty when the head is tied to the embedding and stays in the root"""


def shard(
    model: nn.Module,
    units: ShardingUnits,
    *,
    mesh: DeviceMesh,
    config: WrapConfig,
    left_alone: frozenset[nn.Parameter] = frozenset(),
) -> None:
    """Shards ``model`` in place over ``mesh`` (1-D: FSDP; 2-D: HSDP, replicate x shard).

    Parameters that are ``left_alone`` stay as they are. Masters keep their dtype; with ``config.param_dtype`` the
    layers compute in that one. ``output_dtype`` is left alone, because FSDP2 would round the loss with it.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=config.param_dtype, reduce_dtype=config.reduce_dtype, output_dtype=None
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
        ),
    }
    for layer in (*chain(*units.other_stacks), *units.layers, *filter(None, [units.embedding])):
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    if units.tail:
        # Its backward follows its forward at once: freeing it in between would only gather it twice.
        fully_shard(list(units.tail), reshard_after_forward=False, **options)
    fully_shard(model, ignored_params=set(left_alone) or None, **options)


def divide_factor(model: nn.Module) -> float:
    """What FSDP2 divides summed gradients by, read from the first of the model's groups."""
    return _divide_factor(next(_param_groups(model)))


def _divide_factor(group: Any) -> float:
    return float(group.gradient_divide_factor or group.mesh_info.mesh.size())


def reduces_over_replicas(model: nn.Module) -> bool:
    """True if a backward that runs now reduces gradients over all ranks: neither ``set_requires_gradient_sync(False)``
    nor ``set_requires_all_reduce(False)`` is on."""
    group = next(_param_groups(model))
    return bool(group.reduce_grads and group.all_reduce_grads)


def unfinished_reduction(model: nn.Module) -> str | None:
    """What FSDP2 has put off, as a clause: gradients that it has not reduced yet, or would not reduce."""
    for group in _param_groups(model):
        if any(param.unsharded_accumulated_grad is not None for param in group.fsdp_params):
            return "FSDP2 holds gradients that it has not reduced yet"
        if not group.reduce_grads:
            return "FSDP2's gradient reduction is turned off (set_requires_gradient_sync(False))"
    return None


def find_param(head: nn.Module, model: nn.Module) -> tuple[Any, Any] | None:
    """FSDP2's own records of ``head.weight``, its parameter group and itself; None when FSDP2 does not store it."""
    for group in _param_groups(model):
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            owners = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
            if any(module is head and name == "weight" for module, name in owners):
                return group, fsdp_param
    return None


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """How FSDP2 stores ``head.weight``."""

    weight: Tensor
    """the sharded parameter"""
    data_parallel_axes: int
    """number of mesh axes of its group"""
    is_apart: bool
    """True where no other module holds the same sharded parameter"""
    padded_in_two_groups: bool
    """True where another group holds the same parameter and the ranks do not divide its rows"""


def stored_weight(head: nn.Module, model: nn.Module) -> StoredWeight | None:
    """Reads FSDP2's records of ``head.weight``; None when FSDP2 does not store it. No collectives.

    [Note: one parameter in two FSDP2 groups] transformers shards before it ties, so the embedding and the head end in
    different groups, and tying gives both modules one sharded parameter. Each group then gathers it for its own module
    and adds its gradient to the same ``.grad``, which is exact. But a group all-gathers from the local tensor that it
    saw in its first forward, and a shard with fewer rows than the others is replaced there by a padded copy, once in
    each group: the parameter is a view of the last copy, and the first is never updated.
    """
    found = find_param(head, model)
    if found is None:
        return None
    group, fsdp_param = found
    weight = _sharded_parameter(group, fsdp_param)
    records = [p for g in _param_groups(model) for p in g.fsdp_params if _sharded_parameter(g, p) is weight]
    return StoredWeight(
        weight=weight,
        data_parallel_axes=group.mesh_info.mesh.ndim,
        is_apart=len(records) == 1 and not fsdp_param._module_info.shared_modules,
        padded_in_two_groups=len(records) > 1 and weight.shape[0] % _shards(weight) != 0,
    )


def _sharded_parameter(group: Any, fsdp_param: Any) -> Any:
    """FSDP2 reads the parameter from the module in its first forward, and keeps it from then on."""
    info = fsdp_param._module_info
    return fsdp_param.sharded_param if group._reset_sharded_params else getattr(info.module, info.param_name)


def _shards(weight: DTensor) -> int:
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def _param_groups(model: nn.Module) -> Iterator[Any]:
    """Each group once, also where ``fully_shard`` was given a list of modules, which share its state."""
    states = dict.fromkeys(m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    for state in states:
        # torch 2.13 keeps a list, earlier releases one group.
        groups = getattr(state, "_fsdp_param_groups", None)
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])
