# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Weights of 4 bits with a scale for each block (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), dequantised in one
launch, also where the scales are quantised to 8 bits themselves.

Two weights are in a byte, the first one in its upper half. A weight is ``level * scale``; with double quantisation the
scale of block ``i`` is ``scale_level[code_i] * scale_of_scales[i // scales_block] + offset``. All is computed in fp32,
each product and each sum rounded alone, as bitsandbytes does, and rounded once to the dtype of the result.

Legend: N weights, S blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton_utils import Backend, cdiv, launch, rounded_product, runs_triton
from .launches import FOUR_BIT


@dataclass(frozen=True)
class QuantizedScales:
    """Scales of blocks, quantised to 8 bits in blocks of their own (double quantisation)."""

    levels_256: Tensor
    """fp32: the value of each code"""
    scale: Tensor
    """fp32, one for each block of codes"""
    block_size: int
    """codes of a block, a power of 2"""
    offset: Tensor
    """fp32 of one element, added to each scale"""


@triton.jit
def _four_bit_kernel(
    out_ptr, packed_ptr, levels_ptr, scales_ptr, scale_levels_ptr, scale_of_scales_ptr, offset_ptr, num_words,
    WORDS: tl.constexpr, WORDS_OF_BLOCK: tl.constexpr, SCALES_BLOCK: tl.constexpr,
):  # fmt: skip
    """Dequantises ``WORDS`` words of eight weights each; a thread stores eight that lie beside each other."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    mask = word < tl.minimum(num_words - first, WORDS).to(tl.int32)
    packed = tl.load(packed_ptr.to(tl.pointer_type(tl.int32)) + first + word, mask=mask, other=0)
    # Both are powers of 2.
    block = first // WORDS_OF_BLOCK + word // WORDS_OF_BLOCK
    scale = tl.load(scales_ptr + block, mask=mask, other=0)
    if SCALES_BLOCK > 0:
        level = tl.load(scale_levels_ptr + scale.to(tl.int32))
        scale = rounded_product(level, tl.load(scale_of_scales_ptr + block // SCALES_BLOCK, mask=mask, other=0.0))
        scale += tl.load(offset_ptr)
    place = tl.arange(0, 8)
    # The first weight of a byte is in its upper half.
    code = (packed[:, None] >> ((place ^ 1) * 4)[None, :]) & 15
    weight = tl.load(levels_ptr + code) * scale[:, None]
    weight = weight.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first * 8 + (word[:, None] * 8 + place[None, :]), weight, mask=mask[:, None])


def dequantize_4bit(
    packed: Tensor,
    levels_16: Tensor,
    scales_S: Tensor,
    block_size: int,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantized: QuantizedScales | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns the weights of 4 bits as a new tensor of ``shape`` and ``dtype``.

    Args:
        packed: uint8, contiguous, ``N / 2`` elements in any shape, which begin at a multiple of 4 bytes; N is a
            multiple of 8.
        levels_16: fp32: the value of each code of 4 bits, such as nf4's.
        scales_S: fp32, contiguous, ``S = ceil(N / block_size)``; uint8 with ``quantized``.
        block_size: weights of a block, a power of 2 of at least 8.
        quantized: what ``scales_S`` stand for in double quantisation.

    Raises:
        ValueError: ``packed`` or ``block_size`` is not as above.
    """
    is_packed = packed.dtype == torch.uint8 and packed.is_contiguous() and packed.data_ptr() % 4 == 0
    if not is_packed or packed.numel() % 4 or packed.numel() * 2 != math.prod(shape):
        raise ValueError(
            f"packed is {tuple(packed.shape)}, {packed.dtype}, for weights {tuple(shape)}; expected contiguous uint8, "
            "half as many as weights, a multiple of 4, at an address that is a multiple of 4."
        )
    if block_size < 8 or block_size & (block_size - 1):
        raise ValueError(f"block_size is {block_size}; expected a power of 2 of at least 8.")
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    if not runs_triton(packed, backend):
        return out.copy_(_reference(packed, levels_16, scales_S, block_size, quantized).view(shape))
    num_words = out.numel() // 8
    if num_words > 0:
        q = quantized
        launch(
            _four_bit_kernel,
            (cdiv(num_words, FOUR_BIT["WORDS"]),),
            out,
            packed,
            levels_16,
            scales_S,
            None if q is None else q.levels_256,
            None if q is None else q.scale,
            None if q is None else q.offset,
            num_words,
            WORDS_OF_BLOCK=block_size // 8,
            SCALES_BLOCK=0 if q is None else q.block_size,
            **FOUR_BIT,
        )
    return out


def _reference(
    packed: Tensor, levels_16: Tensor, scales_S: Tensor, block_size: int, quantized: QuantizedScales | None
) -> Tensor:
    scales = scales_S
    if quantized is not None:
        block = torch.arange(scales.numel(), device=scales.device) // quantized.block_size
        scales = quantized.levels_256[scales.int()] * quantized.scale[block] + quantized.offset
    pair = packed.view(-1).int()
    codes_N = torch.stack((pair >> 4, pair & 15), 1).view(-1)
    block = torch.arange(codes_N.numel(), device=packed.device) // block_size
    return levels_16[codes_N] * scales[block]
