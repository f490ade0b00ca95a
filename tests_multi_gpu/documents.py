"""Packed documents in one row, and the truth about them: every document in a separate call of the unwrapped model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import on_device
import pytest
import torch
from models import VOCAB_SIZE, assert_below, norm_errors
from torch import Tensor, nn

import liger_dist

TOLERANCE = 5e-6
"""recurrent layers compute in fp32 in fp64 models, too"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignores warnings in the tests of a file that imports this fixture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def packed(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    ids = on_device.randint(1, VOCAB_SIZE, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([on_device.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def trained(model: Any, *batches: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of calls, and gradients of their sum in one backward."""
    model.train().zero_grad()
    losses = [model(**batch).loss for batch in batches]
    torch.stack(losses).sum().backward()
    return [float(loss.detach()) for loss in losses], gradients_of(model)


def alone(model: Any, *batches: dict[str, Tensor], **further: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The same from every document in a separate call, with ``further`` keywords."""
    model.train().zero_grad()
    losses = []
    for batch in batches:
        starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["position_ids"].shape[1]]
        lengths = [end - start for start, end in pairwise(starts)]
        count, total = int((batch["labels"] != -100).sum()), 0.0
        for ids, labels in zip(batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1), strict=True):
            valid = int((labels != -100).sum())
            if valid:
                loss = model(input_ids=ids, labels=labels, use_cache=False, **further).loss * valid / count
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
    return losses, gradients_of(model)


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(
    got: tuple[list[float], dict[str, Tensor]],
    want: tuple[list[float], dict[str, Tensor]],
    tolerance: float = TOLERANCE,
) -> None:
    assert got[0] == pytest.approx(want[0], abs=tolerance)
    assert_below(norm_errors(got[1], want[1]), tolerance)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(**options))
