"""Settings of the measured tables, for ``liger_dist_train.time_plan``: rows of ``benchmarks/results`` that its rates
are fitted to, and rows that are held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from liger_dist_train.config import TrainConfig
from liger_dist_train.layer_work import BF16
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.time_plan import CARDS, RATES, Rates, StepShape, TimePlan, predict, step_shape

from .experts import QWEN_SIZES as MIXTURE
from .harness import RESULTS
from .small_models import SHAPES as SMALL
from .training_ways import SHAPES, VOCAB_SIZE

LLAMA_8B, LLAMA_1B, EIGHT = (SHAPES[name] for name in ("Llama 8B", "Llama-3.2-1B, tied", "8 layers of 2048, untied"))
QWEN3, GEMMA3 = (SMALL[name].config for name in ("Qwen3-0.6B", "Gemma3-270M"))
FOREACH = 84 + 12
"""bytes of a parameter in torch's AdamW and clipping that are not fused: eight operations in turn, and two"""
IN_BF16 = 7 * BF16 + BF16
"""of fused AdamW and the norm where weights, gradients and moments are in bf16"""
NO_UPDATE = 0


@dataclass(frozen=True)
class Setting:
    """A row of a table, and what the program would have to be given for it."""

    file: str
    problem: str
    way: str
    shape: dict[str, Any]
    model_type: str = "llama"
    sequences: int = 2
    tokens: int = 8192
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    has_lora: bool = False
    update: int | None = None
    """bytes of a parameter that is updated; None for those of the program"""
    fits: bool = False
    """the rates are fitted to this row"""

    @property
    def name(self) -> str:
        return f"{self.problem}: {self.way}"

    @property
    def card(self) -> str:
        return next(card for card in CARDS if card in _results(self.file)[self.problem]["environment"]["gpu"])

    @property
    def row(self) -> Any:
        rows = {row["name"]: row for row in _results(self.file)[self.problem]["rows"]}
        return rows[self.way]

    @property
    def seconds(self) -> float:
        """What was measured."""
        return float(self.row["median_ms"]) * 1e-3

    @property
    def computing(self) -> float | None:
        """What the GPU computed, where it is alone and that was measured."""
        figure = None if self.ranks > 1 else self.row["figures"].get("GPU busy ms")
        return None if figure is None else float(figure) * 1e-3

    def predicted(self, rates: Rates = RATES) -> TimePlan:
        return predict(self.step, CARDS[self.card], rates)

    @property
    def step(self) -> StepShape:
        """Counts the step; one GPU's weights are in bf16 there, and the program's under autocast."""
        return _steps()[self.name]


@cache
def _results(file: str) -> Any:
    return json.loads((RESULTS / f"{file}.json").read_text())


@cache
def _steps() -> dict[str, StepShape]:
    return {setting.name: _step(setting) for setting in SETTINGS}


def _step(setting: Setting) -> StepShape:
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.for_model(setting.model_type, **({"vocab_size": VOCAB_SIZE} | setting.shape))
    config = TrainConfig(
        dtype="bfloat16",
        batch_size=setting.sequences,
        sequence_length=setting.tokens // setting.sequences,
        lora_rank=16 if setting.has_lora else 0,
        **setting.options,
    )
    dims = parallel_dims_of(config, setting.ranks)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
        if setting.has_lora:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    # As FSDP2 on one rank: without autocast.
    alone = replace(dims, strategy="fsdp2") if setting.ranks == 1 else dims
    found = step_shape(config, alone, model, model_config)
    if setting.update is not None:
        numbers = sum(p.numel() for p in model.parameters() if p.requires_grad) / setting.ranks
        found = replace(found, update_bytes=setting.update * numbers)
    return found


def _small(name: str, shape: dict[str, Any], ways: Sequence[str], *, fits: bool, **more: Any) -> list[Setting]:
    ranks = more.get("ranks", 1)
    where = f"FSDP2 on {ranks} GPUs" if ranks > 1 else "on one GPU"
    tokens, card = more.pop("tokens", 8192 if ranks > 1 else 4096), more.pop("card", "")
    found = []
    for way in ways:
        options: dict[str, Any] = {"strategy": "fsdp2" if ranks > 1 else "none", "compile": "compiled" in way}
        if " a unit" in way:
            options["layers_per_unit"] = int(way.split(", ")[-1].split()[0])
        update = None if ranks > 1 else IN_BF16
        problem = f"{name}, {tokens} tokens, {where}" + (f", {card}" if card else "")
        found.append(
            Setting(
                "small_models", problem, way, shape, tokens=tokens, options=options, update=update, fits=fits, **more
            )
        )
    return found


def _steps_of(problem: str, shape: dict[str, Any], way: str, *, fits: bool = False, **options: Any) -> Setting:
    given = {"strategy": "fsdp2", "compile": "compiled" in way} | options
    if given["strategy"] == "fsdp2":
        given["layers_per_unit"] = 1
    if "vocab_parallel" in way:
        given["lm_head"] = "vocab_parallel"
    ranks = int(problem[-1])
    return Setting("training_step", problem, way, shape, ranks=ranks, options=given, update=FOREACH, fits=fits)


def _large(ranks: int, way: str, *, fits: bool = False) -> Setting:
    options: dict[str, Any] = {"strategy": "fsdp2", "compile": "compiled" in way}
    if way == "zero3":
        options = ZERO3
    if "vocab-parallel" in way:
        options["lm_head"] = "vocab_parallel"
    if "checkpointing" in way:
        options["activation_checkpointing"] = True
    problem = f"Llama 8B, on {ranks}"
    return Setting("large_model", problem, way, LLAMA_8B, sequences=1, ranks=ranks, options=options, fits=fits)


def _adapters(layers: int, way: str, where: str = "one GPU", *, fits: bool = False) -> Setting:
    ranks = 2 if "FSDP2" in where else 1
    options: dict[str, Any] = {"strategy": "fsdp2" if ranks > 1 else "none", "compile": "compiled" in way}
    if "4 bits" in way:
        options |= {"load_in_4bit": True, "compile": None}
    if "replicated" in way:
        options["frozen"] = "replicate"
    return Setting(
        "adapters",
        f"LoRA on {layers} layers of Llama 8B, 2 x 2048 tokens, {where}",
        way,
        LLAMA_8B | {"num_hidden_layers": layers},
        tokens=4096,
        ranks=ranks,
        options=options,
        has_lora=True,
        update=IN_BF16,
        fits=fits,
    )


def _experts(problem: str, model_type: str, shape: dict[str, Any], *, fits: bool) -> list[Setting]:
    ways = ("liger_dist, layers compiled", "liger_dist")
    return [
        Setting(
            "experts",
            problem,
            way,
            shape,
            model_type,
            options={"strategy": "none", "compile": "compiled" in way},
            update=NO_UPDATE,
            fits=fits,
        )
        for way in ways
    ]


def _mixtures() -> list[Setting]:
    """Steps of a mixture on two GPUs."""
    ways: dict[str, dict[str, Any]] = {
        "fsdp2, layers compiled": {},
        "fsdp2, layers compiled, weights stay gathered": {"reshard_after_forward": False},
        "ep": {"ep": 2},
    }
    return [
        Setting(
            "mixture_step",
            f"12 layers of Qwen3-30B-A3B, {8192 * sequences} tokens a GPU, balanced routers, on 2",
            way,
            MIXTURE | {"num_hidden_layers": 12},
            "qwen3_moe",
            sequences=sequences,
            tokens=8192 * sequences,
            ranks=2,
            options={"strategy": "fsdp2"} | options,
        )
        for sequences in (1, 2, 4)
        for way, options in ways.items()
    ]


ZERO3: dict[str, Any] = {"strategy": "deepspeed", "deepspeed": "launch/deepspeed/zero3.json"}
COMPILED, EAGER = "liger_dist, layers compiled", "liger_dist"
ONE_A_UNIT = "liger_dist, layers compiled, 1 layer a unit"
OF_1B = "Llama-3.2-1B, tied"
UNTIED = "8 layers of 2048, untied"
SETTINGS: tuple[Setting, ...] = (
    *_small("Qwen3-0.6B", QWEN3, (COMPILED, EAGER), model_type="qwen3", fits=True),
    *_small("Llama-3.2-1B", LLAMA_1B, (COMPILED, EAGER), card="H100", fits=True),
    *_small("Llama-3.2-1B", LLAMA_1B, (COMPILED, EAGER), fits=False),
    *_small("Llama 8B, LoRA", LLAMA_8B, (COMPILED, EAGER), tokens=1024, sequences=1, has_lora=True, fits=True),
    *_small("Gemma3-270M", GEMMA3, (COMPILED, EAGER), model_type="gemma3_text", card="H100", fits=False),
    *_small("Gemma3-270M", GEMMA3, (COMPILED, EAGER), model_type="gemma3_text", fits=False),
    *_small(UNTIED, EIGHT, (ONE_A_UNIT, COMPILED, EAGER), ranks=2, fits=True),
    *_small(
        "Qwen3-0.6B",
        QWEN3,
        (ONE_A_UNIT, COMPILED, "liger_dist, layers compiled, 14 layers a unit", EAGER),
        model_type="qwen3",
        ranks=2,
        fits=True,
    ),
    *_small(
        "Llama-3.2-1B",
        LLAMA_1B,
        (ONE_A_UNIT, COMPILED, "liger_dist, layers compiled, 4 layers a unit", EAGER),
        ranks=2,
        fits=False,
    ),
    *_small("Gemma3-270M", GEMMA3, (COMPILED, EAGER), model_type="gemma3_text", ranks=2, fits=False),
    _large(2, "fsdp2", fits=True),
    _large(2, "fsdp2, vocab-parallel", fits=True),
    _large(2, "fsdp2, vocab-parallel, layers compiled"),
    _large(2, "fsdp2, vocab-parallel, activation checkpointing"),
    _large(2, "zero3"),
    _large(4, "fsdp2"),
    _large(4, "fsdp2, vocab-parallel"),
    _large(4, "fsdp2, vocab-parallel, layers compiled"),
    _large(4, "fsdp2, vocab-parallel, activation checkpointing"),
    _large(4, "zero3"),
    _steps_of(
        "16 layers of 4096, untied, bf16 and float8, on 2",
        LLAMA_8B | {"num_hidden_layers": 16},
        "liger_dist, gather",
        fits=True,
    ),
    _steps_of(f"{UNTIED}, FSDP1, on 2", EIGHT, EAGER, strategy="fsdp1", fits=True),
    _steps_of(f"{UNTIED}, ZeRO-3, on 2", EIGHT, EAGER, **ZERO3, fits=True),
    _steps_of("Llama 8B, compiled and float8, on 2", LLAMA_8B, "liger_dist, gather"),
    _steps_of("Llama 8B, compiled and float8, on 2", LLAMA_8B, "liger_dist, gather, layers compiled"),
    _steps_of(f"{OF_1B}, on 2", LLAMA_1B, "liger_dist, gather"),
    _steps_of(f"{OF_1B}, on 2", LLAMA_1B, "liger_dist, vocab_parallel"),
    _steps_of(f"{OF_1B}, layers compiled, on 2", LLAMA_1B, "liger_dist, gather, layers compiled"),
    _steps_of(f"{OF_1B}, layers compiled, H100, on 2", LLAMA_1B, "liger_dist, gather, layers compiled"),
    _steps_of(f"{OF_1B}, on 4", LLAMA_1B, "liger_dist, gather"),
    _steps_of(f"{UNTIED}, on 2", EIGHT, "liger_dist, gather"),
    _steps_of(f"{UNTIED}, on 4", EIGHT, "liger_dist, gather"),
    _adapters(32, "liger_dist", fits=True),
    _adapters(32, "liger_dist, 4 bits", "one GPU, 4 bits", fits=True),
    _adapters(8, "liger_dist", fits=True),
    _adapters(8, "liger_dist, layers compiled"),
    _adapters(32, "liger_dist", "FSDP2 on 2 GPUs"),
    _adapters(32, "liger_dist, replicated", "FSDP2 on 2 GPUs"),
    *_experts("Qwen3-30B-A3B, 4 layers, sdpa, 8192 tokens", "qwen3_moe", MIXTURE, fits=True),
    *_experts(
        "gpt-oss-20b, 4 layers, flex_attention, 8192 tokens",
        "gpt_oss",
        {"vocab_size": 201088, "num_hidden_layers": 4, "num_local_experts": 32},
        fits=False,
    ),
    *_mixtures(),
)
