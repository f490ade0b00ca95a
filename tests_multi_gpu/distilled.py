"""Pairs of a student and a teacher in any two layouts, against both unwrapped, with full logits in fp64."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import on_device
import torch
import torch.nn.functional as F
from cells import LEARNING_RATE, Cell
from layouts import SESSIONS, Session
from models import documents_of, make_batch, make_config, relative_errors
from torch import Tensor, nn

import liger_dist
from liger_dist.sharding.process_groups import compute_device

TEACHER_VOCAB = 107
"""padded beyond the student's"""


def divergences(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """``[T]``, over the classes of both, in the dtype of the logits."""
    common = min(student_logits.shape[-1], teacher_logits.shape[-1])
    log_q = (student_logits[:, :common] / temperature).log_softmax(-1)
    log_p = (teacher_logits[:, :common] / temperature).log_softmax(-1)
    if divergence == "forward_kl":
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    if divergence == "reverse_kl":
        return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    if divergence == "total_variation":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1.0 - beta))
    of_teacher = F.kl_div(log_m, log_p, reduction="none", log_target=True).sum(-1)
    return beta * of_teacher + (1.0 - beta) * F.kl_div(log_m, log_q, reduction="none", log_target=True).sum(-1)


def make_teacher(*, family: str = "llama", dtype: torch.dtype = torch.float64, vocab_size: int = TEACHER_VOCAB) -> Any:
    """A model of other sizes than the student; the same on every rank."""
    from transformers import AutoModelForCausalLM

    config = make_config(family)
    config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers = vocab_size, 24, 40, 1
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:1]
    config.head_dim = 12
    torch.manual_seed(77)
    return AutoModelForCausalLM.from_config(config).to(dtype).to(compute_device())


class Plain(Session):
    """A full model on every rank, which nothing shards or averages: a teacher."""

    def shard(self) -> None:
        self.root = self.wrap("auto")


def session_of(cell: Cell, model: nn.Module) -> Session:
    return (Plain if cell.engine == "none" else SESSIONS[cell.engine])(cell, model)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Student and teacher, and what is computed with them."""

    student: Cell
    teacher: Cell
    options: dict[str, Any] = field(default_factory=dict)
    """of ``distillation_loss``"""
    passes_items: bool = False
    same_tokens: bool = False
    """True for one batch on all ranks, as a tensor-parallel teacher needs"""
    trains_teacher: bool = True
    """False for a teacher whose parameters require no gradient"""
    teacher_family: str = "llama"

    @property
    def tolerance(self) -> float:
        return max(self.student.tolerance, self.teacher.tolerance)

    def __str__(self) -> str:
        changed = [f"{name} {value}" for name, value in self.options.items()]
        changed += [name for name in ("passes_items", "same_tokens") if getattr(self, name)]
        return ", ".join([f"{self.student} from {self.teacher}", *changed])


def errors_of(pair: Pair) -> dict[str, float]:
    """Two optimiser steps beside the truth; runs on every rank."""
    model = pair.student.build()
    dtype = min(pair.student.dtype, pair.teacher.dtype, key=lambda dtype: dtype.itemsize)
    teacher = make_teacher(family=pair.teacher_family, dtype=dtype)
    teacher.requires_grad_(pair.trains_teacher)
    reference, true_teacher = pair.student.built.truth(model), copy.deepcopy(teacher).double()
    session = session_of(pair.student, model)
    other = session_of(pair.teacher, teacher)
    other.root.eval()
    errors: dict[str, float] = {}
    for step in range(2):
        errors |= {
            f"step {step} {name}": e for name, e in _step(pair, session, other, reference, true_teacher, step).items()
        }
    assert all(parameter.grad is None for parameter in other.inner.parameters())
    session.close()
    other.close()
    return errors


def _step(
    pair: Pair, session: Session, other: Session, reference: nn.Module, true_teacher: nn.Module, step: int
) -> dict[str, float]:
    micro, world = pair.student.accumulation, session.data_world
    batches = [
        [
            make_batch(0 if pair.same_tokens else rank, seed=10 * step + m, rows=pair.student.given.rows)
            for m in range(micro)
        ]
        for rank in range(world)
    ]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for rank in batches for batch in rank)
    reports = []
    for rank, micros in enumerate(batches):
        for batch in micros:
            sum_of_losses, count, parts = true_sum(pair, reference, true_teacher, batch)
            loss = sum_of_losses * world / total if pair.passes_items else sum_of_losses / max(count, 1) / micro
            (loss / world).backward()
            if rank == session.data_rank:
                reports.append((loss.detach() * (1 if pair.passes_items else micro), *parts))
    losses = {}
    for index, (batch, report) in enumerate(zip(batches[session.data_rank], reports, strict=True)):
        extra = {"num_items_in_batch": on_device.tensor(total / world)} if pair.passes_items else {}
        output = liger_dist.distillation_loss(session.root, other.root, **batch, **pair.options, **extra)
        assert not hasattr(output, "logits")
        assert not output.divergence.requires_grad
        losses[f"loss {index}"] = abs(float(output.loss.detach()) / float(report[0]) - 1)
        if not pair.passes_items:
            losses[f"divergence {index}"] = abs(float(output.divergence) / float(report[1]) - 1)
        loss = output.loss if pair.passes_items else output.loss / micro
        if index < micro - 1:
            with session.without_reduction():
                session.backward(loss)
        else:
            session.backward(loss)
    return losses | _errors_of_gradients(session, reference, pair.tolerance)


def _errors_of_gradients(session: Session, reference: nn.Module, tolerance: float) -> dict[str, float]:
    gradients = session.step()
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert not [name for name in gradients.keys() - truths.keys() if gradients[name].any()]
    errors = relative_errors(gradients, truths, floor=1e-2 if tolerance > 1e-6 else 1e-4)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in truths:
                parameter -= LEARNING_RATE * truths[name]
                parameter.grad = None
    return {f"gradient of {name}": error for name, error in errors.items()}


def true_sum(
    pair: Pair, reference: nn.Module, true_teacher: nn.Module, batch: dict[str, Tensor]
) -> tuple[Tensor, int, tuple[Tensor, ...]]:
    """The sum of the token losses, the number of tokens, and the mean divergence; each document alone."""
    if "position_ids" in batch:
        found = [true_sum(pair, reference, true_teacher, document) for document in documents_of(batch)]
        tokens = sum(count for _, count, _ in found)
        means = [part[0] * count for _, count, part in found if count]
        return torch.stack([total for total, *_ in found]).sum(), tokens, (torch.stack(means).sum() / max(tokens, 1),)
    options = dict(pair.options)
    hard_weight = options.pop("hard_weight", 0.0)
    labels = batch["labels"][:, 1:].reshape(-1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        teacher_logits = true_teacher(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    rows = options.pop("teacher_rows", None)
    teacher_logits = teacher_logits if rows is None else teacher_logits[:, rows.to(teacher_logits.device)]
    logits = reference(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    each = divergences(logits, teacher_logits, **options)
    hard = F.cross_entropy(logits, labels, reduction="none")
    valid = labels != -100
    total = ((1.0 - hard_weight) * each + hard_weight * hard)[valid].sum()
    return total, int(valid.sum()), (each[valid].mean().detach(),)
