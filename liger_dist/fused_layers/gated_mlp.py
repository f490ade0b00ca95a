"""Gated MLPs, ``down(activation(gate(x)) * up(x))``: the activation as one autograd function, the match of modules, and
their swapped forward. Gate and up may be one projection.

The projections stay modules that are called as before, so LoRA, quantisation and sharding on them keep working; only
the elementwise part between them becomes one kernel. In the probe the projections return fixed values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import Parameter, signature
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_dist.errors import refuse_second_order
from liger_dist.model.peft import hooks_rows
from liger_dist.sharding.deepspeed import is_stored_by_zero3
from liger_dist.trials.attributes import Attributes
from liger_dist.trials.isolated import LeftAloneError, StandIn, probing, without_hooks
from liger_dist.trials.kinds import PROBE_SCALES, agrees, run_class_forward
from liger_dist_kernels import ACTIVATIONS, Activation, Backend, gated_activation_bwd, gated_activation_fwd

from .mlp_tiles import compute_in_tiles, linear_without_output
from .recompute import RecomputedFunction, free_copy, note_output, should_recompute
from .swap import Kind, Match, PartState, has_kernels, is_local, is_plain_linear, match_of, original_forward

TOLERANCE = 1e-5
_ZERO_LEAF = "_z3_leaf"
"""attribute of modules whose parameters DeepSpeed all-gathers together"""


class _GatedActivation(RecomputedFunction):
    """Activation of the projections' outputs themselves, not views, so that :func:`_may_overwrite` can count their
    references."""

    is_end_of_walk = False

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation, backend: Backend) -> Tensor:
        ctx.activation, ctx.backend = activation, backend
        ctx.save_for_backward(gate, up)
        result = gated_activation_fwd(gate, up, activation=activation, backend=backend)
        if should_recompute(result) and any(ctx.needs_input_grad):
            note_output(ctx, result)
        return result

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        gate, up = ctx.saved_tensors
        return gated_activation_fwd(gate, up, activation=ctx.activation, backend=ctx.backend)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        free_copy(ctx)
        saved = list(ctx.saved_tensors)
        overwrites = _may_overwrite(saved)
        gate, up = saved
        d_gate, d_up = gated_activation_bwd(
            d_y, gate, up, activation=ctx.activation, backend=ctx.backend, overwrite=overwrites
        )
        return d_gate, d_up, None, None


def _may_overwrite(saved: list[Tensor]) -> bool:
    """True if the caller's list and this graph alone hold the ``saved`` tensors and their memory, in the last backward
    through the graph: they may be overwritten."""
    if not _COUNTS_REFERENCES or torch.compiler.is_compiling():
        return False
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    of_holder, least, unheld = _usual_references()
    for names, holders, memory, objects in _references(saved):
        # A storage has one Python object; a reference to it does not count in the use count of the memory.
        if names > of_holder.get(holders, 0) or memory > least or objects > unheld:
            return False
    return all(is_local(tensor) and tensor._base is None for tensor in saved)


def _references(tensors: list[Tensor]) -> list[tuple[int, int, int, int]]:
    """Returns numbers of references to each tensor, by Python and by C++, and to its memory, by C++ and by Python."""
    return [
        (
            sys.getrefcount(tensor),
            tensor._use_count(),  # type: ignore[attr-defined]
            torch._C._storage_Use_Count(tensor.untyped_storage()._cdata),
            sys.getrefcount(tensor.untyped_storage()),
        )
        for tensor in tensors
    ]


@lru_cache(maxsize=1)
def _usual_references() -> tuple[dict[int, int], int, int]:
    """Counts the references of Python to a tensor that only a list holds, and to one that a view keeps like a node
    keeps a saved tensor, by the number of references of C++; and both numbers for the memory of the former. They
    depend on the versions of Python and torch."""
    tensors = [torch.empty(0), torch.empty(0).requires_grad_()]
    view = tensors[-1].view(0)
    (alone, _, least, unheld), (kept, _, _, _) = _references(tensors)
    del view
    return {1: alone, 2: kept}, least, unheld


def _has_private_names() -> bool:
    """True if this torch has the private names for counting references; without them nothing is overwritten."""
    has_graph_task = hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    return has_graph_task and hasattr(torch._C, "_storage_Use_Count") and hasattr(Tensor, "_use_count")


_COUNTS_REFERENCES = _has_private_names()


def gated_activation(gate: Tensor, up: Tensor, *, activation: Activation, backend: Backend = "auto") -> Tensor:
    """Computes ``activation(gate) * up``; both ``[..., F]`` of one floating dtype.

    The result is recomputed in the backward instead of saved, where a :func:`.norm` follows.
    """
    if not torch.is_grad_enabled():
        return gated_activation_fwd(gate, up, activation=activation, backend=backend)
    result: Tensor = _GatedActivation.apply(gate, up, activation, backend)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, kw_only=True)
class GatedMatch(Match):
    """Roles of a gated MLP's projections, and its activation."""

    gate: str
    up: str | None
    """None if the gate projection returns both halves"""
    down: str
    gate_first: bool
    activation: Activation
    backend: Backend
    remaining: dict[str, PartState]
    """other submodules of the module, such as the activation, when it was matched"""
    attributes: Attributes
    """attributes of the module when it was matched"""
    tile_tokens: int | None = None
    """tokens of one tile; None for all tokens at once"""

    def of_twin(self, module: nn.Module) -> GatedMatch | None:
        if not self.attributes.are_of_twin(module):
            return None
        remaining = {}
        for name, state in self.remaining.items():
            twin = state.of_twin(module._modules.get(name))
            if twin is None:
                return None
            remaining[name] = twin
        match = replace(self, remaining=remaining, attributes=Attributes(module))
        with probing(module):
            return match if _agrees(module, match, _probe_values()[1:2], (True,)) else None

    def __str__(self) -> str:
        tiles = "" if self.tile_tokens is None else f", {self.tile_tokens} tokens at a time"
        return f"{self.activation}({self.gate}) * {self.up or 'its other half'}{tiles}"

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        first, second = both.chunk(2, -1)
        return (first, second) if self.gate_first else (second, first)


def with_tiles(module: nn.Module, match: GatedMatch, tile_tokens: int) -> GatedMatch:
    """Returns the match of a module that computes ``tile_tokens`` tokens at a time. ZeRO-3 all-gathers its weights
    together, because tiles read them outside of the projections' hooks."""
    vars(module)[_ZERO_LEAF] = True
    module.register_forward_pre_hook(_require_input_gradient)
    return replace(match, tile_tokens=tile_tokens)


def without_tiles(module: nn.Module) -> None:
    """Undoes :func:`with_tiles`, before the module is restored."""
    match = match_of(module)
    if isinstance(match, GatedMatch) and match.tile_tokens is not None:
        vars(module).pop(_ZERO_LEAF, None)
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _require_input_gradient]:
            del hooks[key]


def _require_input_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Makes the input of a trained leaf module of ZeRO-3 require a gradient. DeepSpeed reduces the gradients of a leaf
    module when its input's gradient is ready. Without one it reduces them before they exist, and frees the weights that
    the backward still reads (the first MLP with LoRA in a model whose embedding and attention are frozen)."""
    if not (args and torch.is_grad_enabled() and isinstance(args[0], Tensor) and not args[0].requires_grad):
        return None
    if not any(parameter.requires_grad and is_stored_by_zero3(parameter) for parameter in module.parameters()):
        return None
    return args[0].detach().requires_grad_(), *args[1:]


class Given(nn.Module):
    """Stand-in for a projection: returns fixed values for the ``expected`` hidden states, or its input."""

    def __init__(self, values: Tensor | None, expected: Tensor) -> None:
        super().__init__()
        self.values, self.expected = values, expected

    def forward(self, x: Tensor) -> Tensor:
        if self.values is None:
            return x
        if x is not self.expected:
            raise LeftAloneError("it does something to its input before projecting it")
        return self.values


def _is_candidate(module: nn.Module) -> bool:
    """True if its projections have the shapes of a gated MLP's, and hidden states are the only required argument of its
    forward."""
    required = [p for p in signature(module.forward).parameters.values() if p.default is Parameter.empty]
    is_one_input = len(required) == 1
    return is_one_input and not module._parameters and not module._buffers and next(_roles(module), None) is not None


def _match(module: nn.Module, backend: Backend) -> GatedMatch:
    with probing(module):
        found = (_explained(module, roles, backend) for roles in _roles(module))
        match = next((match for match in found if match is not None), None)
    if match is None:
        raise LeftAloneError("it does not compute down(activation(gate) * up) with a known activation")
    return match


def _roles(module: nn.Module) -> Iterator[tuple[str, str | None, str]]:
    """Yields names of gate, up and down projection, in all assignments that the shapes allow."""
    linears = {name: child for name, child in module._modules.items() if projection_shape(child) is not None}
    shapes = {name: projection_shape(child) for name, child in linears.items()}
    if len(linears) == 3:
        for down, (inside, outside) in ((name, shape) for name, shape in shapes.items() if shape):
            remaining = [name for name in linears if name != down]
            if all(shapes[name] == (outside, inside) for name in remaining):
                yield remaining[0], remaining[1], down
                yield remaining[1], remaining[0], down
    if len(linears) == 2:
        (first, in_first), (second, in_second) = ((name, shape) for name, shape in shapes.items() if shape)
        for both, wide, down, narrow in ((first, in_first, second, in_second), (second, in_second, first, in_first)):
            if wide == (narrow[1], 2 * narrow[0]):
                yield both, None, down


def projection_shape(module: nn.Module | None) -> tuple[int, int] | None:
    """Returns ``(in, out)`` of a projection, also of one with LoRA."""
    shape = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return shape if isinstance(shape[0], int) and isinstance(shape[1], int) else None  # type: ignore[return-value]


def _explained(module: nn.Module, roles: tuple[str, str | None, str], backend: Backend) -> GatedMatch | None:
    gate, up, down = roles
    parts = ((name, part) for name, part in module._modules.items() if part is not None and name not in roles)
    remaining = {name: PartState.of(part) for name, part in parts}
    attributes = Attributes(module)
    of_roles = functools.partial(GatedMatch, gate=gate, up=up, down=down, remaining=remaining, attributes=attributes)
    for gate_first, activation in product((True, False) if up is None else (True,), ACTIVATIONS):
        match = of_roles(gate_first=gate_first, activation=activation, backend=backend)
        if _agrees(module, match, _probe_values(), (False, True)):
            return match
    return None


def _probe_values() -> list[list[Tensor]]:
    """Returns values of gate and up, at each of the scales."""
    generator = torch.Generator().manual_seed(0)
    return [[scale * torch.randn(1, 4, 8, generator=generator) for _ in range(2)] for scale in PROBE_SCALES]


def _agrees(module: nn.Module, match: GatedMatch, values: Sequence[list[Tensor]], modes: Sequence[bool]) -> bool:
    """True if the original forward computes the match, for all values in all modes (True: training)."""
    originals = [functools.partial(_original, module, match, training) for training in modes]
    compute = functools.partial(gated_activation, activation=match.activation, backend="reference")
    return all(agrees(pair, original, compute, tolerance=TOLERANCE) for pair, original in product(values, originals))


def _original(module: nn.Module, match: GatedMatch, training: bool, gate: Tensor, up: Tensor) -> Any:
    """Runs the module's original forward between its projections."""
    halves = (gate, up) if match.gate_first else (up, gate)
    given = {match.gate: gate, match.up: up} if match.up else {match.gate: torch.cat(halves, -1)}
    hidden_states = torch.linspace(-2, 3, 32).reshape(1, 4, 8).requires_grad_()
    parts: dict[str, nn.Module] = {name: Given(value, hidden_states) for name, value in given.items()}
    parts[match.down] = Given(None, hidden_states)
    with match.attributes.noting(module), ExitStack() as stack:
        for name, state in match.remaining.items():
            # Without their hooks, which must not see the probe.
            parts[name] = StandIn(state.part, without_hooks)
            stack.enter_context(state.attributes.noting(state.part))
        return run_class_forward(module, (hidden_states,), parts, training=training)


def _compute(module: nn.Module, match: GatedMatch, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
    if hidden_states is None or args or kwargs or not _is_as_probed(module, match):
        return NotImplemented
    runs_original = not has_kernels(hidden_states)
    if match.tile_tokens is not None and _has_tiles(match.tile_tokens, hidden_states) and not hooks_rows(module):
        # The backward does not look at the match: the module may have been restored by then.
        original = functools.partial(original_forward(module), module)
        compute = original if runs_original else functools.partial(_fused, module, match)
        recompute = original if runs_original else functools.partial(_fused, module, match, needs_values=False)
        return compute_in_tiles(module, compute, hidden_states, match.tile_tokens, recompute=recompute)
    return NotImplemented if runs_original else _fused(module, match, hidden_states)


def _has_tiles(tile_tokens: int, hidden_states: Any) -> bool:
    return is_local(hidden_states) and bool(hidden_states.shape[:-1].numel() > tile_tokens)


def _fused(module: nn.Module, match: GatedMatch, hidden_states: Tensor, *, needs_values: bool = True) -> Any:
    """Computes the MLP with the fused activation.

    Args:
        needs_values: False if the caller reads only the graph of the result.
    """
    projected: Any = getattr(module, match.gate)(hidden_states)
    gate, up = (projected, getattr(module, match.up)(hidden_states)) if match.up else match.split(projected)
    del projected
    down = getattr(module, match.down)
    if not has_kernels(gate) or not is_local(up) or gate.dtype != up.dtype or gate.shape != up.shape:
        # Projections may return DTensors, with LoRA another dtype, and after an exchange shapes that broadcast.
        return down(_activate(gate, match.activation) * up)
    product = gated_activation(gate, up, activation=match.activation, backend=match.backend)
    has_autocast = torch.is_autocast_enabled(product.device.type)
    if not needs_values and not has_autocast and is_plain_linear(down):
        return linear_without_output(down, product)
    return down(product)


def _is_as_probed(module: nn.Module, match: GatedMatch) -> bool:
    """True if the submodules that are no longer called are unchanged, and have no user hooks."""
    return all(state.is_unchanged(module._modules.get(name)) for name, state in match.remaining.items())


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "relu_squared":
        return F.relu(gate).square()
    if activation == "sigmoid":
        return gate.sigmoid()
    return F.silu(gate) if activation == "silu" else F.relu(gate)


GATED_MLP = Kind(
    name="gated MLP",
    is_candidate=_is_candidate,
    match=_match,
    compute=_compute,
    absent="no module that takes hidden states alone has projections with the shapes of gate, up and down",
)
