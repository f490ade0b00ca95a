"""PEFT on a model and on its lm_head: all names of PEFT that this library reads.

LoRA and DoRA compute a map that is linear in the hidden states, for any ranks, scalings and magnitudes. Its weight is
the map of the identity, computed by PEFT's code. Every parameter is read inside its module's call, where wrappers have
unsharded it, and autograd propagates the weight's gradient to each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

WAY_OUT = "exclude lm_head from target_modules, or train it fully with modules_to_save."
TRAINED_ROWS = (
    "PEFT trains some rows of its lm_head (trainable_token_indices on a tied model); train all of them with "
    "modules_to_save to have the loss fused"
)


def base_model_of(model: nn.Module) -> nn.Module:
    """Returns the base model inside a ``PeftModel``, which contains the PEFT layers; any other model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    return base if isinstance(base, nn.Module) else model


def needs_own_root(outer: nn.Module, model: nn.Module) -> bool:
    """True for a ``PeftModel`` that has parameters outside of ``model``, such as prompts, or calls the forward of
    ``model`` without its hooks (AdaLoRA, AdaptionPrompt): FSDP2's root is then ``outer``. LoRA layers are inside
    ``model``, and both ``model`` and ``outer`` may be called."""
    inside = set(model.parameters())
    if any(parameter not in inside for parameter in outer.parameters()):
        return True
    tuner = getattr(outer, "base_model", None)
    if not isinstance(tuner, nn.Module) or getattr(tuner, "model", None) is not model:
        return False
    code = getattr(type(tuner).forward, "__code__", None)
    return "forward" in vars(tuner) or (code is not None and "forward" in code.co_names)


def target_parameters_of(outer: nn.Module) -> dict[str, set[str]]:
    """Returns the last part of each name in ``target_parameters``, by the adapters of a ``PeftModel``; nothing of any
    other model."""
    configs: Any = getattr(outer, "peft_config", None) or {}
    return {
        adapter: {name.rpartition(".")[2] for name in getattr(one, "target_parameters", None) or ()}
        for adapter, one in configs.items()
    }


def adapters_of(*around: nn.Module) -> tuple[object, ...]:
    """Returns the names of PEFT adapters on modules that PEFT may wrap, and of the active ones; changes when one is
    added."""
    tuners = [getattr(module, "base_model", None) for module in around]
    active = [getattr(tuner, "active_adapter", None) for tuner in tuners if isinstance(tuner, nn.Module)]
    named = [tuple(vars(module).get("peft_config", ())) for module in around]
    return (*named, *(tuple(name) for name in active if isinstance(name, str | list)))


def adapter_settings(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Returns what decides how the PEFT layers in ``module`` compute now: each layer with the names of attributes and
    copies of their values."""
    layers = [part for part in module.modules() if has_lora(part)]
    return [(layer, name, copy(getattr(layer, name))) for layer in layers for name in _DECIDING if hasattr(layer, name)]


def hooks_rows(module: nn.Module) -> bool:
    """True in a call for which PEFT has hooked what belongs to each row of the batch onto the layers in ``module``:
    names of adapters, or the offsets of aLoRA."""
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    return any((getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith("peft.") for hook in hooks)


_DECIDING = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def learns_prompts(outer: nn.Module) -> bool:
    """True for a ``PeftModel`` that prepends learned tokens to those of a call."""
    return bool(getattr(getattr(outer, "active_peft_config", None), "is_prompt_learning", False))


def reason_against_packing(outer: nn.Module) -> str | None:
    """Says why a ``PeftModel`` takes a packed row for one text, as a clause; None if it does not."""
    if learns_prompts(outer):
        return "PEFT puts its prompts before the first document of a row alone"
    if getattr(getattr(outer, "active_peft_config", None), "alora_invocation_tokens", None):
        return "PEFT's aLoRA begins at the last invocation of a row"
    return None


def loss_objection(outer: nn.Module) -> str | None:
    """Says why a ``PeftModel`` needs the logits of each call, as a clause; None if it leaves the loss to its base
    model."""
    config = getattr(outer, "active_peft_config", None)
    is_cpt = getattr(config, "peft_type", None) == "CPT"
    return "PEFT's CPT weighs the loss of each token itself, from the logits" if is_cpt else None


def reads_sharded_weights(outer: nn.Module) -> str | None:
    """Says why a ``PeftModel`` cannot train with sharded parameters, as a clause; None if it reads each parameter
    inside its module's call."""
    config = getattr(outer, "active_peft_config", None)
    if getattr(config, "peft_type", None) != "ADALORA" or not getattr(config, "orth_reg_weight", 0):
        return None
    return "AdaLoRA's regularizer reads all its matrices after the forward"


def has_lora(head: nn.Module) -> bool:
    """True if a LoRA layer (or another tuner layer of PEFT) computes the output of ``head``."""
    return callable(getattr(head, "get_base_layer", None)) and hasattr(head, "disable_adapters")


def peft_parameters(outer: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that PEFT's layers have beside their base layers, of adapters that are active or not."""
    layers = [module for module in outer.modules() if has_lora(module)]
    return {p for layer in layers for p in set(layer.parameters()) - set(base_head(layer).parameters())}


def lora_objection(head: nn.Module) -> str | None:
    """Says why the PEFT layer on ``head`` is not linear in the hidden states, as a clause with the way out; None if it
    is, or without a PEFT layer."""
    if not has_lora(head):
        return None
    if not hasattr(head, "lora_A"):
        return f"an adapter of type {type(head).__module__}.{type(head).__qualname__}; expected LoRA or DoRA: {WAY_OUT}"
    variants = getattr(head, "lora_variant", {})
    unsupported = [
        type(variant).__name__ for variant in variants.values() if not type(variant).__name__.startswith("Dora")
    ]
    return f"LoRA of the variant {unsupported[0]}; expected plain LoRA or DoRA: {WAY_OUT}" if unsupported else None


def parts_of(layer: nn.Module) -> list[nn.Module]:
    """Returns the modules that a LoRA layer calls."""
    return list(layer.modules())[1:]


def reads_base_weight(layer: nn.Module) -> bool:
    """True for a layer whose forward reads the weight of its base layer, as DoRA's norms do."""
    return bool(getattr(layer, "lora_magnitude_vector", None))


def only_plain_adapter(layer: Any) -> str | None:
    """Returns the name of the one active PEFT adapter of a LoRA layer, if its forward now adds ``scaling * B(A(x))``:
    not disabled, not merged, no variant of LoRA, no active dropout."""
    active = layer.active_adapters
    if len(active) != 1 or layer.disable_adapters or layer.merged:
        return None
    # By the dicts of submodules: each attribute that is a module takes 1 us, in every layer and step.
    (name,), modules = active, layer._modules
    if name not in modules["lora_A"]._modules or name in layer.lora_variant:
        return None
    return name if _returns_its_input(modules["lora_dropout"]._modules[name]) else None


def _returns_its_input(dropout: Any) -> bool:
    """True for PEFT's module in a place of dropout, while it drops nothing and has no hooks."""
    is_idle = type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not (dropout.training and dropout.p > 0))
    hooks = (
        dropout._forward_hooks or dropout._forward_pre_hooks or dropout._backward_hooks or dropout._backward_pre_hooks
    )
    return is_idle and not hooks and "forward" not in vars(dropout)


def has_active_dropout(head: nn.Module) -> bool:
    """True if LoRA dropout is active: the effective weight then differs per token."""
    return has_lora(head) and any(
        isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in head.modules()
    )


def under_trained_rows(head: nn.Module) -> nn.Module | None:
    """Returns the lm_head inside a PEFT module that trains some of its rows; None for any other module."""
    inside = getattr(head, "token_adapter", head)  # PEFT puts the adapter of TrainableTokensConfig there itself.
    if not isinstance(inside, nn.Module) or not hasattr(inside, "get_merged_weights"):
        return None
    base = getattr(inside, "base_layer", None)
    return base if isinstance(base, nn.Module) else None


def active_head(module: nn.Module) -> nn.Module:
    """Returns the module that the model's forward calls as lm_head, inside FSDP1's wrapper and PEFT's
    ``modules_to_save``."""
    module = without_fsdp1(module)
    saved = getattr(module, "modules_to_save", None)
    if not isinstance(saved, nn.ModuleDict):
        return module
    active = [name for name in module.active_adapters if name in saved]  # type: ignore[union-attr]
    is_original = module.disable_adapters or not active
    return active_head(module.original_module if is_original else saved[active[0]])  # type: ignore[arg-type]


def trains_copy(module: nn.Module) -> bool:
    """True for the PEFT module around an lm_head, if ``modules_to_save`` trains a copy of it."""
    return isinstance(getattr(without_fsdp1(module), "modules_to_save", None), nn.ModuleDict)


def base_head(head: nn.Module) -> nn.Module:
    """Returns the base layer of a LoRA layer; any other module itself."""
    return without_fsdp1(head.get_base_layer()) if has_lora(head) else head  # type: ignore[operator]


def heads_at(module: nn.Module) -> tuple[nn.Module, ...]:
    """Returns every module that may be called as lm_head: a LoRA layer and its base layer, or an original module and
    those of ``modules_to_save``."""
    module = without_fsdp1(module)
    saved = getattr(module, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):
        return tuple(head for one in (module.original_module, *saved.values()) for head in heads_at(one))  # type: ignore[arg-type]
    with_trained_rows = under_trained_rows(module)
    if with_trained_rows is not None:
        return (with_trained_rows,)
    return (module, *heads_at(base_head(module))) if has_lora(module) else (module,)


def without_fsdp1(module: nn.Module) -> nn.Module:
    """Returns the module inside an FSDP1 unit; any other module itself."""
    return module.module if isinstance(module, FullyShardedDataParallel) else module


@dataclass(frozen=True)
class EffectiveHead:
    """Linear map of an lm_head with LoRA: ``weight`` ``[V, D]`` and ``bias`` ``[V]``, with their graph."""

    weight: Tensor
    bias: Tensor | None


def effective_head(lora: nn.Module, forward: Callable[[Tensor], Tensor], hidden_states: Tensor) -> EffectiveHead:
    """Computes the weight of ``forward`` of the LoRA layer ``lora``: its outputs for the rows of the identity.

    A bias is added to every row, and a large one would round the weight. So the rows are scaled by a power of two,
    which makes the bias small in comparison, and their outputs are scaled back, both exactly.
    """
    D = hidden_states.shape[-1]
    inputs = torch.eye(D, dtype=hidden_states.dtype, device=hidden_states.device)
    # The bias of lm_head, or of lora_B with LoraConfig(lora_bias=True).
    if all(getattr(module, "bias", None) is None for module in lora.modules()):
        return EffectiveHead(forward(inputs).T, None)
    scale = _LARGE[_compute_dtype(hidden_states)]
    outputs = forward(torch.cat([inputs * scale, inputs.new_zeros(1, D)]))
    return EffectiveHead(((outputs[:D] - outputs[D]) / scale).T, outputs[D])


_LARGE = {torch.float64: 2.0**40, torch.float32: 2.0**40, torch.bfloat16: 2.0**40, torch.float16: 2.0**8}
"""scale of the identity's rows; fp16 ends at 2 ** 16"""


def _compute_dtype(hidden_states: Tensor) -> torch.dtype:
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type) and hidden_states.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return hidden_states.dtype
