"""The verb lm_head_loss: the loss of an lm_head alone, from hidden states, without full logits: of a draft and its
target, or of a model whose forward computes no loss.

Legend: C classes of lm_head, V vocabulary of the teacher, D hidden of the lm_head, E hidden of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_dist_kernels import Divergence

from .config import check_count
from .distillation import CallerModes, check_divergence, check_lone_head, check_transform, full_linear
from .errors import LigerDistError
from .fused_head.distilled import forward_of, intercepted
from .fused_head.loss_call import LogitsToLoss, LossToLogits, detached
from .fused_head.recipe import LogitTransform
from .fused_layers.swap import is_of_framework
from .losses.distillation import Distillation, Teacher
from .losses.draft_vocabulary import check_rows
from .losses.execution import Execution
from .losses.labels import check_labels, check_range
from .losses.outputs import LossOutput
from .losses.spec import LossSpec
from .model.peft import without_fsdp1
from .model.torch_modes import untraced
from .sharding.base import Head
from .sharding.fsdp2 import forward as fsdp2_forward
from .sharding.single import Replicated
from .sharding.tensor_parallel import TensorParallelAdapter, placed_like
from .sharding.vocab_parallel import VocabParallel, row_shards_of

NOT_CALLED = (
    "the forward of {} did not run in the thread of lm_head_loss; expected one process for each device (DDP instead of "
    "nn.DataParallel)."
)


@untraced
def lm_head_loss(
    lm_head: nn.Module,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    teacher: nn.Module | None = None,
    teacher_hidden: Tensor | None = None,
    teacher_rows: Tensor | None = None,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
) -> LossOutput:
    """Computes the loss of an lm_head alone, inside its call: the cross entropy of the labels, or with a teacher
    ``(1 - hard_weight) * divergence + hard_weight * cross entropy``, inside the calls of both lm_heads, where their
    frameworks have unsharded the weights.

    Call it in the forward of the trained model, and return its ``loss`` from there: DDP, FSDP and ZeRO reduce the
    gradient of ``lm_head`` as for logits. The teacher is not trained; with one the gradients are made in the forward
    (four products for each chunk of tokens), and the backward scales them.

    Args:
        lm_head: an ``nn.Linear`` of C rows, or the FSDP1 unit around one.
        hidden_states: ``[..., D]``, what ``lm_head`` gets. Several depths of a draft are one tensor ``[depths, B, S,
            D]``.
        labels: ``[...]`` classes for the logits at their positions, which are not shifted, or ``ignore_index`` for
            tokens without a part in the loss. For a draft, :func:`draft_labels` makes them of token ids.
        teacher: the lm_head of a teacher, the target of a draft: an ``nn.Linear`` of V rows, or the FSDP1 unit around
            one. None for the cross entropy alone.
        teacher_hidden: ``[..., E]``, the hidden states that predict the same tokens, after the teacher's final norm.
        teacher_rows: ``[C]`` token id of the teacher for each class of ``lm_head``, in any order; the teacher's
            distribution is the softmax over these rows. None for one vocabulary.
        divergence: as for :func:`distillation_loss`, with ``beta``, ``temperature``, ``hard_weight``,
            ``teacher_softcap`` and ``teacher_logit_scale``.
        softcap: bound of the logits of ``lm_head``, after their factor ``logit_scale``.
        token_weight: ``[...]``, the labels' shape; multiplies each token's loss, not the divisor.
        num_items_in_batch: divisor of the loss instead of the number of tokens with a label.
        memory_budget: bytes of the buffer of both models' logits; None for 1 GiB.

    Returns:
        ``loss``, and without gradients ``divergence``, ``hard_loss`` and ``entropy`` ``[...]``; ``loss`` alone without
        a teacher.

    Raises:
        LigerDistError: arguments that do not fit, before anything is computed.
    """
    given = {"divergence": divergence, "beta": beta, "temperature": temperature, "hard_weight": hard_weight}
    transform = LogitTransform(softcap=teacher_softcap, scale=teacher_logit_scale)
    spec = LossSpec(
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
    )
    call = _HeadCall(lm_head, hidden_states, labels, spec, Execution(memory_budget=memory_budget))

    def check() -> None:
        call.check()
        if teacher is None:
            _check_no_teacher(given, transform, teacher_hidden, teacher_rows)
        else:
            check_divergence(given)
            _check_teacher(call, teacher, teacher_hidden, teacher_rows)
            check_transform(transform, teacher_hidden, None)

    call.agree(check)
    if teacher is None:
        return call.run(None)
    finished: list[LossOutput] = []

    def run(of_teacher: Teacher) -> None:
        distillation = Distillation(teacher=replace(of_teacher, rows=teacher_rows), **given)  # type: ignore[arg-type]
        finished.append(call.run(distillation))

    try:
        with intercepted(without_fsdp1(teacher), run, full_linear, transform), torch.no_grad():
            teacher(teacher_hidden)
    finally:
        fsdp2_forward.reshard(teacher)
    if not finished:
        raise LigerDistError(NOT_CALLED.format("teacher"))
    return finished[0]


class _HeadCall:
    """A call of an lm_head, in the caller's modes, whose logits carry a loss; see [Note: Zero-width logits and
    the upstream side channel]."""

    def __init__(
        self, lm_head: nn.Module, hidden_states: Tensor, labels: Tensor, spec: LossSpec, execution: Execution
    ) -> None:
        self._unit, self.head = lm_head, without_fsdp1(lm_head)
        self._hidden_states, self.labels, self._spec, self._execution = hidden_states, labels, spec, execution
        self._modes = CallerModes()
        self._output: LossOutput | None = None
        """without gradients"""
        self.upstream: tuple[Tensor | None, ...] = ()

    def check(self) -> None:
        """Refuses arguments that do not fit.

        Raises:
            LigerDistError: with the value, what was expected and the way out.
        """
        head = check_lone_head(self.head, "lm_head_loss was given as lm_head")
        if any(not is_of_framework(hook) for hook in head._forward_hooks.values()):
            raise LigerDistError(
                "lm_head has a forward hook, which reads logits that lm_head_loss does not compute; remove it."
            )
        shape, width = tuple(self._hidden_states.shape), head.in_features
        if shape[-1:] != (width,):
            raise LigerDistError(
                f"hidden_states have shape {shape} and lm_head takes {width} features; expected [..., {width}]."
            )
        ignored = self._spec.ignore_index
        check_labels(self.labels, tokens_of="hidden states", shape=self._hidden_states.shape[:-1], ignore_index=ignored)
        if self.labels.device.type == "cpu":
            check_range(self.labels, vocab_size=head.out_features, ignore_index=ignored)
        self._spec.check(vocab_size=head.out_features, labels_shape=self.labels.shape)
        check_count("memory_budget", self._execution.memory_budget, "bytes")

    def agree(self, check: Callable[[], None]) -> None:
        """Runs ``check``; the ranks of a vocab-parallel lm_head agree whether one of them refuses the call.

        Raises:
            LigerDistError: what ``check`` raises, on every rank of a vocab-parallel lm_head.
        """
        shards = row_shards_of(self.head)
        try:
            check()
        except Exception as error:
            if shards is not None:
                shards.agree_on_call(f"nothing, and refuse it: {error}")
            raise
        if shards is not None:
            shards.agree_on_call("a loss of lm_head alone")

    def run(self, distillation: Distillation | None) -> LossOutput:
        """Calls lm_head, whose forward computes the loss, and returns it.

        Raises:
            LigerDistError: the forward did not run in this thread.
        """
        spec = replace(self._spec, distillation=distillation)
        with self._modes.restored(), forward_of(self.head, lambda hidden: self._forward(hidden, spec)):
            logits = self._unit(self._hidden_states)
            logits = logits.to_local() if isinstance(logits, DTensor) else logits
            if self._output is None:
                raise LigerDistError(NOT_CALLED.format("lm_head"))
            (loss,) = LogitsToLoss.apply(logits, self)  # type: ignore[no-untyped-call]
        # The graph of the loss keeps this object, which must not keep the loss.
        return replace(self._output, loss=loss)

    def _forward(self, hidden_states: Tensor, spec: LossSpec) -> Tensor:
        head = cast(Head, self.head)
        adapter = _adapter_of(self.head, head.weight, hidden_states)
        labels, execution = self.labels, self._execution
        output = adapter.linear_cross_entropy(hidden_states, head, labels, spec=spec, execution=execution)
        self._output = detached(output)
        shape, dtype = hidden_states.shape[:-1], hidden_states.dtype
        carried: Tensor = LossToLogits.apply(self, shape, dtype, output.loss)  # type: ignore[no-untyped-call]
        return placed_like(hidden_states, carried)

    def values(self) -> list[Tensor]:
        """Returns the loss."""
        assert self._output is not None
        return [self._output.loss]


def _adapter_of(head: nn.Module, weight: Tensor, hidden_states: Tensor) -> Any:
    """Chooses the sharding adapter inside the forward of ``head``.

    Raises:
        LigerDistError: no framework has unsharded the weight.
    """
    if row_shards_of(head) is not None:
        return VocabParallel()
    if isinstance(weight, DTensor) and isinstance(hidden_states, DTensor):
        return TensorParallelAdapter()
    if isinstance(weight, DTensor) or weight.dim() != 2:
        raise LigerDistError(
            f"the weight of lm_head has shape {tuple(weight.shape)} and is still sharded in its own "
            "forward; call lm_head_loss in the forward of the FSDP or DeepSpeed model that has the lm_head."
        )
    return Replicated()


def _check_no_teacher(
    given: dict[str, Any], transform: LogitTransform, teacher_hidden: Tensor | None, teacher_rows: Tensor | None
) -> None:
    """Refuses arguments of a divergence without a teacher."""
    defaults = {"divergence": "forward_kl", "beta": 0.5, "temperature": 1.0, "hard_weight": 0.0}
    named = [name for name, value in given.items() if value != defaults[name]]
    named += [] if transform == LogitTransform() else ["teacher_softcap or teacher_logit_scale"]
    named += [] if teacher_hidden is None else ["teacher_hidden"]
    named += [] if teacher_rows is None else ["teacher_rows"]
    if named:
        raise LigerDistError(
            f"{named[0]} was given without a teacher, so nothing reads it; pass teacher, an lm_head, or leave it out."
        )


def _check_teacher(
    call: _HeadCall, teacher: nn.Module, teacher_hidden: Tensor | None, teacher_rows: Tensor | None
) -> None:
    """Refuses an lm_head or hidden states of the teacher that do not fit those of the call."""
    if teacher_hidden is None:
        raise LigerDistError(
            "teacher was given without teacher_hidden; pass the hidden states of its last layer, [..., E]."
        )
    head = check_lone_head(without_fsdp1(teacher), "lm_head_loss was given as teacher")
    if head is call.head:
        raise LigerDistError("lm_head and teacher are one module; pass a copy of it as teacher.")
    expected = (*call.labels.shape, head.in_features)
    if tuple(teacher_hidden.shape) != expected:
        raise LigerDistError(
            f"teacher_hidden has shape {tuple(teacher_hidden.shape)}; expected {expected}, one hidden state of the "
            "teacher for each label."
        )
    num_classes = cast(nn.Linear, call.head).out_features
    if teacher_rows is not None:
        check_rows(teacher_rows, vocab_size=head.out_features, name="teacher_rows", num_classes=num_classes)
