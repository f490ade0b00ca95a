"""Every cell of strategy x model x data x use: every parameter's gradient equals that of the unwrapped fp64 model on
the union of all ranks' data, over two optimiser steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import FAMILIES, full, gradient_errors, make_batch, make_model, true_loss_sum
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import liger_dist

TOLERANCE = 1e-6
"""The models' own norms and softmax round to fp32 inside, alike in both; the loss and its gradient are fp64."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination, as data."""

    strategy: str = "fsdp2"
    family: str = "llama"
    tied: bool = False
    mesh: tuple[int, ...] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    normalization: str = "local"
    """"local": mean of each rank's mean; "global": WrapConfig.token_mean; "items": num_items_in_batch"""
    empty_rank: bool = False
    """the last rank has no valid token"""
    accumulation: int = 1
    forwards_first: bool = False
    """all forwards of an accumulation before their backwards"""
    frozen: str = ""
    """"backbone", "head" or nothing"""
    shift_labels: bool = False
    by_others: bool = False
    """sharded by code that does not know this library, after wrap(strategy="auto")"""

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(Cell(), name) and name not in ("strategy", "family")
        ]
        return " ".join([self.strategy, self.family, *changed])


CELLS = [
    *(Cell(strategy=s, family=f, tied=t) for s in ("ddp", "fsdp2") for f in FAMILIES for t in (False, True)),
    *(Cell(strategy=s, normalization=n) for s in ("ddp", "fsdp2") for n in ("global", "items")),
    *(Cell(strategy=s, normalization=n, empty_rank=True) for s in ("ddp", "fsdp2") for n in ("local", "global")),
    *(Cell(strategy=s, accumulation=2, tied=t) for s in ("ddp", "fsdp2") for t in (False, True)),
    Cell(accumulation=2, forwards_first=True),
    *(Cell(strategy=s, frozen=f) for s in ("ddp", "fsdp2") for f in ("backbone", "head")),
    *(Cell(strategy=s, shift_labels=True) for s in ("ddp", "fsdp2")),
    *(Cell(config={"reshard_after_forward": False}, tied=t) for t in (False, True)),
    *(Cell(config={"activation_checkpointing": True}, strategy=s) for s in ("ddp", "fsdp2")),
    *(Cell(config={"cpu_offload": True}, tied=t) for t in (False, True)),
    *(Cell(config={"memory_budget": 3 * 101 * 8}, family=f) for f in FAMILIES),
    *(Cell(strategy="auto", by_others=True, tied=t) for t in (False, True)),
    Cell(strategy="auto", by_others=True, normalization="global"),
]
CELLS_ON_FOUR = [
    *(Cell(mesh=(2, 2), tied=t) for t in (False, True)),
    Cell(mesh=(2, 2), normalization="global", empty_rank=True),
    Cell(mesh=(2, 2), accumulation=2),
    *(Cell(strategy=s, family="gemma2", tied=True, normalization="items") for s in ("ddp", "fsdp2")),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_two_ranks(cell: Cell, workers_2: Workers) -> None:
    assert_exact(workers_2.run(run_cell, cell))


@pytest.mark.parametrize("cell", CELLS_ON_FOUR, ids=str)
def test_four_ranks(cell: Cell, workers_4: Workers) -> None:
    assert_exact(workers_4.run(run_cell, cell))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_process(family: str, tied: bool) -> None:
    assert_exact([run_cell(Cell(strategy="none", family=family, tied=tied))])


def assert_exact(results: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(results):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, f"rank {rank}: {worst} is off by {errors[worst]:.2e}"


def run_cell(cell: Cell) -> dict[str, float]:
    """Trains two steps beside the truth and returns every error found, by name. Runs on every rank."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = make_model(cell.family, tied=cell.tied)
    freeze(model, cell.frozen)
    reference = copy.deepcopy(model)
    wrapped = wrap_cell(model, cell)
    explanation = liger_dist.explain(wrapped)
    assert explanation.adapter == ("fsdp2-gathered" if "fsdp2" in (cell.strategy, *cell_engine(cell)) else "replicated")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, reference)]
    errors: dict[str, float] = {}
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [
            [
                make_batch(
                    r, seed=10 * step + micro, num_ignored=12 if cell.empty_rank and r == world_size - 1 else None
                )
                for micro in range(cell.accumulation)
            ]
            for r in range(world_size)
        ]
        losses = train_step(wrapped, cell, batches[rank], count_valid(batches) / world_size)
        truths = true_step(reference, cell, batches)[rank]
        for micro, (loss, truth) in enumerate(zip(losses, truths, strict=True)):
            errors[f"step {step} loss {micro}"] = abs(loss - truth) / max(abs(truth), 1e-12)
        for name, error in gradient_errors(wrapped, reference).items():
            errors[f"step {step} gradient of {name}"] = error
        for optimizer in optimizers:
            optimizer.step()
    return errors


def cell_engine(cell: Cell) -> tuple[str, ...]:
    return ("fsdp2",) if cell.by_others else ()


def wrap_cell(model: nn.Module, cell: Cell) -> nn.Module:
    precision = {"reduce_dtype": torch.float64} if cell.strategy == "fsdp2" else {}
    mean = {"token_mean": "global"} if cell.normalization == "global" else {}
    config = liger_dist.WrapConfig(**precision, **mean, **cell.config)
    wrapped: nn.Module = liger_dist.wrap(model, cell.strategy, mesh=cell.mesh, config=config)  # type: ignore[arg-type]
    if cell.by_others:
        from torch.distributed.fsdp import fully_shard

        for layer in wrapped.model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        if not cell.tied:
            # A unit of its own, as adapters and other frameworks make it.
            fully_shard(wrapped.lm_head)
        fully_shard(wrapped)
    return wrapped


def freeze(model: nn.Module, what: str) -> None:
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    for parameter in model.parameters():
        is_head = parameter is head
        parameter.requires_grad_(not ((what == "backbone" and not is_head) or (what == "head" and is_head)))


def count_valid(batches: list[list[dict[str, Tensor]]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for rank in batches for batch in rank)


def train_step(model: nn.Module, cell: Cell, batches: list[dict[str, Tensor]], items: float) -> list[float]:
    """Forward and backward of one rank's micro-batches; gradients are reduced with the last one."""
    losses: list[Tensor] = []

    def forward(batch: dict[str, Tensor]) -> Tensor:
        extra: dict[str, Any] = {"num_items_in_batch": torch.tensor(items)} if cell.normalization == "items" else {}
        if cell.shift_labels:
            extra["shift_labels"] = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        output = model(**batch, **extra)
        assert output.logits.shape[-1] == 0
        losses.append(output.loss.detach())
        loss: Tensor = output.loss
        return loss if cell.normalization == "items" else loss / cell.accumulation

    if cell.forwards_first:
        for loss in [forward(batch) for batch in batches]:
            loss.backward()
        return [float(loss) for loss in losses]
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        if isinstance(model, DistributedDataParallel) and not is_last:
            with model.no_sync():
                forward(batch).backward()
        else:
            forward(batch).backward()
    return [float(loss) for loss in losses]


def true_step(reference: nn.Module, cell: Cell, batches: list[list[dict[str, Tensor]]]) -> list[list[float]]:
    """Gradients of the unwrapped model as data parallelism defines them; what each rank's micro-batches should
    report."""
    world_size = len(batches)
    reports: list[list[float]] = []
    for rank_batches in batches:
        reports.append([])
        for micro, batch in enumerate(rank_batches):
            total, count = true_loss_sum(reference, batch)
            if cell.normalization == "local":
                loss, factor = total / max(count, 1), cell.accumulation
            elif cell.normalization == "items":
                loss, factor = total * world_size / count_valid(batches), 1
            else:
                loss, factor = total * world_size / count_valid([[rank[micro]] for rank in batches]), cell.accumulation
            if loss.requires_grad:
                (loss / factor / world_size).backward()
            reports[-1].append(float(loss))
    return reports


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_evaluation_generation_and_logits_after_training(strategy: str, workers_2: Workers) -> None:
    for errors in workers_2.run(use_after_training, strategy):
        assert max(errors.values()) < TOLERANCE, errors


def use_after_training(strategy: str) -> dict[str, float]:
    model = make_model("gemma2")
    reference = copy.deepcopy(model).eval()
    config = liger_dist.WrapConfig(**({"reduce_dtype": torch.float64} if strategy == "fsdp2" else {}))
    wrapped: nn.Module = liger_dist.wrap(model, strategy, config=config)  # type: ignore[arg-type]
    batch = make_batch(dist.get_rank())
    wrapped(**batch).loss.backward()
    wrapped.eval()
    with torch.no_grad():
        evaluated = wrapped(**batch)
        logits = wrapped(input_ids=batch["input_ids"]).logits
        total, count = true_loss_sum(reference, batch)
        expected = reference(input_ids=batch["input_ids"]).logits
        prompt = make_batch(0)["input_ids"][:1, :5]
        inner = wrapped.module if strategy == "ddp" else wrapped
        text, wanted = (
            m.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (inner, reference)
        )
    assert evaluated.logits.shape[-1] == 0
    assert not evaluated.loss.requires_grad
    return {
        "loss": abs(float(evaluated.loss) - float(total) / count),
        "logits": float((logits - expected).abs().max()),
        "text": float((text != wanted).sum()),
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", None), ("fsdp2", None), ("fsdp2", (2, 1))])
def test_a_meta_model_gets_the_values_of_one_process(
    strategy: str, mesh: tuple[int, ...] | None, tied: bool, workers_2: Workers
) -> None:
    expected = {name: tensor.cpu() for name, tensor in built_on_meta("none", None, tied).items()}
    for parameters in workers_2.run(built_on_meta, strategy, mesh, tied):
        assert parameters.keys() == expected.keys()
        for name, values in parameters.items():
            assert torch.isfinite(values).all(), name
            assert torch.equal(values, expected[name]), name


def built_on_meta(strategy: str, mesh: tuple[int, ...] | None, tied: bool) -> dict[str, Tensor]:
    """All parameters and buffers of a model that was built on the meta device, wrapped and run once."""
    from models import make_config
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config("gemma2", tied=tied))
    # Ranks disagree on purpose: rank 0's generator decides.
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    wrapped: nn.Module = liger_dist.wrap(model, strategy, mesh=mesh)  # type: ignore[arg-type]
    loss = wrapped(**make_batch(0)).loss
    loss.backward()
    inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    assert isinstance(inner, nn.Module)
    values = {name: full(tensor).cpu() for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]}
    return values | {"loss": loss.detach().cpu()}


def test_bf16_compute_with_fp32_masters(workers_2: Workers) -> None:
    for dtypes in workers_2.run(precision_of_a_step):
        assert dtypes == {
            "loss": "torch.float32",
            "master": "torch.float32",
            "gradient": "torch.float32",
            "close": "True",
        }


def precision_of_a_step() -> dict[str, str]:
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    wrapped = liger_dist.wrap(model, "fsdp2", config=liger_dist.WrapConfig(param_dtype=torch.bfloat16))
    batch = make_batch(dist.get_rank())
    loss = wrapped(**batch).loss
    loss.backward()
    total, count = true_loss_sum(reference, batch)
    head = wrapped.lm_head.weight
    return {
        "loss": str(loss.dtype),
        "master": str(head.dtype),
        "gradient": str(head.grad.dtype),
        "close": str(bool(abs(loss - total / count) < 0.1)),
    }
