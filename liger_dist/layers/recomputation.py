"""What norms and gated activations put out is computed again in the backward, where others would keep it for theirs:
one pass over numbers that are kept anyway.

By the time a norm is called, whoever reads the output of the norm in front of it is in the graph of its input. That
graph is walked back as far as such norms. Where somebody else's hooks decide what is kept (activation checkpointing,
offloading), they do. A backward through a part of the graph frees what a later one through another part may need to
compute an output again: ``retain_graph=True`` keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MOST_NODES = 64
"""of one walk; an attention has two dozen, with adapters twice as many"""
LEAST_BYTES = 2**24
"""of an output, and of the input of the norm behind it: a walk takes the host a tenth of a ms, in which a GPU is done
with small layers"""
PRODUCTS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "LinearBackward0")
"""nodes of autograd that keep what they multiply by a weight; functions of others may as well"""


@dataclass(frozen=True)
class Output:
    """How what a function put out is known where it is kept."""

    memory: StorageWeakRef
    first: int
    """address"""
    end: int
    dtype: torch.dtype
    version: int

    def is_kept_as(self, saved: Any) -> bool:
        """With the same numbers, and not with their negatives."""
        is_plain = type(saved) is Tensor and saved.layout is torch.strided
        is_inside = is_plain and self.first <= saved.data_ptr() < self.end
        is_same = is_inside and saved.dtype == self.dtype and saved._version == self.version and not saved.is_neg()
        # What was detached may outlive the function that would compute it again.
        return is_same and saved.requires_grad


class RecomputedFunction(torch.autograd.Function):
    """A function whose output can be computed again from what it keeps for its own backward."""

    is_end_of_walk: bool

    @staticmethod
    def again(ctx: Any) -> Tensor:
        """The output, bit by bit."""
        raise NotImplementedError


def is_worth_it(x: Tensor) -> bool:
    """Whether outputs of this size can be dropped where the call is made, and should be."""
    if torch.compiler.is_compiling() or x.nbytes < LEAST_BYTES:
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def note_output(ctx: Any, output: Tensor) -> None:
    """In the forward of a :class:`RecomputedFunction`, whose backward calls :func:`forget_copy`."""
    storage = output.untyped_storage()
    first = storage.data_ptr()
    ctx.output = Output(StorageWeakRef(storage), first, first + storage.nbytes(), output.dtype, output._version)
    ctx.copy = None


def forget_copy(ctx: Any) -> None:
    """Everybody who reads the output has had it in the backward."""
    ctx.copy = None


def drop_outputs(x: Tensor) -> None:
    """Drops the outputs of norms and gated activations that products in the graph of ``x`` keep, as far as the last
    norms."""
    if x.grad_fn is None or not is_worth_it(x):
        return
    producers, products = _walk(x.grad_fn)
    outputs = [(node, node.output) for node in producers if not node.output.memory.expired()]
    for product in products if outputs else ():
        for raw, saved in _saved_by(product):
            for producer, output in outputs:
                if output.is_kept_as(saved):
                    part = _Part(producer, saved.shape, saved.stride(), int(saved.storage_offset()))
                    raw.register_hooks(lambda _, part=part: part, _Part.compute)
                    break


@dataclass(frozen=True)
class _Part:
    """What stands for a view of a dropped output."""

    producer: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def compute(self) -> Tensor:
        # Several read it one after another, and its own backward follows.
        if self.producer.copy is None:
            kind: Any = type(self.producer)
            function = _function_of(kind)
            assert function is not None
            with torch.no_grad():
                self.producer.copy = function.again(self.producer)
        copy: Tensor = self.producer.copy
        return copy.as_strided(self.shape, self.stride, self.offset)


def _function_of(node_type: Any) -> type[RecomputedFunction] | None:
    """The :class:`RecomputedFunction` whose nodes these are, if they are one's."""
    function = getattr(node_type, "_forward_cls", None)
    return function if isinstance(function, type) and issubclass(function, RecomputedFunction) else None


def _saved_names(node_type: Any) -> tuple[tuple[str, str], ...]:
    """Of a product's attributes, where a tensor is saved and the tensor itself; nothing for any other node."""
    if hasattr(node_type, "_forward_cls"):
        return (("_raw_saved_tensors", "saved_tensors"),)
    return _saved_names_of_torch(node_type) if node_type.__name__ in PRODUCTS else ()


@functools.cache
def _saved_names_of_torch(node_type: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name, name[4:]) for name in dir(node_type) if name.startswith("_raw_saved_"))


def _walk(last: Any) -> tuple[list[Any], list[Any]]:
    """Nodes that have put out what can be computed again, and products; of very many nodes only some."""
    producers: list[Any] = []
    products: list[Any] = []
    seen, waiting = {last}, [last]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        kind: Any = type(node)
        function = _function_of(kind)
        if function is not None and hasattr(node, "output"):
            producers.append(node)
            if function.is_end_of_walk:
                continue
        elif _saved_names(kind):
            products.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return producers, products


def _saved_by(node: Any) -> Iterator[tuple[Any, Any]]:
    """What a node has saved, with where hooks are set on it; without what has hooks already."""
    kind: Any = type(node)
    for place, name in _saved_names(kind):
        raw = getattr(node, place)
        several = raw if isinstance(raw, tuple) else (raw,)
        if any(one.unpack_hook is not None for one in several):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:
            # It has been changed or freed since, which autograd says in the backward, if there is one.
            continue
        yield from zip(several, saved if isinstance(raw, tuple) else (saved,), strict=True)
