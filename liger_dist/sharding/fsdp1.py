"""FSDP1 (``FullyShardedDataParallel``): strategy, sharding adapter, and its private names.

The hooks of the unit that holds lm_head unshard its flat parameter for the forward and again for the backward, and
reduce-scatter its gradient. Collectives of a step for that unit are those of FSDP1 (one or two all-gathers, one
reduce-scatter); the loss adds none, or one all-reduce of one value per process group with ``token_mean="global"``.

``summon_full_params`` is not used: around a loss with gradients it raises, or silently loses lm_head's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.model.peft import active_head
from liger_dist.model.structure import Structure, stored_parameter, weight_of

from . import encoders
from .base import DataParallel, Facts, FullWeight, Initializer, Storage
from .fsdp_options import FullySharded, shares_parameters
from .materialize import materialize
from .mesh import make_mesh
from .process_groups import compute_device


@dataclass(frozen=True, kw_only=True)
class FSDP1(FullySharded):
    """Shards a model by FSDP1: one unit per layer, one for an untied lm_head, and the root."""

    name: ClassVar[str] = "fsdp1"

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        super().check(config, world_size=world_size)
        if self.cpu_offload and dist.is_initialized() and compute_device().type == "cpu":
            raise LigerDistError(
                "cpu_offload is True but FSDP1 needs an accelerator for it; leave it out here, or use strategy='fsdp2'."
            )
        if self.frozen == "replicate" and config.token_mean == "global":
            raise LigerDistError(
                "token_mean is 'global' but frozen is 'replicate' under FSDP1, and no unit around lm_head has a "
                "process group for its loss; pass num_items_in_batch to the model, or use strategy='fsdp2'."
            )

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        super().check_model(outer, model, structure, unfused=unfused, on_meta=on_meta)
        if any(isinstance(parameter, DTensor) for parameter in outer.parameters()):
            raise LigerDistError(
                f"this {type(model).__name__} has tensor-parallel parameters, which FSDP1 does not shard here; use "
                "strategy='fsdp2' with a mesh whose last axis is named 'tp'."
            )
        if self.frozen == "replicate" and structure.other_stacks:
            raise LigerDistError(
                f"frozen is 'replicate' but {type(model).__name__} has an encoder, and FSDP1 waits forever for ranks "
                "without images if only some of its layers are units; use strategy='fsdp2', or leave the option out."
            )
        all_names = _all_names(outer)
        for names in map(all_names.__getitem__, structure.all_layers):
            if len(names) > 1:
                raise LigerDistError(
                    f"{' and '.join(names)} are one layer, and FSDP1 wraps only the first of them; use "
                    "strategy='fsdp2', or a model that has each layer once."
                )
        full = self.full_parameters(outer)
        own_units = list(self._own_units(model, structure, head={}))
        apart = {id(parameter) for unit in own_units for parameter in unit.parameters()}
        units = [list(unit.named_parameters()) for unit in own_units]
        units.append([(name, p) for name, p in outer.named_parameters() if id(p) not in apart])
        for unit in units:
            by_dtype = {parameter.dtype: name for name, parameter in unit if parameter not in full}
            if len(by_dtype) > 1:
                given = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
                raise LigerDistError(
                    f"FSDP1 flattens the parameters of a layer into one, of one dtype, but {given}; convert the model "
                    "to one dtype, or use strategy='fsdp2'."
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
        device = compute_device()
        names = ("replicate", "shard")
        mesh = make_mesh(self.mesh, dist.get_world_size(), device_type=device.type, names=names)
        if initialize is not None:
            materialize(model, initialize, layers=structure.all_layers, device=device)
        full = self.full_parameters(outer)
        self.compile(structure, undo)
        freed, kept = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
        if mesh.ndim == 2:
            freed, kept = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
        # The head's backward follows its forward immediately: resharding would only all-gather it twice.
        units = self._own_units(model, structure, head={"sharding_strategy": kept})
        root = FullyShardedDataParallel(
            outer,
            auto_wrap_policy=CustomPolicy(lambda module: units.get(module, False)),
            device_mesh=mesh,
            sharding_strategy=freed if self.reshard_after_forward else kept,
            mixed_precision=MixedPrecision(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype),
            cpu_offload=CPUOffload(offload_params=self.cpu_offload),
            use_orig_params=True,
            ignored_states=full or None,
            device_id=device,
        )
        self.keep_full(outer, full)
        for unit in _units(root):
            unit.training = unit.module.training
        encoders.install(model, structure, mesh=mesh, root=root, undo=undo, flat_parameters=flat_parameters)
        return root

    def _own_units(
        self, model: nn.Module, structure: Structure, *, head: dict[str, Any]
    ) -> dict[nn.Module, bool | dict[str, Any]]:
        """Returns the modules that become units inside the root, with their options; ``head`` holds lm_head's."""
        options: dict[nn.Module, bool | dict[str, Any]] = dict.fromkeys(structure.all_layers, True)
        options |= dict.fromkeys(_head_unit(model, structure), head)
        return {unit: given for unit, given in options.items() if self.has_own_group(unit)}


def _head_unit(model: nn.Module, structure: Structure) -> list[nn.Module]:
    """Returns lm_head, unless it has several names, shares a parameter with another module, or is called several times:
    the root then has it."""
    head = active_head(model.get_submodule(structure.head_name))
    is_shared = structure.tied or shares_parameters(model, [head]) or len(_all_names(model)[head]) > 1
    return [] if is_shared or structure.repeats_head else [head]


def _all_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


class FSDP1Adapter(FullWeight):
    """FSDP1's hooks unshard the weight for lm_head's forward; the loss runs inside it on the unsharded view."""

    name: ClassVar[str] = "fsdp1"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        weight = stored_parameter(head)
        if not is_stored_by_fsdp1(weight):
            return None
        unit = _innermost(head, model)
        is_apart = unit is not None
        if tied_to:
            is_apart = any(_innermost(module, model) is not unit for module in tied_to)
        return Storage.of(self, head, weight, "FSDP1 shards the weight", apart_from_embedding=is_apart)

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.tied and facts.storage.apart_from_embedding:
            return [
                "lm_head is tied to the embedding but wrapped in an FSDP1 unit without it, where FSDP1 loses one of "
                "the two gradients; leave lm_head out of the wrapping policy, so that both stay in one unit"
            ]
        return []

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        unit = next(iter(_units(model)), None)
        if unit is None:
            raise LigerDistError(
                "token_mean='global' needs FSDP1's process group, and no module inside the model is an FSDP1 unit; "
                "wrap the decoder layers as units, or pass num_items_in_batch to the model."
            )
        between_nodes = getattr(unit, "_inter_node_pg", None)
        groups = tuple(group for group in (unit.process_group, between_nodes) if group is not None)
        factor = unit._gradient_predivide_factor * unit._gradient_postdivide_factor
        return DataParallel(groups=groups, divide_factor=float(factor))

    def check_unsharded(self, weight: Tensor) -> None:
        if weight.dim() != 2:
            raise LigerDistError(
                f"lm_head.weight has shape {tuple(weight.shape)} in its own forward: FSDP1 has not unsharded it, "
                "because the model was called without its FSDP1 wrapper. Call the wrapper that "
                "FullyShardedDataParallel (or liger_dist.wrap) returned."
            )


def is_outside_forward(model: nn.Module, embedding: nn.Module | None) -> bool:
    """True if the root unit around ``model`` holds the weight of ``embedding`` and has not unsharded it: the model was
    called without its wrapper."""
    weight = None if embedding is None else weight_of(embedding)
    if embedding is None or weight is None or not is_stored_by_fsdp1(weight):
        return False
    if any(embedding in unit.modules() for unit in _units(model)):
        return False  # The embedding's unit unshards it later.
    return weight.dim() != 2 or weight.untyped_storage().size() == 0


def is_stored_by_fsdp1(weight: Tensor) -> bool:
    """True for a module's ``weight`` that is a flattened parameter of FSDP1, or a view of its flat parameter."""
    return bool(getattr(weight, "_fsdp_flattened", False) or getattr(weight._base, "_is_flat_param", False))


def is_inside_fsdp1(model: nn.Module) -> bool:
    """True if FSDP1 stores parameters of ``model``."""
    return bool(_units(model)) or any(getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters())


def is_flat(name: str) -> bool:
    """True for the name of a flat parameter."""
    return "_flat_param" in name


def flat_parameters(unit: FullyShardedDataParallel) -> list[Tensor]:
    """Returns the flat parameter of a unit, unsharded inside its forward; none for a unit without parameters."""
    return [] if unit._handle is None else [unit._handle.flat_param]


def _units(model: nn.Module) -> Sequence[FullyShardedDataParallel]:
    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def _innermost(module: nn.Module, model: nn.Module) -> FullyShardedDataParallel | None:
    """Returns the smallest unit inside ``model`` that holds ``module``; None if only the root holds it."""
    holding = [unit for unit in _units(model) if module in unit.modules()]
    return min(holding, key=lambda unit: sum(1 for _ in unit.modules()), default=None)
