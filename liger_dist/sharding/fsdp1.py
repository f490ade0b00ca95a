"""A weight that FSDP1 keeps in the flat parameter of a unit.

The unit's own hooks gather it for the head's forward and again for its backward, and reduce its gradient. Collectives a
step, for the unit that holds the head: those of FSDP1 (one or two all-gathers, one reduce-scatter). The loss adds none,
or one all-reduce of one number for each process group with ``token_mean="global"``.

``summon_full_params`` is not used: around a loss that trains it raises, or loses the head's gradient without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy

from .base import DataParallel, Facts, Head


class FSDP1:
    """FSDP1's hooks summon the full weight for the head's forward; the loss runs inside it on a plain view."""

    name: ClassVar[str] = "fsdp1"

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        if facts.engine != "fsdp1":
            return [facts.storage]
        if facts.tied and facts.apart_from_embedding:
            return [
                "the head is tied to the embedding but wrapped in an FSDP1 unit of its own, where FSDP1 loses one of "
                "the two gradients; leave the head out of the wrapping policy, so that both stay in one unit"
            ]
        return []

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        unit = next((m for m in model.modules() if isinstance(m, FullyShardedDataParallel)), None)
        if unit is None:
            raise LigerDistError(
                "token_mean='global' needs FSDP1's process group, and no module inside the model is an FSDP1 unit; "
                "wrap the decoder layers as units, or pass num_items_in_batch to the model."
            )
        between_nodes = getattr(unit, "_inter_node_pg", None)
        groups = tuple(group for group in (unit.process_group, between_nodes) if group is not None)
        factor = unit._gradient_predivide_factor * unit._gradient_postdivide_factor
        return DataParallel(groups=groups, divide_factor=float(factor))

    def linear_cross_entropy(
        self, hidden_states: Tensor, head: Head, labels: Tensor, *, loss: LossArguments, execution: Execution
    ) -> LossOutput:
        if head.weight.dim() != 2:
            raise LigerDistError(
                f"the output embedding's weight has shape {tuple(head.weight.shape)} in its own forward: FSDP1 has not "
                "gathered it, because the model was called without its FSDP1 wrapper. Call the wrapper that "
                "FullyShardedDataParallel (or liger_dist.wrap) returned."
            )
        return fused_linear_cross_entropy(hidden_states, head.weight, head.bias, labels, loss=loss, execution=execution)


def shard(
    model: nn.Module,
    layers: Sequence[nn.Module],
    own_unit: nn.Module | None,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    config: WrapConfig,
) -> FullyShardedDataParallel:
    """Wraps ``model`` in FSDP1: a unit for each of ``layers`` (of the decoder and of encoders), one for ``own_unit``
    (an untied head) if given, and the root.

    A mesh of two axes is (replicate, shard). Masters keep their dtype; with ``config.param_dtype`` the units compute
    in that one.
    """
    is_hybrid = mesh.ndim == 2
    freed = ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
    kept = ShardingStrategy._HYBRID_SHARD_ZERO2 if is_hybrid else ShardingStrategy.SHARD_GRAD_OP
    strategy = freed if config.reshard_after_forward else kept
    units: dict[nn.Module, bool | dict[str, Any]] = dict.fromkeys(layers, True)
    if own_unit is not None:
        # Its backward follows its forward at once: freeing it in between would only gather it twice.
        units[own_unit] = {"sharding_strategy": kept}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: units.get(module, False)),
        device_mesh=mesh,
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(param_dtype=config.param_dtype, reduce_dtype=config.reduce_dtype),
        cpu_offload=CPUOffload(offload_params=config.cpu_offload),
        use_orig_params=True,
        device_id=device,
    )


def is_outside_forward(model: nn.Module, embedding: nn.Module | None) -> bool:
    """True if the root unit around ``model`` holds the weight of ``embedding`` and has not gathered it: the model was
    called without its wrapper."""
    weight = getattr(embedding, "weight", None)
    if embedding is None or not isinstance(weight, Tensor) or not is_stored_by_fsdp1(weight):
        return False
    if any(embedding in unit.modules() for unit in _units(model)):
        return False  # Its own unit gathers it later.
    return weight.dim() != 2 or weight.untyped_storage().size() == 0


def _units(model: nn.Module) -> list[FullyShardedDataParallel]:
    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def is_stored_by_fsdp1(weight: object) -> bool:
    """Whether a module's ``weight`` is FSDP1's: a flattened parameter at rest, a plain view inside a forward."""
    return bool(getattr(weight, "_fsdp_flattened", False)) or not isinstance(weight, nn.Parameter)


def is_inside_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 keeps the parameters of ``model``."""
    return bool(_units(model)) or any(getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters())


def has_own_unit(head: nn.Module, model: nn.Module, tied_to: Sequence[nn.Module]) -> bool:
    """True if the FSDP1 unit inside ``model`` that shards ``head`` shards none of ``tied_to`` (an untied head: if there
    is one)."""
    unit = _innermost(head, model)
    if not tied_to:
        return unit is not None
    return any(_innermost(module, model) is not unit for module in tied_to)


def _innermost(module: nn.Module, model: nn.Module) -> FullyShardedDataParallel | None:
    """The smallest unit inside ``model`` that holds ``module``; None for one that only the root holds."""
    holding = [unit for unit in _units(model) if module in unit.modules()]
    return min(holding, key=lambda unit: sum(1 for _ in unit.modules()), default=None)
