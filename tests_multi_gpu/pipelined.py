"""Pipelines of tiny models on the ranks of a test, and the uncut model that they are held to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import full, make_batch, make_config, relative_errors, true_loss_sum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import liger_dist
from liger_dist import pipeline
from liger_dist.sharding.process_groups import compute_device

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
OTHER_SCHEDULES = ("LoopedBFS", "DualPipeV")
SPLIT = (*SCHEDULES[3:], "DualPipeV")
"""schedules with the backward of weights after that of inputs"""
REFUSED_BY_TORCH = (
    r"runs .*torch \S+ frees the nodes of custom autograd functions .*Schedule1F1B or ScheduleInterleaved1F1B"
)
"""what ``pipeline_step`` says of them before torch 2.13"""
MICRO_BATCHES = 4
NUM_LAYERS = 4
PIPELINE = 2
"""ranks of a pipeline"""


def make_uncut(family: str, *, num_layers: int = NUM_LAYERS, **options: Any) -> Any:
    """The same weights on every rank, in fp64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = make_config("llama" if family in OTHER_FAMILIES else family, **options)
    if family in OTHER_FAMILIES:
        sizes = {name: value for name, value in config.to_dict().items() if name in SIZES}
        config = AutoConfig.for_model(family, **sizes, **OTHER_FAMILIES[family], attn_implementation="sdpa")
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * num_layers)[:num_layers]
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(compute_device())


OTHER_FAMILIES: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 8}, "gpt_neox": {"max_position_embeddings": 64}}
"""families beside those of ``make_config``, and what their tiny configs have beside the usual sizes"""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "initializer_range",
    "pad_token_id",
    "tie_word_embeddings",
)


def make_rows(data_rank: int, *, rows: str = "texts", seed: int = 0) -> dict[str, Tensor]:
    """The batch of one data-parallel rank: micro-batches with different numbers of labels, one of them without any."""
    parts = [make_batch(number, seed=1 + seed + 7 * data_rank, rows=rows) for number in range(MICRO_BATCHES)]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if rows == "texts":
        # No logits score the first token.
        batch["labels"][1::2, 0] = batch["input_ids"][1::2, 0]
    rows_of_one = len(parts[0]["labels"])
    batch["labels"][: rows_of_one * ((data_rank + seed) % 2)] = -100
    batch["labels"][-rows_of_one:] = -100
    return batch


class Pipeline:
    """The stages of one rank, and their schedule."""

    def __init__(self, uncut: nn.Module, schedule: str, *, data: str = "none", config: Any = None, **options: Any):
        """
        Args:
            data: "none", "fsdp2", "hsdp", or "tp" for lm_head, over the ranks that have a stage.
            options: of FSDP2.
        """
        world = dist.get_world_size()
        device = compute_device().type
        axes = {"none": ("data",), "fsdp2": ("data",), "hsdp": ("replicate", "shard"), "tp": ("data", "tp")}[data]
        sizes = {"none": (world // PIPELINE,), "fsdp2": (world // PIPELINE,)}.get(data, (1, world // PIPELINE))
        sizes = (world // PIPELINE, 1) if data == "hsdp" else sizes
        self.mesh = init_device_mesh(device, (PIPELINE, *sizes), mesh_dim_names=("pp", *axes))
        self.data_rank = 0 if data == "tp" else dist.get_rank() % (world // PIPELINE)
        """rank among those with other batches"""
        rank = self.mesh["pp"].get_local_rank()
        made = getattr(schedules, f"Schedule{schedule}")
        is_multi = issubclass(made, schedules.PipelineScheduleMulti)
        self.num_stages = 2 * PIPELINE if is_multi else PIPELINE
        indices = list(range(rank, self.num_stages, PIPELINE))
        if schedule in ("ZBVZeroBubble", "DualPipeV"):
            indices = [rank, self.num_stages - 1 - rank]
        strategy: Any = "auto"
        if data != "none":
            options = {"reshard_after_forward": schedule not in SPLIT, "reduce_dtype": torch.float64} | options
            strategy = liger_dist.FSDP2(mesh=self.mesh[axes if len(axes) > 1 else axes[0]], **options)
        self.modules = [
            liger_dist.wrap(liger_dist.pipeline_stage(uncut, index, self.num_stages), strategy, config=config)
            for index in indices
        ]
        group = self.mesh.get_group("pp")
        self.stages = [
            PipelineStage(module, index, self.num_stages, compute_device(), group=group)
            for module, index in zip(self.modules, indices, strict=True)
        ]
        self.schedule = made(
            self.stages if is_multi else self.stages[0],
            MICRO_BATCHES,
            loss_fn=liger_dist.pipeline_loss,
            scale_grads=False,
        )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for module in self.modules for name, p in module.named_parameters()}

    def step(self, batch: dict[str, Any]) -> float | None:
        loss = liger_dist.pipeline_step(self.schedule, **batch)
        return None if loss is None else float(loss)

    def gradients(self) -> dict[str, Tensor]:
        return {name: full(p.grad) for name, p in self.parameters.items() if p.grad is not None}


def run_or_refused(workers: Workers, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``function(*args)``, which trains with a schedule, on every rank. Expects a refusal, and returns nothing,
    if this torch cannot run the schedule."""
    (schedule,) = [name for name in args if name in SCHEDULES + OTHER_SCHEDULES]
    if schedule not in SPLIT or pipeline._keeps_custom_nodes():
        return workers.run(function, *args)
    with pytest.raises(RuntimeError, match=f"LigerDistError: Schedule{schedule} {REFUSED_BY_TORCH}"):
        workers.run(function, *args)
    return []


def true_step(uncut: nn.Module, batches: list[dict[str, Tensor]], *, token_mean: str = "local") -> list[float]:
    """Losses of the data-parallel ranks, and gradients in ``uncut``, added to those that it has."""
    sums, counts = zip(*(true_loss_sum(uncut, batch) for batch in batches), strict=True)
    shared = [sum(counts) / len(counts)] * len(counts) if token_mean == "global" else counts
    losses = [total / count for total, count in zip(sums, shared, strict=True)]
    (torch.stack(losses).sum() / len(losses)).backward()
    return [float(loss.detach()) for loss in losses]


def errors_of_step(
    family: str,
    schedule: str,
    data: str,
    *,
    rows: str = "texts",
    token_mean: str = "local",
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, float]:
    """Errors of the loss and every gradient on this rank, relative to the uncut model in fp64.

    Args:
        dtype: of the stages; kernels of layers run in fp32.
    """
    uncut = make_uncut(family)
    config = liger_dist.WrapConfig(token_mean=token_mean) if token_mean != "local" else None
    pipeline = Pipeline(copy.deepcopy(uncut).to(dtype), schedule, data=data, config=config, **options)
    ranks = 1 if data == "tp" else dist.get_world_size() // PIPELINE
    batches = [make_rows(rank, rows=rows) for rank in range(ranks)]
    loss = pipeline.step(batches[pipeline.data_rank])
    if data == "none":
        batches = [batches[pipeline.data_rank]]
    losses = true_step(uncut, batches, token_mean=token_mean)
    truth = losses[0 if data == "none" else pipeline.data_rank]
    truths = {name: p.grad for name, p in uncut.named_parameters() if name in pipeline.parameters}
    errors = relative_errors(pipeline.gradients(), truths)
    return errors | ({} if loss is None else {"loss": abs(loss - truth) / abs(truth)})
