"""Transforms of torch that a call runs under: torch.compile, torch.func, forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.autograd.forward_ad as fwAD
import torch.utils.checkpoint

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Breaks a compiled graph at ``function``, which then runs in Python: a graph cannot see the state of a call."""
    return cast(F, torch.compiler.disable(function))


def is_compiled_now() -> bool:
    """True while torch.compile traces a frame or writes its guards, in this thread."""
    context: Any = getattr(torch._guards, "CompileContext", None)
    return torch.compiler.is_compiling() or (context is not None and context.current_compile_id() is not None)


def is_transformed() -> bool:
    """True under ``torch.func`` or forward-mode differentiation, where the kernels are not defined."""
    is_functorch: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(is_functorch and is_functorch()) or getattr(fwAD, "_current_level", -1) >= 0


def in_checkpoint() -> bool:
    """True inside ``torch.utils.checkpoint`` (``use_reentrant=False``), in the forward and in the recomputation; False
    in a compiled graph, because its compiler decides what is recomputed."""
    if torch.compiler.is_compiling():
        return False
    ask: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if ask is None else ask(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__


def in_backward() -> bool:
    """True while autograd runs a backward, for example to recompute a checkpoint."""
    task: Any = getattr(torch._C, "_current_graph_task_id", None)
    return bool(task and task() != -1)
