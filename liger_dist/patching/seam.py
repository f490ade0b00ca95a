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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from liger_dist.config import WrapConfig
from liger_dist.dispatch import choose, collect_facts
from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.labels import LabelSummary, check_labels, check_range
from liger_dist.sharding.base import DataParallel, ShardingAdapter
from liger_dist.sharding.tensor_parallel import placed_like
from liger_dist_kernels import LossOptions

from .head import fuse_head, precede_installed_forward, restore_head
from .probe import LogitTransform
from .redirect import Redirect
from .structure import Structure, active_head, heads_at
from .untraced import untraced

IGNORE_INDEX = -100


@dataclass
class LossRequest:
    """One call's labels on their way in, and its loss on the way out."""

    seam: Seam
    labels: Tensor
    is_shifted: bool
    num_items_in_batch: Tensor | float | None
    ignore_index: int
    summary: LabelSummary | None
    value: Tensor | None = None
    """the finished loss, outside the graph"""
    upstream: Tensor | None = field(default=None, repr=False)
    delivered: bool = False

    def compute(self, head: nn.Linear, hidden_states: Tensor) -> Tensor:
        """Computes the loss; the logits without width that carry it are returned."""
        check_labels(
            self.labels,
            tokens_of="hidden states",
            shape=hidden_states.shape[:-1],
            ignore_index=self.ignore_index,
        )
        output = self.seam.compute(self, head, hidden_states)
        self.value = output.loss.detach()
        shape, dtype = hidden_states.shape[:-1], hidden_states.dtype
        carried: Tensor = _LossToLogits.apply(output.loss, self, shape, dtype)  # type: ignore[no-untyped-call]
        return placed_like(hidden_states, carried)

    def shifted_labels(self) -> Tensor:
        """Each token's next label, the last one's ignored."""
        if self.is_shifted:
            return self.labels
        return nn.functional.pad(self.labels[..., 1:].long(), (0, 1), value=self.ignore_index)

    def differences(self, given: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        """Whether the model hands its loss function other arguments than this loss was computed with. Tensors may have
        been moved on the way, so only their presence is compared."""
        return (
            ("num_items_in_batch", (given.get("num_items_in_batch") is None) != (self.num_items_in_batch is None)),
            ("shift_labels", (given.get("shift_labels") is None) == self.is_shifted),
            ("ignore_index", given.get("ignore_index", IGNORE_INDEX) != self.ignore_index),
        )


class _LossToLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, request: LossRequest, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.request = request
        return loss.new_empty((*shape, 0), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None, None, None]:
        upstream, ctx.request.upstream = ctx.request.upstream, None
        return upstream, None, None, None


class _LogitsToLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: LossRequest) -> Tensor:
        assert request.value is not None
        ctx.request = request
        ctx.save_for_backward(logits)
        return request.value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        ctx.request.upstream = upstream
        return torch.zeros_like(logits), None


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
        self._redirect: Redirect | None = None
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
            fresh: dict[str, Any] = {"_requests": {}, "_redirect": None}
            setattr(twin, name, fresh[name] if name in fresh else copy.deepcopy(value, memo))
        return twin

    def fuse(self) -> None:
        """Changes the instance's head class and loss function; before it is sharded."""
        for head in heads_at(self._place):
            fuse_head(head, self)
        self.model.loss_function = self.loss_function  # type: ignore[assignment]

    def listen(self) -> None:
        """Hooks the model's forward, ahead of the hooks that are there already."""
        self._hooks = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        )

    def redirect_through(self, root: nn.Module) -> None:
        """Sends what is asked of the model inside ``root`` through ``root``: a loss that trains, and under FSDP1, where
        the model inside has no weights, every call."""
        self._redirect = Redirect(self.model, root, every_call=not isinstance(root, DistributedDataParallel))

    def remove(self) -> None:
        """Undoes :meth:`fuse`, :meth:`listen` and :meth:`redirect_through`."""
        if self._redirect is not None:
            self._redirect.remove()
        for hook in self._hooks:
            hook.remove()
        if self._had_own_loss_function:
            self.model.loss_function = self._own_loss_function  # type: ignore[assignment]
        else:
            del self.model._loss_function
        for head in heads_at(self._place):
            if vars(head).get("_liger_dist_seam") is self:
                restore_head(head)

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
        loss: Tensor = _LogitsToLoss.apply(logits, request)  # type: ignore[no-untyped-call]
        return loss

    @untraced
    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running = self._requests.setdefault(threading.get_ident(), [])
        running.append(None)
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        labels, shift_labels = named.get("labels"), named.get("shift_labels")
        if self._redirect is not None and self._redirect.takes(args, kwargs):
            return None  # The wrapper calls this model again.
        if labels is None:
            # Without labels the models of transformers compute no loss, whatever else they are given.
            return None
        effective = labels if shift_labels is None else shift_labels
        ignore_index = named.get("ignore_index", IGNORE_INDEX)
        head = self._check_at_entry(named, effective, ignore_index)
        self._adapter(head).check_entry(model)
        precede_installed_forward(head)
        ddp = DistributedDataParallel._get_active_ddp_module()
        if self._redirect is None and ddp is not None and ddp.module is model:
            # Somebody else's, so it is known from its first forward on.
            self.redirect_through(ddp)
        running[-1] = LossRequest(
            seam=self,
            labels=effective,
            is_shifted=shift_labels is not None,
            num_items_in_batch=named.get("num_items_in_batch"),
            ignore_index=ignore_index,
            summary=_start_summary(effective, shift_labels is not None, ignore_index),
        )
        if "use_cache" in self._parameters[len(args) :] and kwargs.get("use_cache") is None:
            # A training forward never reads a cache, and some attention masks change when one is built.
            kwargs["use_cache"] = False
        return args, kwargs

    def _check_at_entry(self, named: dict[str, Any], labels: Tensor, ignore_index: int) -> nn.Linear:
        """The head that will be called; refuses what can be seen to be wrong before the model runs its first
        collective."""
        place = self._place
        head = active_head(place)
        if not isinstance(head, nn.Linear) or vars(head).get("_liger_dist_seam") is not self:
            raise LigerDistError(
                f"the output embedding of {type(self.model).__name__} is a {type(place).__name__} now, not the one "
                "that was wrapped. After resizing embeddings or adding an adapter call liger_dist.unwrap(model) and "
                "wrap it again; LoRA on the head is not supported (train it whole with modules_to_save)."
            )
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


def _start_summary(labels: Tensor, is_shifted: bool, ignore_index: int) -> LabelSummary | None:
    if not labels.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    if not is_shifted:
        labels = labels[..., 1:]
    return LabelSummary(labels, ignore_index) if labels.numel() > 0 and not labels.is_floating_point() else None
