"""A copy of a forward in which some of the functions that it calls are replaced.

No source is read: the copy has the forward's code and other globals, inside copies of its decorators. Every global that
is not replaced is looked up at call time.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

from liger_dist.model.decorators import redecorated

from .swap import LeftAloneError


class _Globals(dict[str, Any]):
    """Globals of a function, some of them replaced: other names are looked up in ``own`` at call time.

    Python looks a global up by ``__getitem__`` when a function's globals are a subclass of dict.
    """

    def __init__(self, own: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(replaced)
        self.own = own

    def __missing__(self, name: str) -> Any:
        return self.own[name]


def called_functions(forward: Any) -> dict[str, FunctionType]:
    """Returns functions of the module of ``forward``, under any decorators, whose names it reads."""
    innermost = unwrap(forward)
    if not isinstance(innermost, FunctionType):
        return {}
    found = {name: innermost.__globals__.get(name) for name in innermost.__code__.co_names}
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


def with_globals(forward: Any, replaced: Mapping[str, Any]) -> Any:
    """Copies ``forward`` and its decorators; globals of the names in ``replaced`` have these values.

    Raises:
        LeftAloneError: the forward does more than look its globals up, or its decorators cannot be copied.
    """
    innermost: FunctionType = unwrap(forward)
    if _needs_its_globals(innermost.__code__):
        raise LeftAloneError("its forward writes or lists its globals")
    own = innermost.__globals__
    # Names of builtins are not looked up through __missing__.
    given = {"__builtins__": own["__builtins__"], "__name__": own["__name__"], **replaced}
    copy = FunctionType(
        innermost.__code__,
        _Globals(own, given),
        innermost.__name__,
        innermost.__defaults__,
        innermost.__closure__,
    )
    copy.__kwdefaults__ = innermost.__kwdefaults__
    try:
        return redecorated(forward, copy)
    except ValueError as error:
        raise LeftAloneError(f"the decorators of its forward cannot be copied ({error})") from error


def _needs_its_globals(code: CodeType) -> bool:
    """True if a function with this code does more than look up its globals: it assigns one, has a class body, or calls
    a function that reads all of them."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    operations = {instruction.opname for instruction in dis.get_instructions(code)}
    writes = operations & {"STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS"}
    reads_all = {"globals", "locals", "vars", "eval", "exec"} & set(code.co_names)
    return bool(writes or reads_all) or any(map(_needs_its_globals, inner))
