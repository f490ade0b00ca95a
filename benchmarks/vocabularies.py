"""The fused linear cross entropy at vocabularies of any size, beside other libraries at the same size."""

from __future__ import annotations

import torch

from liger_dist_kernels.products import row_stride

from . import peers
from .harness import Candidate, Row, arguments, measure, products, save, show
from .linear_cross_entropy import Inputs, bare_gemms, ours, step

TOKENS, HIDDEN = 8192, 2048
VOCABULARIES = (32000, 32001, 50257, 128256, 128257, 151936, 151665)
"""Llama 2's and with a pad token, GPT-2's, Llama 3's and with one more, Qwen's and its tokenizer's length"""
PEERS = ("Liger x8", "Liger CuTe, for Hopper", "TRL", "QuACK", "QuACK scaled-exp", "torch.compile", "torch")


def rows_of(vocab_size: int, rounds: int) -> list[Row]:
    """Times and their ratio to the three GEMMs of the next multiple of 64, in the same rounds."""
    inputs = Inputs.random(TOKENS, HIDDEN, vocab_size)
    aligned = Inputs.random(TOKENS, HIDDEN, row_stride(vocab_size))
    found = [("liger_dist", ours(1024), "fp32 sum")]
    found += [peer for peer in peers.linear_cross_entropies() if peer[0] in PEERS]
    candidates = [Candidate(f"three GEMMs, {row_stride(vocab_size)} classes", bare_gemms(aligned))]
    candidates += [Candidate(name, step(inputs, loss), kind) for name, loss, kind in found]
    rows = measure(str(vocab_size), candidates, rounds=rounds, before=products())
    for row in rows:
        if not row.failure:
            row.figures = {"ratio": row.median_ms / rows[0].median_ms, "extra MiB": row.extra_mib}
    return rows


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    for vocab_size in VOCABULARIES:
        if given.only not in str(vocab_size):
            continue
        rows = rows_of(vocab_size, given.rounds)
        print(vocab_size)
        show(rows, ("ratio", "extra MiB"))
        save("vocabularies", rows, given.results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
