"""Layers of a model that kernels compute: one file per kind, each with the operation, the match and the swapped
forward. A match is detected by structure, confirmed by a probe of the module's original forward, and undone by
``unwrap``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_dist.errors import LigerDistError
from liger_dist.model.structure import full_shape
from liger_dist.trials.isolated import LeftAloneError, torch_defaults
from liger_dist.trials.model_run import CannotRunError, Groups, find_shared_inputs
from liger_dist_kernels import Backend

from .experts import EXPERTS, LOW_RANK_EXPERTS, needs_its_ranks
from .experts import refuse_merged_weights as refuse_merged_weights
from .gated_mlp import GATED_MLP, GatedMatch, with_tiles, without_tiles
from .gated_norm import GATED_NORM
from .lora import LOW_RANK, link_siblings
from .norm import NORM
from .rotary import ROTARY
from .swap import Kind, Match, Swapped, match_of, restore_forward, swap_forward

KINDS: tuple[Kind, ...] = (GATED_NORM, NORM, LOW_RANK_EXPERTS, LOW_RANK, EXPERTS, GATED_MLP, ROTARY)
"""Kinds of layers in order; a module is swapped by the first kind that recognizes and matches it."""


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Layers of a model that kernels compute, and those left alone, with reasons."""

    swapped: tuple[tuple[str, int], ...] = ()
    """class and match of the swapped modules, and their count"""
    left: tuple[tuple[str, str], ...] = ()
    """class of modules that keep their original forward, and the reason"""
    absent: tuple[tuple[str, str], ...] = ()
    """kinds without any candidate module, and what a candidate has"""

    def lines(self) -> list[tuple[str, str]]:
        """Lists rows for tables."""
        rows = [("swapped", f"{count} x {what}") for what, count in self.swapped]
        return rows + [("left alone", f"{what}: {why}") for what, why in (*self.left, *self.absent)]


COMPILED = "its decoder layer is compiled, from its own code"


def swap_layers(
    model: nn.Module,
    *,
    backend: Backend,
    owner: str,
    mlp_tile_tokens: int | None = None,
    layers: Sequence[nn.Module] = (),
    compiled: Iterable[nn.Module] = (),
) -> LayerReport:
    """Swaps the forward of every module of ``model`` that one of :data:`KINDS` matches.

    Args:
        layers: decoder layers.
        compiled: layers whose modules keep their forwards, but for those that are operators to the compiler, because
            a compiled layer runs its original code: every check of a swapped forward would be a guard, evaluated in
            each call.
        owner: id of the ``wrap`` call, for :func:`restore_layers`.
        mlp_tile_tokens: tokens of a tile of gated MLPs; None for all at once.

    Raises:
        LigerDistError: tiles were requested and no gated MLP was swapped; the swapped layers are not restored.
    """
    probed = _Probed(backend)
    swapped: Counter[str] = Counter()
    left: dict[str, str] = {}
    seen: set[str] = set()
    in_compiled = {module for layer in compiled for module in layer.modules()}
    together: Groups = {}
    try:
        together = {} if in_compiled else find_shared_inputs(model, layers, LOW_RANK.is_candidate)
    except CannotRunError as reason:
        left["LoRA"] = f"each layer is computed by itself, because the model does not run without weights ({reason})"
    for module in list(model.modules()):
        if isinstance(module, Swapped):
            seen.add(module._liger_dist_kind.name)
            continue
        name = type(module).__name__
        reasons: dict[str, str] = {}
        for kind in (kind for kind in KINDS if kind.is_candidate(module)):
            seen.add(kind.name)
            if module in in_compiled and not kind.in_compiled_layers:
                reasons = reasons or {f"{name} ({kind.name})": COMPILED}
                continue
            try:
                with torch_defaults():
                    match = probed.match(module, kind)
                if isinstance(match, GatedMatch) and mlp_tile_tokens is not None:
                    match = with_tiles(module, match, mlp_tile_tokens)
                swap_forward(module, kind, match, owner=owner)
                swapped[f"{name}: {match}"] += 1
                reasons = {}
                break
            except LeftAloneError as reason:
                reasons[f"{name} ({kind.name})"] = str(reason)
        left |= reasons
    link_siblings(together)
    if mlp_tile_tokens is not None and not any(isinstance(match_of(m), GatedMatch) for m in model.modules()):
        raise LigerDistError(
            f"mlp_tile_tokens is {mlp_tile_tokens} but {type(model).__name__} has no gated MLP that is computed by "
            "kernels (liger_dist.explain(model) names the reasons); leave it out."
        )
    absent = [(kind.name, kind.absent) for kind in KINDS if kind.name not in seen and kind.is_expected(model)]
    return LayerReport(swapped=tuple(swapped.items()), left=tuple(left.items()), absent=tuple(absent))


class _Probed:
    """Matches of the modules of one model that have been probed: most further modules are twins of one of them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._matches: dict[tuple[Any, ...], list[Match]] = {}

    def match(self, module: nn.Module, kind: Kind) -> Match:
        """Raises :class:`LeftAloneError` if the module is none of the kind."""
        parts = tuple((name, type(part)) for name, part in module.named_modules())
        tensors = (*module.named_parameters(), *module.named_buffers())
        shapes = tuple((name, full_shape(tensor)) for name, tensor in tensors)
        known = self._matches.setdefault((kind.name, parts, shapes), [])
        for match in known:
            twin = match.of_twin(module)
            if twin is not None:
                return twin
        known.append(kind.match(module, self._backend))
        return known[-1]


def restore_layers(model: nn.Module, *, owner: str) -> None:
    """Undoes :func:`swap_layers`, also in copies of modules, but for experts that are on several ranks."""
    for module in model.modules():
        if isinstance(module, Swapped) and not needs_its_ranks(module):
            without_tiles(module)
            restore_forward(module, owner=owner)
