"""JSON that users write."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: it is no JSON, or an object has a name twice, of which :func:`json.loads` keeps the last one.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the name {twice!r} twice; expected each once")
    return found
