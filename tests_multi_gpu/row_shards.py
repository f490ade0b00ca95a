"""Options of a loss over row shards of lm_head, the shards, and errors of its outputs."""

from __future__ import annotations

from typing import Any

import on_device
import torch
import torch.distributed as dist
from truth import relative_error

from liger_dist.losses.token_exchange import ExchangedRowShard
from liger_dist.sharding.process_groups import compute_device

D = 8
PLAIN = ("reduction", "num_items_in_batch", "token_ids", "top_k")
"""arguments of a loss that are no numbers of its formula"""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.1},
    "soft-cap and scales": {"softcap": 2.0, "logit_scale": 1.5, "temperature": 0.7},
    "class weights and smoothing": {"class_weight": True, "label_smoothing": 0.1},
    "token weights": {"token_weight": True},
    "items": {"num_items_in_batch": 5.0},
    "log-probabilities and entropy": {
        "outputs": ("log_prob", "entropy", "is_top1", "z_loss", "mean_logit"),
        "z_loss": 0.1,
    },
    "every output, temperatures of tokens": {
        "outputs": ("log_prob", "log_prob_at", "top_k", "entropy", "sum_sq_prob", "is_top1", "mean_logit"),
        "temperature": True,
        "token_ids": 3,
        "top_k": 3,
        "softcap": 3.0,
    },
    "bias": {"bias": True},
    "everything": {
        "bias": True,
        "class_weight": True,
        "token_weight": True,
        "label_smoothing": 0.1,
        "z_loss": 0.1,
        "softcap": 3.0,
        "outputs": ("log_prob", "entropy"),
    },
}


def own_rows(vocab_size: int) -> slice:
    """Returns the rows of this rank: as many on each rank, fewer or none on the last ones."""
    rank, rows = dist.get_rank(), -(-vocab_size // dist.get_world_size())
    return slice(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def shard_of(vocab_size: int, *, divide_factor: float) -> tuple[ExchangedRowShard, slice]:
    """Makes the row shard of this rank, and the slice of its rows."""
    own = own_rows(vocab_size)
    world: Any = dist.group.WORLD
    counting = world if compute_device().type == "cpu" else dist.new_group(backend="gloo")
    shard = ExchangedRowShard(
        group=world,
        tokens_group=world,
        counting_group=counting,
        start=own.start,
        vocab_size=vocab_size,
        divide_factor=divide_factor,
    )
    return shard, own


def tensors_of_tokens(case: dict[str, Any], count: int, vocab_size: int, generator: torch.Generator) -> dict[str, Any]:
    """Draws temperatures and classes for a case that has ``token_ids``: one class twice, and none for some tokens."""
    if "token_ids" not in case:
        return {}
    device = compute_device()
    ids = on_device.randint(vocab_size, (count, case["token_ids"]), generator=generator).to(device)
    ids[:, 1] = ids[:, 0]
    ids[::3, 2] = -1
    temperature = 0.5 + on_device.rand(count, generator=generator, dtype=torch.float64).to(device)
    return {"token_ids": ids, "temperature": temperature}


def output_error(result: Any, truth: Any, name: str) -> float:
    """Compares one output; of the likeliest classes, their log-probabilities and the remainder."""
    actual, wanted = getattr(result, name), getattr(truth, name)
    if name != "top_k":
        return relative_error(actual.double(), wanted.double())
    assert torch.equal(actual.ids, wanted.ids)
    # Three classes of three leave no remainder.
    remainder = float((actual.remainder - wanted.remainder).abs().max()) if len(actual.remainder) else 0.0
    return max(relative_error(actual.log_prob, wanted.log_prob), remainder)
