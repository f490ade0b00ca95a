"""What every host has to show: the fused op was called, no logits existed, and training is as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from models import VOCAB_SIZE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_dist.losses import linear_cross_entropy, linear_divergence


@dataclass
class Seen:
    """Of the loss, while it was watched."""

    fused_calls: int = 0
    most_logits: int = 0
    """rows of the largest tensor with a column for every class, its gradient or the weight's transpose not counted"""


class _Logits(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim > 1 and result.shape[-1] == VOCAB_SIZE and func._schema.name in (
            "aten::mm", "aten::addmm", "aten::_unsafe_view", "aten::linear"
        ):  # fmt: skip
            self.seen.most_logits = max(self.seen.most_logits, result.numel() // VOCAB_SIZE)
        return result


@contextmanager
def watched(*, logits: bool = True) -> Iterator[Seen]:
    """Counts calls of the fused ops, and looks at what products return (without ``logits`` it does not: ring attention
    of torch dispatches plain tensors and DTensors itself)."""
    seen = Seen()

    def counted(function: Any) -> Any:
        own = function.forward

        def forward(*args: Any) -> Any:
            seen.fused_calls += 1
            return own(*args)

        return mock.patch.object(function, "forward", staticmethod(forward))

    functions = (linear_cross_entropy._LinearCrossEntropy, linear_divergence._LinearDivergence)
    with counted(functions[0]), counted(functions[1]), _Logits(seen) if logits else nullcontext():
        yield seen


def printed_by(command: Sequence[str], folder: Path, **variables: str) -> str:
    """What a program prints that is run in ``folder`` with this process's path and further environment variables."""
    finished = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
