"""Experts on several ranks with tokens sent once to each of them, against all experts on all tokens in fp64."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import assert_below
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from truth import relative_error

import liger_dist
from liger_dist.fused_layers import swap_layers
from liger_dist.fused_layers.swap import match_of
from liger_dist.sharding.process_groups import compute_device

E, D, FEATURES = 8, 16, 12
TOKENS = {"even": (6, 6, 6, 6), "ragged": (9, 1, 0, 5)}
CHOICES = {
    "drawn": "any experts",
    "rank 0": "those of rank 0 alone, so that nothing arrives elsewhere",
    "own": "those of the token's rank",
    "last": "the last expert and one of rank 0",
    "none": "drawn, some of which name no expert",
}


def make_experts(family: str = "qwen3_moe") -> Any:
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config: Any = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=FEATURES, num_experts=E)
    if family == "gpt_oss":
        config = GptOssConfig(hidden_size=D, intermediate_size=FEATURES, num_local_experts=E)
    config._experts_implementation = "eager"
    experts: Any = Qwen3MoeExperts(config) if family == "qwen3_moe" else GptOssExperts(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in list(experts.named_parameters()):
        drawn = on_device.randn(*parameter.shape, generator=generator, dtype=torch.float64)
        setattr(experts, name, torch.nn.Parameter(drawn.to(compute_device())))
    return experts


def shard(experts: Any, implementation: str, dtype: torch.dtype) -> Any:
    """Leaves each rank its part of the experts, as transformers does."""
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

    liger_dist.register_expert_parallelism()
    world, rank = dist.get_world_size(), dist.get_rank()
    device = compute_device().type
    mesh = init_device_mesh(device, (world, 1), mesh_dim_names=("ep", "tp"))
    for name, parameter in list(experts.named_parameters()):
        part = parameter.detach().chunk(world)[rank].to(dtype)
        setattr(experts, name, torch.nn.Parameter(part.clone()))
    experts.num_experts, experts._is_expert_parallel = E // world, True
    style = EpDispatchExpertsParallel()
    return style.install_forward(experts, mesh["ep"], tp_mesh=mesh["tp"], ep_implementation=implementation)


def inputs(rank: int, tokens: int, choice: str, top_k: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and the router's weights of a rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    hidden = on_device.randn(tokens, D, generator=generator, dtype=torch.float64)
    index = on_device.rand(tokens, E, generator=generator).argsort(1)[:, :top_k]
    local = E // world
    if choice == "rank 0":
        index %= local
    elif choice == "own":
        index = index % local + rank * local
    elif choice == "last" and top_k > 1:
        index[:, 0], index[:, 1:] = E - 1, index[:, 1:] % local
    elif choice == "none":
        index[:, 0] = E
    weight = on_device.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    device = compute_device()
    return hidden.to(device), index.to(device), weight.to(device)


def true_results(world: int, tokens: tuple[int, ...], choice: str, top_k: int) -> list[dict[str, Tensor]]:
    """What each rank should have: output and gradients, of parameters those of its experts over all tokens."""
    experts = make_experts()
    parameters = [experts.gate_up_proj, experts.down_proj]
    found, sums = [], [torch.zeros_like(one) for one in parameters]
    for rank in range(world):
        hidden, index, weight = inputs(rank, tokens[rank], choice, top_k, world)
        hidden.requires_grad_()
        weight.requires_grad_()
        total = torch.zeros_like(hidden)
        for expert in range(E):
            token, k = torch.where(index == expert)
            gate, up = (hidden[token] @ experts.gate_up_proj[expert].T).chunk(2, 1)
            y = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].T
            total = total.index_add(0, token, y * weight[token, k, None])
        gradients = torch.autograd.grad(total, [hidden, weight, *parameters], upstream(total))
        for summed, gradient in zip(sums, gradients[2:], strict=True):
            summed += gradient
        found.append({"output": total.detach(), "hidden": gradients[0], "weight": gradients[1]})
    for rank, one in enumerate(found):
        one |= dict(zip(("up", "down"), (summed.chunk(world)[rank] for summed in sums), strict=True))
    return found


def upstream(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, max(y.numel(), 2), dtype=torch.float64, device=y.device)[: y.numel()].view_as(y).to(y)


def results(
    implementation: str, tokens: tuple[int, ...], choice: str, top_k: int, dtype: torch.dtype, checkpointed: bool
) -> dict[str, Tensor]:
    experts = shard(make_experts(), implementation, dtype)
    hidden, index, weight = inputs(dist.get_rank(), tokens[dist.get_rank()], choice, top_k, dist.get_world_size())
    hidden, weight = (one.to(dtype).requires_grad_() for one in (hidden, weight))
    if checkpointed:
        y: Any = checkpoint(experts, hidden, index, weight, use_reentrant=False)
    else:
        y = experts(hidden, index, weight)
    with torch.no_grad():
        assert torch.equal(experts(hidden, index, weight), y)
    parameters = [experts.gate_up_proj, experts.down_proj]
    gradients = torch.autograd.grad(y, [hidden, weight, *parameters], upstream(y))
    return dict(zip(("output", "hidden", "weight", "up", "down"), (y.detach(), *gradients), strict=True))


def compared(choice: str, which: str, top_k: int, dtype: torch.dtype, checkpointed: bool) -> dict[str, float]:
    """Relative errors, by what it is and its case."""
    world = dist.get_world_size()
    tokens = TOKENS[which][:world]
    found = results("liger_dist", tokens, choice, top_k, dtype, checkpointed)
    truth = true_results(world, tokens, choice, top_k)[dist.get_rank()]
    return {
        f"{name}, {which}, {top_k} experts": relative_error(found[name].double(), true)
        for name, true in truth.items()
        if true.numel() > 0 and bool(true.any())
    } | {
        f"{name}, zero": float(found[name].abs().max())
        for name, true in truth.items()
        if true.numel() > 0 and not bool(true.any())
    }


def needs_registry() -> None:
    from transformers.distributed import DistributedConfig

    if "ep_implementation" not in {field.name for field in fields(DistributedConfig)}:
        pytest.skip("this transformers takes no implementations of expert parallelism")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("choice", CHOICES)
def test_experts_on_several_ranks_are_all_experts(
    choice: str, world: int, workers_2: Workers, workers_4: Workers
) -> None:
    needs_registry()
    workers = workers_2 if world == 2 else workers_4
    for which in TOKENS:
        for top_k in (1, 3):
            checkpointed = top_k == 3 and which == "even"
            for errors in workers.run(compared, choice, which, top_k, torch.float64, checkpointed):
                assert_below(errors, 1e-12)


@pytest.mark.parametrize("what", ["as built", "wrapped, and implemented otherwise since"])
def test_forwards_that_take_no_other_index(what: str, workers_2: Workers) -> None:
    """That of gpt-oss raises for an index that names no expert of the rank."""
    needs_registry()
    is_swapped = what != "as built"
    for mine, theirs in zip(
        workers_2.run(gpt_oss_results, "liger_dist", is_swapped),
        workers_2.run(gpt_oss_results, "auto", False),
        strict=True,
    ):
        assert_below({name: relative_error(one, theirs[name]) for name, one in mine.items()}, 1e-12)


def gpt_oss_results(implementation: str, is_swapped: bool) -> dict[str, Tensor]:
    experts = shard(make_experts("gpt_oss"), implementation, torch.float64)
    if is_swapped:
        swap_layers(experts, backend="reference", owner="test")
        assert match_of(experts) is not None
        experts.config.original._experts_implementation = None
    hidden, index, weight = inputs(dist.get_rank(), 6, "drawn", 3, 2)
    given = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_(), **dict(experts.named_parameters())}
    y = experts(hidden, index, weight)
    gradients = torch.autograd.grad(y, list(given.values()), upstream(y))
    return {"output": y.detach(), **dict(zip(given, gradients, strict=True))}


def test_second_order_gradients_are_refused(workers_2: Workers) -> None:
    needs_registry()
    for message in workers_2.run(message_of_second_order):
        assert "not available from expert parallelism" in message


def message_of_second_order() -> str:
    """Of gradients of parameters alone, whose backward ends before that of the first exchange."""
    experts = shard(make_experts(), "liger_dist", torch.float64)
    y = experts(*inputs(dist.get_rank(), 6, "drawn", 3, 2))
    with pytest.raises(liger_dist.LigerDistError) as raised:
        torch.autograd.grad(y.square().sum(), list(experts.parameters()), create_graph=True)
    return str(raised.value)


def test_bf16_is_rounded_once_a_rank(workers_4: Workers) -> None:
    """No worse than transformers' exchange, which rounds each expert's output."""
    needs_registry()
    mine, theirs = (
        [max(one.values()) for one in workers_4.run(errors_in_bf16, name)] for name in ("liger_dist", "auto")
    )
    assert max(mine) < 1.2 * max(theirs)


def errors_in_bf16(implementation: str) -> dict[str, float]:
    tokens = TOKENS["even"]
    found = results(implementation, tokens, "drawn", 3, torch.bfloat16, False)
    truth = true_results(4, tokens, "drawn", 3)[dist.get_rank()]
    return {name: relative_error(found[name].double(), true) for name, true in truth.items()}


def test_a_token_is_sent_once_to_a_rank(workers_2: Workers) -> None:
    """Four experts of a token on two ranks: at most two rows of a token, where transformers sends four."""
    needs_registry()
    for mine, theirs in zip(
        workers_2.run(elements_sent, "liger_dist"), workers_2.run(elements_sent, "auto"), strict=True
    ):
        assert mine <= 0.75 * theirs


def elements_sent(implementation: str) -> int:
    """Elements of the largest message of a forward."""
    experts = shard(make_experts(), implementation, torch.float64)
    hidden, index, weight = inputs(dist.get_rank(), 64, "drawn", 4, 2)
    with torch.profiler.profile(record_shapes=True) as profiled:
        experts(hidden, index, weight)
    shapes = [
        event.input_shapes for event in profiled.events() if "all_to_all" in event.name or "alltoall" in event.name
    ]
    return max(sum(torch.Size(shape).numel() for shape in one if len(shape) == 2) for one in shapes)


@pytest.mark.smoke
def test_older_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(liger_dist.LigerDistError, match="no implementations of expert parallelism; install"):
        liger_dist.register_expert_parallelism()
