"""Memory of gated MLPs: gradients over gate and up where nothing else holds them, and tiles of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
from allocations import LargestTensor
from models import BATCH_SIZE, SEQUENCE_LENGTH, gradient_errors, make_batch, make_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

import liger_dist
from liger_dist.sharding.process_groups import compute_device

TILE = 7
TOKENS = BATCH_SIZE * SEQUENCE_LENGTH
TILES = -(-TOKENS // TILE)


class Multiplications(TorchDispatchMode):
    """Those of matrix products. The hooks of torch's FlopCounterMode would make modules run their own code."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.number += args[0].numel() * args[1].shape[1]
        return func(*args, **(kwargs or {}))


def pair(*, checkpointing: bool = False, use_reentrant: bool = False, **options: Any) -> tuple[Any, Any]:
    """A wrapped model in fp32, and the truth in fp64."""
    model: Any = make_model("llama", dtype=torch.float32)
    reference = make_model("llama", dtype=torch.float32).double()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(**options))
    return model, reference


def assert_gradients_are_true(model: Any, reference: Any) -> None:
    reference(**make_batch(0), use_cache=False).loss.backward()
    errors = gradient_errors(model, reference)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_written_over_gate_and_up(checkpointing: bool) -> None:
    model, reference = pair(checkpointing=checkpointing)
    outputs: dict[str, int] = {}
    overwritten = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs[name] = output.data_ptr()
            if output.requires_grad:
                output.register_hook(lambda gradient: overwritten.append(gradient.data_ptr() == outputs[name]))

        return hook

    mlp = model.model.layers[0].mlp
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).register_forward_hook(note(name))
    model(**make_batch(0)).loss.backward()
    assert overwritten == [True, True]
    assert_gradients_are_true(model, reference)


@pytest.mark.parametrize("tile", [None, TILE])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_second_backward(checkpointing: bool, tile: int | None) -> None:
    model, reference = pair(checkpointing=checkpointing, mlp_tile_tokens=tile)
    loss = model(**make_batch(0)).loss
    loss.backward(retain_graph=True)
    assert_gradients_are_true(model, reference)
    loss.backward()
    assert_gradients_are_true(model, reference)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
@pytest.mark.parametrize(
    "kept_as",
    [lambda out: out, lambda out: out.detach(), lambda out: out[:, 1:], lambda out: out.detach().view(-1).numpy()],
    ids=["itself", "detached", "a part", "numpy"],
)
def test_what_code_holds_is_not_overwritten(kept_as: Callable[[Tensor], Any], name: str, checkpointing: bool) -> None:
    if compute_device().type == "cuda":
        kept_as = lambda out: out.detach()  # noqa: E731 - numpy reads no GPU memory
    model, reference = pair(checkpointing=checkpointing)
    kept, copies = [], []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(kept_as(output))
        copies.append(kept_as(output.detach().clone()))

    getattr(model.model.layers[0].mlp, name).register_forward_hook(hook)
    model(**make_batch(0)).loss.backward()
    assert len(kept) == 1 + checkpointing
    assert all(bool((one == other).all()) for one, other in zip(kept, copies, strict=True))
    assert_gradients_are_true(model, reference)


def test_what_another_node_saved_is_not_overwritten() -> None:
    (model, own), squares = pair(), []

    def square(module: nn.Module, args: Any, output: Tensor) -> None:
        squares.append((output * output).sum())

    for one in (model, own):
        one.model.layers[0].mlp.gate_proj.register_forward_hook(square)
    (model(**make_batch(0)).loss + squares[0]).backward()
    (own(**make_batch(0), use_cache=False).loss + squares[1]).backward()
    assert max(gradient_errors(model, own).values()) < 1e-5


def test_tokens_of_all_tiles_are_those_of_the_batch_and_no_tile_runs_three_times() -> None:
    for checkpointing in (False, True):
        model, reference = pair(checkpointing=checkpointing, mlp_tile_tokens=TILE)
        seen: list[int] = []

        def count(module: nn.Module, args: Any, output: Tensor, seen: list[int] = seen) -> None:
            seen.append(len(output))

        for layer in model.model.layers:
            layer.mlp.gate_proj.register_forward_hook(count)
        model(**make_batch(0)).loss.backward()
        layers, runs = len(model.model.layers), 2
        assert sum(seen) == layers * runs * TOKENS
        assert len(seen) == layers * runs * TILES
        assert max(seen) == TILE
        assert_gradients_are_true(model, reference)
        assert f"{TILE} tokens at a time" in str(liger_dist.explain(model))


def test_tiles_compute_no_more_products_than_checkpointing_alone() -> None:
    counts = []
    for tile in (None, TILE):
        model, reference = pair(checkpointing=True, mlp_tile_tokens=tile)
        with Multiplications() as counted:
            model(**make_batch(0)).loss.backward()
        counts.append(counted.number)
        assert_gradients_are_true(model, reference)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tile_keeps_its_product_only_for_the_gradient_of_down(frozen: bool) -> None:
    model, _ = pair(mlp_tile_tokens=TILE)
    for layer in model.model.layers:
        layer.mlp.down_proj.requires_grad_(not frozen)
    width, kept = model.config.intermediate_size, []
    loss = model(**make_batch(0)).loss
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        loss.backward()
    tiles = len(model.model.layers) * (TOKENS // TILE)
    assert kept.count((TILE, width)) == tiles * (2 if frozen else 3)


HOOKS = {
    "forward_pre_hook": lambda module, args: (args[0] * args[0],),
    "forward_hook": lambda module, args, output: output * 2,
    "full_backward_pre_hook": lambda module, outputs: (outputs[0] * 2,),
    "full_backward_hook": lambda module, inputs, outputs: (inputs[0] * 2,),
}


@pytest.mark.filterwarnings("ignore:liger_dist leaves the loss")
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_down_projection_run_as_without_tiles(name: str, everywhere: bool) -> None:
    model, reference = pair(mlp_tile_tokens=TILE)
    downs = [one.model.layers[0].mlp.down_proj for one in (model, reference)]
    handles = []
    if everywhere:
        only = lambda module, *args: HOOKS[name](module, *args) if module in downs else None  # noqa: E731
        handles.append(getattr(nn.modules.module, f"register_module_{name}")(only))
    else:
        for down in downs:
            getattr(down, f"register_{name}")(HOOKS[name])
    try:
        model(**make_batch(0)).loss.backward()
        assert_gradients_are_true(model, reference)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("place", ["nn.Linear.forward", "F.linear"])
def test_patches_of_torchs_linear_count_as_without_tiles(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair(mlp_tile_tokens=TILE)
    owner, name = (nn.Linear, "forward") if place == "nn.Linear.forward" else (nn.functional, "linear")
    own: Any = getattr(owner, name)
    down = model.model.layers[0].mlp.down_proj.weight.shape

    def patched(*args: Any) -> Tensor:
        weight = args[0].weight if name == "forward" else args[1]
        result: Tensor = own(*args)
        return result * 1.5 if weight.shape == down else result

    monkeypatch.setattr(owner, name, patched)
    model(**make_batch(0)).loss.backward()
    assert_gradients_are_true(model, reference)


@pytest.mark.parametrize("frozen", ["gate_proj", "down_proj", "down_proj.bias"])
def test_tiles_with_biases_and_frozen_projections(frozen: str) -> None:
    config = make_model("llama", dtype=torch.float32).config
    config.mlp_bias = True
    torch.manual_seed(0)
    model: Any = type(make_model("llama"))(config).to(compute_device())
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.requires_grad_(frozen not in name)
    reference = copy.deepcopy(model).double()
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=TILE))
    model(**make_batch(0)).loss.backward()
    assert model.model.layers[0].mlp.down_proj.bias.requires_grad == (frozen == "gate_proj")
    assert_gradients_are_true(model, reference)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_tiles_under_both_kinds_of_checkpointing(use_reentrant: bool) -> None:
    model, reference = pair(checkpointing=True, use_reentrant=use_reentrant, mlp_tile_tokens=TILE)
    model(**make_batch(0)).loss.backward()
    assert_gradients_are_true(model, reference)


def test_activations_of_one_tile_exist_at_a_time() -> None:
    wide: Any = make_model("llama", dtype=torch.float32)
    for layer in wide.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(16, 4096, bias=False) for _ in range(2))
        layer.mlp.down_proj = nn.Linear(4096, 16, bias=False)
        layer.to(compute_device())
    liger_dist.wrap(wide, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=TILE))
    batch = make_batch(0)
    # Weights and their gradients are 16 x 4096.
    for run in (lambda: wide(**batch).loss.backward(), lambda: no_gradient(wide, batch)):
        with LargestTensor() as largest:
            run()
        assert largest.bytes == 4 * 16 * 4096 < 4 * TOKENS * 4096


def no_gradient(model: Any, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model.eval()(**batch)


@pytest.mark.smoke
def test_dropout_of_a_tile_is_drawn_again_alike() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        target_modules=["gate_proj", "down_proj"], r=2, lora_dropout=0.5, init_lora_weights=False
    )
    torch.manual_seed(0)
    model: Any = make_model("llama", dtype=torch.float32)
    inner = peft.get_peft_model(model, settings).train()
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 10, 16, device=compute_device(), requires_grad=True)
    trained = [p for p in mlp.parameters() if p.requires_grad]
    torch.manual_seed(1)
    want = torch.autograd.grad(torch.cat([mlp(tile) for tile in x.view(-1, 16).split(TILE)]).sum(), [x, *trained])
    after = on_device.rand(3)
    liger_dist.wrap(inner, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=TILE))
    torch.manual_seed(1)
    out = mlp(x)
    got = torch.autograd.grad(out.sum(), [x, *trained])
    assert torch.equal(on_device.rand(3), after), "the backward leaves random numbers as they were"
    for ours, true in zip(got, want, strict=True):
        torch.testing.assert_close(ours, true)


@pytest.mark.parametrize("backward_within", [False, True])
def test_tiles_under_autocast(backward_within: bool) -> None:
    """Autocast keeps casts of weights, and those that a forward without gradients has made have none."""
    gradients = []
    for tile in (None, TILE):
        model: Any = make_model("llama", dtype=torch.float32)
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=tile))
        with torch.autocast(compute_device().type, dtype=torch.bfloat16):
            mlp, x = model.model.layers[0].mlp, torch.randn(TOKENS, 16, device=compute_device(), requires_grad=True)
            assert mlp(x).dtype == torch.bfloat16
            loss = model(**make_batch(0)).loss
            if backward_within:
                loss.backward()
        if not backward_within:
            loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradients[1][name] is not None, name
        assert float((gradients[1][name] - gradient).norm() / gradient.norm()) < 2e-2, name


def test_hooks_of_a_weight_run_once_for_all_tiles() -> None:
    model, reference = pair(mlp_tile_tokens=TILE)
    calls = []

    def halve(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient / 2

    for one in (model, reference):
        one.model.layers[0].mlp.down_proj.weight.register_hook(halve)
    model(**make_batch(0)).loss.backward()
    assert len(calls) == 1
    assert_gradients_are_true(model, reference)


@pytest.mark.smoke
def test_tiles_after_layers_that_do_not_train() -> None:
    model, reference = pair(mlp_tile_tokens=TILE)
    for one in (model, reference):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("layers.0.mlp" in name or "layers.1" in name)
    model(**make_batch(0)).loss.backward()
    assert model.model.layers[0].mlp.gate_proj.weight.grad is not None
    assert_gradients_are_true(model, reference)


def test_gradients_over_many_tiles_are_summed_in_fp32() -> None:
    """The error of bf16 gradients does not grow with the number of tiles."""
    truth = make_model("llama", dtype=torch.float32).bfloat16().double()
    truth(**make_batch(0), use_cache=False).loss.backward()
    errors = []
    for tile in (None, 1):
        model = make_model("llama", dtype=torch.float32).bfloat16()
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=tile))
        model(**make_batch(0)).loss.backward()
        named = dict(truth.named_parameters())
        mlps = [(p.grad, named[n].grad) for n, p in model.named_parameters() if ".mlp." in n]
        errors.append(sum(float((own.double() - true).norm() / true.norm()) for own, true in mlps))
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.smoke
def test_unwrap_leaves_nothing() -> None:
    model, _ = pair(mlp_tile_tokens=TILE)
    liger_dist.unwrap(model)
    fresh: Any = make_model("llama", dtype=torch.float32)
    for one, other in zip(model.model.layers, fresh.model.layers, strict=True):
        assert vars(one.mlp).keys() == vars(other.mlp).keys()
        assert type(one.mlp) is type(other.mlp)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_wrong_size_is_refused(value: Any) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=r"mlp_tile_tokens is .* expected a number of tokens"):
        liger_dist.WrapConfig(mlp_tile_tokens=value)


@pytest.mark.smoke
def test_tiles_without_kernels_or_gated_mlps_are_refused() -> None:
    with pytest.raises(liger_dist.LigerDistError, match="layer_kernels is False"):
        liger_dist.WrapConfig(mlp_tile_tokens=TILE, layer_kernels=False)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=101))
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(liger_dist.LigerDistError, match="has no gated MLP that is computed by kernels"):
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(mlp_tile_tokens=TILE))
    assert {name: type(module) for name, module in model.named_modules()} == before
    with pytest.raises(liger_dist.LigerDistError, match="has no gated MLP that is computed by kernels"):
        liger_dist.wrap(make_model("qwen3_moe"), "none", config=liger_dist.WrapConfig(mlp_tile_tokens=TILE))
