"""A copy of a forward in which some of the functions that it calls are replaced, and the functions of other packages
that a forward calls.

No source is read: the copy has the forward's code and other globals, inside copies of its decorators. Every global that
is not replaced is looked up at call time.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from inspect import signature, unwrap
from types import CellType, CodeType, FunctionType
from typing import Any

from liger_dist.model.keywords import cell_content

from .isolated import LeftAloneError

_OF_PACKAGE = ("torch_function", "implementation")
"""variables of the function that ``transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback``
returns: the function of the model's file, and what it calls"""


class _Globals(dict[str, Any]):
    """Globals of a function, some of them replaced: other names are looked up in ``namespace`` at call time.

    Python looks a global up by ``__getitem__`` when a function's globals are a subclass of dict.
    """

    def __init__(self, namespace: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(replaced)
        self.namespace = namespace

    def __missing__(self, name: str) -> Any:
        return self.namespace[name]


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
    namespace = innermost.__globals__
    # Names of builtins are not looked up through __missing__.
    given = {"__builtins__": namespace["__builtins__"], "__name__": namespace["__name__"], **replaced}
    copy = FunctionType(
        innermost.__code__,
        _Globals(namespace, given),
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


def redecorated(function: Any, innermost: FunctionType) -> FunctionType:
    """Copies the decorators of ``function``, outermost first, around ``innermost``.

    Args:
        function: a function, or one that ``functools.wraps`` has marked with ``__wrapped__``.

    Raises:
        ValueError: a decorator is not a function, or does not hold the function below it in exactly one variable.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return innermost
    if not isinstance(function, FunctionType):
        raise ValueError(f"a decorator is of type {type(function).__name__}")
    below = redecorated(wrapped, innermost)
    holds = [cell_content(cell) is wrapped for cell in function.__closure__ or ()]
    if sum(holds) != 1:
        raise ValueError(f"its decorator {function.__code__.co_name} does not call it by one variable")
    closure = tuple(
        CellType(below) if is_held else cell for is_held, cell in zip(holds, function.__closure__ or (), strict=True)
    )
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure=closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    vars(copy).update(vars(function), __wrapped__=below)
    return copy


def installed_function(function: Any) -> Any:
    """Returns the function of another package, as fla's ``chunk_gated_delta_rule``, that transformers calls for
    ``function`` (``use_kernel_func_from_hub_with_fallback``); None if the package is not installed, and for any other
    function."""
    code = getattr(function, "__code__", None)
    if code is None or not set(_OF_PACKAGE) <= set(code.co_freevars):
        return None
    cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
    fallback, installed = (cell_content(cells[name]) for name in _OF_PACKAGE)
    return None if installed is fallback else installed


def fallback_of(function: FunctionType) -> Any:
    """Returns transformers' fallback for a function that calls another package; it leaves out keywords that the
    fallback does not take, as transformers does."""
    unwrapped = unwrap(function)
    parameters = signature(unwrapped).parameters

    def fallback(*args: Any, **kwargs: Any) -> Any:
        return unwrapped(*args, **{name: value for name, value in kwargs.items() if name in parameters})

    return fallback
