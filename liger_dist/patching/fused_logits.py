"""The logits of a fused call: a tensor without width that carries the loss through the model's own code.

What that code does to logits on their way to its loss was seen by the probe and is part of the loss already, so it
leaves this tensor as it is. Whatever would read numbers that were never computed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LogitsNotComputedError

from .untraced import untraced

if TYPE_CHECKING:
    from .request import LossRequest

HOW_TO_GET_LOGITS = (
    "the logits of this call were never computed, only its loss. For logits call the model without labels, or with "
    "outputs=('logits',) beside them; token accuracy, entropy and log-probabilities need none: pass "
    "outputs=('token_accuracy', 'entropy', 'log_prob') along with the labels. For metrics and predict of a Trainer of "
    "transformers: trainer = liger_dist.integrations.trainer.fuse(trainer), or WrapConfig(outputs=('logits',))."
)

_SHAPES_AND_DTYPES = """
    view reshape flatten unflatten contiguous clone squeeze unsqueeze transpose permute swapaxes movedim
    float double half bfloat16 to type type_as cpu cuda __getitem__ narrow masked_select index_select
"""
_ARITHMETIC = """
    mul __mul__ __rmul__ mul_ __imul__ div true_divide __truediv__ div_ __itruediv__ __rtruediv__
    add __add__ __radd__ add_ __iadd__ sub __sub__ tanh tanh_ clamp
"""
_ABOUT_THE_TENSOR = """
    __get__ __set__ __len__ __repr__ __format__ __hash__ size dim ndimension numel nelement stride storage_offset
    is_floating_point is_complex is_conj is_neg is_contiguous is_sparse is_quantized is_same_size
    element_size get_device data_ptr untyped_storage
    record_stream register_hook retain_grad requires_grad_ detach alias view_as as_subclass _is_view is_inference
"""
_CROSS_ENTROPY = signature(F.cross_entropy)
_PASSING = frozenset(_SHAPES_AND_DTYPES.split())
_CHANGING = frozenset(_ARITHMETIC.split())
_DESCRIBING = frozenset(_ABOUT_THE_TENSOR.split())


class FusedLogits(Tensor):
    """``[..., 0]``; see the module. Made by :meth:`carrying` only."""

    _request: LossRequest | None
    _changes: list[tuple[Any, ...]]
    """the arithmetic that the model's code has done to logits so far, in the probe and in every call"""

    @staticmethod
    def carrying(logits: Tensor, request: LossRequest | None) -> FusedLogits:
        carrier: FusedLogits = _Carry.apply(logits)  # type: ignore[no-untyped-call]
        carrier._request, carrier._changes = request, []
        return carrier

    def refusing(self) -> FusedLogits:
        """The same shape outside of the graph and of its call, to be refused wherever it is read."""
        return FusedLogits.carrying(self.as_subclass(Tensor).detach(), None)

    @property
    def request(self) -> LossRequest | None:
        """The call whose loss this tensor carries; None outside of one."""
        request: LossRequest | None = vars(self)["_request"]
        return request

    @property
    def changes(self) -> tuple[tuple[Any, ...], ...]:
        """Name and numbers of each operation; a tensor counts as one, whatever its values."""
        changes: list[tuple[Any, ...]] = vars(self)["_changes"]
        return tuple(changes)

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        carrier = next((value for value in (*args, *kwargs.values()) if isinstance(value, FusedLogits)), None)
        if carrier is None:
            raise LogitsNotComputedError(HOW_TO_GET_LOGITS)
        if func is F.cross_entropy:
            request = carrier.request
            if request is None:
                raise LogitsNotComputedError(HOW_TO_GET_LOGITS)
            given = dict(_CROSS_ENTROPY.bind(*args, **kwargs).arguments)
            targets = given.pop("target")
            del given["input"]
            return request.seam.inline_loss(carrier, request, targets, given)
        name = func.__name__
        if name in _PASSING:
            return carrier
        if name in _CHANGING:
            operands = (value for value in (*args, *kwargs.values()) if value is not carrier)
            numbers = ("tensor" if isinstance(value, Tensor) else value for value in operands)
            vars(carrier)["_changes"].append((name.strip("_"), *numbers))
            return carrier
        if name not in _DESCRIBING:
            raise LogitsNotComputedError(f"{name} was called on fused logits: {HOW_TO_GET_LOGITS}")
        result = super().__torch_function__(func, tuple(types), args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(result, FusedLogits):
            vars(result).update(vars(carrier))
        return result


class _Carry(torch.autograd.Function):
    """A subclass that is no view: FSDP2 warns of views that leave a module."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return Tensor._make_subclass(FusedLogits, logits.detach())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream
