"""Kernels are compiled as the library launches them, for GPUs that need not be there: nothing spills, logits are loaded
16 bytes at a time, and no number of tokens compiles a kernel anew."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch

import liger_dist_kernels
from liger_dist_kernels._triton_utils import ANY_LENGTH
from liger_dist_kernels.cross_entropy import tile_arguments

PROGRAMS = Path(__file__).parents[1] / "programs"
SOME = (
    r"one launch, bfloat16, 128257, soft-cap,.* padded",
    r"one launch, bfloat16, 128257, (plain|smoothing),.* padded",
    r"tile, float32, 128257, (plain|smoothing, soft-cap),.* padded",
    r"divergence, (forward_kl|jsd|total_variation), bfloat16, 128257",
    r"RMSNorm, bfloat16",
    r"gated norm, bfloat16",
    r"convolution, bfloat16, 4 taps, packed",
    r"experts, bfloat16, (SwiGLU|gpt-oss), (768|2880)",
)
"""of the launches that all are compiled by ``make test-all``"""
ALLOWED = {
    r"fwd_bwd_kernel: .*, padded|fwd_bwd_kernel: .*, 128264": 8,
    r"fwd_bwd_kernel: .*, smoothing, soft-cap, entropy, class weight": 16,
    r"Norm, \w+, (12288|16384)": 440,
    r"Norm, \w+, (576|896|3072)": 8,
    r"gated norm": 88,
    r"_gate_bwd_kernel: experts, .*LoRA": 8,
}
"""bytes of spills: two registers of the pass in one launch (sm_90: with four options together, on sm_80 four registers;
sm_100: in 70 of 3,909 launches), and norms, which are faster with theirs (H100: 2.5 TB/s at 16384 columns, 2.3 without;
gated, 4096 columns, 2.6 after spills of 0 bytes and 2.0 after 48, 2.2 in smaller programs without). Experts with LoRA
are faster in tiles of 128 features, see expert_gate.py
"""


@pytest.mark.nightly(
    pattern=[
        "RMSNorm, bfloat16",
        "experts, bfloat16, (SwiGLU|gpt-oss), (768|2880)",
        "gated norm, bfloat16",
        "convolution, bfloat16, 4 taps, packed",
        "tile, float32, 128257, (plain|smoothing, soft-cap),.* padded",
        "divergence, (forward_kl|jsd|total_variation), bfloat16, 128257",
        "one launch, bfloat16, 128257, (plain|smoothing),.* padded",
    ]
)
@pytest.mark.parametrize("pattern", SOME)
def test_some_launches_spill_nothing(pattern: str) -> None:
    check("sm_90", pattern)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_all_launches_spill_nothing(arch: str) -> None:
    check(arch, "")


@pytest.mark.nightly
@pytest.mark.skipif(torch.__version__ < "2.12", reason="fake tensors of this torch have no products with out_dtype")
def test_no_number_of_tokens_compiles_a_kernel_anew() -> None:
    """After the first three, of 1k to 131k tokens: below and above what fits the memory budget, and the largest."""
    lines = lines_of("variants.py")
    assert len({line["op"] for line in lines}) == 17
    first = {line["tokens"] for line in lines[:3]}
    for line in lines:
        assert line["launched"] > 0, line
        assert line["new"] == [] or line["tokens"] in first, line


def test_what_is_not_specialised_are_arguments_of_kernels() -> None:
    found = set()
    for module in pkgutil.iter_modules(liger_dist_kernels.__path__):
        for kernel in vars(import_module(f"liger_dist_kernels.{module.name}")).values():
            if getattr(kernel, "__name__", "").endswith("_kernel"):
                found |= set(inspect.signature(kernel.fn).parameters)
    for names in ANY_LENGTH.values():
        assert set(names) <= found
        assert len(set(names)) == len(names)


def lines_of(program: str, *arguments: str) -> list[Any]:
    """What a program of tests_multi_gpu/programs prints, each line as JSON, with kernels that compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(PROGRAMS / program), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return [json.loads(line) for line in finished.stdout.splitlines()]


def check(arch: str, pattern: str) -> None:
    launches = lines_of("registers.py", arch, pattern)
    assert launches, pattern
    for launch in launches:
        most = max((size for name, size in ALLOWED.items() if re.search(name, launch["launch"])), default=0)
        assert launch["spilled"] <= most, launch
        if "padded" in launch["launch"]:
            # The label's own.
            assert launch["loads_of_two_bytes"] <= 2, launch


@pytest.mark.smoke
def test_registers_are_limited_on_gpus_of_nvidia_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = on_device.zeros(2, 8)
    assert tile_arguments(logits, is_padded=False)["maxnreg"] == 64
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "maxnreg" not in tile_arguments(logits, is_padded=False)
