"""Trains a Llama of 8 billion parameters for some steps with Accelerate or DeepSpeed, on one sequence over all ranks;
prints a line of JSON for each step. :mod:`benchmarks.long_context` starts it.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.long_context_peers cp 65536 3
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .training_ways import SHAPES, VOCAB_SIZE, make_llama

Batch = dict[str, Tensor]


def batch(length: int, step: int) -> Batch:
    """The same random sequence on all ranks, its labels shifted."""
    generator = torch.Generator("cuda").manual_seed(step)
    ids = torch.randint(256, (1, length), device="cuda", generator=generator)
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    return {"input_ids": ids, "shift_labels": labels, "position_ids": torch.arange(length, device="cuda")[None]}


def build(length: int, *, swiglu: bool) -> Any:
    """Makes the model with Liger's kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model: Any = make_llama({**SHAPES["Llama 8B"], "max_position_embeddings": length}, vocab_size=VOCAB_SIZE)
    apply_liger_kernel_to_llama(model=model, swiglu=swiglu)
    return model.train()


def context_parallel(length: int) -> Callable[[Batch], Tensor]:
    """Accelerate with ``cp_size`` under FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig
    from torchao.optim import AdamW8bit

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        mixed_precision="bf16",
        fsdp_plugin=plugin,
        parallelism_config=ParallelismConfig(cp_size=int(os.environ["WORLD_SIZE"])),
    )
    model = build(length, swiglu=True)
    model, optimizer = accelerator.prepare(model, AdamW8bit(model.parameters(), lr=3e-4))

    def step(inputs: Batch) -> Tensor:
        buffers = list(inputs.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
            loss: Tensor = model(**inputs, labels=inputs["shift_labels"], use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def alst(length: int) -> Callable[[Batch], Tensor]:
    """DeepSpeed's Ulysses and tiled MLP under ZeRO-3."""
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, UlyssesSPAttentionHF
    from torchao.optim import AdamW8bit
    from transformers.models.llama import modeling_llama

    def mlp(self: Any, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down

    def tiled(self: Any, x: Tensor) -> Tensor:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        output: Tensor = TiledMLP.apply(mlp, self, x, math.ceil(x.shape[1] / x.shape[2]), weights)
        return output

    deepspeed.init_distributed()
    modeling_llama.LlamaMLP.forward = tiled
    model = build(length, swiglu=False).bfloat16()
    model.gradient_checkpointing_enable()
    ranks = dist.get_world_size()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=ranks,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "sequence_parallel_size": ranks,
        "steps_per_print": 10**9,
    }
    optimizer = AdamW8bit(model.parameters(), lr=3e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)

    def step(inputs: Batch) -> Tensor:
        shards = {name: x.chunk(ranks, 1)[dist.get_rank()].contiguous() for name, x in inputs.items()}
        loss: Tensor = engine(**shards, labels=shards["shift_labels"], use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def main() -> None:
    name, length, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    step = {"cp": context_parallel, "alst": alst}[name](length)
    torch.cuda.empty_cache()
    for number in range(steps):
        inputs = batch(length, number)
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step(inputs)
        torch.cuda.synchronize()
        seen = torch.tensor([time.perf_counter() - began, torch.cuda.max_memory_allocated()], device="cuda")
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(json.dumps({"ms": float(seen[0]) * 1e3, "peak GiB": float(seen[1]) / 2**30}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
