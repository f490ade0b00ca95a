"""The errors of other projects on the page of that name: not raised after the page's line, and, in ``make test-all``,
raised before it. Their words are those of torch 2.13, DeepSpeed 0.19 and Liger 0.8, of 2026-11."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Workers
from layouts import zero_settings
from models import full, make_batch, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from training_runs import ROOT
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device

PAGE = (ROOT / "docs" / "errors_you_come_from.md").read_text()
ROWS = re.findall(r"^\| `(.+?)`.*? \| (.+?) \| (.+?) \|$", PAGE.split("## ")[0], re.MULTILINE)
MEMORY = "CUDA out of memory"
"""needs a GPU's memory, and most of it"""


def sharded_by(strategy: str, model: Any) -> Any:
    """By torch or DeepSpeed alone."""
    if strategy == "fsdp2":
        fully_shard(model)
        return model
    if strategy == "tp":
        layout = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model.lm_head, init_device_mesh(compute_device().type, (2,)), layout)
        return model
    if strategy == "zero3":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = zero_settings({"stage": 3, "stage3_param_persistence_threshold": 0})
        return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    return FullyShardedDataParallel(model, device_id=compute_device(), use_orig_params=strategy == "fsdp1")


def read_weight(strategy: str) -> None:
    """A loss outside of the forward, from hidden states and lm_head's weight."""
    model = make_model("llama", dtype=torch.float32)
    batch = make_batch(dist.get_rank())
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state.detach()  # type: ignore[operator]
    root = sharded_by(strategy, model)
    F.linear(hidden, model.lm_head.weight)  # type: ignore[arg-type]
    del root


def call_decoder(strategy: str) -> None:
    """Hidden states from the decoder, past the hooks of what is around it."""
    model: Any = make_model("llama", dtype=torch.float32)
    root = sharded_by(strategy, model)
    model.model(input_ids=make_batch(dist.get_rank())["input_ids"])
    del root


def gather_weight(strategy: str) -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    engine = sharded_by(strategy, model)
    batch = make_batch(dist.get_rank())
    hidden = engine(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[-1]
    with deepspeed.zero.GatheredParameters([model.lm_head.weight]):
        logits = F.linear(hidden, model.lm_head.weight)
    engine.backward(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


def liger_without_rows(strategy: str) -> None:
    liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    hidden = torch.randn(4, 16, device=compute_device())
    labels = torch.zeros(4, dtype=torch.long, device=compute_device())
    liger.fused_linear_cross_entropy_forward(hidden, torch.empty(0, 16, device=compute_device()), labels)


def share_weight(strategy: str) -> None:
    model: Any = make_model("llama", tied=True)
    fully_shard(model.lm_head)
    fully_shard(model)
    model(**make_batch(dist.get_rank()))


def freeze(strategy: str) -> None:
    model: Any = make_model("llama")
    model.model.requires_grad_(False)
    sharded_by(strategy, model)


def loss_of(strategy: str) -> None:
    sharded_by(strategy, make_model("llama"))(**make_batch(0))


def clip(strategy: str) -> None:
    model = sharded_by(strategy, make_model("llama"))
    model(input_ids=make_batch(0)["input_ids"]).logits.full_tensor().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


RAISED: dict[str, list[tuple[Callable[[str], None], str]]] = {
    "aten.mm.default got mixed torch.Tensor and DTensor": [(read_weight, "fsdp2")],
    "aten.embedding.default got mixed torch.Tensor and DTensor": [(call_decoder, "fsdp2")],
    "size mismatch, got input": [(read_weight, "fsdp1"), (read_weight, "zero3")],
    "Output 0 of View is a view and its base": [(read_weight, "flat fsdp1")],
    "'weight' must be 2-D": [(call_decoder, "fsdp1")],
    "The size of tensor a (0) must match the size of tensor b": [(gather_weight, "zero3")],
    "integer division or modulo by zero": [(liger_without_rows, "zero3")],
    "is shared with a parameter already managed by another FSDP group": [(share_weight, "fsdp2")],
    "Must flatten tensors with uniform": [(freeze, "flat fsdp1")],
    "aten.nll_loss_forward.default got mixed torch.Tensor and DTensor": [(loss_of, "tp")],
    "aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor": [(clip, "tp")],
}


def test_every_row_is_raised_here() -> None:
    named = [error for error, _, _ in ROWS]
    assert len(named) == 13
    assert set(named) == {*RAISED, MEMORY}


@pytest.mark.nightly
@pytest.mark.parametrize("error", RAISED)
def test_the_error(error: str, workers_2: Workers) -> None:
    if error == "integer division or modulo by zero":
        pytest.importorskip("liger_kernel")
    for provoke, strategy in RAISED[error]:
        for message in workers_2.run(message_of, provoke, strategy):
            assert error in message


def message_of(provoke: Callable[[str], None], strategy: str) -> str:
    try:
        provoke(strategy)
    except Exception as error:
        return str(error)
    return "no error"


WRAPPED_BY = {"fsdp2": "fsdp2", "fsdp1": "fsdp1", "flat fsdp1": "fsdp1", "zero3": "deepspeed", "tp": "tp"}
LINES = [(error, line, strategy) for error, _, line in ROWS if error != MEMORY for _, strategy in RAISED[error]]


@pytest.mark.smoke
@pytest.mark.parametrize(("error", "line", "strategy"), LINES, ids=[f"{error}, {way}" for error, _, way in LINES])
def test_the_line_ends_it(error: str, line: str, strategy: str, workers_2: Workers) -> None:
    """The model trains one step with that line as it does unsharded."""
    name = WRAPPED_BY[strategy]
    code = re.findall(r"`([^`]+)`", line)
    wrapping = f'model = liger_dist.wrap(model, "{name}")'
    if code[0].startswith("model ="):
        assert f'"{name}"' in line
        code = [wrapping]
    else:
        code = [wrapping, code[0]]
    tied, frozen = "is shared with" in error, "uniform" in error
    for worst in workers_2.run(error_of_a_step, code, strategy, tied, frozen):
        assert worst < 1e-5


def error_of_a_step(code: list[str], strategy: str, tied: bool, frozen: bool) -> float:
    """The largest error of a weight after a step of SGD on a batch that both ranks have."""
    model = make_model("llama", dtype=torch.float32, tied=tied)
    if frozen:
        model.model.requires_grad_(False)  # type: ignore[union-attr]
    reference = copy.deepcopy(model)
    batch = make_batch(0)
    names: dict[str, Any] = {"model": model, "liger_dist": liger_dist}
    names |= {"ids": batch["input_ids"], "labels": batch["labels"]}
    exec(code[0], names)
    root: Any = names["model"]
    if strategy == "zero3":
        root = names["model"] = sharded_by(strategy, root)
    if code[-1].startswith("output ="):
        exec(code[-1], names)
        loss = -names["output"].log_prob.sum() / (batch["labels"][:, 1:] != -100).sum()
    else:
        loss = root(**batch).loss
    expected = reference(**batch).loss
    expected.backward()
    if strategy == "zero3":
        root.backward(loss)
        root.step()
    else:
        loss.backward()
        if code[-1].startswith("liger_dist.clip"):
            exec(code[-1], names)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.optim.SGD([p for p in root.parameters() if p.requires_grad], lr=0.1, foreach=False).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    weights = dict(reference.named_parameters())
    return max(relative_error(found, weights[name]) for name, found in whole_weights(strategy, root, model).items())


def whole_weights(strategy: str, root: Any, model: nn.Module) -> dict[str, Tensor]:
    """By name in ``model``, which ``root`` holds."""
    if "fsdp1" in strategy:
        with FullyShardedDataParallel.summon_full_params(root, writeback=False):
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            return {name.replace("_fsdp_wrapped_module.", ""): weight for name, weight in weights.items()}
    if strategy == "zero3":
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: full(p) for name, p in model.named_parameters()}
