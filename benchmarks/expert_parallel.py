"""One layer's experts on several GPUs, forward and backward: dispatch of tokens, grouped products, and the way back.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.expert_parallel

Each rank has its tokens, and an equal part of the 128 experts of Qwen3-30B-A3B; each token has 8 different ones, drawn
evenly. bf16, random weights. ``products alone``: dense products of as many operations, of a rank's pairs of a token and
an expert. A time is that of the slowest rank. Errors are relative (L2) to fp64, over all ranks, of some tokens and of
the first expert of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import liger_dist
from liger_dist.fused_layers import swap_layers

from .experts import QWEN, QWEN_SIZES
from .harness import Candidate, Row, arguments, save, show
from .vocab_parallel import measure_together

TOKENS = (8192, 16384)
EXPERTS, TOP_K = QWEN_SIZES["num_experts"], QWEN_SIZES["num_experts_per_tok"]
D, FEATURES = QWEN_SIZES["hidden_size"], QWEN_SIZES["moe_intermediate_size"]
CHECKED = 128
"""tokens of each rank that are compared with fp64"""
LIGER = "Liger, expert parallel (CuTe)"
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""output; gradients of hidden states, of the router's weights, and of gate and up and of down of the first expert"""
Step = Callable[[], Results]


class Inputs:
    """Tokens of this rank, and its part of the experts."""

    def __init__(self, tokens: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator("cuda").manual_seed(rank)
        draw: Any = {"device": "cuda", "generator": generator}
        self.hidden_TD = torch.randn(tokens, D, **draw).bfloat16().requires_grad_()
        self.index_TK = torch.rand(tokens, EXPERTS, **draw).argsort(1)[:, :TOP_K].contiguous()
        self.weight_TK = torch.rand(tokens, TOP_K, **draw).softmax(1).bfloat16().requires_grad_()
        self.upstream_TD = torch.randn(tokens, D, **draw).bfloat16()
        self.first = rank * (EXPERTS // world)
        local = EXPERTS // world
        self.gate_up = (torch.randn(local, 2 * FEATURES, D, **draw) / D**0.5).bfloat16()
        self.down = (torch.randn(local, D, FEATURES, **draw) / FEATURES**0.5).bfloat16()


def module(inputs: Inputs, implementation: str) -> Step:
    """Builds transformers' experts under its expert parallelism, or under this library's."""
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    liger_dist.register_expert_parallelism()
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world, 1), mesh_dim_names=("ep", "tp"))
    config: Any = Qwen3MoeConfig(**QWEN_SIZES)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(inputs.gate_up.clone())
    experts.down_proj = torch.nn.Parameter(inputs.down.clone())
    experts.num_experts, experts._is_expert_parallel = EXPERTS // world, True
    style = EpDispatchExpertsParallel()
    experts = style.install_forward(experts, mesh["ep"], tp_mesh=mesh["tp"], ep_implementation=implementation)
    if implementation == "liger_dist":
        swap_layers(experts, backend="auto", owner="benchmark")

    def run() -> Results:
        y = experts(inputs.hidden_TD, inputs.index_TK, inputs.weight_TK)
        given = [inputs.hidden_TD, inputs.weight_TK, experts.gate_up_proj, experts.down_proj]
        by_hidden, by_weight, by_gate_up, by_down = torch.autograd.grad(y, given, inputs.upstream_TD)
        return y.detach(), by_hidden, by_weight, by_gate_up[0], by_down[0]

    return run


def liger(inputs: Inputs) -> Step:
    """Builds Liger's native layer, in which gate and up are two parameters."""
    from liger_kernel.ops.configure import MoEConfig, configure

    world = dist.get_world_size()
    sizes = MoEConfig(
        max_tokens=max(TOKENS),  # Later calls may not ask for more.
        hidden_size=D,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_hosts=1,
        gpus_per_host=world,
        group="ep",
    )
    device = torch.device("cuda", torch.cuda.current_device())
    index_TK = inputs.index_TK.int()
    gate, up = (half.contiguous().requires_grad_() for half in inputs.gate_up.chunk(2, 1))
    down = inputs.down.clone().requires_grad_()
    is_ready = False

    def run() -> Results:
        nonlocal is_ready
        from liger_kernel.ops.cute.ops.moe import moe_fused

        if not is_ready:
            if not configure(process_groups={"ep": dist.group.WORLD}, device=device, moe=sizes):
                raise RuntimeError("Liger has no expert-parallel kernels for this device")
            is_ready = True
        given = [inputs.hidden_TD, inputs.weight_TK, gate, up, down]
        y = moe_fused(inputs.hidden_TD, index_TK, inputs.weight_TK, gate, up, down, EXPERTS, TOP_K, dist.group.WORLD)
        by_hidden, by_weight, by_gate, by_up, by_down = torch.autograd.grad(y, given, inputs.upstream_TD)
        return y.detach(), by_hidden, by_weight, torch.cat([by_gate[0], by_up[0]]), by_down[0]

    return run


def products_alone(inputs: Inputs) -> Callable[[], None]:
    pairs = len(inputs.hidden_TD) * TOP_K
    like = inputs.gate_up
    x, h = like.new_empty(pairs, D), like.new_empty(pairs, 2 * FEATURES)
    a = like.new_empty(pairs, FEATURES)
    gate_up, down = inputs.gate_up[0], inputs.down[0]
    by_gate_up, by_down = torch.empty_like(gate_up), torch.empty_like(down)

    def run() -> None:
        torch.mm(x, gate_up.T, out=h)
        torch.mm(a, down.T, out=x)
        torch.mm(x, down, out=a)
        torch.mm(x.T, a, out=by_down)
        torch.mm(h, gate_up, out=x)
        torch.mm(h.T, x, out=by_gate_up)

    return run


def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up) @ down.T


def gathered(local: Tensor) -> Tensor:
    full = local.new_empty((dist.get_world_size() * len(local), *local.shape[1:]))
    dist.all_gather_into_tensor(full, local.detach().contiguous())
    return full


class Truth:
    """In fp64: outputs and gradients of the first tokens, and gradients of the first expert."""

    def __init__(self, inputs: Inputs) -> None:
        gate_up, down = gathered(inputs.gate_up), gathered(inputs.down)
        hidden = inputs.hidden_TD.detach()[:CHECKED].double().requires_grad_()
        weight = inputs.weight_TK.detach()[:CHECKED].double().requires_grad_()
        y = torch.zeros_like(hidden)
        for number in range(EXPERTS):
            token, k = torch.where(inputs.index_TK[:CHECKED] == number)
            part = expert(hidden[token], gate_up[number].double(), down[number].double())
            y = y.index_add(0, token, part * weight[token, k, None])
        by_hidden, by_weight = torch.autograd.grad(y, (hidden, weight), inputs.upstream_TD[:CHECKED].double())
        hidden_GD, index = gathered(inputs.hidden_TD), gathered(inputs.index_TK)
        router, upstream = gathered(inputs.weight_TK), gathered(inputs.upstream_TD)
        token, k = torch.where(index == inputs.first)
        mine = [one[0].double().requires_grad_() for one in (inputs.gate_up, inputs.down)]
        found = expert(hidden_GD[token].double(), *mine) * router[token, k, None].double()
        self.results = (y.detach(), by_hidden, by_weight, *torch.autograd.grad(found, mine, upstream[token].double()))

    def errors(self, found: Results) -> dict[str, float]:
        names = ("output error", "dX error", "router error", "gate and up error", "down error")
        figures = {}
        for name, got, true in zip(names, found, self.results, strict=True):
            seen = got[: len(true)].double()
            squares = torch.stack([(seen - true).square().sum(), true.square().sum()])
            dist.all_reduce(squares)
            figures[name] = float((squares[0] / squares[1]).sqrt())
        return figures


def table(tokens: int, rounds: int) -> list[Row]:
    inputs = Inputs(tokens)
    truth = Truth(inputs)
    torch.cuda.empty_cache()
    steps: dict[str, Step] = {
        "liger_dist": module(inputs, "liger_dist"),
        "transformers, grouped_mm": module(inputs, "auto"),
    }
    if find_spec("liger_cute_kernels"):
        steps[LIGER] = liger(inputs)
    candidates = [Candidate("products alone", products_alone(inputs))]
    candidates += [Candidate(label, step) for label, step in steps.items()]
    problem = f"experts of one layer of {QWEN}, {tokens} tokens of each rank, on {dist.get_world_size()}"
    rows = measure_together(problem, candidates, rounds)
    for row in rows:
        if row.failure:
            continue
        row.figures["ratio"] = row.median_ms / rows[0].median_ms
        if row.name != LIGER:  # It reserves memory outside of torch.
            row.figures["peak MiB"] = row.extra_mib
        if row.name in steps:
            row.figures |= truth.errors(steps[row.name]())
    return rows


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for tokens in TOKENS:
        if given.only not in str(tokens):
            continue
        rows = table(tokens, given.rounds)
        if dist.get_rank() == 0:
            print(rows[0].problem)
            show(rows, ("ratio", "peak MiB", "output error", "dX error", "router error", "down error"))
            save("expert_parallel", rows, given.results)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
