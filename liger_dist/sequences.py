"""Sequence parallelism on a mesh axis "sp": :func:`shard_sequence` shards a batch, :func:`gather_sequence` all-gathers
per-token results, :func:`check_sequence_parallel` refuses models that are not supported.

Legend: B rows, S tokens of a row, n ranks of the axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from liger_dist.errors import LigerDistError
from liger_dist.model.documents import read_documents
from liger_dist.model.peft import learns_prompts
from liger_dist.model.torch_modes import untraced
from liger_dist.sharding.sequence_parallel import SequenceAxis

from .fused_layers.attention import NAME
from .fused_layers.attention_selection import reason_against
from .fused_layers.document_mask import document_lengths

IGNORED = -100
_OF_TOKENS = ("input_ids", "position_ids", "labels", "shift_labels", "attention_mask", "token_weight")
_OF_SEQUENCES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention", "attention")
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def shard_sequence(batch: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, object]:
    """Returns this rank's shard of a batch of full sequences, on the axis "sp" of ``mesh``.

    Labels are shifted before they are sharded, positions are relative to the full sequences, and document boundaries
    are returned as ``cu_seq_lens_*``. Rows are padded on the right to a multiple of the ranks. No collectives; the host
    reads the boundaries.

    Args:
        batch: the same on all ranks of the axis: ``input_ids`` ``[B, S]``; ``labels``, not shifted, or
            ``shift_labels``; ``attention_mask`` ``[B, S]`` of padding; ``position_ids`` ``[B, S]``, which restart where
            documents are packed and there is no ``attention_mask``; ``cu_seq_lens_q`` of packed documents;
            ``token_weight`` ``[B, S]``, aligned with the labels. Other values are passed through if they are not
            tensors or have one element.

    Returns:
        Arguments of the wrapped model: shards ``[B, ceil(S / n)]`` of ``input_ids``, ``position_ids``, ``labels`` and
        ``shift_labels`` (the same values), and ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q``,
        ``max_length_k`` of the full sequences.

    Raises:
        LigerDistError: the mesh has no axis "sp", or the batch has tensors that cannot be sharded here.
    """
    axis = SequenceAxis.of(mesh)
    ids = _checked(batch)
    rows, length = ids.shape
    padding = -length % axis.size
    documents = read_documents({**batch, "input_ids": ids})
    assert documents is not None
    begins, valid = documents.begins, documents.valid
    # The padding is a separate document.
    begins, valid = F.pad(begins, (0, padding)), F.pad(valid, (0, padding))
    lengths = document_lengths(begins, valid)
    if lengths is None:
        raise LigerDistError(
            "attention_mask has zeros between the tokens of a row; expected padding at the start or end of each row. "
            "For packed documents leave out attention_mask and pass position_ids that restart."
        )
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=ids.device).expand(rows, length)
    full = {"input_ids": F.pad(ids, (0, padding)), "position_ids": F.pad(positions, (0, padding))}
    shifted = _shifted(batch)
    if shifted is not None:
        ignored = batch.get("ignore_index", IGNORED)
        full["labels"] = full["shift_labels"] = F.pad(shifted, (0, padding), value=ignored)
    if batch.get("token_weight") is not None:
        # Aligned with the labels, and shifted with them.
        first = 0 if batch.get("shift_labels") is not None else 1
        full["token_weight"] = F.pad(batch["token_weight"][:, first:], (0, padding + first))
    part = (length + padding) // axis.size
    shard = {name: x[:, axis.rank * part : (axis.rank + 1) * part].contiguous() for name, x in full.items()}
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=ids.device)
    longest = max(lengths)
    rest = {name: value for name, value in batch.items() if name not in (*_OF_TOKENS, *_OF_SEQUENCES)}
    return rest | shard | dict(zip(_OF_SEQUENCES, (ends, ends, longest, longest), strict=True))


def gather_sequence(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-gathers sequence shards ``[B, S / n, ...]`` into ``[B, S, ...]`` over the axis "sp" of ``mesh``, without
    gradient. S includes the padding that :func:`shard_sequence` appends.

    Raises:
        LigerDistError: the mesh has no axis "sp".
    """
    return _gathered(part, SequenceAxis.of(mesh))


def gather_batch(batch: Mapping[str, Any], axis: SequenceAxis) -> dict[str, Any]:
    """All-gathers the full sequences of a shard ``batch`` of :func:`shard_sequence`, on every rank of ``axis``."""
    is_shard = {name: name in _OF_TOKENS and isinstance(value, Tensor) for name, value in batch.items()}
    return {name: _gathered(value, axis) if is_shard[name] else value for name, value in batch.items()}


def _gathered(part: Tensor, axis: SequenceAxis) -> Tensor:
    part = part.detach().contiguous()
    parts = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(parts, part, group=axis.group)
    return torch.cat(parts, 1)


def check_sequence_parallel(outer: nn.Module, model: nn.Module, decoder: nn.Module, layers: Any) -> None:
    """Refuses a decoder that mixes tokens outside the "liger_dist" attention, or computes positions from anything but
    ``position_ids``.

    Args:
        outer: ``model``, or the ``PeftModel`` around it.

    Raises:
        LigerDistError: the model is not supported.
    """
    reason = _reason(model, decoder, layers)
    if reason is None and learns_prompts(outer):
        reason = "PEFT puts prompt tokens before each rank's shard"
    if reason is not None:
        raise LigerDistError(
            f"{type(model).__name__} cannot be computed on a mesh with an axis 'sp': {reason}. Leave out the axis, and "
            "use activation checkpointing and mlp_tile_tokens for long sequences."
        )


def guard_decoder(decoder: nn.Module) -> RemovableHandle:
    """Registers a pre-hook that refuses calls with full sequences, and another ``attn_implementation`` than wrap
    selected."""
    return decoder.register_forward_pre_hook(_refuse_other_calls, with_kwargs=True)


@untraced
def _refuse_other_calls(decoder: Any, args: Any, kwargs: dict[str, Any]) -> None:
    name = type(decoder).__name__
    if decoder.config._attn_implementation != NAME:
        raise LigerDistError(
            f"the attention of {name} was set to {decoder.config._attn_implementation!r} after wrap; on a mesh with an "
            f"axis 'sp' expected {NAME!r}: call model.set_attn_implementation({NAME!r})."
        )
    if kwargs.get("cu_seq_lens_q") is None:
        raise LigerDistError(
            f"{name} was called without cu_seq_lens_q on a mesh with an axis 'sp', so that this rank does not know the "
            "full sequences; shard the batch by liger_dist.shard_sequence(batch, mesh). Generation is not available on "
            "such a mesh."
        )


def _reason(model: nn.Module, decoder: nn.Module, layers: Any) -> str | None:
    against = reason_against(model, decoder)
    if against is not None:
        return f"it keeps its own attention implementation ({against})"
    if any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in decoder.named_parameters()):
        return "its attention has sinks"
    config: Any = decoder.config
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind not in _KINDS_OF_LAYERS}
    if kinds or getattr(config, "attention_chunk_size", None) is not None:
        return f"it has layers that mix tokens outside attention ({', '.join(sorted(kinds)) or 'chunks'})"
    for name, module in (pair for layer in layers for pair in layer.named_modules()):
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            return f"its layers mix tokens by a {type(module).__name__} ({name})"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention is not causal"
    learned = [name for name, module in decoder.named_modules() if _is_position_embedding(name, module)]
    if learned or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return f"it does not compute positions from position_ids alone ({learned[0] if learned else 'it takes none'})"
    has_windows = getattr(config, "use_sliding_window", True) and isinstance(
        getattr(config, "sliding_window", None), int
    )
    if has_windows and not any(map(_passes_window, decoder.modules())):
        return "its layers do not pass sliding_window to attention, and a mask covers only the rank's own tokens"
    rope = getattr(config, "rope_parameters", None) or {}
    used = [kind for kind in _LENGTH_DEPENDENT if kind in str(rope)]
    return f"its RoPE type ({used[0]}) depends on the sequence length, and a rank has only its shard" if used else None


def _is_position_embedding(name: str, module: nn.Module) -> bool:
    last = name.rsplit(".", 1)[-1].lower()
    return isinstance(module, nn.Embedding) and ("pos" in last or last == "wpe")


def _passes_window(module: nn.Module) -> bool:
    """True if the code of its forward passes ``sliding_window`` as a keyword."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = () if code is None else code.co_consts
    return any(isinstance(constant, tuple) and "sliding_window" in constant for constant in names)


def _checked(batch: Mapping[str, Any]) -> Tensor:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise LigerDistError(
            f"input_ids is {type(ids).__name__ if ids is None else tuple(ids.shape)}; expected a tensor [B, S]."
        )
    for name, value in batch.items():
        if isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value):
            raise LigerDistError(
                f"{name} holds tensors, which shard_sequence does not shard; shard them after this call."
            )
        if not isinstance(value, Tensor) or name in _OF_SEQUENCES:
            continue
        if name in _OF_TOKENS and value.shape != ids.shape:
            raise LigerDistError(f"{name} has the shape {tuple(value.shape)}; expected {tuple(ids.shape)}, input_ids'.")
        if name not in _OF_TOKENS and value.numel() > 1:
            raise LigerDistError(
                f"{name} of shape {tuple(value.shape)} is in the batch, and shard_sequence shards only "
                f"{', '.join(_OF_TOKENS)}; shard it after this call."
            )
    return ids


def _shifted(batch: Mapping[str, Any]) -> Tensor | None:
    shifted: Tensor | None = batch.get("shift_labels")
    labels = batch.get("labels")
    if shifted is None and labels is not None:
        shifted = F.pad(labels[:, 1:], (0, 1), value=batch.get("ignore_index", IGNORED))
    return shifted
