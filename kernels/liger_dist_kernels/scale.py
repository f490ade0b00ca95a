# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Multiplication by a number that only the device knows, and that is mostly 1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import Backend, runs_triton

BLOCK = 4096


@triton.jit
def _kernel(x_ptr, scale_ptr, size, FP64: tl.constexpr, BLOCK: tl.constexpr):
    dtype = tl.float64 if FP64 else tl.float32
    scale = tl.load(scale_ptr).to(dtype)
    if scale != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < size:
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offs, mask=offs < size).to(dtype)
            tl.store(x_ptr + offs, (x * scale).to(x_ptr.dtype.element_ty), mask=offs < size)
            start += tl.num_programs(0) * BLOCK


def scale_in_place(x: Tensor, scale: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``x *= scale``, read and written only where ``scale`` is not 1. Returns ``x``.

    Args:
        x: any shape, dense, floating.
        scale: 0-d on the same device, floating; never read by the host.
    """
    if not runs_triton(x, backend):
        return x.mul_(scale)
    if x.numel() > 0:
        programs = 16 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        _kernel[(min(programs, triton.cdiv(x.numel(), BLOCK)),)](
            x, scale, x.numel(), FP64=x.dtype == torch.float64, BLOCK=BLOCK, num_warps=8
        )
    return x
