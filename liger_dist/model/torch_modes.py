"""What a call runs under: torch.compile, torch.func, forward-mode differentiation, checkpoints, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any, TypeVar, cast

import torch
import torch.autograd.forward_ad as fwAD
import torch.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes

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
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
    return _frame_of(_checkpoint_hook())


def checkpoint_frames() -> list[Any]:
    """Returns the records of all checkpoints around the caller, also below other hooks of saved tensors."""
    autograd: Any = torch._C._autograd
    if torch.compiler.is_compiling() or not hasattr(autograd, "_top_saved_tensors_default_hooks"):
        return []
    hooks: list[tuple[Any, Any]] = []
    try:
        while (hook := autograd._top_saved_tensors_default_hooks(False)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            hooks.append(hook)
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
    return [frame for pack, _ in hooks if (frame := _frame_of(pack)) is not None]


def _frame_of(hook: Any) -> Any:
    if getattr(hook, "__module__", None) != torch.utils.checkpoint.__name__ or hook.__closure__ is None:
        return None
    closed = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
    frame = closed["frame"].cell_contents if "frame" in closed else None
    return frame if hasattr(frame, "recompute_fn") else None


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Within, dispatch modes see nothing, as that of selective checkpointing, which saves results by their order."""
    with _disable_current_modes():
        yield


_EAGER_LOCK = Lock()
_EAGER: list[ExitStack] = []
"""one for each running :func:`uncompiled`; the first one has set the stance"""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, compiled functions run in Python, in all threads; until the last of several contexts ends."""
    with _EAGER_LOCK, ExitStack() as stack:
        if not _EAGER:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _EAGER.append(stack.pop_all())
    try:
        yield
    finally:
        with _EAGER_LOCK:
            last = _EAGER.pop()
            last.close()


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
