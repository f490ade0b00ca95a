"""Parameters that are trained and whose gradients nothing averages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from liger_dist.errors import LigerDistError
from liger_dist.peft_layers import adapters_of
from liger_dist.tracing import untraced

from .ddp import averaged_parameters
from .fsdp1 import is_flat, is_stored_by_fsdp1
from .fsdp2 import managed_parameters
from .vocab_parallel import row_shards_of


def refuse_unreduced(root: nn.Module, strategy: str) -> None:
    """Refuses trained parameters of ``root`` whose gradients its framework does not reduce. Does nothing where DDP,
    FSDP1 and FSDP2 are not: tensor-parallel ranks see the same tokens, and other frameworks reduce later.

    Raises:
        LigerDistError: with the names.
    """
    names = unreduced_parameters(root)
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LigerDistError(
            f"nothing averages the gradients of {names[0]}{others} over the ranks: {strategy!r} averages those of "
            "parameters that were trained when liger_dist.wrap was called. Make PEFT's adapters first (get_peft_model, "
            "PeftModel.from_pretrained, add_adapter), then call liger_dist.wrap on the result."
        )


def unreduced_parameters(root: nn.Module) -> list[str]:
    """Names of the trained parameters of ``root`` whose gradients neither DDP nor FSDP reduces."""
    kinds = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    if not any(isinstance(module, kinds) for module in root.modules()):
        return []
    averaged = set(averaged_parameters(root))
    managed = managed_parameters(root)
    return [
        f"{module_name}.{name}".lstrip(".")
        for module_name, module in root.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
        and parameter not in averaged
        and (module, name) not in managed
        and row_shards_of(module) is None
        and not (is_flat(name) or is_stored_by_fsdp1(parameter))
    ]


def refuse_unreduced_later(root: nn.Module, outer: nn.Module, model: nn.Module, strategy: str) -> None:
    """Makes forwards with gradients refuse parameters that were added to the sharded ``root``: the first one, and the
    first after PEFT's adapters have changed. Others cost no walk over the model."""
    check = partial(_check, root, outer, model, strategy, [])
    for module in dict.fromkeys((outer, model)):
        module.register_forward_pre_hook(check, prepend=True)


@untraced
def _check(
    root: nn.Module, outer: nn.Module, model: nn.Module, strategy: str, checked: list[Any], *_: Any
) -> None:
    if not torch.is_grad_enabled():
        return
    adapters = adapters_of(outer, model)
    if checked != [adapters]:
        refuse_unreduced(root, strategy)
        checked[:] = [adapters]
