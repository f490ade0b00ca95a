"""The seam of one model instance: labels noted at its forward, the loss computed in its head, handed back by its loss
function.

The head's output must stay in the autograd graph, because wrappers hang their backward hooks on it. So the loss leaves
the head as logits without width, which no transform in between can change; ``loss_function``, or the cross entropy that
a forward calls itself, turns them back into the loss. The value travels beside the graph, and so does the upstream
gradient on its way back.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_dist.config import WrapConfig
from liger_dist.dispatch import choose, collect_facts
from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossOutput
from liger_dist.losses.labels import LabelSummary, check_labels, check_range
from liger_dist.losses.normalization import denominator
from liger_dist.sharding.base import DataParallel, Facts, Head, ShardingAdapter
from liger_dist.sharding.fsdp1 import is_outside_forward
from liger_dist.sharding.replicated import is_averaged
from liger_dist.sharding.split_head import rows_of

from .adapted import TRAINED_ROWS, adapter_objection, has_active_dropout, under_trained_rows
from .call import IGNORE_INDEX, LOGITS, LOSS_KEYWORDS, Call, Signature, options_for
from .fused_logits import FusedLogits
from .head import fuse_head, precede_installed_forward, restore_head
from .local import is_transformed
from .output import fused_output
from .plan import LossPlan
from .redirect import Redirect, Wrapper
from .request import GivenLabels, LossRequest, start_summary
from .structure import Structure, active_head, base_head, embedding_of, heads_at
from .untraced import untraced

_PAUSED: ContextVar[frozenset[int]] = ContextVar("liger_dist_paused", default=frozenset())
"""ids of the seams that compute full logits in this context"""


class Seam:
    """Joins one model instance to its head. Installed and removed as a whole."""

    def __init__(
        self, model: nn.Module, structure: Structure, plan: LossPlan, *, strategy: str, config: WrapConfig
    ) -> None:
        self.model = model
        self.head = structure.head
        self.tied_to = structure.tied_to
        self.plan = plan
        self.strategy = strategy
        self.config = config
        self._requests: dict[int, list[LossRequest | None]] = {}
        self._chosen: ShardingAdapter | None = None
        self._stored: tuple[object, ...] = ()
        self._hooks: tuple[RemovableHandle, ...] = ()
        self.redirect: Redirect | None = None
        self._pauses = 0
        self._has_said: set[str] = set()
        self.compute_dtype: torch.dtype | None = None
        """of the last loss"""
        self._head_name = structure.head_name
        self.signature = Signature(model, outputs=config.outputs, own_smoothing=plan.label_smoothing)
        self._owner: nn.Module | None = None if plan.owner is None else model.get_submodule(plan.owner)
        self._own_loss_function: Callable[..., Tensor] | None = getattr(self._owner, "loss_function", None)
        self._had_own_loss_function = self._owner is not None and "_loss_function" in vars(self._owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Seam:
        """Goes with a copy of the model; a copy of the head alone (an adapter's) stays with this model."""
        if id(self.model) not in memo:
            return self
        twin = Seam.__new__(Seam)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, {} if name == "_requests" else copy.deepcopy(value, memo))
        return twin

    def fuse(self) -> None:
        """Changes the instance's head class and loss function; before it is sharded."""
        for head in heads_at(self._place):
            fuse_head(head, self)
        if self._owner is not None:
            self._owner.loss_function = self.loss_function  # type: ignore[assignment]

    def listen(self) -> None:
        """Hooks the model's forward, ahead of the hooks that are there already."""
        self._hooks = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            self._place.register_forward_hook(self._after_head),
        )

    def remove(self) -> None:
        """Undoes :meth:`fuse` and :meth:`listen`."""
        if self.redirect is not None:
            self.redirect.remove()
        for hook in self._hooks:
            hook.remove()
        if self._owner is not None and vars(self._owner).get("_loss_function") == self.loss_function:
            if self._had_own_loss_function:
                self._owner.loss_function = self._own_loss_function  # type: ignore[assignment]
            else:
                del self._owner._loss_function
        for head in heads_at(self._place):
            if vars(head).get("_liger_dist_seam") is self:
                restore_head(head)

    def redirect_through(self, root: Wrapper) -> None:
        """Sends losses of the model inside ``root``, which wrap has made, through it."""
        self.redirect = Redirect(self.model, root)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, calls by this thread compute the model's own loss on full logits."""
        token = _PAUSED.set(_PAUSED.get() | {id(self)})
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            _PAUSED.reset(token)

    def _is_paused(self, called: nn.Module) -> bool:
        # Replicas of nn.DataParallel run in threads of their own, while the one that paused waits for them.
        is_replica = called is not self.model
        return id(self) in _PAUSED.get() or (is_replica and self._pauses > 0)

    def shared_mean(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The ``num_items_in_batch`` that gives the model's own loss the mean over all processes of
        ``token_mean="global"``; empty for a local mean. As many all-reduces as the mean has groups."""
        if self.config.token_mean == "local" or batch.get("num_items_in_batch") is not None:
            return {}
        head = self._head_in_use()
        base = cast(nn.Linear, base_head(head))
        mean_over = self._adapter(head).data_parallel(base, self.model)
        ignore_index = batch.get("ignore_index", IGNORE_INDEX)
        labels, is_aligned = self._targets(batch, ignore_index)
        labels = labels if is_aligned else labels[..., 1:]
        items = denominator(
            None,
            torch.where(labels == ignore_index, -1, labels).to(base.weight.device),
            reduction="mean",
            num_items_in_batch=None,
            dtype=torch.float32,
            groups=mean_over.groups,
            divide_factor=mean_over.divide_factor,
        )
        return {"num_items_in_batch": items}

    def _head_in_use(self) -> nn.Module:
        """The output embedding that a forward will call, adapted or not; an adapter that was put on it after wrapping
        is taken in.

        Raises:
            LigerDistError: it is not one that was wrapped, or an adapter that does not have one weight.
        """
        head = active_head(self._place)
        objection = adapter_objection(head)
        if vars(base_head(head)).get("_liger_dist_seam") is not self or objection is not None:
            raise LigerDistError(
                f"the output embedding of {type(self.model).__name__} is a {type(self._place).__name__} now"
                + (f", with {objection}" if objection else ", not the one that was wrapped. ")
                + "After resizing embeddings call liger_dist.unwrap(model) and wrap it again."
            )
        fuse_head(head, self)
        return head

    @property
    def _place(self) -> nn.Module:
        return self.model.get_submodule(self._head_name)

    def _adapter(self, head: nn.Module) -> ShardingAdapter:
        """The dispatcher's choice; facts are collected anew only when the weight is stored in another way."""
        base = cast(nn.Linear, base_head(head))
        weight = base.weight
        stored = (
            type(self.model),
            id(head),
            type(base),
            type(weight),
            hasattr(weight, "ds_id"),
            hasattr(weight, "_fsdp_flattened"),
            weight.requires_grad,
        )
        if self._chosen is None or self._stored != stored:
            self._chosen, self._stored = choose(self._facts(head)), stored
        return self._chosen

    def _facts(self, head: nn.Module) -> Facts:
        base = cast(nn.Linear, base_head(head))
        return collect_facts(
            self.model,
            base,
            strategy=self.strategy,
            tied_to=self.tied_to if base is self.head else (),
            adapted=base is not head,
            config=self.config,
        )

    def check_storage(self) -> None:
        """Refuses a head that is sharded already in a layout that no adapter serves; changes nothing. No collectives.

        Raises:
            NoAdapterError: no adapter serves it, whatever comes around the model later.
        """
        facts = self._facts(active_head(self._place))
        if facts.engine == "dtensor":
            # DDP or FSDP2 may come around a tensor-parallel model and average over the replicas.
            facts = replace(facts, token_mean="local")
        if facts.engine != "plain":
            choose(facts)

    def take(self) -> LossRequest | None:
        """The request of the running forward, once; None where lm_head has to compute logits."""
        request = self._current()
        return request if request is not None and not (request.started or request.on_logits) else None

    def _current(self) -> LossRequest | None:
        running = self._requests.get(threading.get_ident())
        return running[-1] if running else None

    def compute(self, request: LossRequest, base: nn.Linear, head: Head, hidden_states: Tensor) -> LossOutput:
        """The loss of one request on ``head``, which is ``base`` or what an adapter makes of it, by the sharding
        adapter that its storage asks for."""
        device_type = hidden_states.device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        self.compute_dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden_states.dtype
        adapter = self._chosen
        assert adapter is not None
        return adapter.linear_cross_entropy(
            hidden_states,
            head,
            request.aligned_labels(),
            loss=request.loss,
            execution=self._execution(adapter, base, summary=request.summary),
        )

    def _execution(self, adapter: ShardingAdapter, base: nn.Linear, *, summary: LabelSummary | None) -> Execution:
        mean_over = DataParallel(groups=(), divide_factor=1.0)
        if self.config.token_mean == "global":
            mean_over = adapter.data_parallel(base, self.model)
        return Execution(
            backend=self.config.kernels,
            memory_budget=self.config.memory_budget,
            label_summary=summary,
            max_valid_tokens=self.config.max_valid_tokens,
            mean_groups=mean_over.groups,
            divide_factor=mean_over.divide_factor,
        )

    @untraced
    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of the owner's loss function: the finished loss, or the owner's own for real logits."""
        assert self._own_loss_function is not None
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        targets = kwargs["labels"] if "labels" in kwargs else args[1]
        shifted = kwargs.get("shift_labels")
        # A nested call that failed before its turn may have taken this one's place.
        request = logits.request if isinstance(logits, FusedLogits) else self._current()
        if request is not None and request.on_logits:
            loss = self._score(request, logits, targets, shifted)
            return loss if request.alters_loss else self._own_loss_function(*args, **kwargs)
        if request is None or request.output is None or logits.shape[-1] != 0:
            if threading.get_ident() not in self._requests:
                self._note_call_without_hooks(kwargs)
            return self._own_loss_function(*args, **kwargs)
        for name, differs in request.differences(kwargs, takes_num_items=self.plan.takes_num_items):
            if differs:
                raise LigerDistError(
                    f"the loss was computed with the {name} that {type(self.model).__name__} was called with, but the "
                    "model hands another one to its loss function; wrap it with WrapConfig(fused_loss=False)."
                )
        return request.deliver(logits, targets if shifted is None or self.plan.targets == "same" else shifted)

    def _score(self, request: LossRequest, logits: Tensor, targets: Tensor, shifted: Tensor | None) -> Tensor:
        """The loss of one request on full logits, with its targets aligned as the model's own loss function does."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        aligned = targets
        if self._own_loss_function is ForCausalLMLoss:
            ignored = request.loss.options.ignore_index
            aligned = nn.functional.pad(targets[..., 1:], (0, 1), value=ignored) if shifted is None else shifted
        head = self._head_in_use()
        execution = self._execution(self._adapter(head), cast(nn.Linear, base_head(head)), summary=None)
        return request.score(logits, aligned, execution=execution)

    def _note_call_without_hooks(self, kwargs: dict[str, Any]) -> None:
        """Warns of a loss outside of a call of the model, such as ``model.forward(...)``, which runs no hooks.

        Raises:
            LigerDistError: options of the loss came along, which nothing would compute.
        """
        name = type(self.model).__name__
        for option in LOSS_KEYWORDS:
            if kwargs.get(option) is not None and option not in self.signature.names:
                raise LigerDistError(
                    f"{option} was given to a loss of {name} outside of a call of the model, where nothing computes "
                    "it: model.forward(...) runs without the model's hooks. Call model(...) itself."
                )
        self._say_once(
            f"a loss of {name} was computed from full logits, outside of a call of the model, and is not fused: "
            "model.forward(...) runs without the model's hooks. Call model(...) itself."
        )

    def inline_loss(self, logits: FusedLogits, request: LossRequest, targets: Any, options: dict[str, Any]) -> Tensor:
        """In the place of a cross entropy that the model's forward calls itself.

        Raises:
            LigerDistError: its options are not those that the probe saw.
        """
        seen = {"ignore_index": IGNORE_INDEX, "label_smoothing": self.plan.label_smoothing, "reduction": "mean"}
        changed = [name for name, value in seen.items() if options.get(name, value) != value]
        if self.plan.owner is not None or changed or options.get("weight") is not None:
            raise LigerDistError(
                f"{type(self.model).__name__} calls torch.nn.functional.cross_entropy with other options "
                f"({', '.join(changed) or 'weight'}) than when it was wrapped; the loss was computed already. Unwrap "
                "it and wrap it again, or use WrapConfig(fused_loss=False)."
            )
        return request.deliver(logits, targets)

    @untraced
    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running = self._requests.setdefault(threading.get_ident(), [])
        running.append(None)
        is_redirected = self.redirect is not None and self.redirect.takes(args, kwargs)
        call = self._read(model, args, kwargs)
        if is_redirected:
            return None  # The wrapper calls this model again, with everything that it was called with.
        if call.named.get("labels") is None:
            # Without labels the models of transformers compute no loss, whatever else they are given.
            return call.args, call.kwargs
        if "use_cache" in self.signature.names[len(args) :] and kwargs.get("use_cache") is None:
            # A loss never reads a cache, and some attention masks change when one is built: fused or not, one loss.
            call.kwargs["use_cache"] = False
        wants_logits, asked = self._wants_logits(model, call), self._asked(call)
        if wants_logits and not asked:
            return call.args, call.kwargs
        if self._has_trained_rows():
            self._say_once(f"liger_dist leaves the loss of {call.model_name} unfused: {TRAINED_ROWS}.")
            return call.args, call.kwargs | (self._handed_on(call, asked, TRAINED_ROWS) if asked else {})
        head = self._head_in_use()
        self._adapter(head)
        self._check_wrapper()
        precede_installed_forward(head)
        reason = "logits are asked for" if wants_logits else self._reason_to_leave(head)
        if reason is not None and not wants_logits:
            self._say_once(
                f"liger_dist leaves the loss of {call.model_name} unfused: {reason}. The loss is the model's own."
            )
        if reason is None or (asked and self._can_score()):
            running[-1] = self._request(call, on_logits=reason is not None)
        elif asked:
            return call.args, call.kwargs | self._handed_on(call, asked, reason)
        return call.args, call.kwargs

    def _wants_logits(self, model: nn.Module, call: Call) -> bool:
        # nn.DataParallel gathers what its replicas return, and would not meet logits that refuse to be read.
        is_replica = model is not self.model
        return self._is_paused(model) or LOGITS in call.outputs or (is_replica and not torch.is_grad_enabled())

    def _read(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call, checked. A vocab-parallel head's ranks agree before the first collective whether one refuses it.

        Raises:
            LigerDistError: on every rank of a vocab-parallel head, where one refuses; otherwise on this one.
        """
        rows = rows_of(self.head)
        try:
            call = self.signature.read(args, kwargs)
            has_labels = call.named.get("labels") is not None
            is_scored = bool(self._asked(call)) or not self._wants_logits(model, call)
            if has_labels and is_scored and not self._has_trained_rows():
                self.check_at_entry(call)
        except LigerDistError as error:
            if rows is not None:
                rows.agree_on_call(f"nothing, and refuse it: {error}")
            raise
        if rows is not None:
            rows.agree_on_call("a loss" if has_labels else "a call without labels")
        return call

    def _asked(self, call: Call) -> tuple[str, ...]:
        """What is asked of a call's loss that the model's own does not have. In evaluation the mean of a loss beside
        full logits may be the rank's own."""
        is_global = self.config.token_mean == "global" and call.named.get("num_items_in_batch") is None
        counts = is_global and (torch.is_grad_enabled() or self._can_score())
        return call.asks_of_the_loss + (("token_mean='global'",) if counts else ())

    def _request(self, call: Call, *, on_logits: bool) -> LossRequest:
        labels, is_aligned = self._targets(call.named, call.ignore_index)
        loss = call.arguments(self.plan)
        if self.plan.transform.bias is not None:
            loss = replace(loss, logit_bias=self.model.get_buffer(self.plan.transform.bias).reshape(-1))
        if loss.token_weight is not None and not is_aligned:
            # One weight for each label, so they are shifted together.
            loss = replace(loss, token_weight=nn.functional.pad(loss.token_weight[..., 1:], (0, 1)))
        given = (call.named[name] for name in ("labels", "shift_labels") if call.named.get(name) is not None)
        return LossRequest(
            seam=self,
            labels=labels,
            is_aligned=is_aligned,
            loss=loss,
            outputs=tuple(name for name in call.outputs if name != LOGITS),
            summary=None if on_logits else start_summary(labels, is_aligned, call.ignore_index),
            given=tuple(GivenLabels.of(tensor) for tensor in given),
            mean_is_global=self.config.token_mean == "global",
            on_logits=on_logits,
            alters_loss=bool(call.loss_options) or self.config.token_mean == "global",
        )

    def _has_trained_rows(self) -> bool:
        """True if PEFT has put a module that trains some rows of lm_head on it since."""
        return under_trained_rows(active_head(self._place)) is not None

    def _can_score(self) -> bool:
        """True if this seam's loss function will get the full logits, in a call that autograd follows as usual."""
        return self._owner is not None and self._has_loss_function() and not is_transformed()

    def _has_loss_function(self) -> bool:
        return self._owner is not None and vars(self._owner).get("_loss_function") == self.loss_function

    def _handed_on(self, call: Call, asked: tuple[str, ...], reason: str) -> dict[str, Any]:
        """The options of a loss that is the user's own function, as keywords for it.

        Raises:
            LigerDistError: it does not name them, or the model's forward computes its loss itself.
        """
        if self._owner is not None and not self._has_loss_function() and set(asked) == set(call.asks_of_the_loss):
            own: Any = self._owner.loss_function
            return options_for(own, call, reason=reason)
        raise LigerDistError(
            f"{asked[-1]} was asked of {call.model_name}, whose loss is not fused here ({reason}), so that nothing "
            "would compute it. Leave it out of such calls."
        )

    def _check_wrapper(self) -> None:
        """Refuses a loss outside of the forward of an FSDP1 wrapper that other code has made, and warns of one that
        nothing averages."""
        if self.strategy != "auto" or is_transformed():
            return
        name = type(self.model).__name__
        if is_outside_forward(self.model, embedding_of(self.model)):
            raise LigerDistError(
                f"a loss was asked of the {name} inside FullyShardedDataParallel, outside the wrapper's forward, which "
                "gathers sharded weights and reduces gradients. Call the wrapper, or wrap the model itself with "
                "strategy='fsdp1'."
            )
        is_whole = self._chosen is None or self._chosen.name == "replicated"
        # A checkpoint of the whole model computes it again in the backward, outside of every forward.
        in_backward = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and is_whole and not in_backward and not is_averaged():
            self._say_once(
                f"a loss of {name} was asked for on {dist.get_world_size()} ranks outside the forward of "
                "DistributedDataParallel, so that nothing averages its gradients. Call the wrapper instead of the "
                "model inside it, wrap with strategy='ddp' (or 'deepspeed'), or average them yourself."
            )

    def _reason_to_leave(self, head: nn.Module) -> str | None:
        """Why this call's loss is the model's own, by what may have changed since wrapping."""
        if has_active_dropout(head):
            return (
                "the adapter on its output embedding has dropout, which is another weight for every token; set "
                "lora_dropout=0.0 or leave the head out of target_modules"
            )
        if is_transformed():
            return "torch.func or forward-mode differentiation is at work, which the fused loss does not know"
        if self._owner is not None and not self._has_loss_function():
            loss_function = vars(self._owner).get("_loss_function")
            return f"its loss_function is {getattr(loss_function, '__qualname__', loss_function)} now"
        return None

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._has_said:
            self._has_said.add(sentence)
            warnings.warn(sentence, stacklevel=2)

    def _targets(self, named: dict[str, Any], ignore_index: int) -> tuple[Tensor, bool]:
        """The labels that the loss is computed with, and whether each stands at its own token's place."""
        labels, shifted = named["labels"], named.get("shift_labels")
        if self.plan.targets == "same":
            return labels, True
        if shifted is not None:
            return shifted, True
        attention_mask = named.get("attention_mask")
        if self.plan.targets == "next_attended" and attention_mask is not None:
            if attention_mask.shape != labels.shape:
                raise LigerDistError(
                    f"attention_mask has shape {tuple(attention_mask.shape)} and labels have shape "
                    f"{tuple(labels.shape)}; {type(self.model).__name__} scores the tokens that its mask has, so "
                    "expected one shape. Pass the mask of the labels, or use WrapConfig(fused_loss=False)."
                )
            labels = labels.masked_fill(attention_mask.to(labels.device) == 0, ignore_index)
        return labels, False

    def has_target(self, call: Call) -> bool:
        """True if a label of the call counts."""
        labels, is_aligned = self._targets(call.named, call.ignore_index)
        return bool(((labels if is_aligned else labels[..., 1:]) != call.ignore_index).any())

    def check_at_entry(self, call: Call) -> nn.Module:
        """The head that will be called; refuses what can be seen to be wrong with the model's arguments before it runs
        its first collective."""
        named, ignore_index = call.named, call.ignore_index
        head = self._head_in_use()
        vocab_size = cast(nn.Linear, base_head(head)).out_features
        given = [named["labels"], named.get("shift_labels")]
        for labels in given:
            if labels is not None and not isinstance(labels, Tensor):
                raise LigerDistError(f"labels are a {type(labels).__name__}; expected a tensor of integers.")
        labels = self._targets(named, ignore_index)[0]
        inputs = next((named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None), None)
        config = getattr(self.model, "config", None)
        keeps_some = isinstance(named.get("logits_to_keep"), Tensor) or bool(named.get("logits_to_keep"))
        same_tokens = inputs is not None and not keeps_some and not getattr(config, "is_encoder_decoder", False)
        tokens = inputs.shape[:2] if inputs is not None and same_tokens else labels.shape
        check_labels(labels, tokens_of="inputs", shape=tokens, ignore_index=ignore_index)
        if labels.device.type == "cpu":
            scored = labels if self._targets(named, ignore_index)[1] else labels[..., 1:]
            check_range(scored, vocab_size=vocab_size, ignore_index=ignore_index)
        call.arguments(self.plan).check(vocab_size=vocab_size, labels_shape=labels.shape)
        return head

    @untraced
    def _after_head(self, head: nn.Module, args: Any, output: Any) -> Any:
        """Tensor parallelism takes DTensors from the head and hands out others; those carry the loss from here."""
        request = self._current()
        is_carrying = (
            request is not None and request.output is not None and not request.on_logits and type(output) is Tensor
        )
        return FusedLogits.carrying(output, request) if is_carrying and output.shape[-1] == 0 else None

    @untraced
    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        running = self._requests.get(threading.get_ident())
        if not running:
            return None  # An earlier hook raised before this seam's turn.
        request = running.pop()
        if not running:
            del self._requests[threading.get_ident()]
        went_through = output is not None
        if not went_through or request is None or not (request.started or request.on_logits):
            return None
        if not request.delivered:
            raise LigerDistError(
                f"{type(model).__name__} called its output embedding but not its loss_function, so the fused loss went "
                "nowhere. Unwrap the model, or wrap it with WrapConfig(fused_loss=False)."
            )
        return fused_output(output, request)
