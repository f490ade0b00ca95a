"""Compiles the kernels as the library launches them, for GPUs that need not be there, and reads what ``ptxas`` says.

``python registers.py sm_90 [pattern]`` prints one JSON line for each distinct launch: its name with the options of the
call, bytes of spills, registers and the number of loads of two bytes. Not in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import liger_dist_kernels as kernels
from liger_dist_kernels import (
    GradientCoefficients,
    LossOptions,
    NormOptions,
    RowOptions,
    TokenGradients,
    TokenOutputs,
    TokenTargets,
)
from liger_dist_kernels.products import logits_buffer

SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}
"""bytes of a program at most"""
TOKENS = 4096
Launch = tuple[Any, dict[str, Any], dict[str, Any]]


def main(arch: str, pattern: str = "") -> None:
    capability = int(arch.removeprefix("sm_"))
    launches: dict[str, tuple[str, Launch]] = {}
    with recorded_launches(SHARED_MEMORY[capability]) as recorded:
        for name, call in calls():
            if re.search(pattern, name):
                recorded.clear()
                call()
                for kernel, given, options in recorded:
                    source = described(kernel, given, options)
                    launches.setdefault(source, (f"{kernel.__name__}: {name}", (kernel, given, options)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(lambda launch: json.dumps(usage(*launch, capability)), launches.values()):
            print(line, flush=True)


@contextmanager
def recorded_launches(shared_memory: int = SHARED_MEMORY[90]) -> Iterator[list[Launch]]:
    """Records the launches of kernels instead of running them, as on a GPU of this many bytes of shared memory."""
    recorded: list[Launch] = []
    properties = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block_optin=shared_memory,
        shared_memory_per_block=49152,
    )

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        options = {name: value for name, value in kwargs.items() if name not in names}
        given = dict(zip(names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in names}
        recorded.append((kernel, given, options))

    with (
        mock.patch.object(triton.runtime.JITFunction, "run", record),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "current_device", return_value=None),
        mock.patch.object(Tensor, "is_cuda", new=True),
    ):
        yield recorded


def arguments(kernel: Any, given: dict[str, Any]) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Signature, constants and attributes, as Triton specialises a launch."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        value = value.value if isinstance(value, triton.language.constexpr) else value
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        is_constant = parameter.is_constexpr or value is None or is_one
        if is_constant or isinstance(given[parameter.name], triton.language.constexpr):
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + triton.runtime.jit.type_canonicalisation_dict[str(value.dtype)[6:]]
            is_aligned = value.storage_offset() * value.element_size() % 16 == 0
            if is_aligned and not parameter.do_not_specialize_on_alignment:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif type(value) is int:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def described(kernel: Any, given: dict[str, Any], options: dict[str, Any]) -> str:
    return repr((kernel.__name__, *arguments(kernel, given), options))


def usage(name: str, launch: Launch, capability: int) -> dict[str, Any]:
    kernel, given, options = launch
    signature, constants, attributes = arguments(kernel, given)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptxas = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as into:
        path = Path(into) / "kernel.ptx"
        path.write_text(ptx)
        gpu = f"sm_{capability}" + ("a" if capability >= 90 else "")
        command = [ptxas, "-v", f"--gpu-name={gpu}", path, "-o", f"{path}.bin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    frame, stores, loads = map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said)[:3])
    return {
        "launch": name,
        "spilled": max(frame, stores, loads),
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "loads_of_two_bytes": len(re.findall(r"ld\.global[^;]*\.b16", ptx)),
        "shared": compiled.metadata.shared,
    }


def vector(dtype: torch.dtype = torch.float32, size: int = TOKENS) -> Tensor:
    """Without memory."""
    return torch.empty(size, dtype=dtype, device="meta")


VOCABULARIES = (128256, 128257, 128264, 32001)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z-loss": {"z_loss": 1e-4},
    "temperature": {"temperature": 0.7},
    "soft-cap": {"softcap": 30.0},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, soft-cap": {"label_smoothing": 0.1, "softcap": 30.0},
}
OUTPUTS: dict[str, dict[str, bool]] = {
    "": {},
    "entropy": {"entropy": True},
    "squares": {"sum_sq_prob": True},
    "entropy, squares": {"entropy": True, "sum_sq_prob": True},
    "all": {"entropy": True, "sum_sq_prob": True, "mean_logit": True},
}


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield from cross_entropies()
    yield from divergences()
    yield from norms()
    yield from gated_norms()
    yield from convolutions()
    yield from experts()
    yield from four_bits()


def cross_entropies() -> Iterator[tuple[str, Callable[[], Any]]]:
    labels = vector(torch.int64)
    gradients = TokenGradients(vector(), vector())
    choices = itertools.product(DTYPES, VOCABULARIES, OPTIONS, OUTPUTS, (False, True), (False, True), (False, True))
    for dtype, V, options_name, outputs_name, is_weighted, per_token, is_padded in choices:
        if not is_padded and V % 16 == 0:
            continue
        options, outputs = LossOptions(**OPTIONS[options_name]), TokenOutputs(**OUTPUTS[outputs_name])
        like = vector(dtype, 1)
        logits = logits_buffer(like, TOKENS, V) if is_padded else like.new_empty(TOKENS, V)
        tile = logits_buffer(like, TOKENS, V % 16384) if is_padded else like.new_empty(TOKENS, V % 16384)
        targets = TokenTargets(labels, vector() if per_token else None)
        rows = RowOptions(
            vocab_size=V,
            options=options,
            outputs=outputs,
            class_weight_V=vector(size=V) if is_weighted else None,
            is_padded=is_padded,
        )
        names = [str(dtype)[6:], str(V), options_name, outputs_name, "class weight" * is_weighted]
        name = ", ".join(filter(None, [*names, "temperatures" * per_token, "padded" * is_padded]))

        def in_one(logits: Tensor = logits, targets: TokenTargets = targets, rows: RowOptions = rows) -> None:
            kernels.cross_entropy_fwd_bwd(logits, targets, gradients, rows, out_TV=logits)

        def tiles(tile: Tensor = tile, targets: TokenTargets = targets, rows: RowOptions = rows) -> None:
            kernels.cross_entropy_fwd(tile, targets, rows)
            outputs, smooths = rows.outputs, rows.options.label_smoothing > 0
            coefficients = GradientCoefficients(
                max_T=vector(),
                log_total_T=vector(),
                miss_T=vector(),
                nll_T=vector(),
                mass_T=vector(),
                entropy_T=vector() if outputs.entropy else None,
                square_T=vector() if outputs.sum_sq_prob else None,
                smoothing_T=vector() if smooths else None,
            )
            kernels.cross_entropy_bwd(tile, targets, coefficients, rows, out_TV=tile)

        yield f"one launch, {name}", in_one
        yield f"tile, {name}", tiles


def divergences() -> Iterator[tuple[str, Callable[[], Any]]]:
    from liger_dist_kernels.divergence import DIVERGENCES, DivergenceOptions, divergence_bwd
    from liger_dist_kernels.divergence_terms import divergence_terms

    labels = vector(torch.int64)
    for dtype, V, kind, tau in itertools.product(DTYPES, VOCABULARIES, DIVERGENCES, (1.0, 2.0)):
        transform = LossOptions(temperature=tau)
        options = DivergenceOptions(divergence=kind, student=transform, teacher=transform)

        def call(dtype: torch.dtype = dtype, V: int = V, options: Any = options) -> None:
            student, teacher = (logits_buffer(vector(dtype, 1), TOKENS, V) for _ in range(2))
            terms = divergence_terms(student, teacher, options=options, is_padded=True)
            divergence_bwd(student, teacher, labels, terms, vector(), options=options, out_TV=student, is_padded=True)

        yield f"divergence, {kind}, {str(dtype)[6:]}, {V}, temperature {tau}", call


WIDTHS = (576, 896, 1024, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)


def norms() -> Iterator[tuple[str, Callable[[], Any]]]:
    for dtype, D, subtracts, has_bias in itertools.product(DTYPES, WIDTHS, (False, True), (False, True)):
        if has_bias and not subtracts:
            continue

        def call(
            dtype: torch.dtype = dtype, D: int = D, subtracts: bool = subtracts, has_bias: bool = has_bias
        ) -> None:
            x, weight = vector(dtype, 1).new_empty(TOKENS, D), vector(dtype, D)
            options = NormOptions(eps=1e-6, subtract_mean=subtracts)
            output = kernels.norm_fwd(x, weight, vector(dtype, D) if has_bias else None, options=options)
            kernels.norm_bwd(
                x,
                x,
                output.mean_T,
                output.rstd_T,
                weight,
                needs_weight=True,
                needs_bias=has_bias,
                options=options,
            )

        yield f"{'LayerNorm' if subtracts else 'RMSNorm'}, {str(dtype)[6:]}, {D}, {'bias' * has_bias}", call


def gated_norms() -> Iterator[tuple[str, Callable[[], Any]]]:
    sizes = ((128, 1), (256, 1), (1024, 1), (4096, 1), (5376, 1), (8192, 1), (8192, 8))
    for dtype, (D, groups), gates_first in itertools.product(DTYPES, sizes, (False, True)):

        def call(dtype: torch.dtype = dtype, D: int = D, groups: int = groups, gates_first: bool = gates_first) -> None:
            x, weight = vector(dtype, 1).new_empty(TOKENS, D), vector(dtype, D)
            options = kernels.GatedNormOptions(
                eps=1e-6, groups=groups, gates_first=gates_first, round_before_weight=True
            )
            rstd = kernels.gated_norm_fwd(x, x, weight, options=options).rstd_TG
            kernels.gated_norm_bwd(x, x, x, rstd, weight, needs_weight=True, options=options)

        order = "before" if gates_first else "after"
        yield f"gated norm, {str(dtype)[6:]}, {D}, {groups} groups, {order}", call


def convolutions() -> Iterator[tuple[str, Callable[[], Any]]]:
    for dtype, taps, is_packed, has_bias in itertools.product(DTYPES, (3, 4), (False, True), (False, True)):

        def call(dtype: torch.dtype = dtype, taps: int = taps, is_packed: bool = is_packed, b: bool = has_bias) -> None:
            x, weight = (
                vector(dtype, 1).new_empty(1, TOKENS, 8192).transpose(1, 2),
                vector(dtype, 1).new_empty(8192, taps),
            )
            numbers = vector(torch.int32, TOKENS)[None] if is_packed else None
            given = (x, weight, vector(dtype, 8192) if b else None, numbers)
            kernels.causal_convolution_fwd(*given, activation="silu")
            kernels.causal_convolution_bwd(x, *given, needs_weight=True, activation="silu")

        yield f"convolution, {str(dtype)[6:]}, {taps} taps{', packed' * is_packed}{', bias' * has_bias}", call


def four_bits() -> Iterator[tuple[str, Callable[[], Any]]]:
    for dtype, block, double in itertools.product(DTYPES, (64, 4096), (False, True)):

        def call(dtype: torch.dtype = dtype, block: int = block, double: bool = double) -> None:
            shape, blocks = (14336, 4096), 14336 * 4096 // block
            nested = kernels.QuantizedScales(vector(size=256), vector(size=blocks // 256), 256, vector(size=1))
            kernels.dequantize_4bit(
                vector(torch.uint8, 14336 * 2048),
                vector(size=16),
                vector(torch.uint8 if double else torch.float32, blocks),
                block,
                shape=shape,
                dtype=dtype,
                quantized=nested if double else None,
            )

        yield f"4 bits, {str(dtype)[6:]}, blocks of {block}{', double' * double}", call


GATES = {
    "SwiGLU": kernels.GateOptions(activation="silu"),
    "GeGLU": kernels.GateOptions(activation="gelu_tanh"),
    "squared ReLU": kernels.GateOptions(activation="relu_squared", is_gated=False),
    "limited": kernels.GateOptions(activation="silu", limit=10.0),
    "limited after": kernels.GateOptions(activation="silu", limit=7.0, limits_activation=True),
    "gpt-oss": kernels.GateOptions(activation="silu", is_interleaved=True, limit=7.0, slope=1.702, offset=1.0),
}


def experts() -> Iterator[tuple[str, Callable[[], Any]]]:
    choices = itertools.product(DTYPES, GATES, (768, 1408, 2880, 14336), (False, True), (False, True))
    for dtype, gate, F, has_bias, has_low in choices:

        def call(
            dtype: torch.dtype = dtype, gate: str = gate, F: int = F, has_bias: bool = has_bias, low: bool = has_low
        ) -> None:
            T, K, E, D, H = TOKENS, 8, 128, 2880, F * (1 + GATES[gate].is_gated)
            like, index = vector(dtype, 1), vector(torch.int64, T * K).view(T, K)
            rows = vector(torch.int32, T * K)
            routing = kernels.Routing(rows, rows.view(T, K), vector(torch.int32, E), index.view(-1))
            x_TD, h_SH, a_SF, y_SD, w_TK = (
                like.new_empty(shape) for shape in ((T, D), (T * K, H), (T * K, F), (T * K, D), (T, K))
            )
            bias = kernels.WeightedBias(like.new_empty(E, D), index, w_TK) if has_bias else None
            given: dict[str, Any] = {
                "options": GATES[gate], "bias_EH": like.new_empty(E, H) if has_bias else None
            }  # fmt: skip
            kernels.gather_rows(x_TD, routing)
            if low:
                low_Sr = like.new_empty(T * K, 16)
                given["low"] = kernels.LowRankFactors(low_Sr, like.new_empty(E, 16, H), 0.5)
                kernels.outer_products_with_tokens(low_Sr, x_TD, routing, scale=0.5)
            of_a = kernels.LowRankFactors(low_Sr, like.new_empty(E, 16, F), 0.5) if low else None
            kernels.gate_fwd(h_SH, w_TK, routing, **given)
            kernels.gate_bwd(a_SF, h_SH, w_TK, routing, needs_y=True, d_low=of_a, **given)
            kernels.combine_rows(y_SD, routing, low=kernels.LowRank(y_SD, 0.5) if low else None, bias=bias)
            if bias is not None:
                kernels.sum_of_experts(y_SD, routing, weight_TK=w_TK)
                kernels.sum_of_experts(h_SH, routing)
                kernels.product_with_bias(x_TD, bias, routing)

        yield f"experts, {str(dtype)[6:]}, {gate}, {F}{', bias' * has_bias}{', LoRA' * has_low}", call


if __name__ == "__main__":
    main(*sys.argv[1:])
