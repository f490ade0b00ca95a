"""Numbers and flags of modules and configs that change after a forward: the wrapped model computes what the unwrapped
one computes with the same change, or refuses it by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from families import Family, batch_for, build, families
from models import make_batch, make_model
from torch import Tensor, nn

import liger_dist
from liger_dist.fused_layers.swap import Swapped
from liger_dist.sharding.process_groups import compute_device

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


# --- every kind of attribute, on every kind of layer ----------------------------------------------------------------


@dataclass
class Options:
    factor: float = 1.0


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda owner: setattr(owner, name, value)


class Read(NamedTuple):
    """Factor that a forward reads from its module."""

    start: dict[str, Any]
    """attributes of the module"""
    of: Callable[[Any], Any]
    """returns the factor, 1 at the start"""
    change: Callable[[Any], Any]


def tensor(value: float) -> Tensor:
    return torch.tensor(value, device=compute_device())


def one(x: Any) -> float:
    return 1.0


def two(x: Any) -> float:
    return 2.0


READS: dict[str, Read] = {
    "a number": Read({"factor": 1.0}, lambda m: m.factor, set_to("factor", 2.0)),
    "a number of NumPy": Read({"factor": np.float32(1)}, lambda m: float(m.factor), set_to("factor", np.float32(2))),
    "a string": Read({"mode": "plain"}, lambda m: 1.0 if m.mode == "plain" else 2.0, set_to("mode", "loud")),
    "a name with an underscore": Read({"_factor": 1.0}, lambda m: m._factor, set_to("_factor", 2.0)),
    "a tensor in place": Read({"factor": tensor(1.0)}, lambda m: m.factor, lambda m: m.factor.fill_(2.0)),
    "another tensor": Read({"factor": tensor(1.0)}, lambda m: m.factor, set_to("factor", tensor(2.0))),
    "an item": Read({"_all": [1.0]}, lambda m: m._all[0], lambda m: m._all.__setitem__(0, 2.0)),
    "an item of an item": Read({"all": [[1.0]]}, lambda m: m.all[0][0], lambda m: m.all[0].__setitem__(0, 2.0)),
    "a tensor in a list": Read({"all": [tensor(1.0)]}, lambda m: m.all[0], lambda m: m.all[0].fill_(2.0)),
    "a value of a dict": Read({"all": {"f": 1.0}}, lambda m: m.all["f"], lambda m: m.all.update(f=2.0)),
    "a dataclass": Read({"args": Options()}, lambda m: m.args.factor, lambda m: set_to("factor", 2.0)(m.args)),
    "another dataclass": Read({"args": Options()}, lambda m: m.args.factor, set_to("args", Options(2.0))),
    "a namespace": Read(
        {"args": SimpleNamespace(of={"f": 1.0})}, lambda m: m.args.of["f"], lambda m: m.args.of.update(f=2.0)
    ),
    "a function": Read({"_of": one}, lambda m: m._of(m), set_to("_of", two)),
    "a default of the class": Read({}, lambda m: m.default, set_to("default", 2.0)),
    "a default of the class, by a tensor": Read({}, lambda m: m.default, set_to("default", tensor(2.0))),
    "a method": Read({}, lambda m: m.method(), set_to("method", lambda: 2.0)),
    "an attribute that was absent": Read({}, lambda m: getattr(m, "later", 1.0), set_to("later", 2.0)),
    "a buffer that was None": Read(
        {},
        lambda m: 1.0 if getattr(m, "late", None) is None else m.late,
        lambda m: m.register_buffer("late", tensor(2.0)),
    ),
    "a module that was None": Read(
        {},
        lambda m: 1.0 if getattr(m, "late", None) is None else 2.0,
        lambda m: m.register_module("late", nn.Identity()),
    ),
    "the config": Read({}, lambda m: m.config.factor, lambda m: set_to("factor", 2.0)(m.config)),
    "a dict in the config": Read({}, lambda m: m.config.all["f"], lambda m: m.config.all.update(f=2.0)),
    "an object in the config": Read({}, lambda m: m.config.args.factor, lambda m: set_to("factor", 2.0)(m.config.args)),
}
LAYERS = {
    "MLP": ("llama", "LlamaMLP", "forward"),
    "norm": ("llama", "LlamaRMSNorm", "forward"),
    "activation": ("llama", "SiLUActivation", "forward"),
    "gated norm": ("mamba2", "MambaRMSNormGated", "forward"),
    "experts": ("gpt_oss", "GptOssExperts", "_apply_gate"),
}


def with_factor(kind: Any, method: str, read: Read) -> Any:
    """A class whose method multiplies its result by the factor."""
    original, factor = getattr(kind, method), read.of

    @wraps(original)
    def scaled(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, *args, **kwargs) * factor(self)  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {method: scaled, "default": 1.0, "method": lambda self: 1.0})


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", READS)
def test_what_a_forward_reads_from_its_module(kind: str, layer: str, is_copy: bool) -> None:
    read, (family, name, method) = READS[kind], LAYERS[layer]
    own: Any = make_model(family, dtype=torch.float32)
    own.config.factor, own.config.all, own.config.args = 1.0, {"f": 1.0}, Options()
    found = [module for module in own.modules() if type(module).__name__ == name]
    cls = with_factor(type(found[0]), method, read)
    for module in found:
        module.__class__ = cls
        vars(module).update(copy.deepcopy(read.start), config=own.config)
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none")
    parts = [module for module in wrapped.modules() if isinstance(module, cls)]
    if torch.cuda.is_available() and not isinstance(parts[0], Swapped):
        pytest.skip("left alone: probes compute on the CPU, and this module's tensor is on a GPU")
    assert layer == "activation" or all(isinstance(module, Swapped) for module in parts)
    outcome(wrapped, make_batch(0))
    if is_copy:
        wrapped = copy.deepcopy(wrapped)
    for model in (own, wrapped):
        for module in model.modules():
            if isinstance(module, cls):
                read.change(module)
    assert fault(outcome(wrapped, make_batch(0)), outcome(own, make_batch(0))) is None
