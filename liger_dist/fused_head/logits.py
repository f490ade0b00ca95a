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
_FRAMEWORKS = ("torch.", "deepspeed.", "accelerate.", "liger_dist.")
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
    _is_clipped: bool

    @staticmethod
    def carrying(logits: Tensor, loss: CarriedLoss | None) -> FusedLogits:
        """``logits`` ``[..., 0]`` that carry ``loss``; without one they refuse to be read."""
        carrier: FusedLogits = _Carry.apply(logits)  # type: ignore[no-untyped-call]
        carrier._carried, carrier._changes, carrier._is_clipped = loss, [], False
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

    @property
    def is_clipped(self) -> bool:
        """True if a slice asked for more tokens than there are, and so selected all of them."""
        return bool(vars(self)["_is_clipped"])

    def runs_only_frameworks(self) -> bool:
        """True if between lm_head and here autograd runs no function but those of frameworks, which pass gradients on
        as they are."""
        node: Any = self.grad_fn
        while node is not None:
            function = getattr(type(node), "_forward_cls", None)
            if function is _Carry:
                return True
            if function is not None and not function.__module__.startswith(_FRAMEWORKS):
                return False
            node = next((following for following, _ in node.next_functions if following is not None), None)
        return True

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
            described, is_clipped = _at_any_length(name, selection, carrier.shape)
            if any(part not in (":", "...") for part in described):
                vars(carrier)["_changes"].append((name.strip("_"), *described))
            vars(carrier)["_is_clipped"] |= is_clipped
            return carrier
        if name in _CHANGING:
            operands = (value for value in (*args, *kwargs.values()) if value is not carrier)
            numbers = ("tensor" if isinstance(value, Tensor) else value for value in operands)
            vars(carrier)["_changes"].append((name.strip("_"), *numbers))
            return carrier
        if name == "register_hook" and not _is_of_framework(args[-1]):
            raise LogitsNotComputedError(
                "a gradient hook was registered on logits that were never computed; register it on lm_head's weight or "
                "on the hidden states, or use WrapConfig(fused_loss=False)."
            )
        if name not in _DESCRIBING:
            raise LogitsNotComputedError(f"{name} was called on fused logits: {HOW_TO_GET_LOGITS}")
        result = super().__torch_function__(func, tuple(types), args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(result, FusedLogits):
            vars(result).update(vars(carrier))
        return result


def _is_of_framework(hook: Any) -> bool:
    """True for hooks of FSDP and DeepSpeed that start their backward; they read no gradient of logits."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.startswith(_FRAMEWORKS)


def _at_any_length(name: str, operands: tuple[Any, ...], shape: torch.Size) -> tuple[tuple[Any, ...], bool]:
    """Describes a selection from logits ``[..., 0]`` of ``shape`` as it is at any length of the sequences, and whether
    a slice asked for more than there is."""
    index = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple) else operands
    if name == "narrow" and isinstance(operands[1], int):
        dim, start, length = operands
        index = dim, slice(start, start + length)
        shape = torch.Size([0, shape[dim]])
    found: list[Any] = []
    is_clipped = False
    for place, item in enumerate(index):
        if not isinstance(item, slice) or place >= len(shape):
            found.append("tensor" if isinstance(item, Tensor) else "..." if item is Ellipsis else item)
            continue
        size, first, last = shape[place], item.start or 0, item.stop
        # Numbers from the end stay as they are, others are counted from the nearer end.
        is_clipped |= -first > size > 0 or (last is not None and last > size > 0)
        begin = "" if first == 0 or -first >= size else str(first)
        end = "" if last is None or last >= size else str(last if last < 0 else last - size)
        found.append(f"{begin}:{end}" + (f":{item.step}" if item.step not in (None, 1) else ""))
    return tuple(found), is_clipped


class _Carry(torch.autograd.Function):
    """Makes a subclass that is no view: FSDP2 warns of views that leave a module."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return Tensor._make_subclass(FusedLogits, logits.detach())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream
