"""Rotary position embedding: one autograd function, the match of rotary functions, and attentions whose forward calls
one.

The function, a global of the model's module such as ``apply_rotary_pos_emb``, runs on probe values; the layout of pairs
and tables that reproduces it, forward and backward, is its match. A swapped attention runs a copy of its forward in
which that function is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_in
from functools import lru_cache
from inspect import Parameter, signature, unwrap
from itertools import product
from types import FunctionType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from liger_dist.errors import refuse_second_order
from liger_dist.model.class_swap import below_wrappers
from liger_dist.trials.functions import called_functions, with_globals
from liger_dist.trials.isolated import LeftAloneError
from liger_dist.trials.kinds import agrees, none_on_error
from liger_dist_kernels import Backend, Pairing, RotaryLayout, rotate

from .swap import Kind, Match, has_kernels, is_local

TOLERANCE = 1e-5
TABLES = (("cos", "sin"), ("freqs_cis",), ("freqs_ci",))
KNOWN_PARAMETERS = ("unsqueeze_dim", "position_ids", "mrope_section")
"""known parameters besides tensors and tables"""
BATCH, HEADS, TOKENS, WIDTH = 2, 3, 5, 12
SECTIONS = [3, 2, 1]


@dataclass(frozen=True, kw_only=True)
class RotaryConvention:
    """Layout of the rotation that one function computes."""

    tensors: tuple[str, ...]
    tables: tuple[str, ...]
    layout: RotaryLayout
    half_tables: bool
    """True if the tables have one column per pair instead of per feature"""
    heads_dim: int
    """position of the heads' dim, which the tables lack, unless the call passes it"""
    partial: bool
    """True if features beyond the tables are returned unchanged"""

    @property
    def is_complex(self) -> bool:
        """True if cos and sin are one complex table."""
        return len(self.tables) == 1

    def __str__(self) -> str:
        layout = self.layout
        written = f", written as {_PAIRS[layout.writes]}" if layout.reads != layout.writes else ""
        return f"pairs {_PAIRS[layout.reads]}{written}"


_PAIRS = {"halves": "(p, p + D/2)", "interleaved": "(2p, 2p + 1)"}
"""features that are rotated together"""


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, options: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.save_for_backward(cos, sin)
        return rotate(tensors, cos, sin, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        cos, sin = ctx.saved_tensors
        given = [_dense(gradient) for gradient in gradients if gradient is not None]
        rotated = iter(rotate(given, cos, sin, backward=True, **ctx.options) if given else ())
        return None, None, None, *(None if g is None else next(rotated) for g in gradients)


def rotary(
    tensors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    num_rotated: int,
    layout: RotaryLayout,
    heads_dim: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """Rotates the first R features of each of ``tensors``.

    Args:
        tensors: one or two (queries and keys), each ``[B, T, H, D]``, floating.
        cos, sin: ``[B, T, R]``, or broadcastable to ``[B, T, H, R]``, a column for each rotated feature; of "shared"
            tables only the first R / 2 are read, and the rest may be missing.
        num_rotated: R, even and at most D.
        layout: where the pairs are.
        heads_dim: 1 if all of these have the dims of T and H exchanged; None: where tables of four dims have one head.
    """
    if heads_dim is None:
        heads_dim = 1 if cos.dim() == 4 and cos.shape[1] == 1 else 2
    options = {"num_rotated": num_rotated, "layout": layout, "heads_dim": heads_dim, "backend": backend}
    cos, sin, *given = map(_dense, (cos, sin, *tensors))
    has_one_table = cos.dim() == 3 or cos.shape[heads_dim] == 1
    sizes = {(x.shape[0], x.shape[3 - heads_dim]) for x in given}
    if len(given) > 1 and not (has_one_table and len(sizes) == 1):
        return tuple(_Rotary.apply(cos, sin, options, x)[0] for x in given)  # type: ignore[no-untyped-call]
    rotated: tuple[Tensor, ...] = _Rotary.apply(cos, sin, options, *given)  # type: ignore[no-untyped-call]
    return rotated


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _arguments(given: dict[str, Any], convention: RotaryConvention) -> dict[str, Any] | None:
    """Returns the arguments of :func:`rotary` for a call of the model's function; None for an unsupported call."""
    tensors = [given[name] for name in convention.tensors]
    tables = [given[name] for name in convention.tables]
    # Loops: a generator costs 1 us of host time.
    for x in tensors:
        if not has_kernels(x):
            return None
    for table in tables:
        if not is_local(table) or table.requires_grad:
            return None
    if given.get("position_ids") is not None:
        return None
    if all(x.dim() == 3 for x in tensors) and tables[0].dim() == 2 and convention.heads_dim == 2:
        # Vision towers pack their sequences into one.
        tensors, tables = [x[None] for x in tensors], [table[None] for table in tables]
    cos, sin = _cos_and_sin(tables, convention)
    if given.get("mrope_section") is not None:
        cos, sin = (_sections(table, given["mrope_section"]) for table in (cos, sin))
    *lead, width = cos.shape
    heads_dim = None
    if len(lead) == 2:
        heads_dim = given.get("unsqueeze_dim", convention.heads_dim)
        if heads_dim not in (1, 2):
            return None
        lead.insert(heads_dim, 1)
    if len(lead) != 3:
        return None
    width *= 2 if convention.half_tables else 1
    for x in tensors:
        shape = x.shape
        fits = len(shape) == 4 and (width == shape[3] or (convention.partial and width < shape[3]))
        # Tables of a wider dtype would widen what many functions return.
        if not fits or (cos.dtype != x.dtype and not convention.is_complex):
            return None
        for size, of_tensor in zip(lead, shape, strict=False):
            if size not in (1, of_tensor):
                return None
    return {
        "tensors": tensors,
        "cos": cos,
        "sin": sin,
        "num_rotated": width,
        "layout": convention.layout,
        "heads_dim": heads_dim,
    }


def _cos_and_sin(tables: list[Tensor], convention: RotaryConvention) -> tuple[Tensor, Tensor]:
    if convention.is_complex:
        return tables[0].real, tables[0].imag
    return tables[convention.tables.index("cos")], tables[convention.tables.index("sin")]


def _sections(table: Tensor, sections: list[int]) -> Tensor:
    """Merges multimodal tables ``[3, ...]`` (time, height, width): each section of features from one of them, twice."""
    parts = table.split([*sections, *sections], dim=-1)
    return torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)


class _Call:
    """Replacement of one rotary function in the globals of one attention's forward."""

    def __init__(self, namespace: dict[str, Any], name: str, convention: RotaryConvention, backend: Backend) -> None:
        """Replaces the function ``name`` of the globals ``namespace`` of the forward that calls it."""
        self.namespace, self.name, self.convention, self.backend = namespace, name, convention, backend
        self.function: FunctionType = namespace[name]
        self._helpers: dict[str, Any] = dict(called_functions(self.function))
        self._globals: dict[str, Any] = getattr(unwrap(self.function), "__globals__", {})
        self._parameters = signature(self.function).parameters
        self._required = {name for name, one in self._parameters.items() if one.default is Parameter.empty}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = self.namespace.get(self.name, self.function)
        if current is not self.function:
            return current(*args, **kwargs)  # Patched since.
        for name, helper in self._helpers.items():
            if self._globals.get(name) is not helper:
                return self.function(*args, **kwargs)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        is_bound = len(given) == len(args) + len(kwargs) and self._required <= given.keys() <= self._parameters.keys()
        arguments = _arguments(given, self.convention) if is_bound else None
        if arguments is None:
            return self.function(*args, **kwargs)
        rotated = rotary(**arguments, backend=self.backend)
        if given[self.convention.tensors[0]].dim() == 3:
            rotated = tuple(x[0] for x in rotated)
        return rotated if len(rotated) > 1 else rotated[0]


class RotaryMatch(Match):
    """Forward of an attention with its rotary functions replaced."""

    def __init__(self, forward: Any, backend: Backend) -> None:
        """Copies ``forward`` and its decorators.

        Raises:
            LeftAloneError: no function that ``forward`` calls has a known layout, or its decorators cannot be copied.
        """
        self.forward, self.backend = forward, backend
        functions = _functions(forward)
        conventions = {name: convention_of(function) for name, function in functions.items()}
        self._conventions = {name: convention for name, convention in conventions.items() if convention is not None}
        if not self._conventions:
            raise LeftAloneError("its rotary function is none of the known layouts")
        namespace = unwrap(forward).__globals__
        calls = {name: _Call(namespace, name, convention, backend) for name, convention in self._conventions.items()}
        self.run = with_globals(forward, calls)
        """computes the module from the arguments of its forward"""

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryMatch:
        # Made anew, it would read the functions that have been patched since.
        return self

    def __reduce__(self) -> Any:
        return _loaded, (self.forward, self.backend)

    def __str__(self) -> str:
        return f"rotary ({', '.join(map(str, self._conventions.values()))})"


def _loaded(forward: Any, backend: Backend) -> RotaryMatch | None:
    """Makes a match from a pickle; None, so that the module's original forward runs, where its functions are
    patched."""
    try:
        return RotaryMatch(forward, backend)
    except LeftAloneError:
        return None


def _is_candidate(module: nn.Module) -> bool:
    """True if its forward, under any decorators, calls a function whose name contains "rotary" or "rope"."""
    return bool(_functions(below_wrappers(type(module)).forward))


def _functions(forward: Any) -> dict[str, FunctionType]:
    """Returns the rotary functions that ``forward`` calls."""
    called = called_functions(forward)
    return {name: function for name, function in called.items() if "rotary" in name or "rope" in name}


def _match(module: nn.Module, backend: Backend) -> RotaryMatch:
    return RotaryMatch(below_wrappers(type(module)).forward, backend)


def _compute(module: nn.Module, match: RotaryMatch, *args: Any, **kwargs: Any) -> Any:
    return match.run(module, *args, **kwargs)


def convention_of(function: Any) -> RotaryConvention | None:
    """Finds the convention that reproduces ``function``; None without one."""
    # Not by the function alone: a function that it calls may be patched.
    return _convention_of(function, tuple(called_functions(function).items()))


@lru_cache(maxsize=64)
def _convention_of(function: Any, helpers: tuple[tuple[str, FunctionType], ...]) -> RotaryConvention | None:
    parameters = signature(function).parameters
    known = next((names for names in TABLES if all(name in parameters for name in names)), None)
    if known is None:
        return None
    places = list(parameters)
    first = min(places.index(name) for name in known)
    further = [name for name in places[first:] if name not in known]
    optional = all(name in KNOWN_PARAMETERS or parameters[name].default is not Parameter.empty for name in further)
    if first == 0 or not optional or any(name not in KNOWN_PARAMETERS for name in further):
        return None
    tables = tuple(name for name in places if name in known)
    for convention in _conventions(tuple(places[:first]), tables, is_multimodal="mrope_section" in parameters):
        # Where a call may pass the heads' dim, both positions have to be right.
        dims = (1, 2) if "unsqueeze_dim" in parameters else (convention.heads_dim,)
        if all(_reproduces(function, replace_in(convention, heads_dim=dim)) for dim in dims):
            narrow = replace_in(convention, partial=True)
            convention = narrow if not convention.half_tables and _reproduces(function, narrow) else convention
            default = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else convention.heads_dim
            return replace_in(convention, heads_dim=default)
    return None


def _conventions(
    tensors: tuple[str, ...], tables: tuple[str, ...], *, is_multimodal: bool
) -> Iterator[RotaryConvention]:
    is_complex = len(tables) == 1
    pairings: tuple[Pairing, ...] = get_args(Pairing)
    for heads_dim, half_tables in product(
        (1, 2), (True,) if is_complex else (False,) if is_multimodal else (False, True)
    ):
        for reads, writes in product(pairings, pairings):
            for places in ("shared",) if half_tables else (*pairings, "shared"):
                yield RotaryConvention(
                    tensors=tensors,
                    tables=tables,
                    layout=RotaryLayout(reads=reads, writes=writes, tables=places),  # type: ignore[arg-type]
                    half_tables=half_tables,
                    heads_dim=heads_dim,
                    partial=False,
                )


def _reproduces(function: Callable[..., Any], convention: RotaryConvention) -> bool:
    """True if the convention has the same outputs and gradients as the function, on tables whose halves differ."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, TOKENS, WIDTH) if convention.heads_dim == 1 else (BATCH, TOKENS, HEADS, WIDTH)
    width = WIDTH // 2 if convention.half_tables else WIDTH - 4 if convention.partial else WIDTH
    parameters = signature(function).parameters
    lead: tuple[int, ...] = (BATCH, TOKENS)
    given: dict[str, Any] = {}
    if "mrope_section" in parameters:
        lead, given["mrope_section"] = (3, *lead), SECTIONS
        if convention.partial:
            return False
    if convention.layout.tables == "shared" and not convention.half_tables:
        half = torch.randn(2, *lead, width // 2, generator=generator)
        cos, sin = torch.cat([half, half], -1)
    else:
        cos, sin = torch.randn(2, *lead, width, generator=generator)
    if convention.is_complex:
        given[convention.tables[0]] = torch.complex(cos, sin)
    else:
        given |= {"cos": cos, "sin": sin}
    if "unsqueeze_dim" in parameters:
        given["unsqueeze_dim"] = convention.heads_dim

    def original(*tensors: Tensor) -> Tensor:
        outputs = function(**dict(zip(convention.tensors, tensors, strict=True)), **given)
        return outputs[None] if isinstance(outputs, Tensor) else torch.stack(outputs)

    def compute(*tensors: Tensor) -> Tensor | None:
        arguments = _arguments(dict(zip(convention.tensors, tensors, strict=True)) | given, convention)
        return None if arguments is None else torch.stack(rotary(**arguments, backend="reference"))

    values = [torch.randn(shape, generator=generator) for _ in convention.tensors]
    return agrees(values, none_on_error(original), compute, tolerance=TOLERANCE)


ROTARY = Kind(
    name="rotary embedding",
    is_candidate=_is_candidate,
    match=_match,
    compute=_compute,
    absent="no forward calls a function of its file that has 'rotary' or 'rope' in its name",
)
