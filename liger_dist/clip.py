"""Clips gradients of models whose parameters are sharded over different meshes, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .errors import LigerDistError
from .losses.collectives import device_for
from .model.stages import stage_of
from .sharding.deepspeed import has_gradients_in_engine
from .sharding.fsdp1 import is_stored_by_fsdp1
from .sharding.mesh import local_shard


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clips the gradients of all parameters together, like ``torch.nn.utils.clip_grad_norm_``, which cannot combine
    norms over several meshes.

    Gradients may be DTensors on any number of meshes (a vocab-parallel or tensor-parallel lm_head has another one) and
    full tensors, which are equal on all ranks and therefore count once. The host is not synchronised, unless
    ``error_if_nonfinite`` is True.

    Args:
        parameters: the model (under FSDP1 and DDP: the wrapper), its ``parameters()`` or ``named_parameters()``.
        max_norm: the norm after clipping; infinity, or 0, to leave gradients as they are.
        norm_type: order of the norm; may be infinity.
        error_if_nonfinite: True to raise if the norm is NaN or Inf, on every rank.
        foreach: as torch's: False multiplies one gradient after the other.
        group: of the ranks of a pipeline, each of which gives the parameters of all its stages; they are clipped by one
            norm. One all-reduce of one value.

    Returns:
        The norm before clipping, a ``torch.Tensor`` of shape ``[]``, equal on every rank. If it is NaN or Inf, the
        gradients are unchanged, so that the parameter can be identified; FSDP1's method, however, makes all of them
        NaN.

    Raises:
        LigerDistError: ``max_norm`` is negative or NaN; parameters of FSDP1 without their wrapper, or of ZeRO, whose
            engine clips; a stage of a pipeline without ``group``.
        RuntimeError: with ``error_if_nonfinite``, the norm is NaN or Inf.
    """
    if not max_norm >= 0:
        raise LigerDistError(f"max_norm is {max_norm}; expected a number of at least 0.")
    limit = max_norm or float("inf")
    if isinstance(parameters, FullyShardedDataParallel):
        return _finite(parameters.clip_grad_norm_(limit, norm_type), error_if_nonfinite)
    if isinstance(parameters, nn.Module):
        _refuse_module(parameters, group)
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    by_layout: dict[Any, list[Tensor]] = {}
    for given in parameters:
        parameter = given[1] if isinstance(given, tuple) else given
        if is_stored_by_fsdp1(parameter):
            raise LigerDistError(
                "the parameters are FSDP1's, of which every rank has another part; give the FullyShardedDataParallel "
                "module that wraps the model."
            )
        if has_gradients_in_engine(parameter):
            raise LigerDistError(
                "the parameters are DeepSpeed's, whose engine clips in its step; set gradient_clipping in its "
                "configuration."
            )
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            by_layout.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient)
        elif gradient is not None:
            by_layout.setdefault(None, []).append(gradient)
    if not by_layout and group is None:
        return torch.zeros(())
    norms = [_norm(gradients, layout, norm_type) for layout, gradients in by_layout.items()]
    total = nn.utils.get_total_norm([norm.to(norms[0].device) for norm in norms], norm_type)
    if group is not None:
        total = _of_group(total, group, norm_type)
    _finite(total, error_if_nonfinite)
    if limit < float("inf"):
        # A norm that is not finite is replaced by 0, so that torch clamps the factor limit / 0 to 1.
        finite = torch.where(total.isfinite(), total, 0.0)
        by_dtype: dict[torch.dtype, list[_Gradient]] = {}
        for gradient in (gradient for gradients in by_layout.values() for gradient in gradients):
            by_dtype.setdefault(gradient.dtype, []).append(_Gradient(local_shard(gradient)))
        for dtype, shards in by_dtype.items():
            # With a factor of another dtype torch multiplies one tensor after the other.
            norm = finite.clamp(max=torch.finfo(dtype).max).to(dtype)
            nn.utils.clip_grads_with_norm_(shards, limit, norm, foreach)  # type: ignore[arg-type]
    return total


def _of_group(norm: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Combines the norms ``[]`` of the ranks of a pipeline, whose dtypes may differ."""
    is_largest = norm_type == float("inf")
    total = norm.to(device_for(group), torch.float64)
    total = total if is_largest else total**norm_type
    dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group)
    return (total if is_largest else total ** (1.0 / norm_type)).to(norm)


def _finite(norm: Tensor, is_asked: bool) -> Tensor:
    if is_asked and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so that they cannot be clipped; leave error_if_nonfinite out "
            "to go on with gradients that are not clipped."
        )
    return norm


class _Gradient(NamedTuple):
    """Shard of a gradient, as the attribute that ``clip_grads_with_norm_`` reads of a parameter."""

    grad: Tensor


def _norm(gradients: list[Tensor], layout: Any, norm_type: float) -> Tensor:
    """Computes the norm ``[]`` of gradients with one mesh and placements (None for full tensors), equal on all ranks.

    Of shards it is computed on each rank and reduced once: operators on DTensors cost 10 us of host time a tensor.
    """
    mesh: Any = None if layout is None else layout[0]
    placements = () if layout is None else layout[1]
    if norm_type <= 0 or any(placement.is_partial() for placement in placements):
        norm = nn.utils.get_total_norm(gradients, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # An uneven shard may be empty, of which there is no largest element.
    shards = [shard for shard in map(local_shard, gradients) if shard.numel() > 0]
    norm = nn.utils.get_total_norm(shards, norm_type) if shards else local_shard(gradients[0]).new_zeros(())
    norm = norm.to(torch.promote_types(norm.dtype, torch.float32))
    sharded = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    is_largest = norm_type == float("inf")
    total = norm if is_largest or not sharded else norm**norm_type
    for axis in sharded:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=mesh.get_group(axis))
    return total if is_largest or not sharded else total ** (1.0 / norm_type)


def _refuse_module(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    if stage_of(module) is not None and group is None:
        raise LigerDistError(
            f"the model is {stage_of(module)} of a pipeline, whose stages would be clipped by different norms; give "
            "the parameters of all stages of this rank, and group=, the process group of the pipeline."
        )
    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        raise LigerDistError(
            f"{type(module).__name__} holds FSDP1 units, whose norm only their root can add up; give the "
            "FullyShardedDataParallel module that wraps the model."
        )
    if hasattr(module, "zero_optimization_stage"):
        raise LigerDistError(
            "the model is a DeepSpeed engine, which clips in its step; set gradient_clipping in its configuration."
        )
