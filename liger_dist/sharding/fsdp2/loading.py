"""Shards parameters while ``from_pretrained`` reads them, so that no rank ever has more than its shards and one
parameter, and later, when FSDP2 shards a layer, that layer.

transformers registers each parameter as soon as it has read (and quantised) it. A hook on the registration keeps the
rank's rows of it, in a DTensor. ``FSDP2`` all-gathers them layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from liger_dist.errors import LigerDistError
from liger_dist.model.class_swap import swapped
from liger_dist.model.four_bit_experts import LOADED, READ
from liger_dist.model.quantized import as_bytes, is_four_bit
from liger_dist.sharding.mesh import require_process_group
from liger_dist.sharding.process_groups import compute_device

from .packed_bytes import PackedBytes


@contextmanager
def sharded_loading() -> Iterator[None]:
    """Shards each parameter over all ranks as soon as ``from_pretrained`` has read it, within the context. Wrap the
    model with :class:`FSDP2`, which all-gathers and shards one layer after another::

        with liger_dist.sharded_loading():
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = liger_dist.wrap(get_peft_model(base, LoraConfig(...)), "fsdp2")

    Weights of 4 bits are quantised where they are read: pass ``device_map={"": device}`` to do so on the GPU. Load
    without it for PEFT methods that compute initial values from the base's weights (DoRA, PiSSA, OLoRA, LoftQ, CorDA,
    EVA), and for ``resize_token_embeddings``. All ranks read the files.

    Raises:
        LigerDistError: there is no process group.
    """
    ranks = require_process_group("fsdp2", dist.get_world_size() if dist.is_initialized() else None)
    mesh = init_device_mesh(compute_device().type, (ranks,), mesh_dim_names=("fsdp",))
    from transformers import modeling_utils

    hook = register_module_parameter_registration_hook(partial(_keep_shard, mesh))  # type: ignore[arg-type]
    try:
        # It would allocate the memory of the full model at once.
        with swapped(vars(modeling_utils), "caching_allocator_warmup", lambda *args, **kwargs: None):
            yield
    finally:
        hook.remove()


def _keep_shard(mesh: DeviceMesh, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Returns the shard of a parameter that a module registers; None to keep the parameter."""
    # The mark says that transformers has read it: further ones, such as PEFT's, get their values later, on all ranks
    # alike.
    is_read = getattr(parameter, READ, False)
    if parameter is None or not is_read or parameter.is_meta or isinstance(parameter, DTensor) or parameter.dim() == 0:
        return None
    data: Tensor = parameter.data
    attributes: dict[str, Any] = {}
    if is_four_bit(parameter):
        data, attributes = as_bytes(module, parameter), dict(vars(parameter))
    elif type(parameter) is not nn.Parameter or type(data) is not Tensor:
        return None
    rows = data.chunk(mesh.size())
    local = rows[mesh.get_local_rank()] if mesh.get_local_rank() < len(rows) else data[:0]
    # A copy, so that the full parameter is freed.
    local = local.to(compute_device(), copy=True, memory_format=torch.contiguous_format)
    stride = torch.empty(data.shape, device="meta").stride()
    shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=data.shape, stride=stride)
    result = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    # PEFT reads the kind of quantisation there, and transformers that the parameter has values.
    vars(result).update(attributes | {READ: True})
    vars(module).setdefault(LOADED, set()).add(name)
    return result


def loaded_shards(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields module name, module and name of each parameter of ``model`` that :func:`sharded_loading` has sharded; of a
    tied one, those of the module that registered it first."""
    for prefix, module in model.named_modules():
        for name in vars(module).get(LOADED, ()):
            if isinstance(module._parameters.get(name), DTensor):
                yield prefix, module, name


def refuse_loaded_shards(model: nn.Module, strategy: str) -> None:
    """Raises:
    LigerDistError: a strategy other than FSDP2 for a model that was loaded by :func:`sharded_loading`.
    """
    for prefix, _, name in loaded_shards(model) if strategy != "fsdp2" else ():
        raise LigerDistError(
            f"{prefix}.{name} was sharded by liger_dist.sharded_loading(), whose models need strategy='fsdp2', but the "
            f"strategy is {strategy!r}; load the model without it, or use FSDP2."
        )


class LoadedShards:
    """The parameters of a model that :func:`sharded_loading` has sharded, to be all-gathered part by part."""

    def __init__(self, root: nn.Module) -> None:
        loaded = {module._parameters[name] for _, module, name in loaded_shards(root)}
        self._users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in root.modules() if loaded else ():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in loaded:
                    self._users.setdefault(parameter, []).append((module, name))

    @torch.no_grad()
    def gather(self, *parts: nn.Module, packs: bool = True) -> None:
        """Replaces shards in ``parts`` by full parameters, wherever the model uses them. One all-gather each.

        Args:
            packs: True for bytes as FSDP2 shards them; False for those that it leaves alone.
        """
        inside = dict.fromkeys(parameter for part in parts for parameter in part.parameters() if self._users)
        for shard in [parameter for parameter in inside if parameter in self._users]:
            assert isinstance(shard, DTensor)
            data = shard.full_tensor()
            is_packed = packs and data.dtype == torch.uint8
            full = nn.Parameter(PackedBytes(data) if is_packed else data, requires_grad=shard.requires_grad)
            for module, name in self._users.pop(shard):
                module._parameters[name] = full
                vars(module).get(LOADED, set()).discard(name)
