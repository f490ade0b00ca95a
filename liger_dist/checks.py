"""What :func:`liger_dist.wrap` refuses before it changes anything. No collectives."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .config import SHARDING_STRATEGIES, STRATEGIES, WrapConfig, check_sharding_options
from .errors import LigerDistError
from .head_choice import check_head_of, check_head_options
from .losses.arguments import as_output_names
from .patching.call import LOGITS
from .patching.structure import Structure
from .sharding.devices import compute_device
from .sharding.mesh import Mesh, check_mesh


def check_model(
    model: nn.Module, structure: Structure, strategy: str, config: WrapConfig, *, without_storage: bool
) -> None:
    if config.activation_checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
        raise LigerDistError(
            f"activation_checkpointing is True but {type(model).__name__} does not support it "
            "(supports_gradient_checkpointing); leave it out, or checkpoint the layers yourself before wrapping."
        )
    check_head_of(model, structure, config)
    if without_storage and strategy == "auto":
        raise LigerDistError(
            "the model is on the meta device and strategy='auto' does not give it storage; name a strategy that does, "
            "or materialise it first."
        )
    is_sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    if strategy in ("fsdp1", "fsdp2", "tp") and is_sharded:
        raise LigerDistError(
            f"this {type(model).__name__} is sharded by FSDP already; wrap it with strategy='auto', or wrap a model "
            "that is not sharded yet."
        )
    if strategy in SHARDING_STRATEGIES and not structure.layers:
        raise LigerDistError(
            f"{type(model).__name__} keeps no list of decoder layers that could be sharded one by one; shard it "
            "yourself and wrap with strategy='auto'."
        )
    if strategy == "fsdp1" and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise LigerDistError(
            f"this {type(model).__name__} has tensor-parallel parameters, which FSDP1 does not shard here; use "
            "strategy='fsdp2' with a mesh whose last axis is named 'tp'."
        )
    if strategy in SHARDING_STRATEGIES:
        _check_parameters(model, structure, strategy)
    if strategy == "ddp" and not any(parameter.requires_grad for parameter in model.parameters()):
        raise LigerDistError(
            f"no parameter of this {type(model).__name__} requires a gradient, so there is nothing for DDP to "
            "average; use strategy='auto' for evaluation."
        )


def _check_parameters(model: nn.Module, structure: Structure, strategy: str) -> None:
    """Refuses what FSDP1 and FSDP2 would refuse in the middle of sharding."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise LigerDistError(
                f"{name} has no dimension and {strategy!r} shards the first one of every parameter; make it a "
                "parameter of shape (1,), or a buffer."
            )
        if strategy == "fsdp2" and not parameter.is_contiguous():
            raise LigerDistError(
                f"{name} has the strides {parameter.stride()} for the shape {tuple(parameter.shape)}, and FSDP2 shards "
                "contiguous parameters only; make it contiguous (parameter.data = parameter.data.contiguous())."
            )
    if strategy == "fsdp1":
        _check_dtypes_of_units(model, structure)


def _check_dtypes_of_units(model: nn.Module, structure: Structure) -> None:
    """FSDP1 flattens the parameters of a unit into one."""
    layers = (*structure.layers, *chain(*structure.other_stacks))
    own_units = [*layers, *([] if structure.tied else [structure.head])]
    apart = {id(parameter) for unit in own_units for parameter in unit.parameters()}
    units = [list(unit.named_parameters()) for unit in own_units]
    units.append([(name, p) for name, p in model.named_parameters() if id(p) not in apart])
    for unit in units:
        by_dtype = {parameter.dtype: name for name, parameter in unit}
        if len(by_dtype) > 1:
            given = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
            raise LigerDistError(
                f"FSDP1 flattens the parameters of a layer into one, of one dtype, but {given}; convert the model to "
                "one dtype, or use strategy='fsdp2'."
            )


@dataclass(frozen=True)
class RefusesPrepare:
    """Mark that Accelerate's ``prepare`` reads on a model that wrap has sharded. Refuses under settings with which
    Accelerate would put DistributedDataParallel or DeepSpeed around the shards."""

    strategy: str

    def __bool__(self) -> bool:
        state = sys.modules.get("accelerate.state")
        kinds = None if state is None else state.DistributedType
        kind = None if state is None else state.AcceleratorState._shared_state.get("distributed_type")
        if kinds is None or kind in (kinds.FSDP, kinds.NO):
            return False
        raise LigerDistError(
            f"accelerator.prepare was given a model that liger_dist.wrap has sharded by {self.strategy!r}; prepare the "
            "optimizer and the data loader alone, or wrap and prepare at once with "
            "liger_dist.integrations.accelerate.prepare(accelerator, model, ...) under Accelerate's own FSDP settings."
        )


def check_strategy(strategy: str, mesh: Mesh | None, config: WrapConfig) -> None:
    if strategy not in STRATEGIES:
        raise LigerDistError(f"strategy is {strategy!r}; expected one of {', '.join(map(repr, STRATEGIES))}.")
    if strategy in ("ddp", "fsdp1", "fsdp2", "tp") and not dist.is_initialized():
        raise LigerDistError(
            f"strategy={strategy!r} needs a process group and none is initialised; start the program with torchrun "
            "and call torch.distributed.init_process_group(), or use strategy='none'."
        )
    if strategy == "none" and dist.is_initialized() and dist.get_world_size() > 1:
        raise LigerDistError(
            f"strategy='none' is for one process but {dist.get_world_size()} are running, whose gradients would "
            "not be averaged; use 'ddp' or 'fsdp2', or 'auto' when another framework shards the model."
        )
    if strategy in (*SHARDING_STRATEGIES, "tp"):
        check_mesh(mesh, dist.get_world_size(), strategy=strategy)
    elif mesh is not None:
        raise LigerDistError(
            f"a mesh was given but strategy={strategy!r} takes none; use strategy='fsdp1', 'fsdp2' or 'tp'."
        )
    check_sharding_options(strategy, config)
    if not config.fused_loss:
        outputs = as_output_names(config.outputs)
        for name, is_given in (
            ("token_mean", config.token_mean != "local"),
            ("outputs", outputs not in ((), (LOGITS,))),
        ):
            if is_given:
                raise LigerDistError(
                    f"{name} is {getattr(config, name)!r} but fused_loss is False, and the model's own loss does not "
                    "have it; leave one of them out."
                )
    check_head_options(strategy, mesh, config)
    if strategy == "fsdp1" and config.cpu_offload and compute_device().type == "cpu":
        raise LigerDistError(
            "cpu_offload is True but FSDP1 needs an accelerator for it; leave it out here, or use strategy='fsdp2'."
        )
    if strategy == "deepspeed" and config.token_mean == "global":
        raise LigerDistError(
            "token_mean is 'global' but DeepSpeed's engine scales the loss itself; pass num_items_in_batch to the "
            "model."
        )
