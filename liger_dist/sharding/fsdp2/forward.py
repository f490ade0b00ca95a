"""State of FSDP2's groups in a forward: private names of it that say whether one runs, and end one that has raised or
of which only a part ran."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from liger_dist.model.class_swap import swapped
from liger_dist.model.torch_modes import in_backward

ROOT = "_liger_dist_fsdp2_root"
"""on a model: reference to FSDP2's root, where that is a module around it"""


def is_in_forward(root: object) -> bool:
    """True while the forward of the FSDP2 module ``root`` runs, or that of an FSDP2 module around it."""
    assert isinstance(root, FSDPModule)
    state: Any = root._get_fsdp_state()
    runs = state._state_ctx.iter_forward_root
    return runs is not None and len(runs._modules) == 1


def is_running(root: nn.Module) -> bool:
    """True while a forward or backward of the FSDP2 module ``root`` runs, or of an FSDP2 module around it."""
    assert isinstance(root, FSDPModule)
    return is_in_forward(root) or root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def has_part(root: object) -> bool:
    """True after a forward of a part of ``root`` in which only some modules of a group ran."""
    assert isinstance(root, FSDPModule)
    context = root._get_fsdp_state()._state_ctx
    return context.iter_forward_root is not None and any(s._modules_to_run_forward for s in context.all_states)


def _drop_prefetched(root: object) -> None:
    """Ends all-gathers that were begun ahead, of weights that may have changed since."""
    for group in all_groups(root):
        pending = group._all_gather_result
        if pending is None:
            continue
        group._all_gather_result = None
        if pending.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(pending.all_gather_event)
        if hasattr(pending.all_gather_work, "wait"):
            pending.all_gather_work.wait()


def finish_forward(root: object) -> None:
    """Ends a forward of a part of ``root`` for groups of several modules of which only some ran, such as a final norm
    without lm_head: FSDP2 would treat the next forward of ``root`` as a part of it, and not wait for the optimizer."""
    assert isinstance(root, FSDPModule)
    context = root._get_fsdp_state()._state_ctx
    if context.iter_forward_root is None:
        return
    context.iter_forward_root = None
    for state in context.all_states:
        if state._modules_to_run_forward:
            state._modules_to_run_forward.clear()
            for paused in (state, *groups_of(state)):
                paused._training_state = type(paused._training_state).IDLE


def unshard_in_backward(norm: nn.Module, args: Any, output: Any) -> None:
    """Unshards for a backward, as a forward hook of a norm in one group with lm_head. FSDP2 unshards a group in the
    backward of the output of its last module: a backward of hidden states alone, after another one has resharded the
    group, would read freed weights."""
    if isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled():
        output.register_hook(functools.partial(_unshard_again, norm))


def _unshard_again(norm: Any, gradient: Tensor) -> None:
    state = norm._get_fsdp_state()
    if not all(group.is_unsharded for group in groups_of(state)):
        state._pre_backward(gradient)


def abandon_forward(model: nn.Module) -> None:
    """Ends a forward that has raised in ``model`` or below it, and frees what it unsharded. FSDP2 would take the next
    forward for a part of it, and not wait for the optimizer."""
    root: nn.Module = vars(model).get(ROOT, lambda: model)()
    if not (isinstance(root, FSDPModule) and is_in_forward(root)):
        return
    finish_forward(root)
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for unsharded in (state, *groups_of(state)):
            unsharded._training_state = type(unsharded._training_state).IDLE
    _drop_prefetched(root)
    reshard(root)


def reshard(model: nn.Module) -> None:
    """Frees the parameters that FSDP2 keeps unsharded after a forward, of a model without a following backward. No
    collectives."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def end_failed_backward(root: nn.Module) -> bool:
    """Ends a backward that has raised, at the next forward: FSDP2 would neither reduce nor reshard in later ones.

    Returns:
        True if one had raised. Gradients that it has not reduced are left: :func:`unreduced_gradients`.
    """
    assert isinstance(root, FSDPModule)
    context = root._get_fsdp_state()._state_ctx
    if not context.post_backward_final_callback_queued or in_backward():
        return False
    context.post_backward_final_callback_queued = False
    for state in context.all_states:
        for part in (state, *groups_of(state)):
            part._training_state = type(part._training_state).IDLE
        for group in groups_of(state):
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
    reshard_all(root)
    return True


def reduces_all(root: nn.Module) -> bool:
    """True if a backward that runs now reduces all gradients, over replicas too (no no-sync)."""
    return all(group.reduce_grads and group.all_reduce_grads for group in all_groups(root))


def unreduced_gradients(groups: Iterable[Any]) -> Iterator[tuple[Any, str, Tensor]]:
    """Yields object, attribute and value of each gradient that ``groups`` hold and have not reduced: sums of no-sync
    micro-batches, and what a backward that raised has left."""
    for group in groups:
        holders = [(group, "_partial_reduce_output")]  # of HSDP without all-reduce
        for record in group.fsdp_params:
            # FSDP2 moves the sum out of ``.grad`` only where that has another dtype than ``reduce_dtype``.
            holders += [(record, "unsharded_accumulated_grad"), (vars(record).get("_unsharded_param"), "grad")]
        for holder, name in holders:
            gradient = getattr(holder, name, None)
            if gradient is not None:
                yield holder, name, gradient


def begin_outside_inference_mode(root: nn.Module) -> None:
    """Makes the full parameters of a root that has not run yet: those made in inference mode could not train.
    All-gathers each group once."""
    if any(not hasattr(record, "_unsharded_param") for group in param_groups(root) for record in group.fsdp_params):
        with torch.inference_mode(False):
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    module.reshard()


def reshard_all(root: nn.Module, *, frees: bool = True) -> None:
    """Reshards the parameters that FSDP2 keeps unsharded after a forward of ``root``, or of a part of it. No
    collectives.

    Args:
        frees: False to keep the memory of the full parameters, which a graph may have saved.
    """
    finish_forward(root)
    _drop_prefetched(root)
    for group in unsharded(root):
        with ExitStack() as stack:
            for record in () if frees else group.fsdp_params:
                stack.enter_context(swapped(vars(record), "free_unsharded_param", _keep))
            group.reshard()


def _keep() -> None:
    """Keeps, instead of freeing, the memory of a full parameter."""


def have_memory(groups: list[Any]) -> bool:
    """True if the memory of a full parameter of these groups is not freed."""
    records = (record for group in groups for record in group.fsdp_params)
    return any(gathered.untyped_storage().nbytes() > 0 for record in records for gathered in record.all_gather_outputs)


def trained_of_unsharded(root: nn.Module) -> dict[int, bool]:
    """Returns which full parameters require a gradient, by the id of their record."""
    records = (record for group in unsharded(root) for record in group.fsdp_params)
    return {id(record): record.unsharded_param.requires_grad for record in records}


def keep_changed_flags(root: nn.Module, trained: dict[int, bool]) -> None:
    """Sets the flags of shards whose full parameter's flag has changed, and not the shard's.

    Args:
        trained: :func:`trained_of_unsharded` after the forward that left them unsharded.
    """
    if not trained:
        return
    # Also of those that a backward has resharded since.
    for group in all_groups(root):
        for record in group.fsdp_params:
            before = trained.get(id(record))
            now = before is not None and record._unsharded_param.requires_grad
            if before is not None and now != before and record.sharded_param.requires_grad == before:
                record.sharded_param.requires_grad_(now)


def read_dtypes(root: nn.Module) -> None:
    """Reads the dtypes of gradients of groups that train now and were frozen in their first forward, in which FSDP2 has
    read none."""
    for group in all_groups(root):
        if group._orig_dtype is None and any(record.sharded_param.requires_grad for record in group.fsdp_params):
            group._init_mp_dtypes()


def full_parameters(root: nn.Module) -> frozenset[int]:
    """Returns the ids of the full parameters that FSDP2 frees and all-gathers into."""
    records = (record for group in all_groups(root) for record in group.fsdp_params)
    return frozenset(id(vars(record).get("_unsharded_param")) for record in records) - {id(None)}


def all_groups(root: object) -> Iterator[Any]:
    """Yields the groups of ``root`` and of all modules that its forward runs; none before its first forward."""
    assert isinstance(root, FSDPModule)
    for state in root._get_fsdp_state()._state_ctx.all_states:
        yield from groups_of(state)


def unsharded(root: nn.Module) -> list[Any]:
    """Returns the groups whose parameters are unsharded now."""
    return [group for group in all_groups(root) if group.is_unsharded]


def keep_output_dtype(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Undoes the rounding of outputs that ``policy`` asks of FSDP2 for ``model`` and the modules around it. Call it
    within the forward; groups with another policy keep theirs."""
    for state in {m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)}:
        # Includes the states of modules around the model, such as PEFT's.
        for shared in (state, *state._state_ctx.all_states):
            if shared._mp_policy == policy:
                shared._mp_policy = replace(policy, output_dtype=None)


def param_groups(model: nn.Module) -> Iterator[Any]:
    """Yields each group once, also where ``fully_shard`` had a list of modules, which share its state."""
    around = vars(model).get(ROOT, lambda: None)()
    modules = (model if around is None else around).modules()
    states = dict.fromkeys(m._get_fsdp_state() for m in modules if isinstance(m, FSDPModule))
    for state in states:
        yield from groups_of(state)


def groups_of(state: Any) -> list[Any]:
    # torch 2.13 keeps a list, earlier releases one group.
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups if groups is not None else filter(None, [state._fsdp_param_group]))
