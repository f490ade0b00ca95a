"""State of one call from lm_head to its loss function, in a context variable: aligned labels and options in, loss and
outputs out. :mod:`.call` has the arguments, :mod:`.model_loss` makes this object.

[Note: Zero-width logits and the upstream side channel]
The output of lm_head must stay in the autograd graph, because FSDP, DDP and ZeRO hang backward hooks on it, and no
transform between lm_head and loss may change the loss. So the loss leaves lm_head as logits of shape ``[..., 0]``
(:class:`LossToLogits`), and the loss function turns them back into the loss (:class:`LogitsToLoss`). Neither the
value nor the upstream gradient fits into a tensor of width 0: the value is kept on the :class:`PendingLoss`, and in the
backward :class:`LogitsToLoss` leaves the upstream gradient there for :class:`LossToLogits`, which autograd runs next
for these logits. Both functions belong to one pending loss, so calls may nest and run in several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.losses.collectives import require
from liger_dist.losses.execution import Execution
from liger_dist.losses.outputs import LossOutput
from liger_dist.losses.spec import LossSpec
from liger_dist.model.peft import effective_head
from liger_dist.sharding.base import Head
from liger_dist.sharding.tensor_parallel import placed_like

from .call import IGNORE_INDEX, TOKEN_ACCURACY, WrapId
from .label_checks import CHANGED_LABELS, OTHER_TOKENS, check_further, check_options
from .logits import FusedLogits, TensorOperand, with_operands
from .recipe import LossRecipe, listed, selects_by_tensor

Compute = Callable[[Tensor, Head, Tensor], LossOutput]
"""hidden states ``[..., D]``, lm_head or its effective weight, aligned labels ``[...]``"""


NO_HEAD = "its lm_head was not called in the context (thread) of the model's call"


_RUNNING: ContextVar[tuple[tuple[WrapId, LossCall | None], ...]] = ContextVar("liger_dist_running", default=())
"""running calls of wrapped models in this context, innermost last: the model, and the loss if it is one of ours"""


@contextmanager
def running(wrap_id: WrapId, call: LossCall | None) -> Iterator[bool]:
    """Within, the forward of a model runs. Calls may nest: yields True within another one.

    Args:
        call: None where lm_head computes logits.
    """
    outer = _RUNNING.get()
    token = _RUNNING.set((*outer, (wrap_id, call)))
    try:
        yield bool(outer)
    finally:
        _RUNNING.reset(token)


def is_running(wrap_id: WrapId) -> bool:
    """True inside a forward of this model."""
    return any(running_id is wrap_id for running_id, _ in _RUNNING.get())


def current_call(wrap_id: WrapId | None) -> LossCall | None:
    """Returns the loss of the innermost running call, if it is a call of this model."""
    calls = _RUNNING.get()
    return calls[-1][1] if calls and calls[-1][0] is wrap_id else None


def none_further(*_: Any) -> LossCall:
    """Refuses a further loss outside of the call.

    Raises:
        LigerDistError: always.
    """
    raise LigerDistError(
        "a further loss was asked for after the model's forward; call lm_head within it, where its loss is known."
    )


def _nothing() -> None:
    """Does nothing."""


def _terms(node: Any) -> Iterator[Any]:
    """Yields the nodes of a graph whose gradient is that of ``node``: terms of sums."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        name, alpha = type(node).__name__, getattr(node, "_saved_alpha", None)
        if name.startswith("AddBackward") and alpha == 1:
            pending += [before for before, _ in node.next_functions if before is not None]


@dataclass
class LossCall:
    """The loss of one call with labels, checked before the model's forward begins."""

    wrap_id: WrapId
    model_name: str
    recipe: LossRecipe
    labels: Tensor
    """``[B, S]``, aligned: ``labels[:, s]`` belongs to the logits at s"""
    labels_of_next: Tensor | None
    """the same labels before they were shifted, as the model shifts them itself; None where they came aligned"""
    vocab_size: int
    """number of classes, V"""
    spec: LossSpec
    outputs: tuple[str, ...]
    """names that were asked for beside the loss"""
    labels_of_call: tuple[tuple[Tensor, int | Tensor], ...]
    """labels of the call, to detect in-place changes: each with its version counter, or with a copy if it is an
    inference tensor, which has none"""
    compute_loss: Compute
    """of the sharding adapter for this lm_head"""
    execution: Execution
    mean_is_global: bool
    """True if the mean is over the tokens of all ranks"""
    has_lora: bool
    """True if a LoRA layer computes the output of lm_head"""
    on_logits: bool
    """True if the loss function computes the loss from full logits, and lm_head only these"""
    alters_loss: bool
    """with ``on_logits``: True if the loss differs from the model's original one"""
    is_further: bool = False
    """True for the loss of another call of lm_head than the first that a loss takes"""
    pending: PendingLoss | None = None
    """the loss that lm_head has computed; None before its call"""
    head_calls: tuple[LossCall | None, ...] = ()
    """of the first loss: the losses of the calls of lm_head, in their order, this one among them; None for logits"""
    losses_before: int = 0
    """with ``on_logits``: number of losses that the model computes before this one"""
    num_head_calls: int = 0
    """of the first loss: number of calls of lm_head so far"""
    is_in_head: bool = False
    """of the first loss: True in a call of lm_head"""
    share: Callable[[LossCall, float], None] | None = None
    """of the first loss: lets it share one gradient of lm_head's weight, with its coefficient; None where a LoRA layer
    computes another weight for each loss"""
    share_separately: Callable[[], None] = _nothing
    """of the first loss: lets further losses share a gradient without this one"""
    further: Callable[[Tensor, float, bool], LossCall] = none_further
    """of the first loss: makes a further one from its aligned labels, its coefficient, and whether it is the last"""
    next_loss: LossCall | None = None
    """of the first loss: the loss of the next call of lm_head, which the forward has announced"""
    is_announced: bool = False
    """True for a further loss that this library's forward has announced"""
    is_left_out: bool = False
    """True for a first loss whose coefficient is 0: it is not computed"""
    checkpoints: tuple[Any, ...] | None = None
    """of the first loss: checkpoints that know this call, or run around it; None where lm_head is called once"""

    def begin_head_call(self) -> LossCall | None:
        """Begins a call of lm_head, until :attr:`is_in_head` is set back; returns its loss, None for logits."""
        self.is_in_head = True
        announced, self.next_loss = self.next_loss, None
        if announced is not None:
            self.head_calls = (*self.head_calls, announced)
            return announced
        number, self.num_head_calls = self.num_head_calls, self.num_head_calls + 1
        return self.head_calls[number] if number < len(self.head_calls) else None

    def announce(self, coefficient: float) -> None:
        """Expects further losses by :attr:`next_loss`, with which one gradient of lm_head's weight is shared.

        Args:
            coefficient: of this loss; 0 leaves it out.
        """
        if coefficient == 0 and self.spec.distillation is not None:
            raise LigerDistError(
                "main_weight is 0, with which the divergence from a teacher has no part in the loss; give "
                "MultiTokenPrediction a main_weight above 0, or train without a teacher."
            )
        self.is_left_out = coefficient == 0 and not self.outputs
        if self.share is not None and coefficient != 0:
            self.share(self, coefficient)

    def is_term_of(self, loss: Tensor) -> bool:
        """True if ``loss`` is this loss, or a sum with it as one term: its gradient is that of ``loss``, unscaled."""
        delivered = None if self.pending is None else self.pending.node
        return delivered is not None and sum(node is delivered for node in _terms(loss.grad_fn)) == 1

    def losses(self) -> list[LossCall]:
        """Returns all losses of the call, of which this is the first."""
        return [call for call in self.head_calls if call is not None]

    def latest(self) -> PendingLoss | None:
        """Returns the loss that lm_head has computed last."""
        computed = [call.pending for call in self.losses() if call.pending is not None]
        return computed[-1] if computed else None

    def release(self) -> None:
        """Frees what refers to this call: the cycle would live until the garbage collector runs."""
        for call in (self, *self.losses()):
            if call.pending is not None:
                call.pending.node = None
            call.pending = None
        self.head_calls, self.checkpoints, self.next_loss = (), None, None
        self.share, self.share_separately, self.further = None, _nothing, none_further

    def compute(self, head: nn.Module, hidden_states: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Computes the loss inside lm_head's call; returns zero-width logits that carry it.

        Args:
            logits_of: the forward of ``head`` without a loss.
        """
        self.check_unchanged()
        self._check_tokens(hidden_states)
        pending = self.pending = PendingLoss(self)
        if self.is_left_out:
            return self._left_out(hidden_states, pending)
        used = effective_head(head, logits_of, hidden_states) if self.has_lora else cast(nn.Linear, head)
        output = self.nan_if_empty(self.compute_loss(hidden_states, used, self.labels))
        self._release_teacher()
        shape, dtype = hidden_states.shape[:-1], hidden_states.dtype
        values = [output.loss, *(getattr(output, name) for name in self.spec.differentiable_outputs)]
        carried: Tensor = LossToLogits.apply(pending, shape, dtype, *values)  # type: ignore[no-untyped-call]
        pending.output = detached(output)
        if type(hidden_states) is not Tensor:
            carried = placed_like(hidden_states, carried)
        if type(carried) is not Tensor:
            return carried
        return FusedLogits.carrying(carried, pending, vocab_size=self.vocab_size)

    def _check_tokens(self, hidden_states: Tensor) -> None:
        """Refuses a call of lm_head for a further loss with other tokens than when the model was wrapped."""
        if self.is_further and hidden_states.shape[:-1] != self.labels.shape:
            raise LigerDistError(
                f"{self.model_name} calls lm_head with {tuple(hidden_states.shape[:-1])} tokens for a further loss, "
                f"whose labels were of {tuple(self.labels.shape)} when it was wrapped, perhaps because it calls "
                "lm_head more often now. Unwrap it and wrap it again, or use WrapConfig(fused_loss=False)."
            )

    def _left_out(self, hidden_states: Tensor, pending: PendingLoss) -> Tensor:
        """Returns zero-width logits that carry a loss of 0, without a gradient."""
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        pending.output = LossOutput(loss=torch.zeros((), dtype=dtype, device=hidden_states.device))
        carried = pending.output.loss.new_empty((*hidden_states.shape[:-1], 0), dtype=hidden_states.dtype)
        if type(hidden_states) is not Tensor:
            return placed_like(hidden_states, carried)
        return FusedLogits.carrying(carried, pending, vocab_size=self.vocab_size)

    def _release_teacher(self) -> None:
        """Frees the teacher: the graph keeps this call until the backward, which needs none."""
        if self.spec.distillation is not None:
            self.spec = replace(self.spec, distillation=None)
            self.compute_loss = _computed

    def nan_if_empty(self, output: LossOutput) -> LossOutput:
        """Sets the mean over zero tokens to NaN in evaluation, as transformers does: a trainer leaves it out of its
        mean over batches. In training it is 0, so that a rank without labels does not spoil the gradients of the
        others."""
        items = self.spec.num_items_in_batch
        if torch.is_grad_enabled() or self.mean_is_global or not (items is None or isinstance(items, Tensor)):
            return output
        if self.is_announced:
            return output
        device = output.loss.device
        is_empty = (self.labels == self.spec.options.ignore_index).all().to(device, non_blocking=True)
        if items is not None:
            is_empty &= items.reshape(()).to(device, non_blocking=True) == 0
        named = {name: getattr(output, name) for name in ("loss", "divergence", "hard_loss")}
        means: dict[str, Any] = {
            name: torch.where(is_empty, torch.nan, mean) for name, mean in named.items() if mean is not None
        }
        return replace(output, **means)

    def check_unchanged(self) -> None:
        """Raises:
        LigerDistError: the forward has changed the labels in place.
        """
        for labels, before in self.labels_of_call:
            if isinstance(before, Tensor):
                require((labels == before).all(), CHANGED_LABELS.format(self.model_name))
            elif labels._version != before:
                raise LigerDistError(CHANGED_LABELS.format(self.model_name))

    def check_arguments(self, given: dict[str, Any]) -> None:
        """Refuses a model that calls its loss function with other arguments than this loss was computed with. Tensors
        may have been moved in between, so that only their presence is compared."""
        of_spec, items = self.spec.num_items_in_batch, given.get("num_items_in_batch")
        are_numbers = isinstance(of_spec, int | float) and isinstance(items, int | float)
        differs = {
            "num_items_in_batch": (items is None) != (of_spec is None) or (are_numbers and items != of_spec),
            "ignore_index": given.get("ignore_index", IGNORE_INDEX) != self.spec.options.ignore_index,
        }
        for name, is_other in differs.items():
            if is_other:
                raise LigerDistError(
                    f"the loss was computed with the {name} that {self.model_name} was called with, but the model "
                    "calls its loss function with another one; wrap it with WrapConfig(fused_loss=False)."
                )

    def check_not_altered(self) -> None:
        """Refuses a call whose loss the model has computed itself, without lm_head's.

        Raises:
            LigerDistError: options or outputs were asked of it.
        """
        asked = self.outputs or (("options of the loss",) if self.alters_loss else ())
        if asked:
            raise LigerDistError(
                f"{asked[0]} was asked of {self.model_name}, but {NO_HEAD}; leave it out of such calls."
            )

    def further_outputs(self) -> dict[str, Tensor]:
        """Returns the requested outputs beside the loss, by name.

        Raises:
            LigerDistError: the loss was computed but never used.
        """
        pending = self.pending
        unused = [call for call in self.losses() if call.pending is not None and not call.pending.delivered]
        if pending is None or unused:
            raise LigerDistError(
                f"{self.model_name} called lm_head but never its loss_function; the fused loss was not used. Unwrap "
                "the model, or wrap it with WrapConfig(fused_loss=False)."
            )
        assert pending.output is not None
        # The graph of the further outputs holds the pending loss, which must not hold them.
        further_outputs, pending.further_outputs = pending.further_outputs, {}
        found: dict[str, Tensor] = {}
        for name in self.outputs:
            if name == TOKEN_ACCURACY:
                assert pending.output.is_top1 is not None
                counted = (self.labels != self.spec.options.ignore_index).sum()
                found[name] = pending.output.is_top1.sum() / counted.to(pending.output.is_top1.device).clamp(min=1)
            else:
                found[name] = further_outputs.get(name, getattr(pending.output, name))
        return found


@dataclass
class PendingLoss:
    """The loss of one lm_head call, on its way to the model's loss function."""

    call: LossCall
    output: LossOutput | None = None
    """the finished loss, outside of the graph"""
    further_outputs: dict[str, Tensor] = field(default_factory=dict)
    """further outputs that carry gradients"""
    upstream: tuple[Tensor | None, ...] = field(default=(), repr=False)
    """gradients of the loss and of ``further_outputs``"""
    delivered: bool = False
    """True when the loss function has returned it"""
    node: Any = field(default=None, repr=False)
    """of the graph, of the loss that the loss function has returned"""

    def inline_loss(self, logits: FusedLogits, targets: Any, options: dict[str, Any]) -> Tensor:
        """Returns the loss where the model's forward calls ``torch.nn.functional.cross_entropy`` itself.

        Raises:
            LigerDistError: the other arguments are not those that the probe saw.
        """
        recipe, name = self.call.recipe, self.call.model_name
        if recipe.owner is not None:
            raise LigerDistError(
                f"{name} computes a cross entropy from the logits of one call in addition to its loss_function, which "
                "it did not do when it was wrapped, and the logits were never computed. Unwrap it and wrap it again "
                "with that loss on, or use WrapConfig(fused_loss=False)."
            )
        check_options(options, recipe.label_smoothing, model_name=name)
        return self.deliver(logits, targets, is_aligned=True)

    def deliver(self, logits: Tensor, targets: Any, *, is_aligned: bool) -> Tensor:
        """Returns the loss where the model computes it from ``logits`` and its targets.

        Args:
            is_aligned: True if each target is scored by the logits at its position.

        Raises:
            LigerDistError: the model computes a second one, or did something to the logits or the labels that it did
                not do when it was wrapped.
        """
        name = self.call.model_name
        if self.delivered:
            raise LigerDistError(
                f"{name} computes a second loss from the logits of one call, which were never computed; wrap it with "
                "WrapConfig(fused_loss=False)."
            )
        if isinstance(logits, FusedLogits):
            changes, recipe = logits.changes, self.call.recipe
            if recipe.transform.bias is not None:
                recipe = self._with_buffer(recipe)
            seen = recipe.changes
            if changes != seen and not recipe.allows(changes):
                raise LigerDistError(
                    f"{name} did {listed(changes)} to its logits, but {listed(seen)} when "
                    "it was wrapped, which is what its loss was computed with. Unwrap it and wrap it again after such "
                    "a change, or use WrapConfig(fused_loss=False)."
                )
            if not logits.runs_only_frameworks():
                raise LigerDistError(
                    f"{name} passes its logits through a custom autograd function, which may change their "
                    "gradient; the loss was computed without it. Use WrapConfig(fused_loss=False)."
                )
            if changes and selects_by_tensor(changes):
                self._check_selection(targets)
            else:
                self._check_targets(targets, is_aligned=is_aligned)
            logits = logits.as_subclass(Tensor)
        else:
            self._check_targets(targets, is_aligned=is_aligned)
        self.delivered = True
        loss, *further_outputs = LogitsToLoss.apply(logits, self)  # type: ignore[no-untyped-call]
        self.node = loss.grad_fn
        self.further_outputs = dict(zip(self.call.spec.differentiable_outputs, further_outputs, strict=True))
        return cast(Tensor, loss)

    def _with_buffer(self, recipe: LossRecipe) -> LossRecipe:
        """Returns the recipe with the buffer that this call's loss has read as the tensor that is added to logits."""
        assert self.call.spec.logit_bias is not None
        buffer = TensorOperand(self.call.spec.logit_bias)
        return replace(recipe, changes=with_operands(recipe.changes, lambda probed: buffer))

    def take(self, logits: FusedLogits) -> Tensor:
        """Returns the loss where this library's code has called lm_head.

        Raises:
            LigerDistError: a hook has changed the logits.
        """
        if logits.changes or not logits.runs_only_frameworks():
            raise LigerDistError(
                f"a hook did {listed(logits.changes)} to logits of {self.call.model_name} for further tokens, which "
                "were never computed; remove it."
            )
        self.delivered = True
        loss, *_ = LogitsToLoss.apply(logits.as_subclass(Tensor), self)  # type: ignore[no-untyped-call]
        return cast(Tensor, loss)

    def values(self) -> list[Tensor]:
        """Returns the finished loss and the outputs that carry gradients."""
        assert self.output is not None
        return [self.output.loss, *(getattr(self.output, name) for name in self.call.spec.differentiable_outputs)]

    def _check_selection(self, targets: Any) -> None:
        """Checks that the tokens which the forward has selected have all labels that count: the loss was computed of
        these. On a GPU by an assertion on the device."""
        ignored = self.call.spec.options.ignore_index
        if isinstance(targets, Tensor):
            counted = (self.call.labels != ignored).sum()
            same = (targets != ignored).sum() == counted.to(targets.device)
            require(same, OTHER_TOKENS.format(self.call.model_name))

    def _check_targets(self, targets: Any, *, is_aligned: bool) -> None:
        """Checks that the loss function got the labels that the loss was computed with: the same memory, or equal
        values, which are compared on a GPU by an assertion on the device."""
        call = self.call
        call.check_unchanged()
        if not isinstance(targets, Tensor):
            return
        labels, of_next = call.labels, call.labels_of_next
        if call.is_further:
            ignored = call.spec.options.ignore_index
            check_further(targets, labels, ignored, is_aligned=is_aligned, model_name=call.model_name)
            return
        if of_next is not None and _is_same_view(targets, of_next[..., 1:] if is_aligned else of_next):
            return
        if of_next is None and _is_same_view(targets, labels):
            return
        expected = [labels, labels[..., :-1]] if is_aligned else [labels if of_next is None else of_next]
        same = [x for x in expected if x.numel() == targets.numel()]
        if not same:
            raise LigerDistError(CHANGED_LABELS.format(call.model_name))
        given = targets.reshape(-1)
        require((same[0].reshape(-1).to(given.device) == given).all(), CHANGED_LABELS.format(call.model_name))


def pending_of(call: LossCall | None, logits: Tensor) -> PendingLoss | None:
    """Returns the loss that ``logits`` carry; None for full logits.

    Args:
        call: the running call, whose loss a zero-width tensor of another class carries (a DTensor's local tensor).
    """
    if isinstance(logits, FusedLogits):
        return logits.carried if isinstance(logits.carried, PendingLoss) else None
    return call.latest() if call is not None and logits.shape[-1] == 0 else None


def _computed(hidden_states: Tensor, head: Head, labels: Tensor) -> LossOutput:
    raise LigerDistError("a distillation loss was computed already; call distillation_loss again.")


def detached(output: LossOutput) -> LossOutput:
    values: dict[str, Any] = {name: value for name, value in vars(output).items() if isinstance(value, Tensor)}
    return replace(output, **{name: value.detach() for name, value in values.items()})


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    """True only if both are views of the same elements in the same order."""
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype or a.device != b.device or a.numel() != b.numel():
        return False
    return (a.shape == b.shape and a.stride() == b.stride()) or (a.is_contiguous() and b.is_contiguous())


class Carried(Protocol):
    """Tensors on their way from lm_head to a loss."""

    upstream: tuple[Tensor | None, ...]
    """gradients of the values, between the two backwards"""

    def values(self) -> list[Tensor]:
        """Returns the tensors, without gradients."""
        ...


class LossToLogits(torch.autograd.Function):
    """See [Note: Zero-width logits and the upstream side channel]."""

    @staticmethod
    def forward(ctx: Any, pending: Carried, shape: torch.Size, dtype: torch.dtype, *values: Tensor) -> Tensor:
        ctx.pending, ctx.nothing = pending, (None,) * len(values)
        return values[0].new_empty((*shape, 0), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Nothing was left where only the logits themselves were asked for a gradient.
        upstream, ctx.pending.upstream = ctx.pending.upstream or ctx.nothing, ()
        return None, None, None, *upstream


class LogitsToLoss(torch.autograd.Function):
    """See [Note: Zero-width logits and the upstream side channel]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, pending: Carried) -> tuple[Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        return tuple(value.clone() for value in pending.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        ctx.pending.upstream = upstream
        return torch.zeros_like(logits), None
