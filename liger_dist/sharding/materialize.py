"""Initialises a sharded model that was built on the meta device.

Each decoder layer (or single module) gets full tensors, is initialised by the model's rule and is sharded again, so
no rank holds more than its shards and one layer. Values do not depend on the sharding: one seed gives one model under
every strategy and world size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from liger_dist.errors import LigerDistError
from liger_dist.model.quantized import four_bit_stacks, is_four_bit

from .base import Initializer
from .mesh import local_shard
from .process_groups import collective_device


def is_meta(model: nn.Module) -> bool:
    """True if the parameters of ``model`` are on the meta device.

    Raises:
        LigerDistError: some parameters are and some are not, or they are of 4 bits.
    """
    names: dict[bool, list[str]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        names[parameter.is_meta].append(name)
    if names[True] and names[False]:
        raise LigerDistError(
            f"{names[True][0]} is on the meta device and {names[False][0]} is not; put all of the model there "
            '(with torch.device("meta"): ...) or none of it.'
        )
    stacks = {id(stack.packed) for _, _, stack in four_bit_stacks(model)}
    quantized = [n for n, p in model.named_parameters() if p.is_meta and (is_four_bit(p) or id(p) in stacks)]
    if quantized:
        raise LigerDistError(
            f"{quantized[0]} is a weight of 4 bits on the meta device, which no rule initialises; load it "
            "(from_pretrained inside liger_dist.sharded_loading())."
        )
    return bool(names[True])


def values_of_rank_0(model: nn.Module, undo: ExitStack) -> Initializer:
    """Returns a rule that broadcasts the values of rank 0, module by module, for a model that is on the meta device on
    all other ranks. Rank 0's model is moved there as well; its values stay in memory until the rule is freed.

    Args:
        undo: restores rank 0's model.
    """
    values: dict[tuple[nn.Module, str], torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules() if dist.get_rank() == 0 else ():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for names in tables:
            for name, value in list(names.items()):
                if value is None:
                    continue
                values[module, name] = value.detach()
                if id(value) not in moved:
                    empty = torch.empty_like(value, device="meta")
                    is_parameter = isinstance(value, nn.Parameter)
                    moved[id(value)] = nn.Parameter(empty, value.requires_grad) if is_parameter else empty
                undo.callback(names.__setitem__, name, value)
                names[name] = moved[id(value)]

    def broadcast(module: nn.Module) -> None:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.is_meta:
                continue
            sent = tensor.detach().to(collective_device())
            if dist.get_rank() == 0:
                sent = values[module, name].to(collective_device()).contiguous()
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)

    return broadcast


@torch.no_grad()
def materialize(
    model: nn.Module, initialize: Initializer, *, layers: Collection[nn.Module], device: torch.device
) -> None:
    """Gives ``model`` storage on ``device`` and calls ``initialize`` on every module, children first.

    The random numbers come from rank 0's generator (one broadcast of one value), whatever the other ranks' seeds are.
    A shared parameter is initialised with the first module that has it.

    Raises:
        LigerDistError: the model's rule leaves a parameter or buffer without values.
    """
    names_by_parameter: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names_by_parameter.setdefault(parameter, []).append((module, name))
    model.to_empty(device=device)
    for owners in names_by_parameter.values():
        first, first_name = owners[0]
        for module, name in owners[1:]:
            module._parameters[name] = first._parameters[first_name]
    for tensor in (*model.parameters(), *model.buffers()):
        _poison(local_shard(tensor))
    seed = torch.randint(2**62, (), device="cpu")
    if dist.is_initialized():
        seed = seed.to(collective_device())
        dist.broadcast(seed, src=0)
    # The caller may still be in the context of the meta device, in which the model was built.
    with torch.device("cpu"), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        _initialize(model, initialize, frozenset(layers), set())
    for name, buffer in model.named_buffers():
        _check_written(name, buffer)
    _check_flags(model, initialize, device)


def _check_flags(model: nn.Module, initialize: Initializer, device: torch.device) -> None:
    """Runs the rule once more over inverted bools: buffers that it writes come out the same. Any bool is a plausible
    value, so no marker value can show an unwritten one."""
    for owner_name, owner in model.named_modules():
        before = {name: b.clone() for name, b in owner._buffers.items() if b is not None and b.dtype == torch.bool}
        if not before:
            continue
        devices = [device] if device.type == "cuda" else []
        with _throwaway(owner), torch.device("cpu"), torch.random.fork_rng(devices=devices):
            initialize(owner)
            after = dict(owner._buffers)
        for name, value in before.items():
            written = after[name]
            assert written is not None
            if not torch.equal(written, value):
                raise _unwritten(f"{owner_name}.{name}".lstrip("."))


@contextmanager
def _throwaway(owner: nn.Module) -> Iterator[None]:
    """Puts the parameters of ``owner`` and below on the meta device within the context, because a rule may write into a
    child. Buffers are copies; the owner's bools are inverted."""
    kept = [(module, dict(module._parameters), dict(module._buffers)) for module in owner.modules()]
    for module, parameters, buffers in kept:
        for name, parameter in parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, buffer in buffers.items():
            if buffer is not None:
                is_flag = module is owner and buffer.dtype == torch.bool
                module._buffers[name] = buffer.logical_not() if is_flag else buffer.clone()
    try:
        yield
    finally:
        for module, parameters, buffers in kept:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _initialize(module: nn.Module, initialize: Initializer, layers: frozenset[nn.Module], done: set[int]) -> None:
    """Initialises ``module`` and its children; ``done`` holds the ids of parameters that have values already."""
    if module in layers:
        with _full(tuple(module.modules()), done):
            module.apply(lambda child: initialize(child))
        return
    for child in module.children():
        _initialize(child, initialize, layers, done)
    with _full((module,), done):
        initialize(module)


@contextmanager
def _full(owners: tuple[nn.Module, ...], done: set[int]) -> Iterator[None]:
    """Swaps the owners' parameters for full tensors within the context; copies their values to the shards at the
    end."""
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                swapped.append((owner, name, parameter))
    for owner, name, parameter in swapped:
        device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        _poison(full)
        owner._parameters[name] = nn.Parameter(full, requires_grad=False)
    try:
        yield
        for owner, name, parameter in swapped:
            values = owner._parameters[name]
            if id(parameter) in done or values is None:
                continue
            done.add(id(parameter))
            _check_written(f"{name} of {type(owner).__name__}", values)
            if isinstance(parameter, DTensor):
                cut = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(cut.to_local())
            else:
                parameter.copy_(values)
    finally:
        for owner, name, parameter in swapped:
            owner._parameters[name] = parameter


def _poison(tensor: torch.Tensor) -> None:
    """Fills fresh storage with values that no rule would choose, so that unwritten ones are detected."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(False)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _check_written(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        is_untouched = bool(tensor.isnan().any())
    else:
        is_untouched = tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())
    if is_untouched and tensor.numel() > 0:
        raise _unwritten(name)


def _unwritten(name: str) -> LigerDistError:
    return LigerDistError(
        f"the model's rule to initialise itself leaves {name} without values; build the model on a real device instead "
        "of the meta device, or define the rule (_init_weights)."
    )
