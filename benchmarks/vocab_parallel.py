"""lm_head alone on several GPUs, forward and backward: vocab-parallel, tensor parallel, and an all-gathered weight.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.vocab_parallel

Every process has its own N tokens. Ratios are to the three bare GEMMs of one process's tokens with the whole weight, as
many products as each process computes either way. A time is that of the slowest process. Errors are relative (L2) to
fp64, on 256 rows of each gradient, over all processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist.losses.tensor_parallel import RowShard, vocab_parallel_linear_cross_entropy
from liger_dist.losses.token_exchange import ExchangedRowShard

from .harness import Candidate, Row, arguments, products, save, show
from .linear_cross_entropy import Inputs, Truth, bare_gemms, checked_rows

SHAPES = ((8192, 4096, 128256), (8192, 2048, 128256), (16384, 4096, 128256), (8192, 8192, 128256))
BUDGETS_MIB = (1700, 1024, 700, 512)
LIGER = "Liger, tensor parallel (CuTe)"
Step = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""own tokens' loss and hidden states' gradient, and the mean gradient of own rows over processes"""


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


def vocab_parallel(inputs: Inputs, groups: Groups, budget_mib: int) -> Step:
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

    def run() -> tuple[Tensor, Tensor, Tensor]:
        output = fused_linear_cross_entropy(
            inputs.hidden_TD, local, None, inputs.labels_T, spec=LossSpec(), execution=execution, rows=shard
        )
        by_hidden, by_weight = torch.autograd.grad(output.loss, (inputs.hidden_TD, local))
        return output.loss.detach(), by_hidden, by_weight

    return run


def gathered(inputs: Inputs, dtype: torch.dtype) -> Step:
    """What FSDP2 does with a head of fp32 masters: gathers bf16 rows, and reduces the gradient in ``dtype``."""
    own, largest = rows_of(inputs.weight_VD)
    size, D = dist.get_world_size(), inputs.weight_VD.shape[1]
    local = torch.zeros(largest, D, device=inputs.weight_VD.device)
    local[: own.stop - own.start] = inputs.weight_VD.detach()[own]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        whole = inputs.weight_VD.new_empty((size * largest, D))
        dist.all_gather_into_tensor(whole, local.to(whole.dtype))
        weight = whole[: len(inputs.weight_VD)].detach().requires_grad_()
        output = fused_linear_cross_entropy(
            inputs.hidden_TD, weight, None, inputs.labels_T, spec=LossSpec(), execution=Execution()
        )
        by_hidden, by_weight = torch.autograd.grad(output.loss, (inputs.hidden_TD, weight))
        loss = output.loss.detach()
        # FSDP2 frees the weight before it reduces the gradient.
        del whole, weight, output
        gradient = by_weight.new_zeros((size * largest, D), dtype=dtype)
        gradient[: len(by_weight)] = by_weight
        del by_weight
        reduced = gradient.new_empty((largest, D))
        dist.reduce_scatter_tensor(reduced, gradient, op=dist.ReduceOp.AVG)
        return loss, by_hidden, reduced[: own.stop - own.start].float()

    return run


def tensor_parallel(inputs: Inputs, groups: Groups) -> Step:
    """Builds the loss of tensor parallelism over the all-gathered tokens of all ranks; gradients of hidden states are
    all-reduced in their dtype."""
    own, _ = rows_of(inputs.weight_VD)
    local = inputs.weight_VD.detach()[own].float().requires_grad_()
    shard = RowShard(group=groups.world, start=own.start, vocab_size=len(inputs.weight_VD))
    size, T = dist.get_world_size(), len(inputs.hidden_TD)
    mine = slice(dist.get_rank() * T, (dist.get_rank() + 1) * T)

    spec = LossSpec(outputs=("log_prob",), differentiable=False)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        hidden, labels = gathered_tokens(inputs)
        output = vocab_parallel_linear_cross_entropy(
            hidden, local, None, labels, shard=shard, spec=spec, execution=Execution()
        )
        by_hidden, by_weight = torch.autograd.grad(output.loss, (hidden, local))
        assert output.log_prob is not None
        # The mean over the tokens of all ranks has gradients smaller by their number than that of this rank's tokens.
        return -output.log_prob[mine].mean(), by_hidden[mine] * size, by_weight

    return run


def gathered_tokens(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """All-gathers hidden states and labels of all ranks."""
    size, (T, D) = dist.get_world_size(), inputs.hidden_TD.shape
    hidden, labels = inputs.hidden_TD.new_empty((size * T, D)), inputs.labels_T.new_empty(size * T)
    dist.all_gather_into_tensor(hidden, inputs.hidden_TD.detach())
    dist.all_gather_into_tensor(labels, inputs.labels_T)
    return hidden.requires_grad_(), labels


class LigerTensorParallel:
    """Liger's loss of all processes' tokens, gathered before, and of own rows. Its kernels sum the hidden states'
    gradient over processes in fp32; that of the rows is bf16, and added up in bf16 over blocks of tokens."""

    started = False
    """whether its communication is there"""

    def __init__(self, inputs: Inputs, groups: Groups) -> None:
        self.inputs, self.groups = inputs, groups
        self.own, self.largest = rows_of(inputs.weight_VD)
        self.local = inputs.weight_VD.detach()[self.own].float()
        self.buffers_mib: float | None = None
        """what is taken outside of torch's allocator; None before the first call"""

    def prepare(self) -> None:
        """Reserves the library's buffers, for this problem."""
        from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, configure

        size, (T, D) = dist.get_world_size(), self.inputs.hidden_TD.shape
        if self.own.stop - self.own.start != self.largest or size * self.largest != len(self.inputs.weight_VD):
            raise ValueError(f"{len(self.inputs.weight_VD)} classes are no equal shards on {size} ranks")
        sizes = FusedLinearCrossEntropyConfig(
            max_tokens=size * T, hidden_size=D, local_vocab_size=self.largest, group="tp"
        )
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        if not configure(process_groups={"tp": self.groups.world}, device=device, flsce=sizes):
            raise RuntimeError("Liger has no tensor-parallel kernels for this device")
        LigerTensorParallel.started = True
        torch.cuda.synchronize()
        self.buffers_mib = (free - torch.cuda.mem_get_info()[0]) / 2**20

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        from liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp import (
            LigerFusedLinearScaledCrossEntropyNativeTPFunction,
        )

        if self.buffers_mib is None:
            self.prepare()
        size, T = dist.get_world_size(), len(self.inputs.hidden_TD)
        hidden, labels = gathered_tokens(self.inputs)
        weight = self.local.to(hidden.dtype).requires_grad_()
        # First row, temperature, ignored label, tiles of one sum, entropy.
        rest = (self.own.start, 1.0, -100, 1, False, self.groups.world)
        losses = LigerFusedLinearScaledCrossEntropyNativeTPFunction.apply(hidden, weight, labels, *rest)
        by_hidden, by_weight = torch.autograd.grad(losses.mean(), (hidden, weight))
        mine = slice(dist.get_rank() * T, (dist.get_rank() + 1) * T)
        # The mean over all processes' tokens has gradients smaller by their number than those of own tokens' mean.
        return losses[mine].mean().detach(), by_hidden[mine] * size, by_weight.float()

    def release(self) -> None:
        if self.buffers_mib is not None:
            from liger_cute_kernels import nvshmem

            torch.cuda.synchronize()
            nvshmem.pool_clear_all()

    @classmethod
    def finalize(cls) -> None:
        if cls.started:
            from liger_cute_kernels import nvshmem

            torch.cuda.synchronize()
            nvshmem.finalize()


def errors(truth: Truth, own: slice, found: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Differences from fp64 of all processes together; those of the weight's gradient of each one's own rows."""
    loss, by_hidden, by_weight = found
    here = (truth.rows_V >= own.start) & (truth.rows_V < own.stop)
    pairs = {
        "loss error": (loss, truth.loss),
        "dX error": (by_hidden[truth.rows_T], truth.d_hidden),
        "dW error": (by_weight[truth.rows_V[here] - own.start], truth.d_weight[here]),
    }
    figures = {}
    for name, (got, want) in pairs.items():
        squares = torch.stack([(got.double() - want).square().sum(), want.square().sum()])
        dist.all_reduce(squares)
        figures[name] = float((squares[0] / squares[1]).sqrt())
    return figures


def true_values(inputs: Inputs) -> Truth:
    """Loss and gradient of own tokens in fp64, and the mean gradient of some rows."""
    rows = checked_rows(inputs)
    dist.broadcast(rows, 0)
    truth = Truth(inputs, rows)
    dist.all_reduce(truth.d_weight, op=dist.ReduceOp.AVG)
    return truth


def measure_together(problem: str, candidates: list[Candidate], rounds: int) -> list[Row]:
    """As :func:`benchmarks.harness.measure`, on all processes at once."""
    rows, before = [Row(problem, c.name, c.accuracy) for c in candidates], products()
    times = torch.zeros(len(candidates), rounds, device="cuda")
    for row, candidate in zip(rows, candidates, strict=True):
        try:
            for _ in range(3):
                candidate.run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            candidate.run()
            row.extra_mib = (torch.cuda.max_memory_allocated() - held) / 2**20
        except Exception as error:  # Another library's refusal is a result of the table.
            sentence = " ".join(str(error).split())
            row.failure = f"{type(error).__name__}: {sentence[:160]}"
            print(f"{problem}: {candidate.name}: {sentence}", file=sys.stderr)
    failed = torch.tensor([bool(row.failure) for row in rows], device="cuda", dtype=torch.int32)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    for row, stops in zip(rows, failed.tolist(), strict=True):
        if stops and not row.failure:
            row.failure = "another process failed"
    alive = [index for index, row in enumerate(rows) if not row.failure]
    order = torch.Generator().manual_seed(0)
    for number in range(rounds):
        for index in (alive[i] for i in torch.randperm(len(alive), generator=order).tolist()):
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
    for index, seen in enumerate(times.sort(1).values.tolist()):
        row = rows[index]
        if row.failure:
            continue
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
        truth = true_values(inputs)
        torch.cuda.empty_cache()
        steps: dict[str, Step] = {}
        steps |= {f"vocab_parallel, {budget} MiB": vocab_parallel(inputs, groups, budget) for budget in BUDGETS_MIB}
        steps["gathered, bf16 reduction"] = gathered(inputs, torch.bfloat16)
        steps["gathered, fp32 reduction"] = gathered(inputs, torch.float32)
        steps["tensor_parallel"] = tensor_parallel(inputs, groups)
        liger = LigerTensorParallel(inputs, groups) if find_spec("liger_cute_kernels") else None
        if liger is not None:
            steps[LIGER] = liger
        candidates = [Candidate("three GEMMs", bare_gemms(inputs))]
        candidates += [Candidate(label, step) for label, step in steps.items()]
        rows = measure_together(problem, candidates, given.rounds)
        if liger is not None and liger.buffers_mib is not None:
            rows[-1].extra_mib += liger.buffers_mib
        for row in rows:
            if row.failure:
                continue
            row.figures |= {"ratio": row.median_ms / rows[0].median_ms, "peak MiB": row.extra_mib}
            if row.name in steps:
                row.figures |= errors(truth, rows_of(inputs.weight_VD)[0], steps[row.name]())
        if liger is not None:
            liger.release()
        if dist.get_rank() == 0:
            print(problem)
            show(rows, ("ratio", "peak MiB", "dW error", "dX error", "loss error"))
            save("vocab_parallel", rows, given.results)
        del inputs, candidates, steps, truth, liger
        torch.cuda.empty_cache()
    LigerTensorParallel.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
