"""float8 linear layers of torchao under FSDP2.

With the recipe "tensorwise" each rank casts its shards, with scales that one all-reduce per forward of the decoder
computes for all weights, and FSDP2 all-gathers one byte per element. With "rowwise" it all-gathers the compute dtype,
and every rank casts the full weights.

[Note: Weights of a float8 all-gather]
torchao casts a shard in FSDP2's pre-all-gather hook, which is a method of the parameter's tensor class. Other code must
not meet that class: a checkpoint that is staged for a background write would copy no data, and a pickled one needs
torchao to load. So state dicts hold the shard inside it, in the same memory. Two kinds of layers keep the usual
all-gather: those whose rows the ranks do not divide, because FSDP2 pads their shards and the cast would not, and those
of DoRA, which reads the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_dist.errors import LigerDistError
from liger_dist.model.peft import reads_base_weight
from liger_dist.model.torch_modes import untraced

from .process_groups import compute_device

Recipe = Literal["tensorwise", "rowwise"]
_MULTIPLE = 16
"""divisor of both sizes of a weight in float8 products"""
_CAPABILITY = (8, 9)
"""lowest compute capability with float8 products"""


def check_float8() -> None:
    """Refuses a machine without torchao or float8 products. CPUs emulate them.

    Raises:
        LigerDistError: with the way out.
    """
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise LigerDistError(
            f"float8 needs torchao, which cannot be imported ({error}); pip install torchao, or leave float8 out."
        ) from error
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _CAPABILITY:
        raise LigerDistError(
            f"float8 was asked for on {torch.cuda.get_device_name()} of capability "
            f"{torch.cuda.get_device_capability()}; expected {_CAPABILITY} or more, H100 or newer. Leave float8 out."
        )


def convert(
    layers: Iterable[nn.Module], recipe: Recipe, *, shards: int, numbers_of_experts: frozenset[int], undo: ExitStack
) -> None:
    """Swaps the classes of the linear layers in ``layers`` for torchao's. Call it before they are sharded.

    Args:
        shards: ranks that share the rows of a weight.
        numbers_of_experts: sizes of outputs that select experts; such layers are small, and their rounding would route
            tokens to other experts.

    Raises:
        LigerDistError: a weight that is a DTensor, or no layer with sizes that are multiples of 16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        # Any number of tokens.
        pad_inner_dim=True,
        emulate=compute_device().type == "cpu",
    )
    weights: dict[int, nn.Parameter] = {}
    for linear, keeps_weight in _fitting(layers, numbers_of_experts):
        gathers_float8 = recipe == "tensorwise" and not keeps_weight and linear.weight.shape[0] % shards == 0
        options = replace(config, enable_fsdp_float8_all_gather=gathers_float8)
        converted = convert_to_float8_training(linear, config=options)
        # Layers that share a weight go on sharing it.
        converted.weight = weights.setdefault(id(linear.weight), converted.weight)
        _become(linear, converted, undo)
        if gathers_float8:
            undo.callback(linear.register_state_dict_post_hook(_replace_by_shard).remove)


def numbers_of_experts(config: Any) -> frozenset[int]:
    """Returns the numbers of experts in a model's config."""
    named = {value for name, value in vars(config).items() if name.endswith("experts")}
    return frozenset(value for value in named if isinstance(value, int))


def _fitting(layers: Iterable[nn.Module], numbers_of_experts: frozenset[int]) -> list[tuple[nn.Linear, bool]]:
    """Returns the linear layers in ``layers`` that compute in float8, each once, with True if another module reads the
    layer's weight."""
    found = {linear: read for linear, read in _linears(layers) if linear.out_features not in numbers_of_experts}
    if not found:
        raise LigerDistError(
            "float8 was asked for and the decoder has no torch.nn.Linear; it computes these alone, not subclasses or "
            "weights of experts. Leave float8 out."
        )
    if any(isinstance(linear.weight, DTensor) for linear in found):
        raise LigerDistError(
            "float8 was asked for and the layers are tensor-parallel already; load the model without a plan, or leave "
            "float8 out."
        )
    fitting = [place for place in found.items() if all(size % _MULTIPLE == 0 for size in place[0].weight.shape)]
    if not fitting:
        raise LigerDistError(
            f"float8 was asked for and none of the {len(found)} linear layers of the decoder has sizes that are "
            f"multiples of {_MULTIPLE}; leave float8 out."
        )
    return fitting


def _linears(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Linear, bool]]:
    """Yields each linear layer, with True if its parent reads the weight; skips LoRA's matrices, which PEFT keeps in a
    ModuleDict."""
    for layer in layers:
        for parent in layer.modules():
            if isinstance(parent, nn.ModuleDict):
                continue
            for child in parent.children():
                if type(child) is nn.Linear:
                    yield child, reads_base_weight(parent)


def _become(linear: nn.Linear, converted: nn.Module, undo: ExitStack) -> None:
    """Gives ``linear`` the class, options and weight of ``converted``, and keeps its identity and hooks."""
    options = {name: value for name, value in vars(converted).items() if name not in vars(linear)}
    undo.callback(linear.register_parameter, "weight", linear._parameters["weight"])
    undo.callback(setattr, linear, "__class__", type(linear))
    for name in options:
        undo.callback(delattr, linear, name)
    linear.register_parameter("weight", converted.weight)  # type: ignore[arg-type]
    linear.__class__ = type(converted)  # type: ignore[assignment]
    vars(linear).update(options)


def _replace_by_shard(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Replaces the weight in a state dict by its shard as a torch.Tensor; see [Note: Weights of a float8
    all-gather]."""
    weight = state.get(f"{prefix}weight")
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    shard: Tensor | None = getattr(local, "_tensor", None)
    if shard is None:
        return
    if isinstance(weight, DTensor):
        shard = DTensor.from_local(
            shard, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    state[f"{prefix}weight"] = shard


def precompute_scales(decoder: nn.Module, undo: ExitStack) -> None:
    """Hooks ``decoder`` so that every forward first computes the scales of all its float8 weights: one all-reduce,
    instead of one before each all-gather."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    @untraced
    def before_forward(module: nn.Module, *_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(module)

    undo.callback(decoder.register_forward_pre_hook(before_forward).remove)
