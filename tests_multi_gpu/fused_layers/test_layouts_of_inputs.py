"""Results of swapped layers have the strides of the model's own, for inputs in any layout: models call view on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
from models import HYBRIDS, make_model
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import liger_dist
from liger_dist.fused_layers.swap import Swapped
from liger_dist.sharding.process_groups import compute_device


def contiguous(*shape: int) -> Tensor:
    return on_device.randn(*shape)


def tokens_last(*shape: int) -> Tensor:
    """As a vision tower flattens an image ``[B, D, H * W]``."""
    return on_device.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def exchanged(*shape: int) -> Tensor:
    """As heads and tokens are exchanged."""
    order = [1, 0, *range(2, len(shape))]
    return on_device.randn(*(shape[dim] for dim in order)).permute(order)


def sliced(*shape: int) -> Tensor:
    """A part of the features of a wider row, as of one projection of queries, keys and values."""
    return on_device.randn(*shape[:-1], 3 * shape[-1])[..., shape[-1] : 2 * shape[-1]]


def expanded(*shape: int) -> Tensor:
    return on_device.randn(1, *shape[1:]).expand(shape)


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (contiguous, tokens_last, exchanged, sliced, expanded)
}


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(16),
    "RMSNorm of torch": lambda: nn.RMSNorm(16, eps=1e-6),
    "RMSNorm of Llama": lambda: modeling_llama.LlamaRMSNorm(16),
}


BACKENDS = ["auto", "triton"]
"""kernels give contiguous results; their references on CPUs keep strides by themselves"""


@pytest.mark.nightly(dims=[2], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, layout: str, dims: int, backend: Any) -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    model.model.norm = NORMS[name]().to(compute_device())
    own = copy.deepcopy(model.model.norm)
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(backend=backend))
    assert isinstance(model.model.norm, Swapped)
    rows = LAYOUTS[layout](*(2, 3, 5, 16)[4 - dims :])
    check(model.model.norm, own, rows)


def check(swapped: nn.Module, own: nn.Module, *given: Tensor) -> None:
    """Compares values, strides and gradients of the first input and of weights."""
    results = []
    for module in (swapped, own):
        first = given[0].detach().requires_grad_()
        y = module(first, *given[1:])
        y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape))
        results.append((y, [first.grad, *(p.grad for p in module.parameters())]))
    (y, gradients), (truth, true_gradients) = results
    assert y.stride() == truth.stride()
    assert torch.allclose(y, truth, rtol=1e-5, atol=1e-5)
    for found, true in zip(gradients, true_gradients, strict=True):
        assert torch.allclose(found, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_gated_norms(layout: str, backend: Any) -> None:
    model: Any = make_model("qwen3_5_text", dtype=torch.float32)
    assert "linear_attention" in HYBRIDS["qwen3_5_text"]["layer_types"]
    norm = next(m for m in model.modules() if "RMSNormGated" in type(m).__name__)
    own = copy.deepcopy(norm)
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(backend=backend))
    assert isinstance(norm, Swapped)
    shape = (4, 6, norm.weight.shape[0])
    check(norm, own, LAYOUTS[layout](*shape), LAYOUTS[layout](*shape))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_gated_mlps_and_rotary_functions(layout: str) -> None:
    """Of a whole decoder layer, whose hidden states come in a layout."""
    model: Any = make_model("llama", dtype=torch.float32)
    layer = model.model.layers[0]
    own = copy.deepcopy(layer)
    liger_dist.wrap(model, "none")
    assert isinstance(layer.mlp, Swapped)
    rows = LAYOUTS[layout](2, 5, 16)
    check(layer.mlp, own.mlp, rows)
    positions = torch.arange(5, device=rows.device)[None]
    tables = model.model.rotary_emb(rows, positions)
    outputs = [one.self_attn(rows, position_embeddings=tables, attention_mask=None)[0] for one in (layer, own)]
    assert outputs[0].stride() == outputs[1].stride()
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_images_of_models_that_view_the_result_of_a_norm(name: str) -> None:
    """The tower transposes its rows before its last norm."""
    import transformers as t

    text = t.LlamaConfig(
        vocab_size=131, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"patch_size": 4, "image_size": 16}
    config, cls = {
        "idefics3": (t.Idefics3Config, t.Idefics3ForConditionalGeneration),
        "smolvlm": (t.SmolVLMConfig, t.SmolVLMForConditionalGeneration),
    }[name]
    torch.manual_seed(0)
    model = cls(config(text_config=text, vision_config=vision, image_token_id=97, scale_factor=2, pad_token_id=0))
    model = model.to(compute_device())
    reference = copy.deepcopy(model).double()
    ids = on_device.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(1)).to(compute_device())
    ids[:, 1:5] = 97
    batch: dict[str, Any] = {
        "input_ids": ids,
        "labels": ids,
        "pixel_attention_mask": torch.ones(2, 1, 16, 16, dtype=torch.bool, device=compute_device()),
    }
    pixels = on_device.randn(2, 1, 3, 16, 16)
    wrapped = liger_dist.wrap(model, "none")
    wrapped(**batch, pixel_values=pixels).loss.backward()
    reference(**batch, pixel_values=pixels.double()).loss.backward()
    truth = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    found = {key: p.grad for key, p in wrapped.named_parameters() if p.grad is not None}
    assert found.keys() == truth.keys()
    # The gradient of a bias of keys is zero but for rounding.
    largest = max(float(true.norm()) for true in truth.values())
    errors = {
        key: float((found[key] - true).norm()) / max(float(true.norm()), 1e-3 * largest) for key, true in truth.items()
    }
    assert max(errors.values()) < 1e-4, errors
