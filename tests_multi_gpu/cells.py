"""The conformance suite as data: every layout, model, kind of data and use that is exact or refused."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import on_device
import torch
from models import make_model
from mtp_models import add_mtp
from predicting import Prediction, make_predicting
from tiers import cover, pairs
from torch import nn

from liger_dist.config import LogitsDtype

LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Model:
    """How the model of a cell is built."""

    family: str = "llama"
    tied: bool = False
    bias: bool = False
    single: bool = False
    """True for fp32 under every engine, so that kernels compute the layers"""
    trains: Literal["all", "head", "backbone"] = "all"
    lora: Literal["", "LoRA", "DoRA"] = ""
    """PEFT's layer on lm_head"""
    lora_on_layers: tuple[str, ...] = ()
    """linear layers with LoRA"""
    lora_on_experts: bool = False
    four_bits: Literal["", "linear", "experts"] = ""
    """weights of bitsandbytes: linear layers, or these and experts"""
    saved: str = ""
    """name of the adapter that trains lm_head as a whole, PEFT's ``modules_to_save``; empty for none"""
    quantised: bool = False
    predicts: Prediction | None = None
    """further losses of its forward"""
    mtp: int = 0
    """depth of multi-token prediction"""

    def obstacle(self) -> str | None:
        """Why this machine cannot build it."""
        needed = {"peft": self.has_peft, "bitsandbytes": bool(self.four_bits)}
        missing = [name for name in needed if needed[name] and importlib.util.find_spec(name) is None]
        return f"{missing[0]} is not installed" if missing else None

    @property
    def has_peft(self) -> bool:
        return bool(self.lora or self.saved or self.lora_on_layers or self.lora_on_experts)

    @property
    def is_in_fp32(self) -> bool:
        return self.single or bool(self.four_bits)

    def build(self, *, dtype: torch.dtype, heads: int) -> nn.Module:
        """The model, the same on every rank."""
        if self.predicts is not None:
            return make_predicting(self.predicts, tied=self.tied, dtype=dtype)  # type: ignore[no-any-return]
        if self.four_bits:
            from quantized import four_bit

            model: Any = four_bit(self.family, tied=self.tied, dtype=dtype, experts=self.four_bits == "experts")
        else:
            model = make_model(self.family, tied=self.tied, dtype=dtype, heads=heads, bias=self.bias)
        return self._complete(model.train(), dtype)

    def truth(self, model: nn.Module) -> nn.Module:
        """An unwrapped model in fp64 with the values of ``model``; weights of 4 bits are dequantised."""
        if not self.four_bits:
            return copy.deepcopy(model).double()
        from quantized import dequantized

        reference = self._complete(make_model(self.family, tied=self.tied), torch.float64).double()
        values = dequantized(model)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(values[name])
        return reference

    def _complete(self, model: Any, dtype: torch.dtype) -> Any:
        """Freezes parameters, and adds PEFT's layers and modules of further tokens."""
        head = model.lm_head.weight
        for parameter in model.parameters() if not self.four_bits else ():
            parameter.requires_grad_(
                {"all": True, "head": parameter is head, "backbone": parameter is not head}[self.trains]
            )
        if self.quantised:
            model.lm_head = QuantisedLinear()
        if self.has_peft:
            self._add_peft(model, dtype)
        return add_mtp(model, depth=self.mtp, dtype=dtype) if self.mtp else model

    def _add_peft(self, model: Any, dtype: torch.dtype) -> None:
        import peft

        if self.lora_on_experts:
            parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            settings = peft.LoraConfig(target_modules=["q_proj"], target_parameters=parameters, r=2)
        elif self.lora_on_layers:
            settings = peft.LoraConfig(target_modules=[*self.lora_on_layers], r=2)
        elif self.lora:
            settings = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, use_dora=self.lora == "DoRA")
        else:
            settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2)
        # PEFT changes the base model in place; it is what gets wrapped.
        peft.get_peft_model(model, settings, adapter_name=self.saved or "default")
        for name, parameter in model.named_parameters():
            if "lora_B" in name or (self.lora_on_experts and "lora_A" in name):
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator(parameter.device).manual_seed(1))
        if not self.four_bits:
            model.to(dtype)


class QuantisedLinear(nn.Module):
    """An lm_head as quantisation libraries make it: integer weights and another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", on_device.zeros(101, 16, dtype=torch.int8))


Rows = Literal["texts", "packed", "packed, by lengths", "padded"]
"""a text; documents whose positions restart; the same with their lengths given; a text and padding, with a mask"""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which tokens the ranks see, and what the calls are given with them."""

    empty_rank: bool = False
    """True if the last rank has no label"""
    passes_items: bool = False
    """True for calls with ``num_items_in_batch``"""
    passes_shifted: bool = False
    """True for calls with ``shift_labels``"""
    global_mean: bool = False
    """True for ``WrapConfig(token_mean="global")``"""
    rows: Rows = "texts"
    """what a row of the batch is"""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What is done with the model."""

    outside: bool = False
    """True for calls of the model inside its wrapper"""
    checkpointing: bool = False
    mlp_tiles: bool = False
    many_chunks: bool = False
    forwards: int = 1
    """before one backward"""
    policy: bool = False
    """True for an objective of log-probabilities, entropies and squared probabilities beside the loss"""
    has_support: bool = False
    """True if the objective is one of the classes of which each token was sampled"""
    replays: bool = False
    """True if the experts of each token are given, within a context of the forward alone"""
    soft_labels: bool = False
    """True for probabilities of four classes of each token beside its label"""
    logits_dtype: LogitsDtype = None
    unused_parameters: bool = False
    then: Literal["", "evaluate", "generate"] = ""
    """after training"""


MODEL: dict[str, Model] = {
    "untied": Model(),
    "tied": Model(tied=True),
    "bias": Model(bias=True),
    "frozen backbone": Model(trains="head"),
    "frozen head": Model(trains="backbone"),
    "saved head": Model(saved="default"),
    "saved head, named adapter": Model(saved="other"),
    "fp32": Model(single=True),
    "encoder-decoder": Model(family="t5", tied=True),
    "LoRA on the head": Model(lora="LoRA"),
    "DoRA on the head": Model(lora="DoRA"),
    "LoRA on the tied head": Model(lora="LoRA", tied=True),
    "LoRA on the biased head": Model(lora="LoRA", bias=True),
    "quantised head": Model(quantised=True),
    "further losses": Model(predicts=Prediction(depth=2, way="documents")),
    "further losses, tied": Model(predicts=Prediction(depth=2, way="cut labels"), tied=True),
    "multi-token prediction": Model(mtp=2),
    "multi-token prediction, tied": Model(mtp=1, tied=True),
    "further losses, checkpointed": Model(predicts=Prediction(depth=2, checkpointed=True, unused="last")),
    "experts": Model(family="qwen3_moe"),
    "experts, divisible": Model(family="qwen3_moe, 8 experts"),
    "experts, tied": Model(family="qwen3_moe", tied=True),
    "experts with biases": Model(family="gpt_oss"),
    "LoRA on experts": Model(family="qwen3_moe", lora_on_experts=True),
    "LoRA on experts with biases": Model(family="gpt_oss", lora_on_experts=True),
    "qwen2": Model(family="qwen2"),
    "gemma2": Model(family="gemma2"),
    "tied qwen2": Model(family="qwen2", tied=True),
    "tied gemma2": Model(family="gemma2", tied=True),
}
DATA: dict[str, Data] = {
    "uneven": Data(),
    "empty rank": Data(empty_rank=True),
    "num_items_in_batch": Data(passes_items=True),
    "shift_labels": Data(passes_shifted=True),
    "global mean": Data(global_mean=True),
    "packed": Data(rows="packed"),
    "packed, by lengths": Data(rows="packed, by lengths"),
    "padded": Data(rows="padded"),
}
USE: dict[str, Use] = {
    "training": Use(),
    "evaluation": Use(then="evaluate"),
    "generation": Use(then="generate"),
    "outside the root": Use(outside=True),
    "checkpointing": Use(checkpointing=True),
    "MLP tiles": Use(mlp_tiles=True),
    "MLP tiles, checkpointing": Use(mlp_tiles=True, checkpointing=True),
    "many chunks": Use(many_chunks=True),
    "two forwards": Use(forwards=2),
    "policy outputs": Use(policy=True, many_chunks=True),
    "sampled support": Use(policy=True, has_support=True, many_chunks=True),
    "replayed routing": Use(replays=True),
    "replayed routing, checkpointing": Use(replays=True, checkpointing=True),
    "soft labels": Use(soft_labels=True, many_chunks=True),
    "fp32 logits": Use(logits_dtype=torch.float32),
    "fp32 operands": Use(logits_dtype="fp32_operands"),
    "unused parameters": Use(unused_parameters=True),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination; ``model``, ``data`` and ``use`` are keys of the records above. ``refused`` holds words of the
    refusal; empty for an exact one."""

    engine: str
    layout: dict[str, Any] = field(default_factory=dict)
    world: int = 2
    model: str = "untied"
    data: str = "uneven"
    use: str = "training"
    accumulation: int = 1
    refused: str = ""
    fused: bool = True

    @property
    def built(self) -> Model:
        return MODEL[self.model]

    @property
    def given(self) -> Data:
        return DATA[self.data]

    @property
    def used(self) -> Use:
        return USE[self.use]

    @property
    def where(self) -> str:
        """The layout in words, a row of the support matrix."""
        words = [WORDS.get((name, value), f"{name.replace('_', ' ')} {value}") for name, value in self.layout.items()]
        if self.engine in ("fsdp1", "fsdp2") and not self.by_others:
            words.insert(0, "by wrap")
        return ", ".join([NAMES[self.engine], *filter(None, words)])

    @property
    def by_others(self) -> bool:
        """True if the test shards as a framework without this library does."""
        return bool(self.layout.get("by_others", self.engine == "fsdp1" or "head" in self.layout))

    def __str__(self) -> str:
        changed = [value for value in (self.model, self.data, self.use) if value not in USUAL]
        if self.accumulation > 1:
            changed.append("accumulation")
        return f"{self.where} on {self.world}" + (f": {', '.join(changed)}" if changed else "")

    @property
    def adapter(self) -> str:
        """The way in which lm_head is stored, in the words of the sharding adapters."""
        if self.engine in ("none", "ddp"):
            return "replicated"
        if self.engine == "zero":
            return "zero3" if self.layout["stage"] == 3 else "replicated"
        if self.layout.get("axes") == GRID:
            return "fsdp2-tensor-parallel"
        if self.layout.get("rows"):
            return "fsdp2-vocab-parallel"
        return self.engine

    @property
    def factors(self) -> dict[str, Any]:
        """What pairs of values are counted of."""
        layout = {name: value for name, value in self.layout.items() if name != "accumulation"}
        return {
            "adapter": self.adapter,
            "model": self.model,
            "data": self.data,
            "use": self.use,
            "accumulation": max(self.accumulation, self.layout.get("accumulation", 1)),
            "layout": (self.engine, self.world, *sorted((name, str(value)) for name, value in layout.items())),
        }

    @property
    def options(self) -> dict[str, Any]:
        """Options of the WrapConfig."""
        options: dict[str, Any] = {"fused_loss": self.fused}
        if self.given.global_mean:
            options["token_mean"] = "global"
        if self.used.many_chunks:
            options["memory_budget"] = 3 * 101 * 8
        if self.used.logits_dtype is not None and self.fused:
            options["logits_dtype"] = self.used.logits_dtype
        if self.used.mlp_tiles:
            options["mlp_tile_tokens"] = 7
        return options

    @property
    def tied(self) -> bool:
        return self.built.tied

    @property
    def tolerance(self) -> float:
        """The models' own norms and softmax round to fp32 inside, alike in both; DeepSpeed keeps fp32 masters."""
        if self.engine == "transformers":
            return 1e-6 if self.dtype == torch.float64 else 1e-4
        if self.engine == "zero" and (self.used.has_support or self.used.replays):
            return 3e-5  # In fp32; a support's in the second step, after an update by these gradients.
        return 1e-5 if self.engine == "zero" or self.built.is_in_fp32 else 1e-6

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters; DeepSpeed takes no fp64."""
        is_single = self.engine == "zero" or self.layout.get("bf16") or self.built.is_in_fp32
        # torch divides gradients of a group of one rank twice by the divisor that transformers sets, in fp64.
        is_single = is_single or "fsdp_size" in self.layout
        return torch.float32 if is_single else torch.float64

    def build(self) -> nn.Module:
        """The cell's model, the same on every rank."""
        heads = 4 if self.layout.get("plan") == "transformers" or "tp_size" in self.layout else 2
        return self.built.build(dtype=self.dtype, heads=heads)

    def obstacle(self) -> str | None:
        """Why this machine cannot run it."""
        on_gpu, is_offloaded = torch.cuda.is_available(), bool(self.layout.get("offload"))
        if self.engine == "zero" and importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed"
        if self.engine == "zero" and on_gpu and torch.cuda.device_count() < self.world:
            return "DeepSpeed needs a GPU for each rank"
        if self.engine == "zero" and is_offloaded and on_gpu:
            return "DeepSpeed's CPU optimizer is not built here"
        if self.engine == "fsdp1" and is_offloaded and not on_gpu:
            return "FSDP1 pins offloaded memory, which needs an accelerator"
        if self.engine == "transformers":
            from transformers import distributed

            fields = getattr(distributed.DistributedConfig, "__dataclass_fields__", {})
            for field in ("ep_size", "ep_implementation"):
                if field in self.layout and field not in fields:
                    return f"this transformers has no {field}"
        if self.layout.get("plan") == "transformers":
            if importlib.util.find_spec("transformers.distributed.tensor_parallel") is None:
                return "this transformers shards lm_head by another class than those since 5.11"
            from transformers.distributed.tensor_parallel import ColwiseParallel as PlanOfTransformers

            if "validate_param" in vars(PlanOfTransformers):
                return "this transformers refuses to shard a vocabulary that the ranks do not divide"
        return self.built.obstacle()


USUAL = ("untied", "uneven", "training")
NAMES = {
    "none": "one process",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "tp": "TP",
    "zero": "ZeRO",
    "transformers": "transformers",
}
WORDS: dict[tuple[str, Any], str] = {
    ("by_others", True): "by others",
    ("by_others", False): "",
    ("own_unit", True): "head in its own unit",
    ("units", 2): "units of two layers",
    ("use_orig_params", True): "use_orig_params",
    ("use_orig_params", False): "flat parameters",
    ("head", "root"): "head in the root",
    ("head", "tail"): "head with the norm",
    ("head", "own"): "head alone",
    ("rows", True): "vocab-parallel head",
    ("reshard", True): "",
    ("reshard", False): "no reshard",
    ("offload", True): "CPU offload",
    ("bf16", True): "bf16",
    ("accumulation", 2): "accumulation",
    ("frozen", "replicate"): "frozen weights replicated",
    ("axes", ("replicate", "shard")): "HSDP",
    ("axes", ("shard", "tp")): "x TP",
    ("zero_init", True): "zero.Init",
    ("plain_backward", True): "loss.backward()",
    ("quantized_gradients", True): "quantised gradients",
    ("plan", "transformers"): "the model's own plan",
    **{("fsdp_size", size): f"fsdp {size}" for size in (2, 4)},
    ("tp_size", 2): "TP 2",
    ("ep_size", 2): "ep 2",
    **{("ep", size): f"experts on {size} ranks" for size in (2, 4)},
    ("ep_implementation", "liger_dist"): "tokens once per rank",
    ("plan", "sequence"): "sequence-parallel input",
}


def _fsdp1(**layout: Any) -> Cell:
    return Cell(engine="fsdp1", layout=layout, world=4 if str(layout.get("sharding")).startswith("HYBRID") else 2)


def _fsdp2(**layout: Any) -> Cell:
    return Cell(engine="fsdp2", layout=layout, world=4 if "axes" in layout else 2)


def _zero(stage: int, **layout: Any) -> Cell:
    return Cell(engine="zero", layout={"stage": stage, **layout})


ONE = Cell(engine="none", world=1)
DDP = Cell(engine="ddp")
HSDP, GRID = ("replicate", "shard"), ("shard", "tp")

UNITS: list[dict[str, Any]] = [
    {},
    {"reshard": False},
    {"offload": True},
    {"axes": HSDP},
    {"rows": True},
    {"rows": True, "axes": HSDP},
    {"axes": GRID},
]
"""Layouts in which both layers are in one unit of FSDP2."""

FSDP1 = [
    _fsdp1(sharding=sharding, **({"own_unit": True} if own else {}), use_orig_params=orig)
    for sharding in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    for own in (False, True)
    for orig in (False, True)
]
FSDP1 += [_fsdp1(offload=True), _fsdp1(offload=True, use_orig_params=False), _fsdp1(offload=True, own_unit=True)]
FSDP2 = [
    *(_fsdp2(head=head, reshard=reshard) for head in ("root", "tail", "own") for reshard in (True, False)),
    *(_fsdp2(head=head, axes=HSDP) for head in ("root", "tail", "own")),
    *(_fsdp2(head=head, offload=True) for head in ("root", "tail", "own")),
]
OURS = [
    _fsdp1(by_others=False),
    _fsdp1(by_others=False, sharding="SHARD_GRAD_OP"),
    _fsdp1(by_others=False, sharding="HYBRID_SHARD"),
    _fsdp1(by_others=False, offload=True),
    _fsdp2(),
    _fsdp2(reshard=False),
    _fsdp2(offload=True),
    _fsdp2(axes=HSDP),
    _fsdp2(rows=True),
    _fsdp2(rows=True, axes=HSDP),
    _fsdp2(axes=GRID),
    _fsdp2(axes=GRID, head="root"),
    *(_fsdp2(units=2, **layout) for layout in UNITS),
]
ZERO = [
    *(_zero(stage, **variant) for stage in range(4) for variant in ({}, {"accumulation": 2})),
    *(_zero(stage, plain_backward=True) for stage in (1, 2, 3)),
    *(_zero(stage, plain_backward=True, accumulation=2) for stage in (1, 2, 3)),
    *(_zero(stage, offload=True) for stage in (1, 2, 3)),
    _zero(3, zero_init=True),
]
TP = [
    Cell(engine="tp"),
    Cell(engine="tp", world=4),
    *(
        Cell(engine="tp", layout={"plan": plan}, world=world)
        for plan in ("transformers", "sequence")
        for world in (2, 4)
    ),
]

PRINCIPAL = [
    DDP,
    _fsdp1(by_others=False),
    _fsdp1(use_orig_params=False),
    _fsdp1(own_unit=True),
    _fsdp2(),
    _fsdp2(units=2),
    _fsdp2(head="own"),
    _fsdp2(axes=HSDP),
    _fsdp2(rows=True),
    _fsdp2(rows=True, axes=HSDP),
    _fsdp2(axes=GRID),
    *(_zero(stage) for stage in range(4)),
    Cell(engine="tp", world=4),
]
"""One layout of each kind: these meet every model, kind of data and use."""

EXPERT_PARALLEL = [
    Cell(engine="transformers", layout={"tp_size": 2, "ep_size": 2}),
    Cell(engine="transformers", layout={"fsdp_size": 2, "ep_size": 2}),
    Cell(engine="transformers", layout={"fsdp_size": 4, "ep_size": 2}, world=4),
    Cell(engine="transformers", layout={"tp_size": 2, "ep_size": 2, "ep_implementation": "liger_dist"}),
    Cell(engine="transformers", layout={"fsdp_size": 2, "ep_size": 2, "ep_implementation": "liger_dist"}),
    Cell(engine="transformers", layout={"fsdp_size": 4, "ep_size": 2, "ep_implementation": "liger_dist"}, world=4),
]
"""Experts on several ranks, as transformers or this library dispatches tokens to them."""

EXPERTS_ON_RANKS = [
    _fsdp2(ep=2),
    replace(_fsdp2(ep=2), world=4),
    replace(_fsdp2(ep=4), world=4),
    _fsdp2(ep=2, reshard=False),
    _fsdp2(ep=2, offload=True),
    _fsdp2(ep=2, axes=HSDP),
    _fsdp2(ep=2, rows=True),
    _fsdp2(ep=2, rows=True, axes=HSDP),
    _fsdp2(ep=2, axes=GRID),
    _fsdp2(ep=2, units=2),
]
"""The same by FSDP2's ``expert_parallel``, with its other options."""

FROZEN = [
    _fsdp1(by_others=False, frozen="replicate"),
    _fsdp2(frozen="replicate"),
    _fsdp2(axes=HSDP, frozen="replicate"),
    _fsdp2(rows=True, frozen="replicate"),
    _fsdp2(axes=GRID, frozen="replicate"),
]
"""Frozen parameters whole on every rank."""

LORA = ("LoRA on the head", "DoRA on the head", "LoRA on the tied head", "LoRA on the biased head")
OTHERS = ("fp32", "encoder-decoder")
"""layers computed by kernels, which fp64 ones are not; two stacks, tied, with a cross entropy of the forward's own"""
MODELS = (
    "tied",
    "bias",
    "frozen backbone",
    "frozen head",
    "saved head",
    "saved head, named adapter",
    *OTHERS,
    *LORA,
)
FROZEN_MODELS = ("frozen backbone", "frozen head", "saved head", *LORA)
REFUSED_MODELS = ("quantised head",)
FURTHER = ("further losses", "further losses, tied", "further losses, checkpointed")
MTP = ("multi-token prediction", "multi-token prediction, tied")
EXPERTS = ("experts", "experts, tied", "experts with biases", "LoRA on experts", "LoRA on experts with biases")
DATAS = (
    "empty rank",
    "num_items_in_batch",
    "shift_labels",
    "global mean",
    "packed",
    "packed, by lengths",
    "padded",
)
USES = (
    "evaluation",
    "generation",
    "outside the root",
    "checkpointing",
    "MLP tiles",
    "MLP tiles, checkpointing",
    "many chunks",
    "two forwards",
    "policy outputs",
    "sampled support",
    "soft labels",
)


def _cells() -> list[Cell]:
    cells = [ONE, DDP, replace(DDP, layout={"by_others": True}), *FSDP1, *OURS, *FSDP2, *ZERO, *TP]
    cells += [
        replace(cell, accumulation=2) for cell in (DDP, *FSDP1, *OURS, *FSDP2, *TP) if not cell.layout.get("offload")
    ]
    cells += [replace(c, model="tied") for c in (ONE, *FSDP1, *OURS, *FSDP2, *ZERO, *TP) if "plan" not in c.layout]
    cells += [replace(c, model="tied") for c in TP if c.layout.get("plan") == "transformers"]
    for cell in PRINCIPAL:
        # FSDP1 itself refuses frozen and trained parameters in one flat one.
        is_flat = cell.layout.get("use_orig_params") is False
        cells += [replace(cell, model=model) for model in (("tied", "bias") if is_flat else MODELS)]
        cells += [replace(cell, data=data) for data in DATAS]
        cells += [replace(cell, use=use) for use in USES]
        cells += [replace(cell, model=model) for model in REFUSED_MODELS]
    for cell in (replace(cell, world=4) for cell in PRINCIPAL if cell.world == 2):
        cells += [cell, replace(cell, model="tied"), replace(cell, use="two forwards")]
        cells += [replace(cell, data=data) for data in ("empty rank", "num_items_in_batch")]
        if cell.engine != "zero":
            cells.append(replace(cell, accumulation=2))
    cells += [replace(DDP, use="unused parameters")]
    for cell in (ONE, DDP, _fsdp2(), _zero(3)):
        cells += [replace(cell, data="packed", use=use) for use in ("checkpointing", "MLP tiles")]
        cells += [replace(cell, model="LoRA on the head", data="packed", use="MLP tiles")]
    cells += [_zero(3, quantized_gradients=True)]
    cells.append(replace(_fsdp1(own_unit=True, use_orig_params=False), model="frozen backbone"))
    for cell in FROZEN:
        cells += [replace(cell, model=model) for model in ("untied", *FROZEN_MODELS)]
        for usual in (replace(cell, model=model) for model in ("saved head", "LoRA on the head")):
            if _refusal(usual):
                continue
            cells.append(replace(usual, accumulation=2))
            cells += [replace(usual, data=data) for data in DATAS]
            cells += [replace(usual, use=use) for use in USES]
    for cell in (ONE, *PRINCIPAL, _fsdp2(head="tail")):
        cells += [replace(cell, model=model) for model in (*FURTHER, *MTP)]
        for usual in (replace(cell, model=model) for model in (FURTHER[0], MTP[0])):
            datas = ("empty rank", "num_items_in_batch", "global mean", "packed")
            cells += [replace(usual, data=data) for data in datas]
            cells += [replace(usual, use=use) for use in ("many chunks", "two forwards", "checkpointing")]
            cells += [replace(usual, accumulation=2)] if cell.engine not in ("zero", "none") else []
    for cell in (ONE, *PRINCIPAL, _fsdp1(), _fsdp2(head="root")):
        is_flat = cell.layout.get("use_orig_params") is False
        cells += [replace(cell, model=model) for model in (EXPERTS[:3] if is_flat else EXPERTS)]
        for usual in (replace(cell, model=model) for model in (EXPERTS[0], *(() if is_flat else (EXPERTS[3],)))):
            cells += [replace(usual, data=data) for data in ("empty rank", "packed")]
            # DeepSpeed gathers these families' layers of experts as one, for a single forward before each backward.
            is_one = cell.layout.get("stage") == 3
            cells += [replace(usual, use=use) for use in ("checkpointing", *(() if is_one else ("two forwards",)))]
            cells += [replace(usual, use=use) for use in ("replayed routing", "replayed routing, checkpointing")]
            cells += [replace(usual, accumulation=2)] if cell.engine not in ("zero", "none") else []
        cells.append(replace(cell, model="experts with biases", use="replayed routing"))
    for cell in (replace(cell, model="experts") for cell in EXPERT_PARALLEL):
        cells += [cell, replace(cell, model="experts with biases")]
        cells += [replace(cell, use=use) for use in ("checkpointing", "two forwards", "replayed routing")]
        cells += [replace(cell, data="packed"), replace(cell, data="empty rank")]
    cells += _with_experts_on_ranks()
    families = ("qwen2", "gemma2", "tied qwen2", "tied gemma2")
    cells += [replace(c, model=m) for c in (ONE, DDP, _fsdp2(), _fsdp2(rows=True), Cell(engine="tp")) for m in families]
    return list({str(cell): replace(cell, refused=_refusal(cell)) for cell in cells}.values())


def _with_experts_on_ranks() -> list[Cell]:
    cells: list[Cell] = []
    for cell in EXPERTS_ON_RANKS:
        # Six experts, which four ranks do not divide.
        models = ("experts, divisible",) if cell.layout["ep"] == 4 else EXPERTS
        cells += [replace(cell, model=model) for model in models]
        for usual in (replace(cell, model=model) for model in models[:: max(1, len(models) - 2)]):
            cells += [replace(usual, data=data) for data in ("empty rank", "packed", "num_items_in_batch")]
            cells += [replace(usual, data="global mean"), replace(usual, accumulation=2)]
            uses = ("checkpointing", "two forwards", "evaluation", "generation", "many chunks", "policy outputs")
            cells += [replace(usual, use=use) for use in (*uses, "replayed routing", "replayed routing, checkpointing")]
    frozen = replace(_fsdp2(ep=2, frozen="replicate"), model="LoRA on experts")
    cells += [frozen, replace(frozen, use="checkpointing"), replace(frozen, world=4), replace(frozen, accumulation=2)]
    return cells


@dataclass(frozen=True)
class Refusal:
    """Cells that are refused, and words of the sentence."""

    words: str
    applies: Callable[[Cell], bool]


REFUSALS = (
    Refusal(
        "leave lm_head out of the wrapping policy",
        lambda c: c.tied and c.engine == "fsdp1" and bool(c.layout.get("own_unit")),
    ),
    Refusal("fully_shard", lambda c: c.tied and c.layout.get("head") in ("own", "tail")),
    Refusal("outside the wrapper's forward", lambda c: c.used.outside and c.engine == "fsdp1" and c.by_others),
    Refusal("pass num_items_in_batch to the model", lambda c: c.given.global_mean and c.engine == "zero"),
    Refusal(
        "leave the option out",
        lambda c: c.layout.get("frozen") == "replicate" and c.model == "untied",
    ),
    Refusal(
        "pass num_items_in_batch to the model",
        lambda c: c.given.global_mean and c.engine == "fsdp1" and c.layout.get("frozen") == "replicate",
    ),
    Refusal(
        "FSDP2 has nothing to shard",
        lambda c: c.layout.get("frozen") == "replicate" and bool(c.layout.get("rows")) and c.model == "frozen backbone",
    ),
    Refusal("turn them off", lambda c: bool(c.layout.get("quantized_gradients"))),
    Refusal(
        "leave the head out of its target_modules",
        lambda c: (
            bool(c.built.lora) and (c.engine == "tp" or c.layout.get("axes") == GRID or bool(c.layout.get("rows")))
        ),
    ),
    Refusal("expected an unmodified torch.nn.Linear", lambda c: c.built.quantised),
)
"""The first that applies; a cell without one is exact."""


def _refusal(cell: Cell) -> str:
    return next((refusal.words for refusal in REFUSALS if refusal.applies(cell)), "")


CELLS = _cells()

BF16 = [
    _fsdp1(by_others=False, bf16=True),
    _fsdp1(use_orig_params=False, bf16=True),
    _fsdp1(own_unit=True, bf16=True),
    *(_fsdp2(head=head, bf16=True) for head in ("root", "tail", "own")),
    _fsdp2(bf16=True),
    _fsdp2(units=2, bf16=True),
    _fsdp2(rows=True, bf16=True),
    _fsdp2(axes=GRID, bf16=True),
    *(_zero(stage, bf16=True) for stage in range(4)),
]
PRECISION = [
    *BF16,
    *(replace(cell, use=use) for cell in BF16 for use in ("fp32 logits", "fp32 operands")),
    *(
        replace(cell, data=data)
        for cell in (_fsdp1(by_others=False, bf16=True), _fsdp2(bf16=True), _zero(3, bf16=True))
        for data in ("packed", "padded")
    ),
]
"""bf16 compute: held to 1.5 times the error of the same layout unfused."""


PAIRED = ("adapter", "model", "data", "use", "accumulation")
"""factors of which ``make smoke`` has every pair of values that occurs in the suite"""


def _smoke_parts(cell: Cell) -> list[Any]:
    factors = cell.factors
    return pairs({name: factors[name] for name in PAIRED})


def _test_parts(cell: Cell) -> list[Any]:
    """``make test`` adds every layout."""
    return [*_smoke_parts(cell), ("layout", cell.factors["layout"])]


def _covered(kinds: list[list[Cell]], parts: Callable[[Cell], list[Any]]) -> list[list[Cell]]:
    """Of every kind, cells that have every part which such a cell has."""
    return [cover(cells, [parts(cell) for cell in cells]) for cells in kinds]


@cache
def _tiers() -> tuple[set[str], set[str]]:
    """Names of the cells of ``make smoke`` and of ``make test``; processes of a pool never ask for them."""
    kinds = [[cell for cell in CELLS if not cell.refused], [cell for cell in CELLS if cell.refused], PRECISION]
    of_test = _covered(kinds, _test_parts)
    # Chosen among the first. The page has the sentence of each refusal.
    of_smoke = _covered(of_test, _smoke_parts)
    return {str(c) for cells in of_smoke for c in cells}, {str(c) for c in (*of_test[0], *kinds[1], *of_test[2])}


def tier(cell: Cell) -> Literal["smoke", "test", "nightly"]:
    """The first tier that runs a cell, by one rule: covers of pairs; every refusal is in ``make test``."""
    smoke, test = _tiers()
    name = str(cell)
    return "smoke" if name in smoke else "test" if name in test else "nightly"


def by_world(cells: list[Cell], world: int) -> list[Cell]:
    return [cell for cell in cells if cell.world == world]
