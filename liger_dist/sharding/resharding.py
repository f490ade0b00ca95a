"""Reshards the parameters that FSDP1 and FSDP2 keep unsharded after a forward without a backward.

[Note: Parameters that stay unsharded]
FSDP keeps some parameters unsharded after their forward, for the backward that follows: those of the root, of final
norm and lm_head, all of them with ``reshard_after_forward=False``. If no backward follows, they stay unsharded. An
optimizer built from ``model.parameters()`` then holds full tensors that no forward reads, ``requires_grad_`` changes
only these, and a forward after ``optimizer.step()`` reads the old weights. What trains may change at any moment, and
nothing says in advance whether a loss will have a backward. So all parameters are resharded

- at the end of the outermost forward whose output has no gradient, and of ``generate``, whose tokens share one
  all-gather;
- when the model's ``parameters()`` or ``named_parameters()`` are called outside of a forward or backward, and before
  PEFT merges an adapter into them;
- before an optimizer's step;
- at the beginning of a forward, since they may have been written to by hand.

Resharding needs no collective; the next forward or backward that reads a weight all-gathers it. A graph may have saved
full parameters, as that of a penalty on a weight does, so their memory is freed only where no forward with gradients
awaits its backward. FSDP1 always frees it: it would neither all-gather anew, nor find gradients of its shards again.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from liger_dist.errors import LigerDistError
from liger_dist.model.stand_ins import swapped
from liger_dist.model.torch_modes import untraced

from . import fsdp1_forward, fsdp2_forward
from .optimizer_steps import call_before_steps, call_no_longer

_GENERATING: ContextVar[frozenset[int]] = ContextVar("liger_dist_generating", default=frozenset())
"""ids of the roots whose ``generate`` runs in this context"""


_MERGES = ("merge_adapter", "unmerge_adapter", "merge_and_unload")
"""methods of PEFT that write to the base layers' weights"""
_INSTALLED, _ROOT = "_liger_dist_resharding", "_liger_dist_root"
"""attributes of a model: what undoes :func:`install`, and its root"""


class _Root:
    """The root of FSDP1 or FSDP2 around a wrapped model."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._fsdp: ModuleType = fsdp1_forward if isinstance(module, FullyShardedDataParallel) else fsdp2_forward
        # FSDP1 walks over its units several times in a step.
        self._sharded: Any = fsdp1_forward.units_of(module) if self._fsdp is fsdp1_forward else module
        self._held: list[Any] = []
        """FSDP2's groups that stayed unsharded for a backward"""
        self._is_entered = False
        """True in the root's outermost forward"""
        self._trained: dict[int, bool] = {}
        """of FSDP2's full parameters that stay for a backward, by the id of their record: whether they required a
        gradient in their forward"""
        self._before: fsdp1_forward.BeforeForward | None = None
        """state from before this forward"""

    @untraced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._fsdp is fsdp2_forward:
            fsdp2_forward.end_failed_backward(self.module)
        if self._fsdp.is_running(self._sharded):
            return
        self._is_entered = True
        if torch.is_inference_mode_enabled():
            self._fsdp.begin_outside_inference_mode(self._sharded)
        if id(self.module) not in _GENERATING.get():
            self._keep_changed_flags()
            self._reshard_all()
        if self._fsdp is fsdp1_forward:
            self._before = fsdp1_forward.BeforeForward(self._sharded)
        else:
            fsdp2_forward.read_dtypes(self.module)

    @untraced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.module:
            self._is_entered = False
        if id(self.module) in _GENERATING.get() or self._fsdp.is_running(self._sharded):
            return
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output)):
            self._before = None
            if self._fsdp is fsdp2_forward:
                self._held = fsdp2_forward.unsharded(self._sharded)
                self._trained = fsdp2_forward.trained_of_unsharded(self._sharded)
        elif self._fsdp is fsdp1_forward:
            fsdp1_forward.end_without_backward(self._sharded, self._before)
            self._before = None
        else:
            self._keep_changed_flags()
            self._reshard_all()

    @untraced
    def after_failed_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a forward that has raised outside of the model's own, in a hook or in a wrapper."""
        if self._is_entered:
            self.abandon_forward()

    def abandon_forward(self) -> None:
        if self._fsdp is fsdp1_forward:
            fsdp1_forward.abandon_forward(self._sharded, self._before)
        else:
            fsdp2_forward.abandon_forward(self.module)
        self._before, self._is_entered = None, False

    def _has_graph(self) -> bool:
        """True if a graph may have saved full parameters: the memory that a forward with gradients left was not freed
        since, as its backward does."""
        if self._held and not fsdp2_forward.have_memory(self._held):
            self._held = []
        return bool(self._held)

    def reshard(self) -> None:
        """Reshards all parameters, between forwards and backwards; does nothing inside of one."""
        if id(self.module) not in _GENERATING.get() and not self._fsdp.is_running(self._sharded):
            self._keep_changed_flags()
            self._reshard_all()

    def _reshard_all(self) -> None:
        if self._fsdp is fsdp1_forward:
            fsdp1_forward.reshard_all(self._sharded)
        else:
            fsdp2_forward.reshard_all(self._sharded, frees=not self._has_graph())

    def _keep_changed_flags(self) -> None:
        """Lets what ``requires_grad_`` has changed of full parameters hold for their shards."""
        if self._fsdp is fsdp2_forward:
            fsdp2_forward.keep_changed_flags(self._sharded, self._trained)
            self._trained = {}

    def before_step(self, optimizer: Optimizer) -> None:
        """Reshards before an optimizer's step.

        Raises:
            LigerDistError: the optimizer has full parameters, which it was given while they were unsharded.
        """
        self.reshard()
        given = (parameter for group in optimizer.param_groups for parameter in group["params"])
        others = [parameter for parameter in given if not isinstance(parameter, DTensor)]
        full = self._fsdp.full_parameters(self._sharded) if others else ()
        number = sum(id(parameter) in full for parameter in others)
        if number > 0:
            raise LigerDistError(
                f"{number} parameters of this {type(optimizer).__name__} are full tensors that FSDP frees, so that "
                "their update would be lost: they were read after a backward that raised, or from modules inside the "
                "model after a forward with gradients. Build the optimizer from model.parameters() or "
                "model.named_parameters()."
            )

    def around_generate(self, generate: Any) -> Any:
        @functools.wraps(generate)
        def generate_and_reshard(*args: Any, **kwargs: Any) -> Any:
            token = _GENERATING.set(_GENERATING.get() | {id(self.module)})
            try:
                return generate(*args, **kwargs)
            finally:
                _GENERATING.reset(token)
                self.reshard()

        return generate_and_reshard

    def before(self, method: Any) -> Any:
        """Reshards before each call of a method."""

        @functools.wraps(method)
        def reshard_and_call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.reshard()
            return method(*args, **kwargs)

        return reshard_and_call


def install(wrapped: nn.Module, outer: nn.Module, model: nn.Module, decoder: nn.Module) -> None:
    """Hooks the forwards of a model that FSDP1 or FSDP2 shards; does nothing for other models. See [Note: Parameters
    that stay unsharded].

    Args:
        wrapped: the module that the caller trains: ``outer``, or FSDP1's root around it.
        outer: ``model``, or the ``PeftModel`` around it.
        decoder: the module inside ``model`` that may be called alone, for hidden states.
    """
    modules = list(dict.fromkeys((wrapped, outer, model)))
    found = next((module for module in modules if isinstance(module, FSDPModule | FullyShardedDataParallel)), None)
    if found is None:
        return
    root = _Root(found)
    undo = vars(model)[_INSTALLED] = ExitStack()
    undo.enter_context(swapped(vars(model), _ROOT, root))
    for module in dict.fromkeys((*modules, decoder)):
        undo.callback(module.register_forward_hook(root.after_forward).remove)
    undo.callback(found.register_forward_pre_hook(root.before_forward, prepend=True, with_kwargs=True).remove)
    undo.callback(found.register_forward_hook(root.after_failed_forward, always_call=True).remove)
    for module in modules:
        if callable(getattr(module, "generate", None)):
            undo.enter_context(swapped(vars(module), "generate", root.around_generate(module.generate)))
        undo.enter_context(swapped(vars(module), "named_parameters", root.before(module.named_parameters)))
    tuner = getattr(outer, "base_model", None) if outer is not model else None
    for name in _MERGES if isinstance(tuner, nn.Module) else ():
        if callable(getattr(tuner, name, None)):
            undo.enter_context(swapped(vars(tuner), name, root.before(getattr(tuner, name))))
    call_before_steps(root)
    undo.callback(call_no_longer, root)


def abandon_forward(model: nn.Module) -> None:
    """Ends a forward that has raised in ``model`` or below it, and frees what it unsharded. FSDP would take the next
    forward for a part of it."""
    root: _Root | None = vars(model).get(_ROOT)
    if root is not None:
        root.abandon_forward()
    else:
        fsdp2_forward.abandon_forward(model)


def uninstall(model: nn.Module) -> None:
    """Undoes :func:`install`."""
    vars(model).pop(_INSTALLED, ExitStack()).close()
