"""Experts of a mixture as one autograd function: two grouped products, with what lies between and around them in
kernels; and its custom ops for compiled layers.

A forward keeps the tokens themselves, the order of tokens by expert, and gate and up; gathered tokens, activations and
the outputs of the experts are computed again or not needed, because the weight of the router is applied before the
down projection. LoRA adds grouped low-rank products; no weight is merged. A stack of 4 bits is dequantised for each
product and freed after it, so that a layer keeps its bytes alone.

Legend: T tokens, K experts of a token, S = T * K rows sorted by expert, E experts, D hidden, F features of an expert,
H features of the first projection (2 * F with a gate), r LoRA rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist.model.quantized import dequantized
from liger_dist.model.torch_modes import untraced
from liger_dist_kernels import (
    Backend,
    GateOptions,
    LowRank,
    LowRankFactors,
    Routing,
    WeightedBias,
    combine_rows,
    expert_dtype,
    gate_bwd,
    gate_fwd,
    gather_rows,
    grouped_outer_product,
    grouped_product,
    outer_products_with_tokens,
    product_with_bias,
    route,
    sum_of_experts,
)

from .swap import is_local


class ExpertTensors(NamedTuple):
    """Parameters of the experts, all in one dtype but for bytes ``[n, 1]`` of 4 bits, whose shape the options have."""

    up: Tensor
    """first projection, ``[E, H, D]``; ``[E, D, H]`` if transposed"""
    down: Tensor
    """``[E, D, F]``; ``[E, F, D]`` if transposed"""
    up_bias_EH: Tensor | None = None
    down_bias_ED: Tensor | None = None
    up_a_ErD: Tensor | None = None
    up_b_ErH: Tensor | None = None
    down_a_ErF: Tensor | None = None
    down_b_ErD: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """What experts compute, besides their parameters."""

    gate: GateOptions
    is_transposed: bool = False
    """True for weights of which each expert's takes rows, ``x @ weight``"""
    up_scale: float = 0.0
    """LoRA's scaling of the first projection"""
    down_scale: float = 0.0
    backend: Backend = "auto"
    num_rows: int | None = field(default=None, compare=False)
    """pairs of a token and an expert of this rank, where the host knows them; not read in compiled layers"""
    up_state: Any = field(default=None, compare=False)
    """``QuantState`` of the first projection in 4 bits, which then has no gradient; None for floating ones"""
    down_state: Any = field(default=None, compare=False)


class _Kept(NamedTuple):
    """What the forward keeps for the backward, beside its inputs."""

    h_SH: Tensor
    """gate and up, without bias and LoRA"""
    pair_S: Tensor
    row_TK: Tensor
    ends_E: Tensor
    expert_S: Tensor
    up_low_Sr: Tensor | None = None
    down_low_Sr: Tensor | None = None

    @classmethod
    def of_op(cls, found: list[Tensor], tensors: ExpertTensors) -> _Kept:
        """Returns what an op has returned, which has no None in a list."""
        present = iter(found)
        lows = (tensors.up_a_ErD, tensors.down_a_ErF)
        return cls(*(next(present) for _ in range(5)), *(None if a is None else next(present) for a in lows))

    @property
    def routing(self) -> Routing:
        return Routing(self.pair_S, self.row_TK, self.ends_E, self.expert_S)


class _Needs(NamedTuple):
    """Which gradients a backward computes."""

    hidden: bool
    weight: bool
    tensors: tuple[bool, ...]
    """of the fields of :class:`ExpertTensors`"""


def num_experts(tensors: ExpertTensors, options: ExpertOptions) -> int:
    return int(tensors.up.shape[0] if options.up_state is None else options.up_state.shape[0])


def _projection(x_SI: Tensor, weight: Tensor, state: Any, ends_E: Tensor, *, is_transposed: bool) -> Tensor:
    full = weight if state is None else dequantized(weight, state, x_SI.dtype)
    return grouped_product(x_SI, full if is_transposed else full.transpose(1, 2), ends_E)


def _low_rank(
    x_SI: Tensor, first_ErI: Tensor | None, second_ErO: Tensor | None, scale: float, ends_E: Tensor
) -> LowRankFactors | None:
    """Returns the factors of LoRA's product, or of its gradient, for which B comes first; None without LoRA."""
    if first_ErI is None or second_ErO is None:
        return None
    return LowRankFactors(grouped_product(x_SI, first_ErI.transpose(1, 2), ends_E), second_ErO, scale)


def _multiplied(low: LowRankFactors | None, ends_E: Tensor) -> LowRank | None:
    return None if low is None else LowRank(grouped_product(low.low_Sr, low.matrix_ErO, ends_E), low.scale)


def _forward(
    hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, tensors: ExpertTensors, options: ExpertOptions
) -> tuple[Tensor, _Kept]:
    """Computes the experts; returns the sum of each token ``[T, D]``, and what the backward reads."""
    routing = route(index_TK, num_experts(tensors, options), options.num_rows)
    ends, backend = routing.ends_E, options.backend
    x_SD = gather_rows(hidden_TD, routing, backend=backend)
    h_SH = _projection(x_SD, tensors.up, options.up_state, ends, is_transposed=options.is_transposed)
    up_low = _low_rank(x_SD, tensors.up_a_ErD, tensors.up_b_ErH, options.up_scale, ends)
    del x_SD
    gate: dict[str, Any] = {"options": options.gate, "bias_EH": tensors.up_bias_EH, "backend": backend}
    a_SF = gate_fwd(h_SH, weight_TK, routing, low=up_low, **gate)
    y_SD = _projection(a_SF, tensors.down, options.down_state, ends, is_transposed=options.is_transposed)
    down_low = _low_rank(a_SF, tensors.down_a_ErF, tensors.down_b_ErD, options.down_scale, ends)
    del a_SF
    bias = None if tensors.down_bias_ED is None else WeightedBias(tensors.down_bias_ED, index_TK, weight_TK)
    sum_TD = combine_rows(y_SD, routing, low=_multiplied(down_low, ends), bias=bias, backend=backend)
    lows = (None if low is None else low.low_Sr for low in (up_low, down_low))
    return sum_TD, _Kept(h_SH, *routing, *lows)


def _backward(
    d_sum_TD: Tensor,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    tensors: ExpertTensors,
    kept: _Kept,
    options: ExpertOptions,
    needs: _Needs,
) -> list[Tensor | None]:
    """Computes the gradients of hidden states, weights of the router and parameters; None where not needed."""
    routing, backend, is_transposed = kept.routing, options.backend, options.is_transposed
    ends, wanted = routing.ends_E, ExpertTensors(*needs.tensors)  # type: ignore[arg-type]
    found: dict[str, Tensor] = {}
    d_y_SD = gather_rows(d_sum_TD, routing, backend=backend)
    d_a_SF = _projection(d_y_SD, tensors.down, options.down_state, ends, is_transposed=not is_transposed)
    d_down_low = _low_rank(d_y_SD, tensors.down_b_ErD, tensors.down_a_ErF, options.down_scale, ends)
    if kept.down_low_Sr is not None and wanted.down_b_ErD:
        found["down_b_ErD"] = outer_products_with_tokens(
            kept.down_low_Sr, d_sum_TD, routing, scale=options.down_scale, backend=backend
        )
    gate: dict[str, Any] = {"options": options.gate, "bias_EH": tensors.up_bias_EH, "backend": backend}
    if kept.up_low_Sr is not None and tensors.up_b_ErH is not None:
        gate["low"] = LowRankFactors(kept.up_low_Sr, tensors.up_b_ErH, options.up_scale)
    needs_a = bool(wanted.down or wanted.down_a_ErF)
    gradients = gate_bwd(d_a_SF, kept.h_SH, weight_TK, routing, needs_y=needs_a, d_low=d_down_low, **gate)
    del d_a_SF
    d_h_SH, d_weight_TK, a_SF = gradients
    if a_SF is not None:
        if wanted.down:
            found["down"] = _weight_gradient(a_SF, d_y_SD, ends, is_transposed=is_transposed)
        if d_down_low is not None and wanted.down_a_ErF:
            found["down_a_ErF"] = grouped_outer_product(d_down_low.low_Sr, a_SF, ends) * options.down_scale
    if tensors.down_bias_ED is not None:
        if wanted.down_bias_ED:
            found["down_bias_ED"] = sum_of_experts(d_y_SD, routing, weight_TK=weight_TK, backend=backend)
        if needs.weight:
            bias = WeightedBias(tensors.down_bias_ED, index_TK, weight_TK)
            d_weight_TK += product_with_bias(d_sum_TD, bias, routing, backend=backend)
    del d_y_SD, a_SF, gradients, d_down_low
    if wanted.up_bias_EH:
        found["up_bias_EH"] = sum_of_experts(d_h_SH, routing, backend=backend)
    d_up_low = _low_rank(d_h_SH, tensors.up_b_ErH, tensors.up_a_ErD, options.up_scale, ends)
    if d_up_low is not None and kept.up_low_Sr is not None:
        if wanted.up_b_ErH:
            found["up_b_ErH"] = grouped_outer_product(kept.up_low_Sr, d_h_SH, ends) * options.up_scale
        if wanted.up_a_ErD:
            found["up_a_ErD"] = outer_products_with_tokens(
                d_up_low.low_Sr, hidden_TD, routing, scale=options.up_scale, backend=backend
            )
    if wanted.up:
        x_SD = gather_rows(hidden_TD, routing, backend=backend)
        found["up"] = _weight_gradient(x_SD, d_h_SH, ends, is_transposed=is_transposed)
        del x_SD
    d_hidden_TD = None
    if needs.hidden:
        d_x_SD = _projection(d_h_SH, tensors.up, options.up_state, ends, is_transposed=not is_transposed)
        d_hidden_TD = combine_rows(d_x_SD, routing, low=_multiplied(d_up_low, ends), backend=backend)
    of_tensors = [found.get(name) if is_wanted else None for name, is_wanted in wanted._asdict().items()]
    return [d_hidden_TD, d_weight_TK.to(weight_TK.dtype) if needs.weight else None, *of_tensors]


def _weight_gradient(x_SI: Tensor, d_SO: Tensor, ends_E: Tensor, *, is_transposed: bool) -> Tensor:
    return grouped_outer_product(x_SI, d_SO, ends_E) if is_transposed else grouped_outer_product(d_SO, x_SI, ends_E)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: ExpertOptions, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, *given: Tensor | None
    ) -> Tensor:
        if torch.compiler.is_compiling():
            y, *found = torch.ops.liger_dist.experts(hidden_TD, index_TK, weight_TK, [*given], *_packed(options))
            kept = _Kept.of_op(found, ExpertTensors(*given))  # type: ignore[arg-type]
        else:
            y, kept = _forward(hidden_TD, index_TK, weight_TK, ExpertTensors(*given), options)  # type: ignore[arg-type]
        ctx.options = options
        ctx.save_for_backward(hidden_TD, index_TK, weight_TK, *given, *kept)
        # Itself: torch 2.11 compiles a function that returns another name of a tensor to one without gradients.
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        hidden_TD, index_TK, weight_TK, *saved = ctx.saved_tensors
        given, kept = saved[: len(ExpertTensors._fields)], saved[len(ExpertTensors._fields) :]
        _, needs_hidden, _, needs_weight, *wanted = ctx.needs_input_grad
        inputs = (d_y.contiguous(), hidden_TD, index_TK, weight_TK)
        gradients: list[Tensor | None]
        if torch.compiler.is_compiling():
            flags = [needs_hidden, needs_weight, *wanted]
            computed = iter(torch.ops.liger_dist.experts_backward(*inputs, given, kept, flags, *_packed(ctx.options)))
            gradients = [next(computed) if is_needed else None for is_needed in flags]
        else:
            needs = _Needs(needs_hidden, needs_weight, tuple(wanted))
            gradients = _backward(*inputs, ExpertTensors(*given), _Kept(*kept), ctx.options, needs)
        d_hidden, d_weight, *of_tensors = gradients
        return None, d_hidden, None, d_weight, *of_tensors


def experts(
    hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, tensors: ExpertTensors, *, options: ExpertOptions
) -> Tensor:
    """Computes the experts of each token and their weighted sum, ``[T, D]`` in the dtype of ``hidden_TD``.

    Differentiable once, by everything but the indices; the result and all gradients are the same in each run.

    Args:
        index_TK: experts of each token, integers. Those of ``E`` or more name no expert and count nothing.
        weight_TK: their weights, any floating dtype.
        tensors: parameters, in the dtype of ``hidden_TD``; any dtype under autocast. Any strides, but for projections
            of which the last or last but one is 1. Those of 4 bits are dequantised to the dtype of the products.
    """
    device_type, dtype = hidden_TD.device.type, hidden_TD.dtype
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    x_TD = hidden_TD.to(dtype).contiguous()
    states = (options.up_state, options.down_state, *(None for _ in tensors[2:]))
    given = [
        tensor if tensor is None or state is not None else tensor.to(dtype)
        for tensor, state in zip(tensors, states, strict=True)
    ]
    # Products take weights of other layouts; kernels read every layout.
    given[2:] = [None if tensor is None else tensor.contiguous() for tensor in given[2:]]
    y = _Experts.apply(options, x_TD, index_TK.contiguous(), weight_TK.contiguous(), *given)  # type: ignore[no-untyped-call]
    result: Tensor = y.to(hidden_TD.dtype)
    return result


@untraced
def experts_of_four_bits(
    hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, tensors: ExpertTensors, *, options: ExpertOptions
) -> Tensor:
    """Computes :func:`experts` outside of compiled graphs, whose ops cannot take a ``QuantState``."""
    return experts(hidden_TD, index_TK, weight_TK, tensors, options=options)


def supports(hidden: Tensor, tensors: ExpertTensors, options: ExpertOptions) -> bool:
    """True if :func:`experts` computes these: full ordinary tensors, of one dtype or under autocast, or of 4 bits."""
    states = (options.up_state, options.down_state, *(None for _ in tensors[2:]))
    if not all(tensor is None or is_local(tensor) for tensor in (hidden, *tensors)):
        return False
    present = [tensor for tensor, state in zip(tensors, states, strict=True) if tensor is not None and state is None]
    if not all(tensor.is_floating_point() for tensor in (hidden, *present)):
        return False
    is_autocast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    return is_autocast or all(tensor.dtype == hidden.dtype for tensor in present)


_OPTIONS = "float[] numbers, bool[] flags, str[] names"


def _packed(options: ExpertOptions) -> tuple[list[float], list[bool], list[str]]:
    """Returns the options as arguments of an op."""
    gate = options.gate
    numbers = [gate.slope, gate.offset, options.up_scale, options.down_scale]
    numbers += [] if gate.limit is None else [gate.limit]
    flags = [gate.is_gated, gate.is_interleaved, gate.limits_activation, options.is_transposed]
    return numbers, flags, [gate.activation, options.backend]


def _unpacked(numbers: list[float], flags: list[bool], names: list[Any]) -> ExpertOptions:
    """Rebuilds the options from :func:`_packed`."""
    (slope, offset, up_scale, down_scale, *limit), (activation, backend) = numbers, names
    is_gated, is_interleaved, limits_activation, is_transposed = flags
    gate = GateOptions(
        activation=activation,
        is_gated=is_gated,
        is_interleaved=is_interleaved,
        limit=limit[0] if limit else None,
        limits_activation=limits_activation,
        slope=slope,
        offset=offset,
    )
    return ExpertOptions(
        gate=gate, is_transposed=is_transposed, backend=backend, up_scale=up_scale, down_scale=down_scale
    )


@torch.library.custom_op(
    "liger_dist::experts",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor index, Tensor weight, Tensor?[] tensors, {_OPTIONS}) -> Tensor[]",
)
def _experts_op(
    hidden: Tensor, index: Tensor, weight: Tensor, tensors: list[Tensor | None], *packed: Any
) -> list[Tensor]:
    y, kept = _forward(hidden, index, weight, ExpertTensors(*tensors), _unpacked(*packed))  # type: ignore[arg-type]
    return [y, *(tensor for tensor in kept if tensor is not None)]


@_experts_op.register_fake
def _(hidden: Tensor, index: Tensor, weight: Tensor, tensors: list[Tensor | None], *packed: Any) -> list[Tensor]:
    options, parts = _unpacked(*packed), ExpertTensors(*tensors)  # type: ignore[arg-type]
    rows = index.shape[0] * index.shape[1]
    width = parts.up.shape[2 if options.is_transposed else 1]
    found = [
        hidden.new_empty(hidden.shape),
        hidden.new_empty(rows, width),
        index.new_empty(rows, dtype=torch.int32),
        index.new_empty(index.shape, dtype=torch.int32),
        index.new_empty(parts.up.shape[0], dtype=torch.int32),
        index.new_empty(rows, dtype=expert_dtype(parts.up.shape[0])),
    ]
    lows = (parts.up_a_ErD, parts.down_a_ErF)
    return found + [hidden.new_empty(rows, a.shape[1]) for a in lows if a is not None]


@torch.library.custom_op(
    "liger_dist::experts_backward",
    mutates_args=(),
    schema=(
        "(Tensor d_y, Tensor hidden, Tensor index, Tensor weight, Tensor?[] tensors, Tensor?[] kept, bool[] needs, "
        f"{_OPTIONS}) -> Tensor[]"
    ),
)
def _experts_backward_op(
    d_y: Tensor,
    hidden: Tensor,
    index: Tensor,
    weight: Tensor,
    tensors: list[Tensor | None],
    kept: list[Tensor | None],
    needs: list[bool],
    *packed: Any,
) -> list[Tensor]:
    wanted = _Needs(needs[0], needs[1], tuple(needs[2:]))
    parts = ExpertTensors(*tensors)  # type: ignore[arg-type]
    gradients = _backward(
        d_y,
        hidden,
        index,
        weight,
        parts,
        _Kept(*kept),  # type: ignore[arg-type]
        _unpacked(*packed),
        wanted,
    )
    return [gradient for gradient in gradients if gradient is not None]


@_experts_backward_op.register_fake
def _(
    d_y: Tensor,
    hidden: Tensor,
    index: Tensor,
    weight: Tensor,
    tensors: list[Tensor | None],
    kept: list[Tensor | None],
    needs: list[bool],
    *packed: Any,
) -> list[Tensor]:
    inputs = (hidden, weight, *tensors)
    return [
        tensor.new_empty(tensor.shape)
        for tensor, is_needed in zip(inputs, needs, strict=True)
        if is_needed and tensor is not None
    ]
