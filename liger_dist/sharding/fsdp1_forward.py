"""State of FSDP1's units between forwards: private names of it that say whether one runs and what is unsharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _lazy_init, _post_backward_hook, _reshard

Units = list[Any]
"""FSDP1's modules in a root, which are listed once: no unit is added to it later"""


def units_of(root: nn.Module) -> Units:
    return [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]


def is_running(units: Units) -> bool:
    """True while a forward or backward of a unit runs, or its parameters are summoned."""
    return any(unit.training_state != TrainingState.IDLE for unit in units)


def begin_outside_inference_mode(units: Units) -> None:
    """Makes the full parameters of a root that has not run yet: those made in inference mode could not train."""
    with torch.inference_mode(False):
        _lazy_init(units[0], units[0])


def reshard_all(units: Units) -> None:
    """Reshards the parameters that FSDP1 keeps unsharded after a forward. No collectives."""
    for unit in units:
        if _is_unsharded(unit):
            _reshard(unit, unit._handle, True)


def abandon_forward(units: Units, before: BeforeForward | None) -> None:
    """Ends a forward that has raised: FSDP1 would refuse the next one. See :func:`end_without_backward`."""
    for unit in units:
        unit.training_state = TrainingState.IDLE
        if unit._handle is not None:
            unit._handle._training_state = HandleTrainingState.IDLE
    end_without_backward(units, before)


class BeforeForward:
    """What FSDP1 forgets in a forward of frozen parameters: which handles a backward will unshard, and gradients."""

    def __init__(self, units: Units) -> None:
        handles = [unit._handle for unit in units if unit._handle is not None]
        self._awaited = [handle for handle in handles if getattr(handle, "_needs_pre_backward_unshard", False)]
        parameters = [parameter for handle in handles for parameter in handle.flat_param._params]
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        self.hooks = {id(_hooks_of(handle)[0]) for handle in handles if _hooks_of(handle)}
        """of earlier forwards"""

    def restore(self) -> None:
        for handle in self._awaited:
            handle._needs_pre_backward_unshard = True
        for parameter, gradient in self._gradients:
            if parameter.grad is None and parameter.shape == gradient.shape:
                parameter.grad = gradient


def _hooks_of(handle: Any) -> tuple[Any, ...]:
    hooks: tuple[Any, ...] = getattr(handle.flat_param, "_post_backward_hook_state", ())
    return hooks


class EarlierGraphs:
    """Graphs of forwards that await a backward, or will have none.

    FSDP1 reduces a unit's gradient in a hook of autograd's node that accumulates it, which it sets in the first of
    several forwards. Under mixed precision resharding changes the dtype of the flat parameter, and with it that node:
    the gradient of a later forward alone would have no hook. It gets one here, which does nothing in a backward that
    goes through an earlier forward as well: that one accumulates last.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, list[Any]] = {}
        """by the id of a flat parameter: the nodes of earlier forwards"""

    def begin_forward(self, units: Units) -> None:
        """Forgets graphs of units whose backward has come."""
        handles = [unit._handle for unit in units if unit._handle is not None]
        awaiting = {id(handle.flat_param) for handle in handles if _hooks_of(handle)}
        self._nodes = {key: nodes for key, nodes in self._nodes.items() if key in awaiting}

    def hook(self, unit: Any) -> None:
        """Hooks the node of the forward that begins now, if it is another one than FSDP1 has hooked."""
        handle = unit._handle
        state = () if handle is None else _hooks_of(handle)
        if len(state) != 2 or not torch.is_grad_enabled() or not handle.flat_param.requires_grad:
            return
        flat = handle.flat_param
        function: Any = flat.expand_as(flat).grad_fn
        node = function.next_functions[0][0]
        if node is state[0]:
            return
        earlier = self._nodes.setdefault(id(flat), [])
        earlier.append(state[0])
        before = len(earlier)

        def reduce(*gradients: Any) -> None:
            if not any(map(torch._C._will_engine_execute_node, earlier[:before])):
                _post_backward_hook(unit, handle, *gradients)

        flat._post_backward_hook_state = (node, node.register_hook(reduce))


def end_without_backward(units: Units, before: BeforeForward | None) -> None:
    """Ends a forward whose output has no gradient: reshards, restores what FSDP1 has forgotten, and removes the hooks
    that would reshard frozen units in a backward, which FSDP1 would take for those of the next forward, in which the
    unit may train."""
    for unit in units:
        if unit._handle is None:
            continue
        flat = unit._handle.flat_param
        state = _hooks_of(unit._handle)
        # Of trained units there is an AccumulateGrad node as well: EarlierGraphs.
        if len(state) == 1 and not (before is not None and id(state[0]) in before.hooks):
            state[0].remove()
            del flat._post_backward_hook_state
        if torch.is_inference_mode_enabled():
            # Parameters are views made in inference mode, which no optimizer could update.
            with torch.inference_mode(False):
                _reshard(unit, unit._handle, True)
    reshard_all(units)
    if before is not None:
        before.restore()


def awaits_backward(units: Units) -> bool:
    """True after a forward with gradients, until its backward."""
    return any(getattr(unit._handle, "_needs_pre_backward_unshard", False) for unit in units)


def has_flat_shards(units: Units) -> bool:
    """True if a unit shards its parameters, which are one-dimensional outside of forwards."""
    return any(unit._handle is not None and unit._handle.uses_sharded_strategy for unit in units)


def full_parameters(units: Units) -> frozenset[int]:
    """Returns the ids of full parameters that FSDP1 frees: none, because its modules have views instead."""
    return frozenset()


def _is_unsharded(unit: Any) -> bool:
    handle = unit._handle
    if handle is None or not handle.uses_sharded_strategy:
        return False
    # The root's first forward makes the full parameters.
    return hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard()
