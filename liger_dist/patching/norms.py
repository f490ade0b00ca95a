"""RMSNorms and LayerNorms, told by what they compute.

A candidate is a module without parts, with a weight and a bias of one dim or none. Its own forward is run on probe
values in the place of its parameters; what reproduces it, forward and backward, in fp32 and bf16, decides.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.layers import norm
from liger_dist_kernels import Backend, NormOptions

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
from .stand_ins import swapped

KIND = "norm"
TOLERANCE = 1e-5
WIDTH = 32
"""of a norm that has no parameters to tell it"""


@dataclass(frozen=True, kw_only=True)
class NormPlan:
    options: NormOptions
    backend: Backend
    parameters: tuple[str, ...]
    """weight and bias, if it has them"""
    settings: dict[str, Any]
    """what the module's numbers were"""
    under_autocast: bool
    """whether the module does the same under autocast"""

    def __str__(self) -> str:
        options = self.options
        name = "LayerNorm" if options.subtract_mean else "RMSNorm"
        words = [f"eps {options.eps:g}"]
        words += [f"weight + {options.offset:g}"] if options.offset else []
        words += ["rounded before the weight"] if options.round_before_weight else []
        return f"{name} ({', '.join(words)})"


def is_candidate(module: nn.Module) -> bool:
    """Whether it looks like a norm."""
    named = "norm" in type(module).__name__.lower()
    return named and not module._modules and set(module._parameters) <= {"weight", "bias"}


def replace(module: nn.Module, backend: Backend, *, owner: str) -> NormPlan:
    """Replaces the forward of a candidate.

    Raises:
        LeftAloneError: it computes something else.
    """
    with probing(module):
        plan = _plan(module, backend)
    replace_forward(module, KIND, plan, owner=owner)
    return plan


def _plan(module: nn.Module, backend: Backend) -> NormPlan:
    given = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    # ZeRO-3 keeps the full shape beside an empty tensor.
    shapes = {tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in given.values()}
    if any(len(shape) != 1 or shape[0] < 2 for shape in shapes) or len(shapes) > 1:
        raise LeftAloneError(f"its parameters have the shapes {sorted(shapes)}")
    width = shapes.pop()[0] if shapes else (getattr(module, "normalized_shape", None) or (WIDTH,))[-1]
    generator = torch.Generator().manual_seed(0)
    # Rows of very different sizes, so that the place of eps shows.
    x = torch.randn(1, 4, width, generator=generator) * torch.tensor([3.0, 1.0, 1e-2, 1e-3])[:, None]
    values = {name: torch.randn(width, generator=generator) for name in given}
    probe = _Probe(module, x, values)
    options = probe.explain()
    if options is None:
        raise LeftAloneError("its forward is no RMSNorm or LayerNorm of the last dim")
    if not probe.agrees_backward(options):
        raise LeftAloneError("its gradients are not those of the norm that its forward is")
    rounded = probe.rounding(options)
    if rounded is None:
        raise LeftAloneError("it rounds in a way that is not known")
    # Torch's own norms are among what autocast gives another dtype, on GPUs at least.
    is_torchs = type(module).__module__.startswith("torch.") or rounded.subtract_mean
    return NormPlan(
        options=rounded,
        backend=backend,
        parameters=tuple(given),
        settings=settings_of(module),
        under_autocast=not is_torchs and probe.same_under_autocast(rounded),
    )


class _Probe:
    """One module's own forward on probe values."""

    def __init__(self, module: nn.Module, x: Tensor, values: dict[str, Tensor]) -> None:
        self.module, self.x, self.values = module, x, values

    def own(self, x: Tensor, values: dict[str, Tensor], *, training: bool = False) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(swapped(vars(self.module), "training", training))
            for name, value in values.items():
                stack.enter_context(swapped(self.module._parameters, name, value))
            result: Tensor = type(self.module).forward(self.module, x)
        return result

    @staticmethod
    def ours(x: Tensor, values: dict[str, Tensor], options: NormOptions) -> Tensor:
        return norm(x, values.get("weight"), values.get("bias"), options=options, backend="reference")[0]

    def explain(self) -> NormOptions | None:
        with torch.no_grad():
            expected = self.own(self.x, self.values)
            if not isinstance(expected, Tensor) or expected.shape != self.x.shape:
                return None
            if not torch.equal(self.own(self.x, self.values, training=True), expected):
                return None
            numbers = {value for value in vars(self.module).values() if isinstance(value, float) and 0 < value < 0.1}
            for eps in sorted(numbers | {torch.finfo(torch.float32).eps}):
                for subtract_mean in (False, True):
                    for offset in (0.0, 1.0) if "weight" in self.values else (0.0,):
                        options = NormOptions(eps=eps, subtract_mean=subtract_mean, offset=offset)
                        if _agree(self.ours(self.x, self.values, options), expected):
                            return options
        return None

    def agrees_backward(self, options: NormOptions) -> bool:
        upstream = torch.linspace(-1, 1, self.x.numel()).reshape(self.x.shape)
        gradients: list[tuple[Tensor, ...]] = []
        for run in (self.own, lambda x, values: self.ours(x, values, options)):
            leaves = [tensor.clone().requires_grad_() for tensor in (self.x, *self.values.values())]
            with torch.enable_grad():
                result = run(leaves[0], dict(zip(self.values, leaves[1:], strict=True)))
            gradients.append(torch.autograd.grad(result, leaves, upstream))
        return all(_agree(ours, own) for own, ours in zip(*gradients, strict=True))

    def rounding(self, options: NormOptions) -> NormOptions | None:
        """The same options with the module's way of rounding, seen with bf16 rows and parameters of two dtypes."""
        for round_before_weight in (True, False) if "weight" in self.values and not options.offset else (False,):
            candidate = NormOptions(**{**vars(options), "round_before_weight": round_before_weight})
            if all(self._rounds_alike(candidate, dtype) for dtype in (torch.bfloat16, torch.float32)):
                return candidate
        return None

    def _rounds_alike(self, options: NormOptions, dtype: torch.dtype) -> bool:
        x, values = self.x.bfloat16(), {name: value.to(dtype) for name, value in self.values.items()}
        try:
            with torch.no_grad():
                own = self.own(x, values)
        except RuntimeError:
            # A module that does not mix dtypes will not be asked to; with one dtype it has to run.
            return dtype != x.dtype
        ours = self.ours(x, values, options)
        same = (own == ours).float().mean() if own.dtype == ours.dtype else torch.tensor(0.0)
        return float(same) > 0.97

    def same_under_autocast(self, options: NormOptions) -> bool:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self._rounds_alike(options, torch.float32)


def _agree(ours: Tensor, own: Tensor) -> bool:
    return bool((ours - own).norm() <= TOLERANCE * own.norm()) and torch.allclose(ours, own, rtol=1e-4, atol=1e-5)


@forward_of(KIND)
def _make_forward(own: Forward) -> Forward:
    def forward(self: nn.Module, hidden_states: Any, *args: Any, liger_dist_residual: Any = None, **kwargs: Any) -> Any:
        residual, plan = liger_dist_residual, plan_of(self)
        parameters = None if plan is None or args or kwargs else _parameters(self, plan, own, hidden_states, residual)
        if parameters is None:
            run = own_forward(self, own) or own
            if residual is None:
                return run(self, hidden_states, *args, **kwargs)
            total = residual + hidden_states
            return run(self, total, *args, **kwargs), total
        weight, bias = parameters
        y, total = norm(hidden_states, weight, bias, residual=residual, options=plan.options, backend=plan.backend)
        return y if residual is None else (y, total)

    return forward


def _parameters(
    module: nn.Module, plan: NormPlan, own: Forward, hidden_states: Any, residual: Any
) -> tuple[Any, Any] | None:
    """Weight and bias for the kernel; None where the module's own code has to run."""
    if runs_own_code(hidden_states, under_autocast=plan.under_autocast) or own_forward(module, own) is not None:
        return None
    found: dict[str, Any] = {name: getattr(module, name, None) for name in plan.parameters}
    width = hidden_states.shape[-1]
    fits = all(is_local(tensor) and tuple(tensor.shape) == (width,) for tensor in found.values())
    if not fits or not (residual is None or is_local(residual)) or not has_settings(module, plan.settings):
        return None
    return found.get("weight"), found.get("bias")
