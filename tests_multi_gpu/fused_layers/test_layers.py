"""Layers that wrap swaps: found by structure, held to the model's own code, left alone with a reason, restored."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import types
import weakref
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
from models import HIDDEN_SIZE, gradient_errors, make_batch, make_config, make_model
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP
from truth import relative_error

import liger_dist
from liger_dist.fused_layers import LayerReport, restore_layers, swap_layers
from liger_dist.fused_layers import norm as norms
from liger_dist.fused_layers import rotary as rotaries
from liger_dist.fused_layers.swap import Swapped
from liger_dist.sharding.process_groups import compute_device


def swapped_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Swapped)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_every_kind_is_swapped_and_restored(family: str) -> None:
    model: Any = make_model(family, dtype=torch.float32)
    classes = {name: type(module) for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    liger_dist.wrap(model)
    layer = model.model.layers[0]
    expected = {
        "RMSNorm": [model.model.norm, layer.input_layernorm, layer.post_attention_layernorm],
        "Attention": [layer.self_attn],
        "MLP": [layer.mlp],
    }
    for name, modules in expected.items():
        for module in modules:
            assert isinstance(module, Swapped)
            assert type(module).__name__ == type(model).__name__.replace("ForCausalLM", name)
    assert all(isinstance(module, classes[name]) for name, module in model.named_modules())
    assert model.state_dict().keys() == state.keys()
    model(**make_batch(0)).loss.backward()
    liger_dist.unwrap(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_activations_of_every_name_are_the_same_at_every_size() -> None:
    """Those that clip, as relu6 and gelu_10, are not taken for their relatives."""
    fused = set()
    for name in ACT2FN:
        config = make_config("llama")
        config.hidden_act = name
        try:
            own = LlamaMLP(config).double().float().to(compute_device())
        except TypeError:
            continue  # An activation that needs arguments.
        mlp = nn.ModuleList([copy.deepcopy(own)])
        swap_layers(mlp, backend="reference", owner="test")
        if swapped_in(mlp):
            fused.add(name)
        for scale in (1e-2, 1.0, 1e2, 1e4):
            x = scale * on_device.randn(2, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
            assert relative_error(mlp[0](x), own(x)) < 1e-5, (name, scale)
        if name in fused:
            # A projection may have another dtype, as a layer of LoRA may; no kernel computes the product then.
            for gated in (own, mlp[0]):
                gated.gate_proj.register_forward_hook(lambda _, __, output: output.bfloat16())  # type: ignore[union-attr]
            assert relative_error(mlp[0](x), own(x)) < 2e-2, name
    assert fused == {
        *("gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        *("relu", "relu2", "sigmoid", "silu", "swish"),
    } & set(ACT2FN)


def test_layers_may_be_called_by_keyword_and_their_activations_changed() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    layer = copy.deepcopy(model.model.layers[0]).to(compute_device())
    liger_dist.wrap(model, "none")
    ours, x = model.model.layers[0], torch.randn(2, 5, HIDDEN_SIZE, device=compute_device())
    assert relative_error(ours.mlp(x=x), layer.mlp(x)) < 1e-6
    assert relative_error(ours.input_layernorm(hidden_states=x), layer.input_layernorm(x)) < 1e-6
    for mlp in (ours.mlp, layer.mlp):
        mlp.act_fn = nn.GELU()
    liger_dist.unwrap(model)
    liger_dist.wrap(model, "none")
    for mlp in (ours.mlp, layer.mlp):
        mlp.act_fn.approximate = "tanh"
    assert relative_error(ours.mlp(x), layer.mlp(x)) < 1e-6


@pytest.mark.smoke
def test_explain_lists_swapped_layers_and_those_left_alone() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    model.model.layers[1].mlp = Clamped(model.model.layers[1].mlp)
    liger_dist.wrap(model)
    table = str(liger_dist.explain(model))
    assert "5 x LlamaRMSNorm: RMSNorm (eps 1e-06, normalized values rounded before the weight)" in table
    assert "1 x LlamaMLP: silu(gate_proj) * up_proj" in table
    assert "2 x LlamaAttention: rotary (pairs (p, p + D/2))" in table
    assert "Clamped (gated MLP): it does not compute down(activation(gate) * up)" in table
    off = liger_dist.wrap(make_model("llama"), config=liger_dist.WrapConfig(layer_kernels=False))
    assert not swapped_in(off)


def test_explain_lists_kinds_of_which_a_model_has_no_layer() -> None:
    """A kind that is no longer recognised, after a change of transformers, must not look like one that is not asked
    for."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def rows(model: nn.Module, **options: Any) -> dict[str, str]:
        table = str(liger_dist.explain(liger_dist.wrap(model, config=liger_dist.WrapConfig(**options))))
        left = [line.split(maxsplit=2)[2] for line in table.splitlines() if line.startswith("left alone")]
        return dict(line.split(": ", 1) for line in left)

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1))
    listed = rows(gpt2)
    assert listed.keys() == {"gated MLP", "rotary embedding"}
    assert "'rotary' or 'rope' in its name" in listed["rotary embedding"]
    model: Any = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.__class__ = WithoutRotary
    assert rows(model).keys() == {"rotary embedding"}
    assert not rows(make_model("llama", dtype=torch.float32))
    assert not rows(make_model("llama", dtype=torch.float32), layer_kernels=False)
    peft = pytest.importorskip("peft")
    settings = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    with_ia3 = peft.get_peft_model(make_model("llama", dtype=torch.float32), settings)
    assert "lora_A" in rows(with_ia3)["LoRA"]


class WithoutRotary(modeling_llama.LlamaAttention):
    """An attention in which no rotary function is recognised."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_layers_in_fp64_run_their_own_code() -> None:
    """Its forward is another one, but the model's own arithmetic runs."""
    model = make_model("llama")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, config=liger_dist.WrapConfig(fused_loss=False))
    assert torch.equal(model(**make_batch(0)).loss, reference(**make_batch(0)).loss)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("way", ["plain", "autocast", "bf16", "checkpointing"])
def test_gradients_are_as_exact_as_the_models_own(family: str, way: str) -> None:
    """Against fp64: not more than 1.5 times the error of the model's own layers, and the rounding of fp32."""
    truth = make_model(family)
    own, ours = (make_model(family, dtype=torch.float32) for _ in range(2))
    if way == "bf16":
        truth, own, ours = truth.bfloat16().double(), own.bfloat16(), ours.bfloat16()
    for model in (own, ours):
        # One attention for both: which one "sdpa" takes depends on strides, and so does its error in fp32.
        model.set_attn_implementation("eager")  # type: ignore[operator]
    liger_dist.wrap(ours, config=liger_dist.WrapConfig(varlen_attention=False))
    if way == "checkpointing":
        ours.gradient_checkpointing_enable()  # type: ignore[operator]
    liger_dist.wrap(own, config=liger_dist.WrapConfig(layer_kernels=False, varlen_attention=False))
    batch = make_batch(0)
    device = compute_device().type
    for model in (truth, own, ours):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=way == "autocast" and model is not truth):
            loss = model(**batch).loss
        loss.backward()
    errors: list[list[float]] = [[], []]
    size = torch.stack([parameter.grad.norm() for parameter in truth.parameters()]).norm()  # type: ignore[union-attr]
    for name, parameter in truth.named_parameters():
        for place, model in enumerate((own, ours)):
            errors[place].append(float((model.get_parameter(name).grad.double() - parameter.grad).norm()))  # type: ignore[union-attr,operator]
    own_error, our_error = (on_device.tensor(values).norm() for values in errors)
    # Three times the rounding of fp32: on GPUs the own layers' error is less than that here, on CPUs it is not.
    assert float(our_error) <= 1.5 * float(own_error) + 3 * torch.finfo(torch.float32).eps * float(size)


class Clamped(nn.Module):
    """A gated MLP with something between its parts."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))  # type: ignore[no-any-return]


class Norm(nn.Module):
    """A family of norms, most of which are not what their name says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(on_device.ones(16))
        self.eps, self.way = 1e-6, way

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        mean_square = x.square().mean(-1, keepdim=True)
        if self.way == "detached":
            mean_square = mean_square.detach()
        if self.way == "absolute":
            mean_square = x.abs().mean(-1, keepdim=True).square()
        if self.way == "divided":
            return (self.weight * (x / (mean_square + self.eps).sqrt())).to(dtype)
        if self.way == "eps outside":
            return (self.weight * x / (mean_square.sqrt() + self.eps)).to(dtype)
        if self.way == "first half":
            mean_square = x[..., :8].square().mean(-1, keepdim=True)
        return (self.weight * (x * torch.rsqrt(mean_square + self.eps))).to(dtype)


@pytest.mark.parametrize("way", ["exact", "divided", "detached", "absolute", "eps outside", "first half"])
def test_a_norm_is_told_by_its_numbers_and_gradients(way: str) -> None:
    model = nn.Sequential(Norm(way))
    x = on_device.randn(3, 16)
    expected = model(x)
    report = swap_layers(model, backend="reference", owner="test")
    assert bool(swapped_in(model)) == (way in ("exact", "divided")), report
    assert bool(report.left) != bool(swapped_in(model))
    assert relative_error(model(x), expected) < 1e-6


def test_an_attention_of_its_own_module_rotates_as_before() -> None:
    """A rotary function that is no rotation keeps its attention as it is."""
    from transformers.models.llama import modeling_llama

    namespace = dict(vars(modeling_llama))
    namespace["apply_rotary_pos_emb"] = stretched
    own = inspect.unwrap(modeling_llama.LlamaAttention.forward)
    forward = type(own)(own.__code__, namespace, own.__name__, own.__defaults__, own.__closure__)
    attention = type("LlamaAttention", (modeling_llama.LlamaAttention,), {"forward": forward})
    model: Any = make_model("llama", dtype=torch.float32)
    model.model.layers[0].self_attn.__class__ = attention
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    assert not isinstance(model.model.layers[0].self_attn, Swapped)
    assert isinstance(model.model.layers[1].self_attn, Swapped)
    assert "none of the known layouts" in str(liger_dist.explain(model))
    assert relative_error(model(**make_batch(0)).loss, reference(**make_batch(0)).loss) < 1e-6


def stretched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return 1.5 * q, k


def test_a_function_put_in_place_of_the_rotary_one_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model, reference = make_model("llama", dtype=torch.float32), make_model("llama", dtype=torch.float32)
    liger_dist.wrap(model)
    before = model(**make_batch(0)).loss
    own = modeling_llama.apply_rotary_pos_emb
    doubled = lambda q, k, *rest: tuple(2 * x for x in own(q, k, *rest))  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", doubled)
    after = model(**make_batch(0)).loss
    assert relative_error(after, before) > 1e-3
    assert relative_error(after, reference(**make_batch(0)).loss) < 1e-5


def test_a_layer_whose_instance_has_a_forward_is_left_alone() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    norm = model.model.norm
    norm.forward = lambda x: 3 * x
    expected = model(**make_batch(0)).loss
    liger_dist.wrap(model)
    assert not isinstance(norm, Swapped)
    assert relative_error(model(**make_batch(0)).loss, expected) < 1e-5


def test_hooks_on_layers_still_run() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    seen: list[str] = []
    for name, module in model.named_modules():
        if "norm" in name:
            module.register_forward_hook(lambda module, inputs, output, name=name: seen.append(name))
    liger_dist.wrap(model)
    model(**make_batch(0)).loss.backward()
    assert len(seen) == 5


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_keep_their_kernels(way: str) -> None:
    model = make_model("llama", dtype=torch.float32)
    liger_dist.wrap(model)
    expected = model(**make_batch(0)).loss
    if way == "deepcopy":
        twin: Any = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert swapped_in(twin) == swapped_in(model)
    assert torch.equal(twin(**make_batch(0)).loss, expected)
    liger_dist.unwrap(twin)
    assert not swapped_in(twin)
    assert swapped_in(model)


def test_second_order_gradients_are_refused_with_a_way_out() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    liger_dist.wrap(model, config=liger_dist.WrapConfig(fused_loss=False))
    embeds = model.get_input_embeddings()(make_batch(0)["input_ids"]).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=make_batch(0)["labels"]).loss
    with pytest.raises(liger_dist.LigerDistError, match="layer_kernels=False"):
        torch.autograd.grad(loss, embeds, create_graph=True)


def test_restoring_twice_does_nothing() -> None:
    model = make_model("llama", dtype=torch.float32)
    restore_layers(model, owner="test")
    assert swap_layers(model, backend="auto", owner="test") != LayerReport()
    restore_layers(model, owner="test")
    restore_layers(model, owner="test")
    assert not swapped_in(model)


def test_an_attribute_that_hides_a_default_of_the_class_is_a_change() -> None:
    class ScaledNorm(nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(on_device.rand(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return self.scale * (self.weight * wide.to(x.dtype))

    module = ScaledNorm()
    swap_layers(module, backend="reference", owner="test")
    x = on_device.rand(3, 8)
    once = module(x)
    module.note_of_an_engine = True  # type: ignore[assignment]
    with mock.patch.object(norms, "norm", wraps=norms.norm) as kernel:
        assert torch.allclose(module(x), once)
        assert kernel.call_count == 1
        module.scale = 3.0
        assert torch.allclose(module(x), 3.0 * once)
        assert kernel.call_count == 1


ROTARY_USERS = """
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.llama import modeling_llama

COUNT = 5

class Counts(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        global COUNT
        COUNT += 1
        apply_rotary_pos_emb
        return modeling_llama.LlamaAttention.forward(
            self, hidden_states, position_embeddings, attention_mask, **kwargs
        )
"""


def test_an_attention_that_writes_a_global_is_left_alone() -> None:
    module = types.ModuleType("rotary_users")
    exec(ROTARY_USERS, vars(module))
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = module.Counts
    liger_dist.wrap(model, "none")
    assert "its forward writes or lists its globals" in str(liger_dist.explain(model))
    before = module.COUNT  # Probes have run it too.
    model(**make_batch(0))
    assert before + len(model.model.layers) == module.COUNT


def test_a_patch_of_the_forwards_own_module_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that imports its rotary function from another module looks it up in its own."""
    module = types.ModuleType("rotary_users")
    source = inspect.getsource(modeling_llama.LlamaAttention.forward)
    vars(module).update(vars(modeling_llama))
    exec("class Own(LlamaAttention):\n" + source, vars(module))
    model = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.__class__ = module.Own
    liger_dist.wrap(model, "none")
    assert "rotary" in str(liger_dist.explain(model).layers.swapped)
    before = float(model(**make_batch(0)).loss)
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args: own(2 * q, k, *args))
    assert float(model(**make_batch(0)).loss) == before
    vars(module)["apply_rotary_pos_emb"] = modeling_llama.apply_rotary_pos_emb
    assert float(model(**make_batch(0)).loss) != before


def renaming(function: Any) -> Any:
    """As transformers' ``deprecate_kwarg``."""

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "mask" in kwargs:
            kwargs["attention_mask"] = kwargs.pop("mask")
        return function(*args, **kwargs)

    return renamed


def doubling(function: Any) -> Any:
    @functools.wraps(function)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        output, weights = function(*args, **kwargs)
        return 2 * output, weights

    return doubled


def forgetting(function: Any) -> Any:
    """A decorator that holds its function twice: which one of them it calls is not known."""
    again = function

    @functools.wraps(function)
    def forgotten(*args: Any, **kwargs: Any) -> Any:
        return (again if kwargs else function)(*args, **kwargs)

    return forgotten


class Descriptor:
    """A decorator that is no function."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("decorators", "reason"),
    [
        ((renaming,), None),
        ((torch.enable_grad(), renaming, doubling), None),
        ((renaming, forgetting), "forgotten"),
        ((Descriptor,), "Descriptor"),
    ],
    ids=["renaming", "three", "held twice", "an object"],
)
def test_rotary_of_a_decorated_attention_is_swapped_with_its_decorators(
    decorators: tuple[Any, ...], reason: str | None
) -> None:
    """transformers decorates the forwards of its attentions, some of which also change what the forward gets."""
    models: list[Any] = [make_model("llama", dtype=torch.float32) for _ in range(2)]
    forward: Any = modeling_llama.LlamaAttention.forward
    for decorator in decorators:
        forward = decorator(forward)
    decorated = type("LlamaAttention", (modeling_llama.LlamaAttention,), {"forward": forward})
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.__class__ = decorated
    model, reference = models
    liger_dist.wrap(model, config=liger_dist.WrapConfig(varlen_attention=False))
    layers = liger_dist.explain(model).layers
    assert ("rotary" in str(layers.swapped)) == (reason is None), layers
    if reason is not None:
        assert any("decorators of its forward" in why and reason in why for _, why in layers.left), layers
    with mock.patch.object(rotaries, "rotary", wraps=rotaries.rotary) as kernel:
        loss = model(**make_batch(0)).loss
    assert kernel.call_count == (2 if reason is None else 0)
    loss.backward()
    expected = reference(**make_batch(0)).loss
    expected.backward()
    assert relative_error(loss, expected) < 1e-6
    assert max(gradient_errors(model, reference).values()) < 1e-5
    hidden = torch.randn(1, 4, model.config.hidden_size, device=model.device)
    tables = model.model.rotary_emb(hidden, torch.arange(4, device=model.device)[None])
    mask = torch.full((4, 4), -1e9, device=model.device).triu(1)[None, None]
    if renaming in decorators:
        renamed, _ = model.model.layers[0].self_attn(hidden, tables, mask=mask)
        own, _ = reference.model.layers[0].self_attn(hidden, tables, attention_mask=mask)
        assert relative_error(renamed, own) < 1e-6
    liger_dist.unwrap(model)
    assert all(type(layer.self_attn) is decorated for layer in model.model.layers)


def test_copies_keep_the_classes_of_swapped_layers() -> None:
    model = liger_dist.wrap(make_model("llama"), "none")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize("when", ["before wrap", "after wrap", "between wraps"])
def test_a_helper_of_a_rotary_function_that_is_patched_is_called(when: str) -> None:
    def other_half(x: Tensor) -> Tensor:
        return 0.5 * x.flip(-1)

    def patched() -> Any:
        return mock.patch.object(modeling_llama, "rotate_half", other_half)

    own, model = make_model("llama", dtype=torch.float32), make_model("llama", dtype=torch.float32)
    with patched():
        expected = own(**make_batch(0)).loss
    if when == "between wraps":
        liger_dist.wrap(make_model("llama", dtype=torch.float32), "none")
    if when == "after wrap":
        liger_dist.wrap(model, "none")
    with patched():
        if when != "after wrap":
            liger_dist.wrap(model, "none")
        assert torch.allclose(model(**make_batch(0)).loss, expected)


class HalvedNorm(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    """A norm that is one only where ``factor`` is 1."""

    calls = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        HalvedNorm.calls += 1
        HalvedNorm.calls += 1
        return self.factor * super().forward(hidden_states)  # type: ignore[no-any-return]


def test_alike_layers_are_probed_once_and_others_by_themselves() -> None:
    """The second layer has a norm of another eps and another activation; in the third model a norm differs as well."""
    batch, calls = make_batch(0), []
    for number, differs in ((3, False), (6, False), (6, True)):
        config: Any = copy.deepcopy(make_model("llama").config)
        config.num_hidden_layers = number
        model: Any = modeling_llama.LlamaForCausalLM(config).to(compute_device())
        for layer in model.model.layers:
            layer.input_layernorm.__class__, layer.input_layernorm.factor = HalvedNorm, 1.0
        model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2
        model.model.layers[1].mlp.act_fn = nn.GELU()
        if differs:
            model.model.layers[2].input_layernorm.factor = 0.5
        reference, HalvedNorm.calls = copy.deepcopy(model), 0
        liger_dist.wrap(model)
        calls.append(HalvedNorm.calls)
        found = dict(liger_dist.explain(model).layers.swapped)
        assert found["HalvedNorm: RMSNorm (eps 1e-06, normalized values rounded before the weight)"] == number - differs
        assert found["LlamaMLP: gelu(gate_proj) * up_proj"] == 1
        for one in (model, reference):
            one(**batch).loss.backward()
        assert max(gradient_errors(model, reference).values()) < 1e-4
    # One comparison of each further layer.
    assert calls[0] + 3 <= calls[1] <= calls[0] + 6 < calls[2]


class NormByOtherNames(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor) -> Tensor:
        return scaled(self, super().forward(hidden_states))


def scaled(norm: nn.Module, x: Tensor) -> Tensor:
    """A helper, whose names the code of the norm does not contain, and which reads a table by module."""
    for name in ("factor", "gain"):
        x = x * getattr(norm, name, 1.0)
    return x * FACTORS.get(norm, 1.0)


FACTORS: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


@pytest.mark.parametrize("way", ["attribute", "table"])
def test_a_layer_that_differs_where_its_code_does_not_show_it(way: str) -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = NormByOtherNames
    norm = model.model.layers[1].input_layernorm
    if way == "attribute":
        norm.gain = 2.0
    else:
        FACTORS[norm] = 2.0
    x = on_device.randn(2, 3, HIDDEN_SIZE)
    expected = norm(x)
    liger_dist.wrap(model)
    torch.testing.assert_close(norm(x), expected)
    assert sum("NormByOtherNames" in name for name, _ in liger_dist.explain(model).layers.left) == 1


def test_a_part_of_an_mlp_with_two_names() -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers[:1]:
        layer.mlp.alias = layer.mlp.act_fn
    liger_dist.wrap(model)
    assert dict(liger_dist.explain(model).layers.swapped)["LlamaMLP: silu(gate_proj) * up_proj"] == 2


def test_shallow_copies_are_wrapped_and_unwrap() -> None:
    model: Any = liger_dist.wrap(make_model("llama"))
    copies = [copy.copy(one) for one in (model, model.model.norm, model.model.layers[0].mlp)]
    assert [type(one) for one in copies] == [type(one) for one in (model, model.model.norm, model.model.layers[0].mlp)]
    for one in (copies[0], model):
        liger_dist.unwrap(one)
        assert not liger_dist.is_wrapped(one)
    assert model(**make_batch(0)).logits is not None
