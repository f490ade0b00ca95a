"""Decoder layers that are compiled one by one: gradients of the unwrapped model, little kept for the backward, and no
compilation for every length."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import on_device
import pytest
import torch
from full_tensors import full_gradients
from harness import Workers
from models import assert_below, make_batch, make_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from truth import relative_error

import liger_dist
from liger_dist.model.compile import reason_against_compiling
from liger_dist.sharding.process_groups import compute_device

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="Inductor needs a C++ compiler on CPUs"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def texts(length: int) -> dict[str, Tensor]:
    ids = on_device.randint(1, 101, (2, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


STRATEGIES: dict[str, Any] = {
    "fsdp2": liger_dist.FSDP2(compile_layers=True),
    "vocab-parallel": liger_dist.FSDP2(compile_layers=True, lm_head="vocab_parallel"),
    "fsdp1": liger_dist.FSDP1(compile_layers=True),
}


@pytest.mark.nightly
@pytest.mark.nightly(name=["vocab-parallel", "fsdp1"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_of_two_ranks(name: str, workers_2: Workers) -> None:
    for errors in workers_2.run(errors_of_two_steps, name):
        assert_below(errors, 1e-5)


def errors_of_two_steps(name: str) -> dict[str, float]:
    """Against the unwrapped model in fp64; vocab-parallel under activation checkpointing."""
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model).double()
    if name == "vocab-parallel":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = liger_dist.wrap(model, STRATEGIES[name])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, foreach=False)
    errors = {}
    for step in range(2):
        for rank in range(2):
            (reference(**make_batch(rank, seed=step)).loss / 2).backward()
        loss = wrapped(**make_batch(torch.distributed.get_rank(), seed=step)).loss
        loss.backward()
        got = full_gradients(wrapped)
        for key, parameter in reference.named_parameters():
            errors[f"step {step} {key}"] = relative_error(got[key], parameter.grad)
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return errors


@pytest.mark.nightly
def test_inputs_of_products_are_not_kept() -> None:
    """Outputs of norms and of the activation are computed again: layers that torch.compile alone compiles keep them."""
    by_torch, ours = kept_bytes(by_torch=True), kept_bytes(by_torch=False)
    config = make_model("llama").config
    of_products = config.num_hidden_layers * (2 * config.hidden_size + config.intermediate_size)
    assert by_torch - ours > 0.7 * of_products * texts(256)["labels"].numel() * 4, (ours, by_torch)


def kept_bytes(*, by_torch: bool) -> int:
    """Of all layers, for one batch."""
    model: Any = make_model("llama", dtype=torch.float32).to(compute_device())
    if by_torch:
        for layer in model.model.layers:
            layer.compile()
    else:
        liger_dist.compile_layers(model)
    model = liger_dist.wrap(model, "none")
    batch = texts(256)
    model(**batch).loss.backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    return sum(held.values())


@pytest.mark.nightly
def test_other_lengths_are_not_compiled_one_by_one() -> None:
    from torch._dynamo.utils import counters

    model: Any = make_model("llama", dtype=torch.float32).to(compute_device())
    liger_dist.compile_layers(model)
    wrapped = liger_dist.wrap(model, "none")
    graphs = []
    for length in (24, 32, 40, 48, 56):
        wrapped(**texts(length)).loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[-1], graphs


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["before wrap", "before wrap, reentrant", "after wrap", "torch's"])
def test_checkpointed_layers_are_compiled(way: str) -> None:
    """Dynamo counts a checkpointed layer as one call; Inductor makes its kernels."""
    from torch._inductor import metrics

    metrics.reset()
    model: Any = make_model("llama", dtype=torch.float32).train().to(compute_device())
    if way.startswith("before"):
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in way})
    if way == "torch's":
        apply_activation_checkpointing(model, check_fn=lambda module: module in {*model.model.layers})
    liger_dist.compile_layers(model)
    wrapped = liger_dist.wrap(model, "none")
    if way == "after wrap":
        model.gradient_checkpointing_enable()
    assert liger_dist.explain(model).compiled == "2 of 2"
    wrapped(**texts(64)).loss.backward()
    assert metrics.generated_kernel_count >= 10


@pytest.mark.parametrize("strategy", [liger_dist.FSDP1, liger_dist.FSDP2])
def test_auto_decides_from_facts_and_explains(strategy: Any, workers_2: Workers) -> None:
    for device, with_tiles, alone in workers_2.run(explained, strategy):
        assert with_tiles == "none: mlp_tile_tokens is 8"
        assert alone == ("2 of 2" if device == "cuda" else "none: the device is cpu")


def explained(strategy: Any) -> list[str | None]:
    configs = (liger_dist.WrapConfig(mlp_tile_tokens=8), liger_dist.WrapConfig())
    made = (make_model("llama", dtype=torch.float32) for _ in configs)
    wrapped = (
        liger_dist.wrap(model, strategy(compile_layers="auto"), config=config)
        for model, config in zip(made, configs, strict=True)
    )
    return [compute_device().type, *(liger_dist.explain(model).compiled for model in wrapped)]


@pytest.mark.smoke
def test_auto_leaves_layers_alone_that_compilation_does_not_help() -> None:
    gpu, layers = torch.device("cuda"), make_model("llama").model.layers
    assert reason_against_compiling(layers, device=gpu, is_recurrent=False) is None
    assert "recurrent" in str(reason_against_compiling(layers, device=gpu, is_recurrent=True))
    assert "no list" in str(reason_against_compiling((), device=gpu, is_recurrent=False))
    layers[0].mlp.up_proj.weight = torch.nn.Parameter(on_device.zeros(4, dtype=torch.uint8), requires_grad=False)
    assert "quantized" in str(reason_against_compiling(layers, device=gpu, is_recurrent=False))


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(liger_dist.LigerDistError, match="compile_layers is 'yes'; expected one of False, True, 'auto'"):
        liger_dist.FSDP2(compile_layers="yes")  # type: ignore[arg-type]


@pytest.mark.smoke
def test_tiles_of_the_mlp_are_refused() -> None:
    config = liger_dist.WrapConfig(mlp_tile_tokens=8)
    for strategy in (liger_dist.FSDP1(compile_layers=True), liger_dist.FSDP2(compile_layers=True)):
        with pytest.raises(liger_dist.LigerDistError, match="mlp_tile_tokens is 8 but the layers are compiled"):
            strategy.check(config, world_size=2)
    model = make_model("llama", dtype=torch.float32)
    liger_dist.compile_layers(model)
    with pytest.raises(liger_dist.LigerDistError, match="mlp_tile_tokens is 8 but the layers are compiled"):
        liger_dist.wrap(model, "none", config=config)


def test_a_model_without_layers() -> None:
    with pytest.raises(liger_dist.LigerDistError):
        liger_dist.compile_layers(torch.nn.Linear(2, 2))
