"""Experts on several ranks by FSDP2's ``expert_parallel``, over time: values and checkpoints of other layouts, passes
that reduce later, sequence shards, further tokens, ``unwrap``; and what is refused. Gradients by layout, data and use
are cells of the conformance suite."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients, full_parameters
from harness import Workers
from models import make_batch, make_model
from mtp_models import add_mtp, true_mtp_losses
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist.fused_layers.packed_calls import packing_objection
from liger_dist.sharding.process_groups import compute_device

TOLERANCE = 1e-6
"""norms and routers round to fp32 inside, in models of fp64 too"""
RANKS = 2


def sharded(model: Any, **options: Any) -> Any:
    strategy = liger_dist.FSDP2(**({"expert_parallel": RANKS, "reduce_dtype": torch.float64} | options))
    return liger_dist.wrap(model, strategy)


def worst(model: Any, truth: Any) -> float:
    """The largest relative error of a gradient."""
    found = full_gradients(model)
    true = {name: parameter.grad for name, parameter in truth.named_parameters() if parameter.grad is not None}
    assert {name for name, gradient in found.items() if gradient is not None} == true.keys()
    return max(float((found[name] - true[name]).norm() / true[name].norm()) for name in true)


def true_backward(truth: Any, *seeds: int) -> None:
    for seed in seeds:
        for rank in range(dist.get_world_size()):
            (truth(**make_batch(rank, seed=seed)).loss / dist.get_world_size()).backward()


def backward(model: Any, seed: int) -> None:
    model(**make_batch(dist.get_rank(), seed=seed)).loss.backward()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_values_do_not_depend_on_where_experts_are(family: str, workers_2: Workers) -> None:
    for names in workers_2.run(differing_values, family):
        assert names == []


def differing_values(family: str) -> list[str]:
    """Names of parameters that differ from those of FSDP2 alone, of models that get their values in three ways."""
    config, found = make_model(family).config, []
    for name in ("everywhere", "meta", "rank 0"):
        models = []
        for size in (1, RANKS):
            torch.manual_seed(0)
            model: Any = make_model(family, dtype=torch.float32)
            if name == "meta":
                with torch.device("meta"):
                    model = type(model)(config)
            if name == "rank 0" and dist.get_rank() > 0:
                model = model.to("meta")
            models.append(full_parameters(sharded(model, expert_parallel=size)))
        found += [f"{name}: {key}" for key, value in models[0].items() if not torch.equal(value, models[1][key])]
    return found


def make_deep() -> Any:
    """Six layers, of whose experts every stack has the same shape and other values."""
    config = copy.deepcopy(make_model("qwen3_moe").config)
    config.num_hidden_layers = 6
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(compute_device())


def test_experts_that_were_read_in_shards_keep_their_layers(workers_4: Workers, tmp_path: Path) -> None:
    """All ranks gather the stacks of one layer after the other in one order."""
    make_deep().save_pretrained(tmp_path)
    for names in workers_4.run(read_in_shards, tmp_path):
        assert names == []


def read_in_shards(folder: Path) -> list[str]:
    """Names of parameters that differ from those of the files."""
    with liger_dist.sharded_loading():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = full_parameters(sharded(model))
    return [name for name, value in make_deep().named_parameters() if not torch.equal(found[name], value.cpu())]


@dataclass(frozen=True, kw_only=True)
class Watching(liger_dist.FSDP2):
    """Counts the full stacks that are still in memory when all parameters are sharded."""

    full: list[weakref.ref[Any]] = field(default_factory=list, compare=False, repr=False)
    alive: list[int] = field(default_factory=list, compare=False, repr=False)

    def keep_full(self, root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        gc.collect()
        self.alive.append(sum(reference() is not None for reference in self.full))
        super().keep_full(root, parameters)


def test_full_stacks_are_freed_while_the_model_is_sharded(workers_2: Workers) -> None:
    for before, after in workers_2.run(held_stacks):
        assert before == 12
        assert after == 0


def held_stacks() -> tuple[int, int]:
    model = make_deep()
    stacks = [p for name, p in model.named_parameters() if ".experts." in name]
    strategy = Watching(expert_parallel=RANKS, full=[weakref.ref(p) for p in stacks])
    del stacks
    before = sum(reference() is not None for reference in strategy.full)
    liger_dist.wrap(model, strategy)
    return before, strategy.alive[0]


@pytest.mark.parametrize("sizes", [(1, RANKS), (RANKS, 1)], ids=["onto ranks", "off ranks"])
def test_a_checkpoint_moves_between_layouts(sizes: tuple[int, int], workers_2: Workers, tmp_path: Path) -> None:
    for names in workers_2.run(moved, sizes, tmp_path):
        assert names == []


def moved(sizes: tuple[int, int], folder: Path) -> list[str]:
    """Names of what differs after the second of two models has read weights and moments of the first."""
    models = [
        sharded(make_model("qwen3_moe", dtype=torch.float32, seed=seed), expert_parallel=size)
        for seed, size in enumerate(sizes)
    ]
    states = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        backward(model, 0)
        optimizer.step()
        states.append((model, optimizer))
    save(dict(zip(("model", "optimizer"), get_state_dict(*states[0]), strict=True)), checkpoint_id=folder)
    given = dict(zip(("model", "optimizer"), get_state_dict(*states[1]), strict=True))
    load(given, checkpoint_id=folder)
    set_state_dict(*states[1], model_state_dict=given["model"], optim_state_dict=given["optimizer"])
    for _, optimizer in states:
        optimizer.zero_grad()
    for model, optimizer in states:
        backward(model, 1)
        optimizer.step()
    first, second = map(full_parameters, models)
    # Sums of experts' gradients are in another order.
    return [name for name in first if not torch.allclose(first[name], second[name], rtol=1e-4, atol=1e-5)]


PASSES: dict[str, Callable[[Any], None]] = {}


def a_pass(function: Callable[[Any], None]) -> Callable[[Any], None]:
    PASSES[function.__name__.replace("_", " ")] = function
    return function


@a_pass
def two_backwards(model: Any) -> None:
    for seed in range(2):
        backward(model, seed)


@a_pass
def reduced_in_the_last(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    model.set_requires_gradient_sync(True)
    backward(model, 1)


@a_pass
def replicas_in_the_last(model: Any) -> None:
    model.set_requires_all_reduce(False)
    backward(model, 0)
    model.set_requires_all_reduce(True)
    backward(model, 1)


@a_pass
def weights_stay_gathered_between(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    backward(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    backward(model, 1)


@a_pass
def evaluated_between(model: Any) -> None:
    backward(model, 0)
    with torch.no_grad():
        model(**make_batch(dist.get_rank(), seed=5))
    model.eval()
    model(**make_batch(dist.get_rank(), seed=6))
    model.train()
    backward(model, 1)


def _two_forwards(model: Any, *, use_reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    for seeds in ((2, 3), (0, 1)):
        # What the first backward leaves unreduced would be in the second one's gradients.
        model.zero_grad()
        losses = [model(**make_batch(dist.get_rank(), seed=seed)).loss for seed in seeds]
        (losses[0] + losses[1]).backward()


@a_pass
def two_reentrant_forwards(model: Any) -> None:
    _two_forwards(model, use_reentrant=True)


@a_pass
def two_checkpointed_forwards(model: Any) -> None:
    _two_forwards(model, use_reentrant=False)


@a_pass
def reentrant_steps(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    backward(model, 0)
    backward(model, 1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", PASSES)
def test_gradients_of_passes(name: str, replicas: int, workers_4: Workers) -> None:
    for error in workers_4.run(of_passes, name, replicas):
        assert error < TOLERANCE


def of_passes(name: str, replicas: int) -> float:
    truth = make_model("qwen3_moe")
    mesh = (replicas, dist.get_world_size() // replicas) if replicas > 1 else None
    model = sharded(copy.deepcopy(truth), mesh=mesh)
    PASSES[name](model)
    true_backward(truth, 0, 1)
    return worst(model, truth)


@pytest.mark.parametrize("is_summed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_divide_factor_takes_the_place_of_the_average(
    factor: float, dtype: torch.dtype, is_summed: bool, workers_2: Workers, workers_4: Workers
) -> None:
    """Also where a group has one rank, whose gradients torch divides twice in some cases."""
    for workers in (workers_2, workers_4) if is_summed else (workers_2,):
        for error in workers.run(divided_by, factor, dtype, is_summed):
            assert error < (1e-4 if dtype == torch.float32 else TOLERANCE)


def divided_by(factor: float, dtype: torch.dtype, is_summed: bool) -> float:
    truth = make_model("qwen3_moe", dtype=dtype)
    model = sharded(copy.deepcopy(truth), reduce_dtype=dtype)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            # gloo multiplies nothing before its sum; a group of one rank has no sum.
            module.set_force_sum_reduction_for_comms(is_summed or not name.endswith(".experts"))
    backward(model, 0)
    truth = truth.double()
    true_backward(truth, 0)
    for parameter in truth.parameters():
        if parameter.grad is not None:
            parameter.grad *= dist.get_world_size() / factor
    return worst(model, truth)


def only_experts(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)


def experts_of_the_first_layer(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.mlp.experts" in name or "layers.1" in name)


def experts_and_head(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name or "lm_head" in name)


@pytest.mark.parametrize("token_mean", ["local", "global"])
@pytest.mark.parametrize("lm_head", ["gather", "vocab_parallel"])
@pytest.mark.parametrize("train", [only_experts, experts_of_the_first_layer, experts_and_head])
def test_experts_are_the_first_that_train(
    train: Callable[[Any], None], lm_head: str, token_mean: str, workers_4: Workers
) -> None:
    """With replicated frozen weights, FSDP2's first group is then one of experts."""
    if train is not experts_and_head and lm_head == "vocab_parallel":
        pytest.skip("lm_head is replicated")
    for error in workers_4.run(of_first_experts, train, lm_head, token_mean):
        assert error < TOLERANCE


def of_first_experts(train: Callable[[Any], None], lm_head: str, token_mean: str) -> float:
    truth = make_model("qwen3_moe")
    train(truth)
    strategy = liger_dist.FSDP2(
        expert_parallel=RANKS,
        frozen="replicate",
        lm_head=lm_head,
        reduce_dtype=torch.float64,  # type: ignore[arg-type]
    )
    model = liger_dist.wrap(copy.deepcopy(truth), strategy, config=liger_dist.WrapConfig(token_mean=token_mean))  # type: ignore[arg-type]
    backward(model, 0)
    batches = [make_batch(rank) for rank in range(dist.get_world_size())]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        share = count / sum(counts) if token_mean == "global" else 1 / len(batches)
        (truth(**batch).loss * share).backward()
    return worst(model, truth)


def test_parts_of_sequences_are_sent_to_experts(workers_2: Workers) -> None:
    for error in workers_2.run(of_a_sequence):
        assert error < TOLERANCE


def of_a_sequence() -> float:
    truth = make_model("qwen3_moe")
    mesh = init_device_mesh(compute_device().type, (RANKS,), mesh_dim_names=("sp",))
    model = sharded(copy.deepcopy(truth), mesh=mesh)
    ids = on_device.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(3))
    truth(input_ids=ids, labels=ids).loss.backward()
    model(**liger_dist.shard_sequence({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
    return worst(model, truth)


@pytest.mark.parametrize("depth", [1, 2])
def test_layers_of_further_tokens_have_experts_on_ranks(depth: int, workers_2: Workers) -> None:
    for error, experts in workers_2.run(of_further_tokens, depth):
        assert error < TOLERANCE
        assert experts == 2 + depth


def of_further_tokens(depth: int) -> tuple[float, int]:
    truth: Any = add_mtp(make_model("qwen3_moe"), depth=depth, dtype=torch.float64)
    model = sharded(copy.deepcopy(truth))
    backward(model, 0)
    for rank in range(RANKS):
        terms = zip((truth.mtp.main_weight, *truth.mtp.weights), true_mtp_losses(truth, make_batch(rank)), strict=True)
        for weight, (total, count) in terms:
            (weight * total / count / RANKS).backward(retain_graph=True)
    number = sum(name.endswith(".experts") for name, module in model.named_modules() if isinstance(module, FSDPModule))
    return worst(model, truth), number


def test_unwrap_leaves_experts_on_their_ranks(workers_2: Workers) -> None:
    for first, after, again, error in workers_2.run(unwrapped):
        assert after == pytest.approx(first, rel=1e-6)
        assert again == pytest.approx(first, rel=1e-6)
        assert error < TOLERANCE


def unwrapped() -> tuple[float, float, float, float]:
    truth = make_model("qwen3_moe")
    model = sharded(copy.deepcopy(truth))
    batch = make_batch(dist.get_rank())
    first = float(model(**batch).loss)
    model = liger_dist.unwrap(model)
    after = float(model(**batch).loss)
    model = liger_dist.wrap(model, "auto")
    again = float(model(**batch).loss)
    backward(model, 0)
    true_backward(truth, 0)
    return first, after, again, worst(model, truth)


def test_what_packing_would_be_is_known_to_each_rank(workers_2: Workers) -> None:
    """Without the other ranks, of a model that was wrapped, too."""
    assert workers_2.run(asked_on_one_rank) == [None, None]


def asked_on_one_rank() -> str | None:
    model = liger_dist.unwrap(sharded(make_model("qwen3_moe")))
    return packing_objection(model) if dist.get_rank() == 0 else None


def test_verify_compares_all_but_the_experts(workers_2: Workers) -> None:
    for is_ok, kept in workers_2.run(verified):
        assert is_ok
        assert "experts on several ranks" in kept


def verified() -> tuple[bool, str]:
    model = sharded(make_model("qwen3_moe", dtype=torch.float32))
    report = liger_dist.verify(model, make_batch(dist.get_rank()))
    return report.ok, str(report)


def test_compiled_layers(workers_2: Workers) -> None:
    for errors in workers_2.run(of_compiled_layers):
        assert max(errors) < 2e-5


def of_compiled_layers() -> list[float]:
    torch._dynamo.reset()
    truth, errors = make_model("qwen3_moe", dtype=torch.float32), []
    model = liger_dist.wrap(copy.deepcopy(truth), liger_dist.FSDP2(expert_parallel=RANKS, compile_layers=True))
    truth = truth.double()
    for seed in range(2):
        backward(model, seed)
        true_backward(truth, seed)
        errors.append(worst(model, truth))
    return errors


def test_linear_layers_in_float8(workers_2: Workers) -> None:
    """Experts keep the compute dtype: gradients are those of FSDP2 alone."""
    pytest.importorskip("torchao")
    for error in workers_2.run(in_float8):
        assert error < 1e-4


def in_float8() -> float:
    torch._dynamo.reset()
    found = []
    for size in (1, RANKS):
        model = make_model("qwen3_moe", dtype=torch.float32)
        model = liger_dist.wrap(model, liger_dist.FSDP2(expert_parallel=size, float8="rowwise"))
        backward(model, 0)
        found.append({name: gradient for name, gradient in full_gradients(model).items() if gradient is not None})
    return max(float((found[1][name] - one).norm() / one.norm()) for name, one in found[0].items())


def with_lora(model: Any, *names: str) -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], r=2)
    adapted = peft.get_peft_model(model, settings)
    for name in names:
        adapted.add_adapter(name, settings)
    return adapted


def test_lora_cannot_be_merged_into_experts_of_other_ranks(workers_2: Workers) -> None:
    for message, merged in workers_2.run(merged_lora):
        assert "some is on experts that are on several ranks (expert_parallel)" in message
        assert merged == []


def merged_lora() -> tuple[str, list[str]]:
    model = with_lora(make_model("qwen3_moe", dtype=torch.float32))
    sharded(model)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model.merge_adapter()
    return str(caught.value), [name for name, module in model.named_modules() if getattr(module, "merged", False)]


def test_lora_that_peft_would_compute_is_refused(workers_2: Workers) -> None:
    """After wrap, as several adapters are active, and after unwrap, as adapters are made for experts on ranks."""
    for several, hooked, later, after in workers_2.run(lora_left_to_peft):
        assert "has changed since liger_dist.wrap (several active adapters" in several
        assert "has changed since liger_dist.wrap" in hooked
        assert "make the adapter before liger_dist.wrap shards the model" in later
        assert after


def lora_left_to_peft() -> tuple[str, str, str, bool]:
    model = with_lora(make_model("qwen3_moe", dtype=torch.float32), "second")
    sharded(model)
    model.base_model.set_adapter(["default", "second"])
    several = refused_forward(model)
    model.base_model.set_adapter("default")
    handle = model.base_model.model.model.layers[0].mlp.experts.lora_A.default.register_forward_hook(lambda *args: None)
    hooked = refused_forward(model)
    handle.remove()
    batch, plain = make_batch(dist.get_rank()), make_model("qwen3_moe", dtype=torch.float32)
    with model.disable_adapter():
        after = torch.allclose(model(**batch).loss, plain(**batch).loss)
    plain = liger_dist.unwrap(sharded(make_model("qwen3_moe", dtype=torch.float32)))
    adapted = with_lora(plain)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(adapted, "auto")
    return several, hooked, str(caught.value), after


def refused_forward(model: Any) -> str:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(**make_batch(dist.get_rank()))
    return str(caught.value)


@pytest.mark.parametrize("frozen", ["shard", "replicate"])
def test_explain_counts_the_experts_of_a_rank(frozen: str, workers_2: Workers) -> None:
    """In what replicated weights cost: half of the experts, and all else that is frozen."""
    for found, expected in workers_2.run(cost_of_frozen, frozen):
        assert found == pytest.approx(expected, rel=2e-2)


def cost_of_frozen(frozen: str) -> tuple[float, float]:
    model = with_lora(make_model("qwen3_moe", dtype=torch.float32))
    values = {name: p.numel() * 4 for name, p in model.named_parameters() if "lora_" not in name}
    experts = sum(size for name, size in values.items() if ".experts." in name)
    sharded(model, frozen=frozen)
    row = liger_dist.explain(model).sharding["frozen weights"]
    shown = re.search(r"([\d.e-]+) GiB" if frozen == "replicate" else r"replicated: ([\d.e-]+)", row)
    assert shown is not None, row
    return float(shown[1]) * 2**30, sum(values.values()) - experts / RANKS


def changed_activation(experts: nn.Module) -> None:
    experts.act_fn = nn.ReLU()


def other_implementation(experts: Any) -> None:
    experts.config._experts_implementation = "batched_mm"


@pytest.mark.parametrize("change", [changed_activation, other_implementation])
def test_experts_that_have_changed_are_refused(change: Callable[[Any], None], workers_2: Workers) -> None:
    for message in workers_2.run(changed, change):
        assert "have changed since liger_dist.wrap, and its experts are on several ranks" in message


def changed(change: Callable[[Any], None]) -> str:
    model = sharded(make_model("qwen3_moe"))
    for layer in model.model.layers:
        change(layer.mlp.experts)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(**make_batch(dist.get_rank()))
    return str(caught.value)


def patched(model: Any) -> Any:
    model.model.layers[1].mlp.experts.forward = lambda *args: None
    return model


def with_another_parameter(model: Any) -> Any:
    model.model.layers[1].mlp.experts.scale = nn.Parameter(on_device.ones(16))
    return model


def with_peft_alone(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_parameters=["mlp.experts.down_proj"], r=2, target_modules=["q_proj"])
    peft.get_peft_model(model, settings)
    return add_adapter(model, settings)


def add_adapter(model: Any, settings: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "parameter_name"):
            module.forward = partial(type(module).forward, module)
    return model


@pytest.mark.parametrize(
    ("family", "options", "change", "words"),
    [
        ("qwen3_moe", {"expert_parallel": 3}, None, "expert_parallel is 3 but 2 ranks shard each parameter"),
        ("qwen3_moe", {"mesh": (2, 1)}, None, "expert_parallel is 2 but 1 ranks shard each parameter"),
        ("qwen3_moe", {"expert_parallel": 0}, None, "expert_parallel is 0; expected a number of ranks"),
        ("qwen3_moe", {"expert_parallel": True}, None, "expert_parallel is True; expected a number of ranks"),
        ("llama", {}, None, "no decoder layer of this LlamaForCausalLM has experts in one parameter"),
        ("qwen3_moe", {}, patched, "it is computed by its own code (its forward has been patched on the instance)"),
        ("qwen3_moe", {}, with_another_parameter, "scale of a Qwen3MoeExperts has the shape (16,), expected one part"),
        ("qwen3_moe", {}, with_peft_alone, "LoRA on it is added by PEFT ("),
    ],
)
def test_refusals_leave_the_model_as_it_was(
    family: str, options: dict[str, Any], change: Callable[[Any], Any] | None, words: str, workers_2: Workers
) -> None:
    for message, is_unchanged in workers_2.run(refused, family, options, change):
        assert words in message
        assert is_unchanged


def refused(family: str, options: dict[str, Any], change: Callable[[Any], Any] | None) -> tuple[str, bool]:
    model: Any = make_model(family)
    model = model if change is None else change(model)
    before = {name: (parameter, type(parameter)) for name, parameter in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(liger_dist.LigerDistError) as caught:
        sharded(model, **options)
    after = {name: (parameter, type(parameter)) for name, parameter in model.named_parameters()}
    same = before.keys() == after.keys() and all(before[name][0] is after[name][0] for name in before)
    return str(caught.value), same and classes == [type(module) for module in model.modules()]


def test_a_refusal_of_one_rank_is_one_of_all(workers_2: Workers) -> None:
    first, second = workers_2.run(refused_on_rank_1)
    assert "another rank refused to wrap its model: expert_parallel is above 1" in first
    assert second.startswith("expert_parallel is above 1")


def refused_on_rank_1() -> str:
    model = make_model("qwen3_moe")
    with pytest.raises(liger_dist.LigerDistError) as caught:
        sharded(patched(model) if dist.get_rank() == 1 else model)
    backward(sharded(make_model("qwen3_moe")), 0)
    return str(caught.value)


def test_experts_of_four_bits_are_refused(workers_2: Workers) -> None:
    pytest.importorskip("bitsandbytes")
    for message in workers_2.run(refused_four_bits):
        assert "are of 4 bits, whose blocks belong to no expert" in message


def refused_four_bits() -> str:
    from quantized import four_bit

    model: Any = four_bit("qwen3_moe", dtype=torch.float32, experts=True)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        sharded(model)
    return str(caught.value)


def test_each_rank_holds_its_share(workers_4: Workers) -> None:
    """Of eight experts two, in groups of two ranks of which two have the same ones; in a forward four."""
    for held, gathered, experts in workers_4.run(shares):
        assert held == 2
        assert gathered == 4
        assert experts == "4 of 8 of a layer on each rank; tokens are sent to 2 ranks"


def shares() -> tuple[int, int, str]:
    model: Any = sharded(make_model("qwen3_moe, 8 experts"))
    experts = model.model.layers[0].mlp.experts
    held = experts.down_proj.to_local().shape[0]
    experts.unshard()
    gathered = experts.down_proj.to_local().shape[0]
    experts.reshard()
    return held, gathered, liger_dist.explain(model).sharding["experts"]
