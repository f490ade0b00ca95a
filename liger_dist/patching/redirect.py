"""Calls of a model that sits inside a wrapper (DDP, FSDP1), sent through the wrapper.

A loss asked of the inner model misses what the wrapper does around its forward: under DDP its gradients are not
averaged, without a word; under FSDP1 the weights are not there. The same idea serves Lightning's training steps.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Redirect:
    """Installed on one model and its wrapper, removed as a whole."""

    def __init__(self, model: nn.Module, root: nn.Module, *, every_call: bool) -> None:
        """``every_call=False`` redirects only losses that train; evaluation of the inner model stays local."""
        self._model, self._root, self._every_call = model, root, every_call
        self._own_forward = model.forward
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._running = threading.local()
        self._hooks: tuple[RemovableHandle, ...] = (
            root.register_forward_pre_hook(lambda *_: self.enter()),
            root.register_forward_hook(lambda *_: self._leave(), always_call=True),
        )
        model.forward = functools.wraps(self._own_forward)(self._forward)

    @property
    def root(self) -> nn.Module:
        """The wrapper."""
        return self._root

    def remove(self) -> None:
        """The model's forward is its own again."""
        for hook in self._hooks:
            hook.remove()
        del self._model.forward

    def enter(self) -> None:
        """The wrapper's forward has begun."""
        self._running.inside = True

    def _leave(self) -> None:
        self._running.inside = False

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._running, "inside", False) or not self._concerns(args, kwargs):
            return self._own_forward(*args, **kwargs)
        return self._root(*args, **kwargs)

    def _concerns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._every_call:
            return True
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        return torch.is_grad_enabled() and named.get("labels") is not None
