# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Selects Triton or the reference, and holds the device functions that all Triton files share, such as the transform of
a raw logit (softcap, scale, temperature)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]
Vector = TypeVar("Vector", Tensor, Tensor | None)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
BACKENDS: tuple[str, ...] = ("auto", "triton", "reference")


def runs_triton(tensor: Tensor, backend: Backend) -> bool:
    """True if an op on ``tensor`` runs its Triton kernels; otherwise its plain-torch reference runs.

    ``"auto"`` means Triton on a GPU and the reference elsewhere. ``"triton"`` on a CPU tensor needs Triton's
    interpreter (``TRITON_INTERPRET=1`` before the first import).

    Raises:
        ValueError: unknown backend, or Triton requested for a CPU tensor without the interpreter.
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


def on_its_device(op: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates an op: launches its kernels on the GPU of its first argument (a tensor, or tensors of one device),
    where Triton alone would use the current GPU."""

    @wraps(op)
    def launched(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        first: Any = args[0] if isinstance(args[0], Tensor) else args[0][0]  # type: ignore[index]
        # A compiled graph has set the device already.
        if torch.compiler.is_compiling() or not first.is_cuda or first.device.index == torch.cuda.current_device():
            return op(*args, **kwargs)
        with torch.cuda.device(first.device):
            return op(*args, **kwargs)

    return launched


def host_number(value: float, dtype: torch.dtype) -> Any:
    """Returns ``value`` as the argument of a kernel that computes in ``dtype``: compiled kernels get Python floats in
    fp32, so that fp64 ones have it compiled in as a constant."""
    return tl.constexpr(value) if dtype == torch.float64 else value


def dense(vector: Vector) -> Vector:
    """Returns the vector contiguous, as kernels read it: copies a column of a matrix."""
    return vector if vector is None else vector.contiguous()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of softmax statistics: fp64 for fp64 logits, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


ANY_LENGTH: dict[str, Any] = {
    "do_not_specialize": ("T", "tokens", "num_parts", "stride_g", "stride_nll", "stride_anchor_n"),
    "do_not_specialize_on_alignment": (
        "anchor_ptr",
        "arrived_ptr",
        "cross_entropy_ptr",
        "d_lse_ptr",
        "dot_other_ptr",
        "entropy_ptr",
        "expectation_ptr",
        "factor_ptr",
        "fields_ptr",
        "hard_factor_ptr",
        "hard_log_total_ptr",
        "hard_max_ptr",
        "hard_miss_ptr",
        "inverse_temperature",
        "is_top1_ptr",
        "labels_ptr",
        "log_prob_ptr",
        "log_total_ptr",
        "marked_ptr",
        "mass_ptr",
        "max_ptr",
        "mean_ptr",
        "merged_ptr",
        "miss_ptr",
        "nll_ptr",
        "row_max_ptr",
        "rstd_ptr",
        "smoothing_ptr",
        "square_other_ptr",
        "square_ptr",
        "student_log_total_ptr",
        "student_max_ptr",
        "sum_other_ptr",
        "sum_sq_prob_ptr",
        "target_ptr",
        "teacher_log_total_ptr",
        "teacher_max_ptr",
        "ticket_ptr",
        "weighted_sum_ptr",
        "z_loss_ptr",
    ),
}
"""Options of :func:`triton.jit` for kernels that are compiled once for any number of tokens. Triton would compile again
for multiples of 16, and for chunks whose per-token values are aligned differently."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp_of_difference(x, y):
    """Computes exp(x - y) in three instructions; ``tl.exp`` has nine, because it keeps results below 1e-38, which are 0
    here. The difference comes first: products with log2(e) would overflow at finfo.min, and round at large x and y.
    ``y`` is finite: -inf - -inf is NaN."""
    return tl.exp2((x - y) * _LOG2_E)


@triton.jit
def anchor_of(row_max):
    """Returns what exponentials are relative to: the maximum, or 0 where all logits are -inf, because inf - inf is
    NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def probability(z, row_max, log2_total):
    """Computes ``exp(z - row_max) / total``. The row's maximum and the logarithm of its sum stay separate, so that the
    rounding of large logits does not reach the result."""
    return tl.exp2((z - row_max) * _LOG2_E - log2_total)


@triton.jit
def log2_of(x):
    """Converts a natural logarithm to base 2."""
    return x * _LOG2_E


@triton.jit
def shrunk(shrink, total, sum_x, shift):
    """Computes ``shrink * (total + shift * sum_x)``: a sum of ``e * distance``, relative to a maximum that has moved by
    ``shift``. 0 where nothing of it is left: the shift may be infinite there."""
    return tl.where(shrink * sum_x == 0.0, 0.0, shrink * (total + shift * sum_x))


@triton.jit
def number(x, dtype: tl.constexpr):
    """Casts a value from the host to ``dtype``: torch.compile passes fp64, which would widen everything computed with
    it."""
    return tl.full((), x, dtype)


@triton.jit
def rounded_product(x, y):
    """Computes ``x * y``, rounded before any subtraction. Compilers contract a product and a difference into one
    multiply-add, which keeps the product's rounding error: the largest logit minus itself would not be 0."""
    return tl.fma(x, y, tl.zeros_like(x))


@triton.jit
def capped(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Computes ``softcap * tanh(scale * raw / softcap)`` and its derivative by ``scale * raw``.

    tanh is written with a sigmoid, which the interpreter supports too.
    """
    scaled = raw * scale
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(2.0 * scaled / softcap) - 1.0
        return softcap * tanh, 1.0 - tanh * tanh
    return scaled, tl.full(scaled.shape, 1.0, scaled.dtype)
