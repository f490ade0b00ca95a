"""What each token's terms count in the loss.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_dist_kernels import Backend, TokenGradients, TokenTerms, scale_in_place

from .arguments import Execution, LossArguments
from .normalization import Reduction, denominator


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Reduction, token weights and validity of each token in one number for each term, ``[T]``."""

    cross_entropy_T: Tensor
    z_loss_T: Tensor
    factor: Tensor | None = None
    """0-d factor of both that is left out of gradients until the backward; None for 1"""

    def upstream(self, gradient: Tensor | None = None) -> TokenGradients:
        """Gradients of the terms for an upstream ``gradient`` (0-d or ``[T]``; None for 1) of the loss."""
        if gradient is None:
            return TokenGradients(self.cross_entropy_T, self.z_loss_T)
        return TokenGradients(self.cross_entropy_T * gradient, self.z_loss_T * gradient)

    def reduce(self, terms: TokenTerms, reduction: Reduction) -> tuple[Tensor, Tensor]:
        """The loss and the z-loss part of it: 0-d, or ``[T]`` for "none"."""
        z_loss = self.z_loss_T * terms.z_loss_T
        loss = self.cross_entropy_T * terms.cross_entropy_T + z_loss
        if reduction == "none":
            return loss, z_loss
        if self.factor is None:
            return loss.sum(), z_loss.sum()
        return loss.sum() * self.factor, z_loss.sum() * self.factor


def token_scales(
    labels_T: Tensor,
    token_weight_T: Tensor | None,
    loss: LossArguments,
    execution: Execution,
    dtype: torch.dtype,
    *,
    common_divisor: float | None = None,
) -> Scales:
    """Scales of tokens with ``labels_T`` (negative: counts nothing), in fp32, or fp64 for an fp64 ``dtype``.

    For an fp16 ``dtype`` the divisor is kept apart as ``factor``: a gradient divided by the number of tokens would
    underflow in fp16 before a loss scale could lift it. With ``common_divisor``, which is the same everywhere, that is
    kept apart in its place.
    """
    keeps_apart = dtype == torch.float16 and loss.reduction != "none"
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    counts_T = (labels_T >= 0).to(dtype)
    if token_weight_T is not None:
        counts_T = counts_T * token_weight_T.to(dtype)

    def divisor(weights_T: Tensor | None) -> Tensor:
        return denominator(
            weights_T,
            labels_T,
            reduction=loss.reduction,
            num_items_in_batch=loss.num_items_in_batch,
            dtype=dtype,
            groups=execution.mean_groups,
            divide_factor=execution.divide_factor,
        )

    by_class = z_divisor = divisor(None)
    if loss.class_weight is not None:
        # The mean of the cross entropy is weighted by class, that of the z-loss is over tokens.
        by_class = divisor(loss.class_weight.to(dtype)[labels_T.clamp_min(0)])
    if keeps_apart and common_divisor is not None:
        lifted_T = counts_T * common_divisor
        factor = torch.full((), 1.0 / common_divisor, dtype=dtype, device=labels_T.device)
        return Scales(cross_entropy_T=lifted_T / by_class, z_loss_T=lifted_T / z_divisor, factor=factor)
    if keeps_apart:
        return Scales(cross_entropy_T=counts_T, z_loss_T=counts_T * (by_class / z_divisor), factor=1.0 / by_class)
    scale_T = counts_T / z_divisor
    return Scales(cross_entropy_T=scale_T if by_class is z_divisor else counts_T / by_class, z_loss_T=scale_T)


def scaled(saved: Tensor, scale: Tensor, dtype: torch.dtype, *, backend: Backend) -> Tensor:
    """A gradient that was made in the forward, times its upstream gradient (0-d), in ``dtype``. To be called in a
    backward.

    The saved gradient itself is handed out when nobody can ask for it again: the graph is not retained. Its largest
    cost is then gone, because an upstream gradient is mostly 1.
    """
    # A compiled graph decides about memory itself.
    may_retain = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
    if not may_retain and saved.dtype == dtype:
        return scale_in_place(saved, scale, backend=backend)
    out = torch.empty(saved.shape, dtype=dtype, device=saved.device)
    return torch.mul(saved, scale, out=out)
