"""The entry of one call of a wrapped model: its arguments are checked once, and it is decided whether its loss is
fused, computed from full logits, or the model's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_dist.config import LOGITS, LogitsDtype, WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.fused_layers.recurrent import PackedDocuments
from liger_dist.losses.arguments import Execution, LossArguments
from liger_dist.losses.distillation import Distillation
from liger_dist.losses.labels import LabelSummary, check_labels, check_range
from liger_dist.losses.pending_gradients import PendingGradients
from liger_dist.losses.scales import denominator
from liger_dist.peft_layers import TRAINED_ROWS, base_head, has_active_dropout
from liger_dist.sharding import ddp, deepspeed, fsdp2, host_sequences
from liger_dist.sharding.base import DataParallel
from liger_dist.sharding.fsdp1 import is_outside_forward
from liger_dist.sharding.process_groups import world_size
from liger_dist.sharding.vocab_parallel import row_shards_of
from liger_dist.structure import Structure, embedding_of
from liger_dist.tracing import in_backward, is_transformed
from liger_dist.weak import Weakly

from .head_access import HeadAccess
from .lm_head import computes_in_fp32
from .loss_call import GivenLabels, LossCall
from .recipe import LossRecipe
from .signature import IGNORE_INDEX, Call, Signature, options_for


@dataclass(frozen=True)
class Checked:
    """A call with labels whose arguments have been checked."""

    head: nn.Module
    labels: Tensor
    is_aligned: bool
    """True if each token is scored against the label at its own position"""
    loss: LossArguments


class Entry:
    """Reads and checks the calls of one model."""

    model = Weakly()
    owner = Weakly()
    """the module whose ``loss_function`` gets the logits, or None"""
    seam = Weakly()
    """the seam whose ``loss_function`` is put on the owner"""

    def __init__(
        self, model: nn.Module, structure: Structure, recipe: LossRecipe, access: HeadAccess, config: WrapConfig
    ) -> None:
        self.model, self.structure, self.recipe, self.access, self.config = model, structure, recipe, access, config
        self.signature = Signature(model, outputs=config.outputs, own_smoothing=recipe.label_smoothing)
        self.owner = None if recipe.owner is None else model.get_submodule(recipe.owner)
        self.own_loss_function: Callable[..., Tensor] | None = getattr(self.owner, "loss_function", None)
        self.warns_of_wrappers = False
        """True if other code may wrap the model"""
        self.packed: PackedDocuments | None = None
        """refuses packed documents that the model's layers would mix"""
        self.replaced_attention: str | None = None
        """implementation of the model's own attention where another one is selected, whose hidden states of padding
        differ; None where it was kept"""
        self._has_looked_at_padding = False
        self._warned: set[str] = set()
        self._has_scored = False
        self._pending = PendingGradients()

    def read(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        wants_logits: Callable[[Call], bool],
        distillation: Distillation | None = None,
    ) -> tuple[Call, Checked | None]:
        """The call, checked where its loss is not simply the model's own. The ranks of a vocab-parallel lm_head agree
        before the first collective whether one refuses it.

        Raises:
            LigerDistError: on every rank of a vocab-parallel lm_head, where one refuses; otherwise on this one.
        """
        shards = row_shards_of(self.structure.head)
        checked = None
        try:
            call = self.signature.read(args, kwargs)
            self._check_packed(call)
            if distillation is not None:
                call = call.distilled(distillation)
            has_labels = call.named.get("labels") is not None
            is_scored = bool(self.requested(call)) or not wants_logits(call)
            if has_labels and is_scored and not self.access.has_trained_rows():
                checked = self.check(call)
                if call.named.get("num_items_in_batch") is not None and distillation is None:
                    self._warn_of_ignored_items()
        except Exception as error:
            if shards is not None:
                shards.agree_on_call(f"nothing, and refuse it: {error}")
            raise
        if shards is not None:
            shards.agree_on_call("a loss" if has_labels else "a call without labels")
        return call, checked

    def _check_packed(self, call: Call) -> None:
        if self.packed is not None:
            self.packed.check(call.named)

    def check(self, call: Call) -> Checked:
        """Refuses what is wrong with the model's arguments, before it runs its first collective."""
        named, ignore_index = call.named, call.ignore_index
        head = self.access.in_use()
        vocab_size = self._vocab_size(head)
        for given in (named["labels"], named.get("shift_labels")):
            if given is not None and not isinstance(given, Tensor):
                raise LigerDistError(f"labels are a {type(given).__name__}; expected a tensor of integers.")
        labels, is_aligned = self._targets(named, ignore_index)
        inputs = _inputs(named)
        config = getattr(self.model, "config", None)
        keeps_some = isinstance(named.get("logits_to_keep"), Tensor) or bool(named.get("logits_to_keep"))
        same_tokens = inputs is not None and not keeps_some and not getattr(config, "is_encoder_decoder", False)
        tokens = inputs.shape[:2] if inputs is not None and same_tokens else labels.shape
        check_labels(labels, tokens_of="inputs", shape=tokens, ignore_index=ignore_index)
        if labels.device.type == "cpu":
            scored = labels if is_aligned else labels[..., 1:]
            check_range(scored, vocab_size=vocab_size, ignore_index=ignore_index)
        self._warn_of_scored_padding(labels, is_aligned, named.get("attention_mask"), ignore_index)
        # Never by the attribute, which a parametrization computes: weights may be sharded here.
        host_sequences.check(self.model, base_head(head)._parameters.get("weight"), named.get("position_ids"))
        loss = call.arguments(self.recipe)
        loss.check(vocab_size=vocab_size, labels_shape=labels.shape)
        return Checked(head, labels, is_aligned, loss)

    def _vocab_size(self, head: nn.Module) -> int:
        """Rows of lm_head; more than at :func:`liger_dist.wrap` where ``resize_token_embeddings`` has grown a tied one
        in place."""
        weight = base_head(head)._parameters.get("weight")
        is_full = type(weight) is nn.Parameter and weight.shape[1:] == (self.structure.hidden_size,)
        return max(self.structure.vocab_size, len(weight)) if is_full else self.structure.vocab_size  # type: ignore[arg-type]

    def _warn_of_scored_padding(self, labels: Tensor, is_aligned: bool, mask: Any, ignore_index: int) -> None:
        """Warns, once, of labels that are scored by the logits of padding. On a GPU only the first batch with a mask is
        looked at: that waits."""
        is_known = self._has_looked_at_padding or self.replaced_attention is None
        if is_known or not isinstance(mask, Tensor) or mask.shape != labels.shape:
            return
        if labels.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return
            self._has_looked_at_padding = True
        if not is_aligned:
            mask, labels = mask[..., :-1], labels[..., 1:]
        differs = (mask == 0) & (labels.to(mask.device) != ignore_index)
        if self.replaced_attention != "eager":
            # Padding on the left sees nothing, which is 0 here as in scaled_dot_product_attention.
            differs &= mask.cumsum(-1) > 0
        if bool(differs.any()):
            self._has_looked_at_padding = True
            self.warn_once(
                f"labels of {type(self.model).__name__} score logits of padding, whose attention_mask is 0. They "
                "differ from those of the model's own attention, and so does the loss. Give padding, and the token "
                f"after padding on the left, the label {ignore_index}, or wrap with WrapConfig(varlen_attention=False)."
            )

    def decide(
        self, call: Call, checked: Checked | None, *, wants_logits: bool
    ) -> tuple[LossCall | None, dict[str, Any]]:
        """The loss call, or None for the model's own loss; and the keywords of the model's forward.

        Raises:
            LigerDistError: options are asked of a loss that does not have them.
        """
        kwargs = call.kwargs
        if call.named.get("labels") is None:
            # Without labels the models of transformers compute no loss, whatever other arguments they get.
            return None, kwargs
        if "use_cache" in self.signature.names[len(call.args) :] and kwargs.get("use_cache") is None:
            # A loss never reads a cache, and some attention masks depend on one: fused or not, the loss is the same.
            kwargs["use_cache"] = False
        asked = self.requested(call)
        if wants_logits and not asked:
            return None, kwargs
        if call.distillation is not None:
            self.refuse_unfused_distillation()
        if checked is None:
            self.warn_once(f"liger_dist leaves the loss of {call.model_name} unfused: {TRAINED_ROWS}.")
            return None, kwargs | (self._keywords_of_own_loss(call, asked, TRAINED_ROWS) if asked else {})
        self.access.adapter(checked.head)
        if not self._has_scored:
            fsdp2.return_losses_unrounded(self.model)
        self._check_wrapper(checked.head)
        reason = "logits are asked for" if wants_logits else self._reason_to_leave(checked.head)
        if reason is not None and not wants_logits:
            self.warn_once(
                f"liger_dist leaves the loss of {call.model_name} unfused: {reason}. The loss is the model's own."
            )
        if reason is None or (asked and self._can_score()):
            return self._loss_call(call, checked, on_logits=reason is not None), kwargs
        if asked:
            kwargs = kwargs | self._keywords_of_own_loss(call, asked, reason)
        return None, kwargs

    def _loss_call(self, call: Call, checked: Checked, *, on_logits: bool) -> LossCall:
        loss = checked.loss
        if self.recipe.transform.bias is not None:
            loss = replace(loss, logit_bias=self.model.get_buffer(self.recipe.transform.bias).reshape(-1))
        if loss.token_weight is not None and not checked.is_aligned:
            # One weight per label, so they are shifted together.
            loss = replace(loss, token_weight=nn.functional.pad(loss.token_weight[..., 1:], (0, 1)))
        given = (call.named[name] for name in ("labels", "shift_labels") if call.named.get(name) is not None)
        execution = self._execution(call, checked, with_summary=not on_logits)
        self._has_scored = self._has_scored or not on_logits
        compute = partial(self.access.adapter(checked.head).linear_cross_entropy, loss=loss, execution=execution)
        return LossCall(
            model_name=call.model_name,
            recipe=self.recipe,
            labels=checked.labels,
            is_aligned=checked.is_aligned,
            vocab_size=self._vocab_size(checked.head),
            loss=loss,
            outputs=tuple(name for name in call.outputs if name != LOGITS),
            given=tuple(GivenLabels.of(tensor) for tensor in given),
            compute_loss=compute,
            execution=execution,
            mean_is_global=self._mean_is_global(checked.head),
            on_logits=on_logits,
            alters_loss=bool(call.loss_options) or self.config.token_mean == "global",
        )

    def _execution(self, call: Call, checked: Checked, *, with_summary: bool) -> Execution:
        mean_over = self._mean_over(checked.head)
        summary = None
        if with_summary:
            labels = checked.labels if checked.is_aligned else checked.labels[..., 1:]
            summary = LabelSummary.start(labels, call.ignore_index, self.config.backend)
        in_fp32: LogitsDtype = "fp32_operands" if computes_in_fp32(base_head(checked.head)) else None
        return Execution(
            backend=self.config.backend,
            memory_budget=self.config.memory_budget,
            logits_dtype=in_fp32 or call.logits_dtype or self.config.logits_dtype,
            pending=self._pending,
            label_summary=summary,
            max_valid_tokens=self.config.max_valid_tokens,
            is_first=not self._has_scored,
            mean_groups=mean_over.groups,
            divide_factor=mean_over.divide_factor,
        )

    def _mean_is_global(self, head: nn.Module) -> bool:
        """True if this call's mean is over the tokens of all ranks. Without gradients ranks with full weights may
        evaluate alone, as many batches as each has: their mean is their own."""
        is_alone = not torch.is_grad_enabled() and self.access.adapter(head).name == "replicated"
        return self.config.token_mean == "global" and not is_alone

    def _mean_over(self, head: nn.Module) -> DataParallel:
        if not self._mean_is_global(head):
            return DataParallel(groups=(), divide_factor=1.0)
        return self.access.data_parallel(head)

    def requested(self, call: Call) -> tuple[str, ...]:
        """Names that the call asks of the loss and that the model's own loss does not have. In evaluation the mean of a
        loss beside full logits may be the rank's own."""
        is_global = self.config.token_mean == "global" and call.named.get("num_items_in_batch") is None
        counts = is_global and (torch.is_grad_enabled() or self._can_score())
        return call.asks_of_the_loss + (("token_mean='global'",) if counts else ())

    def _can_score(self) -> bool:
        """True if the installed loss function will get the full logits, in a call that autograd follows as usual."""
        return self.has_installed() and not is_transformed()

    def has_installed(self) -> bool:
        """True if the owner's loss function is still the one that the seam has installed."""
        return self.owner is not None and vars(self.owner).get("_loss_function") == self.seam.loss_function

    def _keywords_of_own_loss(self, call: Call, asked: tuple[str, ...], reason: str) -> dict[str, Any]:
        """The options of a loss that is the user's own function, as keywords for it.

        Raises:
            LigerDistError: it has no parameters for them, or the model's forward computes its loss itself.
        """
        if self.owner is not None and not self.has_installed() and set(asked) == set(call.asks_of_the_loss):
            own: Any = self.owner.loss_function
            return options_for(own, call, reason=reason)
        raise LigerDistError(
            f"{asked[-1]} was asked of {call.model_name}, whose loss is not fused here ({reason}), so that nothing "
            "would compute it. Leave it out of such calls."
        )

    def _check_wrapper(self, head: nn.Module) -> None:
        """Refuses a loss outside of the forward of an FSDP1 wrapper that other code has made, and warns of one whose
        gradients nothing averages."""
        if not self.warns_of_wrappers or is_transformed():
            return
        name = type(self.model).__name__
        if is_outside_forward(self.model, embedding_of(self.model)):
            raise LigerDistError(
                f"a loss was asked of the {name} inside FullyShardedDataParallel, outside the wrapper's forward, which "
                "unshards weights and reduces gradients. Call the wrapper, or wrap the model itself with "
                "strategy='fsdp1'."
            )
        is_replicated = self.access.adapter(head).name == "replicated"
        is_averaged = world_size() == 1 or ddp.may_be_running() or deepspeed.has_started()
        # A checkpoint of the whole model is recomputed in the backward, outside of every forward.
        if torch.is_grad_enabled() and is_replicated and not is_averaged and not in_backward():
            self.warn_once(
                f"a loss of {name} was asked for on {dist.get_world_size()} ranks outside the forward of "
                "DistributedDataParallel, so that nothing averages its gradients. Call the wrapper instead of the "
                "model inside it, wrap with strategy='ddp' (or 'deepspeed'), or average them yourself."
            )

    def check_distilled(self, kwargs: dict[str, Any], check_teacher: Callable[[], None]) -> None:
        """Refuses what is wrong with a student's call, or with its teacher, before the teacher runs. The ranks of a
        vocab-parallel lm_head agree whether one refuses it.

        Raises:
            LigerDistError: as :meth:`read`.
        """
        shards = row_shards_of(self.structure.head)
        try:
            unknown = self.signature.unknown(kwargs)
            if unknown:
                raise LigerDistError(
                    f"distillation_loss was called with {unknown[0]!r}, which {type(self.model).__name__} does not "
                    "take; expected arguments of the student's forward."
                )
            call = self.signature.read((), kwargs)
            self._check_packed(call)
            call.check_distilled()
            self.refuse_unfused_distillation()
            self.check(call)
            check_teacher()
        except Exception as error:
            if shards is not None:
                shards.agree_on_call(f"nothing, and refuse it: {error}")
            raise
        if shards is not None:
            shards.agree_on_call("a distillation loss")

    def refuse_unfused_distillation(self) -> None:
        """Raises:
        LigerDistError: the model's loss would not be fused, so that nothing would compute a divergence.
        """
        reason = TRAINED_ROWS if self.access.has_trained_rows() else self._reason_to_leave(self.access.in_use())
        if reason is not None:
            raise LigerDistError(
                f"a distillation loss was asked of {type(self.model).__name__}, whose loss is not fused here: {reason}."
            )

    def is_fused_now(self) -> bool:
        """True if the loss of a call would be fused, and no warning would say otherwise."""
        return not self.access.has_trained_rows() and self._reason_to_leave(self.access.in_use()) is None

    def _reason_to_leave(self, head: nn.Module) -> str | None:
        """Why this call's loss is the model's own, from what may have changed since wrapping."""
        if has_active_dropout(head):
            return (
                "the LoRA layer on its lm_head has dropout, which gives every token another weight; set "
                "lora_dropout=0.0 or leave the head out of target_modules"
            )
        if is_transformed():
            return "torch.func or forward-mode differentiation is at work, where the fused loss is not defined"
        if self.owner is not None and not self.has_installed():
            loss_function = vars(self.owner).get("_loss_function")
            return f"its loss_function is {getattr(loss_function, '__qualname__', loss_function)} now"
        return None

    def warn_once(self, sentence: str) -> None:
        """Warns with a sentence, the first time."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(sentence, stacklevel=2)

    def _warn_of_ignored_items(self) -> None:
        if torch.is_grad_enabled() and not self.recipe.takes_num_items:
            self.warn_once(
                f"num_items_in_batch was given to {type(self.model).__name__}, whose forward computes the mean over "
                "the tokens of the call and ignores it. A Trainer that passes it does not divide the loss itself: loss "
                "and gradients are too large by the number of micro-batches of a step, and by that of ranks. Set "
                "model.accepts_loss_kwargs = False before the Trainer is made; in a loop leave it out, and divide the "
                "loss by the number of micro-batches."
            )

    def _targets(self, named: dict[str, Any], ignore_index: int) -> tuple[Tensor, bool]:
        """The labels that the loss is computed with, and whether each stands at its own token's position."""
        labels, shifted = (_with_rows(named.get(name), _inputs(named)) for name in ("labels", "shift_labels"))
        if self.recipe.targets == "same":
            return labels, True
        if shifted is not None:
            return shifted, True
        attention_mask = named.get("attention_mask")
        if self.recipe.targets == "next_attended" and attention_mask is not None:
            if attention_mask.shape != labels.shape:
                raise LigerDistError(
                    f"attention_mask has shape {tuple(attention_mask.shape)} and labels have shape "
                    f"{tuple(labels.shape)}; {type(self.model).__name__} scores the tokens that its mask has, so "
                    "expected one shape. Pass the mask of the labels, or use WrapConfig(fused_loss=False)."
                )
            labels = labels.masked_fill(attention_mask.to(labels.device) == 0, ignore_index)
        return labels, False

    def is_aligned(self, batch: dict[str, Any]) -> bool:
        """True if the labels of a call stand at the positions of the logits that they are scored against."""
        return self._targets(batch, batch.get("ignore_index", IGNORE_INDEX))[1]

    def aligned_labels(self, batch: dict[str, Any]) -> Tensor:
        """``[B, S]``: the label that each position of the logits is scored against."""
        ignore_index = batch.get("ignore_index", IGNORE_INDEX)
        labels, is_aligned = self._targets(batch, ignore_index)
        return labels if is_aligned else nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)

    def has_target(self, call: Call) -> bool:
        """True if a label of the call is not ignored."""
        labels, is_aligned = self._targets(call.named, call.ignore_index)
        return bool(((labels if is_aligned else labels[..., 1:]) != call.ignore_index).any())

    def shared_mean(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The ``num_items_in_batch`` that gives the model's own loss the mean of ``token_mean="global"``; empty for a
        local mean. One all-reduce per group of the mean."""
        if self.config.token_mean == "local" or batch.get("num_items_in_batch") is not None:
            return {}
        head = self.access.in_use()
        mean_over = self._mean_over(head)
        ignore_index = batch.get("ignore_index", IGNORE_INDEX)
        labels, is_aligned = self._targets(batch, ignore_index)
        labels = labels if is_aligned else labels[..., 1:]
        device = cast(nn.Linear, base_head(head)).weight.device
        items = denominator(
            None,
            torch.where(labels == ignore_index, -1, labels).to(device),
            reduction="mean",
            num_items_in_batch=None,
            dtype=torch.float32,
            groups=mean_over.groups,
            divide_factor=mean_over.divide_factor,
        )
        return {"num_items_in_batch": items}


def _inputs(named: dict[str, Any]) -> Tensor | None:
    """The tokens of a call, by their ids or embeddings."""
    return next((named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None), None)


def _with_rows(labels: Tensor | None, inputs: Tensor | None) -> Any:
    """``labels`` ``[B, S]``. Those of a single sequence may come as ``[S]``, which the model's own loss flattens to."""
    is_flat = labels is not None and labels.dim() == 1 and inputs is not None and inputs.dim() > 1
    return labels[None] if is_flat and len(inputs) == 1 else labels  # type: ignore[arg-type, index]
