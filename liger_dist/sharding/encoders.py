"""Encoders (vision, audio) under FSDP when only some ranks have images in their batch.

FSDP all-gathers a unit's parameters when its forward runs and reduce-scatters their gradients after its backward. A
rank without images never runs the vision encoder, so its collectives would be missing there. The ranks exchange on the
host which of them have images; those without images call the encoder's units on a scalar that adds zero to the result.

[Note: Order of collectives with and without images]
A rank that has images leads. Before each unit of an encoder it broadcasts which unit comes next and whether the unit's
inputs require gradients, before the decoder which units and parameters the decoder's inputs depend on. A rank without
images repeats that:

- Forward: it calls the same units in the same order through FSDP's hooks, before its decoder runs. The input
  embedding, when it is a unit, and the decoder are announced as well, so that the ranks also agree on what comes
  between encoder and embedding.
- Backward: autograd runs the ready node that was created last. The scalars are created where the leader's activations
  are, between embedding and decoder, so the decoder's units come first, then the encoder's in reverse, then the
  embedding. A unit whose output the leader does not use (Llava skips the last layer) has no backward on either rank.
- Reduce-scatter: FSDP2 reduces only existing gradients. A parameter gets zeros on a rank without images if the
  leader's decoder inputs depend on it, and None otherwise. This includes the root's parameters around the encoder
  (patch embedding, projector). A unit that runs more than once before a backward is reduced once, when autograd sums
  its gradients. Under reentrant activation checkpointing each of its passes has a backward inside the backward, whose
  gradients FSDP2 reduces alone: a rank without images writes the zeros of those parameters in the same nested way, and
  a rank with images those of parameters that the layer does not use, because the graph does not show them. FSDP1 fails
  there without images too (its first reduction frees what the second pass needs), which is refused.

No value of a parameter is read, so NaN or Inf do not spread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from liger_dist.errors import LigerDistError
from liger_dist.model.keywords import renamed_keywords
from liger_dist.model.peft import without_fsdp1
from liger_dist.model.structure import Structure, input_embedding
from liger_dist.model.torch_modes import untraced

from .process_groups import compute_device, host_group
from .reentrant_layers import ReentrantLayers, check_hooks, check_repetitions

_INSTALLED = "_liger_dist_optional_encoders"
_ENCODER_INPUTS = ("pixel_values", "input_features", "input_values", "audio_values")
_GRAD_ENABLED, _INPUTS_REQUIRE_GRAD = 1, 2
_UNUSED, _IN_GRAPH, _IN_CHECKPOINT = 0, 1, 2
"""dependence of the leader's decoder inputs on a parameter: none, in the graph, or inside a reentrant checkpoint"""


def install(
    model: nn.Module,
    structure: Structure,
    *,
    mesh: DeviceMesh,
    root: nn.Module,
    undo: ExitStack,
    flat_parameters: Callable[[FullyShardedDataParallel], list[Tensor]] | None = None,
) -> None:
    """Hooks a sharded model whose encoders are FSDP units; does nothing for a model without encoders.

    Creates one gloo group of the mesh's ranks. Call it last, so that the exchange comes before FSDP's hooks.

    Args:
        mesh: the data-parallel axes.
        root: the module that the caller calls: the model, or FSDP1's wrapper.
        flat_parameters: returns the flat parameter of an FSDP1 unit.
    """
    inputs = _encoder_inputs(model)
    if structure.other_stacks and inputs and mesh.size() > 1:
        vars(model)[_INSTALLED] = OptionalEncoders(
            model, structure, inputs, mesh=mesh, root=root, flat_parameters=flat_parameters
        )
        undo.callback(uninstall, model)


def uninstall(model: nn.Module) -> None:
    """Removes the hooks of :func:`install`, if any."""
    installed = vars(model).pop(_INSTALLED, None)
    if installed is not None:
        installed.remove()


def _kind(encoder_input: str) -> str:
    """Maps an encoder input to its kind, equal for inputs of one kind of encoder, such as images and videos."""
    return next(kind for kind in _ENCODER_INPUTS if kind in encoder_input)


def _encoder_inputs(model: nn.Module) -> dict[str, int]:
    """Returns the parameters of the model's forward that are encoder inputs, with their positions. Their deprecated
    names, which transformers' decorators still accept, are keywords alone."""
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    names += renamed_keywords(type(model).forward)
    return {
        name: position
        for position, name in enumerate(names)
        if any(part in name for part in _ENCODER_INPUTS) and "mask" not in name
    }


@dataclass(kw_only=True)
class _MixedCall:
    """One forward of the model in which only some ranks have encoder inputs."""

    leader: int
    """global rank that announces its units"""
    has_inputs: bool
    """True on ranks that run their encoders themselves"""
    depends_on: list[int] = field(default_factory=list)
    """for each parameter, the dependence of the leader's decoder inputs on it; filled before the decoder runs"""
    outputs: list[tuple[int, Tensor]] = field(default_factory=list)
    """outputs of the units with the units' indices, in the order of calls"""
    parameters: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """unsharded parameters of units that this rank ran itself, with the indices of unit and parameter"""
    is_repeating: bool = False
    """True while a unit runs on a scalar"""


class OptionalEncoders:
    """Hooks of one model. See [Note: Order of collectives with and without images]."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        inputs: dict[str, int],
        *,
        mesh: DeviceMesh,
        root: nn.Module,
        flat_parameters: Callable[[FullyShardedDataParallel], list[Tensor]] | None,
    ) -> None:
        self._flat_parameters = flat_parameters
        decoder = structure.decoder
        self._root = root
        self._inputs = inputs
        self._num_stacks = len(structure.other_stacks)
        # FSDP1 has put a wrapper around each layer.
        wrappers = {unit.module: unit for unit in root.modules() if isinstance(unit, FullyShardedDataParallel)}
        self._units = [wrappers.get(layer, layer) for stack in structure.other_stacks for layer in stack]
        self._skips_layers = any(
            name.startswith("cross_attention") for name in inspect.signature(type(decoder).forward).parameters
        )
        self._decoder_name = type(decoder).__name__
        excluded = {*decoder.modules(), *(inside for unit in self._units for inside in unit.modules())}
        self._in_root = [
            (owner, name)
            for owner in model.modules()
            if owner not in excluded
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        counts = [len(self._parameters_of(unit)) for unit in self._units]
        self._first_parameter = [sum(counts[:number]) for number in range(len(counts) + 1)]
        self._message_size = 2 + len(counts) + self._first_parameter[-1] + len(self._root_parameters())
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        self._group = host_group(self._ranks)
        self._call: _MixedCall | None = None
        self._reentrant = ReentrantLayers(structure, root)
        self._hooks = self._install(root, input_embedding(model), decoder)

    def _install(self, root: nn.Module, embedding: nn.Module | None, decoder: nn.Module) -> list[RemovableHandle]:
        hooks = [
            root.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True),
            root.register_forward_hook(self._after_model, always_call=True),
            decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True, prepend=True),
        ]
        stops = [*self._units, *([embedding] if isinstance(embedding, FSDPModule) else [])]
        for stop, module in enumerate(stops):
            before = partial(self._before_stop, stop)
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        for number, unit in enumerate(self._units):
            # Before FSDP2 reshards, so that the parameters are those of the graph.
            hooks.append(unit.register_forward_hook(partial(self._after_unit, number), prepend=True))
            if not isinstance(unit, FullyShardedDataParallel):
                # After FSDP2's hook, so that in the backward it comes before the reduction.
                hooks.append(unit.register_forward_pre_hook(partial(self._in_unit, number)))
        return hooks + self._reentrant.install(decoder)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        dist.destroy_process_group(self._group)

    @untraced
    def _before_model(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Exchanges which encoder inputs each rank has (one all-gather on the host).

        Raises:
            LigerDistError: on all ranks, if they differ in a way that FSDP does not support.
        """
        self._call = None
        given = [kwargs.get(n) is not None or (p < len(args) and args[p] is not None) for n, p in self._inputs.items()]
        repetition = self._reentrant.repetition(_kind(name) for name in compress(self._inputs, given))
        mine = torch.tensor([*given, repetition], dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in self._ranks]
        dist.all_gather(gathered, mine, group=self._group)
        rows: list[list[int]] = [row.tolist() for row in gathered]
        names = {rank: tuple(compress(self._inputs, row)) for rank, row in zip(self._ranks, rows, strict=True)}
        self._check(names)
        check_repetitions(self._ranks, [row[-1] for row in rows])
        leader = next((rank for rank in self._ranks if names[rank]), None)
        if leader is not None and not all(names.values()):
            check_hooks(root, self._units)
            self._call = _MixedCall(leader=leader, has_inputs=any(given))

    def _check(self, names: dict[int, tuple[str, ...]]) -> None:
        kinds = {kinds_of_rank for kinds_of_rank in names.values() if kinds_of_rank}
        # One encoder for images and videos runs as often for one as for the other.
        is_alike = self._num_stacks == 1 and len({len(kinds_of_rank) for kinds_of_rank in kinds}) == 1
        what = "; ".join(f"rank {rank}: {', '.join(kinds_of_rank) or 'none'}" for rank, kinds_of_rank in names.items())
        if len(kinds) > 1 and not is_alike:
            raise LigerDistError(
                f"ranks were called with different encoder inputs ({what}); expected the same on every rank that has "
                "any, because FSDP's ranks have to run the same layers. Group the data by kind of input."
            )
        if self._skips_layers and kinds and not all(names.values()):
            raise LigerDistError(
                f"only some ranks were called with encoder inputs ({what}), and {self._decoder_name} skips its "
                "cross-attention layers without them; expected an image on every rank, because FSDP's ranks have to "
                "run the same layers. Add one to every batch."
            )

    @untraced
    def _after_model(self, root: nn.Module, args: Any, output: Any) -> None:
        self._call = None

    @untraced
    def _before_stop(self, stop: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._call
        if call is None or call.is_repeating:
            return
        if call.has_inputs:
            requires_grad = any(tensor.requires_grad for tensor in _tensors((args, kwargs)))
            flags = _GRAD_ENABLED * torch.is_grad_enabled() + _INPUTS_REQUIRE_GRAD * requires_grad
            self._announce(call, stop, flags)
        else:
            self._follow(call, until=stop)

    @untraced
    def _in_unit(self, number: int, unit: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = self._call
        if call is None or call.is_repeating or not call.has_inputs or not torch.is_grad_enabled():
            return None
        place = next((i for i, value in enumerate(args) if isinstance(value, Tensor) and value.requires_grad), None)
        if place is None:
            return None
        filled = _FillGradients.apply(  # type: ignore[no-untyped-call]
            args[place], call.depends_on, self._first_parameter[number], self._parameters_of(unit)
        )
        return *args[:place], filled, *args[place + 1 :]

    @untraced
    def _after_unit(self, number: int, unit: nn.Module, args: Any, output: Any) -> None:
        call = self._call
        if call is None or call.is_repeating or not call.has_inputs:
            return
        call.outputs += [(number, tensor) for tensor in _tensors(output)]
        for index, parameter in enumerate(self._parameters_of(unit), start=self._first_parameter[number]):
            call.parameters.append((number, index, parameter))

    @untraced
    def _before_decoder(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call = self._call
        if call is None:
            return None
        self._call = None
        stop = len(self._units) + 1
        if call.has_inputs:
            dependencies = self._dependencies(call, (args, kwargs))
            call.depends_on[:] = dependencies[len(self._units) :]
            self._announce(call, stop, 0, dependencies)
            return None
        message = self._follow(call, until=stop)
        num_units = len(self._units)
        is_used, call.depends_on[:] = message[:num_units], message[num_units:]
        used = [output for number, output in call.outputs if is_used[number] and output.requires_grad]
        first = self._first_parameter[-1]
        used += [p for index, p in enumerate(self._root_parameters(), start=first) if call.depends_on[index]]
        if not used:
            return None
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            raise LigerDistError(
                f"{self._decoder_name} was called without inputs_embeds, and this rank has no images while others do; "
                "expected inputs_embeds, to which the encoder's zero is added. Add an image to every batch."
            )
        zero = _zero([_IN_GRAPH] * len(used), 0, torch.zeros((), device=embeddings.device), *used)
        return args, kwargs | {"inputs_embeds": embeddings + zero.to(embeddings.dtype)}

    def _announce(self, call: _MixedCall, stop: int, flags: int, dependencies: Sequence[int] = ()) -> None:
        """Broadcasts the next stop from the leader; other ranks with encoder inputs check that it is theirs."""
        sent = self._broadcast(call, [stop, flags, *dependencies])
        if sent[0] != stop:
            raise LigerDistError(
                f"this rank runs encoder layer {stop} next and rank {call.leader} layer {sent[0]} (of "
                f"{len(self._units)}); expected ranks that have images to run the same layers in the same order. Give "
                "each of them the same kinds of input."
            )

    def _follow(self, call: _MixedCall, *, until: int) -> list[int]:
        """Runs the leader's units up to ``until``; returns the message of that stop."""
        while True:
            stop, flags, *dependencies = self._broadcast(call, [])
            if stop == until:
                return dependencies
            if stop >= len(self._units):
                raise LigerDistError(
                    f"rank {call.leader} has images and calls its embedding and decoder in another order than this "
                    "rank, which has none. Add an image to every batch."
                )
            self._repeat(call, stop, flags)

    def _broadcast(self, call: _MixedCall, message: list[int]) -> list[int]:
        tensor = torch.zeros(self._message_size, dtype=torch.int32)
        tensor[: len(message)] = torch.tensor(message, dtype=torch.int32)
        dist.broadcast(tensor, src=call.leader, group=self._group)
        return cast(list[int], tensor.tolist())

    def _repeat(self, call: _MixedCall, number: int, flags: int) -> None:
        """Runs one unit with FSDP's hooks on a scalar that requires a gradient where the leader's inputs do."""
        unit = self._units[number]
        target = without_fsdp1(unit)
        first = self._first_parameter[number]

        def forward(hidden: Tensor) -> Tensor:
            return _zero(call.depends_on, first, hidden, *self._parameters_of(unit))

        requires_grad = bool(flags & _INPUTS_REQUIRE_GRAD)
        hidden = torch.zeros((), device=compute_device(), requires_grad=requires_grad)
        instance_forward = vars(target).get("forward")
        target.forward = forward
        call.is_repeating = True
        try:
            with torch.set_grad_enabled(bool(flags & _GRAD_ENABLED)):
                # Not __call__, which earlier releases of transformers checkpoint and torch.compile replaces.
                call.outputs.append((number, unit._call_impl(hidden)))
        finally:
            call.is_repeating = False
            del target.forward
            if instance_forward is not None:
                target.forward = instance_forward

    def _parameters_of(self, unit: nn.Module) -> list[Tensor]:
        """Returns the leaves of the graph that a unit's forward builds, unsharded inside that forward."""
        if isinstance(unit, FullyShardedDataParallel):
            assert self._flat_parameters is not None
            return self._flat_parameters(unit)
        return list(unit.parameters())

    def _root_parameters(self) -> list[Tensor]:
        """Returns the parameters of the root's unit outside the decoder, unsharded inside the model's forward."""
        if isinstance(self._root, FullyShardedDataParallel):
            return self._parameters_of(self._root)
        return [cast(Tensor, owner._parameters[name]) for owner, name in self._in_root]

    def _dependencies(self, call: _MixedCall, inputs: Any) -> list[int]:
        """Computes which units' outputs the decoder's ``inputs`` depend on (0 or 1), and the dependence on each
        parameter."""
        nodes, leaves = _graph_of(_tensors(inputs))
        used = {number for number, output in call.outputs if output.grad_fn in nodes}
        # Reentrant checkpointing hides a layer's parameters from the graph: all trained ones count as used.
        is_hidden = any(node.name() == "CheckpointFunctionBackward" for node in nodes)
        is_used = [int(number in used) for number in range(len(self._units))]
        depends = [_UNUSED] * (self._message_size - 2 - len(self._units))
        for number, index, parameter in call.parameters:
            if id(parameter) in leaves:
                depends[index] = _IN_GRAPH
            elif is_hidden and number in used and parameter.requires_grad:
                # FSDP1 waits for the gradient of the graph, and a unit of it runs once.
                depends[index] = _IN_GRAPH if self._flat_parameters is not None else _IN_CHECKPOINT
        for index, parameter in enumerate(self._root_parameters(), start=self._first_parameter[-1]):
            depends[index] = _IN_GRAPH if id(parameter) in leaves else _UNUSED
        return is_used + depends


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _graph_of(tensors: Iterator[Tensor]) -> tuple[set[Any], set[int]]:
    """Returns all nodes of the autograd graph of ``tensors``, and the ids of its leaves."""
    nodes: set[Any] = set()
    ahead: list[Any] = [tensor.grad_fn for tensor in tensors]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            ahead += [following for following, _ in node.next_functions]
    return nodes, {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _zero(depends_on: list[int], first: int, hidden: Tensor, *parameters: Tensor) -> Tensor:
    return cast(Tensor, _ZeroGradients.apply(depends_on, first, hidden, *parameters))  # type: ignore[no-untyped-call]


class _ZeroGradients(torch.autograd.Function):
    """The scalar 0, with zero gradients for ``hidden`` and for the parameters used according to ``depends_on``."""

    @staticmethod
    def forward(ctx: Any, depends_on: list[int], first: int, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.depends_on, ctx.first, ctx.parameters = depends_on, first, parameters
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hows = ctx.depends_on[ctx.first :][: len(ctx.parameters)]
        in_graph: list[Tensor | None] = []
        nested: dict[Tensor, Tensor] = {}
        for parameter, is_needed, how in zip(ctx.parameters, ctx.needs_input_grad[3:], hows, strict=True):
            is_used = is_needed and how != _UNUSED
            zeros = torch.zeros_like(parameter) if is_used else None
            in_graph.append(zeros if how == _IN_GRAPH else None)
            if zeros is not None and how == _IN_CHECKPOINT:
                nested[parameter] = zeros
        if nested:
            # As the backward of a reentrant checkpoint does, so that FSDP2 finds these gradients after this pass.
            torch.autograd.backward([*nested], [*nested.values()])
        return None, None, torch.zeros_like(gradients[0]), *in_graph


class _FillGradients(torch.autograd.Function):
    """Identity for a unit's input. After the unit's backward, parameters inside a reentrant checkpoint without a
    gradient get zeros: ranks without images cannot know which parameters of a layer the checkpoint does not use."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, depends_on: list[int], first: int, parameters: list[Tensor]) -> Tensor:
        ctx.depends_on, ctx.first, ctx.parameters = depends_on, first, parameters
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        for parameter, how in zip(ctx.parameters, ctx.depends_on[ctx.first :], strict=False):
            if how == _IN_CHECKPOINT and parameter.grad is None:
                # From torch 2.15 on FSDP2 sets the gradient's dtype.
                parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
        return gradient, None, None, None
