"""Outputs of the losses' autograd functions, and the :class:`LossOutput` that callers get.

Legend: T tokens. The tensors are the loss, the log-probabilities, is_top1, the z-loss, and what was asked for of
entropy and mean logit, in this order: a function that returns None in a place cannot be compiled, because Dynamo fails
at its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from liger_dist_kernels import TokenGradients, TokenTerms

from .arguments import LossArguments, LossOutput


def returned_tensors(loss: Tensor, z_loss: Tensor, terms: TokenTerms) -> tuple[Tensor, ...]:
    """The tensors in the order above."""
    further = (terms.entropy_T, terms.mean_logit_T)
    return (loss, terms.log_prob_T, terms.is_top1_T, z_loss, *(tensor for tensor in further if tensor is not None))


def reports_of(terms: TokenTerms, z_loss: Tensor, loss: LossArguments) -> list[Tensor]:
    """The returned tensors that carry no gradient."""
    reports = [terms.is_top1_T, z_loss, terms.mean_logit_T]
    if loss.reports_only:
        reports += [terms.log_prob_T, terms.entropy_T]
    return [report for report in reports if report is not None]


def with_gradients_of_outputs(
    upstream: TokenGradients, gradients: Sequence[Tensor | None], loss: LossArguments
) -> TokenGradients:
    """``upstream`` of the loss with the upstream gradients of log-probabilities and entropies added."""
    return upstream._replace(log_prob_T=gradients[1], entropy_T=gradients[4] if "entropy" in loss.outputs else None)


def as_loss_output(tensors: Sequence[Tensor], loss: LossArguments, spread: Callable[[Tensor], Tensor]) -> LossOutput:
    """The outputs that ``loss`` names; ``spread`` gives per-token values the labels' shape."""
    value, log_prob_T, is_top1_T, z_loss, *further = tensors
    named = dict(zip((name for name in ("entropy", "mean_logit") if name in loss.outputs), further, strict=True))
    per_token = loss.reduction == "none"
    return LossOutput(
        loss=spread(value) if per_token else value,
        log_prob=spread(log_prob_T) if "log_prob" in loss.outputs else None,
        is_top1=spread(is_top1_T) if "is_top1" in loss.outputs else None,
        z_loss=(spread(z_loss) if per_token else z_loss) if "z_loss" in loss.outputs else None,
        **{name: spread(values_T) for name, values_T in named.items()},
    )
