"""Packed documents in models with recurrent or convolution layers: gated delta nets, Mamba, short convolutions, RWKV.

A mask keeps documents of a row apart in attention. A state or a causal convolution runs on from one document into the
next, in transformers without a message. :func:`find_leaks` runs the model's original code on two documents before it is
wrapped (no class is named here), and :class:`PackedDocuments` refuses the calls whose documents would mix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.model.peft import base_model_of
from liger_dist.model.structure import Structure, find_structure

from .token_dependency import LENGTHS, POSITIONS, SEQ_IDX, CannotRunError, mixing_module

WAYS: tuple[tuple[str, ...], ...] = ((POSITIONS,), (LENGTHS,), (SEQ_IDX,), (LENGTHS, SEQ_IDX))
"""arguments that may separate documents; positions in addition to lengths add nothing"""
SEEN = {
    POSITIONS: "position_ids restart without a 2-D attention_mask",
    LENGTHS: "cu_seq_lens_q has more documents than rows",
    SEQ_IDX: "seq_idx changes within a row",
}
"""condition under which a call is packed by each argument"""


class PackedDocuments:
    """Refuses packed documents in calls of one model whose layers would mix them.

    Args:
        reasons: for each of :data:`WAYS` that does not keep documents apart, the reason as a clause.
    """

    def __init__(self, model: nn.Module, reasons: dict[tuple[str, ...], str]) -> None:
        self._name = type(model).__name__
        self._reasons = reasons

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for way, reason in self._reasons.items():
            by_reason.setdefault(reason, []).append(" with ".join(way))
        return "; ".join(f"not separated by {', '.join(ways)}: {reason}" for reason, ways in by_reason.items())

    def check(self, named: dict[str, Any]) -> None:
        """Refuses a call whose documents would mix. Synchronises the host with ``position_ids`` if the call has no 2-D
        mask, as transformers' mask functions do, and with no other tensor of a call that is not packed.

        Args:
            named: the arguments of the model by name.

        Raises:
            LigerDistError: on this rank.
        """
        way = packed_by(named)
        reason = self._reasons.get(way)
        if reason is None:
            return
        others = [" and ".join(other) for other in WAYS if other not in self._reasons]
        apart = f"Tell documents apart by {others[0]}, which keeps them apart; or give" if others else "Give"
        raise LigerDistError(
            f"{self._name} was called with packed documents ({', '.join(SEEN[name] for name in way)}), but {reason}. "
            f"{apart} each document a separate row and pad the rows (attention_mask), or leave {' and '.join(way)} "
            "out, so that a row is one text (--attend_across_documents true in the training program)."
        )

    def reason_against(self, *way: str) -> str | None:
        """Says why arguments do not keep documents apart, as a clause; None if they do."""
        return self._reasons.get(way)


def packed_by(named: dict[str, Any]) -> tuple[str, ...]:
    """Returns the arguments of a call that separate documents of a row, as in :data:`WAYS`; empty if each row is one
    text.

    The rule of transformers and of the "liger_dist" attention: lengths of more documents than rows, otherwise positions
    that restart without a 2-D mask.
    """
    ends, seq_idx, mask = named.get(LENGTHS), named.get(SEQ_IDX), named.get("attention_mask")
    ends = named.get("cu_seq_lens_k") if ends is None else ends
    inputs = next((named[name] for name in ("input_ids", "inputs_embeds") if isinstance(named.get(name), Tensor)), None)
    rows = 1 if inputs is None else inputs.shape[0]
    found = []
    # The shape is known to the host; only lengths that look packed are read: some of them may be zero.
    if isinstance(ends, Tensor) and ends.numel() - 1 > rows and int((ends.diff() > 0).sum()) > rows:
        found.append(LENGTHS)
    if isinstance(seq_idx, Tensor) and bool((seq_idx[..., 1:] != seq_idx[..., :-1]).any()):
        found.append(SEQ_IDX)
    has_mask = isinstance(mask, Tensor) and mask.dim() == 2
    if not found and not has_mask and _restart(named.get(POSITIONS)):
        found.append(POSITIONS)
    return tuple(found)


def _restart(position_ids: Any) -> bool:
    """True if positions within a row are not consecutive."""
    if not isinstance(position_ids, Tensor) or position_ids.is_meta:
        return False
    if position_ids.dim() == 3 and position_ids.shape[0] == 4:
        # Those of the text, before the three of images.
        position_ids = position_ids[0]
    return position_ids.dim() == 2 and bool((position_ids.diff() != 1).any())


def packing_objection(model: nn.Module) -> str | None:
    """Says why a model does not support documents packed by ``position_ids`` that restart, as a clause; None if it
    does. The model may be on the meta device; it is not changed.

    Args:
        model: a Hugging Face causal language model that is not wrapped, or a ``PeftModel`` of one; of a wrapped model,
            ``explain(model).packing`` says more.

    Raises:
        LigerDistError: the model has no lm_head.
    """
    model = base_model_of(model)
    leaks = find_leaks(model, find_structure(model))
    return None if leaks is None else leaks.reason_against(POSITIONS)


def find_leaks(model: nn.Module, structure: Structure) -> PackedDocuments | None:
    """Runs the model's code on two documents, see :mod:`.token_dependency`; no weight is read, and no collective runs.

    Returns:
        Calls to refuse; None for a model in which only attention reads other tokens.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    try:
        if mixing_module(model, structure.layers, ()) is None:
            return None
    except CannotRunError as error:
        convolution = next(_with_convolution(structure.layers), None)
        if convolution is None:
            return None
        unknown = f"its {convolution} mixes tokens by a convolution or recurrence, and could not be probed ({error})"
        return PackedDocuments(model, dict.fromkeys(WAYS, unknown))
    reasons = {way: reason for way in WAYS if (reason := _reason(model, structure, way)) is not None}
    return PackedDocuments(model, reasons) if reasons else None


def _reason(model: nn.Module, structure: Structure, way: tuple[str, ...]) -> str | None:
    try:
        mixer = mixing_module(model, structure.layers, way)
    except CannotRunError as error:
        return f"its own code does not take them ({error})"
    return None if mixer is None else f"its {mixer} carries state from one document of a row into the next"


def _with_convolution(layers: Sequence[nn.Module]) -> Iterator[str]:
    """Yields class names of the modules in ``layers`` that have a convolution or a recurrence of torch."""
    for layer in layers:
        for module in layer.modules():
            if any(isinstance(child, nn.Conv1d | nn.RNNBase) for child in module.children()):
                yield type(module).__name__
