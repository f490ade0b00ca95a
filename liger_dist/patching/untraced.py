"""What ``torch.compile`` must not trace: a compiled graph cannot see the loss that travels beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Breaks a compiled graph at ``function``, which then runs as it is written."""
    return cast(F, torch.compiler.disable(function))
