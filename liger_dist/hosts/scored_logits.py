"""Stands in for logits: answers ``gather`` and ``logsumexp`` from precomputed per-token values.

The trainers of :data:`.trainer_frames.READERS` call a model without labels and compute log-probabilities of the input
ids from the logits. A wrapped model computes these in its lm_head, and returns an object that answers the trainers'
reads.
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
    "the logits of this call were never computed, only values of the next tokens, because its trainer reads no others. "
    "Unwrap the model to read logits there."
)
_OTHER_TOKENS = (
    "log-probabilities of other tokens than the model's next input ids were read from a fused call; unwrap the model "
    "for such a trainer"
)
_GRADIENT = (
    "a loss was computed from the means of logits, or from logits that are not normalised, whose gradients a fused "
    "call does not compute; unwrap the model for such a trainer"
)
_CROSS_ENTROPY = signature(F.cross_entropy)
_CLASS_0 = 0
"""class that trainers gather where they mask the result"""
LOGITS, DOUBLED, LOG_PROBS, PROBABILITIES, ENTROPY_TERMS = (
    "logits",
    "2 * logits",
    "log-probabilities",
    "probabilities",
    "probabilities * log-probabilities",
)
_OF_COPIES = ("__copy__", "__deepcopy__", "__setstate__")
SCORES = ("log_prob", "log_sum_exp", "log_prob_at")
"""outputs of a wrapped model that every object has; ``log_prob_at`` of class 0 alone, or of the ``token_ids`` that
are among the outputs"""


class _Constant(torch.autograd.Function):
    """Identity for values whose gradient was not computed. The gradient has to cancel, as that of a log-sum-exp does in
    the difference to a logit."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, log_prob: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        _check((gradient.nan_to_num() == 0).all(), _GRADIENT)
        return None, None


class LargestClasses:
    """Result of ``topk``: the classes alone, because their values would have no gradient."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices

    @property
    def values(self) -> Tensor:
        raise LogitsNotComputedError(f"values of topk were read: {NOT_COMPUTED}")

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.indices))


class ScoredLogits:
    """Stand-in for logits ``[..., V]``, or for the log-probabilities that trainers compute from them."""

    @staticmethod
    def of(ids: Tensor, outputs: dict[str, Tensor], vocab_size: int) -> ScoredLogits:
        """Wraps ``ids`` ``[...]`` and the ``outputs`` of a wrapped model for them: :data:`SCORES` and further ones.
        With ``token_ids`` ``[..., K]``, ``log_prob_at`` has the same shape; ``top_k_ids`` ``[..., k]`` answer
        ``topk``."""
        values = dict(outputs)
        if "token_ids" not in values:
            values["log_prob_at"] = values["log_prob_at"][..., 0]
        log_prob = values["log_prob"]
        if log_prob.requires_grad:
            for name in (name for name in ("log_sum_exp", "mean_logit") if name in values):
                values[name] = _Constant.apply(values[name], log_prob)  # type: ignore[no-untyped-call]
        return ScoredLogits(ids, values, vocab_size)

    def __init__(self, ids: Tensor, outputs: dict[str, Tensor], vocab_size: int, *, kind: str = LOGITS) -> None:
        """Stores ids ``[...]`` and outputs, ``[...]`` or ``[..., K]``."""
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
        """False on every device: no kernel can read these logits."""
        return False

    def stride(self, dim: int) -> int:
        """Returns 0, which no kernel accepts for dense logits."""
        return 0

    def __len__(self) -> int:
        if self.ndim == 1:
            raise LogitsNotComputedError(f"the classes of {self._kind} were read: {NOT_COMPUTED}")
        return len(self._ids)

    def __iter__(self) -> Iterator[ScoredLogits]:
        return (self[row] for row in range(len(self)))

    __array_ufunc__ = None
    """NumPy leaves operators to this class, which refuses them."""

    def __getattr__(self, name: str) -> Any:
        if name in _OF_COPIES:
            raise AttributeError(name)
        raise LogitsNotComputedError(f"{name} of {self._kind} was read: {NOT_COMPUTED}")

    # Operations over tokens.

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
        if not isinstance(dtype, torch.dtype):
            raise LogitsNotComputedError(f"{self._kind} were moved to {dtype}: {NOT_COMPUTED}")
        return self._each(lambda values: values.to(dtype) if values.is_floating_point() else values)

    def float(self) -> ScoredLogits:
        return self.to(torch.float32)

    def view(self, *shape: int) -> ScoredLogits:
        if shape[-1] != self._vocab_size:
            raise LogitsNotComputedError(f"classes of {self._kind} were reshaped: {NOT_COMPUTED}")
        tokens = self._ids.dim()
        return self._each(lambda values: values.reshape(*shape[:-1], *values.shape[tokens:]))

    reshape = view

    def index_select(self, dim: int, index: Tensor) -> ScoredLogits:
        self._over_tokens(dim)
        return self._each(lambda values: values.index_select(dim, index))

    def split(self, size: int, dim: int = 0) -> tuple[ScoredLogits, ...]:
        starts = range(0, self.shape[self._over_tokens(dim)], size)
        return tuple(
            self._each(lambda values, start=start: values.narrow(dim, start, min(size, values.shape[dim] - start)))  # type: ignore[misc]
            for start in starts
        )

    def chunk(self, chunks: int, dim: int = 0) -> tuple[ScoredLogits, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    # Reductions over the classes.

    def _output(self, name: str, *kinds: str) -> Tensor:
        if self._kind not in (kinds or (LOGITS,)) or name not in self._outputs:
            raise LogitsNotComputedError(f"{name} of {self._kind} was read: {NOT_COMPUTED}")
        return self._outputs[name]

    def _becomes(self, kind: str, *kinds: str) -> ScoredLogits:
        if self._kind not in (kinds or (LOGITS,)):
            raise LogitsNotComputedError(f"{kind} were computed from {self._kind}: {NOT_COMPUTED}")
        return ScoredLogits(self._ids, self._outputs, self._vocab_size, kind=kind)

    def _over_classes(self, dim: Any) -> None:
        if dim not in (-1, self.ndim - 1):
            raise LogitsNotComputedError(f"dim {dim} of {self._kind} was reduced: {NOT_COMPUTED}")

    def _over_tokens(self, dim: int) -> int:
        if not 0 <= dim < self.ndim - 1:
            raise LogitsNotComputedError(f"dim {dim} of {self._kind} was indexed: {NOT_COMPUTED}")
        return dim

    def mean(self, dim: int | None = None) -> Tensor:
        """Averages over the classes for ``dim`` -1, ``[...]``; over all tokens and classes for None, 0-d."""
        mean_logit = self._output("mean_logit", LOGITS, LOG_PROBS)
        if self._kind == LOG_PROBS:
            mean_logit = mean_logit - self._outputs["log_sum_exp"]
        if dim is None:
            return mean_logit.mean()
        self._over_classes(dim)
        return mean_logit

    def nansum(self) -> Tensor:
        """Sums over all tokens and classes, 0-d."""
        return self._output("mean_logit").nansum() * self._vocab_size

    def argmax(self, dim: int) -> Tensor:
        """Selects the likeliest class, -1 where it is not the next token: ``[...]``."""
        self._over_classes(dim)
        return torch.where(self._output("is_top1", LOGITS, LOG_PROBS).bool(), self._ids, -1)

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> ScoredLogits:
        self._over_classes(dim)
        found = self._becomes(LOG_PROBS, LOGITS, LOG_PROBS)
        return found if dtype is None else found.to(dtype)

    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor:
        """Reduces over the classes: ``[...]``, or ``[..., 1]`` with ``keepdim``."""
        self._over_classes(dim)
        log_sum_exp = self._output("log_sum_exp", LOGITS, DOUBLED)
        if self._kind == DOUBLED:
            log_sum_exp = self._output("sum_sq_prob", DOUBLED).log() + 2 * log_sum_exp
        return log_sum_exp[..., None] if keepdim else log_sum_exp

    def exp(self) -> ScoredLogits:
        return self._becomes(PROBABILITIES, LOG_PROBS)

    def __mul__(self, other: Any) -> ScoredLogits:
        if isinstance(other, ScoredLogits):
            other._becomes(LOG_PROBS, LOG_PROBS)
            return self._becomes(ENTROPY_TERMS, PROBABILITIES)
        if not isinstance(other, int | float) or other != 2:
            raise LogitsNotComputedError(f"{other} * {self._kind} were read: {NOT_COMPUTED}")
        return self._becomes(DOUBLED)

    __rmul__ = __mul__

    def sum(self, dim: int) -> Tensor:
        """Sums the terms of the entropy over the classes: ``[...]``."""
        self._over_classes(dim)
        return -self._output("entropy", ENTROPY_TERMS)

    def topk(self, k: int, dim: int = -1) -> LargestClasses:
        """Selects the classes of the k largest logits, ``[..., k]``."""
        self._over_classes(dim)
        ids = self._output("top_k_ids", LOGITS, LOG_PROBS)
        if k > ids.shape[-1]:
            raise LogitsNotComputedError(f"the {k} largest {self._kind} were read: {NOT_COMPUTED}")
        return LargestClasses(ids[..., :k])

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """Gathers logits or log-probabilities. Without ``token_ids`` ``[..., 1]`` of the next tokens, or of class 0:
        ``index`` ``[..., 1]`` must contain one of the two. With them, ``index`` must equal them, ``[..., K]``."""
        self._over_classes(dim)
        if "token_ids" in self._outputs:
            return self._gather_token_ids(index)
        if index.shape != (*self._ids.shape, 1):
            raise LogitsNotComputedError(
                f"{self._kind} of classes of shape {tuple(index.shape)} were read: {NOT_COMPUTED}"
            )
        named = index[..., 0]
        is_next = named == self._ids
        _check((is_next | (named == _CLASS_0)).all(), _OTHER_TOKENS)
        log_prob = torch.where(is_next, self._output("log_prob", LOGITS, LOG_PROBS), self._outputs["log_prob_at"])
        return (log_prob if self._kind == LOG_PROBS else log_prob + self._outputs["log_sum_exp"])[..., None]

    def _gather_token_ids(self, index: Tensor) -> Tensor:
        token_ids = self._outputs["token_ids"]
        if index.shape != token_ids.shape:
            raise LogitsNotComputedError(
                f"{self._kind} of classes of shape {tuple(index.shape)} were read: {NOT_COMPUTED}"
            )
        _check((index == token_ids).all(), _OTHER_TOKENS)
        log_prob = self._output("log_prob_at", LOGITS, LOG_PROBS)
        return log_prob if self._kind == LOG_PROBS else log_prob + self._outputs["log_sum_exp"][..., None]

    def cross_entropy(self, target: Tensor, **options: Any) -> Tensor:
        """Computes the 0-d mean over the tokens that are not ignored."""
        ignore_index = options.pop("ignore_index", -100)
        usual = {"weight": None, "label_smoothing": 0.0, "reduction": "mean", "size_average": None, "reduce": None}
        if any(value != usual[name] for name, value in options.items()):
            raise LogitsNotComputedError(f"a cross entropy with {', '.join(options)} was computed: {NOT_COMPUTED}")
        counts = target != ignore_index
        _check(((target == self._ids) | ~counts).all(), _OTHER_TOKENS)
        loss: Tensor = -(self._output("log_prob", LOGITS, LOG_PROBS) * counts).sum() / counts.sum()
        return loss

    def __eq__(self, other: object) -> Any:
        raise LogitsNotComputedError(f"{self._kind} were compared: {NOT_COMPUTED}")

    __ne__ = __eq__
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            given = dict(_CROSS_ENTROPY.bind(*args, **kwargs).arguments)
            return given.pop("input").cross_entropy(given.pop("target"), **given)
        method = _METHODS.get(func)
        if method is None or not args or not isinstance(args[0], ScoredLogits):
            raise LogitsNotComputedError(f"{getattr(func, '__name__', func)} was called on logits: {NOT_COMPUTED}")
        if func is torch.take_along_dim:
            kwargs = {"index" if name == "indices" else name: value for name, value in kwargs.items()}
            args = (args[0], kwargs.pop("dim", None), *args[1:2]) if len(args) < 3 else (args[0], args[2], args[1])
        kwargs.pop("_stacklevel", None)
        return method(*args, **kwargs)


_OPERATORS = """
    add sub matmul truediv floordiv mod divmod pow lshift rshift and xor or
    radd rsub rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand rxor ror
    iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior
    lt le gt ge neg pos abs invert bool int float complex index round trunc floor ceil
    contains setitem delitem array
"""
"""operators that Python looks up on a class and not through ``__getattr__``"""


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: ScoredLogits, *operands: Any, **options: Any) -> Any:
        raise LogitsNotComputedError(f"{name} of {self._kind} was computed: {NOT_COMPUTED}")

    return refuse


for _name in _OPERATORS.split():
    setattr(ScoredLogits, f"__{_name}__", _refusal(_name))


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.gather: ScoredLogits.gather,
    torch.take_along_dim: ScoredLogits.gather,
    torch.logsumexp: ScoredLogits.logsumexp,
    torch.exp: ScoredLogits.exp,
    torch.topk: ScoredLogits.topk,
    torch.log_softmax: ScoredLogits.log_softmax,
    F.log_softmax: ScoredLogits.log_softmax,
}


def _check(holds: Tensor, sentence: str) -> None:
    if holds.is_cuda:
        device_assert(holds, sentence)
    elif not bool(holds):
        raise LogitsNotComputedError(f"{sentence}.")
