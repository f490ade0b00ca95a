"""Classes for swapping: a subclass made at run time and put below FSDP2's class, which copies and pickles.

[Note: Swapping a class below FSDP2's]
``fully_shard`` sets a module's class to ``FSDPX(FSDPModule, X)``. FSDP2 keeps its state by instance and its hooks on
the instance, and reads nothing from the class but ``FSDPModule``'s methods. So swapping ``X`` for a subclass of ``X``
below it changes none of FSDP2's behaviour, and ``isinstance`` holds for all three. :func:`below_wrappers` finds ``X``
by the order of bases that ``fully_shard`` makes; another order counts as a user's class, which is then subclassed
itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


class SameLinearMap:
    """Mixin of lm_head classes with another forward that computes the same logits as ``nn.Linear``."""


class MadeAtRunTime:
    """Mixin of classes that :func:`subclass_of` makes. No pickle can name such a class: it names what makes it."""

    _liger_dist_maker: tuple[Callable[..., Any], tuple[Any, ...]]
    """a function that returns the class, and its arguments"""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if getattr(self, "_liger_dist_maker", None) is None:
            return super().__reduce_ex__(protocol)
        # object.__getstate__ is new in Python 3.11.
        get_state = getattr(self, "__getstate__", None)
        return _blank, (_ByMaker(self._liger_dist_maker),), vars(self) if get_state is None else get_state()


class _ByMaker:
    """Stands for a class in a pickle or a copy, which contain the class itself once they are read."""

    def __init__(self, maker: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        self._maker = maker

    def made(self) -> Any:
        """Returns the class."""
        make, args = self._maker
        return make(*args)

    def __reduce__(self) -> Any:
        make, args = self._maker
        makers = (vars(arg).get("_liger_dist_maker") if isinstance(arg, type) else None for arg in args)
        return make, tuple(arg if maker is None else _ByMaker(maker) for arg, maker in zip(args, makers, strict=True))


def _blank(cls: Any) -> Any:
    """Makes an object without state, for a pickle or a copy to fill."""
    cls = cls.made() if isinstance(cls, _ByMaker) else cls  # copy.copy copies no arguments.
    return cls.__new__(cls)


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


def subclass_of(
    base: Any,
    mixin: type[MadeAtRunTime],
    maker: tuple[Callable[..., Any], tuple[Any, ...]],
    members: dict[str, Any] | None = None,
) -> Any:
    """Returns a subclass of ``mixin`` and ``base`` with the name of ``base``. Reuses an existing one with equal
    ``members`` (except ``forward``): modules of one class then stay of one class.

    Args:
        maker: the function that calls this one, and its arguments, for pickles.
    """
    members = {"_liger_dist_maker": maker, **(members or {})}
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
