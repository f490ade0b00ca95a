"""Distributions over the classes that a sampler kept: sampling replay.

A token that was drawn with top-p, top-k or min-p comes from the softmax of a few classes, its support. With their
log-probabilities ``p_k`` under the full softmax, which the loss returns for any classes, that of class k within the
support is ``p_k - log(sum_j exp p_j)``, in which the normalisation over the vocabulary cancels, in the gradient too. So
no other pass over the logits is needed, in whatever way they are computed.

Legend: K classes of a support.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError

from .collectives import require

OF_SUPPORT = ("log_prob", "log_prob_at", "entropy", "sum_sq_prob")
"""outputs of the distribution over the support; all other outputs, and the loss, are of the full vocabulary"""


def check_support(support_ids: Tensor, labels: Tensor, ignore_index: int) -> None:
    """Refuses a label that its support does not contain, and a class that stands in one twice, which would count
    twice; on a GPU by device-side assertions.

    Args:
        support_ids: ``[..., K]``, the labels' shape and K, negative for none. A token without any has the whole
            vocabulary.
    """
    if torch.compiler.is_compiling():
        return
    ids = support_ids.to(labels.device)
    is_free = (labels == ignore_index) | (ids < 0).all(-1)
    contains = is_free | (ids == labels[..., None]).any(-1)
    require(
        contains.all(),
        "a label is not among its support_ids, of which it was sampled; expected the classes that the sampler kept for "
        "each token, at the position of the logits (those of labels[:, s + 1] at s), or -1 alone for all classes",
        lambda: f"The first one is {labels[~contains][0].item()}.",
    )
    ordered = ids.sort(-1).values
    is_twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    require(
        ~is_twice.any(),
        "support_ids has a class twice for one token; expected different classes, and -1 for the rest",
        lambda: f"The first one is {ordered[..., 1:][is_twice][0].item()}.",
    )


def on_support(outputs: Mapping[str, Tensor], support_ids: Tensor, is_valid: Tensor) -> dict[str, Tensor]:
    """Returns outputs of the distribution over the support instead of the vocabulary.

    Args:
        outputs: by name, of the vocabulary, with ``log_prob_at`` of ``support_ids`` ``[..., K]``.
        is_valid: bool, the labels' shape: False for tokens without a target.
    """
    at = outputs["log_prob_at"]
    is_in = (support_ids >= 0).to(at.device) & is_valid[..., None]
    # Classes with a logit of -inf have the probability 0, and 0 * -inf is NaN.
    may_be = is_in & (at > -torch.inf)
    has_support = may_be.any(-1)
    # Elsewhere numbers whose gradient is not NaN.
    finite = torch.where(may_be, at, 0.0)
    total = torch.where(may_be, finite, torch.where(has_support[..., None], -torch.inf, 0.0)).logsumexp(-1)
    total = torch.where(has_support, total, 0.0)
    log_probs = torch.where(may_be, finite - total[..., None], 0.0)
    probs = torch.where(may_be, log_probs.exp(), 0.0)
    found = {**outputs, "log_prob_at": torch.where(is_in & ~may_be, -torch.inf, log_probs)}
    if "log_prob" in outputs:
        found["log_prob"] = outputs["log_prob"] - total
    if "entropy" in outputs:
        found["entropy"] = torch.where(has_support, -(probs * log_probs).sum(-1), outputs["entropy"])
    if "sum_sq_prob" in outputs:
        found["sum_sq_prob"] = torch.where(has_support, probs.square().sum(-1), outputs["sum_sq_prob"])
    return found


def pad_support(support_offsets: Tensor, support_ids: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pads supports in compressed rows, as an engine returns them, to ``support_ids`` of a call.

    Args:
        support_offsets: integers ``[T + 1]``: row t has the ids from ``support_offsets[t]`` on, before
            ``support_offsets[t + 1]``; an empty one stands for the whole vocabulary.
        support_ids: integers ``[N]``, the classes of all rows.
        shape: of the labels, T tokens in all, such as ``(B, S)``.

    Returns:
        int64 ``[*shape, K]``, -1 after the ids of a row; K is the length of the longest one, at least 1, which the host
        reads.

    Raises:
        LigerDistError: offsets that are not those of T rows of these ids.
    """
    tokens = torch.Size(shape).numel()
    if support_offsets.shape != (tokens + 1,) or support_ids.dim() != 1:
        raise LigerDistError(
            f"support_offsets have shape {tuple(support_offsets.shape)} and support_ids {tuple(support_ids.shape)}; "
            f"expected ({tokens + 1},), one more than the tokens of {tuple(shape)}, and one dimension."
        )
    offsets = support_offsets.long()
    lengths = offsets.diff()
    first, last, least = (int(x) for x in torch.stack([offsets[0], offsets[-1], lengths.min()]).tolist())
    if first != 0 or last != len(support_ids) or least < 0:
        raise LigerDistError(
            f"support_offsets begin with {first}, end with {last} and fall by {max(-least, 0)}; expected ascending "
            f"ones from 0 to {len(support_ids)}, the number of support_ids."
        )
    padded = support_ids.new_full((tokens, max(int(lengths.max()), 1)), -1, dtype=torch.int64)
    rows = torch.arange(tokens, device=lengths.device).repeat_interleave(lengths)
    places = torch.arange(len(support_ids), device=lengths.device) - offsets[:-1].repeat_interleave(lengths)
    padded[rows, places] = support_ids.long()
    return padded.view(*shape, -1)
