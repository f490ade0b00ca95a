"""Costs of a gathered and of a vocab-parallel lm_head, as functions of shapes and in ``explain``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE, make_model

import liger_dist
from liger_dist import HeadCost, HeadShapes, head_costs

LLAMA_8B = HeadShapes(
    tokens=8192,
    hidden_size=4096,
    vocab_size=128256,
    ranks=8,
    tied=False,
    trains=True,
    itemsize=2,
    memory_budget=None,
)


def gathered(shapes: HeadShapes) -> HeadCost:
    return head_costs(shapes)["gather"]


def vocab_parallel(shapes: HeadShapes) -> HeadCost:
    return head_costs(shapes)["vocab_parallel"]


def test_of_a_large_head() -> None:
    weight = 128256 * 4096
    assert gathered(LLAMA_8B).sent_bytes == weight * (2 + 4) * 7 // 8
    hidden = 8192 * 4096 * 2
    assert vocab_parallel(LLAMA_8B).sent_bytes == pytest.approx(2 * hidden * 7, rel=0.03)
    assert gathered(LLAMA_8B).held_bytes == weight * (2 + 2 + 4)
    assert vocab_parallel(LLAMA_8B).held_bytes < gathered(LLAMA_8B).held_bytes / 2


def test_the_costs_cross_where_tokens_outnumber_the_vocabulary() -> None:
    """G * N = 1.5 V with a reduction in fp32."""
    at = 128256 * 3 // 2 // 8
    few, many = replace(LLAMA_8B, tokens=at * 9 // 10), replace(LLAMA_8B, tokens=at * 11 // 10)
    assert vocab_parallel(few).sent_bytes < gathered(few).sent_bytes
    assert vocab_parallel(many).sent_bytes > gathered(many).sent_bytes


def test_a_tied_embedding_exchanges_tokens_as_well() -> None:
    both = vocab_parallel(replace(LLAMA_8B, tied=True)).sent_bytes - vocab_parallel(LLAMA_8B).sent_bytes
    assert both == 2 * 8192 * 4096 * 2 * 7


def test_explain_shows_both_costs_for_given_tokens(workers_2: Workers) -> None:
    for costs, tables in workers_2.run(explained_costs):
        few, many, frozen = (dict(cost) for cost in costs)
        expected = HeadShapes(
            tokens=8,
            hidden_size=HIDDEN_SIZE,
            vocab_size=VOCAB_SIZE,
            ranks=2,
            tied=False,
            trains=True,
            itemsize=8,
            memory_budget=None,
        )
        for cost, shapes in (
            (few, expected),
            (many, replace(expected, tokens=10**6)),
            (frozen, replace(expected, tokens=10**6, trains=False)),
        ):
            assert cost == {name: str(value) for name, value in head_costs(shapes).items()}
        assert many["vocab_parallel"] != few["vocab_parallel"]
        for name in ("gather", "vocab_parallel"):
            assert f"lm_head={name!r}" in tables[0]
        assert not tables[1]


def explained_costs() -> tuple[list[Any], tuple[str, tuple[Any, ...]]]:
    """Costs of both layouts for few and many tokens and for a frozen lm_head; the table; the costs of DDP."""
    model = liger_dist.wrap(make_model("llama"), liger_dist.FSDP2(lm_head="vocab_parallel"))
    frozen: Any = make_model("llama")
    frozen.lm_head.requires_grad_(False)
    frozen = liger_dist.wrap(frozen, "fsdp2")
    found = [liger_dist.explain(model, tokens=tokens).costs for tokens in (8, 10**6)]
    found.append(liger_dist.explain(frozen, tokens=10**6).costs)
    ddp = liger_dist.wrap(make_model("llama"), "ddp")
    return found, (str(liger_dist.explain(model)), liger_dist.explain(ddp).costs)
