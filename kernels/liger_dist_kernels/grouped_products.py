"""Products of the rows of each expert with that expert's matrix.

Legend: S rows sorted by expert, E experts, I and O features of input and output. ``ends_E`` holds the number of rows of
the experts up to each one. Rows beyond the last end belong to no expert: they are not read, and those of a result are
not initialised.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNED_BYTES = 16
"""what ``torch.nn.functional.grouped_mm`` wants rows to be a multiple of"""
_GROUPED = (torch.bfloat16, torch.float16, torch.float32)


def grouped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies the rows of each expert by its matrix; returns ``[S, O]`` in the dtype of ``x_SI``.

    Args:
        weight_EIO: in the dtype of ``x_SI``; any strides whose last or last but one is 1.
        ends_E: int32.
    """
    if _is_grouped(x_SI, x_SI.shape[1], weight_EIO.shape[2]):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    product = x_SI.new_empty(x_SI.shape[0], weight_EIO.shape[2])
    for expert, (start, end) in enumerate(_ranges(ends_E)):
        torch.mm(x_SI[start:end], weight_EIO[expert], out=product[start:end])
    return product


def grouped_outer_product(left_SI: Tensor, right_SO: Tensor, ends_E: Tensor) -> Tensor:
    """Sums the outer products of the rows of each expert; returns ``[E, I, O]``, zeros for experts without rows."""
    if _is_grouped(left_SI, left_SI.shape[1], right_SO.shape[1]):
        return F.grouped_mm(left_SI.T, right_SO, offs=ends_E)
    product = left_SI.new_empty(ends_E.shape[0], left_SI.shape[1], right_SO.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends_E)):
        torch.mm(left_SI[start:end].T, right_SO[start:end], out=product[expert])
    return product


def _is_grouped(x: Tensor, *features: int) -> bool:
    """True if torch has one kernel for all groups. Otherwise there is a product for each expert, whose number of
    rows the host reads from the device."""
    is_aligned = all(number * x.element_size() % _ALIGNED_BYTES == 0 for number in features)
    is_supported = x.is_cuda and x.dtype in _GROUPED and _is_new_enough(x.device)
    return is_supported and is_aligned and x.shape[0] > 0


@lru_cache
def _is_new_enough(device: torch.device) -> bool:
    """False for GPUs of NVIDIA before Ampere."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _ranges(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
