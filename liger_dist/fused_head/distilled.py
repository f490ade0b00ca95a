"""Runs a student's call inside the call of a teacher's lm_head.

[Note: The student runs inside the teacher's lm_head]
A divergence needs the weights of both lm_heads at once, and each is unsharded only inside its module's call. So the
teacher runs first, without gradients; its lm_head, instead of computing logits, runs the student's forward, whose
lm_head computes the divergence and its gradients. There the frameworks of both models have unsharded their weights by
their hooks, and each reshards its weight after its module's call. The backward needs no tensor of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_dist.errors import LigerDistError
from liger_dist.fused_layers.swap import is_of_framework
from liger_dist.losses.distillation import Teacher
from liger_dist.model.peft import base_head, effective_head, has_lora
from liger_dist.model.torch_modes import untraced
from liger_dist.sharding.base import FullHead, Head
from liger_dist.sharding.tensor_parallel import placed_like

from .lm_head import computes_in_fp32
from .logits import FusedLogits, TensorOperand, with_operands
from .recipe import SELECTIONS, LogitTransform, LossRecipe, listed


@contextmanager
def intercepted(
    head: nn.Module,
    then: Callable[[Teacher], None],
    full_head: Callable[..., FullHead],
    transform: LogitTransform,
    bias: Tensor | None = None,
) -> Iterator[None]:
    """Within, a call of ``head`` calls ``then`` with the unsharded lm_head instead of computing logits, and returns
    zero-width logits, which record what follows (:class:`.logits.FusedLogits`).

    Args:
        full_head: of the sharding adapter.
        transform: from the logits of ``head`` to those of its model.
        bias: ``[V]``, added to the logits; a buffer of the model.
    """
    original_forward = head.forward
    vocab_size = 0

    def carry(_: nn.Module, args: Any, output: Any) -> Any:
        # Tensor parallelism converts a DTensor to a tensor.
        is_plain = type(output) is Tensor and output.shape[-1] == 0
        return FusedLogits.carrying(output, None, vocab_size=vocab_size) if is_plain else None

    @untraced
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal vocab_size
        used = (
            effective_head(head, original_forward, hidden_states)
            if has_lora(head)
            else cast(nn.Linear, base_head(head))
        )
        full = full_head(hidden_states, cast(Head, used))
        hidden, weight, offset = full
        if computes_in_fp32(base_head(head)):
            hidden, weight = hidden.float(), weight.float()
        if bias is not None:
            offset = bias.reshape(-1) if offset is None else offset + bias.reshape(-1)
        vocab_size = len(weight)
        then(Teacher(hidden=hidden, weight=weight, bias=offset, softcap=transform.softcap, logit_scale=transform.scale))
        empty = hidden.new_empty((*hidden.shape[:-1], 0))
        if not isinstance(hidden_states, DTensor):
            return FusedLogits.carrying(empty, None, vocab_size=vocab_size)
        if any(not is_of_framework(hook) for hook in head._forward_hooks.values()):
            raise LigerDistError(
                "the teacher's lm_head has a forward hook, which may change its logits, on a tensor-parallel mesh; "
                "remove it."
            )
        return placed_like(hidden_states, empty)

    hook = head.register_forward_hook(carry)
    try:
        with forward_of(head, forward):
            yield
    finally:
        hook.remove()


@contextmanager
def forward_of(head: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Within, a call of ``head`` runs ``forward``, inside the hooks of its framework."""
    before = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def check_logits(logits: Any, model: nn.Module, recipe: LossRecipe | None, vocab_size: int) -> None:
    """Refuses a teacher whose code did something else to the logits of its lm_head than what the divergence has
    computed with.

    Args:
        logits: of the teacher's call.
        model: the teacher, or its lm_head alone.
        recipe: what its code did when it was wrapped; None for nothing.
        vocab_size: number of rows of its lm_head.

    Raises:
        LigerDistError: the logits are different ones.
    """
    name = type(model).__name__
    if not isinstance(logits, FusedLogits):
        raise LigerDistError(
            f"the logits of the teacher {name} are not those of its lm_head alone, so that a divergence computed in "
            "its lm_head would be another one; distil from its full logits without distillation_loss."
        )
    expected = () if recipe is None else recipe.changes
    if recipe is not None and recipe.transform.bias is not None:
        buffer = TensorOperand(model.get_buffer(recipe.transform.bias))
        expected = with_operands(expected, lambda probed: buffer)
    seen, known = (tuple(one for one in changes if one[0] not in SELECTIONS) for changes in (logits.changes, expected))
    # Labels shift logits by slices of tokens, in calls that have some.
    by_tensors = tuple(one for one in logits.changes if "tensor" in one or "indices" in one)
    if logits.shape[-1] != vocab_size or by_tensors:
        seen = seen or by_tensors or logits.changes
    if seen != known or logits.shape[-1] != vocab_size:
        before = "expected nothing" if recipe is None else f"but {listed(known)} when it was wrapped"
        raise LigerDistError(
            f"the teacher {name} did {listed(seen)} to its logits, {before}, which is what the divergence was computed "
            "with. Unwrap it and wrap it again after such a change, and remove hooks that change logits."
        )
