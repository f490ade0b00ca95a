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
    numbers in a tensor of each width."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.shape: tuple[int, ...] = ()
        self.numbers_of_width: dict[int, int] = {}

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
                self.numbers_of_width[width] = max(self.numbers_of_width.get(width, 0), leaf.numel())
        return result

    def in_words(self, tokens: int, vocab_size: int, own_rows: int, *, is_fused: bool) -> str:
        """Of a head's largest tensors, how much of the logits of one process's ``tokens`` they were.

        Args:
            own_rows: of the head on this process: logits are as wide as the vocabulary, or as these.
        """
        numbers = max(self.numbers_of_width.get(width, 0) for width in (vocab_size, own_rows))
        share = numbers / (tokens * vocab_size)
        return (
            f"at most {share:.1%} of a micro-batch's logits existed at once, the head's largest tensor was "
            f"{list(self.shape)}, {self.num_bytes / 2**20:.2f} MiB"
            + (" (a smaller --memory_budget holds less)" if is_fused and share > 0.5 else "")
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
