"""Every causal family of transformers: cut into two stages it computes the same, or pipeline_stage refuses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import Family, batch_for, build, families, families_with_options
from models import assert_below, norm_errors
from torch import nn

import liger_dist
from liger_dist.model.structure import embedding_of

CUT = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "olmo3", "gpt_oss", "deepseek_v3", "glm4_moe", "smollm3", "cohere2", "lfm2", "gpt_neox"),
)
"""families that are never refused, which ``make test`` runs"""
CASES = [
    pytest.param(family, marks=[] if family.name in CUT and not family.option else pytest.mark.nightly)
    for family in [*families(), *families_with_options()]
    if family.mapping == "causal"
]


@pytest.mark.parametrize("family", CASES, ids=str)
def test_two_stages_compute_what_the_family_does_or_are_refused(family: Family) -> None:
    try:
        model: Any = build(family)
        batch = batch_for(family, model)
        untie(model)
        model(**batch)
    except Exception as error:
        pytest.skip(f"not built: {error}")
    try:
        stages = [liger_dist.pipeline_stage(model, index, 2) for index in range(2)]
    except liger_dist.LigerDistError:
        assert family.name not in CUT or family.option
        return
    own = model(**batch).loss
    own.backward()
    truths = take_gradients(model)
    count = int((batch["labels"][:, 1:] != -100).sum())
    loss = stages[1](stages[0](batch["input_ids"]), labels=batch["labels"], num_items_in_batch=count)
    loss.sum().backward()
    assert float(loss) == pytest.approx(float(own), rel=1e-5)
    assert_below(norm_errors(take_gradients(model), truths), 1e-4)


def untie(model: Any) -> None:
    head, embedding = model.get_output_embeddings(), embedding_of(model)
    if head is not None and embedding is not None and head.weight is embedding.weight:
        model.config.tie_word_embeddings = False
        head.weight = nn.Parameter(head.weight.detach().clone())


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
