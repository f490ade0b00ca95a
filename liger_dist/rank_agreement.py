"""Compares parameters and gradients over the ranks: shared ones must be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .explain import Explanation, explain
from .record import inner_model, record_of
from .sharding import deepspeed, fsdp1
from .sharding.fsdp2.packed_bytes import PackedBytes
from .sharding.mesh import local_shard
from .sharding.process_groups import collective_device


class GradientErrors:
    """Relative L2 errors of gradients against reference gradients of the same names, over all ranks."""

    def __init__(self, actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
        self._names = list(expected)
        sums = torch.zeros(len(self._names), 2, dtype=torch.float64)
        for row, name in enumerate(self._names):
            found, truth = actual[name], expected[name]
            if found is None and truth is None:
                continue
            found = torch.zeros_like(truth) if found is None else found  # type: ignore[arg-type]
            truth = torch.zeros_like(found) if truth is None else truth
            difference = found.double() - truth.double()
            sums[row] = torch.stack([difference.square().sum(), truth.double().square().sum()]).cpu()
        if dist.is_initialized():
            sums = sums.to(collective_device())
            dist.all_reduce(sums)
        self._sums = sums.cpu()

    def reach(self, names: list[str]) -> bool:
        """True if any gradient of these parameters is not zero in the reference."""
        return any(self._sums[row, 1] > 0 for row, name in enumerate(self._names) if name in names)

    def of(self, names: list[str]) -> float:
        """Computes the error of several parameters together."""
        rows = [row for row, name in enumerate(self._names) if name in names]
        difference, truth = self._sums[rows].sum(0).tolist()
        return float((difference / truth) ** 0.5) if truth > 0 else float(difference**0.5)

    def worst(self) -> tuple[str, float]:
        """Returns the parameter with the largest error. Some gradients are zero but for rounding, so the error is
        relative to at least a thousandth of the largest norm."""
        norms = self._sums[:, 1].sqrt()
        errors = self._sums[:, 0].sqrt() / norms.clamp_min(float(norms.max()) * 1e-3 or 1.0)
        row = int(errors.argmax())
        return self._names[row], float(errors[row])


def disagreements(chosen: Explanation, model: nn.Module) -> list[str]:
    """Lists differences between ranks that should not exist."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    problems = []
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (chosen.adapter, chosen.facts.lines()))
    if any(other != gathered[0] for other in gathered):
        problems.append(f"ranks disagree about the layout: {sorted({str(other[0]) for other in gathered})}")
    copies = _copies(model, chosen.facts.storage.tensor_parallel_size, lambda parameter: parameter)
    names = _divergent(copies, tolerance=0.0)
    if names:
        problems.append(
            f"{len(names)} parameters that should be alike on several ranks are not, such as {names[0]}: load or "
            "initialise the same values everywhere before wrapping"
        )
    return problems


def disagreements_of_gradients(model: nn.Module) -> list[str]:
    """Lists trained parameters of the outermost module whose gradients differ between ranks that should share them.
    Skips DeepSpeed, which reduces all of its parameters, and FSDP1, whose flat parameters are sharded."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    if deepspeed.is_engine(model) or fsdp1.is_inside_fsdp1(inner_model(model)):
        return []
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tuple(name for name, p in trained if p.grad is None))
    partial = sorted(set().union(*gathered) - set(gathered[0]).intersection(*gathered))
    if partial:
        return [
            f"{len(partial)} parameters get a gradient on some ranks and none on others, such as {partial[0]}: experts "
            "without tokens, or branches that depend on the data. FSDP2 sums gradients of different parameters then. "
            "Compute every branch on every rank, with weight 0 where it has no tokens"
        ]
    record = record_of(inner_model(model))
    facts = explain(model).facts
    is_averaged = isinstance(model, DistributedDataParallel) or any(isinstance(p, DTensor) for _, p in trained)
    if not is_averaged and record.strategy.name in ("auto", "deepspeed"):
        return []  # Nothing that is known averages them.
    names = _divergent(
        _copies(model, facts.storage.tensor_parallel_size, lambda parameter: parameter.grad), tolerance=1e-3
    )
    if not names:
        return []
    return [
        f"the gradients of {len(names)} parameters differ between ranks that should share them, such as {names[0]}: "
        "nothing reduces them. Put their modules into the model before it is wrapped"
    ]


@torch.no_grad()
def _copies(
    model: nn.Module, tensor_parallel_size: int, tensor_of: Callable[[nn.Parameter], Tensor | None]
) -> dict[dist.ProcessGroup, list[tuple[str, Tensor]]]:
    """Groups the tensors of parameters that several ranks should share, by name, for each group of such ranks: full
    ones over all ranks, DTensors over their replicated mesh axes, and over the tensor-parallel axis (the last axis of
    the largest mesh) where they are not sharded over it."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    largest_mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    copies: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = {}
    world = dist.group.WORLD
    assert world is not None
    for name, parameter in model.named_parameters():
        tensor = tensor_of(parameter)
        if tensor is None:
            continue
        if isinstance(parameter, DTensor):
            local = local_shard(tensor)
            if tensor_parallel_size > 1 and largest_mesh is not None and parameter.device_mesh.ndim < largest_mesh.ndim:
                group = largest_mesh.get_group(largest_mesh.ndim - 1)
                copies.setdefault(group, []).append((name, local))
            for axis, placement in enumerate(parameter.placements):
                if placement.is_replicate():
                    group = parameter.device_mesh.get_group(axis)
                    copies.setdefault(group, []).append((name, local))
        elif not fsdp1.is_stored_by_fsdp1(parameter) and not deepspeed.is_stored_by_zero3(parameter):
            copies.setdefault(world, []).append((name, tensor))
    return copies


@torch.no_grad()
def _divergent(copies: dict[dist.ProcessGroup, list[tuple[str, Tensor]]], *, tolerance: float) -> list[str]:
    """Lists names of tensors that differ between the ranks of a group by more than ``tolerance`` of their size. Two
    all-reduces per process group."""
    names = []
    for group, held in copies.items():
        sums = torch.stack([_checksum(tensor) for _, tensor in held]).to(collective_device())
        largest, smallest = sums.clone(), sums.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        # For the plain sum, the size is the sum of absolute values.
        sizes = largest[:, [1, 1, 2]]
        differs = (largest - smallest > tolerance * sizes).any(1).tolist()
        names += [name for (name, _), differs in zip(held, differs, strict=True) if differs]
    return names


def _checksum(tensor: Tensor) -> Tensor:
    values = (tensor.packed if isinstance(tensor, PackedBytes) else tensor).double()
    return torch.stack([values.sum(), values.abs().sum(), values.square().sum()]).cpu()
