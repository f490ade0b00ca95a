"""What a model was in the forward is what its backward computes with, whatever changes in between: the gradient is that
without the change, or an error says that it cannot be."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from models import make_batch, make_model
from torch import Tensor

import liger_dist
from liger_dist.fused_layers import recompute
from liger_dist.sharding.process_groups import compute_device

peft = pytest.importorskip("peft")
LORA = {"target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]}


def adapted(family: str = "llama") -> Any:
    model = make_model(family, dtype=torch.float32)
    torch.manual_seed(5)
    options = peft.LoraConfig(r=3, init_lora_weights=False, lora_dropout=0.25, **LORA)
    made = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
    made.add_adapter("second", peft.LoraConfig(r=3, init_lora_weights=False, **LORA))
    return made.to(compute_device()).train()


def dense(family: str = "llama") -> Any:
    return make_model(family, dtype=torch.float32).train()


@contextmanager
def small_outputs_too() -> Iterator[None]:
    with mock.patch.object(recompute, "MIN_BYTES", 1):
        yield


def checkpointed(model: Any, *, use_reentrant: bool) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


MECHANISMS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False)),
    "tiles": lambda model: liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=7)),
    "recomputed outputs": lambda model: liger_dist.wrap(model, "none"),
    "chunks of the head": lambda model: liger_dist.wrap(
        model, "none", config=liger_dist.WrapConfig(memory_budget=4096)
    ),
}
"""what a backward computes again"""
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "checkpoint": {"use_reentrant": False},
    "reentrant checkpoint": {"use_reentrant": True},
}


# --- changes between a forward and its backward ----------------------------------------------------------------------


def to_eval(model: Any) -> None:
    model.eval()


def frozen(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            parameter.requires_grad_(False)


def other_adapter(model: Any) -> None:
    model.set_adapter("second")


def without_adapter(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def rescaled(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 3


def other_settings(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1.0


def written(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.down_proj" in name:
                parameter.mul_(1.5)


CHANGES = {
    function.__name__: function
    for function in (to_eval, frozen, other_adapter, without_adapter, rescaled, other_settings, written)
}
OF_ADAPTERS = ("other_adapter", "without_adapter", "rescaled")


def gradients(model: Any, change: Callable[[Any], None] | None) -> dict[str, Tensor] | str:
    """By parameter, or the name of the error."""
    torch.manual_seed(11)
    loss = model(**make_batch(0)).loss
    if change is not None:
        change(model)
    try:
        loss.backward()
    except (RuntimeError, liger_dist.LigerDistError) as error:  # Of what was written in place.
        return type(error).__name__
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["dense", "LoRA"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_change_between_forward_and_backward_changes_no_gradient(mechanism: str, kind: str, change: str) -> None:
    if kind == "dense" and change in OF_ADAPTERS:
        pytest.skip("no adapters")
    make = adapted if kind == "LoRA" else dense
    with small_outputs_too():
        expected = gradients(MECHANISMS[mechanism](make()), None)
        found = gradients(MECHANISMS[mechanism](make()), CHANGES[change])
        own = gradients(make(), CHANGES[change])
    assert isinstance(expected, dict)
    if isinstance(found, str):
        # Torch's error, or one that the model has without this library, for a weight that was written to.
        assert change == "written"
        assert isinstance(own, str) or mechanism == "tiles"
        return
    # Torch accumulates no gradient for what requires none any more, as of adapters that are not active.
    assert isinstance(own, dict)
    assert found.keys() == own.keys()
    for name in own:
        assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "written"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_change_before_a_checkpoint_is_recomputed_does_what_it_does_unwrapped(checkpoint: str, change: str) -> None:
    """Torch's checkpoints run the model's forward again, as it is then."""

    def made() -> Any:
        model = adapted()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # Their random numbers are drawn in another order.
        return checkpointed(model, **CHECKPOINTS[checkpoint])

    own, unchanged = gradients(made(), CHANGES[change]), gradients(made(), None)
    found = gradients(liger_dist.wrap(made(), "none"), CHANGES[change])
    if isinstance(found, str):
        # What is recomputed saves other tensors, which torch notices.
        assert found == "CheckpointError"
        return
    # Without kernels torch may notice what it does not with them.
    truth = unchanged if isinstance(own, str) else own
    assert isinstance(truth, dict)
    for name, gradient in found.items():
        assert (gradient - truth[name]).norm() <= 2e-4 * truth[name].norm() + 1e-7, name


def test_weights_of_tiles_may_change_after_the_backward() -> None:
    model = MECHANISMS["tiles"](dense())
    reference = copy.deepcopy(MECHANISMS["none"](dense()))
    for one in (model, reference):
        for _ in range(2):
            one(**make_batch(0)).loss.backward()
            written(one)
    for (name, found), (_, true) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (found.grad - true.grad).norm() <= 1e-5 * true.grad.norm(), name


def test_a_hook_of_a_projection_that_writes_to_its_input_reaches_the_next_ones() -> None:
    """By ``.data``, which has no version."""

    def write(module: Any, args: Any, output: Any) -> None:
        args[0].data.mul_(1.25)

    def loss(model: Any) -> Tensor:
        for layer in model.base_model.model.model.layers:
            layer.self_attn.q_proj.register_forward_hook(write)
        found: Tensor = model(**make_batch(0)).loss
        return found.detach()

    own, wrapped = adapted().eval(), liger_dist.wrap(adapted().eval(), "none")
    assert torch.allclose(loss(wrapped), loss(own), rtol=1e-5)


def base_trains(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            parameter.requires_grad_(True)


def capturing_hooks(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["default"].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [base_trains, capturing_hooks, lambda model: None], ids=["base", "hooks", "plain"])
def test_products_that_a_selective_checkpoint_keeps_are_not_written_to(change: Any) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    gradients = []
    for is_wrapped in (False, True):
        # Without dropout, which would draw other numbers in fp64.
        options = peft.LoraConfig(r=3, init_lora_weights=False, **LORA)
        base = make_model("llama", dtype=torch.float32)
        model = peft.get_peft_model(base, options, autocast_adapter_dtype=False).to(compute_device()).train()
        change(model)
        if is_wrapped:
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
            model.enable_input_require_grads()
        model = liger_dist.wrap(model, "none") if is_wrapped else model.double()
        model(**make_batch(0)).loss.backward()
        gradients.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, true in gradients[0].items():
        assert (gradients[1][name] - true).norm() <= 1e-4 * true.norm() + 1e-7, name
