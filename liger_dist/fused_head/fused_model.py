"""The swapped forward of a model: it reads the arguments of a call, runs its own code and finishes its output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from liger_dist.model.class_swap import below_wrappers, subclass_of, with_base
from liger_dist.sharding import fsdp2

from .loss_call import running
from .model_loss import FusedLoss

_LOSS, _ORIGINAL = "_liger_dist_loss", "_liger_dist_original_forward"


class FusedModel(nn.Module):
    """Mixed into the class of a wrapped model: same parameters, same names, same signature of the forward."""

    _liger_dist_base: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss: FusedLoss | None = vars(self).get(_LOSS)
        host_call = None if loss is None else loss.host_call(self, args, kwargs)
        if host_call is None:
            return super().__call__(*args, **kwargs)
        return host_call.answer(super().__call__(*args, **host_call.kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle cannot name a class made at run time.
        return _blank, (self._liger_dist_base,), vars(self)


def swap_model(model: nn.Module, loss: FusedLoss) -> None:
    """Swaps the class of ``model`` in place; FSDP2's class stays on top. A forward that other code has patched on the
    instance becomes the one that the swapped forward calls."""
    vars(model)[_LOSS] = loss
    base = below_wrappers(type(model))
    if not isinstance(model, FusedModel):  # It is where a wrapped model's class has made another model.
        model.__class__ = with_base(type(model), base, _class_for(base))
    if "forward" in vars(model):
        vars(model)[_ORIGINAL] = vars(model).pop("forward")


def restore_model(model: nn.Module) -> None:
    """Undoes :func:`swap_model`. A forward that other code has patched since stays, on top of the earlier one."""
    fused: Any = next(cls for cls in type(model).__mro__ if FusedModel in cls.__bases__)
    model.__class__ = with_base(type(model), fused, fused._liger_dist_base)
    if _ORIGINAL in vars(model) and "forward" not in vars(model):
        vars(model)["forward"] = vars(model).pop(_ORIGINAL)
    del vars(model)[_LOSS]


def original_forward_of(model: nn.Module) -> Any:
    """The forward that the model had when it was wrapped, bound or not."""
    return vars(model).get(_ORIGINAL) or getattr(type(model), "_liger_dist_base", type(model)).forward


def _make_forward(base: Any) -> Callable[..., Any]:
    """The swapped forward, for models of the class ``base``."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = vars(self).get(_ORIGINAL) or partial(base.forward, self)
        loss: FusedLoss | None = vars(self).get(_LOSS)
        if loss is None:
            # Called through a bound method of before unwrap.
            return original(*args, **kwargs)
        wrapper = loss.redirected(args, kwargs)
        if wrapper is not None:
            return wrapper(*args, **kwargs)
        loss_call = None
        try:
            call, loss_call = loss.begin(self, args, kwargs)
            with running(loss.owner, loss_call):
                output = original(*call.args, **call.kwargs)
            return loss.finish(loss_call, output)
        except BaseException:
            fsdp2.abandon_forward(self)
            raise
        finally:
            if loss_call is not None:
                # The pending loss refers to its call: the cycle would keep both until the garbage collector runs.
                loss_call.pending = None

    # This frame alone runs in Python: torch.compile compiles the model's own forward.
    return cast(Callable[..., Any], torch.compiler.disable(forward, recursive=False))


def _class_for(base: Any) -> Any:
    return subclass_of(base, FusedModel, {"_liger_dist_base": base, "forward": _make_forward(base)})


def _blank(base: Any) -> nn.Module:
    cls = _class_for(base)
    module: nn.Module = cls.__new__(cls)
    return module
