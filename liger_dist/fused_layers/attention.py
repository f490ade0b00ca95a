"""Attention without a dense mask for packed and padded sequences: ``attn_implementation="liger_dist"``.

:func:`register_attention` registers an attention function and a mask function with transformers. The mask function
returns a :class:`DocumentMask` instead of a mask ``[B, 1, S, S]``: the lengths of the documents, read once per
micro-batch. The attention function passes them to ``torch.nn.attention.varlen.varlen_attn`` (FlashAttention-2, Dao
2023, arXiv:2307.08691).

[Note: which implementation computes a call]

- Neither packed nor padded: the function that ``ALL_ATTENTION_FUNCTIONS["sdpa"]`` holds at that time. DeepSpeed's
  Ulysses replaces that entry; a replaced entry computes every call.
- Packed, padded, or with a window shorter than the sequence: ``varlen_attn`` in bf16 and fp16 on GPUs; elsewhere, and
  with dropout or a second head size, one ``scaled_dot_product_attention`` for each document.
- On a mesh with an axis "sp": any of the above, on all tokens of a part of the heads.
- With sinks: FlashAttention in bf16 and fp16 on GPUs (:mod:`.sink_attention`).
- With a position bias: "sdpa" with a dense mask. With soft-capped scores, sinks elsewhere, and where attention weights
  are requested: the eager function of the model's file with a dense mask.
- Masks of other kinds than within documents (images, encoders), and queries with a cache: transformers' mask.

Tokens that a 2-D mask excludes get zeros, as with FlashAttention in transformers.

Legend: B rows, S tokens of a row, H heads, D head size.
"""

from __future__ import annotations

import sys
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from liger_dist.errors import LigerDistError
from liger_dist.model.documents import LENGTHS, current_call, read_lengths
from liger_dist.model.torch_modes import untraced
from liger_dist.sharding.sequence_parallel import SequenceAxis, gather_tokens, scatter_tokens, sequence_axis_of
from liger_dist.trials.model_run import BY_LENGTHS, CannotRunError

from .document_mask import (
    AttentionFunction,
    DocumentMask,
    causal,
    document_mask,
    is_replaced,
    mask_of,
    mask_with_documents,
    notes_on,
    sdpa_function,
    was_eager,
)
from .sink_attention import sink_attention
from .swap import is_of_framework

NAME = "liger_dist"
MASKED = {implementation: f"{NAME}_{implementation}" for implementation in ("eager", "sdpa")}
"""by a model's original implementation, the one with the same attention and masks of packed documents"""
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
SINKS = "s_aux"
EAGER_KEYWORDS = ("softcap", SINKS, "sinks")
"""keywords of attention functions that neither ``varlen_attn`` nor ``scaled_dot_product_attention`` computes"""
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""torch 2.11 accepts fewer key heads without this option"""


def register_attention() -> None:
    """Registers ``attn_implementation="liger_dist"`` with transformers, for models that are loaded with it.

    :func:`liger_dist.wrap` does so too, and selects it for the models that it wraps.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, document_mask)
    for implementation, name in MASKED.items():
        AttentionInterface.register(name, _eager_attention if implementation == "eager" else _sdpa_attention)
        AttentionMaskInterface.register(name, partial(mask_with_documents, implementation))
    AttentionInterface.register(BY_LENGTHS, _tried_lengths)


def _eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return _eager_of(module)(module, *args, **kwargs)


def _sdpa_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return sdpa_function()(module, *args, **kwargs)


def _tried_lengths(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands for FlashAttention in a trial: reads whether lengths of packed documents arrive."""
    call = current_call()
    is_packed = call is not None and call.documents is not None and call.documents.is_packed
    if is_packed and kwargs.get(LENGTHS) is None:
        raise CannotRunError(f"{type(module).__name__} gets no {LENGTHS}")
    # FlashAttention's results are contiguous, and some models take views of them.
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention; [Note: which implementation computes a call] lists the cases.

    Args:
        query: ``[B, H, S, D]``; ``key`` and ``value`` may have fewer heads.
        kwargs: those of transformers' attention functions: ``sliding_window``, ``is_causal``, ``position_ids``,
            ``cu_seq_lens_q`` ``[documents + 1]``.

    Returns:
        ``[B, S, H, D]``, and attention weights where the eager function computes them.

    Raises:
        LigerDistError: ``cu_seq_lens_q`` does not fit; soft-capped scores in a model without an eager function;
            ``is_causal`` of the module was set to False.
    """
    if vars(module).get("is_causal") is False and kwargs.get("is_causal") is None:
        raise LigerDistError(
            f"is_causal of a {type(module).__name__} is False, which eager attention does not read and others do; set "
            "it before liger_dist.wrap, or select the attention with model.set_attn_implementation."
        )
    axis = sequence_axis_of(module)
    if axis is not None:
        return _sequence_parallel(axis, module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    documents, mask = None, None
    if isinstance(attention_mask, DocumentMask):
        documents = attention_mask
    elif attention_mask is not None:
        # As the eager functions of transformers 5.0: some decoders build a mask that is wider than the keys.
        mask = attention_mask[..., : key.shape[2]]
    if kwargs.get(LENGTHS) is not None and _takes_lengths(documents, mask, query, key):
        documents = _given(module, query, kwargs, documents)
    if mask is None and _has_only_sinks(query, key, value, dropout, kwargs):
        documents = _whole_rows(query) if documents is None else documents
        if documents.is_causal:
            return _of_documents(query, key, value, documents, scaling, dropout, sinks=kwargs[SINKS]), None
    if (
        kwargs.get("output_attentions")
        or _gives_weights(module)
        or any(kwargs.get(name) is not None for name in EAGER_KEYWORDS)
        # What replaces that of "sdpa" is not for a model that was eager.
        or (is_replaced() and was_eager(getattr(module, "config", None)))
    ):
        mask = _dense(module, mask if documents is None else documents.dense(), query, key)
        return _eager_of(module)(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    if documents is None or documents.is_plain or kwargs.get("position_bias") is not None:
        if documents is not None and not documents.is_plain:
            mask = documents.dense()
        return sdpa_function()(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return _of_documents(query, key, value, documents, scaling, dropout), None


def _gives_weights(module: nn.Module) -> bool:
    """True if a forward hook of a user may read the weights of attention that was eager."""
    everywhere = nn.modules.module._global_forward_hooks
    if not (module._forward_hooks or everywhere or "forward" in vars(module)):
        return False
    if not was_eager(getattr(module, "config", None)):
        return False
    readers = [*module._forward_hooks.values(), *everywhere.values(), *filter(None, [vars(module).get("forward")])]
    return any(not is_of_framework(reader) and not _is_of_transformers(reader) for reader in readers)


def _is_of_transformers(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")


def _has_only_sinks(query: Tensor, key: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]) -> bool:
    """True for attention of the tokens of a call to themselves that differs from plain attention by sinks alone, on a
    GPU."""
    unsupported = ("output_attentions", "position_bias", *(name for name in EAGER_KEYWORDS if name != SINKS))
    if kwargs.get(SINKS) is None or any(kwargs.get(name) not in (None, False) for name in unsupported):
        return False
    is_of_call = query.shape[2] == key.shape[2] > 1 and not is_replaced()
    return is_of_call and _has_varlen(query, value, dropout, _dtype_of(query))


def _whole_rows(query: Tensor) -> DocumentMask:
    """Computes one text in each row."""
    rows, _, length, _ = query.shape
    ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
    return DocumentMask((length,) * rows, ends, rows=rows)


def _dtype_of(query: Tensor) -> torch.dtype:
    """Returns the dtype that attention computes in: autocast's, or that of the queries."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _of_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: DocumentMask,
    scaling: float | None,
    dropout: float,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention within documents, ``[B, S, H, D]``.

    Args:
        sinks: ``[H]``; on a GPU alone.
    """
    dtype = _dtype_of(query)
    if dtype != query.dtype:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if documents.valid is not None:
        value = value.masked_fill(~documents.valid[:, None, :, None], 0.0)
    if _has_varlen(query, value, dropout, dtype):
        return _varlen(query, key, value, documents, scaling, sinks)
    return _one_by_one(query, key, value, documents, scaling, dropout)


def _sequence_parallel(
    axis: SequenceAxis,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local_mask: DocumentMask | Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Computes attention ``[B, s, H, D]`` over full sequences that are sharded on ``axis``, by two all-to-alls.
    Document boundaries come from ``cu_seq_lens_q``; ``local_mask``, of this rank's tokens, may only be causal.

    Raises:
        LigerDistError: the model needs another mask or attention weights, or does not pass ``cu_seq_lens_q``.
    """
    if kwargs.get("cu_seq_lens_q") is None:
        raise LigerDistError(
            f"{type(module).__name__} got no cu_seq_lens_q: the model's layers do not pass it. Leave out the axis 'sp'."
        )
    if isinstance(local_mask, Tensor):
        raise LigerDistError(
            f"{type(module).__name__} got a mask of shape {tuple(local_mask.shape)}, of this rank's tokens alone; on a "
            "mesh with an axis 'sp' attention is causal within documents and windows. Leave out the axis."
        )
    if kwargs.get("output_attentions") or any(kwargs.get(name) is not None for name in EAGER_KEYWORDS):
        raise LigerDistError(
            f"{type(module).__name__} asks for attention weights, soft-capped scores or sinks, which are not available "
            "on a mesh with an axis 'sp'; leave them out, or leave out the axis."
        )
    query, key, value = gather_tokens(query, key, value, axis)
    documents = _given(module, query, kwargs, None)
    if documents.is_plain:
        output, _ = sdpa_function()(module, query, key, value, None, scaling=scaling, dropout=dropout, **kwargs)
    else:
        output = _of_documents(query, key, value, documents, scaling, dropout)
    return scatter_tokens(output, axis)


def _takes_lengths(documents: DocumentMask | None, mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """True if ``cu_seq_lens_q`` separates documents: no padding mask, no cache, as with FlashAttention; and no call of
    a wrapped model, which has read them."""
    is_masked = mask is not None or (documents is not None and (documents.valid is not None or documents.is_of_call))
    return not is_masked and query.shape[2] == key.shape[2] and not is_replaced()


@untraced
def _given(module: nn.Module, query: Tensor, kwargs: dict[str, Any], found: DocumentMask | None) -> DocumentMask:
    """Reads the documents of ``cu_seq_lens_q``, once for all layers: they are cached on that tensor.

    Args:
        found: documents of the mask function: its window applies, and its boundaries too (of chunks).
    """
    given: Tensor = kwargs["cu_seq_lens_q"]
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = kwargs.get("sliding_window") if found is None else found.window
    window = window if is_causal else None
    masks: dict[object, DocumentMask] = notes_on(given)
    further = () if found is None else found.lengths
    key = (query.device, query.shape[0], query.shape[2], further, window, is_causal)
    if key not in masks:
        masks[key] = _read_lengths(given, query, further, window=window, is_causal=is_causal)
    return masks[key]


def _read_lengths(given: Tensor, query: Tensor, further: tuple[int, ...], **facts: Any) -> DocumentMask:
    """Builds the documents' mask from cumulative lengths.

    Args:
        further: lengths of documents, further boundaries.

    Raises:
        LigerDistError: the lengths do not end at the number of tokens.
    """
    rows = query.shape[0]
    read = read_lengths(given, rows * query.shape[2])
    ends = sorted({0, *read, *accumulate(further)})
    lengths = tuple(end - start for start, end in pairwise(ends))
    if given.device == query.device and ends == read:
        return DocumentMask(lengths, given.to(torch.int32), rows=rows, **facts)
    return mask_of(lengths, query.device, rows=rows, **facts)


def _has_varlen(query: Tensor, value: Tensor, dropout: float, dtype: torch.dtype) -> bool:
    size = query.shape[-1]
    fits = dtype in VARLEN_DTYPES and size == value.shape[-1] and size % 8 == 0 and size <= MAX_HEAD_SIZE
    return query.is_cuda and fits and dropout == 0.0


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: DocumentMask,
    scaling: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Runs FlashAttention over the tokens of all rows."""
    rows, heads, length, _ = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    ends, longest = documents.cu_seq_lens, documents.max_length
    left = -1 if documents.window is None else documents.window - 1
    if sinks is not None:
        of_sinks = sink_attention(q, k, v, sinks, (ends, longest, left), scaling)
        return of_sinks.view(rows, length, heads, -1)
    result = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0) if documents.is_causal else (-1, -1),
        **_GROUPED,
    )
    assert isinstance(result, Tensor)
    return result.view(rows, length, heads, -1)


@untraced
def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, documents: DocumentMask, scaling: float | None, dropout: float
) -> Tensor:
    """Runs one ``scaled_dot_product_attention`` for each document."""
    rows, heads, length, _ = query.shape
    parts = (t.transpose(0, 1).flatten(1, 2).split(documents.lengths, 1) for t in (query, key, value))
    results = []
    for q, k, v in zip(*parts, strict=True):
        position = torch.arange(q.shape[1], device=q.device)
        has_window = documents.window is not None and documents.window < q.shape[1]
        results.append(
            F.scaled_dot_product_attention(
                q[None],
                k[None],
                v[None],
                attn_mask=causal(position[:, None], position, documents.window) if has_window else None,
                dropout_p=dropout,
                is_causal=documents.is_causal and not has_window,
                scale=scaling,
                enable_gqa=key.shape[1] != heads,
            )
        )
    joined: Tensor = torch.cat(results, 2)[0]
    by_row: Tensor = joined.unflatten(1, (rows, length)).permute(1, 2, 0, 3)
    return by_row.contiguous()


def _dense(module: nn.Module, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Builds the mask of the eager function: zero, or the smallest value of the dtype."""
    # A mask function leaves out the mask of attention in both directions as well.
    is_causal = getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True)
    if mask is None and query.shape[2] > 1 and is_causal:
        position = torch.arange(key.shape[2], device=query.device)
        mask = causal(position[: query.shape[2], None], position, None)[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    dense = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    return dense.masked_fill(~mask, torch.finfo(query.dtype).min)


def _eager_of(module: nn.Module) -> AttentionFunction:
    """Returns the eager attention function of the file that defines the module's class.

    Raises:
        LigerDistError: there is none.
    """
    for cls in type(module).__mro__:
        found: AttentionFunction | None = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise LigerDistError(
        f"{type(module).__name__} asks for soft-capped scores, sinks or attention weights, and its "
        'file has no eager_attention_forward; build the model with attn_implementation="eager".'
    )
