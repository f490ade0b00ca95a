"""The fused loss of a torch newer than the installed one, from the files of its wheel: the op in Python, and since 2.15
a CuTe kernel for its chunks, for which ``nvidia-cutlass-dsl`` has to be installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
FILES = "LIGER_DIST_TORCH_FILES"
"""environment variable: folder ``torch`` of a newer wheel, unpacked"""
OP, OPTIONS = "linear_cross_entropy", "linear_cross_entropy_options"


@cache
def module_of(name: str, folder: Path | None) -> Any:
    """Imports a module of ``torch.nn.modules`` from ``folder``, or from the installed torch for None."""
    full_name = f"torch.nn.modules.{name}"
    if folder is None:
        return import_module(full_name)
    spec = spec_from_file_location(full_name, folder / "nn/modules" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[full_name] = module  # Dataclasses look their module up, and the kernel this name.
    spec.loader.exec_module(module)
    return module


def has_kernel(folder: Path | None) -> bool:
    if folder is None or find_spec("cutlass") is None:
        return False
    return (folder / "_native/ops/linear_cross_entropy/fused_grad_logits_kernel.py").is_file()


def _package(name: str, path: Path | None, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    if path is not None:
        module.__path__ = [str(path)]
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    setattr(sys.modules[parent], own, module)


def kernel_loss(folder: Path, chunk_size: Callable[[Tensor, Tensor], int]) -> Loss:
    """Builds the loss whose chunks the CuTe kernel computes, with the gradient of the op: computed by the forward,
    scaled by the backward. What the newer torch puts around it, its registry of overrides, is left out."""
    for name in ("torch._native", "torch._native.ops", "torch._native.ops.linear_cross_entropy"):
        _package(name, folder.joinpath(*name.split(".")[1:]))
    _package("torch._native.cutedsl_utils", None)
    _package("torch._native.instrumentation", None, instrumented_cutedsl_cache=lambda *_, **__: cache)
    import_module("torch._vendor")
    _package("torch._vendor.quack", folder / "_vendor/quack")
    implementation: Any = import_module("torch._native.ops.linear_cross_entropy.cutedsl_impl")

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            sizes = (chunk_size(hidden, weight), "compact", torch.float32, False)
            values = (hidden, weight, labels, None, None, "mean", -100, 0.0)
            wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], False)
            found = implementation._batch_chunked_kernel(*values, *sizes, *wanted)
            loss, ctx.by_hidden, ctx.by_weight, _ = found
            return cast(Tensor, loss)

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
            # A gradient that the context keeps would be copied.
            by_hidden, by_weight, ctx.by_hidden, ctx.by_weight = ctx.by_hidden, ctx.by_weight, None, None
            return by_hidden.mul_(upstream), by_weight.mul_(upstream), None

    return lambda hidden, weight, labels: Function.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]
