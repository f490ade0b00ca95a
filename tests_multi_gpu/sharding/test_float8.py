"""float8 linear layers under FSDP2: gradients of torchao's layers in the unwrapped model, masters that keep their
dtype, checkpoints, LoRA, and what is refused. CPUs emulate the products."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import assert_below, full, make_batch
from safetensors.torch import load_file
from training_runs import config_for, losses_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device
from liger_dist_train.export import export
from liger_dist_train.run import train

pytest.importorskip("torchao")
RECIPES = ("tensorwise", "rowwise")
TOLERANCE = 2e-3
"""a rounding error that falls on the other side of a step of float8 changes a number by a sixteenth"""


def make_wide_model(**sizes: Any) -> Any:
    """Sizes that are multiples of 16."""
    torch.manual_seed(0)
    usual = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=101, num_key_value_heads=2, **(usual | sizes)))


def as_they_are(function: Any, *args: Any) -> Any:
    """Without compiling: what is compared is the same code."""
    torch.compiler.set_stance("force_eager")
    return function(*args)


LAYOUTS: dict[str, dict[str, Any]] = {
    "gather": {},
    "vocab_parallel": {"lm_head": "vocab_parallel"},
    "HSDP": {"mesh": (2, 1)},
    "units of two layers": {"layers_per_unit": 2},
    "no reshard": {"reshard_after_forward": False},
    "three ranks": {},
}
"""96 rows are divided by three ranks, 64 are not"""


@pytest.mark.cover("values")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_torchao_unwrapped(layout: str, recipe: str, workers_2: Workers) -> None:
    if layout == "three ranks":
        with Workers(3) as workers:
            found = workers.run(as_they_are, errors_beside_torchao, layout, recipe)
    else:
        found = workers_2.run(as_they_are, errors_beside_torchao, layout, recipe)
    for errors, changed, kinds in found:
        assert_below(errors, TOLERANCE)
        assert changed > 10 * TOLERANCE, "the layers compute in fp32"
        assert kinds == {"Float8Linear": 14, "lm_head": "FusedLMHead"}


def errors_beside_torchao(layout: str, recipe: Any) -> tuple[dict[str, float], float, dict[str, Any]]:
    """Errors of every gradient, with 7 tokens in a row; how far float8 is from fp32; and what was swapped."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    device = compute_device()
    world = dist.get_world_size()
    batches = [{name: part[:, :7] for name, part in make_batch(0, seed=rank).items()} for rank in range(world)]
    exact, reference, model = make_wide_model().to(device), make_wide_model().to(device), make_wide_model()
    settings = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device.type == "cpu", pad_inner_dim=True)
    convert_to_float8_training(reference.model.layers, config=settings)
    for batch in batches:
        for one in (exact, reference):
            one(**batch).loss.backward()
    wrapped = liger_dist.wrap(model, liger_dist.FSDP2(float8=recipe, **LAYOUTS[layout]))
    wrapped(**batches[dist.get_rank()]).loss.backward()
    assert all(parameter.dtype == torch.float32 for parameter in wrapped.parameters())
    # Divided here: rounded scales of another upstream gradient give other numbers.
    truth = {name: parameter.grad / world for name, parameter in reference.named_parameters()}
    errors = {name: relative_error(full(p.grad), truth[name]) for name, p in wrapped.named_parameters()}
    gradients = [torch.cat([p.grad.flatten() for p in one.parameters()]) for one in (reference, exact)]
    swapped = [module for module in wrapped.modules() if "Float8Linear" in type(module).__name__]
    lm_head_kind = type(wrapped.lm_head).__name__.removeprefix("FSDP")
    return errors, relative_error(*gradients), {"Float8Linear": len(swapped), "lm_head": lm_head_kind}


def test_gradients_of_lora_under_checkpointing(workers_2: Workers) -> None:
    """Base layers in float8 have the gradients of torchao's, for LoRA beside them."""
    pytest.importorskip("peft")
    for errors in workers_2.run(as_they_are, errors_of_lora):
        assert len(errors) == 28
        assert_below(errors, TOLERANCE)


def errors_of_lora() -> dict[str, float]:
    """Of every gradient, against torchao's layers under PEFT, unwrapped."""
    from peft import LoraConfig, get_peft_model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        settings = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        return get_peft_model(model, settings).to(compute_device()).train()

    device, world = compute_device(), dist.get_world_size()
    model, reference = (adapted(make_wide_model()) for _ in range(2))
    settings = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=device.type == "cpu")
    settings = replace(settings, pad_inner_dim=True)
    layers = reference.get_base_model().model.layers
    convert_to_float8_training(layers, config=settings, module_filter_fn=lambda _, name: "lora_" not in name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    for rank in range(world):
        reference(**make_batch(rank)).loss.backward()
    truth = {name: p.grad / world for name, p in reference.named_parameters() if p.grad is not None}
    wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(float8="tensorwise"))
    wrapped(**make_batch(dist.get_rank()), use_cache=False).loss.backward()
    got = {name: full(p.grad) for name, p in wrapped.named_parameters() if p.grad is not None}
    return {name: relative_error(got[name], gradient) for name, gradient in truth.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_on_the_meta_device_accumulation_and_verify(recipe: str, workers_2: Workers) -> None:
    for losses, verdict in workers_2.run(as_they_are, losses_of_ways, recipe):
        assert losses["meta"] == pytest.approx(losses["built"], rel=1e-6)
        assert losses["checkpointing"] == pytest.approx(losses["built"], rel=1e-3)
        assert losses["built"][-1] < losses["built"][0]
        assert verdict == ()


def losses_of_ways(recipe: Any) -> tuple[dict[str, list[float]], tuple[str, ...]]:
    losses: dict[str, list[float]] = {}
    for way in ("meta", "built", "checkpointing"):
        with torch.device("meta"):
            model = make_wide_model()
        if way != "meta":
            # The values of the model on the meta device, in one with storage.
            torch.manual_seed(3)
            other = liger_dist.wrap(model, "fsdp2")
            values = {name: full(p).clone() for name, p in other.named_parameters()}
            model = make_wide_model()
            model.load_state_dict(values)
        if way == "checkpointing":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(3)
        wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(float8=recipe, param_dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        losses[way] = []
        for _ in range(3):
            for micro in range(2):
                wrapped.set_requires_gradient_sync(micro == 1)
                loss = wrapped(**make_batch(dist.get_rank(), seed=micro)).loss
                (loss / 2).backward()
                losses[way].append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return losses, liger_dist.verify(wrapped, make_batch(dist.get_rank())).problems


@pytest.mark.parametrize(
    ("recipe", "in_background"),
    [
        ("tensorwise", False),
        pytest.param("tensorwise", True, marks=pytest.mark.nightly),
        pytest.param("rowwise", False, marks=pytest.mark.nightly),
    ],
)
def test_training_resumes_and_exports(
    recipe: str, in_background: bool, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Bit for bit; the exported weights are the masters, and all that the checkpoint holds is in fp32."""
    options: dict[str, Any] = {"strategy": "fsdp2", "float8": recipe, "dtype": "bfloat16", "steps": 4}
    options |= {"checkpoint_every": 2, "lm_head": "vocab_parallel", "async_checkpoints": in_background}
    runs = {name: config_for(data, cache, tmp_path / name, **options) for name in ("whole", "halves")}
    workers_2.run(as_they_are, train, runs["whole"])
    workers_2.run(as_they_are, train, config_for(data, cache, tmp_path / "halves", **options, stop_at_step=2))
    workers_2.run(as_they_are, train, config_for(data, cache, tmp_path / "halves", **options, resume=True))
    assert losses_of(tmp_path / "halves") == losses_of(tmp_path / "whole")
    files = list((tmp_path / "whole" / "checkpoints").rglob("*.safetensors"))
    assert files
    assert {value.dtype for file in files for value in load_file(file).values()} == {torch.float32}
    for name in runs:
        export(tmp_path / name, tmp_path / name / "exported", step=None)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "exported").state_dict() for name in runs]
    for name, weight in models[0].items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, models[1][name]), name


@pytest.mark.parametrize("use_dora", [False, True])
def test_lora(use_dora: bool, workers_2: Workers) -> None:
    """The base layers compute in float8, LoRA's matrices do not, and only these train."""
    for kinds, trained in workers_2.run(as_they_are, lora_layers, use_dora):
        assert kinds == {"base_layer": "Float8Linear", "lora_A": "Linear", "lora_B": "Linear"}
        assert trained


def lora_layers(use_dora: bool) -> tuple[dict[str, str], bool]:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=use_dora)
    model: Any = get_peft_model(make_wide_model(), settings)
    wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(float8="tensorwise", param_dtype=torch.bfloat16))
    wrapped(**make_batch(dist.get_rank())).loss.backward()
    layer = wrapped.base_model.model.model.layers[0].mlp.up_proj
    parts = {"base_layer": layer.base_layer, "lora_A": layer.lora_A["default"], "lora_B": layer.lora_B["default"]}
    has_gradient = {name: p.grad is not None for name, p in wrapped.named_parameters()}
    return {name: type(part).__name__ for name, part in parts.items()}, all(
        has == ("lora_" in name) for name, has in has_gradient.items()
    )


def test_scales_of_a_decoder_that_is_called_alone(workers_2: Workers) -> None:
    """They are those of its weights, also after a step: a later forward of the model changes nothing."""
    for before, after in workers_2.run(as_they_are, hidden_states_around_a_forward):
        assert torch.equal(before, after)


def hidden_states_around_a_forward() -> tuple[torch.Tensor, torch.Tensor]:
    wrapped: Any = liger_dist.wrap(make_wide_model(), liger_dist.FSDP2(float8="tensorwise"))
    batch = make_batch(dist.get_rank())
    wrapped(**batch).loss.backward()
    with torch.no_grad():
        for parameter in wrapped.model.layers.parameters():
            parameter.mul_(1.3)
        found = []
        for _ in range(2):
            found.append(wrapped.model(batch["input_ids"]).last_hidden_state.cpu())
            wrapped(**batch)
    return found[0], found[1]


def test_layers_that_share_a_weight(workers_2: Workers) -> None:
    assert workers_2.run(as_they_are, shared_weight) == [True, True]


def shared_weight() -> bool:
    model = make_wide_model()
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight = layer.mlp.up_proj.weight
    wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(float8="tensorwise"))
    wrapped(**make_batch(dist.get_rank())).loss.backward()
    return all(layer.mlp.gate_proj.weight is layer.mlp.up_proj.weight for layer in wrapped.model.layers)


@pytest.mark.smoke
def test_layers_that_select_experts_keep_their_dtype(workers_2: Workers) -> None:
    assert workers_2.run(as_they_are, kinds_beside_a_router) == [("Linear", "Float8Linear")] * 2


def kinds_beside_a_router() -> tuple[str, str]:
    model = make_wide_model()
    model.config.num_experts = 48
    mlp = model.model.layers[0].mlp
    mlp.router = torch.nn.Linear(64, 48)
    liger_dist.wrap(model, liger_dist.FSDP2(float8="tensorwise"))
    return type(mlp.router).__name__, type(mlp.up_proj).__name__


@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_documents_of_a_model_in_float8(recipe: Any) -> None:
    """torchao's own conversion, or what unwrap leaves. A scale of all tokens mixes no documents; fp32 is near."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    device = compute_device()
    exact, model = make_wide_model().to(device), make_wide_model().to(device)
    settings = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device.type == "cpu", pad_inner_dim=True)
    convert_to_float8_training(model.model.layers, config=settings)
    ids = make_batch(0)["input_ids"][:1]
    positions = on_device.tensor([[*range(3), *range(ids.shape[1] - 3)]])
    wrapped = [liger_dist.wrap(one, "none") for one in (exact, model)]
    assert liger_dist.explain(wrapped[0]).packing == liger_dist.explain(wrapped[1]).packing
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    with torch.compiler.set_stance("force_eager"):
        losses = [float(one(**batch).loss.detach()) for one in wrapped]
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_experts_stay_in_the_compute_dtype(workers_2: Workers) -> None:
    for kinds, line, error in workers_2.run(as_they_are, experts_beside_float8):
        assert kinds == ("Float8Linear", "DTensor", "DTensor")
        assert line == "2 x Qwen3MoeExperts: experts by grouped products, down(silu(gate) * up)"
        assert error < TOLERANCE


def experts_beside_float8() -> tuple[tuple[str, ...], str, float]:
    """What is swapped, and the error of all gradients beside the model's own experts and layers, in float8 too."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    torch.manual_seed(0)
    own = Qwen3MoeConfig(vocab_size=101, num_key_value_heads=2, head_dim=16, **sizes, **experts)
    model = Qwen3MoeForCausalLM(own)
    gradients = []
    for layer_kernels in (False, True):
        config = liger_dist.WrapConfig(layer_kernels=layer_kernels)
        wrapped: Any = liger_dist.wrap(copy.deepcopy(model), liger_dist.FSDP2(float8="tensorwise"), config=config)
        wrapped(**make_batch(dist.get_rank()), use_cache=False).loss.backward()
        gradients.append(torch.cat([full(parameter.grad).flatten() for parameter in wrapped.parameters()]))
    layer = wrapped.model.layers[0]
    kinds = (layer.self_attn.q_proj, layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj)
    lines = liger_dist.explain(wrapped).layers.lines()
    line = next(line for _, line in lines if "Experts" in line)
    return tuple(type(kind).__name__ for kind in kinds), line, relative_error(*gradients)


@pytest.mark.nightly
@pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="Inductor needs a C++ compiler on CPUs"
)
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.nightly)])
def test_compiled_layers(recipe: str, workers_2: Workers) -> None:
    """Gradients of the same layers without compiling."""
    for error in workers_2.run(error_of_compiled_layers, recipe):
        assert error < 10 * TOLERANCE


def error_of_compiled_layers(recipe: Any) -> float:
    gradients = []
    for stance in ("default", "force_eager"):
        torch.compiler.set_stance(stance)
        torch._dynamo.reset()
        wrapped: Any = liger_dist.wrap(make_wide_model(), liger_dist.FSDP2(float8=recipe))
        wrapped(**make_batch(dist.get_rank())).loss.backward()
        gradients.append(torch.cat([full(parameter.grad).flatten() for parameter in wrapped.parameters()]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return relative_error(*gradients)


@pytest.mark.nightly
@pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="Inductor needs a C++ compiler on CPUs"
)
def test_compiled_layers_keep_no_float8_weights(workers_2: Workers) -> None:
    """FSDP2 reshards every float8 tensor that the forward keeps: there are no copies in another layout."""
    for kept, resharded in workers_2.run(float8_bytes_after_a_forward):
        assert kept == 0
        assert resharded == 14


def float8_bytes_after_a_forward() -> tuple[int, int]:
    """Bytes of the float8 tensors kept for the backward, and number of those that FSDP2 has resharded. CPUs have
    float8 products too; emulated ones need no other layout."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    model = make_wide_model(hidden_size=128, intermediate_size=256).to(compute_device())
    convert_to_float8_training(model.model.layers, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    liger_dist.compile_layers(model)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if "float8" in str(tensor.dtype) and type(tensor) is torch.Tensor:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**make_batch(dist.get_rank()), use_cache=False).loss
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept]
    loss.backward()
    return sum(sizes), sizes.count(0)


@pytest.mark.smoke
def test_wrong_options() -> None:
    for options, sentence in (
        ({"float8": "blockwise"}, "float8 is 'blockwise'"),
        ({"float8": "rowwise", "cpu_offload": True}, "float8 is 'rowwise' but cpu_offload is True"),
    ):
        with pytest.raises(liger_dist.LigerDistError, match=sentence):
            liger_dist.FSDP2(**options).check(liger_dist.WrapConfig(), world_size=2)  # type: ignore[arg-type]


@pytest.mark.smoke
def test_a_model_without_sizes_that_fit(workers_2: Workers) -> None:
    """Nothing is left behind: the model can be wrapped without."""
    for message, is_plain in workers_2.run(odd_sizes):
        assert "none of the 14 linear layers of the decoder has sizes that are multiples of 16" in message
        assert is_plain


def odd_sizes() -> tuple[str, bool]:
    model = make_wide_model(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, liger_dist.FSDP2(float8="rowwise"))
    return str(caught.value), not liger_dist.is_wrapped(model) and type(model.lm_head) is torch.nn.Linear


def test_tensor_parallel_layers(workers_2: Workers) -> None:
    for message in workers_2.run(tensor_parallel_layers):
        assert "float8 was asked for and the layers are tensor-parallel already" in message


def tensor_parallel_layers() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make_wide_model().to(compute_device())
    mesh = init_device_mesh(compute_device().type, (2,))
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, liger_dist.FSDP2(float8="tensorwise"))
    return str(caught.value)


def test_options_of_the_program() -> None:
    from liger_dist_train.config import parse

    for options, sentence in (
        (["--float8", "rowwise", "--dtype", "float32"], "--float8 is rowwise and --dtype float32; expected bfloat16"),
        (["--float8", "rowwise", "--dtype", "bfloat16", "--mlp_tile_tokens", "8"], "--mlp_tile_tokens is 8 but"),
    ):
        with pytest.raises(liger_dist.LigerDistError) as caught:
            parse(options)
        assert sentence in str(caught.value)
