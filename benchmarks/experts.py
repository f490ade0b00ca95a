"""Times mixtures of experts on one GPU: steps of four layers of released shapes, one layer's experts alone, and LoRA on
experts.

    python -m benchmarks.experts

Random weights in bf16, 8192 tokens, forward and backward without an optimizer. ``kept MiB``: what the
experts' forward keeps for the backward. Candidates of a problem share their weights and one GPU, and take turns.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import liger_dist

from .gpu_time import gpu_time
from .harness import Candidate, arguments, measure, save, show

LAYERS = 4
QWEN, GPT_OSS = "Qwen3-30B-A3B", "gpt-oss-20b"
QWEN_SIZES: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
TOKENS = (2, 4096)
EAGER_TOKENS = (8, 1024)
"""the eager function of attention has all scores of a sequence in memory"""


def config_of(shape: str) -> Any:
    from transformers import GptOssConfig, Qwen3MoeConfig

    if shape == GPT_OSS:
        return GptOssConfig(num_hidden_layers=LAYERS, num_local_experts=32)
    return Qwen3MoeConfig(**QWEN_SIZES)


def make_model(shape: str, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(
            config_of(shape), dtype=torch.bfloat16, attn_implementation=attention
        )
    return model.train()


def with_same_weights(model: Any) -> Any:
    """A copy whose parameters are those of the model."""
    memo = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo)


def ours(model: Any, *, compiled: bool) -> Any:
    model = with_same_weights(model)
    if compiled:
        liger_dist.compile_layers(model)
    return liger_dist.wrap(model, "none")


def hugging_face(model: Any) -> Any:
    model = with_same_weights(model)
    for layer in model.model.layers:
        layer.compile()
    return model


def step(model: Any, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def steps(shape: str, rounds: int, attention: str = "sdpa") -> list[Any]:
    """Full steps, beside Hugging Face's with compiled layers."""
    model = make_model(shape, attention)
    ids = torch.randint(model.config.vocab_size, EAGER_TOKENS if attention == "eager" else TOKENS, device="cuda")
    models = {
        "Hugging Face, layers compiled": hugging_face(model),
        "liger_dist, layers compiled": ours(model, compiled=True),
        "liger_dist": ours(model, compiled=False),
    }
    for name, one in models.items():
        with torch.no_grad():
            print(f"{shape}, {name}: loss {float(one(input_ids=ids, labels=ids, use_cache=False).loss):.5f}")
    candidates = [Candidate(name, partial(step, one, ids)) for name, one in models.items()]
    rows = measure(f"{shape}, {LAYERS} layers, {attention}, 8192 tokens", candidates, rounds=rounds)
    by_name = {row.name: row.median_ms for row in rows}
    for row in rows:
        row.figures["GPU ms"] = gpu_time(partial(step, models[row.name], ids)).computing
        row.figures["GiB"] = row.extra_mib / 1024
        row.figures["of Hugging Face"] = row.median_ms / by_name["Hugging Face, layers compiled"]
    return rows


def with_lora(shape: str, *, on_experts: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    if on_experts:
        settings["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(make_model(shape), LoraConfig(**settings), autocast_adapter_dtype=False)


def lora(rounds: int) -> list[Any]:
    """LoRA on the projections of attention, without and with LoRA on experts."""
    plain, experts = with_lora(QWEN, on_experts=False), with_lora(QWEN, on_experts=True)
    ids = torch.randint(151936, TOKENS, device="cuda")
    models = {
        "liger_dist": ours(plain, compiled=False),
        "liger_dist, LoRA on experts": ours(experts, compiled=False),
        "liger_dist, layers compiled": ours(plain, compiled=True),
        "liger_dist, LoRA on experts, layers compiled": ours(experts, compiled=True),
    }
    candidates = [Candidate(name, partial(step, one, ids)) for name, one in models.items()]
    rows = measure(f"{QWEN}, {LAYERS} layers, LoRA of rank 16, 8192 tokens", candidates, rounds=rounds)
    by_name = {row.name: row.median_ms for row in rows}
    for row in rows:
        row.figures["GiB"] = row.extra_mib / 1024
        is_compiled = row.name.endswith("compiled")
        row.figures["of without"] = row.median_ms / by_name["liger_dist" + ", layers compiled" * is_compiled]
    return rows


def layer(shape: str, rounds: int) -> list[Any]:
    """The experts of one layer."""
    model = make_model(shape, "sdpa" if shape == QWEN else "eager")
    own = model.model.layers[0].mlp.experts
    wrapped = ours(model, compiled=False).model.layers[0].mlp.experts
    compiled = with_same_weights(model).model.layers[0].mlp.experts
    compiled.compile()
    T, E, K = 8192, own.num_experts, model.config.num_experts_per_tok
    x = torch.randn(T, model.config.hidden_size, device="cuda").bfloat16().requires_grad_()
    weight, index = torch.topk(torch.randn(T, E, device="cuda").softmax(-1), K)
    weight = (weight / weight.sum(-1, keepdim=True)).bfloat16().requires_grad_()
    d_y = torch.randn_like(x)
    found: dict[str, Callable[..., Tensor]] = {
        "transformers, grouped_mm": own,
        "transformers, grouped_mm, compiled": compiled,
        "liger_dist": wrapped,
    }
    if find_spec("liger_kernel") and shape == QWEN:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        found["Liger, fused MoE"] = lambda x, index, weight: LigerFusedMoEFunction.apply(
            x, own.gate_up_proj, own.down_proj, index.int(), weight
        )
    leaves = [x, weight, *own.parameters()]
    kept: dict[str, float] = {}
    candidates = []
    for name, run in found.items():
        candidates.append(
            Candidate(name, lambda run=run: torch.autograd.grad(run(x, index, weight), leaves, d_y))  # type: ignore[misc]
        )
        try:
            kept[name] = kept_mib(lambda run=run: run(x, index, weight))  # type: ignore[misc]
        except Exception as error:  # Another library's refusal is a result of the table.
            print(f"{name}: {error}")
    rows = measure(f"experts of one layer of {shape}, 8192 tokens", candidates, rounds=rounds)
    for row in rows:
        row.figures["kept MiB"] = kept.get(row.name, float("nan"))
        row.figures["GiB"] = row.extra_mib / 1024
    return rows


def kept_mib(run: Callable[[], Tensor]) -> float:
    """What a forward keeps, without its result."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = run()
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before - y.numel() * y.element_size()) / 2**20


PROBLEMS: dict[str, Callable[[int], list[Any]]] = {
    "layer of Qwen3": partial(layer, QWEN),
    "layer of gpt-oss": partial(layer, GPT_OSS),
    "steps of Qwen3": partial(steps, QWEN),
    "LoRA": lora,
    "steps of gpt-oss, flex": partial(steps, GPT_OSS, attention="flex_attention"),
    "steps of gpt-oss, eager": partial(steps, GPT_OSS, attention="eager"),
}


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    for name, problem in PROBLEMS.items():
        if given.only in name:
            rows = problem(given.rounds)
            show(rows, ("GPU ms", "kept MiB", "GiB", "of Hugging Face", "of without"))
            save("experts", rows, given.results)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
