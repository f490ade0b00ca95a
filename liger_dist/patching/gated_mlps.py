"""Gated MLPs, told by what they compute: ``down(activation(gate(x)) * up(x))``, with gate and up apart or one.

The projections stay modules that are called as before, so adapters, quantisation and sharding on them go on working;
only the elementwise part between them becomes one kernel. In the probe the projections hand out given numbers.
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

from liger_dist.layers import gated_activation
from liger_dist_kernels import ACTIVATIONS, Activation, Backend

from .hooks import has_hooks
from .local import is_local, runs_own_code
from .replaced import (
    Forward,
    LeftAloneError,
    forward_of,
    has_settings,
    own_forward,
    plan_of,
    probing,
    replace_forward,
    settings_of,
)
from .stand_ins import StandIn, swapped, without_hooks

KIND = "gated MLP"
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class GatedPlan:
    gate: str
    up: str | None
    """None where the gate's projection gives both halves"""
    down: str
    gate_first: bool
    activation: Activation
    backend: Backend
    others: dict[str, nn.Module]
    """its other parts, such as the activation, as they were"""
    settings: dict[str, Any]
    """what the module's numbers were"""

    def __str__(self) -> str:
        return f"{self.activation}({self.gate}) * {self.up or 'its other half'}"

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        first, second = both.chunk(2, -1)
        return (first, second) if self.gate_first else (second, first)


class _Given(nn.Module):
    """Stands in for a projection: hands out given numbers for ``expected`` hidden states, or what it gets."""

    def __init__(self, values: Tensor | None, expected: Tensor) -> None:
        super().__init__()
        self.values, self.expected = values, expected

    def forward(self, x: Tensor) -> Tensor:
        if self.values is None:
            return x
        if x is not self.expected:
            raise LeftAloneError("it does something to its input before projecting it")
        return self.values


def is_candidate(module: nn.Module) -> bool:
    """Whether its projections have the shapes of a gated MLP's, and its forward takes hidden states alone."""
    required = [p for p in signature(module.forward).parameters.values() if p.default is Parameter.empty]
    is_one_input = len(required) == 1
    return is_one_input and not module._parameters and not module._buffers and next(_roles(module), None) is not None


def replace(module: nn.Module, backend: Backend, *, owner: str) -> GatedPlan:
    """Replaces the forward of a candidate.

    Raises:
        LeftAloneError: it computes something else.
    """
    with probing(module):
        plan = next((plan for roles in _roles(module) if (plan := _plan(module, roles, backend)) is not None), None)
    if plan is None:
        raise LeftAloneError("it does not compute down(activation(gate) * up) with a known activation")
    replace_forward(module, KIND, plan, owner=owner)
    return plan


def _roles(module: nn.Module) -> Iterator[tuple[str, str | None, str]]:
    """Names of gate, up and down projection, in every way that the shapes allow."""
    linears = {name: child for name, child in module._modules.items() if _shape(child) is not None}
    shapes = {name: _shape(child) for name, child in linears.items()}
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


def _shape(module: nn.Module | None) -> tuple[int, int] | None:
    """``(in, out)`` of a projection, also of one under an adapter."""
    shape = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return shape if isinstance(shape[0], int) and isinstance(shape[1], int) else None  # type: ignore[return-value]


def _plan(module: nn.Module, roles: tuple[str, str | None, str], backend: Backend) -> GatedPlan | None:
    gate, up, down = roles
    others = {name: part for name, part in module._modules.items() if part is not None and name not in roles}
    generator = torch.Generator().manual_seed(0)
    values = [3 * torch.randn(1, 4, 8, generator=generator) for _ in range(2)]
    for gate_first in (True, False) if up is None else (True,):
        for activation in ACTIVATIONS:
            plan = GatedPlan(
                gate=gate,
                up=up,
                down=down,
                gate_first=gate_first,
                activation=activation,
                backend=backend,
                others=others,
                settings=settings_of(module),
            )
            if all(_agrees(module, plan, values, training) for training in (False, True)):
                return plan
    return None


def _agrees(module: nn.Module, plan: GatedPlan, values: list[Tensor], training: bool) -> bool:
    upstream = torch.linspace(-1, 1, values[0].numel()).reshape(values[0].shape)
    results: list[tuple[Tensor, ...]] = []
    for own in (True, False):
        leaves = [value.clone().requires_grad_() for value in values]
        gate, up = leaves
        with torch.enable_grad():
            if own:
                result = _own(module, plan, gate, up, training)
            else:
                result = gated_activation(gate, up, activation=plan.activation, backend="reference")
        if not isinstance(result, Tensor) or result.shape != upstream.shape:
            return False
        results.append((result.detach(), *torch.autograd.grad(result, leaves, upstream, allow_unused=True)))
    return all(
        own_value is not None and bool((ours - own_value).norm() <= TOLERANCE * own_value.norm())
        for own_value, ours in zip(*results, strict=True)
    )


def _own(module: nn.Module, plan: GatedPlan, gate: Tensor, up: Tensor, training: bool) -> Any:
    """The module's own forward between its projections."""
    halves = (gate, up) if plan.gate_first else (up, gate)
    given = {plan.gate: gate if plan.up else torch.cat(halves, -1), plan.down: None}
    if plan.up is not None:
        given[plan.up] = up
    hidden_states = torch.linspace(-2, 3, 32).reshape(1, 4, 8).requires_grad_()
    modes = [part for part in module.modules() if part.training != training]
    with ExitStack() as stack:
        for part in modes:
            stack.enter_context(swapped(vars(part), "training", training))
        for name, value in given.items():
            stack.enter_context(swapped(module._modules, name, _Given(value, hidden_states)))
        for name, part in plan.others.items():
            # Without the hooks on them, which are not meant for probes.
            stack.enter_context(swapped(module._modules, name, StandIn(part, without_hooks)))
        return type(module).forward(module, hidden_states)


@forward_of(KIND)
def _make_forward(own: Forward) -> Forward:
    def forward(self: nn.Module, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        plan: GatedPlan | None = plan_of(self)
        if plan is None or args or kwargs or runs_own_code(hidden_states) or not _is_as_probed(self, plan, own):
            return (own_forward(self, own) or own)(self, hidden_states, *args, **kwargs)
        projected: Any = getattr(self, plan.gate)(hidden_states)
        gate, up = (projected, getattr(self, plan.up)(hidden_states)) if plan.up else plan.split(projected)
        down = getattr(self, plan.down)
        if runs_own_code(gate) or not is_local(up) or gate.dtype != up.dtype:
            # Projections may give DTensors, or under an adapter another dtype.
            return down(_activate(gate, plan.activation) * up)
        return down(gated_activation(gate, up, activation=plan.activation, backend=plan.backend))

    return forward


def _is_as_probed(module: nn.Module, plan: GatedPlan, own: Forward) -> bool:
    """Whether nothing has been changed, and nobody listens to the parts that are not called any more."""
    parts = plan.others.items()
    same = all(module._modules.get(name) is part and not has_hooks(part) for name, part in parts)
    return same and own_forward(module, own) is None and has_settings(module, plan.settings)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.silu(gate) if activation == "silu" else F.relu(gate)
