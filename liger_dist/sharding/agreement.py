"""What one rank objects to, raised by all ranks."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """All-gathers a value of every rank, in the order of ranks. Without a process group, this rank's alone."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sentences_of_all_ranks(sentences: list[str]) -> list[str]:
    """All-gathers the sentences of all ranks: each once, in the order of ranks."""
    return list(dict.fromkeys(sentence for theirs in gathered(sentences) for sentence in theirs))
