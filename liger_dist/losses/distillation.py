"""Inputs of a distillation loss besides the student's logits: a teacher's hidden states and lm_head.

Legend: E hidden of the teacher, V its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist_kernels import Divergence, DivergenceOptions, LossOptions, TeacherHead


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher's hidden states and its full lm_head, without gradients."""

    hidden: Tensor
    """``[..., E]``, the labels' shape and E"""
    weight: Tensor
    """``[V, E]``"""
    bias: Tensor | None = None
    """``[V]``"""
    softcap: float | None = None
    logit_scale: float = 1.0
    rows: Tensor | None = None
    """``[C]``, row of ``weight`` for each class of the student; None for the same classes"""

    def check(self, labels_shape: torch.Size, device: torch.device) -> None:
        """Refuses hidden states that are not one vector for each label, or that are on another device.

        Raises:
            LigerDistError: with the shapes or devices.
        """
        if self.hidden.shape[:-1] != labels_shape or self.hidden.shape[-1] != self.weight.shape[-1]:
            raise LigerDistError(
                f"the teacher's hidden states have shape {tuple(self.hidden.shape)}, its lm_head has shape "
                f"{tuple(self.weight.shape)} and the student's labels have shape {tuple(labels_shape)}; expected one "
                "hidden state for each label. Give the teacher the same tokens, at the same positions."
            )
        if self.hidden.device != device:
            raise LigerDistError(
                f"the teacher is on {self.hidden.device} and the student on {device}; move them to one device."
            )

    def with_operands(self, hidden_TE: Tensor, dtype: torch.dtype | None) -> Teacher:
        """Replaces the hidden states by those of scored tokens, selects the ``rows`` of lm_head, and casts it to their
        dtype or ``dtype``."""
        dtype = hidden_TE.dtype if dtype is None else dtype
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        if self.rows is not None:
            rows = self.rows.to(weight.device)
            weight, bias = weight.index_select(0, rows), None if bias is None else bias.index_select(0, rows)
        bias = None if bias is None else bias.to(dtype)
        return replace(self, hidden=hidden_TE.detach().to(dtype), weight=weight.to(dtype), bias=bias, rows=None)

    def head(self) -> TeacherHead:
        """Builds the kernels' record of the lm_head."""
        return TeacherHead(weight_VE=self.weight, bias_V=self.bias)


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """``(1 - hard_weight) * divergence + hard_weight * cross entropy of the labels``."""

    teacher: Teacher
    divergence: Divergence = "forward_kl"
    beta: float = 0.5
    """weight of the teacher in the mixture of "jsd", in (0, 1)"""
    temperature: float = 1.0
    """divisor of both models' logits in the divergence"""
    hard_weight: float = 0.0

    def __str__(self) -> str:
        """Formats options and shapes, for the comparison between ranks that share a loss."""
        teacher = self.teacher
        rows = "" if teacher.rows is None else f", {len(teacher.rows)} of its rows"
        return (
            f"{self.divergence} (beta {self.beta}, temperature {self.temperature}, hard_weight {self.hard_weight}) to "
            f"a teacher of {tuple(teacher.weight.shape)}{rows}, {teacher.hidden.dtype}, softcap {teacher.softcap}, "
            f"logit scale {teacher.logit_scale}"
        )

    def options(self, student: LossOptions) -> DivergenceOptions:
        """Builds the kernels' options from those of the student's logits."""
        of_teacher: dict[str, Any] = {"softcap": self.teacher.softcap, "logit_scale": self.teacher.logit_scale}
        return DivergenceOptions(
            divergence=self.divergence,
            beta=self.beta,
            student=replace(student, temperature=self.temperature),
            teacher=LossOptions(temperature=self.temperature, **of_teacher),
        )
