"""The swapped forward of a model: it reads the arguments of a call, runs the original forward and completes its
output."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_dist.fused_layers.lora import drop_precomputed
from liger_dist.model.class_swap import MadeAtRunTime, below_wrappers, present_as, subclass_of, with_base
from liger_dist.sharding import resharding

from .loss_call import is_running, running
from .model_loss import FusedLoss

_LOSS, _ORIGINALS = "_liger_dist_loss", "_liger_dist_original_forwards"
"""attributes of a model: its loss, and forwards of other code on the instance, innermost first"""


_PATCHED: ContextVar[tuple[int, int] | None] = ContextVar("liger_dist_patched", default=None)
"""id of the model whose patched forward runs in this context, and the number of forwards below that one"""


class FusedModel(MadeAtRunTime, nn.Module):
    """Mixed into the class of a wrapped model: same parameters, same names, same signature of the forward."""

    _liger_dist_base: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss: FusedLoss | None = vars(self).get(_LOSS)
        host_call = None if loss is None else loss.host_call(self, args, kwargs)
        if host_call is not None:
            return host_call.to_host_output(self(*args, **host_call.kwargs))
        if loss is not None and isinstance(self, FSDPModule):
            loss.check_early(self, args, kwargs)
        return super().__call__(*args, **kwargs)


def swap_model(outer: nn.Module, model: nn.Module, loss: FusedLoss) -> None:
    """Swaps the class of ``model`` in place; FSDP2's class stays on top. A forward that other code has patched on the
    instance becomes the one that the swapped forward calls. Modules of ``outer`` around it that hold its forward as
    theirs, such as PEFT's AdaptionPrompt, get the swapped one; after :func:`restore_model` that runs the model's
    original code."""
    vars(model)[_LOSS] = loss
    if not isinstance(model, FusedModel):  # A model made by a wrapped model's class has the swapped class already.
        base = below_wrappers(type(model))
        model.__class__ = with_base(type(model), base, _class_for(base))
    if "forward" in vars(model):
        vars(model)[_ORIGINALS] = (*vars(model).get(_ORIGINALS, ()), vars(model).pop("forward"))
    for module in outer.modules():
        held = vars(module).get("forward")
        if module is not model and getattr(held, "__self__", None) is model:
            module.forward = model.forward


def restore_model(model: nn.Module) -> None:
    """Undoes :func:`swap_model`. A forward that other code has patched since stays, on top of the earlier ones."""
    fused: Any = next((cls for cls in type(model).__mro__ if FusedModel in cls.__bases__), None)
    if fused is not None:  # The swap itself may have failed.
        model.__class__ = with_base(type(model), fused, fused._liger_dist_base)
    if _ORIGINALS in vars(model) and "forward" not in vars(model):
        *below, vars(model)["forward"] = vars(model).pop(_ORIGINALS)
        if below:
            vars(model)[_ORIGINALS] = tuple(below)
    vars(model).pop(_LOSS, None)


def loss_of(model: nn.Module) -> FusedLoss | None:
    """Returns the loss of a wrapped model; None for any other."""
    loss: FusedLoss | None = vars(model).get(_LOSS)
    return loss


def original_forward_of(model: nn.Module) -> Any:
    """Returns the forward that the model had when it was wrapped, bound or not."""
    originals = vars(model).get(_ORIGINALS, ())
    return originals[-1] if originals else getattr(type(model), "_liger_dist_base", type(model)).forward


def _make_forward(base: Any) -> Callable[..., Any]:
    """Makes the swapped forward for models of the class ``base``."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        patched = _PATCHED.get()
        if patched is not None and patched[0] == id(self):
            # A patched forward calls the one that it was put on, which is this one.
            return _call_original(self, base, patched[1], args, kwargs)
        originals = len(vars(self).get(_ORIGINALS, ()))
        loss: FusedLoss | None = vars(self).get(_LOSS)
        if loss is None:
            # A caller still holds the bound method from before unwrap.
            return _call_original(self, base, originals, args, kwargs)
        if loss.wrapper_redirect is not None:
            wrapper = loss.redirected(args, kwargs)
            if wrapper is not None:
                return wrapper(*args, **kwargs)
        loss_call = None
        try:
            call, loss_call, packed = loss.begin(self, args, kwargs)
            with running(loss.wrap_id, loss_call) as is_nested, loss.running(packed, is_nested=is_nested):
                output = _call_original(self, base, originals, call.args, call.kwargs)
            return loss.finish(loss_call, output)
        except BaseException:
            if not is_running(loss.wrap_id):
                drop_precomputed(self)
                resharding.abandon_forward(self)
            raise
        finally:
            if loss_call is not None:
                loss_call.release()

    # These frames alone run in Python: torch.compile compiles the model's original forward.
    return cast(Callable[..., Any], present_as(forward, base.forward))


def _call_original(model: nn.Module, base: Any, level: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the forward below the swapped one: the uppermost of ``level`` patched ones, or that of ``base``."""
    token = _PATCHED.set((id(model), level - 1) if level else None)
    try:
        return vars(model)[_ORIGINALS][level - 1](*args, **kwargs) if level else base.forward(model, *args, **kwargs)
    finally:
        _PATCHED.reset(token)


_call_original = torch.compiler.disable(_call_original, recursive=False)


def _class_for(base: Any) -> Any:
    members = {"_liger_dist_base": base, "forward": _make_forward(base)}
    return subclass_of(base, FusedModel, (_class_for, (base,)), members)
