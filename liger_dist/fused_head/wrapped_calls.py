"""Sends calls of the model inside the DDP or FSDP1 wrapper that :func:`liger_dist.wrap` made through that wrapper.

A loss asked of the inner model bypasses the wrapper's forward: DDP silently skips the averaging of its gradients, FSDP1
has not unsharded the weights. Wrappers made by other code are not known here; :mod:`.entry` warns of a loss outside of
DDP, and refuses one outside of FSDP1.
"""

from __future__ import annotations

import copy
import functools
import inspect
from contextvars import ContextVar
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from liger_dist.sharding.base import Wrapper

_ATTRIBUTE = "_liger_dist_wrapped_calls"
_INSIDE: ContextVar[frozenset[int]] = ContextVar("liger_dist_inside", default=frozenset())
"""ids of the wrappers whose forward runs in this context"""


class WrappedCalls:
    """Patches the forward of ``model``, which is inside ``wrapper`` or inside a ``PeftModel`` there, and that of
    ``wrapper``, to know when it runs."""

    def __init__(self, model: nn.Module, wrapper: Wrapper) -> None:
        self._model = model
        self._own_forward = vars(model).get("forward")
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._wrapper: ref[Wrapper] | None = ref(wrapper)
        # Not by hooks, which a KeyboardInterrupt skips: the wrapper would be taken to run from then on.
        vars(wrapper)["forward"] = MethodType(_noted, wrapper)

        @functools.wraps(type(model).forward)
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls = vars(model).get(_ATTRIBUTE)
            if calls is None:
                return type(model).forward(model, *args, **kwargs)
            return calls.run(args, kwargs)

        setattr(model, _ATTRIBUTE, self)
        model.forward = self._installed = MethodType(forward, model)

    def remove(self) -> None:
        """Restores the model's forward; a forward that other code has patched on top of this one stays."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None and getattr(vars(wrapper).get("forward"), "__func__", None) is _noted:
            del vars(wrapper)["forward"]
        delattr(self._model, _ATTRIBUTE)
        if vars(self._model).get("forward") == self._installed:
            del self._model.forward
            if self._own_forward is not None:
                self._model.forward = self._own_forward

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wrapper's result, or the model's own inside the wrapper's forward."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None and self.takes(args, kwargs):
            return wrapper(*args, **kwargs)
        own = self._own_forward or MethodType(type(self._model).forward, self._model)
        return own(*args, **kwargs)

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call with these arguments goes through the wrapper: a loss with gradients, and under FSDP1, where
        the model inside has no weights, every call. Evaluation of the model inside DDP stays local."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is None or id(wrapper) in _INSIDE.get():
            return False
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        trains = torch.is_grad_enabled() and named.get("labels") is not None
        return trains or isinstance(wrapper, FullyShardedDataParallel)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedCalls:
        """Follows a copy of the wrapper; a copy of the inner model alone is inside no wrapper."""
        twin = WrappedCalls.__new__(WrappedCalls)
        memo[id(self)] = twin
        twin._model, twin._parameters = copy.deepcopy(self._model, memo), self._parameters
        twin._own_forward = None
        wrapper = None if self._wrapper is None else memo.get(id(self._wrapper()))
        twin._wrapper = None if wrapper is None else ref(wrapper)
        twin._installed = MethodType(self._installed.__func__, twin._model)
        return twin

    def __reduce__(self) -> Any:
        return _restored, (self._model,)


def _noted(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the wrapper's class, noted in :data:`_INSIDE`."""
    before = _INSIDE.get()
    _INSIDE.set(before | {id(wrapper)})
    try:
        return type(wrapper).forward(wrapper, *args, **kwargs)
    finally:
        _INSIDE.set(before)


# Bound methods are pickled by this name.
_noted.__name__ = "forward"


def _restored(model: nn.Module) -> None:
    """A pickled model is inside no wrapper: unpickled, it has the forward of its class."""
