"""Zero-width logits that carry a fused loss through the model's own code.

The probe has seen what that code does to logits before its loss, and the fused loss includes it, so the code leaves
this tensor unchanged. Whatever would read logits that were never computed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LogitsNotComputedError
from liger_dist.tracing import untraced

from .recipe import SELECTIONS

HOW_TO_GET_LOGITS = (
    "the logits of this call were never computed, only its loss. For logits call the model without labels, or with "
    "outputs=('logits',) beside them; token accuracy, entropy and log-probabilities need none: pass "
    "outputs=('token_accuracy', 'entropy', 'log_prob') along with the labels. For metrics and predict of a Trainer of "
    "transformers: trainer = liger_dist.integrations.trainer.fuse(trainer), or WrapConfig(outputs=('logits',)). "
    "For a model whose own forward reads them, as for a loss that it adds: WrapConfig(fused_loss=False)."
)

_SHAPES_AND_DTYPES = """
    view reshape flatten unflatten contiguous clone squeeze unsqueeze transpose permute swapaxes movedim
    float double half bfloat16 to type type_as cpu cuda
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


class CarriedLoss(Protocol):
    """The loss that zero-width logits carry."""

    def inline_loss(self, logits: FusedLogits, targets: Any, options: dict[str, Any]) -> Tensor:
        """The loss, where the model's forward calls ``torch.nn.functional.cross_entropy`` itself.

        Args:
            options: the other arguments of that call.
        """
        ...


class FusedLogits(Tensor):
    """``[..., 0]``; see the module. Made by :meth:`carrying` only."""

    _carried: CarriedLoss | None
    _changes: list[tuple[Any, ...]]

    @staticmethod
    def carrying(logits: Tensor, loss: CarriedLoss | None) -> FusedLogits:
        """``logits`` ``[..., 0]`` that carry ``loss``; without one they refuse to be read."""
        carrier: FusedLogits = _Carry.apply(logits)  # type: ignore[no-untyped-call]
        carrier._carried, carrier._changes = loss, []
        return carrier

    def refusing(self) -> FusedLogits:
        """The same shape outside of the graph and of its call, refused wherever it is read."""
        return FusedLogits.carrying(self.as_subclass(Tensor).detach(), None)

    @property
    def carried(self) -> CarriedLoss | None:
        """The loss that this tensor carries; None after its call."""
        loss: CarriedLoss | None = vars(self)["_carried"]
        return loss

    @property
    def changes(self) -> tuple[tuple[Any, ...], ...]:
        """The arithmetic and selections that the model's code has done: name and numbers of each operation, "tensor"
        for a tensor. Slices are counted from both ends, so that they are the same at every length."""
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
            raise LogitsNotComputedError(f"{func.__name__} was called on fused logits: {HOW_TO_GET_LOGITS}")
        if func is F.cross_entropy:
            if carrier.carried is None:
                raise LogitsNotComputedError(HOW_TO_GET_LOGITS)
            given = dict(_CROSS_ENTROPY.bind(*args, **kwargs).arguments)
            targets = given.pop("target")
            del given["input"]
            return carrier.carried.inline_loss(carrier, targets, given)
        name = func.__name__
        if name in _PASSING:
            return carrier
        if name.strip("_") in SELECTIONS:
            selection = tuple(value for value in (*args, *kwargs.values()) if value is not carrier)
            vars(carrier)["_changes"].append((name.strip("_"), *_at_any_length(name, selection, carrier.shape)))
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


def _at_any_length(name: str, operands: tuple[Any, ...], shape: torch.Size) -> tuple[Any, ...]:
    """Describes a selection from logits ``[..., 0]`` of ``shape``, as it is at any length of the sequences."""
    index = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple) else operands
    if name == "narrow" and isinstance(operands[1], int):
        dim, start, length = operands
        index = dim, slice(start, start + length)
        shape = torch.Size([0, shape[dim]])
    found: list[Any] = []
    for place, item in enumerate(index):
        if isinstance(item, slice) and place < len(shape):
            size = shape[place]
            start, stop, step = item.indices(size)
            found.append(f"{start}:{stop - size or ''}" + (f":{step}" if step != 1 else ""))
        else:
            found.append("tensor" if isinstance(item, Tensor) else "..." if item is Ellipsis else item)
    return tuple(found)


class _Carry(torch.autograd.Function):
    """Makes a subclass that is no view: FSDP2 warns of views that leave a module."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return Tensor._make_subclass(FusedLogits, logits.detach())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream
