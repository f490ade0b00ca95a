"""Modules whose forward is another one for a while: by a subclass of their own class, put on the instance.

Parameters, names, state dict, ``isinstance`` and the class's name stay; nothing but the instance changes. A replaced
forward falls back to the module's own wherever the module is not what it was when its plan was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

Forward = Callable[..., Any]
_FORWARDS: dict[str, Callable[[Forward], Forward]] = {}
_PLAN = "_liger_dist_plan"
_OWNER = "_liger_dist_owner"
_SIMPLE = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class LeftAloneError(Exception):
    """A module keeps its own forward; the message says why. Never leaves this package."""


@contextmanager
def probing(module: nn.Module) -> Iterator[None]:
    """Within: what the module's own code raises on probe values is a reason to leave it alone; random numbers, and
    what the code notes on the module, are as before afterwards."""
    before = dict(vars(module))
    try:
        with torch.random.fork_rng([]):
            yield
    except LeftAloneError:
        raise
    except Exception as error:
        raise LeftAloneError(f"its own forward cannot be probed ({type(error).__name__}: {error})") from error
    finally:
        vars(module).clear()
        vars(module).update(before)


class Replaced:
    """Mixed into the classes that :func:`replace_forward` makes."""

    _liger_dist_kind: str
    _liger_dist_base: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle cannot name a class that was made at run time.
        return _blank, (self._liger_dist_kind, self._liger_dist_base), vars(self)


def forward_of(kind: str) -> Callable[[Callable[[Forward], Forward]], Callable[[Forward], Forward]]:
    """Registers what makes the forward of one kind of replacement out of a class's own."""

    def register(make: Callable[[Forward], Forward]) -> Callable[[Forward], Forward]:
        _FORWARDS[kind] = make
        return make

    return register


def replace_forward(module: nn.Module, kind: str, plan: Any, *, owner: str) -> None:
    """Gives the instance the forward that was registered for ``kind``, which reads its ``plan``.

    Raises:
        LeftAloneError: somebody has given the instance another one.
    """
    if "forward" in vars(module):
        raise LeftAloneError("its forward has been replaced on the instance")
    base = below_wrappers(type(module))
    if type(module) is not base and "forward" in vars(type(module)):
        # transformers defines a forward on every subclass of its checkpointed layers, FSDP2's included, which calls the
        # base's: a swap below it would never run.
        raise LeftAloneError(f"{type(module).__name__}, made by fully_shard, defines its own forward")
    replaced = _class_for(kind, base, base.forward)
    setattr(module, _PLAN, plan)
    setattr(module, _OWNER, owner)
    module.__class__ = with_base(type(module), base, replaced)


def restore_forward(module: nn.Module, *, owner: str) -> None:
    """Undoes :func:`replace_forward` of the same owner."""
    if vars(module).get(_OWNER) != owner:
        return
    replaced: Any = next(cls for cls in type(module).__mro__ if "_liger_dist_kind" in vars(cls))
    module.__class__ = with_base(type(module), replaced, replaced._liger_dist_base)
    delattr(module, _PLAN)
    delattr(module, _OWNER)


def plan_of(module: nn.Module) -> Any:
    """What the module's replaced forward goes by; None when it has been restored and somebody has kept the forward."""
    return vars(module).get(_PLAN)


def own_forward(module: nn.Module, probed: Forward) -> Forward | None:
    """The forward that the module's class has now, if it is another one than was probed."""
    base = getattr(type(module), "_liger_dist_base", None)
    current = None if base is None else base.forward
    return current if current is not probed else None


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The numbers and names on a module that its forward may go by."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in _SIMPLE and name not in _OF_EVERY_MODULE and not name.startswith("_is_hf")
    }


def has_settings(module: nn.Module, settings: dict[str, Any]) -> bool:
    """Whether all of them are as they were. There may be others by now: FSDP and DeepSpeed note things on modules, of
    which a forward that was probed without them knows nothing, unless its class has a default for them."""
    now = settings_of(module)
    changed = [name for name, value in settings.items() if name not in now or now[name] != value]
    return not changed and not any(hasattr(type(module), name) for name in now.keys() - settings.keys())


def is_replaced(module: nn.Module, kind: str) -> bool:
    return isinstance(module, Replaced) and module._liger_dist_kind == kind and plan_of(module) is not None


def below_wrappers(cls: Any) -> Any:
    """The module's class under the one that FSDP2 makes of it."""
    return cls.__bases__[1] if cls.__bases__[0] is FSDPModule else cls


def with_base(cls: type, old: type, new: type) -> Any:
    """``cls`` with ``new`` in the place of ``old``, which is itself or an ancestor."""
    if cls is old:
        return new
    bases = tuple(with_base(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    return type(cls.__name__, bases, dict(vars(cls)))


@cache
def _class_for(kind: str, base: Any, forward: Any) -> Any:
    members = {
        "forward": _FORWARDS[kind](forward),
        "_liger_dist_kind": kind,
        "_liger_dist_base": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (Replaced, base), members)


def _blank(kind: str, base: Any) -> nn.Module:
    cls = _class_for(kind, base, base.forward)
    module: nn.Module = cls.__new__(cls)
    return module
