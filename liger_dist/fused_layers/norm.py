"""RMSNorm and LayerNorm: one autograd function, the match of modules, and their swapped forward.

A candidate is a module without submodules, with a weight and a bias of one dimension or none. Its original forward runs
on probe values instead of its parameters; the norm that agrees with it, forward and backward, in fp32 and bf16, is the
match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.errors import LigerDistError, refuse_second_order
from liger_dist.model.structure import full_shape
from liger_dist.trials.attributes import Attributes
from liger_dist.trials.isolated import LeftAloneError, probing
from liger_dist.trials.kinds import Trial
from liger_dist_kernels import Backend, NormOptions, norm_bwd, norm_fwd

from .layout import in_layout
from .recompute import RecomputedFunction, drop_outputs, free_copy, note_output, should_recompute
from .swap import Kind, Match, has_kernels, is_local

TOLERANCE = 1e-5
WIDTH = 32
"""features in the probe of a norm without parameters"""


def refuse_freed(weight: Tensor | None, layer: str = "a norm") -> None:
    """Refuses a second backward through a graph whose weights FSDP1 has freed, which kernels would read.

    Raises:
        LigerDistError: the weight has no storage.
    """
    if weight is None or weight.numel() == 0 or torch.compiler.is_compiling():
        return
    if weight.untyped_storage().size() == 0:
        raise LigerDistError(
            f"the weight of {layer} has been freed since its forward: FSDP1 does so after the first backward, and a "
            "second one through the same graph (retain_graph=True) needs it. Add the losses up before one backward, or "
            "use strategy='fsdp2'."
        )


class _Norm(RecomputedFunction):
    is_end_of_walk = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        options: NormOptions,
        backend: Backend,
        recomputes: bool,
    ) -> Tensor:
        ctx.options, ctx.backend = options, backend
        ctx.bias_dtype = None if bias_D is None else bias_D.dtype
        y, mean_T, rstd_T = norm_fwd(x, weight_D, bias_D, options=options, backend=backend)
        ctx.save_for_backward(x, mean_T, rstd_T, weight_D)
        if recomputes and any(ctx.needs_input_grad):
            # Copies: the parameters may be resharded when the output is recomputed.
            ctx.parameters = [None if p is None else p.detach().clone() for p in (weight_D, bias_D)]
            note_output(ctx, y)
        return y

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        weight_D, bias_D = ctx.parameters
        return norm_fwd(ctx.saved_tensors[0], weight_D, bias_D, options=ctx.options, backend=ctx.backend).y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        free_copy(ctx)
        x, mean_T, rstd_T, weight_D = ctx.saved_tensors
        refuse_freed(weight_D)
        gradients = norm_bwd(
            d_y,
            x,
            mean_T,
            rstd_T,
            weight_D,
            needs_weight=ctx.needs_input_grad[1],
            needs_bias=ctx.needs_input_grad[2],
            options=ctx.options,
            backend=ctx.backend,
        )
        d_weight_D = None if gradients.d_weight_D is None else gradients.d_weight_D.to(weight_D.dtype)
        d_bias_D = None if gradients.d_bias_D is None else gradients.d_bias_D.to(ctx.bias_dtype)
        return gradients.d_x, d_weight_D, d_bias_D, None, None, None


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, options: NormOptions, backend: Backend = "auto"
) -> Tensor:
    """Normalises ``x`` ``[..., D]``. The result is recomputed in the backward instead of saved, where another norm
    follows.

    Args:
        x: ``[..., D]``, floating.
        weight, bias: ``[D]``, or None.
    """
    if not torch.is_grad_enabled():
        # Autograd would request the copies that a backward needs even here.
        return norm_fwd(x, weight, bias, options=options, backend=backend).y
    recomputes = should_recompute(x)
    if recomputes:
        drop_outputs(x)
    result: Tensor = _Norm.apply(x, weight, bias, options, backend, recomputes)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, kw_only=True)
class NormMatch(Match):
    """Norm that a module computes."""

    options: NormOptions
    backend: Backend
    parameters: tuple[str, ...]
    """names of weight and bias, if it has them"""
    attributes: Attributes
    """attributes of the module when it was matched"""
    under_autocast: bool
    """True if the module does the same under autocast"""
    keeps_layout: bool
    """True if the result has the order of the rows' dims in memory; False if it is contiguous"""

    def of_twin(self, module: nn.Module) -> NormMatch | None:
        if not self.attributes.are_of_twin(module):
            return None
        with probing(module):
            trial = _trial_of(module)
            return replace(self, attributes=trial.attributes) if trial.has_output_of(self.options) else None

    def __str__(self) -> str:
        options = self.options
        name = "LayerNorm" if options.subtract_mean else "RMSNorm"
        words = [f"eps {options.eps:g}"]
        words += [f"weight + {options.offset:g}"] if options.offset else []
        words += ["normalized values rounded before the weight"] if options.round_before_weight else []
        return f"{name} ({', '.join(words)})"


def _is_candidate(module: nn.Module) -> bool:
    named = "norm" in type(module).__name__.lower()
    return named and not module._modules and not module._buffers and set(module._parameters) <= {"weight", "bias"}


def _match(module: nn.Module, backend: Backend) -> NormMatch:
    with probing(module):
        return _explained(module, backend)


def _trial_of(module: nn.Module) -> Trial[NormOptions]:
    given = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    shapes = {full_shape(parameter) for parameter in given.values()}
    if any(len(shape) != 1 or shape[0] < 2 for shape in shapes) or len(shapes) > 1:
        raise LeftAloneError(f"its parameters have the shapes {sorted(shapes)}")
    width = shapes.pop()[0] if shapes else (getattr(module, "normalized_shape", None) or (WIDTH,))[-1]
    generator = torch.Generator().manual_seed(0)
    # Rows of very different sizes, so that the position of eps and clipped values show.
    x = torch.randn(1, 5, width, generator=generator) * torch.tensor([300.0, 3.0, 1.0, 1e-2, 1e-3])[:, None]
    values = {name: torch.randn(width, generator=generator) for name in given}
    return Trial(module, (x,), values, _of_options, tolerance=TOLERANCE)


def _explained(module: nn.Module, backend: Backend) -> NormMatch:
    trial = _trial_of(module)
    options = _explained_forward(trial)
    if options is None:
        raise LeftAloneError("its forward is no RMSNorm or LayerNorm of the last dim")
    if not trial.agrees(options):
        raise LeftAloneError("its gradients are not those of the norm that its forward is")
    before_weight = (True, False) if "weight" in trial.parameters and not options.offset else (False,)
    rounded = trial.first_that_rounds_alike(replace(options, round_before_weight=before) for before in before_weight)
    if rounded is None:
        raise LeftAloneError("it rounds in a way that is not known")
    # Autocast runs torch's norms in another dtype, at least on GPUs.
    is_torchs = type(module).__module__.startswith("torch.") or rounded.subtract_mean
    return NormMatch(
        options=rounded,
        backend=backend,
        parameters=tuple(trial.parameters),
        attributes=trial.attributes,
        under_autocast=not is_torchs and _is_same_under_autocast(trial, rounded),
        keeps_layout=_keeps_layout(trial),
    )


def _of_options(inputs: Sequence[Tensor], values: Mapping[str, Tensor], options: NormOptions) -> Tensor:
    return norm(inputs[0], values.get("weight"), values.get("bias"), options=options, backend="reference")


def _explained_forward(trial: Trial[NormOptions]) -> NormOptions | None:
    """Returns options with which the forward is the module's, without rounding; None for none."""
    x = trial.inputs[0]
    with torch.no_grad():
        expected = trial.original(trial.inputs, trial.parameters)
        if not isinstance(expected, Tensor) or expected.shape != x.shape:
            return None
        if not torch.equal(trial.original(trial.inputs, trial.parameters, training=True), expected):
            return None
        numbers = {value for value in vars(trial.module).values() if isinstance(value, float) and 0 < value < 0.1}
        for eps in sorted(numbers | {torch.finfo(torch.float32).eps}):
            for subtract_mean in (False, True):
                for offset in (0.0, 1.0) if "weight" in trial.parameters else (0.0,):
                    options = NormOptions(eps=eps, subtract_mean=subtract_mean, offset=offset)
                    if _agree(_of_options(trial.inputs, trial.parameters, options), expected):
                        return options
    return None


def _keeps_layout(trial: Trial[NormOptions]) -> bool:
    x = trial.inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        try:
            strides: tuple[int, ...] = trial.original((x,), trial.parameters).stride()
        except RuntimeError:
            return False  # It views its input, and is never called that way.
    return strides == x.stride()


def _is_same_under_autocast(trial: Trial[NormOptions], options: NormOptions) -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return trial.rounds_alike(options, torch.float32)


def _agree(ours: Tensor, original: Tensor) -> bool:
    return bool((ours - original).norm() <= TOLERANCE * original.norm()) and torch.allclose(
        ours, original, rtol=1e-4, atol=1e-5
    )


def _compute(module: nn.Module, match: NormMatch, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not has_kernels(hidden_states, under_autocast=match.under_autocast):
        return NotImplemented
    found: dict[str, Any] = {name: getattr(module, name, None) for name in match.parameters}
    width = hidden_states.shape[-1]
    fits = all(is_local(tensor) and tuple(tensor.shape) == (width,) for tensor in found.values())
    if not fits:
        return NotImplemented
    compute = partial(
        norm, weight=found.get("weight"), bias=found.get("bias"), options=match.options, backend=match.backend
    )
    if hidden_states.is_contiguous():
        return compute(hidden_states)
    return in_layout(compute, hidden_states) if match.keeps_layout else compute(hidden_states.contiguous())


NORM = Kind(
    name="norm",
    is_candidate=_is_candidate,
    match=_match,
    compute=_compute,
    absent="no module without submodules has 'norm' in the name of its class, and a weight and a bias at most",
)
