"""Selects ``attn_implementation="liger_dist"`` for one model instance, where it computes what the model's own does."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from .attention import NAME, is_replaced, register_attention

OWN = ("sdpa", "eager")
"""implementations that it takes the place of"""
SELECTED = "liger_dist: packed, padded and windowed sequences without a dense mask"


@dataclass
class AttentionSelection:
    """The attention of a model's text decoder after :func:`select_attention`."""

    reason: str | None
    """why the model keeps its own; None if it was selected"""
    configs: list[tuple[Any, Any]]
    """the config of the model, or of a module, and the copy that replaces it"""

    def __str__(self) -> str:
        return SELECTED if self.reason is None else f"its own: {self.reason}"

    def restore(self, model: nn.Module) -> None:
        """Gives modules the configs that they had before; also in copies of the model."""
        _exchange(model, [(new, old) for old, new in self.configs])


def select_attention(model: nn.Module, decoder: nn.Module) -> AttentionSelection:
    """Selects the implementation for ``decoder``, the text decoder of ``model``.

    Modules get copies of the configs, because another model may share the originals.
    """
    reason = _reason_against(model, decoder)
    if reason is not None:
        return AttentionSelection(reason, [])
    register_attention()
    configs: list[tuple[Any, Any]] = []
    _copied(model.config, decoder.config, configs)
    _exchange(model, configs)
    return AttentionSelection(None, configs)


def _reason_against(model: nn.Module, decoder: nn.Module) -> str | None:
    config: Any = getattr(decoder, "config", None)
    outer: Any = getattr(model, "config", None)
    if not _is_config(config) or not _is_config(outer):
        return "it has no config of transformers"
    own = config._attn_implementation
    if own not in OWN:
        return f"it is {own!r}"
    if config is not outer and not _is_within(config, outer):
        return "its config is not a part of the model's"
    if config is not outer and own == "eager":
        # Some of these models make the dense mask of their decoder themselves, another one than for "sdpa".
        return "it is 'eager' in a model of several parts"
    return _of_hosts() or _of_config(config) or _of_code(decoder)


def _of_config(config: Any) -> str | None:
    """Why attention with these numbers is not one softmax over causal scores of one head size."""
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        return "it is not causal self-attention alone"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its scores are soft-capped"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its queries and values have different head sizes"
    dropouts = {name: getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop", "attn_dropout")}
    used = next((name for name, value in dropouts.items() if isinstance(value, float) and value > 0.0), None)
    return None if used is None else f"it has dropout ({used})"


def _of_code(decoder: nn.Module) -> str | None:
    """Why its code may not take the implementation."""
    files = (sys.modules.get(cls.__module__) for cls in type(decoder).__mro__ if cls not in _bases())
    functions: list[Any] = [vars(file).get("ALL_ATTENTION_FUNCTIONS") for file in files if file is not None]
    if not any(own is not None for own in functions):
        return "its code does not use transformers' AttentionInterface"
    if not getattr(decoder, "_supports_flex_attn", False):
        return "its code expects masks that are tensors"
    if any(getattr(own, "_local_mapping", None) for own in functions):
        return "its file has attention functions that no other has"
    if any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in decoder.named_parameters()):
        return "it has sinks"
    return None


def _bases() -> tuple[Any, ...]:
    """The classes that every model inherits from."""
    from transformers.modeling_utils import PreTrainedModel

    bases: tuple[Any, ...] = PreTrainedModel.__mro__
    return bases


def _of_hosts() -> str | None:
    """Why a host's sequence or context parallelism needs its own attention."""
    if is_replaced():
        return 'another package has replaced the attention of "sdpa"'
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    parallelism = None if state is None else state._shared_state.get("parallelism_config")
    for name in ("cp_size", "sp_size"):
        size = getattr(parallelism, name, 1)
        if isinstance(size, int) and size > 1:
            return f"Accelerate's {name} is {size}"
    return None


def _is_config(value: Any) -> bool:
    from transformers.configuration_utils import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _is_within(config: Any, outer: Any) -> bool:
    return any(part is config or _is_within(config, part) for part in vars(outer).values() if _is_config(part))


def _copied(outer: Any, config: Any, configs: list[tuple[Any, Any]]) -> Any:
    """Copies ``outer`` down to ``config``, whose copy selects the implementation."""
    kind: Any = type(outer)
    twin = kind.__new__(kind)
    vars(twin).update(vars(outer))
    configs.append((outer, twin))
    if outer is config:
        twin._attn_implementation = {"": NAME}
        return twin
    for name, part in vars(outer).items():
        if _is_config(part) and (part is config or _is_within(config, part)):
            vars(twin)[name] = _copied(part, config, configs)
    return twin


def _exchange(model: nn.Module, configs: list[tuple[Any, Any]]) -> None:
    twins = {id(old): new for old, new in configs}
    for module in model.modules():
        twin = twins.get(id(vars(module).get("config")))
        if twin is not None:
            module.config = twin
