"""Normalisation: the factor of each token's terms in the loss, and the divisor of a mean (``num_items_in_batch``).

Legend: T tokens. The host reads none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.model.torch_modes import keeps_graph
from liger_dist_kernels import Backend, TokenGradients, TokenTerms
from liger_dist_kernels import scaled as scaled_into

from .execution import Execution
from .labels import Targets
from .spec import LossSpec, Reduction


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors of the loss's terms from reduction and token weight: ``[T]``, or 0-d for all tokens. The terms of ignored
    tokens are 0."""

    cross_entropy: Tensor
    z_loss: Tensor | None
    """None without a z-loss"""
    factor: Tensor | None = None
    """0-d common factor that gradients are multiplied by in the backward only; None for 1"""

    def upstream(self, labels_T: Tensor, gradient: Tensor | float | None = None) -> TokenGradients:
        """Computes gradients of the terms for an upstream ``gradient`` (0-d or ``[T]``; None for 1) of the loss."""

        def of_tokens(scale: Tensor | None) -> Tensor | None:
            if scale is None:
                return None
            return (scale if gradient is None else scale * gradient).expand(labels_T.shape)

        return TokenGradients(of_tokens(self.cross_entropy), of_tokens(self.z_loss))

    def total(self, values_T: Tensor) -> Tensor:
        """Reduces ``values_T`` to a 0-d sum or mean with the factors of the cross entropy."""
        return self._total(self.cross_entropy, values_T)

    def _total(self, scale: Tensor, values_T: Tensor) -> Tensor:
        total = values_T.sum() * scale if scale.dim() == 0 else (values_T * scale).sum()
        return total if self.factor is None else total * self.factor

    def reduce(self, terms: TokenTerms, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
        """Reduces the terms to the loss and its z-loss part (None for 0): 0-d, or ``[T]`` for "none"."""
        if reduction == "none":
            loss = self.cross_entropy * terms.cross_entropy_T
            z_loss = None if self.z_loss is None else self.z_loss * terms.z_loss_T
        else:
            loss = self.total(terms.cross_entropy_T)
            z_loss = None if self.z_loss is None else self._total(self.z_loss, terms.z_loss_T)
        return loss if z_loss is None else loss + z_loss, z_loss


def token_scales(
    targets: Targets,
    token_weight_T: Tensor | None,
    spec: LossSpec,
    execution: Execution,
    dtype: torch.dtype,
    *,
    common_divisor: float | None = None,
) -> Scales:
    """Computes the scales of the tokens of ``targets``, in fp32, or fp64 for an fp64 ``dtype``.

    For an fp16 ``dtype`` the divisor becomes the separate ``factor``. A ``common_divisor``, equal on all ranks,
    replaces it there.
    """
    has_factor = dtype == torch.float16 and spec.reduction != "none"
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    labels_T = targets.labels_T
    weight_T = None
    if token_weight_T is not None:
        # The weight of an ignored token may be anything: 1 / (labels of its sequence) is infinite without labels.
        weight_T = torch.where(labels_T >= 0, token_weight_T.to(dtype), 0.0)

    def divisor(weights_T: Tensor | None) -> Tensor:
        return denominator(
            weights_T,
            labels_T,
            count=targets.divisor,
            reduction=spec.reduction,
            num_items_in_batch=spec.num_items_in_batch,
            dtype=dtype,
            groups=execution.mean_groups,
            divide_factor=execution.divide_factor,
        )

    by_class = z_divisor = divisor(None)
    if spec.class_weight is not None:
        # The mean of the cross entropy is weighted by class, that of the z-loss is over tokens.
        by_class = divisor(spec.class_weight.to(dtype)[labels_T.clamp_min(0)])
    factor = None
    if has_factor:
        # A gradient divided by the number of tokens would underflow in fp16 before the loss scale multiplies it.
        separate = by_class
        if common_divisor is not None:
            separate = torch.full((), common_divisor, dtype=dtype, device=labels_T.device)
        factor = torch.reciprocal(separate)
        by_class, z_divisor = by_class / separate, z_divisor / separate

    def scale(divisor: Tensor) -> Tensor:
        return torch.reciprocal(divisor) if weight_T is None else weight_T / divisor

    z_loss = None
    cross_entropy = scale(by_class)
    if spec.options.z_loss != 0:
        z_loss = cross_entropy if spec.class_weight is None else scale(z_divisor)
    return Scales(cross_entropy=cross_entropy, z_loss=z_loss, factor=factor)


def denominator(
    weights_T: Tensor | None,
    labels_T: Tensor,
    *,
    count: Tensor | int | None = None,
    reduction: Reduction,
    num_items_in_batch: Tensor | float | None,
    dtype: torch.dtype,
    groups: Sequence[dist.ProcessGroup] = (),
    divide_factor: float = 1.0,
) -> Tensor:
    """Computes the 0-d divisor of the sum of token losses.

    A mean divides by ``num_items_in_batch`` if it is not None, otherwise by the weights of the valid tokens (1 each
    without ``weights_T``, as :func:`torch.nn.functional.cross_entropy`). A mean over no token divides by 1: its loss is
    0, not NaN, so that a rank without labels does not spoil the gradients of the other ranks.

    With ``groups``, the tokens of all their ranks are counted (one all-reduce of one value per group), and the count
    is divided by ``divide_factor``, as the framework divides summed gradients afterwards. The host reads nothing.

    Args:
        count: number of valid tokens, but at least 1; None to count them. A tensor of another ``dtype`` is not used.
    """
    device = labels_T.device
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=device)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(device=device, dtype=dtype, non_blocking=True).reshape(())
    if num_items_in_batch is not None:
        return torch.full((), float(num_items_in_batch), dtype=dtype, device=device)
    if weights_T is None and not groups:
        if isinstance(count, int):
            return torch.full((), float(count), dtype=dtype, device=device)
        if count is not None and count.dtype == dtype:
            return count
    valid_T = labels_T >= 0
    total = valid_T.sum(dtype=dtype) if weights_T is None else torch.where(valid_T, weights_T, 0).sum(dtype=dtype)
    for group in groups:
        dist.all_reduce(total, group=group)
    total = total / divide_factor
    return torch.where(total == 0, 1.0, total)


def scaled(saved: Tensor, scale: Tensor, dtype: torch.dtype, *, backend: Backend) -> Tensor:
    """Multiplies a gradient of the forward by its upstream gradient (0-d), in ``dtype``. Call it in a backward.

    The saved gradient is scaled in place and returned when the graph is not retained: no second backward can read it.
    """
    # A compiled graph decides about memory itself.
    may_retain = torch.compiler.is_compiling() or keeps_graph()
    if not may_retain and saved.dtype == dtype:
        return scaled_into(saved, scale, out=saved, backend=backend)
    out = torch.empty(saved.shape, dtype=dtype, device=saved.device)
    return scaled_into(saved, scale, out=out, backend=backend)
