# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Selects Triton or the reference, launches kernels, and holds the device functions that all Triton files share, such
as probabilities and exponentials of differences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

Backend = Literal["auto", "triton", "reference"]
Vector = TypeVar("Vector", Tensor, Tensor | None)
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


_COMPILED: dict[Any, tuple[CompiledKernel, tuple[str, ...], Any]] = {}
"""compiled kernels by launch, with the names of the parameters that a launch passes by name, and the kernel, whose id
is part of the launch"""
_MOST_COMPILED = 4096
"""launches that are remembered: some differ in the number of tokens alone"""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches ``kernel[grid](*args, **options)`` on the GPU of the first argument, where Triton alone would use the
    current GPU.

    From the second launch with arguments of the same kind on, the compiled kernel is launched: what Triton does before
    takes half of a launch's host time (13 of 26 us on the host of an H100, Triton 3.6).

    Args:
        args: the kernel's first parameters, in order; a tensor first.
        options: its other parameters, and Triton's options such as ``num_warps``.
    """
    # A compiled graph has set the device already, and traces the launch.
    if torch.compiler.is_compiling():
        kernel[grid](*args, **options)
        return
    device = args[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, **options)
        return
    key = (id(kernel), device, *_kinds_of(args), *options, *_kinds_of(options.values(), are_options=True))
    known = _COMPILED.get(key)
    if known is not None:
        compiled, names, _ = known
        compiled[(*grid, 1, 1)](*args, *[options[name] for name in names])
        return
    found = kernel[grid](*args, **options)
    # Not in the interpreter; and AMD's kernels depend on the size of a tensor's memory too.
    if isinstance(found, CompiledKernel) and torch.version.hip is None:
        if len(_COMPILED) >= _MOST_COMPILED:
            _COMPILED.clear()
        _COMPILED[key] = found, tuple(kernel.arg_names[len(args) :]), kernel


def _kinds_of(arguments: Iterable[Any], *, are_options: bool = False) -> list[Any]:
    """Returns what Triton compiles a kernel for, or more: dtype and alignment of a tensor, and the value of all else.
    The value of a ``float`` counts among options alone, which may be constants."""
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            kinds.append((argument.dtype, argument.data_ptr() % 16 == 0))
        elif type(argument) is float and not are_options:
            kinds.append(float)
        else:
            kinds.append(argument)
    return kinds


def cdiv(a: int, b: int) -> int:
    """Divides and rounds up, as ``triton.cdiv``, which takes 2 us."""
    return (a + b - 1) // b


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of 2 of at least ``number``, as ``triton.next_power_of_2``."""
    return 1 << max(number - 1, 0).bit_length()


def host_number(value: float, dtype: torch.dtype) -> Any:
    """Returns ``value`` as the argument of a kernel that computes in ``dtype``: compiled kernels get Python floats in
    fp32, so that fp64 ones have it compiled in as a constant."""
    return tl.constexpr(value) if dtype == torch.float64 else value


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor ``[..., D]`` as kernels read it, and the stride of its rows: itself, a view ``[T, D]``, or a
    copy where neither has one stride of rows and a contiguous last dim."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def dense(vector: Vector) -> Vector:
    """Returns the vector contiguous, as kernels read it: copies a column of a matrix."""
    return vector if vector is None else vector.contiguous()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of softmax statistics: fp64 for fp64 logits, otherwise fp32."""
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
def add_product(total, a, b):
    """Computes ``total + a @ b`` of tiles in the dtype of ``total``; in fp64 without ``tl.dot``, with which a test
    failed on an H100 (Triton 3.6)."""
    if total.dtype == tl.float64:
        total += tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def rounded_product(x, y):
    """Computes ``x * y``, rounded before any subtraction. Compilers contract a product and a difference into one
    multiply-add, which keeps the product's rounding error: the largest logit minus itself would not be 0."""
    return tl.fma(x, y, tl.zeros_like(x))
