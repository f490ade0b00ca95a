"""How a model gets from its lm_head's logits and its labels to its loss, as the probe has seen it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Targets = Literal["next", "next_attended", "same"]
"""Alignment of labels to logits: the next token's label; the same, except where the next token's attention mask is 0;
the label at its position (decoders whose input is shifted, masked language models)."""


SELECTIONS = ("getitem", "narrow", "masked_select", "index_select")
"""operations that select logits, by their names without underscores"""


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """``softcap * tanh(scale * logit / softcap)``, or ``scale * logit`` without a soft-cap; or ``logit + bias``."""

    softcap: float | None = None
    scale: float = 1.0
    bias: str | None = None
    """name of a buffer ``[V]`` of the model that is added to the logits"""

    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        scaled = logits * self.scale
        capped = scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)
        return capped if bias is None else capped + bias

    def __str__(self) -> str:
        return f"softcap {self.softcap}, logit scale {self.scale:g}" + (f", bias {self.bias}" if self.bias else "")


@dataclass(frozen=True, kw_only=True)
class HeadCalls:
    """Calls of lm_head in one forward, besides the first whose logits a loss takes."""

    before: int = 0
    """number of calls before that one; their logits are computed"""
    after: tuple[LossRecipe | None, ...] = ()
    """for each call after it: its loss; None for logits that no loss takes"""
    losses_before: int = 0
    """number of losses that the model computes before that of the first call"""

    @property
    def further(self) -> tuple[LossRecipe, ...]:
        """The further losses, such as those of multi-token prediction."""
        return tuple(recipe for recipe in self.after if recipe is not None)

    def __str__(self) -> str:
        counted = ", ".join(f"{_plural(recipe.ahead, 'token')} further" for recipe in self.further)
        return f"{_plural(len(self.further), 'further loss', 'es')} through lm_head (labels {counted})"


def _plural(number: int, name: str, ending: str = "s") -> str:
    return f"{number} {name}{'' if number == 1 else ending}"


@dataclass(frozen=True, kw_only=True)
class LossRecipe:
    """What the fused loss has to reproduce of a model's original loss."""

    transform: LogitTransform
    owner: str | None
    """name of the module whose ``loss_function`` gets the logits ("" for the model itself); None where a forward calls
    ``torch.nn.functional.cross_entropy`` itself"""
    targets: Targets
    takes_num_items: bool
    """True if ``num_items_in_batch`` reaches the loss"""
    label_smoothing: float = 0.0
    changes: tuple[tuple[Any, ...], ...] = ()
    """the arithmetic on logits and the selections of them between lm_head and loss; a call that does something else is
    refused"""
    ahead: int = 0
    """number of tokens that the labels of a further loss are shifted by, in addition to ``targets``"""
    missing_tokens: int = 0
    """number of tokens at the end of each sequence that the call of lm_head for a further loss leaves out"""
    cut: int | None = None
    """number of tokens within which a label of a further loss has to be of the same document, by restarting
    ``position_ids``; None where documents do not matter"""
    training: HeadCalls = HeadCalls()
    """in a model in training mode; of the first loss alone"""
    evaluation: HeadCalls = HeadCalls()

    @property
    def repeats_head(self) -> bool:
        """True if a forward calls lm_head several times."""
        return any(calls.before > 0 or calls.after for calls in (self.training, self.evaluation))

    def allows(self, changes: tuple[tuple[Any, ...], ...]) -> bool:
        """True if a call whose code did ``changes`` to the logits has the loss of this recipe, if those that it selects
        by tensors, such as masks, have all labels that count (:func:`selects_by_tensor`)."""
        return _at_places(changes) == _at_places(self.changes)

    def __str__(self) -> str:
        where = "its own cross entropy" if self.owner is None else f"{self.owner}.loss_function".lstrip(".")
        one = f"fused linear cross entropy for {where}, {_SHIFTS[self.targets]}, {self.transform}"
        modes = {"in training": self.training, "in evaluation": self.evaluation}
        if self.training == self.evaluation:
            modes = {"": self.training}
        return "; ".join([one, *(f"{calls} {mode}".rstrip() for mode, calls in modes.items() if calls.further)])


_SHIFTS: dict[Targets, str] = {
    "next": "labels shifted by one",
    "next_attended": "labels shifted by one, of attended tokens",
    "same": "labels not shifted",
}


def selects_by_tensor(changes: tuple[tuple[Any, ...], ...]) -> bool:
    """True if logits were selected by a mask of tokens."""
    return len(_at_places(changes)) < len(changes)


def listed(changes: tuple[tuple[Any, ...], ...]) -> str:
    """Lists changes for a sentence."""
    return ", ".join(" ".join(map(str, change)) for change in changes) or "nothing"


def _at_places(changes: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
    return [change for change in changes if not (change[0] in SELECTIONS and "tensor" in change)]


class NotFusableError(Exception):
    """The probe cannot explain the model's code; the message says why. Never leaves this package."""
