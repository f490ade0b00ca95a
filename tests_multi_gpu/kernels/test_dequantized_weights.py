"""Dequantised weights of 4 bits: the kernel against bitsandbytes' levels and scales, in every format, dtype and size of
block, and where the last block is not full."""

from __future__ import annotations

import itertools
from typing import Any

import on_device
import pytest
import torch
from loss_inputs import BACKENDS, DEVICE
from torch import Tensor

from liger_dist.model.quantized import dequantized
from liger_dist_kernels import QuantizedScales, dequantize_4bit

functional = pytest.importorskip("bitsandbytes.functional")

SHAPES = [(64, 128), (512, 128), (3, 20, 32), (7, 8), (33, 104), (96, 64)]
BLOCKS = [32, 64, 4096]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def quantised(shape: tuple[int, ...], dtype: torch.dtype, *, kind: str, double: bool, block: int) -> tuple[Tensor, Any]:
    weight = on_device.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=double)
    return packed, state


def weights_of(packed: Tensor, state: Any, backend: Any) -> Tensor:
    nested = state.state2
    scales = None
    if nested is not None:
        scales = QuantizedScales(nested.code, nested.absmax, nested.blocksize, state.offset)
    return dequantize_4bit(
        packed,
        state.code,
        state.absmax,
        state.blocksize,
        shape=state.shape,
        dtype=state.dtype,
        quantized=scales,
        backend=backend,
    )


def truth(packed: Tensor, state: Any) -> Tensor:
    """In fp64, weight by weight; bitsandbytes itself reads wrong scales on CPUs where a block ends within a row."""
    scales = state.absmax.double()
    if state.nested:
        of_scales = state.state2.absmax.double().repeat_interleave(state.state2.blocksize)[: len(state.absmax)]
        scales = state.state2.code.double()[state.absmax.long()] * of_scales + state.offset.double()
    codes = [code for byte in packed.flatten().tolist() for code in divmod(byte, 16)]
    number = state.shape.numel()
    level = state.code.double()[torch.tensor(codes, device=packed.device)[:number]]
    return (level * scales.repeat_interleave(state.blocksize)[:number]).view(state.shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_are_those_of_the_levels_and_scales(kind: str, double: bool, backend: Any) -> None:
    for shape, dtype, block in itertools.product(SHAPES, DTYPES, BLOCKS):
        packed, state = quantised(shape, dtype, kind=kind, double=double, block=block)
        found, want = weights_of(packed, state, backend), truth(packed, state)
        assert (found.dtype, found.shape) == (dtype, torch.Size(shape))
        # Two products and a sum in fp32, rounded to the dtype; Triton's interpreter cuts bf16 off instead.
        is_cut = dtype == torch.bfloat16 and backend == "triton" and DEVICE == "cpu"
        rtol = 3 * 2**-24 + torch.finfo(dtype).eps / (1 if is_cut else 2)
        torch.testing.assert_close(found.double(), want, rtol=rtol, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_are_those_of_bitsandbytes_bit_by_bit(kind: str, double: bool) -> None:
    storages = (torch.uint8, torch.bfloat16, torch.float32)
    sizes = ((256, 512), (8, 96, 160), (100, 36), (30, 34), (1000, 4096))
    for shape, dtype, block, storage in itertools.product(sizes, DTYPES, (64, 128, 4096), storages):
        weight = torch.randn(shape, device="cuda", dtype=dtype)
        packed, state = functional.quantize_4bit(
            weight, blocksize=block, quant_type=kind, compress_statistics=double, quant_storage=storage
        )
        if 2 * packed.nbytes == weight.numel():  # Not rounded up to the storage's dtype.
            assert torch.equal(dequantized(packed, state, dtype), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_weights(backend: Any) -> None:
    empty, levels = on_device.zeros(0, dtype=torch.uint8), on_device.zeros(16)
    found = dequantize_4bit(empty, levels, on_device.zeros(0), 64, shape=(0, 8), dtype=torch.float32, backend=backend)
    assert found.shape == (0, 8)


def test_what_the_kernel_does_not_read_is_refused() -> None:
    packed, state = quantised((64, 64), torch.float32, kind="nf4", double=False, block=64)
    given = {"shape": (64, 64), "dtype": torch.float32}
    wrong: list[tuple[Tensor, int, str]] = [
        (packed[:-1], 64, "packed"),
        (packed.view(64, 32).T, 64, "packed"),
        (packed.repeat(2, 1)[1:2049], 64, "packed"),
        (packed.float(), 64, "packed"),
        (packed, 4, "block_size is 4"),
        (packed, 96, "block_size is 96"),
    ]
    for tensor, block, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            dequantize_4bit(tensor, state.code, state.absmax, block, **given)  # type: ignore[arg-type]
