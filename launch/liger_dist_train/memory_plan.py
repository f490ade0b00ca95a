"""What each process would hold, from shapes alone: nothing is allocated.

Legend: T tokens of a micro-batch, S of a sequence, D hidden, F width of the MLP, G ranks that share the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from liger_dist import FSDP2, LigerDistError
from liger_dist.fused_layers.packed_calls import is_recurrent
from liger_dist.model.structure import Structure, find_structure
from liger_dist_train.head_cost import HeadCost, HeadShapes, head_costs

from .bases import quantisable
from .config import TrainConfig
from .deepspeed_engine import deepspeed_settings
from .expert_needs import Mixture, stacks_of_layer
from .model import FULL_FIRST, reason_against_compiling
from .optimizer import matrices_of_layers
from .parallel_dims import ParallelDims

FP32 = 4
STATES = {"adamw": 2 * FP32, "adamw_8bit": 2, "muon": 2 * FP32}
"""bytes of AdamW's two moments for each parameter; scales of 8-bit blocks are left out, and Muon has one moment"""
RECOMPUTED_BYTES = 2**24
"""of a layer's input, from which liger_dist recomputes outputs of norms and gated activations in the backward"""
SCALES = (1 + FP32 / 256) / 64
"""bytes of scales for each 4-bit weight: one for 64 of them, of 8 bits, and one of fp32 for 256 of those"""
AUTOCAST = ("none", "ddp", "tp")
"""strategies that set no compute dtype"""
GATHERED_UNITS = 2
"""the one that runs, and the next one, which is gathered meanwhile"""
BUCKETS = {"reduce_bucket_size": 500_000_000, "stage3_max_live_parameters": 1_000_000_000, "sub_group_size": 10**9}
"""numbers that ZeRO keeps at once, as DeepSpeed has them where its JSON says nothing"""


OF_DEPTH = 7
"""numbers of each token, by the hidden size, that a depth of multi-token prediction keeps beside its decoder layer:
shifted embeddings, both normalised inputs of the projection (two), the inputs of the layer and of the last norm, that
of lm_head and its gradient"""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one process at the peak of a step."""

    head: str
    parameters: int
    optimizer: int
    gradients: int
    """at the end of the backward"""
    buffers: int
    """that stay through the whole step: ZeRO's, and the gradients it keeps between steps"""
    activations: int
    """at the end of the forward"""
    gathered: int
    """weights of layers that run, and what the reduction of their gradients starts from"""
    loss: int
    """what the head holds beside the shards of its weight"""
    sent: int
    """by this rank to other ranks for one loss"""
    teacher: int = 0
    """weights of the teacher that stay, and at the loss its lm_head, embedding and hidden states"""
    accumulated: int = 0
    """gradients of earlier micro-batches, which are there at the loss of the next one"""
    embedding: int = 0
    """gradient of the embedding, and its copy in fp32 to be reduced: the last of a backward"""

    @property
    def peak(self) -> int:
        """At the loss all activations live, at the end of the backward all gradients."""
        at_the_loss = self.accumulated + self.activations + max(self.loss, self.gathered)
        at_the_end = self.gradients + max(self.gathered, self.embedding)
        return self.parameters + self.optimizer + self.buffers + self.teacher + max(at_the_loss, at_the_end)


@dataclass(frozen=True)
class Plans:
    """One plan for each layout of lm_head."""

    dims: ParallelDims
    plans: list[MemoryPlan]
    assumption: str = ""
    """what else the plans are right for"""

    def __str__(self) -> str:
        names = ["parameters", "optimizer", "gradients", "buffers", "activations", "gathered", "loss", "peak", "sent"]
        if any(plan.teacher for plan in self.plans):
            names.insert(0, "teacher")
        rows = [["GiB of each process", *(plan.head for plan in self.plans)]]
        rows += [[name, *(f"{getattr(plan, name) / 2**30:.2f}" for plan in self.plans)] for name in names]
        width = max(len(row[0]) for row in rows)
        lines = [f"{first:<{width}}" + "".join(f"{value:>16}" for value in rest) for first, *rest in rows]
        return "\n".join([f"{self.dims}", *lines, *([self.assumption] if self.assumption else [])])


def plan(
    config: TrainConfig, dims: ParallelDims, model: nn.Module, model_config: Any, teacher_config: Any = None
) -> Plans:
    """Plans a model without storage: trained parameters and their gradients in fp32, states of the optimizer, decoder
    layers of attention or a gated delta net and a gated MLP or experts, with LoRA layers or not.

    Args:
        teacher_config: of a teacher's model; None without one.

    Raises:
        LigerDistError: layers of another kind.
    """
    structure = find_structure(model)
    text = model_config.get_text_config()
    is_known = bool(structure.layers) and all(_has_known_mlp(layer, text) for layer in structure.layers)
    if not is_known or (is_recurrent(model) and not DeltaNet.is_in(text)):
        raise LigerDistError(
            "--dry_run knows decoder layers of attention or a gated delta net and a gated MLP or experts, and "
            f"{type(model).__name__} has others; measure a step instead (peak_memory_bytes in metrics.jsonl)."
        )
    heads = ["gather", "vocab_parallel"] if dims.strategy == "fsdp2" and dims.parameter_shards > 1 else ["gather"]
    if dims.tensor_parallel > 1:
        heads = ["gather"]
    plans = [_plan(config, dims, model, structure, text, head) for head in heads]
    if teacher_config is not None:
        held = bytes_of_teacher(config, dims, teacher_config)
        plans = [replace(plan, teacher=held) for plan in plans]
    assumption = "gated delta nets as flash-linear-attention computes them; transformers' code needs more"
    return Plans(dims, plans, assumption if DeltaNet.is_in(text) else "")


def _has_known_mlp(layer: nn.Module, text: Any) -> bool:
    """True for a gated MLP of the config's width, and for experts in one parameter."""
    has_experts = any(name.rpartition(".")[2] == "experts" for name, _ in layer.named_modules())
    if has_experts:
        return Mixture.of(layer, text) is not None and not DeltaNet.is_in(text)
    return isinstance(getattr(text, "intermediate_size", None), int)


def bytes_of_teacher(config: TrainConfig, dims: ParallelDims, teacher_config: Any) -> int:
    """Counts the shard of a teacher, and what exists of it at the loss: its hidden states, and gathered its lm_head and
    its embedding, which FSDP2 keeps in the root until the teacher's forward ends."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(teacher_config)
    numbers: int = sum(parameter.numel() for parameter in model.parameters())
    size = FP32 if config.dtype == "float32" else 2
    hidden: int = config.batch_size * config.sequence_length * teacher_config.get_text_config().hidden_size
    ends = {model.get_output_embeddings().weight, model.get_input_embeddings().weight}
    gathered: int = sum(weight.numel() for weight in ends) if dims.world_size > 1 else 0
    return size * (-(-numbers // dims.world_size) + gathered + hidden)


@dataclass(frozen=True)
class Held:
    """Parameters of a model, or of one of its modules."""

    trained: int
    """numbers, in fp32"""
    frozen: int
    """numbers under LoRA"""
    frozen_bytes: int
    matrices: int = 0
    """numbers that Muon trains"""
    flat: int = 0
    """numbers of layers that train, frozen ones included: FSDP1 has one gradient of each such layer"""
    compute_bytes: int = 0
    """of frozen numbers, where every rank keeps all of them"""
    scales: int = 0
    """bytes of the scales of 4-bit weights, which every rank has"""
    largest: int = 0
    """numbers of the largest 4-bit weight: a product makes one of 16 bits"""

    @classmethod
    def of(cls, module: nn.Module, config: TrainConfig, strategy: str) -> Held:
        frozen = {p for p in module.parameters() if not p.requires_grad}
        packed = [p for p in quantisable(module) if p in frozen] if config.load_in_4bit else []
        rest = frozen.difference(packed)
        bytes_of_packed = sum(p.numel() for p in packed) // 2
        return cls(
            trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
            frozen=sum(p.numel() for p in frozen),
            frozen_bytes=bytes_of_packed
            + sum(p.numel() * (FP32 if strategy in FULL_FIRST else p.element_size()) for p in rest),
            compute_bytes=bytes_of_packed + sum(p.numel() for p in rest) * (FP32 if config.dtype == "float32" else 2),
            scales=int(sum(p.numel() for p in packed) * SCALES),
            largest=max((p.numel() for p in packed), default=0),
        )

    @property
    def numbers(self) -> int:
        return self.trained + self.frozen

    def without(self, other: Held) -> Held:
        """Returns the parameters that are not in ``other``, which is a part of these."""
        return replace(
            self,
            trained=self.trained - other.trained,
            frozen=self.frozen - other.frozen,
            frozen_bytes=self.frozen_bytes - other.frozen_bytes,
            compute_bytes=self.compute_bytes - other.compute_bytes,
        )

    def part(self, ranks: int) -> Held:
        """Returns one of ``ranks`` equal parts."""
        return Held(
            self.trained // ranks,
            self.frozen // ranks,
            self.frozen_bytes // ranks,
            compute_bytes=self.compute_bytes // ranks,
        )


def _plan(
    config: TrainConfig, dims: ParallelDims, model: nn.Module, structure: Structure, text: Any, head: str
) -> MemoryPlan:
    # Each rank of a sequence-parallel group has a shard of the tokens.
    a = replace(
        config,
        sequence_length=-(-config.sequence_length // dims.sequence_parallel),
        compile=reason_against_compiling(config, dims.strategy, model) is None,
    )
    size = FP32 if a.dtype == "float32" else 2
    layers = [Held.of(module, config, dims.strategy) for module in structure.layers]
    apart = [_apart(module, config, dims) for module in structure.layers]
    in_layers = [found.without(experts) for found, experts in zip(layers, apart, strict=True)]
    layer = max(in_layers, key=lambda found: found.numbers)
    own = max(apart, key=lambda found: found.numbers).part(dims.expert_parallel)
    of_muon = matrices_of_layers(model, config)
    held = replace(
        Held.of(model, config, dims.strategy),
        matrices=sum(parameter.numel() for name, parameter in model.named_parameters() if name in of_muon),
        flat=sum(found.numbers for found in layers if found.trained and found.frozen),
    )
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    for experts in apart if a.frozen == "replicate" else ():
        of_others = experts.without(experts.part(dims.expert_parallel))
        held = held.without(replace(of_others, trained=0))
    sizes = [found.trained * size + found.compute_bytes for found in in_layers]
    in_unit = _layers_of_a_unit(a, dims, structure, sizes)
    stored = _stored(a, dims, held, [layer] * in_unit + [own], weight, size)
    if dims.holds_unsharded_gradients(config):
        stored = replace(stored, gradients=held.trained * FP32)
    if dims.micro_batches(config, dims.global_batch_size(config)) > 1:
        stored = replace(stored, accumulated=stored.gradients)
    T, D = a.batch_size * a.sequence_length, text.hidden_size
    needs = needs_of_layers(a, dims.strategy, text, structure.layers)
    of_lora = [_of_lora(a, layer, D, under_autocast=dims.strategy in AUTOCAST) for layer in structure.layers]
    needs = [replace(one, kept=one.kept + T * size * more) for one, more in zip(needs, of_lora, strict=True)]
    further = [needs_of_a_layer(a, dims.strategy, text)] * len(structure.prediction_layers)
    layer_needs = max(needs, key=lambda layer: layer.kept + layer.passing)
    of_checkpoint = 0 if a.offload_checkpoints else T * D * size
    needs += further
    kept = len(needs) * of_checkpoint if a.activation_checkpointing else sum(layer.kept for layer in needs)
    kept += len(further) * T * D * size * OF_DEPTH
    cost = _cost_of_head(a, dims, structure, head, tokens=T, size=size)
    # The embedding's output, and around the last norm the input, the output and the gradient of the head.
    ends = 4 * T * D * size
    loss = _at_the_head(a, dims, structure, head, cost.held_bytes, (in_unit * layer.numbers + own.numbers) * size)
    computed_again = layer_needs.kept if a.activation_checkpointing else 0
    return replace(
        stored,
        head=head,
        activations=kept + ends,
        gathered=stored.gathered + computed_again + layer_needs.passing,
        loss=loss,
        sent=cost.sent_bytes,
    )


def _cost_of_head(
    a: TrainConfig, dims: ParallelDims, structure: Structure, head: str, *, tokens: int, size: int
) -> HeadCost:
    shapes = HeadShapes(
        tokens=tokens,
        hidden_size=structure.hidden_size,
        vocab_size=structure.vocab_size,
        ranks=dims.parameter_shards if "fsdp" in dims.strategy and not _is_full(a, structure, head) else 1,
        tied=structure.tied,
        trains=structure.head.weight.requires_grad,
        itemsize=size,
        memory_budget=a.memory_budget,
    )
    return head_costs(shapes)[head]


def _layers_of_a_unit(a: TrainConfig, dims: ParallelDims, structure: Structure, sizes: Sequence[int]) -> int:
    """Counts the layers of the largest unit, by the bytes of each layer."""
    if dims.strategy != "fsdp2":
        return 1
    strategy = FSDP2(layers_per_unit=a.layers_per_unit or "auto")
    return max(len(unit) for unit in strategy.units(structure, sizes))


def _apart(layer: nn.Module, config: TrainConfig, dims: ParallelDims) -> Held:
    """Counts the experts of a layer, of all ranks, where ``--ep`` has them in a group apart from the layer."""
    found = stacks_of_layer(layer) if dims.expert_parallel > 1 else None
    return Held(0, 0, 0) if found is None else Held.of(found[1], config, dims.strategy)


def _at_the_head(
    a: TrainConfig, dims: ParallelDims, structure: Structure, head: str, held_bytes: int, layer_bytes: int
) -> int:
    """Plans what lm_head holds: of its weight, and of the logits."""
    weight = structure.head.weight
    in_bytes = weight.numel() * (FP32 if a.dtype == "float32" else 2)
    if not a.fused_loss:
        return 3 * a.batch_size * a.sequence_length * structure.vocab_size * FP32
    if ("fsdp" not in dims.strategy and weight.dtype != torch.float32) or _is_full(a, structure, head):
        # Frozen in the compute dtype already.
        return held_bytes - in_bytes
    in_root = structure.tied or structure.repeats_head
    if dims.strategy == "fsdp2" and dims.parameter_shards > 1 and head == "gather" and not in_root:
        # FSDP2 copies out of what it all-gathers into, and frees that of the last layer with the next one.
        return max(held_bytes, 2 * in_bytes + layer_bytes)
    return held_bytes


def _is_full(a: TrainConfig, structure: Structure, head: str) -> bool:
    """True if every rank keeps the full, frozen lm_head."""
    return a.frozen == "replicate" and head == "gather" and not structure.head.weight.requires_grad


def _of_lora(a: TrainConfig, layer: nn.Module, hidden_size: int, *, under_autocast: bool) -> int:
    """Counts the numbers that LoRA layers keep of each token: what is between their two matrices; with dropout, or
    where their fp32 weights are under autocast, a copy of their input, which the frozen product does not keep."""
    downs = [module for name, module in layer.named_modules() if isinstance(module, nn.Linear) and ".lora_A." in name]
    is_cast = under_autocast and a.dtype == "bfloat16"
    copies = sum(down.in_features for down in downs) if is_cast or a.lora_dropout else 0
    return sum(down.out_features for down in downs) + copies - (2 * hidden_size if is_cast and downs else 0)


def _stored(
    a: TrainConfig, dims: ParallelDims, held: Held, gathered_parts: Sequence[Held], embedding: Tensor, size: int
) -> MemoryPlan:
    """Plans what does not depend on the tokens.

    Args:
        gathered_parts: what is gathered at once: the layers of a unit, and this rank's experts of a layer.
        embedding: weight of the input embedding.
    """
    numbers = held.trained
    states = numbers * (STATES[a.optimizer] + (FP32 if a.ema_decay else 0)) - held.matrices * FP32
    weights = numbers * FP32 + held.frozen_bytes + held.scales
    empty = MemoryPlan("", weights, states, numbers * FP32, 0, 0, held.largest * size, 0, 0)
    if dims.strategy == "deepspeed":
        return _zero(a, dims, held, size)
    if dims.strategy in ("fsdp1", "fsdp2"):
        share = -(-numbers // dims.parameter_shards)
        # Gathered weights; gradients of one unit as they are computed and, in fp32, as they are reduced.
        trained = sum(part.trained for part in gathered_parts)
        weights = trained * size + sum(part.compute_bytes for part in gathered_parts)
        gathered = weights * GATHERED_UNITS + trained * (size + FP32) + held.largest * size
        frozen = -(-held.frozen_bytes // dims.parameter_shards) + held.scales
        if a.frozen == "replicate":
            # All LoRA layers are gathered and reduced at once.
            gathered, frozen = numbers * (2 * size + FP32) + held.largest * size, held.compute_bytes + held.scales
        of_embedding = embedding.numel() * (size + FP32) if embedding.requires_grad else 0
        empty = replace(empty, gathered=gathered, embedding=of_embedding)
        if a.cpu_offload:
            return replace(empty, parameters=0, optimizer=0, gradients=0)
        # FSDP1 keeps what is in its root gathered: the embedding.
        is_flat = dims.strategy == "fsdp1" and a.frozen == "shard"
        buffers, flat = (embedding.numel() * size, held.flat) if is_flat else (0, 0)
        return replace(
            empty,
            parameters=share * FP32 + frozen,
            optimizer=-(-states // dims.parameter_shards),
            gradients=max(share, flat // dims.parameter_shards) * FP32,
            buffers=buffers,
        )
    # Autocast keeps the weights in bf16 through a forward.
    casts = 0 if size == FP32 else numbers * size
    # DDP reduces copies of the gradients.
    return replace(empty, gathered=casts + empty.gathered, buffers=numbers * FP32 if dims.strategy == "ddp" else 0)


def _zero(a: TrainConfig, dims: ParallelDims, held: Held, size: int) -> MemoryPlan:
    settings = deepspeed_settings(a, dims)
    zero = settings.get("zero_optimization", {})
    stage, ranks = int(zero.get("stage", 0)), dims.world_size
    limits = {name: int(float(zero.get(name, default))) for name, default in BUCKETS.items()}
    masters = 0 if size == FP32 else FP32
    weights = held.numbers // ranks if stage == 3 else held.numbers
    states = held.trained // ranks if stage > 0 else held.trained
    gradients = (held.trained // ranks if stage > 1 else held.trained) * size
    bucket = min(limits["reduce_bucket_size"], held.trained) * size
    live = min(limits["stage3_max_live_parameters"], held.numbers) * size if stage == 3 else 0
    in_step = min(limits["sub_group_size"], states) * FP32 if masters else 0
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    return MemoryPlan(
        head="",
        parameters=(0 if (zero.get("offload_param") or {}).get("device", "none") != "none" else weights * size),
        optimizer=0 if offloads else states * (masters + STATES[a.optimizer]),
        gradients=(0 if offloads else in_step) + (0 if stage == 3 else gradients),
        # The third stage keeps its gradients' memory from step to step.
        buffers=bucket + live + (gradients if stage == 3 else 0),
        activations=0,
        gathered=0,
        loss=0,
        sent=0,
    )


@dataclass(frozen=True)
class LayerNeeds:
    """Bytes of one layer."""

    kept: int
    passing: int
    """while its backward runs"""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net, as fla computes it."""

    keys: int
    """numbers of all key heads of a token; queries have as many"""
    values: int
    state: int
    """numbers of a token's share of the states, one for each chunk"""

    CHUNK = 64

    @staticmethod
    def is_in(text: Any) -> bool:
        """True if a config has recurrent layers, and all are gated delta nets."""
        kinds = set(getattr(text, "layer_types", None) or ())
        has_sizes = hasattr(text, "linear_value_head_dim") and "linear_attention" in kinds
        return has_sizes and kinds <= {"linear_attention", "full_attention"}

    @classmethod
    def of(cls, text: Any) -> DeltaNet:
        values = text.linear_num_value_heads * text.linear_value_head_dim
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        return cls(keys=keys, values=values, state=values * text.linear_key_head_dim // cls.CHUNK)

    def kept(self, heads: int) -> int:
        """Counts what is kept of each token: the inputs of the convolution and of the recurrence; products within a
        chunk; output and gate; decays, gates and statistics of each head, most in fp32."""
        return 2 * (2 * self.keys + self.values) + heads * self.CHUNK + 2 * self.values + 10 * heads

    @property
    def passing(self) -> int:
        """Counts what a backward needs of each token: states and their gradients, and what is computed again or is a
        gradient of queries, keys and values, the former for each head of the values."""
        return 2 * self.state + 12 * self.values


def needs_of_layers(a: TrainConfig, strategy: str, text: Any, layers: Sequence[nn.Module]) -> list[LayerNeeds]:
    """Estimates the activations of each layer from the config of the model's text part."""
    mixtures = [Mixture.of(layer, text) for layer in layers]
    if not DeltaNet.is_in(text):
        return [needs_of_a_layer(a, strategy, text, mixture) for mixture in mixtures]
    of_attention = needs_of_a_layer(a, strategy, text)
    size, T, D = FP32 if a.dtype == "float32" else 2, a.batch_size * a.sequence_length, text.hidden_size
    net = DeltaNet.of(text)
    # The projections share their input, which is kept.
    numbers = net.kept(text.linear_num_value_heads) + D + _of_norms_and_mlp(a, D, text.intermediate_size)
    if size == 2 and strategy in AUTOCAST:
        numbers += 4 * D
    linear = LayerNeeds(kept=T * size * numbers, passing=max(of_attention.passing, T * size * net.passing))
    needs = []
    for kind, layer in zip(text.layer_types, layers, strict=True):
        more = T * size * _of_gated_attention(text, layer)
        needs.append(linear if kind == "linear_attention" else replace(of_attention, kept=of_attention.kept + more))
    return needs


def _of_gated_attention(text: Any, layer: nn.Module) -> int:
    """Counts what an attention keeps of each token beside queries, keys, values and output: queries and keys before
    their norms; the gate of the output beside its queries, that as a sigmoid, and the product."""
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    queries, keys = heads * head_dim, (text.num_key_value_heads or heads) * head_dim
    parts = {name.rpartition(".")[2]: part for name, part in layer.named_modules()}
    is_gated = getattr(parts.get("q_proj"), "out_features", 0) == 2 * queries
    return (queries + keys if "q_norm" in parts else 0) + (3 * queries if is_gated else 0)


def needs_of_a_layer(a: TrainConfig, strategy: str, text: Any, mixture: Mixture | None = None) -> LayerNeeds:
    """Estimates a layer's activations from the config of the model's text part. docs/benchmarks has measurements.

    Args:
        mixture: its experts; None for an MLP.
    """
    size = 4 if a.dtype == "float32" else 2
    S, T = a.sequence_length, a.batch_size * a.sequence_length
    D: int = text.hidden_size
    F: int = text.intermediate_size if mixture is None else mixture.width
    heads: int = text.num_attention_heads
    queries = heads * (getattr(text, "head_dim", None) or D // heads)
    is_masked = not a.attend_across_documents and a.attention == "sdpa"
    # Over "sp", key heads are repeated until the ranks divide them; with a mask, for SDPA, to as many as query heads.
    groups = 1 if is_masked else max(heads // math.lcm(text.num_key_value_heads or heads, a.sp or 1), 1)
    # Attention of full sequences keeps its output, and the product after it that of this rank's tokens.
    outputs = 2 if (a.sp or 1) > 1 else 1
    of_attention = (1 + outputs) * queries + 2 * queries // groups
    if getattr(text, "kv_lora_rank", None):
        of_attention = _of_latent_attention(text, outputs)
    numbers = of_attention + _of_norms_and_mlp(a, D, F)
    if size == 2 and strategy in AUTOCAST:
        # Under autocast the residual stream is fp32, and products get copies in bf16.
        numbers += 4 * D
    square = a.batch_size * S * S
    # A mask of each layer, in bf16 and as it was; scores where SDPA has no fused kernel: fp32 with shared keys.
    masks = 3 * square if is_masked else 0
    has_scores = a.attention == "eager" or (size == 4 and a.attention in (None, "sdpa"))
    scores = heads * square * size if has_scores else 0
    passing = 2 * T * F * size
    if mixture is not None:
        numbers += mixture.kept(a, D)
        passing = T * size * mixture.in_backward(D)
    if a.mlp_tile_tokens is not None and a.mlp_tile_tokens < T:
        # Of a tile: gate, up, their product, its gradient. Of the weights: gradients of a tile, and their sum in fp32.
        passing = 4 * a.mlp_tile_tokens * F * size + 3 * D * F * (size + FP32)
    if (a.sp or 1) > 1:
        # The output's gradient; those of queries, keys and values as computed, as sent and as received.
        passing = max(passing, T * size * (queries + 3 * (queries + 2 * queries // groups)))
    return LayerNeeds(kept=T * size * numbers + masks + scores, passing=passing + 3 * scores)


def _of_latent_attention(text: Any, outputs: int) -> int:
    """Counts what multi-head latent attention keeps of each token: queries and keys, both joined from two parts; the
    projection that values and a part of the keys are views of; outputs; both latents before and after their norms."""
    heads: int = text.num_attention_heads
    values: int = heads * text.v_head_dim
    plain: int = heads * text.qk_nope_head_dim
    rotated: int = text.qk_rope_head_dim
    scored = plain + heads * rotated
    latents: int = (getattr(text, "q_lora_rank", None) or 0) + text.kv_lora_rank
    return 2 * scored + plain + values + outputs * values + 2 * latents + rotated


def _of_norms_and_mlp(a: TrainConfig, D: int, F: int) -> int:
    """Counts the numbers that norms and MLP keep of each token, with the residual stream's two."""
    tokens, size = a.batch_size * a.sequence_length, FP32 if a.dtype == "float32" else 2
    if a.mlp_tile_tokens is not None and a.mlp_tile_tokens < tokens:
        return 2 * D
    if a.compile or a.float8 or (a.layer_kernels and tokens * D * size >= RECOMPUTED_BYTES):
        # Norms and the activation keep their inputs alone.
        return 2 * D + 2 * F
    if a.layer_kernels:
        return 4 * D + 3 * F
    # Each norm: its input in fp32, normalised, and scaled; the MLP: gate, its activation, up, and their product.
    return 2 * D + 2 * 4 * D + 4 * F
