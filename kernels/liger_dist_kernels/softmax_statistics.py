"""Records that kernels return and take: softmax statistics of rows of logits, and coefficients of their gradient.

Legend: T tokens, K chosen classes of each token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class SoftmaxStatistics(NamedTuple):
    """Softmax statistics of each row of logits, from which loss and gradient are computed. All ``[T]``, fp32 (fp64 for
    fp64 logits)."""

    max_T: Tensor
    """``max_v z_v``"""
    sum_other_T: Tensor
    """``sum over v != y of exp(z_v - max)``. Without the target, so that ``1 - p_y`` is exact as p_y nears 1."""
    target_T: Tensor
    """``z_y``; 0 where the label is negative"""
    dot_other_T: Tensor | None
    """``sum over v != y of exp(z_v - max) * (z_v - max)``, for the entropy"""
    weighted_sum_T: Tensor | None
    """``sum_v w_v * z_v`` with class weights w (or ones), for label smoothing"""
    square_other_T: Tensor | None
    """``sum over v != y of exp(z_v - max)**2``, for the sum of squared probabilities"""


class GradientCoefficients(NamedTuple):
    """Per-token coefficients, each ``[T]``, of the gradient by z:

    ``nll * (p_v - [v = y]) + mass * p_v + entropy * p_v * log(p_v) + square * p_v**2 - smoothing * w_v``
    """

    max_T: Tensor
    """``max_v z_v``"""
    log_total_T: Tensor
    """``log(sum_v exp(z_v - max))``, so that ``log(p_v) = z_v - max - log_total``. Kept separate from the
    maximum, because the rounding of large maxima would be a common factor of all probabilities."""
    miss_T: Tensor
    """``1 - p_y``, computed from the other classes"""
    nll_T: Tensor
    mass_T: Tensor | None
    entropy_T: Tensor | None
    square_T: Tensor | None
    smoothing_T: Tensor | None
    at_TK: Tensor | None = None
    """``[T, K]``: added to the entries of K chosen classes; of a class that is chosen twice, the total for both"""

    def scaled(self, factor: float) -> GradientCoefficients:
        """Scales the gradient by ``factor``."""
        fields: list[Any] = [None if field is None else field * factor for field in self]
        unscaled = {"max_T": self.max_T, "log_total_T": self.log_total_T, "miss_T": self.miss_T}
        return GradientCoefficients(*fields)._replace(**unscaled)

    def log_probs(self, z: Tensor) -> Tensor:
        """Computes ``log(p)`` of ``z`` ``[T, ...]``."""
        return (z - self.max_T[:, None]) - self.log_total_T[:, None]
