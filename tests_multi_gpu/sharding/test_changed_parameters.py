"""Parameters of a sharded model that are read, written to, frozen or exchanged after a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients
from harness import Workers
from models import make_batch, make_model, relative_errors, true_loss_sum
from test_passes import AFTER_WRAP, BEFORE_WRAP, BY_CALLER, FSDP1_OPTIONS, shard
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

import liger_dist
from liger_dist.sharding.process_groups import compute_device

TOLERANCE = 1e-9
FSDP2: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, units of two layers": {"layers_per_unit": 2},
    "fsdp2, not resharded": {"reshard_after_forward": False},
    "vocab-parallel": {"lm_head": "vocab_parallel"},
}
STRATEGIES = (*FSDP2, "fsdp1")


def sharded(model: nn.Module, strategy: str) -> Any:
    if strategy == "ddp":
        return liger_dist.wrap(model, "ddp")
    if strategy == "fsdp1":
        return liger_dist.wrap(model, liger_dist.FSDP1(reduce_dtype=torch.float64))
    return liger_dist.wrap(model, liger_dist.FSDP2(reduce_dtype=torch.float64, **FSDP2[strategy]))


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    return make_batch(dist.get_rank(), seed=seed)


def inside(root: Any) -> Any:
    return getattr(root, "module", root)


def true_loss(reference: Any) -> torch.Tensor:
    sums, counts = zip(*(true_loss_sum(reference, make_batch(rank)) for rank in range(2)), strict=True)
    return sum(s / n for s, n in zip(sums, counts, strict=True)) / 2  # type: ignore[no-any-return]


# --- a penalty on a full weight, whose graph keeps it ----------------------------------------------------------------


def listed(root: Any) -> None:
    assert list(root.parameters())


def other_step(root: Any) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1, device=compute_device()))], lr=1.0).step()


def evaluated(root: Any) -> None:
    with torch.no_grad():
        root(**batch(7))


@pytest.mark.nightly(between=["listed"])
@pytest.mark.parametrize("between", [listed, other_step, evaluated])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_penalty_on_a_weight_survives_a_pass(
    strategy: str, between: Callable[[Any], None], workers_2: Workers
) -> None:
    """Its graph holds a weight that would be freed."""
    for errors in workers_2.run(errors_of_a_penalty, strategy, between):
        assert max(errors.values()) < TOLERANCE, errors


def errors_of_a_penalty(strategy: str, between: Callable[[Any], None]) -> dict[str, float]:
    model: Any = make_model("llama")
    reference = copy.deepcopy(model)
    root = sharded(model, strategy)

    def penalty(of: Any) -> torch.Tensor:
        norm = of.model.norm
        return 0.1 * getattr(norm, "module", norm).weight.square().sum()

    loss = root(**batch()).loss + penalty(model)
    between(root)
    loss.backward()
    (true_loss(reference) + penalty(reference)).backward()
    truth = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return relative_errors(full_gradients(root), truth)  # type: ignore[arg-type]


# --- writes to parameters after a loss without a backward ------------------------------------------------------------


def by_data(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5)


def by_foreach(parameters: list[Any]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.5)


def in_place(parameters: list[Any]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


@pytest.mark.parametrize("write", [by_data, by_foreach, in_place])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_reads_what_was_written_by_hand(
    strategy: str, write: Callable[[list[Any]], None], workers_2: Workers
) -> None:
    for found, true in workers_2.run(losses_after_a_write, strategy, write):
        assert found == pytest.approx(true, rel=TOLERANCE)


def losses_after_a_write(strategy: str, write: Callable[[list[Any]], None]) -> tuple[float, float]:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    root = sharded(model, strategy)
    parameters = list(root.parameters())
    assert root(**batch()).loss > 0
    write(parameters)
    write(list(reference.parameters()))
    total, count = true_loss_sum(reference, batch())
    loss = torch.stack([root(**batch()).loss.detach(), (total / count).detach()])
    dist.all_reduce(loss)
    return float(loss[0]), float(loss[1])


# --- freezing between a forward and its backward ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.layers.0.mlp"])
@pytest.mark.parametrize("strategy", FSDP2)
def test_what_is_frozen_before_a_backward_stays_frozen(strategy: str, name: str, workers_2: Workers) -> None:
    if strategy == "vocab-parallel" and name == "lm_head":
        pytest.skip("its weight is never full")
    for trained, has_gradient in workers_2.run(frozen_before_a_backward, strategy, name):
        assert not trained
        assert not has_gradient


def frozen_before_a_backward(strategy: str, name: str) -> tuple[bool, bool]:
    root = sharded(make_model("llama"), strategy)
    loss = root(**batch()).loss
    root.get_submodule(name).requires_grad_(False)
    loss.backward()
    root.zero_grad()
    root(**batch()).loss.backward()
    parameters = list(root.get_submodule(name).parameters())
    return any(p.requires_grad for p in parameters), any(p.grad is not None for p in parameters)


# --- parameters that nothing averages --------------------------------------------------------------------------------


def other_embedding(root: Any) -> None:
    inside(root).set_input_embeddings(nn.Embedding(101, 16, device=compute_device(), dtype=torch.float64))


def other_projection(root: Any) -> None:
    layer = inside(root).model.layers[0]
    getattr(layer, "module", layer).mlp.gate_proj = nn.Linear(
        16, 24, bias=False, device=compute_device(), dtype=torch.float64
    )


def assigned(root: Any) -> None:
    state = {name: value.clone() for name, value in inside(root).state_dict().items()}
    inside(root).load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [
        *((strategy, change) for strategy in ("ddp", *STRATEGIES) for change in (other_embedding, other_projection)),
        ("ddp", assigned),
    ],
)
def test_exchanged_parameters_are_refused_before_a_step(
    strategy: str, exchange: Callable[[Any], None], workers_2: Workers
) -> None:
    for sentence in workers_2.run(refusal_of_a_step, strategy, exchange):
        assert "nothing averages the gradients of" in sentence


def refusal_of_a_step(strategy: str, exchange: Callable[[Any], None]) -> str:
    root = sharded(make_model("llama"), strategy)
    root(**batch()).loss.backward()
    torch.optim.SGD(root.parameters(), lr=0.1, foreach=False).step()
    exchange(root)
    root.zero_grad()
    root(**batch()).loss.backward()
    before = [parameter.detach().clone() for parameter in root.parameters()]
    with pytest.raises(liger_dist.LigerDistError) as caught:
        torch.optim.SGD(root.parameters(), lr=0.1, foreach=False).step()
    assert all(torch.equal(*pair) for pair in zip(before, root.parameters(), strict=True))
    return str(caught.value)


def test_another_models_parameters_are_not_refused(workers_2: Workers) -> None:
    workers_2.run(step_of_two_models)


def step_of_two_models() -> None:
    root, other = sharded(make_model("llama"), "ddp"), nn.Linear(2, 2, device=compute_device())
    optimizer = torch.optim.SGD([*root.parameters(), *other.parameters()], lr=0.1)
    for _ in range(2):
        (root(**batch()).loss + other.weight.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not isinstance(root, FullyShardedDataParallel)


# --- the divide factor of FSDP2 --------------------------------------------------------------------------------------


def fused(root: Any, labelled: dict[str, torch.Tensor]) -> torch.Tensor:
    return root(**labelled).loss  # type: ignore[no-any-return]


def of_full_logits(root: Any, labelled: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = root(input_ids=labelled["input_ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labelled["labels"][:, 1:].flatten())


@pytest.mark.parametrize("compute", [fused, of_full_logits])
@pytest.mark.parametrize("strategy", [*FSDP2, "vocab-parallel, replicas"])
def test_a_divide_factor_set_after_the_forward_holds_or_is_refused(
    strategy: str, compute: Callable[..., torch.Tensor], workers_2: Workers
) -> None:
    """The fused loss of a vocab-parallel lm_head computes its gradient in the forward."""
    is_refused = strategy.startswith("vocab-parallel") and compute is fused
    for refusal, errors in workers_2.run(errors_of_a_divide_factor, strategy, compute):
        assert ("divide factor was 2.0 in the forward and is 1.0" in refusal) == is_refused
        assert max(errors.values()) < TOLERANCE, errors


def errors_of_a_divide_factor(strategy: str, compute: Callable[..., torch.Tensor]) -> tuple[str, dict[str, float]]:
    """Of gradients that are sums over the ranks; after a refusal, those of the next backward."""
    model: Any = make_model("llama")
    reference = copy.deepcopy(model)
    if strategy in FSDP2:
        root = sharded(model, strategy)
    else:
        options = liger_dist.FSDP2(lm_head="vocab_parallel", mesh=(2, 1), reduce_dtype=torch.float64)
        root = liger_dist.wrap(model, options)
    loss, refusal = compute(root, batch()), ""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    try:
        loss.backward()
    except liger_dist.LigerDistError as error:
        refusal = str(error)
        root.zero_grad()
        compute(root, batch()).backward()
    (2 * true_loss(reference)).backward()
    truth = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return refusal, relative_errors(full_gradients(root), truth)  # type: ignore[arg-type]


# --- adapters that are merged ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("summoned", [False, True])
@pytest.mark.parametrize("strategy", FSDP1_OPTIONS)
def test_a_merge_into_flat_shards_is_refused(strategy: str, summoned: bool, workers_2: Workers) -> None:
    """A product of one-dimensional shards is a number, which fits any weight."""
    for sentences, error in workers_2.run(loss_around_a_merge, strategy, summoned):
        assert len(sentences) == (0 if summoned else 2)
        assert all("inside of FullyShardedDataParallel.summon_full_params" in sentence for sentence in sentences)
        assert error < TOLERANCE


def loss_around_a_merge(strategy: str, summoned: bool) -> tuple[list[str], float]:
    """The refusals, and how far the loss of a merged adapter is from the one before."""
    import peft

    options = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    root = shard(peft.get_peft_model(make_model("llama"), options, autocast_adapter_dtype=False).train(), strategy)
    sentences, losses = [], []
    for call in (None, "merge_adapter", "unmerge_adapter"):
        with FullyShardedDataParallel.summon_full_params(root) if summoned else nullcontext():
            try:
                if call is not None:
                    getattr(inside(root), call)()
            except liger_dist.LigerDistError as error:
                sentences.append(str(error))
        with torch.no_grad():
            losses.append(float(root(**batch()).loss))
    return sentences, max(abs(loss - losses[0]) for loss in losses)


# --- adapters that are added -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "vocab-parallel", *BY_CALLER])
def test_an_adapter_added_to_a_sharded_model_is_refused(strategy: str, has_stepped: bool, workers_2: Workers) -> None:
    """Of a model that the caller shards after wrap, what it has in its first forward is the caller's to average."""
    for sentence in workers_2.run(refusal_of_an_adapter, strategy, has_stepped):
        if strategy == AFTER_WRAP and not has_stepped:
            assert not sentence
        else:
            assert "nothing averages the gradients of" in sentence
            assert "lora_A" in sentence


def refusal_of_an_adapter(strategy: str, has_stepped: bool) -> str:
    import peft

    options = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    root = shard(peft.get_peft_model(make_model("llama"), options, autocast_adapter_dtype=False).train(), strategy)
    if has_stepped:
        root(**batch()).loss.backward()
        torch.optim.SGD([p for p in root.parameters() if p.requires_grad], lr=0.1, foreach=False).step()
        root.zero_grad()
    inside(root).add_adapter("later", options)
    for name, parameter in inside(root).named_parameters():
        if ".later." in name:
            parameter.data = parameter.data.double()
    inside(root).set_adapter("later")
    try:
        root(**batch()).loss.backward()
    except liger_dist.LigerDistError as error:
        return str(error)
    # Adapters that were there are no news.
    inside(root).set_adapter("default")
    root(**batch()).loss.backward()
    return ""


@pytest.mark.parametrize("strategy", BY_CALLER)
def test_parameters_that_the_caller_averages_are_not_refused(strategy: str, workers_2: Workers) -> None:
    workers_2.run(steps_of_ignored_adapters, strategy)


def steps_of_ignored_adapters(strategy: str) -> None:
    """LoRA outside of FSDP2's groups, with an adapter that is switched to later."""
    import peft

    options = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    model: Any = peft.get_peft_model(make_model("llama"), options, autocast_adapter_dtype=False).train()
    model.add_adapter("second", options)
    model.double()
    ignored = {parameter for name, parameter in model.named_parameters() if "lora_" in name}
    if strategy == BEFORE_WRAP:
        fully_shard(model, ignored_params=ignored)
    root = liger_dist.wrap(model, "auto")
    if strategy != BEFORE_WRAP:
        fully_shard(model, ignored_params=ignored)
    for name in ("default", "second"):
        root.set_adapter(name)
        root(**batch()).loss.backward()
