"""Detects modules that their parent calls with one tensor, such as q, k and v, by a run without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from .token_dependency import EAGER, PAIR, CannotRunError, TokenByToken, call_arguments, dummy_run, token_ids

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
        try:
            with TokenByToken(PAIR):
                model(input_ids=token_ids(model).to(device), **dict(call_arguments(model, {})))
        except CannotRunError:
            raise
        except Exception as error:
            raise CannotRunError(f"{type(error).__name__}: {error}") from error
