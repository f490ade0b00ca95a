"""Modules whose forward is another one for a while: by a subclass of their own class, put on the instance.

Parameters, names, state dict, ``isinstance`` and the class's name stay; nothing but the instance changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

Forward = Callable[..., Any]
_FORWARDS: dict[str, Callable[[type[nn.Module]], Forward]] = {}
_PLAN = "_liger_dist_plan"


class LeftAloneError(Exception):
    """A module keeps its own forward; the message says why. Never leaves this package."""


@contextmanager
def probing() -> Iterator[None]:
    """Within: what a model's own code raises on probe values is a reason to leave it alone."""
    try:
        yield
    except LeftAloneError:
        raise
    except Exception as error:
        raise LeftAloneError(f"its own forward cannot be probed ({type(error).__name__}: {error})") from error


class Replaced:
    """Mixed into the classes that :func:`replace_forward` makes."""

    _liger_dist_kind: str
    _liger_dist_base: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle cannot name a class that was made at run time.
        return _blank, (self._liger_dist_kind, self._liger_dist_base), vars(self)


def forward_of(kind: str) -> Callable[[Callable[[type[nn.Module]], Forward]], Callable[[type[nn.Module]], Forward]]:
    """Registers what makes the forward of one kind of replacement for a class of modules."""

    def register(make: Callable[[type[nn.Module]], Forward]) -> Callable[[type[nn.Module]], Forward]:
        _FORWARDS[kind] = make
        return make

    return register


def replace_forward(module: nn.Module, kind: str, plan: Any) -> None:
    """Gives the instance the forward that was registered for ``kind``, which reads its ``plan``.

    Raises:
        LeftAloneError: somebody has given the instance another one.
    """
    if "forward" in vars(module):
        raise LeftAloneError("its forward has been replaced on the instance")
    base = below_wrappers(type(module))
    replaced = _class_for(kind, base)
    setattr(module, _PLAN, plan)
    module.__class__ = with_base(type(module), base, replaced)


def restore_forward(module: nn.Module) -> None:
    """Undoes :func:`replace_forward`."""
    replaced: Any = below_wrappers(type(module))
    module.__class__ = with_base(type(module), replaced, replaced._liger_dist_base)
    delattr(module, _PLAN)


def plan_of(module: nn.Module) -> Any:
    """What the module's replaced forward goes by."""
    return vars(module)[_PLAN]


def is_replaced(module: nn.Module, kind: str) -> bool:
    return isinstance(module, Replaced) and module._liger_dist_kind == kind


def below_wrappers(cls: Any) -> Any:
    """The module's class under the one that FSDP2 makes of it."""
    return cls.__bases__[1] if cls.__bases__[0] is FSDPModule else cls


def with_base(cls: type, old: type, new: type) -> Any:
    """``cls`` with ``new`` in the place of ``old``, which is itself or one of its bases."""
    if cls is old:
        return new
    return type(cls.__name__, tuple(new if base is old else base for base in cls.__bases__), dict(vars(cls)))


@cache
def _class_for(kind: str, base: Any) -> Any:
    members = {
        "forward": _FORWARDS[kind](base),
        "_liger_dist_kind": kind,
        "_liger_dist_base": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (Replaced, base), members)


def _blank(kind: str, base: Any) -> nn.Module:
    cls = _class_for(kind, base)
    module: nn.Module = cls.__new__(cls)
    return module
