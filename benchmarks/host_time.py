"""Profiles the host's time of a training step by library.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.host_time --sharding fsdp2

What the GPU does in a step (see :mod:`.gpu_time`), and whose Python code the host runs meanwhile, by samples of all
threads' stacks. A sample belongs to the innermost frame that has an owner: a GEMM that a linear layer of the model
issues belongs to the model, also where a layer of ours called it. While autograd's C++ runs between Python's hooks, a
sample belongs to autograd.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from tqdm import tqdm

from .gpu_time import gpu_time
from .harness import Row, arguments, save, show
from .training_step import batch
from .training_ways import SHAPES, Sharding, Training, Way, make_model, restored_transformers, ways

OWNERS: dict[str, tuple[str, ...]] = {
    "Triton": ("/triton/",),
    "liger_dist": ("/liger_dist/", "/liger_dist_kernels/"),
    "Liger": ("/liger_kernel/",),
    "optimizer": ("/torch/optim/", "/torch/nn/utils/clip_grad.py"),
    "DeepSpeed": ("/deepspeed/",),
    "FSDP": ("/torch/distributed/",),
    "compiled code": ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "torchinductor_"),
    "model": ("/transformers/", "/peft/", "/torch/nn/"),
    "waits": ("/torch/cuda/",),
    "autograd": ("/torch/autograd/graph.py",),
}
"""parts of the paths of source files, in the order in which they are looked for"""
TITLES: dict[Sharding, str] = {"fsdp2": "FSDP2", "fsdp1": "FSDP1", "zero3": "ZeRO-3", "none": "not sharded"}
_SAMPLE_S = 2e-4


def owner_of(frame: Any) -> str | None:
    """The owner of the innermost frame that has one."""
    while frame is not None:
        path = frame.f_code.co_filename
        for owner, parts in OWNERS.items():
            if any(part in path for part in parts):
                return owner
        frame = frame.f_back
    return None


def host_samples(step: Callable[[], object], steps: int) -> Counter[str]:
    """Counts owners over ``steps`` calls. In a backward the thread of autograd counts before the one that waits for
    it."""
    counts: Counter[str] = Counter()
    done = threading.Event()

    def sample() -> None:
        me = threading.get_ident()
        while not done.wait(_SAMPLE_S):
            owners = {owner_of(frame) for thread, frame in sys._current_frames().items() if thread != me}
            working = [owner for owner in OWNERS if owner in owners]
            counts[working[0] if working else "other"] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    finally:
        done.set()
        sampler.join()
        sys.setswitchinterval(interval)
    return counts


def step_ms(step: Callable[[], object], rounds: int) -> float:
    """The median; the steps follow each other, as in training."""
    torch.cuda.synchronize()
    seen = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seen.append((time.perf_counter() - began) * 1e3)
    return statistics.median(seen)


def row_of(problem: str, name: str, way: Way, shape: str, rounds: int) -> Row:
    """What GPU and host do in one step."""
    with restored_transformers():
        training: Training = way(make_model(shape))
        ids, labels = batch(shape)
        for _ in range(4):
            training.step(ids, labels)
        row = Row(problem, name, "", median_ms=step_ms(lambda: training.step(ids, labels), rounds))
        gpu = gpu_time(lambda: training.step(ids, labels))
        counts = host_samples(lambda: training.step(ids, labels), 3)
        training.close()
    row.figures = {
        "computing ms": gpu.computing,
        "communicating ms": gpu.communicating,
        "waiting ms": gpu.waiting,
        "kernels": gpu.kernels,
    }
    row.figures |= {f"host: {owner} %": 100 * count / counts.total() for owner, count in counts.most_common()}
    torch._dynamo.reset()
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sharding", choices=get_args(Sharding), default="fsdp2")
    parser.add_argument("--ways", help="implementations to run, separated by semicolons; default: all")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    found = ways(given.sharding)
    chosen = {name: found[name] for name in (given.ways.split(";") if given.ways else found)}
    suffix = f", {TITLES[given.sharding]}, on {dist.get_world_size()}"
    for shape in (shape for shape in SHAPES if given.only in shape and "LoRA" not in shape):
        problem, rows = shape + suffix, []
        for name, way in tqdm(chosen.items(), desc=problem, disable=dist.get_rank() != 0):
            rows.append(row_of(problem, name, way, shape, given.rounds))
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(problem)
            show(rows, tuple(dict.fromkeys(figure for row in rows for figure in row.figures)))
            save("host_time", rows, given.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
