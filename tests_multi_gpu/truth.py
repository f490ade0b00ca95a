"""The truth that the loss ops are held to: whole logits in fp64, and torch's own functions wherever it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_dist.losses.outputs import TopK

DIFFERENTIABLE = ("log_prob", "log_prob_at", "entropy", "sum_sq_prob")


@dataclass(frozen=True)
class Truth:
    """Results in fp64, with graph."""

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor
    is_top1: Tensor
    z_loss: Tensor
    mean_logit: Tensor
    log_sum_exp: Tensor
    sum_sq_prob: Tensor
    log_prob_at: Tensor | None
    top_k: TopK | None


def transformed(logits: Tensor, *, softcap: float | None, logit_scale: float, temperature: Any) -> Tensor:
    scaled = logits * logit_scale
    if softcap is not None:
        scaled = softcap * torch.tanh(scaled / softcap)
    return scaled / (temperature[:, None].double() if isinstance(temperature, Tensor) else temperature)


def cross_entropy_truth(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: Tensor | float = 1.0,
    token_ids: Tensor | None = None,
    support_ids: Tensor | None = None,
    top_k: int | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    soft_labels: tuple[Tensor, Tensor] | None = None,
    soft_weight: float = 1.0,
    remainder: str = "drop",
    reduction: str = "mean",
    num_items_in_batch: Any = None,
) -> Truth:
    """``logits`` is ``[T, V]`` in fp64; the other arguments are those of ``liger_dist.linear_cross_entropy``."""
    z = transformed(logits, softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    valid = labels != ignore_index
    safe = labels.where(valid, 0)
    weight = None if class_weight is None else class_weight.double()
    losses = F.cross_entropy(
        z, labels, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    log_probs = F.log_softmax(z, -1)
    if soft_labels is not None:
        soft = soft_cross_entropy(log_probs, *soft_labels, remainder).where(valid, 0.0)
        losses = (1.0 - soft_weight) * losses + soft_weight * soft
    z_losses = torch.where(valid, z_loss * torch.logsumexp(z, -1) ** 2, 0.0)
    if token_weight is not None:
        losses, z_losses = losses * token_weight.double(), z_losses * token_weight.double()
    count = valid.sum().double()
    weighted_count = count if weight is None else weight[safe][valid].sum()
    if num_items_in_batch is not None:
        count = weighted_count = torch.as_tensor(num_items_in_batch, device=logits.device).double()
    if reduction == "mean":
        z_term = z_losses.sum() / (count if count != 0 else 1)
        loss = losses.sum() / (weighted_count if weighted_count != 0 else 1) + z_term
    elif reduction == "sum":
        z_term = z_losses.sum()
        loss = losses.sum() + z_term
    else:
        loss, z_term = losses + z_losses, z_losses
    probs, log_probs, at, top = policy_values(z, valid, token_ids, support_ids, top_k)
    return Truth(
        loss=loss,
        log_prob=log_probs.gather(1, safe[:, None])[:, 0].where(valid, 0.0),
        entropy=(-(probs * log_probs).sum(-1)).where(valid, 0.0),
        is_top1=valid & (z.gather(1, safe[:, None])[:, 0] >= z.amax(-1)),
        z_loss=z_term,
        mean_logit=z.mean(-1).where(valid, 0.0),
        log_sum_exp=z.logsumexp(-1).where(valid, 0.0),
        sum_sq_prob=probs.square().sum(-1).where(valid, 0.0),
        log_prob_at=at,
        top_k=top,
    )


def in_support(support_ids: Tensor, vocab_size: int) -> Tensor:
    """Bool ``[T, V]``: the classes that are in the support of a token; all of one that has none."""
    counts = torch.zeros(len(support_ids), vocab_size + 1, device=support_ids.device)
    counts.scatter_(1, support_ids.where(support_ids >= 0, vocab_size), 1.0)
    is_in = counts[:, :-1] > 0
    return is_in | ~is_in.any(1, keepdim=True)


def soft_cross_entropy(log_probs: Tensor, ids: Tensor, probs: Tensor, remainder: str) -> Tensor:
    """``[T]``, with dense target probabilities."""
    return -(dense_soft_labels(ids, probs, log_probs.shape[1], remainder) * log_probs).sum(-1)


def policy_values(
    z: Tensor, valid: Tensor, token_ids: Tensor | None, support_ids: Tensor | None, top_k: int | None
) -> tuple[Tensor, Tensor, Any, Any]:
    """Probabilities and log-probabilities ``[T, V]``, with a support 0 outside of it; the latter of ``token_ids`` or of
    the support; and the ``top_k`` likeliest classes of the vocabulary. None for what was not asked for."""
    at = top = None
    log_probs = of_vocabulary = F.log_softmax(z, -1)
    is_in = torch.ones_like(z, dtype=torch.bool)
    if support_ids is not None:
        is_in, token_ids = in_support(support_ids, z.shape[1]), support_ids
        log_probs = F.log_softmax(z.masked_fill(~is_in, -torch.inf), -1).masked_fill(~is_in, 0.0)
    if token_ids is not None:
        is_one = valid[:, None] & (token_ids >= 0)
        at = log_probs.gather(1, token_ids.clamp_min(0)).where(is_one, 0.0)
    if top_k is not None:
        values, ids = of_vocabulary.topk(top_k)
        remainder = (1.0 - values.exp().sum(-1)).where(valid, 0.0)
        top = TopK(ids.where(valid[:, None], 0), values.where(valid[:, None], 0.0), remainder)
    return log_probs.exp() * is_in, log_probs, at, top


def dense_soft_labels(ids: Tensor, probs: Tensor, vocab_size: int, remainder: str) -> Tensor:
    """``[T, V]`` target probabilities in fp64."""
    dense = torch.zeros(len(ids), vocab_size, dtype=torch.float64, device=ids.device)
    named = torch.zeros_like(dense)
    for token_ids, token_probs in zip(ids.T, probs.double().T, strict=True):
        is_one = token_ids >= 0
        rows, columns = is_one.nonzero()[:, 0], token_ids[is_one]
        dense[rows, columns] += token_probs[is_one]
        named[rows, columns] = 1.0
    sums = dense.sum(1, keepdim=True)
    if remainder == "renormalize":
        return dense / sums.where(sums > 0, 1.0)
    if remainder == "spread":
        unnamed = vocab_size - named.sum(1, keepdim=True)
        return torch.where(named > 0, dense, (1.0 - sums) / unnamed.clamp_min(1.0))
    return dense


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error in fp64; the absolute one where the truth is zero."""
    expected = expected.detach().double()
    error = (actual.detach().double() - expected).norm()
    norm = expected.norm()
    return float(error / norm) if norm > 0 else float(error)


def weighted_sum(result: Any, outputs: Sequence[str], upstream: dict[str, Tensor]) -> Tensor:
    """A scalar whose gradient reaches the loss and the differentiable ``outputs`` of a result."""
    names = ["loss", *(name for name in DIFFERENTIABLE if name in outputs)]
    return torch.stack([(getattr(result, name) * upstream[name]).sum() for name in names]).sum()
