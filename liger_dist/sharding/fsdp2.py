"""A weight sharded by FSDP2 and gathered for the head's forward.

Collectives a step, for the group that holds the head: one all-gather before the forward, one reduce-scatter after the
backward (and one all-reduce under HSDP), all of them FSDP's own; one more all-gather in the backward when the group is
resharded after its forward. The loss adds none, or one all-reduce of one number for ``token_mean="global"``.
"""

from __future__ import annotations

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


class FSDP2Gathered:
    """FSDP2's hooks gather the weight for the head's forward; the loss runs inside it on a plain weight."""

    name: ClassVar[str] = "fsdp2-gathered"

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.engine != "fsdp2":
            return [facts.storage]
        if facts.tensor_parallel is not None:
            return ["the weight stays split over the tensor-parallel axis when FSDP2 has gathered it"]
        if facts.tied and facts.apart_from_embedding:
            return [TIED_APART]
        return []

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


def _param_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # torch 2.13 keeps a list, earlier releases one group.
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from groups if groups is not None else filter(None, [state._fsdp_param_group])
