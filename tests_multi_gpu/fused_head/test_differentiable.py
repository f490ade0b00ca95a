"""Log-probabilities and entropies that carry gradients, from a model's own call, in every layout."""

from __future__ import annotations

import gc
from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from cells import Cell
from harness import Workers
from layouts import SESSIONS
from models import make_batch, make_model
from torch import Tensor, nn
from truth import relative_error

import liger_dist
from liger_dist.fused_head.loss_call import LossCall

CELLS = {
    "DDP": Cell(engine="ddp"),
    "FSDP1": Cell(engine="fsdp1", layout={"by_others": False}),
    "FSDP1, head in its own unit": Cell(engine="fsdp1", layout={"own_unit": True}),
    "FSDP1, flat": Cell(engine="fsdp1", layout={"use_orig_params": False}),
    "FSDP2": Cell(engine="fsdp2"),
    "FSDP2, head alone": Cell(engine="fsdp2", layout={"head": "own"}),
    "FSDP2, vocab-parallel": Cell(engine="fsdp2", layout={"rows": True}),
    "FSDP2, tied, vocab-parallel": Cell(engine="fsdp2", layout={"rows": True}, model="tied"),
    "TP": Cell(engine="tp"),
    "ZeRO-2": Cell(engine="zero", layout={"stage": 2}),
    "ZeRO-3": Cell(engine="zero", layout={"stage": 3}),
    "checkpointing": Cell(engine="fsdp2", use="checkpointing"),
}
NAMES = ("log_prob", "entropy")


@pytest.mark.cover("values")
@pytest.mark.parametrize("uses_loss", [True, False], ids=["beside the loss", "alone"])
@pytest.mark.parametrize("name", CELLS)
def test_every_gradient(name: str, uses_loss: bool, workers_2: Workers) -> None:
    tolerance = CELLS[name].tolerance
    for errors in workers_2.run(errors_of_outputs, name, uses_loss):
        assert len(errors) > 10
        assert max(errors.values()) < tolerance, errors


def test_one_process() -> None:
    model = liger_dist.wrap(make_model("gemma2"))
    batch = make_batch(0)
    objective(model(**batch, outputs=NAMES, differentiable=True), 0, uses_loss=True).backward()
    truth = make_model("gemma2")
    objective(true_outputs(truth, batch), 0, uses_loss=True).backward()
    for mine, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-6
    reports = model(**batch, outputs=NAMES)
    assert not reports.log_prob.requires_grad
    assert reports.loss.requires_grad


def test_a_call_leaves_nothing_behind() -> None:
    model = liger_dist.wrap(make_model("llama"))
    gc.collect()
    # Of tests before, a failed one's traceback may hold some.
    before = {id(thing) for thing in gc.get_objects() if type(thing) is LossCall}
    for _ in range(3):
        model(**make_batch(0), outputs=NAMES, differentiable=True)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is LossCall and id(thing) not in before]


@pytest.mark.smoke
def test_what_carries_no_gradient_is_refused() -> None:
    model = liger_dist.wrap(make_model("llama"))
    with pytest.raises(liger_dist.LigerDistError, match=r"differentiable is True and outputs is \('is_top1',\)"):
        model(**make_batch(0), outputs=("is_top1",), differentiable=True)


def errors_of_outputs(name: str, uses_loss: bool) -> dict[str, float]:
    cell = CELLS[name]
    dtype = torch.float32 if cell.engine == "zero" else torch.float64
    session = SESSIONS[cell.engine](cell, make_model("llama", tied=cell.tied, dtype=dtype))
    batch = make_batch(session.data_rank)
    output = session.forward(batch, outputs=NAMES, differentiable=True)
    session.backward(objective(output, session.data_rank, uses_loss=uses_loss))
    gradients = session.step()
    session.close()
    truth = make_model("llama", tied=cell.tied)
    for rank in range(session.data_world):
        (objective(true_outputs(truth, make_batch(rank)), rank, uses_loss=uses_loss) / session.data_world).backward()
    true_gradients = {name: p.grad for name, p in truth.named_parameters()}
    assert gradients.keys() == true_gradients.keys()
    return {name: relative_error(gradients[name], gradient) for name, gradient in true_gradients.items()}


def objective(output: Any, rank: int, *, uses_loss: bool) -> Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    u, v = on_device.randn(2, *output.log_prob.shape, generator=generator, dtype=torch.float64)
    total: Tensor = (u * output.log_prob).sum() + (v * output.entropy).sum()
    return total + 3.0 * output.loss if uses_loss else total


def true_outputs(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    log_probs = model(input_ids=batch["input_ids"], use_cache=False).logits.log_softmax(-1)
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    valid = labels >= 0
    log_prob = log_probs.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * valid
    entropy = -(log_probs.exp() * log_probs).sum(-1) * valid
    return liger_dist.LossOutput(loss=-log_prob.sum() / valid.sum(), log_prob=log_prob, entropy=entropy)
