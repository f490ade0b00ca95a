"""Adapters of PEFT on the head and on the layers, held to the same model of PEFT unwrapped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import make_batch, make_model, relative_errors
from torch import nn
from truth import relative_error

import liger_dist

peft = pytest.importorskip("peft")

SETTINGS: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 3},
    "DoRA": {"r": 3, "use_dora": True},
    "rank-stabilised LoRA": {"r": 4, "use_rslora": True, "lora_alpha": 5},
    "LoRA on every projection": {"r": 2, "target_modules": "all-linear"},
}


def adapt(model: nn.Module, *, name: str = "default", seed: int = 1, **settings: Any) -> Any:
    settings = {"target_modules": ["q_proj", "lm_head"]} | settings
    if settings["target_modules"] == "all-linear":
        settings["target_modules"] = ["q_proj", "v_proj", "gate_proj", "down_proj", "lm_head"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings), adapter_name=name)
    fill(adapted, name, seed)
    return adapted


def fill(adapted: nn.Module, name: str, seed: int) -> None:
    """A fresh adapter adds nothing; this one does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name and f".{name}." in parameter_name:
                drawn = 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.copy_(drawn if "magnitude" not in parameter_name else parameter + drawn)


def assert_same_step(actual: nn.Module, reference: nn.Module, batch: Any, *, is_fused: bool = True) -> None:
    """Loss and every gradient."""
    for model in (actual, reference):
        model.zero_grad()
        torch.manual_seed(0)
    output = actual(**batch)
    torch.manual_seed(0)
    expected = reference(**batch)
    assert hasattr(output, "logits") != is_fused
    assert relative_error(output.loss, expected.loss) < 1e-5
    output.loss.backward()
    expected.loss.backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    own = dict(actual.named_parameters())
    for name, error in relative_errors({name: own[name].grad for name in gradients}, gradients, floor=1e-2).items():
        assert error < 1e-4, name


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("order", ["wrapped first", "adapted first"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_an_adapter_on_the_head_counts(name: str, order: str, bias: bool) -> None:
    model = make_model("llama", dtype=torch.float32, bias=bias)
    reference = adapt(copy.deepcopy(model), **SETTINGS[name])
    if order == "wrapped first":
        liger_dist.wrap(model)
        adapted = adapt(model, **SETTINGS[name])
    else:
        adapted = adapt(model, **SETTINGS[name])
        liger_dist.wrap(model)
    assert_same_step(adapted, reference, make_batch(0))
    plain = make_model("llama", dtype=torch.float32, bias=bias)(**make_batch(0)).loss
    assert relative_error(reference(**make_batch(0)).loss, plain) > 1e-3, "the adapter adds nothing, so nothing is seen"


def test_adapters_are_switched_disabled_merged_and_unloaded() -> None:
    model = make_model("llama", dtype=torch.float32)
    reference = adapt(copy.deepcopy(model), r=2)
    liger_dist.wrap(model)
    adapted = adapt(model, r=2)
    for one in (adapted, reference):
        one.add_adapter("other", peft.LoraConfig(target_modules=["lm_head"], r=4, use_dora=True))
        fill(one, "other", 2)
    for name in ("other", "default", "other"):
        adapted.set_adapter(name)
        reference.set_adapter(name)
        assert_same_step(adapted, reference, make_batch(0))
    with adapted.disable_adapter(), reference.disable_adapter(), torch.no_grad():
        assert relative_error(adapted(**make_batch(1)).loss, reference(**make_batch(1)).loss) < 1e-5
    adapted.merge_adapter()
    reference.merge_adapter()
    with torch.no_grad():
        assert relative_error(adapted(**make_batch(1)).loss, reference(**make_batch(1)).loss) < 1e-5
    adapted.unmerge_adapter()
    reference.unmerge_adapter()
    assert_same_step(adapted, reference, make_batch(2))
    merged, expected = adapted.merge_and_unload(), reference.merge_and_unload()
    assert not hasattr(merged(**make_batch(0)), "logits")
    with torch.no_grad():
        assert relative_error(merged(**make_batch(0)).loss, expected(**make_batch(0)).loss) < 1e-5
    liger_dist.unwrap(merged)
    assert type(merged.lm_head) is nn.Linear
    assert merged.state_dict().keys() == expected.state_dict().keys()


def test_dropout_in_an_adapter_on_the_head_runs_unfused_and_says_so() -> None:
    model = make_model("llama", dtype=torch.float32)
    reference = adapt(copy.deepcopy(model), r=2, lora_dropout=0.3)
    liger_dist.wrap(model)
    adapted = adapt(model, r=2, lora_dropout=0.3)
    with pytest.warns(UserWarning, match=r"lora_dropout=0\.0"):
        assert_same_step(adapted, reference, make_batch(0), is_fused=False)
    adapted.eval()
    reference.eval()
    assert_same_step(adapted, reference, make_batch(0))


@pytest.mark.parametrize("order", ["wrapped first", "adapted first"])
def test_an_adapter_without_one_weight_is_refused(order: str) -> None:
    settings = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
    model = make_model("llama", dtype=torch.float32)
    if order == "adapted first":
        peft.get_peft_model(model, settings)
        with pytest.raises(liger_dist.LigerDistError, match=r"expected LoRA or DoRA.*target_modules"):
            liger_dist.wrap(model)
        return
    liger_dist.wrap(model)
    adapted = peft.get_peft_model(model, settings)
    with pytest.raises(liger_dist.LigerDistError, match=r"expected LoRA or DoRA.*target_modules"):
        adapted(**make_batch(0))


def test_unwrapping_under_an_adapter_restores_everything() -> None:
    model = make_model("llama", dtype=torch.float32)
    adapted = adapt(model, r=2)
    classes = {name: type(module) for name, module in adapted.named_modules()}
    liger_dist.wrap(model)
    assert {name: type(module) for name, module in adapted.named_modules()} != classes
    adapted(**make_batch(0)).loss.backward()
    liger_dist.unwrap(model)
    assert {name: type(module) for name, module in adapted.named_modules()} == classes
    assert adapted(**make_batch(0)).logits.shape[-1] == 101


def test_a_release_of_peft_that_calls_forward_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.18 does, around the hooks of the model."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)

    monkeypatch.setattr(peft.tuners.tuners_utils.BaseTuner, "forward", forward)
    adapted = adapt(make_model("llama"))
    tuner = adapted.base_model
    expected = adapted(**make_batch(0)).loss
    liger_dist.wrap(adapted, "none")
    output = adapted(**make_batch(0))
    assert not hasattr(output, "logits")
    assert relative_error(output.loss, expected) < 1e-6
    liger_dist.unwrap(adapted)
    assert "forward" not in vars(tuner)
    assert hasattr(adapted(**make_batch(0)), "logits")
