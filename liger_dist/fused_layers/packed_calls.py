"""Calls with packed documents: which are computed so that documents stay apart, and which are refused.

:func:`find_packing` tries it when a model is wrapped, on made-up values (:mod:`.token_dependency`): two documents in a
row, whose results must not depend on each other, and must be those of each alone. No class and no model is named here.

- Recurrent and convolution layers are computed on rows of single documents (:mod:`.recurrent`).
- Attention reads a mask. Where the model's code does not make one of packed documents, "liger_dist" attention does,
  or :mod:`.attention` adds the documents to the masks that the model asks transformers for.
- What stays dependent is refused when a packed call comes, before any layer runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_dist.errors import LigerDistError
from liger_dist.model.document_rows import DocumentRows, rows_of
from liger_dist.model.documents import (
    INPUTS,
    LENGTHS,
    MASK,
    OF_DOCUMENTS,
    POSITIONS,
    SEEN,
    Documents,
    call_of,
    current_call,
    read_documents,
)
from liger_dist.model.peft import base_model_of, reason_against_packing
from liger_dist.model.structure import Structure, find_structure
from liger_dist.model.torch_modes import in_backward, untraced
from liger_dist.model.weak import Weakly
from liger_dist.sharding.sequence_parallel import sequence_axis_of
from liger_dist.trials.isolated import LeftAloneError
from liger_dist.trials.model_run import (
    BY_LENGTHS,
    EAGER,
    CannotRunError,
    Found,
    is_same_attention,
    lengths_of,
    token_dependency,
)

from .attention import MASKED, NAME, register_attention
from .attention_selection import REPLACEABLE, AttentionSelection, reason_against_varlen
from .document_mask import is_replaced
from .recurrent import RecurrentLayers, find_recurrent_layers, has_convolution, runs_in_rows

ARGUMENTS = (*OF_DOCUMENTS, POSITIONS, MASK)
"""arguments that say something of documents or padding"""
CACHES = ("past_key_values", "cache", "cache_params", "state")
"""arguments with the state of earlier tokens"""
NOT_WANTED = "WrapConfig(varlen_attention=False)"


def takes_lengths(implementation: str) -> bool:
    """True for what transformers takes for FlashAttention, a package or a kernel of the hub: it reads the lengths of
    documents instead of a mask."""
    return "flash" in implementation


@dataclass(frozen=True)
class PackedCall:
    """One call of a model."""

    documents: Documents | None
    """None for a call without tokens, or with shards of sequences"""
    rows: DocumentRows | None
    """documents that recurrent layers compute in separate rows; None for one text in each row"""
    dropped: tuple[str, ...] = ()
    """keywords that say nothing and that some layers refuse"""


class PackedCalls:
    """How one model keeps packed documents apart.

    Args:
        recurrent: layers other than attention that read earlier tokens; None if there are none.
        reason: why such layers would mix documents, as a clause; None if they would not.
        attention_reasons: by implementation of attention, why documents would mix; None where they would not.
        wanted: the implementation to select; None for the model's original one.
        varlen_reason: why it is not "liger_dist"; None if it is.
        is_right_by_itself: True if the decoder alone keeps documents apart by positions ``[B, S]``.
        text_row: True if the model's original mask reads positions ``[4, B, S]``, of the text and then the three of
            images.
    """

    _outer = Weakly()
    """the model, or the ``PeftModel`` around it"""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        recurrent: RecurrentLayers | None,
        *,
        reason: str | None,
        attention_reasons: dict[str, str | None],
        wanted: str | None,
        varlen_reason: str | None,
        is_right_by_itself: bool,
        text_row: bool,
    ) -> None:
        self.recurrent, self.wanted, self.attention_reason = recurrent, wanted, varlen_reason
        self._name = type(model).__name__
        self._layers = structure.layers
        self._reason, self._attention_reasons = reason, attention_reasons
        self._decoder_config = getattr(structure.decoder, "config", None)
        self._selection: AttentionSelection | None = None
        self._outer = model
        self._text_row, self._is_right_by_itself = text_row, is_right_by_itself
        self._has_image_positions = has_image_positions(self._decoder_config)

    def install(
        self, outer: nn.Module, model: nn.Module, structure: Structure, selection: AttentionSelection
    ) -> tuple[RemovableHandle, ...]:
        """Returns hooks of the decoder, and of a ``PeftModel`` ``outer``."""
        self._selection, self._outer = selection, outer
        hooks = [] if outer is model else [outer.register_forward_pre_hook(self._check_adapter, with_kwargs=True)]
        if structure.decoder is not model and not self._is_right_by_itself:
            hooks.append(structure.decoder.register_forward_pre_hook(self._check_decoder_call, with_kwargs=True))
        return tuple(hooks)

    def __str__(self) -> str:
        found = [] if self.recurrent is None else self.recurrent.lines()
        reason = self.objection()
        return "; ".join([*found, *([f"refused: {reason}"] if reason else [self._how_attention()])])

    def _how_attention(self) -> str:
        implementation = self._implementation()
        if implementation == NAME:
            return "attention: by their lengths"
        if self._selection is not None and self._selection.is_selected():
            return "attention: by a dense mask of documents"
        if takes_lengths(implementation):
            return "attention: by their lengths, in the model's own"
        return "attention: by the model's own mask"

    def read(self, model: nn.Module, named: dict[str, Any]) -> PackedCall:
        """Reads the documents of a call.

        Args:
            named: the arguments of the model by name.

        Raises:
            LigerDistError: on this rank; the documents would mix.
        """
        if self._layers and sequence_axis_of(self._layers[0]) is not None:
            return PackedCall(None, None)
        documents = read_documents(named)
        cache = next((name for name in CACHES if named.get(name) is not None), None)
        is_generation = cache is not None and self.recurrent is None and named.get("labels") is None
        if documents is None or (is_generation and documents.told_by == POSITIONS):
            # With a cache, transformers takes a row for one text: generation, whose positions padding interrupts.
            return PackedCall(None, None)
        if documents.told_by is not None:
            self._check(model, documents, documents.told_by, named)
        if self.recurrent is None:
            return PackedCall(documents, None)
        # Generation runs the model's original code.
        has_cache = any(named.get(name) is not None and named[name] is not False for name in (*CACHES, "use_cache"))
        rows = None if has_cache else rows_of(documents)
        return PackedCall(documents, rows, OF_DOCUMENTS if rows is None else ())

    def _check(self, model: nn.Module, documents: Documents, told_by: str, named: dict[str, Any]) -> None:
        what = f"{self._name} was called with packed documents ({SEEN[told_by]})"
        cache = next((name for name in (*CACHES, "use_cache") if named.get(name) is not None), "use_cache")
        reads_documents = self.recurrent is None and cache == "use_cache" and self._reads_documents()
        if named.get(cache) and not reads_documents:
            way_out = "pass use_cache=False" if cache == "use_cache" else f"leave {cache} out"
            raise LigerDistError(f"{what} and {cache}, but a cache holds one text for each row; {way_out}.")
        reason = self._reason or (None if self.recurrent is None else self.recurrent.objection(model))
        if reason is None and not _has_dense_mask(named):
            reason = self._reason_of_attention() or self._reason_of_positions(documents, named)
        if reason is not None:
            raise LigerDistError(
                f"{what}, but {reason}. Give each document a separate row and pad the rows (attention_mask), or leave "
                f"{told_by} out, so that a row is one text (--attend_across_documents true in the training program)."
            )

    def objection(self) -> str | None:
        """Says why packed documents would be refused, as a clause; None if they would not."""
        return self._reason or self._reason_of_attention() or reason_against_packing(self._outer)

    def _reason_of_attention(self) -> str | None:
        """Says why attention would mix documents, as a clause: that which is selected now."""
        implementation = self._implementation()
        if implementation not in self._attention_reasons:
            return (
                f"its attention was set to {implementation!r} after liger_dist.wrap, which could not be tried "
                "(select it before liger_dist.wrap)"
            )
        return self._attention_reasons[implementation]

    def _implementation(self) -> str:
        """Returns the implementation of attention now; before it is selected, the one that will be."""
        if self._selection is None and self.wanted is not None:
            return self.wanted
        return _implementation_of(self._decoder_config)

    def _reason_of_positions(self, documents: Documents, named: dict[str, Any]) -> str | None:
        """Says why the positions of a call do not show the model's original attention its documents, as a clause."""
        positions = named.get(POSITIONS)
        if positions is None:
            is_image = any(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 3 for x in named.values())
            if self._has_image_positions and is_image:
                return f"its positions of images are made for rows of one text (pass {POSITIONS} of each document)"
            return None
        if positions.dim() > 2 and not self._has_image_positions:
            return f"{POSITIONS} has the shape {list(positions.shape)} (expected [B, S])"
        if self._reads_documents():
            return None
        if not documents.positions_restart and documents.told_by != POSITIONS:
            return (
                f"its attention reads {POSITIONS}, which do not restart at documents (leave them out, or restart them)"
            )
        if positions.dim() > 2 and not self._text_row:
            return f"its attention separates them by {POSITIONS} [B, S], and these are {list(positions.shape)}"
        return None

    def _reads_documents(self) -> bool:
        """True if attention gets the documents of a call, from this library or by their lengths."""
        is_selected = self._selection is not None and self._selection.is_selected()
        return is_selected or takes_lengths(self._implementation())

    def keywords(self, call: PackedCall, named: dict[str, Any], *, has_labels: bool) -> dict[str, Any]:
        """Returns further keywords of a call. A packed one has no cache, which would hold one text for each row, and
        positions that begin anew in each document."""
        documents = call.documents
        if documents is None or not documents.is_packed:
            return {"use_cache": False} if call.rows is not None and has_labels else {}
        found: dict[str, Any] = {"use_cache": False} if named.get("use_cache") is None else {}
        if documents.mask is not None:
            # It says nothing else, and with it transformers takes a row for one text.
            found[MASK] = None
        positions = named.get(POSITIONS)
        inputs = next(named[name] for name in INPUTS if isinstance(named.get(name), Tensor))
        if positions is None:
            found[POSITIONS] = positions = documents.positions(inputs.device)
        # [4, B, S] has the row of the text already; [B, S] may have four rows as well.
        lacks_text = isinstance(positions, Tensor) and not (positions.dim() == 3 and len(positions) == 4)
        if self._text_row and lacks_text and not self._reads_documents():
            of_text = documents.positions(positions.device)[None]
            of_images = positions.expand(3, *documents.shape)
            found[POSITIONS] = torch.cat([of_text.to(positions.dtype), of_images])
        if takes_lengths(self._implementation()) and named.get(LENGTHS) is None:
            found |= lengths_of(documents)
        return found

    @contextmanager
    def running(self, call: PackedCall | None) -> Iterator[None]:
        """Within, the call runs; None for one that says nothing of documents."""
        with ExitStack() as stack:
            stack.enter_context(call_of(None if call is None else call.documents))
            if self.recurrent is not None:
                stack.enter_context(self.recurrent.running(None if call is None else call.rows))
            yield

    @untraced
    def _check_adapter(self, outer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses packed documents in a call of a ``PeftModel`` that takes a row for one text."""
        reason = reason_against_packing(outer)
        if reason is None or "forward" in vars(outer) or in_backward():
            return  # PEFT replaces the forward where an adapter is disabled.
        named = dict(zip(signature(outer.forward).parameters, args, strict=False)) | kwargs
        documents = read_documents(named)
        if documents is not None and documents.told_by is not None:
            raise LigerDistError(
                f"{self._name} was called with packed documents ({SEEN[documents.told_by]}), but {reason}. Give each "
                "document a separate row and pad the rows (attention_mask)."
            )

    @untraced
    def _check_decoder_call(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses packed documents in a call of the decoder alone, whose arguments the model has not read, where its
        own code does not keep them apart."""
        if in_backward() or current_call() is not None:
            return  # In the call of a model, possibly another one that shares the decoder.
        named = dict(zip(signature(decoder.forward).parameters, args, strict=False)) | kwargs
        documents = read_documents(named)
        if documents is not None and documents.told_by is not None and not _has_dense_mask(named):
            raise LigerDistError(
                f"{type(decoder).__name__} was called by itself with packed documents "
                f"({SEEN[documents.told_by]}), which its layers would mix; call the {self._name} around it, with "
                "output_hidden_states=True for its hidden states."
            )


def _has_dense_mask(named: dict[str, Any]) -> bool:
    """True if the caller has made the masks of attention."""
    mask = named.get(MASK)
    return isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() > 2)


def _implementation_of(config: Any) -> str:
    return str(getattr(config, "_attn_implementation", None))


def find_packing(model: nn.Module, structure: Structure, *, varlen_attention: bool) -> PackedCalls:
    """Tries how ``model`` keeps packed documents apart; it is not changed, no weight is read and no collective runs.

    Args:
        varlen_attention: True to select "liger_dist" attention where it computes the same as the model's.
    """
    config = getattr(structure.decoder, "config", None)
    original = _implementation_of(config)
    tried = BY_LENGTHS if takes_lengths(original) else original if original == "sdpa" and not is_replaced() else EAGER
    mixers: tuple[type[nn.Module], ...] = ()
    reason = found = None
    text_row = False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        reason = "its encoder and decoder take one text for each row"
    else:
        register_attention()
        try:
            mixers, found, text_row = _find_mixers(model, structure, tried)
        except LeftAloneError as error:
            reason = str(error)
    is_recurrent = bool(mixers) or (found is None and has_convolution(structure.layers))
    recurrent = RecurrentLayers(model, mixers) if is_recurrent else None
    varlen_reason = (
        reason_against_varlen(model, structure, has_recurrent=is_recurrent) if varlen_attention else NOT_WANTED
    )
    wanted = NAME if varlen_reason is None else None
    reasons: dict[str, str | None] = {}
    if found is not None:
        reasons = {original: _reason_in(found)}
        if original in REPLACEABLE:
            # The same masks, should another of them be set later.
            reasons |= dict.fromkeys(MASKED, reasons[original])
        masked = _masked(original)
        if reasons[original] is None:
            reasons[NAME] = None
        elif masked is not None and not is_replaced():
            reasons[masked] = reasons[NAME] = _reason_with(model, structure, mixers, masked)
            is_right = reasons[masked] is None and is_same_attention(model, structure.layers, tried, masked)
            if wanted is None and is_right:
                wanted = masked
    return PackedCalls(
        model,
        structure,
        recurrent,
        reason=reason,
        attention_reasons=reasons,
        wanted=wanted,
        varlen_reason=varlen_reason,
        is_right_by_itself=not (mixers or text_row) and reasons.get(original, reason) is None,
        text_row=text_row,
    )


def _find_mixers(
    model: nn.Module, structure: Structure, attention: str
) -> tuple[tuple[type[nn.Module], ...], Found, bool]:
    """Finds recurrent layers, and how attention keeps documents apart with those in rows: by positions ``[4, B, S]``
    (True) if it does so, otherwise by ``[B, S]``."""
    if has_image_positions(getattr(structure.decoder, "config", None)):
        try:
            mixers, found = find_recurrent_layers(model, structure.layers, attention=attention, text_row=True)
        except LeftAloneError:
            pass  # It takes no such positions.
        else:
            if _reason_in(found) is None:
                return mixers, found, True
    return *find_recurrent_layers(model, structure.layers, attention=attention), False


def _reason_in(found: Found) -> str | None:
    if found.mixer is not None:
        return f"its {found.mixer.__name__} carries state from one document of a row into the next"
    if found.attends_across:
        return "its attention, which is the model's own, makes no mask of packed documents"
    return "the results of a document depend on its place in the row" if found.counts_on else None


def _reason_with(
    model: nn.Module, structure: Structure, mixers: Sequence[type[nn.Module]], attention: str
) -> str | None:
    try:
        return _reason_in(token_dependency(model, structure.layers, runs_in_rows(mixers), attention=attention))
    except CannotRunError as error:
        return f"its forward does not run on made-up values of packed documents ({error})"


def _masked(original: str) -> str | None:
    """Returns the implementation that adds masks of documents to a model's original one; None if there is none. With a
    config that another wrapped model shares, the model's may be this library's already."""
    if original in MASKED.values():
        return original
    return MASKED["eager"] if original == NAME else MASKED.get(original)


def has_image_positions(config: Any) -> bool:
    """True if the text decoder reads three positions of each token: of images in time, height and width."""
    return "mrope_section" in str(getattr(config, "rope_parameters", None))


def packing_objection(model: nn.Module) -> str | None:
    """Says why a model that :func:`liger_dist.wrap` wraps would refuse packed documents, as a clause; None if it would
    not. The model may be on the meta device; it is not changed.

    Args:
        model: a Hugging Face causal language model that is not wrapped, or a ``PeftModel`` of one; of a wrapped model,
            ``explain(model).packing`` says more.

    Raises:
        LigerDistError: the model has no lm_head.
    """
    inner = base_model_of(model)
    found = find_packing(inner, find_structure(inner), varlen_attention=True)
    return found.objection() or reason_against_packing(model)


def is_recurrent(model: nn.Module) -> bool:
    """True if layers other than attention read earlier tokens: recurrences and convolutions. Arguments and errors as of
    :func:`packing_objection`."""
    model = base_model_of(model)
    layers = find_structure(model).layers
    try:
        return bool(find_recurrent_layers(model, layers)[0])
    except LeftAloneError:
        return has_convolution(layers)
