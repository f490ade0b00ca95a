"""Calls of a model that sits inside a wrapper (DDP, FSDP1), sent through the wrapper.

A loss asked of the inner model misses what the wrapper does around its forward: under DDP its gradients are not
averaged, without a word; under FSDP1 the weights are not there.
"""

from __future__ import annotations

import functools
import gc
import inspect
import threading
from types import MethodType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from liger_dist.errors import LigerDistError
from liger_dist.sharding import fsdp1, replicated

_ATTRIBUTE = "_liger_dist_redirect"
Wrapper = DistributedDataParallel | FullyShardedDataParallel


class Redirect:
    """The forward of one model that has, or may get, a wrapper.

    The wrapper that :func:`liger_dist.wrap` makes is told. Somebody else's is seen when DDP runs, and otherwise looked
    for at the first loss that trains: nothing in a model points to it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own_forward = vars(model).get("forward")
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._root: ref[Wrapper] | None = None
        self._has_searched = False
        self._is_hooked = False
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._running = threading.local()

        @functools.wraps(type(model).forward)
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            redirect = vars(model).get(_ATTRIBUTE)
            if redirect is None:
                return type(model).forward(model, *args, **kwargs)
            return redirect.run(args, kwargs)

        setattr(model, _ATTRIBUTE, self)
        model.forward = self._installed = MethodType(forward, model)

    def remove(self) -> None:
        """The model's forward is its own again; one that somebody has put on top of this one stays."""
        for hook in self._hooks:
            hook.remove()
        delattr(self._model, _ATTRIBUTE)
        if vars(self._model).get("forward") == self._installed:
            del self._model.forward
            if self._own_forward is not None:
                self._model.forward = self._own_forward

    @property
    def root(self) -> Wrapper | None:
        """The wrapper around the model, or around a module that has the model inside, if it is known."""
        return None if self._root is None else self._root()

    def attach(self, root: Wrapper) -> None:
        """Tells the wrapper before its first forward."""
        self._root, self._is_hooked = ref(root), True
        self._hooks = (
            root.register_forward_pre_hook(lambda *_: setattr(self._running, "inside", True)),
            root.register_forward_hook(lambda *_: setattr(self._running, "inside", False), always_call=True),
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wrapper's result, or the model's own inside the wrapper's forward."""
        root = self.root
        if root is not None and self.takes(args, kwargs):
            return root(*args, **kwargs)
        own = self._own_forward or MethodType(type(self._model).forward, self._model)
        return own(*args, **kwargs)

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments goes through the wrapper: a loss that trains, and under FSDP1, where the
        model inside has no weights, every call. Evaluation of the model inside DDP stays local."""
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        trains = torch.is_grad_enabled() and named.get("labels") is not None
        root = self._look_for_root(trains)
        if root is None or not _is_directly_around(root, self._model) or self.is_running():
            return False
        return trains or isinstance(root, FullyShardedDataParallel)

    def check_inside(self) -> None:
        """Refuses a loss that a wrapper of something larger would have to see and does not.

        Raises:
            LigerDistError: the wrapper's forward is not running, and the loss trains, or the weights are FSDP1's.
        """
        root = self.root
        if root is None or self.is_running():
            return
        if isinstance(root, FullyShardedDataParallel) or torch.is_grad_enabled():
            raise LigerDistError(
                f"a loss was asked of the {type(self._model).__name__} inside {type(root.module).__name__} inside "
                f"{type(root).__name__}, outside the wrapper's forward, which gathers sharded weights and reduces "
                "gradients. Ask it inside that forward, or wrap the model itself with strategy='ddp' or 'fsdp1'."
            )

    def is_running(self) -> bool:
        """Whether the wrapper's own forward is running."""
        root = self.root
        if self._is_hooked:
            return bool(getattr(self._running, "inside", False))
        if isinstance(root, FullyShardedDataParallel):
            return fsdp1.is_running(root)
        return root is not None and replicated.is_running(root)

    def _look_for_root(self, trains: bool) -> Wrapper | None:
        running = DistributedDataParallel._get_active_ddp_module()
        if running is not None and running is not self.root and _is_around(running, self._model):
            self._root, self._is_hooked = ref(running), False
        if self.root is None and trains and not (self._has_searched and self._root is None) and dist.is_initialized():
            self._has_searched, self._is_hooked = True, False
            found = _find_wrapper(self._model)
            self._root = None if found is None else ref(found)
        return self.root

    def __deepcopy__(self, memo: dict[int, Any]) -> Redirect:
        """Goes with a copy of the model, which is inside no wrapper yet."""
        model = memo[id(self._model)]
        twin = Redirect.__new__(Redirect)
        twin._model, twin._parameters, twin._own_forward = model, self._parameters, None
        twin._root, twin._has_searched, twin._is_hooked = None, False, False
        twin._hooks, twin._running = (), threading.local()
        twin._installed = MethodType(self._installed.__func__, model)
        return twin

    def __reduce__(self) -> Any:
        return _restored, (self._model,)


def _restored(model: nn.Module) -> None:
    """In a file, a model is inside no wrapper; loaded, it has the forward of its class."""


def _is_directly_around(root: Wrapper, model: nn.Module) -> bool:
    """Whether a call of ``root`` is a call of ``model``, possibly through PEFT's model."""
    inside = root.module
    get_base_model = getattr(inside, "get_base_model", None)
    return inside is model or (callable(get_base_model) and get_base_model() is model)


def _is_around(root: nn.Module, model: nn.Module) -> bool:
    return any(module is model for module in root.modules())


def _find_wrapper(model: nn.Module) -> Wrapper | None:
    """The outermost wrapper that holds ``model``."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Wrapper) and _is_around(thing, model)]
    return max(found, key=lambda root: sum(1 for _ in root.modules()), default=None)
