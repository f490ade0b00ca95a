"""The DDP or FSDP1 wrapper that :func:`liger_dist.wrap` made, as the model inside it sees it.

A loss asked of the inner model bypasses the wrapper's forward: DDP silently skips the averaging of its gradients, FSDP1
has not unsharded the weights. So such calls go through the wrapper. Wrappers made by other code are not known here:
:mod:`.call_warnings` warns of a loss outside of DDP, and refuses one outside of FSDP1.
"""

from __future__ import annotations

from contextlib import nullcontext
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from liger_dist.sharding.base import Wrapper

_INSIDE: ContextVar[frozenset[int]] = ContextVar("liger_dist_inside", default=frozenset())
"""ids of the wrappers whose forward runs in this context"""


class WrapperRedirect:
    """Patches the forward of ``wrapper``, to know when it runs, and does not keep the wrapper alive."""

    def __init__(self, wrapper: Wrapper | None) -> None:
        self._wrapper = None if wrapper is None else ref(wrapper)
        if wrapper is not None:
            # Not by hooks, which a KeyboardInterrupt skips: the wrapper would be taken to run from then on.
            vars(wrapper)["forward"] = MethodType(_forward_inside, wrapper)

    def remove(self) -> None:
        """Restores the wrapper's forward."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None and getattr(vars(wrapper).get("forward"), "__func__", None) is _forward_inside:
            del vars(wrapper)["forward"]

    def redirects(self, *, has_labels: bool) -> Wrapper | None:
        """Returns the wrapper, if a call goes through it: a loss with gradients, and under FSDP1, where the model
        inside has no weights, every call. Evaluation of the model inside DDP stays local."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is None or id(wrapper) in _INSIDE.get():
            return None
        trains = torch.is_grad_enabled() and has_labels
        return wrapper if trains or isinstance(wrapper, FullyShardedDataParallel) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapperRedirect:
        """Follows a copy of the wrapper; a copy of the inner model alone is inside no wrapper."""
        twin = WrapperRedirect(None)
        wrapper = None if self._wrapper is None else memo.get(id(self._wrapper()))
        twin._wrapper = None if wrapper is None else ref(wrapper)
        return twin

    def __reduce__(self) -> Any:
        # Unpickled, the model is inside no wrapper.
        return WrapperRedirect, (None,)


def _forward_inside(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of the wrapper's class, with its id in :data:`_INSIDE`."""
    before = _INSIDE.get()
    _INSIDE.set(before | {id(wrapper)})
    try:
        with wrapper.no_sync() if _reduces_nothing(wrapper) else nullcontext():
            return type(wrapper).forward(wrapper, *args, **kwargs)
    finally:
        _INSIDE.set(before)


def _reduces_nothing(wrapper: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """True for a call of DDP whose parameters require no gradient. With gradients enabled DDP would take all of them
    for ready, and not average the gradients of an earlier forward whose backward follows."""
    if not torch.is_grad_enabled() or not isinstance(wrapper, DistributedDataParallel):
        return False
    return not any(parameter.requires_grad for parameter in wrapper.parameters())


# Bound methods are pickled by this name.
_forward_inside.__name__ = "forward"
