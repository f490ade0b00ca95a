"""The head alone on several GPUs, forward and backward: a vocab-parallel lm_head against a gathered weight.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.vocab_parallel

Every process has its own N tokens. Ratios are to the three bare GEMMs of one process's tokens with the whole weight, as
many products as each process computes either way. A time is that of the slowest process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist.losses.token_exchange import ExchangedRowShard

from .harness import Candidate, Row, arguments, products, save, show
from .linear_cross_entropy import Inputs, bare_gemms, relative

SHAPES = ((8192, 4096, 128256), (8192, 2048, 128256), (16384, 4096, 128256), (8192, 8192, 128256))
BUDGETS_MIB = (1700, 1024, 700, 512)


class Groups:
    """Communicators of one benchmark."""

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.tokens: Any = dist.new_group()
        self.hosts: Any = dist.new_group(backend="gloo")


def rows_of(weight_VD: Tensor) -> tuple[slice, int]:
    """This process's rows, and how many the largest shard has."""
    largest = -(-len(weight_VD) // dist.get_world_size())
    start = min(dist.get_rank() * largest, len(weight_VD))
    return slice(start, min(start + largest, len(weight_VD))), largest


def vocab_parallel(inputs: Inputs, groups: Groups, budget_mib: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """A loss by token exchange; fp32 masters, so that their gradient is summed in fp32."""
    own, _ = rows_of(inputs.weight_VD)
    local = inputs.weight_VD.detach()[own].float().requires_grad_()
    shard = ExchangedRowShard(
        group=groups.world,
        tokens_group=groups.tokens,
        counting_group=groups.hosts,
        start=own.start,
        vocab_size=len(inputs.weight_VD),
        divide_factor=float(dist.get_world_size()),
    )
    execution = Execution(memory_budget=budget_mib * 2**20)

    def run() -> tuple[Tensor, Tensor]:
        output = fused_linear_cross_entropy(
            inputs.hidden_TD, local, None, inputs.labels_T, spec=LossSpec(), execution=execution, rows=shard
        )
        _, gradient = torch.autograd.grad(output.loss, (inputs.hidden_TD, local))
        return output.loss.detach(), gradient

    return run


def gathered(inputs: Inputs, dtype: torch.dtype) -> Callable[[], tuple[Tensor, Tensor]]:
    """What FSDP2 does with a head of fp32 masters: gathers bf16 rows, and reduces the gradient in ``dtype``."""
    own, largest = rows_of(inputs.weight_VD)
    size, D = dist.get_world_size(), inputs.weight_VD.shape[1]
    local = torch.zeros(largest, D, device=inputs.weight_VD.device)
    local[: own.stop - own.start] = inputs.weight_VD.detach()[own]

    def run() -> tuple[Tensor, Tensor]:
        whole = inputs.weight_VD.new_empty((size * largest, D))
        dist.all_gather_into_tensor(whole, local.to(whole.dtype))
        weight = whole[: len(inputs.weight_VD)].detach().requires_grad_()
        output = fused_linear_cross_entropy(
            inputs.hidden_TD, weight, None, inputs.labels_T, spec=LossSpec(), execution=Execution()
        )
        _, by_weight = torch.autograd.grad(output.loss, (inputs.hidden_TD, weight))
        loss = output.loss.detach()
        # FSDP2 frees the weight before it reduces the gradient.
        del whole, weight, output
        gradient = by_weight.new_zeros((size * largest, D), dtype=dtype)
        gradient[: len(by_weight)] = by_weight
        del by_weight
        reduced = gradient.new_empty((largest, D))
        dist.reduce_scatter_tensor(reduced, gradient, op=dist.ReduceOp.AVG)
        return loss, reduced[: own.stop - own.start].float()

    return run


def measure_together(problem: str, candidates: list[Candidate], rounds: int) -> list[Row]:
    """As :func:`benchmarks.harness.measure`, on all processes at once."""
    rows, before = [Row(problem, c.name, c.accuracy) for c in candidates], products()
    times = torch.zeros(len(candidates), rounds, device="cuda")
    for index, candidate in enumerate(candidates):
        for _ in range(3):
            candidate.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        candidate.run()
        rows[index].extra_mib = (torch.cuda.max_memory_allocated() - held) / 2**20
    order = torch.Generator().manual_seed(0)
    for number in range(rounds):
        for index in torch.randperm(len(candidates), generator=order).tolist():
            before()
            # No rank is timed while it waits for another rank's products; the hosts run ahead.
            dist.all_reduce(torch.zeros(1, device="cuda"))
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            candidates[index].run()
            end.record()
            torch.cuda.synchronize()
            times[index, number] = start.elapsed_time(end)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    for row, seen in zip(rows, times.sort(1).values.tolist(), strict=True):
        row.median_ms, row.p20_ms, row.p80_ms = (seen[rounds * share // 100] for share in (50, 20, 80))
    return rows


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    groups = Groups()
    for shape in SHAPES:
        problem = "x".join(map(str, shape)) + f" on {dist.get_world_size()}"
        if given.only not in problem:
            continue
        inputs = Inputs.random(*shape)
        # The same weight everywhere, other tokens.
        torch.manual_seed(1 + dist.get_rank())
        inputs.hidden_TD.data.normal_()
        inputs.labels_T.random_(0, shape[2])
        steps = {f"vocab_parallel, {budget} MiB": vocab_parallel(inputs, groups, budget) for budget in BUDGETS_MIB}
        steps["gathered, bf16 reduction"] = gathered(inputs, torch.bfloat16)
        steps["gathered, fp32 reduction"] = gathered(inputs, torch.float32)
        candidates = [Candidate("three GEMMs", bare_gemms(inputs))]
        candidates += [Candidate(label, step) for label, step in steps.items()]
        rows = measure_together(problem, candidates, given.rounds)
        true_loss, true_gradient = steps["gathered, fp32 reduction"]()
        for row in rows:
            row.figures |= {"ratio": row.median_ms / rows[0].median_ms, "peak MiB": row.extra_mib}
            if row.name in steps:
                loss, gradient = steps[row.name]()
                row.figures["loss difference"] = relative(loss, true_loss)
                row.figures["dW difference"] = relative(gradient, true_gradient)
        if dist.get_rank() == 0:
            print(problem)
            show(rows, ("ratio", "peak MiB", "loss difference", "dW difference"))
            save("vocab_parallel", rows, given.results)
        del inputs, candidates, steps, true_loss, true_gradient
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
