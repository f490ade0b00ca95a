"""Reads the arguments of one call of a model: those of its forward, and those of its loss. Identifies wrapped
models, and notes the losses of their calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, ClassVar, Protocol, get_args
from weakref import ref

from torch import Tensor, nn

from liger_dist.config import LOGITS, LOGITS_DTYPES, LogitsDtype, check_choice
from liger_dist.errors import LigerDistError
from liger_dist.losses.distillation import Distillation
from liger_dist.losses.labels import AlignedLabels, align_labels, cut_at_documents, shifted_further
from liger_dist.losses.spec import (
    CALL_KEYWORDS,
    DIFFERENTIABLE_OUTPUTS,
    KEYWORDS_OF_MODELS,
    OUTPUTS,
    LossSpec,
    Uncast,
    as_output_names,
)
from liger_dist.model.keywords import renamed_keywords

from .recipe import LossRecipe

IGNORE_INDEX = -100
TAKEN_BY_DECORATORS = ("return_dict", "output_")
"""prefixes of keywords that transformers' decorators take"""
DIFFERENTIABLE = "differentiable"
ARGUMENTS_OF_OUTPUTS = ("token_ids", "support_ids", "top_k")
TOKEN_ACCURACY = "token_accuracy"
DISTILLATION_OUTPUTS = ("divergence", "hard_loss", "entropy")
CALL_OUTPUTS = (*OUTPUTS, TOKEN_ACCURACY, LOGITS)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one call of a model's forward."""

    named: dict[str, Any]
    """all arguments by name, including those of :data:`CALL_KEYWORDS`"""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """with ``args`` the arguments of the model's forward"""
    keywords: dict[str, Any]
    """the arguments of :data:`CALL_KEYWORDS`"""
    outputs: tuple[str, ...]
    """names that are asked for beside the loss, among :data:`CALL_OUTPUTS`"""
    loss_options: tuple[str, ...]
    """names of the options that change the model's original loss"""
    asks_of_the_loss: tuple[str, ...]
    """names that the model's original loss does not have: options of the loss, and outputs other than logits"""
    logits_dtype: LogitsDtype
    """instead of the config's; None for that"""
    model_name: str
    ignore_index: int
    distillation: Distillation | None = None
    """of :func:`liger_dist.distillation_loss`; None for any other call"""

    def aligned_labels(
        self, recipe: LossRecipe, *, is_encoder_decoder: bool, vocab_size: int | None = None
    ) -> AlignedLabels:
        """Checks the labels and aligns them to the logits that score them.

        Args:
            vocab_size: of labels that are checked to be classes, on the CPU; None for no such check.

        Raises:
            LigerDistError: they are not one integer for each token, or the attention mask that selects them has another
                shape.
        """
        inputs, keep = inputs_of(self.named), self.named.get("logits_to_keep")
        labels, shifted = self.named.get("labels"), self.named.get("shift_labels")
        for given in (labels, shifted):
            if given is not None and not isinstance(given, Tensor):
                raise LigerDistError(f"labels are a {type(given).__name__}; expected a tensor of integers.")
        are_aligned = recipe.targets == "same" or shifted is not None
        labels = labels if shifted is None or recipe.targets == "same" else shifted
        assert labels is not None
        if labels.dim() == 1 and inputs is not None and inputs.dim() > 1 and len(inputs) == 1:
            # Those of a single sequence may come as [S], which the model's loss flattens to.
            labels = labels[None]
        keeps_some = isinstance(keep, Tensor) or bool(keep)
        mask = self.named.get("attention_mask") if recipe.targets == "next_attended" else None
        if mask is not None and not are_aligned and mask.shape != labels.shape:
            raise LigerDistError(
                f"attention_mask has shape {tuple(mask.shape)} and labels have shape {tuple(labels.shape)}; "
                f"{self.model_name} scores the tokens that its mask has, so expected one shape. Pass the mask of the "
                "labels, or use WrapConfig(fused_loss=False)."
            )
        return align_labels(
            labels,
            are_aligned=are_aligned,
            mask=mask,
            shape=labels.shape if inputs is None or keeps_some or is_encoder_decoder else inputs.shape[:2],
            ignore_index=self.ignore_index,
            vocab_size=vocab_size,
        )

    def further_labels(self, recipe: LossRecipe, *, is_encoder_decoder: bool) -> Tensor:
        """Returns the labels of a further loss, aligned to the logits ``[B, S - missing_tokens]`` of its call of
        lm_head."""
        aligned = self.aligned_labels(recipe, is_encoder_decoder=is_encoder_decoder).labels
        labels = shifted_further(aligned, recipe.ahead, ignore_index=self.ignore_index)
        if recipe.cut is not None:
            positions = self.named.get("position_ids")
            labels = cut_at_documents(labels, positions, recipe.cut, ignore_index=self.ignore_index)
        return labels[:, : labels.shape[1] - recipe.missing_tokens]

    def spec(self, recipe: LossRecipe) -> LossSpec:
        """Makes the record of this call's loss, without the bias that the model adds to its logits."""
        smoothing, takes_num_items = recipe.label_smoothing, recipe.takes_num_items
        if self.distillation is not None:
            # Its cross entropy is that of the labels alone, and its divisor does not reach the model's original loss.
            smoothing, takes_num_items = 0.0, True
        keywords: dict[str, Any] = {
            "ignore_index": self.ignore_index,
            "label_smoothing": smoothing,
            "softcap": recipe.transform.softcap,
            "logit_scale": recipe.transform.scale,
            "differentiable": False,
        }
        not_of_losses = ("outputs", "logits_dtype")
        keywords |= {k: v for k, v in self.keywords.items() if v is not None and k not in not_of_losses}
        token_outputs = {"is_top1" if name == TOKEN_ACCURACY else name for name in self.outputs}
        return LossSpec(
            **keywords,
            num_items_in_batch=self.named.get("num_items_in_batch") if takes_num_items else None,
            outputs=tuple(name for name in OUTPUTS if name in token_outputs),
            distillation=self.distillation,
        )

    def distilled(self, distillation: Distillation) -> Call:
        """Returns this call with the divergence from a teacher as its loss."""
        asked = ("a divergence from a teacher",)
        return replace(self, distillation=distillation, outputs=DISTILLATION_OUTPUTS, asks_of_the_loss=asked)

    def check_distilled(self) -> None:
        """Raises:
        LigerDistError: the call has options or outputs that a divergence does not have.
        """
        if not isinstance(self.named.get("labels"), Tensor):
            raise LigerDistError(f"labels are {self.named.get('labels')!r}; expected a tensor of token ids [B, S].")
        if self.named.get("return_dict") is False:
            raise LigerDistError("return_dict is False, and a tuple has no place for a divergence; leave it out.")
        refused = [name for name in self.keywords if name != "token_weight"]
        if refused:
            raise LigerDistError(
                f"{refused[0]} was given to a distillation loss, which has labels, num_items_in_batch, ignore_index, "
                "shift_labels and token_weight; leave it out."
            )


class HostCall(Protocol):
    """A call that a host has made with further keywords, such as TRL's ``fused_lm_head=True``."""

    only_fused: ClassVar[bool]
    """True if the call is passed on unchanged when its loss is not fused"""

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keywords of a wrapped model for the same call."""
        ...

    def to_host_output(self, output: Any) -> Any:
        """Converts the output of the wrapped model to what the host expects."""
        ...


@dataclass(frozen=True)
class Hosts:
    """How hosts make calls with further keywords."""

    keywords: frozenset[str] = frozenset()
    """of such calls; calls without labels may be some too"""
    readers: tuple[Callable[[nn.Module, dict[str, Any], dict[str, Any], int], HostCall | None], ...] = ()
    """from the model, all arguments by name, those given by keyword, and the vocabulary size"""
    returns_logits: Callable[[], bool] = lambda: False
    """True inside a call without gradients whose logits the host returns"""


class Signature:
    """Signature of one model's forward, and of the modules that its further keyword arguments may reach."""

    def __init__(
        self, model: nn.Module, *, outputs: tuple[str, ...], original_smoothing: float, host_keywords: frozenset[str]
    ) -> None:
        self._original_smoothing = original_smoothing
        parameters = signature(model.forward).parameters
        self.names = tuple(parameters)
        self.takes_more = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        self.model_name = type(model).__name__
        self._outputs = as_output_names(outputs)
        check_usual_outputs(self._outputs)
        self._known = frozenset({*self.names, *CALL_KEYWORDS, *KEYWORDS_OF_MODELS, *_keywords_below(model)})
        self._host_keywords = host_keywords
        # Another forward than transformers' may read any keyword.
        self._is_transformers = model.forward.__module__.startswith(("transformers.", "accelerate."))
        self._warned: set[str] = set()

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Separates the arguments of the model from those of the loss.

        Raises:
            LigerDistError: loss options without labels.
        """
        named = dict(zip(self.names, args, strict=False)) | kwargs
        keywords = {name: kwargs[name] for name in CALL_KEYWORDS if name in kwargs and name not in self.names}
        keywords = {name: _uncast(value) for name, value in keywords.items()}
        if keywords and named.get("labels") is None:
            name = next(iter(keywords))
            raise LigerDistError(
                f"{name} was given to {self.model_name} without labels, so there is no loss to apply it to; pass "
                "labels, or leave it out."
            )
        outputs = (
            as_output_names(keywords["outputs"]) if keywords.get("outputs") is not None else self._usual_outputs(model)
        )
        check_outputs(outputs)
        if "logits_dtype" in keywords:
            check_choice("logits_dtype", keywords["logits_dtype"], LOGITS_DTYPES)
        if keywords.get(DIFFERENTIABLE, False) and not DIFFERENTIABLE_OUTPUTS.intersection(outputs):
            raise LigerDistError(
                f"differentiable is {keywords[DIFFERENTIABLE]} and outputs is {outputs}, of which nothing carries "
                f"gradients; ask for some of {', '.join(sorted(DIFFERENTIABLE_OUTPUTS))}, or leave it out."
            )
        kept = {name: value for name, value in kwargs.items() if name not in keywords}
        options = self._options(keywords) if keywords else ()
        if named.get("labels") is not None:
            self._warn_of_unknown(kept.keys() - self._host_keywords)
        return Call(
            named=named,
            args=args,
            kwargs=kept,
            keywords=keywords,
            outputs=outputs,
            loss_options=options,
            asks_of_the_loss=options + tuple(name for name in outputs if name != LOGITS),
            logits_dtype=keywords.get("logits_dtype"),
            model_name=self.model_name,
            ignore_index=named.get("ignore_index", IGNORE_INDEX),
        )

    def _options(self, keywords: dict[str, Any]) -> tuple[str, ...]:
        """Names of the keywords that change the model's original loss."""
        of_outputs = ("outputs", *ARGUMENTS_OF_OUTPUTS, DIFFERENTIABLE)
        neutral = {"label_smoothing": self._original_smoothing, "z_loss": 0.0, "temperature": 1.0}
        return tuple(
            name
            for name, value in keywords.items()
            if name not in of_outputs
            and value is not None
            and not (isinstance(value, int | float) and value == neutral.get(name))
        )

    def _usual_outputs(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the outputs of a call without ``outputs=``. With "logits" in the config, training stays fused."""
        return () if LOGITS in self._outputs and model.training else self._outputs

    def unknown(self, keywords: Iterable[str]) -> list[str]:
        """Returns the keywords that neither the model nor its loss has."""
        if not self.takes_more:
            return []  # Python itself refuses unknown keywords.
        further = [name for name in keywords if name not in self._known and not name.startswith(TAKEN_BY_DECORATORS)]
        if not further or not self._is_transformers:
            return []
        return [name for name in further if name not in _attention_keywords()]

    def _warn_of_unknown(self, keywords: Iterable[str]) -> None:
        """Warns, the first time, of a keyword that neither the model nor the loss has; transformers' models drop it."""
        for name in self.unknown(keywords):
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"{self.model_name} was called with {name!r}, which neither its modules nor its attention take, so "
                    f"that it has no effect. Options of the loss are {', '.join(CALL_KEYWORDS)}, num_items_in_batch, "
                    "ignore_index and shift_labels.",
                    stacklevel=2,
                )


def options_for(loss_function: Callable[..., Any], call: Call, *, reason: str) -> dict[str, Any]:
    """Returns the loss options of a call whose loss is not fused, as keywords for ``loss_function``.

    Raises:
        LigerDistError: it has no parameter for one of them, so that it would be dropped.
    """
    named = signature(loss_function).parameters
    for name in call.asks_of_the_loss:
        if name not in named:
            raise LigerDistError(
                f"{name} was given to {call.model_name}, whose loss is not fused here ({reason}), so that nothing "
                f"would apply it: {getattr(loss_function, '__qualname__', loss_function)} has no {name}. Leave it "
                "out, or use a loss function that names it."
            )
    return {name: call.keywords[name] for name in call.loss_options}


def _uncast(value: Any) -> Any:
    """Returns an argument with the tensors of each :class:`Uncast` instead of it."""
    if isinstance(value, tuple | list):
        return type(value)(_uncast(item) for item in value)
    return value.tensor if isinstance(value, Uncast) else value


def inputs_of(named: dict[str, Any]) -> Tensor | None:
    """Returns the tokens of a call, as ids or embeddings."""
    return next((named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None), None)


def check_usual_outputs(outputs: tuple[str, ...]) -> None:
    """Refuses outputs that a :class:`WrapConfig` cannot have.

    Raises:
        LigerDistError: unknown ones, or such as need an argument of the call.
    """
    check_outputs(outputs)
    for output in ("log_prob_at", "top_k"):
        if output in outputs:
            raise LigerDistError(
                f"outputs of the WrapConfig contains {output!r}, which needs an argument of the call; ask for it in "
                "the call, by outputs= along with token_ids= or top_k=."
            )


def check_outputs(outputs: tuple[str, ...]) -> None:
    unknown = [name for name in outputs if name not in CALL_OUTPUTS]
    if unknown:
        raise LigerDistError(f"outputs contains {unknown[0]!r}; expected names among {', '.join(CALL_OUTPUTS)}.")
    if LOGITS in outputs and len(outputs) > 1:
        raise LigerDistError(
            f"outputs is {outputs}: with its logits the model computes its own loss, which has no other outputs; ask "
            "for the logits alone, or leave them out."
        )


def _keywords_below(model: nn.Module) -> Iterable[str]:
    """Names of the arguments of all modules, with deprecated ones, and of the keywords that annotations pass on."""
    classes: set[Any] = {cls for module in model.modules() for cls in type(module).__mro__ if "forward" in vars(cls)}
    for cls in classes:
        try:
            parameters = signature(cls.forward).parameters
        except (TypeError, ValueError):
            continue  # A property, None or a builtin: it names no keywords.
        yield from renamed_keywords(cls.forward)
        for parameter in parameters.values():
            yield parameter.name
            yield from _typed_keywords(cls, parameter)


def _typed_keywords(cls: type[nn.Module], parameter: Parameter) -> Iterable[str]:
    """Returns the keys of ``**kwargs: Unpack[SomeTypedDict]``."""
    if parameter.kind is not Parameter.VAR_KEYWORD or parameter.annotation is Parameter.empty:
        return
    for typed in get_args(parameter.annotation):
        yield from getattr(typed, "__annotations__", ())


def _attention_keywords() -> frozenset[str]:
    """Names of the arguments of the registered attention functions, including those of the user."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Data collators give seq_idx with packed rows; the annotations of transformers 5.0 do not have it.
    names = {"seq_idx"}
    for module, typed in (
        ("transformers.modeling_flash_attention_utils", "FlashAttentionKwargs"),
        ("transformers.utils", "TransformersKwargs"),
    ):
        names |= set(getattr(getattr(import_module(module), typed, None), "__annotations__", ()))
    for function in ALL_ATTENTION_FUNCTIONS.values():
        names |= set(signature(function).parameters)
    return frozenset(names)


class WrapId:
    """Identifies one wrapped model: its loss and its lm_head hold the same object. A copy of the model gets another
    one, a copy of lm_head alone (PEFT's) keeps it."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapId:
        model = None if self._model is None else self._model()
        return WrapId(memo[id(model)]) if id(model) in memo else self

    def __reduce__(self) -> Any:
        return WrapId, (None if self._model is None else self._model(),)


NOTED_LOSSES: ContextVar[list[Tensor] | None] = ContextVar("liger_dist_losses", default=None)
"""losses of calls in this context; None where they are not noted"""


@contextmanager
def noted_losses() -> Iterator[list[Tensor]]:
    """Within, the losses that calls of wrapped models compute are noted, in their order, each 0-d and detached."""
    losses: list[Tensor] = []
    token = NOTED_LOSSES.set(losses)
    try:
        yield losses
    finally:
        NOTED_LOSSES.reset(token)


@contextmanager
def unnoted_losses() -> Iterator[None]:
    """Within, losses are not noted."""
    token = NOTED_LOSSES.set(None)
    try:
        yield
    finally:
        NOTED_LOSSES.reset(token)


def note_loss(loss: Tensor) -> Tensor:
    """Notes a loss for :func:`noted_losses`; returns it."""
    losses = NOTED_LOSSES.get()
    if losses is not None:
        losses.append(loss.detach())
    return loss
