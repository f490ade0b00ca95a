"""Hooks of one model instance that move its loss into its lm_head: the call begins at the model's entry, lm_head
computes its loss, the model's loss function returns it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_dist.config import LOGITS, WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.peft_layers import heads_at
from liger_dist.sharding.base import Wrapper
from liger_dist.structure import Structure
from liger_dist.tracing import untraced
from liger_dist.weak import Weakly, WeakReference

from .distilled_calls import distillation_of
from .entry import Entry
from .head_access import HeadAccess
from .host_calls import returns_logits
from .lm_head import fuse_head, is_fused_by, restore_head
from .logits import FusedLogits
from .loss_call import NO_HEAD, LossCall, PendingLoss, current_call, enter, is_running, leave, set_call
from .output import fused_output
from .recipe import LossRecipe
from .signature import LOSS_KEYWORDS, Call
from .trl_calls import read_call, read_scored_call
from .wrapped_calls import WrappedCalls

_ARGUMENTS_OF_LOSSES = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index")
"""of transformers' token losses, by position"""
_PAUSED: ContextVar[frozenset[int]] = ContextVar("liger_dist_paused", default=frozenset())
"""ids of the seams that compute full logits in this context"""


class _AfterHead:
    """Forward hook of lm_head, which does not keep its seam alive."""

    def __init__(self, seam: Seam) -> None:
        self._seam = WeakReference(seam)

    def __call__(self, head: nn.Module, args: Any, output: Any) -> Any:
        seam = self._seam()
        return None if seam is None else seam.after_head(output)


class Seam:
    """Connects one model instance to its lm_head. Installed and removed as a whole."""

    model = Weakly()

    def __init__(
        self, model: nn.Module, structure: Structure, recipe: LossRecipe, *, strategy: str, config: WrapConfig
    ) -> None:
        self.model = model
        self.access = HeadAccess(model, structure, seam=self, strategy=strategy, config=config)
        self.entry = Entry(model, structure, recipe, self.access, config)
        self.entry.seam = self
        self.entry.warns_of_wrappers = strategy == "auto"
        self.wrapped_calls: WrappedCalls | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._pauses = 0
        owner = self.entry.owner
        self._had_own_loss_function = owner is not None and "_loss_function" in vars(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Seam:
        """A copy of the model has its own seam; a copy of lm_head alone (PEFT's) shares this one."""
        if id(self.model) not in memo:
            return self
        twin = Seam.__new__(Seam)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def fuse(self) -> None:
        """Swaps the class of lm_head and sets the loss function; before the model is sharded."""
        for head in heads_at(self.access.outer_head):
            fuse_head(head, self)
        if self.entry.owner is not None:
            self.entry.owner.loss_function = self.loss_function

    def install_hooks(self) -> None:
        """Hooks the forwards of model and lm_head; after the model is sharded, so that a wrong label is refused before
        FSDP2's hooks start a collective."""
        self._hooks = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            self.access.outer_head.register_forward_hook(_AfterHead(self)),
        )

    def remove(self) -> None:
        """Undoes :meth:`fuse` and :meth:`install_hooks`."""
        if self.wrapped_calls is not None:
            self.wrapped_calls.remove()
        for hook in self._hooks:
            hook.remove()
        owner = self.entry.owner
        if owner is not None and self.entry.has_installed():
            if self._had_own_loss_function:
                owner.loss_function = self.entry.own_loss_function
            else:
                del owner._loss_function
        for head in heads_at(self.access.outer_head):
            if is_fused_by(head, self):
                restore_head(head)

    def send_through(self, wrapper: Wrapper) -> None:
        """Sends losses asked of the model inside ``wrapper``, which wrap made, through it."""
        self.wrapped_calls = WrappedCalls(self.model, wrapper)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, calls in this context compute the model's own loss on full logits."""
        token = _PAUSED.set(_PAUSED.get() | {id(self)})
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            _PAUSED.reset(token)

    def _wants_logits(self, called: nn.Module, call: Call) -> bool:
        # Replicas of nn.DataParallel run in separate threads, while the thread that paused waits for them. It
        # gathers their outputs, so that zero-width logits must not be among them.
        is_replica = called is not self.model
        if distillation_of(self) is not None:
            return False
        is_paused = id(self) in _PAUSED.get() or (is_replica and self._pauses > 0)
        if is_paused or LOGITS in call.outputs:
            return True
        return not torch.is_grad_enabled() and (is_replica or returns_logits())

    @untraced
    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        enter(self)
        goes_to_wrapper = self.wrapped_calls is not None and self.wrapped_calls.takes(args, kwargs)
        wants_logits = partial(self._wants_logits, model)
        call_of_trl, kwargs = read_call(model, kwargs)
        scored_call, with_labels = read_scored_call(
            model, args, kwargs, self.entry.signature.names, self.entry.structure.vocab_size
        )
        if scored_call is not None and not self.entry.is_fused_now():
            scored_call = None
        kwargs = kwargs if scored_call is None else with_labels
        distillation = distillation_of(self) if kwargs.get("labels") is not None else None
        call, checked = self.entry.read(args, kwargs, wants_logits=wants_logits, distillation=distillation)
        if goes_to_wrapper:
            return None  # The wrapper calls this model again, with all its arguments.
        if call_of_trl is not None and call_of_trl.operands_in_fp32:
            call = replace(call, logits_dtype="fp32_operands")
        loss_call, kwargs = self.entry.decide(call, checked, wants_logits=wants_logits(call))
        if loss_call is not None:
            host_call = call_of_trl or scored_call
            loss_call.answer = None if host_call is None else host_call.answer
            set_call(loss_call)
        return call.args, kwargs

    @untraced
    def after_head(self, output: Any) -> Any:
        """Tensor parallelism converts lm_head's output from a DTensor to a tensor; it carries the loss again from
        here."""
        call = current_call(self)
        is_plain = call is not None and call.pending and not call.on_logits and type(output) is Tensor
        if call is None or not is_plain or output.shape[-1] != 0:
            return None
        return FusedLogits.carrying(output, call.pending[-1], vocab_size=call.vocab_size)

    @untraced
    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the owner's loss function: the finished loss, or the owner's own for full logits."""
        own = self.entry.own_loss_function
        assert own is not None
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        targets = kwargs["labels"] if "labels" in kwargs else args[1]
        shifted = kwargs.get("shift_labels")
        call = current_call(self)
        if call is not None and call.on_logits:
            loss = self._score(call, logits, targets, shifted)
            return loss if call.alters_loss else own(*args, **kwargs)
        pending = self._pending(call, logits)
        if pending is None:
            if not is_running(self):
                self._check_call_without_hooks(kwargs)
            return own(*args, **kwargs)
        pending.call.check_arguments(dict(zip(_ARGUMENTS_OF_LOSSES, args, strict=False)) | kwargs)
        is_same = shifted is None or self.entry.recipe.targets == "same"
        is_aligned = not is_same or self.entry.recipe.targets == "same"
        return pending.deliver(logits, targets if is_same else shifted, is_aligned=is_aligned)

    def _pending(self, call: LossCall | None, logits: Tensor) -> PendingLoss | None:
        """The loss that ``logits`` carry; None for full logits."""
        if isinstance(logits, FusedLogits):
            # A nested call that failed in an earlier hook may have ended the frame of this one.
            return logits.carried if isinstance(logits.carried, PendingLoss) else None
        return call.pending[-1] if call is not None and call.pending and logits.shape[-1] == 0 else None

    def _score(self, call: LossCall, logits: Tensor, targets: Tensor, shifted: Tensor | None) -> Tensor:
        """The loss of full logits, with its targets aligned as the model's own loss function does."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        aligned = targets
        if self.entry.own_loss_function is ForCausalLMLoss:
            ignored = call.loss.options.ignore_index
            aligned = nn.functional.pad(targets[..., 1:], (0, 1), value=ignored) if shifted is None else shifted
        return call.score(logits, aligned)

    def _check_call_without_hooks(self, kwargs: dict[str, Any]) -> None:
        """Warns of a loss outside of a call of the model, such as ``model.forward(...)``, which runs no hooks.

        Raises:
            LigerDistError: it has options of the loss, which nothing would compute.
        """
        name = type(self.model).__name__
        for option in LOSS_KEYWORDS:
            if kwargs.get(option) is not None and option not in self.entry.signature.names:
                raise LigerDistError(
                    f"{option} was given to a loss of {name} outside of a call of the model, where nothing computes "
                    "it: model.forward(...) runs without the model's hooks. Call model(...) itself."
                )
        if self.entry.config.token_mean == "global":
            raise LigerDistError(
                f"token_mean is 'global' but a loss of {name} was asked for outside of a call of the model, where it "
                "is the rank's own mean: model.forward(...) runs without the model's hooks. Call model(...) itself, or "
                "pass num_items_in_batch and leave token_mean out."
            )
        self.entry.warn_once(
            f"a loss of {name} was computed from full logits, outside of a call of the model, and is not fused: "
            "model.forward(...) runs without the model's hooks. Call model(...) itself."
        )

    @untraced
    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = leave(self)
        if call is None:
            return None
        try:
            if output is None:
                return None
            if not (call.pending or call.on_logits):
                call.check_not_altered()
                self.entry.warn_once(f"liger_dist leaves the loss of {call.model_name} unfused: {NO_HEAD}.")
                return None
            reports = call.reports()
            name = type(model).__name__
            answer = fused_output(output, reports, model_name=name, without_logits=not call.on_logits)
            return answer if call.answer is None else call.answer(answer)
        finally:
            # Pending losses refer to their call: the cycle would keep both until the garbage collector runs.
            call.pending.clear()
