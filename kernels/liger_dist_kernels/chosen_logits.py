"""Logits of chosen classes and of the k largest, of full rows or of slices of the vocabulary.

Legend: T tokens, V vocabulary, K chosen classes of each token, k largest ones. ``z`` are transformed logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._triton_utils import statistics_dtype
from .logit_rows import transformed
from .options import RowOptions
from .token_chunks import TokenTargets


class ChosenLogits(NamedTuple):
    """``z`` of chosen classes, in the dtype of the statistics; None for outputs that were not requested."""

    at_TK: Tensor | None
    """of the requested classes; 0 for those of another slice"""
    top_Tk: Tensor | None
    """the largest ones in descending order; -inf beyond the number of classes"""
    top_ids_Tk: Tensor | None
    """their classes in the full vocabulary"""


class ChosenLogProbs(NamedTuple):
    """Log-probabilities of chosen classes; None for outputs that were not requested."""

    at_TK: Tensor | None
    """of the requested classes; 0 where the class is negative"""
    top_Tk: Tensor | None
    top_ids_Tk: Tensor | None
    remainder_T: Tensor | None
    """the probability of all classes but the top k, in [0, 1]"""


def choose_logits(logits_TV: Tensor, targets: TokenTargets, top_k: int, rows: RowOptions) -> ChosenLogits:
    """Gathers ``z`` ``[T, K]`` of the classes in ``targets`` and the ``top_k`` largest ``[T, k]`` (0 for none)."""
    V, options, first_class = logits_TV.shape[1], rows.options, rows.first_class
    token_ids_TK, temperature_T = targets.token_ids_TK, targets.temperature_T
    at_TK = top_Tk = top_ids_Tk = None
    if token_ids_TK is not None:
        at_TK = logits_TV.new_zeros(token_ids_TK.shape, dtype=statistics_dtype(logits_TV.dtype))
        if V > 0:
            local_ids_TK = token_ids_TK - first_class
            raw_TK = logits_TV.gather(1, local_ids_TK.clamp(0, V - 1))
            is_here_TK = (local_ids_TK >= 0) & (local_ids_TK < V)
            at_TK = torch.where(is_here_TK, transformed(raw_TK, options, temperature_T)[0], 0.0)
    if top_k > 0:
        # The transform grows with the raw logit, or falls with it where the scale is negative.
        raw_Tk, ids_Tk = logits_TV.topk(min(top_k, V), largest=options.logit_scale > 0)
        missing = (0, top_k - ids_Tk.shape[1])
        top_Tk = pad(transformed(raw_Tk, options, temperature_T)[0], missing, value=float("-inf"))
        top_ids_Tk = pad(ids_Tk + first_class, missing, value=0)
    return ChosenLogits(at_TK, top_Tk, top_ids_Tk)


def merge_chosen(slices: Sequence[ChosenLogits]) -> ChosenLogits:
    """Merges the chosen logits of slices of the vocabulary into those of full rows. The result is the same on every
    rank that merges the same slices in the same order."""
    if len(slices) == 1:
        return slices[0]
    at, top, top_ids = ([field for field in column if field is not None] for column in zip(*slices, strict=True))
    at_TK = torch.stack(at).sum(0) if at else None
    if not top:
        return ChosenLogits(at_TK, None, None)
    top_Tk, places_Tk = torch.cat(top, 1).topk(top[0].shape[1])
    return ChosenLogits(at_TK, top_Tk, torch.cat(top_ids, 1).gather(1, places_Tk))


def chosen_log_probs(
    chosen: ChosenLogits, log_probs: Callable[[Tensor], Tensor], targets: TokenTargets
) -> ChosenLogProbs:
    """Computes log-probabilities from complete logits, without those of soft labels; all 0 for tokens with a negative
    label. ``log_probs`` maps ``z`` ``[T, K]`` to log-probabilities."""
    at_TK = top_Tk = top_ids_Tk = remainder_T = None
    token_ids_TK = targets.asked_ids_TK
    if token_ids_TK is None and chosen.top_Tk is None:
        return ChosenLogProbs(None, None, None, None)
    is_ignored_T1 = targets.labels_T[:, None] < 0
    if token_ids_TK is not None:
        assert chosen.at_TK is not None
        asked_TK = chosen.at_TK[:, : token_ids_TK.shape[1]]
        at_TK = log_probs(asked_TK).masked_fill_(is_ignored_T1 | (token_ids_TK < 0), 0.0)
    if chosen.top_Tk is not None and chosen.top_ids_Tk is not None:
        top_Tk = log_probs(chosen.top_Tk).masked_fill_(is_ignored_T1, 0.0)
        top_ids_Tk = chosen.top_ids_Tk.masked_fill(is_ignored_T1, 0)
        remainder_T = (1.0 - top_Tk.exp().sum(1)).clamp_(min=0.0)
    return ChosenLogProbs(at_TK, top_Tk, top_ids_Tk, remainder_T)


def sum_of_same_ids(values_TK: Tensor, token_ids_TK: Tensor) -> Tensor:
    """Sums the values of equal token ids in each row; every position gets the total of its id: ``[T, K]``.

    A segmented scan over the sorted ids (Hillis and Steele 1986), whose order of summation is fixed, unlike that of
    ``scatter_add_`` on GPUs.
    """
    sorted_TK, order_TK = token_ids_TK.sort(dim=1, stable=True)
    sums_TK = values_TK.gather(1, order_TK)
    distance, K = 1, token_ids_TK.shape[1]
    while distance < K:
        is_same = sorted_TK[:, distance:] == sorted_TK[:, :-distance]
        moved = torch.where(is_same, sums_TK[:, :-distance], 0.0)
        sums_TK = torch.cat([sums_TK[:, :distance], sums_TK[:, distance:] + moved], 1)
        distance *= 2
    last_TK = torch.searchsorted(sorted_TK, token_ids_TK.contiguous(), right=True) - 1
    return sums_TK.gather(1, last_TK)
