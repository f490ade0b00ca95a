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
def divergent_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters whose copies differ between processes: whole ones over all processes, DTensors over
    their replicated mesh axes. One all-reduce for each group of processes."""
    copies: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = {}
    flattened = is_inside_fsdp1(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
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
