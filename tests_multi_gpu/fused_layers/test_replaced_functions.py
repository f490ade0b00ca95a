"""Functions of transformers that are replaced after ``wrap`` (masks, attention, activations of convolutions), and
attention in both directions: the numbers of the model that is not wrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from models import make_batch, make_model
from torch import Tensor
from transformers import masking_utils, modeling_utils
from transformers.activations import ACT2FN, SiLUActivation
from transformers.integrations import sdpa_attention
from transformers.models.mamba2 import modeling_mamba2
from truth import relative_error

import liger_dist


def both(family: str, attention: str) -> tuple[Any, Any]:
    own: Any = make_model(family, dtype=torch.float32)
    own.set_attn_implementation(attention)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.mul_(4 if "self_attn" in name else 1)
    return own, liger_dist.wrap(copy.deepcopy(own))


def step(model: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(**make_batch(0)).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(own: Any, wrapped: Any) -> Tensor:
    (loss, gradients), (found, of_wrapped) = step(own), step(wrapped)
    assert relative_error(found, loss) < 1e-5
    assert max(relative_error(a, b) for a, b in zip(of_wrapped, gradients, strict=True)) < 1e-3
    return loss


def _nothing_earlier(row: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key > query - 2)


def _of_two_tokens(own: Any) -> Callable[..., Any]:
    def mask(**arguments: Any) -> Any:
        return own(**arguments | {"mask_function": _nothing_earlier, "allow_is_causal_skip": False})

    return mask


@contextmanager
def masks(own: str) -> Iterator[None]:
    entries: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    entries[own] = _of_two_tokens(entries[own])
    try:
        yield
    finally:
        del entries[own]


@contextmanager
def half_attention() -> Iterator[None]:
    entries: Any = modeling_utils.ALL_ATTENTION_FUNCTIONS

    def half(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention.sdpa_attention_forward(*args, **kwargs)
        return output / 2, weights

    entries["sdpa"] = half
    try:
        yield
    finally:
        del entries["sdpa"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("moment", ["before wrap", "after wrap"])
def test_replaced_masks_are_used(attention: str, moment: str) -> None:
    with masks(attention) if moment == "before wrap" else nullcontext():
        own, wrapped = both("llama", attention)
    usual = step(own)[0]
    with masks(attention):
        assert assert_same(own, wrapped) != usual
    assert torch.equal(assert_same(own, wrapped), usual)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_replaced_attention_is_that_of_its_models_alone(attention: str) -> None:
    own, wrapped = both("llama", attention)
    usual = step(own)[0]
    with half_attention():
        assert (assert_same(own, wrapped) == usual) == (attention == "eager")


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_attention_in_both_directions(family: str, hook: bool) -> None:
    own, wrapped = both(family, "eager")
    usual = step(own)[0]
    for model in (own, wrapped):
        model.config.is_causal = False
    if hook:
        for layer in wrapped.model.layers:
            layer.self_attn.register_forward_hook(lambda *_: None)
    assert assert_same(own, wrapped) != usual


class _Doubled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.nn.functional.silu(x)


@pytest.mark.parametrize("what", ["class", "table"])
def test_replaced_activations_of_convolutions_are_used(what: str) -> None:
    own, wrapped = both("mamba2", "eager")
    usual = step(own)[0]
    changed: Any = mock.patch.object(SiLUActivation, "forward", _Doubled.forward)
    if what == "table":
        changed = mock.patch.object(modeling_mamba2, "ACT2FN", type(ACT2FN)({**dict.copy(ACT2FN), "silu": _Doubled}))
    with changed:
        assert assert_same(own, wrapped) != usual
    assert_same(own, wrapped)
