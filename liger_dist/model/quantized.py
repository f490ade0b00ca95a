"""Quantised weights: bitsandbytes 4-bit, and the attribute names of other formats.

``Linear4bit`` packs two weights into a byte and keeps a scale for each block of 64 (``absmax``, 8 bits with double
quantisation) in a ``QuantState`` beside them, an attribute of the parameter and of the module. A parameter of another
module, such as a stack of experts, is bytes in a parametrization (``bitsandbytes.nn.parametrize``), which has the
``QuantState``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_dist_kernels import QuantizedScales, dequantize_4bit

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


class FourBitStack(NamedTuple):
    """Parameter of 4 bits of a module that is no linear layer."""

    owner: Any
    """torch's ``ParametrizationList``, whose ``original`` has the bytes"""
    name: str
    """of the parameter"""

    @property
    def packed(self) -> Tensor:
        """Bytes ``[n, 1]``."""
        return self.owner.original  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        """``QuantState``, with the shape of the parameter."""
        return self.owner[0].quant_state

    @property
    def is_full(self) -> bool:
        """False for bytes that ZeRO-3 has partitioned: it all-gathers them where the parameter itself is read."""
        return 2 * self.packed.numel() >= torch.Size(self.state.shape).numel()


def _parametrization_class() -> Any:
    """Returns the class that dequantises a parameter where it is read; () without one."""
    return getattr(sys.modules.get(f"{_PACKAGE}.nn.parametrize"), "Bnb4bitParametrization", ())


def dequantized_shape(module: nn.Module) -> torch.Size | None:
    """Returns the shape of what a parametrization dequantises; None for any other module."""
    found: Any = module.quant_state if isinstance(module, _parametrization_class()) else None
    return None if found is None else torch.Size(found.shape)


def four_bit_stack(module: nn.Module, name: str) -> FourBitStack | None:
    """Returns a parameter that ``bitsandbytes.nn.parametrize`` has quantised; None for any other attribute."""
    lists = module._modules.get("parametrizations")
    if lists is None or name not in lists._modules:
        return None
    owner: Any = lists._modules[name]
    # PEFT adds another one for the time of a forward.
    is_plain = len(owner) == 1 and isinstance(owner[0], _parametrization_class())
    return FourBitStack(owner, name) if is_plain else None


def lora_of_peft(module: nn.Module, name: str) -> int:
    """Counts what PEFT's forwards have added to a parameter of 4 bits as further parametrizations."""
    owner = _four_bit_owner(module, name)
    return 0 if owner is None else sum(map(_is_of_peft, owner))


def remove_lora_of_peft(module: nn.Module, name: str) -> None:
    """Removes what a forward of PEFT has added to a parameter of 4 bits and left there.

    PEFT 0.21.2 does not find its ``_LoraFactorsProxy`` again in the list of a quantised parameter: the next forward
    would add LoRA once more."""
    owner = _four_bit_owner(module, name)
    while owner is not None and _is_of_peft(owner[-1]):
        del owner[-1]


def has_four_bits(module: nn.Module, name: str) -> bool:
    """True for a parameter that ``bitsandbytes.nn.parametrize`` has quantised, also within a forward of PEFT."""
    return _four_bit_owner(module, name) is not None


def _four_bit_owner(module: nn.Module, name: str) -> Any:
    lists = module._modules.get("parametrizations")
    owner: Any = None if lists is None else lists._modules.get(name)
    return owner if owner is not None and isinstance(owner[0], _parametrization_class()) else None


def _is_of_peft(parametrization: nn.Module) -> bool:
    return type(parametrization).__module__.startswith("peft.")


def four_bit_stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, FourBitStack]]:
    """Yields name, module and parameter of each one that ``bitsandbytes.nn.parametrize`` has quantised."""
    for prefix, module in model.named_modules():
        for name in module._modules.get("parametrizations") or ():
            stack = four_bit_stack(module, name)
            if stack is not None:
                yield f"{prefix}.{name}".lstrip("."), module, stack


def unsharded_kind(module: nn.Module, weight: nn.Parameter | None) -> str | None:
    """Names the kind of a quantised module's weight that FSDP cannot shard; None for a 4-bit one and for any other
    module.

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


def bytes_of_scales(model: nn.Module) -> int:
    """Counts the bytes of the scales of 4-bit weights, which every rank holds; 0 before they are quantised."""
    states = [getattr(layer.weight, "quant_state", None) or layer.quant_state for _, layer in four_bit_layers(model)]
    states += [stack.state for _, _, stack in four_bit_stacks(model)]
    tensors: list[Tensor] = []
    for state in filter(None, states):
        tensors += [state.absmax, state.state2.absmax] if state.nested else [state.absmax]
    return sum(scales.numel() * scales.element_size() for scales in tensors)


def move(weight: Any, device: torch.device) -> None:
    """Moves a 4-bit weight with its scales, and quantises it if it is not yet."""
    weight.data = weight.to(device).data


def move_stack(stack: FourBitStack, device: torch.device) -> None:
    """Moves the bytes and the scales of a parameter of 4 bits."""
    stack.owner.original.data = stack.owner.original.data.to(device)
    stack.state.to(device)


def is_four_bit_linear(linear: nn.Module) -> bool:
    """True for a 4-bit linear layer that runs the code of bitsandbytes."""
    package = sys.modules.get(_PACKAGE)
    return package is not None and type(linear).forward is package.nn.Linear4bit.forward


def is_quantized_linear(module: nn.Module) -> bool:
    """True for a linear layer of bitsandbytes, of 4 or 8 bits, whose kernels read the weight by its address."""
    package = sys.modules.get(_PACKAGE)
    return package is not None and isinstance(module, package.nn.Linear4bit | package.nn.Linear8bitLt)


def is_float8_linear(module: nn.Module) -> bool:
    """True for a linear layer of torchao that is trained in float8, with whose tensorwise scales the rounding of a
    token depends on all others."""
    package = sys.modules.get("torchao.float8.float8_linear")
    return package is not None and isinstance(module, package.Float8Linear)


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
    """Returns the full weight of 4 bits in ``dtype``, ``[O, I]`` of a linear layer, bit by bit that of bitsandbytes: on
    GPUs in one launch, where bitsandbytes needs three for double quantisation."""
    # Else each access to an attribute of a Params4bit runs Python code of its class.
    with torch._C.DisableTorchFunctionSubclass():
        if packed.is_cuda and _has_kernel(packed, state):
            weight = _dequantized_on_gpu(packed.view(torch.uint8), state)
        else:
            weight = sys.modules[_PACKAGE].functional.dequantize_4bit(packed.view(-1, 1), state)
    return weight.to(dtype)


def _has_kernel(packed: Tensor, state: Any) -> bool:
    """True for bytes and a ``QuantState`` that :func:`dequantize_4bit` takes."""
    scales = [state.code, state.absmax]
    if state.state2 is not None:
        scales += [state.state2.code, state.state2.absmax, state.offset]
    is_here = all(isinstance(tensor, Tensor) and tensor.device == packed.device for tensor in scales)
    # bitsandbytes has the levels in its kernels, and reads none.
    is_known = is_here and state.code.dtype == torch.float32 and torch.Size(state.shape).numel() % 8 == 0
    return is_known and packed.is_contiguous() and packed.data_ptr() % 4 == 0


def _dequantized_on_gpu(packed: Tensor, state: Any) -> Tensor:
    nested, scales = state.state2, None
    if nested is not None:
        scales = QuantizedScales(nested.code, nested.absmax, nested.blocksize, state.offset)
    return dequantize_4bit(
        packed,
        state.code,
        state.absmax,
        state.blocksize,
        shape=torch.Size(state.shape),
        dtype=state.dtype,
        quantized=scales,
    )


def as_bytes(layer: Any, weight: Any) -> Tensor:
    """Returns the bytes ``[bytes, 1]`` of a weight for a 4-bit linear layer, and leaves the scales with the layer,
    which makes a 4-bit weight of the full bytes in each forward.

    FSDP2 copies bytes as they are: it would cast a weight that is stored in 32 bits to its compute dtype.
    """
    layer.quant_state, layer.quant_storage = weight.quant_state, torch.uint8
    packed: Tensor = weight.data
    return packed.view(torch.uint8).view(-1, 1)
