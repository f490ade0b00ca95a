"""Frozen weights replicated: how they are stored, from the meta device too, refusals, and what is said.

Gradients are those of the conformance suite's rows, of PEFT's methods and of vision-language models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import own_name
from harness import Workers
from models import full, make_batch, make_config, make_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import liger_dist

peft = pytest.importorskip("peft")
BF16 = torch.bfloat16


def adapted(*, targets: Any = "all-linear", **settings: Any) -> Any:
    torch.manual_seed(1)
    model = make_model("llama", dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **settings))


def test_frozen_weights_are_full_and_adapters_are_sharded(workers_2: Workers) -> None:
    for strategy in ("fsdp1", "fsdp2"):
        for wrong in workers_2.run(stored, strategy):
            assert wrong == []


def stored(strategy: str) -> list[str]:
    """Names of parameters that are stored otherwise."""
    options: dict[str, Any] = {"param_dtype": BF16, "frozen": "replicate"}
    model = adapted()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    root = liger_dist.wrap(model, liger_dist.FSDP1(**options) if strategy == "fsdp1" else liger_dist.FSDP2(**options))
    wrong, held, trained = [], 0, 0
    for name, parameter in root.named_parameters():
        own = own_name(name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad:
            held, trained = held + local.numel(), trained + shapes[own].numel()
            is_right = local.dtype == torch.float32
        else:
            is_right = local is parameter and local.dtype == BF16 and local.shape == shapes[own]
        wrong += [] if is_right else [own]
    # Padding of the shards is less than a tenth.
    assert held < 0.6 * trained
    assert root(**make_batch(dist.get_rank())).loss.isfinite()
    return wrong


def test_values_from_the_meta_device_do_not_depend_on_it(workers_2: Workers) -> None:
    for sharded, replicated in workers_2.run(from_meta):
        assert sharded.keys() == replicated.keys()
        for name, values in sharded.items():
            assert torch.equal(values, replicated[name]), name


def from_meta() -> list[dict[str, Tensor]]:
    found = []
    for frozen in ("shard", "replicate"):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(make_config("llama"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        torch.manual_seed(3)
        model = liger_dist.wrap(model, liger_dist.FSDP2(frozen=frozen))
        found.append({name: full(parameter).detach().clone() for name, parameter in model.named_parameters()})
    return found


def test_a_state_dict_of_one_way_is_read_by_the_other(workers_2: Workers) -> None:
    for before, after in workers_2.run(losses_after_reading):
        assert after == pytest.approx(before, rel=1e-6)


def losses_after_reading() -> tuple[list[float], list[float]]:
    options = StateDictOptions(full_state_dict=True)
    batch = make_batch(0)
    before, after = [], []
    for first, second in (("shard", "replicate"), ("replicate", "shard")):
        model = liger_dist.wrap(adapted(), liger_dist.FSDP2(frozen=first))
        before.append(float(model(**batch).loss.detach()))
        state = get_model_state_dict(model, options=options)
        other = liger_dist.wrap(adapted(bias="none"), liger_dist.FSDP2(frozen=second))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        # Rank 0 alone has the full tensors of a sharded model.
        set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        after.append(float(other(**batch).loss.detach()))
    return before, after


def test_explain_says_what_both_ways_cost(workers_2: Workers) -> None:
    for sharded, replicated, unfrozen in workers_2.run(explanations):
        assert unfrozen is None
        assert re.fullmatch(
            r"(\S+) GiB on each rank, all-gathered in forward and backward \(replicated: (\S+)\)", sharded
        )
        assert re.fullmatch(
            r"(\S+) GiB on each rank \(sharded: (\S+), all-gathered in forward and backward\)", replicated
        )
        (share, full_size), (kept, other) = (
            map(float, re.findall(r"[\d.e-]+(?= GiB|,|\))", s)) for s in (sharded, replicated)
        )
        frozen = sum(p.numel() for p in adapted().parameters() if not p.requires_grad)
        # Half of the fp32 weights, or all of them in bf16.
        assert share == pytest.approx(2 * frozen / 2**30, rel=1e-2) == other
        assert full_size == pytest.approx(2 * frozen / 2**30, rel=1e-2) == kept


def explanations() -> list[str | None]:
    models = [(adapted(), "shard"), (adapted(), "replicate"), (make_model("llama", dtype=torch.float32), "shard")]
    return [
        liger_dist.explain(liger_dist.wrap(model, liger_dist.FSDP2(frozen=frozen, param_dtype=BF16))).frozen
        for model, frozen in models
    ]


def untouched() -> Any:
    return make_model("llama", dtype=torch.float32)


def all_frozen() -> Any:
    return untouched().requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a value": (adapted, {"frozen": "replicated"}, "expected one of 'shard', 'replicate'"),
    "all train": (untouched, {}, "freeze the base (get_peft_model) before wrap, or leave the option out"),
    "none trains": (all_frozen, {}, "no parameter of this LlamaForCausalLM trains"),
    "offload": (adapted, {"cpu_offload": True}, "but cpu_offload is True; leave one of them out"),
    "float8": (adapted, {"float8": "tensorwise"}, "but frozen is 'replicate'"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str, workers_2: Workers) -> None:
    if reason == "float8":
        pytest.importorskip("torchao")
    for sentence in workers_2.run(refusal, reason):
        assert REFUSED[reason][2] in sentence


def refusal(reason: str) -> str:
    build, options, _ = REFUSED[reason]
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(build(), liger_dist.FSDP2(**{"frozen": "replicate"} | options))
    return str(caught.value)


def test_what_is_unfrozen_later_is_refused(workers_2: Workers) -> None:
    """By name, before it trains on one rank's gradient."""
    for sentence in workers_2.run(refused_later):
        assert "nothing averages the gradients of base_model.model.model.norm.weight" in sentence


def refused_later() -> str:
    model = liger_dist.wrap(adapted(), liger_dist.FSDP2(frozen="replicate"))
    model(**make_batch(dist.get_rank())).loss.backward()
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_()
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(**make_batch(dist.get_rank()))
    return str(caught.value)


def test_an_adapter_that_is_set_later_trains(workers_2: Workers) -> None:
    for error in workers_2.run(error_of_the_second_adapter):
        assert error < 1e-5


def error_of_the_second_adapter() -> float:
    """Of two adapters that were there when the model was wrapped."""

    def made() -> Any:
        model = adapted()
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return model

    reference, model = made(), liger_dist.wrap(made(), liger_dist.FSDP2(frozen="replicate"))
    model(**make_batch(dist.get_rank())).loss.backward()
    reference.set_adapter("second")
    model.set_adapter("second")
    model.zero_grad()
    model(**make_batch(dist.get_rank())).loss.backward()
    for rank in range(2):
        (reference(**make_batch(rank)).loss / 2).backward()
    truth = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    assert all("second" in name for name in truth)
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if name in truth}
    return max(float((gradients[name] - true).norm() / true.norm()) for name, true in truth.items())


@pytest.mark.smoke
def test_ranks_that_train_other_parameters_are_refused_together(workers_2: Workers) -> None:
    """Their groups would differ, and each would wait for the other."""
    for sentence in workers_2.run(refused_unlike):
        assert "different settings" in sentence
        assert "trained parameters: 16 (" in sentence
        assert "trained parameters: 15 (" in sentence


def refused_unlike() -> str:
    model = adapted(targets=["q_proj", "v_proj", "down_proj", "o_proj"])
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if dist.get_rank() == 1:
        model.get_parameter(names[-1]).requires_grad_(False)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, liger_dist.FSDP2(frozen="replicate"))
    return str(caught.value)
