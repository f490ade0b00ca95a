"""Times whole training steps of a mixture on several GPUs: FSDP2, and experts on several ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.mixture_step

Twelve layers of Qwen3-30B-A3B by default, as ``liger-dist train`` builds them: fp32 masters, bf16 compute, gradient
clipping and AdamW; random tokens in sequences of 8192. ``ep``: experts shared by all ranks. Ways are built one after
the other, for two of them do not fit.

``balanced``: what experts and attention add starts at zero, so that routers see the embeddings of random tokens, and
each expert has about as many as another. Otherwise as the model's initialization makes them. ``load``: tokens of the
fullest expert over the mean, of all layers and ranks. Exposed: the GPU runs NCCL's kernels alone.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from liger_dist import FSDP2, WrapConfig, wrap
from liger_dist_train.config import TrainConfig
from liger_dist_train.distributed import start
from liger_dist_train.engine import TorchEngine
from liger_dist_train.expert_loads import ExpertLoads
from liger_dist_train.model import read_config, shell
from liger_dist_train.parallel_dims import parallel_dims_of

from .gpu_time import gpu_time
from .harness import Row, arguments, save, show
from .launched import ROOT

SEQUENCE_LENGTH = 8192
WAYS: dict[str, dict[str, Any]] = {
    "fsdp2, layers compiled": {"compile": True},
    "fsdp2": {"compile": False},
    "fsdp2, layers compiled, weights stay gathered": {"compile": True, "reshard_after_forward": False},
    "ep": {"ep": 0},
    "ep, layers compiled": {"ep": 0, "compile": True},
    "ep, transformers' exchange": {"ep": 0},
}
KINDS = {
    "nccl": ("nccl",),
    "attention": ("flash", "fmha", "attn"),
    "products": ("gemm", "nvjet", "cutlass", "grouped", "_product"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
    "copies": ("memcpy", "copy", "cat", "split", "chunk"),
}
"""of kernels, by parts of their names; the first one counts"""


@dataclass(frozen=True)
class Problem:
    """A model and its batch."""

    layers: int
    sequences: int
    """of one GPU, in one micro-batch"""
    balanced: bool

    def __str__(self) -> str:
        tokens = self.sequences * SEQUENCE_LENGTH
        routers = "balanced routers" if self.balanced else "routers as initialized"
        return f"{self.layers} layers of Qwen3-30B-A3B, {tokens} tokens a GPU, {routers}, on {dist.get_world_size()}"


def make_engine(way: str, layers: int, folder: Path) -> TorchEngine:
    """Builds a model and its optimizer as ``liger-dist train`` does."""
    model = json.loads((ROOT / "launch/models/qwen3_30b_a3b.json").read_text()) | {"num_hidden_layers": layers}
    path = folder / "config.json"
    path.write_text(json.dumps(model))
    options = dict(WAYS[way])
    if "ep" in options:
        options["ep"] = dist.get_world_size()
    config = TrainConfig(
        model=str(path),
        data=["-"],
        sequence_length=SEQUENCE_LENGTH,
        strategy="fsdp2",
        learning_rate=1e-6,
        **options,
    )
    dims = parallel_dims_of(config, dist.get_world_size())
    with patch("liger_dist_train.model.wrap", wrap_sharded) if "transformers" in way else nullcontext():
        return TorchEngine(config, dims, shell(config, read_config(path)))


def wrap_sharded(model: Any, strategy: FSDP2, *, config: WrapConfig) -> Any:
    """Wraps a model without storage that transformers has sharded, with its dispatch of tokens."""
    from transformers.distributed import DistributedConfig, initialize_distributed_mesh

    distributed = DistributedConfig(
        fsdp_size=dist.get_world_size(), ep_size=strategy.expert_parallel, fsdp_mixed_precision=True
    )
    _, mesh = initialize_distributed_mesh(distributed)
    sharded = type(model).maybe_distribute_model(model, distributed, mesh)
    # What reads the config later would shard once more.
    del sharded.config.distributed_config
    sharded.to_empty(device="cuda")
    with torch.no_grad():
        for name, tensor in (*sharded.named_parameters(), *sharded.named_buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if "norm" in name:
                local.fill_(1.0)
            else:
                local.normal_(std=sharded.config.initializer_range)
        # The frequencies of rotary embedding.
        sharded._init_weights(sharded.model.rotary_emb)
    return wrap(sharded, "auto", config=config)


def balance(model: Any) -> None:
    """Makes zeros of what each part of a layer adds to the hidden states."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()


def kernel_ms(step: Callable[[], object]) -> dict[str, float]:
    """Busy milliseconds of a step by :data:`KINDS`, which may overlap, and of its dearest kernels."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    events: Any = profiled.profiler.kineto_results.events()
    for event in events:
        if event.device_type().name == "CUDA" and not event.is_user_annotation():
            name = event.name()
            found = (kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts))
            kinds[next(found, "rest")] += event.duration_ns()
            names[name[:90]] += event.duration_ns()
    if dist.get_rank() == 0:
        for name, ns in names.most_common(int(os.environ.get("LIGER_DIST_TOP_KERNELS", "0"))):
            print(f"    {ns * 1e-6:8.2f} ms  {name}")
    return {f"{kind} ms": ns * 1e-6 for kind, ns in kinds.items()}


def run(way: str, engine: TorchEngine, loads: ExpertLoads, problem: Problem, rounds: int) -> Row:
    """Times ``rounds`` steps.

    Args:
        loads: of the engine's model, whose hooks count in each step, as in training.
    """
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    vocab_size: Any = engine.model.config.vocab_size  # type: ignore[union-attr]
    shape = (problem.sequences, SEQUENCE_LENGTH)
    ids: Tensor = torch.randint(vocab_size, shape, device="cuda", generator=generator)
    host: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        engine.backward(engine.model(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.update()
        engine.clear()
        host.append((time.perf_counter() - began) * 1e3)

    loads.read()
    for _ in range(3):
        step()
    load = loads.read()["experts/max_load"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    host.clear()
    for _ in tqdm(range(rounds), desc=f"{problem}: {way}", disable=dist.get_rank() != 0, leave=False):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    seen = sorted(times)
    row = Row(str(problem), way, "", statistics.median(seen), seen[len(seen) // 5], seen[-1 - len(seen) // 5])
    tokens = problem.sequences * SEQUENCE_LENGTH
    gpu = gpu_time(step)
    row.figures = {
        "tokens/s a GPU": tokens / row.median_ms * 1e3,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "host ms": statistics.median(host[:rounds]),
        "computing ms": gpu.computing,
        "exposed ms": gpu.communicating,
        "idle ms": gpu.waiting,
        "load": load,
        **kernel_ms(step),
    }
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 2, 4], help="of each GPU")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    given = parser.parse_args()
    start()
    rows: dict[Problem, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in given.ways.split(";"):
            engine = make_engine(way, given.layers, Path(folder))
            loads = ExpertLoads(engine.model)
            for balanced in (False, True):
                if balanced:
                    balance(engine.model)
                for sequences in given.sequences:
                    problem = Problem(given.layers, sequences, balanced)
                    row = run(way, engine, loads, problem, given.rounds)
                    rows.setdefault(problem, []).append(row)
                    if dist.get_rank() == 0:
                        print(problem)
                        show([row], tuple(row.figures))
                        sys.stdout.flush()
                        save("mixture_step", rows[problem], given.results)
            del engine, loads
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
