"""RMSNorm and LayerNorm, with a residual addition in front if asked for, as one autograd function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist_kernels import Backend, NormOptions, NormOutput, norm_bwd, norm_fwd

from .recomputation import RecomputedFunction, drop_outputs, forget_copy, is_worth_it, note_output


class _Norm(RecomputedFunction):
    is_end_of_walk = True

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        residual_TD: Tensor | None,
        options: NormOptions,
        backend: Backend,
    ) -> tuple[Tensor, Tensor] | Tensor:
        ctx.set_materialize_grads(False)
        ctx.options, ctx.backend = options, backend
        ctx.has_residual, ctx.bias_dtype = residual_TD is not None, None if bias_D is None else bias_D.dtype
        output = norm_fwd(x_TD, weight_D, bias_D, residual_TD, options=options, backend=backend)
        ctx.save_for_backward(output.sum_TD, output.mean_T, output.rstd_T, weight_D)
        if any(ctx.needs_input_grad) and is_worth_it(output.y_TD):
            # Copies: when the output is computed again, the parameters may be sharded.
            ctx.parameters = [None if p is None else p.detach().clone() for p in (weight_D, bias_D)]
            note_output(ctx, output.y_TD)
        return (output.y_TD, output.sum_TD) if residual_TD is not None else output.y_TD

    @staticmethod
    def again(ctx: Any) -> Tensor:
        weight_D, bias_D = ctx.parameters
        return norm_fwd(ctx.saved_tensors[0], weight_D, bias_D, None, options=ctx.options, backend=ctx.backend).y_TD

    @staticmethod
    def backward(ctx: Any, d_y_TD: Tensor | None, d_sum_TD: Tensor | None = None) -> tuple[Any, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        forget_copy(ctx)
        sum_TD, mean_T, rstd_T, weight_D = ctx.saved_tensors
        if d_y_TD is None:
            return d_sum_TD, None, None, d_sum_TD if ctx.has_residual else None, None, None
        gradients = norm_bwd(
            _rows(d_y_TD),
            None if d_sum_TD is None else _rows(d_sum_TD),
            NormOutput(d_y_TD, sum_TD, mean_T, rstd_T),
            weight_D,
            needs_weight=ctx.needs_input_grad[1],
            needs_bias=ctx.needs_input_grad[2],
            options=ctx.options,
            backend=ctx.backend,
        )
        d_weight_D = None if gradients.d_weight_D is None else gradients.d_weight_D.to(weight_D.dtype)
        d_bias_D = None if gradients.d_bias_D is None else gradients.d_bias_D.to(ctx.bias_dtype)
        d_residual_TD = gradients.d_x_TD if ctx.has_residual else None
        return gradients.d_x_TD, d_weight_D, d_bias_D, d_residual_TD, None, None


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    options: NormOptions,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The normalised ``x + residual``, and that sum itself (``x`` without a residual).

    The normalised values are computed again in the backward rather than kept, where another norm follows.

    Args:
        x: ``[..., D]``, floating.
        weight, bias: ``[D]``, or None.
        residual: as ``x``.
    """
    drop_outputs(x)
    residual_TD = None if residual is None else _rows(residual)
    result = _Norm.apply(_rows(x), weight, bias, residual_TD, options, backend)  # type: ignore[no-untyped-call]
    if residual is None:
        return result.reshape(x.shape), x
    y, total = result
    return y.reshape(x.shape), total.reshape(x.shape)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
