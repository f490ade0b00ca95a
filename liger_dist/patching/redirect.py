"""Calls of a model that sits inside a wrapper (DDP, FSDP1), sent through the wrapper.

A loss asked of the inner model misses what the wrapper does around its forward: under DDP its gradients are not
averaged, without a word; under FSDP1 the weights are not there.
"""

from __future__ import annotations

import functools
import inspect
import threading
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Redirect:
    """The forward of a model inside a wrapper. Installed on both, removed as a whole."""

    def __init__(self, model: nn.Module, root: nn.Module, *, every_call: bool) -> None:
        """``every_call=False`` redirects only losses that train; evaluation of the inner model stays local."""
        self._model, self._root, self._every_call = model, root, every_call
        self._own_forward = model.forward
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._running = threading.local()
        self._hooks: tuple[RemovableHandle, ...] = (
            root.register_forward_pre_hook(lambda *_: self._set_running(True)),
            root.register_forward_hook(lambda *_: self._set_running(False), always_call=True),
        )
        functools.update_wrapper(self, self._own_forward)
        model.forward = self

    def remove(self) -> None:
        """The model's forward is its own again."""
        for hook in self._hooks:
            hook.remove()
        del self._model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapper's result, or the model's own inside the wrapper's forward."""
        return self._root(*args, **kwargs) if self.takes(args, kwargs) else self._own_forward(*args, **kwargs)

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments goes through the wrapper."""
        if getattr(self._running, "inside", False):
            return False
        if self._every_call:
            return True
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        return torch.is_grad_enabled() and named.get("labels") is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is inside no wrapper: it gets the forward of its class."""
        copied = memo[id(self._model)]
        return MethodType(type(copied).forward, copied)

    def _set_running(self, inside: bool) -> None:
        self._running.inside = inside
