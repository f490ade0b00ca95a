"""Layers with a config of their own: which attention ``wrap`` selects for copied layers, as the unwrapped model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import flash_attention
import pytest
import torch
from models import assert_below, assert_same, gradients, make_batch, make_model, relative_errors, true_loss_sum
from torch import Tensor, nn

import liger_dist


def upscaled(attention: str) -> Any:
    """Twice as many layers, by copies."""
    model: Any = make_model("llama")
    model.config._attn_implementation = attention
    model.model.layers = nn.ModuleList([copy.deepcopy(layer) for layer in model.model.layers for _ in range(2)])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    return model


def student_of_copies(attention: str) -> Any:
    teacher, model = make_model("llama", seed=1), make_model("llama")
    teacher.config._attn_implementation = model.config._attn_implementation = attention  # type: ignore[union-attr]
    model.model.layers = copy.deepcopy(teacher.model.layers)  # type: ignore[union-attr]
    return model


def replicated(attention: str) -> Any:
    peft = pytest.importorskip("peft")
    model: Any = make_model("llama")
    model.config._attn_implementation = attention
    torch.manual_seed(3)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            target_modules=["q_proj"],
            layer_replication=[(0, 2), (0, 2)],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        ),
    )


def bidirectional(attention: str) -> Any:
    """``is_causal`` of the modules counts only without a mask."""
    model: Any = make_model("llama")
    model.config._attn_implementation = attention
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


@pytest.mark.cover("values")
@pytest.mark.parametrize("rows", ["texts", "padded", "packed"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "make", [upscaled, student_of_copies, replicated, bidirectional], ids=lambda make: make.__name__
)
def test_attention_of_copied_layers(make: Callable[[str], Any], attention: str, rows: str) -> None:
    torch.manual_seed(0)
    own = make(attention).train()
    torch.manual_seed(0)
    wrapped = liger_dist.wrap(make(attention).train(), "none")
    for mine, theirs in zip(wrapped.parameters(), own.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # With a cache transformers does not separate the documents of a row.
    batch = make_batch(0, rows=rows) | {"use_cache": False}
    if rows == "padded":  # Eager attention makes NaN of rows that see nothing.
        batch = {name: value[1:] if isinstance(value, Tensor) else value for name, value in batch.items()}
    assert_same(wrapped, own, batch)


@pytest.mark.smoke
def test_attention_is_selected_in_stock_models() -> None:
    assert "liger_dist" in liger_dist.explain(liger_dist.wrap(make_model("llama"), "none")).attention


@pytest.mark.parametrize("rows", ["texts", "packed"])
@pytest.mark.parametrize("change", ["nothing", "copied", "pickled", "a global hook", "a patched forward"])
def test_hooks_of_eager_attention_read_its_weights(change: str, rows: str) -> None:
    """As penalties on the entropy of attention do."""
    found = []
    for is_wrapped in (True, False):
        model = build("eager")
        model = liger_dist.wrap(model, "none") if is_wrapped else model
        if change in ("copied", "pickled"):
            model = copy.deepcopy(model) if change == "copied" else pickle.loads(pickle.dumps(model))
        weights: list[Any] = []
        handles = []
        for layer in model.model.layers:
            if change == "a patched forward":
                layer.self_attn.forward = noting(layer.self_attn.forward, weights)
            elif change != "a global hook":
                layer.self_attn.register_forward_hook(lambda module, args, output, to=weights: to.append(output[1]))
        if change == "a global hook":
            attention = [layer.self_attn for layer in model.model.layers]
            handles.append(nn.modules.module.register_module_forward_hook(noting_of(attention, weights)))
        loss = model(**make_batch(0, rows=rows), use_cache=False).loss
        for handle in handles:
            handle.remove()
        (loss + 0.1 * sum((one.clamp_min(1e-9).log() * one).sum() for one in weights)).backward()
        found.append([float(loss.detach()), *(float(p.grad.norm()) for p in model.parameters())])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def noting_of(modules: list[nn.Module], to: list[Any]) -> Any:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        if any(module is one for one in modules):
            to.append(output[1])

    return note


def noting(forward: Any, to: list[Any]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        to.append(output[1])
        return output

    return noted


def build(attention: str) -> Any:
    model: Any = make_model("llama")
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("rows", ["texts", "padded", "packed"])
@pytest.mark.parametrize("name", flash_attention.NAMES)
def test_flash_attention_gets_the_lengths_of_documents(name: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package, or of a kernel of the hub."""
    model, batch = make_model("llama"), make_batch(0, rows=rows)
    own: Any = copy.deepcopy(model)
    wrapped: Any = liger_dist.wrap(flash_attention.select(model, name, monkeypatch), "none")
    assert "by their lengths, in the model's own" in str(liger_dist.explain(wrapped))
    loss = wrapped(**batch).loss
    loss.backward()
    total, count = true_loss_sum(own, batch)
    (total / count).backward()
    assert abs(float(loss.detach()) * count - float(total.detach())) < 1e-9 * float(total.detach())
    assert_below(relative_errors(gradients(wrapped), gradients(own)), 1e-9)
