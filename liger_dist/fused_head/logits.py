"""Zero-width logits that carry a fused loss through the model's code.

The probe has seen what that code does to logits before its loss, and the fused loss includes it, so the code leaves
this tensor unchanged. Whatever would read logits that were never computed is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LogitsNotComputedError
from liger_dist.model.torch_modes import is_compiled_now, untraced

from .recipe import SELECTIONS

HOW_TO_GET_LOGITS = (
    "the logits of this call were never computed, only its loss. For logits call the model without labels, or with "
    "outputs=('logits',) beside them; token accuracy, entropy and log-probabilities need none: pass "
    "outputs=('token_accuracy', 'entropy', 'log_prob') along with the labels. For metrics and predict of a Trainer of "
    "transformers: trainer = liger_dist.integrations.trainer.fuse(trainer), or WrapConfig(outputs=('logits',)). "
    "For a model whose own forward reads them, as for a loss that it adds: WrapConfig(fused_loss=False)."
)

_SHAPES = "view reshape flatten unflatten squeeze unsqueeze transpose permute swapaxes movedim"
_COPIES_AND_DTYPES = "contiguous clone float double half bfloat16 to type type_as cpu cuda"
_ARITHMETIC = """
    mul __mul__ __rmul__ mul_ __imul__ div true_divide __truediv__ div_ __itruediv__ __rtruediv__
    add __add__ __radd__ add_ __iadd__ sub __sub__ tanh tanh_ clamp
"""
_ABOUT_THE_TENSOR = """
    __get__ __set__ __len__ size dim ndimension numel nelement stride __repr__ __format__ __hash__
    storage_offset is_floating_point is_complex is_conj is_neg is_contiguous is_sparse is_quantized
    is_same_size element_size get_device data_ptr untyped_storage record_stream register_hook retain_grad
    requires_grad_ detach alias view_as as_subclass _is_view is_inference
"""
_CROSS_ENTROPY = signature(F.cross_entropy)
_FRAMEWORKS = ("torch.", "deepspeed.", "accelerate.", "liger_dist.")
_RESHAPING = frozenset(_SHAPES.split())
_PASSING = frozenset(_COPIES_AND_DTYPES.split())
_CHANGING = frozenset(_ARITHMETIC.split())
_DESCRIBING = frozenset(_ABOUT_THE_TENSOR.split())
_SIZES = frozenset(("size", "__len__", "dim", "ndimension", "numel", "nelement", "stride"))
_SIZE_ATTRIBUTES = frozenset(("shape", "ndim", "nbytes"))
_TRANSPOSED_ATTRIBUTES = frozenset(("T", "mT", "H", "mH"))


_LOGITS = object()
_FULL = (Tensor, torch.nn.Parameter)
_WRITING = re.compile(r"(__i\w+__|[a-z]\w*_)$")
"""names of operations in place, among those of :data:`_ARITHMETIC`"""


class TensorOperand:
    """Tensor that a model multiplies or adds to its logits. Equals one of the same values: by memory and version,
    else by a comparison, for which the host waits where both are on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.trains = tensor.detach(), tensor.requires_grad
        self.version = None if tensor.is_inference() else tensor._version
        self._equal: TensorOperand | None = None
        """the operand of the latest call, which had these values"""

    def kept(self) -> TensorOperand:
        """Returns a copy with memory that the model does not write to."""
        copy = TensorOperand(self.tensor.clone())
        copy.trains = self.trains
        return copy

    def __str__(self) -> str:
        shape = tuple(self.tensor.shape)
        # Only errors show it, so that the host may wait for a GPU.
        return f"tensor({self.tensor.item():g})" if self.tensor.numel() == 1 else f"a tensor of shape {shape}"

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorOperand):
            return NotImplemented
        if other._equal is not None and other._equal._is_unchanged(self):
            return True
        is_same = self._is_unchanged(other) or self._has_values_of(other)
        other._equal = self if is_same else None
        return is_same

    def _is_unchanged(self, now: TensorOperand) -> bool:
        """True if ``now`` is this tensor, which has not been written to."""
        one, two = self.tensor, now.tensor
        versions = {self.version, now.version, None if one.is_inference() else one._version}
        where = [(x.data_ptr(), x.dtype, x.device, x.shape, x.stride()) for x in (one, two) if type(x) in _FULL]
        is_same = len(where) == 2 and where[0] == where[1] and where[0][0] != 0
        return is_same and self.trains == now.trains and len(versions) == 1 and None not in versions

    def _has_values_of(self, other: TensorOperand) -> bool:
        one, two = self.tensor, other.tensor
        if self.trains != other.trains or _without_ones(one.shape) != _without_ones(two.shape):
            return False
        if one.is_meta or two.is_meta or not (type(one) in _FULL and type(two) in _FULL):
            return True
        two = two.reshape(one.shape).to(one.device)
        # A number that the model makes in the dtype of its logits is rounded to it.
        return torch.equal(two.to(one.dtype), one) or torch.equal(one.to(two.dtype), two)


def _without_ones(shape: torch.Size) -> tuple[int, ...]:
    first = next((place for place, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])


def with_operands(
    changes: tuple[tuple[Any, ...], ...], to: Callable[[TensorOperand], TensorOperand]
) -> tuple[tuple[Any, ...], ...]:
    """Returns the changes with other tensors among their operands."""
    return tuple(tuple(to(part) if isinstance(part, TensorOperand) else part for part in one) for one in changes)


class CarriedLoss(Protocol):
    """The loss that zero-width logits carry."""

    def inline_loss(self, logits: FusedLogits, targets: Any, options: dict[str, Any]) -> Tensor:
        """Returns the loss, where the model's forward calls ``torch.nn.functional.cross_entropy`` itself.

        Args:
            options: the other arguments of that call.
        """
        ...


class FusedLogits(Tensor):
    """``[..., 0]``, with the sizes ``[..., V]`` of the logits; see the module. Made by :meth:`carrying` only."""

    _carried: CarriedLoss | None
    _vocab_size: int
    _reshapes: tuple[_Operation, ...]
    """the views and selections of the model's code that have led to this tensor, whose sizes they change"""
    _changes: tuple[tuple[Any, ...], ...]
    _writes: list[tuple[Any, ...]]
    """arithmetic in place of the model's code on this tensor and all its views and aliases, which share the list"""
    _seen: tuple[int, ...]
    """places in that list of the writes that are among this tensor's changes"""
    _is_clipped: bool

    @staticmethod
    def carrying(logits: Tensor, loss: CarriedLoss | None, *, vocab_size: int) -> FusedLogits:
        """Makes ``logits`` ``[..., 0]`` that carry ``loss``; without one they refuse to be read."""
        carrier: FusedLogits = _Carry.apply(logits)  # type: ignore[no-untyped-call]
        state = {"_carried": loss, "_vocab_size": vocab_size, "_reshapes": (), "_changes": (), "_is_clipped": False}
        vars(carrier).update(state, _writes=[], _seen=())
        return carrier

    def refusing(self) -> FusedLogits:
        """Makes the same outside of the graph and of its call, refused wherever it is read."""
        twin = FusedLogits.carrying(self.as_subclass(Tensor).detach(), None, vocab_size=vars(self)["_vocab_size"])
        vars(twin)["_reshapes"] = vars(self)["_reshapes"]
        return twin

    @property
    def carried(self) -> CarriedLoss | None:
        """Returns the loss that this tensor carries; None after its call."""
        loss: CarriedLoss | None = vars(self)["_carried"]
        return loss

    @property
    def changes(self) -> tuple[tuple[Any, ...], ...]:
        """Returns the arithmetic and selections that the model's code has done: name and operands of each operation,
        then writes to views and aliases. Slices are counted from both ends, so that they fit every length."""
        changes: tuple[tuple[Any, ...], ...] = vars(self)["_changes"]
        writes, seen = vars(self)["_writes"], vars(self)["_seen"]
        if len(writes) == len(seen):
            return changes
        unseen = (write for place, write in enumerate(writes) if place not in seen)
        return *changes, *((f"{name} of a view or alias", *operands) for name, *operands in unseen)

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
        attribute = (
            getattr(getattr(func, "__self__", None), "__name__", None) if name in ("__get__", "__set__") else None
        )
        operation = _Operation.of(func, args, kwargs)
        if name in _RESHAPING or attribute in _TRANSPOSED_ATTRIBUTES:
            return carrier._after(operation)
        if name.strip("_") in SELECTIONS:
            selection = tuple(value for value in (*args, *kwargs.values()) if value is not carrier)
            described, is_clipped = _at_any_length(name, selection, carrier._sizes())
            selected = carrier._after(operation)
            if any(part not in (":", "...") for part in described):
                vars(selected)["_changes"] += ((name.strip("_"), *described),)
            vars(selected)["_is_clipped"] |= is_clipped
            return selected
        if (name in _SIZES or attribute in _SIZE_ATTRIBUTES) and not is_compiled_now():
            return operation.on(carrier._without_memory())
        if name in _CHANGING:
            carrier = kwargs.get("out", carrier)
            operands = (value for value in (*args, *kwargs.values()) if not isinstance(value, FusedLogits))
            change = name.strip("_"), *(TensorOperand(one) if isinstance(one, Tensor) else one for one in operands)
            # In place or not: the caller has one tensor, and a copy would cost a node of autograd.
            vars(carrier)["_changes"] += (change,)
            if _WRITING.match(name) or "out" in kwargs:
                vars(carrier)["_seen"] += (len(vars(carrier)["_writes"]),)
                vars(carrier)["_writes"].append(change)
            return carrier
        if name == "__set__" and attribute == "data":
            raise LogitsNotComputedError(f"data of fused logits was assigned: {HOW_TO_GET_LOGITS}")
        if name == "register_hook" and not _is_of_framework(args[-1]):
            raise LogitsNotComputedError(
                "a gradient hook was registered on logits that were never computed; register it on lm_head's weight or "
                "on the hidden states, or use WrapConfig(fused_loss=False)."
            )
        if name not in _DESCRIBING:
            raise LogitsNotComputedError(f"{name} was called on fused logits: {HOW_TO_GET_LOGITS}")
        result = super().__torch_function__(func, tuple(types), args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(result, FusedLogits) and "_carried" not in vars(result):
            # New, unlike the base of a view, which torch.compile asks for.
            vars(result).update(vars(carrier))
        return result

    def _after(self, operation: _Operation) -> FusedLogits:
        """Returns this tensor after a view or a selection, which change the sizes of logits and nothing here."""
        with torch._C.DisableTorchFunctionSubclass():
            twin = self.as_subclass(FusedLogits)
        vars(twin).update(vars(self), _reshapes=(*vars(self)["_reshapes"], operation))
        return twin

    def _sizes(self) -> torch.Size:
        if vars(self)["_reshapes"]:
            return self._without_memory().shape
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Size((*self.shape[:-1], vars(self)["_vocab_size"]))

    def _without_memory(self) -> Tensor:
        """Returns a tensor on the meta device that has the sizes of the logits at this place of the model's code."""
        with torch._C.DisableTorchFunctionSubclass():
            logits = torch.empty((*self.shape[:-1], vars(self)["_vocab_size"]), device="meta")
        for operation in vars(self)["_reshapes"]:
            logits = operation.on(logits)
        return logits


@dataclass(frozen=True)
class _Operation:
    """A call of torch with fused logits among its operands, which it does not keep alive."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """in both :data:`_LOGITS` stands for them"""

    @staticmethod
    def of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operation:
        """Takes note of a call."""
        positional = tuple(_LOGITS if isinstance(value, FusedLogits) else value for value in args)
        named = {name: _LOGITS if isinstance(value, FusedLogits) else value for name, value in kwargs.items()}
        return _Operation(func, positional, named)

    def on(self, logits: Tensor) -> Any:
        """Returns the same call with ``logits`` on the meta device. A mask is read: it decides the size."""
        if self.func.__name__ == "masked_select":
            mask = next(value for value in (*self.args, *self.kwargs.values()) if value is not _LOGITS)
            return logits.new_empty(int(mask.expand(logits.shape).sum()))
        args = [logits if value is _LOGITS else _on_meta(value) for value in self.args]
        kwargs = {name: logits if value is _LOGITS else _on_meta(value) for name, value in self.kwargs.items()}
        return self.func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    """Returns an operand on the meta device, masks among the indices as the indices that they select."""
    if isinstance(value, Tensor):
        return _on_meta((value,)) if value.dtype == torch.bool else value.to("meta")
    if not isinstance(value, tuple):
        return value
    flat: list[Any] = []
    for item in value:
        is_mask = isinstance(item, Tensor) and item.dtype == torch.bool
        flat.extend(item.nonzero(as_tuple=True) if is_mask else (item,))
    return tuple(item.to("meta") if isinstance(item, Tensor) else item for item in flat)


def _is_of_framework(hook: Any) -> bool:
    """True for hooks of FSDP and DeepSpeed that start their backward; they read no gradient of logits."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.startswith(_FRAMEWORKS)


def _is_mask_of_tokens(item: Tensor, before: tuple[Any, ...], shape: torch.Size) -> bool:
    """True for a mask that selects tokens in their order, and no classes.

    Args:
        before: indices of the dimensions before it.
    """
    if item.dtype != torch.bool or any(one is Ellipsis for one in before):
        return False
    dims = sum(one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else one is not None for one in before)
    return dims + item.dim() < len(shape) or item.shape[-1:] == (1,)


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
            is_mask = isinstance(item, Tensor) and _is_mask_of_tokens(item, index[:place], shape)
            word = "tensor" if is_mask else "indices"
            found.append(word if isinstance(item, Tensor) else "..." if item is Ellipsis else item)
            continue
        # After an ellipsis from the end.
        at = place - len(index) if any(one is Ellipsis for one in index[:place]) else place
        size, first, last = shape[at], item.start or 0, item.stop
        # Numbers from the end stay as they are, other numbers are counted from the nearer end.
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
