"""Runs a student's call inside the call of a teacher's lm_head.

[Note: The student runs inside the teacher's lm_head]
A divergence needs the weights of both lm_heads at once, and each is unsharded only inside its own module's call. So the
teacher runs first, without gradients; its lm_head, instead of computing logits, runs the student's forward, whose
lm_head computes the divergence and its gradients. There the frameworks of both models have unsharded their weights by
their own hooks, and each reshards its weight after its module's call. The backward needs no tensor of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from liger_dist.losses.distillation import Teacher
from liger_dist.model.peft import base_head, effective_head, has_lora
from liger_dist.model.torch_modes import untraced
from liger_dist.sharding.base import FullHead, Head
from liger_dist.sharding.tensor_parallel import placed_like

from .lm_head import computes_in_fp32
from .recipe import LogitTransform


@contextmanager
def intercepted(
    head: nn.Module,
    then: Callable[[Teacher], None],
    full_head: Callable[..., FullHead],
    transform: LogitTransform,
    bias: Tensor | None = None,
) -> Iterator[None]:
    """Within, a call of ``head`` calls ``then`` with the unsharded lm_head instead of computing logits, and returns
    zero-width logits.

    Args:
        full_head: of the sharding adapter.
        transform: from the logits of ``head`` to those of its model.
        bias: ``[V]``, added to the logits; a buffer of the model.
    """
    before = vars(head).get("forward")
    own = head.forward

    @untraced
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        used = effective_head(head, own, hidden_states) if has_lora(head) else cast(nn.Linear, base_head(head))
        full = full_head(hidden_states, cast(Head, used))
        hidden, weight, offset = full
        if computes_in_fp32(base_head(head)):
            hidden, weight = hidden.float(), weight.float()
        if bias is not None:
            offset = bias.reshape(-1) if offset is None else offset + bias.reshape(-1)
        then(Teacher(hidden=hidden, weight=weight, bias=offset, softcap=transform.softcap, logit_scale=transform.scale))
        return placed_like(hidden_states, hidden.new_empty((*hidden.shape[:-1], 0)))

    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before
