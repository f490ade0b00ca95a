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
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_dist.config import WrapConfig
from liger_dist.dispatch import choose, collect_facts
from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossOutput
from liger_dist.losses.labels import check_labels, check_range
from liger_dist.losses.normalization import denominator
from liger_dist.sharding.base import DataParallel, Facts, Head, ShardingAdapter

from .adapted import adapter_objection, has_active_dropout
from .call import IGNORE_INDEX, LOGITS, Call, Signature
from .fused_logits import FusedLogits
from .head import fuse_head, precede_installed_forward, restore_head
from .local import is_transformed
from .output import fused_output
from .plan import LossPlan
from .redirect import Redirect
from .request import LossRequest, start_summary
from .structure import Structure, active_head, base_head, heads_at
from .untraced import untraced


class Seam:
    """Joins one model instance to its head. Installed and removed as a whole."""

    def __init__(
        self, model: nn.Module, structure: Structure, plan: LossPlan, *, strategy: str, config: WrapConfig
    ) -> None:
        self.model = model
        self.head = structure.head
        self.tied = structure.tied
        self.plan = plan
        self.strategy = strategy
        self.config = config
        self._requests: dict[int, list[LossRequest | None]] = {}
        self._chosen: ShardingAdapter | None = None
        self._stored: tuple[object, ...] = ()
        self._hooks: tuple[RemovableHandle, ...] = ()
        self.redirect: Redirect | None = None
        self._is_paused = False
        self._has_said = False
        self.compute_dtype: torch.dtype | None = None
        """of the last loss"""
        self._head_name = structure.head_name
        self.signature = Signature(model, outputs=config.outputs)
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
        """Hooks the model's forward, ahead of the hooks that are there already; and redirects it when a wrapper may
        come around the model."""
        if self.strategy in ("auto", "ddp", "fsdp1"):
            self.redirect = Redirect(self.model)
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model computes its own loss on whole logits for a while."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

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
            tied=self.tied and base is self.head,
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
        """The request of the running forward, once."""
        request = self._current()
        return request if request is not None and not request.started else None

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
        mean_over = DataParallel(groups=(), divide_factor=1.0)
        if self.config.token_mean == "global":
            mean_over = adapter.data_parallel(base, self.model)
        return adapter.linear_cross_entropy(
            hidden_states,
            head,
            request.aligned_labels(),
            loss=request.loss,
            execution=Execution(
                backend=self.config.kernels,
                memory_budget=self.config.memory_budget,
                label_summary=request.summary,
                max_valid_tokens=self.config.max_valid_tokens,
                mean_groups=mean_over.groups,
                divide_factor=mean_over.divide_factor,
            ),
        )

    @untraced
    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of the owner's loss function: the finished loss, or the owner's own for real logits."""
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        request = self._current()
        if request is None or request.output is None or logits.shape[-1] != 0:
            assert self._own_loss_function is not None
            return self._own_loss_function(*args, **kwargs)
        for name, differs in request.differences(kwargs, takes_num_items=self.plan.takes_num_items):
            if differs:
                raise LigerDistError(
                    f"the loss was computed with the {name} that {type(self.model).__name__} was called with, but the "
                    "model hands another one to its loss function; wrap it with WrapConfig(fused_loss=False)."
                )
        targets = kwargs["labels"] if "labels" in kwargs else args[1]
        shifted = kwargs.get("shift_labels")
        return request.deliver(logits, targets if shifted is None or self.plan.targets == "same" else shifted)

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
        call = self.signature.read(args, kwargs)
        is_redirected = self.redirect is not None and self.redirect.takes(args, kwargs)
        if call.named.get("labels") is None or self._is_paused or LOGITS in call.outputs:
            # Without labels the models of transformers compute no loss, whatever else they are given.
            return call.args, call.kwargs
        head = self.check_at_entry(call)
        if is_redirected:
            return None  # The wrapper calls this model again.
        if self.redirect is not None:
            self.redirect.check_inside()
        self._adapter(head)
        precede_installed_forward(head)
        reason = self._reason_to_leave(head)
        if reason is not None:
            self._say_once(reason)
            return call.args, call.kwargs
        labels, is_aligned = self._targets(call.named, call.ignore_index)
        loss = call.arguments(self.plan)
        if self.plan.transform.bias is not None:
            loss = replace(loss, logit_bias=self.model.get_buffer(self.plan.transform.bias).reshape(-1))
        running[-1] = LossRequest(
            seam=self,
            labels=labels,
            is_aligned=is_aligned,
            loss=loss,
            outputs=call.outputs,
            summary=start_summary(labels, is_aligned, call.ignore_index),
        )
        if "use_cache" in self.signature.names[len(args) :] and kwargs.get("use_cache") is None:
            # A training forward never reads a cache, and some attention masks change when one is built.
            call.kwargs["use_cache"] = False
        return call.args, call.kwargs

    def _reason_to_leave(self, head: nn.Module) -> str | None:
        """Why this call's loss is the model's own, by what may have changed since wrapping."""
        if has_active_dropout(head):
            return (
                "the adapter on its output embedding has dropout, which is another weight for every token; set "
                "lora_dropout=0.0 or leave the head out of target_modules"
            )
        if is_transformed():
            return "torch.func or forward-mode differentiation is at work, which the fused loss does not know"
        loss_function = None if self._owner is None else vars(self._owner).get("_loss_function")
        if self._owner is not None and loss_function != self.loss_function:
            return f"its loss_function is {getattr(loss_function, '__qualname__', loss_function)} now"
        return None

    def _say_once(self, reason: str) -> None:
        if not self._has_said:
            self._has_said = True
            warnings.warn(
                f"liger_dist leaves the loss of {type(self.model).__name__} unfused: {reason}. The loss is the "
                "model's own.",
                stacklevel=2,
            )

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
        is_carrying = request is not None and request.output is not None and type(output) is Tensor
        return FusedLogits.carrying(output, request) if is_carrying and output.shape[-1] == 0 else None  # type: ignore[arg-type]

    @untraced
    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        running = self._requests.get(threading.get_ident())
        if not running:
            return None  # An earlier hook raised before this seam's turn.
        request = running.pop()
        if not running:
            del self._requests[threading.get_ident()]
        went_through = output is not None
        if not went_through or request is None or request.output is None:
            return None
        if not request.delivered:
            raise LigerDistError(
                f"{type(model).__name__} called its output embedding but not its loss_function, so the fused loss went "
                "nowhere. Unwrap the model, or wrap it with WrapConfig(fused_loss=False)."
            )
        return fused_output(output, request)
