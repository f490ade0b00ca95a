"""Models of the whole-step benchmarks, and the ways to train them: this library's, Liger's and Hugging Face's, under
FSDP2, FSDP1, ZeRO-3, and on one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

import liger_dist

Sharding = Literal["fsdp2", "fsdp1", "zero3", "none"]
OptimizerName = Literal["adamw", "adamw_8bit"]
VOCAB_SIZE, SEQUENCE_LENGTH, SEQUENCES = 128256, 4096, 2
_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 8B": _8B,
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
    "16 layers of 4096, untied": _8B | {"num_hidden_layers": 16},
    "8 layers of 4096, LoRA": _8B | {"num_hidden_layers": 8},
}


@dataclass(frozen=True)
class Training:
    """A sharded model with its backward and optimizer step."""

    model: Any
    backward: Callable[[Tensor], object]
    update: Callable[[], object]
    close: Callable[[], object] = lambda: None
    """destroys the framework's engine"""

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        self.backward(loss)
        self.update()
        return loss.detach()


Shard = Callable[[Any], Any]
Way = Callable[[Any], Training]


def make_model(name: str) -> Any:
    """The model of a shape; with LoRA in bf16, rank 16 on all linear layers."""
    model = make_llama(SHAPES[name], vocab_size=VOCAB_SIZE)
    if "LoRA" not in name:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model.bfloat16(), lora, autocast_adapter_dtype=False)


def make_llama(shape: dict[str, Any], *, vocab_size: int) -> nn.Module:
    """Random fp32 weights on the GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **shape))
    return model


@contextmanager
def restored_transformers() -> Iterator[None]:
    """Restores transformers' Llama module after Liger's patches."""
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    try:
        yield
    finally:
        vars(modeling_llama).update(before)


def ways(sharding: Sharding, optimizer: OptimizerName = "adamw") -> dict[str, Way]:
    """Every way under one sharding that is installed, by the name of its row. ZeRO-3 has ``"adamw"`` alone."""
    train = by_deepspeed if sharding == "zero3" else partial(by_torch, name=optimizer)
    found: dict[str, Shard] = dict(_OURS[sharding])
    peers: dict[str, dict[str, bool]] = {"Hugging Face": {}}
    if sharding != "zero3":
        # DeepSpeed's hooks break the graph of every layer.
        peers["Hugging Face, layers compiled"] = {"compiled": True}
    if sharding == "fsdp2" and find_spec("torchao"):
        peers["Hugging Face, layers compiled, float8"] = {"compiled": True, "float8": True}
    if find_spec("liger_kernel"):
        peers["Liger, all kernels"] = {"liger": True}
    found |= {name: by_hand(sharding, **options) for name, options in peers.items()}
    return {name: partial(_trained, shard, train) for name, shard in found.items()}


def _trained(shard: Shard, train: Way, model: Any) -> Training:
    return train(shard(model))


def ours(strategy: Any, *, budget_mib: int | None = None, compiled: bool = False) -> Shard:
    def wrap(model: Any) -> Any:
        if compiled:
            liger_dist.compile_layers(model)
        config = liger_dist.WrapConfig(memory_budget=None if budget_mib is None else budget_mib * 2**20)
        return liger_dist.wrap(model, strategy, config=config)

    return wrap


def fsdp2(lm_head: Literal["gather", "vocab_parallel"], *, budget_mib: int | None = None, **options: Any) -> Shard:
    strategy = liger_dist.FSDP2(param_dtype=torch.bfloat16, lm_head=lm_head, **options)
    return ours(strategy, budget_mib=budget_mib)


_OURS: dict[Sharding, dict[str, Shard]] = {
    "fsdp2": {
        "liger_dist, gather": fsdp2("gather"),
        "liger_dist, vocab_parallel": fsdp2("vocab_parallel"),
        "liger_dist, vocab_parallel, 512 MiB": fsdp2("vocab_parallel", budget_mib=512),
        "liger_dist, gather, layers compiled": fsdp2("gather", compile_layers=True),
        "liger_dist, vocab_parallel, layers compiled": fsdp2("vocab_parallel", compile_layers=True),
        "liger_dist, gather, float8 tensorwise": fsdp2("gather", float8="tensorwise"),
        "liger_dist, vocab_parallel, float8 tensorwise": fsdp2("vocab_parallel", float8="tensorwise"),
        "liger_dist, gather, float8 rowwise": fsdp2("gather", float8="rowwise"),
    },
    "fsdp1": {
        "liger_dist": ours(liger_dist.FSDP1(param_dtype=torch.bfloat16)),
        "liger_dist, layers compiled": ours(liger_dist.FSDP1(param_dtype=torch.bfloat16, compile_layers=True)),
    },
    "zero3": {"liger_dist": ours("deepspeed")},
    "none": {"liger_dist": ours("none"), "liger_dist, layers compiled": ours("none", compiled=True)},
}
assert set(_OURS) == set(get_args(Sharding))


def by_hand(sharding: Sharding, *, compiled: bool = False, float8: bool = False, liger: bool = False) -> Shard:
    """As the documentation of FSDP has it: each layer, then the root. float8 as torchao's has it: all linear layers of
    the decoder, tensorwise, with float8 all-gathers."""

    def shard(model: Any) -> Any:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=base)
        if float8:
            _to_float8(base)
        if compiled:
            for layer in base.model.layers:
                layer.compile()
        return _sharded(model, base.model.layers, sharding)

    return shard


def _to_float8(model: Any) -> None:
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    convert_to_float8_training(model.model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    model.register_forward_pre_hook(lambda module, *_: precompute_float8_dynamic_scale_for_fsdp(module))


def _sharded(model: Any, layers: Any, sharding: Sharding) -> Any:
    if sharding == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*layers, model):
            fully_shard(layer, mp_policy=policy)
    if sharding == "fsdp1":
        kinds = {type(layer) for layer in layers}
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=torch.distributed.fsdp.wrap.ModuleWrapPolicy(kinds),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            device_id=torch.cuda.current_device(),
            use_orig_params=True,
        )
    return model


def by_torch(model: Any, *, name: OptimizerName) -> Training:
    """AdamW of torch, or torchao's with 8-bit states, and clipping of torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(name)(trained, lr=1e-4)
    clip = getattr(model, "clip_grad_norm_", None) or (lambda norm: nn.utils.clip_grad_norm_(trained, norm))

    def update() -> None:
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, Tensor.backward, update)


def _optimizer(name: OptimizerName) -> Callable[..., Any]:
    if name == "adamw":
        return torch.optim.AdamW
    from torchao.optim import AdamW8bit

    kind: Callable[..., Any] = AdamW8bit
    return kind


def by_deepspeed(model: Any) -> Training:
    """ZeRO-3 with torch's AdamW."""
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return Training(engine, engine.backward, engine.step, engine.destroy)
