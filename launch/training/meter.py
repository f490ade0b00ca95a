"""Looks inside: the largest tensor that a module's forward allocates, and a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .process import rank


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

    def in_words(self, tokens: int, vocab_size: int) -> str:
        """Of a head's largest tensors, whether they were the logits of all ``tokens``."""
        rows = self.rows_of_width.get(vocab_size, 0)
        # Inside the head, logits are as wide as the vocabulary; all of them have a row for each token that is learnt.
        seen = f"at most {rows} of {tokens} rows of {vocab_size} at once" if rows else f"not one row of {vocab_size}"
        return (
            f"{'no' if 2 * rows <= tokens else 'all'} logits were materialised: {seen}, the head's largest tensor was "
            f"{list(self.shape)}, {self.num_bytes / 2**20:.2f} MiB"
        )


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


@contextmanager
def traced(folder: Path) -> Iterator[None]:
    """Writes ``trace-rank*.json`` into ``folder``, for Perfetto or chrome://tracing."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / f"trace-rank{rank()}.json"))
