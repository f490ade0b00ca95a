"""Who listens to a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

FRAMEWORKS = ("torch.distributed.", "deepspeed.")
"""whose hooks gather, move and free tensors, and change no number"""


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody other than a sharding framework is called around the module, or in its place."""
    return "forward" in vars(module) or any(not _is_frameworks(hook) for hook in _hooks(module))


def _hooks(module: nn.Module) -> Iterator[Any]:
    for own in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ):
        yield from own.values()
    everywhere = nn.modules.module
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks"):
        yield from getattr(everywhere, name).values()


def _is_frameworks(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(FRAMEWORKS)
