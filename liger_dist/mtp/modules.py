"""Modules of multi-token prediction, in the names of checkpoints: those that predict the token ``k + 2`` places after
the last one that the decoder has read, for each depth ``k``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.model.documents import current_call, read_documents
from liger_dist.model.stages import PASSED
from liger_dist.model.structure import READS_OUTPUT, PredictionUnits, Structure
from liger_dist.model.torch_modes import untraced

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""arguments of decoder layers that hold keys and values of earlier calls"""


@dataclass
class Seen:
    """Embeddings, hidden states and arguments of layers in a running call of a decoder."""

    shape: torch.Size
    """of the tokens, ``[B, S]``"""
    embeddings: Tensor | None = None
    """``[B, S, D]``"""
    hidden_states: Tensor | None = None
    """``[B, S, D]``, after the final norm"""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """of the template layer's call, without its hidden states and cache"""


SEEN: ContextVar[Seen | None] = ContextVar("liger_dist_seen", default=None)
"""running call of a model with these modules"""


class Parts(NamedTuple):
    """Modules of one depth."""

    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: nn.Module
    """``[..., 2 D]`` to ``[..., D]``"""
    block: nn.Module
    """decoder layer of the model's class"""
    norm: nn.Module


class PredictionLayer(nn.Module):
    """Modules of one depth, in the names of transformers' ``MtpLayer``."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.eh_proj, self.mtp_block, self.post_norm = parts

    def forward(self, embeddings: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the hidden states ``[B, S, D]`` of this depth from those before."""
        parts = Parts(self.enorm, self.hnorm, self.eh_proj, self.mtp_block, self.post_norm)
        return _hidden_states(parts, embeddings, hidden_states, args, kwargs)


class PredictionModules(PredictionUnits):
    """The modules of all depths, on a model as ``mtp``.

    Under the names of Qwen3-Next and Qwen3.5 for one depth (``fc``, ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``,
    ``layers.0``, ``norm``), otherwise a :class:`PredictionLayer` for each depth in ``layers``.
    """

    def __init__(self, parts: Sequence[Parts], *, is_flat: bool) -> None:
        super().__init__()
        self.is_flat = is_flat
        if is_flat:
            (one,) = parts
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.fc = one[:3]
            self.layers, self.norm = nn.ModuleList([one.block]), one.norm
        else:
            self.layers = nn.ModuleList([PredictionLayer(one) for one in parts])

    @property
    def depth(self) -> int:
        """Number of further tokens."""
        return len(self.layers)

    def units(self) -> tuple[nn.Module, ...]:
        return tuple(self.layers)

    def next_hidden_states(self, depth: int, seen: Seen, hidden_states: Tensor) -> Tensor:
        """Computes the hidden states ``[B, S, D]`` of a depth from those of the depth before: those of a token predict
        the token ``depth + 2`` places after it."""
        assert seen.embeddings is not None
        # Without a next token there is no label either.
        embeddings = F.pad(seen.embeddings[:, depth + 1 :], (0, 0, 0, min(depth + 1, hidden_states.shape[1])))
        layer = self.layers[depth]
        if not self.is_flat:
            states: Tensor = layer(embeddings, hidden_states, *seen.args, **seen.kwargs)
            return states
        parts = Parts(self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.fc, layer, self.norm)
        return _hidden_states(parts, embeddings, hidden_states, seen.args, seen.kwargs)


def _hidden_states(
    parts: Parts, embeddings: Tensor, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    both = torch.cat([parts.embedding_norm(embeddings), parts.hidden_norm(hidden_states)], -1)
    projected = parts.projection(both)
    try:
        output = parts.block(projected, *args, **kwargs)
    except (AttributeError, TypeError) as error:
        raise LigerDistError(
            f"a {type(parts.block).__name__} of multi-token prediction cannot be called as the model calls its own "
            f"({error}): it needs something that the model gives it by itself. Leave mtp out."
        ) from error
    states: Tensor = parts.norm(output[0] if isinstance(output, tuple) else output)
    return states


def template_layer(structure: Structure) -> tuple[int, nn.Module]:
    """Returns the index of the decoder layer that each depth has a layer of the class of, and that layer: the last with
    softmax attention.

    Raises:
        LigerDistError: the decoder has no list of layers.
    """
    layers = list(enumerate(structure.layers))
    if not layers or structure.final_norm is None:
        raise LigerDistError(
            f"{type(structure.decoder).__name__} has no list of decoder layers, or no norm after them, which the "
            "layers of multi-token prediction copy; leave mtp out."
        )
    found = [item for item in layers if any(_is_attention(name) for name in item[1]._modules)]
    if not found:
        raise LigerDistError(
            f"no layer of {type(structure.decoder).__name__} has softmax attention, of whose kind the layers of "
            "multi-token prediction are; leave mtp out."
        )
    return found[-1]


def _is_attention(name: str) -> bool:
    return ("attn" in name or "attention" in name) and "linear" not in name and "norm" not in name


def make_parts(model: nn.Module, structure: Structure, depth: int) -> list[Parts]:
    """Makes the modules of ``depth`` depths on the device of the model's final norm, in its dtype, with the initial
    values of its ``_init_weights``."""
    index, template = template_layer(structure)
    assert structure.final_norm is not None
    like: Tensor = next(structure.final_norm.parameters(), structure.head.weight)
    size = structure.hidden_size
    config: Any = structure.decoder.config
    made = []
    with torch.device(like.device):
        for _ in range(depth):
            norms = [copy.deepcopy(structure.final_norm) for _ in range(3)]
            try:
                block = type(template)(config, index)
            except TypeError as error:
                raise LigerDistError(
                    f"{type(template).__name__} is not made from a config and an index ({error}), as decoder layers of "
                    "transformers are."
                ) from error
            _checkpoint_as(template, block)
            projection = nn.Linear(2 * size, size, bias=False)
            made.append(Parts(norms[0], norms[1], projection, block, norms[2]))
    initialize: Any = getattr(model, "_init_weights", None)
    for parts in made:
        for part in parts:
            part.to(dtype=like.dtype)
            for module in part.modules():
                if initialize is not None and not like.is_meta:
                    initialize(module)
            part.requires_grad_(True)
    return made


def _checkpoint_as(template: nn.Module, block: nn.Module) -> None:
    """Checkpoints the activations of ``block`` if those of ``template`` are."""
    for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
        if name in vars(template):
            setattr(block, name, vars(template)[name])


@untraced
def note_hidden_states(decoder: nn.Module, args: Any, output: Any) -> None:
    """Notes hidden states, as a forward hook of a decoder."""
    seen = SEEN.get()
    if seen is not None:
        seen.hidden_states = output[0] if isinstance(output, tuple) else output.last_hidden_state


@untraced
def note_embeddings(embedding: nn.Module, args: Any, output: Any) -> None:
    """Notes embeddings, as a forward hook of an input embedding; in the first stage of a pipeline for the last one."""
    seen, passed = SEEN.get(), PASSED.get()
    if seen is not None and seen.embeddings is None and output.shape[:2] == seen.shape:
        seen.embeddings = output
    if passed is not None and passed.embeddings is None and passed.model.get_input_embeddings() is embedding:
        passed.embeddings = output


setattr(note_embeddings, READS_OUTPUT, True)


@untraced
def note_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes arguments, as a forward pre-hook of the template layer."""
    seen = SEEN.get()
    if seen is not None:
        seen.args = tuple(None if _is_cache(value) else value for value in args[1:])
        kept = {name: None if name in CACHES or _is_cache(value) else value for name, value in kwargs.items()}
        seen.kwargs = kept
        seen.kwargs.pop("hidden_states", None)
        if "use_cache" in seen.kwargs:
            seen.kwargs["use_cache"] = False


def _is_cache(value: object) -> bool:
    from transformers.cache_utils import Cache

    return isinstance(value, Cache)


def document_ids(named: dict[str, Any], shape: torch.Size) -> Tensor | None:
    """Returns a number for the document of each token ``[B, S]``, 0 for padding; None for rows of one text. The host
    reads nothing in a call of a wrapped model, which has read its documents.

    Args:
        named: arguments of the model by name.
    """
    call = current_call()
    documents = None if call is None else call.documents
    documents = read_documents(named) if documents is None or documents.shape != tuple(shape) else documents
    if documents is None or not (documents.is_packed or documents.mask is not None):
        return None
    device = next(value for value in named.values() if isinstance(value, Tensor)).device
    numbers = documents.numbers(device) + 1
    return numbers if documents.mask is None else torch.where(documents.valid_on(device), numbers, 0)
