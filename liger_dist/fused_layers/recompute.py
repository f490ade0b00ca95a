"""Recomputes norm and activation outputs in the backward instead of saving them for the next matmul: one pass over
tensors that are saved anyway.

When a norm is called, all matmuls that read the output of the previous norm are in the graph of its input. That graph
is walked back to such norms, and their outputs among the saved tensors get hooks. The context
``torch.autograd.graph.saved_tensors_hooks`` would need no walk, but under it autograd stops noticing in-place changes
of every tensor that the model saves. Hooks of other code (activation checkpointing, offloading) take precedence. A
backward through a part of the graph frees what a later one through another part may need to recompute an output:
``retain_graph=True`` keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MAX_NODES = 128
"""nodes of one walk; an attention has two dozen, with LoRA three times as many"""
MIN_BYTES = 2**24
"""bytes of an output, and of the input of the norm after it: a walk takes 0.07 ms of host time, too much for small
layers"""
PRODUCTS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "LinearBackward0")
"""nodes of autograd that save the operand of a weight; custom functions may too"""
SUM = "AddBackward0"
_WALKED = "liger_dist: walked"


def _has_private_names() -> bool:
    """True if this torch has the private names that recomputation needs; without them outputs are saved."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = (torch.ones(1, 1, device="cpu", requires_grad=True) @ torch.ones(1, 1, device="cpu")).grad_fn
    has_saved = any(name.startswith("_raw_saved_") for name in dir(node))
    return has_saved and hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


_RECOMPUTES = _has_private_names()


@dataclass(frozen=True)
class Output:
    """Identifies an output of a function among saved tensors."""

    memory: StorageWeakRef
    first: int
    """address"""
    end: int
    dtype: torch.dtype
    version: int

    def is_kept_as(self, saved: Any) -> bool:
        """True for the same values, not their negatives."""
        is_plain = type(saved) is Tensor and saved.layout is torch.strided
        is_inside = is_plain and self.first <= saved.data_ptr() < self.end
        is_same = is_inside and saved.dtype == self.dtype and saved._version == self.version and not saved.is_neg()
        # A detached tensor may outlive the function that would recompute it.
        return is_same and saved.requires_grad


class RecomputedFunction(torch.autograd.Function):
    """Autograd function whose output can be recomputed from the tensors that it saves for its backward."""

    is_end_of_walk: bool

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        """Recomputes the output, bit by bit."""
        raise NotImplementedError


def should_recompute(x: Tensor) -> bool:
    """True if an output of this size can and should be recomputed."""
    if torch.compiler.is_compiling() or x.nbytes < MIN_BYTES:
        return False
    return _RECOMPUTES and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def note_output(ctx: Any, output: Tensor) -> None:
    """Records the output in the forward of a :class:`RecomputedFunction`, whose backward calls :func:`free_copy`."""
    storage = output.untyped_storage()
    first = storage.data_ptr()
    ctx.output = Output(StorageWeakRef(storage), first, first + storage.nbytes(), output.dtype, output._version)
    ctx.copy = None


def free_copy(ctx: Any) -> None:
    """Frees the recomputed copy, after all consumers have run their backward."""
    ctx.copy = None


def drop_outputs(x: Tensor) -> None:
    """Replaces saved outputs of norms and gated activations in the graph of ``x`` by their recomputation, back to the
    last norms."""
    if x.grad_fn is None or not should_recompute(x):
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
    """View of an output, saved instead of its values."""

    producer: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def compute(self) -> Tensor:
        # Several products unpack it one after another, and the producer's backward follows.
        if self.producer.copy is None:
            function = _kind_of(self.producer).function
            assert function is not None
            with torch.no_grad():
                self.producer.copy = function.recompute(self.producer)
        copy: Tensor = self.producer.copy
        return copy.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _NodeKind:
    """Facts about one type of autograd nodes that a walk needs."""

    function: type[RecomputedFunction] | None
    """the function of these nodes, if it is recomputed"""
    saved_names: tuple[tuple[str, str], ...]
    """of a product: names of the handle of a saved tensor and of the tensor itself"""
    is_sum: bool


_KINDS: WeakKeyDictionary[Any, _NodeKind] = WeakKeyDictionary()
"""kinds by type of node; functions may be defined at run time and end with their last node"""


def _kind_of(node: Any) -> _NodeKind:
    kind = _KINDS.get(type(node))
    if kind is None:
        kind = _KINDS[type(node)] = _read_kind(type(node))
    return kind


def _read_kind(node_type: Any) -> _NodeKind:
    function = getattr(node_type, "_forward_cls", None)
    if function is not None:
        is_recomputed = isinstance(function, type) and issubclass(function, RecomputedFunction)
        saved = (("_raw_saved_tensors", "saved_tensors"),)
        return _NodeKind(function if is_recomputed else None, saved, is_sum=False)
    names = dir(node_type) if node_type.__name__ in PRODUCTS else ()
    saved_by_torch = tuple((name, name[4:]) for name in names if name.startswith("_raw_saved_"))
    return _NodeKind(None, saved_by_torch, is_sum=node_type.__name__ == SUM)


def _walk(last: Any) -> tuple[list[Any], list[Any]]:
    """Collects nodes whose output can be recomputed, and products; stops after :data:`MAX_NODES`.

    A walk ends at sums where an earlier one began: those of the residual stream, whose past has been walked.
    """
    producers: list[Any] = []
    products: list[Any] = []
    seen, waiting = {last}, [last]
    last.metadata[_WALKED] = True
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        kind = _kind_of(node)
        if kind.function is not None and hasattr(node, "output"):
            producers.append(node)
            if kind.function.is_end_of_walk:
                continue
        elif kind.saved_names:
            products.append(node)
        elif kind.is_sum and node is not last and _WALKED in node.metadata:
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return producers, products


def _saved_by(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the tensors that a node has saved without hooks, each with the handle for hooks."""
    for place, name in _kind_of(node).saved_names:
        raw = getattr(node, place)
        several = raw if isinstance(raw, tuple) else (raw,)
        if any(one.unpack_hook is not None for one in several):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:
            # Changed or freed since, which autograd reports in the backward.
            continue
        yield from zip(several, saved if isinstance(raw, tuple) else (saved,), strict=True)
