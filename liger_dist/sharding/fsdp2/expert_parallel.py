"""Experts on several ranks under FSDP2: each rank of a group has some of a layer's experts, and tokens are sent to them
(:mod:`liger_dist.fused_layers.expert_dispatch`), where FSDP2 alone sends the experts to the tokens.

The ranks that shard a parameter are divided into groups of ``expert_parallel`` ranks that follow each other. A stack of
experts is sharded by expert inside a group, and over the groups by FSDP2, as DTensors of a mesh of both, so that
distributed checkpoints have the full stack and load under any other layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from liger_dist.errors import LigerDistError
from liger_dist.model.four_bit_experts import is_experts
from liger_dist.model.quantized import four_bit_stacks
from liger_dist.model.structure import Structure, full_shape
from liger_dist.model.torch_modes import untraced
from liger_dist.sharding.mesh import Mesh, num_shards, ranks_of_parameters

from .forward import groups_of

RANKS_OF_EXPERTS = "_liger_dist_ranks_of_experts"
"""on a module of experts: :class:`RanksOfExperts`; None while it has all of them"""


class RanksOfExperts(NamedTuple):
    """Which experts of a module this rank has, and the ranks that have the others."""

    group: dist.ProcessGroup
    num_experts: int
    """of each rank; those of rank r of the group begin at ``r * num_experts``"""

    @property
    def here(self) -> slice:
        """Experts of this rank."""
        first = self.group.rank() * self.num_experts
        return slice(first, first + self.num_experts)


def ranks_of_experts(module: nn.Module) -> RanksOfExperts | None:
    """Returns where the experts of a module are; None if this rank has all of them."""
    return vars(module).get(RANKS_OF_EXPERTS)


def experts_of(structure: Structure) -> Iterator[nn.Module]:
    """Yields the modules of experts of the decoder's layers, which all ranks call in each forward, once each, in an
    order that all ranks share."""
    layers = (*structure.layers, *structure.prediction_layers)
    yield from dict.fromkeys(module for layer in layers for module in layer.modules() if is_experts(module))


def stacks_of(module: nn.Module) -> list[str]:
    """Returns the names of a module's parameters, whose first dimension is that of the experts."""
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def num_experts(module: nn.Module) -> int:
    """Counts the experts of a module, those of other ranks included."""
    return full_shape(module.get_parameter(stacks_of(module)[0]))[0]


def describe_experts(structure: Structure) -> str | None:
    """Says how many experts this rank has; None if it has all of them."""
    apart = [(module, ranks) for module in experts_of(structure) if (ranks := ranks_of_experts(module)) is not None]
    if not apart:
        return None
    numbers = sorted({(ranks.num_experts, num_experts(module)) for module, ranks in apart})
    here = " or ".join(f"{own} of {total}" for own, total in numbers)
    return f"{here} of a layer on each rank; tokens are sent to {apart[0][1].group.size()} ranks"


def check_expert_parallel(size: object) -> None:
    """
    Raises:
        LigerDistError: it is not a number of ranks.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise LigerDistError(f"expert_parallel is {size!r}; expected a number of ranks from 1 on.")


def check_divides(size: int, mesh: Mesh | None, world_size: int) -> None:
    """
    Raises:
        LigerDistError: the groups do not divide the ranks that shard a parameter.
    """
    shards = num_shards(mesh, world_size)
    if shards % size:
        raise LigerDistError(
            f"expert_parallel is {size} but {shards} ranks shard each parameter, which groups of {size} do not divide; "
            "choose one of its divisors, or start other ranks."
        )


def check_experts(model: nn.Module, structure: Structure, size: int) -> None:
    """Refuses a model that ``FSDP2(expert_parallel=size)`` cannot shard. No collectives.

    Args:
        model: may be on the meta device.
        structure: of the model.
        size: number of ranks.

    Raises:
        LigerDistError: the model has no experts that can be on several ranks, or not as many as the ranks divide.
    """
    found = list(experts_of(structure))
    if not found:
        raise LigerDistError(
            f"expert_parallel is {size} but no decoder layer of this {type(model).__name__} has experts in one "
            "parameter behind transformers' interface for them (use_experts_implementation); leave it out."
        )
    for module in found:
        if next(four_bit_stacks(module), None) is not None:
            raise LigerDistError(
                f"expert_parallel is {size} but the experts of a {type(module).__name__} are of 4 bits, whose blocks "
                "belong to no expert; leave it out (FSDP2 shards their bytes)."
            )
        count = num_experts(module)
        for name, parameter in module.named_parameters(recurse=False):
            if full_shape(parameter)[:1] != (count,):
                raise LigerDistError(
                    f"expert_parallel is {size} but {name} of a {type(module).__name__} has the shape "
                    f"{full_shape(parameter)}, expected one part for each of {count} experts; leave it out."
                )
        if count % size:
            raise LigerDistError(
                f"expert_parallel is {size} but a {type(module).__name__} has {count} experts; choose a divisor of "
                f"{count}."
            )


class ExpertMesh(NamedTuple):
    """Meshes of stacks of experts."""

    data: DeviceMesh
    """``(replicate, shard)`` or ``(shard,)``, over the groups; FSDP2 shards and reduces over it"""
    experts: DeviceMesh
    """the ranks of a group"""

    @classmethod
    def of(cls, mesh: DeviceMesh, size: int) -> ExpertMesh:
        """Divides the axis that shards parameters into groups of ``size`` ranks. Collectives: new process groups.

        Args:
            mesh: of all ranks, with the axes of :class:`.FSDP2`.
        """
        ranks, names = ranks_of_parameters(mesh)
        axis = names.index("shard")
        names = (*names[: axis + 1], "experts", *names[axis + 1 :])
        full = DeviceMesh(mesh.device_type, ranks.unflatten(axis, (-1, size)), mesh_dim_names=names)
        return cls(full[names[: axis + 1]], full["experts"])


@torch.no_grad()
def keep_own_experts(module: nn.Module, mesh: ExpertMesh, undo: ExitStack) -> None:
    """Replaces the full stacks of a module by this rank's experts, for good, and says so on the module."""
    ranks = RanksOfExperts(mesh.experts.get_group(), num_experts(module) // mesh.experts.size())
    for name in stacks_of(module):
        full: Any = module._parameters[name]
        # A copy, so that the full stack is freed.
        own = full.data[ranks.here].clone()
        stack = DTensor.from_local(
            own, mesh.experts, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )
        module._parameters[name] = nn.Parameter(stack, requires_grad=full.requires_grad)
    vars(module)[RANKS_OF_EXPERTS] = ranks
    undo.callback(vars(module).pop, RANKS_OF_EXPERTS, None)


def average_over_all_ranks(module: Any, size: int) -> None:
    """Averages gradients over all ranks: a rank's experts have the tokens of the ranks of its group, and FSDP2 divides
    by the number of groups. A factor of ``set_gradient_divide_factor`` replaces the average.

    [Note: A divide factor on one rank] Where a group has one rank, torch divides by the factor when it copies the
    gradient, and once more afterwards where it does not leave the division to the collective: with forced sums, and in
    other dtypes than fp32 and bf16.
    """
    (group,) = groups_of(module._get_fsdp_state())

    def divide(gradient: Tensor) -> None:
        factor = group.gradient_divide_factor
        if factor is None:
            gradient.div_(size)
        elif group.mesh_info.shard_mesh_size == 1 and _divides_twice(group, gradient.dtype):
            gradient.mul_(factor)

    module.set_all_reduce_hook(divide)


def reduce_each_pass(module: nn.Module) -> None:
    """Reduces the gradients of each pass through a module of experts, after ``fully_shard``.

    [Note: Groups inside a reentrant checkpoint] Each pass through a layer that is checkpointed with
    ``use_reentrant=True`` has a backward inside the backward, and FSDP2 leaves a group inside of the layer in the state
    of that backward until all of them have ended. In the forward that the next pass recomputes it takes the group for
    one whose first forward has asked for the reduction, which a forward without gradients has not: the gradients of all
    passes but the first would be left until the next step, and be in its gradients (torch 2.13).
    """
    module.register_forward_pre_hook(_ask_for_reduction, with_kwargs=True)


@untraced
def _ask_for_reduction(module: Any, args: Any, kwargs: Any) -> Any:
    state = module._get_fsdp_state()
    if state._training_state.name == "PRE_BACKWARD" and torch.is_grad_enabled():
        (group,) = groups_of(state)
        return group._register_post_backward_hook(args, kwargs)
    return None


def _divides_twice(group: Any, dtype: torch.dtype) -> bool:
    return bool(group.force_sum_reduction_for_comms) or dtype not in (torch.float32, torch.bfloat16)
