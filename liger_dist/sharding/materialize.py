"""Values for a model built on the meta device, after it was sharded.

Each decoder layer (or single module) is made whole on the device, initialised by the model's own rule, cut to this
rank's shards and freed again, so no rank ever holds more than its shards and one layer. Values do not depend on the
sharding: one seed gives one model under every strategy and world size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from liger_dist.sharding.devices import collective_device

Initializer = Callable[[nn.Module], None]
"""sets the parameters and buffers that a module itself owns"""


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter of ``model`` has no storage yet."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def materialize(
    model: nn.Module, initialize: Initializer, *, layers: Collection[nn.Module], device: torch.device
) -> None:
    """Gives ``model`` storage on ``device`` and calls ``initialize`` on every module, children first.

    The random numbers come from rank 0's generator (one broadcast of one number), whatever the other ranks' seeds are.
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
    seed = torch.randint(2**62, ())
    if dist.is_initialized():
        seed = seed.to(collective_device())
        dist.broadcast(seed, src=0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        _initialize(model, initialize, frozenset(layers))


def _initialize(module: nn.Module, initialize: Initializer, layers: frozenset[nn.Module]) -> None:
    if module in layers:
        with _whole(module, recurse=True):
            module.apply(lambda child: initialize(child))
        return
    for child in module.children():
        _initialize(child, initialize, layers)
    with _whole(module, recurse=False):
        initialize(module)


@contextmanager
def _whole(module: nn.Module, *, recurse: bool) -> Iterator[None]:
    """Puts whole tensors in the place of sharded parameters, and cuts them to the shards at the end."""
    sharded: list[tuple[nn.Module, str, DTensor]] = []
    for owner in module.modules() if recurse else (module,):
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, DTensor):
                sharded.append((owner, name, parameter))
    for owner, name, shard in sharded:
        full = torch.empty(shard.shape, dtype=shard.dtype, device=shard.to_local().device)
        owner._parameters[name] = nn.Parameter(full, requires_grad=False)
    try:
        yield
        for owner, name, shard in sharded:
            whole = owner._parameters[name]
            assert whole is not None
            cut = distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)
            shard.to_local().copy_(cut.to_local())
    finally:
        for owner, name, shard in sharded:
            owner._parameters[name] = cast(nn.Parameter, shard)
