"""Keywords of forwards that decorators of transformers (``@deprecate_kwarg``) rename."""

from __future__ import annotations

from types import CellType
from typing import Any

_RENAMED = ("old_name", "new_name")
"""variables of the function that ``transformers.utils.deprecation.deprecate_kwarg`` returns"""


def renamed_keywords(function: Any) -> dict[str, str]:
    """Reads the deprecated names of keywords that the decorators of ``function`` still accept, with their current
    names."""
    renamed: dict[str, str] = {}
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and set(_RENAMED) <= set(code.co_freevars):
            cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
            old, new = (cell_content(cells[name]) for name in _RENAMED)
            if isinstance(old, str) and isinstance(new, str):
                renamed[old] = new
        function = getattr(function, "__wrapped__", None)
    return renamed


def cell_content(cell: CellType) -> Any:
    """Returns what a variable of a closure holds; None for one that was never set."""
    try:
        return cell.cell_contents
    except ValueError:  # Empty: its variable was never set.
        return None
