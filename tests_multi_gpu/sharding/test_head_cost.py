"""Costs of a gathered and of a vocab-parallel lm_head, as functions of shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from liger_dist_train.head_cost import HeadCost, HeadShapes, head_costs

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


@pytest.mark.smoke
def test_the_costs_cross_where_tokens_outnumber_the_vocabulary() -> None:
    """G * N = 1.5 V with a reduction in fp32."""
    at = 128256 * 3 // 2 // 8
    few, many = replace(LLAMA_8B, tokens=at * 9 // 10), replace(LLAMA_8B, tokens=at * 11 // 10)
    assert vocab_parallel(few).sent_bytes < gathered(few).sent_bytes
    assert vocab_parallel(many).sent_bytes > gathered(many).sent_bytes


def test_a_tied_embedding_exchanges_tokens_as_well() -> None:
    both = vocab_parallel(replace(LLAMA_8B, tied=True)).sent_bytes - vocab_parallel(LLAMA_8B).sent_bytes
    assert both == 2 * 8192 * 4096 * 2 * 7
