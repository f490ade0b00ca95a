"""What a model's own code does to logits between its head and its loss.

The model's real ``forward`` runs once with its decoder and its head replaced by stand-ins that cost nothing and touch
no weight, and its loss function replaced by one that looks at what arrives. Candidates are read from the config; the
probe decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .structure import Structure

PROBE_TOKENS = 6


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """``softcap * tanh(scale * logit / softcap)``, or ``scale * logit`` without a soft-cap."""

    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


class NotFusableError(Exception):
    """The model's own code cannot be explained; the message says why. Never leaves this package."""


class _Decoder(nn.Module):
    """Stands in for the decoder: hands out hidden states of the right shape."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        class Output(BaseModelOutputWithPast):  # type: ignore[misc]
            def __getattr__(self, name: str) -> None:
                # Families have fields of their own (router logits, say); nobody reads them here.
                return None

        return Output(last_hidden_state=self.hidden_states)


class _Head(nn.Module):
    """Stands in for the head: hands out the probe's logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.logits[:, : hidden_states.shape[1]]


def probe_transform(model: nn.Module, structure: Structure) -> LogitTransform:
    """The transform that the model applies to logits before its loss.

    Raises:
        NotFusableError: the model does not call ``self.loss_function`` with its labels, or changes the logits in a
        way that
            its config does not explain.
    """
    logits = torch.linspace(-70.0, 70.0, PROBE_TOKENS * 8, dtype=torch.float64).reshape(1, PROBE_TOKENS, 8)
    labels = torch.arange(PROBE_TOKENS)[None]
    arrived = _run(model, structure, logits, labels)
    arrived_logits = arrived.get("logits")
    if not isinstance(arrived_logits, Tensor):
        raise NotFusableError("its forward does not hand logits and labels to self.loss_function")
    if not isinstance(arrived.get("labels"), Tensor) or not torch.equal(arrived["labels"], labels):
        raise NotFusableError("its forward changes the labels before the loss")
    if arrived_logits.shape != logits.shape:
        raise NotFusableError(
            f"its forward changes the logits' shape from {tuple(logits.shape)} to {tuple(arrived_logits.shape)}"
        )
    for transform in _candidates(model):
        if torch.allclose(arrived_logits.double(), transform(logits), rtol=1e-5, atol=1e-5):
            return transform
    raise NotFusableError("its forward changes the logits before the loss in a way that its config does not explain")


def _candidates(model: nn.Module) -> Iterator[LogitTransform]:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    named = vars(get_text_config() if callable(get_text_config) else config) if config is not None else {}
    numbers = {name: float(value) for name, value in named.items() if isinstance(value, int | float) and value}
    caps = [value for name, value in numbers.items() if "softcap" in name or "logit_cap" in name]
    factors = [value for name, value in numbers.items() if "logit" in name or "head" in name]
    scales = [1.0, *factors, *(1.0 / factor for factor in factors)]
    for softcap, scale in itertools.product([None, *caps], scales):
        yield LogitTransform(softcap=softcap, scale=scale)


def _run(model: nn.Module, structure: Structure, logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """What arrives at the model's loss function, by the names of its arguments."""
    prefix = getattr(model, "base_model_prefix", "")
    if prefix not in model._modules:
        raise NotFusableError(f"it keeps no decoder under its base_model_prefix {prefix!r}")
    if not isinstance(getattr(type(model), "loss_function", None), property):
        raise NotFusableError("it has no loss_function to hand the loss to")
    from transformers.loss.loss_utils import ForCausalLMLoss

    own_loss = model.loss_function
    if own_loss is not ForCausalLMLoss:
        name = getattr(own_loss, "__qualname__", repr(own_loss))
        raise NotFusableError(f"its loss_function is {name}, not the causal cross entropy of transformers")
    arrived: dict[str, Any] = {}

    def look(*args: Any, **kwargs: Any) -> Tensor:
        arrived.update(zip(("logits", "labels"), args, strict=False))
        arrived.update(kwargs)
        return torch.zeros(())

    hidden_states = torch.zeros(1, PROBE_TOKENS, structure.head.in_features, dtype=logits.dtype)
    # There are no router logits to compute an auxiliary loss from.
    quiet = {"output_router_logits": False} if "output_router_logits" in signature(model.forward).parameters else {}
    parent_name, _, head_attribute = structure.head_name.rpartition(".")
    head_parent = model.get_submodule(parent_name)
    with (
        torch.no_grad(),
        _swapped(model._modules, prefix, _Decoder(hidden_states)),
        _swapped(head_parent._modules, head_attribute, _Head(logits)),
        _swapped(vars(model), "_loss_function", look),
    ):
        try:
            model.forward(input_ids=torch.zeros_like(labels), labels=labels, **quiet)
        except Exception as error:
            raise NotFusableError(f"its forward cannot be probed ({type(error).__name__}: {error})") from error
    return arrived


@contextmanager
def _swapped(mapping: dict[str, Any], key: str, value: Any) -> Iterator[None]:
    """``mapping[key] = value`` for a while; a key that was absent is absent again afterwards."""
    missing = object()
    before = mapping.get(key, missing)
    mapping[key] = value
    try:
        yield
    finally:
        if before is missing:
            del mapping[key]
        else:
            mapping[key] = before
