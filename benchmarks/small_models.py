"""Times steps of small models, and the host in them: forward, backward and optimizer.

    python -m torch.distributed.run --standalone --nproc-per-node 1 -m benchmarks.small_models
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.small_models --sharding fsdp2

All ways are in memory together and take turns, a few steps each, in an order drawn anew in every round: a host that
becomes slower does so for all of them. ``--ways`` names some, where not all fit. bf16 weights on one GPU; under FSDP2
fp32 masters, bf16 compute and fp32 reduction. Fused AdamW and clipping are torch's, and for liger_dist under FSDP2
those of ``liger-dist train``. LoRA: rank 16 on all linear layers, the frozen weights shared by all ways.

``--ways`` also takes a budget of liger_dist's buffer for logits, ``liger_dist, 256 MiB``, and under FSDP2 the layers of
a unit, ``liger_dist, 4 layers a unit`` and ``Hugging Face, 4 layers a unit``; without, liger_dist decides.

``host ms``: the time until the call returns, from an empty queue. ``kernels``: launches of one step.
"""

from __future__ import annotations

import gc
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

import liger_dist
from liger_dist_train.optimizer import ShardedAdamW

from .gpu_time import gpu_time
from .harness import Row, arguments, save, show

Sharding = Literal["none", "fsdp2"]
STEPS = 2
"""steps of one way in a round"""


@dataclass(frozen=True)
class Shape:
    """A model and its micro-batch."""

    model_type: str
    """of transformers, with Liger's suffix"""
    config: dict[str, Any]
    tokens: int
    """of one GPU, in two sequences; with LoRA in one"""
    has_lora: bool = False


_LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, Shape] = {
    "Qwen3-0.6B": Shape(
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        4096,
    ),
    "Gemma3-270M": Shape(
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
        4096,
    ),
    "Llama-3.2-1B": Shape(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        4096,
    ),
    "SmolLM2-135M": Shape(
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        4096,
    ),
    "8 layers of 2048, untied": Shape(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        4096,
    ),
    "Llama 8B, LoRA": Shape("llama", _LLAMA_8B, 1024, has_lora=True),
}
TOKENS_UNDER_FSDP2 = 8192
WAYS = (
    "liger_dist",
    "liger_dist, layers compiled",
    "Hugging Face",
    "Hugging Face, layers compiled",
    "Liger, all kernels",
)


@dataclass
class Training:
    """One way to train one model, and what was seen of it."""

    model: Any
    update: Callable[[], object]
    patched: dict[str, Any]
    """transformers' module of the model as this way has it: Liger replaces functions there"""
    steps_ms: list[float] = field(default_factory=list)
    host_ms: list[tuple[float, float, float]] = field(default_factory=list)
    loss: Tensor | None = None
    peak_gib: float = float("nan")

    def step(self, ids: Tensor) -> tuple[float, float, float, float]:
        """Makes a step; returns when it began, and when forward, backward and update had returned."""
        began = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.update()
        self.loss = loss.detach()
        return began, forward, backward, time.perf_counter()

    def run(self, ids: Tensor, module: Any) -> None:
        """Times :data:`STEPS` steps that follow each other, the host in the first of them."""
        vars(module).update(self.patched)
        if dist.get_world_size() > 1:
            dist.barrier()
        torch.cuda.synchronize()
        times = [self.step(ids) for _ in range(STEPS)]
        torch.cuda.synchronize()
        self.steps_ms.append((time.perf_counter() - times[0][0]) / STEPS * 1e3)
        began, forward, backward, updated = times[0]
        self.host_ms.append(((forward - began) * 1e3, (backward - forward) * 1e3, (updated - backward) * 1e3))


def make_model(shape: Shape, sharding: Sharding, frozen: dict[str, Tensor]) -> nn.Module:
    """Builds a model with the same random weights each time; with LoRA its frozen ones are those of the first call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(shape.model_type, **shape.config)
    torch.manual_seed(0)
    dtype = torch.float32 if sharding == "fsdp2" else torch.bfloat16
    with torch.device("meta" if frozen else "cuda"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not shape.has_lora:
        return model
    if frozen:
        model.to_empty(device="cpu")
        # Buffers are computed, as from_pretrained does.
        with torch.device("cuda"):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)  # type: ignore[union-attr]
        model.load_state_dict(frozen, assign=True)
    else:
        frozen.update(model.state_dict())
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return adapted.cuda()


def make_training(way: str, shape: Shape, sharding: Sharding, frozen: dict[str, Tensor], module: Any) -> Training:
    """Builds one way to train."""
    model: Any = make_model(shape, sharding, frozen)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_compiled, is_ours = "compiled" in way, way.startswith("liger_dist")
    per_unit = re.search(r"(\d+) layers? a unit", way)
    if way.startswith("Liger"):
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{shape.model_type}")(model=base)
    if is_ours:
        budget = re.search(r"(\d+) MiB", way)
        config = liger_dist.WrapConfig(memory_budget=None if budget is None else int(budget[1]) * 2**20)
        if sharding == "fsdp2":
            strategy: Any = liger_dist.FSDP2(
                param_dtype=torch.bfloat16,
                compile_layers=is_compiled,
                layers_per_unit="auto" if per_unit is None else int(per_unit[1]),
            )
        else:
            strategy = "none"
            if is_compiled:
                liger_dist.compile_layers(model)
        model = liger_dist.wrap(model, strategy, config=config)
    else:
        for layer in base.model.layers if is_compiled else ():
            layer.compile()
        if sharding == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            number, layers = 1 if per_unit is None else int(per_unit[1]), list(base.model.layers)
            for start in range(0, len(layers), number):
                fully_shard(layers[start : start + number], mp_policy=policy)
            fully_shard(model, mp_policy=policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = (ShardedAdamW if is_ours and sharding == "fsdp2" else torch.optim.AdamW)(trained, lr=1e-5, fused=True)
    clip = liger_dist.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_

    def update() -> None:
        clip(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, update, dict(vars(module)))


def rows_of(problem: str, shape: Shape, sharding: Sharding, ways: list[str], rounds: int) -> list[Row]:
    """Builds all ways, warms them up and lets them take turns."""
    name = shape.model_type.removesuffix("_text")
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["modeling"])
    own, frozen = dict(vars(module)), dict[str, Tensor]()
    tokens = TOKENS_UNDER_FSDP2 if sharding == "fsdp2" else shape.tokens
    sequences = 1 if shape.has_lora else 2
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    vocab_size = shape.config["vocab_size"]
    ids = torch.randint(vocab_size, (sequences, tokens // sequences), device="cuda", generator=generator)
    trainings: dict[str, Training] = {}
    for way in tqdm(ways, desc=f"{problem}: warm-up", disable=dist.get_rank() != 0):
        vars(module).update(own)
        shared = sum(tensor.nbytes for tensor in frozen.values())
        before = torch.cuda.memory_allocated() - shared
        training = trainings[way] = make_training(way, shape, sharding, frozen, module)
        for _ in range(4):
            training.step(ids)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        training.step(ids)
        torch.cuda.synchronize()
        training.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        torch.cuda.empty_cache()
    # Python's garbage collection goes through what is there: that of a single way, in training.
    gc.collect()
    gc.freeze()
    draw = random.Random(0)
    for _ in tqdm(range(rounds), desc=problem, disable=dist.get_rank() != 0):
        for way in draw.sample(ways, len(ways)):
            trainings[way].run(ids, module)
    rows = []
    for way, training in trainings.items():
        seen = sorted(training.steps_ms)
        row = Row(problem, way, "", statistics.median(seen), seen[len(seen) // 5], seen[-1 - len(seen) // 5])
        vars(module).update(training.patched)
        gpu = gpu_time(lambda training=training: training.step(ids))  # type: ignore[misc]
        parts = [statistics.median(column) for column in zip(*training.host_ms, strict=True)]
        row.figures = dict(zip(("forward host ms", "backward host ms", "update host ms"), parts, strict=True))
        row.figures |= {"GPU busy ms": gpu.computing + gpu.communicating, "kernels": gpu.kernels}
        row.figures |= {"peak GiB": training.peak_gib, "loss": float(training.loss)}  # type: ignore[arg-type]
        rows.append(row)
    vars(module).update(own)
    gc.unfreeze()
    torch._dynamo.reset()
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sharding", choices=get_args(Sharding), default="none")
    parser.add_argument("--ways", help="ways to train, separated by semicolons; default: all")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ways = given.ways.split(";") if given.ways else list(WAYS)
    where = "on one GPU" if given.sharding == "none" else f"FSDP2 on {dist.get_world_size()} GPUs"
    for name, shape in SHAPES.items():
        if given.only not in name or (shape.has_lora and given.sharding == "fsdp2"):
            continue
        tokens = TOKENS_UNDER_FSDP2 if given.sharding == "fsdp2" else shape.tokens
        rows = rows_of(f"{name}, {tokens} tokens, {where}", shape, given.sharding, ways, given.rounds)
        if dist.get_rank() == 0:
            print(rows[0].problem)
            show(rows, tuple(rows[0].figures))
            sys.stdout.flush()
            save("small_models", rows, given.results)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
