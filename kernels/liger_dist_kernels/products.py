"""The three GEMMs of a chunk of tokens: cuBLAS, or the CPU's BLAS.

Legend: D hidden, V vocabulary, c tokens of a chunk, r tokens of one GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._triton_utils import statistics_dtype

ROWS_PER_GEMM = 2048
"""Rows of one GEMM whose result has a row for each token. cuBLAS does 2048 rows at a time up to 6 % faster than 4096
(H200, D = 4096): its operands then stay in the L2 cache. The weight's gradient sums over a whole chunk."""


def write_logits(hidden_cD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, out_cV: Tensor) -> Tensor:
    """``hidden @ weight.T + bias`` into ``out_cV``, which is returned."""
    for hidden_rD, out_rV in zip(hidden_cD.split(ROWS_PER_GEMM), out_cV.split(ROWS_PER_GEMM), strict=True):
        if bias_V is None:
            torch.mm(hidden_rD, weight_VD.T, out=out_rV)
        else:
            torch.addmm(bias_V, hidden_rD, weight_VD.T, out=out_rV)
    return out_cV


def write_hidden_gradient(d_logits_cV: Tensor, weight_VD: Tensor, out_cD: Tensor) -> Tensor:
    """``d_logits @ weight`` into ``out_cD``, which is returned."""
    for d_logits_rV, out_rD in zip(d_logits_cV.split(ROWS_PER_GEMM), out_cD.split(ROWS_PER_GEMM), strict=True):
        torch.mm(d_logits_rV, weight_VD, out=out_rD)
    return out_cD


class WeightGradient:
    """``sum over chunks of d_logits.T @ hidden``: added in the weight's own dtype for one or two chunks, otherwise in
    the dtype of the statistics, because a sum of many 16-bit roundings drifts. Always so for fp16, which could
    overflow. A caller's own sum is added to in its dtype."""

    def __init__(self, weight_VD: Tensor, num_chunks: int, sum_VD: Tensor | None) -> None:
        self._is_first, self._is_own, self._weight_dtype = sum_VD is None, sum_VD is None, weight_VD.dtype
        if sum_VD is None:
            is_direct = num_chunks <= 2 and weight_VD.dtype != torch.float16
            dtype = weight_VD.dtype if is_direct else statistics_dtype(weight_VD.dtype)
            sum_VD = torch.empty(weight_VD.shape, dtype=dtype, device=weight_VD.device)
            if num_chunks == 0:
                sum_VD.zero_()
        self._sum_VD = sum_VD

    def add(self, d_logits_cV: Tensor, hidden_cD: Tensor) -> None:
        d_logits_Vc, out = d_logits_cV.T, self._sum_VD
        if out.dtype != hidden_cD.dtype and out.is_cuda:
            if self._is_first:
                torch.mm(d_logits_Vc, hidden_cD, out_dtype=out.dtype, out=out)
            else:
                torch.addmm(out, d_logits_Vc, hidden_cD, out_dtype=out.dtype, out=out)
        else:
            # The CPU has no GEMM with a wider output: the chunk's operands are widened instead.
            beta = 0 if self._is_first else 1
            torch.addmm(out, d_logits_Vc.to(out.dtype), hidden_cD.to(out.dtype), beta=beta, out=out)
        self._is_first = False

    def total(self) -> Tensor:
        """In the weight's dtype, so that the wider sum is gone before the backward; an fp16 one has to be divided by
        the number of tokens first."""
        if self._is_own and self._weight_dtype != torch.float16:
            return self._sum_VD.to(self._weight_dtype)
        return self._sum_VD
