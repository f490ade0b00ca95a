"""Parts and attributes of layers that change after a forward, or that have parameters of their own: a wrapped model
computes what the unwrapped one does with the same change."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import families
import on_device
import pytest
import torch
import torch.nn.functional as F
from families import Family, batch_for, build
from models import gradient_errors, make_batch, make_model
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import liger_dist
from liger_dist.fused_layers import recompute
from liger_dist.sharding.process_groups import compute_device

pytestmark = pytest.mark.filterwarnings("ignore:liger_dist leaves the loss")
TOLERANCE = 1e-4


class LearnedSwish(nn.Module):
    """SiLU, until it has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones((), device=compute_device()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class WithFunction(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.function(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class WithList(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.factors[0] * self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class WithTensor(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.factors[0][0])  # type: ignore[no-any-return]


class WithConfig(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(product * getattr(self.config, "factor", 1.0))  # type: ignore[no-any-return]


def each(model: Any, name: str) -> list[Any]:
    return [getattr(layer, name) for layer in model.model.layers]


def with_class(kind: type[nn.Module], **attributes: Any) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        for mlp in each(model, "mlp"):
            mlp.__class__ = kind
            vars(mlp).update(copy.deepcopy(attributes))

    return prepare


def with_activation(make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        for mlp in each(model, "mlp"):
            mlp.act_fn = make()

    return prepare


def with_norms(bias: bool) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        for layer in model.model.layers:
            layer.input_layernorm = nn.LayerNorm(16, elementwise_affine=True, bias=bias, device=compute_device())

    return prepare


def nothing(model: Any) -> None:
    pass


def other_function(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.function = F.gelu


def other_list(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.factors[0] = 2.0


def other_tensor(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.factors[0] = torch.full((2,), 2.0, device=compute_device())


def other_config(model: Any) -> None:
    model.config.factor = 2.0


def other_child(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.act_fn[0] = nn.GELU()


def other_class(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.act_fn.__class__ = nn.GELU
        mlp.act_fn.approximate = "none"


def hooked_activation(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output)


def bias_of_norms(model: Any) -> None:
    for norm in each(model, "input_layernorm"):
        norm.bias = nn.Parameter(torch.full((16,), 0.5, device=compute_device()))


def hooked_gradient_of_the_head(model: Any) -> None:
    model.lm_head.register_full_backward_pre_hook(lambda module, gradients: (3 * gradients[0],))


def other_loss_type(model: Any) -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    def double(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * ForCausalLMLoss(*args, **kwargs)

    LOSS_MAPPING["double"] = double
    model.loss_type = "double"


CHANGES: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "an activation that learns": (with_activation(LearnedSwish), nothing),
    "an activation of several modules": (with_activation(lambda: nn.Sequential(nn.SiLU())), other_child),
    "the class of an activation": (nothing, other_class),
    "a hook of an activation": (nothing, hooked_activation),
    "a function on an MLP": (with_class(WithFunction, function=F.silu), other_function),
    "a list on an MLP": (with_class(WithList, factors=[1.0]), other_list),
    "a list of tensors on an MLP": (
        with_class(WithTensor, factors=[torch.ones(2, device=compute_device())]),
        other_tensor,
    ),
    "a number in the config of an MLP": (with_class(WithConfig), other_config),
    "a bias of norms": (with_norms(bias=False), bias_of_norms),
    "the gradient of logits": (nothing, hooked_gradient_of_the_head),
    "the loss of a type": (nothing, other_loss_type),
}


def assert_same_after(change: Callable[[Any], None], own: Any, **config: Any) -> None:
    """Compares gradients of ``own`` and of a wrapped copy, after a step and the change."""
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none", config=liger_dist.WrapConfig(**config))
    for model in (own, wrapped):
        model(**make_batch(0)).loss.backward()
        model.zero_grad()
        change(model)
        model(**make_batch(0)).loss.backward()
    errors = gradient_errors(wrapped, own)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_part_is_computed(name: str) -> None:
    prepare, change = CHANGES[name]
    own = make_model("llama", dtype=torch.float32)
    prepare(own)
    assert_same_after(change, own)


def of_the_head(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 101


GLOBAL_HOOKS: dict[str, Callable[[], Any]] = {
    "full backward pre-hook": lambda: nn.modules.module.register_module_full_backward_pre_hook(
        lambda module, d_output: (3 * d_output[0],) if of_the_head(module) else None
    ),
    "full backward hook": lambda: nn.modules.module.register_module_full_backward_hook(
        lambda module, d_input, d_output: (3 * d_input[0],) if of_the_head(module) else None
    ),
    "forward pre-hook": lambda: nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (3 * args[0],) if of_the_head(module) else None
    ),
}


@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_global_hooks_of_the_head_run(kind: str) -> None:
    own: Any = make_model("llama", dtype=torch.float32)
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none")
    wrapped(**make_batch(0)).loss.backward()
    wrapped.zero_grad()
    hook = GLOBAL_HOOKS[kind]()
    try:
        for model in (own, wrapped):
            model(**make_batch(0)).loss.backward()
    finally:
        hook.remove()
    errors = gradient_errors(wrapped, own)
    assert max(errors.values()) < TOLERANCE, errors


def one_feature(projection: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        torch.manual_seed(0)
        for mlp in each(model, "mlp"):
            setattr(mlp, projection, nn.Linear(16, 1, device=compute_device()))

    return change


def mean_over(dim: int, projection: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for mlp in each(model, "mlp"):
            getattr(mlp, projection).register_forward_hook(lambda module, args, output: output.mean(dim, keepdim=True))

    return change


SHAPES = {"one feature": one_feature} | {f"mean over dim {dim}": partial(mean_over, dim) for dim in range(3)}


@pytest.mark.nightly
@pytest.mark.cover("values")
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("shape", SHAPES)
def test_projections_of_an_mlp_whose_shapes_broadcast(shape: str, projection: str, backend: str) -> None:
    change = SHAPES[shape](projection)
    assert_same_after(change, make_model("llama", dtype=torch.float32), backend=backend)


def test_patched_activations_run() -> None:
    own = make_model("llama", dtype=torch.float32)
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none")
    wrapped(**make_batch(0))
    kind: Any = type(own.model.layers[0].mlp.act_fn)
    with mock.patch.object(kind, "forward", lambda self, x: F.gelu(x)):
        losses = [float(model(**make_batch(0)).loss.detach()) for model in (own, wrapped)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_attention_that_is_made_bidirectional_later_is_refused() -> None:
    """Eager attention does not read it."""
    model: Any = liger_dist.wrap(make_model("llama", dtype=torch.float32), "none")
    if model.config._attn_implementation != "liger_dist":
        pytest.skip("this model keeps its own attention")
    for attention in each(model, "self_attn"):
        attention.is_causal = False
    with pytest.raises(liger_dist.LigerDistError, match="is_causal of a LlamaAttention is False"):
        model(**make_batch(0))


LORA = {"target_modules": ["q_proj", "k_proj", "lm_head"]}


def dropout_that_scales(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"].register_forward_hook(lambda module, args, output: 2 * output)


def part_that_is_not_linear(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["default"].register_forward_pre_hook(lambda module, args: (args[0].tanh(),))


@pytest.mark.parametrize("change", [dropout_that_scales, part_that_is_not_linear])
def test_hooks_inside_of_lora_run(change: Callable[[Any], None]) -> None:
    import peft

    own = peft.get_peft_model(
        make_model("llama", dtype=torch.float32), peft.LoraConfig(r=3, init_lora_weights=False, **LORA)
    )
    assert_same_after(change, own)


# --- weights between forward and backward, and from step to step ----------------------------------------------------


def exchanged(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.down_proj.weight = nn.Parameter(torch.randn_like(mlp.down_proj.weight))


def other_data(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.down_proj.weight.data = torch.randn_like(mlp.down_proj.weight)


def exchanged_projections(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.down_proj = nn.Linear(24, 16, bias=False, device=compute_device())


def hooked_projections(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.gate_proj.register_forward_hook(lambda module, args, output: 2 * output)


def unwrapped(model: Any) -> None:
    liger_dist.unwrap(model)


@pytest.mark.parametrize("change", [exchanged, other_data, exchanged_projections, hooked_projections, unwrapped])
def test_tiles_have_the_weights_of_the_forward(change: Callable[[Any], None]) -> None:
    found = []
    for is_changed in (False, True):
        model = make_model("llama", dtype=torch.float32)
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=7))
        loss = model(**make_batch(0)).loss
        of_embedding: Any = model.get_input_embeddings().weight  # type: ignore[operator]
        if is_changed:
            change(model)
        found.append(torch.autograd.grad(loss, of_embedding)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor * self.factors[0] * getattr(self, "later", 1.0)


def with_scaled_projections(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.up_proj.__class__ = Scaled
        mlp.up_proj.factor, mlp.up_proj.factors = 1.0, [1.0]


def with_dropout(model: Any) -> None:
    for mlp in each(model, "mlp"):
        dropout = nn.Sequential(nn.Dropout(0.3), mlp.down_proj)
        dropout.in_features, dropout.out_features = 24, 16
        mlp.down_proj = dropout


def with_keyword_hook(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.hook = mlp.up_proj.register_forward_pre_hook(
            lambda module, args, kwargs: ((0.5 * args[0],), kwargs), with_kwargs=True
        )


def of_projections(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(model: Any) -> None:
        for mlp in each(model, "mlp"):
            change(mlp.up_proj)

    return changed


def other_forward(projection: Any) -> None:
    projection.forward = lambda x: torch.zeros(*x.shape[:-1], 24, device=compute_device())


def other_probability(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.down_proj[0].p = 0.8


def without_hook(model: Any) -> None:
    for mlp in each(model, "mlp"):
        mlp.hook.remove()


BETWEEN = {
    "forward of an instance": (nothing, of_projections(other_forward)),
    "number": (with_scaled_projections, of_projections(lambda one: setattr(one, "factor", 3.0))),
    "item": (with_scaled_projections, of_projections(lambda one: one.factors.__setitem__(0, 3.0))),
    "absent attribute": (with_scaled_projections, of_projections(lambda one: setattr(one, "later", 3.0))),
    "deleted attribute": (with_scaled_projections, of_projections(lambda one: delattr(one, "factor"))),
    "p of a dropout": (with_dropout, other_probability),
    "hook with keywords": (with_keyword_hook, without_hook),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_tiles_have_the_attributes_of_the_forward(what: str) -> None:
    prepare, change = BETWEEN[what]
    found = []
    for is_changed in (False, True):
        model: Any = make_model("llama", dtype=torch.float32).train()
        prepare(model)
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=7))
        torch.manual_seed(3)
        loss = model(**make_batch(0)).loss
        if is_changed:
            change(model)
        found.append(torch.autograd.grad(loss, model.model.embed_tokens.weight)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def halved_linear(module: nn.Linear, x: Tensor) -> Tensor:
    return 0.5 * F.linear(x, module.weight, module.bias)


class HalvedLinear(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 0.5 * result if function is F.linear and result.shape[-1] == 24 else result


@pytest.mark.parametrize("when", ["forward", "backward", "both"])
@pytest.mark.parametrize("kind", ["global hook", "torch function mode", "forward of a class"])
def test_tiles_under_what_ends_or_begins_before_the_backward(kind: str, when: str) -> None:
    def context() -> Any:
        if kind == "torch function mode":
            return HalvedLinear()
        if kind == "forward of a class":
            return mock.patch.object(nn.Linear, "forward", halved_linear)
        stack = ExitStack()
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: 0.5 * output if isinstance(module, nn.Linear) else None
        )
        stack.callback(hook.remove)
        return stack

    is_refused = kind == "forward of a class" and when != "both"
    found: list[Tensor] = []
    own: Any = make_model("llama", dtype=torch.float32)
    config = liger_dist.WrapConfig(mlp_tile_tokens=7, fused_loss=False)
    for model in (own, liger_dist.wrap(copy.deepcopy(own), "none", config=config)):
        with context() if when != "backward" else nullcontext():
            loss = model(**make_batch(0)).loss
        with ExitStack() as stack:
            if found and is_refused:
                stack.enter_context(pytest.raises(liger_dist.LigerDistError, match="since the forward of an MLP"))
            stack.enter_context(context() if when != "forward" else nullcontext())
            found.append(torch.autograd.grad(loss, model.model.embed_tokens.weight)[0])
    if is_refused:
        assert len(found) == 1
        return
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.5, True),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "of the CPU": lambda x: x * torch.rand(x.shape[-1], device="cpu").to(x.device),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_tiles_draw_the_random_numbers_of_the_forward(draw: str) -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=7))
    drawn: list[list[Tensor]] = [[], []]

    def hook(noted: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> Tensor:
        result = DRAWS[draw](output)
        noted.append(result.detach().clone())
        return result

    for mlp, noted in zip(each(model, "mlp"), drawn, strict=True):
        mlp.gate_proj.register_forward_hook(partial(hook, noted))
    loss = model(**make_batch(0)).loss
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    for noted in drawn:
        half = len(noted) // 2
        assert half > 1
        torch.testing.assert_close(noted[half:], noted[:half], rtol=1e-5, atol=1e-6)


def test_tiles_of_a_projection_that_writes_its_buffers_are_refused() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    for mlp in each(model, "mlp"):
        torch.nn.utils.spectral_norm(mlp.gate_proj)
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=7))
    with pytest.raises(liger_dist.LigerDistError, match="writes to its buffers in its forward"):
        model(**make_batch(0))


def test_tiles_take_the_weights_of_a_functional_call() -> None:
    own = make_model("llama", dtype=torch.float32)
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none", config=liger_dist.WrapConfig(mlp_tile_tokens=7))
    torch.manual_seed(3)
    given = {name: (p.detach() + 0.1 * torch.randn_like(p)).requires_grad_() for name, p in own.named_parameters()}
    found = []
    for model in (own, wrapped):
        loss = torch.func.functional_call(model, given, (), make_batch(0)).loss
        found.append(torch.autograd.grad(loss, list(given.values())))
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly(name=["falcon_h1", "phi3", "cohere2"])
@pytest.mark.parametrize("name", ["phi3", "falcon_h1", "deepseek_v3", "cohere2", "jamba"])
def test_other_weights_train_in_each_step(name: str) -> None:
    """The memory of an output that was freed is another tensor's a moment later."""
    family = next(one for one in families.families() if one.name == name)
    assert isinstance(family, Family)
    own: Any = build(family).float().train()
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none")
    batch = batch_for(family, own)
    kinds = sorted({parameter.split(".", 3)[-1] for parameter, _ in own.named_parameters()})
    random_numbers = random.Random(0)
    with mock.patch.object(recompute, "MIN_BYTES", 1):
        for step in range(25):
            trained = [kind for kind in kinds if step == 0 or random_numbers.random() > 0.4]
            length = random_numbers.choice([12, 40, 64])
            generator = torch.Generator().manual_seed(step)
            ids = on_device.randint(3, 80, (2, length), generator=generator)
            for model in (own, wrapped):
                model.zero_grad()
                for parameter, value in model.named_parameters():
                    value.requires_grad_(parameter.split(".", 3)[-1] in trained)
                model(**(batch | {"input_ids": ids, "labels": ids})).loss.backward()
            errors = gradient_errors(wrapped, own)
            assert max(errors.values()) < 2e-3, (step, errors)
