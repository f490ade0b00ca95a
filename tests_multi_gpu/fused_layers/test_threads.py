"""Another thread computes the same while models are wrapped, verified and unwrapped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import make_batch, make_model
from torch import Tensor, nn

import liger_dist
from liger_dist.mtp import MultiTokenPrediction
from liger_dist.sharding.process_groups import compute_device


def wrapped_and_unwrapped() -> None:
    liger_dist.unwrap(liger_dist.wrap(make_model("llama", dtype=torch.float32), "none"))


def hybrid() -> None:
    liger_dist.wrap(make_model("qwen3_5_text", dtype=torch.float32), "none")


def mixture() -> None:
    liger_dist.wrap(make_model("qwen3_moe", dtype=torch.float32), "none")


def predicting() -> None:
    model = make_model("llama", dtype=torch.float32)
    MultiTokenPrediction(model, 1)
    liger_dist.wrap(model, "none")


def verified() -> None:
    liger_dist.verify(liger_dist.wrap(make_model("llama", dtype=torch.float32), "none"), make_batch(0))


def packable() -> None:
    from liger_dist.fused_layers.packed_calls import packing_objection

    packing_objection(make_model("falcon_h1", dtype=torch.float32))


ACTIONS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (wrapped_and_unwrapped, hybrid, mixture, predicting, verified, packable)
}


class Works:
    """Computes in a thread until it is stopped; counts what differs from the first result."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute, self._truth = compute, compute().clone()
        self.number = self.wrong = 0
        self.errors: list[BaseException] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                found = self._compute()
            except BaseException as error:
                self.errors.append(error)
                return
            self.number += 1
            self.wrong += not (found.dtype == self._truth.dtype and torch.equal(found, self._truth))

    def __enter__(self) -> Works:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def product() -> Callable[[], Tensor]:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 32).to(compute_device()), torch.randn(4, 32, device=compute_device())
    return lambda: layer(x).detach()


def step(family: str) -> Callable[[], Tensor]:
    model: Any = make_model(family, dtype=torch.float32)

    def compute() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(**make_batch(0)).loss
        loss.backward()
        return loss.detach()

    return compute


def default_dtype() -> Callable[[], Tensor]:
    return lambda: torch.ones(3, device="cpu") / 3


WORK: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "a product": product,
    "a step": lambda: step("llama"),
    "a step of a hybrid": lambda: step("qwen3_5_text"),
    "the default dtype": default_dtype,
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("action", ACTIONS)
def test_another_thread_computes_the_same(action: str, work: str) -> None:
    ACTIONS[action]()  # What is made once is made.
    with Works(WORK[work]()) as other:
        for _ in range(3):
            ACTIONS[action]()
    assert not other.errors
    assert other.number > 0
    assert other.wrong == 0


def test_wraps_of_two_threads_are_those_of_one() -> None:
    expected = str(liger_dist.explain(liger_dist.wrap(make_model("qwen3_5_text", dtype=torch.float32), "none")))
    found: list[str] = []

    def wrap() -> None:
        found.append(str(liger_dist.explain(liger_dist.wrap(make_model("qwen3_5_text", dtype=torch.float32), "none"))))

    threads = [threading.Thread(target=wrap) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


def test_a_default_dtype_that_another_thread_sets_changes_no_probe() -> None:
    """As ``from_pretrained`` does for a moment."""
    expected = str(liger_dist.explain(liger_dist.wrap(make_model("llama", dtype=torch.float32), "none")))
    model = make_model("llama", dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert str(liger_dist.explain(liger_dist.wrap(model, "none"))) == expected
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
