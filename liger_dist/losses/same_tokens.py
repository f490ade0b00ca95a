"""Whether processes that have to see the same tokens do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_dist.errors import LigerDistError

from .vocab_parallel import gather


def check_same_tokens(hidden_states: Tensor, labels: Tensor, group: dist.ProcessGroup, *, waits: bool) -> None:
    """Refuses tokens that differ between processes that have to see the same ones: their labels exactly, their hidden
    states beyond rounding. One all-gather of seven numbers.

    Args:
        waits: read the result now. Otherwise, on a GPU, an assertion on the device ends the program.

    Raises:
        LigerDistError: on every process of the group alike.
    """
    everyone_GF = gather(_fingerprint(hidden_states, labels), group)
    differences_GF = (everyone_GF - everyone_GF[0]).abs()
    other_labels = (differences_GF[:, :2] > 0).any()
    other_hidden = (differences_GF[:, 2:] > 0.05 * everyone_GF[0, 2]).any()
    sentence = (
        f"the {group.size()} processes that share the output embedding's rows (tensor parallelism) see different "
        "tokens: expected one batch for all of them. Give the data loader's sampler, and the seeds of dropout, the "
        "rank of the data-parallel axis and not that of the world"
    )
    if not waits and hidden_states.is_cuda:
        torch._assert_async(~(other_labels | other_hidden), sentence)
    elif bool(other_labels):
        raise LigerDistError(f"{sentence}. Their labels: (tokens, checksum) {everyone_GF[:, :2].long().tolist()}.")
    elif bool(other_hidden):
        raise LigerDistError(f"{sentence}. Their labels agree and their hidden states do not.")


def _fingerprint(hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Number of labels and a checksum of them; norm of the hidden states and four projections of them, which move by as
    much as the hidden states do."""
    hidden_TD = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
    device = hidden_TD.device
    positions = torch.arange(1, labels.numel() + 1, device=labels.device)
    # Filled on the device: a number sent there would make the host wait.
    count = torch.full((), labels.numel(), dtype=torch.int64, device=labels.device)
    counted = torch.stack([count, (labels.reshape(-1) * positions).sum()])

    def waves(size: int) -> Tensor:
        steps_4 = 1.1 + 1.3 * torch.arange(4, dtype=torch.float64, device=device)
        return torch.cos(steps_4[:, None] * torch.arange(1, size + 1, dtype=torch.float64, device=device))

    projected_T4 = hidden_TD @ waves(hidden_TD.shape[1]).T.to(hidden_TD.dtype)
    projections_4 = (projected_T4.double() * waves(hidden_TD.shape[0]).T).sum(0)
    norm = torch.linalg.vector_norm(hidden_TD, dtype=torch.float32 if hidden_TD.dtype != torch.float64 else None)
    return torch.cat([counted.double().to(device, non_blocking=True), norm.double()[None], projections_4])
