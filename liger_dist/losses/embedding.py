"""Vocab-parallel embedding lookup by token exchange: each rank has different tokens and a row shard.

Legend: T tokens of this rank, m tokens of each rank at once, G ranks, D hidden, V rows of this rank.

The ids of all ranks are all-gathered, and every rank looks up the ids in its rows. An all-to-all sends each rank the
vectors of its tokens (one vector and zeros, which are summed). The backward all-gathers the gradients; they are
complete for the rows of this rank. A rank sends ``8 * T * (G - 1)`` bytes of ids, ``T * D * itemsize * (G - 1)`` of
vectors, and as many of their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.errors import LigerDistError, refuse_second_order

from .collectives import device_assert, gather
from .token_exchange import ExchangedRowShard

BUFFER_BYTES = 2**28
"""bytes of the vectors that this rank looks up at once"""


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """One lookup, the same on every rank except for the number of tokens."""

    shard: ExchangedRowShard
    most: int
    """tokens of the rank with the most"""
    at_once: int
    """m"""
    dtype: torch.dtype
    padding_idx: int | None

    def pieces(self) -> Iterator[int]:
        """Yields the first token of each piece."""
        return iter(range(0, self.most, self.at_once))

    def padded(self, values_T: Tensor, start: int, fill: int) -> Tensor:
        """Slices this rank's values from ``start`` on and pads them: ``[m, ...]``."""
        local = values_T[start : start + self.at_once]
        padded = local.new_full((self.at_once, *local.shape[1:]), fill)
        padded[: len(local)] = local
        return padded

    def local_rows(self, ids_Gm: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Returns the row of this rank for each id, any row for ids of other ranks, and a mask of this rank's ids."""
        rows = ids_Gm.reshape(-1) - self.shard.start
        is_local = (rows >= 0) & (rows < num_rows)
        # Spread over the rows, so that the backward does not accumulate into one.
        return torch.where(is_local, rows, torch.arange(rows.numel(), device=rows.device) % max(num_rows, 1)), is_local


class _ExchangedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids_T: Tensor, lookup: _Lookup) -> Tensor:
        ctx.lookup, ctx.num_rows, ctx.weight_dtype = lookup, weight_VD.shape[0], weight_VD.dtype
        out_TD = torch.empty((ids_T.numel(), weight_VD.shape[1]), dtype=lookup.dtype, device=weight_VD.device)
        gathered_ids = []
        used_VD = weight_VD.to(lookup.dtype)
        for start in lookup.pieces():
            ids_Gm = gather(lookup.padded(ids_T, start, -1), lookup.shard.group)
            gathered_ids.append(ids_Gm)
            rows, is_local = lookup.local_rows(ids_Gm, ctx.num_rows)
            if ctx.num_rows > 0:
                vectors = used_VD[rows].masked_fill_(~is_local[:, None], 0)
            else:
                vectors = used_VD.new_zeros((rows.numel(), weight_VD.shape[1]))
            received = torch.empty_like(vectors)
            dist.all_to_all_single(received, vectors, group=lookup.shard.tokens_group)
            local = slice(start, min(start + lookup.at_once, ids_T.numel()))
            parts_GmD = received.view(*ids_Gm.shape, -1)
            out_TD[local] = parts_GmD[:, : max(local.stop - local.start, 0)].sum(0)
        ctx.save_for_backward(*gathered_ids)
        return out_TD

    @staticmethod
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_order("this vocab-parallel embedding", "use FSDP2(lm_head='gather')")
        lookup: _Lookup = ctx.lookup
        d_weight_VD = d_out_TD.new_zeros((ctx.num_rows, d_out_TD.shape[1]), dtype=ctx.weight_dtype)
        for start, ids_Gm in zip(lookup.pieces(), ctx.saved_tensors, strict=True):
            gradients = gather(lookup.padded(d_out_TD, start, 0), lookup.shard.tokens_group).flatten(0, 1)
            if ctx.num_rows == 0:
                continue
            rows, is_local = lookup.local_rows(ids_Gm, ctx.num_rows)
            if lookup.padding_idx is not None:
                is_local &= ids_Gm.reshape(-1) != lookup.padding_idx
            gradients = gradients.to(ctx.weight_dtype).masked_fill_(~is_local[:, None], 0)
            d_weight_VD += torch.ops.aten.embedding_dense_backward(gradients, rows, ctx.num_rows, -1, False)
        return d_weight_VD.div_(lookup.shard.divide_factor), None, None


def exchanged_embedding(
    ids: Tensor, weight_local: Tensor, *, shard: ExchangedRowShard, dtype: torch.dtype, padding_idx: int | None = None
) -> Tensor:
    """Looks up ids in the full weight, as :func:`torch.nn.functional.embedding`: ``[..., D]`` of ``dtype``.

    Args:
        ids: ``[...]`` integers in ``[0, shard.vocab_size)``, of any shape on each rank.
        weight_local: ``[V, D]``, this rank's rows, possibly none. Its gradient is the sum over all ranks' tokens,
            divided by ``shard.divide_factor``.
        padding_idx: id of a row without gradient.

    Raises:
        LigerDistError: an id out of range, for ids on the CPU, on every rank; on a GPU a device-side assertion fails.
    """
    ids_T = ids.reshape(-1).long()
    in_range = ((ids_T >= 0) & (ids_T < shard.vocab_size)).all()
    problem = None
    if ids_T.is_cuda:
        device_assert(in_range, f"an id lies outside [0, {shard.vocab_size})")
    elif not bool(in_range):
        problem = (
            f"ids go from {ids_T.min()} to {ids_T.max()} but the embedding has {shard.vocab_size} rows: expected ids "
            f"in [0, {shard.vocab_size}). Use the tokenizer that belongs to the model, or resize its embeddings first."
        )
    most = max(shard.agree(ids_T.numel(), f"an embedding in {dtype}" if problem is None else f"nothing: {problem}"))
    if problem is not None:
        raise LigerDistError(problem)
    bytes_of_token = shard.group.size() * max(weight_local.shape[1], 1) * dtype.itemsize
    lookup = _Lookup(
        shard=shard,
        most=most,
        at_once=max(min(BUFFER_BYTES // bytes_of_token, most), 1),
        dtype=dtype,
        padding_idx=padding_idx,
    )
    vectors: Tensor = _ExchangedEmbedding.apply(weight_local, ids_T, lookup)  # type: ignore[no-untyped-call]
    return vectors.view(*ids.shape, weight_local.shape[1])
