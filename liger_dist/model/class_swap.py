"""Classes for swapping: a subclass put below FSDP2's class, and markers of swapped classes.

[Note: Swapping a class below FSDP2's]
``fully_shard`` sets a module's class to ``FSDPX(FSDPModule, X)``. FSDP2 keeps its state by instance and its hooks on
the instance, and reads nothing from the class but ``FSDPModule``'s methods. So swapping ``X`` for a subclass of ``X``
below it changes none of FSDP2's behaviour, and ``isinstance`` holds for all three. :func:`below_wrappers` finds ``X``
by the order of bases that ``fully_shard`` makes; another order counts as a user's class, which is then subclassed
itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


class SameLinearMap:
    """Mixin of lm_head classes with another forward that computes the same logits as ``nn.Linear``."""


def below_wrappers(cls: Any) -> Any:
    """Returns the module's class below FSDP2's. See [Note: Swapping a class below FSDP2's]."""
    return cls.__bases__[1] if cls.__bases__[0] is FSDPModule else cls


def with_base(cls: type, old: type, new: type) -> Any:
    """Rebuilds ``cls`` with ``new`` instead of ``old``, which is ``cls`` or an ancestor."""
    if cls is old:
        return new
    bases = tuple(with_base(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    return type(cls.__name__, bases, dict(vars(cls)))


def present_as(forward: Any, other: Any) -> Any:
    """Gives ``forward`` the name and the signature of ``other``, and runs it in Python under torch.compile, which
    compiles what it calls. Not by functools.wraps: code that undoes wrappers, as Accelerate's, follows ``__wrapped__``
    past it."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(forward, name, getattr(other, name))
    forward.__signature__ = inspect.signature(other)
    return torch.compiler.disable(forward, recursive=False)


def subclass_of(base: Any, mixin: type, members: dict[str, Any] | None = None) -> Any:
    """Returns a subclass of ``mixin`` and ``base`` with the name of ``base``. Reuses an existing one with equal
    ``members`` (except ``forward``): modules of one class then stay of one class."""
    members = members or {}
    for found in base.__subclasses__():
        is_same = all(vars(found).get(name) == value for name, value in members.items() if name != "forward")
        if found.__bases__ == (mixin, base) and is_same:
            return found
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (mixin, base), {**members, **named})


@contextmanager
def swapped(mapping: dict[str, Any], key: str, value: Any) -> Iterator[None]:
    """Sets ``mapping[key] = value`` within the context. A key that was absent is absent again afterwards."""
    missing = object()
    before = mapping.get(key, missing)
    mapping[key] = value
    try:
        yield
    finally:
        if before is missing:
            del mapping[key]
        else:
            mapping[key] = before
