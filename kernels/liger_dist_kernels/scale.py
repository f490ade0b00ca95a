# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Multiplies by a scalar on the device, which the host never reads.

Legend: T rows, V columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import ANY_LENGTH, Backend, cdiv, launch, runs_triton, statistics_dtype
from .launches import SCALE


@triton.jit(**ANY_LENGTH)
def _scale_kernel(
    out_ptr, stride_out_t, x_ptr, stride_t, scale_ptr, T, V, IN_PLACE: tl.constexpr, FP64: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = tl.float64 if FP64 else tl.float32
    scale = tl.load(scale_ptr).to(dtype)
    if not IN_PLACE or scale != 1.0:
        blocks = tl.cdiv(V, BLOCK)
        block = tl.program_id(0).to(tl.int64)
        while block < T * blocks:
            row = block // blocks
            offs = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_t + offs, mask=offs < V).to(dtype)
            tl.store(out_ptr + row * stride_out_t + offs, (x * scale).to(out_ptr.dtype.element_ty), mask=offs < V)
            block += tl.num_programs(0)


def scaled(x: Tensor, scale: Tensor, *, out: Tensor, backend: Backend = "auto") -> Tensor:
    """Writes ``x * scale`` into ``out`` and returns it. The product is fp32 (fp64 for fp64 tensors) and rounded once.

    Args:
        x: floating; contiguous, or ``[T, V]`` with unit stride along V.
        scale: 0-d on the same device, floating. Never read by the host.
        out: of the shape of ``x`` and any floating dtype, in the same layouts; ``x`` itself for a product in place,
            which reads and writes nothing where ``scale`` is 1.
    """
    dtype = statistics_dtype(x.dtype)
    if not runs_triton(x, backend):
        return out.copy_(x.to(dtype) * scale.to(dtype))
    if x.numel() > 0:
        T, V = (1, x.numel()) if x.is_contiguous() and out.is_contiguous() else x.shape
        programs = 16 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        launch(
            _scale_kernel,
            (min(programs, T * cdiv(V, SCALE["BLOCK"])),),
            out,
            0 if T == 1 else out.stride(0),
            x,
            0 if T == 1 else x.stride(0),
            scale,
            T,
            V,
            IN_PLACE=out is x,
            FP64=dtype == torch.float64,
            **SCALE,
        )
    return out
