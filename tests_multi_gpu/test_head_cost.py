"""The costs that speak for a gathered head or for rows that stay, and which of them wrap chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from harness import Workers
from models import make_model

import liger_dist
from liger_dist.sharding.head_cost import HeadShapes, gathered, vocab_parallel
from liger_dist.sharding.split_head import rows_of

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


def test_auto_compares_what_is_sent_and_held(workers_2: Workers) -> None:
    for choices in workers_2.run(choices_of_a_head):
        assert choices == {
            "few tokens": "vocab_parallel: it sends less and holds less",
            "more tokens": "gather: vocab_parallel would hold more",
            "many tokens": "gather: vocab_parallel would send more",
            "frozen": "gather: vocab_parallel would hold more",
            "two nodes": "gather: the shard axis goes beyond a node (vocab_parallel keeps replicas of the rows there)",
            "replicas": "gather: the shard axis has one process",
            "unfused": "gather: the loss is not fused",
            "as asked for": "vocab_parallel, as asked for",
        }


def choices_of_a_head() -> dict[str, str | None]:
    def choice(tokens: int, head: str = "auto", *, model: Any = None, **options: Any) -> str | None:
        mesh = options.pop("mesh", None)
        config = liger_dist.WrapConfig(head=head, expected_tokens=tokens, **options)  # type: ignore[arg-type]
        model = liger_dist.wrap(model or make_model("llama"), "fsdp2", mesh=mesh, config=config)
        split = "vocab_parallel" in str(liger_dist.explain(model).head).partition(":")[0]
        assert (rows_of(model.lm_head) is not None) == split
        return liger_dist.explain(model).head

    frozen: Any = make_model("llama")
    frozen.lm_head.requires_grad_(False)
    found = {
        "few tokens": choice(8),
        "more tokens": choice(24),
        "many tokens": choice(100),
        "frozen": choice(8, model=frozen),
        "replicas": choice(8, mesh=(2, 1)),
        "unfused": choice(8, fused_loss=False),
        "as asked for": choice(100, "vocab_parallel"),
    }
    with mock.patch("socket.gethostname", return_value=f"host {dist.get_rank()}"):
        found["two nodes"] = choice(8)
    return found


def test_processes_that_would_choose_differently_are_refused(workers_2: Workers) -> None:
    for sentence in workers_2.run(chosen_differently):
        assert (
            "rank 0 vocab_parallel: it sends less and holds less; rank 1 gather: vocab_parallel would send" in sentence
        )


def chosen_differently() -> str:
    config = liger_dist.WrapConfig(head="auto", expected_tokens=8 if dist.get_rank() == 0 else 10**6)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_model("llama"), "fsdp2", config=config)
    return str(caught.value)
