"""The loss of one wrapped model: decides for each call how it is computed, and checks what it is computed from.

A call's loss is *fused* (lm_head computes it), computed from *full logits* (a loss function that is installed on the
model scores them), or the *model's original one*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_dist.config import LOGITS, LogitsDtype, WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.fused_layers.packed_calls import ARGUMENTS, CACHES, PackedCall, PackedCalls
from liger_dist.losses.distillation import Distillation
from liger_dist.losses.execution import Execution
from liger_dist.losses.labels import AlignedLabels, LabelSummary
from liger_dist.losses.shared_gradient import SharedGradient, budget_beside_sum
from liger_dist.losses.spec import LossSpec, PendingGradients
from liger_dist.losses.support import check_support
from liger_dist.model.peft import has_active_dropout, without_fsdp1
from liger_dist.model.stages import stage_of
from liger_dist.model.structure import Structure
from liger_dist.model.torch_modes import checkpoint_frame, is_captured, is_transformed, untraced
from liger_dist.sharding import accelerate
from liger_dist.sharding.base import DataParallel, Wrapper
from liger_dist.sharding.vocab_parallel import ROW_SHARDS, RowSharding

from .call import NOTED_LOSSES, Call, HostCall, Hosts, Signature, WrapId, note_loss, options_for
from .call_warnings import CallWarnings
from .lm_head import HeadInUse, LMHead
from .loss_call import NO_HEAD, LossCall, current_call, is_running, none_further, pending_of
from .output import fused_output
from .recipe import LossRecipe
from .scored import score
from .wrapper_redirect import WrapperRedirect

FULL_LOGITS: Literal["full logits"] = "full logits"
Mode = Distillation | Literal["full logits"]
_MODES: ContextVar[tuple[tuple[WrapId, Mode], ...]] = ContextVar("liger_dist_modes", default=())
"""model and mode of each :meth:`FusedLoss.mode` that is active in this context, innermost last"""
_ARGUMENTS_OF_LOSSES = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index")
"""of transformers' token losses, by position"""


def _tensors_of(call: Call) -> tuple[tuple[str, int], ...]:
    """Returns the tensors that say where documents are, by identity."""
    return tuple((name, id(call.named.get(name))) for name in ("input_ids", "inputs_embeds", *ARGUMENTS))


class FusedLoss:
    """The loss of one wrapped model; kept on the instance, to which it does not refer."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        recipe: LossRecipe | None,
        *,
        unfused_reason: str | None,
        strategy: str,
        config: WrapConfig,
        hosts: Hosts,
        packing: PackedCalls,
    ) -> None:
        self.structure, self.recipe, self.unfused_reason = structure, recipe, unfused_reason
        self.config, self.hosts, self.packing = config, hosts, packing
        self.wrap_id = WrapId(model)
        self.head = LMHead(structure, wrap_id=self.wrap_id, strategy=strategy, config=config)
        smoothing = getattr(getattr(model, "config", None), "label_smoothing", None) or 0.0
        self.signature = Signature(
            model,
            outputs=config.outputs,
            original_smoothing=smoothing if recipe is None else recipe.label_smoothing,
            host_keywords=hosts.keywords,
        )
        self.wrapper_redirect: WrapperRedirect | None = None
        """the wrapper that :func:`liger_dist.wrap` made around the model, through which its losses go"""
        self.loss_module = None if recipe is None else recipe.owner
        """name of the module whose ``loss_function`` gets the logits, or None"""
        module = self._loss_module_of(model)
        self.original_loss_function: Callable[..., Tensor] | None = getattr(module, "loss_function", None)
        """as it was when the recipe was found"""
        self._original_loss_function_now = self.original_loss_function
        self._had_original_loss_function = module is not None and "_loss_function" in vars(module)
        self.is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._is_stage = stage_of(model) is not None
        self.warnings = CallWarnings(wrapped_by_caller=strategy == "auto" and not self._is_stage)
        self._read_early: tuple[object, PackedCall] | None = None
        """arguments of a call and its documents, from :meth:`check_early` to :meth:`begin`"""
        self._has_scored = False
        self._pending = PendingGradients()

    def install(self, model: nn.Module) -> None:
        """Swaps the class of lm_head and installs the loss function; before the model is sharded."""
        if self.recipe is None:
            return
        self.head.fuse(model)
        module: Any = self._loss_module_of(model)
        if module is not None:
            module.loss_function = self.loss_function

    def remove(self, model: nn.Module) -> None:
        """Undoes :meth:`install`, and what has followed it."""
        if self.wrapper_redirect is not None:
            self.wrapper_redirect.remove()
        module: Any = self._loss_module_of(model)
        if module is not None and self.has_installed(model):
            if self._had_original_loss_function:
                module.loss_function = self.original_loss_function
            else:
                del module._loss_function
        if self.recipe is not None:
            self.head.remove(model)

    def _loss_module_of(self, model: nn.Module) -> nn.Module | None:
        if not self.loss_module:
            return None if self.loss_module is None else model
        return without_fsdp1(model.get_submodule(self.loss_module))

    @untraced
    def host_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HostCall | None:
        """Reads a call that a host made with further keywords; None for any other."""
        if kwargs.get("labels") is not None and self.hosts.keywords.isdisjoint(kwargs):
            return None
        if self.recipe is None:
            return None
        named = dict(zip(self.signature.names, args, strict=False)) | kwargs
        for read in self.hosts.readers:
            call = read(model, named, kwargs, self.structure.vocab_size)
            if call is not None:
                return call if not call.only_fused or self.unfused_reason_now(model) is None else None
        return None

    @contextmanager
    def mode(self, mode: Mode) -> Iterator[None]:
        """Within, calls of the model in this context compute their loss in ``mode``: on full logits, by the model's own
        loss function; or, with labels, as the divergence from a teacher."""
        token = _MODES.set((*_MODES.get(), (self.wrap_id, mode)))
        try:
            yield
        finally:
            _MODES.reset(token)

    def _mode(self) -> Mode | None:
        return next((mode for wrap_id, mode in reversed(_MODES.get()) if wrap_id is self.wrap_id), None)

    @untraced
    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, LossCall | None, PackedCall | None]:
        """Returns the arguments for the model's forward, the loss of the call if it is not the model's, and the
        documents. The ranks of a vocab-parallel lm_head agree whether one refuses the call.

        Raises:
            LigerDistError: on every rank of a vocab-parallel lm_head, where one refuses; otherwise on this one.
        """
        shards = self.row_shards()
        try:
            call = self.signature.read(model, args, kwargs)
            documents = self.documents(model, call)
            decided = self._decide(model, call)
            loss_call = None if decided is None else self._loss_call(model, *decided)
        except Exception as error:
            if shards is not None:
                shards.agree_on_call(f"nothing, and refuse it: {error}")
            raise
        if shards is not None:
            has_labels = call.named.get("labels") is not None
            shards.agree_on_call("a loss" if has_labels else "a call without labels")
        return call, loss_call, documents

    @untraced
    def check_early(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses a call before the hooks of FSDP2 start a collective; the forward checks the final arguments. The
        ranks of a vocab-parallel lm_head agree in their forward instead.

        Raises:
            LigerDistError: as :meth:`begin`.
        """
        self._read_early = None
        if self.row_shards() is not None or is_running(self.wrap_id):
            return
        call = self.signature.read(model, args, kwargs)
        packed = self.documents(model, call)
        self._read_early = None if packed is None else (_tensors_of(call), packed)
        decided = self._decide(model, call)
        if decided is not None:
            call, in_use, _ = decided
            self.checked(model, call, in_use)

    def documents(self, model: nn.Module, call: Call) -> PackedCall | None:
        """Reads the documents of a call, and gives it the keywords that keep them apart; None for a call whose
        arguments say nothing of documents or padding.

        Raises:
            LigerDistError: the documents would mix.
        """
        # In a CUDA graph transformers cannot look whether positions restart: masks ask the call.
        if all(call.named.get(name) is None for name in ARGUMENTS) and not is_captured():
            return None
        early, self._read_early = self._read_early, None
        if early is not None and early[0] == _tensors_of(call):
            packed = early[1]
        else:
            packed = self.packing.read(model, call.named)
        for name in packed.dropped:
            call.kwargs.pop(name, None)
        has_labels = call.named.get("labels") is not None
        for name, value in self.packing.keywords(packed, call.named, has_labels=has_labels).items():
            if name in self.signature.names[: len(call.args)]:
                raise LigerDistError(
                    f"{call.model_name} got {name} of packed documents as a positional argument; pass it by keyword."
                )
            if self.signature.takes_more or name in self.signature.names:
                call.kwargs[name] = value
        return packed

    def running(self, packed: PackedCall | None, *, is_nested: bool) -> AbstractContextManager[None]:
        """Within, a call with these documents runs.

        Args:
            is_nested: True within a call of another model, whose documents are different ones.
        """
        is_plain = packed is None and self.packing.recurrent is None and not is_nested
        return nullcontext() if is_plain else self.packing.running(packed)

    def row_shards(self) -> RowSharding | None:
        return vars(self.structure.head).get(ROW_SHARDS)

    def _decide(self, model: nn.Module, call: Call) -> tuple[Call, HeadInUse, bool] | None:
        """Decides how the loss of a call is computed: None for the model's original one, or none; otherwise by lm_head,
        or (True) from full logits."""
        if call.named.get("labels") is None:
            # Without labels the models of transformers compute no loss, whatever other arguments they get.
            return None
        if self.recipe is None:
            assert self.unfused_reason is not None
            if call.keywords:
                original: Any = getattr(model, "loss_function", nn.functional.cross_entropy)
                call.kwargs.update(options_for(original, call, reason=self.unfused_reason))
            return None
        self._original_loss_function_now = self._read_original_loss_function(model)
        mode = self._mode()
        if isinstance(mode, Distillation):
            call = call.distilled(mode)
        takes_cache = any(name in call.kwargs for name in CACHES)
        may_choose = "use_cache" in self.signature.names[len(call.args) :] and call.kwargs.get("use_cache") is None
        if may_choose and not takes_cache:
            # A loss never reads a cache, and some attention masks depend on one: fused or not, the loss is the same.
            call.kwargs["use_cache"] = False
        wants_logits = self._wants_logits(model, call, mode)
        asked = self.requested(model, call)
        if wants_logits and not asked:
            return None
        in_use = self.head.in_use(model)
        reason = self._unfused_reason(model, in_use)
        if reason is not None and call.distillation is not None:
            self.refuse_distillation(reason)
        if reason is not None and not wants_logits:
            self.warnings.of_unfused(call.model_name, reason, runs_original=in_use.unfusable is None)
        if (
            in_use.adapter is not None
            and self.warnings.wrapped_by_caller
            and dist.is_initialized()
            and not is_transformed()
        ):
            self.warnings.check_wrapper(model, in_use.adapter)
        if reason is None and not wants_logits:
            return call, in_use, False
        if asked and in_use.adapter is not None and self._can_score(model):
            return call, in_use, True
        if asked:
            call.kwargs.update(self._keywords_of_original_loss(model, call, asked, reason or "logits are asked for"))
        return None

    def _wants_logits(self, model: nn.Module, call: Call, mode: Mode | None) -> bool:
        if isinstance(mode, Distillation):
            return False
        if mode == FULL_LOGITS or LOGITS in call.outputs:
            return True
        # nn.DataParallel gathers the logits of its replicas, which fails for zero-width ones.
        is_replica = getattr(model, "_is_replica", False)
        return not torch.is_grad_enabled() and (is_replica or self.hosts.returns_logits())

    def requested(self, model: nn.Module, call: Call) -> tuple[str, ...]:
        """Returns what the call requests and the model's loss does not have, as names. In evaluation the mean of a
        loss beside full logits may be that of the rank alone."""
        is_global = self.config.token_mean == "global" and call.named.get("num_items_in_batch") is None
        counts = is_global and (torch.is_grad_enabled() or self._can_score(model))
        return call.asks_of_the_loss + (("token_mean='global'",) if counts else ())

    def _can_score(self, model: nn.Module) -> bool:
        """True if the installed loss function will get the full logits, in a call that autograd follows as usual."""
        return self.has_installed(model) and not is_transformed()

    def has_installed(self, model: nn.Module) -> bool:
        """True if the loss function of this object is still the one of the module that gets the logits."""
        module = self._loss_module_of(model)
        return module is not None and vars(module).get("_loss_function") == self.loss_function

    def unfused_reason_now(self, model: nn.Module) -> str | None:
        """Returns why the loss of a call would not be fused now, as a clause; None if it would."""
        if self.recipe is None:
            return self.unfused_reason
        return self._unfused_reason(model, self.head.in_use(model))

    def _unfused_reason(self, model: nn.Module, in_use: HeadInUse) -> str | None:
        """Returns why a call's loss is the model's, from what may have changed since wrapping."""
        if in_use.unfusable is not None:
            return in_use.unfusable
        if in_use.head is not in_use.base and has_active_dropout(in_use.head):
            return (
                "the LoRA layer on its lm_head has dropout, which gives every token another weight; set "
                "lora_dropout=0.0 or leave the head out of target_modules"
            )
        if is_transformed():
            return "torch.func or forward-mode differentiation is at work, where the fused loss is not defined"
        if self.loss_module is not None and not self.has_installed(model):
            loss_function = vars(self._loss_module_of(model)).get("_loss_function")
            return f"its loss_function is {getattr(loss_function, '__qualname__', loss_function)} now"
        if self._read_original_loss_function(model) is not self.original_loss_function:
            loss_type = getattr(self._loss_module_of(model), "loss_type", None)
            return f"its loss_type has another loss function since liger_dist.wrap: {loss_type}"
        return None

    def _read_original_loss_function(self, model: nn.Module) -> Any:
        """Returns the loss function that transformers chooses for the module by now."""
        module = self._loss_module_of(model)
        chosen = getattr(type(module), "loss_function", None)
        if self._had_original_loss_function or not isinstance(chosen, property) or chosen.fget is None:
            return self.original_loss_function
        return chosen.fget(SimpleNamespace(loss_type=getattr(module, "loss_type", None)))

    def _keywords_of_original_loss(
        self, model: nn.Module, call: Call, asked: tuple[str, ...], reason: str
    ) -> dict[str, Any]:
        """Returns the options of a loss that is a function of the user, as keywords for it.

        Raises:
            LigerDistError: it has no parameters for them, or the model's forward computes its loss itself.
        """
        module: Any = self._loss_module_of(model)
        is_users = module is not None and not self.has_installed(model)
        if is_users and set(asked) == set(call.asks_of_the_loss):
            return options_for(module.loss_function, call, reason=reason)
        raise LigerDistError(
            f"{asked[-1]} was asked of {call.model_name}, whose loss is not fused here ({reason}), so that nothing "
            "would apply it. Leave it out of such calls."
        )

    def _loss_call(self, model: nn.Module, call: Call, in_use: HeadInUse, on_logits: bool) -> LossCall:
        """Makes the loss of a call, after wrong arguments have been refused."""
        assert self.recipe is not None
        assert in_use.adapter is not None
        aligned, spec = self.checked(model, call, in_use)
        if call.named.get("num_items_in_batch") is not None and call.distillation is None:
            self.warnings.of_ignored_items(call, self.recipe)
        if self.recipe.transform.bias is not None:
            spec = replace(spec, logit_bias=model.get_buffer(self.recipe.transform.bias).reshape(-1))
        if spec.token_weight is not None:
            spec = replace(spec, token_weight=aligned.shift(spec.token_weight))
        if not self._has_scored:
            accelerate.return_losses_unrounded(model)
        execution = self._execution(model, call, aligned.labels, in_use, with_summary=not on_logits)
        self._has_scored = self._has_scored or not on_logits
        given = (call.named[name] for name in ("labels", "shift_labels") if call.named.get(name) is not None)
        first = LossCall(
            wrap_id=self.wrap_id,
            model_name=call.model_name,
            recipe=self.recipe,
            labels=aligned.labels,
            labels_of_next=aligned.of_next,
            vocab_size=in_use.vocab_size,
            spec=spec,
            outputs=tuple(name for name in call.outputs if name != LOGITS),
            labels_of_call=tuple(
                (labels, labels.clone() if labels.is_inference() else labels._version) for labels in given
            ),
            compute_loss=partial(in_use.adapter.linear_cross_entropy, spec=spec, execution=execution),
            execution=execution,
            mean_is_global=self._mean_is_global(in_use),
            has_lora=in_use.head is not in_use.base,
            on_logits=on_logits,
            alters_loss=bool(call.loss_options) or self.config.token_mean == "global",
            losses_before=(self.recipe.training if model.training else self.recipe.evaluation).losses_before,
        )
        return first if on_logits else self._with_further(first, model, call, in_use, self.recipe)

    def _with_further(
        self, first: LossCall, model: nn.Module, call: Call, in_use: HeadInUse, recipe: LossRecipe
    ) -> LossCall:
        """Adds the losses of the further calls of lm_head, without options and outputs of the call."""
        assert in_use.adapter is not None
        adapter, shared = in_use.adapter, list[SharedGradient]()
        calls = recipe.training if model.training else recipe.evaluation

        def share(loss: LossCall, coefficient: float | None, is_last: bool = False) -> None:
            if not shared:
                shared.append(SharedGradient(self._pending, self.config.backend))
            execution = replace(loss.execution, shared=shared[0], coefficient=coefficient)
            if is_last:
                # The fp32 sum needs memory of the logits; after earlier losses come activations of later ones.
                budget = budget_beside_sum(in_use.vocab_size * self.structure.hidden_size)
                execution = replace(execution, memory_budget=execution.memory_budget or budget)
            loss.execution = execution
            loss.compute_loss = partial(adapter.linear_cross_entropy, spec=loss.spec, execution=execution)

        def further(
            labels: Tensor, coefficient: float | None, is_last: bool = False, *, recipe: LossRecipe
        ) -> LossCall:
            spec = replace(call, keywords={}, outputs=(), distillation=None).spec(recipe)
            spec = replace(spec, logit_bias=first.spec.logit_bias)
            execution = self._execution(model, call, labels, in_use, with_summary=True)
            changed = {"recipe": recipe, "labels": labels, "labels_of_next": None, "spec": spec, "outputs": ()}
            of_first = {"head_calls": (), "share": None, "further": none_further, "next_loss": None}
            made = replace(first, **changed, **of_first, execution=execution, is_further=True, is_left_out=False)  # type: ignore[arg-type]
            made.compute_loss = partial(adapter.linear_cross_entropy, spec=spec, execution=execution)
            if first.share is not None:
                share(made, coefficient, is_last)
            return made

        # A LoRA layer computes another weight in each call.
        first.share, first.share_separately = None if first.has_lora else share, shared.clear
        first.further = partial(further, recipe=replace(recipe, changes=()))
        losses: list[LossCall | None] = [
            None
            if one is None
            else further(call.further_labels(one, is_encoder_decoder=self.is_encoder_decoder), None, recipe=one)
            for one in calls.after
        ]
        if any(losses) and first.share is not None:
            share(first, None)
        first.head_calls = (*[None] * calls.before, first, *losses)
        if len(first.head_calls) > 1:
            first.checkpoints = tuple(filter(None, [checkpoint_frame()]))
        return first

    def checked(self, model: nn.Module, call: Call, in_use: HeadInUse) -> tuple[AlignedLabels, LossSpec]:
        """Refuses what is wrong with the arguments, before the model's forward begins."""
        assert self.recipe is not None
        aligned = call.aligned_labels(
            self.recipe, is_encoder_decoder=self.is_encoder_decoder, vocab_size=in_use.vocab_size
        )
        if self.warnings.replaced_attention is not None and call.named.get("attention_mask") is not None:
            self.warnings.of_scored_padding(call, aligned)
        if dist.is_initialized():
            # Never by the attribute, which a parametrization computes: weights may be sharded here.
            accelerate.check(model, in_use.base._parameters.get("weight"), call.named.get("position_ids"))
        spec = call.spec(self.recipe)
        spec.check(vocab_size=in_use.vocab_size, labels_shape=aligned.labels.shape)
        if spec.support_ids is not None:
            check_support(spec.support_ids, aligned.labels, spec.ignore_index)
        return aligned, spec

    def scored_labels(self, model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, int]:
        """Returns the labels of a call, aligned to the logits ``[B, S]`` that score them, and the ignored one."""
        assert self.recipe is not None
        call = self.signature.read(model, (), arguments)
        aligned = call.aligned_labels(self.recipe, is_encoder_decoder=self.is_encoder_decoder)
        return aligned.labels, call.ignore_index

    def _execution(
        self, model: nn.Module, call: Call, labels: Tensor, in_use: HeadInUse, *, with_summary: bool
    ) -> Execution:
        mean_over = self.mean_over(model, in_use)
        summary = None
        if with_summary and labels.is_cuda:
            summary = LabelSummary.start(labels, call.ignore_index, self.config.backend)
        in_fp32: LogitsDtype = "fp32_operands" if in_use.in_fp32 else None
        return Execution(
            backend=self.config.backend,
            memory_budget=self.config.memory_budget,
            logits_dtype=in_fp32 or call.logits_dtype or self.config.logits_dtype,
            pending=self._pending,
            label_summary=summary,
            max_valid_tokens=self.config.max_valid_tokens,
            is_first=not self._has_scored,
            has_real_hidden=not self._is_stage,
            mean_groups=mean_over.groups,
            divide_factor=mean_over.divide_factor,
        )

    def _mean_is_global(self, in_use: HeadInUse) -> bool:
        """True if this call's mean is over the tokens of all ranks. Without gradients ranks with full weights may
        evaluate different numbers of batches, so that the mean is per rank."""
        if self.config.token_mean == "local" or in_use.adapter is None:
            return False
        return torch.is_grad_enabled() or in_use.adapter.name != "replicated"

    def mean_over(self, model: nn.Module, in_use: HeadInUse) -> DataParallel:
        if not self._mean_is_global(in_use) or in_use.adapter is None:
            return DataParallel(groups=(), divide_factor=1.0)
        return in_use.adapter.data_parallel(in_use.base, model)

    @untraced
    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the owner's loss function: the finished loss, or the owner's original one for full logits."""
        original = self._original_loss_function_now
        assert original is not None
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        targets = kwargs["labels"] if "labels" in kwargs else args[1]
        shifted = kwargs.get("shift_labels")
        call = current_call(self.wrap_id)
        if call is not None and call.on_logits:
            is_first, call.losses_before = call.losses_before == 0, call.losses_before - 1
            loss = score(call, logits, targets, shifted, original) if is_first else None
            return note_loss(loss if loss is not None and call.alters_loss else original(*args, **kwargs))
        pending = pending_of(call, logits)
        if pending is None:
            if not is_running(self.wrap_id):
                self.warnings.of_earlier_forward(self.signature, self.config, kwargs)
            return note_loss(original(*args, **kwargs))
        pending.call.check_arguments(dict(zip(_ARGUMENTS_OF_LOSSES, args, strict=False)) | kwargs)
        uses_shifted = shifted is not None and pending.call.recipe.targets != "same"
        is_aligned = uses_shifted or pending.call.recipe.targets == "same"
        loss = pending.deliver(logits, shifted if uses_shifted else targets, is_aligned=is_aligned)
        return loss if NOTED_LOSSES.get() is None else note_loss(loss)

    @untraced
    def finish(self, call: LossCall | None, output: Any) -> Any:
        """Makes the output of a call from that of the model's forward."""
        if call is None or output is None:
            return output
        if call.pending is None:
            call.check_not_altered()
            self.warnings.of_unfused(call.model_name, NO_HEAD)
            return output
        return fused_output(
            output, call.further_outputs(), model_name=call.model_name, without_logits=not call.on_logits
        )

    def refuse_distillation(self, reason: str) -> None:
        raise LigerDistError(
            f"a distillation loss was asked of {self.signature.model_name}, whose loss is not fused here: {reason}."
        )

    def redirected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wrapper | None:
        """Returns the wrapper that a call has to go through; None if it goes to the model. Only for a loss with a
        :attr:`wrapper_redirect`."""
        assert self.wrapper_redirect is not None
        named = dict(zip(self.signature.names, args, strict=False)) | kwargs
        return self.wrapper_redirect.redirects(has_labels=named.get("labels") is not None)
