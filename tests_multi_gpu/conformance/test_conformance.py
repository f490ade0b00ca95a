"""Every cell: every parameter's gradient and value equal those of the unwrapped fp64 model on the union of all ranks'
data, over two optimiser steps; or a refusal before anything is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
from cells import CELLS, LEARNING_RATE, PRECISION, Cell, by_world, tier
from harness import InThisProcess, Workers
from layouts import SESSIONS, Session
from matrix import Matrix, Outcomes
from models import (
    assert_below,
    make_batch,
    policy_arguments,
    policy_objective,
    relative_errors,
    soft_arguments,
    true_loss_sum,
    true_policy_sum,
    true_soft_sum,
)
from mtp_models import true_mtp_losses
from predicting import true_losses
from routes import by_hand, routes_for
from torch import Tensor, nn

import liger_dist

MATRIX_FILE = Path(__file__).parents[2] / "docs" / "support_matrix.md"

OUTCOMES = Outcomes()
STEPS = 2


def marked(cells: list[Cell]) -> list[Any]:
    """Cells as parameters, with the mark of their tier."""
    marks = {"smoke": [pytest.mark.smoke], "test": [], "nightly": [pytest.mark.nightly]}
    return [pytest.param(cell, marks=marks[tier(cell)], id=str(cell)) for cell in cells]


@pytest.mark.parametrize("cell", marked(by_world(CELLS, 1)))
def test_one_process(cell: Cell) -> None:
    with InThisProcess() as here:
        conform(cell, here)


@pytest.mark.parametrize("cell", marked(by_world(CELLS, 2)))
def test_two_ranks(cell: Cell, workers_2: Workers) -> None:
    conform(cell, workers_2)


@pytest.mark.parametrize("cell", marked(by_world(CELLS, 4)))
def test_four_ranks(cell: Cell, workers_4: Workers) -> None:
    conform(cell, workers_4)


@pytest.mark.parametrize("cell", marked(PRECISION))
def test_bf16_is_no_worse_than_the_unfused_model(cell: Cell, workers_2: Workers, workers_4: Workers) -> None:
    skip_without(cell)
    workers = workers_2 if cell.world == 2 else workers_4
    fused, unfused = (workers.run(rounding, replace(cell, fused=fused)) for fused in (True, False))
    for mine, theirs in zip(fused, unfused, strict=True):
        for name, error in mine.items():
            assert error <= 1.5 * theirs[name] + 1e-3, f"{name}: {error:.2e}, unfused {theirs[name]:.2e}"
    OUTCOMES.exact.add(str(cell))


def test_the_documented_matrix_is_that_of_this_run(request: pytest.FixtureRequest) -> None:
    """``make test`` runs some cells of each refusal, and expects the others to be on the page as they are declared."""
    writes = request.config.getoption("--write-pages")
    if not writes:
        for cell in (*CELLS, *PRECISION):
            if tier(cell) == "nightly":
                (OUTCOMES.skipped if cell.obstacle() else OUTCOMES.exact).add(str(cell))
    if torch.cuda.is_available() or OUTCOMES.missing:
        pytest.skip(f"{len(OUTCOMES.missing)} cells were not run on a CPU before this test")
    rendered = Matrix(OUTCOMES).render()
    if writes:
        MATRIX_FILE.write_text(rendered)
    assert MATRIX_FILE.read_text() == rendered, "run `make matrix` and read what has changed"


def conform(cell: Cell, workers: Any) -> None:
    """A cell is exact, or refused with the words it says."""
    skip_without(cell)
    if not cell.refused:
        for rank, errors in enumerate(workers.run(train, cell)):
            assert_below(errors, cell.tolerance, f"rank {rank}")
        OUTCOMES.exact.add(str(cell))
        return
    for message in workers.run(refusal, cell):
        assert cell.refused in message
    OUTCOMES.refused[str(cell)] = next(line.strip() for line in message.splitlines() if cell.refused in line)


def refusal(cell: Cell) -> str:
    """The message that refuses a cell on this rank."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - some are refused by the framework itself
        train(cell)
    return str(caught.value)


def skip_without(cell: Cell) -> None:
    """Skips what this machine cannot run, with the reason."""
    reason = cell.obstacle()
    if reason is not None:
        OUTCOMES.skipped.add(str(cell))
        pytest.skip(reason)


def train(cell: Cell) -> dict[str, float]:
    """Trains two steps beside the truth and returns every error found, by name. Runs on every rank."""
    model = build(cell)
    reference = cell.built.truth(model)
    session = SESSIONS[cell.engine](cell, model)
    if not cell.refused:
        facts = liger_dist.explain(session.inner).facts
        assert facts.tied == cell.tied
        # Tied weights that are stored apart would be two weights.
        assert not (facts.tied and facts.storage.apart_from_embedding)
    errors: dict[str, float] = {}
    with ExitStack() as stack:
        if cell.built.single:
            stack.enter_context(all_by_kernels(model, forwards=2))
        for step in range(STEPS):
            errors |= {f"step {step} {name}": error for name, error in train_step(session, reference, step).items()}
    if cell.used.then:
        errors |= AFTERWARDS[cell.used.then](session, reference)
    session.close()
    return errors


@contextmanager
def all_by_kernels(model: nn.Module, *, forwards: int) -> Iterator[None]:
    """Within, every norm and gated MLP is computed by its kernel, ``forwards`` times, and none keeps its output."""
    norms, gated_mlps = (import_module(f"liger_dist.fused_layers.{name}") for name in ("norm", "gated_mlp"))
    with (
        mock.patch.object(import_module("liger_dist.fused_layers.recompute"), "MIN_BYTES", 1),
        mock.patch.object(norms, "norm", wraps=norms.norm) as norm,
        mock.patch.object(gated_mlps, "gated_activation", wraps=gated_mlps.gated_activation) as activation,
    ):
        yield
    for kind, kernel in (("Norm", norm), ("MLP", activation)):
        modules = [name for name, module in model.named_modules() if type(module).__name__.endswith(kind)]
        assert modules
        assert kernel.call_count == forwards * len(modules), f"{kernel.call_count} calls for {modules}"


def build(cell: Cell) -> nn.Module:
    """The model of a cell, the same on every rank."""
    return cell.build()


def batches_of(cell: Cell, session: Session, step: int) -> list[list[dict[str, Tensor]]]:
    """Micro-batches of every data-parallel rank."""
    micro = cell.accumulation * cell.layout.get("accumulation", 1) * cell.used.forwards
    empty = session.data_world - 1 if cell.given.empty_rank else None
    return [
        [
            make_batch(r, seed=10 * step + m, num_ignored=12 if r == empty else None, rows=cell.given.rows)
            for m in range(micro)
        ]
        for r in range(session.data_world)
    ]


def train_step(session: Session, reference: nn.Module, step: int) -> dict[str, float]:
    cell = session.cell
    batches = batches_of(cell, session, step)
    mine = run_micro_batches(session, batches)
    truths = true_step(reference, cell, batches)[session.data_rank]
    errors = {
        f"loss {micro}": abs(loss - truth) / max(abs(truth), 1e-12)
        for micro, (loss, truth) in enumerate(zip(mine, truths, strict=True))
    }
    gradients = session.step()
    true_gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = relative_errors(gradients, true_gradients, floor=1e-2 if cell.tolerance > 1e-6 else 1e-4)
    errors |= {f"gradient of {name}": error for name, error in found.items()}
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad
                parameter.grad = None
    # After the last step, which the values before it have led to: each is all-gathered.
    values = session.parameters() if step == STEPS - 1 else {}
    for name, parameter in reference.named_parameters():
        if name in values:
            errors[f"value of {name}"] = float((values[name] - parameter).abs().max())
    return errors


def run_micro_batches(session: Session, batches: list[list[dict[str, Tensor]]]) -> list[float]:
    """Forward and backward of this rank's micro-batches."""
    cell, mine = session.cell, batches[session.data_rank]
    items = on_device.tensor(count_valid(batches) / session.data_world)
    losses: list[Tensor] = []

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        extra: dict[str, Any] = {"num_items_in_batch": items} if cell.given.passes_items else {}
        if cell.given.passes_shifted:
            extra["shift_labels"] = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        if cell.used.policy:
            extra |= policy_arguments(batch, has_support=cell.used.has_support)
        if cell.used.soft_labels:
            extra |= soft_arguments(batch)
        # The backward, with what it recomputes, comes after the context.
        routing: AbstractContextManager[Any] = nullcontext()
        if cell.used.replays:
            routing = liger_dist.replay_routing(session.root, routes_for(batch, session.inner))
        with routing:
            output = session.forward(batch, outside=cell.used.outside, **extra)
        assert not (cell.fused and hasattr(output, "logits"))
        assert output.loss.dtype in (torch.float32, torch.float64)
        loss: Tensor = output.loss
        if cell.used.policy:
            loss = loss + policy_objective(output, batch) / max(count_valid([[batch]]), 1)
        losses.append(loss.detach())
        return loss if cell.given.passes_items else loss / (len(mine) / cell.layout.get("accumulation", 1))

    if cell.used.forwards > 1:
        session.backward(sum(loss_of(batch) for batch in mine))  # type: ignore[arg-type]
        return [float(loss) for loss in losses]
    for index, batch in enumerate(mine):
        if index < len(mine) - 1 and cell.accumulation > 1:
            with session.without_reduction():
                session.backward(loss_of(batch))
        else:
            session.backward(loss_of(batch))
    return [float(loss) for loss in losses]


def count_valid(batches: list[list[dict[str, Tensor]]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for rank in batches for batch in rank)


def true_step(reference: nn.Module, cell: Cell, batches: list[list[dict[str, Tensor]]]) -> list[list[float]]:
    """Gradients of the unwrapped model as data parallelism defines them; what each rank's micro-batches should
    report."""
    world = len(batches)
    true_policy = partial(true_policy_sum, has_support=cell.used.has_support)
    true_sum = true_soft_sum if cell.used.soft_labels else true_policy if cell.used.policy else true_loss_sum
    if cell.built.predicts is not None or cell.built.mtp:
        return true_further_step(reference, cell, batches)
    reports: list[list[float]] = []
    for rank_batches in batches:
        reports.append([])
        for micro, batch in enumerate(rank_batches):
            with by_hand(reference, routes_for(batch, reference)) if cell.used.replays else nullcontext():
                total, count = true_sum(reference, batch)
            if cell.given.passes_items:
                loss, factor = total * world / count_valid(batches), 1
            elif cell.given.global_mean:
                loss, factor = total * world / count_valid([[r[micro]] for r in batches]), len(rank_batches)
            else:
                loss, factor = total / max(count, 1), len(rank_batches)
            if loss.requires_grad:
                (loss / factor / world).backward()
            reports[-1].append(float(loss.detach()))
    return reports


def weighted_losses(reference: Any, batch: dict[str, Tensor]) -> list[tuple[float, Tensor, int]]:
    """Weight, sum over tokens, and number of labels of each loss."""
    if not hasattr(reference, "mtp"):
        return true_losses(reference, batch)
    weights = (reference.mtp.main_weight, *reference.mtp.weights)
    return [(weight, *found) for weight, found in zip(weights, true_mtp_losses(reference, batch), strict=True)]


def true_further_step(reference: nn.Module, cell: Cell, batches: list[list[dict[str, Tensor]]]) -> list[list[float]]:
    """As :func:`true_step`, for a model with several losses: each has its own mean."""
    world = len(batches)
    losses = [[weighted_losses(reference, batch) for batch in rank_batches] for rank_batches in batches]
    reports: list[list[float]] = []
    for found in losses:
        reports.append([])
        for micro, terms in enumerate(found):
            factor = 1 if cell.given.passes_items else len(found)
            loss = torch.zeros((), dtype=torch.float64, device="cpu")
            for number, (weight, total, count) in enumerate(terms):
                divisor = float(max(count, 1))
                if cell.given.passes_items:
                    divisor = count_valid(batches) / world
                elif cell.given.global_mean:
                    divisor = sum(rank[micro][number][2] for rank in losses) / world
                loss = loss + weight * total.cpu() / divisor
            (loss / factor / world).backward()
            reports[-1].append(float(loss.detach()))
    return reports


@torch.no_grad()
def evaluate(session: Session, reference: nn.Module) -> dict[str, float]:
    """A loss without logits or gradients, and logits on request, between training steps."""
    session.root.eval()
    reference.eval()
    batch = make_batch(session.data_rank)
    with ExitStack() as patched:
        refusal = AssertionError("a gradient buffer in evaluation")
        kernel = import_module("liger_dist_kernels.linear_cross_entropy")
        patched.enter_context(mock.patch.object(kernel, "WeightGradient", side_effect=refusal))
        output = session.forward(batch)
    total, count = true_loss_sum(reference, batch)
    logits = session.forward({"input_ids": batch["input_ids"]}).logits
    truth = reference(input_ids=batch["input_ids"]).logits
    assert not hasattr(output, "logits")
    assert not output.loss.requires_grad
    return {
        "evaluated loss": abs(float(output.loss) - float(total) / count),
        "logits": float((logits - truth).abs().max()) / float(truth.abs().max()),
    }


@torch.no_grad()
def generate(session: Session, reference: Any) -> dict[str, float]:
    session.root.eval()
    reference.eval()
    prompt = make_batch(0)["input_ids"][:1, :5]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with session.whole_weights():
        text = session.inner.generate(prompt, **options)  # type: ignore[operator]
    return {"text": float((text != reference.generate(prompt, **options)).sum())}


AFTERWARDS = {"evaluate": evaluate, "generate": generate}


def rounding(cell: Cell) -> dict[str, float]:
    """Relative L2 error of one step in bf16: of all gradients, and of the head's."""
    model = build(cell)
    if cell.engine == "zero":
        model.to(torch.bfloat16)
    reference = cell.built.truth(model)
    session = SESSIONS[cell.engine](cell, model)
    batches = batches_of(cell, session, 0)
    (loss,) = run_micro_batches(session, batches)
    (truth,) = true_step(reference, cell, batches)[session.data_rank]
    gradients = session.step()
    session.close()
    differences, squares = {}, {}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        differences[name] = float((gradients[name].double() - parameter.grad).square().sum())
        squares[name] = float(parameter.grad.square().sum())
    return {
        "loss": abs(loss - truth) / abs(truth),
        "all gradients": (sum(differences.values()) / sum(squares.values())) ** 0.5,
        "gradient of the head": (differences["lm_head.weight"] / squares["lm_head.weight"]) ** 0.5,
    }
