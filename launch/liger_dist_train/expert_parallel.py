"""Experts on several ranks, by transformers' expert parallelism: tokens are sent to the rank of their experts and back.
A model without storage is sharded, and then given values from a full model on rank 0."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from liger_dist import LigerDistError, register_expert_parallelism
from liger_dist.model.structure import initializer_of

from .config import TrainConfig
from .distributed import device
from .parallel_dims import ParallelDims


def has_own_exchange() -> bool:
    """True if transformers takes this library's exchange of tokens, which keeps less for the backward."""
    from transformers.distributed import DistributedConfig

    return "ep_implementation" in signature(DistributedConfig).parameters


def shard_experts(model: Any, config: TrainConfig, dims: ParallelDims) -> nn.Module:
    """Shards a model without storage: experts over the ranks of a group, and over the groups; all else over all ranks,
    as under FSDP2. Its parameters get storage and no values, its buffers values.

    Raises:
        LigerDistError: transformers has no rule for the model's experts, or the ranks do not divide them.
    """
    from transformers.distributed import DistributedConfig, initialize_distributed_mesh

    check_experts(model, dims)
    tied = {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}
    exchange = {}
    if has_own_exchange():
        register_expert_parallelism()
        exchange = {"ep_implementation": "liger_dist"}
    # FSDP2 shares a weight within a group only: that of the root has what has no rule.
    model.fsdp_plan = {name: style for name, style in model.fsdp_plan.items() if name not in tied}
    distributed = DistributedConfig(
        dp_replicate_size=dims.replicate,
        fsdp_size=dims.shard,
        ep_size=dims.expert_parallel,
        fsdp_mixed_precision=config.dtype == "bfloat16",
        **exchange,
    )
    _, mesh = initialize_distributed_mesh(distributed)
    sharded: Any = type(model).maybe_distribute_model(model, distributed, mesh)
    # What reads the config later would shard once more.
    del sharded.config.distributed_config
    sharded.to_empty(device=device())
    sharded.tie_weights(recompute_mapping=False)
    initialize = initializer_of(sharded)
    with torch.no_grad():
        for module in sharded.modules():
            for buffer in module.buffers(recurse=False):
                # Those of no rule are read with the parameters, after wrap has run the model's code.
                buffer.zero_()
            if module._buffers:
                initialize(module)
    found: nn.Module = sharded
    return found


def check_experts(model: Any, dims: ParallelDims) -> None:
    """Checks that the experts of a model can be on several ranks.

    Raises:
        LigerDistError: see :func:`shard_experts`.
    """
    rules = [name for name, style in (getattr(model, "ep_plan", None) or {}).items() if style == "ep_dispatch_experts"]
    if not rules:
        raise LigerDistError(
            f"--ep is {dims.expert_parallel} but transformers has no rule for experts of {type(model).__name__}; leave "
            "it out."
        )
    counts = {module.num_experts for name, module in model.named_modules() if name.endswith(".experts")}
    for count in counts:
        if count % dims.expert_parallel:
            raise LigerDistError(
                f"--ep is {dims.expert_parallel} but {type(model).__name__} has {count} experts, which these ranks do "
                "not divide; choose a divisor."
            )


def random_model(config: TrainConfig, model_config: Any) -> nn.Module:
    """Makes a full model of random fp32 values, by its initialization and ``--seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: nn.Module = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    return model
