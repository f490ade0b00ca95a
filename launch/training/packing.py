"""Packs documents into sequences of one length by best fit, so that none that fits is cut (Ding et al. 2024, "Fewer
Truncations Improve Language Modeling").

Legend: L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Which pieces of which documents every sequence holds: sequence ``i`` has the pieces ``bounds[i]`` to ``bounds[i +
    1]``."""

    document: Integers
    """of each piece"""
    start: Integers
    """first token of the piece in its document"""
    length: Integers
    bounds: Integers

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def pieces(self, sequence: int) -> list[tuple[int, int, int]]:
        """Document, start and length of each piece of a sequence."""
        here = slice(self.bounds[sequence], self.bounds[sequence + 1])
        columns = (self.document[here], self.start[here], self.length[here])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, values in vars(self).items():
            np.save(folder / f"{name}.npy", values)

    @classmethod
    def load(cls, folder: Path) -> Packing:
        """Maps what :meth:`save` wrote."""
        names = ("document", "start", "length", "bounds")
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in names))


def pack(documents: Integers, lengths: Integers, length: int, first: Integers | None = None) -> Packing:
    """Cuts documents that are longer than ``length`` into pieces of ``length`` tokens and a rest, and packs all pieces.

    Args:
        documents: number of each document.
        lengths: its tokens.
        first: token at which it begins; default: 0.
    """
    count = -(-lengths // length)
    of = np.repeat(np.arange(len(lengths)), count)
    start = (np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)) * length
    piece = np.minimum(lengths[of] - start, length)
    order, bounds = best_fit(piece, length)
    start = start if first is None else start + first[of]
    return Packing(documents[of][order], start[order], piece[order], bounds)


def best_fit(lengths: Integers, capacity: int) -> tuple[Integers, Integers]:
    """Best-fit decreasing: the longest piece first, each into the fullest bin that has room.

    Bins with the same room are treated together, so the time grows with the number of different lengths.

    Returns:
        Indices of ``lengths`` bin by bin, and the bounds of the bins in them, ``[bins + 1]``.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(lengths), dtype=np.int64)
    open_bins: dict[int, Integers] = {}
    """by their room"""
    is_open = np.zeros(capacity + 1, dtype=bool)
    num_bins = position = 0
    values, counts = np.unique(-lengths, return_counts=True)
    for size, count in zip((-values).tolist(), counts.tolist(), strict=True):
        left = count
        while left > 0:
            offset = int(np.argmax(is_open[size:]))
            room = size + offset if is_open[size + offset] else capacity
            each = room // size
            needed = -(-left // each)
            if is_open[room]:
                bins = open_bins[room]
                needed = min(needed, len(bins))
                open_bins[room] = bins[needed:]
                is_open[room] = needed < len(bins)
                bins = bins[:needed]
            else:
                bins = np.arange(num_bins, num_bins + needed)
                num_bins += needed
            taken = min(left, needed * each)
            bin_of[longest_first[position : position + taken]] = np.repeat(bins, each)[:taken]
            position, left = position + taken, left - taken
            rest = taken - (needed - 1) * each
            for remaining, group in ((room - each * size, bins[:-1]), (room - rest * size, bins[-1:])):
                if remaining > 0 and len(group):
                    there = open_bins[remaining] if is_open[remaining] else bins[:0]
                    open_bins[remaining] = np.concatenate([there, group])
                    is_open[remaining] = True
    order = np.argsort(bin_of, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=num_bins))]).astype(np.int64)
    return order, bounds
