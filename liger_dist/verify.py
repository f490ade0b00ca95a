"""One micro-batch through the model as it is wrapped, fused and unfused, compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import LigerDistError
from .explain import Explanation, explain
from .patching.call import LOGITS
from .patching.seam import Seam
from .sharding.agreement import sentences_of_all_ranks
from .sharding.devices import collective_device
from .sharding.gradients import backward, clear_gradients, local_gradients, unfinished_step
from .sharding.replicas import divergent_parameters
from .wrap import inner_model, record_of

TOLERANCES: dict[torch.dtype | None, float] = {torch.float64: 1e-5, torch.float32: 1e-4}
"""of gradients, relative L2; 16-bit dtypes are held to 2e-2"""
SINGLE = 5.0
"""how many tolerances a single parameter may differ by, against its own norm or, if that is tiny, against a thousandth
of the largest"""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What :func:`verify` saw. ``print(verification)`` shows it as a table; every number is alike on all ranks but the
    losses."""

    adapter: str
    loss: float
    """of this rank, fused"""
    reference_loss: float
    """of this rank, by the model's own loss on whole logits"""
    loss_dtype: torch.dtype
    """of the loss as it leaves the outermost wrapper"""
    head_gradient_error: float
    """of the parameters that hold the head: relative L2 against the model's own loss, over all ranks"""
    gradient_error: float
    """the same of all parameters together"""
    worst_parameter: tuple[str, float]
    """the parameter with the largest error, against its own norm, or a thousandth of the largest where that is more"""
    linearity_error: float
    """relative L2 between the head's gradient of twice the loss and twice its gradient"""
    tolerance: float
    problems: tuple[str, ...]
    """sentences; none when everything agrees"""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    def __str__(self) -> str:
        rows = [
            ("adapter", self.adapter),
            ("loss", f"{self.loss:.6f}, unfused {self.reference_loss:.6f}, {self.loss_dtype}"),
            ("gradient error", f"head {self.head_gradient_error:.1e}, all {self.gradient_error:.1e}"),
            ("worst parameter", f"{self.worst_parameter[0]} {self.worst_parameter[1]:.1e}"),
            ("linearity error", f"{self.linearity_error:.1e}"),
            ("tolerance", f"{self.tolerance:.0e}"),
            ("verdict", "ok" if self.ok else f"{len(self.problems)} problems"),
            *(("problem", sentence) for sentence in self.problems),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@dataclass(frozen=True)
class _Pass:
    loss: Tensor
    dtype: torch.dtype | None
    """in which the head computed"""
    gradients: dict[str, Tensor | None]


def verify(model: nn.Module, batch: dict[str, Any]) -> Verification:
    """Runs one micro-batch through the wrapped ``model`` and compares it with the model's own loss.

    Three passes forward and backward with the same random numbers: fused, fused with twice the loss, and unfused,
    which materialises the logits: choose a batch that fits. Every rank has to call it, between optimiser steps.
    Parameters, buffers, optimiser and random number generators are as before afterwards, and no gradient is left.

    Args:
        model: what is trained: the result of :func:`wrap`, or the engine that DeepSpeed made of it.
        batch: this rank's arguments of the model, with labels of which at least one counts.

    Raises:
        LigerDistError: on every rank alike; the model is not wrapped or not fused, gradients are waiting for an
            optimiser step, or a rank has no labels.
    """
    inner = inner_model(model)
    record = record_of(inner)
    if record.seam is None:
        raise LigerDistError(f"there is no fused loss to verify: {record.unfused_reason}.")
    _agree(_objection(model, record.seam, batch))
    chosen = explain(model)
    if chosen.adapter is None:
        raise LigerDistError(f"no adapter computes the loss of this model:\n{chosen}")
    with _kept(inner):
        fused = _run(model, batch)
        doubled = _run(model, batch, factor=2.0)
        with record.seam.paused():
            unfused = _run(model, batch | record.seam.shared_mean(batch))
    errors = _Errors(fused.gradients, unfused.gradients)
    heads = _parameters_of_the_head(model, inner.get_submodule(record.structure.head_name))
    twice = {name: None if gradient is None else 2 * gradient for name, gradient in fused.gradients.items()}
    linearity = _Errors(doubled.gradients, twice)
    verification = Verification(
        adapter=chosen.adapter,
        loss=float(fused.loss),
        reference_loss=float(unfused.loss),
        loss_dtype=fused.loss.dtype,
        head_gradient_error=errors.of(heads),
        gradient_error=errors.of(list(fused.gradients)),
        worst_parameter=errors.worst(),
        linearity_error=linearity.of(heads if errors.reach(heads) else list(fused.gradients)),
        tolerance=TOLERANCES.get(fused.dtype, 2e-2),
        problems=(),
    )
    problems = [*_problems(verification), *_disagreements(chosen, inner)]
    if not errors.reach(list(fused.gradients)):
        problems.append("no gradient reached any parameter in any pass, so nothing has been compared")
    return replace(verification, problems=tuple(sentences_of_all_ranks(problems)))


def _run(model: nn.Module, batch: dict[str, Any], *, factor: float = 1.0) -> _Pass:
    """One forward and backward; the generators are where they were before."""
    seam = record_of(inner_model(model)).seam
    assert seam is not None
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            loss: Tensor = model(**batch).loss
            backward(model, loss * factor)
            gradients = local_gradients(model)
    finally:
        clear_gradients(model)
    return _Pass(loss.detach(), seam.compute_dtype, gradients)


@contextmanager
def _kept(inner: nn.Module) -> Iterator[None]:
    """Buffers are put back: some models count or average in them."""
    before = copy.deepcopy(dict(inner.named_buffers()))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in inner.named_buffers():
                buffer.copy_(before[name])


class _Errors:
    """Relative L2 errors over all ranks of gradients against others of the same names."""

    def __init__(self, actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
        self._names = list(expected)
        sums = torch.zeros(len(self._names), 2, dtype=torch.float64)
        for row, name in enumerate(self._names):
            found, truth = actual[name], expected[name]
            if found is None and truth is None:
                continue
            found = torch.zeros_like(truth) if found is None else found  # type: ignore[arg-type]
            truth = torch.zeros_like(found) if truth is None else truth
            difference = found.double() - truth.double()
            sums[row] = torch.stack([difference.square().sum(), truth.double().square().sum()]).cpu()
        if dist.is_initialized():
            sums = sums.to(collective_device())
            dist.all_reduce(sums)
        self._sums = sums.cpu()

    def reach(self, names: list[str]) -> bool:
        """Whether any gradient of these parameters is not zero in the reference."""
        return any(self._sums[row, 1] > 0 for row, name in enumerate(self._names) if name in names)

    def of(self, names: list[str]) -> float:
        """Of several parameters together."""
        rows = [row for row, name in enumerate(self._names) if name in names]
        difference, truth = self._sums[rows].sum(0).tolist()
        return float((difference / truth) ** 0.5) if truth > 0 else float(difference**0.5)

    def worst(self) -> tuple[str, float]:
        """The parameter with the largest error; some gradients are zero but for rounding, so it is not taken against a
        norm below a thousandth of the largest."""
        norms = self._sums[:, 1].sqrt()
        errors = self._sums[:, 0].sqrt() / norms.clamp_min(float(norms.max()) * 1e-3 or 1.0)
        row = int(errors.argmax())
        return self._names[row], float(errors[row])


def _problems(seen: Verification) -> list[str]:
    problems = []
    # Written so that NaN is a problem.
    if not abs(seen.loss - seen.reference_loss) <= seen.tolerance * max(abs(seen.reference_loss), 1.0):
        problems.append(f"the fused loss is {seen.loss:.6f}, the model's own {seen.reference_loss:.6f}")
    for error, what in (
        (seen.head_gradient_error, "the head's gradient differs from the model's own"),
        (seen.gradient_error, "the gradients differ from the model's own"),
        (seen.linearity_error, "twice the loss does not give twice the head's gradient"),
    ):
        if not error <= seen.tolerance:
            problems.append(f"{what}: relative error {error:.1e}, tolerance {seen.tolerance:.0e}")
    name, error = seen.worst_parameter
    if not error <= SINGLE * seen.tolerance:
        problems.append(f"the gradient of {name} differs from the model's own: relative error {error:.1e}")
    if seen.loss_dtype in (torch.bfloat16, torch.float16):
        problems.append(
            f"the loss leaves the model as {seen.loss_dtype}, which keeps two or three digits of it: a wrapper "
            "casts its outputs. Under FSDP2 set MixedPrecisionPolicy(output_dtype=None)"
        )
    return problems


def _disagreements(chosen: Explanation, inner: nn.Module) -> list[str]:
    """What is not alike on all ranks but should be."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    problems = []
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (chosen.adapter, chosen.facts))
    if any(theirs != everyone[0] for theirs in everyone):
        problems.append(f"ranks disagree about the layout: {sorted({str(theirs[0]) for theirs in everyone})}")
    names = divergent_parameters(inner, chosen.facts.tensor_parallel_size)
    if names:
        problems.append(
            f"{len(names)} parameters that should be alike on several ranks are not, such as {names[0]}: load or "
            "initialise the same values everywhere before wrapping"
        )
    return problems


def _objection(model: nn.Module, seam: Seam, batch: dict[str, Any]) -> str | None:
    """Why this rank cannot take part, before any rank has begun."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        return "the batch has no labels; give every rank some with a target"
    try:
        call = seam.signature.read((), batch | {"labels": labels.cpu()})
        if call.loss:
            return f"the batch has {next(iter(call.loss))}, which the model's own loss does not know; leave it out"
        if LOGITS in call.outputs:
            return "outputs=('logits',) of its config leaves evaluation unfused; call train() first"
        seam.check_at_entry(call)
        if not seam.has_target(call):
            return "the batch has no label that counts; give every rank one with a target"
    except LigerDistError as error:
        return str(error).rstrip(".")
    if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in model.parameters()):
        return "there are no gradients to compare: no parameter requires one, or torch.no_grad() is on"
    unfinished = unfinished_step(model)
    return None if unfinished is None else f"{unfinished}; call its step() and zero_grad() first"


def _parameters_of_the_head(model: nn.Module, place: nn.Module) -> list[str]:
    """Names of the head's parameters, or of the flat ones in which FSDP1 may keep them."""
    own = {id(parameter) for parameter in place.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in own or "_flat_param" in name]


def _agree(objection: str | None) -> None:
    """Raises on every rank what one rank objects to."""
    sentences = sentences_of_all_ranks([] if objection is None else [objection])
    if sentences:
        raise LigerDistError(f"verify cannot run: {'; '.join(sentences)}.")
