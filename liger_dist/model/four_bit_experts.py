"""Quantises stacks of experts to 4 bits while ``from_pretrained`` reads them. transformers quantises linear layers
alone; in most mixtures nearly all weights are stacks, ``[experts, out, in]``.

transformers registers each parameter as soon as it has read it. A hook on the registration puts its bytes in its place,
and the parametrization of bitsandbytes, which has the scales, follows when all are read.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from liger_dist.errors import LigerDistError

from .class_swap import swapped
from .quantized import four_bit_stacks

READ = "_is_hf_initialized"
"""on a parameter that transformers has read"""
LOADED = "_liger_dist_loaded_shards"
"""on a module: names of its parameters that are shards of ``sharded_loading``"""


@contextmanager
def four_bit_experts(quantization: Any) -> Iterator[None]:
    """Quantises the experts of a mixture to 4 bits as soon as ``from_pretrained`` has read them, within the context.
    transformers quantises the linear layers of the model, and keeps stacks of experts as they are::

        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        with liger_dist.four_bit_experts(quantization), liger_dist.sharded_loading():
            base = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": device}
            )
        model = liger_dist.wrap(get_peft_model(base, LoraConfig(...)), "fsdp2")

    A stack becomes bytes and scales of blocks of 64 numbers in a parametrization of bitsandbytes
    (``bitsandbytes.nn.parametrize``, which also quantises the parameters of models that are built otherwise). It is
    quantised where it was read: ``device_map`` says on which device. Strategies shard the bytes as those of linear
    layers. :func:`wrap`'s grouped products dequantise one stack at a time, in the forward and again in the backward.

    Args:
        quantization: the ``BitsAndBytesConfig`` of the model. Its ``bnb_4bit_quant_type`` and
            ``bnb_4bit_use_double_quant`` count; bytes are uint8 whatever ``bnb_4bit_quant_storage`` is, and all stacks
            are quantised whatever ``llm_int8_skip_modules`` has.

    Raises:
        LigerDistError: ``quantization`` is not one of 4 bits, bitsandbytes is not installed,
            ``sharded_loading`` has been entered first, or the folder has no values for experts.
    """
    if not getattr(quantization, "load_in_4bit", False):
        raise LigerDistError(
            f"quantization is {quantization!r}; expected a transformers.BitsAndBytesConfig with load_in_4bit=True."
        )
    if find_spec("bitsandbytes") is None:
        raise LigerDistError("experts of 4 bits need bitsandbytes, which is not installed; pip install bitsandbytes.")
    from transformers import modeling_utils

    states: dict[tuple[nn.Module, str], Any] = {}
    registered: set[tuple[nn.Module, str]] = set()

    def quantise(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        # from_pretrained makes the model without storage.
        if parameter.is_meta and parameter.dim() == 3:
            registered.add((module, name))
        if not _is_stack(module, parameter):
            return None
        packed, states[module, name] = _quantised(parameter, quantization)
        vars(packed)[READ] = True
        return packed

    hook = register_module_parameter_registration_hook(quantise)  # type: ignore[arg-type]
    try:
        # It would allocate the memory of the unquantised experts at once.
        with swapped(vars(modeling_utils), "caching_allocator_warmup", lambda *args, **kwargs: None):
            yield
    finally:
        hook.remove()
    for module, name in registered - states.keys():
        left = module._parameters.get(name)
        if is_experts(module) and left is not None and not left.is_meta:
            raise LigerDistError(
                f"{name} of a {type(module).__name__} was not read within four_bit_experts, so that it has random "
                "values: the folder has no values for it. What save_pretrained has written of a base whose experts are "
                "of 4 bits cannot be read; give the folder of the model in floating point."
            )
    for (module, name), state in states.items():
        _parametrise(module, name, state)


def is_experts(module: nn.Module) -> bool:
    """True for experts of transformers' interface, whose stacks of matrices :func:`four_bit_experts` quantises."""
    return hasattr(module, "is_transposed") and "config" in vars(module)


def _is_stack(module: nn.Module, parameter: nn.Parameter) -> bool:
    """True for a stack of matrices of transformers' experts that has just been read.

    Raises:
        LigerDistError: it is sharded already.
    """
    is_read = is_experts(module) and getattr(parameter, READ, False) and not parameter.is_meta
    if not is_read or parameter.dim() != 3 or not parameter.is_floating_point():
        return False
    if isinstance(parameter, DTensor):
        raise LigerDistError(
            "experts have been sharded before they could be quantised; enter four_bit_experts before sharded_loading: "
            "with liger_dist.four_bit_experts(quantization), liger_dist.sharded_loading(): ..."
        )
    return True


@torch.no_grad()
def _quantised(parameter: nn.Parameter, quantization: Any) -> tuple[nn.Parameter, Any]:
    """Returns the bytes ``[n, 1]`` of a parameter, and its ``QuantState``."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(
        parameter.data.contiguous(),
        compress_statistics=quantization.bnb_4bit_use_double_quant,
        quant_type=quantization.bnb_4bit_quant_type,
    )
    return nn.Parameter(packed, requires_grad=False), state


def _parametrise(module: nn.Module, name: str, state: Any) -> None:
    """Makes bytes that a module has registered a parameter of 4 bits."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized

    shards: set[str] = vars(module).get(LOADED, set())
    replace_parameter_4bit_prequantized(module, name, state.as_dict(packed=True), state.absmax.device)
    owner: Any = module.parametrizations[name]  # type: ignore[index]
    if name in shards:
        shards.discard(name)
        vars(owner).setdefault(LOADED, set()).add("original")
    with ExitStack() as undo:
        keep_scales_in_state_dict(module, undo)
        undo.pop_all()


def keep_scales_in_state_dict(model: nn.Module, undo: ExitStack) -> None:
    """Stores the scales of parameters that bitsandbytes has quantised as extra state of their parametrizations.
    bitsandbytes names them as attributes of the parameter (``down_proj.absmax``), which
    ``torch.distributed.checkpoint.state_dict`` looks up and does not find."""
    for _, module, stack in list(four_bit_stacks(model)):
        if isinstance(stack.owner[0], _stack_class()):
            continue
        for key, hook in list(module._state_dict_hooks.items()):
            if getattr(hook, "func", None) is _bitsandbytes()._parametrized_state_dict_post_hook:
                undo.callback(module._state_dict_hooks.__setitem__, key, module._state_dict_hooks.pop(key))
        undo.callback(stack.owner.__setitem__, 0, stack.owner[0])
        stack.owner[0] = _stack_class()(stack.owner[0].quant_state)


def _bitsandbytes() -> Any:
    return sys.modules["bitsandbytes.nn.parametrize"]


@lru_cache(maxsize=1)
def _stack_class() -> Any:
    base: Any = _bitsandbytes().Bnb4bitParametrization

    class FourBitStack(base):  # type: ignore[misc]
        """Parametrization of a parameter of 4 bits that has the scales in its extra state."""

        quant_state: Any

        def forward(self, packed: Tensor) -> Any:
            state = self.quant_state
            if isinstance(packed, DTensor):
                # A shard has no values; PEFT reads the shape and the device.
                return torch.full((), math.nan, dtype=state.dtype, device=packed.device).expand(state.shape)
            return super().forward(packed)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            # Scales are neither parameters nor buffers, which would be cast: they move with the bytes.
            result = super()._apply(fn, recurse)
            self.quant_state.to(fn(torch.empty(0, device=self.quant_state.absmax.device)).device)
            return result

        def get_extra_state(self) -> Tensor:
            buffer = io.BytesIO()
            scales = self.quant_state.as_dict(packed=True)
            torch.save({name: value.cpu() for name, value in scales.items()}, buffer)
            return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

        def set_extra_state(self, state: Tensor) -> None:
            scales = torch.load(io.BytesIO(state.cpu().numpy().tobytes()), weights_only=True)
            self.quant_state = type(self.quant_state).from_dict(scales, device=self.quant_state.absmax.device)

    return FourBitStack
