"""Rotary position embedding of queries and keys together, as one autograd function. Its tables carry no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist_kernels import Backend, RotaryLayout, rotate


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, num_rotated: int, layout: RotaryLayout, backend: Backend, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_rotated, ctx.layout, ctx.backend = num_rotated, layout, backend
        ctx.save_for_backward(cos, sin)
        return rotate(tensors, cos, sin, num_rotated=num_rotated, layout=layout, backend=backend)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        cos, sin = ctx.saved_tensors
        given = [_dense(gradient) for gradient in gradients if gradient is not None]
        rotated = iter(
            rotate(
                given,
                cos,
                sin,
                num_rotated=ctx.num_rotated,
                layout=ctx.layout,
                backward=True,
                backend=ctx.backend,
            )
            if given
            else ()
        )
        return None, None, None, None, None, *(None if g is None else next(rotated) for g in gradients)


def rotary(
    tensors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    num_rotated: int,
    layout: RotaryLayout,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """Each of ``tensors`` with its first R features rotated.

    Args:
        tensors: one or two (queries and keys), each ``[A, B, C, D]``, floating; they differ at most in the dim along
            which the tables are one (the heads').
        cos, sin: broadcastable to ``[A, B, C, R]``, a number for each rotated feature; of "shared" tables the first
            R / 2 are read, and there may be no others.
        num_rotated: R, even and at most D.
        layout: where the pairs are.
    """
    heads_dim = 1 if cos.shape[1] == 1 else 2
    tokens_of = {(x.shape[0], x.shape[3 - heads_dim]) for x in tensors}
    if len(tensors) > 1 and (cos.shape[heads_dim] != 1 or len(tokens_of) > 1):
        return tuple(
            rotary((x,), cos, sin, num_rotated=num_rotated, layout=layout, backend=backend)[0] for x in tensors
        )
    if heads_dim == 1:
        tensors, cos, sin = [x.transpose(1, 2) for x in tensors], cos.transpose(1, 2), sin.transpose(1, 2)
    batch, tokens = tensors[0].shape[:2]
    cos, sin = (_dense(table).expand(batch, tokens, *table.shape[2:]) for table in (cos, sin))
    rotated: tuple[Tensor, ...] = _Rotary.apply(  # type: ignore[no-untyped-call]
        cos, sin, num_rotated, layout, backend, *map(_dense, tensors)
    )
    return tuple(x.transpose(1, 2) for x in rotated) if heads_dim == 1 else rotated


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
