"""Kernels that move bytes: norms, gated activations, rotary embedding, cross entropy on given logits.

Time is that of the device: calls are captured in a CUDA graph, each on separate inputs, so that none finds its data
in the L2 cache. A backward is what a forward and backward together take longer than the forward. Percentages are of
the bandwidth of a large copy in the same rounds; the bytes are those that have to be moved, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import layers
from .harness import Candidate, Row, arguments, captured, host_us, measure, save, show

NORM_SHAPES = ((8192, 2048), (32768, 2048), (8192, 4096), (16384, 4096), (8192, 8192), (4096, 16384), (8192, 5120))
GATED_SHAPES = ((8192, 8192), (8192, 14336))
ROTARY_SHAPES = ((1, 8192, 32, 8, 128), (4, 4096, 32, 8, 64))
CACHE_BYTES = 400e6
"""inputs of this many bytes in turn leave nothing of themselves in the cache"""


@dataclass(frozen=True)
class Problem:
    """One kernel at one size."""

    kernel: str
    shape: tuple[int, ...]
    numbers: int
    """elements of the tensor that the bytes are counted by"""
    forward_bytes: int
    """for each of them"""
    backward_bytes: int

    @property
    def name(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.shape))}"


def problems() -> list[Problem]:
    """bf16: two bytes for each number read or written."""
    found = []
    for shape in NORM_SHAPES:
        size = shape[0] * shape[1]
        found += [Problem("RMSNorm", shape, size, 4, 6), Problem("add + RMSNorm", shape, size, 8, 8)]
        found.append(Problem("LayerNorm", shape, size, 4, 6))
    for shape in GATED_SHAPES:
        found += [Problem(name, shape, shape[0] * shape[1], 6, 10) for name in ("SwiGLU", "GeGLU")]
    for batch, tokens, heads_q, heads_k, width in ROTARY_SHAPES:
        size = batch * tokens * (heads_q + heads_k) * width
        found.append(Problem("RoPE", (batch, tokens, heads_q, heads_k, width), size, 4, 4))
    return found


def run(problem: Problem, rounds: int, names: Sequence[str] = ()) -> list[Row]:
    """Forward and backward rows of every implementation."""
    sets = max(3, int(CACHE_BYTES / (problem.numbers * problem.forward_bytes)))
    # Some implementations write over what they are given, so each has its own.
    functions = [each for each in layers.implementations(problem.kernel) if not names or each[0] in names]
    own = {name: [layers.inputs(problem.kernel, problem.shape, seed) for seed in range(sets)] for name, _ in functions}
    inputs = next(iter(own.values()))
    copied = torch.randn(2**28, device="cuda")
    target = torch.empty_like(copied)
    same = [torch.empty_like(x[0]) for x in inputs]
    candidates = [
        Candidate("copy", lambda: target.copy_(copied)),
        Candidate("copy of this size", captured(lambda i: same[i].copy_(inputs[i][0]), sets)),
    ]
    hosts: dict[str, float] = {}
    for name, function in functions:

        def forward(i: int, function: layers.Layer = function, name: str = name) -> object:
            with torch.no_grad():
                return function(*own[name][i])

        def both(i: int, function: layers.Layer = function, name: str = name) -> object:
            leaves = [x for x in own[name][i] if x.requires_grad]
            result = function(*own[name][i])
            outputs = [result] if isinstance(result, Tensor) else list(result)
            return torch.autograd.grad(outputs, leaves, [upstream(o, i, j) for j, o in enumerate(outputs)])

        try:
            candidates += [Candidate(name, captured(forward, sets)), Candidate(f"{name} both", captured(both, sets))]
            hosts[name] = host_us(lambda forward=forward: forward(0))  # type: ignore[misc]
        except Exception as error:
            print(f"{problem.name}: {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    rows = {row.name: row for row in measure(problem.name, candidates, rounds=rounds)}
    bandwidth = 2 * copied.numel() * 4 / rows["copy"].median_ms
    found = []
    small = rows["copy of this size"]
    for row in (small, *(rows[name] for name in hosts)):
        both_row = rows.get(f"{row.name} both")
        for each in (row, both_row):
            if each is not None:
                each.median_ms, each.p20_ms, each.p80_ms = (
                    t / sets for t in (each.median_ms, each.p20_ms, each.p80_ms)
                )
        counted = 4 * same[0].numel() if row is small else problem.forward_bytes * problem.numbers
        row.figures["forward %"] = 100 * counted / row.median_ms / bandwidth
        if both_row is not None:
            backward_ms = both_row.median_ms - row.median_ms
            row.figures["backward ms"] = backward_ms
            row.figures["backward %"] = 100 * problem.backward_bytes * problem.numbers / backward_ms / bandwidth
            row.figures["host us"] = hosts[row.name]
        row.figures["copy TB/s"] = bandwidth / 1e9
        found.append(row)
    return found


_UPSTREAM: dict[tuple[torch.Size, int, int], Tensor] = {}


def upstream(output: Tensor, index: int, place: int) -> Tensor:
    """The same random gradient for every implementation."""
    key = (output.shape, index, place)
    if key not in _UPSTREAM:
        _UPSTREAM[key] = torch.randn(output.shape, device=output.device, dtype=output.dtype)
    return _UPSTREAM[key]


def forget_upstream() -> None:
    """Frees the gradients of one problem."""
    _UPSTREAM.clear()


def run_cross_entropy(rounds: int, T: int = 8192, V: int = 128256) -> list[Row]:
    """Loss and gradient on given bf16 logits, through autograd; 4 bytes a logit have to be moved."""
    labels = torch.randint(0, V, (T,), device="cuda")
    copied = torch.randn(2**28, device="cuda")
    target = torch.empty_like(copied)

    def timed(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        # Its own logits, because some implementations write over them.
        leaf = torch.randn(T, V, device="cuda").bfloat16().requires_grad_()

        def call() -> None:
            # Not .backward(): what shares the memory of the logits would be copied into .grad.
            torch.autograd.grad(function(leaf, labels), leaf)

        return call

    candidates = [Candidate("copy", lambda: target.copy_(copied))]
    candidates += [Candidate(name, timed(function)) for name, function in layers.cross_entropies()]
    rows = measure(f"cross_entropy {T}x{V}", candidates, rounds=rounds)
    bandwidth = 2 * copied.numel() * 4 / rows[0].median_ms
    for row in rows[1:]:
        if not row.failure:
            row.figures |= {"of 4 bytes %": 100 * 4 * T * V / row.median_ms / bandwidth, "extra MiB": row.extra_mib}
    return rows[1:]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--names", default="", help="implementations, comma-separated; all of them by default")
    given = parser.parse_args()
    names = tuple(filter(None, given.names.split(",")))
    columns: Sequence[str] = ("forward %", "backward ms", "backward %", "host us", "of 4 bytes %", "extra MiB")
    for problem in problems():
        if given.only in problem.name:
            rows = run(problem, given.rounds, names)
            print(problem.name)
            show(rows, columns)
            save("memory_bound", rows, given.results)
            forget_upstream()
            torch.cuda.empty_cache()
    if given.only in "cross_entropy":
        rows = run_cross_entropy(given.rounds)
        print("cross_entropy")
        show(rows, columns)
        save("memory_bound", rows, given.results)


if __name__ == "__main__":
    main()
