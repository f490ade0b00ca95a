"""Scalar options of a cross entropy, with checks of their ranges, and which outputs of each token a kernel computes.

Legend: V vocabulary, v classes of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ._triton_utils import Backend


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Scalar options of the loss. A logit is transformed as

    ``z = softcap * tanh(logit_scale * raw / softcap) / temperature``   (without soft-cap: ``logit_scale * raw /
    temperature``)

    and a token with label y then costs, with ``lse`` the log-sum-exp of its z and ``w`` the class weights,

    ``(1 - label_smoothing) * w_y * (lse - z_y) + label_smoothing / V * sum_v w_v * (lse - z_v) + z_loss * lse**2``.

    Soft labels t add ``sum_v t_v * (lse - z_v)``; they are per token, times ``soft_weight``, and scale the first two
    terms by ``1 - soft_weight``.
    """

    ignore_index: int = -100
    """Label of tokens without a loss."""
    label_smoothing: float = 0.0
    """Mass of the uniform distribution, in [0, 1] (Szegedy et al. 2016; as ``F.cross_entropy``)."""
    z_loss: float = 0.0
    """Factor of the squared log-sum-exp (Chowdhery et al. 2022, PaLM, section 5)."""
    softcap: float | None = None
    """Bound of the logits' magnitude (Gemma Team 2024, Gemma 2, section 2)."""
    logit_scale: float = 1.0
    """Factor of the raw logits, before the soft-cap."""
    temperature: float = 1.0
    """Divisor of the logits, after the soft-cap; overridden by per-token temperatures."""
    soft_weight: float = 0.0
    """Weight of soft labels, in [0, 1] (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network")."""

    def __post_init__(self) -> None:
        if not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index is {self.ignore_index!r}; expected an integer.")
        for name in ("label_smoothing", "soft_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number in [0, 1].")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap is {self.softcap}; expected None or a finite number above 0.")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature}; expected a finite number above 0.")
        for name in ("z_loss", "logit_scale"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; expected a finite number.")


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Per-token outputs, each of which needs a sum over the vocabulary that the loss does not."""

    entropy: bool = False
    """``-sum_v p_v log p_v``"""
    sum_sq_prob: bool = False
    """``sum_v p_v**2``"""
    mean_logit: bool = False
    """``sum_v z_v / V``"""

    def sums_logits(self, options: LossOptions) -> bool:
        """True if the sum of each token's z over the vocabulary is needed, for an output or for the loss."""
        return self.mean_logit or options.label_smoothing > 0


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options of the rows of a block of logits, whose columns are a slice of the vocabulary or all of it."""

    vocab_size: int
    """V"""
    options: LossOptions = LossOptions()
    outputs: TokenOutputs = TokenOutputs()
    class_weight_V: Tensor | None = None
    """``[V]`` floating, of the full vocabulary"""
    first_class: int = 0
    """vocabulary index of the block's first column"""
    is_padded: bool = False
    """True if logits and outputs are of :func:`.products.logits_buffer`"""
    backend: Backend = "auto"
    """see :func:`.runs_triton`"""

    @property
    def sums_logits(self) -> bool:
        """True if the sum of each token's z over the vocabulary is needed."""
        return self.outputs.sums_logits(self.options)

    def class_weights(self, num_classes: int) -> Tensor | None:
        """Returns the class weights ``[v]`` of the block's columns."""
        if self.class_weight_V is None:
            return None
        return self.class_weight_V[self.first_class : self.first_class + num_classes]
