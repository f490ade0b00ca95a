"""Every refusal of this library."""

from __future__ import annotations

import torch


class LigerDistError(ValueError):
    """A request that cannot be carried out: the message states the value, what was expected and the way out."""


class NoAdapterError(LigerDistError):
    """No sharding adapter can compute the loss on this layout: the message lists the facts and every adapter's
    reasons."""


class LogitsNotComputedError(LigerDistError, AttributeError):
    """Logits of a call that computed only its loss were asked for. An AttributeError too, so that ``hasattr`` and
    ``getattr`` with a default find none."""


def refuse_second_order(what: str, way_out: str) -> None:
    """Refuses, in a backward, second-order gradients: they are not defined, and must not be taken for zero.

    Raises:
        LigerDistError: the backward runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise LigerDistError(f"second-order gradients (create_graph=True) are not available from {what}; {way_out}.")
