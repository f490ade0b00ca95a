"""A stage of a pipeline: a copy of a Hugging Face model without the modules of other stages.

:func:`liger_dist.pipeline_stage` makes it. Absent modules stand where other stages' modules were, so that names of
parameters, indices of layers and the config are those of the uncut model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_dist.errors import LigerDistError

from .class_swap import MadeAtRunTime, present_as, subclass_of

_STAGE = "_liger_dist_stage"
"""attribute of a model: its :class:`Stage`"""
OF_THE_LOSS = ("labels", "num_items_in_batch")
"""arguments that only the last stage reads; a rank gives the same ones to all of its stages"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Place of a stage in its pipeline."""

    index: int
    num_stages: int
    first_layer: int
    end_layer: int
    """one more than the index of the last layer"""
    decoder: str
    """name of the decoder in the model"""
    passes_embeddings: bool = False
    """True if hidden states go from stage to stage beside the embeddings of the tokens, which the last one reads:
    ``[B, S, 2 D]``"""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def __str__(self) -> str:
        return f"stage {self.index} of {self.num_stages}"

    def described(self) -> str:
        """Lists the modules of the stage."""
        parts = [f"layers {self.first_layer} to {self.end_layer - 1}"]
        further = ", modules of further tokens" if self.passes_embeddings else ""
        parts = ["embedding"] * self.is_first + parts + [f"final norm, lm_head{further} and loss"] * self.is_last
        parts += ["embeddings for further tokens passed on"] * (self.passes_embeddings and not self.is_last)
        return f"{self}: {', '.join(parts)}"


@dataclass
class Passed:
    """Embeddings of the tokens in a call of a stage, if the stages pass them on."""

    model: Any
    embeddings: Tensor | None
    """``[B, S, D]``; None in the first stage until its embedding has run"""


PASSED: ContextVar[Passed | None] = ContextVar("liger_dist_passed", default=None)
"""of the innermost running call of a stage"""
AbsentCall = tuple[nn.Module, Tensor, tuple[Any, ...]]
"""an absent module, the hidden states that it got, and its other arguments"""


def stage_of(model: nn.Module) -> Stage | None:
    """Returns the place of a stage in its pipeline; None for any other model."""
    stage: Stage | None = vars(model).get(_STAGE)
    return stage


class Absent(nn.Module):
    """Stands for a decoder layer or a norm of another stage: returns its first argument.

    Args:
        calls: list to which a trial adds the calls.
    """

    def __init__(self, calls: list[AbsentCall] | None = None) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.calls is not None:
            self.calls.append((self, hidden_states, (*args, *kwargs.values())))
        return hidden_states


class AbsentEmbedding(nn.Module):
    """Stands for the input embedding of the first stage. The trials of ``wrap`` make up its values."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, torch.empty(0, self.hidden_size, device=input_ids.device))


class AbsentHead(nn.Module):
    """Stands for the lm_head of the last stage; it is never called."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.out_features, self.in_features = vocab_size, hidden_size


class StageModel(MadeAtRunTime, nn.Module):
    """Mixed into the class of a stage: same signature of the forward, whose first argument are token ids in the first
    stage and in others what the stage before returned: hidden states ``[B, S, D]``, with the embeddings of the tokens
    beside them ``[B, S, 2 D]`` for multi-token prediction. The last stage returns the loss ``[1]`` of the labels, or
    logits without labels."""


def as_stage(model: nn.Module, stage: Stage) -> nn.Module:
    """Swaps the class of ``model`` in place, which has lost the modules of other stages."""
    vars(model)[_STAGE] = stage
    model.__class__ = _class_for(type(model))
    return model


def _class_for(base: Any) -> Any:
    return subclass_of(base, StageModel, (_class_for, (base,)), {"forward": _make_forward(base)})


def _make_forward(base: Any) -> Callable[..., Any]:
    names = tuple(signature(base.forward).parameters)[1:]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        stage: Stage = vars(self)[_STAGE]
        named = {"use_cache": False} | dict(zip(names, args, strict=False)) | kwargs
        _refuse_router_loss(self, stage, named)
        passed = Passed(self, _take_inputs(self, stage, named))
        token = PASSED.set(passed)
        try:
            return _result_of(base, self, stage, named, passed)
        finally:
            PASSED.reset(token)

    return present_as(forward, base.forward)  # type: ignore[no-any-return]


def _result_of(base: Any, model: Any, stage: Stage, named: dict[str, Any], passed: Passed) -> Tensor:
    """Computes what a stage returns from its arguments ``named``."""
    if not stage.is_last:
        given = {name: value for name, value in named.items() if name not in OF_THE_LOSS}
        hidden_states: Tensor = model.get_submodule(stage.decoder)(**given).last_hidden_state
        if not stage.passes_embeddings or passed.embeddings is None:  # A trial has no embeddings.
            return hidden_states
        return torch.cat([hidden_states, passed.embeddings], -1)
    has_labels = named.get("labels") is not None
    if has_labels and named.get("num_items_in_batch") is None:
        raise LigerDistError(
            f"{stage} was called with labels and num_items_in_batch is None, so that its loss would be a mean over one "
            "micro-batch; call liger_dist.pipeline_step, or pass the number of labels of all micro-batches."
        )
    output = base.forward(model, **named)
    # No view: FSDP2 warns of views that leave a module.
    result: Tensor = torch.stack([output.loss.reshape(())]) if has_labels else output.logits
    return result


def _take_inputs(model: Any, stage: Stage, named: dict[str, Any]) -> Tensor | None:
    """Puts what the stage before has returned among the arguments ``named`` of a model, as its ``inputs_embeds``.

    Returns:
        the embeddings of the tokens ``[B, S, D]``; None if they are not passed on, or not known yet.

    Raises:
        LigerDistError: it is not what the stage before returns.
    """
    if stage.is_first:
        return named.get("inputs_embeds") if stage.passes_embeddings else None
    inputs = named.get("input_ids")
    if inputs is None or not inputs.is_floating_point():  # Ids are those of a trial.
        return None
    size = model.get_input_embeddings().hidden_size * (1 + stage.passes_embeddings)
    if inputs.shape[-1] != size:
        beside = " and the embeddings of the tokens beside them" if stage.passes_embeddings else ""
        raise LigerDistError(
            f"{stage} got a tensor of the shape {tuple(inputs.shape)}; expected hidden states{beside}, [B, S, {size}], "
            "as the stage before returns them. Cut all stages from the same model."
        )
    del named["input_ids"]
    if not stage.passes_embeddings:
        named["inputs_embeds"] = inputs
        return None
    hidden_states, embeddings = inputs.chunk(2, -1)
    named["inputs_embeds"] = hidden_states.contiguous()
    return embeddings  # type: ignore[no-any-return]


def _refuse_router_loss(model: Any, stage: Stage, named: dict[str, Any]) -> None:
    """Raises:
    LigerDistError: the model would add a loss of its routers, of which a stage has only some.
    """
    asked = named.get("output_router_logits")
    if getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked:
        raise LigerDistError(
            f"output_router_logits is True in {stage}, and the loss of the routers needs those of all stages; set "
            "model.config.output_router_logits = False."
        )
