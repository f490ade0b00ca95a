"""Forwards of recurrent layers with functions replaced: causal convolutions by kernels, and functions of other packages
that read the lengths of documents, such as fla's delta rules.

Given lengths, such a forward computes one row of all documents: no token is padding, and none is moved. A run of the
model without weights detects whether it separates documents. In that run transformers' fallback computes each document
alone; the packages' functions promise the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature, unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from liger_dist.model.document_rows import DocumentsOfRow
from liger_dist.model.torch_modes import is_traced
from liger_dist.trials.functions import called_functions, fallback_of, installed_function, with_globals
from liger_dist.trials.isolated import LeftAloneError
from liger_dist_kernels import Backend

from .convolution import convolutions_of
from .swap import has_kernels

_DOCUMENTS: ContextVar[DocumentsOfRow | None] = ContextVar("liger_dist_documents_of_row", default=None)
"""documents of the row that a forward computes in this context; None for rows of one document each"""


class MixerForward:
    """Copy of a forward with the functions that it calls replaced.

    Args:
        reads_lengths: True to replace functions of other packages that read lengths as well.
        backend: of the convolutions; None: they stay.
        fallbacks: True to call transformers' fallback for each document instead of another package.
    """

    def __init__(
        self, forward: Any, backend: Backend | None, *, reads_lengths: bool = False, fallbacks: bool = False
    ) -> None:
        self._namespace: dict[str, Any] = unwrap(forward).__globals__
        # A copy: a run without weights exchanges functions of the module meanwhile.
        namespace = dict(self._namespace) if fallbacks else self._namespace
        self.convolutions = {} if backend is None else convolutions_of(forward, namespace, backend)
        self.ignores_lengths: set[str] = set()
        """functions of other packages that a call with fallbacks has reached without telling them lengths"""
        self._read: dict[str, FunctionType] = {}
        replaced: dict[str, Any] = {name: _Call(one, ("seq_idx",)) for name, one in self.convolutions.items()}
        for name, parameters in functions_of_lengths(forward).items() if reads_lengths else ():
            if name not in replaced:
                function = self._read[name] = self._namespace[name]
                replaced[name] = _EachDocumentAlone(function) if fallbacks else _Call(function, parameters)
        self.replaced = frozenset(replaced)
        if fallbacks:
            installed = {name: one for name, one in called_functions(forward).items() if installed_function(one)}
            replaced |= {name: self._noted(name, installed[name]) for name in installed.keys() - replaced.keys()}
        self.left_because: str | None = None
        """reason why nothing is replaced"""
        try:
            self._copy = with_globals(forward, replaced) if replaced else forward
        except LeftAloneError as reason:
            self.left_because, self._copy, self.convolutions, self._read = str(reason), forward, {}, {}
            self.replaced = frozenset()

    def _noted(self, name: str, function: FunctionType) -> Any:
        fallback = fallback_of(function)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.ignores_lengths.add(name)
            return fallback(*args, **kwargs)

        return noted

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._copy(module, *args, **kwargs)

    def takes_lengths(self, hidden_states: Tensor) -> bool:
        """True if a call may get one row of several documents."""
        if not self._read or is_traced() or not has_kernels(hidden_states):
            return False
        is_current = all(self._namespace.get(name) is function for name, function in self._read.items())
        return is_current and all(one.is_current() for one in self.convolutions.values())

    @contextmanager
    def with_documents(self, documents: DocumentsOfRow) -> Iterator[None]:
        """Within, the forward computes one row of these documents."""
        token = _DOCUMENTS.set(documents)
        try:
            yield
        finally:
            _DOCUMENTS.reset(token)


class _Call:
    """Calls a function with the documents of the row that is computed, as arguments of the names ``parameters``."""

    def __init__(self, function: Any, parameters: tuple[str, ...]) -> None:
        self.function, self.parameters = function, parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        documents = _DOCUMENTS.get()
        if documents is None:
            return self.function(*args, **kwargs)
        return self.function(*args, **kwargs | {name: getattr(documents, name) for name in self.parameters})


def functions_of_lengths(forward: Any) -> dict[str, tuple[str, ...]]:
    """Returns the functions that ``forward`` calls from another package and that read the lengths of documents, by
    name, with the parameters for them."""
    found = {}
    for name, function in called_functions(forward).items():
        installed = installed_function(function)
        parameters = () if installed is None else signature(installed).parameters
        names = tuple(one for one in DocumentsOfRow._fields if one in parameters)
        if names:
            found[name] = names
    return found


class _EachDocumentAlone:
    """Computes a recurrence of several documents by transformers' fallback, one by one."""

    def __init__(self, function: FunctionType) -> None:
        self._fallback = fallback_of(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        documents = _DOCUMENTS.get()
        assert documents is not None
        lengths = documents.cu_seqlens_cpu.diff().tolist()
        leaves, structure = tree_flatten((args, kwargs))
        parts = [
            leaf.split(lengths, 1) if _is_of_tokens(leaf, sum(lengths)) else [leaf] * len(lengths) for leaf in leaves
        ]
        outputs = []
        for of_document in zip(*parts, strict=True):
            document_args, document_kwargs = tree_unflatten(list(of_document), structure)
            outputs.append(tree_flatten(self._fallback(*document_args, **document_kwargs)))
        leaves_of = zip(*(found for found, _ in outputs), strict=True)
        joined = [torch.cat(of, 1) if _is_of_tokens(of[0], lengths[0]) else None for of in leaves_of]
        return tree_unflatten(joined, outputs[0][1])


def _is_of_tokens(leaf: Any, tokens: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1 and tuple(leaf.shape[:2]) == (1, tokens)
