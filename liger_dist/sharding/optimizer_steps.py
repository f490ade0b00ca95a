"""Calls objects before each step of an optimizer of torch, as long as they live."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class BeforeStep(Protocol):
    def before_step(self, optimizer: Optimizer) -> None:
        """Called before the step."""


_CALLED: WeakSet[BeforeStep] = WeakSet()


def call_before_steps(listener: BeforeStep) -> None:
    """Calls ``listener.before_step`` before each step of any optimizer, until it is given to
    :func:`call_no_longer` or freed."""
    _CALLED.add(listener)


def call_no_longer(listener: BeforeStep) -> None:
    """Undoes :func:`call_before_steps`."""
    _CALLED.discard(listener)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for listener in list(_CALLED):
        listener.before_step(optimizer)


# One hook of the process: torch iterates over its hooks, of which none may be removed by a garbage collection then.
register_optimizer_step_pre_hook(_before_step)
