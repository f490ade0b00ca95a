"""Soft labels: probabilities of some classes of each token, such as a teacher's top k.

Legend: T tokens, K classes of each token, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from liger_dist.config import check_choice
from liger_dist.errors import LigerDistError
from liger_dist_kernels import sum_of_same_ids

from .collectives import require

Remainder = Literal["drop", "renormalize", "spread"]
MOST_PROBABILITY = 1.001
"""largest sum of a token's probabilities, with room for rounding"""


@dataclass(frozen=True, kw_only=True)
class SoftLabels:
    """Soft labels and their options: the cross entropy ``sum_k p_k * (lse - z_k)`` is mixed with that of the labels."""

    ids: Tensor
    """``[..., K]``, the labels' shape and K: classes, negative for none; probabilities of one class are summed"""
    probs: Tensor
    """probabilities of the classes, fp32 or fp64"""
    weight: float = 1.0
    """weight of this cross entropy; that of the labels is ``1 - weight``"""
    remainder: Remainder = "drop"
    """how the missing probability mass is treated: dropped, renormalised, or spread evenly over the other classes"""

    def check(self, *, vocab_size: int, labels_shape: torch.Size) -> None:
        """Refuses ids and probabilities that are not K of each label; on a GPU, device-side assertions check their
        values.

        Raises:
            LigerDistError: with the value, what was expected and the way out.
        """
        check_choice("remainder", self.remainder, get_args(Remainder))
        ids, probs = self.ids, self.probs
        has_ids = ids.dim() > 0 and ids.shape[-1] > 0 and ids.shape[:-1] == labels_shape
        if ids.dtype not in (torch.int64, torch.int32) or not has_ids or probs.shape != ids.shape:
            raise LigerDistError(
                f"soft_labels have ids of shape {tuple(ids.shape)} and dtype {ids.dtype}, and probabilities of shape "
                f"{tuple(probs.shape)}; expected K > 0 class indices of dtype torch.int64 or torch.int32 for each "
                f"label, shape {(*labels_shape, 'K')}, negative for none, and as many probabilities."
            )
        if probs.dtype not in (torch.float32, torch.float64):
            raise LigerDistError(
                f"soft_labels have probabilities of dtype {probs.dtype}; expected fp32 or fp64, because 16 bits round "
                "them by up to 0.4 %. FSDP with mixed precision casts floating arguments of a model that it wraps: "
                "give soft_labels=(ids, liger_dist.Uncast(probs))."
            )
        if probs.requires_grad:
            raise LigerDistError("soft_labels require a gradient, which this loss does not compute; detach them.")
        if not torch.compiler.is_compiling():
            self._check_values(vocab_size)

    def _check_values(self, vocab_size: int) -> None:
        sums = self.probs.masked_fill(self.ids < 0, 0.0).sum(-1)
        in_range = {
            f"an id of {vocab_size} or more; expected ids in [0, {vocab_size}), or negative for none": (
                self.ids < vocab_size
            ),
            "a probability that is negative or not finite; expected numbers in [0, 1] (the exponentials of "
            "log-probabilities)": (self.ids < 0) | ((self.probs >= 0) & torch.isfinite(self.probs)),
            f"probabilities of one token that sum to more than {MOST_PROBABILITY}; divide them by their sum": (
                sums <= MOST_PROBABILITY
            ),
        }
        for what, valid in in_range.items():
            require(valid.all(), f"soft_labels have {what}")

    def factors(
        self, ids_TK: Tensor, probs_TK: Tensor, *, vocab_size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Computes factors of ``lse - z``: ``[T, K]`` for the named classes, and ``[T]`` for every class in addition
        (None for 0). Both include ``weight``."""
        is_none_TK = ids_TK < 0
        probs_TK = probs_TK.to(dtype).masked_fill(is_none_TK, 0.0)
        if self.remainder == "drop":
            return self.weight * probs_TK, None
        sum_T1 = probs_TK.sum(1, keepdim=True)
        if self.remainder == "renormalize":
            return self.weight * probs_TK / torch.where(sum_T1 == 0, 1.0, sum_T1), None
        share_TK = 1.0 / sum_of_same_ids(torch.ones_like(probs_TK), ids_TK)
        num_named_T1 = share_TK.masked_fill(is_none_TK, 0.0).sum(1, keepdim=True).round()
        each_T1 = (1.0 - sum_T1).clamp_min(0.0) / (vocab_size - num_named_T1).clamp_min(1.0)
        each_T1 = torch.where(num_named_T1 < vocab_size, each_T1, 0.0)
        named_TK = (probs_TK - each_T1 * share_TK).masked_fill(is_none_TK, 0.0)
        return self.weight * named_TK, self.weight * each_T1[:, 0]
