"""Selects ``attn_implementation="liger_dist"`` for one model instance, where it computes the same as the model's
attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_dist.model.structure import Structure
from liger_dist.sharding.accelerate import size_in_accelerate
from liger_dist.trials.model_run import passes_masks_on

from .attention import MASKED, NAME, register_attention
from .document_mask import attends_in_both_directions, is_replaced, note_eager

REPLACEABLE = ("sdpa", "eager", NAME, *MASKED.values())
"""implementations that it may replace; another model with the same config may have selected "liger_dist" already"""
EXPECTS_TENSORS = "its code expects masks that are tensors"
SELECTED = "liger_dist: packed, padded and windowed sequences without a dense mask"
WITH_MASKS = "its own, with masks of packed documents"


@dataclass
class AttentionSelection:
    """Attention of a model's text decoder after :func:`select_attention`."""

    reason: str | None
    """reason why the model keeps its original attention; None if "liger_dist" was selected"""
    config: Any = None
    """config of the text decoder"""
    original: str | None = None
    """implementation before the selection"""
    selected: str | None = None
    """"liger_dist", or the model's original one with masks of packed documents; None without a selection"""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.selected is not None:
            register_attention()  # The model may have been loaded into another program.
            self._note()

    def __post_init__(self) -> None:
        self._note()

    def _note(self) -> None:
        if self.selected == NAME and self.original == "eager":
            note_eager(self.config)

    def __str__(self) -> str:
        if self.selected is None:
            return f"its own: {self.reason}"
        if not self.is_selected():
            return f"its own: it was set to {self.config._attn_implementation!r} after wrap"
        return SELECTED if self.selected == NAME else f"{WITH_MASKS}: {self.reason}"

    def is_selected(self) -> bool:
        """True if the decoder has the selected attention now: another one may have been set after ``wrap``."""
        return self.selected is not None and self.config._attn_implementation == self.selected

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Selects the previous implementation of the decoder within the context."""
        is_selected = self.is_selected()
        if is_selected:
            _select(self.config, self.original)
        try:
            yield
        finally:
            if is_selected:
                _select(self.config, self.selected)

    def restore(self) -> None:
        """Selects the previous implementation of the decoder, unless another was selected since."""
        if self.is_selected():
            _select(self.config, self.original)


def select_attention(decoder: nn.Module, wanted: str | None, reason: str | None) -> AttentionSelection:
    """Selects the implementation ``wanted`` for a text decoder, in its config, as ``model.set_attn_implementation``
    does; None for the decoder's original one.

    Args:
        reason: why it is not "liger_dist".
    """
    if wanted is None:
        return AttentionSelection(reason)
    register_attention()
    config: Any = decoder.config
    original = config._attn_implementation
    _select(config, wanted)
    return AttentionSelection(reason, config, original, wanted)


def reason_against_varlen(model: nn.Module, structure: Structure, *, has_recurrent: bool) -> str | None:
    """Says why "liger_dist" attention does not compute the same as the model's original one, as a clause; None if it
    does.

    Args:
        has_recurrent: True if some decoder layers are recurrent. The classes of many such models do not say that they
            take masks of any type: their code is run.
    """
    reason = reason_against(model, structure.decoder)
    if reason == EXPECTS_TENSORS and has_recurrent:
        register_attention()
        return None if passes_masks_on(model, structure.layers, NAME) else reason
    return reason


def _select(config: Any, implementation: str | None) -> None:
    """Sets the implementation of ``config`` and not of its parts, which a dict leaves as they are. Without parts by its
    name: not every config of transformers before 5.24 can be set by a dict."""
    config._attn_implementation = {"": implementation} if config.sub_configs else implementation


def reason_against(model: nn.Module, decoder: nn.Module) -> str | None:
    """Says why the model keeps its original attention, as a clause; None if it does not."""
    config: Any = getattr(decoder, "config", None)
    outer: Any = getattr(model, "config", None)
    if not _is_config(config) or not _is_config(outer):
        return "it has no config of transformers"
    original = config._attn_implementation
    if original not in REPLACEABLE:
        return f"it is {original!r}"
    if config is not outer and not _is_within(config, outer):
        return "its config is not a part of the model's"
    if config is not outer and original == "eager":
        # Some of these models build the dense mask of their decoder themselves, and not the same as for "sdpa".
        return "it is 'eager' in a model of several parts"
    return _of_hosts() or _of_config(config) or _of_code(decoder) or _of_modules(decoder, config)


def _of_config(config: Any) -> str | None:
    """Says why attention with this config is not one softmax over scores of one head size, causal or in both
    directions."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is not self-attention alone"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its scores are soft-capped"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its queries and values have different head sizes"
    dropouts = {name: getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop", "attn_dropout")}
    used = next((name for name, value in dropouts.items() if isinstance(value, float) and value > 0.0), None)
    return None if used is None else f"it has dropout ({used})"


def _of_code(decoder: nn.Module) -> str | None:
    """Says why the decoder's code may not work with the implementation."""
    files = (sys.modules.get(cls.__module__) for cls in type(decoder).__mro__ if cls not in _bases())
    functions: list[Any] = [vars(file).get("ALL_ATTENTION_FUNCTIONS") for file in files if file is not None]
    if not any(functions_of_file is not None for functions_of_file in functions):
        return "its code does not use transformers' AttentionInterface"
    if not getattr(decoder, "_supports_flex_attn", False):
        return EXPECTS_TENSORS
    if any(getattr(functions_of_file, "_local_mapping", None) for functions_of_file in functions):
        return "its file has attention functions that no other has"
    return None


def _of_modules(decoder: nn.Module, config: Any) -> str | None:
    """Says why attention modules may compute something else than the decoder's config says. Each module reads the
    implementation from its config, but the decoder builds the mask from the decoder's: copied layers have copies of it.
    ``is_causal`` of a module counts only without a mask."""
    for module in decoder.modules():
        module_config = vars(module).get("config")
        if _is_config(module_config) and module_config is not config and hasattr(module, "is_causal"):
            return f"a {type(module).__name__} reads another config object than its decoder, as copied layers do"
        if vars(module).get("is_causal") is False and not attends_in_both_directions(config):
            return f"is_causal of a {type(module).__name__} is False"
    return None


def _bases() -> tuple[Any, ...]:
    """Returns the base classes of every model."""
    from transformers.modeling_utils import PreTrainedModel

    bases: tuple[Any, ...] = PreTrainedModel.__mro__
    return bases


def _of_hosts() -> str | None:
    """Says why a host's sequence or context parallelism needs its attention."""
    if is_replaced():
        return 'another package has replaced the attention of "sdpa"'
    sizes = {option: size_in_accelerate(option) for option in ("cp_size", "sp_size")}
    return next((f"Accelerate's {option} is {size}" for option, size in sizes.items() if size > 1), None)


def _is_config(value: Any) -> bool:
    from transformers.configuration_utils import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _is_within(config: Any, outer: Any) -> bool:
    return any(part is config or _is_within(config, part) for part in vars(outer).values() if _is_config(part))
