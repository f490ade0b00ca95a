"""Units of FSDP2: consecutive decoder layers that are all-gathered and reduced together.

A unit costs the host one to three milliseconds a step, whatever its size, and each of its collectives a latency. The
layers of small models take less than that to compute. So layers share a unit until it has :data:`UNIT_BYTES`, in the
compute dtype. A step keeps about two units unsharded, which is why the bound is small beside the memory of the shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.model.structure import full_shape
from liger_dist.model.torch_modes import untraced

from .forward import unshard_in_backward

UNIT_BYTES = 3 * 2**26
"""bytes from which on a unit is worth its collectives: measured for 0.6B and 1B on two H200 (docs/benchmarks, "Small
models")"""
LEAST_UNITS = 4
"""units of a model that has as many layers: the collectives of one overlap with the computation of another"""
_MAY_SKIP = ("layerdrop", "decoder_layerdrop", "layer_drop")
"""settings of a config with which a forward leaves out layers at random"""

LayersPerUnit = int | Literal["auto"]
Units = list[tuple[nn.Module, ...]]


def check_layers_per_unit(value: object) -> None:
    """
    Raises:
        LigerDistError: it is neither "auto" nor a number of layers.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "auto" and not is_number:
        raise LigerDistError(f"layers_per_unit is {value!r}; expected 'auto', or a number of layers from 1 on.")


def units_of(layers: Sequence[nn.Module], sizes: Sequence[int], layers_per_unit: LayersPerUnit) -> Units:
    """Divides decoder layers that follow each other into units, in order.

    Args:
        layers: different modules.
        sizes: bytes of each layer's full parameters.
        layers_per_unit: "auto" for as many as a unit needs for :data:`UNIT_BYTES`, and at least :data:`LEAST_UNITS`
            units.
    """
    if layers_per_unit != "auto":
        return [tuple(layers[start : start + layers_per_unit]) for start in range(0, len(layers), layers_per_unit)]
    units: list[list[nn.Module]] = []
    held = UNIT_BYTES
    for layer, size in zip(layers, sizes, strict=True):
        if held >= UNIT_BYTES or LEAST_UNITS * (held + size) > sum(sizes):
            units.append([])
            held = 0
        units[-1].append(layer)
        held += size
    return list(map(tuple, units))


def reason_against_units(layers: Sequence[nn.Module], config: Any) -> str | None:
    """Says why each decoder layer has to be a separate unit, as a clause; None if several may share one."""
    if len(set(layers)) < len(layers):
        return "the model runs a layer several times"
    skips = next((name for name in _MAY_SKIP if getattr(config, name, None)), None)
    if skips is not None:
        return f"{skips} is {getattr(config, skips)}, with which a forward leaves out layers"
    if any(_is_checkpointed_with_hooks(layer) for layer in layers):
        return "a release of transformers checkpoints layers together with FSDP2's hooks"
    return None


def _is_checkpointed_with_hooks(layer: nn.Module) -> bool:
    return type(layer).__call__ is not nn.Module.__call__


def bytes_of(layer: nn.Module, param_dtype: torch.dtype | None, apart: Collection[nn.Module] = ()) -> int:
    """Counts the bytes of a layer's full parameters, floating-point ones in ``param_dtype`` unless that is None.

    Args:
        apart: modules whose parameters are in groups apart from that of the layer.
    """
    left_out = {parameter for module in apart for parameter in module.parameters(recurse=False)}
    return sum(
        torch.Size(full_shape(parameter)).numel()
        * (param_dtype.itemsize if param_dtype is not None and parameter.is_floating_point() else parameter.itemsize)
        for parameter in layer.parameters()
        if parameter not in left_out
    )


def describe(units: Units, param_dtype: torch.dtype | None, apart: Collection[nn.Module] = ()) -> str | None:
    """Says how many layers are in a unit, for ``explain``; None where each is one by itself."""
    if all(len(unit) == 1 for unit in units):
        return None
    numbers = sorted({len(unit) for unit in units})
    layers = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    largest = max(sum(bytes_of(layer, param_dtype, apart) for layer in unit) for unit in units)
    size = f"{largest / 2**20:.0f} MiB unsharded at most"
    return f"{len(units)} units of {layers} layers, {size} (docs/strategy_options.md)"


def unshard_inside(unit: Sequence[nn.Module]) -> None:
    """Lets a backward begin at the output of a layer inside a unit: FSDP2 unshards a unit in the backward of the output
    of its last layer."""
    for layer in unit[:-1]:
        layer.register_forward_hook(_unshard_for)


@untraced
def _unshard_for(layer: nn.Module, args: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, Tensor):
        unshard_in_backward(layer, args, first)
