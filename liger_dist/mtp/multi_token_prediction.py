"""Multi-token prediction: modules that predict the tokens after the next one, trained through the model's lm_head.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 2.2: at depth ``k`` (1, 2, …) the hidden
states of the depth before and the embeddings of the tokens ``k`` places later are normalised, concatenated and
projected from ``2 D`` to ``D``; a decoder layer follows, and the model's lm_head predicts the token ``k + 1`` places
later. Teacher forcing: the embeddings are those of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from liger_dist.errors import LigerDistError
from liger_dist.fused_head.call import IGNORE_INDEX, inputs_of, note_loss, unnoted_losses
from liger_dist.fused_head.fused_model import FusedModel
from liger_dist.fused_head.output import with_field
from liger_dist.fused_head.probe import probe_recipe
from liger_dist.fused_head.recipe import LossRecipe, NotFusableError
from liger_dist.losses.labels import shifted_further
from liger_dist.model.class_swap import MadeAtRunTime, present_as, subclass_of
from liger_dist.model.peft import base_model_of
from liger_dist.model.stages import PASSED, stage_of
from liger_dist.model.structure import PREDICTION, Structure, embedding_of, find_structure
from liger_dist.trials.isolated import StandIn, torch_defaults

from .checkpoints import has_flat_names, name_in_checkpoint, read_parts
from .losses import Announced
from .modules import (
    SEEN,
    Parts,
    PredictionModules,
    Seen,
    document_ids,
    make_parts,
    note_arguments,
    note_embeddings,
    note_hidden_states,
    template_layer,
)


class MultiTokenPrediction(PredictionModules):
    """Modules that predict ``depth`` tokens after the next one, on ``model.mtp``.

    With labels, the loss of the model in training becomes ``main_weight * loss + sum_k weight_k * loss_k``, where
    ``loss_k`` is the mean cross entropy of the tokens ``k + 1`` places later, over the labels that exist in the same
    document, or divided by ``num_items_in_batch``. In evaluation it stays that of the next token, unless
    ``main_weight`` is 0. The output has ``mtp_loss`` ``[depth]`` (fp32, without gradients). Without labels the model is
    as before. Options and outputs of a call, such as ``z_loss`` or ``outputs``, are of the first loss.

    Embedding and lm_head are the model's. Add it before :func:`liger_dist.wrap`, and after ``get_peft_model``.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` of one; changed in place.
        depth: number of further tokens.
        weight: factor of the mean over depths, as DeepSeek-V3's lambda; or a factor for each depth.
        main_weight: factor of the model's original loss; 0 trains the modules alone, and costs no loss of the next
            token.
        train_model: False freezes every parameter of ``model``, for draft heads.

    Raises:
        LigerDistError: the model has such modules, is wrapped, or predicts no next token by an lm_head whose loss can
            be fused.
    """

    _weights: tuple[float, ...]
    _main_weight: float
    _recipe: LossRecipe

    def __init__(
        self,
        model: nn.Module,
        depth: int = 1,
        *,
        weight: float | Sequence[float] = 0.3,
        main_weight: float = 1.0,
        train_model: bool = True,
    ) -> None:
        inner, structure, recipe = _checked(model)
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise LigerDistError(f"depth is {depth!r}; expected a number of further tokens, at least 1.")
        parts = make_parts(inner, structure, depth)
        is_flat = depth == 1 and has_flat_names(inner)
        self._set_up(parts, is_flat, recipe, weight, main_weight)
        self._add_to(inner, structure, train_model=train_model)

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        folder: str | None = None,
        *,
        weight: float | Sequence[float] = 0.3,
        main_weight: float = 1.0,
        train_model: bool = True,
    ) -> MultiTokenPrediction:
        """Adds the modules that the checkpoint of ``model`` has, which ``from_pretrained`` of the model leaves out:
        ``mtp.*`` of Qwen3-Next, Qwen3.5 and this class, or those that transformers' ``MtpModel`` reads.

        Args:
            folder: of the checkpoint; None for the one that ``model`` was loaded from.

        Raises:
            LigerDistError: the checkpoint has no such modules, or other parameters than the model's decoder layers.
        """
        inner, structure, recipe = _checked(model)
        parts, is_flat = read_parts(inner, structure, folder)
        made = cls.__new__(cls)
        made._set_up(parts, is_flat, recipe, weight, main_weight)
        made._add_to(inner, structure, train_model=train_model)
        return made

    @property
    def weights(self) -> tuple[float, ...]:
        """factor of each depth; may be set between steps, to 0 as well"""
        return self._weights

    @weights.setter
    def weights(self, weights: float | Sequence[float]) -> None:
        self._weights = _as_weights(weights, self.depth, least=0.0)

    @property
    def main_weight(self) -> float:
        """factor of the model's original loss; may be set between steps"""
        return self._main_weight

    @main_weight.setter
    def main_weight(self, main_weight: float) -> None:
        is_number = isinstance(main_weight, int | float) and not isinstance(main_weight, bool)
        if not is_number or not 0 <= main_weight < float("inf"):
            raise LigerDistError(f"main_weight is {main_weight!r}; expected a number of at least 0.")
        self._main_weight = float(main_weight)

    def _set_up(
        self,
        parts: Sequence[Parts],
        is_flat: bool,
        recipe: LossRecipe,
        weight: float | Sequence[float],
        main_weight: float,
    ) -> None:
        PredictionModules.__init__(self, parts, is_flat=is_flat)
        self._weights, self.main_weight = _as_weights(weight, len(parts)), main_weight
        self._recipe = recipe

    def _add_to(self, model: nn.Module, structure: Structure, *, train_model: bool) -> None:
        embedding = embedding_of(model)
        assert embedding is not None
        if not train_model:
            model.requires_grad_(False)
        config: Any = model.config
        # A trainer takes every other output for logits.
        ignored = getattr(config, "keys_to_ignore_at_inference", ())
        config.keys_to_ignore_at_inference = [*dict.fromkeys((*ignored, "mtp_loss"))]
        text = config.get_text_config()
        if getattr(text, "num_mtp_layers", None) is not None:
            text.num_mtp_layers = self.depth
        setattr(model, PREDICTION, self)
        structure.decoder.register_forward_hook(note_hidden_states)
        embedding.register_forward_hook(note_embeddings)
        template_layer(structure)[1].register_forward_pre_hook(note_arguments, with_kwargs=True)
        base: Any = type(model)
        model.__class__ = predicting_class(base)

    def losses(self, model: nn.Module, seen: Seen, announced: Announced | None, named: dict[str, Any]) -> list[Tensor]:
        """Computes the mean loss of each depth, 0-d."""
        labels, documents = self._aligned(named, seen.shape), document_ids(named, seen.shape)
        ignore_index = named.get("ignore_index", IGNORE_INDEX)
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if seen.hidden_states is None or seen.embeddings is None:
            raise LigerDistError(
                f"{type(model).__name__} did not call the decoder and the input embedding that it had when "
                "MultiTokenPrediction was added, for the tokens of the labels, so that no further token can be "
                "predicted. Replace an embedding before; give input_ids or inputs_embeds of the labels' shape."
            )
        states, found = seen.hidden_states, []
        for depth, weight in enumerate(self.weights):
            states = self.next_hidden_states(depth, seen, states)
            further = shifted_further(labels, depth + 1, ignore_index=ignore_index)
            if documents is not None:
                # From a token to that of its label.
                distance = depth + (1 if named.get("shift_labels") is not None else 2)
                later = shifted_further(documents, distance, ignore_index=0)
                is_same = (later == documents) & (documents != 0)
                further = torch.where(is_same.to(labels.device), further, ignore_index)
            if announced is not None:
                is_last = depth + 1 == self.depth
                found.append(announced.loss(head, states, further, coefficient=weight, is_last=is_last))
            else:
                found.append(self._loss_of_logits(model, head(states), further, named, ignore_index))
            note_loss(found[-1])
        return found

    def _aligned(self, named: dict[str, Any], shape: torch.Size) -> Tensor:
        """Returns labels ``[B, S]`` that belong to the logits at their positions."""
        ignore_index = named.get("ignore_index", IGNORE_INDEX)
        shifted, mask = named.get("shift_labels"), named.get("attention_mask")
        if shifted is not None:
            return cast(Tensor, shifted).reshape(shape)
        labels: Tensor = named["labels"].reshape(shape)
        if self._recipe.targets == "next_attended" and mask is not None:
            labels = labels.masked_fill(mask.to(labels.device) == 0, ignore_index)
        return shifted_further(labels, 1, ignore_index=ignore_index)

    def _loss_of_logits(
        self, model: nn.Module, logits: Tensor, labels: Tensor, named: dict[str, Any], ignore_index: int
    ) -> Tensor:
        """Computes the loss of full logits ``[B, S, V]``, as the model computes that of the next token."""
        transform = self._recipe.transform
        bias = None if transform.bias is None else model.get_buffer(transform.bias)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        flat, targets = transform(wide, bias).flatten(0, 1), labels.flatten().to(logits.device)
        items = named.get("num_items_in_batch") if self._recipe.takes_num_items else None
        smoothing = self._recipe.label_smoothing
        total = F.cross_entropy(flat, targets, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum")
        # As the fused loss: 0 where a depth has no label.
        return total / ((targets != ignore_index).sum().clamp(min=1) if items is None else items)


class PredictsFurther(MadeAtRunTime, nn.Module):
    """Mixed into the class of a model that predicts further tokens."""

    def save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        """Saves the model with the names of its family's checkpoints; arguments are those of the model's method."""
        # Not by a state dict: under FSDP it is a collective, and one rank may save what was gathered before.
        stored = (*self.named_parameters(), *self.named_buffers())
        present = [name for name, _ in stored] if state_dict is None else list(state_dict)
        names = {name: name_in_checkpoint(self, name) for name in present if PREDICTION in name}
        if any(name != original for original, name in names.items()):
            state = self.state_dict() if state_dict is None else state_dict
            state_dict = {names.get(name, name): value for name, value in state.items()}
        return super().save_pretrained(save_directory, *args, state_dict=state_dict, **kwargs)  # type: ignore[misc]


def _without_wrapper(modules: object) -> MultiTokenPrediction:
    """Refuses modules in a wrapper, whose forward nothing would call.

    Raises:
        LigerDistError: they are in a wrapper.
    """
    if isinstance(modules, MultiTokenPrediction) and not isinstance(modules, FSDPModule):
        return modules
    raise LigerDistError(
        f"model.mtp is a {type(modules).__name__} now, whose forward is never called; expected MultiTokenPrediction. "
        "Leave mtp out of wrapping policies and fully_shard (its layers may be units), and out of PEFT's "
        "modules_to_save: added after get_peft_model, it trains in full."
    )


@contextmanager
def _seen(shape: torch.Size, embeddings: Tensor | None) -> Iterator[Seen]:
    seen = Seen(shape, embeddings)
    token = SEEN.set(seen)
    try:
        yield seen
    finally:
        SEEN.reset(token)


def _given_embeddings(model: nn.Module, named: dict[str, Any]) -> Tensor | None:
    """Returns embeddings that a call gets as arguments. In the last stage of a pipeline ``inputs_embeds`` are hidden
    states of the stage before, which are no embeddings, and the stages have passed these on."""
    passed = PASSED.get()
    is_passed = passed is not None and passed.model is model and passed.embeddings is not None
    return passed.embeddings if passed is not None and is_passed else named.get("inputs_embeds")


@lru_cache(maxsize=64)
def predicting_class(base: Any) -> Any:
    """Returns the subclass of a model's class that predicts further tokens."""
    return subclass_of(base, PredictsFurther, (predicting_class, (base,)), {"forward": _make_forward(base)})


def _make_forward(base: Any) -> Callable[..., Any]:
    names = tuple(signature(base.forward).parameters)[1:]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modules, named = self._modules.get(PREDICTION), dict(zip(names, args, strict=False)) | kwargs
        inputs = inputs_of(named)
        # A probe has a stand-in for the modules.
        if modules is None or isinstance(modules, StandIn) or named.get("labels") is None or inputs is None:
            return base.forward(self, *args, **kwargs)
        modules = _without_wrapper(modules)
        has_main, trains_further = modules.main_weight != 0, self.training or modules.main_weight == 0
        with _seen(inputs.shape[:2], _given_embeddings(self, named)) as seen:
            announced = Announced.of(self, coefficient=modules.main_weight if trains_further else None)
            with nullcontext() if has_main else unnoted_losses():
                output = base.forward(self, *args, **kwargs)
            if announced is not None and has_main and trains_further:
                announced.note_output(output[0] if isinstance(output, tuple) else output.loss)
            with nullcontext() if trains_further else torch.no_grad():
                losses = modules.losses(self, seen, announced, named)
        main = output[0] if isinstance(output, tuple) else output.loss
        loss = main
        if trains_further:
            weighted = [weight * loss for weight, loss in zip(modules.weights, losses, strict=True)]
            weighted += [modules.main_weight * main.to(losses[0].device)] if has_main else []
            loss = torch.stack(weighted).sum()
        return with_field(output, "mtp_loss", torch.stack(losses).detach(), loss=loss)

    return cast(Callable[..., Any], present_as(forward, base.forward))


def _checked(model: nn.Module) -> tuple[nn.Module, Structure, LossRecipe]:
    """Checks that further tokens can be predicted; changes nothing."""
    inner = base_model_of(model)
    name = type(inner).__name__
    if isinstance(inner, FusedModel):
        raise LigerDistError(f"this {name} is wrapped already; add MultiTokenPrediction before liger_dist.wrap.")
    if any(isinstance(module, FSDPModule) for module in inner.modules()):
        raise LigerDistError(
            f"this {name} is sharded already; add MultiTokenPrediction to the full model, before fully_shard or "
            "liger_dist.wrap, and load it without fsdp_size."
        )
    if stage_of(inner) is not None:
        raise LigerDistError(
            f"the model is {stage_of(inner)} of a pipeline; add MultiTokenPrediction to the uncut model, before "
            "pipeline_stage."
        )
    if "forward" in vars(inner):
        raise LigerDistError(
            f"the forward of this {name} was patched on the instance ({vars(inner)['forward']!r}), which would hide "
            "that of MultiTokenPrediction; patch it after MultiTokenPrediction is added, or restore it first."
        )
    if PREDICTION in inner._modules:
        raise LigerDistError(f"this {name} has a module mtp already; expected a model that predicts the next token.")
    structure = find_structure(inner)
    if getattr(inner.config, "is_encoder_decoder", False) or embedding_of(inner) is None:
        raise LigerDistError(f"{name} is no causal language model, and predicts no next token; leave mtp out.")
    try:
        with torch_defaults():
            recipe = probe_recipe(inner, structure)
    except NotFusableError as error:
        raise LigerDistError(
            f"the loss of {name} cannot be fused ({error}), so that its further tokens would need full logits; leave "
            "mtp out."
        ) from error
    if recipe.targets == "same":
        raise LigerDistError(f"{name} predicts masked tokens and not the next one; leave mtp out.")
    return inner, structure, recipe


def _as_weights(weight: float | Sequence[float], depth: int, *, least: float | None = None) -> tuple[float, ...]:
    """Returns a factor for each depth.

    Args:
        least: smallest factor; None for any above 0.

    Raises:
        LigerDistError: they are no such numbers, or not one for each depth.
    """
    weights = [weight / depth] * depth if isinstance(weight, int | float) else list(weight)
    are_numbers = all(isinstance(one, int | float) and 0 <= one < float("inf") for one in weights)
    if len(weights) != depth or not are_numbers or (least is None and 0 in weights):
        expected = "above 0" if least is None else f"of at least {least:g}"
        raise LigerDistError(
            f"weight is {weight!r} for depth {depth}; expected a number {expected}, or one for each depth."
        )
    return tuple(map(float, weights))
