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
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MAX_NODES = 128
"""nodes of one walk; an attention has two dozen, with LoRA three times as many"""
MIN_BYTES = 2**24
"""bytes of an output, and of the input of the norm after it: the way to an output takes host time, which small layers
lack"""
PRODUCTS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "LinearBackward0")
"""nodes of autograd that save the operand of a weight; custom functions may too"""
SUM = "AddBackward0"
_WALKED = "liger_dist: walked"
_SAVED: ContextVar[bool] = ContextVar("liger_dist_outputs_are_saved", default=False)
"""True in a context of :func:`outputs_are_saved`"""


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

    def is_kept_as(self, saved: Tensor) -> bool:
        """True for the same values, not their negatives; of a tensor that :func:`_may_be_output`."""
        is_inside = saved.layout is torch.strided and self.first <= saved.data_ptr() < self.end
        return is_inside and saved.dtype == self.dtype and saved._version == self.version and not saved.is_neg()


class RecomputedFunction(torch.autograd.Function):
    """Autograd function whose output can be recomputed from the tensors that it saves for its backward."""

    is_end_of_walk: bool

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        """Recomputes the output, bit by bit."""
        raise NotImplementedError


@contextmanager
def outputs_are_saved() -> Iterator[None]:
    """Within, forwards save their outputs: for a backward in parts of the graph, as zero-bubble schedules run it."""
    token = _SAVED.set(True)
    try:
        yield
    finally:
        _SAVED.reset(token)


def should_recompute(x: Tensor) -> bool:
    """True if an output of this size can and should be recomputed."""
    if torch.compiler.is_compiling() or x.nbytes < MIN_BYTES or _SAVED.get():
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
    last norms; where :func:`should_recompute`."""
    if x.grad_fn is not None and not _drop_at_known_places(x.grad_fn):
        _drop_by_search(x.grad_fn)


class _Part:
    """View of an output, saved instead of its values."""

    __slots__ = ("offset", "producer", "shape", "stride")

    def __init__(self, producer: Any, saved: Tensor) -> None:
        self.producer, self.shape, self.stride = producer, saved.shape, saved.stride()
        self.offset = saved.storage_offset()

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


class _Step:
    """What searches have found at nodes of one type in one place of a graph, and behind them."""

    number = 0
    """of all steps since :data:`_KNOWN` was empty"""
    __slots__ = ("edges", "is_producer", "saved_names")

    def __init__(self) -> None:
        _Step.number += 1
        self.edges: dict[int, _Steps] = {}
        """next steps by their position in ``next_functions``"""
        self.is_producer = False
        self.saved_names: set[tuple[str, str]] = set()
        """of a product: those of its saved tensors that were outputs"""


_Steps = dict[str, _Step]
"""steps by the name of a node's type: types of functions that are defined at run time end with their last node"""
_KNOWN: _Steps = {}
"""way from a norm's input to products and producers, the same in every layer and every step: 18 to 53 us of host time a
norm, where a search takes 26 to 80 (a CPU)"""
_MOST_STEPS = 4096
"""steps that are remembered: graphs may differ in every step of a training"""


def _drop_at_known_places(last: Any) -> bool:
    """Replaces outputs where searches have found some; False where the graph is another one, or an output is left."""
    producers: list[Any] = []
    products: set[tuple[Any, str, str]] = set()
    waiting: list[tuple[Any, _Steps]] = [(last, _KNOWN)]
    while waiting:
        node, steps = waiting.pop()
        step = steps.get(type(node).__name__)
        if step is None:
            # The search that follows adds what is behind it, if there is something.
            steps[type(node).__name__] = _Step()
            return False
        if step.is_producer and hasattr(node, "output"):
            producers.append(node)
        # Several ways may lead to a node.
        products |= {(node, place, name) for place, name in step.saved_names}
        if step.edges:
            following = node.next_functions
            for index, steps_behind in step.edges.items():
                if index >= len(following):
                    return False
                waiting.append((following[index][0], steps_behind))
    # The memory of an output that was freed may be another tensor's by now.
    kept = [node for node in producers if not node.output.memory.expired()]
    # Not every place holds an output: the first nodes of an attention and of an MLP are the same.
    held = [one for product in products for one in _saved_as(*product)] if kept else []
    found = {_replace(raw, saved, kept) for raw, saved in held}
    return bool(producers) and all(one in found for one in kept)


def _drop_by_search(last: Any) -> None:
    """Replaces outputs in the whole graph back to the last norms, and remembers where they were."""
    producers, products, came_from = _walk(last)
    producers = [node for node in producers if not node.output.memory.expired()]
    found: list[tuple[Any, tuple[str, str] | None]] = []
    for product in products if producers else ():
        for names in _kind_of(product).saved_names:
            replaced = [_replace(raw, saved, producers) for raw, saved in _saved_as(product, *names)]
            kept = [producer for producer in replaced if producer is not None]
            found += [(product, names)] if kept else []
            found += [(producer, None) for producer in kept]
    _remember(last, found, came_from)


def _walk(last: Any) -> tuple[list[Any], list[Any], dict[Any, tuple[Any, int]]]:
    """Collects nodes whose output can be recomputed, products, and the edge that led to each node; stops after
    :data:`MAX_NODES`.

    A walk ends at sums where an earlier one began: those of the residual stream, whose past has been walked.
    """
    producers: list[Any] = []
    products: list[Any] = []
    came_from: dict[Any, tuple[Any, int]] = {last: (None, 0)}
    waiting = [last]
    last.metadata[_WALKED] = True
    while waiting and len(came_from) < MAX_NODES:
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
        for index, (following, _) in enumerate(node.next_functions):
            if following is not None and following not in came_from:
                came_from[following] = node, index
                waiting.append(following)
    return producers, products, came_from


def _remember(
    last: Any, found: list[tuple[Any, tuple[str, str] | None]], came_from: dict[Any, tuple[Any, int]]
) -> None:
    """Adds the ways from ``last`` to products (with the names of what they saved) and producers to :data:`_KNOWN`."""
    if _Step.number >= _MOST_STEPS:
        _Step.number = 0
        _KNOWN.clear()
    for node, names in found:
        way: list[tuple[Any, int]] = []
        at = node
        while at is not last:
            at, index = came_from[at]
            way.append((at, index))
        steps = _KNOWN
        for passed, index in reversed(way):
            steps = _step_at(passed, steps).edges.setdefault(index, {})
        step = _step_at(node, steps)
        if names is not None:
            step.saved_names.add(names)


def _step_at(node: Any, steps: _Steps) -> _Step:
    name = type(node).__name__
    if name not in steps:
        steps[name] = _Step()
    # Also one whose output was kept at that time, by a hook for example.
    steps[name].is_producer |= _kind_of(node).function is not None
    return steps[name]


def _replace(raw: Any, saved: Any, producers: list[Any]) -> Any:
    """Replaces a saved tensor, whose handle is ``raw``, by a part of an output, and returns the producer; None if it is
    not one of them."""
    for producer in producers if _may_be_output(saved) else ():
        if producer.output.is_kept_as(saved):
            raw.register_hooks(partial(_Part, producer), _Part.compute)
            return producer
    return None


def _may_be_output(saved: Any) -> bool:
    """False for parameters and other subclasses, and for detached tensors, which may outlive the function that would
    recompute them."""
    return type(saved) is Tensor and saved.requires_grad


def _saved_as(node: Any, place: str, name: str) -> list[tuple[Any, Any]]:
    """Returns the tensors that a node has saved under a name without hooks, each after its handle."""
    raw = getattr(node, place, ())
    several = raw if isinstance(raw, tuple) else (raw,)
    for one in several:
        if one.unpack_hook is not None:
            return []
    try:
        saved = getattr(node, name, ())
    except RuntimeError:
        # Changed or freed since, which autograd reports in the backward.
        return []
    return list(zip(several, saved, strict=True)) if isinstance(saved, tuple) else [(raw, saved)]
