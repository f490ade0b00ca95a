"""Logits of which only what a trainer reads was computed, against full logits and by TRL's functions."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import make_batch, make_model
from torch import Tensor

import liger_dist
from liger_dist.hosts.scored_logits import ScoredLogits

pytest.importorskip("trl")


@pytest.mark.smoke
def test_logits_of_which_only_what_is_read_was_computed() -> None:
    """What trainers read of them is what they read of logits, by TRL's own functions too; anything else is refused."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    truth = torch.randn(4, 3, 7, dtype=torch.float64, device="cpu")
    ids = torch.tensor([[3, 1, 2], [2, 2, 1], [1, 4, 6], [5, 0, 0]], device="cpu")
    ids[1] = truth[1].argmax(-1)
    logits = scored_as(truth, ids)
    assert (logits.shape, logits.ndim, logits.dtype, len(logits)) == (truth.shape, 3, torch.float64, 4)
    mask = ids % 2 == 0
    reads: list[Callable[[Any], Tensor]] = [
        lambda given: selective_log_softmax(given[..., :-1, :], ids[:, :-1]),
        lambda given: torch.take_along_dim(given.log_softmax(dim=-1), ids[..., None], dim=2),
        lambda given: F.cross_entropy(given.view(-1, 7), ids.masked_fill(mask, -100).view(-1)),
        lambda given: F.cross_entropy(given[mask], ids[mask]),
        lambda given: entropy_from_logits(given.detach(), chunk_size=5),
        lambda given: given[:1].mean(),
        lambda given: given.index_select(0, torch.tensor([2, 0], device="cpu")).chunk(2, dim=0)[1].mean(-1),
        lambda given: given.to(torch.float32).split(3, dim=0)[1].nansum(),
        lambda given: given[mask].mean(-1).sum(),
        lambda given: torch.logsumexp(2.0 * given, dim=-1) - 2.0 * torch.logsumexp(given, dim=-1),
        lambda given: torch.logsumexp(given * 2, dim=-1, keepdim=True),
        lambda given: given.argmax(dim=-1) == ids,
        lambda given: torch.gather(given, 2, ids[..., None]),
        lambda given: torch.logsumexp(given, -1),
        lambda given: given.log_softmax(-1).mean(-1),
        lambda given: torch.gather(given.log_softmax(-1), -1, torch.zeros_like(ids)[..., None]),
    ]
    for position, read in enumerate(reads):
        assert torch.allclose(read(logits), read(truth), atol=1e-6), position
    others: list[Callable[[], Any]] = [
        lambda: torch.gather(logits, -1, (ids % 6 + 1)[..., None]),
        lambda: F.cross_entropy(logits.view(-1, 7), (ids % 6 + 1).view(-1)),
        lambda: F.cross_entropy(logits.view(-1, 7), ids.view(-1), label_smoothing=0.1),
        lambda: logits[..., 0],
        lambda: logits.view(-1),
        lambda: logits.max(-1),
        lambda: torch.softmax(logits, -1),
        lambda: 3.0 * logits,
        lambda: logits * logits,
        lambda: torch.exp(logits).mean(),
        lambda: (2 * logits).log_softmax(-1),
        lambda: torch.exp(logits.log_softmax(-1)).sum(-1),
        lambda: (torch.exp(logits.log_softmax(-1)) * logits).sum(-1),
        lambda: (2 * logits).gather(-1, ids[..., None]),
        lambda: ScoredLogits(ids, {"log_prob": torch.zeros(4, 3, device="cpu")}, 7).argmax(-1),
        lambda: logits.mean(1),
        lambda: logits.logsumexp(1),
        lambda: logits.log_softmax(1),
        lambda: logits.index_select(-1, ids[0]),
        lambda: logits.chunk(2, dim=-1),
        lambda: torch.gather(logits, -1, ids[..., None].expand(-1, -1, 2)),
        lambda: F.cross_entropy(logits.view(-1, 7), ids.view(-1), reduce=False),
        lambda: logits == logits,
        lambda: torch.take_along_dim(logits, ids[..., None]),
    ]
    for read_other in others:
        with pytest.raises(liger_dist.LigerDistError):
            read_other()


OPERATORS = """
    add sub matmul truediv floordiv mod pow lshift rshift and_ xor or_ lt le gt ge eq ne
    iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior
"""
NOT_OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert", "index", "truth")},
    **{kind.__name__: kind for kind in (int, float, complex, round, math.trunc, math.floor, math.ceil)},
    "in": lambda logits: 3 in logits,
    "setitem": lambda logits: operator.setitem(logits, 0, 1.0),
    "delitem": lambda logits: operator.delitem(logits, 0),
    "array": np.asarray,
    "tensor": torch.as_tensor,
    "one class": lambda logits: logits[0, 0, 0],
    "some classes": lambda logits: logits[..., :2],
    "classes of one token": lambda logits: list(logits[0, 0]),
    "attribute": lambda logits: logits.T,
}


def test_operators_on_scored_logits_say_that_logits_were_not_computed() -> None:
    """Every operator, with numbers, tensors, arrays and other logits on either side."""
    truth, ids = torch.randn(2, 3, 7, device="cpu"), torch.ones(2, 3, dtype=torch.long, device="cpu")
    binary: dict[str, Callable[[Any, Any], Any]] = {name: getattr(operator, name) for name in OPERATORS.split()}
    binary |= {"mul": operator.mul, "divmod": divmod}
    others: list[Any] = [3, 0.5, None, torch.ones(7, device="cpu"), np.ones(7), scored_as(truth, ids)]
    for name, operation in binary.items():
        for other in others:
            assert is_refused(operation, scored_as(truth, ids), other), f"{name} {other!r}"
            if not name.startswith("i"):
                assert is_refused(operation, other, scored_as(truth, ids)), f"{other!r} {name}"
    for name, read in NOT_OF_TENSORS.items():
        assert is_refused(read, scored_as(truth, ids)), name
    assert copy.copy(scored_as(truth, ids)).shape == truth.shape


def is_refused(read: Callable[..., Any], *operands: Any) -> bool:
    try:
        read(*operands)
    except liger_dist.LigerDistError as refusal:
        return "never computed" in str(refusal)
    return False


@pytest.mark.smoke
def test_gradients_of_reads() -> None:
    """Those of normalised log-probabilities are right; those of raw logits and of their means are refused."""
    from trl.trainer.utils import selective_log_softmax

    truth = torch.randn(4, 3, 7, dtype=torch.float64, requires_grad=True, device="cpu")
    ids = torch.tensor([[3, 1, 2], [2, 2, 1], [1, 4, 6], [5, 0, 0]], device="cpu")
    weights = torch.randn(4, 3, dtype=torch.float64, device="cpu")
    found = []
    for given in (scored_as(truth, ids), truth):
        read = selective_log_softmax(given, ids) + given.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        found.append(torch.autograd.grad((weights * read).sum(), truth)[0])
    assert torch.allclose(*found)
    losses: list[Callable[[Any], Tensor]] = [
        lambda given: given.mean(),
        lambda given: given.log_softmax(-1).mean(-1).sum(),
        lambda given: torch.gather(given, -1, ids[..., None]).sum(),
        lambda given: torch.logsumexp(given, -1).sum(),
    ]
    for loss in losses:
        with pytest.raises(liger_dist.LigerDistError, match="whose gradients a fused call does not compute"):
            loss(scored_as(truth, ids)).backward()


@pytest.mark.parametrize("module", ["trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"])
@pytest.mark.parametrize(
    ("name", "reads"),
    [("_compute_loss", "entropy"), ("compute_ref_log_probs", ""), ("_compute_ref_log_probs", ""), ("another", None)],
)
def test_scored_logits_for_trainers_of_trl_before_1_16(
    module: str, name: str, reads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Axolotl requires these releases, whose trainers call a model without labels."""
    found: dict[str, Any] = {"__name__": module}
    exec(f"def {name}(model, ids): return model(input_ids=ids).logits", found)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    model, ids = make_model("llama"), make_batch(0)["input_ids"]
    truth = model(input_ids=ids).logits.double()
    logits = found[name](liger_dist.wrap(model), ids)
    assert isinstance(logits, Tensor) == (reads is None)
    scores = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    expected = truth[:, :-1].log_softmax(-1)
    assert torch.allclose(scores.double(), expected.gather(-1, ids[:, 1:, None]), atol=1e-5)
    if reads == "entropy":
        log_probs = logits[:, :-1].detach().log_softmax(-1)
        entropy = -(torch.exp(log_probs) * log_probs).sum(-1)
        assert torch.allclose(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5)


def scored_as(logits: Tensor, ids: Tensor) -> Any:
    """What stands for ``logits``, whose next tokens are ``ids``."""
    log_probs = logits.log_softmax(-1)
    outputs = {
        "log_prob": log_probs.gather(-1, ids[..., None])[..., 0],
        "log_sum_exp": logits.detach().logsumexp(-1),
        "log_prob_at": log_probs[..., :1],
        "mean_logit": logits.detach().mean(-1),
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "is_top1": logits.argmax(-1) == ids,
        "sum_sq_prob": log_probs.exp().square().sum(-1),
    }
    return ScoredLogits.of(ids, outputs, logits.shape[-1])
