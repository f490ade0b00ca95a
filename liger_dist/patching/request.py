"""One call's labels on their way to the head, and its loss on the way back beside the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.losses.arguments import Execution, LossArguments, LossOutput
from liger_dist.losses.cross_entropy import fused_cross_entropy
from liger_dist.losses.labels import LabelSummary, check_labels
from liger_dist.sharding.tensor_parallel import placed_like

from .adapted import effective_head, is_adapted
from .call import IGNORE_INDEX, TOKEN_ACCURACY
from .fused_logits import FusedLogits
from .structure import base_head

if TYPE_CHECKING:
    from .seam import Seam


@dataclass
class LossRequest:
    """One call's labels on their way in, and its loss on the way out."""

    seam: Seam
    labels: Tensor
    is_aligned: bool
    """whether each token is scored against the label at its own place, not against the next"""
    loss: LossArguments
    outputs: tuple[str, ...]
    summary: LabelSummary | None
    given: tuple[GivenLabels, ...]
    """the labels that the model was called with, which its forward must not change"""
    mean_is_global: bool = False
    """True if the mean is over the tokens of all ranks"""
    on_logits: bool = False
    """True if the loss function computes this from full logits, and lm_head only these"""
    alters_loss: bool = False
    """with ``on_logits``: True if the loss is another one than the model's own"""
    output: LossOutput | None = None
    """the finished loss, outside the graph"""
    others: dict[str, Tensor] = field(default_factory=dict)
    """further outputs that carry gradients"""
    upstream: tuple[Tensor | None, ...] = field(default=(), repr=False)
    """gradients of the loss and of ``others``"""
    started: bool = False
    delivered: bool = False

    def compute(self, head: nn.Module, hidden_states: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Computes the loss; the logits without width that carry it are returned. ``forward`` is what ``head`` would
        have run."""
        self.started = True
        self._check_unchanged()
        check_labels(
            self.labels,
            tokens_of="hidden states",
            shape=hidden_states.shape[:-1],
            ignore_index=self.loss.options.ignore_index,
        )
        base = cast(nn.Linear, base_head(head))
        used = effective_head(head, forward, hidden_states) if is_adapted(head) else base
        output = self._without_a_mean(self.seam.compute(self, base, used, hidden_states))
        shape, dtype = hidden_states.shape[:-1], hidden_states.dtype
        carried: Tensor = _LossToLogits.apply(self, shape, dtype, *self._with_gradients(output))  # type: ignore[no-untyped-call]
        self.output = _detached(output)
        carried = placed_like(hidden_states, carried)
        return FusedLogits.carrying(carried, self) if type(carried) is Tensor else carried

    def _without_a_mean(self, output: LossOutput) -> LossOutput:
        """In evaluation the mean of no token is NaN, as the model's own: a trainer leaves it out of its mean over
        batches. In training it is 0, so that an empty rank does not spoil the gradients of the others."""
        items = self.loss.num_items_in_batch
        if torch.is_grad_enabled() or self.mean_is_global or not (items is None or isinstance(items, Tensor)):
            return output
        device = output.loss.device
        is_empty = (self.aligned_labels() == self.loss.options.ignore_index).all().to(device, non_blocking=True)
        if items is not None:
            is_empty &= items.reshape(()).to(device, non_blocking=True) == 0
        return replace(output, loss=torch.where(is_empty, torch.nan, output.loss))

    def _with_gradients(self, output: LossOutput) -> list[Tensor]:
        """What gradients may be asked of: the loss, and further outputs where the call says so."""
        return [output.loss, *(getattr(output, name) for name in self._differentiable)]

    @property
    def _differentiable(self) -> list[str]:
        return sorted(self.loss.differentiable_outputs)

    def aligned_labels(self) -> Tensor:
        """Each token's target; with labels of the next tokens, the last one has none."""
        if self.is_aligned:
            return self.labels
        return nn.functional.pad(self.labels[..., 1:].long(), (0, 1), value=self.loss.options.ignore_index)

    def deliver(self, logits: Tensor, targets: Any) -> Tensor:
        """The loss, in the place where the model computes it from ``logits`` and its targets.

        Raises:
            LigerDistError: the model computes a second one, or did something to the logits or the labels that it did
                not do when it was wrapped.
        """
        name = type(self.seam.model).__name__
        if isinstance(logits, FusedLogits):
            if logits.changes != self.seam.plan.changes:
                raise LigerDistError(
                    f"{name} did {_listed(logits.changes)} to its logits, but {_listed(self.seam.plan.changes)} when "
                    "it was wrapped, which is what its loss was computed with. Unwrap it and wrap it again after such "
                    "a change, or use WrapConfig(fused_loss=False)."
                )
            logits = logits.as_subclass(Tensor)
        self._check_targets(targets, name)
        if self.delivered:
            raise LigerDistError(
                f"{name} computes a second loss from the logits of one call, which were "
                "never computed; wrap it with WrapConfig(fused_loss=False)."
            )
        self.delivered = True
        loss, *others = _LogitsToLoss.apply(logits, self)  # type: ignore[no-untyped-call]
        self.others = dict(zip(self._differentiable, others, strict=True))
        return cast(Tensor, loss)

    def _check_targets(self, targets: Any, name: str) -> None:
        """Whether the labels that arrived are those that the loss was computed with. What was only given another shape
        shares their storage; copies are compared, on a GPU by an assertion there."""
        self._check_unchanged()
        if not isinstance(targets, Tensor) or _storage(targets) == _storage(self.labels):
            return
        aligned = self.aligned_labels()
        expected = [x for x in (self.labels, aligned, aligned[..., :-1]) if x.numel() == targets.numel()]
        given = targets.reshape(-1)
        if expected:
            same = torch.stack([(x.reshape(-1).to(given.device) == given).all() for x in expected]).any()
            _refuse_unless(same, name)

    def _check_unchanged(self) -> None:
        for labels in self.given:
            labels.check_unchanged(type(self.seam.model).__name__)

    def score(self, logits: Tensor, aligned: Tensor, *, execution: Execution) -> Tensor:
        """The loss of full logits ``[..., V]`` that the model's own code has transformed.

        Args:
            aligned: each row's target, as many as there are rows of logits.

        Raises:
            LigerDistError: the model scores other tokens than it was given labels for.
        """
        rows = logits.numel() // logits.shape[-1]
        if not aligned.numel() == rows == self.labels.numel():
            raise LigerDistError(
                f"{type(self.seam.model).__name__} scores {rows} tokens of {self.labels.numel()} labels, so "
                f"that {', '.join(self.loss.outputs) or 'options of the loss'} cannot be told apart by token; leave "
                "them out of calls whose loss is not fused."
            )
        options = replace(self.loss.options, softcap=None, logit_scale=1.0)
        output = self._without_a_mean(
            fused_cross_entropy(
                logits.reshape(*self.labels.shape, logits.shape[-1]),
                aligned.reshape(self.labels.shape),
                loss=replace(self.loss, options=options, logit_bias=None),
                execution=execution,
            )
        )
        self.output, self.delivered = _detached(output), True
        self.others = {name: getattr(output, name) for name in self._differentiable}
        return output.loss

    def differences(self, given: dict[str, Any], *, takes_num_items: bool) -> tuple[tuple[str, bool], ...]:
        """Whether the model hands its loss function other arguments than this loss was computed with. Tensors may have
        been moved on the way, so only their presence is compared."""
        has_items = self.loss.num_items_in_batch is not None
        return (
            ("num_items_in_batch", takes_num_items and (given.get("num_items_in_batch") is None) == has_items),
            ("ignore_index", given.get("ignore_index", IGNORE_INDEX) != self.loss.options.ignore_index),
        )

    def reports(self) -> dict[str, Tensor]:
        """The further outputs that were asked for, by name."""
        assert self.output is not None
        # Their graph holds this request, which must not hold them.
        others, self.others = self.others, {}
        found: dict[str, Tensor] = {}
        for name in self.outputs:
            if name == TOKEN_ACCURACY:
                assert self.output.is_top1 is not None
                counted = (self.aligned_labels() != self.loss.options.ignore_index).sum()
                found[name] = self.output.is_top1.sum() / counted.to(self.output.is_top1.device).clamp(min=1)
            else:
                found[name] = others.get(name, getattr(self.output, name))
        return found


@dataclass(frozen=True)
class GivenLabels:
    """Labels as they were at the model's entry."""

    labels: Tensor
    version: int | None
    """torch's count of changes in place; None for inference tensors, which have none"""
    copy: Tensor | None

    @staticmethod
    def of(labels: Tensor) -> GivenLabels:
        if labels.is_inference():
            return GivenLabels(labels, None, labels.clone())
        return GivenLabels(labels, labels._version, None)

    def check_unchanged(self, name: str) -> None:
        """Raises:
        LigerDistError: the forward of the model ``name`` has changed them; on a GPU inference tensors are held to
            that by an assertion on the device.
        """
        if self.copy is not None:
            _refuse_unless((self.labels == self.copy).all(), name)
        elif self.labels._version != self.version:
            raise LigerDistError(_CHANGED_LABELS.format(name))


_CHANGED_LABELS = (
    "{} changed its labels before its loss, in a way that it did not show when it was wrapped; the loss was computed "
    "with those of the call. Change them before the call, or use WrapConfig(fused_loss=False)."
)


def _refuse_unless(same: Tensor, name: str) -> None:
    problem = _CHANGED_LABELS.format(name)
    if same.is_cuda:
        torch._assert_async(same, problem)
    elif not bool(same):
        raise LigerDistError(problem)


def _detached(output: LossOutput) -> LossOutput:
    values: dict[str, Any] = {name: None if value is None else value.detach() for name, value in vars(output).items()}
    return replace(output, **values)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _listed(changes: tuple[tuple[Any, ...], ...]) -> str:
    return ", ".join(" ".join(map(str, change)) for change in changes) or "nothing"


class _LossToLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: LossRequest, shape: torch.Size, dtype: torch.dtype, *values: Tensor) -> Tensor:
        ctx.request, ctx.nothing = request, (None,) * len(values)
        return values[0].new_empty((*shape, 0), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # None has come where only the logits without width were asked for a gradient.
        upstream, ctx.request.upstream = ctx.request.upstream or ctx.nothing, ()
        return None, None, None, *upstream


class _LogitsToLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: LossRequest) -> tuple[Tensor, ...]:
        assert request.output is not None
        ctx.request = request
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        return tuple(value.clone() for value in request._with_gradients(request.output))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        ctx.request.upstream = upstream
        return torch.zeros_like(logits), None


def start_summary(labels: Tensor, is_aligned: bool, ignore_index: int) -> LabelSummary | None:
    """The count and range of the labels that will count, fetched from the GPU beside the model's run; None on the
    CPU."""
    if not labels.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    if not is_aligned:
        labels = labels[..., 1:]
    return LabelSummary(labels, ignore_index) if labels.numel() > 0 and not labels.is_floating_point() else None
