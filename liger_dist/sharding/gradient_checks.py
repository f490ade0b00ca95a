"""Models whose gradients a strategy drops or mixes without an error: hooks of parameters that it replaces, and experts
as modules, of which FSDP2 reduces only those that ran."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from torch import nn

from liger_dist.errors import LigerDistError
from liger_dist.model.structure import Structure

from .float8 import numbers_of_experts

_TO_CALLER = 7
"""frames from the functions here to the caller of wrap"""
_LATER = {
    "fsdp1": (
        "Hooks that are registered later are not called either: change .grad between backward and optimizer.step(), or "
        "use strategy='fsdp2' or 'ddp'."
    ),
    "fsdp2": (
        "Register them after wrap with register_post_accumulate_grad_hook, which is called with the shard and its "
        "reduced gradient; hooks of register_hook are not called there."
    ),
    "tp": "Register them after wrap.",
}


def check_hooks(parameters: Iterable[tuple[str, nn.Parameter]], strategy: str) -> None:
    """Refuses gradient hooks of ``parameters``, which the strategy replaces by shards, and warns of hooks that only
    read.

    Raises:
        LigerDistError: a trained parameter has a hook of ``register_hook``, which may change its gradient.
    """
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    changed = [name for name, p in trained if p._backward_hooks]
    if changed:
        have = "has a hook on its gradient" if len(changed) == 1 else "have hooks on their gradients"
        raise LigerDistError(
            f"{_listed(changed)} {have} (Tensor.register_hook), and strategy={strategy!r} trains shards in place of "
            f"these parameters, so that it would never run. Use strategy='ddp'. {_LATER.get(strategy, '')}"
        )
    hooked = [name for name, p in trained if getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        warnings.warn(
            f"{_listed(hooked)} {'has' if len(hooked) == 1 else 'have'} hooks of register_post_accumulate_grad_hook, "
            f"and strategy={strategy!r} trains shards instead of these parameters, so that the hooks are never called. "
            f"{_LATER.get(strategy, '')}",
            stacklevel=_TO_CALLER,
        )


def warn_of_experts(model: nn.Module, structure: Structure) -> None:
    """Warns of layers that hold their experts as modules, under FSDP2."""
    counts = numbers_of_experts(structure.decoder.config) - {1}
    names = {module: name for name, module in model.named_modules()}
    found = [names[experts] for experts in _experts(structure.all_layers, counts)]
    if found:
        warnings.warn(
            f"{_listed(found)} {'holds' if len(found) == 1 else 'hold'} experts as modules. FSDP2 reduces the "
            "gradients that a rank has: if the forward skips experts without tokens, and ranks skip different ones, it "
            "adds up gradients of different parameters without an error. liger_dist.verify(model, batch) shows it; use "
            "strategy='fsdp1', or a model that holds its experts in one parameter.",
            stacklevel=_TO_CALLER,
        )


def _experts(layers: Iterable[nn.Module], counts: frozenset[int]) -> Iterator[nn.Module]:
    for layer in layers:
        for module in layer.modules():
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                continue
            # NLLB-MoE holds a dropout beside its experts.
            with_weights = [part for part in module.children() if any(True for _ in part.parameters())]
            if len(with_weights) in counts and any(parameter.requires_grad for parameter in module.parameters()):
                yield module


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
