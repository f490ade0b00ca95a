"""Full parameters and gradients of sharded models, by the names of the unwrapped model."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from layouts import zero_settings
from models import full
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


def own_name(name: str) -> str:
    """Removes the parts that DDP, FSDP1 and checkpoint wrappers add to the name of a parameter."""
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def full_parameters(root: nn.Module, names: Container[str] | None = None) -> dict[str, Tensor]:
    """Copies every full parameter, or those of ``names``, also of ZeRO-3: a collective where ranks hold shards."""
    return dict(_copies(root, names))


def _copies(root: nn.Module, names: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
    with _summoned(root):
        for name, parameter in root.named_parameters():
            if names is not None and own_name(name) not in names:
                continue
            with _gathered(parameter):
                yield own_name(name), full(parameter).clone()


def full_gradients(root: nn.Module) -> dict[str, Tensor]:
    """Copies every full gradient of trained parameters; FSDP1 shows those of ``use_orig_params`` and full sharding, and
    makes some for frozen ones."""
    with _summoned(root, with_grads=True):
        named = {own_name(name): p.grad for name, p in root.named_parameters() if p.requires_grad}
        return {name: full(gradient).clone() for name, gradient in named.items() if gradient is not None}


def _summoned(root: nn.Module, *, with_grads: bool = False) -> AbstractContextManager[Any]:
    if not isinstance(root, FullyShardedDataParallel):
        return nullcontext()
    return FullyShardedDataParallel.summon_full_params(root, with_grads=with_grads)


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return gathered


def deepspeed_step(
    model: nn.Module, batches: list[dict[str, Any]], *, stage: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Runs a forward and a backward of each micro-batch in a new engine; returns losses and every full gradient."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    settings = zero_settings({"stage": stage, "accumulation": len(batches)})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = []
    try:
        for index, batch in enumerate(batches):
            loss = engine(**batch).loss
            engine.backward(loss)
            losses.append(float(loss.detach()))
            if index < len(batches) - 1:
                engine.step()
        gradients = {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
        return losses, {name: gradient for name, gradient in gradients.items() if gradient is not None}
    finally:
        engine.destroy()
