"""Models with code of the user's own, and models that are changed after wrapping: the same numbers, the model's own
code, or a refusal; never a different number without a word."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import on_device
import pytest
import torch
import torch.nn.functional as F
from models import make_batch, make_config, make_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
)
from truth import relative_error

import liger_dist
from liger_dist.fused_layers.swap import Swapped
from liger_dist.sharding.process_groups import compute_device

Model = Any


def build(cls: Any = LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = cls(make_config("llama")).to(dtype).to(compute_device())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def assert_same_step(model: Model, reference: Model, **inputs: Any) -> None:
    """Loss and gradients."""
    batch = make_batch(0) | inputs
    losses = []
    for one in (model, reference):
        one.zero_grad()
        torch.manual_seed(3)
        losses.append(one(**batch).loss)
        losses[-1].backward()
    assert relative_error(losses[0], losses[1]) < 1e-5
    for (name, parameter), own in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (own.grad is None), name
        if own.grad is not None:
            assert relative_error(parameter.grad, own.grad) < 1e-3, name


class WithResidual(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class WithScaledInput(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2.0)


class WithInputDropout(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class WithGain(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(on_device.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


@pytest.mark.parametrize("cls", [WithResidual, WithScaledInput, WithInputDropout, WithGain])
def test_an_mlp_that_does_more_keeps_its_own_code(cls: Any) -> None:
    model = build()
    for layer in model.model.layers:
        own, layer.mlp = layer.mlp, cls(model.config).to(compute_device())
        layer.mlp.load_state_dict(own.state_dict(), strict=False)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    assert not any(isinstance(layer.mlp, Swapped) for layer in model.model.layers)
    assert_same_step(model, reference)


class LouderInTraining(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        y = super().forward(hidden_states)
        return y * 1.5 if self.training else y


class OneGain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(on_device.full((1,), 1.3)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OneGainNorm(OneGain):
    """By its name a norm."""


@pytest.mark.parametrize("make", [lambda: LouderInTraining(16, 1e-6), OneGainNorm])
def test_a_norm_that_is_unusual_keeps_its_own_code(make: Any) -> None:
    model = build()
    for layer in model.model.layers:
        layer.input_layernorm = make().to(compute_device())
    reference = copy.deepcopy(model)
    model.eval()
    liger_dist.wrap(model)
    model.train()
    assert not isinstance(model.model.layers[0].input_layernorm, Swapped)
    assert_same_step(model, reference)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(model: Model) -> None:
    parametrize.register_parametrization(model.model.norm, "weight", Doubled())


def weight_as_buffer(model: Model) -> None:
    weight = model.model.norm.weight.detach().clone()
    del model.model.norm.weight
    model.model.norm.register_buffer("weight", 3 * weight)


def other_activation(model: Model) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def hook_on_activation(model: Model) -> None:
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, inputs, output: output * 0.5)


def other_eps(model: Model) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.1


def hook_before_norm(model: Model) -> None:
    model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * 0 + 1,)
    )


def hook_after_norm(model: Model) -> None:
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, inputs, output: output * 0.5)


def forward_around_norm(model: Model) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    own = norm.forward
    norm.forward = lambda x: own(x) * 0.5


CHANGES = [
    parametrized, weight_as_buffer, other_activation, hook_on_activation, other_eps, hook_before_norm, hook_after_norm,
    forward_around_norm,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_layers_changed_after_wrapping_compute_what_they_are_now(change: Any) -> None:
    model = build()
    reference = copy.deepcopy(model)
    before = model(**make_batch(0)).loss
    liger_dist.wrap(model)
    for one in (model, reference):
        change(one)
    assert relative_error(reference(**make_batch(0)).loss, before) > 1e-4, "the change changes nothing"
    assert_same_step(model, reference)
    liger_dist.unwrap(model)
    assert_same_step(model, reference)


def test_replicas_of_data_parallel_keep_their_norms() -> None:
    """Their parameters are plain attributes, as ``torch.nn.parallel.replicate`` makes them."""
    model = build()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, config=liger_dist.WrapConfig(fused_loss=False))
    modules = list(model.modules())
    replicas: Any = {module: module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        for name, child in module._modules.items():
            setattr(replicas[module], name, replicas[child])
        for name, parameter in module._parameters.items():
            if parameter is None:
                replicas[module]._parameters[name] = None
            else:
                setattr(replicas[module], name, parameter.view_as(parameter))
    assert relative_error(replicas[model](**make_batch(0)).loss, reference(**make_batch(0)).loss) < 1e-5


@pytest.mark.parametrize("when", ["before a second wrap", "while wrapped"])
def test_a_class_patched_for_the_whole_process(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    liger_dist.wrap(build())
    if when == "while wrapped":
        liger_dist.wrap(model)
    layer, mlp = LlamaDecoderLayer.forward, LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: mlp(self, x) * 0.5)
    if when == "before a second wrap":
        monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda self, x, *a, **k: layer(self, x, *a, **k) * 0.5)
        liger_dist.wrap(model)
    reference = build()
    assert_same_step(model, reference)


class Logits(LlamaForCausalLM):
    """Arithmetic on logits and labels that the probe's call cannot show."""

    temper = 1.0

    def forward(self, input_ids: Any = None, labels: Any = None, temp: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        ignored = kwargs.pop("ignored", None)
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        if temp is not None:
            logits = logits / temp
        if self.temper != 1.0:
            logits = logits * self.temper
        if ignored is not None and labels is not None:
            labels = torch.where(input_ids == ignored, -100, labels)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def copied(model: Model, file: io.BytesIO) -> Model:
    return copy.deepcopy(model)


def loaded(model: Model, file: io.BytesIO) -> Model:
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_copied_layers(model: Model, file: io.BytesIO) -> Model:
    """As PEFT's ``modules_to_save`` copies modules."""
    model.model.layers = nn.ModuleList(map(copy.deepcopy, model.model.layers))
    return model


def halved(forward: Any) -> Any:
    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return (0.5 * output[0], *output[1:]) if isinstance(output, tuple) else 0.5 * output

    return patched


def mirrored(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return 0.5 * q.flip(-1), k


PATCHES: dict[str, tuple[Any, str, Any]] = {
    f"forward of {cls.__name__}": (cls, "forward", halved(cls.forward))
    for cls in (LlamaMLP, LlamaRMSNorm, LlamaAttention, nn.SiLU)
} | {"rotary function": (modeling_llama, "apply_rotary_pos_emb", mirrored)}


@pytest.mark.parametrize("make", [copied, loaded, with_copied_layers])
@pytest.mark.parametrize("patch", PATCHES)
def test_copies_made_after_a_patch_run_it(patch: str, make: Any) -> None:
    model = build()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.SiLU()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    file = io.BytesIO()
    torch.save(model, file)
    with mock.patch.object(*PATCHES[patch]):
        twin = make(model, file)
        assert_same_step(twin, reference)
    assert_same_step(twin, reference)


def test_what_a_call_does_otherwise_than_the_probe_is_refused() -> None:
    model = build(Logits)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    assert_same_step(model, reference)
    batch = make_batch(0)
    with pytest.raises(liger_dist.LigerDistError, match=r"div 2\.0 to its logits, but nothing when it was wrapped"):
        model(**batch, temp=2.0)
    if not torch.cuda.is_available():
        with pytest.raises(liger_dist.LigerDistError, match="changed its labels before its loss"):
            model(**batch, ignored=int(batch["input_ids"][0, 5]))
    model.temper = 0.5
    with pytest.raises(liger_dist.LigerDistError, match=r"mul 0\.5 to its logits"):
        model(**batch)
    model.temper = 1.0
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    with pytest.raises(liger_dist.LigerDistError, match=r"mul 0\.5 to its logits"):
        model(**batch)
    hook.remove()
    assert_same_step(model, reference)


def test_a_softcap_taken_out_of_the_config_is_refused() -> None:
    model: Model = make_model("gemma2")
    liger_dist.wrap(model)
    model.config.final_logit_softcapping = None
    with pytest.raises(liger_dist.LigerDistError, match=r"nothing to its logits, but div 30\.0"):
        model(**make_batch(0))


class LearnedBias(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bias = nn.Parameter(on_device.zeros(config.vocab_size))

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state) + self.bias
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_parameter_that_starts_neutral_is_seen() -> None:
    model = build(LearnedBias)
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="not supported"):
        liger_dist.wrap(model)
    assert_same_step(model, reference)


class Passing(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Weighted(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        weight = kwargs.pop("sample_weight", 1.0)
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if output.loss is not None:
            output.loss = output.loss * weight
        return output


class Named(NamedTuple):
    loss: Any
    logits: Any


class NamedOutput(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        return Named(output.loss, output.logits)


def test_forwards_of_the_users_own() -> None:
    for cls, inputs in ((Passing, {}), (Weighted, {"sample_weight": 2.0}), (NamedOutput, {})):
        model = build(cls)
        reference = copy.deepcopy(model)
        liger_dist.wrap(model)
        assert_same_step(model, reference, **inputs)
    with pytest.raises(liger_dist.LigerDistError, match="never computed"):
        model(**make_batch(0)).logits.mean()


def test_labels_that_are_never_scored_may_be_anything() -> None:
    model = build()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    labels = make_batch(0)["labels"].clone()
    labels[:, 0] = 5000
    assert_same_step(model, reference, labels=labels)


def test_torch_func_runs_the_models_own_code() -> None:
    model = build()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    gradients = []
    for one in (model, reference):
        parameters = {name: p.detach() for name, p in one.named_parameters()}

        def loss(given: Any, one: Any = one) -> Tensor:
            return torch.func.functional_call(one, given, (), make_batch(0)).loss  # type: ignore[no-any-return]

        with pytest.warns(UserWarning, match=r"torch\.func") if one is model else nullcontext():
            gradients.append(torch.func.grad(loss)(parameters))
    for name, gradient in gradients[1].items():
        assert relative_error(gradients[0][name], gradient) < 1e-4


@pytest.mark.smoke
def test_unwrapping_one_of_two_nested_models_leaves_the_other() -> None:
    student, teacher = build(), build()
    student.add_module("teacher", teacher)
    liger_dist.wrap(teacher)
    replaced = [name for name, module in teacher.named_modules() if isinstance(module, Swapped)]
    liger_dist.wrap(student)
    liger_dist.unwrap(student)
    assert [name for name, module in teacher.named_modules() if isinstance(module, Swapped)] == replaced
    assert not isinstance(student.model.norm, Swapped)
    assert not hasattr(teacher(**make_batch(0)), "logits")


def test_wrapping_leaves_random_numbers_and_counters_alone() -> None:
    class Counting(LlamaMLP):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return F.dropout(super().forward(x), 0.1, self.training)

    model = build()
    model.model.layers[0].mlp.__class__ = Counting
    state = torch.random.get_rng_state()
    liger_dist.wrap(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert "calls" not in vars(model.model.layers[0].mlp)


@pytest.mark.smoke
def test_hooks_of_accelerate_outlive_unwrapping() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = build()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    for module in model.modules():
        if not list(module.children()):
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=compute_device()))
    assert_same_step(model, reference)
    liger_dist.unwrap(model)
    assert_same_step(model, reference)
    hooks.remove_hook_from_module(model, recurse=True)
    assert_same_step(model, reference)


def test_a_model_of_peft_is_wrapped_inside() -> None:
    peft = pytest.importorskip("peft")
    reference = peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    model = copy.deepcopy(reference)
    assert liger_dist.wrap(model) is model
    assert_same_step(model, reference)
    merged, expected = (one.merge_and_unload().requires_grad_(True) for one in (model, reference))
    assert not hasattr(merged(**make_batch(0)), "logits")
    assert_same_step(merged, expected)
    assert liger_dist.unwrap(merged) is merged
    assert_same_step(merged, expected)


class FailsInBf16(nn.Module):
    """A norm that raises in bf16 for another reason."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(on_device.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise RuntimeError("this norm is for fp32")
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class NormThatFails(FailsInBf16):
    """Has "norm" in its name."""


def test_a_norm_that_raises_is_not_taken_for_one_that_agrees() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    model.model.norm = NormThatFails(16, 1e-6).to(compute_device())
    liger_dist.wrap(model)
    report = liger_dist.explain(model).layers
    assert not any("NormThatFails" in what for what, _ in report.swapped)
    assert any("NormThatFails" in what and "rounds in a way" in why for what, why in report.left)
