"""Calls of a model inside the DDP or FSDP1 wrapper that :func:`liger_dist.wrap` made, sent through the wrapper.

A loss asked of the inner model bypasses the wrapper's forward: DDP silently skips the averaging of its gradients, FSDP1
has not unsharded the weights. Wrappers made by other code are not searched for: the seam warns of a loss outside of
them, and refuses it under FSDP1.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

_ATTRIBUTE = "_liger_dist_redirect"
Wrapper = DistributedDataParallel | FullyShardedDataParallel


class Redirect:
    """Replaces the forward of ``model``, which is inside ``root`` or inside PEFT's model there."""

    def __init__(self, model: nn.Module, root: Wrapper) -> None:
        self._model = model
        self._own_forward = vars(model).get("forward")
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._root: ref[Wrapper] | None = ref(root)
        self._running = threading.local()
        self._hooks: tuple[RemovableHandle, ...] = (
            root.register_forward_pre_hook(self._enter),
            root.register_forward_hook(self._leave, always_call=True),
        )

        @functools.wraps(type(model).forward)
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            redirect = vars(model).get(_ATTRIBUTE)
            if redirect is None:
                return type(model).forward(model, *args, **kwargs)
            return redirect.run(args, kwargs)

        setattr(model, _ATTRIBUTE, self)
        model.forward = self._installed = MethodType(forward, model)

    def remove(self) -> None:
        """Restores the model's forward; a forward that other code has put on top of this one stays."""
        for hook in self._hooks:
            hook.remove()
        delattr(self._model, _ATTRIBUTE)
        if vars(self._model).get("forward") == self._installed:
            del self._model.forward
            if self._own_forward is not None:
                self._model.forward = self._own_forward

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wrapper's result, or the model's own inside the wrapper's forward."""
        root = None if self._root is None else self._root()
        if root is not None and self.takes(args, kwargs):
            return root(*args, **kwargs)
        own = self._own_forward or MethodType(type(self._model).forward, self._model)
        return own(*args, **kwargs)

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments goes through the wrapper: a loss that trains, and under FSDP1, where the
        model inside has no weights, every call. Evaluation of the model inside DDP stays local."""
        root = None if self._root is None else self._root()
        if root is None or getattr(self._running, "inside", False):
            return False
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        trains = torch.is_grad_enabled() and named.get("labels") is not None
        return trains or isinstance(root, FullyShardedDataParallel)

    def _enter(self, root: nn.Module, args: Any) -> None:
        self._running.inside = True

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        self._running.inside = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Redirect:
        """Follows a copy of the wrapper; the copy of the inner model alone is inside no wrapper."""
        twin = Redirect.__new__(Redirect)
        memo[id(self)] = twin
        twin._model, twin._parameters = copy.deepcopy(self._model, memo), self._parameters
        twin._own_forward = None
        root = None if self._root is None else memo.get(id(self._root()))
        twin._root = None if root is None else ref(root)
        twin._hooks, twin._running = (), threading.local()
        twin._installed = MethodType(self._installed.__func__, twin._model)
        return twin

    def __reduce__(self) -> Any:
        return _restored, (self._model,)


def _restored(model: nn.Module) -> None:
    """In a file, a model is inside no wrapper; loaded, it has the forward of its class."""
