"""Options and refusals that FSDP1 and FSDP2 share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from liger_dist.config import WrapConfig, check_dtype
from liger_dist.errors import LigerDistError
from liger_dist.layer_compilation import compile_each, compiled_call, restore_call
from liger_dist.structure import Structure

from .lost_gradients import warn_of_experts, warn_of_hooks
from .mesh import Mesh, check_mesh, require_process_group


@dataclass(frozen=True, kw_only=True)
class FullySharded:
    """Options of :class:`FSDP1` and :class:`FSDP2`.

    Raises:
        LigerDistError: a dtype that is not floating.
    """

    name: ClassVar[str]
    has_collectives: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = True

    mesh: Mesh | None = None
    """A DeviceMesh or its shape, ``(shard,)`` or ``(replicate, shard)``; None: all ranks in one shard group."""
    param_dtype: torch.dtype | None = None
    """Compute dtype, while masters keep theirs (``torch.bfloat16`` is usual); None for the masters' own."""
    reduce_dtype: torch.dtype = torch.float32
    """Dtype of gradient reduction; a lower one than fp32 loses small gradients as ranks grow."""
    reshard_after_forward: bool = True
    """Free a decoder layer's full weights between its forward and its backward."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory."""
    compile_layers: bool = False
    """Compile each decoder layer, as :func:`liger_dist.compile_layers`."""

    def __post_init__(self) -> None:
        check_dtype("param_dtype", self.param_dtype)
        check_dtype("reduce_dtype", self.reduce_dtype)

    @property
    def compiles_layers(self) -> bool:
        """True if an option asks for compiled layers."""
        return self.compile_layers

    def compile(self, structure: Structure, undo: ExitStack) -> None:
        """Compiles the decoder layers where that is asked for; before they are sharded."""
        if self.compiles_layers:
            for layer in structure.layers:
                undo.callback(restore_call, layer, compiled_call(layer))
            compile_each(structure.layers)

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        check_mesh(self.mesh, require_process_group(self.name, world_size), strategy=self.name)
        if self.compiles_layers and config.mlp_tile_tokens is not None:
            raise LigerDistError(
                f"mlp_tile_tokens is {config.mlp_tile_tokens} but the layers are compiled, which computes the MLP at "
                "once; leave one of them out."
            )

    def check_model(self, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool) -> None:
        refuse_sharded(model)
        if not structure.layers:
            raise LigerDistError(
                f"{type(model).__name__} has no list of decoder layers that could be sharded one by one; shard it "
                "yourself and wrap with strategy='auto'."
            )
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise LigerDistError(
                    f"{name} has no dimension and {self.name!r} shards the first one of every parameter; make it a "
                    "parameter of shape (1,), or a buffer."
                )
        warn_of_hooks(model.named_parameters(), self.name)
        if self.name == "fsdp2":
            warn_of_experts(model, structure)


def refuse_sharded(model: nn.Module) -> None:
    """Refuses a model with FSDP units."""
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise LigerDistError(
            f"this {type(model).__name__} is sharded by FSDP already; wrap it with strategy='auto', or wrap a model "
            "that is not sharded yet."
        )
