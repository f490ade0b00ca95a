"""Numbers and flags of modules and configs that change after a forward: the wrapped model computes what the unwrapped
one computes with the same change, or refuses it by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from families import Family, batch_for, build, families
from torch import Tensor, nn

import liger_dist

FAMILIES = ("llama", "gemma2", "granite", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3", "cohere", "falcon_h1")
BY_NAME: dict[str, Family] = {family.name: family for family in families()}
RANDOM = ("dropout", "jitter", "training", "sparse")
"""in names of what draws random numbers, and of another layout of gradients"""
TOLERANCE = 2e-4
pytestmark = pytest.mark.filterwarnings("ignore")


def is_number(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not name.startswith("_") and not any(word in name for word in RANDOM)


def own_class(module: nn.Module) -> str:
    """The name of the model's class, where a layer or the model has been swapped."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("liger_dist")).__name__


def places(model: Any) -> Iterator[tuple[str, str]]:
    """Class of modules, or ``config``, and the name of a number or flag."""
    found = {("config", name) for name, value in vars(model.config).items() if is_number(name, value)}
    for module in model.modules():
        found |= {(own_class(module), name) for name, value in vars(module).items() if is_number(name, value)}
    yield from sorted(found)


def change(model: Any, kind: str, name: str) -> None:
    owners = [model.config] if kind == "config" else [m for m in model.modules() if own_class(m) == kind]
    for owner in owners:
        value = vars(owner).get(name)
        if isinstance(value, bool):
            setattr(owner, name, not value)
        elif isinstance(value, int | float):
            setattr(owner, name, value * 1.5 if isinstance(value, float) else value + 1)


def outcome(model: Any, batch: dict[str, Any]) -> dict[str, Tensor] | Exception:
    """The loss and gradients, or what was raised."""
    model.zero_grad()
    try:
        loss = model(**batch).loss
        loss.backward()
    except Exception as error:  # Many changes leave a model that cannot run.
        return error
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fault(found: dict[str, Tensor] | Exception, right: dict[str, Tensor] | Exception) -> str | None:
    if isinstance(right, Exception) or isinstance(found, liger_dist.LigerDistError):
        return None
    if isinstance(found, Exception):
        return repr(found)
    if found.keys() != right.keys():
        return f"gradients of {sorted(found.keys() ^ right.keys())[:3]}"
    for name, value in right.items():
        error = float((found[name] - value).abs().max()) / max(float(value.abs().max()), 1e-6)
        if not (error < TOLERANCE or (bool(value.isnan().any()) and bool(found[name].isnan().any()))):
            return f"{name} by {error:.1e}"
    return None


@pytest.mark.nightly(family=FAMILIES[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_attribute_that_changes_is_taken_or_refused(family: str) -> None:
    built: Any = build(BY_NAME[family]).float().train()
    batch = batch_for(BY_NAME[family], built)
    found = {}
    for kind, name in places(built):
        own, wrapped = copy.deepcopy(built), liger_dist.wrap(copy.deepcopy(built), "none")
        outcome(wrapped, batch)
        for model in (own, wrapped):
            change(model, kind, name)
        found[f"{kind}.{name}"] = fault(outcome(wrapped, batch), outcome(own, batch))
    assert len(found) > 20
    assert not {place: what for place, what in found.items() if what is not None}
