"""The costs that speak for a gathered head or for rows that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from liger_dist.sharding.head_cost import HeadShapes, gathered, vocab_parallel

LLAMA_8B = HeadShapes(
    tokens=8192,
    hidden_size=4096,
    vocab_size=128256,
    processes=8,
    tied=False,
    trains=True,
    itemsize=2,
    memory_budget=None,
)


def test_of_a_large_head() -> None:
    weight = 128256 * 4096
    assert gathered(LLAMA_8B).sent_bytes == weight * (2 + 4) * 7 // 8
    hidden = 8192 * 4096 * 2
    assert vocab_parallel(LLAMA_8B).sent_bytes == pytest.approx(2 * hidden * 7, rel=0.03)
    assert gathered(LLAMA_8B).held_bytes == weight * (2 + 2 + 4)
    assert vocab_parallel(LLAMA_8B).held_bytes < gathered(LLAMA_8B).held_bytes / 2


def test_they_cross_where_the_tokens_outnumber_the_vocabulary() -> None:
    """G * N = 1.5 V with a reduction in fp32."""
    at = 128256 * 3 // 2 // 8
    few, many = replace(LLAMA_8B, tokens=at * 9 // 10), replace(LLAMA_8B, tokens=at * 11 // 10)
    assert vocab_parallel(few).sent_bytes < gathered(few).sent_bytes
    assert vocab_parallel(many).sent_bytes > gathered(many).sent_bytes


def test_a_tied_embedding_travels_as_well() -> None:
    both = vocab_parallel(replace(LLAMA_8B, tied=True)).sent_bytes - vocab_parallel(LLAMA_8B).sent_bytes
    assert both == 2 * 8192 * 4096 * 2 * 7
