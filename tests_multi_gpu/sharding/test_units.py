"""Units of FSDP2 that hold several decoder layers: the same gradients, names and checkpoints in every grouping, and in
forwards and backwards that begin, end or stop inside a unit."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients, full_parameters
from harness import Workers
from models import make_batch, make_config
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist.sharding.process_groups import compute_device

NUMBER = 6
TOLERANCE = 1e-6
"""norms round to fp32 inside, in models of fp64 too"""
LayersPerUnit = int | Literal["auto"]
GROUPINGS: tuple[LayersPerUnit, ...] = (1, 2, 4, NUMBER, "auto")
"""units of four leave one of two"""


def make_deep(*, number: int = NUMBER, family: str = "llama", dtype: torch.dtype = torch.float64) -> Any:
    config = copy.deepcopy(make_config(family))
    config.num_hidden_layers = number
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index % 2] for index in range(number)]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(compute_device())


def strategy_of(layers_per_unit: LayersPerUnit, **options: Any) -> liger_dist.FSDP2:
    return liger_dist.FSDP2(reduce_dtype=torch.float64, layers_per_unit=layers_per_unit, **options)


def both(layers_per_unit: LayersPerUnit, **options: Any) -> tuple[Any, Any]:
    """The model that one process has, and the sharded one."""
    truth = make_deep()
    return truth, liger_dist.wrap(make_deep(), strategy_of(layers_per_unit, **options))


def batch(rank: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    return make_batch(dist.get_rank() if rank is None else rank, seed=seed)


def worst(found: dict[str, Tensor], truth: Any) -> float:
    true = {name: parameter.grad for name, parameter in truth.named_parameters() if parameter.grad is not None}
    assert {name for name, gradient in found.items() if gradient is not None} == true.keys()
    return max(float((found[name] - true[name]).norm() / true[name].norm()) for name in true)


def true_backward(truth: Any, *, seed: int = 0) -> None:
    for rank in range(dist.get_world_size()):
        (truth(**batch(rank, seed)).loss / dist.get_world_size()).backward()


@pytest.mark.parametrize("layers_per_unit", GROUPINGS)
def test_gradients_are_the_same_in_every_grouping(layers_per_unit: LayersPerUnit, workers_2: Workers) -> None:
    for error, names, number in workers_2.run(trained, layers_per_unit):
        assert error < TOLERANCE
        assert names == list(make_deep().state_dict())
        expected = {1: 6, 2: 3, 4: 2, NUMBER: 1, "auto": 6}[layers_per_unit]
        assert number == expected


def trained(layers_per_unit: LayersPerUnit) -> tuple[float, list[str], int]:
    truth, model = both(layers_per_unit)
    for seed in range(2):
        model(**batch(seed=seed)).loss.backward()
        true_backward(truth, seed=seed)
    states = {layer._get_fsdp_state() for layer in model.model.layers if isinstance(layer, FSDPModule)}
    return worst(full_gradients(model), truth), list(model.state_dict()), len(states)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "qwen3_5_text"])
def test_gradients_of_families_in_units(family: str, workers_2: Workers) -> None:
    for error in workers_2.run(trained_family, family):
        assert error < 1e-4


def trained_family(family: str) -> float:
    truth = make_deep(number=4, family=family, dtype=torch.float32)
    model = liger_dist.wrap(
        make_deep(number=4, family=family, dtype=torch.float32), liger_dist.FSDP2(layers_per_unit=4)
    )
    model(**batch()).loss.backward()
    true_backward(truth)
    return worst(full_gradients(model), truth)


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "not resharded"])
@pytest.mark.parametrize("index", [1, 2, 3, 5])
def test_a_backward_begins_inside_a_unit(index: int, reshard: bool, workers_2: Workers) -> None:
    """A loss of hidden states alone, of a layer in the middle of a unit, at its beginning and at its end; and one
    beside the loss of the model."""
    for alone, beside in workers_2.run(of_hidden_states, index, reshard):
        assert alone < TOLERANCE
        assert beside < TOLERANCE


def of_hidden_states(index: int, reshard: bool) -> tuple[float, float]:
    found = []
    for is_beside in (False, True):
        truth, model = both(3, reshard_after_forward=reshard)

        def loss_of(one: Any, rank: int, is_beside: bool = is_beside) -> Any:
            output = one(**batch(rank), output_hidden_states=True)
            of_states = output.hidden_states[index].square().mean()
            return of_states + output.loss if is_beside else of_states

        # After a whole step, whose backward has resharded everything.
        for _ in range(2):
            for one in (truth, model):
                one.zero_grad()
            loss_of(model, dist.get_rank()).backward()
            for rank in range(dist.get_world_size()):
                (loss_of(truth, rank) / dist.get_world_size()).backward()
        found.append(worst(full_gradients(model), truth))
    return found[0], found[1]


def test_a_forward_ends_inside_a_unit(workers_2: Workers) -> None:
    """By an early exit, as in speculative decoding, and by an error; the next step is exact."""
    for error, output in workers_2.run(after_parts):
        assert error < TOLERANCE
        assert output < TOLERANCE


def after_parts() -> tuple[float, float]:
    truth, model = both(4)
    with torch.no_grad():
        model(**batch())
        outputs = []
        for one in (model, truth):
            one.config.num_hidden_layers = 2
            outputs.append(one.model(input_ids=batch()["input_ids"]).last_hidden_state)
            one.config.num_hidden_layers = NUMBER
    hook = model.model.layers[2].register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        model(**batch())
    hook.remove()
    model(**batch()).loss.backward()
    true_backward(truth)
    return worst(full_gradients(model), truth), float((outputs[0] - outputs[1]).abs().max())


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


CHECKPOINTS = ("before wrap", "after wrap", "reentrant", "torch's, before wrap", "torch's, after wrap")


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_checkpointed_layers_in_units(way: str, workers_2: Workers) -> None:
    for error in workers_2.run(checkpointed, way, strategy_of(3)):
        assert error < TOLERANCE


WRAPPED: dict[str, Any] = {
    "vocab-parallel": liger_dist.FSDP2(reduce_dtype=torch.float64, lm_head="vocab_parallel"),
    "FSDP1": liger_dist.FSDP1(reduce_dtype=torch.float64),
    "DDP": "ddp",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_layers_in_checkpoint_wrappers_of_torch(name: str, workers_2: Workers) -> None:
    for error in workers_2.run(checkpointed, "torch's, before wrap", WRAPPED[name]):
        assert error < TOLERANCE


def checkpointed(way: str, strategy: Any) -> float:
    truth, model = make_deep(), make_deep()
    model.train()
    by_torch = partial(
        apply_activation_checkpointing,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: type(module).__name__.endswith("DecoderLayer"),
    )
    if way == "before wrap":
        model.gradient_checkpointing_enable()
    if way == "torch's, before wrap":
        by_torch(model)
    wrapped = liger_dist.wrap(model, strategy)
    if way in ("after wrap", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
        model.enable_input_require_grads()
    if way == "torch's, after wrap":
        by_torch(model)
    for seed in range(2):
        wrapped(**batch(seed=seed)).loss.backward()
        true_backward(truth, seed=seed)
    return worst(full_gradients(wrapped), truth)


def test_a_checkpoint_moves_between_groupings(workers_2: Workers, tmp_path: Path) -> None:
    """With the optimizer's state, to units of all and of single layers."""
    for errors in workers_2.run(moved, tmp_path):
        assert max(errors) < 1e-12


def moved(folder: Path) -> list[float]:
    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        model(**batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def build(layers_per_unit: LayersPerUnit, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
        model = make_deep()
        if seed:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        model = liger_dist.wrap(model, strategy_of(layers_per_unit))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = build(2)
    step(model, optimizer, 0)
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    step(model, optimizer, 1)
    errors = []
    for layers_per_unit in (1, 4, NUMBER):
        other, its_optimizer = build(layers_per_unit, seed=1)
        weights, states = get_state_dict(other, its_optimizer)
        loaded = {"model": weights, "optimizer": states}
        load(loaded, checkpoint_id=folder)
        set_state_dict(other, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        step(other, its_optimizer, 1)
        expected = full_parameters(model)
        errors.append(max(float((p - expected[name]).abs().max()) for name, p in full_parameters(other).items()))
    return errors


def test_units_have_enough_bytes_and_explain_says_so(workers_2: Workers) -> None:
    for found in workers_2.run(explained):
        # Layers of 16.8 MB in fp32: a quarter of the model is less than 192 MiB. In bf16 they are half as large.
        assert found["auto"] == "4 units of 4 layers, 64 MiB unsharded at most (docs/strategy_options.md)"
        assert found["bf16"] == "4 units of 4 layers, 32 MiB unsharded at most (docs/strategy_options.md)"
        assert found["given"] == "6 units of 1 to 3 layers, 48 MiB unsharded at most (docs/strategy_options.md)"
        assert found["one"] is None


def explained() -> dict[str, str | None]:
    config = copy.deepcopy(make_config("llama"))
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 16, 512, 2048
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim = 64
    strategies = {
        "auto": liger_dist.FSDP2(),
        "bf16": liger_dist.FSDP2(param_dtype=torch.bfloat16),
        "given": liger_dist.FSDP2(layers_per_unit=3),
        "one": liger_dist.FSDP2(layers_per_unit=1),
    }
    found: dict[str, str | None] = {}
    for name, strategy in strategies.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        found[name] = liger_dist.explain(liger_dist.wrap(model, strategy)).sharding.get("units")
    return found


def test_units_are_those_that_explain_shows_over_packed_weights(workers_2: Workers) -> None:
    """Layers of which some have 4-bit weights, whose bytes FSDP2 takes for numbers."""
    pytest.importorskip("bitsandbytes")
    for shown, number in workers_2.run(packed_units):
        assert shown == f"{number} units of 1 to 4 layers"


def packed_units() -> tuple[str, int]:
    import peft
    from bitsandbytes.nn import Linear4bit, Params4bit

    model = make_deep(number=8, dtype=torch.float32)
    for layer in model.model.layers[:4]:
        for name, linear in [(name, one) for name, one in layer.named_modules() if isinstance(one, torch.nn.Linear)]:
            packed = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32)
            packed.weight = Params4bit(linear.weight.data, requires_grad=False)
            layer.set_submodule(name, packed.to(compute_device()))
    model.is_loaded_in_4bit = True
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["q_proj"]))
    wrapped = liger_dist.wrap(adapted, liger_dist.FSDP2())
    units = {layer._get_fsdp_state() for layer in model.model.layers}
    return liger_dist.explain(wrapped).sharding["units"].split(",")[0], len(units)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "all", None])
def test_a_wrong_number_of_layers_is_refused(value: Any) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=r"expected 'auto', or a number of layers"):
        liger_dist.FSDP2(layers_per_unit=value)


def test_layers_that_a_forward_may_skip_are_units_by_themselves(workers_2: Workers) -> None:
    for units, refusal in workers_2.run(with_skipped_layers):
        assert units is None
        assert refusal == (
            "layers_per_unit is 2 but layerdrop is 0.5, with which a forward leaves out layers; leave it out."
        )


def with_skipped_layers() -> tuple[str | None, str]:
    def build() -> Any:
        config = copy.deepcopy(make_config("opt"))
        config.num_hidden_layers, config.layerdrop = 8, 0.5
        return AutoModelForCausalLM.from_config(config).to(compute_device())

    with pytest.raises(liger_dist.LigerDistError) as refusal:
        liger_dist.wrap(build(), liger_dist.FSDP2(layers_per_unit=2))
    return liger_dist.explain(liger_dist.wrap(build(), "fsdp2")).sharding.get("units"), str(refusal.value)


def test_generation_in_units(workers_2: Workers) -> None:
    for is_same, error in workers_2.run(generated):
        assert is_same
        assert error < TOLERANCE


def generated() -> tuple[bool, float]:
    truth, model = both(NUMBER)
    ids = on_device.randint(3, 90, (1, 5))
    tokens = [one.generate(ids, max_new_tokens=4, do_sample=False) for one in (truth, model)]
    model(**batch()).loss.backward()
    true_backward(truth)
    return bool(torch.equal(*tokens)), worst(full_gradients(model), truth)
