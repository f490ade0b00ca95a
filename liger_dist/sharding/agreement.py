"""What one rank objects to, raised by all."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def sentences_of_all_ranks(sentences: list[str]) -> list[str]:
    """All-gathers the sentences of all ranks: each once, in the order of ranks. Without a process group, the own."""
    if not dist.is_initialized():
        return sentences
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sentences)
    return list(dict.fromkeys(sentence for theirs in gathered for sentence in theirs))
