"""Parameters that several processes hold copies of, and whether the copies agree."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .devices import collective_device
from .fsdp1 import is_inside_fsdp1
from .zero3 import is_stored_by_zero3


@torch.no_grad()
def divergent_parameters(model: nn.Module, tensor_parallel_size: int) -> list[str]:
    """Names of the parameters whose copies differ between processes: whole ones over all processes, DTensors over
    their replicated mesh axes, and over the tensor-parallel axis (the last one of the parameters that have it) where
    they are not split over it. Two all-reduces for each group of processes."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    largest_mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    copies: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = {}
    flattened = is_inside_fsdp1(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            if tensor_parallel_size > 1 and largest_mesh is not None and parameter.device_mesh.ndim < largest_mesh.ndim:
                group = largest_mesh.get_group(largest_mesh.ndim - 1)
                copies.setdefault(group, []).append((name, parameter.to_local()))
            for axis, placement in enumerate(parameter.placements):
                if placement.is_replicate():
                    group = parameter.device_mesh.get_group(axis)
                    copies.setdefault(group, []).append((name, parameter.to_local()))
        elif not flattened and not is_stored_by_zero3(parameter):
            copies.setdefault(dist.distributed_c10d._get_default_group(), []).append((name, parameter))
    names = []
    for group, held in copies.items():
        sums = torch.stack([_checksum(tensor) for _, tensor in held]).to(collective_device())
        largest, smallest = sums.clone(), sums.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        names += [
            name for (name, _), differs in zip(held, (largest != smallest).any(1).tolist(), strict=True) if differs
        ]
    return names


def _checksum(tensor: Tensor) -> Tensor:
    values = tensor.double()
    return torch.stack([values.sum(), values.abs().sum(), values.square().sum()]).cpu()
