"""The three GEMMs of a chunk of tokens: cuBLAS, or the CPU's BLAS.

Legend: D hidden, V vocabulary, c tokens of a chunk, r tokens of one GEMM, v classes of a tile of the vocabulary.

[Note: Vocabularies that are no multiple of a vector]
Tensor cores load 16 bytes at once. cuBLAS takes 4 to 8 times as long (H100, torch 2.11) if the rows of an operand begin
elsewhere, or if a dimension along which an operand is contiguous is no multiple of 16 bytes, whatever the row stride.
So buffers of logits have rows of a multiple of :data:`ALIGNMENT` elements (:func:`logits_buffer`), and each
product over such a vocabulary is two: over the largest multiple of :data:`ALIGNMENT` classes, and over the rest, whose
product takes 0.02 to 0.04 ms. No weight is copied or padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._triton_utils import statistics_dtype

ROWS_PER_GEMM = 2048
"""Rows of one GEMM whose result has a row for each token. cuBLAS does 2048 rows at a time up to 6 % faster than 4096
(H200, D = 4096): its operands then stay in the L2 cache. The weight's gradient sums over a whole chunk."""
ALIGNMENT = 64
"""Elements; see [Note: Vocabularies that are no multiple of a vector]"""
FEW_CLASSES = 4 * ALIGNMENT
"""Classes below which a product is not split: its time is negligible, and the rest would be so large a part of the
hidden states' gradient that the rest's rounding shows."""


def row_stride(num_classes: int) -> int:
    """Returns the stride between rows of a buffer of logits, in elements."""
    return -(-num_classes // ALIGNMENT) * ALIGNMENT


def logits_buffer(like: Tensor, num_rows: int, num_classes: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocates ``[num_rows, num_classes]`` on the device of ``like``, in its dtype by default. The columns up to
    :func:`row_stride` belong to the buffer."""
    return like.new_empty((num_rows, row_stride(num_classes)), dtype=dtype)[:, :num_classes]


def logits_view(buffer: Tensor, num_rows: int, num_classes: int) -> Tensor:
    """Views the first elements of the one-dimensional ``buffer`` as a :func:`logits_buffer`."""
    stride = row_stride(num_classes)
    return buffer[: num_rows * stride].view(num_rows, stride)[:, :num_classes]


def class_slices(num_classes: int, itemsize: int) -> list[slice]:
    """Splits a product over classes; see [Note: Vocabularies that are no multiple of a vector]."""
    if num_classes * itemsize % 16 == 0 or num_classes < FEW_CLASSES:
        return [slice(0, num_classes)]
    most = num_classes // ALIGNMENT * ALIGNMENT
    return [slice(0, most), slice(most, num_classes)]


def write_product(left: Tensor, right: Tensor, out: Tensor, *, adds: bool = False) -> Tensor:
    """Writes ``left @ right``, or with ``adds`` ``out + left @ right``, into ``out`` and returns it. A wider ``out``
    gets the products' fp32 sums unrounded."""
    if not left.is_cuda and left.itemsize == 2 and left.stride(1) == 1:
        # On processors with AMX oneDNN reads beyond the end of a row: NaN in a buffer's unused columns would spread.
        left = left.contiguous()
    if out.dtype == left.dtype:
        return torch.addmm(out, left, right, out=out) if adds else torch.mm(left, right, out=out)
    if out.is_cuda:
        if adds:
            return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    # The CPU has no GEMM with a wider output: the operands are widened instead.
    return torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=1 if adds else 0, out=out)


def write_logits(hidden_cD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, out_cV: Tensor) -> Tensor:
    """Writes ``hidden @ weight.T + bias`` into ``out_cV`` and returns it; it may be fp32 for 16-bit operands."""
    for hidden_rD, out_rV in zip(hidden_cD.split(ROWS_PER_GEMM), out_cV.split(ROWS_PER_GEMM), strict=True):
        for classes in class_slices(len(weight_VD), out_cV.element_size()):
            weight_vD, out_rv = weight_VD[classes], out_rV[:, classes]
            if bias_V is None:
                write_product(hidden_rD, weight_vD.T, out_rv)
            elif out_rv.dtype == hidden_rD.dtype:
                torch.addmm(bias_V[classes], hidden_rD, weight_vD.T, out=out_rv)
            else:
                write_product(hidden_rD, weight_vD.T, out_rv).add_(bias_V[classes])
    return out_cV


def write_hidden_gradient(d_logits_cV: Tensor, weight_VD: Tensor, out_cD: Tensor) -> Tensor:
    """Writes ``d_logits @ weight`` into ``out_cD`` and returns it."""
    for d_logits_rV, out_rD in zip(d_logits_cV.split(ROWS_PER_GEMM), out_cD.split(ROWS_PER_GEMM), strict=True):
        _add_over_classes(d_logits_rV, weight_VD, out_rD, adds=False)
    return out_cD


def _add_over_classes(d_logits_rv: Tensor, weight_vD: Tensor, out_rD: Tensor, *, adds: bool) -> None:
    """Writes ``d_logits @ weight`` into ``out_rD``, or with ``adds`` adds it. The few classes of the rest come first,
    so that the smaller part is the one rounded in between."""
    for classes in reversed(class_slices(len(weight_vD), d_logits_rv.element_size())):
        write_product(d_logits_rv[:, classes], weight_vD[classes], out_rD, adds=adds)
        adds = True


class HiddenGradient:
    """``sum over tiles of the vocabulary of d_logits @ weight`` into ``out_cD``: summed in the dtype of the statistics
    where there are several tiles."""

    def __init__(self, out_cD: Tensor, num_tiles: int) -> None:
        self._out_cD, self._sum_cD = out_cD, out_cD
        if num_tiles > 1:
            self._sum_cD = out_cD.new_empty(out_cD.shape, dtype=statistics_dtype(out_cD.dtype))

    def add(self, d_logits_cv: Tensor, weight_vD: Tensor, tile: int) -> None:
        """Adds the product of a tile, in ascending order of the tiles."""
        _add_over_classes(d_logits_cv, weight_vD, self._sum_cD, adds=tile > 0)

    def finish(self) -> None:
        """Rounds the sum into ``out_cD``."""
        if self._sum_cD is not self._out_cD:
            self._out_cD.copy_(self._sum_cD)


class WeightSum:
    """Gradient of one weight ``[V, D]``, summed over several losses in the dtype of the statistics."""

    def __init__(self) -> None:
        self.total_VD: Tensor | None = None
        """None before the first loss"""

    def take(self) -> Tensor | None:
        """Returns the sum, which is empty afterwards."""
        total_VD, self.total_VD = self.total_VD, None
        return total_VD


class WeightGradient:
    """``sum over chunks of d_logits.T @ hidden``: added in the weight's dtype for up to ``direct_chunks`` chunks,
    otherwise in the dtype of the statistics, because a sum of many 16-bit roundings drifts. Always so for fp16, which
    could overflow, and for a sum over several losses, to which it is added."""

    def __init__(
        self, weight_VD: Tensor, num_chunks: int, *, direct_chunks: int = 2, over_losses: WeightSum | None = None
    ) -> None:
        self._weight_dtype = weight_VD.dtype
        self._is_shared = over_losses is not None
        self._adds = over_losses is not None and over_losses.total_VD is not None
        is_direct = num_chunks <= direct_chunks and weight_VD.dtype != torch.float16 and not self._is_shared
        dtype = weight_VD.dtype if is_direct else statistics_dtype(weight_VD.dtype)
        if over_losses is not None and over_losses.total_VD is not None:
            self._sum_VD = over_losses.total_VD
            return
        self._sum_VD = torch.empty(weight_VD.shape, dtype=dtype, device=weight_VD.device)
        if num_chunks == 0:
            self._sum_VD.zero_()
        if over_losses is not None:
            over_losses.total_VD = self._sum_VD

    def add(self, d_logits_cv: Tensor, hidden_cD: Tensor, chunk: int, first_class: int = 0) -> None:
        """Adds the product of a chunk of at least one token, in ascending order of the chunks, to the rows from
        ``first_class`` on."""
        out_vD = self._sum_VD[first_class : first_class + d_logits_cv.shape[1]]
        for classes in class_slices(len(out_vD), d_logits_cv.element_size()):
            write_product(d_logits_cv[:, classes].T, hidden_cD, out_vD[classes], adds=self._adds or chunk > 0)

    def total(self) -> Tensor | None:
        """Returns the sum in the weight's dtype, so that the wider sum is freed before the backward; an fp16 sum stays
        fp32, because it has to be divided by the number of tokens first. None for a sum over several losses."""
        if self._is_shared:
            return None
        return self._sum_VD if self._weight_dtype == torch.float16 else self._sum_VD.to(self._weight_dtype)
