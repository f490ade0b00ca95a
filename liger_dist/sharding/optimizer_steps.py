"""Calls objects before each step of an optimizer of torch, as long as they live."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class BeforeStep:
    """What is called."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Runs before the step."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Runs before parameters are updated: after the step's closure, if it has one."""


_CALLED: WeakSet[BeforeStep] = WeakSet()


def call_before_steps(listener: BeforeStep) -> None:
    """Calls the methods of ``listener`` in each step of any optimizer, until it is given to :func:`call_no_longer` or
    freed."""
    _CALLED.add(listener)


def call_no_longer(listener: BeforeStep) -> None:
    """Undoes :func:`call_before_steps`."""
    _CALLED.discard(listener)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    listeners = list(_CALLED)
    for listener in listeners:
        listener.before_step(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        for listener in listeners:
            listener.before_update(optimizer)
        return None
    if not listeners:
        return None

    @functools.wraps(closure)
    def closure_and_check() -> Any:
        loss = closure()
        for listener in listeners:
            listener.before_update(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], closure_and_check, *args[2:]), kwargs
    return args, kwargs | {"closure": closure_and_check}


# One hook of the process: torch iterates over its hooks, of which none may be removed by a garbage collection then.
register_optimizer_step_pre_hook(_before_step)
