"""This library's dispatch of tokens (:mod:`.expert_dispatch`) as an implementation of transformers' expert
parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_dist.errors import LigerDistError

from .expert_dispatch import sent_to_experts
from .experts import NAME, experts_forward, pair_by_pair
from .swap import match_of


def register_expert_parallelism() -> None:
    """Registers ``ep_implementation="liger_dist"`` with transformers, for models that are loaded with
    ``DistributedConfig(ep_size=..., ep_implementation="liger_dist")``.

    A token is sent once to each rank that has some of its experts, in place of once for each of its experts.

    Raises:
        LigerDistError: this version of transformers takes no implementations of expert parallelism.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError as error:
        import transformers

        raise LigerDistError(
            f"transformers is {transformers.__version__}, which takes no implementations of expert parallelism; "
            "install 5.24 or newer, or leave out ep_implementation."
        ) from error
    EPImplementationInterface.register(NAME, ExpertExchange)


class ExpertExchange:
    """Dispatch of one layer, an ``EPImplementation`` of transformers. With ``tp_size`` above 1, and for experts whose
    kernel exchanges tokens itself, transformers' implementation runs."""

    needs_shared_batch = False

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        from transformers.distributed.expert_parallel import AutoEP

        self.experts, self.forward = experts, experts.forward
        self.num_experts, self.group = experts.num_experts, ep_mesh.get_group()
        automatic = AutoEP(experts, ep_mesh, tp_mesh)
        self.instead = automatic if tp_mesh.size() > 1 or automatic.megamoe is not None else None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum of each token's experts.

        Args:
            hidden_states: ``[T, D]`` of this rank.
            top_k_index: ``[T, K]``; experts of all ranks, those of rank r from ``r * num_experts`` on.
            top_k_weights: ``[T, K]``
        """
        if self.instead is not None:
            return self.instead(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return sent_to_experts(
            self._compute, hidden_states, top_k_index, top_k_weights, num_experts=self.num_experts, group=self.group
        )

    def _compute(self, hidden_MD: Tensor, index_MK: Tensor, weight_MK: Tensor, num_pairs: int) -> Tensor:
        if match_of(self.experts) is not None:
            return experts_forward(self.experts, hidden_MD, index_MK, weight_MK, num_rows=num_pairs)
        return pair_by_pair(
            self.forward, hidden_MD, index_MK, weight_MK, num_experts=self.num_experts, num_pairs=num_pairs
        )
