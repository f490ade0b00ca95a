"""What takes the changes of one wrap back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Undo:
    """Functions that undo changes of a model, in the order of the changes.

    They are kept on the model and get it when they run: a copy of the model undoes the changes of the copy. So
    arguments are what a copy or a pickle of the model may hold, and functions are those of a module.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = []

    def add(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Adds ``function(model, *args, **kwargs)``, which undoes a change that was made, or is about to be."""
        self._functions.append((function, args, kwargs))

    def run(self, model: nn.Module) -> None:
        """Undoes all changes, the last one first. The list stays: a shallow copy of the model shares it."""
        for function, args, kwargs in reversed(self._functions):
            function(model, *args, **kwargs)
