"""Reshards FSDP2's groups after calls without gradients.

[Note: Groups that stay unsharded]
FSDP2 keeps some groups unsharded after their forward, for the backward that follows: the root, final norm and lm_head,
all of them with ``reshard_after_forward=False``. After a call without gradients no backward follows, and they stay
unsharded. An optimizer built from ``model.parameters()`` then holds full tensors that FSDP2 replaces at the next
backward, so its steps have no effect; and a forward after ``optimizer.step()`` reads the old weights if the call was
between backward and step. So the outermost call without gradients reshards all groups at its end. ``generate`` is one
call, whose tokens share one all-gather.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_dist.model.stand_ins import swapped
from liger_dist.model.torch_modes import untraced

from .fsdp2_forward import finish_forward, is_in_forward, reshard

_GENERATING: ContextVar[frozenset[int]] = ContextVar("liger_dist_generating", default=frozenset())
"""ids of the roots whose ``generate`` runs in this context"""


_INSTALLED = "_liger_dist_resharding"


def reshard_after_inference(outer: nn.Module, model: nn.Module, decoder: nn.Module) -> None:
    """Hooks the forwards and ``generate`` of a model that FSDP2 shards; does nothing for other models. See [Note:
    Groups that stay unsharded].

    Args:
        decoder: the module inside ``model`` that may be called alone, for hidden states.
    """
    root = next((module for module in (outer, model) if isinstance(module, FSDPModule)), None)
    if root is None:
        return
    undo = vars(model)[_INSTALLED] = ExitStack()
    for module in dict.fromkeys((outer, model, decoder)):
        undo.callback(module.register_forward_hook(partial(_after_forward, root)).remove)
    for module in dict.fromkeys((outer, model)):
        if callable(getattr(module, "generate", None)):
            undo.enter_context(swapped(vars(module), "generate", _resharding(module.generate, root)))


def keep_unsharded(model: nn.Module) -> None:
    """Undoes :func:`reshard_after_inference`."""
    vars(model).pop(_INSTALLED, ExitStack()).close()


@untraced
def _after_forward(root: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
    if not (torch.is_grad_enabled() or id(root) in _GENERATING.get() or is_in_forward(root)):
        _reshard(root)


def _resharding(generate: Any, root: nn.Module) -> Any:
    @functools.wraps(generate)
    def generate_and_reshard(*args: Any, **kwargs: Any) -> Any:
        is_outermost = id(root) not in _GENERATING.get()
        token = _GENERATING.set(_GENERATING.get() | {id(root)})
        try:
            return generate(*args, **kwargs)
        finally:
            _GENERATING.reset(token)
            if is_outermost:
                _reshard(root)

    return generate_and_reshard


def _reshard(root: nn.Module) -> None:
    """Reshards all groups. A model without trained parameters has no optimizer, and its weights do not change."""
    if any(parameter.requires_grad for parameter in root.parameters()):
        finish_forward(root)
        reshard(root)
