"""float8 linear layers of torchao under FSDP2, and its private names.

With the recipe "tensorwise" each rank casts its shards, with scales that one all-reduce per forward of the model
computes for all weights, and FSDP2 all-gathers one byte per element. With "rowwise" it all-gathers the compute dtype,
and every rank casts the full weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from liger_dist.errors import LigerDistError

from .process_groups import compute_device

Recipe = Literal["tensorwise", "rowwise"]
_MULTIPLE = 16
"""that float8 products ask of both sizes of a weight"""
_CAPABILITY = (8, 9)
"""the first GPUs with float8 products"""


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


def _linears(layers: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """The linear layers in ``layers``. PEFT keeps the matrices of LoRA in dictionaries of modules, which are left
    out."""
    for layer in layers:
        for parent in layer.modules():
            if not isinstance(parent, nn.ModuleDict):
                yield from (child for child in parent.children() if type(child) is nn.Linear)


def convert(layers: Iterable[nn.Module], recipe: Recipe, undo: ExitStack) -> None:
    """Swaps the classes of the linear layers in ``layers`` for torchao's. Before they are sharded.

    Raises:
        LigerDistError: a weight that is a DTensor, or no layer with sizes that are multiples of 16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        enable_fsdp_float8_all_gather=recipe == "tensorwise",
        # Any number of tokens.
        pad_inner_dim=True,
        emulate=compute_device().type == "cpu",
    )
    found = list(_linears(layers))
    if any(isinstance(linear.weight, DTensor) for linear in found):
        raise LigerDistError(
            "float8 was asked for and the layers are tensor-parallel already; load the model without a plan, or leave "
            "float8 out."
        )
    fitting = [linear for linear in found if all(size % _MULTIPLE == 0 for size in linear.weight.shape)]
    if not fitting:
        raise LigerDistError(
            f"float8 was asked for and none of the {len(found)} linear layers of the decoder has sizes that are "
            f"multiples of {_MULTIPLE}; leave float8 out."
        )
    for linear in fitting:
        _become(linear, convert_to_float8_training(linear, config=config), undo)


def _become(linear: nn.Linear, converted: nn.Module, undo: ExitStack) -> None:
    """Gives ``linear`` class, options and weight of ``converted``; its identity and its hooks stay."""
    options = {name: value for name, value in vars(converted).items() if name not in vars(linear)}
    undo.callback(linear.register_parameter, "weight", linear._parameters["weight"])
    undo.callback(setattr, linear, "__class__", type(linear))
    for name in options:
        undo.callback(delattr, linear, name)
    linear.register_parameter("weight", converted.weight)  # type: ignore[arg-type]
    linear.__class__ = type(converted)  # type: ignore[assignment]
    vars(linear).update(options)


def precompute_scales(model: nn.Module, undo: ExitStack) -> None:
    """Makes every forward of ``model`` compute the scales of all its float8 weights first: one all-reduce, instead of
    one before each all-gather. Weights that change outside of a training step need no further call."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def before_forward(module: nn.Module, *_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(module)

    undo.callback(model.register_forward_pre_hook(before_forward).remove)
