"""Identity of a wrapped model, which calls of wrapped models run in this context, and the losses that they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import ref

from torch import Tensor, nn


class WrapId:
    """Identifies one wrapped model: its loss and its lm_head hold the same object. A copy of the model gets another
    one, a copy of lm_head alone (PEFT's) keeps it."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapId:
        model = None if self._model is None else self._model()
        return WrapId(memo[id(model)]) if id(model) in memo else self

    def __reduce__(self) -> Any:
        return WrapId, (None if self._model is None else self._model(),)


_RUNNING: ContextVar[tuple[tuple[WrapId, object], ...]] = ContextVar("liger_dist_running", default=())
"""running calls of wrapped models in this context, innermost last: the model, and the loss if it is one of ours"""


@contextmanager
def running(wrap_id: WrapId, call: object) -> Iterator[None]:
    """Within, the forward of a model runs. Calls may nest.

    Args:
        call: None where lm_head computes logits.
    """
    token = _RUNNING.set((*_RUNNING.get(), (wrap_id, call)))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def innermost(wrap_id: WrapId | None) -> object:
    """Returns what :func:`running` was given for the innermost running call, if it is a call of this model."""
    calls = _RUNNING.get()
    return calls[-1][1] if calls and calls[-1][0] is wrap_id else None


def is_running(wrap_id: WrapId) -> bool:
    """True inside a forward of this model."""
    return any(running_id is wrap_id for running_id, _ in _RUNNING.get())


_LOSSES: ContextVar[list[Tensor] | None] = ContextVar("liger_dist_losses", default=None)


@contextmanager
def noted_losses() -> Iterator[list[Tensor]]:
    """Within, the losses that calls of wrapped models compute are noted, in their order, each 0-d and detached."""
    losses: list[Tensor] = []
    token = _LOSSES.set(losses)
    try:
        yield losses
    finally:
        _LOSSES.reset(token)


@contextmanager
def unnoted_losses() -> Iterator[None]:
    """Within, losses are not noted."""
    token = _LOSSES.set(None)
    try:
        yield
    finally:
        _LOSSES.reset(token)


def note_loss(loss: Tensor) -> Tensor:
    """Notes a loss for :func:`noted_losses`; returns it."""
    losses = _LOSSES.get()
    if losses is not None:
        losses.append(loss.detach())
    return loss
