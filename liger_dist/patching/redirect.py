"""Calls of a model that sits inside a wrapper (DDP, FSDP1), sent through the wrapper.

A loss asked of the inner model misses what the wrapper does around its forward: under DDP its gradients are not
averaged, without a word; under FSDP1 the weights are not there.
"""

from __future__ import annotations

import functools
import gc
import inspect
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from liger_dist.sharding import fsdp1, replicated

Wrapper = DistributedDataParallel | FullyShardedDataParallel


class Redirect:
    """Stands in the place of a model's forward. The wrapper may be made later, by somebody else: it is looked for once,
    at the first loss that trains."""

    def __init__(self, model: nn.Module) -> None:
        self.root: Wrapper | None = None
        self._has_searched = False
        self._model = model
        self._own_forward = model.forward
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        functools.update_wrapper(self, self._own_forward)
        model.forward = self

    def remove(self) -> None:
        """The model's forward is its own again."""
        del self._model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapper's result, or the model's own inside the wrapper's forward."""
        if self.takes(args, kwargs):
            assert self.root is not None
            return self.root(*args, **kwargs)
        return self._own_forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is inside no wrapper: it gets the forward of its class."""
        copied = memo[id(self._model)]
        return MethodType(type(copied).forward, copied)

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments goes through the wrapper: a loss that trains, and under FSDP1, where the
        model inside has no weights, every call. Evaluation of the model inside DDP stays local."""
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        trains = torch.is_grad_enabled() and named.get("labels") is not None
        if self.root is None and trains and not self._has_searched:
            self._has_searched = True
            self.root = _find_wrapper(self._model)
        if isinstance(self.root, FullyShardedDataParallel):
            return not fsdp1.is_running(self.root)
        return self.root is not None and trains and not replicated.is_running(self.root)


def _find_wrapper(model: nn.Module) -> Wrapper | None:
    """The wrapper that has ``model`` as its module, or PEFT's model around it; nothing in the model points to it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    for thing in gc.get_objects():
        if issubclass(type(thing), Wrapper):
            inside = thing.module
            get_base_model = getattr(inside, "get_base_model", None)
            if inside is model or (callable(get_base_model) and get_base_model() is model):
                return thing  # type: ignore[no-any-return]
    return None
