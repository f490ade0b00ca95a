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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from liger_dist.errors import LigerDistError
from liger_dist.model.class_swap import swapped
from liger_dist.model.peft import has_lora
from liger_dist.model.torch_modes import untraced

from . import fsdp1_forward
from .fsdp2 import forward as fsdp2_forward
from .optimizer_steps import BeforeStep, call_before_steps, call_no_longer
from .reentrant_layers import check_shared_units, layers_in_shared_units
from .vocab_parallel import row_shards_of

_GENERATING: ContextVar[frozenset[int]] = ContextVar("liger_dist_generating", default=frozenset())
"""ids of the roots whose ``generate`` runs in this context"""


_MERGES = ("merge_adapter", "unmerge_adapter", "merge_and_unload")
"""methods of PEFT that write to the base layers' weights"""
_INSTALLED, _ROOT = "_liger_dist_resharding", "_liger_dist_root"
"""attributes of a model: what undoes :func:`install`, and its root"""


class _Root(BeforeStep):
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
        self._shared = layers_in_shared_units(module) if self._fsdp is fsdp1_forward else []
        self._earlier = fsdp1_forward.EarlierGraphs()
        """FSDP1's forwards whose backward has not come"""
        self._graph: ref[_Graph] | None = None
        """of the last forward outside of the root, alive as long as its graph"""
        self._before: fsdp1_forward.BeforeForward | None = None
        """state from before this forward"""
        self._row_shards = {id(rows): rows for m in module.modules() if (rows := row_shards_of(m)) is not None}
        """of a vocab-parallel lm_head and its tied embeddings, by id"""
        self._inputs_train = False
        """True if an input of this forward of FSDP1's root requires a gradient"""
        self._unreduced: dict[Any, tuple[ref[Tensor], int]] = {}
        """gradients that were unreduced before the last forward, with their versions: sums of no-sync micro-batches"""
        self._awaits_no_sync = False
        """True if another forward awaited its backward before the last one, and that would not reduce its gradients"""

    @untraced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._fsdp is fsdp2_forward:
            self.end_failed_backward()
        if self._fsdp.is_running(self._sharded):
            return
        check_shared_units(self._shared)
        self._is_entered = True
        if torch.is_inference_mode_enabled():
            self._fsdp.begin_outside_inference_mode(self._sharded)
        if id(self.module) not in _GENERATING.get():
            self._note_unreduced()
            self._keep_changed_flags()
            if not self._awaits_part():
                self._reshard_all()
        if self._fsdp is fsdp1_forward:
            leaves = tree_leaves((args, kwargs))
            self._inputs_train = any(isinstance(one, Tensor) and one.requires_grad for one in leaves)
            self._before = fsdp1_forward.BeforeForward(self._sharded)
            self._earlier.begin_forward(self._sharded)
        else:
            fsdp2_forward.read_dtypes(self.module)

    @untraced
    def before_decoder(self, module: nn.Module, args: Any) -> None:
        """Reshards before a forward of the decoder alone, as :meth:`before_forward`."""
        if not self._awaits_part():
            self.reshard()

    @untraced
    def before_unit(self, unit: nn.Module, module: nn.Module, args: Any) -> None:
        """Runs in a forward of FSDP1's ``unit``, which has been unsharded."""
        self._earlier.hook(unit)

    def _awaits_part(self) -> bool:
        """True if a graph of the decoder alone awaits its backward, in which FSDP2 cannot unshard its final norm again:
        it shares a group with lm_head, which has not run."""
        is_part = self._fsdp is fsdp2_forward and fsdp2_forward.has_part(self.module)
        graph = None if self._graph is None else self._graph()
        return is_part and torch.is_grad_enabled() and graph is not None and self._has_graph()

    @untraced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.module:
            self._is_entered = False
        if self._is_entered:
            return
        if id(self.module) in _GENERATING.get() or self._fsdp.is_running(self._sharded):
            return
        if torch.is_grad_enabled() and _may_have_graph(output) and self._may_train(module):
            self._before = None
            if self._fsdp is fsdp2_forward:
                self._graph = None if module is self.module else _mark_graph(output)
                self._held = fsdp2_forward.unsharded(self._sharded)
                self._trained = fsdp2_forward.trained_of_unsharded(self._sharded)
        elif self._fsdp is fsdp1_forward:
            fsdp1_forward.end_without_backward(self._sharded, self._before)
            self._before = None
        else:
            self._keep_changed_flags()
            self._reshard_all()

    def _may_train(self, module: nn.Module) -> bool:
        """False if a forward of FSDP1's root has a graph without a purpose: transformers makes the embedding's output
        require a gradient for checkpoints, also where nothing trains."""
        return (
            self._fsdp is fsdp2_forward
            or module is not self.module
            or self._inputs_train
            # Without the model's parameters(), at which FSDP's are resharded.
            or any(p is not None and p.requires_grad for m in self.module.modules() for p in m._parameters.values())
        )

    @untraced
    def after_failed_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a forward that has raised outside of the model's forward, in a hook or in a wrapper."""
        if self._is_entered:
            self.abandon_forward()

    def end_failed_backward(self) -> None:
        """Ends a backward of FSDP2 that has raised, and drops the gradients that it has left unreduced.

        Raises:
            LigerDistError: it has added to, or reduced, gradients of earlier no-sync micro-batches, or it is not known
                which of the gradients it added. All unreduced gradients are dropped.
        """
        if self._fsdp is fsdp1_forward or not fsdp2_forward.end_failed_backward(self.module):
            return
        now = {key: (gradient, drop) for key, gradient, drop in self._unreduced_gradients()}
        kept = {
            key
            for key, (gradient, version) in self._unreduced.items()
            if key in now and now[key][0] is gradient() and now[key][0]._version == version
        }
        are_known = len(kept) == len(self._unreduced) and not self._awaits_no_sync
        for key, (_, drop) in now.items():
            if not (are_known and key in kept):
                drop()
        self._unreduced, self._awaits_no_sync = {}, False
        if not are_known:
            raise LigerDistError(
                "a backward has raised, and its gradients cannot be told from those of earlier micro-batches of the "
                "step, which were not reduced (set_requires_gradient_sync(False)); all of them are dropped. Call "
                "zero_grad() and begin again with the first micro-batch of the step."
            )

    def _note_unreduced(self) -> None:
        """Notes gradients of earlier no-sync micro-batches, so that those of a backward that raises can be told from
        them."""
        if self._fsdp is fsdp1_forward:
            return
        self._unreduced = {key: (ref(gradient), gradient._version) for key, gradient, _ in self._unreduced_gradients()}
        if torch.is_grad_enabled():
            self._awaits_no_sync = self._has_graph() and not fsdp2_forward.reduces_all(self._sharded)

    def _unreduced_gradients(self) -> Iterator[tuple[Any, Tensor, Callable[[], object]]]:
        """Yields a key, the gradient, and a function that drops it, of each gradient that is not reduced."""
        for holder, name, gradient in fsdp2_forward.unreduced_gradients(fsdp2_forward.all_groups(self._sharded)):
            yield (id(holder), name), gradient, functools.partial(setattr, holder, name, None)
        for rows in self._row_shards.values():
            for parameter, gradient in list(rows.unreduced.items()):
                yield parameter, gradient, functools.partial(rows.unreduced.pop, parameter)

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
        is_inside = self._is_entered or id(self.module) in _GENERATING.get()
        if not (is_inside or self._fsdp.is_running(self._sharded)):
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
        unsharded = [parameter for parameter in given if not isinstance(parameter, DTensor)]
        full = self._fsdp.full_parameters(self._sharded) if unsharded else ()
        number = sum(id(parameter) in full for parameter in unsharded)
        if number > 0:
            raise LigerDistError(
                f"{number} parameters of this {type(optimizer).__name__} are full tensors that FSDP frees, so that "
                "their update would be lost: they were read after a backward that raised, or from modules inside the "
                "model after a forward with gradients. Build the optimizer from model.parameters() or "
                "model.named_parameters()."
            )

    def before_update(self, optimizer: Optimizer) -> None:
        """
        Raises:
            LigerDistError: a vocab-parallel lm_head has gradients that no backward has summed over the replicas, which
                are dropped.
        """
        if not any(rows.unreduced for rows in self._row_shards.values()):
            return
        groups = optimizer.param_groups
        if all(float(group.get("lr", 1.0)) == 0.0 for group in groups) and not any(
            bool(p.grad.any()) for group in groups for p in group["params"] if p.grad is not None
        ):
            return  # torch makes the state of an optimizer by such a step, to save it.
        of_module = {id(parameter) for parameter in self.module.parameters()}
        if any(id(parameter) in of_module for group in optimizer.param_groups for parameter in group["params"]):
            for rows in self._row_shards.values():
                rows.unreduced.clear()
            raise LigerDistError(
                "lm_head has gradients of micro-batches under set_requires_gradient_sync(False) that no backward has "
                "summed over the replicas, because it was frozen, or its loss not computed, in the last micro-batch; "
                "they are dropped. Freeze lm_head between steps, and compute the loss in each micro-batch."
            )

    def around_generate(self, generate: Any) -> Any:
        @functools.wraps(generate)
        def generate_and_reshard(*args: Any, **kwargs: Any) -> Any:
            self.reshard()
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

    def before_merge(self, method: Any) -> Any:
        """Reshards before each call of a method of PEFT that writes to weights; refuses it for FSDP1's flat shards."""

        @functools.wraps(method)
        def check_and_call(*args: Any, **kwargs: Any) -> Any:
            is_flat = self._fsdp is fsdp1_forward and fsdp1_forward.has_flat_shards(self._sharded)
            if is_flat and not self._fsdp.is_running(self._sharded):
                raise LigerDistError(
                    f"{method.__name__} would multiply and add FSDP1's flat shards, which are no matrices; call it "
                    "inside of FullyShardedDataParallel.summon_full_params(root)."
                )
            if self._fsdp is fsdp2_forward and _is_partly_sharded(self.module):
                raise LigerDistError(
                    f"{method.__name__} would add sharded weights of adapters to base weights that every rank has "
                    "(frozen='replicate'); merge in a copy of the model that is not sharded, from the adapter's "
                    "checkpoint."
                )
            return method(*args, **kwargs)

        return self.before(check_and_call)


def _is_partly_sharded(root: nn.Module) -> bool:
    """True if only some parameters of a LoRA layer are sharded."""
    layers = (layer for layer in root.modules() if has_lora(layer))
    return any(len({isinstance(parameter, DTensor) for parameter in layer.parameters()}) > 1 for layer in layers)


class _Graph:
    """Lives as long as the graph that it was attached to."""


def _mark_graph(output: Any) -> ref[_Graph] | None:
    """Attaches an object to the graph of an output; None for one that is no tensor."""
    node = next((x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None), None)
    if node is None:
        return None
    graph = _Graph()
    metadata: Any = node.metadata
    metadata[_GRAPH] = graph
    return ref(graph)


_GRAPH = "liger_dist_graph"
"""key in the metadata of an output's node"""


def _may_have_graph(output: Any) -> bool:
    """True if a tensor in ``output`` requires a gradient, or none is found: objects that pytrees do not know, such as a
    ``SimpleNamespace``, are looked into once."""
    leaves = (leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", leaf) for leaf in tree_leaves(output))
    tensors = [leaf for leaf in tree_leaves(list(leaves)) if isinstance(leaf, Tensor)]
    return not tensors or any(tensor.requires_grad for tensor in tensors)


class _InstallLater:
    """Forward pre-hook of a model that other code may shard by FSDP2: calls :func:`install` in the first forward after
    that, after FSDP2's hooks. Its copies, with a copy of the model, do nothing."""

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._handles = [module.register_forward_pre_hook(self) for module in dict.fromkeys(modules[1:3])]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not any(isinstance(module, FSDPModule) for module in self._modules[:3]):
            return
        wrapped, outer, model, decoder = self._modules
        uninstall(model)
        install(wrapped, outer, model, decoder)

    def __reduce__(self) -> Any:
        return _InstallLater, ()


def install(
    wrapped: nn.Module, outer: nn.Module, model: nn.Module, decoder: nn.Module, *, may_shard_later: bool = False
) -> None:
    """Hooks the forwards of a model that FSDP1 or FSDP2 shards, or that FSDP2 will shard before its first forward. See
    [Note: Parameters that stay unsharded].

    Args:
        wrapped: the module that the caller trains: ``outer``, or FSDP1's root around it.
        outer: ``model``, or the ``PeftModel`` around it.
        decoder: the module inside ``model`` that may be called alone, for hidden states.
        may_shard_later: True if other code may call ``fully_shard`` before the first forward.
    """
    modules = list(dict.fromkeys((wrapped, outer, model)))
    found = next((module for module in modules if isinstance(module, FSDPModule | FullyShardedDataParallel)), None)
    if found is None and may_shard_later:
        vars(model)[_INSTALLED] = _InstallLater(wrapped, outer, model, decoder)
    if found is None:
        return
    root = _Root(found)
    undo = vars(model)[_INSTALLED] = ExitStack()
    undo.enter_context(swapped(vars(model), _ROOT, root))
    for module in dict.fromkeys((*modules, decoder)):
        undo.callback(module.register_forward_hook(root.after_forward).remove)
    if decoder not in modules:
        undo.callback(decoder.register_forward_pre_hook(root.before_decoder).remove)
    for unit in fsdp1_forward.units_of(found) if isinstance(found, FullyShardedDataParallel) else ():
        inside: nn.Module = unit._fsdp_wrapped_module
        undo.callback(inside.register_forward_pre_hook(functools.partial(root.before_unit, unit)).remove)
    undo.callback(found.register_forward_pre_hook(root.before_forward, prepend=True, with_kwargs=True).remove)
    undo.callback(found.register_forward_hook(root.after_failed_forward, always_call=True).remove)
    for module in modules:
        if callable(getattr(module, "generate", None)):
            undo.enter_context(swapped(vars(module), "generate", root.around_generate(module.generate)))
        undo.enter_context(swapped(vars(module), "named_parameters", root.before(module.named_parameters)))
    tuner = getattr(outer, "base_model", None) if outer is not model else None
    for name in _MERGES if isinstance(tuner, nn.Module) else ():
        if callable(getattr(tuner, name, None)):
            undo.enter_context(swapped(vars(tuner), name, root.before_merge(getattr(tuner, name))))
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


def end_failed_backward(model: nn.Module) -> None:
    """Ends a backward that has raised in ``model``; does nothing for a model that neither FSDP1 nor FSDP2 shards.

    Raises:
        LigerDistError: see :meth:`_Root.end_failed_backward`.
    """
    root: _Root | None = vars(model).get(_ROOT)
    if root is not None:
        root.end_failed_backward()


def uninstall(model: nn.Module) -> None:
    """Undoes :func:`install`."""
    vars(model).pop(_INSTALLED, ExitStack()).close()
