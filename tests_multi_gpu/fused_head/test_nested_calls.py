"""Calls of wrapped models inside other calls, against the same calls one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Workers
from models import full, make_batch, make_model
from torch import Tensor, nn
from truth import relative_error

import liger_dist
from liger_dist.sharding.base import Strategy

Strategy = str | Strategy
FSDP2 = liger_dist.FSDP2(reduce_dtype=torch.float64)
PAIRS: dict[str, tuple[Strategy, Strategy]] = {
    "one process": ("none", "none"),
    "both FSDP2": (FSDP2, FSDP2),
    "vocab-parallel student": (liger_dist.FSDP2(reduce_dtype=torch.float64, lm_head="vocab_parallel"), FSDP2),
    "DDP student": ("ddp", FSDP2),
    "FSDP1 teacher": (FSDP2, liger_dist.FSDP1(reduce_dtype=torch.float64)),
}
"""student, teacher"""


@pytest.mark.cover("values")
@pytest.mark.parametrize("place", ["model.layers.0", "lm_head"])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != "one process"])
def test_a_student_inside_its_teacher(pair: str, place: str, workers_2: Workers) -> None:
    for errors in workers_2.run(errors_of_a_pair, pair, place):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("place", ["model.layers.0", "model.norm", "lm_head"])
def test_a_student_inside_its_teacher_on_one_process(place: str) -> None:
    errors = errors_of_a_pair("one process", place)
    assert max(errors.values()) < 1e-6, errors


def errors_of_a_pair(pair: str, place: str) -> dict[str, float]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    batch = make_batch(rank)
    apart = _student_and_teacher(pair)
    losses = [float(model(**batch).loss) for model in apart]
    student = apart[0]
    student(**batch).loss.backward()
    expected = _gradients(student)

    student, teacher = _student_and_teacher(pair)
    nested: list[Tensor] = []

    def run_the_student(*_: Any) -> None:
        with torch.enable_grad():
            nested.append(student(**batch, outputs=("token_accuracy",)).loss)

    module = next(m for name, m in teacher.named_modules() if name.replace("_fsdp_wrapped_module.", "").endswith(place))
    module.register_forward_pre_hook(run_the_student)
    with torch.no_grad():
        outer = teacher(**batch).loss
    (inner,) = nested
    inner.backward()
    gradients = _gradients(student)
    assert gradients.keys() == expected.keys()
    errors = {name: relative_error(gradients[name], expected[name]) for name in expected}
    return errors | {
        "student's loss": abs(float(inner) - losses[0]),
        "teacher's loss": abs(float(outer) - losses[1]),
    }


def _student_and_teacher(pair: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    student = make_model("llama")
    teacher = make_model("llama", tied=True)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    return tuple(
        liger_dist.wrap(model, strategy) for model, strategy in zip((student, teacher), PAIRS[pair], strict=True)
    )  # type: ignore[return-value]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_a_model_inside_itself() -> None:
    """A call of the same model inside its own forward is a call with its own labels."""
    model: Any = liger_dist.wrap(make_model("llama"), "none")
    first, second = make_batch(0), make_batch(1)
    expected = [float(model(**batch).loss) for batch in (first, second)]
    inner: list[float] = []

    def nest(*_: Any) -> None:
        handle.remove()
        inner.append(float(model(**second).loss))

    handle = model.model.norm.register_forward_pre_hook(nest)
    outer = float(model(**first).loss)
    assert [outer, *inner] == expected


@pytest.mark.smoke
@pytest.mark.parametrize("place", ["model.norm", "lm_head"])
def test_a_nested_call_that_fails(place: str) -> None:
    """The outer call goes on with its own loss when it catches the error of an inner one."""
    model: Any = liger_dist.wrap(make_model("llama"), "none")
    other: Any = liger_dist.wrap(make_model("llama", tied=True), "none")
    batch = make_batch(0)
    expected = float(model(**batch).loss)
    calls: list[Callable[[], Any]] = [
        lambda: other(**batch | {"labels": batch["labels"].float()}),
        lambda: other(input_ids=batch["input_ids"], labels=batch["labels"], label_smoothing=2.0),
    ]
    for call in calls:

        def nest(*_: Any, call: Callable[[], Any] = call) -> None:
            with pytest.raises(liger_dist.LigerDistError):
                call()

        handle = model.get_submodule(place).register_forward_pre_hook(nest)
        assert float(model(**batch).loss) == expected
        handle.remove()
    assert float(model(**batch).loss) == expected


def test_logits_of_one_model_inside_the_loss_of_another() -> None:
    model: Any = liger_dist.wrap(make_model("llama"), "none")
    other: Any = liger_dist.wrap(make_model("llama", tied=True), "none")
    batch = make_batch(0)
    expected = float(model(**batch).loss), other(input_ids=batch["input_ids"]).logits
    seen: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append(other(input_ids=batch["input_ids"]).logits))
    assert float(model(**batch).loss) == expected[0]
    assert torch.equal(seen[0], expected[1])
