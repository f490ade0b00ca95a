"""Reentrant activation checkpointing (``use_reentrant=True``) that FSDP cannot run, or cannot run with images on some
ranks.

Each pass through a checkpointed layer has a backward inside the backward. FSDP1 reduces the gradient after the first
one and frees the parameters, which the second pass needs: it fails on every rank, or the ranks issue different
collectives. FSDP2 reduces each pass; :func:`.fsdp2.expert_parallel.reduce_each_pass` has it do so for experts that are
a group inside the layer. A checkpoint around a unit, hooks included, calls them twice, and the first time without
gradients: a rank without images does not see the second call.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from liger_dist.errors import LigerDistError
from liger_dist.model.peft import without_fsdp1
from liger_dist.model.structure import Structure

ONCE, SEVERAL_INPUTS, SEVERAL_CALLS = 0, 1, 2
"""what will run layers more than once: nothing, several inputs of one encoder, or a call before a backward"""
_REASONS = {
    SEVERAL_INPUTS: "has several inputs for one encoder",
    SEVERAL_CALLS: "calls the model again before the backward of its last call",
}


class ReentrantLayers:
    """Detects before a call whether FSDP1 cannot run it. Other sharding always can."""

    def __init__(self, structure: Structure, root: nn.Module) -> None:
        self._layers = [without_fsdp1(layer) for layer in structure.all_layers]
        self._is_fsdp1 = isinstance(root, FullyShardedDataParallel)
        kinds = Counter(type(without_fsdp1(stack[0])) for stack in structure.other_stacks)
        self._num_alike = max(kinds.values(), default=0)
        """number of encoders of the most common kind, such as one for images and one for videos"""
        self._awaited: weakref.ref[Any] | None = None
        """hook that the graph of the last call holds until its backward"""

    def install(self, decoder: nn.Module) -> list[RemovableHandle]:
        return [decoder.register_forward_hook(self._after_decoder)] if self._is_fsdp1 else []

    def _after_decoder(self, decoder: nn.Module, args: Any, output: Any) -> None:
        def reached(gradient: Tensor) -> None:
            self._awaited = None

        trained = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
        hidden_states = next(trained, None)
        if hidden_states is not None:
            hidden_states.register_hook(reached)
            self._awaited = weakref.ref(reached)

    def repetition(self, encoder_inputs: Iterable[str]) -> int:
        """Returns :data:`SEVERAL_INPUTS` or :data:`SEVERAL_CALLS` for a call of this rank that FSDP1 cannot run,
        otherwise :data:`ONCE`.

        Args:
            encoder_inputs: kinds of the call's encoder inputs, one for each input.
        """
        if not (self._is_fsdp1 and torch.is_grad_enabled() and any(map(is_reentrant, self._layers))):
            return ONCE
        if self._awaited is not None and self._awaited() is not None:
            return SEVERAL_CALLS
        most = max(Counter(encoder_inputs).values(), default=0)
        return SEVERAL_INPUTS if most > self._num_alike else ONCE


def layers_in_shared_units(root: nn.Module) -> list[nn.Module]:
    """Returns layers that transformers can checkpoint and that share a unit of FSDP1, as those do whose frozen
    parameters are replicated and whose adapters are in the unit of the root; none where nothing is sharded."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    units = [unit for unit in root.modules() if isinstance(unit, FullyShardedDataParallel)]
    if not any(unit._handle is not None and unit._handle.uses_sharded_strategy for unit in units):
        return []
    in_units = set(map(without_fsdp1, units))
    return [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer) and m not in in_units]


def check_shared_units(layers: Sequence[nn.Module]) -> None:
    """Refuses reentrant checkpoints of several layers in one unit.

    Args:
        layers: :func:`layers_in_shared_units`.

    Raises:
        LigerDistError: on every rank alike.
    """
    if not torch.is_grad_enabled():
        return
    number = sum(is_reentrant(layer) and any(p.requires_grad for p in layer.parameters()) for layer in layers)
    if number > 1:
        raise LigerDistError(
            f"activation checkpointing has use_reentrant=True and {number} layers share a unit of FSDP1 (that of the "
            "adapters, with frozen='replicate'), whose parameters it frees after the backward of the first layer. Pass "
            "gradient_checkpointing_kwargs={\"use_reentrant\": False}, or use strategy='fsdp2'."
        )


def check_repetitions(ranks: Sequence[int], repetitions: Sequence[int]) -> None:
    """Refuses a call that runs layers more than once before a backward.

    Args:
        repetitions: of each of the ``ranks``.

    Raises:
        LigerDistError: one of them is not :data:`ONCE`.
    """
    reasons = [f"rank {rank} {_REASONS[r]}" for rank, r in zip(ranks, repetitions, strict=True) if r != ONCE]
    if reasons:
        raise LigerDistError(
            f"activation checkpointing has use_reentrant=True and layers run more than once before a backward "
            f"({'; '.join(reasons)}); expected once, because FSDP1 frees a layer's parameters after the first pass. "
            "Pass gradient_checkpointing_kwargs={\"use_reentrant\": False}, or use strategy='fsdp2'."
        )


def check_hooks(root: nn.Module, units: Iterable[nn.Module]) -> None:
    """Refuses reentrant checkpoints around the hooks of units.

    Args:
        units: FSDP units that ranks without images repeat.

    Raises:
        LigerDistError: a reentrant checkpoint runs the hooks of one of them.
    """
    if not torch.is_grad_enabled():
        return
    wrappers = (module for module in root.modules() if isinstance(module, CheckpointWrapper))
    reentrant = (wrapper for wrapper in wrappers if wrapper.checkpoint_impl is CheckpointImpl.REENTRANT)
    inside = {module for wrapper in reentrant for module in wrapper.modules()}
    if any(unit in inside or _checkpoints_call(unit) for unit in units):
        raise LigerDistError(
            "activation checkpointing has use_reentrant=True around the hooks of FSDP's units, and only some ranks "
            "were called with encoder inputs; expected them on every rank, because the others cannot see when the "
            "backward calls those hooks again. Checkpoint with use_reentrant=False (CheckpointImpl.NO_REENTRANT)."
        )


def _checkpoints_call(unit: nn.Module) -> bool:
    """True for a layer of a transformers release that checkpoints ``__call__`` with its hooks, not ``forward``."""
    return type(unit).__call__ is not nn.Module.__call__ and is_reentrant(unit)


def is_reentrant(layer: nn.Module) -> bool:
    """True if transformers checkpoints ``layer`` with ``use_reentrant=True``."""
    function = getattr(layer, "_gradient_checkpointing_func", None)
    is_on = bool(getattr(layer, "gradient_checkpointing", False)) and layer.training
    return is_on and bool(getattr(function, "keywords", {}).get("use_reentrant", False))
