"""What defines a loss, and how it is to be computed: the two records every loss of this package takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.config import check_count
from liger_dist.errors import LigerDistError
from liger_dist_kernels import Backend, LossOptions

from .labels import LabelSummary
from .normalization import Reduction, check_reduction

OUTPUTS: tuple[str, ...] = ("log_prob", "entropy", "is_top1", "z_loss", "mean_logit")
DIFFERENTIABLE_OUTPUTS = frozenset({"log_prob", "entropy"})


@dataclass(frozen=True, kw_only=True)
class LossArguments:
    """What is computed. Everything here changes the result."""

    options: LossOptions = LossOptions()
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None
    reduction: Reduction = "mean"
    num_items_in_batch: Tensor | float | None = None
    outputs: tuple[str, ...] = ()
    reports_only: bool = False
    """whether nobody will ask for gradients of ``outputs``, which then cost no recomputation"""
    logit_bias: Tensor | None = None
    """``[V]``, added to the logits beside the head's own bias; a constant"""

    @property
    def differentiable_outputs(self) -> frozenset[str]:
        """The outputs that gradients may be asked of."""
        return frozenset() if self.reports_only else DIFFERENTIABLE_OUTPUTS.intersection(self.outputs)

    def check(self, *, vocab_size: int, labels_shape: torch.Size) -> None:
        """Refuses arguments that do not fit each other or the tensors.

        Raises:
            LigerDistError: with the value, what was expected and the way out.
        """
        check_reduction(self.reduction, self.num_items_in_batch)
        unknown = [name for name in self.outputs if name not in OUTPUTS]
        if unknown:
            raise LigerDistError(f"outputs contains {unknown[0]!r}; expected names among {', '.join(OUTPUTS)}.")
        if "mean_logit" in self.outputs and self.class_weight is not None:
            raise LigerDistError(
                "outputs contains 'mean_logit' and class_weight is given, with which the sum over the vocabulary is "
                "another one; leave one of them out."
            )
        _check_weight("logit_bias", self.logit_bias, torch.Size([vocab_size]), "one number for each class")
        _check_weight("class_weight", self.class_weight, torch.Size([vocab_size]), "one weight for each class")
        _check_weight("token_weight", self.token_weight, labels_shape, "one weight for each label")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How it is computed. Nothing here changes the result beyond rounding, except the group that shares one mean."""

    backend: Backend = "auto"
    memory_budget: int | None = None
    overwrite_logits: bool = False
    """whether the gradient of given logits may take their memory"""
    label_summary: LabelSummary | None = None
    max_valid_tokens: int | None = None
    """how many tokens are computed when the host does not know how many count; None for all"""
    mean_groups: tuple[dist.ProcessGroup, ...] = ()
    """processes whose tokens share one mean, one group for each mesh axis; empty for this process alone"""
    divide_factor: float = 1.0
    """number by which the framework divides the gradients summed over ``mean_groups``"""

    def __post_init__(self) -> None:
        check_count("memory_budget", self.memory_budget, "bytes")
        check_count("max_valid_tokens", self.max_valid_tokens, "tokens")


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A loss with the further outputs that were asked for (None otherwise).

    ``log_prob`` and ``entropy`` carry gradients; the others are reports and carry none. Tokens
    without a target have 0 (False) everywhere.
    """

    loss: Tensor
    """0-d for "mean" and "sum", the labels' shape for "none"; fp32, or fp64 for fp64 inputs"""
    log_prob: Tensor | None = None
    """log-probability of each label, the labels' shape"""
    entropy: Tensor | None = None
    """entropy of each token's distribution in nats, the labels' shape"""
    is_top1: Tensor | None = None
    """bool, the labels' shape: no class has a larger logit than the label"""
    z_loss: Tensor | None = None
    """the z-loss part of ``loss``, reduced alike"""
    mean_logit: Tensor | None = None
    """mean of each token's transformed logits over the vocabulary, the labels' shape"""


def loss_options(
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    outputs: Sequence[str] = (),
) -> LossOptions:
    """:class:`LossOptions`, whose refusals become this package's."""
    try:
        return LossOptions(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            mean_logit="mean_logit" in outputs,
        )
    except (ValueError, TypeError) as error:
        raise LigerDistError(str(error)) from error


def as_output_names(outputs: Sequence[str]) -> tuple[str, ...]:
    """A single name is a common slip: it would read as a sequence of letters."""
    return (outputs,) if isinstance(outputs, str) else tuple(outputs)


def _check_weight(name: str, weight: Tensor | None, shape: torch.Size, meaning: str) -> None:
    if weight is None:
        return
    if weight.shape != shape:
        raise LigerDistError(
            f"{name} has shape {tuple(weight.shape)}; expected {meaning}, shape {tuple(shape)}. Expand or gather it "
            "first."
        )
    if not weight.is_floating_point():
        raise LigerDistError(f"{name} has dtype {weight.dtype}; expected a floating dtype. Convert it with .float().")
    if weight.requires_grad:
        raise LigerDistError(
            f"{name} requires a gradient, which this loss does not give. Detach it, or ask for reduction='none' (or "
            "outputs=('log_prob',)) and multiply yourself."
        )
