"""Quantised weights: bitsandbytes 4-bit, and the attribute names of other formats.

``Linear4bit`` packs two weights into a byte and keeps a scale for each block of 64 (``absmax``, 8 bits with double
quantisation) in a ``QuantState`` beside them, an attribute of the parameter and of the module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

_PACKAGE = "bitsandbytes"
_PACKS_ON_CPU = "support_avx512bf16_for_cpu"
SETTINGS = ("quant_state", "quant_storage")
"""attributes of a 4-bit layer that :func:`as_bytes` sets"""
_IN_BUFFERS = ("qweight", "W_q")
"""of GPTQ, AWQ and HQQ"""


def is_four_bit(tensor: object) -> bool:
    """True for the weight of a ``Linear4bit``, quantised or not yet."""
    package = sys.modules.get(_PACKAGE)
    return package is not None and isinstance(tensor, package.nn.Params4bit)


def four_bit_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of each 4-bit linear layer."""
    package = sys.modules.get(_PACKAGE)
    if package is not None:
        for name, module in model.named_modules():
            if isinstance(module, package.nn.Linear4bit):
                yield name, module


def unsharded_kind(module: nn.Module, weight: nn.Parameter | None) -> str | None:
    """Names the kind of a quantised module's weight that FSDP cannot shard; None for a 4-bit one and for all others.

    Args:
        weight: a parameter of ``module``; None to look for weights in buffers.
    """
    package = sys.modules.get(_PACKAGE)
    if weight is None:
        packed = [name for name in _IN_BUFFERS if isinstance(getattr(module, name, None), Tensor)]
        return f"a {type(module).__name__} that keeps its weight in {packed[0]!r}" if packed else None
    if package is not None and isinstance(weight, package.nn.Int8Params):
        return "a weight of 8 bits of bitsandbytes"
    kind = type(weight.data)
    is_torchao = kind.__module__.startswith("torchao.") and not kind.__module__.startswith("torchao.float8.")
    return f"a quantised {kind.__name__} of torchao" if is_torchao else None


def store_as_bytes(layer: Any) -> None:
    """Stores the packed weight of a 4-bit layer as uint8 ``[bytes, 1]``, which no engine casts. A weight that is not
    quantised yet stays as it is."""
    if layer.weight.quant_state is None:
        return
    layer.weight.data = layer.weight.data.view(torch.uint8).view(-1, 1)
    layer.weight.quant_storage = layer.quant_storage = torch.uint8


def keep_order_of_bytes(model: nn.Module, undo: ExitStack) -> None:
    """Keeps bitsandbytes from packing 4-bit weights in another order. On CPUs with AVX512-BF16 it does so in the first
    call in evaluation, and its products of such weights have no gradients in the training that follows."""
    for _, layer in four_bit_layers(model):
        undo.callback(setattr, layer, _PACKS_ON_CPU, getattr(layer, _PACKS_ON_CPU, False))
        setattr(layer, _PACKS_ON_CPU, False)


def bytes_of_scales(layer: Any) -> int:
    """Counts the bytes of the scales of a 4-bit layer, which every rank holds; 0 before it is quantised."""
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state
    if state is None:
        return 0
    nested: tuple[Tensor, ...] = (state.state2.absmax,) if state.nested else ()
    return sum(scales.numel() * scales.element_size() for scales in (state.absmax, *nested))


def move(weight: Any, device: torch.device) -> None:
    """Moves a 4-bit weight with its scales, and quantises it if it is not yet."""
    weight.data = weight.to(device).data


def is_four_bit_linear(linear: nn.Module) -> bool:
    """True for a 4-bit linear layer that runs the code of bitsandbytes."""
    package = sys.modules.get(_PACKAGE)
    return package is not None and type(linear).forward is package.nn.Linear4bit.forward


def is_quantized_linear(module: nn.Module) -> bool:
    """True for a linear layer of bitsandbytes, of 4 or 8 bits, whose kernels read the weight by its address."""
    package = sys.modules.get(_PACKAGE)
    return package is not None and isinstance(module, package.nn.Linear4bit | package.nn.Linear8bitLt)


def quant_state(linear: Any, dtype: torch.dtype) -> Any:
    """Returns the ``QuantState`` of a 4-bit linear layer whose full weight is here, ``[O, I]``, and whose products are
    computed in ``dtype``; None otherwise."""
    weight = linear.weight
    state = getattr(weight, "quant_state", None) or linear.quant_state
    shape = (linear.out_features, linear.in_features)
    is_full = type(weight) is nn.Parameter or is_four_bit(weight)
    is_full = is_full and 2 * weight.numel() * weight.element_size() == shape[0] * shape[1]
    if not is_full or state is None or tuple(state.shape) != shape or getattr(state, "packing_format_for_cpu", False):
        return None
    computes = linear.compute_dtype if linear.compute_type_is_set or dtype == torch.float16 else dtype
    return state if computes in (None, dtype) else None


def dequantized(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """Returns the full weight ``[O, I]`` of 4 bits in ``dtype``."""
    weight: Tensor = sys.modules[_PACKAGE].functional.dequantize_4bit(packed.view(-1, 1), state)
    return weight.to(dtype)


def as_bytes(layer: Any, weight: Any) -> Tensor:
    """Returns the bytes ``[bytes, 1]`` of a weight for a 4-bit linear layer, and leaves the scales with the layer,
    which makes a 4-bit weight of the full bytes in each forward.

    FSDP2 copies bytes as they are: it would cast a weight that is stored in 32 bits to its compute dtype.
    """
    layer.quant_state, layer.quant_storage = weight.quant_state, torch.uint8
    packed: Tensor = weight.data
    return packed.view(torch.uint8).view(-1, 1)
