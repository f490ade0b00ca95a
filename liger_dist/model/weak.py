"""Weak references to the module that owns the holder.

:func:`liger_dist.wrap` sets attributes on a model that refer back to it. Strong references would form a cycle, and
``del model`` would leave its parameters in memory until the garbage collector runs.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import ref


class WeakReference:
    """A weak reference that copies and pickles of its target's owner follow."""

    def __init__(self, target: Any) -> None:
        self._ref = None if target is None else ref(target)

    def __call__(self) -> Any:
        return None if self._ref is None else self._ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakReference:
        """Refers to the target's copy, if it is copied along; otherwise to the target itself."""
        target = self()
        return WeakReference(copy.deepcopy(target, memo) if id(target) in memo else target)

    def __reduce__(self) -> Any:
        return WeakReference, (self(),)


class Weakly:
    """Attribute that is stored as a :class:`WeakReference`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_weak_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return vars(instance)[self._name]()

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = WeakReference(value)
