"""What each process would hold, from shapes alone: nothing is allocated.

Legend: T tokens of a micro-batch, D hidden, F width of the MLP, G processes that share the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from liger_dist import HeadShapes, LigerDistError, Structure, find_structure, head_costs

from .arguments import TrainArguments
from .engine import deepspeed_settings
from .layer_memory import needs_of_a_layer
from .layout import Layout

FP32 = 4
ADAM = 2 * FP32
GATHERED_LAYERS = 2
"""the one that runs, and the next one, which is gathered meanwhile"""
BUCKETS = {"reduce_bucket_size": 500_000_000, "stage3_max_live_parameters": 1_000_000_000, "sub_group_size": 10**9}
"""numbers that ZeRO keeps at once, as DeepSpeed has them where its JSON says nothing"""


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
    """by this process to others for one loss"""

    @property
    def peak(self) -> int:
        """At the loss all activations live and few gradients, at the end of the backward the other way round."""
        at_the_loss = self.activations + max(self.loss, self.gathered)
        at_the_end = self.gradients + self.gathered
        return self.parameters + self.optimizer + self.buffers + max(at_the_loss, at_the_end)


@dataclass(frozen=True)
class Plans:
    """One plan for each layout of lm_head."""

    layout: Layout
    plans: list[MemoryPlan]

    def __str__(self) -> str:
        names = ("parameters", "optimizer", "gradients", "buffers", "activations", "gathered", "loss", "peak", "sent")
        rows = [["GiB of each process", *(plan.head for plan in self.plans)]]
        rows += [[name, *(f"{getattr(plan, name) / 2**30:.2f}" for plan in self.plans)] for name in names]
        width = max(len(row[0]) for row in rows)
        lines = [f"{first:<{width}}" + "".join(f"{value:>16}" for value in rest) for first, *rest in rows]
        return "\n".join([f"{self.layout}", *lines])


def plan(arguments: TrainArguments, layout: Layout, model: nn.Module, config: Any) -> Plans:
    """Plans for a model without storage: parameters, gradients and AdamW's states in fp32, decoder layers of attention
    and a gated MLP.

    Raises:
        LigerDistError: layers of another kind.
    """
    structure = find_structure(model)
    text = config.get_text_config()
    width = getattr(text, "intermediate_size", None)
    if not structure.layers or not isinstance(width, int) or getattr(text, "num_experts", None):
        raise LigerDistError(
            f"--dry_run knows decoder layers of attention and a gated MLP, and {type(model).__name__} has others; "
            "measure a step instead (peak_memory_bytes in metrics.jsonl)."
        )
    heads = ["gather", "vocab_parallel"] if layout.strategy == "fsdp2" and layout.shard > 1 else ["gather"]
    if layout.tensor_parallel > 1:
        heads = ["gather"]
    return Plans(layout, [_plan(arguments, layout, model, structure, text, head) for head in heads])


def _plan(
    arguments: TrainArguments, layout: Layout, model: nn.Module, structure: Structure, text: Any, head: str
) -> MemoryPlan:
    a = arguments
    size = FP32 if a.dtype == "float32" else 2
    numbers = sum(parameter.numel() for parameter in model.parameters())
    layer = max(sum(p.numel() for p in module.parameters()) for module in structure.layers)
    embedding = structure.head.weight.numel() * size
    stored = _stored(a, layout, numbers, layer, embedding, size)
    T, D = a.batch_size * a.sequence_length, text.hidden_size
    layer_needs = needs_of_a_layer(a, layout.strategy, text)
    kept = T * D * size if a.activation_checkpointing else layer_needs.kept
    shapes = HeadShapes(
        tokens=T,
        hidden_size=D,
        vocab_size=structure.vocab_size,
        ranks=layout.shard if "fsdp" in layout.strategy else 1,
        tied=structure.tied,
        trains=True,
        itemsize=size,
        memory_budget=a.memory_budget,
    )
    cost = head_costs(shapes)[head]
    # The embedding's output, and around the last norm the input, the output and the gradient of the head.
    ends = 4 * T * D * size
    loss = cost.held_bytes if a.fused_loss else 3 * T * structure.vocab_size * FP32
    computed_again = layer_needs.kept if a.activation_checkpointing else 0
    return replace(
        stored,
        head=head,
        activations=len(structure.layers) * kept + ends,
        gathered=stored.gathered + computed_again + layer_needs.passing,
        loss=loss,
        sent=cost.sent_bytes,
    )


def _stored(a: TrainArguments, layout: Layout, numbers: int, layer: int, embedding: int, size: int) -> MemoryPlan:
    """What does not depend on the tokens; ``numbers`` of the model, and of one ``layer``."""
    empty = MemoryPlan("", numbers * FP32, numbers * ADAM, numbers * FP32, 0, 0, 0, 0, 0)
    if layout.strategy == "deepspeed":
        return _zero(a, layout, numbers, size)
    if layout.strategy in ("fsdp1", "fsdp2"):
        share = -(-numbers // layout.shard)
        # Gathered weights; gradients of one layer as they are computed and, in fp32, as they are reduced.
        gathered = layer * (GATHERED_LAYERS * size + size + FP32)
        if a.cpu_offload:
            return replace(empty, parameters=0, optimizer=0, gradients=0, gathered=gathered)
        # FSDP1 keeps what is in its root gathered: the embedding.
        buffers = embedding if layout.strategy == "fsdp1" else 0
        return replace(
            empty,
            parameters=share * FP32,
            optimizer=share * ADAM,
            gradients=share * FP32,
            buffers=buffers,
            gathered=gathered,
        )
    # Autocast keeps the weights in bf16 through a forward.
    casts = 0 if size == FP32 else numbers * size
    # DDP reduces copies of the gradients.
    return replace(empty, gathered=casts, buffers=numbers * FP32 if layout.strategy == "ddp" else 0)


def _zero(a: TrainArguments, layout: Layout, numbers: int, size: int) -> MemoryPlan:
    settings = deepspeed_settings(a, layout)
    zero = settings.get("zero_optimization", {})
    stage, ranks = int(zero.get("stage", 0)), layout.world_size
    held = {name: int(float(zero.get(name, default))) for name, default in BUCKETS.items()}
    masters = 0 if size == FP32 else FP32
    weights = numbers // ranks if stage == 3 else numbers
    states = numbers // ranks if stage > 0 else numbers
    gradients = (numbers // ranks if stage > 1 else numbers) * size
    bucket = min(held["reduce_bucket_size"], numbers) * size
    live = min(held["stage3_max_live_parameters"], numbers) * size if stage == 3 else 0
    in_step = min(held["sub_group_size"], states) * FP32 if masters else 0
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    return MemoryPlan(
        head="",
        parameters=(0 if (zero.get("offload_param") or {}).get("device", "none") != "none" else weights * size),
        optimizer=0 if offloads else states * (masters + ADAM),
        gradients=(0 if offloads else in_step) + (0 if stage == 3 else gradients),
        # The third stage keeps its gradients' memory from step to step.
        buffers=bucket + live + (gradients if stage == 3 else 0),
        activations=0,
        gathered=0,
        loss=0,
        sent=0,
    )
