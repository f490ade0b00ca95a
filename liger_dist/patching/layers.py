"""The layers of one model: what can be replaced by a kernel is found by structure, confirmed by a probe, and undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from liger_dist_kernels import Backend

from . import gated_mlps, norms, residuals, rotary_calls
from .replaced import LeftAloneError, Replaced, restore_forward


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What became of a model's layers."""

    replaced: tuple[tuple[str, int], ...] = ()
    """a description of the modules and what they compute, and how many there are"""
    left: tuple[tuple[str, str], ...] = ()
    """a class of modules and why it was left alone"""

    def lines(self) -> list[tuple[str, str]]:
        """For tables."""
        rows = [("replaced", f"{count} x {what}") for what, count in self.replaced]
        return rows + [("left alone", f"{what}: {why}") for what, why in self.left]


def replace_layers(
    model: nn.Module, decoder_layers: tuple[nn.Module, ...], *, backend: Backend, owner: str
) -> LayerReport:
    """Replaces norms, gated MLPs, calls of rotary functions and residual additions of ``model``, where its own code is
    reproduced by the kernels'. ``owner`` is a name for whoever will call :func:`restore_layers`."""
    replaced: Counter[str] = Counter()
    left: dict[str, str] = {}

    def attempt(module: nn.Module, kind: str, replace: Callable[[], object]) -> None:
        name = type(module).__name__
        try:
            replaced[f"{name}: {replace()}"] += 1
        except LeftAloneError as reason:
            left[f"{name} ({kind})"] = str(reason)

    for module in list(model.modules()):
        if isinstance(module, Replaced):
            continue
        if norms.is_candidate(module):
            attempt(module, norms.KIND, partial(norms.replace, module, backend, owner=owner))
        elif gated_mlps.is_candidate(module):
            attempt(module, gated_mlps.KIND, partial(gated_mlps.replace, module, backend, owner=owner))
        elif rotary_calls.is_candidate(module):
            attempt(module, rotary_calls.KIND, partial(rotary_calls.replace, module, backend, owner=owner))
        elif module in decoder_layers:
            attempt(module, residuals.KIND, partial(residuals.replace, module, owner=owner))
    return LayerReport(replaced=tuple(replaced.items()), left=tuple(left.items()))


def restore_layers(model: nn.Module, *, owner: str) -> None:
    """Undoes :func:`replace_layers`, also in copies that an adapter has made of some modules."""
    for module in model.modules():
        if isinstance(module, Replaced):
            restore_forward(module, owner=owner)
