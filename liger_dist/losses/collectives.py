"""Collectives and assertions that the losses share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import get_backend_config

from liger_dist.errors import LigerDistError
from liger_dist.model.torch_modes import is_captured

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_single`` from torch 2.13 on, where the older name warns."""


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gathers ``[G, *shape]`` from a tensor of the same ``shape`` on every rank."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    all_gather_single(gathered.view(-1), tensor.reshape(-1), group=group)
    return gathered


def device_for(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device of small tensors in a collective of ``group`` (None: the default group): the CPU if
    possible."""
    config = get_backend_config(group)
    if "gloo" in config or "mpi" in config:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def device_assert(condition: Tensor, sentence: str) -> None:
    """Ends the program by a device-side assertion if ``condition`` (0-d bool) is False, without synchronising the host.

    The sentence has at most 254 characters.
    """
    torch._assert_async(condition, sentence)


def require(condition: Tensor, sentence: str, detail: Callable[[], str] = str) -> None:
    """Raises if ``condition`` (0-d bool) is False; on a GPU by a device-side assertion.

    Args:
        sentence: at most 254 characters.
        detail: a further sentence, for the CPU alone.

    Raises:
        LigerDistError: on the CPU.
    """
    if condition.is_cuda:
        device_assert(condition, sentence)
    elif not bool(condition):
        raise LigerDistError(f"{sentence.rstrip('.')}. {detail()}".rstrip())


def agree(group: dist.ProcessGroup, count: int, asked: str) -> list[int]:
    """All-gathers token counts over ``group`` on the hosts, and checks that all ranks have the same description
    ``asked`` of their next computation.

    Raises:
        LigerDistError: on every rank, if they differ.
    """
    if is_captured():
        raise LigerDistError(
            f"{asked} cannot be captured in a CUDA graph: the ranks of the vocab-parallel lm_head compare their "
            "numbers of tokens on the hosts. Use FSDP2(lm_head='gather')."
        )
    digest = int.from_bytes(hashlib.sha256(asked.encode()).digest()[:7], "big")
    gathered = gather(torch.tensor([count, digest], device=device_for(group)), group).tolist()
    if any(numbers[1] != digest for numbers in gathered):
        answers: list[Any] = [None] * len(gathered)
        dist.all_gather_object(answers, asked, group=group)
        raise LigerDistError(
            "ranks of the vocab-parallel lm_head called the model with different arguments: "
            + "; ".join(f"rank {rank} of the group for {answer}" for rank, answer in enumerate(answers))
            + ". Call the model on all of them, with the same kind of arguments, loss options, frozen parameters "
            "and torch.no_grad()."
        )
    return [numbers[0] for numbers in gathered]
