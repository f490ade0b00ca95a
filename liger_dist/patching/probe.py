"""What a model's own code does to logits between its head and its loss.

The model's real ``forward`` runs once with its decoder and its head replaced by stand-ins that cost nothing and touch
no weight, and its loss function replaced by one that looks at what arrives. Candidates are read from the config; the
probe decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from .structure import Structure

PROBE_TOKENS = 6
PROBE_ITEMS = 7
"""a number of items that no model would come up with by itself"""


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
    """The transform that the model applies to logits before its loss, alike in training and evaluation.

    Raises:
        NotFusableError: the model does not call ``self.loss_function`` as transformers' own models do, or changes the
            logits in a way that its config does not explain.
    """
    for hook in (*structure.head._forward_pre_hooks.values(), *structure.head._forward_hooks.values()):
        # Those of FSDP2 and of torch's tensor parallelism move tensors and change no number.
        if not (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
            raise NotFusableError("its output embedding has forward hooks, which could change the logits")
    training, evaluation = (_probe_once(model, structure, training=mode) for mode in (True, False))
    if training != evaluation:
        raise NotFusableError("its forward treats logits differently in training and in evaluation")
    return training


def _probe_once(model: nn.Module, structure: Structure, *, training: bool) -> LogitTransform:
    vocab_size = structure.head.out_features
    size = (1, PROBE_TOKENS, vocab_size)
    logits = torch.linspace(-70.0, 70.0, PROBE_TOKENS * vocab_size, dtype=torch.float64).reshape(size)
    labels = torch.arange(PROBE_TOKENS)[None] % vocab_size
    arrived = _run(model, structure, logits, labels, training=training)
    if arrived is None:
        raise NotFusableError("its forward does not hand logits and labels to self.loss_function")
    if not isinstance(arrived["labels"], Tensor) or not torch.equal(arrived["labels"], labels):
        raise NotFusableError("its forward changes the labels before the loss")
    expected = {
        "vocab_size": vocab_size,
        "num_items_in_batch": _further_inputs(model, labels).get("num_items_in_batch"),
    }
    for name in ("vocab_size", "num_items_in_batch", "ignore_index", "shift_labels"):
        given = arrived.get(name)
        if isinstance(given, Tensor) or given != expected.get(name):
            raise NotFusableError(f"its forward gives its loss function a {name} of its own")
    arrived_logits = arrived["logits"]
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
    factors = [value for name, value in numbers.items() if "logit" in name or "lm_head" in name]
    scales = [1.0, *factors, *(1.0 / factor for factor in factors)]
    for softcap, scale in itertools.product([None, *caps], scales):
        yield LogitTransform(softcap=softcap, scale=scale)


def _run(
    model: nn.Module, structure: Structure, logits: Tensor, labels: Tensor, *, training: bool
) -> dict[str, Any] | None:
    """What arrives at the model's loss function, by the names of its arguments; None when nothing does."""
    prefix = getattr(model, "base_model_prefix", "")
    if prefix not in model._modules:
        raise NotFusableError(f"it keeps no decoder under its base_model_prefix {prefix!r}")
    if not isinstance(getattr(type(model), "loss_function", None), property):
        raise NotFusableError("it has no loss_function to hand the loss to")
    from transformers.loss.loss_utils import ForCausalLMLoss

    own_loss: Any = model.loss_function
    if own_loss is not ForCausalLMLoss:
        name = getattr(own_loss, "__qualname__", repr(own_loss))
        raise NotFusableError(f"its loss_function is {name}, not the causal cross entropy of transformers")
    seen: list[dict[str, Any]] = []

    def look(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(dict(signature(ForCausalLMLoss).bind(*args, **kwargs).arguments))
        return torch.zeros(())

    parent_name, _, head_attribute = structure.head_name.rpartition(".")
    head_parent = model.get_submodule(parent_name)
    hidden_states = torch.zeros(1, PROBE_TOKENS, structure.head.in_features, dtype=logits.dtype)
    with (
        torch.no_grad(),
        _swapped(model._modules, prefix, _Decoder(hidden_states)),
        _swapped(head_parent._modules, head_attribute, _Head(logits)),
        _swapped(vars(model), "_loss_function", look),
        _swapped(vars(model), "training", training),
    ):
        try:
            model.forward(input_ids=torch.zeros_like(labels), labels=labels, **_further_inputs(model, labels))
        except Exception as error:
            raise NotFusableError(f"its forward cannot be probed ({type(error).__name__}: {error})") from error
    if len(seen) > 1:
        raise NotFusableError(f"its forward computes {len(seen)} losses")
    return seen[0] if seen else None


def _further_inputs(model: nn.Module, labels: Tensor) -> dict[str, Any]:
    """Inputs that a forward might use to change the loss."""
    forward: Callable[..., Any] = model.forward
    parameters = signature(forward).parameters
    inputs: dict[str, Any] = {}
    if "num_items_in_batch" in parameters or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        inputs["num_items_in_batch"] = PROBE_ITEMS
    if "attention_mask" in parameters:
        inputs["attention_mask"] = (labels > 1).long()
    if "output_router_logits" in parameters:
        # There are no router logits here to compute an auxiliary loss from.
        inputs["output_router_logits"] = False
    return inputs


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
