# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What every Triton file here shares: which backend runs, and the transform of a raw logit."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]
Vector = TypeVar("Vector", Tensor, Tensor | None)
BACKENDS: tuple[str, ...] = ("auto", "triton", "reference")


def runs_triton(tensor: Tensor, backend: Backend) -> bool:
    """Whether an op on ``tensor`` runs its Triton kernels; otherwise its plain-torch reference runs.

    ``"auto"`` means Triton on a GPU and the reference elsewhere. ``"triton"`` on a CPU tensor needs Triton's
    interpreter (``TRITON_INTERPRET=1`` before the first import).

    Raises:
        ValueError: unknown backend, or Triton asked for on a CPU tensor without the interpreter.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}.")
    if backend == "auto":
        return tensor.is_cuda
    if backend == "triton" and tensor.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError(
            "backend='triton' was asked for on a CPU tensor. Set TRITON_INTERPRET=1 before Python starts to run the "
            "kernels in Triton's interpreter, or use backend='reference'."
        )
    return backend == "triton"


def dense(vector: Vector) -> Vector:
    """The vector, its numbers side by side, as kernels read them: a column of a matrix is copied."""
    return vector if vector is None else vector.contiguous()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax statistics are kept: fp64 for fp64 logits, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp_of_difference(x, y):
    """exp(x - y) in two instructions, a multiply-add and a power of two, where Triton's own exp takes nine: it keeps
    results below 1e-38, which are 0 here. The rounding of ``y`` is that of an fp32 log-sum-exp of its size."""
    return tl.exp2(x * _LOG2_E - y * _LOG2_E)


@triton.jit
def number(x, dtype: tl.constexpr):
    """A number from the host, in ``dtype``: torch.compile passes it as fp64, which would widen all that it touches."""
    return tl.full((), x, dtype)


@triton.jit
def capped(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """``softcap * tanh(scale * raw / softcap)`` and its derivative by ``scale * raw``.

    tanh is written with a sigmoid, which the interpreter has as well.
    """
    scaled = raw * scale
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(2.0 * scaled / softcap) - 1.0
        return softcap * tanh, 1.0 - tanh * tanh
    return scaled, scaled * 0.0 + 1.0
