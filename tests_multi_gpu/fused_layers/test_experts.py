"""Experts of transformers' models, through ``wrap``: which are computed by grouped products, what stays the model's
own, and LoRA of PEFT on their parameters."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import WeightGradients
from models import make_batch, make_model
from torch import Tensor, nn

import liger_dist
from liger_dist.errors import LigerDistError
from liger_dist.sharding.process_groups import compute_device

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = ("qwen3_moe", "gpt_oss")


def lines(model: Any) -> list[tuple[str, str]]:
    return liger_dist.explain(model).layers.lines()


def is_swapped(model: Any, words: str = "by grouped products") -> bool:
    return any(kind == "swapped" and words in line for kind, line in lines(model))


def experts_of(model: Any) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def loss_and_gradients(model: Any, seed: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**make_batch(0, seed=seed), use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(wrapped: Any, own: Any, *, tolerance: float = 2e-6) -> None:
    """Loss and gradients; transformers' loss, norms and softmax go through fp32."""
    mine, theirs = loss_and_gradients(wrapped), loss_and_gradients(own)
    assert mine.keys() == theirs.keys()
    for name, truth in theirs.items():
        assert float((mine[name] - truth).norm()) <= tolerance * float(truth.norm()) + 1e-12, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_the_models_own_implementations_are_replaced(family: str, implementation: str) -> None:
    own: Any = make_model(family)
    model = copy.deepcopy(own)
    model.set_experts_implementation(implementation)
    liger_dist.wrap(model)
    assert is_swapped(model)
    assert model.config._experts_implementation == implementation
    assert_same_gradients(model, own)


def test_another_implementation_is_left_and_may_be_chosen_later() -> None:
    own: Any = make_model("qwen3_moe")
    model = copy.deepcopy(own)
    model.config._experts_implementation = "sonicmoe"
    liger_dist.wrap(model)
    assert ("left alone", "Qwen3MoeExperts (experts): its implementation is sonicmoe") in lines(model)
    # Grouped products take no fp64.
    own.float()
    model = liger_dist.wrap(copy.deepcopy(own))
    calls = counted()
    loss_and_gradients(model)
    assert calls() == 0
    model.set_experts_implementation("grouped_mm")
    assert_same_gradients(model, own, tolerance=1e-5)
    assert calls() == 2


def counted() -> Callable[[], int]:
    """Counts calls of transformers' grouped_mm."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    seen = []
    own = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def count(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return own(*args, **kwargs)

    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = count
    return lambda: len(seen)


@pytest.fixture(autouse=True)
def _restored_functions() -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = dict(ALL_EXPERTS_FUNCTIONS)
    yield
    for name in before:
        ALL_EXPERTS_FUNCTIONS[name] = before[name]


def test_unwrap_copies_and_pickles() -> None:
    own: Any = make_model("qwen3_moe")
    model = copy.deepcopy(own)
    liger_dist.wrap(model)
    assert_same_gradients(copy.deepcopy(model), own)
    assert_same_gradients(pickle.loads(pickle.dumps(model)), own)
    liger_dist.unwrap(model)
    for module in experts_of(model):
        assert type(module) is type(experts_of(own)[0])
        assert module.config is model.config
    assert_same_gradients(model, own)
    liger_dist.wrap(model)
    assert_same_gradients(model, own)


@pytest.mark.nightly
def test_a_pickle_is_read_in_another_process(tmp_path: Path) -> None:
    model: Any = liger_dist.wrap(make_model("qwen3_moe"))
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((model, make_batch(0))))
    program = (
        "import pickle, sys; model, batch = pickle.load(open(sys.argv[1], 'rb')); print(float(model(**batch).loss))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    said = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert float(said.splitlines()[-1]) == pytest.approx(float(model(**make_batch(0)).loss), rel=1e-6)


def test_hooks_see_the_experts() -> None:
    model: Any = liger_dist.wrap(make_model("qwen3_moe"))
    shapes: list[Any] = []
    for module in experts_of(model):
        module.register_forward_hook(lambda module, args, output: shapes.append((args[1].shape[1], output.shape)))
    loss_and_gradients(model)
    assert shapes == [(2, (36, 16))] * 2


def change_limit(module: Any) -> None:
    module.limit = 0.2


def change_activation(module: Any) -> None:
    module.act_fn = nn.Tanh()


def hook_activation(module: Any) -> None:
    module.act_fn.register_forward_hook(lambda module, args, output: 2 * output)


def patch_gate(module: Any) -> None:
    module._apply_gate = lambda x: x.chunk(2, -1)[0].tanh() * x.chunk(2, -1)[1]


CHANGES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "limit": ("gpt_oss", change_limit, "eager"),
    "activation": ("qwen3_moe", change_activation, "eager"),
    "hook": ("qwen3_moe", hook_activation, "eager"),
    "gate": ("qwen3_moe", patch_gate, "batched_mm"),
}


@pytest.mark.cover("values")
@pytest.mark.nightly(when=["after it"])
@pytest.mark.nightly(change=["limit", "hook"], when=["before the first call"])
@pytest.mark.parametrize("when", ["not compiled", "before the first call", "after it"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_wrap_is_computed_by_the_model(change: str, when: str) -> None:
    if (change, when) == ("hook", "after it"):
        pytest.skip("torch.compile does not look for hooks of later")
    torch._dynamo.reset()
    family, apply, implementation = CHANGES[change]
    own: Any = make_model(family)
    own.set_experts_implementation(implementation)
    model: Any = liger_dist.wrap(copy.deepcopy(own))
    if when != "not compiled":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    if when == "after it":
        assert_same_gradients(model, own)
    for one in (model, own):
        for module in experts_of(one):
            apply(module)
    assert_same_gradients(model, own)


def test_a_patched_forward_inside_lora_runs() -> None:
    own = with_lora("qwen3_moe")
    model = liger_dist.wrap(copy.deepcopy(own))
    for one in (model, own):
        for module in one.modules():
            if "down_proj" in module._parameters:
                module.forward = partial(doubled_experts, module.forward)
    assert_same_gradients(model, own)


def doubled_experts(forward: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    return 2 * forward(hidden_states, top_k_index, top_k_weights)


def limited(module: Any, x: Tensor) -> Tensor:
    g, u = x.chunk(2, -1)
    limit = module.swiglu_limit
    y: Tensor = module.act_fn(g.clamp(max=limit)) * u.clamp(-limit, limit)
    return y


def one_after_the_other(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    total = torch.zeros_like(hidden_states)
    for expert in range(module.num_experts):
        token, k = torch.where(top_k_index == expert)
        y = limited(module, hidden_states[token] @ module.gate_up_proj[expert].T) @ module.down_proj[expert].T
        total = total.index_add(0, token, y * top_k_weights[token, k, None])
    return total


@pytest.mark.parametrize("limit", [0.5, 2e3, 1e6])
def test_a_limit_of_any_size_is_found(limit: float) -> None:
    from transformers.integrations.moe import use_experts_implementation

    own: Any = make_model("qwen3_moe")
    cls: Any = type(experts_of(own)[0])
    members = {"_apply_gate": limited, "forward": one_after_the_other}
    kind: Any = use_experts_implementation(type("Limited", (cls,), members))
    for module in experts_of(own):
        module.__class__ = kind
        module.swiglu_limit = limit
        # So large that most gates are beyond it.
        module.gate_up_proj.data *= 20 * limit
    model = liger_dist.wrap(copy.deepcopy(own))
    assert any(f"limited to {limit:g}" in line for state, line in lines(model) if state == "swapped"), lines(model)
    assert_same_gradients(model, own, tolerance=1e-5)


@pytest.mark.smoke
def test_the_name_of_the_implementation_alone_is_refused() -> None:
    liger_dist.wrap(make_model("qwen3_moe"))
    model: Any = make_model("qwen3_moe")
    model.set_experts_implementation("liger_dist")
    with pytest.raises(LigerDistError, match=r"set_experts_implementation\('grouped_mm'\)"):
        model(**make_batch(0))


@pytest.mark.smoke
def test_what_is_written_to_the_config_stays() -> None:
    model: Any = liger_dist.wrap(make_model("qwen3_moe"))
    first, second = experts_of(model)
    first.config.note = "noted"
    other = copy.deepcopy(model.config)
    second.config = other
    liger_dist.unwrap(model)
    assert first.config is model.config
    assert model.config.note == "noted"
    assert second.config is other


class Doubled(nn.Module):
    """An activation that is none of those known."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.tanh(x)


def test_an_unknown_activation_is_left() -> None:
    own: Any = make_model("qwen3_moe")
    for module in experts_of(own):
        module.act_fn = Doubled()
    model = liger_dist.wrap(copy.deepcopy(own))
    assert ("left alone", "Qwen3MoeExperts (experts): its activation is not a known one") in lines(model)
    assert_same_gradients(model, own)


def test_a_norm_after_each_expert_is_left() -> None:
    own: Any = make_model("qwen3_moe")
    for module in experts_of(own):
        module.has_post_expert_norm = True
    model = liger_dist.wrap(copy.deepcopy(own))
    assert any("it has a norm after each expert" in line for _, line in lines(model))


def test_experts_that_compute_something_else_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = make_model("qwen3_moe")
    cls: Any = type(experts_of(own)[0])

    def without_weights(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return cls.forward.__wrapped__(self, hidden_states, top_k_index, torch.ones_like(top_k_weights))

    class Other(cls):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return without_weights(self, *args, **kwargs)

    Other.forward.__wrapped__ = without_weights  # type: ignore[attr-defined]
    for module in experts_of(own):
        module.__class__ = Other
    model = liger_dist.wrap(copy.deepcopy(own))
    assert any("it does not compute the weighted sum of its experts" in line for _, line in lines(model))
    assert_same_gradients(model, own)


@pytest.mark.nightly(family=["gpt_oss"])
@pytest.mark.smoke
@pytest.mark.nightly(lora=[True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["all", "LoRA"])
def test_compiled_layers_take_experts_as_an_operator(family: str, lora: bool) -> None:
    own: Any = with_lora(family) if lora else make_model(family)
    model = copy.deepcopy(own)
    base = model.get_base_model() if lora else model
    for layer in base.model.layers:
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
        layer.compile(backend="aot_eager")
    liger_dist.wrap(model)
    assert is_swapped(model, "LoRA by grouped products" if lora else "by grouped products")
    assert_same_gradients(model, own)


def with_lora(family: str, parameters: list[str] = PARAMETERS, **settings: Any) -> Any:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": parameters} | settings
    model = get_peft_model(make_model(family), LoraConfig(**options))
    drawn(model)
    return model.double()


def drawn(model: Any) -> None:
    generator = torch.Generator(compute_device()).manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)


@pytest.mark.cover("values")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        (PARAMETERS, {}),
        (PARAMETERS[:1], {"r": 3}),
        (PARAMETERS[1:], {"r": 8, "lora_alpha": 1}),
        (PARAMETERS, {"use_rslora": True}),
    ],
    ids=["both", "first, rank 3", "second, rank 8", "rank-stabilized"],
)
def test_lora_on_experts(family: str, parameters: list[str], settings: dict[str, Any]) -> None:
    own = with_lora(family, parameters, **settings)
    model = copy.deepcopy(own)
    liger_dist.wrap(model)
    assert is_swapped(model, "ParamWrapper: LoRA by grouped products")
    assert_same_gradients(model, own)
    with model.disable_adapter(), own.disable_adapter():
        assert_same_loss(model, own)
    for one in (model, own):
        one.merge_adapter()
    assert_same_loss(model, own)
    for one in (model, own):
        one.unmerge_adapter()
    assert_same_gradients(model, own)
    assert_same_gradients(pickle.loads(pickle.dumps(model)), own)
    liger_dist.unwrap(model)
    assert_same_gradients(model, own)


def assert_same_loss(wrapped: Any, own: Any) -> None:
    with torch.no_grad():
        mine, theirs = (float(model(**make_batch(0), use_cache=False).loss) for model in (wrapped, own))
    assert mine == pytest.approx(theirs, rel=1e-6)


def test_two_adapters_of_which_one_or_both_are_active() -> None:
    from peft import LoraConfig

    own = with_lora("qwen3_moe")
    own.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], target_parameters=PARAMETERS))
    drawn(own)
    own.double()
    own.set_adapter("other")
    model = copy.deepcopy(own)
    liger_dist.wrap(model)
    assert_same_gradients(model, own)
    for active in ("default", ["default", "other"]):
        for one in (model, own):
            one.base_model.set_adapter(active)
        assert_same_gradients(model, own)


def test_no_weight_is_merged() -> None:
    """No tensor of the shape of all experts' weights is made beside them, forward or backward; PEFT makes them."""
    # Of another rank than any size of the model.
    own = with_lora("qwen3_moe", r=20)
    model = liger_dist.wrap(copy.deepcopy(own))
    for one, is_merged in ((model, False), (own, True)):
        for name in ("gate_up_proj", "down_proj"):
            weight = next(p for n, p in one.named_parameters() if n.endswith(name))
            with WeightGradients(weight, one.parameters()) as made:
                loss_and_gradients(one)
            assert bool(made.count) == is_merged, name


def test_lora_on_experts_that_peft_merges_is_refused_under_fsdp1() -> None:
    from liger_dist.fused_layers import refuse_merged_weights

    model = with_lora("qwen3_moe")
    with pytest.raises(LigerDistError, match=r"(?s)mlp.experts has LoRA on down_proj, .*strategy='fsdp2'"):
        refuse_merged_weights(model, "fsdp1")
    refuse_merged_weights(model, "fsdp2")


def test_routing_weights_of_another_dtype() -> None:
    """Routers may return fp32 weights for bf16 experts."""
    model: Any = liger_dist.wrap(make_model("qwen3_moe", dtype=torch.bfloat16))
    module = experts_of(model)[0]
    x = torch.randn(5, 16, device=compute_device(), dtype=torch.bfloat16)
    index = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5], [1, 2]], device=compute_device())
    weight = torch.rand(5, 2, device=compute_device()).requires_grad_()
    y = module(x, index, weight)
    assert y.dtype == torch.bfloat16
    (d_weight,) = torch.autograd.grad(y.float().sum(), [weight])
    assert d_weight.dtype == torch.float32
    half = weight.detach().bfloat16().requires_grad_()
    assert torch.autograd.grad(module(x, index, half).float().sum(), [half])[0].dtype == torch.bfloat16


@pytest.mark.smoke
def test_inputs_of_another_dtype_run_the_models_own() -> None:
    own: Any = make_model("qwen3_moe", dtype=torch.bfloat16)
    own.set_experts_implementation("grouped_mm")
    model = liger_dist.wrap(copy.deepcopy(own))
    x = torch.randn(5, 16, device=compute_device())
    index = torch.tensor([[0, 1]] * 5, device=compute_device())
    weight = torch.rand(5, 2, device=compute_device())
    assert torch.equal(experts_of(model)[0](x, index, weight), experts_of(own)[0](x, index, weight))
