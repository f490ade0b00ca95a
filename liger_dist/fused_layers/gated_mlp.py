"""Gated MLPs, ``down(activation(gate(x)) * up(x))``: the activation as one autograd function, the match of modules that
compute one, and their swapped forward. Gate and up may be one projection.

The projections stay modules that are called as before, so LoRA, quantisation and sharding on them keep working; only
the elementwise part between them becomes one kernel. In the probe the projections return given numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_dist.errors import refuse_second_order
from liger_dist.stand_ins import StandIn, swapped, without_hooks
from liger_dist_kernels import ACTIVATIONS, Activation, Backend, gated_activation_bwd, gated_activation_fwd

from .norm import rows_of
from .recompute import RecomputedFunction, free_copy, note_output, should_recompute
from .swap import (
    Forward,
    Kind,
    LeftAloneError,
    has_hooks,
    has_settings,
    is_local,
    match_of,
    own_forward,
    probing,
    runs_own_code,
    settings_of,
)

TOLERANCE = 1e-5


class _GatedActivation(RecomputedFunction):
    is_end_of_walk = False

    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, activation: Activation, backend: Backend) -> Tensor:
        ctx.activation, ctx.backend = activation, backend
        ctx.save_for_backward(gate_TF, up_TF)
        result = gated_activation_fwd(gate_TF, up_TF, activation=activation, backend=backend)
        if any(ctx.needs_input_grad) and should_recompute(result):
            note_output(ctx, result)
        return result

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        gate_TF, up_TF = ctx.saved_tensors
        return gated_activation_fwd(gate_TF, up_TF, activation=ctx.activation, backend=ctx.backend)

    @staticmethod
    def backward(ctx: Any, d_y_TF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        free_copy(ctx)
        gate_TF, up_TF = ctx.saved_tensors
        d_both = gated_activation_bwd(rows_of(d_y_TF), gate_TF, up_TF, activation=ctx.activation, backend=ctx.backend)
        return d_both[:, 0], d_both[:, 1], None, None


def gated_activation(gate: Tensor, up: Tensor, *, activation: Activation, backend: Backend = "auto") -> Tensor:
    """``activation(gate) * up``; both ``[..., F]`` of one floating dtype.

    The result is recomputed in the backward instead of saved, where a :func:`.norm` follows.
    """
    result: Tensor = _GatedActivation.apply(rows_of(gate), rows_of(up), activation, backend)  # type: ignore[no-untyped-call]
    return result.reshape(gate.shape)


@dataclass(frozen=True, kw_only=True)
class GatedMatch:
    """The roles of a gated MLP's projections, and its activation."""

    gate: str
    up: str | None
    """None if the gate's projection returns both halves"""
    down: str
    gate_first: bool
    activation: Activation
    backend: Backend
    others: dict[str, nn.Module]
    """its other submodules, such as the activation, when it was matched"""
    settings: dict[str, Any]
    """the module's numbers when it was matched"""

    def __str__(self) -> str:
        return f"{self.activation}({self.gate}) * {self.up or 'its other half'}"

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        first, second = both.chunk(2, -1)
        return (first, second) if self.gate_first else (second, first)


class Given(nn.Module):
    """Stand-in for a projection: returns given numbers for the ``expected`` hidden states, or its input."""

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
    """True if its projections have the shapes of a gated MLP's, and its forward takes hidden states alone."""
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
    """Names of gate, up and down projection, in every way that the shapes allow."""
    linears = {name: child for name, child in module._modules.items() if projection_shape(child) is not None}
    shapes = {name: projection_shape(child) for name, child in linears.items()}
    if len(linears) == 3:
        for down, (inside, outside) in ((name, shape) for name, shape in shapes.items() if shape):
            others = [name for name in linears if name != down]
            if all(shapes[name] == (outside, inside) for name in others):
                yield others[0], others[1], down
                yield others[1], others[0], down
    if len(linears) == 2:
        (first, in_first), (second, in_second) = ((name, shape) for name, shape in shapes.items() if shape)
        for both, wide, down, narrow in ((first, in_first, second, in_second), (second, in_second, first, in_first)):
            if wide == (narrow[1], 2 * narrow[0]):
                yield both, None, down


def projection_shape(module: nn.Module | None) -> tuple[int, int] | None:
    """``(in, out)`` of a projection, also of one with LoRA."""
    shape = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return shape if isinstance(shape[0], int) and isinstance(shape[1], int) else None  # type: ignore[return-value]


def _explained(module: nn.Module, roles: tuple[str, str | None, str], backend: Backend) -> GatedMatch | None:
    gate, up, down = roles
    others = {name: part for name, part in module._modules.items() if part is not None and name not in roles}
    generator = torch.Generator().manual_seed(0)
    values = [3 * torch.randn(1, 4, 8, generator=generator) for _ in range(2)]
    for gate_first in (True, False) if up is None else (True,):
        for activation in ACTIVATIONS:
            match = GatedMatch(
                gate=gate,
                up=up,
                down=down,
                gate_first=gate_first,
                activation=activation,
                backend=backend,
                others=others,
                settings=settings_of(module),
            )
            if all(_agrees(module, match, values, training) for training in (False, True)):
                return match
    return None


def _agrees(module: nn.Module, match: GatedMatch, values: list[Tensor], training: bool) -> bool:
    upstream = torch.linspace(-1, 1, values[0].numel()).reshape(values[0].shape)
    results: list[tuple[Tensor, ...]] = []
    for own in (True, False):
        leaves = [value.clone().requires_grad_() for value in values]
        gate, up = leaves
        with torch.enable_grad():
            if own:
                result = _own(module, match, gate, up, training)
            else:
                result = gated_activation(gate, up, activation=match.activation, backend="reference")
        if not isinstance(result, Tensor) or result.shape != upstream.shape:
            return False
        results.append((result.detach(), *torch.autograd.grad(result, leaves, upstream, allow_unused=True)))
    return all(
        own_value is not None and bool((ours - own_value).norm() <= TOLERANCE * own_value.norm())
        for own_value, ours in zip(*results, strict=True)
    )


def _own(module: nn.Module, match: GatedMatch, gate: Tensor, up: Tensor, training: bool) -> Any:
    """The module's own forward between its projections."""
    halves = (gate, up) if match.gate_first else (up, gate)
    given = {match.gate: gate if match.up else torch.cat(halves, -1), match.down: None}
    if match.up is not None:
        given[match.up] = up
    hidden_states = torch.linspace(-2, 3, 32).reshape(1, 4, 8).requires_grad_()
    modes = [part for part in module.modules() if part.training != training]
    with ExitStack() as stack:
        for part in modes:
            stack.enter_context(swapped(vars(part), "training", training))
        for name, value in given.items():
            stack.enter_context(swapped(module._modules, name, Given(value, hidden_states)))
        for name, part in match.others.items():
            # Without their hooks, which must not see the probe.
            stack.enter_context(swapped(module._modules, name, StandIn(part, without_hooks)))
        return type(module).forward(module, hidden_states)


def _make_forward(own: Forward) -> Forward:
    def forward(self: nn.Module, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        match: GatedMatch | None = match_of(self)
        if match is None or args or kwargs or runs_own_code(hidden_states) or not _is_as_probed(self, match, own):
            return (own_forward(self, own) or own)(self, hidden_states, *args, **kwargs)
        projected: Any = getattr(self, match.gate)(hidden_states)
        gate, up = (projected, getattr(self, match.up)(hidden_states)) if match.up else match.split(projected)
        down = getattr(self, match.down)
        if runs_own_code(gate) or not is_local(up) or gate.dtype != up.dtype:
            # Projections may return DTensors, or with LoRA another dtype.
            return down(_activate(gate, match.activation) * up)
        return down(gated_activation(gate, up, activation=match.activation, backend=match.backend))

    return forward


def _is_as_probed(module: nn.Module, match: GatedMatch, own: Forward) -> bool:
    """True if the module is unchanged, and no user hooks are on the submodules that are no longer called."""
    parts = match.others.items()
    same = all(module._modules.get(name) is part and not has_hooks(part) for name, part in parts)
    return same and own_forward(module, own) is None and has_settings(module, match.settings)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.silu(gate) if activation == "silu" else F.relu(gate)


GATED_MLP = Kind(name="gated MLP", is_candidate=_is_candidate, match=_match, make_forward=_make_forward)
