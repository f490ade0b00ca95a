"""``activation(gate) * up`` as one autograd function that keeps only its inputs, also in front of a projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist_kernels import Activation, Backend, gated_activation_bwd, gated_activation_fwd

from .norm import _rows


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, activation: Activation, backend: Backend) -> Tensor:
        ctx.activation, ctx.backend = activation, backend
        ctx.save_for_backward(gate_TF, up_TF)
        return gated_activation_fwd(gate_TF, up_TF, activation=activation, backend=backend)

    @staticmethod
    def backward(ctx: Any, d_y_TF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        gate_TF, up_TF = ctx.saved_tensors
        d_both = gated_activation_bwd(_rows(d_y_TF), gate_TF, up_TF, activation=ctx.activation, backend=ctx.backend)
        return d_both[:, 0], d_both[:, 1], None, None


@dataclass(frozen=True)
class _Product:
    """What stands for a saved ``activation(gate) * up``."""

    node: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def compute(self) -> Tensor:
        gate_TF, up_TF = self.node.saved_tensors
        product = gated_activation_fwd(gate_TF, up_TF, activation=self.node.activation, backend=self.node.backend)
        return product.as_strided(self.shape, self.stride, self.offset)


def _unpacked(saved: Tensor | _Product) -> Tensor:
    return saved.compute() if isinstance(saved, _Product) else saved


def gated_activation(gate: Tensor, up: Tensor, *, activation: Activation, backend: Backend = "auto") -> Tensor:
    """``activation(gate) * up``; both ``[..., F]`` of one floating dtype."""
    result: Tensor = _GatedActivation.apply(_rows(gate), _rows(up), activation, backend)  # type: ignore[no-untyped-call]
    return result.reshape(gate.shape)


def gated_projection(
    down: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, *, activation: Activation, backend: Backend = "auto"
) -> Tensor:
    """``down(activation(gate) * up)``. What ``down`` would keep of the product for its backward is computed again there
    instead: one more pass over gate and up, and a third less memory of a gated MLP. Where somebody else's hooks decide
    what is kept (activation checkpointing, offloading), they do."""
    result: Tensor = _GatedActivation.apply(_rows(gate), _rows(up), activation, backend)  # type: ignore[no-untyped-call]
    product = result.reshape(gate.shape)
    node = result.grad_fn
    if node is None or product.numel() == 0 or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return down(product)
    # Numbers, because autograd keeps the functions, and with them all that they know.
    memory, version = product.untyped_storage().data_ptr(), product._version

    def packed(saved: Tensor) -> Tensor | _Product:
        if saved.untyped_storage().data_ptr() != memory or saved._version != version:
            return saved
        return _Product(node, saved.shape, saved.stride(), int(saved.storage_offset()))

    with torch.autograd.graph.saved_tensors_hooks(packed, _unpacked):
        return down(product)
