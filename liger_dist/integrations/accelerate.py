"""Accelerate: ``prepare(accelerator, model, optimizer, …)`` instead of ``accelerator.prepare(model, optimizer, …)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, overload

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import DataCollatorWithFlattening
from typing_extensions import TypeVarTuple, Unpack

from liger_dist.config import WrapConfig, check_choice
from liger_dist.errors import LigerDistError
from liger_dist.record import inner_model, record_of
from liger_dist.sharding.fsdp2.strategy import FSDP2, LMHead
from liger_dist.wrap import wrap

from .patches import refuse_packing

Others = TypeVarTuple("Others")


@overload
def prepare(
    accelerator: Accelerator, model: nn.Module, *, config: WrapConfig | None = ..., lm_head: LMHead = ...
) -> nn.Module: ...


@overload
def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    *others: Unpack[Others],
    config: WrapConfig | None = ...,
    lm_head: LMHead = ...,
) -> tuple[nn.Module, Unpack[Others]]: ...


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    *others: object,
    config: WrapConfig | None = None,
    lm_head: LMHead = "gather",
) -> nn.Module | tuple[object, ...]:
    """Prepares a model with the fused loss, as ``accelerator.prepare(model, *others)``, under the accelerator's
    settings: one process, DDP, FSDP1, FSDP2 or DeepSpeed.

    Args:
        lm_head: see :class:`liger_dist.FSDP2`; for FSDP2 settings only.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`; or a data loader packs documents that the model would mix.
    """
    for one in others:
        collator = getattr(one, "collate_fn", None)
        if isinstance(collator, DataCollatorWithFlattening):
            refuse_packing(model, type(collator).__name__)
    groups = [group for one in others if isinstance(one, torch.optim.Optimizer) for group in one.param_groups]
    # By name, so that only the optimizers keep references to the parameters before sharding.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    used = [[names.get(id(parameter)) for parameter in group["params"]] for group in groups]
    wrap_for(accelerator.state, model, config, lm_head)
    now = dict(model.named_parameters())
    for group, named in zip(groups, used, strict=True):
        given = zip(group["params"], named, strict=True)
        group["params"] = [parameter if name is None else now[name] for parameter, name in given]
    del now
    prepared: nn.Module | tuple[object, ...] = accelerator.prepare(model, *others)
    return prepared


def wrap_for(
    state: AcceleratorState, model: nn.Module, config: WrapConfig | None = None, lm_head: LMHead = "gather"
) -> None:
    """Wraps a model before an accelerator prepares it, and keeps its loss in fp32 under FSDP2. With a
    vocab-parallel lm_head the model is sharded here, as Accelerate would; Accelerate leaves a sharded model as it is.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`; or settings that a vocab-parallel lm_head does not support.
    """
    check_choice("lm_head", lm_head, get_args(LMHead))
    plugin: Any = state.fsdp_plugin if state.distributed_type == DistributedType.FSDP else None
    if lm_head == "vocab_parallel":
        if plugin is None or plugin.fsdp_version != 2:
            raise LigerDistError(
                f"lm_head is 'vocab_parallel' but the accelerator's distributed_type is {state.distributed_type}; "
                "expected FSDP with fsdp_version=2. Leave lm_head out."
            )
        _shard(state, plugin, model, config)
        return
    is_deepspeed = state.distributed_type == DistributedType.DEEPSPEED
    wrap(model, "deepspeed" if is_deepspeed else "auto", config=config)
    is_fused = record_of(inner_model(model)).found.recipe is not None
    if is_fused and plugin is not None and isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
        # Accelerate's default rounds everything that the model returns, including the loss.
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def _shard(state: AcceleratorState, plugin: Any, model: nn.Module, config: WrapConfig | None) -> None:
    objections = {
        "fsdp_cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
        "fsdp_offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_ignored_modules": plugin.ignored_modules is not None,
        # model.gradient_checkpointing_enable() does it below the sharding.
        "fsdp_activation_checkpointing": plugin.activation_checkpointing,
        "parallelism_config": state.parallelism_config is not None,
    }
    for name, is_set in objections.items():
        if is_set:
            raise LigerDistError(
                f"{name} is set, which does not fit lm_head='vocab_parallel' under Accelerate; leave it out "
                "(model.gradient_checkpointing_enable() checkpoints), or use lm_head='gather'."
            )
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    strategy = FSDP2(
        lm_head="vocab_parallel",
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype or torch.float32,
        reshard_after_forward=bool(plugin.reshard_after_forward),
    )
    # Reads names of classes, which sharding changes.
    plugin.set_auto_wrap_policy(model)
    # Trained parameters have fp32 masters, as under Accelerate.
    widened = [p for p in model.parameters() if p.requires_grad and state.mixed_precision != "no"]
    dtypes = [parameter.dtype for parameter in widened]
    try:
        for parameter in widened:
            parameter.data = parameter.data.float()
        wrap(model, strategy, config=config)
    except BaseException:
        for parameter, dtype in zip(widened, dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)
        raise
