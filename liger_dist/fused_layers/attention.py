"""Attention without a dense mask for packed and padded sequences: ``attn_implementation="liger_dist"``.

:func:`register_attention` registers an attention function and a mask function with transformers. The mask function
returns a :class:`DocumentMask` instead of a mask ``[B, 1, S, S]``: the lengths of the documents, read once per
micro-batch. The attention function gives them to ``torch.nn.attention.varlen.varlen_attn`` (FlashAttention-2, Dao 2023,
arXiv:2307.08691).

[Note: which implementation computes a call]

- Neither packed nor padded: the function that ``ALL_ATTENTION_FUNCTIONS["sdpa"]`` holds at that time. DeepSpeed's
  Ulysses replaces that entry; as long as another function stands there, it computes every call.
- Packed, padded, or with a window shorter than the sequence: ``varlen_attn`` in bf16 and fp16 on GPUs; elsewhere, and
  with dropout or a second head size, one ``scaled_dot_product_attention`` for each document.
- On a mesh with an axis "sp": any of the above, on all tokens of a part of the heads.
- With a position bias: "sdpa" with a dense mask. With soft-capped scores or sinks, and where attention weights are
  asked for: the eager function of the model's own file with a dense mask.
- Masks that are not causal within documents (images, encoders), and queries with a cache: transformers' own mask.

Tokens that a 2-D mask excludes get zeros, as with FlashAttention in transformers.

Legend: B rows, S tokens of a row, H heads, D head size.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from liger_dist.errors import LigerDistError
from liger_dist.model.torch_modes import untraced
from liger_dist.sharding.sequence_parallel import SequenceAxis, gather_tokens, scatter_tokens, sequence_axis_of

NAME = "liger_dist"
PADDING_SEGMENT = 128
"""tokens; padding is cut into documents of this length, which cost next to nothing"""
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
EAGER_KEYWORDS = ("softcap", "s_aux", "sinks")
"""of attention functions: what neither ``varlen_attn`` nor ``scaled_dot_product_attention`` computes"""
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""torch 2.11 takes fewer key heads without being asked"""
_DOCUMENTS = "_liger_dist_documents"
RESTARTS_BESIDE_MASK = (
    "position_ids restart inside a row that has a 2-D attention_mask: transformers takes the row for one text, so that "
    "its documents attend to each other. Leave attention_mask out where documents are packed."
)


class DocumentMask:
    """Causal attention within documents, for one micro-batch; layers get it as their ``attention_mask``.

    No dataclass: FSDP takes those apart, and gives each layer a copy.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        cu_seq_lens: Tensor,
        *,
        rows: int,
        window: int | None = None,
        is_causal: bool = True,
        valid: Tensor | None = None,
        is_from_mask: bool = False,
    ) -> None:
        self.lengths = lengths
        """tokens of each document, row after row; padding counts as documents"""
        self.cu_seq_lens = cu_seq_lens
        """int32 ``[documents + 1]``, on the device of the attention"""
        self.rows = rows
        self.window = window
        """tokens that a token attends to, itself included; None for all of its document"""
        self.is_causal = is_causal
        self.valid = valid
        """bool ``[B, S]``: the 2-D mask that it was made from; None without padding"""
        self.checks_positions = is_from_mask
        """True if it was made from a 2-D mask, until positions have been compared with it"""
        # Once, and not from ``lengths`` in every layer: compiled layers would be compiled again for other lengths.
        self.max_length = max(lengths)
        has_window = window is not None and window < self.max_length
        self.is_plain = len(lengths) == rows and min(lengths) == self.max_length and not has_window and is_causal
        """True if every row is one document, which it attends to without a window"""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of the dense mask, which transformers reads where a model makes masks twice."""
        length = sum(self.lengths) // self.rows
        return self.rows, 1, length, length

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> DocumentMask:
        """Itself: ``generate`` asks every mask that it has made."""
        return self

    def __getitem__(self, index: Any) -> DocumentMask | Tensor:
        """Itself if ``index`` leaves all of the dense mask, else that part of it. Decoders whose last layers share keys
        and values give those layers the last tokens alone, ``mask[:, :, slice(-logits_to_keep, None), :]``."""
        parts = index if isinstance(index, tuple) else (index,)
        is_all = len(parts) <= self.ndim and all(
            isinstance(part, slice) and part.indices(size) == (0, size, 1)
            for part, size in zip(parts, self.shape, strict=False)
        )
        return self if is_all else self.dense()[index]

    @untraced
    def dense(self) -> Tensor:
        """Bool ``[B, 1, S, S]``: True where a query attends to a key."""
        device = self.cu_seq_lens.device
        lengths = torch.tensor(self.lengths, device=device)
        document = torch.arange(len(self.lengths), device=device).repeat_interleave(lengths).view(self.rows, 1, -1)
        allowed = document.transpose(1, 2) == document
        position = torch.arange(allowed.shape[-1], device=device)
        if self.is_causal:
            allowed = allowed & _causal(position[:, None], position, self.window)
        return (allowed if self.valid is None else allowed & self.valid[:, None])[:, None]


def _causal(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)


def register_attention() -> None:
    """Registers ``attn_implementation="liger_dist"`` with transformers, for models that are loaded with it.

    :func:`liger_dist.wrap` does that itself, and selects it for the models that it wraps.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, document_mask)


def document_mask(**arguments: Any) -> DocumentMask | Tensor | None:
    """The mask function: the documents of a micro-batch, or the mask that transformers makes for "sdpa".

    Args:
        arguments: those that transformers gives to mask functions.

    Returns:
        None for causal attention over whole rows, unless its rows may be sliced.
    """
    given = arguments.get("attention_mask")
    if isinstance(given, DocumentMask):
        return given
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    own: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    of_transformers = arguments
    arguments = _by_length(arguments)
    is_simple, is_sliced = arguments.get("allow_is_causal_skip", True), _is_sliced(arguments)
    if is_sliced:
        of_transformers = of_transformers | {"allow_is_causal_skip": False}
    if not _has_documents(arguments):
        return own(**of_transformers)
    length, window = arguments["q_length"], arguments.get("local_size")
    has_window = window is not None and window < length
    if is_simple and not has_window and given is None:
        rows = arguments["batch_size"]
        return _mask_of((length,) * rows, arguments["device"], rows=rows) if is_sliced else None
    mask = _read(arguments)
    # A model that forbids None needs a tensor, to change it.
    return own(**of_transformers) if mask is None or (mask.is_plain and not is_simple) else mask


def _by_length(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` by the names that transformers gives them now; its first 5.x releases give the positions of the
    queries instead of their number and device. Where all keys are queries, the first position is 0."""
    positions = arguments.get("cache_position")
    if positions is None or "q_length" in arguments:
        return arguments
    return arguments | {"q_length": positions.shape[0], "device": positions.device}


def _is_sliced(arguments: dict[str, Any]) -> bool:
    """True if the last layers of the decoder share keys and values: they may get the last tokens alone, with their rows
    of the mask; None would stand for the first tokens."""
    config: Any = arguments.get("config")
    configs = (config, getattr(config, "text_config", None))
    shared = any(getattr(one, "num_kv_shared_layers", None) for one in configs)
    return shared and arguments.get("q_length") != 1


def _has_documents(arguments: dict[str, Any]) -> bool:
    """True if the queries are the keys of this call, and the mask is computed from indices."""
    length, padding = arguments.get("q_length"), arguments.get("attention_mask")
    sizes = (arguments.get("kv_length"), arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
    has_no_cache = isinstance(length, int) and length > 1 and all(isinstance(size, int) for size in sizes)
    if not has_no_cache or sizes != (length, 0, 0) or (padding is not None and padding.shape[-1] != length):
        return False
    if arguments.get("local_size") is not None and arguments["local_size"] < 1:
        return False
    is_indexed = not arguments.get("use_vmap", False) and "allow_is_bidirectional_skip" not in arguments
    return is_indexed and not torch.compiler.is_compiling() and not is_replaced()


def is_replaced() -> bool:
    """True if another package computes the attention of "sdpa", such as DeepSpeed's sequence parallelism."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _of_sdpa() is not sdpa_attention_forward


def _of_sdpa() -> AttentionFunction:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function


def _read(arguments: dict[str, Any]) -> DocumentMask | None:
    """Reads where documents begin, from the neighbours that a token may attend to: ``O(B * S)`` and one copy to the
    host. None if the mask is another one."""
    mask_function: Callable[..., Tensor] = arguments["mask_function"]
    rows, length, device = arguments["batch_size"], arguments["q_length"], arguments["device"]
    window, padding = arguments.get("local_size"), arguments.get("attention_mask")
    row = torch.arange(rows, device=device)[:, None]
    head = torch.zeros(1, 1, dtype=row.dtype, device=device)
    position = torch.arange(length, device=device)[None]

    def attends(query: Tensor, key: Tensor) -> Tensor:
        return mask_function(row, head, query, key).expand(rows, length)

    begins = ~attends(position, (position - 1).clamp(min=0)) | (position == 0)
    first = torch.where(begins, position, 0).cummax(1).values
    if window is not None:
        first = torch.maximum(first, position - window + 1)
    is_last = position == length - 1
    ahead = attends(position, (position + 1).clamp(max=length - 1)) & ~is_last
    before = attends(position, (first - 1).clamp(min=0)) & (first > 0)
    is_known = attends(position, first) & ~ahead & ~before
    valid = torch.ones_like(begins) if padding is None else padding.bool()
    begins, valid_on_host, is_known = torch.stack([begins, valid, is_known]).cpu()
    if not is_known.all():
        return None
    lengths = document_lengths(begins, valid_on_host)
    if lengths is None:
        return None
    window = window if window is not None and window < length else None
    has_padding = padding is not None and not bool(valid_on_host.all())
    facts = {"valid": valid if has_padding else None, "is_from_mask": padding is not None}
    return _mask_of(lengths, device, rows=rows, window=window, **facts)


def document_lengths(begins: Tensor, valid: Tensor) -> tuple[int, ...] | None:
    """The documents of every row, and its padding in short ones; bool ``[B, S]`` on the host. None if padding lies
    inside a document."""
    changes = begins.clone()
    changes[:, 1:] |= valid[:, 1:] != valid[:, :-1]
    lengths: list[int] = []
    for row in range(len(begins)):
        starts = changes[row].nonzero()[:, 0].tolist()
        has_text = False
        for start, end in pairwise([*starts, begins.shape[1]]):
            has_text = has_text and not begins[row, start]
            if valid[row, start]:
                if has_text:
                    return None
                has_text = True
                lengths.append(end - start)
            else:
                full, rest = divmod(end - start, PADDING_SEGMENT)
                lengths += [PADDING_SEGMENT] * full + [rest] * (rest > 0)
    return tuple(lengths)


def _mask_of(lengths: tuple[int, ...], device: torch.device, *, rows: int, **facts: Any) -> DocumentMask:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    on_device = ends.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else ends
    return DocumentMask(lengths, on_device, rows=rows, **facts)


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
    """The attention function; see the note above for what computes which call.

    Args:
        query: ``[B, H, S, D]``; ``key`` and ``value`` may have fewer heads.
        kwargs: those of transformers' attention functions: ``sliding_window``, ``is_causal``, ``position_ids``,
            ``cu_seq_lens_q`` ``[documents + 1]``.

    Returns:
        ``[B, S, H, D]``, and attention weights where the eager function computes them.

    Raises:
        LigerDistError: ``cu_seq_lens_q`` does not fit; soft-capped scores in a model without an eager function.
    """
    axis = sequence_axis_of(module)
    if axis is not None:
        return _sequence_parallel(axis, module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    documents, mask = None, None
    if isinstance(attention_mask, DocumentMask):
        documents = attention_mask
    elif attention_mask is not None:
        # As the eager functions of transformers 5.0: some decoders make a mask that is wider than the keys.
        mask = attention_mask[..., : key.shape[2]]
    if kwargs.get("cu_seq_lens_q") is not None and _takes_lengths(documents, mask, query, key):
        documents = _given(module, query, kwargs, documents)
    elif documents is not None and documents.checks_positions and not torch.compiler.is_compiling():
        _check_positions(documents, kwargs.get("position_ids"))
    if kwargs.get("output_attentions") or any(kwargs.get(name) is not None for name in EAGER_KEYWORDS):
        mask = _dense(module, mask if documents is None else documents.dense(), query, key)
        return _eager_of(module)(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    if documents is None or documents.is_plain or kwargs.get("position_bias") is not None:
        if documents is not None and not documents.is_plain:
            mask = documents.dense()
        return _of_sdpa()(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return _of_documents(query, key, value, documents, scaling, dropout), None


def _of_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: DocumentMask, scaling: float | None, dropout: float
) -> Tensor:
    """``[B, S, H, D]``: attention within documents."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if documents.valid is not None:
        value = value.masked_fill(~documents.valid[:, None, :, None], 0.0)
    if _has_varlen(query, value, dropout):
        return _varlen(query, key, value, documents, scaling)
    return _one_by_one(query, key, value, documents, scaling, dropout)


def _sequence_parallel(
    axis: SequenceAxis,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_mask: DocumentMask | Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """``[B, s, H, D]``: attention over full sequences that are sharded on ``axis``, by two all-to-alls. Document
    boundaries come from ``cu_seq_lens_q``; ``own_mask``, of this rank's tokens, may only be causal.

    Raises:
        LigerDistError: the model asks for another mask or for attention weights, or does not pass ``cu_seq_lens_q``.
    """
    if kwargs.get("cu_seq_lens_q") is None:
        raise LigerDistError(
            f"{type(module).__name__} got no cu_seq_lens_q: the model's layers do not pass it. Leave out the axis 'sp'."
        )
    if isinstance(own_mask, Tensor):
        raise LigerDistError(
            f"{type(module).__name__} got a mask of shape {tuple(own_mask.shape)}, of this rank's tokens alone; on a "
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
        output, _ = _of_sdpa()(module, query, key, value, None, scaling=scaling, dropout=dropout, **kwargs)
    else:
        output = _of_documents(query, key, value, documents, scaling, dropout)
    return scatter_tokens(output, axis)


def _takes_lengths(documents: DocumentMask | None, mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """True if ``cu_seq_lens_q`` separates documents: no padding beside it, no cache, as with FlashAttention."""
    is_masked = mask is not None or (documents is not None and documents.valid is not None)
    return not is_masked and query.shape[2] == key.shape[2] and not is_replaced()


@untraced
def _given(module: nn.Module, query: Tensor, kwargs: dict[str, Any], found: DocumentMask | None) -> DocumentMask:
    """The documents of ``cu_seq_lens_q``, read once for all layers: they are kept on that tensor.

    Args:
        found: what the mask function found: its window counts, and its boundaries too (of chunks).
    """
    given: Tensor = kwargs["cu_seq_lens_q"]
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = kwargs.get("sliding_window") if found is None else found.window
    window = window if is_causal else None
    version = 0 if given.is_inference() else given._version
    masks: dict[object, DocumentMask]
    kept_version, masks = vars(given).get(_DOCUMENTS, (None, {}))
    if kept_version != version:
        masks = {}
        vars(given)[_DOCUMENTS] = version, masks
    others = () if found is None else found.lengths
    key = (query.device, query.shape[0], query.shape[2], others, window, is_causal)
    if key not in masks:
        masks[key] = _read_lengths(given, query, others, window=window, is_causal=is_causal)
    return masks[key]


def _read_lengths(given: Tensor, query: Tensor, others: tuple[int, ...], **facts: Any) -> DocumentMask:
    """
    Args:
        others: lengths of documents whose boundaries count as well.

    Raises:
        LigerDistError: they do not end at the number of tokens.
    """
    read = [int(length) for length in given.diff().tolist()]
    rows, total = query.shape[0], query.shape[0] * query.shape[2]
    if sum(read) != total or min(read, default=0) < 0:
        raise LigerDistError(
            f"cu_seq_lens_q ends at {sum(read)} but the micro-batch has {total} tokens; expected the sums of the "
            "lengths of all documents, from 0 to the number of tokens, padding included."
        )
    ends = sorted({0, *accumulate(read), *accumulate(others)})
    lengths = tuple(end - start for start, end in pairwise(ends))
    if given.device == query.device and list(lengths) == read:
        return DocumentMask(lengths, given.to(torch.int32), rows=rows, **facts)
    return _mask_of(lengths, query.device, rows=rows, **facts)


@untraced
def _check_positions(documents: DocumentMask, position_ids: Tensor | None) -> None:
    """Warns of positions that restart inside the text of a row with a 2-D mask."""
    documents.checks_positions = False
    rows, _, _, length = documents.shape
    if position_ids is None or position_ids.shape != (rows, length):
        return  # Models make positions for one row; positions of images have three numbers.
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if documents.valid is not None:
        restarts = restarts & documents.valid[:, 1:] & documents.valid[:, :-1]
    if restarts.any():
        warnings.warn(RESTARTS_BESIDE_MASK, stacklevel=2)


def _has_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    size = query.shape[-1]
    fits = query.dtype in VARLEN_DTYPES and size == value.shape[-1] and size % 8 == 0 and size <= MAX_HEAD_SIZE
    return query.is_cuda and fits and dropout == 0.0


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: DocumentMask, scaling: float | None) -> Tensor:
    """``varlen_attn`` over the tokens of all rows."""
    rows, heads, length, _ = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    ends, longest = documents.cu_seq_lens, documents.max_length
    left = -1 if documents.window is None else documents.window - 1
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
    """One ``scaled_dot_product_attention`` for each document."""
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
                attn_mask=_causal(position[:, None], position, documents.window) if has_window else None,
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
    """The mask of the eager function: zero, or the smallest number of the dtype."""
    if mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        position = torch.arange(key.shape[2], device=query.device)
        mask = _causal(position[: query.shape[2], None], position, None)[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    dense = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    return dense.masked_fill(~mask, torch.finfo(query.dtype).min)


def _eager_of(module: nn.Module) -> AttentionFunction:
    """The eager attention of the file that the module's class is defined in.

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
