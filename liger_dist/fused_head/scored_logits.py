"""Logits of which only the next tokens' log-probabilities were computed, for trainers that read nothing else of them.

The trainers of :data:`.host_calls.READERS` call a model without labels and compute log-probabilities of its own input
ids from the logits. A wrapped model computes those log-probabilities in its lm_head, and returns them as logits whose
log-sum-exp is 0.
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
    "the logits of this call were never computed, only the log-probabilities of its next tokens, because a trainer of "
    "TRL reads nothing else of them. Unwrap the model to read logits there."
)
_OTHER_TOKENS = (
    "log-probabilities of other tokens than the model's next input ids were read from a fused call; unwrap the model "
    "for such a trainer"
)
_CROSS_ENTROPY = signature(F.cross_entropy)


class ScoredLogits:
    """Stands for logits ``[..., V]``."""

    def __init__(self, ids: Tensor, log_prob: Tensor, mean_logit: Tensor, vocab_size: int) -> None:
        """``ids``, their ``log_prob`` and the ``mean_logit`` over the vocabulary are ``[...]``."""
        self._ids, self._log_prob, self._mean_logit, self._vocab_size = ids, log_prob, mean_logit, vocab_size

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._ids.shape, self._vocab_size))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._log_prob.dtype

    @property
    def device(self) -> torch.device:
        return self._log_prob.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int) -> int:
        """0, which no kernel takes for dense logits."""
        return 0

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[ScoredLogits]:
        return (self[row] for row in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        raise LogitsNotComputedError(f"{name} of logits was read: {NOT_COMPUTED}")

    def _each(self, change: Callable[[Tensor], Tensor]) -> ScoredLogits:
        return ScoredLogits(change(self._ids), change(self._log_prob), change(self._mean_logit), self._vocab_size)

    def __getitem__(self, index: Any) -> ScoredLogits:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) == self.ndim or Ellipsis in index:
            *index, classes = index
            if classes not in (slice(None), Ellipsis):
                raise LogitsNotComputedError(f"some classes of logits were read: {NOT_COMPUTED}")
        return self._each(lambda values: values[tuple(index)])

    def contiguous(self) -> ScoredLogits:
        return self

    def detach(self) -> ScoredLogits:
        return self._each(Tensor.detach)

    def view(self, *shape: int) -> ScoredLogits:
        if shape[-1] != self._vocab_size:
            raise LogitsNotComputedError(f"classes of logits were reshaped: {NOT_COMPUTED}")
        return self._each(lambda values: values.reshape(shape[:-1]))

    reshape = view

    def mean(self) -> Tensor:
        """0-d, over tokens and classes."""
        return self._mean_logit.mean()

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> ScoredLogits:
        return self

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """``[..., 1]``: the log-probabilities of the next tokens, which ``index`` ``[..., 1]`` has to name, or 0 where
        the trainer masks them afterwards."""
        named = index[..., 0]
        self._check(((named == self._ids) | (named == 0)).all())
        return self._log_prob[..., None]

    def cross_entropy(self, target: Tensor, **options: Any) -> Tensor:
        """0-d mean over the tokens that are not ignored."""
        changed = {"weight": None, "label_smoothing": 0.0, "reduction": "mean"}
        if any(options.get(name, usual) != usual for name, usual in changed.items()):
            raise LogitsNotComputedError(f"a cross entropy with {', '.join(options)} was computed: {NOT_COMPUTED}")
        counts = target != options.get("ignore_index", -100)
        self._check(((target == self._ids) | ~counts).all())
        loss: Tensor = -(self._log_prob * counts).sum() / counts.sum()
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
            return torch.zeros_like(logits._log_prob)
        if func in (F.log_softmax, torch.log_softmax):
            return logits
        raise LogitsNotComputedError(f"{getattr(func, '__name__', func)} was called on logits: {NOT_COMPUTED}")
