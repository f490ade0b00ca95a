"""Layouts of tensors in memory: a kernel's result has the one that the model's original operation gives it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_layout(compute: Callable[..., Tensor], x: Tensor, *remaining: Tensor) -> Tensor:
    """Computes a function of the last dim of ``x`` ``[..., D]`` whose result has the strides that an elementwise
    operation would give it: models call ``view`` on it.

    Args:
        compute: function of ``x`` and ``remaining``; gives a contiguous result for contiguous tensors.
        remaining: further rows of the shape of ``x``.
    """
    strides = x.stride()
    if strides[-1] != 1 or 0 in strides:
        y = compute(x.contiguous(), *remaining)
        return torch.empty_like(x, dtype=y.dtype).copy_(y)
    order = [*sorted(range(x.dim() - 1), key=lambda dim: -strides[dim]), x.dim() - 1]
    y = compute(*(tensor.permute(order) for tensor in (x, *remaining)))
    return y.permute([order.index(dim) for dim in range(x.dim())])
