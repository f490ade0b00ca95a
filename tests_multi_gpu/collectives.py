"""Records collectives that move parameters and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

COLLECTIVES = (
    *("all_gather", "all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"),
)
"""those of FSDP; torch 2.13 renamed some"""


@contextlib.contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, int]]]:
    """Records the collectives that move parameters and gradients, with the number of elements they move."""
    seen: list[tuple[str, int]] = []

    def recording(name: str) -> Any:
        own = getattr(dist, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
            seen.append((name, max(tensor.numel() for tensor in tensors)))
            return own(*args, **kwargs)

        return mock.patch.object(dist, name, collective)

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(recording(name))
        yield seen
