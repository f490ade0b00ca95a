"""``activation(gate) * up`` as one autograd function that keeps only its inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_dist.errors import refuse_second_order
from liger_dist_kernels import Activation, Backend, gated_activation_bwd, gated_activation_fwd

from .norm import _rows
from .recomputation import RecomputedFunction, forget_copy, is_worth_it, note_output


class _GatedActivation(RecomputedFunction):
    is_end_of_walk = False

    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, activation: Activation, backend: Backend) -> Tensor:
        ctx.activation, ctx.backend = activation, backend
        ctx.save_for_backward(gate_TF, up_TF)
        result = gated_activation_fwd(gate_TF, up_TF, activation=activation, backend=backend)
        if any(ctx.needs_input_grad) and is_worth_it(result):
            note_output(ctx, result)
        return result

    @staticmethod
    def again(ctx: Any) -> Tensor:
        gate_TF, up_TF = ctx.saved_tensors
        return gated_activation_fwd(gate_TF, up_TF, activation=ctx.activation, backend=ctx.backend)

    @staticmethod
    def backward(ctx: Any, d_y_TF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        forget_copy(ctx)
        gate_TF, up_TF = ctx.saved_tensors
        d_both = gated_activation_bwd(_rows(d_y_TF), gate_TF, up_TF, activation=ctx.activation, backend=ctx.backend)
        return d_both[:, 0], d_both[:, 1], None, None


def gated_activation(gate: Tensor, up: Tensor, *, activation: Activation, backend: Backend = "auto") -> Tensor:
    """``activation(gate) * up``; both ``[..., F]`` of one floating dtype.

    The result is computed again in the backward rather than kept, where a :func:`.norm` follows.
    """
    result: Tensor = _GatedActivation.apply(_rows(gate), _rows(up), activation, backend)  # type: ignore[no-untyped-call]
    return result.reshape(gate.shape)
