"""Layers with LoRA: the adapter is added in place where PEFT's code does the same, under every sharding, and PEFT's own
code runs wherever it would do something else."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import on_device
import pytest
import torch
from full_tensors import deepspeed_step, full_gradients
from harness import Workers
from models import HIDDEN_SIZE, assert_below, make_batch, make_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from truth import relative_error

import liger_dist
from liger_dist.fused_layers import recompute
from liger_dist.sharding.process_groups import compute_device

peft = pytest.importorskip("peft")

ADDED_IN_PLACE = "14 x Linear: LoRA (added in place)"


def adapted(dtype: torch.dtype = torch.float32, *, name: str = "default", **settings: Any) -> Any:
    """Llama of two layers with LoRA on all linear layers of the decoder, which counts."""
    model = make_model("llama", dtype=dtype).to(compute_device())
    settings = {"r": 2, "target_modules": "all-linear", "lora_alpha": 6} | settings
    result = peft.get_peft_model(model, peft.LoraConfig(**settings), adapter_name=name)
    fill(result)
    return result


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.copy_(0.2 * on_device.randn(parameter.shape, generator=generator))


def assert_as_peft(wrapped: Any, own: Any, *, bound: float = 1e-5) -> None:
    """Loss and the gradient of every parameter, against ``own`` in fp64."""
    batch = make_batch(0)
    loss, expected = (model(**batch, use_cache=False).loss for model in (wrapped, own.double()))
    assert relative_error(loss, expected) < bound
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in wrapped.named_parameters()}
    for name, parameter in own.named_parameters():
        if parameter.grad is None:
            assert gradients[name] is None, name
        else:
            assert relative_error(gradients[name], parameter.grad) < 10 * bound, name


@pytest.mark.parametrize("order", ["wrapped last", "wrapped first"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}], ids=["LoRA", "rank-stabilised"])
def test_adapters_are_added_in_place(order: str, settings: dict[str, Any]) -> None:
    if order == "wrapped first":
        inner = liger_dist.wrap(make_model("llama", dtype=torch.float32).to(compute_device()), "none")
        wrapped = peft.get_peft_model(
            inner, peft.LoraConfig(r=2, target_modules="all-linear", lora_alpha=6, **settings)
        )
        fill(wrapped)
    else:
        wrapped = liger_dist.wrap(adapted(**settings), "none")
    assert (ADDED_IN_PLACE in str(liger_dist.explain(wrapped))) == (order == "wrapped last")
    assert_as_peft(wrapped, adapted(**settings))


class Outputs(TorchDispatchMode):
    """Addresses of tensors of one size that operators return."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.addresses = numel, set[int]()
        self.alive: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.numel:
            self.addresses.add(result.untyped_storage().data_ptr())
            self.alive.append(result)
        return result


@pytest.mark.parametrize(("is_wrapped", "number"), [(True, 1), (False, 4)])
def test_one_tensor_of_the_size_of_the_output_is_made(is_wrapped: bool, number: int) -> None:
    """And none beside the gradient of the output in the backward; PEFT's code makes more."""
    model = adapted()
    if is_wrapped:
        liger_dist.wrap(model, "none")
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(2, 3, 24, device=compute_device(), requires_grad=True)
    with Outputs(2 * 3 * 16) as outputs:
        y = layer(x)
    assert len(outputs.addresses) == number
    upstream = torch.ones_like(y)
    with Outputs(2 * 3 * 16) as outputs:
        y.backward(upstream)
    assert len(outputs.addresses) == (1 if is_wrapped else 2)


def test_outputs_of_norms_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of a layer with adapters is found, in graphs three times as large as without. The first norm's
    input gets no gradient, so that nothing can recompute its output."""
    monkeypatch.setattr(recompute, "MIN_BYTES", 1)
    wrapped = liger_dist.wrap(adapted(), "none")
    memories: dict[str, StorageWeakRef] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            memories[name] = StorageWeakRef(output.untyped_storage())

        return hook

    for name, module in wrapped.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(note(name))
    loss = wrapped(**make_batch(0), use_cache=False).loss
    kept = [name for name, memory in memories.items() if not memory.expired()]
    assert kept == ["base_model.model.model.layers.0.input_layernorm"]
    loss.backward()
    assert_as_peft(liger_dist.wrap(adapted(), "none"), adapted())


GROUPS = {"llama": 4, "qwen3_5_text": 4, "lfm2": 3}
"""of two layers: an attention's or delta net's projections and an MLP's; a convolution has one"""


@pytest.mark.smoke
@pytest.mark.parametrize("family", GROUPS)
def test_projections_of_one_input_are_one_product(family: str) -> None:
    """All A of q, k and v are one product; an input of another call is not that of the first one."""
    base: Any = make_model(family, dtype=torch.float32).to(compute_device())
    wrapped = liger_dist.wrap(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear")), "none")
    with Products() as products:
        wrapped(**make_batch(0), use_cache=False)
    assert products.of_several == GROUPS[family]
    if family == "llama":
        attention = base.model.layers[0].self_attn
        x, other = (torch.randn(2, 3, 16, device=compute_device()) for _ in range(2))
        attention.q_proj(x)
        own = attention.k_proj(other)
        original = next(one for one in type(attention.k_proj).__mro__ if one.__module__.startswith("peft"))
        expected = original.forward(attention.k_proj, other)
        assert relative_error(own, expected) < 1e-5


def test_an_output_is_that_of_the_weights_at_its_call() -> None:
    """k's is computed with q's, and not returned once its LoRA layer has changed."""
    wrapped, own = liger_dist.wrap(adapted(), "none"), adapted()
    x = torch.randn(2, 3, 16, device=compute_device())
    for model in (wrapped, own):
        attention = model.base_model.model.model.layers[0].self_attn
        attention.q_proj(x)
        with torch.no_grad():
            attention.k_proj.lora_B["default"].weight.mul_(2.0)
    layers = [model.base_model.model.model.layers[0].self_attn.k_proj for model in (wrapped, own)]
    assert relative_error(layers[0](x), layers[1](x)) < 1e-5


def without_its_adapter(layer: Any) -> AbstractContextManager[Any]:
    layer.enable_adapters(False)
    return nullcontext()


def without_scale(layer: Any) -> AbstractContextManager[Any]:
    layer.set_scale("default", 0.0)
    return nullcontext()


@pytest.mark.parametrize("change", [without_its_adapter, without_scale])
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_an_output_is_that_of_the_layer_at_its_call(context: Any, change: Any) -> None:
    x = torch.randn(2, 3, 16, device=compute_device())
    outputs = []
    for model in (liger_dist.wrap(adapted(), "none"), adapted()):
        attention = model.base_model.model.model.layers[0].self_attn
        with context():
            attention.q_proj(x)
            change(attention.k_proj)
            outputs.append(attention.k_proj(x))
    assert relative_error(outputs[0], outputs[1]) < 1e-5


def rounds_the_base(layer: Any, x: Tensor) -> None:
    layer.base_layer.weight.data.mul_(4).round_().div_(4)


def loads_the_base(layer: Any, x: Tensor) -> None:
    layer.base_layer.weight.data = 2 * layer.base_layer.weight.data


def rounds_a(layer: Any, x: Tensor) -> None:
    layer.lora_A["default"].weight.data.mul_(4).round_().div_(4)


def halves_the_input(layer: Any, x: Tensor) -> None:
    x.data.mul_(0.5)


def freezes_a(layer: Any, x: Tensor) -> None:
    layer.lora_A["default"].weight.requires_grad_(False)


def thaws_a(layer: Any, x: Tensor) -> None:
    layer.lora_A["default"].weight.requires_grad_(True)


WRITES = [rounds_the_base, loads_the_base, rounds_a, halves_the_input, freezes_a, thaws_a]


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("part", ["", "base_layer", "lora_A.default", "lora_B.default"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "up_proj"])
@pytest.mark.parametrize("write", WRITES)
def test_a_pre_hook_of_a_projection_that_shares_its_input(write: Any, name: str, part: str) -> None:
    """Writes without a version, before one of the layers that are computed together is called."""
    wrapped, own = liger_dist.wrap(adapted(), "none"), adapted()
    for model in (wrapped, own):
        for layer in model.base_model.model.model.layers:
            projection = (layer.mlp if name == "up_proj" else layer.self_attn).get_submodule(name)
            projection.lora_A["default"].weight.requires_grad_(write is not thaws_a)
            inside = projection.get_submodule(part)
            inside.register_forward_pre_hook(lambda _, args, layer=projection: write(layer, args[0]))
    for model in (wrapped, own):
        model(**make_batch(0), use_cache=False).loss.backward()
    gradients = {name: parameter.grad for name, parameter in wrapped.named_parameters()}
    for parameter_name, parameter in own.named_parameters():
        assert (parameter.grad is None) == (gradients[parameter_name] is None), parameter_name
        assert parameter.grad is None or relative_error(gradients[parameter_name], parameter.grad) < 1e-4


@pytest.mark.parametrize("tensor", ["input", "A", "B"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_what_begins_or_ends_to_train_between_two_projections(is_trained: bool, tensor: str) -> None:
    x = torch.randn(2, 3, 16, device=compute_device())
    found = []
    for model in (liger_dist.wrap(adapted(), "none"), adapted()):
        attention = model.base_model.model.model.layers[0].self_attn
        layer = attention.k_proj
        given = x.clone().requires_grad_(not is_trained)
        one = {"input": given, "A": layer.lora_A["default"].weight, "B": layer.lora_B["default"].weight}[tensor]
        one.requires_grad_(not is_trained)
        attention.q_proj(given)
        one.requires_grad_(is_trained)
        layer(given).square().sum().backward()
        found.append([given.grad, *(parameter.grad for parameter in layer.parameters())])
    for wrapped, own in zip(*found, strict=True):
        assert (wrapped is None) == (own is None)
        assert own is None or relative_error(wrapped, own) < 1e-5


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_outputs_may_be_changed_in_place(name: str) -> None:
    """As OLMo clips them."""
    for model in (wrapped := liger_dist.wrap(adapted(), "none"), own := adapted()):
        layer = getattr(model.base_model.model.model.layers[0].self_attn, name)
        layer.register_forward_hook(lambda module, args, output: output.mul_(0.5).clamp_(-1.0, 1.0))
    assert_as_peft(wrapped, own)


@pytest.mark.parametrize("tile_tokens", [3, 7])
def test_rows_with_adapters_of_their_own_are_not_cut_into_tiles(tile_tokens: int) -> None:
    models = [adapted() for _ in range(2)]
    for model in models:
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear"))
        fill(model)
        model.eval()
    wrapped: Any = liger_dist.wrap(models[0], "none", config=liger_dist.WrapConfig(mlp_tile_tokens=tile_tokens))
    batch = make_batch(0) | {"adapter_names": ["default", "other", "__base__"]}
    losses = [model(**batch, use_cache=False).loss for model in (wrapped, models[1])]
    assert relative_error(*losses) < 1e-5


def test_a_forward_that_raises_frees_its_outputs() -> None:
    wrapped = liger_dist.wrap(adapted(), "none")

    def fail(*_: Any) -> None:
        raise MemoryError

    layers = wrapped.base_model.model.model.layers
    hook = layers[1].self_attn.k_proj.register_forward_pre_hook(fail)
    inputs: list[weakref.ref[Tensor]] = []
    layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, output: inputs.append(weakref.ref(args[0])))
    with pytest.raises(MemoryError):
        wrapped(**make_batch(0), use_cache=False)
    gc.collect()
    assert [one() for one in inputs] == [None]
    hook.remove()
    assert_as_peft(copy.deepcopy(wrapped), adapted())


def test_a_layer_that_is_exchanged_is_not_computed() -> None:
    wrapped, own = liger_dist.wrap(adapted(), "none"), adapted()
    for model in (wrapped, own):
        torch.manual_seed(0)
        model.base_model.model.model.layers[0].self_attn.k_proj = nn.Linear(16, 8, device=compute_device())
    assert_as_peft(wrapped, own)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients(context: Any) -> None:
    wrapped, own = liger_dist.wrap(adapted(), "none").eval(), adapted().eval()
    ids = make_batch(0)["input_ids"]
    with context():
        assert relative_error(wrapped(input_ids=ids).logits, own(input_ids=ids).logits) < 1e-5
        tokens = [model.generate(input_ids=ids[:, :5], max_new_tokens=4, do_sample=False) for model in (wrapped, own)]
        x = torch.randn(16, device=compute_device())
        layers = [model.base_model.model.model.layers[0].self_attn.q_proj for model in (wrapped, own)]
        assert relative_error(layers[0](x), layers[1](x)) < 1e-5
    assert torch.equal(*tokens)


def test_a_model_that_does_not_run_without_weights_is_computed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    own_forward = LlamaMLP.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if x.shape[1] == 13:  # of the run without weights
            raise ValueError("odd")
        return own_forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    wrapped = liger_dist.wrap(adapted(), "none")
    assert "each layer is computed by itself, because" in " ".join(str(liger_dist.explain(wrapped)).split())
    with Products() as products:
        wrapped(**make_batch(0), use_cache=False)
    assert products.of_several == 0
    assert_as_peft(wrapped, adapted())


class Products(TorchDispatchMode):
    """Number of products with stacked matrices: ``torch.cat`` of what has two rows each."""

    of_several = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.cat.default and len(args) == 1 and all(part.shape[0] == 2 for part in args[0]):
            self.of_several += 1
        return function(*args, **(kwargs or {}))


def disabled(model: Any) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = model.disable_adapter()
    return context


def merged(model: Any) -> AbstractContextManager[Any]:
    model.merge_adapter()
    return nullcontext()


def with_two_adapters(model: Any) -> AbstractContextManager[Any]:
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules="all-linear"))
    fill(model)
    model.base_model.set_adapter(["default", "other"])
    return nullcontext()


def with_another_adapter(model: Any) -> AbstractContextManager[Any]:
    """Of which DoRA is none of ours."""
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules="all-linear", use_dora=True))
    fill(model)
    model.set_adapter("other")
    return nullcontext()


def with_hooks(model: Any) -> AbstractContextManager[Any]:
    for layer in model.base_model.model.model.layers:
        layer.mlp.up_proj.base_layer.register_forward_hook(lambda _, args, output: 2.0 * output)
        layer.self_attn.v_proj.lora_B["default"].register_forward_hook(lambda _, args, output: 3.0 * output)
    return nullcontext()


CHANGES: list[Callable[[Any], AbstractContextManager[Any]]] = [
    disabled,
    merged,
    with_two_adapters,
    with_another_adapter,
    with_hooks,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_wrap(change: Callable[[Any], AbstractContextManager[Any]]) -> None:
    wrapped, own = liger_dist.wrap(adapted(), "none"), adapted()
    with change(wrapped), change(own):
        if change in (disabled, merged):
            batch = make_batch(0)
            loss, expected = (model(**batch, use_cache=False).loss for model in (wrapped, own.double()))
            assert relative_error(loss, expected) < 1e-5
        else:
            assert_as_peft(wrapped, own)


@pytest.mark.parametrize("settings", [{"lora_bias": True}, {"use_dora": True}, {"lora_dropout": 0.5}], ids=str)
def test_other_adapters_run_the_code_of_peft(settings: dict[str, Any]) -> None:
    wrapped, own = liger_dist.wrap(adapted(**settings), "none"), adapted(**settings)
    if "lora_dropout" in settings:
        wrapped.eval()
        own.eval()
    assert_as_peft(wrapped, own)


class Remembering(nn.Linear):
    """Returns one tensor for one input."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "of", None) is not x:
            self.of, self.output = x, super().forward(x)
        return self.output


def test_base_layers_of_others() -> None:
    """A subclass may keep its output."""
    wrapped, own = liger_dist.wrap(adapted(), "none"), adapted()
    for model in (wrapped, own):
        model.base_model.model.model.layers[0].mlp.up_proj.base_layer.__class__ = Remembering
    layers = [model.base_model.model.model.layers[0].mlp.up_proj for model in (wrapped, own)]
    x = torch.randn(2, 3, 16, device=compute_device())
    for _ in range(2):
        assert torch.equal(layers[0](x), layers[1](x))


@pytest.mark.parametrize("under_autocast", [False, True], ids=["as it is", "autocast"])
def test_fp32_adapters_over_a_base_of_16_bits(under_autocast: bool) -> None:
    """PEFT's default: gradients of fp32 as exact as its own, and no copy of an input in fp32."""
    wrapped, own, truth = liger_dist.wrap(adapted(torch.bfloat16), "none"), adapted(torch.bfloat16), adapted()
    truth.load_state_dict(own.state_dict())
    truth.double()
    batch, copies = make_batch(0), []
    size = batch["input_ids"].numel() * HIDDEN_SIZE

    def note(saved: Tensor) -> Tensor:
        copies.append(saved.dtype == torch.float32 and saved.numel() >= size)
        return saved

    gradients = []
    for model in (wrapped, own, truth):
        autocast = torch.autocast(compute_device().type, torch.bfloat16, enabled=under_autocast and model is not truth)
        with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            hidden_states = model.base_model.model.model(input_ids=batch["input_ids"]).last_hidden_state
        hidden_states.float().square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        copies = copies if model is wrapped else []
        if model is wrapped:
            # The norms keep fp32 numbers of their own.
            number_of_copies = sum(copies)
    ours, pefts, true = gradients
    assert ours.keys() == pefts.keys() == true.keys()
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    for name, gradient in true.items():
        assert relative_error(ours[name], gradient) <= 2 * relative_error(pefts[name], gradient) + 2e-3, name
    assert number_of_copies == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_in_autocast_of_a_forward_outside(dtype: torch.dtype) -> None:
    """It has the products of the forward, which autocast would cast in part; norms and attention are cast."""
    wrapped, outside = (liger_dist.wrap(adapted(dtype), "none") for _ in range(2))
    own, truth = adapted(dtype), adapted()
    truth.load_state_dict(own.state_dict())
    gradients = []
    for model in (wrapped, outside, own, truth.double()):
        hidden_states = model.base_model.model.model(input_ids=make_batch(0)["input_ids"]).last_hidden_state
        # The sum of squares would be that of any input: the last norm divides by it.
        weights = on_device.randn(*hidden_states.shape, generator=torch.Generator().manual_seed(1))
        loss = (hidden_states * weights.to(hidden_states.dtype)).sum()
        with torch.autocast(compute_device().type, torch.bfloat16, enabled=model in (wrapped, own)):
            loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    ours, expected, pefts, true = gradients
    assert ours.keys() == expected.keys() == pefts.keys() == true.keys()
    for name, gradient in true.items():
        if dtype == torch.bfloat16:
            # Nothing is cast there. Backwards of attention on GPUs may add in any order.
            assert relative_error(ours[name], expected[name]) < 1e-2, name
        else:
            assert relative_error(ours[name], gradient) <= 2 * relative_error(pefts[name], gradient) + 2e-3, name


def test_fp32_adapters_over_fp16_keep_small_gradients() -> None:
    """Products in fp16 would round them to 0: without autocast PEFT's own forward runs."""
    gradients = []
    for wraps in (True, False):
        model = adapted(torch.float16)
        for name, parameter in model.named_parameters():
            parameter.data.mul_(5e-3 if "lora_" in name else 1.0)
        model = liger_dist.wrap(model, "none") if wraps else model
        (1e-3 * model(**make_batch(0), use_cache=False).loss).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[1].items():
        assert relative_error(gradients[0][name], gradient) < 0.05, name


def test_fp32_adapters_with_one_input_are_one_product() -> None:
    wrapped = liger_dist.wrap(adapted(torch.bfloat16), "none")
    with Products() as products:
        wrapped(**make_batch(0), use_cache=False)
    assert products.of_several == GROUPS["llama"]


def test_copies_checkpoints_and_unwrap(tmp_path: Any) -> None:
    wrapped = liger_dist.wrap(adapted(), "none")
    assert_as_peft(copy.deepcopy(wrapped), adapted())
    wrapped.save_pretrained(tmp_path)
    base = make_model("llama", dtype=torch.float32).to(compute_device())
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    for (name, saved), (_, read) in zip(wrapped.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(saved, read), name
    kinds = {type(module) for module in adapted().modules()}
    assert {type(module) for module in liger_dist.unwrap(wrapped).modules()} == kinds


STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp2": liger_dist.FSDP2(),
    "fsdp2, vocab-parallel, checkpointing": liger_dist.FSDP2(lm_head="vocab_parallel"),
    "fsdp1": liger_dist.FSDP1(),
    "zero3": "deepspeed",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_of_two_ranks(name: str, workers_2: Workers) -> None:
    for errors in workers_2.run(errors_under, name):
        assert len(errors) == 28
        assert_below(errors, 1e-4)


def errors_under(name: str) -> dict[str, float]:
    """Of every adapter's gradient, against PEFT's own in fp64."""
    model, reference = adapted(), adapted().double()
    if "checkpointing" in name:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for rank in range(2):
        (reference(**make_batch(rank), use_cache=False).loss / 2).backward()
    truth = {key: parameter.grad for key, parameter in reference.named_parameters() if parameter.grad is not None}
    wrapped = liger_dist.wrap(model, STRATEGIES[name])
    assert ADDED_IN_PLACE in str(liger_dist.explain(wrapped))
    got = gradients_under(name, wrapped, make_batch(torch.distributed.get_rank()) | {"use_cache": False})
    return {key: relative_error(got[key], gradient) for key, gradient in truth.items()}


def gradients_under(name: str, wrapped: Any, batch: Any) -> dict[str, Tensor]:
    """Runs one step, and returns every full gradient."""
    if name == "zero3":
        return deepspeed_step(wrapped, [batch], stage=3)[1]
    wrapped(**batch).loss.backward()
    return full_gradients(wrapped)


class Codes(Tensor):
    """Rounded numbers whose ``dequantize`` reads a scale, as subclasses of other libraries do."""

    scale: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.dequantize:
                return args[0].as_subclass(Tensor).float() * args[0].scale
            return func(*args, **(kwargs or {}))


def rounded(saved: Tensor) -> Tensor:
    is_activation = saved.is_floating_point() and saved.requires_grad and not isinstance(saved, nn.Parameter)
    if not is_activation or saved.numel() == 0:
        return saved
    scale = saved.detach().abs().amax().clamp(min=1e-9) / 127
    codes = (saved.detach() / scale).round().to(torch.int8).as_subclass(Codes)
    codes.scale = scale
    return codes.dequantize()


def test_hooks_of_saved_tensors_see_subclasses_as_they_are() -> None:
    own = adapted(target_modules=["down_proj"])
    gradients = []
    for model in (liger_dist.wrap(adapted(target_modules=["down_proj"]), "none"), own):
        with torch.autograd.graph.saved_tensors_hooks(rounded, lambda tensor: tensor):
            model(**make_batch(0), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[1].items():
        assert relative_error(gradients[0][name], gradient) < 0.1, name


class Doubled(nn.Parameter):
    """Counts twice where torch's functions read it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (nn.functional.linear, torch.addmm):
                args = [2 * arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args]
            return func(*args, **(kwargs or {}))


def of_another_kind(model: Any) -> None:
    bias = torch.linspace(-1.0, 1.0, HIDDEN_SIZE, device=compute_device())
    projections(model)[0].base_layer.bias = Doubled(bias, requires_grad=False)


def shadowed_base(model: Any) -> None:
    base = projections(model)[0].base_layer
    vars(base)["weight"] = 1.5 * base.weight.detach()


def shadowed_a(model: Any) -> None:
    a = projections(model)[0].lora_A["default"]
    vars(a)["weight"] = 1.5 * a.weight.detach()


def hooked_backward(part: str) -> Callable[[Any], None]:
    def add(model: Any) -> None:
        layer = projections(model)[0]
        module = layer.base_layer if part == "base_layer" else getattr(layer, part)["default"]
        module.register_full_backward_pre_hook(lambda _, d_outputs: tuple(0.5 * d for d in d_outputs))

    return add


def projections(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("o_proj")]


CHANGES: dict[str, Callable[[Any], None]] = {
    "a bias of a subclass": of_another_kind,
    "a weight of the instance": shadowed_base,
    "an A of the instance": shadowed_a,
    "a hook before the backward of A": hooked_backward("lora_A"),
    "a hook before the backward of B": hooked_backward("lora_B"),
    "a hook before the backward of the base": hooked_backward("base_layer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_layer_has_after_wrap_counts(change: str) -> None:
    wrapped, own = liger_dist.wrap(adapted(), "none"), adapted()
    for model in (wrapped, own):
        CHANGES[change](model)
    losses = [model(**make_batch(0), use_cache=False).loss for model in (wrapped, own)]
    assert relative_error(losses[0], losses[1]) < 1e-5
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    assert gradients
    for name, parameter in wrapped.named_parameters():
        if name in gradients:
            assert relative_error(parameter.grad, gradients[name]) < 1e-4, name
