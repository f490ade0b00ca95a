"""Whole training steps: forward, backward, clipping and AdamW of Llamas under FSDP2, FSDP1, ZeRO-3 or on one GPU.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.training_step --sharding fsdp2

bf16 compute, fp32 masters and reduction. Each way is built, warmed up and timed by itself, then all of them once more
in the opposite order; a figure is the median over both. Times and peak memory are the maximum over ranks. The time
that the GPU computes is the union of all kernels but NCCL's, by torch's profiler, in steps that are not timed: beside a
step's time it shows whether the host or the links are what a step waits for. DeepSpeed keeps memory of engines that
are destroyed: its peak is that of the first way alone, so give each way a process (``--ways``) to read it.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from tqdm import tqdm

from .gpu_time import computing_ms
from .harness import Row, arguments, save, show
from .training_ways import (
    SEQUENCE_LENGTH,
    SEQUENCES,
    SHAPES,
    VOCAB_SIZE,
    OptimizerName,
    Sharding,
    Way,
    make_model,
    restored_transformers,
    ways,
)

_WARMUPS = 4
_TITLES: dict[Sharding, str] = {"fsdp2": "", "fsdp1": ", FSDP1", "zero3": ", ZeRO-3", "none": ", not sharded"}
"""of a problem; FSDP2 is what the others are compared with"""


@dataclass
class Seen:
    """Of one way in one pass."""

    step_ms: list[float]
    peak_gib: float
    computing_ms: float
    loss: float


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and labels of a rank; with LoRA the first half of each sequence is a prompt without labels."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    ids = torch.randint(VOCAB_SIZE, (SEQUENCES, SEQUENCE_LENGTH), device="cuda", generator=generator)
    labels = ids.clone()
    if "LoRA" in name:
        labels[:, : SEQUENCE_LENGTH // 2] = -100
    return ids, labels


def run(way: Way, name: str, steps: int) -> Seen:
    """Builds, warms up, and times; transformers' module is as before afterwards."""
    with restored_transformers():
        training = way(make_model(name))
        ids, labels = batch(name)
        for _ in range(_WARMUPS):
            training.step(ids, labels)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = training.step(ids, labels)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
        busy = computing_ms(lambda: training.step(ids, labels))
        training.close()
    largest = torch.tensor([*times, peak_gib], device="cuda")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    *slowest, peak = largest.tolist()
    return Seen(slowest, peak, busy, float(loss))


def rows_of(name: str, problem: str, chosen: dict[str, Way], steps: int) -> list[Row]:
    """Runs all ways, there and back."""
    rows = {way: Row(problem, way, "") for way in chosen}
    times: dict[str, list[float]] = {way: [] for way in chosen}
    order = (*chosen, *reversed(chosen))
    for way in tqdm(order, desc=problem, disable=dist.get_rank() != 0):
        seen = run(chosen[way], name, steps)
        times[way] += seen.step_ms
        rows[way].figures |= {"peak GiB": seen.peak_gib, "loss": seen.loss, "computing ms": seen.computing_ms}
        # Nothing of one way is there when the next one is built.
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    if "ZeRO-3" in problem and len(chosen) > 1:
        for row in rows.values():
            del row.figures["peak GiB"]
    tokens = SEQUENCES * SEQUENCE_LENGTH * dist.get_world_size()
    for way, row in rows.items():
        seen_ms = sorted(times[way])
        row.median_ms = statistics.median(seen_ms)
        row.p20_ms, row.p80_ms = seen_ms[len(seen_ms) // 5], seen_ms[-1 - len(seen_ms) // 5]
        row.figures["tokens/s"] = tokens / row.median_ms * 1e3
    return list(rows.values())


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sharding", choices=get_args(Sharding), default="fsdp2")
    parser.add_argument("--optimizer", choices=get_args(OptimizerName), default="adamw")
    parser.add_argument("--ways", help="implementations to run, separated by semicolons; default: all")
    given = parser.parse_args()
    if given.sharding == "zero3" and given.optimizer != "adamw":
        parser.error(f"--optimizer {given.optimizer} is not available with --sharding zero3")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    all_ways = ways(given.sharding, given.optimizer)
    chosen = {way: all_ways[way] for way in (given.ways.split(";") if given.ways else all_ways)}
    for name in SHAPES:
        if given.only not in name:
            continue
        kind = _TITLES[given.sharding] + (", AdamW with 8-bit states" if given.optimizer == "adamw_8bit" else "")
        rows = rows_of(name, f"{name}{kind}, on {dist.get_world_size()}", chosen, given.rounds)
        if dist.get_rank() == 0:
            print(rows[0].problem)
            show(rows, ("tokens/s", "peak GiB", "computing ms", "loss"))
            save("training_step", rows, given.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
