"""Reads calls of trainers for policies: TRL's ``model(..., labels=labels, fused_lm_head=True)``, and calls without
labels.

TRL 1.x patches the forward of its models (``trl.trainer.utils.add_fused_lm_head``), which then returns per-token
log-probabilities instead of logits. A wrapped model answers those calls itself. It reads the outputs that the trainer
requested of TRL's head from the variables of the patched forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.fused_head.fused_model import original_forward_of
from liger_dist.fused_head.output import with_logits

from .scored_logits import SCORES, ScoredLogits
from .trainer_frames import outputs_read_of_logits

FLAG = "fused_lm_head"
FIELDS = {
    "log_probs": "log_prob",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
"""fields of TRL's output, and the outputs of a wrapped model"""
CACHES = ("past_key_values", "cache_params", "cache")
"""names of a model's cache, in transformers before 5.24 and since"""


@dataclass(frozen=True)
class CallOfTRL:
    """One call with ``fused_lm_head=True``."""

    only_fused: ClassVar[bool] = False
    kwargs: dict[str, Any]
    """keywords of a wrapped model for the same call"""
    fields: tuple[str, ...]
    """requested fields of TRL's output"""
    label_mask: Tensor
    """bool ``[B, S - 1]``, or ``[B, S]`` for shifted labels: True for a token with a label"""
    is_aligned: bool
    """True for labels that were shifted already"""

    def to_host_output(self, output: Any) -> Any:
        """Builds TRL's output from that of the wrapped model."""
        from trl.trainer.utils import FusedCausalLMOutput

        values: dict[str, Tensor] = {}
        for field in self.fields:
            value: Tensor = getattr(output, FIELDS[field])
            values[field] = value if self.is_aligned else value[:, :-1]
        if "log_sum_sq_probs" in values:
            values["log_sum_sq_probs"] = torch.where(self.label_mask, values["log_sum_sq_probs"].detach(), 1.0).log()
        aux_loss = getattr(output, "aux_loss", None)
        # 0 for a batch without labels, as with TRL's head.
        loss = torch.where(self.label_mask.any(), output.loss, torch.zeros_like(output.loss))
        return FusedCausalLMOutput(loss=loss, label_mask=self.label_mask, aux_loss=aux_loss, **values)


def read_call(model: nn.Module, named: dict[str, Any], kwargs: dict[str, Any], vocab_size: int) -> CallOfTRL | None:
    """Reads the call of a trainer; None if it is not one.

    Raises:
        LigerDistError: the flag without TRL's head or without labels, or an unknown field.
    """
    if not kwargs.get(FLAG):
        return None
    kwargs = {keyword: value for keyword, value in kwargs.items() if keyword != FLAG}
    name = type(model).__name__
    asked = next(_asked_of_head(model), None)
    if asked is None:
        raise LigerDistError(
            f"{FLAG}=True was given to a {name} to which TRL has not added its head; call "
            "trl.trainer.utils.add_fused_lm_head(model) or give the model to a trainer of TRL first."
        )
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is None and shifted is None:
        raise LigerDistError(f"{FLAG}=True was given to {name} without labels; pass labels.")
    if labels is None:
        kwargs["labels"] = shifted
    fields = ("log_probs", *(field for field in asked["outputs"] if field != "log_probs"))
    unknown = [field for field in fields if field not in FIELDS]
    if unknown:
        raise LigerDistError(
            f"TRL's head of {name} was asked for {unknown[0]!r}; expected fields among {', '.join(FIELDS)}. Unwrap the "
            "model, or use a release of TRL that this one knows."
        )
    text_config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    if getattr(text_config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    kwargs |= {
        "outputs": tuple(FIELDS[field] for field in fields),
        "differentiable": torch.is_grad_enabled(),
        "use_cache": False,
        "return_dict": True,
    }
    if asked["temperature"] != 1.0:
        kwargs["temperature"] = asked["temperature"]
    if asked["cast_lm_head_to_fp32"]:
        kwargs["logits_dtype"] = "fp32_operands"
    mask = (labels[:, 1:] if shifted is None else shifted) != -100  # type: ignore[index]
    return CallOfTRL(kwargs, fields, mask, shifted is not None)


@dataclass(frozen=True)
class ScoredCall:
    """One call without labels of a trainer that reads values of the next tokens from the logits."""

    only_fused: ClassVar[bool] = True
    kwargs: dict[str, Any]
    """keywords of a wrapped model for the same call"""
    next_ids: Tensor
    """``[B, S]``: the next token of each; the first one after the last"""
    outputs: tuple[str, ...]
    vocab_size: int

    def to_host_output(self, output: Any) -> Any:
        """Returns the output with stand-ins for the logits of the call."""
        values = {name: getattr(output, name) for name in self.outputs}
        return with_logits(output, ScoredLogits.of(self.next_ids, values, self.vocab_size))


def read_scored_call(
    model: nn.Module, named: dict[str, Any], kwargs: dict[str, Any], vocab_size: int
) -> ScoredCall | None:
    """Reads the call of such a trainer; None if it is not one. Scores every token, including padding, because the
    trainer's means include its logits."""
    ids: Any = named.get("input_ids")
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    # Calls on full sequences without a cache, which return a ModelOutput.
    has_rest = any(named.get(name) is not None for name in ("labels", *CACHES))
    keeps_some = isinstance(named.get("logits_to_keep"), Tensor) or named.get("logits_to_keep")
    if ids is None or not is_decoder or has_rest or keeps_some or named.get("return_dict") is False:
        return None
    read = outputs_read_of_logits()
    if read is None:
        return None
    outputs = (*SCORES, *(name for name in read if name not in SCORES))
    next_ids = ids.roll(-1, 1)
    kwargs = kwargs | {
        "labels": ids,
        "shift_labels": next_ids,
        "outputs": outputs,
        "token_ids": torch.zeros_like(ids)[..., None],
        "differentiable": torch.is_grad_enabled(),
        "return_dict": True,
    }
    return ScoredCall(kwargs, next_ids, outputs, vocab_size)


def _asked_of_head(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yields the arguments of ``add_fused_lm_head`` from the patched forward of the model. Accelerate may have wrapped
    that forward since."""
    functions: list[Any] = [model.forward, original_forward_of(model)]
    while functions:
        function = functions.pop(0)
        function = getattr(function, "__func__", function)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "cast_lm_head_to_fp32" in names:
            cells = function.__closure__ or ()
            yield {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        if hasattr(function, "__wrapped__"):
            functions.insert(0, function.__wrapped__)
