"""Sizes of launches, each as measured on the GPU that it names. No other kind of GPU has been measured; add a table for
one that needs other sizes.

Sizes that follow from a shape are computed where the kernel is launched.
"""

from __future__ import annotations

TILE_BYTES = 2**14
"""Logits that a program holds at once, where it computes probabilities alone: eight warps of 64 registers. Half and a
quarter of it with one and with more further terms (H200 and H100: with a larger tile, what is computed of the logits
spills; 80 bytes a thread cost half the speed)."""
UNALIGNED_COLUMNS = 1024
"""Logits of a tile whose rows are not a multiple of 16 bytes: each is loaded alone, and their addresses need
registers."""
STATISTICS_COLUMNS = 2048
"""Logits that a program of the statistics' sweep holds at once. With 8192 of them, 64 registers do not hold both the
logits and their exponentials, which the entropy needs: 1.8 ms instead of 0.8 for 2**30 logits (H200)."""
DIVERGENCE_COLUMNS = 2048
"""Columns of a tile with logits and exponentials of two models: with 1024 of them the sweeps of the JSD take 10 % more
(H200)."""
PIECE_BYTES = 2**15
"""Logits of a row for one program of a pass in one launch: the pieces of 528 programs fit the L2 cache (H200)."""
REGISTERS, UNALIGNED_REGISTERS = 64, 128
"""Registers of a thread: four programs of eight warps on a multiprocessor, which hide each other's reductions
(H200)."""
