"""A function of a model made anew from its own installed source, with a few expressions exchanged.

Nothing is copied and no module is changed: the new function reads the same globals, keeps the source's line numbers in
tracebacks, and finds what was put in by a closure.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

from .replaced import LeftAloneError


def rewritten(
    function: Callable[..., Any], transformer: Callable[[ast.FunctionDef], bool], names: dict[str, Any]
) -> Callable[..., Any]:
    """``function`` with its syntax tree changed by ``transformer``, which returns whether it found anything.

    Args:
        names: what the new expressions refer to.

    Raises:
        LeftAloneError: no plain function with source, or nothing found.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__") or function.__closure__:
        raise LeftAloneError("its forward is decorated or refers to more than its module's globals")
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError) as error:
        raise LeftAloneError("its source is not available") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not transformer(definition):
        raise LeftAloneError("its forward does not have the statements that could be fused")
    ast.increment_lineno(tree, first_line - 1)
    _strip(definition)
    factory = ast.FunctionDef(
        name="_factory",
        args=ast.arguments(
            posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
        ),
        body=[definition, ast.Return(ast.Name(definition.name, ast.Load()))],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module([factory], type_ignores=[]))
    made: dict[str, Any] = {}
    exec(compile(module, inspect.getfile(function), "exec"), function.__globals__, made)
    result: FunctionType = made["_factory"](**names)
    result.__defaults__, result.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    result.__annotations__, result.__doc__ = function.__annotations__, function.__doc__
    result.__qualname__ = function.__qualname__
    return result


def _strip(definition: ast.FunctionDef) -> None:
    """Drops what would be evaluated at its definition; defaults are taken over as values."""
    definition.decorator_list = []
    definition.returns = None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    none = ast.Constant(None)
    arguments.defaults = [none for _ in arguments.defaults]
    arguments.kw_defaults = [None if default is None else none for default in arguments.kw_defaults]
