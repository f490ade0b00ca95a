"""When a layer's own code runs rather than a kernel."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.nn import Parameter

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""fp64 is for those who want the model's own arithmetic to the last digit"""


def is_local(tensor: object) -> bool:
    """Whether it is a whole ordinary tensor: no DTensor, nothing that a subclass gives another meaning."""
    return type(tensor) in (Tensor, Parameter)


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work, which kernels do not know."""
    return bool(torch._C._are_functorch_transforms_active()) or fwAD._current_level >= 0


def runs_own_code(tensor: object, *, under_autocast: bool = True) -> bool:
    """Whether a layer given this tensor is left to its own code: while it is compiled (the compiler fuses it itself) or
    transformed by torch.func, under autocast if it behaves differently there, and for dtypes that kernels are not meant
    for."""
    if torch.compiler.is_compiling() or is_transformed() or not is_local(tensor):
        return True
    assert isinstance(tensor, Tensor)
    return tensor.dtype not in KERNEL_DTYPES or (not under_autocast and torch.is_autocast_enabled(tensor.device.type))
