"""A tiny language model with a 4-bit base and an adapter, as users load it, and its gradients under a strategy."""

from __future__ import annotations

import functools
import re
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from full_tensors import deepspeed_step, full_gradients
from models import make_batch, make_model, true_loss_sum
from torch import Tensor

import liger_dist
from liger_dist.model.quantized import four_bit_stacks
from liger_dist.sharding.process_groups import compute_device

STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
"""dtypes that bitsandbytes packs two weights of 4 bits into"""


@functools.cache
def folder(family: str, tied: bool) -> str:
    """Rank 0 writes it, as transformers does for all."""
    path = [tempfile.mkdtemp(prefix="liger_dist_quantized_")]
    if dist.is_initialized():
        dist.broadcast_object_list(path)
    make_model(family, tied=tied, dtype=torch.float32).save_pretrained(path[0])  # type: ignore[operator]
    if dist.is_initialized():
        dist.barrier()
    return path[0]


def four_bit(
    family: str = "llama",
    *,
    tied: bool = False,
    kind: str = "nf4",
    double: bool = False,
    storage: torch.dtype = torch.uint8,
    dtype: torch.dtype = torch.float32,
    quantised: bool = True,
    experts: bool = False,
    in_shards: bool = False,
) -> Any:
    """The base; not ``quantised``, it is an ordinary one. With ``experts`` these are of 4 bits, too; ``in_shards`` it
    is loaded by ``sharded_loading``."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    loading = liger_dist.sharded_loading() if in_shards else nullcontext()
    if not quantised:
        with loading:
            return AutoModelForCausalLM.from_pretrained(folder(family, tied), dtype=dtype)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=dtype,
    )
    with liger_dist.four_bit_experts(quantization) if experts else nullcontext(), loading:
        return AutoModelForCausalLM.from_pretrained(
            folder(family, tied), quantization_config=quantization, dtype=dtype, device_map={"": compute_device()}
        )


def adapted(base: dict[str, Any], lora: dict[str, Any], loaded: Any = None) -> Any:
    """With LoRA layers that change the output; on ``loaded``, if it is given."""
    import peft

    model = four_bit(**base) if loaded is None else loaded
    torch.manual_seed(1)
    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False} | lora
    return peft.get_peft_model(model, peft.LoraConfig(**settings), autocast_adapter_dtype=False)


STRATEGIES: dict[str, Any] = {
    "none": lambda: "none",
    "ddp": lambda: "ddp",
    "fsdp2": lambda: "fsdp2",
    "fsdp2, units of two layers": lambda: liger_dist.FSDP2(layers_per_unit=2),
    "fsdp2, replicated": lambda: liger_dist.FSDP2(frozen="replicate"),
    "fsdp2, resharded late": lambda: liger_dist.FSDP2(reshard_after_forward=False),
    "fsdp2, vocab-parallel": lambda: liger_dist.FSDP2(lm_head="vocab_parallel"),
    "fsdp2, offloaded": lambda: liger_dist.FSDP2(cpu_offload=True),
    "fsdp1": lambda: "fsdp1",
    "fsdp1, replicated": lambda: liger_dist.FSDP1(frozen="replicate"),
    "ZeRO-2": lambda: "deepspeed",
    "ZeRO-3": lambda: "deepspeed",
}


def outcome(
    strategy: str, base: dict[str, Any], lora: dict[str, Any], use: dict[str, Any], in_shards: bool = False
) -> str:
    """Returns "exact", the sentence of a refusal, or what is wrong.

    Args:
        base: of :func:`four_bit`.
        lora: of ``LoraConfig``.
        use: "checkpointing", "accumulation" (number of micro-batches), "rows" (of :func:`make_batch`).
        in_shards: True to load the base by ``sharded_loading``.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    micro_batches = use.get("accumulation", 1)
    rows = use.get("rows", "texts")
    batches = [[make_batch(r, num_ignored=2, seed=i, rows=rows) for i in range(micro_batches)] for r in range(ranks)]
    model = _made(base, lora, use)
    reference = in_fp64(model, base, lora)
    total = 0.0
    for batch in (batch for of_rank in batches for batch in of_rank):
        loss_sum, tokens = true_loss_sum(reference, batch)
        loss = loss_sum / tokens / (ranks * micro_batches)
        loss.backward()
        total += float(loss)
    names = by_parameter(reference)
    truth = {names[n]: p.grad for n, p in reference.named_parameters() if p.requires_grad and p.grad is not None}
    names = by_parameter(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if in_shards:
                model = _made(base, lora, use, four_bit(**base, in_shards=True))
            root = liger_dist.wrap(model, STRATEGIES[strategy]())
        except liger_dist.LigerDistError as error:
            return f"refused: {error}"
        losses, found = _step(root, strategy, batches[rank])
        gradients = {names[name]: gradient for name, gradient in found.items()}
    mean = torch.tensor(sum(losses) / micro_batches / ranks, device=compute_device())
    if ranks > 1:
        dist.all_reduce(mean)
    if gradients.keys() != truth.keys():
        return f"wrong: gradients of {sorted(gradients.keys() ^ truth.keys())}"
    errors = {n: float((gradients[n] - true).norm() / true.norm()) for n, true in truth.items()}
    errors["loss"] = abs(float(mean) / total - 1)
    worst = max(errors, key=lambda name: errors[name])
    # Softmax with sinks rounds more.
    if not errors[worst] < (3e-5 if base.get("family") == "gpt_oss" else 1e-5):
        return f"wrong: {worst} by {errors[worst]:.1e}"
    return "exact"


def _made(base: dict[str, Any], lora: dict[str, Any], use: dict[str, Any], loaded: Any = None) -> Any:
    model = adapted(base, lora, loaded).train()
    if use.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def in_fp64(model: Any, base: dict[str, Any], lora: dict[str, Any]) -> Any:
    """Unwrapped, with the same values: ordinary linear layers with the weights that the 4 bits stand for."""
    import peft

    settings = {"r": 2, "target_modules": "all-linear"} | lora
    dense = make_model(base.get("family", "llama"), tied=base.get("tied", False))
    reference = peft.get_peft_model(dense, peft.LoraConfig(**settings), autocast_adapter_dtype=False)
    values, names = dequantized(model), by_parameter(reference)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[names[name]])
    return reference


def dequantized(model: Any) -> dict[str, Tensor]:
    """Values of all parameters by the names of :func:`by_parameter`, those of 4 bits as what they stand for."""
    from bitsandbytes.functional import dequantize_4bit

    stacks = {id(one.packed): one.state for _, _, one in four_bit_stacks(model)}
    names, found = by_parameter(model), {}
    for name, value in model.named_parameters():
        state = getattr(value, "quant_state", None) or stacks.get(id(value))
        found[names[name]] = value if state is None else dequantize_4bit(value.data, state)
    return found


def by_parameter(model: Any) -> dict[str, str]:
    """Names that say which parameter LoRA is on: PEFT nests its modules in another order around quantised experts."""
    found = {}
    for name, _ in model.named_parameters():
        module, _, rest = name.partition(".lora_")
        one = model.get_submodule(module) if rest else None
        on = f".{one.parameter_name}" if hasattr(one, "parameter_name") else ""
        plain = f"{module}{on}" + (f".lora_{rest}" if rest else "")
        found[name] = re.sub(r"(mlp\.experts)(\.base_layer)*", r"\1", plain).replace("parametrizations.", "")
        found[name] = found[name].removesuffix(".original")
    return found


def _step(root: Any, strategy: str, batches: list[dict[str, Any]]) -> tuple[list[float], dict[str, Tensor]]:
    """Loss of each micro-batch, and the gradients."""
    if strategy.startswith("ZeRO"):
        return deepspeed_step(root, batches, stage=int(strategy[-1]))
    losses = []
    for batch in batches:
        loss = root(**batch).loss
        (loss / len(batches)).backward()
        losses.append(float(loss.detach()))
    return losses, full_gradients(root)


def outcomes(cells: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    found = {}
    for name, cell in cells.items():
        try:
            found[name] = outcome(*cell)
        except Exception as error:
            found[name] = f"raises {type(error).__name__}: {error}"
    return found
