"""Clips gradients of models whose parameters are sharded over different meshes, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .errors import LigerDistError


@torch.no_grad()
def clip_grad_norm_(parameters: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips the gradients of all parameters together, like ``torch.nn.utils.clip_grad_norm_``, which cannot combine
    norms over several meshes.

    Gradients may be DTensors on any number of meshes (a vocab-parallel or tensor-parallel lm_head has another one) and
    full tensors, which are equal on all ranks and therefore count once. The host is not synchronised.

    Args:
        parameters: the model (under FSDP1 and DDP: the wrapper), or its parameters.
        max_norm: the norm after clipping; infinity, or 0, to leave gradients as they are.
        norm_type: order of the norm; may be infinity.

    Returns:
        The norm before clipping, a ``torch.Tensor`` of shape ``[]``, equal on every rank. If it is NaN or Inf, the
        gradients are unchanged, so that the parameter can be identified; FSDP1's method, however, makes all of them
        NaN.

    Raises:
        LigerDistError: ``max_norm`` is negative or NaN; parameters of FSDP1 without their wrapper, or of ZeRO, whose
            engine clips.
    """
    if not max_norm >= 0:
        raise LigerDistError(f"max_norm is {max_norm}; expected a number of at least 0.")
    limit = max_norm or float("inf")
    if isinstance(parameters, FullyShardedDataParallel):
        return parameters.clip_grad_norm_(limit, norm_type)
    if isinstance(parameters, nn.Module):
        _refuse_module(parameters)
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            raise LigerDistError(
                "the parameters are DeepSpeed's, whose engine clips in its step; set gradient_clipping in its "
                "configuration."
            )
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    if not by_mesh:
        return torch.zeros(())
    gradients = [[p.grad for p in group if p.grad is not None] for group in by_mesh.values()]
    norms = [nn.utils.get_total_norm(group, norm_type) for group in gradients]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = nn.utils.get_total_norm([norm.to(full[0].device) for norm in full], norm_type)
    # A norm that is not finite is replaced by 0, so that torch clamps the factor limit / 0 to 1.
    finite = torch.where(total.isfinite(), total, 0.0)
    for group in by_mesh.values() if limit < float("inf") else ():
        nn.utils.clip_grads_with_norm_(group, limit, finite)
    return total


def _refuse_module(module: nn.Module) -> None:
    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        raise LigerDistError(
            f"{type(module).__name__} holds FSDP1 units, whose norm only their root can add up; give the "
            "FullyShardedDataParallel module that wraps the model."
        )
    if hasattr(module, "zero_optimization_stage"):
        raise LigerDistError(
            "the model is a DeepSpeed engine, which clips in its step; set gradient_clipping in its configuration."
        )
