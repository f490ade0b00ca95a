"""Factories of torch whose tensors are on the device of this rank's tests: its GPU, or the CPU.

``on_device.randn(2, 3)`` is ``torch.randn(2, 3)`` there. Values drawn with a ``generator``, which is one of the CPU,
are the same on every device. ``test_house`` finds tensors of tests that are built on no device by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_dist.sharding.process_groups import compute_device

FACTORIES = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"),
)


def _factory(name: str) -> Any:
    def make(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        where: Any = {} if "generator" in kwargs else {"device": compute_device()}
        made: Tensor = getattr(torch, name)(*args, **where, **kwargs)
        made = made.to(compute_device())
        return made.requires_grad_() if requires_grad else made

    make.__name__ = name
    return make


arange, empty, eye, full, linspace, ones, rand, randint, randn, randperm, tensor, zeros = map(_factory, FACTORIES)


def leaf(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draws a leaf of the autograd graph."""
    drawn: Tensor = randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).requires_grad_()
