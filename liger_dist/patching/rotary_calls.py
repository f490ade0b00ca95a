"""Rotary position embedding, told by what the function computes that a model's attention calls for it.

The function, a global of the model's module, is run on probe values; which layout of pairs and tables reproduces it,
forward and backward, decides. The attention's own forward is then made anew with that one call exchanged.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as replace_in
from functools import cache
from inspect import Parameter, signature
from itertools import product
from types import FunctionType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from liger_dist.layers import rotary
from liger_dist_kernels import Backend, Pairing, RotaryLayout

from .local import is_local, runs_own_code
from .replaced import Forward, LeftAloneError, below_wrappers, forward_of, plan_of, replace_forward
from .rewrite import rewritten

KIND = "rotary embedding"
TOLERANCE = 1e-5
TABLES = (("cos", "sin"), ("freqs_cis",), ("freqs_ci",))
HARMLESS = ("unsqueeze_dim", "position_ids", "mrope_section")
"""parameters beside tensors and tables whose meaning is known"""
BATCH, HEADS, TOKENS, WIDTH = 2, 3, 5, 12
SECTIONS = [3, 2, 1]


@dataclass(frozen=True, kw_only=True)
class RotaryPlan:
    """How one function rotates."""

    tensors: tuple[str, ...]
    tables: tuple[str, ...]
    layout: RotaryLayout
    half_tables: bool
    """whether the tables have one number for a pair rather than for a feature"""
    heads_dim: int
    """where the tables lack the heads' dim, unless the call says so"""
    partial: bool
    """whether features beyond the tables pass"""

    @property
    def is_complex(self) -> bool:
        """Whether cos and sin come as one complex table."""
        return len(self.tables) == 1

    def __str__(self) -> str:
        layout = self.layout
        return f"pairs {layout.reads}" + (f" to {layout.writes}" if layout.reads != layout.writes else "")


class _Call:
    """In the place of one rotary function inside one attention's forward."""

    def __init__(self, function: FunctionType, name: str, plan: RotaryPlan) -> None:
        self.function, self.name, self.plan = function, name, plan
        self._signature = signature(function)

    def __call__(self, backend: Backend | None, *args: Any, **kwargs: Any) -> Any:
        current = self.function.__globals__.get(self.name, self.function)
        if current is not self.function or backend is None:
            return current(*args, **kwargs)  # Somebody has put another one in its place, or the module is restored.
        given = self._signature.bind(*args, **kwargs).arguments
        arguments = None if torch.compiler.is_compiling() else _arguments(given, self.plan)
        if arguments is None:
            return self.function(*args, **kwargs)
        tensors, cos, sin, num_rotated = arguments
        results = rotary(tensors, cos, sin, num_rotated=num_rotated, layout=self.plan.layout, backend=backend)
        rotated = tuple(x.reshape(given[name].shape) for x, name in zip(results, self.plan.tensors, strict=True))
        return rotated if len(rotated) > 1 else rotated[0]


def _arguments(given: dict[str, Any], plan: RotaryPlan) -> tuple[list[Tensor], Tensor, Tensor, int] | None:
    """Tensors, tables and number of rotated features of a call; None for one that is not understood."""
    tensors = [given[name] for name in plan.tensors]
    tables = [given[name] for name in plan.tables]
    if any(map(runs_own_code, tensors)) or not all(map(is_local, tables)):
        return None
    if any(table.requires_grad for table in tables) or given.get("position_ids") is not None:
        return None
    if all(x.dim() == 3 for x in tensors) and tables[0].dim() == 2 and plan.heads_dim == 2:
        # Vision towers pack their sequences into one.
        tensors, tables = [x[None] for x in tensors], [table[None] for table in tables]
    if any(x.dim() != 4 for x in tensors):
        return None
    cos, sin = _cos_and_sin(tables, plan)
    if given.get("mrope_section") is not None:
        cos, sin = (_sections(table, given["mrope_section"]) for table in (cos, sin))
    if cos.dim() == 3:
        heads_dim = given.get("unsqueeze_dim", plan.heads_dim)
        cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    width = cos.shape[-1] * (2 if plan.half_tables else 1)
    for x in tensors:
        fits = width == x.shape[-1] or (plan.partial and width < x.shape[-1])
        broadcasts = all(a in (1, b) for a, b in zip(cos.shape[:-1], x.shape[:-1], strict=True))
        # Tables of a wider dtype would widen what many functions return.
        if not fits or not broadcasts or (cos.dtype != x.dtype and not plan.is_complex):
            return None
    return tensors, cos, sin, width


def _cos_and_sin(tables: list[Tensor], plan: RotaryPlan) -> tuple[Tensor, Tensor]:
    if plan.is_complex:
        return tables[0].real, tables[0].imag
    by_name = dict(zip(plan.tables, tables, strict=True))
    return by_name["cos"], by_name["sin"]


def _sections(table: Tensor, sections: list[int]) -> Tensor:
    """Multimodal tables ``[3, ...]`` (time, height, width) merged: each section of features from one of them, twice."""
    parts = table.split([*sections, *sections], dim=-1)
    return torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)


def is_candidate(module: nn.Module) -> bool:
    """Whether its forward calls a function that is named as one that rotates."""
    return bool(_names(below_wrappers(type(module)).forward))


def _names(forward: Any) -> list[str]:
    """Of the globals that ``forward`` calls to rotate."""
    if not isinstance(forward, FunctionType):
        return []
    named = [name for name in forward.__code__.co_names if "rotary" in name or "rope" in name]
    return [name for name in named if isinstance(forward.__globals__.get(name), FunctionType)]


def replace(module: nn.Module, backend: Backend, *, owner: str) -> str:
    """Replaces the forward of an attention that calls a rotary function.

    Raises:
        LeftAloneError: the function is none of the known layouts, or the forward has no plain source.
    """
    calls = _calls(below_wrappers(type(module)).forward)
    if not calls:
        raise LeftAloneError("its rotary function is none of the known layouts")
    replace_forward(module, KIND, backend, owner=owner)
    return f"rotary ({', '.join(str(call.plan) for call in calls.values())})"


@cache
def _calls(forward: Any) -> dict[str, _Call]:
    found = {}
    for name in _names(forward):
        function: FunctionType = forward.__globals__[name]
        plan = plan_of_function(function)
        if plan is not None:
            found[name] = _Call(function, name, plan)
    return found


@forward_of(KIND)
def _make_forward(forward: Any) -> Forward:
    calls = {f"_liger_dist_{name}": call for name, call in _calls(forward).items()}

    def exchange(definition: ast.FunctionDef) -> bool:
        found = False
        owner = definition.args.args[0].arg
        for node in ast.walk(definition):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = f"_liger_dist_{node.func.id}"
                if name in calls:
                    node.func = ast.Name(name, ast.Load())
                    node.args.insert(0, ast.parse(f"_liger_dist_plan_of({owner})", mode="eval").body)
                    found = True
        return found

    return rewritten(forward, exchange, {**calls, "_liger_dist_plan_of": plan_of})


@cache
def plan_of_function(function: Any) -> RotaryPlan | None:
    """The plan that reproduces ``function``; None when none does."""
    parameters = signature(function).parameters
    known = next((names for names in TABLES if all(name in parameters for name in names)), None)
    if known is None:
        return None
    places = list(parameters)
    first = min(places.index(name) for name in known)
    further = [name for name in places[first:] if name not in known]
    optional = all(name in HARMLESS or parameters[name].default is not Parameter.empty for name in further)
    if first == 0 or not optional or any(name not in HARMLESS for name in further):
        return None
    tables = tuple(name for name in places if name in known)
    for plan in _plans(tuple(places[:first]), tables, is_multimodal="mrope_section" in parameters):
        # Where a call may say where the heads are, both places have to be right.
        dims = (1, 2) if "unsqueeze_dim" in parameters else (plan.heads_dim,)
        if all(_reproduces(function, replace_in(plan, heads_dim=dim)) for dim in dims):
            narrow = replace_in(plan, partial=True)
            plan = narrow if not plan.half_tables and _reproduces(function, narrow) else plan
            default = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else plan.heads_dim
            return replace_in(plan, heads_dim=default)
    return None


def _plans(tensors: tuple[str, ...], tables: tuple[str, ...], *, is_multimodal: bool) -> Iterator[RotaryPlan]:
    is_complex = len(tables) == 1
    pairings: tuple[Pairing, ...] = get_args(Pairing)
    for heads_dim, half_tables in product(
        (1, 2), (True,) if is_complex else (False,) if is_multimodal else (False, True)
    ):
        for reads, writes in product(pairings, pairings):
            for places in ("shared",) if half_tables else (*pairings, "shared"):
                yield RotaryPlan(
                    tensors=tensors,
                    tables=tables,
                    layout=RotaryLayout(reads=reads, writes=writes, tables=places),  # type: ignore[arg-type]
                    half_tables=half_tables,
                    heads_dim=heads_dim,
                    partial=False,
                )


def _reproduces(function: Callable[..., Any], plan: RotaryPlan) -> bool:
    """Whether the plan gives what the function gives, with its gradients, on tables that are alike in no half."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, TOKENS, WIDTH) if plan.heads_dim == 1 else (BATCH, TOKENS, HEADS, WIDTH)
    width = WIDTH // 2 if plan.half_tables else WIDTH - 4 if plan.partial else WIDTH
    parameters = signature(function).parameters
    lead: tuple[int, ...] = (BATCH, TOKENS)
    given: dict[str, Any] = {}
    if "mrope_section" in parameters:
        lead, given["mrope_section"] = (3, *lead), SECTIONS
        if plan.partial:
            return False
    if plan.layout.tables == "shared" and not plan.half_tables:
        half = torch.randn(2, *lead, width // 2, generator=generator)
        cos, sin = torch.cat([half, half], -1)
    else:
        cos, sin = torch.randn(2, *lead, width, generator=generator)
    if plan.is_complex:
        given[plan.tables[0]] = torch.complex(cos, sin)
    else:
        given |= {"cos": cos, "sin": sin}
    if "unsqueeze_dim" in parameters:
        given["unsqueeze_dim"] = plan.heads_dim
    results: list[tuple[Tensor, ...]] = []
    for own in (True, False):
        leaves = [
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for seed in range(len(plan.tensors))
        ]
        named = dict(zip(plan.tensors, leaves, strict=True)) | given
        with torch.enable_grad():
            if own:
                try:
                    outputs = function(**named)
                except Exception:
                    # Whatever somebody else's function raises on these shapes: the plan is not its layout. One that has
                    # none leaves its attention alone, with that reason in explain.
                    return False
            else:
                arguments = _arguments(named, plan)
                if arguments is None:
                    return False
                tensors, cos, sin, num_rotated = arguments
                outputs = rotary(tensors, cos, sin, num_rotated=num_rotated, layout=plan.layout, backend="reference")
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if len(outputs) != len(leaves) or any(output.shape != torch.Size(shape) for output in outputs):
            return False
        upstream = [torch.linspace(-1, 1, output.numel()).reshape(shape) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves, upstream)
        results.append((*(output.detach() for output in outputs), *gradients))
    return all(bool((a - b).norm() <= TOLERANCE * a.norm()) for a, b in zip(*results, strict=True))
