"""Packed and padded documents in models with recurrent or convolution layers: gated delta nets, Mamba, short
convolutions, KDA, RWKV.

A mask keeps documents of a row apart in attention. A state or a causal convolution runs on from one document into the
next, in transformers without a message. Such layers are computed on rows of single documents (:mod:`.document_rows`).

:func:`find_recurrent_layers` runs the model's original code on two documents before it is wrapped, see
:mod:`.token_dependency`: no class is named here. It finds the smallest modules whose output depends on another
document, and runs the model again with those computed in rows. What stays dependent is refused.

[Note: documents in a backward]

Activation checkpointing runs a layer again in the backward, after the call has ended, and other calls may have come in
between. Hooks on the decoder's outputs note the documents of their call as soon as its backward begins.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from liger_dist.errors import LigerDistError
from liger_dist.model.document_rows import DocumentRows, Layout
from liger_dist.model.documents import OF_DOCUMENTS, POSITIONS
from liger_dist.model.structure import Structure
from liger_dist.model.torch_modes import in_backward, untraced
from liger_dist.trials.isolated import LeftAloneError
from liger_dist.trials.model_run import EAGER, CannotRunError, Found, Run, token_dependency
from liger_dist_kernels import Backend

from .convolution import reason_against
from .mixer_forward import MixerForward, functions_of_lengths
from .swap import Kind, Match, check_swappable, match_of, original_forward, swap_forward

MOST_KINDS = 8
"""classes of mixing modules in one model"""
_STATES = ("past_key_values", "cache", "cache_params", "state")
_DOCUMENTS: ContextVar[tuple[tuple[object, DocumentRows | None], ...]] = ContextVar("liger_dist_documents", default=())
"""models whose call runs in this context, innermost last, and its documents"""


class RecurrentLayers(Match):
    """Layers of one model, other than attention, that read earlier tokens.

    Args:
        mixers: classes of the modules that are computed on rows of single documents.
    """

    def __init__(self, model: nn.Module, mixers: Sequence[type[nn.Module]]) -> None:
        self.mixers = tuple(mixers)
        self._name = type(model).__name__
        self._backend: Backend | None = None
        self._read_lengths: dict[type[nn.Module], frozenset[str]] = {}
        """mixers that compute one row of all documents, and the functions that are replaced for it"""
        self._forwards: dict[Any, MixerForward] = {}
        self._in_backward: dict[torch.device, DocumentRows | None] = {}
        self._last: DocumentRows | None = None
        """documents of the last call"""
        self._copied_from: RecurrentLayers | None = None
        """of a copy, those of the model that runs a copied layer; None once a copied model has been called"""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_forwards": {}, "_in_backward": {}, "_last": None, "_copied_from": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentLayers:
        made = memo[id(self)] = RecurrentLayers.__new__(RecurrentLayers)
        vars(made).update(copy.deepcopy(self.__getstate__(), memo), _copied_from=self)
        return made

    def lines(self) -> list[str]:
        """Says how documents are kept apart, as clauses."""
        found = []
        for how, is_how in (("one row per document", False), ("one row of all documents, with their lengths", True)):
            names = [mixer.__name__ for mixer in self.mixers if (mixer in self._read_lengths) is is_how]
            found += [f"{', '.join(names)}: {how}"] if names else []
        return found

    def install(
        self,
        model: nn.Module,
        structure: Structure,
        *,
        owner: str,
        backend: Backend | None,
    ) -> RemovableHandle:
        """Swaps the forward of the mixing modules; returns a hook of the decoder.

        Args:
            owner: id of the ``wrap`` call.
            backend: of the convolutions; None: without kernels.
        """
        self._backend = backend
        if backend is not None:
            self._read_lengths = self._found_to_read_lengths(model, structure)
        for module in model.modules():
            if type(module) in self.mixers:
                swap_forward(module, RECURRENT, self, owner=owner)
        return structure.decoder.register_forward_hook(self._note_documents)

    def _found_to_read_lengths(self, model: nn.Module, structure: Structure) -> dict[type[nn.Module], frozenset[str]]:
        """Finds the mixers that separate documents by their lengths, by a run without weights."""
        forwards = {
            mixer: MixerForward(mixer.forward, "reference", reads_lengths=True, fallbacks=True)
            for mixer in self.mixers
            if functions_of_lengths(mixer.forward)
        }
        if not forwards:
            return {}
        runs: dict[type[nn.Module], Run] = dict.fromkeys(self.mixers, _run_of_class)
        runs |= {mixer: partial(_in_one_row, forward) for mixer, forward in forwards.items()}
        try:
            found = token_dependency(model, structure.layers, runs)
        except CannotRunError:
            # What the fallbacks do not compute by lengths stays in rows, and ``explain`` says so.
            return {}
        if found.mixer is not None or any(forward.ignores_lengths for forward in forwards.values()):
            return {}
        return {mixer: forward.replaced for mixer, forward in forwards.items()}

    def forward_of(self, module: nn.Module) -> MixerForward:
        """Returns the forward of a mixing module, with the functions replaced that kernels compute."""
        forward = original_forward(module)
        if forward not in self._forwards:
            wanted = next((names for mixer, names in self._read_lengths.items() if mixer.forward is forward), None)
            made = MixerForward(forward, self._backend, reads_lengths=wanted is not None)
            if wanted not in (None, made.replaced):  # In a copy: functions have been patched since ``wrap``.
                made = MixerForward(forward, self._backend)
                kept = {mixer: names for mixer, names in self._read_lengths.items() if mixer.forward is not forward}
                self._read_lengths = kept
            self._forwards[forward] = made
        return self._forwards[forward]

    def convolutions(self, model: nn.Module) -> tuple[dict[str, int], dict[str, str]]:
        """Counts the mixing modules whose convolutions kernels compute; returns the remaining ones with a reason as
        well."""
        swapped: Counter[str] = Counter()
        left: dict[str, str] = {}
        for module in model.modules() if self._backend is not None else ():
            if match_of(module) is self:
                forward, name = self.forward_of(module), type(module).__name__
                reason = forward.left_because or (reason_against(module) if forward.convolutions else None)
                if reason is not None:
                    left[f"{name} (convolution)"] = reason
                elif forward.convolutions:
                    swapped[f"{name}: convolution (causal, depthwise)"] += 1
        return swapped, left

    def objection(self, model: nn.Module) -> str | None:
        """Says why a layer would mix documents, as a clause: one of the classes that do has been put in since."""
        added = next((module for module in model.modules() if type(module) in self.mixers), None)
        if added is None:
            return None
        name = next(name for name, module in model.named_modules() if module is added)
        return (
            f"{name} has been exchanged since liger_dist.wrap and would mix them (call liger_dist.unwrap(model) and "
            "wrap it again)"
        )

    @contextmanager
    def running(self, documents: DocumentRows | None) -> Iterator[None]:
        """Within, a call with these documents runs; None for rows of one text each."""
        self._in_backward.clear()
        self._last, self._copied_from = documents, None
        with self.separated(documents):
            yield

    @contextmanager
    def separated(self, documents: DocumentRows | None = None) -> Iterator[None]:
        """Within, layers get tokens of these documents; None for rows of one text each."""
        token = _DOCUMENTS.set((*_DOCUMENTS.get(), (self, documents)))
        try:
            yield
        finally:
            _DOCUMENTS.reset(token)

    def documents_now(self, hidden_states: Tensor) -> DocumentRows | None:
        """Returns the documents of the call that runs, or whose backward does."""
        for owner, documents in reversed(_DOCUMENTS.get()):
            if owner is self:
                return documents
        if self._copied_from is not None:
            # As PEFT's modules_to_save: a copied layer in the original model.
            return self._copied_from.documents_now(hidden_states)
        if not in_backward():
            return None
        if hidden_states.device not in self._in_backward and self._last is not None:
            raise LigerDistError(
                f"a recurrent layer of {self._name} is computed again in a backward that did not pass the decoder's "
                "outputs, as of a loss on a tensor that a hook took from a layer: the documents of its call are "
                "unknown. Do not checkpoint the layers of such a model, or leave documents unpacked."
            )
        return self._in_backward.get(hidden_states.device)

    @untraced
    def _note_documents(self, decoder: nn.Module, args: Any, output: Any) -> None:
        """See [Note: documents in a backward]."""
        running = [documents for owner, documents in _DOCUMENTS.get() if owner is self]
        documents = running[-1] if running else None

        def note(gradient: Tensor) -> None:
            self._in_backward[gradient.device] = documents

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(note)


def find_recurrent_layers(
    model: nn.Module, layers: Sequence[nn.Module], *, attention: str = EAGER, text_row: bool = False
) -> tuple[tuple[type[nn.Module], ...], Found]:
    """Runs the model's code on rows of two documents, see :mod:`.token_dependency`, to find the classes whose modules
    carry state from one into the next; no weight is read, and no collective runs.

    Args:
        layers: the decoder layers.
        attention, text_row: see :func:`.token_dependency.token_dependency`.

    Returns:
        The classes that have to be computed on rows of single documents, none for a model in which only attention
        reads other tokens; and what the last run found with those in rows.

    Raises:
        LeftAloneError: rows do not keep documents apart, or the code does not run; with the reason as a clause.
    """
    mixers: dict[type[nn.Module], Run] = {}
    carries = ""
    while True:
        try:
            found = token_dependency(model, layers, mixers, attention=attention, text_row=text_row)
        except CannotRunError as error:
            raise LeftAloneError(_cannot_run(layers, carries, error)) from error
        mixer = found.mixer
        if mixer is None:
            return tuple(mixers), found
        carries = f"its {mixer.__name__} carries state from one document of a row into the next"
        if mixer in mixers or len(mixers) == MOST_KINDS:
            raise LeftAloneError(carries)
        modules = [module for module in model.modules() if type(module) is mixer]
        if any(hasattr(part, "is_causal") for module in modules for part in module.modules()):
            raise LeftAloneError(f"{carries}, and contains an attention")
        try:
            for module in modules:
                check_swappable(module)
        except LeftAloneError as reason:
            raise LeftAloneError(f"{carries}, and {reason}") from reason
        mixers[mixer] = _run_of_class


def _cannot_run(layers: Sequence[nn.Module], carries: str, error: CannotRunError) -> str:
    if carries:
        return f"{carries}, and its code does not run on rows of documents ({error})"
    convolution = next(_with_convolution(layers), None)
    if convolution is not None:
        return f"its {convolution} mixes tokens by a convolution or recurrence, and could not be probed ({error})"
    return f"its forward does not run on made-up values of packed documents ({error})"


def runs_in_rows(mixers: Sequence[type[nn.Module]]) -> dict[type[nn.Module], Run]:
    """Returns how :func:`.token_dependency.token_dependency` computes these classes."""
    return dict.fromkeys(mixers, _run_of_class)


def _run_of_class(module: nn.Module, documents: DocumentRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _in_rows(partial(type(module).forward, module), documents, args, kwargs, layout="few calls")


def _in_one_row(
    forward: MixerForward,
    module: nn.Module,
    documents: DocumentRows,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    of_row = documents.in_one_row(_hidden_states(args, kwargs).device)
    with forward.with_documents(of_row):
        return _in_rows(partial(forward, module), documents, args, kwargs, layout="one row")


def _in_rows(
    forward: Any, documents: DocumentRows, args: tuple[Any, ...], kwargs: dict[str, Any], *, layout: Layout
) -> Any:
    kept = {name: value for name, value in kwargs.items() if name not in OF_DOCUMENTS}
    # Nothing is left to mask, and some forwards have no default.
    kept |= {name: None for name in kept if "mask" in name}
    device = _hidden_states(args, kwargs).device

    def forward_from_zero(*args: Any, **kwargs: Any) -> Any:
        positions = kwargs.get(POSITIONS)
        if isinstance(positions, Tensor) and positions.dim() == 2:
            # A layer may start anew at position 0; where lengths alone separate documents, positions run on.
            first = positions[:, :1]
            if layout == "one row":
                of_row = documents.in_one_row(device)
                first = positions[:, of_row.cu_seqlens[:-1]][:, of_row.seq_idx[0]]
            kwargs[POSITIONS] = positions - first
        return forward(*args, **kwargs)

    return documents.compute(forward_from_zero, args, kept, device=device, layout=layout)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for leaf in (*args, *kwargs.values()):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 2:
            return leaf
    raise CannotRunError("no argument has the shape [B, S, D]")


def has_convolution(layers: Sequence[nn.Module]) -> bool:
    """True if a module in ``layers`` has a convolution or a recurrence of torch."""
    return next(_with_convolution(layers), None) is not None


def _with_convolution(layers: Sequence[nn.Module]) -> Iterator[str]:
    """Yields class names of the modules in ``layers`` that have a convolution or a recurrence of torch."""
    for layer in layers:
        for module in layer.modules():
            if any(isinstance(child, nn.Conv1d | nn.RNNBase) for child in module.children()):
                yield type(module).__name__


@untraced
def _compute(module: nn.Module, layers: RecurrentLayers, *args: Any, **kwargs: Any) -> Any:
    hidden_states = _hidden_states(args, kwargs)
    documents, forward = layers.documents_now(hidden_states), layers.forward_of(module)
    if documents is None:
        return forward(module, *args, **kwargs)
    if tuple(hidden_states.shape[:2]) != documents.shape:
        raise LigerDistError(
            f"{type(module).__name__} got hidden states of shape {tuple(hidden_states.shape)}; expected "
            f"{documents.shape} tokens, as the arguments of the call that separate documents."
        )
    if _has_state(args, kwargs, documents):
        return forward(module, *args, **kwargs)
    # A mixing module inside this one gets rows of single documents already.
    with layers.separated():
        if forward.takes_lengths(hidden_states):
            return _in_one_row(forward, module, documents, args, kwargs)
        layout: Layout = "one call" if _has_collectives(module) else "few calls"
        return _in_rows(partial(forward, module), documents, args, kwargs, layout=layout)


def _has_state(args: tuple[Any, ...], kwargs: dict[str, Any], documents: DocumentRows) -> bool:
    """True if an argument holds the state of earlier tokens."""
    if any(kwargs.get(name) is not None for name in _STATES):
        return True
    for value in args:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        is_cache = hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache")
        if is_cache or (isinstance(value, tuple | list) and tensors and not any(map(documents.is_of_tokens, tensors))):
            return True
    return False


def _has_collectives(module: nn.Module) -> bool:
    """True if parts of the module unshard their parameters when they are called: as often on every rank."""
    parts = list(module.modules())[1:]
    if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in parts):
        return True
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def _match(module: nn.Module, backend: Backend) -> Any:
    raise LeftAloneError("recurrent layers are found by a run of their model")


RECURRENT = Kind(
    name="recurrent layer",
    is_candidate=lambda module: False,
    match=_match,
    compute=_compute,
    absent="no module other than attention reads earlier tokens",
    in_compiled_layers=True,
)
