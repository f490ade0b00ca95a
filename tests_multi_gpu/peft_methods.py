"""Every method of PEFT that trains a causal language model, on a tiny one, and its gradients under a strategy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import deepspeed_step, full_gradients
from models import make_batch, make_model, relative_errors
from torch import Tensor

import liger_dist

CAUSAL = {"task_type": "CAUSAL_LM"}
TARGETS = CAUSAL | {"target_modules": ["q_proj", "v_proj", "down_proj"]}
PROMPT = CAUSAL | {"num_virtual_tokens": 3}


@dataclass(frozen=True)
class Method:
    """How a method is set up here."""

    config: str
    """name of its config class"""
    settings: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda batch: {}
    """further keywords of a call"""


def _tasks(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"task_ids": torch.arange(len(batch["input_ids"]), device=batch["input_ids"].device) % 2}


def _tuned(config: str, **settings: Any) -> Method:
    return Method(config, TARGETS | settings)


METHODS: dict[str, Method] = {
    "PROMPT_TUNING": Method("PromptTuningConfig", PROMPT),
    "MULTITASK_PROMPT_TUNING": Method("MultitaskPromptTuningConfig", PROMPT | {"num_tasks": 2, "num_ranks": 1}, _tasks),
    "P_TUNING": Method("PromptEncoderConfig", PROMPT | {"encoder_hidden_size": 8}),
    "PREFIX_TUNING": Method("PrefixTuningConfig", PROMPT),
    "CARTRIDGE": Method("CartridgeConfig", PROMPT),
    "CPT": Method(
        "CPTConfig",
        {
            "cpt_token_ids": [1, 2, 3],
            "cpt_mask": [1, 1, 1],
            "cpt_tokens_type_mask": [1, 2, 4],
            "task_type": "CAUSAL_LM",
        },
        lambda batch: {"input_type_mask": torch.full_like(batch["input_ids"], 4)},
    ),
    "ADAPTION_PROMPT": Method(
        "AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 2, "task_type": "CAUSAL_LM"}
    ),
    "LORA": _tuned("LoraConfig", r=2),
    "ADALORA": _tuned("AdaLoraConfig", total_step=100, tinit=10, tfinal=10),
    "BOFT": _tuned("BOFTConfig", boft_block_size=4),
    "IA3": _tuned("IA3Config", feedforward_modules=["down_proj"]),
    "BEFT": Method("BeftConfig", TARGETS | {"target_modules": ["v_proj"]}),
    "LILY": _tuned("LilyConfig", r=2),
    "LOHA": _tuned("LoHaConfig", r=2),
    "LOKR": _tuned("LoKrConfig", r=2),
    "OFT": _tuned("OFTConfig", r=0, oft_block_size=4),
    "POLY": Method("PolyConfig", TARGETS | {"r": 2, "n_tasks": 2, "n_skills": 2}, _tasks),
    "LN_TUNING": Method("LNTuningConfig", {"task_type": "CAUSAL_LM"}),
    "VERA": _tuned("VeraConfig", r=2),
    "FROD": _tuned("FrodConfig", progressbar=False),
    "PVERA": _tuned("PveraConfig", r=2, sample_at_inference=False),
    "FOURIERFT": _tuned("FourierFTConfig", n_frequency=8),
    "GLORA": _tuned("GloraConfig", r=2),
    "HRA": _tuned("HRAConfig", r=2),
    "VBLORA": _tuned("VBLoRAConfig", r=2, num_vectors=8, vector_length=4, topk=2),
    "UNILORA": _tuned("UniLoraConfig", r=2, theta_d_length=16),
    "MISS": _tuned("MissConfig", r=2),
    "RANDLORA": _tuned("RandLoraConfig", r=2),
    "ROAD": _tuned("RoadConfig", group_size=4),
    "TRAINABLE_TOKENS": Method(
        "TrainableTokensConfig",
        {"token_indices": [3, 4, 5], "target_modules": ["embed_tokens"], "task_type": "CAUSAL_LM"},
    ),
    "HIRA": _tuned("HiraConfig", r=2),
    "SHIRA": _tuned("ShiraConfig", r=2),
    "C3A": _tuned("C3AConfig", block_size=8),
    "WAVEFT": _tuned("WaveFTConfig", n_frequency=8),
    "OSF": _tuned("OSFConfig", effective_rank=4),
    "DELORA": _tuned("DeloraConfig", r=2),
    "GRALORA": _tuned("GraloraConfig", r=2, gralora_k=2),
    "TINYLORA": _tuned("TinyLoraConfig", r=2, u=4),
    "PSOFT": _tuned("PsoftConfig", r=2),
    "PEANUT": _tuned("PeanutConfig", r=2),
    "DEFT": _tuned("DeftConfig", r=2),
    "SUPERTUNING": _tuned("SupertuningConfig", r=2),
}
LEFT_OUT = {
    "ADAMSS": "needs scikit-learn",
    "SHADOW": "its gradients differ under plain DDP as well",
    "XLORA": "loads adapters that were trained before",
}
"""methods without a row, with the reason"""

STRATEGIES: dict[str, Callable[[], Any]] = {
    "none": lambda: "none",
    "ddp": lambda: "ddp",
    "fsdp1": lambda: "fsdp1",
    "fsdp2": lambda: "fsdp2",
    "replicated": lambda: liger_dist.FSDP2(frozen="replicate"),
    "vocab_parallel": lambda: liger_dist.FSDP2(lm_head="vocab_parallel"),
    "ZeRO-2": lambda: "deepspeed",
    "ZeRO-3": lambda: "deepspeed",
}


def adapted(name: str, *, tied: bool = False) -> Any:
    """The tiny model under a method, whose trained parameters all have gradients."""
    import peft

    method = METHODS[name]
    model = make_model("llama", tied=tied, dtype=torch.float32)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, getattr(peft, method.config)(**copy.deepcopy(method.settings)))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * on_device.randn(parameter.shape, generator=generator).to(parameter)
    return model


def batch_of(name: str, rank: int) -> dict[str, Any]:
    batch = make_batch(rank, num_ignored=2)
    return batch | METHODS[name].batch(batch)


def true_gradients(name: str, ranks: int, *, tied: bool = False) -> dict[str, Tensor]:
    """Of the unwrapped model on the tokens of all ranks."""
    model = adapted(name, tied=tied)
    for rank in range(ranks):
        torch.manual_seed(rank)
        (model(**batch_of(name, rank)).loss / ranks).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def outcome(name: str, strategy: str, *, tied: bool = False) -> str:
    """Returns "exact", the sentence of a refusal, what is wrong, or "as unwrapped" where PEFT itself fails."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    truth = true_gradients(name, ranks, tied=tied)
    model = adapted(name, tied=tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            root = liger_dist.wrap(model, STRATEGIES[strategy]())
        except liger_dist.LigerDistError as error:
            return f"refused: {error}"
        torch.manual_seed(rank)
        if strategy.startswith("ZeRO"):
            batch, stage = batch_of(name, rank), int(strategy[-1])
            try:
                _, gradients = deepspeed_step(root, [batch], stage=stage)
            except Exception as error:
                with pytest.raises(type(error)):
                    deepspeed_step(adapted(name, tied=tied), [batch], stage=stage)
                return f"as unwrapped: {type(error).__name__}"
        else:
            root(**batch_of(name, rank)).loss.backward()
            gradients = full_gradients(root)
    if gradients.keys() != truth.keys():
        return f"wrong: gradients of {sorted(gradients.keys() ^ truth.keys())}"
    for n, error in relative_errors(gradients, truth, floor=1e-3).items():
        if not error < 1e-4:
            return f"wrong: {n} by {error:.1e}"
    return "exact"


def outcomes(name: str, strategies: list[str]) -> dict[str, str]:
    """:func:`outcome` of each strategy, or the error of another library."""
    found = {}
    for strategy in strategies:
        try:
            found[strategy] = outcome(name, strategy)
        except Exception as error:
            found[strategy] = f"raises {type(error).__name__}: {error}"
    return found
