"""RMSNorm and LayerNorm over widths, forward and backward, beside other libraries."""

from __future__ import annotations

import torch

from .harness import Row, arguments, save, show
from .memory_bound import Problem, forget_upstream, run

WIDTHS = (576, 768, 896, 1024, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 16384)
"""hidden sizes of released models"""
NUMBERS = 2**25
"""elements of a tensor, about: 64 MiB in bf16"""
NAMES = ("liger_dist", "torch", "Liger")


def rows_of(kernel: str, width: int, rounds: int) -> list[Row]:
    """Bytes that have to be moved, each once, by the time of a call: TB/s, and that of a copy of as many numbers."""
    num_rows = NUMBERS // width
    problem = Problem(kernel, (num_rows, width), num_rows * width, 4, 6)
    rows = run(problem, rounds, NAMES)
    for row in rows:
        for which in ("forward", "backward"):
            if f"{which} %" in row.figures:
                row.figures[f"{which} TB/s"] = row.figures[f"{which} %"] / 100 * row.figures["copy TB/s"]
    return rows


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    for kernel in ("RMSNorm", "LayerNorm"):
        for width in WIDTHS:
            if given.only not in f"{kernel} {width}":
                continue
            rows = rows_of(kernel, width, given.rounds)
            print(rows[0].problem)
            show(rows, ("forward TB/s", "backward TB/s"))
            save("norm_widths", rows, given.results)
            forget_upstream()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
