"""Masks of packed and padded sequences: the lengths of the documents instead of a dense mask ``[B, 1, S, S]``.

Legend: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist.model.documents import Documents, current_call
from liger_dist.model.torch_modes import in_backward, is_captured, untraced

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
_NOTES = "_liger_dist_notes"
PADDING_SEGMENT = 128
"""tokens of a padding document; padding is cut into documents of this length, which are nearly free"""


class DocumentMask:
    """Attention within documents, causal or in both directions, for one micro-batch; layers get it as their
    ``attention_mask``.

    No dataclass: FSDP rebuilds those, and passes each layer a copy.
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
        is_of_call: bool = False,
    ) -> None:
        self.lengths = lengths
        """tokens of each document, row after row; padding counts as documents"""
        self.cu_seq_lens = cu_seq_lens
        """int32 ``[documents + 1]``, on the device of the attention"""
        self.rows = rows
        self.window = window
        """tokens that a token attends to, including itself; None for all of its document"""
        self.is_causal = is_causal
        self.valid = valid
        """bool ``[B, S]``: the 2-D mask that it was built from; None without padding"""
        self.is_of_call = is_of_call
        """True if it was built from the documents that the call of a wrapped model has read"""
        # Once, and not from ``lengths`` in every layer: compiled layers would be compiled again for other lengths.
        self.max_length = max(lengths)
        has_window = window is not None and window < self.max_length
        self.is_plain = len(lengths) == rows and min(lengths) == self.max_length and not has_window and is_causal
        """True if every row is one document without a window"""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the dense mask, which transformers reads where a model builds masks twice."""
        length = sum(self.lengths) // self.rows
        return self.rows, 1, length, length

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> DocumentMask:
        """Returns itself: ``generate`` calls it on every mask that it has built."""
        return self

    def __getitem__(self, index: Any) -> DocumentMask | Tensor:
        """Returns itself if ``index`` selects all of the dense mask, otherwise that part of it. Decoders whose last
        layers share keys and values pass those layers only the last tokens, ``mask[:, :, slice(-logits_to_keep, None),
        :]``."""
        parts = index if isinstance(index, tuple) else (index,)
        is_all = len(parts) <= self.ndim and all(
            isinstance(part, slice) and part.indices(size) == (0, size, 1)
            for part, size in zip(parts, self.shape, strict=False)
        )
        return self if is_all else self.dense()[index]

    @untraced
    def dense(self) -> Tensor:
        """Builds a bool mask ``[B, 1, S, S]``: True where a query attends to a key."""
        device = self.cu_seq_lens.device
        lengths = torch.tensor(self.lengths, device=device)
        document = torch.arange(len(self.lengths), device=device).repeat_interleave(lengths).view(self.rows, 1, -1)
        allowed = document.transpose(1, 2) == document
        position = torch.arange(allowed.shape[-1], device=device)
        if self.is_causal:
            allowed = allowed & causal(position[:, None], position, self.window)
        return (allowed if self.valid is None else allowed & self.valid[:, None])[:, None]


def causal(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)


@untraced
def document_mask(**arguments: Any) -> DocumentMask | Tensor | None:
    """Returns the documents of a micro-batch, or the mask that transformers builds for "sdpa": the mask function.

    Args:
        arguments: those that transformers passes to mask functions.

    Returns:
        None for causal attention over full rows, unless the rows may be sliced.
    """
    given = arguments.get("attention_mask")
    if isinstance(given, DocumentMask):
        return given
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if _masks_are_replaced():
        implementation = "eager" if was_eager(arguments.get("config")) else "sdpa"
        return cast(Tensor | None, mask_with_documents(implementation, **arguments))
    original: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if _BOTH_DIRECTIONS in arguments:
        return _of_both_directions(arguments)
    of_transformers = arguments
    arguments = _by_length(arguments)
    documents = _documents_in(arguments)
    is_simple, is_sliced = arguments.get("allow_is_causal_skip", True), _is_sliced(arguments)
    is_packed = documents is not None and documents.is_packed
    if is_sliced or is_packed:
        of_transformers = of_transformers | {"allow_is_causal_skip": False}
    # A chunked mask may be skipped as a causal one in short rows.
    is_plain = _is_causal_within_documents(arguments["mask_function"])
    if documents is not None and (is_packed or given is not None) and is_plain and _has_documents(arguments):
        mask = _of_call(documents, arguments)
        if mask is not None and not (mask.is_plain and not is_simple and not is_packed):
            return mask
    if documents is not None and is_packed:
        within = {"mask_function": _within(documents, arguments)}
        arguments, of_transformers = arguments | within, of_transformers | within
        is_simple = False
    length, window = arguments.get("q_length"), arguments.get("local_size")
    has_window = window is not None and (length is None or window < length)
    is_text = documents is not None and not is_packed and given is None and is_plain
    if is_text and is_captured() and not is_sliced and not has_window:
        # transformers could not look at the positions, of which the call was given none.
        return None
    if not _has_documents(arguments):
        return original(**of_transformers)
    if is_simple and not has_window and given is None:
        rows = arguments["batch_size"]
        return mask_of((length,) * rows, arguments["device"], rows=rows) if is_sliced else None
    mask = _read(arguments)
    # A model that forbids None needs a tensor, to change it.
    return original(**of_transformers) if mask is None or (mask.is_plain and not is_simple) else mask


@untraced
def mask_with_documents(implementation: str, **arguments: Any) -> Any:
    """Returns the mask that transformers builds for ``implementation``, and within the documents of the call that runs:
    the mask function of a model that keeps its original attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    documents = _documents_in(_by_length(arguments))
    if documents is not None and documents.is_packed:
        arguments = _kept_within(documents, arguments)
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments)


def _kept_within(documents: Documents, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns ``arguments`` of transformers for a mask within documents, which must not be left out."""
    never = dict.fromkeys({"allow_is_causal_skip", _BOTH_DIRECTIONS} & arguments.keys(), False)
    return arguments | never | {"mask_function": _within(documents, _by_length(arguments))}


_BOTH_DIRECTIONS = "allow_is_bidirectional_skip"
"""argument of transformers' masks of attention in both directions"""


def attends_in_both_directions(config: Any) -> bool:
    """True for a text decoder whose self-attention is not causal, as its config says; to keys of an encoder it may be
    so in any decoder."""
    return getattr(config, "is_causal", True) is False


def _of_both_directions(arguments: dict[str, Any]) -> DocumentMask | Tensor | None:
    """Returns the documents of the call for self-attention in both directions within each; otherwise the mask that
    transformers builds."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function

    original: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    named = _by_length(arguments)
    documents = _documents_in(named)
    if documents is None or not (documents.is_packed or arguments.get("attention_mask") is not None):
        return original(**arguments)
    is_full = arguments["mask_function"] is bidirectional_mask_function and arguments.get("local_size") is None
    if is_full and not torch.compiler.is_compiling() and not is_captured() and not is_replaced():
        mask = _of_call(documents, named, is_causal=False)
        if mask is not None:
            return mask
    return original(**(_kept_within(documents, arguments) if documents.is_packed else arguments))


def _documents_in(arguments: dict[str, Any]) -> Documents | None:
    """Returns the documents of the call that runs; None if a mask is of other tokens, as to the keys of an encoder.

    Raises:
        LigerDistError: the mask is of other tokens than those of a packed call.
    """
    call = current_call()
    documents = None if call is None else call.documents
    is_of_both = _BOTH_DIRECTIONS in arguments
    if documents is None or (is_of_both and not attends_in_both_directions(arguments.get("config"))):
        return None
    rows, length = documents.shape
    found = (arguments.get("batch_size"), arguments.get("q_length"), arguments.get("kv_length"))
    begins = (arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
    if found == (rows, length, length) and not any(int(offset) for offset in begins):
        return documents
    if documents.is_packed and not is_of_both:
        raise LigerDistError(
            f"a mask of {found[1]} queries and {found[2]} keys in {found[0]} rows is made in a call with packed "
            f"documents in {rows} rows of {length} tokens, which it would mix; give each document a separate row and "
            "pad the rows (attention_mask)."
        )
    return None


def _within(documents: Documents, arguments: dict[str, Any]) -> Callable[..., Tensor]:
    """Makes a mask function that allows what that of ``arguments`` does within documents."""
    mask_function: Callable[..., Tensor] = arguments["mask_function"]
    number = documents.numbers(torch.device(arguments["device"]))

    def within(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask_function(row, head, query, key) & (number[row, query] == number[row, key])

    return within


def _of_call(documents: Documents, arguments: dict[str, Any], *, is_causal: bool = True) -> DocumentMask | None:
    """Makes attention within the documents of a call, and within the window of ``arguments``; None if padding lies
    inside a document. The host waits for a 2-D mask, once in a call."""
    lengths = document_lengths(documents.begins, documents.valid)
    if lengths is None:
        return None
    rows, length = documents.shape
    window, device = arguments.get("local_size"), arguments["device"]
    window = window if window is not None and window < length else None
    valid = documents.valid_on(torch.device(device)) if not documents.valid.all() else None
    facts: dict[str, Any] = {"window": window, "valid": valid, "is_causal": is_causal}
    return mask_of(lengths, device, rows=rows, **facts, is_of_call=True)


_OVERLAYS = ("causal_mask_function", "and_masks", "packed_sequence_mask_function", "sliding_window_overlay")
_REMAPPED = "remap_positions_for_packed_sequence"
"""functions of transformers whose masks are causal within documents and windows"""


def _is_causal_within_documents(mask_function: Any) -> bool:
    """True if transformers made ``mask_function`` of causal attention, documents by positions and a window alone;
    False for any other, which is then read from its values."""
    name = getattr(mask_function, "__qualname__", "").split(".")[0]
    if getattr(mask_function, "__module__", None) != "transformers.masking_utils" or name not in (
        *_OVERLAYS,
        _REMAPPED,
    ):
        return False
    cells = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,)) if callable(part)]
    return all(isinstance(part, Tensor) or _is_causal_within_documents(part) for part in parts)


def _by_length(arguments: dict[str, Any]) -> dict[str, Any]:
    """Renames ``arguments`` to the names of current transformers. Its first 5.x releases pass the positions of the
    queries instead of their number and device. Where all keys are queries, the first position is 0."""
    positions = arguments.get("cache_position")
    if positions is None or "q_length" in arguments:
        return arguments
    return arguments | {"q_length": positions.shape[0], "device": positions.device}


def _is_sliced(arguments: dict[str, Any]) -> bool:
    """True if the last layers of the decoder share keys and values: they may get only the last tokens, with their rows
    of the mask; None would mean the first tokens."""
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
    is_indexed = not arguments.get("use_vmap", False) and _BOTH_DIRECTIONS not in arguments
    # A CUDA graph cannot copy lengths to the host: it computes the dense mask in each replay.
    return is_indexed and not torch.compiler.is_compiling() and not is_captured() and not is_replaced()


_WAS_EAGER: dict[int, ref[Any]] = {}
"""configs by their id in which "liger_dist" has replaced "eager"; they cannot be hashed"""


def note_eager(config: Any) -> None:
    """Takes note that "liger_dist" has replaced "eager" in a config."""
    key = id(config)
    _WAS_EAGER[key] = ref(config, lambda _: _WAS_EAGER.pop(key, None))


def was_eager(config: Any) -> bool:
    """True if "liger_dist" has replaced "eager" in ``config``."""
    noted = _WAS_EAGER.get(id(config))
    return noted is not None and noted() is config


def _masks_are_replaced() -> bool:
    """True if another package builds the masks of "sdpa" or "eager"."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    entries = (ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "eager"))
    return any(getattr(entry, "__module__", None) != "transformers.masking_utils" for entry in entries)


def is_replaced() -> bool:
    """True if another package computes the attention of "sdpa", such as DeepSpeed's sequence parallelism."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_function() is not sdpa_attention_forward


def sdpa_function() -> AttentionFunction:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function


def _read(arguments: dict[str, Any]) -> DocumentMask | None:
    """Reads where documents begin, from the neighbours that a token attends to: ``O(B * S)`` and one copy to the host.
    Returns None for masks of other kinds."""
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
    return mask_of(lengths, device, rows=rows, window=window, valid=valid if has_padding else None)


def notes_on(tensor: Tensor) -> dict[Any, Any]:
    """Returns a dict that stays with the tensor for the call that runs: what the host has read of its values. A
    backward that recomputes the call finds it as well.

    A call of a wrapped model reads anew. In a model that is not wrapped, values on the host are compared, because
    writes through NumPy, DLPack or ``.data`` have no version; on a GPU the versions are.
    """
    call = current_call()
    version = None if tensor.is_inference() else tensor._version
    state: tuple[Any, ...] = (call, version)
    if call is None and tensor.device.type == "cpu":
        state = tuple(tensor.tolist())
    elif call is None and version is None:
        return {}
    kept_state, notes = vars(tensor).get(_NOTES, (None, {}))
    if kept_state is None or (kept_state != state and not in_backward()):
        notes = dict[Any, Any]()
        vars(tensor)[_NOTES] = state, notes
    return cast(dict[Any, Any], notes)


def document_lengths(begins: Tensor, valid: Tensor) -> tuple[int, ...] | None:
    """Computes the lengths of the documents of every row, with padding in short ones; bool ``[B, S]`` on the host. None
    if padding lies inside a document."""
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


def mask_of(lengths: tuple[int, ...], device: torch.device, *, rows: int, **facts: Any) -> DocumentMask:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    on_device = ends.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else ends
    return DocumentMask(lengths, on_device, rows=rows, **facts)
