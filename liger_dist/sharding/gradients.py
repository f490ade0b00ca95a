"""One backward under any engine, its gradients as this process stores them, and none left afterwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import fsdp2


def is_deepspeed_engine(root: nn.Module) -> bool:
    """Whether ``deepspeed.initialize`` returned ``root``."""
    return callable(getattr(root, "set_gradient_accumulation_boundary", None))


def backward(root: Any, loss: Tensor) -> None:
    """The backward of a micro-batch after which the engine reduces gradients."""
    if not is_deepspeed_engine(root):
        loss.backward()
        return
    before = root._is_gradient_accumulation_boundary
    root.set_gradient_accumulation_boundary(True)
    try:
        root.backward(loss)
    finally:
        root._is_gradient_accumulation_boundary = before


def local_gradients(root: nn.Module) -> dict[str, Tensor | None]:
    """A copy of the gradient of every trained parameter, by its name, alike on all ranks: what this process stores of
    it, None for nothing; or all of it under DeepSpeed (a collective under ZeRO)."""
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in root.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if is_deepspeed_engine(root):
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(parameter)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        gradients[name] = None if gradient is None else gradient.detach().clone()
    return gradients


def clear_gradients(root: Any) -> None:
    """As after an optimiser step, without the step."""
    for parameter in root.parameters():
        parameter.grad = None
    if not is_deepspeed_engine(root):
        return
    optimizer = root.optimizer
    optimizer.zero_grad()
    # ZeRO and the bf16 optimiser keep what they have reduced until the step.
    if hasattr(optimizer, "clear_hp_grads"):
        optimizer.clear_hp_grads()
    if hasattr(optimizer, "averaged_gradients"):
        optimizer.averaged_gradients.clear()
    if hasattr(optimizer, "micro_step_id"):
        optimizer.micro_step_id = _first_micro_step(optimizer)


def unfinished_step(root: Any) -> str | None:
    """What of an optimiser step has begun and not ended, as a clause; None between steps."""
    if is_deepspeed_engine(root) and _has_begun_under_deepspeed(root):
        return "DeepSpeed has gradients that wait for engine.step()"
    if any(p.grad is not None and bool((p.grad != 0).any()) for p in root.parameters()):
        return "gradients are waiting for an optimiser step"
    return fsdp2.unfinished_reduction(root)


def _first_micro_step(optimizer: Any) -> int:
    """ZeRO-1 and 2 count from -1, so that a backward makes it 0; ZeRO-3 counts from 0 and keeps a flag until the next
    forward."""
    return 0 if _is_stage_3(optimizer) else -1


def _is_stage_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "parameter_offload")


def _has_begun_under_deepspeed(engine: Any) -> bool:
    optimizer = engine.optimizer
    in_window = engine.micro_steps % engine.gradient_accumulation_steps() != 0
    counted = getattr(optimizer, "micro_step_id", -1) > _first_micro_step(optimizer)
    reduced = _is_stage_3(optimizer) and bool(optimizer._epilogue_ran_this_backward)
    kept = (getattr(parameter, "_hp_grad", None) for parameter in engine.parameters())
    return in_window or counted or reduced or any(g is not None and bool((g != 0).any()) for g in kept)
