"""Measures the largest tensor that a module's forward allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """While active, notes the largest storage that any operation hands out and its inputs did not bring, and the most
    rows of each width."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.shape: tuple[int, ...] = ()
        self.rows_of_width: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or _storage(leaf) in before or leaf.numel() == 0:
                continue
            if leaf.nbytes > self.num_bytes:
                self.num_bytes, self.shape = leaf.nbytes, tuple(leaf.shape)
            if leaf.dim() >= 2:
                width = leaf.shape[-1]
                self.rows_of_width[width] = max(self.rows_of_width.get(width, 0), leaf.numel() // width)
        return result


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def measured(module: nn.Module) -> Iterator[LargestTensor]:
    """Measures every forward of ``module`` that runs inside the context."""
    largest = LargestTensor()

    def enter(*_: Any) -> None:
        largest.__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        largest.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    hooks = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True))
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()
