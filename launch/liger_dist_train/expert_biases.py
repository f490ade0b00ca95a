"""Balances the experts of a mixture without a loss: after each step the bias that a router adds to the scores of an
expert before it selects falls where the expert had more tokens than the mean, and rises where it had fewer.

Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), as in DeepSeek-V3.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_dist import LigerDistError

from .distributed import total_on_device
from .expert_loads import ExpertLoads

NAME = "e_score_correction_bias"
"""of the bias in transformers' models"""


class ExpertBiases:
    """The biases of a model's routers, in the order of its modules of experts; made after it has been wrapped."""

    def __init__(self, model: nn.Module, loads: ExpertLoads, rate: float) -> None:
        """
        Args:
            rate: what one step adds to a bias, or subtracts.

        Raises:
            LigerDistError: a layer of experts has no bias of its experts in fp32 on every rank.
        """
        self._loads, self._rate = loads, rate
        self._biases = [_bias_beside(model, experts, loads.num_experts) for experts in loads.modules]
        if not self._biases:
            raise LigerDistError(
                f"--router_bias_rate is {rate} but {type(model).__name__} has no experts whose tokens are counted; "
                "leave it out."
            )

    @torch.no_grad()
    def update(self, *, skipped: bool = False) -> None:
        """Moves the biases by the counts of one step on all ranks. One all-reduce.

        Args:
            skipped: True for a step whose weights stayed, the same on every rank: its counts are left out.
        """
        of_rank = self._loads.of_step()
        if skipped:
            return
        counts_LE = total_on_device(of_rank.double())
        steps_LE = self._rate * (counts_LE.mean(1, keepdim=True) - counts_LE).sign()
        for bias, step_E in zip(self._biases, steps_LE, strict=True):
            bias.add_(step_E.view_as(bias))


def _bias_beside(model: nn.Module, experts: nn.Module, num_experts: int) -> Tensor:
    """Returns the bias of the router in the block of ``experts``, ``[E]`` or ``[1, E]``."""
    path = next(name for name, module in model.named_modules() if module is experts)
    block = model.get_submodule(path.rpartition(".")[0])
    named = [*block.named_buffers(), *block.named_parameters()]
    found = [tensor for name, tensor in named if name.rpartition(".")[2] == NAME]
    if len(found) != 1:
        raise LigerDistError(
            f"--router_bias_rate moves the bias of each router, named {NAME!r}, of which {path.rpartition('.')[0]} has "
            f"{len(found)}; expected one, as in DeepSeek-V3 and GLM-4.5. Balance other mixtures by their loss "
            "(output_router_logits in the model's config)."
        )
    bias = found[0]
    if isinstance(bias, DTensor) or bias.numel() != num_experts or bias.dtype != torch.float32:
        raise LigerDistError(
            f"--router_bias_rate needs the bias of {path.rpartition('.')[0]} in fp32 on every rank, {num_experts} "
            f"numbers, and it is {tuple(bias.shape)} in {bias.dtype}{', sharded' * isinstance(bias, DTensor)}; leave "
            "the option out, or use --strategy none, ddp or fsdp2 with a model that has it as a buffer."
        )
    return bias
