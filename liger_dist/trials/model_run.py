"""Runs a model's original forward without its weights, to detect a module that, other than by attention, makes a token
depend on another document: a recurrence, a causal convolution.

[Note: a run without weights]

Two pairs of documents differ only in their first one. If a module's inputs agree on both second documents, and its
outputs there do not, it carries the first document into the second. In such a run:

- linear maps and embeddings are computed token by token with made-up values. Their weights are not read: a
  model on the meta device, sharded, quantised or of 100B parameters takes as long as a small one;
- a token attends only to its key, and to keys that are not one per token (sinks, compressed ones). An
  attention without a softmax keeps its scores, and its mask keeps documents apart where it does so in the model;
- only as many decoder layers run as are needed for one of each kind, and the first such module ends the run;
- hooks, compiled calls and dropout do not run, and no collective does.

The run restores the model: attributes, parameters, buffers, hooks, config and random number generators.

Legend: S tokens of a row, K keys.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature, unwrap
from itertools import accumulate
from threading import RLock
from types import MappingProxyType
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from liger_dist.model.class_swap import swapped
from liger_dist.model.document_rows import DocumentRows, rows_of
from liger_dist.model.documents import LENGTHS, LENGTHS_OF_KEYS, POSITIONS, Documents, call_of, read_documents
from liger_dist.model.quantized import dequantized_shape, is_float8_linear, is_quantized_linear
from liger_dist.model.structure import full_shape
from liger_dist.sharding.fsdp2.expert_parallel import RANKS_OF_EXPERTS
from liger_dist.sharding.process_groups import compute_device
from liger_dist.sharding.vocab_parallel import ROW_SHARDS
from liger_dist.trials.functions import installed_function
from liger_dist.trials.isolated import torch_defaults

from .functions import called_functions, fallback_of

DOCUMENTS = (7, 6)
"""tokens of the documents of a pair; models have nothing else of size 13 or 26"""
PAIR = sum(DOCUMENTS)
TOLERANCE = 1e-4
"""tolerance relative to the largest output of a module; rounding in fp32 stays below"""
SMALL = 2**16
"""elements; a smaller parameter gets different values, a larger one is a single value, expanded"""
FRAMEWORKS = ("transformers.", "accelerate.", "torch.")
"""modules whose patched forwards move, gather and reduce tensors around the forward of the class"""
EAGER = "eager"
BY_LENGTHS = "liger_dist_by_lengths"
"""attention of a trial that stands for FlashAttention, which reads the lengths of documents"""
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""settings of transformers' configs; under "eager" the model's file computes, which no host replaces"""
UNLIKELY = -1e30
"""bound above the scores of masked keys"""
CHUNK = 16
CHUNKS = ("chunk_size", "block_size")
"""tokens that a scan computes at once, and attributes with that number: padding a row to more would take most of the
time"""
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class CannotRunError(Exception):
    """Raised if the model's code does not run without its weights; the message is the reason. Never leaves this
    package."""


class _FoundError(Exception):
    """Ends a run at the module that mixes documents."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.kind = type(module)


Run = Callable[[nn.Module, DocumentRows, tuple[Any, ...], dict[str, Any]], Any]
"""computes a module on rows of single documents, from its arguments"""


NONE_IN_ROWS: Mapping[type[nn.Module], Run] = MappingProxyType({})


@dataclass(frozen=True)
class Found:
    """How tokens depend on another document of their row."""

    mixer: type[nn.Module] | None = None
    """class of a module that carries state from one document into the next; None if there is none"""
    attends_across: bool = False
    """True if attention reads other documents: its mask has only one text for each row"""
    counts_on: bool = False
    """True if the result of a document depends on its place in the row"""


def token_dependency(
    model: nn.Module,
    layers: Sequence[nn.Module],
    in_rows: Mapping[type[nn.Module], Run] = NONE_IN_ROWS,
    *,
    attention: str = EAGER,
    text_row: bool = False,
) -> Found:
    """Finds out whether a document of a packed row depends on the other documents.

    Args:
        layers: the decoder layers of ``model``.
        in_rows: classes of modules that are computed on rows of single documents.
        attention: the implementation that computes attention.
        text_row: True to give positions ``[4, B, S]``, of the text and then the three of images.

    Raises:
        CannotRunError: the model's forward raised, does not accept an argument, or computed NaN or Inf.
    """
    failures = []
    # Some forwards need all layers: they count them, or keep their parts in several lists.
    for kept in (layers, ()):
        trial = _Trial(model, kept, in_rows, attention, text_row)
        try:
            found = trial.run(training=False)
            if in_rows and found.mixer is None:
                # Recurrent layers may run other functions in training.
                found = trial.run(training=True)
            if found.mixer is not None or found.attends_across:
                return found
            return Found(counts_on=trial.counts_on())
        except CannotRunError as failure:
            failures.append(failure)
    raise failures[0]


@dataclass(frozen=True)
class _Trial:
    """Runs of a model on two pairs of documents, see [Note: a run without weights]."""

    model: nn.Module
    layers: Sequence[nn.Module]
    in_rows: Mapping[type[nn.Module], Run]
    attention: str
    text_row: bool = False

    def run(self, *, training: bool) -> Found:
        """Runs both pairs, up to the first module that mixes documents."""
        with self._prepared(training=training) as device:
            for module in self.model.modules():
                module.register_forward_hook(_compare_documents, with_kwargs=True)
            tokens = TokenByToken(PAIR)
            try:
                self._forward(token_ids(self.model).to(device), tokens, DOCUMENTS)
            except _FoundError as found:
                return Found(found.kind, tokens.attends_across)
        return Found(None, tokens.attends_across)

    def counts_on(self) -> bool:
        """True if the second documents give other results alone than packed."""
        packed = self.results(DOCUMENTS, is_packed=True)
        # Without positions: some models do not count from 0.
        alone = self.results(DOCUMENTS[1:], is_packed=False)
        second = slice(DOCUMENTS[0], None)
        return not all(_agree([torch.stack([x[:, second], y])]) for x, y in zip(packed, alone, strict=True))

    def results(self, lengths: Sequence[int], *, is_packed: bool) -> list[Tensor]:
        """Returns the tensors ``[B, S, ...]`` of the model's output for the last documents of both pairs, with the
        attention of the model.

        Args:
            lengths: tokens of the documents.
        """
        with self._prepared(training=False) as device:
            ids = token_ids(self.model)[:, -sum(lengths) :].to(device)
            tokens = TokenByToken(sum(lengths), attends=True)
            return _of_tokens(self._forward(ids, tokens, lengths if is_packed else None), sum(lengths))

    @contextmanager
    def _prepared(self, *, training: bool) -> Iterator[torch.device]:
        with dummy_run(self.model, self.layers, self.attention) as device:
            for module in self.model.modules():
                module.training = training
            yield device

    def _forward(self, ids: Tensor, tokens: TokenByToken, lengths: Sequence[int] | None) -> Any:
        """Calls the model as for documents of these lengths in each row."""
        given: dict[str, Any] = {}
        documents = None
        if lengths is not None:
            positions = torch.cat([torch.arange(length) for length in lengths]).repeat(len(ids), 1)
            documents = read_documents({"input_ids": ids, POSITIONS: positions})
            rows = rows_of(documents) if documents is not None and documents.is_packed else None
            _compute_in_rows(self.model, self.in_rows, rows)
            positions = positions.to(ids.device)
            given = {POSITIONS: positions.expand(4, -1, -1) if self.text_row else positions}
            given |= lengths_of(documents) if self.attention == BY_LENGTHS and documents is not None else {}
        with call_of(documents):
            return _called(self.model, ids, tokens, given)


def _called(model: nn.Module, ids: Tensor, tokens: TokenByToken, given: dict[str, Any]) -> Any:
    """Calls a model that :func:`dummy_run` has prepared.

    Raises:
        CannotRunError: its code raises.
    """
    try:
        with tokens:
            return model(input_ids=ids, **dict(call_arguments(model, given)))
    except (CannotRunError, _FoundError):
        raise
    except Exception as error:
        raise CannotRunError(f"{type(error).__name__}: {error}") from error


def lengths_of(documents: Documents) -> dict[str, Any]:
    """Returns the lengths of documents as transformers' keywords of FlashAttention, on the CPU."""
    lengths = documents.lengths
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {LENGTHS: ends, LENGTHS_OF_KEYS: ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}


def _of_tokens(output: Any, length: int) -> list[Tensor]:
    """Lists the tensors ``[B, S, ...]`` of numbers in a model's output."""
    leaves = list(tree_leaves(dict(output) if hasattr(output, "items") else output))
    is_of_tokens = [
        isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 2 and leaf.shape[1] == length
        for leaf in leaves
    ]
    return [leaf.float() for leaf, wanted in zip(leaves, is_of_tokens, strict=True) if wanted]


def is_same_attention(model: nn.Module, layers: Sequence[nn.Module], one: str, other: str) -> bool:
    """True if the model computes the same with two implementations of attention, of rows with one text each."""
    results = []
    for attention in (one, other):
        trial = _Trial(model, layers, NONE_IN_ROWS, attention)
        try:
            results.append(trial.results(DOCUMENTS, is_packed=False))
        except CannotRunError:
            return False
    return all(_agree([torch.stack(pair)]) for pair in zip(*results, strict=True))


def passes_masks_on(model: nn.Module, layers: Sequence[nn.Module], implementation: str) -> bool:
    """True if the model's code passes the masks of an attention implementation on to its attention function, whatever
    their type."""
    padding = torch.ones(2, PAIR, dtype=torch.int64)
    padding[0, : DOCUMENTS[0]] = 0
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1)
    for given in ({POSITIONS: positions}, {"attention_mask": padding}):
        with dummy_run(model, layers, implementation) as device:
            on_device = {name: value.to(device) for name, value in given.items()}
            try:
                _called(model, token_ids(model).to(device), TokenByToken(PAIR), on_device)
            except CannotRunError:
                # Whatever a model's code raises for a mask that is no tensor: it keeps its original attention, and
                # ``explain`` shows that reason.
                return False
    return True


@contextmanager
def dummy_run(model: nn.Module, layers: Sequence[nn.Module], attention: str) -> Iterator[torch.device]:
    """Prepares the model for a run without weights within the context; yields the device of the run."""
    # Kernels of other packages need the device that the model will run on; on the CPU torch's operations run.
    device = compute_device() if dist.is_initialized() or torch.cuda.is_initialized() else torch.device("cpu")
    generators = [device] if device.type == "cuda" else []
    with torch_defaults(), torch.no_grad(), torch.random.fork_rng(generators), catch_warnings():
        simplefilter("ignore")
        with _ONE_RUN, _replacing(), _without_weights(model, layers, device, attention), _by_torch(model):
            yield device


_ONE_RUN = RLock()
"""held by the thread whose run replaces functions of the process"""
_REPLACES: ContextVar[bool] = ContextVar("liger_dist_replaces", default=False)
"""True in the context of a run, where replaced functions compute something else; other threads get the originals"""


@contextmanager
def _replacing() -> Iterator[None]:
    """Within, replaced functions compute what replaces them."""
    token = _REPLACES.set(True)
    try:
        # ZeRO-3 replaces it in the process by a function that no TorchFunctionMode sees.
        linear = F.linear
        is_replaced = inspect.isfunction(linear)
        with swapped(vars(F), "linear", _here(linear, _linear)) if is_replaced else nullcontext():
            yield
    finally:
        _REPLACES.reset(token)


def _here(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that is ``replacement`` in the context of a run, and ``original`` elsewhere."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (replacement if _REPLACES.get() else original)(*args, **kwargs)

    return function


@contextmanager
def _by_torch(model: nn.Module) -> Iterator[None]:
    """Replaces functions of other packages by torch's code within the context: they need a GPU, and autotuning would
    keep what is fastest for 26 tokens."""
    with ExitStack() as stack:
        for forward in {type(module).forward for module in model.modules()}:
            for name, function in called_functions(forward).items():
                if installed_function(function) is not None:
                    namespace: dict[str, Any] = unwrap(forward).__globals__
                    stack.enter_context(swapped(namespace, name, _here(function, fallback_of(function))))
        yield


def _compute_in_rows(model: nn.Module, in_rows: Mapping[type[nn.Module], Run], documents: DocumentRows | None) -> None:
    """Patches the forwards of modules of the classes ``in_rows``, for one run."""
    if documents is None:
        return

    running: list[nn.Module] = []

    def on_rows(module: nn.Module, documents: DocumentRows) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if running:  # Inside another one, on its rows.
                return type(module).forward(module, *args, **kwargs)
            running.append(module)
            try:
                return in_rows[type(module)](module, documents, args, kwargs)
            finally:
                running.clear()

        return forward

    for module in model.modules():
        if type(module) in in_rows:
            vars(module)["forward"] = on_rows(module, documents)


def _compare_documents(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    outputs = _second_documents(output if isinstance(output, tuple | list) else [output])
    if not all(bool(tensor.isfinite().all()) for tensor in outputs):
        raise CannotRunError(f"{type(module).__name__} gives NaN or Inf for weights that are made up")
    # The name of a Conv1d or Linear does not show its purpose; that of the module around it does.
    if type(module).__module__.startswith("torch.") or _agree(outputs):
        return
    if _agree(_second_documents([*args, *kwargs.values()])):
        raise _FoundError(module)


def _second_documents(values: Sequence[Any]) -> list[Tensor]:
    """Slices ``[2, 6, ...]`` of the second documents from the per-token tensors among ``values``; skips ``[..., S,
    S]``, masks."""
    found = []
    for value in values:
        is_of_numbers = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2
        if is_of_numbers and value.shape[:2] == (2, PAIR) and value.shape[-1] != PAIR:
            found.append(value.reshape(2, PAIR, -1)[:, DOCUMENTS[0] :])
    return found


def _agree(tensors: list[Tensor]) -> bool:
    return all(bool((one - other).abs().max() <= TOLERANCE * one.abs().max()) for one, other in tensors if one.numel())


def call_arguments(model: nn.Module, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what the model's forward accepts of ``given``, and no cache."""
    parameters = signature(model.forward).parameters
    takes_more = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in given.items():
        if name in parameters or takes_more:
            yield name, value
    if "use_cache" in parameters or takes_more:
        yield "use_cache", False


def token_ids(model: nn.Module) -> Tensor:
    """Builds ids ``[2, 13]`` that no config contains, since those may stand for images. The first documents differ."""
    special = set(_numbers(getattr(model, "config", None)))
    first, other_first, second = (
        torch.tensor([number for number in range(4, 400) if number not in special][start:][:length])
        for start, length in ((0, DOCUMENTS[0]), (DOCUMENTS[0], DOCUMENTS[0]), (2 * DOCUMENTS[0], DOCUMENTS[1]))
    )
    return torch.stack([torch.cat([first, second]), torch.cat([other_first, second])])


def _numbers(config: Any) -> Iterator[int]:
    for value in vars(config).values() if hasattr(config, "__dict__") else ():
        if isinstance(value, int):
            yield value
        elif hasattr(value, "to_dict"):
            yield from _numbers(value)


class TokenByToken(TorchFunctionMode):
    """Computes linear maps, embeddings and attention token by token; see [Note: a run without weights].

    Args:
        length: tokens of a row.
        attends: True to compute attention as the model does, to all keys that its mask allows.
    """

    def __init__(self, length: int, *, attends: bool = False) -> None:
        super().__init__()
        self._length, self._attends = length, attends
        self.attends_across = False
        """True if a score of another document's key is not masked"""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given, name = [*args, *(kwargs or {}).values()], getattr(func, "__name__", "")
        if name == "linear":
            return _linear(*given)
        if name == "embedding":
            return _embedded(given[0], given[1].shape[-1])
        if name in ("matmul", "__matmul__", "bmm") and given[1].numel() > SMALL and _is_expanded(given[1]):
            return _mapped(given[0], given[1].shape[-1])
        if name == "addmm" and _is_expanded(given[2]):
            return _mapped(given[1], given[2].shape[-1])
        if name in ("mul_", "div_") and _is_expanded(given[0]):
            return given[0]  # RWKV scales its weights for evaluation.
        if name == "dropout":
            return given[0]
        if self._attends:
            if name == "topk" and given[0].dim() > 2 and given[0].shape[-1] == self._length:
                # Keys that an indexer selects: among equal scores any may be.
                return func(given[0], self._length, **{key: x for key, x in (kwargs or {}).items() if key != "k"})
            return func(*args, **kwargs or {})
        if name == "scaled_dot_product_attention":
            self._note_mask(*args, **kwargs or {})
            query, value = given[0], given[2]
            return value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        if name in ("softmax", "logsumexp") and given[0].dim() > 2:
            scores = self._of_diagonal(given[0])
            return func(scores, *args[1:], **{key: value for key, value in (kwargs or {}).items() if key != "input"})
        return func(*args, **kwargs or {})

    def _note_mask(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Notes whether the mask of ``scaled_dot_product_attention`` keeps documents of a row apart."""
        if query.shape[-2] != self._length or key.shape[-2] < self._length:
            return
        if attn_mask is None:
            self.attends_across = True
            return
        across = attn_mask.expand(*attn_mask.shape[:-2], self._length, -1)[..., DOCUMENTS[0] : PAIR, : DOCUMENTS[0]]
        likely = across if attn_mask.dtype == torch.bool else across > UNLIKELY
        self.attends_across |= bool(likely.any())

    def _of_diagonal(self, scores: Tensor) -> Tensor:
        """Masks the scores ``[..., S, K]`` of other tokens' keys; returns any other tensor unchanged."""
        if scores.shape[-2] != self._length or scores.shape[-1] < self._length:
            return scores
        across = scores[..., DOCUMENTS[0] : PAIR, : DOCUMENTS[0]]
        self.attends_across |= bool((across > UNLIKELY).any())
        diagonal = torch.eye(*scores.shape[-2:], dtype=torch.bool, device=scores.device)
        shared = scores[..., self._length :]
        # Not the score of the token's key, which may be masked as well. The value equals the largest other score,
        # because some functions have subtracted the largest score of all keys.
        likely = torch.zeros_like(scores[..., :1]) if shared.shape[-1] == 0 else shared.amax(-1, keepdim=True)
        likely = likely.masked_fill(likely < UNLIKELY, 0.0)
        return torch.cat([torch.where(diagonal, likely, -torch.inf)[..., : self._length], shared], -1)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _mapped(input, weight.shape[0])


def _quantized_linear(module: nn.Module, x: Tensor, *args: Any) -> Tensor:
    return _mapped(x, module.out_features)  # type: ignore[arg-type]


def _dequantized(shape: torch.Size, device: torch.device, packed: Tensor) -> Tensor:
    return _of_shape(shape, device)


def _mapped(x: Tensor, size: int) -> Tensor:
    """Computes ``[..., size]``: a linear map of the last dimension of ``x`` that reads all of it, by one product
    each."""
    rows = -(-x.shape[-1] // size)
    padded = F.pad(x, (0, rows * size - x.shape[-1])) if rows > 1 else x.repeat_interleave(-(-size // x.shape[-1]), -1)
    folded: Tensor = padded[..., : rows * size].unflatten(-1, (rows, size)).sum(-2)
    return folded * _values((size,), x.device).to(x.dtype)


def _embedded(ids: Tensor, size: int) -> Tensor:
    return torch.sin((ids[..., None] + 1.0) * (1.0 + torch.arange(size, device=ids.device)))


def _values(shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns different values between 0.3 and 1.1."""
    numbers = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32)
    return (0.3 + 0.8 * (numbers * 0.618034 % 1.0)).reshape(tuple(shape))


def _is_expanded(tensor: Tensor) -> bool:
    """True for the value of :func:`_parameter` for a large parameter, and for parts of it."""
    return tensor.dim() > 0 and not any(tensor.stride())


@contextmanager
def _without_weights(
    model: nn.Module, layers: Sequence[nn.Module], device: torch.device, attention: str
) -> Iterator[None]:
    """Gives the modules of ``model`` made-up parameters and no hooks within the context; keeps one of ``layers`` of
    each kind."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    configs = {id(config): config for _, state in before if _is_config(config := state.get("config"))}
    with ExitStack() as stack:
        for config in configs.values():
            stack.enter_context(_implemented(config, attention))
        try:
            for module, state in before:
                vars(module).update(_made_up(state, device))
                if getattr(state.get("forward"), "__module__", "").startswith(FRAMEWORKS):
                    del module.forward
                if is_quantized_linear(module):
                    vars(module)["forward"] = partial(_quantized_linear, module)
                if is_float8_linear(module):
                    vars(module)["forward"] = partial(nn.Linear.forward, module)  # type: ignore[arg-type]
                shape = dequantized_shape(module)
                if shape is not None:
                    vars(module)["forward"] = partial(_dequantized, shape, device)
                _keep_one_of_each_kind(module, layers)
            yield
        finally:
            for module, state in before:
                vars(module).clear()
                vars(module).update(state)


def _made_up(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Builds the attributes of a module for a run without weights."""
    made_up: dict[str, Any] = {name: OrderedDict() for name in _HOOKS}
    for kind, make in (("_parameters", _parameter), ("_buffers", _buffer)):
        made_up[kind] = {
            name: None if original is None else make(original, device) for name, original in state[kind].items()
        }
    made_up |= {name: min(state[name], CHUNK) for name in CHUNKS if isinstance(state.get(name), int)}
    if state.get("_is_expert_parallel"):
        # The forward of the class gets tokens of all experts.
        made_up["num_experts"] = max(len(one) for one in made_up["_parameters"].values() if one is not None)
    # Parameters are full in a run, which has no collectives.
    made_up |= {name: None for name in (ROW_SHARDS, RANKS_OF_EXPERTS) if name in state}
    if "_disable_adapters" in state:
        # PEFT's layers run those that they adapt: DoRA reads weights as matrices.
        made_up |= {"_disable_adapters": True, "merged_adapters": []}
    # Some forwards exchange modules.
    return made_up | {"_modules": dict(state["_modules"]), "_compiled_call_impl": None}


def _parameter(original: Tensor, device: torch.device) -> Tensor:
    return _of_shape(full_shape(original), device)


def _of_shape(shape: Sequence[int], device: torch.device) -> Tensor:
    is_small = torch.Size(shape).numel() <= SMALL
    return _values(shape, device) if is_small else torch.full((), 0.01, device=device).expand(shape)


def _buffer(original: Tensor, device: torch.device) -> Tensor:
    if isinstance(original, DTensor):
        # Tensor parallelism replicates buffers, such as the scale of Gemma's embeddings.
        if not all(placement.is_replicate() for placement in original.placements):
            return _parameter(original, device)
        original = original.to_local()
    if original.is_meta and original.is_floating_point():
        return _parameter(original, device)
    if not original.is_meta:
        # Parameters are made in fp32: no matmul takes them with a buffer of fp64.
        dtype = torch.float32 if original.is_floating_point() else original.dtype
        return original.detach().clone().to(device, dtype)
    return torch.ones(original.shape, device=device, dtype=original.dtype)


def _keep_one_of_each_kind(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Shortens a list of decoder layers after the last one that is the first of its kind."""
    children = list(module._modules.items())
    if not isinstance(module, nn.ModuleList) or not layers or not children or children[0][1] is not layers[0]:
        return
    kinds = [tuple((name, type(inner)) for name, inner in layer.named_modules()) for layer in layers]
    vars(module)["_modules"] = dict(children[: max(map(kinds.index, kinds)) + 1])


@contextmanager
def _implemented(config: Any, attention: str) -> Iterator[None]:
    """Makes the model's file compute the experts of a config within the context, and attention with "eager". "sdpa" may
    be another package's function by now, with collectives: DeepSpeed's sequence parallelism."""
    wanted = dict(zip(IMPLEMENTATIONS, (attention, EAGER), strict=True))
    original = {name: getattr(config, name, None) for name in wanted}
    changed = {name: value for name, value in original.items() if value not in (None, wanted[name])}
    try:
        for name in changed:
            setattr(config, name, {"": wanted[name]})
        yield
    finally:
        for name, value in changed.items():
            setattr(config, name, {"": value})


def _is_config(value: Any) -> bool:
    from transformers.configuration_utils import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


Groups = dict[nn.Module, list[list[str]]]
"""by parent: names of children that are called with one tensor, in the order of the calls"""
_Kind = tuple[type[nn.Module], tuple[str, ...]]


def find_shared_inputs(
    model: nn.Module, layers: Sequence[nn.Module], is_candidate: Callable[[nn.Module], bool]
) -> Groups:
    """Finds the candidates that one parent calls with the same tensor and nothing else, one after another.

    Args:
        layers: decoder layers, of which one of each kind runs; parents of the same class and children have the same
            groups.

    Raises:
        CannotRunError: the model's code does not run without its weights.
    """
    parents: dict[nn.Module, tuple[str, ...]] = {}
    for parent in model.modules():
        names = tuple(name for name, child in parent.named_children() if is_candidate(child))
        if len(names) > 1:
            parents[parent] = names
    calls: list[tuple[nn.Module, str, Tensor | None]] = []
    if parents:
        _run(model, layers, parents, calls)
    by_kind: dict[_Kind, list[list[str]]] = {}
    before: tuple[nn.Module, Tensor | None] = (model, None)
    for parent, name, given in calls:
        groups = by_kind.setdefault((type(parent), parents[parent]), [])
        is_shared = given is not None and before[0] is parent and before[1] is given
        if not any(name in group for group in groups):
            if is_shared:
                groups[-1].append(name)
            else:
                groups.append([name])
        before = parent, given
    return {
        parent: [group for group in by_kind.get((type(parent), names), []) if len(group) > 1]
        for parent, names in parents.items()
    }


def _run(
    model: nn.Module,
    layers: Sequence[nn.Module],
    parents: dict[nn.Module, tuple[str, ...]],
    calls: list[tuple[nn.Module, str, Tensor | None]],
) -> None:
    """Records the calls of a run in ``calls``, with their tensors."""

    def note(parent: nn.Module, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        calls.append((parent, name, args[0] if is_alone else None))

    with dummy_run(model, layers, EAGER) as device:
        for parent, names in parents.items():
            for name in names:
                child = parent.get_submodule(name)
                child.register_forward_pre_hook(partial(note, parent, name), with_kwargs=True)
        _called(model, token_ids(model).to(device), TokenByToken(PAIR), {})
