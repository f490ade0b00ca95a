"""RMSNorm with a gate, as after gated delta nets, Mamba2 and KDA: one autograd function, the match of modules, and
their swapped forward.

A candidate is a module without submodules, whose only parameter is a weight of one dimension and whose forward takes a
gate. Its original forward runs on probe values instead of its parameters; the gated norm that agrees with it, forward
and backward, in fp32 and bf16, is the match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.errors import refuse_second_order
from liger_dist.model.structure import full_shape
from liger_dist.trials.attributes import Attributes, numbers_of
from liger_dist.trials.isolated import LeftAloneError, probing
from liger_dist.trials.kinds import Trial
from liger_dist_kernels import Backend, GatedNormOptions, gated_norm_bwd, gated_norm_fwd

from .layout import in_layout
from .norm import refuse_freed
from .recompute import RecomputedFunction, free_copy, note_output, should_recompute
from .swap import Kind, Match, has_kernels, is_local

TOLERANCE = 1e-5
MOST_FEATURES = 8192
"""features of a group; the backward of wider ones runs at 0.4 TB/s (an H100)"""


class _GatedNorm(RecomputedFunction):
    is_end_of_walk = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight_D: Tensor, options: GatedNormOptions, backend: Backend
    ) -> Tensor:
        ctx.options, ctx.backend = options, backend
        y, rstd_TG = gated_norm_fwd(x, gate, weight_D, options=options, backend=backend)
        ctx.save_for_backward(x, gate, rstd_TG, weight_D)
        if should_recompute(y) and any(ctx.needs_input_grad):
            # A copy: the weight may be resharded when the output is recomputed.
            ctx.weight = weight_D.detach().clone()
            note_output(ctx, y)
        return y

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        x, gate = ctx.saved_tensors[:2]
        return gated_norm_fwd(x, gate, ctx.weight, options=ctx.options, backend=ctx.backend).y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        free_copy(ctx)
        x, gate, rstd_TG, weight_D = ctx.saved_tensors
        refuse_freed(weight_D)
        gradients = gated_norm_bwd(
            d_y,
            x,
            gate,
            rstd_TG,
            weight_D,
            needs_weight=ctx.needs_input_grad[2],
            options=ctx.options,
            backend=ctx.backend,
        )
        return *gradients, None, None


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, options: GatedNormOptions, backend: Backend = "auto"
) -> Tensor:
    """Normalises ``x`` and multiplies it by the weight and the activation of ``gate``. The result is recomputed in the
    backward instead of saved, where a norm follows.

    Args:
        x, gate: ``[..., D]``, floating.
        weight: ``[D]``.
    """
    if not torch.is_grad_enabled():
        return gated_norm_fwd(x, gate, weight, options=options, backend=backend).y
    result: Tensor = _GatedNorm.apply(x, gate, weight, options, backend)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, kw_only=True)
class GatedNormMatch(Match):
    """Gated norm that a module computes."""

    options: GatedNormOptions
    backend: Backend
    attributes: Attributes
    """attributes of the module when it was matched"""

    def of_twin(self, module: nn.Module) -> GatedNormMatch | None:
        if not self.attributes.are_of_twin(module):
            return None
        with probing(module):
            trial = _trial_of(module, full_shape(module._parameters["weight"])[0])  # type: ignore[arg-type]
            return replace(self, attributes=trial.attributes) if trial.has_output_of(self.options) else None

    def __str__(self) -> str:
        options = self.options
        words = [
            f"{options.activation} {'before' if options.gates_first else 'after'} the norm",
            f"eps {options.eps:g}",
        ]
        words += [f"{options.groups} groups"] if options.groups > 1 else []
        words += ["normalized values rounded before the weight"] if options.round_before_weight else []
        return f"GatedRMSNorm ({', '.join(words)})"


def _is_candidate(module: nn.Module) -> bool:
    named = "norm" in type(module).__name__.lower()
    holds = set(module._parameters) == {"weight"} and not module._modules and not module._buffers
    return named and holds and "gate" in _arguments(module)


def _arguments(module: nn.Module) -> list[str]:
    return list(signature(type(module).forward).parameters)[1:]


def _match(module: nn.Module, backend: Backend) -> GatedNormMatch:
    weight = module._parameters["weight"]
    shape = () if weight is None else full_shape(weight)
    if len(shape) != 1 or shape[0] < 2:
        raise LeftAloneError(f"its weight has the shape {shape}")
    if _arguments(module)[1:] != ["gate"]:
        raise LeftAloneError(f"its forward takes {', '.join(_arguments(module))}")
    with probing(module):
        trial = _trial_of(module, shape[0])
        candidates = _candidates(module, shape[0])
        options = next((one for one in candidates if all(trial.agrees(one, training=t) for t in (False, True))), None)
        if options is None:
            raise LeftAloneError("its forward is no RMSNorm of the last dim with a gate")
        ways = (replace(options, round_before_weight=before) for before in (True, False))
        rounded = trial.first_that_rounds_alike(ways)
        if rounded is None:
            raise LeftAloneError("it rounds in a way that is not known")
        if shape[0] > MOST_FEATURES * rounded.groups:
            raise LeftAloneError(f"its groups have more than {MOST_FEATURES} features")
        return GatedNormMatch(options=rounded, backend=backend, attributes=trial.attributes)


def _trial_of(module: nn.Module, width: int) -> Trial[GatedNormOptions]:
    generator = torch.Generator().manual_seed(0)
    # Rows of very different sizes, so that the position of eps shows.
    sizes = torch.tensor([300.0, 3.0, 1.0, 1e-2, 1e-3])[:, None]
    x, gate = (torch.randn(1, 5, width, generator=generator) * scale for scale in (sizes, torch.tensor(3.0)))
    weight = torch.randn(width, generator=generator)
    return Trial(module, (x, gate), {"weight": weight}, _of_options, tolerance=TOLERANCE)


def _of_options(inputs: Sequence[Tensor], values: Mapping[str, Tensor], options: GatedNormOptions) -> Tensor:
    x, gate = inputs
    return gated_norm(x, gate, values["weight"], options=options, backend="reference")


def _candidates(module: nn.Module, width: int) -> Iterator[GatedNormOptions]:
    """Yields options without rounding: numbers that the module has, and both orders."""
    found = numbers_of(module)
    numbers = sorted({value for value in found if isinstance(value, float) and 0 < value < 0.1})
    counts = {value for value in found if isinstance(value, int) and 0 < value <= width and width % value == 0}
    for eps in numbers:
        for groups in sorted({1} | counts | {width // count for count in counts}):
            for gates_first in (False, True):
                for activation in ("silu", "sigmoid"):
                    yield GatedNormOptions(eps=eps, activation=activation, gates_first=gates_first, groups=groups)


def _compute(
    module: nn.Module, match: GatedNormMatch, hidden_states: Any = None, gate: Any = None, **kwargs: Any
) -> Any:
    if kwargs or not has_kernels(hidden_states, under_autocast=False) or not is_local(gate):
        return NotImplemented
    weight: Any = getattr(module, "weight", None)
    fits = is_local(weight) and tuple(weight.shape) == hidden_states.shape[-1:] and gate.shape == hidden_states.shape
    if not fits:
        return NotImplemented
    compute = partial(gated_norm, weight=weight, options=match.options, backend=match.backend)
    if hidden_states.is_contiguous():
        return compute(hidden_states, gate)
    return in_layout(compute, hidden_states, gate)


GATED_NORM = Kind(
    name="gated norm",
    is_candidate=_is_candidate,
    match=_match,
    compute=_compute,
    absent="no module without submodules has 'norm' in the name of its class, a weight alone and an argument 'gate'",
    is_expected=lambda model: False,
)
