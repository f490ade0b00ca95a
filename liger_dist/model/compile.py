"""Compiles decoder layers one by one, and saves as little for the backward as our kernels.

[Note: What compiled layers keep]
A compiled layer decides in one place (AOTAutograd's partitioner) which tensors its forward keeps for its backward. By
default it keeps every input of a matrix product, because the backward would have to write those to memory again:
outputs of norms, and the product of the activation and the up projection. Recomputing them costs one pass over memory;
keeping them a third of a layer's activations. Our kernels recompute them, and compiled layers do with the two settings
below: one GPU, four layers of Llama 8B's shape with lm_head, 8192 tokens, 5.22 GiB above the weights instead of 6.59,
in the same time (docs/strategy_options.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from liger_dist.errors import LigerDistError

from .peft import base_model_of
from .structure import find_structure

_PARTITIONER = {"ban_recompute_materialized_backward": False, "ban_recompute_reductions": False}
"""settings of ``torch._functorch.config``: inputs of products and norms' statistics may be recomputed"""


def compile_layers(model: nn.Module) -> None:
    """Compiles each decoder layer by ``torch.compile`` (Inductor) on its first call. Layers of one kind share their
    code. Call it before :func:`wrap`, on a model that is not sharded yet, or let ``FSDP1(compile_layers=True)`` and
    ``FSDP2(compile_layers=True)`` do so.

    Inductor compiles norms, gated MLPs and rotary embedding of these layers from the model's code, instead of the
    kernels. Each new sequence length compiles once more, the second one for all later lengths.

    Args:
        model: a Hugging Face model, or a ``PeftModel`` of one.

    Raises:
        LigerDistError: the model has no list of decoder layers.
    """
    inner = base_model_of(model)
    layers = find_structure(inner).layers
    if not layers:
        raise LigerDistError(
            f"{type(inner).__name__} has no list of decoder layers that could be compiled one by one; compile the "
            "modules that you want (module.compile())."
        )
    compile_each(layers)


def compile_each(layers: Iterable[nn.Module]) -> None:
    """Compiles each of ``layers``, as :func:`compile_layers`."""
    for layer in layers:
        layer.compile(backend=_compile_graph)


def reason_against_compiling(layers: Iterable[nn.Module], *, device: torch.device, is_recurrent: bool) -> str | None:
    """Says why compiled layers are no gain, as a clause; None where they are one (docs/benchmarks). Equal on all
    ranks.

    Args:
        is_recurrent: True if layers other than attention read earlier tokens. In transformers a recurrence is a
            loop, whose steps are compiled one by one.
    """
    if device.type != "cuda":
        return f"the device is {device.type}"
    if is_recurrent:
        return "layers are recurrent or convolve"
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if not parameters:
        return "the model has no list of decoder layers"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "weights are quantized"
    return None


def compiled_call(layer: nn.Module) -> Any:
    """Returns the compiled function that runs when ``layer`` is called; None for a layer that is not compiled."""
    return layer._compiled_call_impl


def restore_call(layer: nn.Module, call: Any) -> None:
    """Restores the result of an earlier :func:`compiled_call`."""
    layer._compiled_call_impl = call


def _compile_graph(graph: Any, inputs: Any) -> Any:
    """Calls Inductor under :data:`_PARTITIONER`; see [Note: What compiled layers keep]."""
    from .partitioner import KeepFloat8Weights  # imports Inductor

    inductor: Any = torch._dynamo.lookup_backend("inductor")
    with (
        torch._functorch.config.patch(_PARTITIONER),
        torch._inductor.config.patch(custom_partitioner_fn=KeepFloat8Weights()),
    ):
        return inductor(graph, inputs)
