"""Quantises stacks of experts to 4 bits while ``from_pretrained`` reads them. transformers quantises linear layers
alone; in most mixtures nearly all weights are stacks, ``[experts, out, in]``.

transformers registers each parameter as soon as it has read it. A hook on the registration puts its bytes in its place,
and the parametrization of bitsandbytes, which has the scales, follows when all are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from liger_dist.errors import LigerDistError

from .class_swap import swapped

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
            ``bnb_4bit_use_double_quant`` count; bytes are uint8 whatever ``bnb_4bit_quant_storage`` is.

    Raises:
        LigerDistError: ``quantization`` is not one of 4 bits, bitsandbytes is not installed, or
            ``sharded_loading`` has been entered first.
    """
    if not getattr(quantization, "load_in_4bit", False):
        raise LigerDistError(
            f"quantization is {quantization!r}; expected a transformers.BitsAndBytesConfig with load_in_4bit=True."
        )
    if find_spec("bitsandbytes") is None:
        raise LigerDistError("experts of 4 bits need bitsandbytes, which is not installed; pip install bitsandbytes.")
    from transformers import modeling_utils

    states: dict[tuple[nn.Module, str], Any] = {}

    def quantise(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or not _is_stack(module, parameter):
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
    for (module, name), state in states.items():
        _parametrise(module, name, state)


def _is_stack(module: nn.Module, parameter: nn.Parameter) -> bool:
    """True for a stack of matrices of transformers' experts that has just been read.

    Raises:
        LigerDistError: it is sharded already.
    """
    is_read = hasattr(module, "is_transposed") and getattr(parameter, READ, False) and not parameter.is_meta
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
    if name in shards:
        owner: Any = module.parametrizations[name]  # type: ignore[index]
        owner[0] = _sharded_class()(owner[0].quant_state)
        shards.discard(name)
        vars(owner).setdefault(LOADED, set()).add("original")


@lru_cache(maxsize=1)
def _sharded_class() -> Any:
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization

    class ShardedStack(Bnb4bitParametrization):  # type: ignore[misc]
        """Parametrization that has NaN for values while the bytes are shards: PEFT reads the shape and the device."""

        def forward(self, packed: Tensor) -> Any:
            if isinstance(packed, DTensor):
                state = self.quant_state
                return torch.full((), math.nan, dtype=state.dtype, device=packed.device).expand(state.shape)
            return super().forward(packed)

    return ShardedStack
