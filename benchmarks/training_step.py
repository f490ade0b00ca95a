"""Whole training steps on several GPUs: forward, backward, clipping and AdamW of Llamas under FSDP2.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.training_step

bf16 compute, fp32 masters and reduction. Each way is built, warmed up and timed by itself, then all of them once more
in the opposite order; a figure is the median over both. Peak memory is that of the process with the most.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_dist

from .harness import Row, arguments, save, show

SHAPES: dict[str, dict[str, Any]] = {
    "Llama 8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B, tied": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8 layers of 2048, untied": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
VOCAB_SIZE, SEQUENCE_LENGTH, SEQUENCES = 128256, 4096, 2


def sharded_by_hand(model: Any, *, compiled: bool = False, float8: bool = False) -> Any:
    """As the documentation of FSDP2 has it: each layer, then the root. float8 as torchao's has it: all linear layers of
    the decoder, tensorwise, with float8 all-gathers."""
    if float8:
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        convert_to_float8_training(model.model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
        model.register_forward_pre_hook(lambda module, *_: precompute_float8_dynamic_scale_for_fsdp(module))
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def liger(model: Any) -> Any:
    """Changes transformers' module as well as the model: :func:`run` puts it back."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return sharded_by_hand(model)


def ours(
    lm_head: Literal["gather", "vocab_parallel"], *, budget_mib: int | None = None, **options: Any
) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        config = liger_dist.WrapConfig(memory_budget=None if budget_mib is None else budget_mib * 2**20)
        strategy = liger_dist.FSDP2(param_dtype=torch.bfloat16, lm_head=lm_head, **options)
        return liger_dist.wrap(model, strategy, config=config)

    return wrap


WAYS: dict[str, Callable[[Any], Any]] = {
    "liger_dist, gather": ours("gather"),
    "liger_dist, vocab_parallel": ours("vocab_parallel"),
    "liger_dist, vocab_parallel, 512 MiB": ours("vocab_parallel", budget_mib=512),
    "liger_dist, vocab_parallel, layers compiled": ours("vocab_parallel", compile_layers=True),
    "liger_dist, gather, layers compiled": ours("gather", compile_layers=True),
    "liger_dist, gather, float8 tensorwise": ours("gather", float8="tensorwise"),
    "liger_dist, gather, float8 rowwise": ours("gather", float8="rowwise"),
    "Hugging Face": sharded_by_hand,
    "Hugging Face, layers compiled": lambda model: sharded_by_hand(model, compiled=True),
    "Hugging Face, layers compiled, float8": lambda model: sharded_by_hand(model, compiled=True, float8=True),
}
if find_spec("liger_kernel"):
    WAYS["Liger, all kernels"] = liger


@dataclass
class Seen:
    """Of one way, in both passes."""

    step_ms: list[float]
    peak_gib: float
    loss: float


def run(way: Callable[[Any], Any], shape: dict[str, Any], steps: int) -> Seen:
    """Builds, warms up, and times; transformers' module is as before afterwards."""
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    try:
        return _run(way, shape, steps)
    finally:
        vars(modeling_llama).update(before)


def _run(way: Callable[[Any], Any], shape: dict[str, Any], steps: int) -> Seen:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        built: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **shape))
    model: Any = way(built)
    del built
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    ids = torch.randint(VOCAB_SIZE, (SEQUENCES, SEQUENCE_LENGTH), device="cuda", generator=generator)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    slowest = torch.tensor(times, device="cuda")
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return Seen(step_ms=slowest.tolist(), peak_gib=float(peak), loss=float(loss))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ways", help="implementations to run, separated by semicolons; default: all")
    given = parser.parse_args()
    ways = {way: WAYS[way] for way in (given.ways.split(";") if given.ways else WAYS)}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for name, shape in SHAPES.items():
        if given.only not in name:
            continue
        problem = f"{name}, on {dist.get_world_size()}"
        rows = {way: Row(problem, way, "") for way in ways}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for way in (*ways, *reversed(ways)):
            seen = run(WAYS[way], shape, given.rounds)
            times[way] += seen.step_ms
            rows[way].figures |= {"peak GiB": seen.peak_gib, "loss": seen.loss}
            # Nothing of one way is there when the next one is built.
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
        tokens = SEQUENCES * SEQUENCE_LENGTH * dist.get_world_size()
        for way, row in rows.items():
            seen_ms = sorted(times[way])
            row.median_ms = statistics.median(seen_ms)
            row.p20_ms, row.p80_ms = seen_ms[len(seen_ms) // 5], seen_ms[-1 - len(seen_ms) // 5]
            row.figures["tokens/s"] = tokens / row.median_ms * 1e3
        if dist.get_rank() == 0:
            print(problem)
            show(list(rows.values()), ("tokens/s", "peak GiB", "loss"))
            save("training_step", list(rows.values()), given.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
