"""What a call runs under: torch.compile, torch.func, forward-mode differentiation, checkpoints, CUDA graphs."""

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


def is_traced() -> bool:
    """True where torch.compile traces, or a transform of torch.func or forward-mode differentiation is active."""
    return torch.compiler.is_compiling() or is_transformed()


def is_captured() -> bool:
    """True while a CUDA graph records the current stream, where the host cannot read what is on the GPU."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_checkpoint() -> bool:
    """True inside ``torch.utils.checkpoint`` (``use_reentrant=False``), in the forward and in the recomputation; False
    in a compiled graph, because its compiler decides what is recomputed."""
    return _checkpoint_hook() is not None


def _checkpoint_hook() -> Any:
    """Returns the function with which a checkpoint saves tensors now; None outside of checkpoints."""
    if torch.compiler.is_compiling():
        return None
    ask: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if ask is None else ask(False)
    pack = None if hooks is None else hooks[0]
    return pack if getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__ else None


def checkpoint_frame() -> Any:
    """Returns torch's record of the checkpoint (``use_reentrant=False``) whose first forward runs; its
    ``recompute_fn`` is called in the backward. None outside, and in the recomputation."""
    hook = _checkpoint_hook()
    if hook is None or hook.__closure__ is None:
        return None
    closed = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
    frame = closed["frame"].cell_contents if "frame" in closed else None
    return frame if hasattr(frame, "recompute_fn") else None


def in_backward() -> bool:
    """True while autograd runs a backward, for example to recompute a checkpoint."""
    return backward_id() is not None


def backward_id() -> int | None:
    """Returns a number of the running backward that no other one has; None outside."""
    task: Any = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if task is None else int(task())
    return None if number == -1 else number


def keeps_graph() -> bool:
    """True if the running backward retains its graph; also if torch has no such query, which costs a copy."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
