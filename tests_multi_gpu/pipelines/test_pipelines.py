"""Pipelines of ``torch.distributed.pipelining``: the loss and every gradient are those of the uncut model."""

from __future__ import annotations

import pytest
from harness import Workers
from models import assert_below
from pipelined import SCHEDULES, errors_of_step, make_uncut, run_or_refused

FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe")
DATA = [
    (family, rows)
    for family in FAMILIES
    for rows in ("texts", "padded", "packed")
    # In fp64 the uncut model's eager attention is NaN for padding on the left.
    if (family, rows) != ("gemma2", "padded")
]


def assert_exact(ranks: list[dict[str, float]], family: str) -> None:
    """Every rank's errors are rounding of fp64 (gemma2 and the routers' softmax are in fp32), and some rank has each
    parameter and the loss. There are no ranks if this torch cannot run the schedule."""
    for errors in ranks:
        assert_below(errors, 1e-9 if family in ("llama", "qwen3") else 2e-5)
    names = {name for name, _ in make_uncut(family).named_parameters()}
    assert not ranks or set().union(*ranks) == names | {"loss"}


@pytest.mark.smoke
@pytest.mark.cover("pairs")
@pytest.mark.parametrize(("family", "rows"), DATA)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_is_the_uncut_model(schedule: str, family: str, rows: str, workers_2: Workers) -> None:
    """Micro-batches have different numbers of labels, some of them none."""
    assert_exact(run_or_refused(workers_2, errors_of_step_of, family, schedule, "none", rows, "local"), family)


@pytest.mark.smoke
@pytest.mark.cover("pairs")
@pytest.mark.parametrize("token_mean", ["local", "global"])
@pytest.mark.parametrize(("family", "rows"), DATA)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_with_fsdp2_is_the_uncut_model(
    schedule: str, family: str, rows: str, token_mean: str, workers_4: Workers
) -> None:
    """Two stages or more over two ranks, each sharded over two."""
    assert_exact(run_or_refused(workers_4, errors_of_step_of, family, schedule, "fsdp2", rows, token_mean), family)


@pytest.mark.cover("values")
@pytest.mark.parametrize("data", ["hsdp", "tp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_with_replicas_or_rows_of_lm_head(schedule: str, data: str, workers_4: Workers) -> None:
    assert_exact(run_or_refused(workers_4, errors_of_step_of, "llama", schedule, data, "texts", "local"), "llama")


def errors_of_step_of(family: str, schedule: str, data: str, rows: str, token_mean: str) -> dict[str, float]:
    return errors_of_step(family, schedule, data, rows=rows, token_mean=token_mean)
