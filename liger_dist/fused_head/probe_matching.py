"""What arrives at the losses of a probed model: labels that explain its targets, transforms that explain its logits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_dist.losses.labels import cut_at_documents, shifted_further

from .logits import FusedLogits
from .recipe import LogitTransform, Targets

IGNORED = -100


@dataclass(frozen=True)
class Arrival:
    """Arguments that a loss was called with."""

    owner: str | None
    call: int
    """index of the call of lm_head whose logits these are"""
    logits: Tensor
    targets: Tensor
    is_aligned: bool
    """True if each token is scored against the target at its position"""
    options: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """Zero-width logits that a loss was called with."""

    call: int
    """index of the call of lm_head that returned them"""
    logits: FusedLogits
    changes: tuple[tuple[Any, ...], ...]
    """of the logits, until then"""
    targets: Tensor
    is_aligned: bool


@dataclass(frozen=True)
class FurtherLabels:
    """Labels of a further loss; fields as in :class:`.recipe.LossRecipe`."""

    targets: Targets
    ahead: int
    cut: int | None
    num_scored: int
    """tokens of each sequence whose logits arrived"""


def alignments(
    labels: Tensor, attention_mask: Tensor, given: Tensor, is_aligned: bool
) -> Iterator[tuple[Targets, Tensor]]:
    """Yields each alignment of ``labels`` to logits that explains the targets ``given`` to a loss, with the indices of
    the scored tokens."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    attended = attention_mask[:, 1:] != 0
    every = torch.arange(labels.numel()).reshape(labels.shape)
    choices: list[tuple[Targets, Tensor, Tensor]] = [
        ("same", every, labels),
        ("next", every, shifted),
        ("next", every[:, :-1], labels[:, 1:]),
        ("next_attended", every, torch.where(F.pad(attended, (0, 1)), shifted, IGNORED)),
        ("next_attended", every[:, :-1][attended], labels[:, 1:][attended]),
    ]
    if not is_aligned:
        if given.numel() != labels.numel():
            return  # The loss function shifts labels that were shifted already.
        given = F.pad(given.reshape(labels.shape)[:, 1:], (0, 1), value=IGNORED)
    for targets, rows, expected in choices:
        if torch.equal(given.reshape(-1), expected.reshape(-1)):
            yield targets, rows


def further_labels(
    labels: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None,
    given: Tensor,
    *,
    first: Targets,
    is_aligned: bool,
    num_tokens: int,
) -> Iterator[FurtherLabels]:
    """Yields what explains the targets ``given`` to a further loss, whose call of lm_head had the first ``num_tokens``
    of each sequence: labels shifted further, with or without a cut at the ends of documents.

    Args:
        first: alignment of the first loss's labels.
        position_ids: ``[B, S]`` that restart at documents; None where the model was not given any.
    """
    rows, length = labels.shape
    if given.numel() % rows != 0:
        return
    given = given.reshape(rows, -1)
    if not is_aligned:
        given = F.pad(given[:, 1:], (0, 1), value=IGNORED)
    num_scored = given.shape[1]
    if num_scored > num_tokens:
        return
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    attended = F.pad(attention_mask[:, 1:] != 0, (0, 1))
    aligned: dict[Targets, Tensor] = {
        "next": shifted,
        "next_attended": torch.where(attended, shifted, IGNORED),
    }
    if first == "same":
        aligned = {"same": labels}
    for (targets, at_once), ahead in itertools.product(aligned.items(), range(length)):
        further = shifted_further(at_once, ahead, ignore_index=IGNORED)
        steps = ahead if targets == "same" else ahead + 1
        for cut in (None,) if position_ids is None else (None, steps, ahead):
            expected = further if cut is None else cut_at_documents(further, position_ids, cut, ignore_index=IGNORED)
            expected = expected[:, :num_tokens]
            if torch.equal(given, expected[:, :num_scored]) and bool((expected[:, num_scored:] == IGNORED).all()):
                yield FurtherLabels(targets, ahead, cut, num_scored)


def candidates(model: nn.Module) -> Iterator[LogitTransform]:
    numbers = list(_numbers(getattr(model, "config", None)))
    caps = [value for name, value in numbers if _has_any(name, "softcap", "soft_cap", "logit_cap")]
    factors = [value for name, value in numbers if _has_any(name, "logit", "lm_head", "multiplier")]
    scales = [1.0, *factors, *(1.0 / factor for factor in factors)]
    for softcap, scale in itertools.product([None, *caps], scales):
        yield LogitTransform(softcap=softcap, scale=scale)


def _has_any(name: str, *parts: str) -> bool:
    return any(part in name for part in parts)


def _numbers(config: Any) -> Iterator[tuple[str, float]]:
    """Lists the numbers above 0 of a config and of the configs inside it."""
    for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
        if isinstance(value, int | float) and value > 0:
            yield name, float(value)
        elif hasattr(value, "to_dict"):
            yield from _numbers(value)
