"""What a model returns from a fused call: its own output, without logits and with the outputs that were asked for."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from liger_dist.errors import LigerDistError, LogitsNotComputedError

from .fused_logits import HOW_TO_GET_LOGITS

if TYPE_CHECKING:
    from .request import LossRequest


class WithoutLogits:
    """Mixed into the class of a model's output. The name ``logits`` is no field any more: containers are walked by
    wrappers, and must not meet numbers that do not exist."""

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            raise LogitsNotComputedError(HOW_TO_GET_LOGITS)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if key == "logits":
            raise LogitsNotComputedError(HOW_TO_GET_LOGITS)
        return super().__getitem__(key)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        cls, reports = type(self)._liger_dist_made_of  # type: ignore[attr-defined]
        return _rebuilt, (cls, reports, dict(self))


def fused_output(output: Any, request: LossRequest) -> Any:
    """A model's ``output`` of a fused call as one of :class:`WithoutLogits`, with the request's reports as fields. Any
    other container stays as it is; the logits in it refuse to be read.

    Raises:
        LigerDistError: reports were asked for, and the model returns a tuple.
    """
    from transformers.utils import ModelOutput

    reports = request.reports()
    if isinstance(output, ModelOutput):
        cls: Any = type(output)
        fused = _class_without_logits(cls, tuple(reports))
        return fused(**{name: value for name, value in output.items() if name != "logits"}, **reports)
    if reports:
        raise LigerDistError(
            f"outputs={tuple(reports)} were asked for, but {type(request.seam.model).__name__} returns a "
            f"{type(output).__name__}, which has no names for them; call it with return_dict=True."
        )
    return output


@lru_cache(maxsize=256)
def _class_without_logits(cls: Any, reports: tuple[str, ...]) -> Any:
    fields = [(field.name, Any, None) for field in dataclasses.fields(cls) if field.name != "logits"]
    extra = [(name, Any, None) for name in reports if name not in {name for name, *_ in fields}]
    fused: Any = dataclasses.make_dataclass(cls.__name__, [*fields, *extra], bases=(WithoutLogits, cls))
    fused.__dataclass_fields__.pop("logits", None)
    fused.__module__ = cls.__module__
    fused._liger_dist_made_of = cls, reports
    return fused


def _rebuilt(cls: Any, reports: tuple[str, ...], values: dict[str, Any]) -> Any:
    """From a pickle, which cannot name a class that was made at run time."""
    return _class_without_logits(cls, reports)(**values)
