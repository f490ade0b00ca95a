"""``activation(gate) * up`` as one autograd function that keeps only its inputs, also in front of a projection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist_kernels import Activation, Backend, gated_activation_bwd, gated_activation_fwd

from .norm import _rows

MOST_NODES = 64
"""of a projection; one with an adapter has a dozen"""


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
    version = product._version
    projected = down(product)
    node = result.grad_fn
    hooks_of_others = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if node is None or product.numel() == 0 or hooks_of_others is not None or type(projected) is not Tensor:
        return projected
    for raw, saved in _saved_between(projected.grad_fn, node):
        if _is_view(saved, product) and saved._version == version:
            packed = _Product(node, saved.shape, saved.stride(), int(saved.storage_offset()))
            raw.register_hooks(lambda _, packed=packed: packed, _Product.compute)
    return projected


def _is_view(saved: Any, product: Tensor) -> bool:
    """With the numbers of ``product``, and not with their negatives."""
    is_plain = type(saved) is Tensor and saved.dtype == product.dtype and not saved.is_neg()
    return is_plain and saved.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()


def _saved_between(last: Any, first: Any) -> Iterator[tuple[Any, Any]]:
    """What the nodes of the graph from ``last`` down to ``first`` have saved, with where hooks are set on it; of very
    many nodes only some."""
    seen, waiting = {first}, [last]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for place, name in _saved_names(type(node)):  # type: ignore[arg-type]
            raw, saved = getattr(node, place), getattr(node, name)
            yield from zip(raw, saved, strict=True) if isinstance(raw, tuple) else ((raw, saved),)
        waiting += [following for following, _ in node.next_functions]


@functools.cache
def _saved_names(node_type: type) -> tuple[tuple[str, str], ...]:
    """Of a node's attributes, where a tensor is saved and the tensor itself."""
    places = [name for name in dir(node_type) if name.startswith("_raw_saved_")]
    return tuple((name, "saved_tensors" if name == "_raw_saved_tensors" else name[4:]) for name in places)
