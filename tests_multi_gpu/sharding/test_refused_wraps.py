"""What ``wrap`` refuses, on every rank and before anything is changed; and what a wrap that fails leaves behind."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import full, make_batch, make_model, true_loss_sum
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import liger_dist
from liger_dist.sharding.process_groups import compute_device


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a wrap may change on a model."""
    return {
        "classes": [type(module) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in model.modules()
        ],
        "parameters": [id(parameter) for parameter in model.parameters()],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
    }


def scalar(model: Any) -> None:
    model.model.norm.scale = nn.Parameter(on_device.ones((), dtype=torch.float64))


def strided(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.detach().T.contiguous().T)


def two_dtypes(model: Any) -> None:
    model.model.layers[0].mlp.to(torch.float32)


def shared_module(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def shared_parameter(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def shared_with_the_final_norm(model: Any) -> None:
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight


def repeated_layer(model: Any) -> None:
    first, second = model.model.layers
    model.model.layers = nn.ModuleList([first, second, first])
    model.config.num_hidden_layers, model.config.use_cache = 3, False


def one_memory(model: Any) -> None:
    first, second = model.model.layers
    second.mlp.up_proj.weight = nn.Parameter(first.mlp.up_proj.weight.detach())


def hooked(model: Any) -> None:
    model.lm_head.weight.register_hook(lambda gradient: gradient * 2)


BAD = {
    ("fsdp2", "scalar"): (scalar, "scale has no dimension"),
    ("fsdp1", "scalar"): (scalar, "scale has no dimension"),
    ("fsdp2", "strides"): (strided, "up_proj.weight has the strides"),
    ("fsdp1", "dtypes"): (two_dtypes, "of one dtype"),
    ("fsdp1", "repeated"): (repeated_layer, "model.layers.0 and model.layers.2 are one layer"),
    **{
        (strategy, what.__name__): (what, sentence)
        for strategy in ("fsdp1", "fsdp2")
        for what, sentence in (
            (shared_module, "layers.0.mlp.gate_proj.weight is a parameter of model.layers.0 and of model.layers.1"),
            (shared_parameter, "layers.0.mlp.up_proj.weight is a parameter of model.layers.0 and of model.layers.1"),
            (shared_with_the_final_norm, "is a parameter of model.layers.0 and of model.norm"),
            (one_memory, "are two parameters in the same memory"),
            (hooked, "lm_head.weight has a hook on its gradient"),
        )
    },
    ("deepspeed", "one_memory"): (one_memory, "are two parameters in the same memory"),
}


@pytest.mark.parametrize(("strategy", "what"), BAD, ids=str)
def test_what_the_framework_would_refuse_in_the_middle_is_refused_before(
    strategy: str, what: str, workers_2: Workers
) -> None:
    for sentence, unchanged in workers_2.run(refused, strategy, what):
        assert BAD[strategy, what][1] in sentence
        assert unchanged


def refused(strategy: Any, what: str) -> tuple[str, bool]:
    model = make_model("llama")
    BAD[strategy, what][0](model)
    before = state_of(model)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, strategy)
    return str(caught.value), state_of(model) == before


EXACT = {
    # DDP leaves parameters and their hooks as they are.
    "ddp": (shared_module, shared_parameter, shared_with_the_final_norm, repeated_layer, hooked),
    "fsdp2": (repeated_layer,),
    "vocab_parallel": (repeated_layer,),
}


@pytest.mark.parametrize("strategy", EXACT)
def test_what_is_not_refused_is_exact(strategy: str, workers_2: Workers) -> None:
    for errors in workers_2.run(errors_of_odd_models, strategy):
        assert max(errors.values()) < 1e-6, errors


def errors_of_odd_models(strategy: str) -> dict[str, float]:
    errors = {}
    for change in EXACT[strategy]:
        model, reference = make_model("llama"), make_model("llama")
        for one in (model, reference):
            change(one)
        asked: Any = strategy
        if strategy != "ddp":
            asked = liger_dist.FSDP2(reduce_dtype=torch.float64)
            if strategy == "vocab_parallel":
                asked = replace(asked, lm_head="vocab_parallel")
        root: Any = liger_dist.wrap(model, asked)
        root(**make_batch(dist.get_rank())).loss.backward()
        for rank in range(2):
            total, count = true_loss_sum(reference, make_batch(rank))
            (total / count / 2).backward()
        truth = {name: p.grad for name, p in reference.named_parameters()}
        errors[change.__name__] = max(
            float((full(p.grad) - truth[name]).abs().max() / truth[name].abs().max())
            for name, p in model.named_parameters()
        )
    return errors


def interleaved(model: Any) -> None:
    """Columns of one tensor, which have no number in common."""
    mlp = model.model.layers[0].mlp
    both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight], dim=1).detach()
    mlp.gate_proj.weight, mlp.up_proj.weight = (nn.Parameter(half) for half in both.chunk(2, dim=1))


@pytest.mark.smoke
def test_columns_of_one_tensor_are_two_parameters(workers_2: Workers) -> None:
    model = make_model("llama")
    interleaved(model)
    liger_dist.wrap(model, "deepspeed")
    for verdict in workers_2.run(verdict_of_interleaved):
        assert verdict.split("verdict")[1].split()[0] == "ok", verdict


def verdict_of_interleaved() -> str:
    model = make_model("llama")
    interleaved(model)
    return str(liger_dist.verify(liger_dist.wrap(model, "fsdp1"), make_batch(dist.get_rank())))


PARAMETRIZED = ("none", "ddp", "fsdp1", "fsdp2", "tp")


def test_a_parametrized_head_is_left_unfused(workers_2: Workers) -> None:
    """Its weight is a computation, which only its own call may make."""
    (alone,) = errors_of_parametrized(["none"]).items()
    sentences = workers_2.run(errors_of_parametrized, [name for name in PARAMETRIZED if name != "none"])
    for strategy, (error, reason) in (alone, *sentences[0].items(), *sentences[1].items()):
        assert error < 1e-6, strategy
        assert "parametrization" in reason


def errors_of_parametrized(strategies: list[str]) -> dict[str, tuple[float, str]]:
    """The largest error of a parameter after a step, and what ``explain`` says."""
    found = {}
    for strategy in strategies:
        model, reference = make_model("llama"), make_model("llama")
        for one in (model, reference):
            torch.nn.utils.parametrizations.weight_norm(one.lm_head)
        ranks = range(2) if strategy not in ("none", "tp") else range(1)
        options: dict[str, Any] = {"fsdp1": liger_dist.FSDP1, "fsdp2": liger_dist.FSDP2}
        own: Any = options[strategy](reduce_dtype=torch.float64) if strategy in options else strategy
        with pytest.warns(UserWarning, match="unfused: its lm_head computes its weight"):
            root: Any = liger_dist.wrap(model, own)
        reason = liger_dist.explain(root).fused
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) for one in (root, reference)]
        rank = dist.get_rank() if len(ranks) > 1 else 0
        root(**make_batch(rank)).loss.backward()
        for rank in ranks:
            (reference(**make_batch(rank)).loss / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
        shown = FullyShardedDataParallel.summon_full_params(root) if strategy == "fsdp1" else nullcontext()
        with shown:
            names = (name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters())
            trained = dict(zip(names, map(full, model.parameters()), strict=True))
            error = max(float((trained[name] - p).abs().max()) for name, p in reference.named_parameters())
        found[strategy] = error, reason
    return found


def test_a_head_in_another_dtype_than_the_body_is_a_unit_of_fsdp1(workers_2: Workers) -> None:
    for loss in workers_2.run(with_an_fp32_head):
        assert loss > 0


def with_an_fp32_head() -> float:
    model: Any = make_model("llama", dtype=torch.bfloat16)
    model.lm_head.float()
    root = liger_dist.wrap(model, liger_dist.FSDP1(param_dtype=torch.bfloat16))
    return float(root(**make_batch(dist.get_rank())).loss)


def test_a_mesh_without_names_is_refused(workers_4: Workers) -> None:
    for sentence in workers_4.run(with_a_mesh_without_names):
        assert "has no names for its axes" in sentence


def with_a_mesh_without_names() -> str:
    mesh = DeviceMesh(compute_device().type, on_device.arange(4).reshape(2, 2))
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_model("llama"), "fsdp2", mesh=mesh)
    return str(caught.value)


ALONE = {
    "a parameter": "scale has no dimension",
    "wrapped already": "is wrapped already",
    "a hook on the head": "ranks call wrap with different settings",
    "another error": "nothing here",
}


@pytest.mark.smoke
@pytest.mark.parametrize("what", ALONE)
def test_one_rank_that_refuses_is_heard_by_all(what: str, workers_2: Workers) -> None:
    """The other would wait in its first collective."""
    sentences = workers_2.run(refused_by_one, what, time_limit=60)
    assert all(ALONE[what] in sentence for sentence in sentences)


def refused_by_one(what: str) -> str:
    model: Any = make_model("llama")
    if dist.get_rank() == 1 and what == "a parameter":
        scalar(model)
    if dist.get_rank() == 1 and what == "wrapped already":
        liger_dist.wrap(model)
    if dist.get_rank() == 1 and what == "a hook on the head":
        model.lm_head.register_forward_hook(lambda *_: None)
    if dist.get_rank() == 1 and what == "another error":

        def fail() -> Any:
            raise ZeroDivisionError("nothing here")

        model.get_output_embeddings = fail
    before = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((liger_dist.LigerDistError, ZeroDivisionError)) as caught:
            liger_dist.wrap(model, "fsdp2")
    assert state_of(model) == before
    return str(caught.value)


class Unshardable(nn.Parameter):
    """Fails when FSDP2 or FSDP1 takes it, after the units before it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.chunk, torch.chunk, torch.Tensor.detach, torch.flatten):
            raise torch.OutOfMemoryError("no memory for this one")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_a_failure_in_the_middle_of_sharding_refuses_the_model_from_then_on(strategy: str, workers_2: Workers) -> None:
    for sentences, checkpointing, wrapped in workers_2.run(failed, strategy):
        assert len(sentences) == 2
        assert all("build the model anew" in sentence for sentence in sentences)
        assert not checkpointing
        assert not wrapped


def failed(strategy: Any) -> tuple[list[str], bool, bool]:
    model: Any = make_model("llama")
    norm = model.model.layers[1].input_layernorm
    norm.weight = norm.weight.detach().as_subclass(Unshardable)
    with pytest.raises(Exception, match="no memory for this one"):
        liger_dist.wrap(model, strategy)
    assert any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    sentences = []
    for ask in (lambda: liger_dist.wrap(model, strategy), lambda: model(**make_batch(0))):
        with pytest.raises(liger_dist.LigerDistError) as caught:
            ask()
        sentences.append(str(caught.value))
    return sentences, model.model.gradient_checkpointing, liger_dist.is_wrapped(model)


@pytest.mark.smoke
def test_a_tied_unit_of_fsdp1_that_holds_embedding_and_head_is_exact(workers_2: Workers) -> None:
    for error in workers_2.run(in_one_unit):
        assert error < 1e-6


class Holder(nn.Module):
    """A model of the user's own around a causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        return self.inside(input_ids=input_ids, labels=labels)


def in_one_unit() -> float:
    from torch.distributed.fsdp.wrap import CustomPolicy

    model: Any = make_model("llama", tied=True)
    reference: Any = copy.deepcopy(model)
    root = FullyShardedDataParallel(
        liger_dist.wrap(Holder(model)),
        auto_wrap_policy=CustomPolicy(lambda module: module is model),
        use_orig_params=True,
        device_id=compute_device(),
    )
    losses = []
    for rank in range(dist.get_world_size()):
        loss = reference(**make_batch(rank)).loss
        losses.append(float(loss))
        (loss / dist.get_world_size()).backward()
    output = root(**make_batch(dist.get_rank()))
    assert not hasattr(output, "logits")
    output.loss.backward()
    with FullyShardedDataParallel.summon_full_params(root, with_grads=True):
        gradient = model.lm_head.weight.grad
    difference = (gradient - reference.lm_head.weight.grad).abs().max() / reference.lm_head.weight.grad.abs().max()
    return max(float(difference), abs(float(output.loss) - losses[dist.get_rank()]))


def test_explain_lists_only_what_runs(workers_2: Workers) -> None:
    for swapped, calls in workers_2.run(sharded_first):
        assert calls == swapped
        assert swapped == {"norm": 5, "gated_activation": 2, "rotary": 2}


def sharded_first() -> tuple[dict[str, int], dict[str, int]]:
    """Layers that ``explain`` calls swapped, after FSDP2 came first, and kernels that a step calls."""
    from contextlib import ExitStack
    from unittest import mock

    from torch.distributed.fsdp import fully_shard

    from liger_dist.fused_layers import gated_mlp, norm, rotary

    model: Any = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        for part in (layer.input_layernorm, layer.self_attn, layer.mlp, layer):
            fully_shard(part)
    fully_shard(model)
    liger_dist.wrap(model)
    told = liger_dist.explain(model).layers.swapped
    kernels = {"norm": (norm, "RMSNorm:"), "gated_activation": (gated_mlp, "MLP:"), "rotary": (rotary, "Attention:")}
    swapped = {
        name: sum(count for what, count in told if f"{end} " in f"{what} ") for name, (_, end) in kernels.items()
    }
    with ExitStack() as stack:
        spies = {
            name: stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for name, (module, _) in kernels.items()
        }
        model(**make_batch(0)).loss.backward()
    return swapped, {name: spy.call_count for name, spy in spies.items()}


def test_nothing_is_a_dtensor_after_a_refusal(workers_2: Workers) -> None:
    assert workers_2.run(refused_vocab_parallel) == [True, True]


def refused_vocab_parallel() -> bool:
    """A vocab-parallel head, and a parameter that FSDP2 refuses."""
    model = make_model("llama", tied=True)
    scalar(model)
    with pytest.raises(liger_dist.LigerDistError):
        liger_dist.wrap(model, liger_dist.FSDP2(lm_head="vocab_parallel"))
    return not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_ranks_with_different_configs_are_refused(workers_2: Workers) -> None:
    for sentence in workers_2.run(wrapped_differently):
        assert "ranks call wrap with different settings" in sentence
        assert "token_mean='global'" in sentence


def wrapped_differently() -> str:
    config = liger_dist.WrapConfig(token_mean="global" if dist.get_rank() == 0 else "local")
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_model("llama"), "fsdp2", config=config)
    return str(caught.value)


def test_options_without_a_value_to_compare_may_differ(workers_2: Workers) -> None:
    assert all(workers_2.run(wrapped_with_objects))


class Slotted:
    """A strategy of a user, with an option that has no value to compare."""

    __slots__ = ("policy",)
    name, shards_parameters, has_collectives = "slotted", False, True

    def __init__(self) -> None:
        self.policy = lambda: None

    def check(self, config: Any, *, world_size: int | None) -> None: ...

    def check_model(self, *_: Any, **__: Any) -> None: ...

    def shard(self, outer: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return outer


class Replicated(Slotted):
    """The same with attributes on the instance."""


def wrapped_with_objects() -> bool:
    for strategy in (Slotted(), Replicated(), "ddp"):
        budget = liger_dist.WrapConfig(memory_budget=2**20 * (1 + dist.get_rank()))
        liger_dist.wrap(make_model("llama"), strategy, config=budget)
    return True


def test_a_head_that_another_wrap_has_fused_is_refused() -> None:
    model, other = make_model("llama"), make_model("llama")
    other.lm_head = model.lm_head
    liger_dist.wrap(model)
    with pytest.raises(liger_dist.LigerDistError, match="unwrap on that one first"):
        liger_dist.wrap(other)
    liger_dist.unwrap(model)
    liger_dist.wrap(other)
