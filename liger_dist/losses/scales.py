"""What each token's terms count in the loss.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_dist_kernels import TokenGradients, TokenTerms

from .arguments import Execution, LossArguments
from .normalization import Reduction, denominator


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Reduction, token weights and validity of each token in one number for each term, ``[T]``."""

    cross_entropy_T: Tensor
    z_loss_T: Tensor

    def upstream(self, gradient: Tensor | None = None) -> TokenGradients:
        """Gradients of the terms for an upstream ``gradient`` (0-d or ``[T]``; None for 1) of the loss."""
        if gradient is None:
            return TokenGradients(self.cross_entropy_T, self.z_loss_T)
        return TokenGradients(self.cross_entropy_T * gradient, self.z_loss_T * gradient)

    def reduce(self, terms: TokenTerms, reduction: Reduction) -> tuple[Tensor, Tensor]:
        """The loss and the z-loss part of it: 0-d, or ``[T]`` for "none"."""
        z_loss = self.z_loss_T * terms.z_loss_T
        loss = self.cross_entropy_T * terms.cross_entropy_T + z_loss
        return (loss, z_loss) if reduction == "none" else (loss.sum(), z_loss.sum())


def token_scales(
    labels_T: Tensor, token_weight_T: Tensor | None, loss: LossArguments, execution: Execution, dtype: torch.dtype
) -> Scales:
    """Scales of tokens with ``labels_T`` (negative: counts nothing), in fp32, or fp64 for an fp64 ``dtype``."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    counts_T = (labels_T >= 0).to(dtype)
    if token_weight_T is not None:
        counts_T = counts_T * token_weight_T.to(dtype)

    def divided(weights_T: Tensor | None) -> Tensor:
        return counts_T / denominator(
            weights_T,
            labels_T,
            reduction=loss.reduction,
            num_items_in_batch=loss.num_items_in_batch,
            dtype=dtype,
            groups=execution.mean_groups,
            divide_factor=execution.divide_factor,
        )

    cross_entropy_T = z_loss_T = divided(None)
    if loss.class_weight is not None:
        # The mean of the cross entropy is weighted by class, that of the z-loss is over tokens.
        cross_entropy_T = divided(loss.class_weight.to(dtype)[labels_T.clamp_min(0)])
    return Scales(cross_entropy_T=cross_entropy_T, z_loss_T=z_loss_T)
