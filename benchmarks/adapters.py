"""Times LoRA steps on a frozen base of 16 or 4 bits, on one GPU and under FSDP2.

    python -m torch.distributed.run --standalone --nproc-per-node 1 -m benchmarks.adapters
    python -m torch.distributed.run --standalone --nproc-per-node 1 -m benchmarks.adapters --four_bits
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.adapters --sharding fsdp2

Llama's 8B shape with random weights: LoRA of rank 16 on all linear layers of the decoder, 2 x 2048 tokens on each GPU,
bf16, without activation checkpointing; forward, backward, clipping and fused AdamW. All ways share the frozen weights
and take turns, a few steps each. 4 bits: nf4 with double quantisation, quantised on the GPU, lm_head and embedding in
bf16. Under FSDP2 the peers' ways are those of PyTorch's documentation: each layer, then the root.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import liger_dist

from .gpu_time import gpu_time
from .harness import Row, arguments, save, show
from .small_models import Training
from .training_ways import SHAPES, VOCAB_SIZE

TOKENS = (2, 2048)
BF16 = torch.bfloat16
Bases = tuple[dict[str, Tensor], dict[str, Any]]
"""frozen tensors of 16 bits, and weights of 4 bits"""
WAYS = {
    "none": (
        "liger_dist",
        "liger_dist, layers compiled",
        "PEFT + Liger",
        "PEFT",
        "PEFT, layers compiled",
        "liger_dist, fp32 adapters",
        "PEFT + Liger, fp32 adapters",
        "PEFT, fp32 adapters",
    ),
    "none, 4 bits": (
        "liger_dist, 4 bits",
        "liger_dist, 4 bits, layers compiled",
        "PEFT + Liger, 4 bits",
        "PEFT, 4 bits",
        "PEFT, 4 bits, layers compiled",
        "liger_dist, 4 bits, fp32 adapters",
        "PEFT, 4 bits, fp32 adapters",
    ),
    "fsdp2": (
        "liger_dist",
        "liger_dist, replicated",
        "liger_dist, replicated, per layer",
        "PEFT + Liger",
        "liger_dist, 4 bits",
        "liger_dist, replicated, 4 bits",
    ),
}


def make_model(
    layers: int, frozen: dict[str, Tensor], packed: dict[str, Any], *, four_bit: bool, fp32_adapters: bool = False
) -> Any:
    """A base with LoRA layers, in bf16 unless ``fp32_adapters``, PEFT's default; its frozen tensors are those of the
    first call."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB_SIZE, **(SHAPES["Llama 8B"] | {"num_hidden_layers": layers}))
    torch.manual_seed(0)
    with torch.device("meta" if frozen else "cuda"):
        model: Any = LlamaForCausalLM._from_config(config, dtype=BF16)
    if frozen:
        model.to_empty(device="cpu")
        with torch.device("cuda"):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        model.load_state_dict(frozen, assign=True)
    else:
        frozen.update(model.state_dict())
    if four_bit:
        quantize(model.model, packed)
        model.is_loaded_in_4bit = True
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=fp32_adapters).cuda()


def quantize(decoder: nn.Module, packed: dict[str, Any]) -> None:
    """Replaces the linear layers of a decoder by those of bitsandbytes, with the weights in ``packed``."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, linear in [(n, m) for n, m in decoder.named_modules() if isinstance(m, nn.Linear)]:
        options = {"compute_dtype": BF16, "quant_type": "nf4", "compress_statistics": True}
        layer = Linear4bit(linear.in_features, linear.out_features, bias=False, device="meta", **options)
        if name not in packed:
            weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
            packed[name] = weight.to("cuda")
        weight = packed[name]
        layer.weight = Params4bit(
            weight.data, quant_state=weight.quant_state, quant_type="nf4", module=layer, bnb_quantized=True
        )
        layer.quant_state = weight.quant_state
        decoder.set_submodule(name, layer)


class PerLayer(liger_dist.FSDP2):
    """Puts the LoRA layers of each decoder layer into one group, also beside replicated weights."""

    def has_own_group(self, *parts: nn.Module) -> bool:
        return True


def make_training(way: str, model: Any, sharding: str, module: Any) -> Training:
    base = model.get_base_model()
    is_compiled = "compiled" in way
    if "Liger" in way:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=base)
    if way.startswith("liger_dist"):
        strategy: Any = "none"
        if sharding == "fsdp2":
            frozen: Any = "replicate" if "replicated" in way else "shard"
            kind = PerLayer if "per layer" in way else liger_dist.FSDP2
            strategy = kind(param_dtype=BF16, frozen=frozen, compile_layers=is_compiled)
        elif is_compiled:
            liger_dist.compile_layers(model)
        model = liger_dist.wrap(model, strategy)
    else:
        for layer in base.model.layers if is_compiled else ():
            layer.compile()
        if sharding == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
            for part in (*base.model.layers, model):
                fully_shard(part, mp_policy=policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    clip = liger_dist.clip_grad_norm_ if way.startswith("liger_dist") else nn.utils.clip_grad_norm_

    def update() -> None:
        clip(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, update, dict(vars(module)))


def warmed_up(way: str, layers: int, sharding: str, module: Any, bases: Bases, ids: Tensor) -> Training:
    """Builds one way and makes five steps, of which the last one has its peak of memory measured."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make_model(layers, *bases, four_bit="4 bits" in way, fp32_adapters="fp32 adapters" in way)
    # Weights that all ways share were there before; those of this way count in full.
    shared = sum({p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}.values())
    training = make_training(way, model, sharding, module)
    held = {p.data_ptr() for p in training.model.parameters() if not isinstance(p.data, DTensor)}
    is_shared = sharding == "none" or len(held & {tensor.data_ptr() for tensor in bases[0].values()}) > 1
    for step in range(5):
        if step == 4:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        training.step(ids)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before + (shared if is_shared else 0)
    training.peak_gib = peak / 2**30
    return training


def row_of(problem: str, way: str, training: Training, ids: Tensor) -> Row:
    seen = sorted(training.steps_ms)
    row = Row(problem, way, "", statistics.median(seen), seen[len(seen) // 5], seen[-1 - len(seen) // 5])
    gpu = gpu_time(lambda: training.step(ids))
    parts = [statistics.median(column) for column in zip(*training.host_ms, strict=True)]
    row.figures = dict(zip(("forward host ms", "backward host ms", "update host ms"), parts, strict=True))
    row.figures |= {"GPU busy ms": gpu.computing, "NCCL alone ms": gpu.communicating, "idle ms": gpu.waiting}
    row.figures |= {"kernels": gpu.kernels, "peak GiB": training.peak_gib}
    row.figures["loss"] = float(training.loss)  # type: ignore[arg-type]
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sharding", choices=["none", "fsdp2"], default="none")
    parser.add_argument("--four_bits", action="store_true", help="on one GPU: a base of 4 bits")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ways", help="ways to train, separated by semicolons; default: all")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    from transformers.models.llama import modeling_llama as module

    own, bases = dict(vars(module)), (dict[str, Tensor](), dict[str, Any]())
    if given.four_bits and given.sharding != "none":
        parser.error("--four_bits is for one GPU; the ways under FSDP2 have both bases")
    suffix = ", 4 bits" if given.four_bits else ""
    ways = given.ways.split(";") if given.ways else WAYS[given.sharding + suffix]
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    ids = torch.randint(VOCAB_SIZE, TOKENS, device="cuda", generator=generator)
    where = "one GPU" if given.sharding == "none" else f"FSDP2 on {dist.get_world_size()} GPUs"
    problem = f"LoRA on {given.layers} layers of Llama 8B, 2 x 2048 tokens, {where}{suffix}"
    make_model(given.layers, *bases, four_bit=False)
    if any("4 bits" in way for way in ways):
        make_model(given.layers, *bases, four_bit=True)
    trainings: dict[str, Training] = {}
    for way in tqdm(ways, desc=f"{problem}: warm-up", disable=dist.get_rank() != 0):
        vars(module).update(own)
        trainings[way] = warmed_up(way, given.layers, given.sharding, module, bases, ids)
    gc.collect()
    gc.freeze()
    draw = random.Random(0)
    for _ in tqdm(range(given.rounds), desc=problem, disable=dist.get_rank() != 0):
        for way in draw.sample(list(ways), len(ways)):
            trainings[way].run(ids, module)
    rows = []
    for way, training in trainings.items():
        vars(module).update(training.patched)
        rows.append(row_of(problem, way, training, ids))
    if dist.get_rank() == 0:
        print(problem)
        show(rows, tuple(rows[0].figures))
        save("adapters", rows, given.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
