"""Logits of which only what a trainer reads was computed: per-token numbers such as the next token's log-probability.

The trainers of :data:`.host_calls.READERS` call a model without labels and compute log-probabilities of its own input
ids from the logits. A wrapped model computes those in its lm_head, and returns them as logits whose log-sum-exp is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LogitsNotComputedError
from liger_dist.losses.collectives import device_assert

NOT_COMPUTED = (
    "the logits of this call were never computed, only numbers of its next tokens, because its trainer reads nothing "
    "else of them. Unwrap the model to read logits there."
)
_OTHER_TOKENS = (
    "log-probabilities of other tokens than the model's next input ids were read from a fused call; unwrap the model "
    "for such a trainer"
)
_CROSS_ENTROPY = signature(F.cross_entropy)
LOGITS, DOUBLED, PROBABILITIES, ENTROPY_TERMS = "logits", "2 * logits", "probabilities", "probabilities * logits"


class ScoredLogits:
    """Stands for logits ``[..., V]``, or for one of the products that entropies and squared probabilities are summed
    from."""

    def __init__(self, ids: Tensor, outputs: dict[str, Tensor], vocab_size: int, *, kind: str = LOGITS) -> None:
        """``ids`` and the ``outputs`` of a wrapped model for them, ``log_prob`` and ``mean_logit`` at least, are
        ``[...]``."""
        self._ids, self._outputs, self._vocab_size, self._kind = ids, outputs, vocab_size, kind

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._ids.shape, self._vocab_size))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._outputs["log_prob"].dtype

    @property
    def device(self) -> torch.device:
        return self._ids.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def is_cuda(self) -> bool:
        """False on every device: no kernel can read these."""
        return False

    def stride(self, dim: int) -> int:
        """0, which no kernel takes for dense logits."""
        return 0

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[ScoredLogits]:
        return (self[row] for row in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        raise LogitsNotComputedError(f"{name} of {self._kind} was read: {NOT_COMPUTED}")

    # Of tokens, not of classes.

    def _each(self, change: Callable[[Tensor], Tensor]) -> ScoredLogits:
        outputs = {name: change(values) for name, values in self._outputs.items()}
        return ScoredLogits(change(self._ids), outputs, self._vocab_size, kind=self._kind)

    def __getitem__(self, index: Any) -> ScoredLogits:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) == self.ndim or Ellipsis in index:
            *index, classes = index
            if classes not in (slice(None), Ellipsis):
                raise LogitsNotComputedError(f"some classes of {self._kind} were read: {NOT_COMPUTED}")
        return self._each(lambda values: values[tuple(index)])

    def contiguous(self) -> ScoredLogits:
        return self

    def detach(self) -> ScoredLogits:
        return self._each(Tensor.detach)

    def to(self, dtype: torch.dtype) -> ScoredLogits:
        return self._each(lambda values: values.to(dtype) if values.is_floating_point() else values)

    def float(self) -> ScoredLogits:
        return self.to(torch.float32)

    def view(self, *shape: int) -> ScoredLogits:
        if shape[-1] != self._vocab_size:
            raise LogitsNotComputedError(f"classes of {self._kind} were reshaped: {NOT_COMPUTED}")
        return self._each(lambda values: values.reshape(shape[:-1]))

    reshape = view

    def index_select(self, dim: int, index: Tensor) -> ScoredLogits:
        return self._each(lambda values: values.index_select(dim, index))

    def split(self, size: int, dim: int = 0) -> tuple[ScoredLogits, ...]:
        starts = range(0, self.shape[dim], size)
        return tuple(
            self._each(lambda values, start=start: values.narrow(dim, start, min(size, values.shape[dim] - start)))  # type: ignore[misc]
            for start in starts
        )

    def chunk(self, chunks: int, dim: int = 0) -> tuple[ScoredLogits, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    # Over the classes.

    def _output(self, name: str, of: str = LOGITS) -> Tensor:
        if self._kind != of or name not in self._outputs:
            raise LogitsNotComputedError(f"{name} of {self._kind} was read: {NOT_COMPUTED}")
        return self._outputs[name]

    def _becomes(self, kind: str, *, of: str = LOGITS) -> ScoredLogits:
        if self._kind != of:
            raise LogitsNotComputedError(f"{kind} were computed from {self._kind}: {NOT_COMPUTED}")
        return ScoredLogits(self._ids, self._outputs, self._vocab_size, kind=kind)

    def mean(self, dim: int | None = None) -> Tensor:
        """Over the classes for ``dim`` -1, ``[...]``; over all tokens and classes for None, 0-d."""
        mean_logit = self._output("mean_logit")
        return mean_logit.mean() if dim is None else mean_logit

    def nansum(self) -> Tensor:
        """0-d."""
        return self._output("mean_logit").nansum() * self._vocab_size

    def argmax(self, dim: int) -> Tensor:
        """The likeliest class, -1 where it is not the next token, ``[...]``."""
        return torch.where(self._output("is_top1").bool(), self._ids, -1)

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> ScoredLogits:
        return self._becomes(LOGITS)

    def logsumexp(self, dim: int) -> Tensor:
        """``[...]``"""
        if self._kind == DOUBLED:
            return self._output("sum_sq_prob", of=DOUBLED).log()
        return torch.zeros_like(self._output("log_prob"))

    def exp(self) -> ScoredLogits:
        return self._becomes(PROBABILITIES)

    def __mul__(self, other: Any) -> ScoredLogits:
        if isinstance(other, ScoredLogits):
            other._becomes(LOGITS)
            return self._becomes(ENTROPY_TERMS, of=PROBABILITIES)
        if other != 2:
            raise LogitsNotComputedError(f"{other} * {self._kind} were read: {NOT_COMPUTED}")
        return self._becomes(DOUBLED)

    __rmul__ = __mul__

    def sum(self, dim: int) -> Tensor:
        """``[...]``"""
        return -self._output("entropy", of=ENTROPY_TERMS)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """``[..., 1]``: the log-probabilities of the next tokens, which ``index`` ``[..., 1]`` has to name, or 0 where
        the trainer masks them afterwards."""
        named = index[..., 0]
        self._check(((named == self._ids) | (named == 0)).all())
        return self._output("log_prob")[..., None]

    def cross_entropy(self, target: Tensor, **options: Any) -> Tensor:
        """0-d mean over the tokens that are not ignored."""
        changed = {"weight": None, "label_smoothing": 0.0, "reduction": "mean"}
        if any(options.get(name, usual) != usual for name, usual in changed.items()):
            raise LogitsNotComputedError(f"a cross entropy with {', '.join(options)} was computed: {NOT_COMPUTED}")
        counts = target != options.get("ignore_index", -100)
        self._check(((target == self._ids) | ~counts).all())
        loss: Tensor = -(self._output("log_prob") * counts).sum() / counts.sum()
        return loss

    def _check(self, same: Tensor) -> None:
        if same.is_cuda:
            device_assert(same, _OTHER_TOKENS)
        elif not bool(same):
            raise LogitsNotComputedError(f"{_OTHER_TOKENS}.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            given = dict(_CROSS_ENTROPY.bind(*args, **kwargs).arguments)
            return given.pop("input").cross_entropy(given.pop("target"), **given)
        logits, *others = args
        if func in (torch.gather, torch.take_along_dim):
            indices = (*others, kwargs.get("index"), kwargs.get("indices"))
            return logits.gather(-1, next(value for value in indices if isinstance(value, Tensor)))
        if func is torch.logsumexp:
            return logits.logsumexp(-1)
        if func is torch.exp:
            return logits.exp()
        if func in (F.log_softmax, torch.log_softmax):
            return logits.log_softmax(-1)
        raise LogitsNotComputedError(f"{getattr(func, '__name__', func)} was called on logits: {NOT_COMPUTED}")
