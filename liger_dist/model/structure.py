"""Structure of a Hugging Face model: decoder layers, final norm, embeddings, lm_head, and initialisation of its
modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.utils.parametrize import is_parametrized

from liger_dist.errors import LigerDistError

from .class_swap import SameLinearMap
from .peft import TRAINED_ROWS, active_head, base_head, lora_objection, under_trained_rows
from .stages import Absent


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Modules of a causal language model that are sharded and fused in different ways."""

    head_name: str
    """name of lm_head in the model; a PEFT module may have that name"""
    head: nn.Linear
    """lm_head itself, inside the PEFT module"""
    vocab_size: int
    """rows of the full weight of lm_head"""
    hidden_size: int
    """columns of the full weight of lm_head"""
    tied_to: tuple[nn.Module, ...]
    """input embeddings that share the parameter of lm_head"""
    layers: tuple[nn.Module, ...]
    """decoder layers, in order; empty when the model has no list of them"""
    unfusable: str | None
    """reason why no loss can be fused into this lm_head, although the model works with it; None if one can"""
    decoder: nn.Module
    """text decoder around ``layers``: the module with the argument ``inputs_embeds``"""
    other_stacks: tuple[tuple[nn.Module, ...], ...]
    """layers of every encoder outside ``decoder`` (vision, audio), one tuple for each list"""
    final_norm: nn.Module | None
    """norm between the last layer and lm_head, identified by its position and name; None if there is none"""
    repeats_head: bool = False
    """True if a forward calls lm_head several times"""
    prediction_layers: tuple[nn.Module, ...] = ()
    """layers of multi-token prediction (:mod:`liger_dist.mtp`)"""

    def with_calls(self, *, repeats_head: bool) -> Structure:
        """Returns this structure, of a model whose forward is known to call lm_head several times."""
        return replace(self, repeats_head=True) if repeats_head else self

    @property
    def all_layers(self) -> tuple[nn.Module, ...]:
        """Layers of the decoder, of every encoder, and of multi-token prediction."""
        return (*self.layers, *chain(*self.other_stacks), *self.prediction_layers)

    @property
    def tied(self) -> bool:
        """True if an input embedding and lm_head are one parameter."""
        return bool(self.tied_to)


def find_structure(model: nn.Module, *, fused_loss: bool = True) -> Structure:
    """Reads the structure of a Hugging Face model.

    Args:
        fused_loss: False to accept an lm_head of any class; the last ``nn.Linear`` replaces it in a model without one,
            such as a classifier.

    Raises:
        LigerDistError: no lm_head, or one that is not an ``nn.Linear``.
    """
    outer_head = _output_embedding(model)
    if outer_head is None and not fused_loss:
        outer_head = _last_linear(model)
    if outer_head is None:
        raise LigerDistError(
            f"{type(model).__name__} has no lm_head (get_output_embeddings() returns None); expected a language "
            "model with one, such as AutoModelForCausalLM builds. A base model or a classifier has no token loss to "
            "fuse: a classifier is sharded by WrapConfig(fused_loss=False)."
        )
    in_use = active_head(outer_head)
    with_trained_rows = under_trained_rows(in_use)
    head = base_head(in_use) if with_trained_rows is None else with_trained_rows
    _check_head(type(model).__name__, in_use, head, fused_loss=fused_loss)
    head_name = next((name for name, module in model.named_modules() if module is outer_head), None)
    if head_name is None:
        raise LigerDistError(
            f"the lm_head of {type(model).__name__} (get_output_embeddings()) is none of its modules; register it as "
            "an attribute of the model."
        )
    reason = None if with_trained_rows is None else TRAINED_ROWS
    if is_parametrized(head, "weight"):
        reason = "its lm_head computes its weight by a parametrization of torch.nn.utils"
    decoder = _decoder_of(model)
    layers, parent = _find_layers(model, decoder)
    decoder = decoder or parent
    vocab_size, hidden_size = head_shape(head)
    return Structure(
        head_name=head_name,
        head=cast(nn.Linear, head),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        tied_to=tied_modules(model, head),
        layers=layers,
        unfusable=reason,
        decoder=decoder,
        other_stacks=_find_other_stacks(model, decoder),
        prediction_layers=_prediction_layers(model),
        repeats_head=bool(_prediction_layers(model)),
        final_norm=_find_final_norm(parent, layers),
    )


def _last_linear(model: nn.Module) -> nn.Module | None:
    """Returns the last ``nn.Linear`` outside the layers, such as that of a classifier."""
    layers, _ = _find_layers(model, _decoder_of(model))
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if isinstance(module, nn.Linear) and module not in inside]
    return outside[-1] if outside else None


def _check_head(name: str, in_use: nn.Module, head: nn.Module, *, fused_loss: bool) -> None:
    """Refuses an lm_head of the model ``name`` that cannot be wrapped, or that no loss can be fused into.

    Raises:
        LigerDistError: with the way out.
    """
    if hasattr(head, "_hf_hook"):
        raise LigerDistError(
            f"the lm_head of {name} has a hook of accelerate, which a device_map puts on each module; load the model "
            "with device_map=None (model_init_kwargs of TRL's trainers) and let the strategy place it."
        )
    if any(cls.__module__.startswith("liger_dist.fused_head.") for cls in type(head).__mro__):
        raise LigerDistError(
            f"the lm_head of {name} has been fused by the wrap of another model that shares it; call "
            "liger_dist.unwrap on that one first."
        )
    if not fused_loss:
        return
    objection = None if under_trained_rows(in_use) is not None else lora_objection(in_use)
    if objection is not None:
        raise LigerDistError(f"the lm_head of {name} has {objection}")
    if not isinstance(head, nn.Linear) or not is_linear_map(head):
        raise LigerDistError(
            f"the lm_head of {name} is a {type(head).__module__}.{type(head).__qualname__}; expected an unmodified "
            "torch.nn.Linear, alone or under PEFT's LoRA. A quantised head cannot be fused: exclude it from "
            "quantisation (llm_int8_skip_modules, modules_to_not_convert), or leave the loss as it is with "
            "WrapConfig(fused_loss=False)."
        )


def weight_of(head: nn.Module) -> Tensor | None:
    """Returns the weight that ``head`` stores, under any framework; None for one that its parametrizations compute:
    outside the call of ``head`` they would read what a framework has freed."""
    return head._parameters.get("weight", vars(head).get("weight"))


def stored_parameter(head: nn.Module) -> Tensor:
    """Returns the weight that ``head`` stores, or the first of the parameters that it is computed from."""
    weight = weight_of(head)
    return next(head.parameters(), torch.empty(0)) if weight is None else weight


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter in full: ZeRO-3 keeps it beside an empty tensor."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def tied_modules(model: nn.Module, head: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the other modules of ``model`` that share the weight of ``head``."""
    weight = weight_of(head)
    if weight is None:
        return ()
    # Not by ``_parameters``, which TorchScript's modules do not have as a dict.
    return tuple(
        m for m in model.modules() if m is not head and dict(m.named_parameters(recurse=False)).get("weight") is weight
    )


def head_shape(head: nn.Module) -> tuple[int, int]:
    """Returns ``(V, D)`` of the full weight of ``head``, read from the weight, also under FSDP2, TP or ZeRO-3: PEFT
    builds tied heads with swapped ``in_features`` and ``out_features``."""
    weight = weight_of(head)
    shape = () if weight is None else full_shape(weight)
    if len(shape) == 2:
        return shape[0], shape[1]
    return getattr(head, "out_features", 0), getattr(head, "in_features", 0)


def is_linear_map(head: nn.Linear) -> bool:
    """True if the forward of ``head`` is that of ``nn.Linear``, or computes the same map."""
    instance_forward = vars(head).get("forward")
    is_changed = instance_forward is not None and not is_linear_forward(instance_forward)
    return not is_changed and (isinstance(head, SameLinearMap) or type(head).forward is nn.Linear.forward)


def is_linear_forward(forward: object) -> bool:
    """True for a patched forward of an lm_head that computes the same linear map: that of transformers' tensor
    parallelism, which only moves and gathers, or of TRL's fp32 head."""
    module = getattr(forward, "__module__", None) or ""
    is_tensor_parallel = module.startswith("transformers.") and module.endswith(".tensor_parallel")
    return is_tensor_parallel or is_fp32_forward(forward)


def is_fp32_forward(forward: object) -> bool:
    """True for the forward that TRL's ``cast_lm_head_to_fp32`` sets on an lm_head: its operands are fp32."""
    module = getattr(forward, "__module__", None) or ""
    return module.startswith("trl.") and getattr(forward, "__name__", "") == "cast_forward_to_fp32"


def _output_embedding(model: nn.Module) -> nn.Module | None:
    """Returns the output embedding of the model, or of the only model inside it that has one."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    if isinstance(head, nn.Module):
        return head
    inside = {_output_embedding(child) for child in model.children()} - {None}
    return inside.pop() if len(inside) == 1 else None


def input_embedding(model: nn.Module) -> nn.Embedding | None:
    """Returns the model's input embedding, if no other module uses its weight."""
    embedding = embedding_of(model)
    if not isinstance(embedding, nn.Embedding):
        return None
    users = [module for module in model.modules() if embedding.weight in set(module._parameters.values())]
    return embedding if users == [embedding] else None


def embedding_of(model: nn.Module) -> nn.Module | None:
    """Returns the model's ``get_input_embeddings()``; None when it has none, or several."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def _decoder_of(model: nn.Module) -> nn.Module | None:
    """Returns the text decoder from the model's ``get_decoder()``, if it contains a list of decoder layers.

    A vision-language model declares the classes of its vision blocks as well, and often has more of those than of text
    layers, so length alone does not identify the decoder.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) and not _is_encoder_decoder(model) else None
    if not isinstance(decoder, nn.Module) or decoder is model:
        return None
    return decoder if any(_stacks(decoder, _declared(model))) else None


def _find_layers(model: nn.Module, decoder: nn.Module | None) -> tuple[tuple[nn.Module, ...], nn.Module]:
    """Returns the longest stack of ``decoder`` (of the model without one), with its owner; for an encoder-decoder, all
    stacks of declared classes, with the owner of the last."""
    declared = _declared(model)
    best: tuple[tuple[nn.Module, ...], nn.Module] = ((), model)
    for stack, owner in _stacks(decoder or model, declared):
        if declared and _is_encoder_decoder(model):
            best = (*best[0], *stack), owner
        elif len(stack) > len(best[0]):
            best = stack, owner
    return best


def _find_other_stacks(model: nn.Module, decoder: nn.Module) -> tuple[tuple[nn.Module, ...], ...]:
    """Returns the stacks of declared classes outside the decoder; skips stacks inside another stack's layers."""
    declared = _declared(model)
    if not declared or _is_encoder_decoder(model):
        return ()
    taken = set(decoder.modules()) | {inner for layer in _prediction_layers(model) for inner in layer.modules()}
    other_stacks: list[tuple[nn.Module, ...]] = []
    for stack, owner in _stacks(model, declared):
        if owner not in taken and stack[0] not in taken:
            other_stacks.append(stack)
            taken.update(inner for layer in stack for inner in layer.modules())
    return tuple(other_stacks)


PREDICTION = "mtp"
"""attribute of a model that predicts further tokens: its :class:`PredictionUnits`"""


class PredictionUnits(nn.Module):
    """Base of the modules of multi-token prediction."""

    def units(self) -> tuple[nn.Module, ...]:
        """Returns the modules that are sharded as decoder layers are."""
        return ()


def _prediction_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    modules = model._modules.get(PREDICTION)
    return modules.units() if isinstance(modules, PredictionUnits) else ()


def _stacks(root: nn.Module, declared: frozenset[str]) -> Iterator[tuple[tuple[nn.Module, ...], nn.Module]]:
    """Yields every list of modules of declared classes (of one class when none is declared) inside ``root``, with its
    owner."""
    for owner in root.modules():
        for child in owner.children():
            if not isinstance(child, nn.ModuleList):
                continue
            layers = [layer for layer in map(_without_checkpoint, child) if not isinstance(layer, Absent)]
            if not layers:
                continue
            if all(_is_one_of(layer, declared) for layer in layers) if declared else len({*map(type, layers)}) == 1:
                yield tuple(layers), owner


def _without_checkpoint(layer: nn.Module) -> nn.Module:
    """Returns the layer inside torch's ``checkpoint_wrapper``, whose forward then calls the hooks of the layer's unit,
    as that of one that is applied after ``wrap`` does."""
    inner = layer._checkpoint_wrapped_module if isinstance(layer, CheckpointWrapper) else layer
    assert isinstance(inner, nn.Module)
    return inner


def _declared(model: nn.Module) -> frozenset[str]:
    """Returns names of the layer classes that the model declares unsplittable; transformers adds those of nested
    models."""
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_one_of(layer: nn.Module, declared: frozenset[str]) -> bool:
    """True if any class in the MRO has a declared name: FSDP2 puts another class on top."""
    return any(cls.__name__ in declared for cls in type(layer).__mro__)


def _find_final_norm(parent: nn.Module, layers: tuple[nn.Module, ...]) -> nn.Module | None:
    if not layers:
        return None
    children = list(parent.children())
    index = next(i for i, child in enumerate(children) if layers[-1] in map(_without_checkpoint, child.children()))
    after = [child for child in children[index + 1 :] if "norm" in type(child).__name__.lower()]
    return after[-1] if after else None


def initializer_of(model: nn.Module) -> Callable[[nn.Module], None]:
    """Returns a function that initialises one module: ``_init_weights`` of the nearest enclosing pretrained model, or
    ``reset_parameters`` of the module where there is none.

    Args:
        model: any model, on any device.

    Raises:
        LigerDistError: a module has parameters and neither rule; nothing is changed.
    """
    rules: dict[nn.Module, Callable[[nn.Module], None]] = {}

    def collect(module: nn.Module, rule: Callable[[nn.Module], None] | None) -> None:
        rule = getattr(module, "_init_weights", rule)
        chosen = rule if rule is not None else _reset_parameters(module)
        if chosen is not None:
            rules[module] = chosen
        elif any(True for _ in module.parameters(recurse=False)):
            raise LigerDistError(
                f"{type(module).__name__} has parameters on the meta device and no rule to initialise them "
                "(_init_weights of its model, or its reset_parameters); define one, or build the model on a "
                "real device."
            )
        for child in module.children():
            collect(child, rule)

    collect(model, None)

    def initialize(module: nn.Module) -> None:
        if module in rules:
            rules[module](module)

    return initialize


def _reset_parameters(module: nn.Module) -> Callable[[nn.Module], None] | None:
    if not callable(getattr(module, "reset_parameters", None)):
        return None
    return lambda owner: owner.reset_parameters()  # type: ignore[operator]


READS_OUTPUT = "_liger_dist_reads_output"
"""attribute of forward hooks of this package that read what a module returns"""


def read_output_last(module: nn.Module) -> None:
    """Moves hooks with :data:`READS_OUTPUT` after those that were registered since, such as the one of torch's tensor
    parallelism, which completes the output."""
    for number, hook in list(module._forward_hooks.items()):
        if getattr(hook, READS_OUTPUT, False):
            module._forward_hooks.move_to_end(number)  # type: ignore[attr-defined]
