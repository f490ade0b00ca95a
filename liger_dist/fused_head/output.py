"""The output of a fused call: the model's output, without logits and with the requested outputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError, LogitsNotComputedError

from .logits import HOW_TO_GET_LOGITS, FusedLogits


class WithOutputs:
    """Mixed into the class of a model's output that has further fields."""

    items: Callable[[], Iterable[tuple[str, Any]]]
    keys: Callable[[], Iterable[str]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __reduce__(self) -> Any:
        cls, outputs = type(self)._liger_dist_made_of  # type: ignore[attr-defined]
        values = {name: value for name, value in self.items() if not isinstance(value, FusedLogits)}
        return _rebuilt, (cls, outputs, isinstance(self, WithoutLogits), values)


class WithoutLogits(WithOutputs):
    """Mixed into the class of the output of a fused call. ``logits`` is not a field: wrappers such as DDP walk the
    fields and must not find it. In evaluation the key stays, with logits that refuse to be read: a trainer's metrics
    must not be computed from the remaining fields."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        logits = vars(self).get("logits")
        if isinstance(logits, FusedLogits):
            keep: Any = OrderedDict.__setitem__
            keep(self, "logits", logits)

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            raise LogitsNotComputedError(HOW_TO_GET_LOGITS)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if key == "logits" and key not in self.keys():
            raise LogitsNotComputedError(HOW_TO_GET_LOGITS)
        return super().__getitem__(key)  # type: ignore[misc]

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the fields that exist, in their order; in place of logits a tensor that refuses to be read."""
        cls, _ = type(self)._liger_dist_made_of  # type: ignore[attr-defined]
        values = dict(self.items())
        if "logits" not in values:
            values["logits"] = FusedLogits.carrying(torch.empty(0), None, vocab_size=0)
        declared = [field.name for field in dataclasses.fields(cls)]
        names = [name for name in declared if name in values]
        return tuple(values[name] for name in (*names, *(name for name in values if name not in declared)))


def fused_output(output: Any, outputs: dict[str, Tensor], *, model_name: str, without_logits: bool) -> Any:
    """Returns a model's ``output`` with ``outputs`` as fields. Any other container stays as it is; the logits in it
    refuse to be read.

    Raises:
        LigerDistError: there are outputs, and the model returns a tuple.
    """
    from transformers.utils import ModelOutput

    if isinstance(output, ModelOutput):
        if not without_logits and not outputs:
            return output
        cls: Any = type(output)
        fused = _class_of(cls, tuple(outputs), without_logits=without_logits)
        values = dict(output.items())
        logits = values.get("logits")
        if isinstance(logits, FusedLogits):
            del values["logits"]
            if not torch.is_grad_enabled():
                values["logits"] = logits.refusing()
        return fused(**values, **outputs)
    if outputs:
        raise LigerDistError(
            f"outputs={tuple(outputs)} were asked for, but {model_name} returns a {type(output).__name__}, which has "
            "no names for them; call it with return_dict=True."
        )
    return output


def with_field(output: Any, name: str, value: Tensor, *, loss: Tensor) -> Any:
    """Returns a model's ``output`` with another loss, and one more field; a tuple gets the loss alone."""
    if isinstance(output, tuple):
        return (loss, *output[1:])
    cls: Any = type(output)
    return _class_of(cls, (name,), without_logits=False)(**(dict(output.items()) | {"loss": loss, name: value}))


def with_logits(output: WithOutputs, logits: Any) -> Any:
    """Returns the fused output of a call that had no labels, with ``logits`` that stand for those that were never
    computed. The outputs stay: DDP looks among the fields for the graph that the backward will run."""
    cls, outputs = type(output)._liger_dist_made_of  # type: ignore[attr-defined]
    made = _class_of(cls, outputs, without_logits=False)
    return made(**(dict(output.items()) | {"logits": logits, "loss": None}))


@lru_cache(maxsize=256)
def _class_of(cls: Any, outputs: tuple[str, ...], *, without_logits: bool) -> Any:
    kept = [field.name for field in dataclasses.fields(cls) if not (without_logits and field.name == "logits")]
    names = [*kept, *(name for name in outputs if name not in kept)]
    mixin = WithoutLogits if without_logits else WithOutputs
    made: Any = dataclasses.make_dataclass(
        cls.__name__, [(name, Any, None) for name in names], bases=(mixin, cls), repr=False, eq=False
    )
    if without_logits:
        made.__dataclass_fields__.pop("logits", None)
    made.__module__ = cls.__module__
    made._liger_dist_made_of = cls, outputs
    return made


def _rebuilt(cls: Any, outputs: tuple[str, ...], without_logits: bool, values: dict[str, Any]) -> Any:
    """Rebuilds an output from a pickle, which cannot name a class made at run time."""
    return _class_of(cls, outputs, without_logits=without_logits)(**values)
