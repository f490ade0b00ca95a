"""Predicts the time of a step from shapes alone, for ``--dry_run``.

[Note: terms of a step]
GPU: matrix products at a fraction of the peak, attention at another, and every byte that is read or written at a
fraction of the memory's bandwidth, one after the other. The FLOPs and bytes are counted in layer_work.py.
Collectives: bytes at a fraction of the links' bandwidth, and a latency. Those of a unit run beside the computation of
the unit before it; what takes longer than that is exposed.
Host: a time for each layer, unit, LoRA layer and linear layer of 4 bits.
GPU and host run beside each other: the forward ends when both have finished it, and the backward likewise.
The fractions and times are fitted by benchmarks/fit_time_plan.py; docs/scaling.md has what they predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from liger_dist import FSDP2
from liger_dist.fused_layers.packed_calls import is_recurrent
from liger_dist.model.structure import find_structure

from .config import TrainConfig
from .deepspeed_engine import deepspeed_settings
from .layer_work import BF16, CASTS, FP32, Facts, LayerWork, Work, work_of_head, work_of_layer
from .metrics import PEAKS
from .parallel_dims import ParallelDims

GPUS_OF_A_NODE = 8
OF_NETWORK = 0.8
"""fraction of the network's bandwidth that collectives between nodes have: assumed, not measured"""
LATENCY, NETWORK_LATENCY = 50e-6, 10e-6
"""seconds of a collective, and for each further node: assumed, steps do not tell them from bandwidth"""
UPDATE = 7 * FP32
"""bytes of a parameter in fused AdamW: it reads weight, gradient and both moments, and writes all but the gradient"""
CLIPPING = FP32
"""bytes of a gradient that its norm reads"""


@dataclass(frozen=True)
class Card:
    """A GPU, by the vendor's data sheet."""

    peak: float
    """dense bf16 FLOP/s"""
    memory: float
    """bytes per second"""
    links: float
    """bytes per second of NVLink, in one direction"""
    network: float = 50e9
    """bytes per second to other nodes: 400 Gbit/s for each GPU, by NVIDIA's data sheet of the DGX H100"""
    host: float = 1.0
    """time of the host of the machine that was measured, relative to the one with H200s"""


@dataclass(frozen=True)
class Rates:
    """What was measured: fractions of the data sheets, and seconds of the host."""

    products: float = 0.768
    attention: float = 0.316
    memory: float = 0.949
    links: float = 0.308
    contention: float = 0.166
    """seconds that computation loses for each second of a collective beside it, whose kernels take multiprocessors"""
    compiled: float = 2.11e-3
    """seconds of the host for a compiled layer, forward and backward"""
    eager: float = 4.31e-3
    """the same of a layer that is not compiled"""
    sharded: float = 3.06e-3
    """for each layer whose parameters FSDP2 or FSDP1 shards, beside its unit"""
    unit: float = 3.08e-3
    """for each unit of FSDP2 or FSDP1, and the root"""
    lora: float = 89e-6
    """for each LoRA layer; half of it where layers are compiled"""
    packed: float = 0.456e-3
    """for each linear layer of 4 bits"""
    zero3: float = 23.6e-3
    """for each layer under ZeRO-3, instead of the times above"""


CARDS = {
    "H100": Card(PEAKS["H100"], 3.35e12, 450e9, host=1.35),
    "H200": Card(PEAKS["H200"], 4.8e12, 450e9),
    "A100": Card(PEAKS["A100"], 2.039e12, 300e9),
    "B200": Card(PEAKS["B200"], 8e12, 900e9),
}
"""by a part of the device's name: SXM cards; NVIDIA's data sheets of A100 80GB, H100, H200 and DGX B200"""
MEASURED = ("H100", "H200")
RATES = Rates()
FORWARD = 0.48
"""part of the host's time of a layer that is its forward"""
UPDATE_OF_A_LAYER = 0.1
"""time of the host for clipping and optimizer, relative to that of a compiled layer, sharded or not"""


@dataclass(frozen=True)
class StepShape:
    """What a step computes and communicates on one rank."""

    dims: ParallelDims
    units: tuple[LayerWork, ...]
    """layers that are gathered together, in order"""
    ends: LayerWork
    """lm_head, loss and embedding"""
    layers: int
    tokens: int
    """of a micro-batch"""
    micro_batches: int
    update_bytes: float
    is_compiled: bool
    exchanges_tokens: bool = False
    """lm_head is vocab-parallel"""
    hidden_bytes: float = 0.0
    """of the tokens' hidden states"""
    keeps_unsharded: bool = False
    """weights are gathered once in forward and backward"""
    replicates_frozen: bool = False
    checkpoints: bool = False
    stage: int = 0
    """of ZeRO"""


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a step."""

    step: float
    tokens: int
    """of a rank in a step"""
    computing: float
    """all kernels of the GPU but NCCL's"""
    exposed: float
    """collectives that no computation hides"""
    host: float
    routed: float
    """of those, the exchange of tokens with experts on other ranks"""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    def __str__(self) -> str:
        return (
            f"a step of {self.step * 1e3:.0f} ms, {self.tokens_per_second:.0f} tokens/s on each GPU; "
            f"computation {self.computing * 1e3:.0f} ms, exposed collectives {self.exposed * 1e3:.0f} ms, host "
            f"{self.host * 1e3:.0f} ms"
        )


def describe_time(
    config: TrainConfig, dims: ParallelDims, model: nn.Module, model_config: Any, gpu: str | None = None
) -> str:
    """Returns the line of ``--dry_run``.

    Args:
        gpu: a key of :data:`CARDS`; default: the GPU of this machine.
    """
    name = gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    card = next((key for key in CARDS if name is not None and key in name), None)
    reason = reason_against_predicting(config, dims, model)
    if name is None:
        reason = f"this machine has no GPU; name one by --gpu, {', '.join(CARDS)}"
    elif card is None:
        reason = f"the bandwidths of {name} are not known; those of {', '.join(CARDS)} are"
    if reason is not None or card is None:
        return f"not predicted: {reason}"
    shape = step_shape(config, dims, model, model_config)
    measured = "" if card in MEASURED else ", of which no step was measured"
    found = predict(shape, CARDS[card])
    return f"predicted for {card}{measured}: {found}; limited by {limit_of(shape, CARDS[card])}"


def reason_against_predicting(config: TrainConfig, dims: ParallelDims, model: nn.Module) -> str | None:
    """Says what of a run is not in the model of time, as a clause; None if all is."""
    options = {
        "--strategy tp": dims.strategy == "tp",
        "--tp": dims.tensor_parallel > 1,
        "--sp": dims.sequence_parallel > 1,
        "--dtype float32": config.dtype != "bfloat16",
        f"--float8 {config.float8}": config.float8 is not None,
        f"--optimizer {config.optimizer}": config.optimizer != "adamw",
        "--teacher": config.teacher is not None,
        "--top_k": config.top_k > 0,
        "--mtp": bool(find_structure(model).prediction_layers),
        "--cpu_offload": config.cpu_offload,
        "--offload_checkpoints": config.offload_checkpoints,
        "--mlp_tile_tokens": config.mlp_tile_tokens is not None,
        "--fused_loss false": not config.fused_loss,
        "--layer_kernels false": not config.layer_kernels,
        f"--attention {config.attention}": config.attention == "eager",
    }
    found = [option for option, is_given in options.items() if is_given]
    if found:
        return f"{', '.join(found)} was not measured"
    if dims.strategy == "deepspeed" and _offloads(deepspeed_settings(config, dims)):
        return "DeepSpeed's offloading was not measured"
    if is_recurrent(model):
        return "recurrent layers were not measured"
    return None


def _offloads(settings: dict[str, Any]) -> bool:
    zero = settings.get("zero_optimization", {})
    return any((zero.get(f"offload_{name}") or {}).get("device", "none") != "none" for name in ("param", "optimizer"))


def step_shape(config: TrainConfig, dims: ParallelDims, model: nn.Module, model_config: Any) -> StepShape:
    """Counts what a step does, of a model without storage, with LoRA layers or not."""
    structure, text = find_structure(model), model_config.get_text_config()
    facts = Facts.of(config, model, text, under_autocast=dims.strategy in ("none", "ddp"))
    layers = [work_of_layer(layer, index, facts) for index, layer in enumerate(structure.layers)]
    sizes = [int(BF16 * one.trained + one.frozen_bytes) for one in layers]
    counts = [1] * len(layers)
    if config.frozen == "replicate":
        # All LoRA layers are gathered and reduced at once.
        counts = [len(layers)]
    elif dims.strategy == "fsdp2":
        units = FSDP2(layers_per_unit=config.layers_per_unit or "auto").units(structure, sizes)
        counts = [len(unit) for unit in units]
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    ends = work_of_head(structure.head.weight, embedding, facts, is_tied=structure.tied)
    zero = deepspeed_settings(config, dims).get("zero_optimization", {}) if dims.strategy == "deepspeed" else {}
    is_sharded = dims.strategy in ("fsdp1", "fsdp2", "deepspeed")
    held = sum(one.trained for one in layers) + ends.trained
    shards = (dims.world_size if dims.strategy == "deepspeed" else dims.parameter_shards) if is_sharded else 1
    experts = sum(one.shared_experts for one in layers) * dims.expert_parallel
    return StepShape(
        dims=dims,
        units=tuple(_units(layers, counts)),
        ends=ends,
        layers=len(layers),
        tokens=facts.tokens,
        micro_batches=dims.micro_batches(config, dims.global_batch_size(config)),
        update_bytes=(UPDATE + CLIPPING) * (held + experts) / shards,
        is_compiled=_is_compiled(config, dims.strategy),
        exchanges_tokens=config.lm_head == "vocab_parallel" and dims.parameter_shards > 1,
        hidden_bytes=float(BF16 * facts.tokens * text.hidden_size),
        keeps_unsharded=not config.reshard_after_forward,
        replicates_frozen=config.frozen == "replicate",
        checkpoints=config.activation_checkpointing,
        stage=int(zero.get("stage", 0)),
    )


def _is_compiled(config: TrainConfig, strategy: str) -> bool:
    """True if a run on a GPU compiles the layers; a dry run may be elsewhere."""
    if config.load_in_4bit:
        return False
    if config.compile is not None:
        return config.compile
    return strategy != "deepspeed" and (config.ep or 1) == 1


def _units(layers: Sequence[LayerWork], counts: Sequence[int]) -> list[LayerWork]:
    found, start = [], 0
    for count in counts:
        unit = LayerWork()
        for layer in layers[start : start + count]:
            unit += layer
        found.append(unit)
        start += count
    return found


@dataclass(frozen=True)
class Clock:
    """Seconds of a card, at the measured rates."""

    card: Card
    rates: Rates

    def gpu(self, work: Work) -> float:
        of_products = work.products / (self.card.peak * self.rates.products)
        of_attention = work.attention / (self.card.peak * self.rates.attention)
        return of_products + of_attention + work.moved / (self.card.memory * self.rates.memory)

    def ring(self, size: float, ranks: int, stride: int = 1) -> float:
        """Computes the time of an all-gather or reduce-scatter of ``size`` bytes over ranks that are ``stride`` apart.
        The ring enters each node once, and has the adapters of its ranks there."""
        if ranks == 1 or size == 0:
            return 0.0
        local = max(1, min(ranks, GPUS_OF_A_NODE // stride))
        nodes = -(-ranks // local)
        inside = size * (ranks - 1) / ranks if local > 1 else 0.0
        return self._slower(inside, size * (nodes - 1) / nodes / local, nodes)

    def exchange(self, size: float, ranks: int) -> float:
        """Computes the time of an all-to-all of ``size`` bytes of each rank."""
        if ranks == 1 or size == 0:
            return 0.0
        to_other_nodes = size * max(0, ranks - GPUS_OF_A_NODE) / ranks
        return self._slower(size * (ranks - 1) / ranks, to_other_nodes, -(-ranks // GPUS_OF_A_NODE))

    def _slower(self, inside: float, between: float, nodes: int) -> float:
        """Computes the time of bytes of one rank, inside of its node and to other nodes at once."""
        seconds = max(inside / (self.card.links * self.rates.links), between / (self.card.network * OF_NETWORK))
        return seconds + LATENCY + (nodes - 1) * NETWORK_LATENCY


@dataclass(frozen=True)
class Traffic:
    """Seconds of the collectives of a unit."""

    gather: float
    reduce: float
    copies: Work = Work()
    """of what is gathered, in the forward and again in the backward"""
    gradient_copies: Work = Work()


def _traffic(shape: StepShape, unit: LayerWork, clock: Clock) -> Traffic:
    dims = shape.dims
    if dims.world_size == 1:
        return Traffic(0.0, 0.0)
    gradients = FP32 * unit.trained
    if dims.strategy == "ddp":
        return Traffic(0.0, 2 * clock.ring(gradients, dims.world_size))
    if dims.strategy == "deepspeed":
        size = BF16 * unit.trained + unit.frozen_bytes
        gather = clock.ring(size, dims.world_size) if shape.stage == 3 else 0.0
        return Traffic(gather, clock.ring(BF16 * unit.trained, dims.world_size))
    shards, experts = dims.parameter_shards, dims.parameter_shards // dims.expert_parallel
    frozen, of_experts = unit.frozen_bytes, unit.frozen_experts
    if shape.replicates_frozen:
        frozen = of_experts = 0.0
    weights, of_experts = BF16 * unit.trained + frozen, BF16 * unit.shared_experts + of_experts
    gather = clock.ring(weights, shards) + clock.ring(of_experts, experts, dims.expert_parallel)
    reduce = clock.ring(gradients, shards) + clock.ring(FP32 * unit.shared_experts, experts, dims.expert_parallel)
    if dims.replicate > 1:
        # HSDP all-reduces the shards over the replicas, beside the reduce-scatter of the next unit.
        of_shards = gradients / shards + FP32 * unit.shared_experts / experts
        reduce = max(reduce, 2 * clock.ring(of_shards, dims.replicate, shards))
    if dims.strategy == "fsdp1":
        return Traffic(gather, reduce, gradient_copies=Work(moved=CASTS * unit.numbers))
    # FSDP2 copies out of what it gathers into, and casts gradients into what it reduces.
    copies = Work(moved=2 * (weights + of_experts) + CASTS * unit.numbers / shards)
    return Traffic(gather, reduce, copies, Work(moved=CASTS * unit.numbers))


def predict(shape: StepShape, card: Card, rates: Rates = RATES) -> TimePlan:
    """Predicts the time of a step. See [Note: terms of a step]."""
    clock = Clock(card, rates)
    traffic = [_traffic(shape, unit, clock) for unit in shape.units]
    root = _traffic(shape, _gathered_ends(shape), clock)
    again = 0 if shape.keeps_unsharded else 1
    pairs = list(zip(shape.units, traffic, strict=True))
    forward = [clock.gpu(unit.forward + its.copies) for unit, its in pairs]
    backward = [clock.gpu(unit.backward + its.copies * again + its.gradient_copies) for unit, its in pairs]
    of_ends = (clock.gpu(shape.ends.forward + root.copies), clock.gpu(shape.ends.backward + root.gradient_copies))
    gathers = sum(its.gather for its in traffic)
    all_of = (gathers + root.gather, gathers * again + sum(its.reduce for its in traffic) + root.reduce)
    exposed = (_exposed_forward(forward, traffic, root), _exposed_backward(backward, traffic, root, again))
    slowed = tuple(rates.contention * (whole - part) for whole, part in zip(all_of, exposed, strict=True))
    routed = 2 * sum(_routing(shape, unit, clock) for unit in shape.units)
    exposed = (exposed[0] + routed, exposed[1] + routed * (2 if shape.checkpoints else 1))
    if shape.exchanges_tokens:
        tokens = clock.ring(shape.hidden_bytes * shape.dims.parameter_shards, shape.dims.parameter_shards)
        # Hidden states and their gradient, of lm_head and of the embedding.
        exposed = (exposed[0] + 2 * tokens, exposed[1] + 2 * tokens)
    host = host_seconds(shape, card, rates)
    update = clock.gpu(Work(moved=shape.update_bytes))
    if shape.stage in (1, 2):
        update += clock.ring(BF16 * sum(u.trained for u in (*shape.units, shape.ends)), shape.dims.world_size)
    gpu = (
        sum(forward) + of_ends[0] + slowed[0] + exposed[0],
        sum(backward) + of_ends[1] + slowed[1] + exposed[1],
    )
    end = issued = 0.0
    for half in (0, 1) * shape.micro_batches:
        issued += host[half]
        end = max(end + gpu[half], issued)
    step = max(end + update, issued + host[2])
    times = shape.micro_batches
    communicated = times * sum(exposed)
    return TimePlan(
        step=step,
        tokens=times * shape.tokens,
        computing=times * sum(gpu) + update - communicated,
        exposed=communicated,
        host=times * (host[0] + host[1]) + host[2],
        routed=times * routed * (3 if shape.checkpoints else 2),
    )


def limit_of(shape: StepShape, card: Card, rates: Rates = RATES) -> str:
    """Says what a step waits for: the host if the GPU is idle for a tenth of it, collectives from a quarter on."""
    found = predict(shape, card, rates)
    if found.step - found.computing - found.exposed > 0.1 * found.step:
        return "the host"
    if found.exposed < 0.25 * found.step:
        return "computation"
    if found.routed > 0.5 * found.exposed:
        return "the exchange of tokens with experts"
    alone = predict(shape, replace(card, network=math.inf), rates)
    where = "between nodes" if alone.exposed < 0.5 * found.exposed else "inside a node"
    return f"all-gather and reduce-scatter {where}"


def _gathered_ends(shape: StepShape) -> LayerWork:
    """Returns lm_head and embedding as far as they are gathered: not with a vocab-parallel lm_head."""
    return replace(shape.ends, trained=0.0, frozen_bytes=0.0) if shape.exchanges_tokens else shape.ends


def _routing(shape: StepShape, unit: LayerWork, clock: Clock) -> float:
    """Computes the time of one exchange of tokens with the experts of other ranks: balanced routers are assumed."""
    return clock.exchange(unit.routed_bytes, shape.dims.expert_parallel)


def _exposed_forward(forward: Sequence[float], traffic: Sequence[Traffic], root: Traffic) -> float:
    """Sums what gathering takes longer than the computation of the unit before."""
    hidden = sum(max(0.0, after.gather - time) for time, after in zip(forward, traffic[1:], strict=False))
    return root.gather + traffic[0].gather + hidden


def _exposed_backward(backward: Sequence[float], traffic: Sequence[Traffic], root: Traffic, again: int) -> float:
    """Sums what gathering the next unit and reducing the last one take longer than the computation of a unit. The
    gradients of the first unit and of the embedding are reduced at the end."""
    exposed = traffic[0].reduce + root.reduce
    for index, time in enumerate(backward):
        next_one = traffic[index - 1].gather * again if index > 0 else 0.0
        last_one = traffic[index + 1].reduce if index + 1 < len(traffic) else 0.0
        exposed += max(0.0, next_one + last_one - time)
    return exposed


def host_seconds(shape: StepShape, card: Card, rates: Rates) -> tuple[float, float, float]:
    """Computes the host's time of a forward, a backward, and the update."""
    layer = rates.compiled if shape.is_compiled else rates.eager
    layers = shape.layers * layer
    layers += rates.lora * sum(unit.lora for unit in shape.units) * (0.5 if shape.is_compiled else 1.0)
    layers += rates.packed * sum(unit.packed for unit in shape.units)
    again = FORWARD * layers if shape.checkpoints else 0.0
    sharded = 0.0
    if shape.dims.strategy in ("fsdp1", "fsdp2") and shape.dims.world_size > 1:
        sharded = 0.0 if shape.replicates_frozen else rates.sharded * shape.layers
        # Experts on several ranks are units apart from their layers.
        apart = shape.layers if shape.dims.expert_parallel > 1 else 0
        layers += sharded + rates.unit * (len(shape.units) + apart + 1)
    if shape.stage == 3:
        layers = rates.zero3 * shape.layers
    update = UPDATE_OF_A_LAYER * (rates.compiled * shape.layers + sharded)
    return card.host * FORWARD * layers, card.host * ((1 - FORWARD) * layers + again), card.host * update
