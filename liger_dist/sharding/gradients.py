"""One backward under any engine, its gradients as this process stores them, and none left afterwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer

        is_stage_3 = not isinstance(optimizer, DeepSpeedZeroOptimizer)
        optimizer.micro_step_id = 0 if is_stage_3 else INITIAL_MICRO_STEP_ID


def has_gradients(root: Any) -> bool:
    """Whether a backward since the last optimiser step has left gradients that count."""
    if is_deepspeed_engine(root) and root.micro_steps % root.gradient_accumulation_steps() != 0:
        return True
    return any(p.grad is not None and bool((p.grad != 0).any()) for p in root.parameters())
