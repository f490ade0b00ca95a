"""Tensor subclass of packed uint8 weights that reports dtype float32, so that FSDP2 shards it.

FSDP2 of torch before 2.13 shards floating parameters alone, and every version casts those to its compute dtype before
the all-gather. Bytes of weights of 4 bits have to arrive as they are: they are all-gathered by the extension of FSDP2
that float8 weights use as well (``fsdp_pre_all_gather``).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from liger_dist.errors import LigerDistError
from liger_dist.model.quantized import (
    SETTINGS,
    as_bytes,
    four_bit_layers,
    four_bit_stacks,
    is_four_bit,
    move,
    move_stack,
)

_WAY_OUT = "leave frozen weights out (StateDictOptions(ignore_frozen_params=True))"
_aten = torch.ops.aten
_KEEPING = {
    _aten.as_strided.default,
    _aten.clone.default,
    _aten.copy_.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.is_pinned.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
    _aten._pin_memory.default,
    _aten._to_copy.default,
}
"""operators of FSDP2's sharding, which are those of the bytes"""


class PackedBytes(torch.Tensor):
    """Packed bytes ``[n, 1]`` that report dtype float32."""

    packed: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor) -> PackedBytes:
        tensor: PackedBytes = torch.Tensor._make_wrapper_subclass(
            cls,
            packed.shape,
            strides=packed.stride(),
            storage_offset=packed.storage_offset(),
            dtype=torch.float32,
            device=packed.device,
        )
        return tensor

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedBytes({tuple(self.shape)}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LigerDistError(f"a shard of a 4-bit weight cannot be saved without its scales; {_WAY_OUT}.")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> PackedBytes:
        return PackedBytes(inner["packed"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def unpacked(value: Any) -> Any:
            return value.packed if isinstance(value, PackedBytes) else value

        if func not in _KEEPING:
            raise NotImplementedError(f"{func} is not defined on a shard of a 4-bit weight; {_WAY_OUT}")
        options = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
        result = func(*tree_map(unpacked, args), **options)
        if func is _aten.copy_.default:
            return args[0]
        return tree_map(lambda value: PackedBytes(value) if isinstance(value, Tensor) else value, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Returns the rank's bytes, as many on every rank."""
        rows = -(-outer_size[0] // mesh.size())
        packed = self.packed
        if packed.shape[0] < rows:
            packed = torch.cat([packed, packed.new_zeros(rows - packed.shape[0], 1)])
        return (packed.contiguous(),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Returns the full bytes, in the memory that FSDP2 has gathered them into."""
        return None if out is not None else (outputs[0], ())


def pack_four_bits(root: nn.Module, kept: Collection[nn.Parameter], device: torch.device, undo: ExitStack) -> None:
    """Moves the weights of 4 bits to ``device`` and makes them bytes for FSDP2 to shard.

    Args:
        kept: weights that FSDP2 leaves alone.
    """
    for _, layer in four_bit_layers(root):
        weight = layer.weight
        if is_four_bit(weight) and weight not in kept:
            move(weight, device)
            kept_settings = {name: vars(layer)[name] for name in SETTINGS if name in vars(layer)}
            undo.callback(vars(layer).update, kept_settings)
            undo.callback(setattr, layer, "weight", weight)
            layer.weight = nn.Parameter(PackedBytes(as_bytes(layer, weight)), requires_grad=False)
    for _, _, stack in four_bit_stacks(root):
        packed: Any = stack.packed
        # Those of sharded_loading become such bytes when they are gathered.
        if packed not in kept and not isinstance(packed.data, DTensor | PackedBytes):
            move_stack(stack, device)
            undo.callback(setattr, stack.owner, "original", packed)
            stack.owner.original = nn.Parameter(PackedBytes(packed.data), requires_grad=False)
