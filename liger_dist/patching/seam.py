"""The seam of one model instance: labels noted at its forward, the loss computed in its head, handed back by its loss
function.

The head's output must stay in the autograd graph, because wrappers hang their backward hooks on it. So the loss leaves
the head as logits without width, which no transform in between can change; ``loss_function`` turns them back into the
loss. The value travels beside the graph, and so does the upstream gradient on its way back.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_dist.config import WrapConfig
from liger_dist.dispatch import choose, collect_facts
from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.labels import check_labels, check_range
from liger_dist.losses.normalization import denominator
from liger_dist.sharding.base import DataParallel, ShardingAdapter
from liger_dist_kernels import LossOptions

from .head import fuse_head, precede_installed_forward, restore_head
from .probe import LogitTransform
from .redirect import Redirect
from .request import IGNORE_INDEX, LogitsToLoss, LossRequest, start_summary
from .structure import Structure, active_head, heads_at
from .untraced import untraced


class Seam:
    """Joins one model instance to its head. Installed and removed as a whole."""

    def __init__(
        self, model: nn.Module, structure: Structure, transform: LogitTransform, *, strategy: str, config: WrapConfig
    ) -> None:
        self.model = model
        self.head = structure.head
        self.tied = structure.tied
        self.transform = transform
        self.strategy = strategy
        self.config = config
        self._requests: dict[int, list[LossRequest | None]] = {}
        self._chosen: ShardingAdapter | None = None
        self._stored: tuple[object, ...] = ()
        self._hooks: tuple[RemovableHandle, ...] = ()
        self.redirect: Redirect | None = None
        self._is_paused = False
        self.compute_dtype: torch.dtype | None = None
        """of the last loss"""
        self._head_name = structure.head_name
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._own_loss_function: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]
        self._had_own_loss_function = "_loss_function" in vars(model)

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
        self.model.loss_function = self.loss_function  # type: ignore[assignment]

    def listen(self) -> None:
        """Hooks the model's forward, ahead of the hooks that are there already; and redirects it when a wrapper may
        come around the model."""
        if self.strategy in ("auto", "ddp", "fsdp1"):
            self.redirect = Redirect(self.model)
        self._hooks = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        )

    def remove(self) -> None:
        """Undoes :meth:`fuse` and :meth:`listen`."""
        if self.redirect is not None:
            self.redirect.remove()
        for hook in self._hooks:
            hook.remove()
        if self._had_own_loss_function:
            self.model.loss_function = self._own_loss_function  # type: ignore[assignment]
        else:
            del self.model._loss_function
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
        mean_over = self._adapter(head).data_parallel(head, self.model)
        labels = batch["labels"][..., 1:] if batch.get("shift_labels") is None else batch["shift_labels"]
        items = denominator(
            None,
            torch.where(labels == batch.get("ignore_index", IGNORE_INDEX), -1, labels).to(head.weight.device),
            reduction="mean",
            num_items_in_batch=None,
            dtype=torch.float32,
            groups=mean_over.groups,
            divide_factor=mean_over.divide_factor,
        )
        return {"num_items_in_batch": items}

    def _head_in_use(self) -> nn.Linear:
        """The head that a forward will call.

        Raises:
            LigerDistError: it is not one that was wrapped.
        """
        head = active_head(self._place)
        if not isinstance(head, nn.Linear) or vars(head).get("_liger_dist_seam") is not self:
            raise LigerDistError(
                f"the output embedding of {type(self.model).__name__} is a {type(self._place).__name__} now, not the "
                "one that was wrapped. After resizing embeddings or adding an adapter call liger_dist.unwrap(model) "
                "and wrap it again; LoRA on the head is not supported (train it whole with modules_to_save)."
            )
        return head

    @property
    def _place(self) -> nn.Module:
        return self.model.get_submodule(self._head_name)

    def _adapter(self, head: nn.Linear) -> ShardingAdapter:
        """The dispatcher's choice; facts are collected anew only when the weight is stored in another way."""
        weight = head.weight
        stored = (
            type(self.model),
            id(head),
            type(head),
            type(weight),
            hasattr(weight, "ds_id"),
            hasattr(weight, "_fsdp_flattened"),
        )
        if self._chosen is None or self._stored != stored:
            is_tied = self.tied and head is self.head
            facts = collect_facts(self.model, head, strategy=self.strategy, tied=is_tied, config=self.config)
            self._chosen, self._stored = choose(facts), stored
        return self._chosen

    def take(self) -> LossRequest | None:
        """The request of the running forward, once."""
        request = self._current()
        return request if request is not None and request.value is None else None

    def _current(self) -> LossRequest | None:
        running = self._requests.get(threading.get_ident())
        return running[-1] if running else None

    def compute(self, request: LossRequest, head: nn.Linear, hidden_states: Tensor) -> LossOutput:
        """The loss of one request, by the adapter that the weight's storage asks for."""
        device_type = hidden_states.device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        self.compute_dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden_states.dtype
        adapter = self._adapter(head)
        mean_over = DataParallel(groups=(), divide_factor=1.0)
        if self.config.token_mean == "global":
            mean_over = adapter.data_parallel(head, self.model)
        return adapter.linear_cross_entropy(
            hidden_states,
            head,
            request.shifted_labels(),
            loss=LossArguments(
                options=LossOptions(
                    ignore_index=request.ignore_index, softcap=self.transform.softcap, logit_scale=self.transform.scale
                ),
                num_items_in_batch=request.num_items_in_batch,
            ),
            execution=Execution(
                backend=self.config.kernels,
                memory_budget=self.config.memory_budget,
                label_summary=request.summary,
                mean_groups=mean_over.groups,
                divide_factor=mean_over.divide_factor,
            ),
        )

    @untraced
    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of the model's loss function: the finished loss, or the model's own for real logits."""
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        request = self._current()
        if request is None or request.value is None or logits.shape[-1] != 0:
            return self._own_loss_function(*args, **kwargs)
        for name, differs in request.differences(kwargs):
            if differs:
                raise LigerDistError(
                    f"the loss was computed with the {name} that {type(self.model).__name__} was called with, but the "
                    "model hands another one to its loss function; wrap it with WrapConfig(fused_loss=False)."
                )
        request.delivered = True
        loss: Tensor = LogitsToLoss.apply(logits, request)  # type: ignore[no-untyped-call]
        return loss

    @untraced
    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running = self._requests.setdefault(threading.get_ident(), [])
        running.append(None)
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        labels, effective, ignore_index = self._labels_of(named)
        is_redirected = self.redirect is not None and self.redirect.takes(args, kwargs)
        if labels is None or self._is_paused:
            # Without labels the models of transformers compute no loss, whatever else they are given.
            return None
        head = self.check_at_entry(named)
        if is_redirected:
            return None  # The wrapper calls this model again.
        if self.redirect is not None:
            self.redirect.check_inside()
        self._adapter(head)
        precede_installed_forward(head)
        running[-1] = LossRequest(
            seam=self,
            labels=effective,
            is_shifted=effective is not labels,
            num_items_in_batch=named.get("num_items_in_batch"),
            ignore_index=ignore_index,
            summary=start_summary(effective, effective is not labels, ignore_index),
        )
        if "use_cache" in self._parameters[len(args) :] and kwargs.get("use_cache") is None:
            # A training forward never reads a cache, and some attention masks change when one is built.
            kwargs["use_cache"] = False
        return args, kwargs

    @staticmethod
    def _labels_of(named: dict[str, Any]) -> tuple[Any, Any, int]:
        """The model's labels, those that the loss is computed with, and the label of tokens without a target."""
        labels, shifted = named.get("labels"), named.get("shift_labels")
        return labels, labels if shifted is None else shifted, named.get("ignore_index", IGNORE_INDEX)

    def check_at_entry(self, named: dict[str, Any]) -> nn.Linear:
        """The head that will be called; refuses what can be seen to be wrong with the model's arguments before it runs
        its first collective."""
        _, labels, ignore_index = self._labels_of(named)
        head = self._head_in_use()
        if not isinstance(labels, Tensor):
            raise LigerDistError(f"labels are a {type(labels).__name__}; expected a tensor of integers.")
        inputs = next((named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None), None)
        config = getattr(self.model, "config", None)
        keeps_some = isinstance(named.get("logits_to_keep"), Tensor) or bool(named.get("logits_to_keep"))
        same_tokens = inputs is not None and not keeps_some and not getattr(config, "is_encoder_decoder", False)
        tokens = inputs.shape[:2] if inputs is not None and same_tokens else labels.shape
        check_labels(labels, tokens_of="inputs", shape=tokens, ignore_index=ignore_index)
        if labels.device.type == "cpu":
            check_range(labels, vocab_size=head.out_features, ignore_index=ignore_index)
        return head

    @untraced
    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running = self._requests.get(threading.get_ident())
        if not running:
            return  # An earlier hook raised before this seam's turn.
        request = running.pop()
        if not running:
            del self._requests[threading.get_ident()]
        went_through = output is not None
        if went_through and request is not None and request.value is not None and not request.delivered:
            raise LigerDistError(
                f"{type(model).__name__} called its output embedding but not its loss_function, so the fused loss went "
                "nowhere. Unwrap the model, or wrap it with WrapConfig(fused_loss=False)."
            )
