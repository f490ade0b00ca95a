"""Normalisation: the factor of each token's terms in the loss, and the divisor of a mean (``num_items_in_batch``).

Legend: T tokens. All of it stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist_kernels import Backend, TokenGradients, TokenTerms
from liger_dist_kernels import scaled as scaled_into

from .arguments import Execution, LossArguments, Reduction


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Reduction, token weight and validity of each token as one factor per term, ``[T]``."""

    cross_entropy_T: Tensor
    z_loss_T: Tensor
    factor: Tensor | None = None
    """0-d common factor that gradients get in the backward only; None for 1"""

    def upstream(self, gradient: Tensor | None = None) -> TokenGradients:
        """Gradients of the terms for an upstream ``gradient`` (0-d or ``[T]``; None for 1) of the loss."""
        if gradient is None:
            return TokenGradients(self.cross_entropy_T, self.z_loss_T)
        return TokenGradients(self.cross_entropy_T * gradient, self.z_loss_T * gradient)

    def total(self, values_T: Tensor) -> Tensor:
        """The sum or mean of ``values_T``, 0-d, as of the cross entropy."""
        total = (self.cross_entropy_T * values_T).sum()
        return total if self.factor is None else total * self.factor

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
    """Scales of tokens with ``labels_T`` (negative: ignored), in fp32, or fp64 for an fp64 ``dtype``.

    For an fp16 ``dtype`` the divisor is kept apart as ``factor``: a gradient divided by the number of tokens would
    underflow in fp16 before the loss scale multiplies it. A ``common_divisor``, alike on all ranks, replaces it there.
    """
    keeps_apart = dtype == torch.float16 and loss.reduction != "none"
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    counts_T = (labels_T >= 0).to(dtype)
    if token_weight_T is not None:
        # The weight of an ignored token may be anything: 1 / (labels of its sequence) is infinite without labels.
        counts_T = torch.where(labels_T >= 0, token_weight_T.to(dtype), 0.0)

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


def denominator(
    weights_T: Tensor | None,
    labels_T: Tensor,
    *,
    reduction: Reduction,
    num_items_in_batch: Tensor | float | None,
    dtype: torch.dtype,
    groups: Sequence[dist.ProcessGroup] = (),
    divide_factor: float = 1.0,
) -> Tensor:
    """0-d tensor that the sum of token losses is divided by.

    A mean divides by ``num_items_in_batch`` when given, otherwise by the weights of the valid tokens (1 each without
    ``weights_T``, as :func:`torch.nn.functional.cross_entropy`). A mean over no token divides by 1: its loss is 0, not
    NaN, so that a rank without labels does not spoil the gradients of the others.

    With ``groups``, the tokens of all their ranks are counted (one all-reduce of one number per group), and the count
    is divided by ``divide_factor``, as the framework divides summed gradients afterwards. Nothing is read by the host.
    """
    device = labels_T.device
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=device)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(device=device, dtype=dtype, non_blocking=True).reshape(())
    if num_items_in_batch is not None:
        return torch.full((), float(num_items_in_batch), dtype=dtype, device=device)
    valid_T = labels_T >= 0
    count = valid_T.sum(dtype=dtype) if weights_T is None else torch.where(valid_T, weights_T, 0).sum(dtype=dtype)
    for group in groups:
        dist.all_reduce(count, group=group)
    count = count / divide_factor
    return torch.where(count == 0, 1.0, count)


def scaled(saved: Tensor, scale: Tensor, dtype: torch.dtype, *, backend: Backend) -> Tensor:
    """A gradient made in the forward, times its upstream gradient (0-d), in ``dtype``. To be called in a backward.

    The saved gradient is scaled in place and returned when the graph is not retained: no second backward can read it.
    """
    # A compiled graph decides about memory itself.
    may_retain = torch.compiler.is_compiling() or keeps_graph()
    if not may_retain and saved.dtype == dtype:
        return scaled_into(saved, scale, out=saved, backend=backend)
    out = torch.empty(saved.shape, dtype=dtype, device=saved.device)
    return scaled_into(saved, scale, out=out, backend=backend)


def keeps_graph() -> bool:
    """True if the running backward retains its graph; also where torch has no name for it, which costs a copy."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
