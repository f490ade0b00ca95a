"""Decorated functions: transformers puts ``@deprecate_kwarg`` on forwards, so that the function of a class has the code
and the globals of the decorator.

``inspect.unwrap`` gives the innermost function, ``inspect.signature`` its parameters. This module copies the decorators
around another function, and reads the keywords that they rename and the functions of other packages that they call.
"""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any

_RENAMED = ("old_name", "new_name")
"""variables of the function that ``transformers.utils.deprecation.deprecate_kwarg`` returns"""
_OF_PACKAGE = ("torch_function", "implementation")
"""variables of the function that ``transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback``
returns: the function of the model's file, and what it calls"""


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
    holds = [_content(cell) is wrapped for cell in function.__closure__ or ()]
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


def renamed_keywords(function: Any) -> dict[str, str]:
    """Reads the deprecated names of keywords that the decorators of ``function`` still accept, with their current
    names."""
    renamed: dict[str, str] = {}
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and set(_RENAMED) <= set(code.co_freevars):
            cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
            old, new = (_content(cells[name]) for name in _RENAMED)
            if isinstance(old, str) and isinstance(new, str):
                renamed[old] = new
        function = getattr(function, "__wrapped__", None)
    return renamed


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Empty: its variable was never set.
        return None


def installed_function(function: Any) -> Any:
    """Returns the function of another package, as fla's ``chunk_gated_delta_rule``, that transformers calls for
    ``function`` (``use_kernel_func_from_hub_with_fallback``); None if the package is not installed, and for any other
    function."""
    code = getattr(function, "__code__", None)
    if code is None or not set(_OF_PACKAGE) <= set(code.co_freevars):
        return None
    cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
    own, installed = (_content(cells[name]) for name in _OF_PACKAGE)
    return None if installed is own else installed
