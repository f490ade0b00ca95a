"""Rotary position embedding as one autograd function. Its tables carry no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist_kernels import Backend, RotaryLayout, rotate


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, layout: RotaryLayout, backend: Backend
    ) -> Tensor:
        ctx.num_rotated, ctx.layout, ctx.backend = num_rotated, layout, backend
        ctx.save_for_backward(cos, sin)
        return rotate(_dense(x), cos, sin, num_rotated=num_rotated, layout=layout, backend=backend)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        cos, sin = ctx.saved_tensors
        d_x = rotate(
            _dense(d_y),
            cos,
            sin,
            num_rotated=ctx.num_rotated,
            layout=ctx.layout,
            backward=True,
            backend=ctx.backend,
        )
        return d_x, None, None, None, None, None


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, num_rotated: int, layout: RotaryLayout, backend: Backend = "auto"
) -> Tensor:
    """``x`` with its first R features rotated.

    Args:
        x: ``[A, B, C, D]``, floating.
        cos, sin: broadcastable to ``[A, B, C, R]``, a number for each rotated feature; of "shared" tables the first
            R / 2 are read, and there may be no others.
        num_rotated: R, even and at most D.
        layout: where the pairs are.
    """
    shape = (*x.shape[:-1], cos.shape[-1])
    cos, sin = _dense(cos).expand(shape), _dense(sin).expand(shape)
    result: Tensor = _Rotary.apply(x, cos, sin, num_rotated, layout, backend)  # type: ignore[no-untyped-call]
    return result


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
