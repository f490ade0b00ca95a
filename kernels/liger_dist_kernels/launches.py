"""Sizes of launches. A size was measured on the GPU that it names; no other kind of GPU has been measured. Add a table
for one that needs other sizes.

A dict has a kernel's block sizes and ``num_warps``, as keywords of its launch; a function returns them for a shape.
Elsewhere are those that are computed together with a grid or a loop:

- ``logit_rows.tile_arguments``, ``one_launch.py``: tiles and pieces of a row of logits, from the constants here
- ``norm.py``, ``gated_norm.py``: from the width of a row, the multiprocessors and their shared memory
- ``rotary.py``: from the number and the width of heads
- ``token_chunks.py``, ``products.py``: chunks of tokens, tiles of the vocabulary, rows of a GEMM; the default memory
  budget

Legend: D hidden, F features of an expert.
"""

from __future__ import annotations

from ._triton_utils import next_power_of_2

# --- cross entropy and divergences --------------------------------------------------------------------------------

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
CROSS_ENTROPY_FWD_EXPONENTIALS = {"num_warps": 16}
MERGE_STATISTICS = {"BLOCK": 128, "num_warps": 4}
TOKEN_TERMS = {"BLOCK": 128, "num_warps": 4}
LABEL_FACTS = {"BLOCK": 4096, "num_warps": 8}
SCALE = {"BLOCK": 4096, "num_warps": 8}

# --- layers -------------------------------------------------------------------------------------------------------

GATED_ACTIVATION = {"BLOCK": 4096, "num_warps": 8}
"""forward and backward"""
NORM_BWD_SUM = {"BLOCK_P": 64, "BLOCK_D": 32, "num_warps": 4}
FOUR_BIT = {"WORDS": 512, "num_warps": 4}
"""of a program: words of eight weights, and warps"""


def causal_convolution_sizes(num_elements: int, *, most_tokens: int) -> dict[str, int]:
    """Returns sizes for an input of so many elements: fewer tokens of a program than ``most_tokens`` where fewer than
    4096 programs of one warp would be left, which keep a GPU busy."""
    channels = 128
    tokens = min(max(next_power_of_2(num_elements // (channels * 4096)), 32), most_tokens)
    return {"STRIP": tokens, "BLOCK_C": channels, "num_warps": 1}


# --- experts ------------------------------------------------------------------------------------------------------


def expert_row_sizes(D: int) -> dict[str, int]:
    """Returns sizes for the kernels that gather and combine rows of experts, and multiply them by their biases."""
    return {"BLOCK_D": min(next_power_of_2(D), 2048), "num_warps": 4}


def sum_of_expert_sizes(D: int) -> dict[str, int]:
    """Returns sizes for the sum of the rows of each expert."""
    return {"BLOCK_S": 16, "BLOCK_D": min(next_power_of_2(D), 128), "num_warps": 4}


def outer_product_sizes(rank: int, D: int, *, is_fp64: bool) -> dict[str, int]:
    """Returns sizes for the outer products of low-rank rows and tokens; every block has 16 elements or more."""
    rows, most_ranks, most_columns = (16, 16, 16) if is_fp64 else (64, 64, 128)
    ranks, columns = min(max(next_power_of_2(rank), 16), most_ranks), min(max(next_power_of_2(D), 16), most_columns)
    return {"BLOCK_S": rows, "BLOCK_R": ranks, "BLOCK_D": columns, "num_warps": 4}


EXPERT_GATE = {"num_warps": 4}
"""beside :func:`expert_gate_blocks`"""


def expert_gate_blocks(F: int, rank: int, *, is_fp64: bool, is_interleaved: bool) -> dict[str, int]:
    """Returns block sizes for the gate of experts: one row of many features, or a tile of rows with a low-rank product.

    The tile of 16 rows of 128 features takes 0.22 and 0.43 ms (H100, 65,536 rows of 768 features, rank 16, forward and
    backward), with 64 features 0.27 and 0.57, 32 rows of 64 features 0.22 and 0.55.

    Args:
        rank: the largest rank of the low-rank products; 0 without one.
    """
    rows, most_features = (16, 32 if is_fp64 else 128) if rank else (1, 1024)
    if rank and is_interleaved:
        # Gate and up are in one tile there: with twice the columns, registers spill.
        most_features //= 2
    features = min(max(next_power_of_2(F), 16), most_features)
    ranks = min(max(next_power_of_2(rank), 16), 16 if is_fp64 else 64)
    return {"BLOCK_S": rows, "BLOCK_F": features, "BLOCK_R": ranks}
