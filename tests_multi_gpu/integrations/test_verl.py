"""verl's own engines and losses, on CPUs: updates of the policy with the plug and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Workers
from models import HIDDEN_SIZE
from policies import LORA, ROWS, differences
from verl_engines import PLUG, ULYSSES, run_updates

import liger_dist

pytest.importorskip("verl", reason="verl is not installed")

TEMPERATURES = torch.tensor([1.0, 0.7, 1.3, 0.9])
def packed(**options: Any) -> dict[str, Any]:
    return {"temperature": TEMPERATURES, **options}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"data": packed()}),
    "qwen3 tied": ("qwen3", {"data": packed()}),
    "gemma2 softcap": ("gemma2", {"data": packed(), "model": {"attn_implementation": "eager"}}),
    "granite scale": ("granite", {"data": packed()}),
    "qwen3_moe": ("qwen3_moe", {"data": packed()}),
    "padded": ("llama", {"data": packed(use_remove_padding=False), "model": {"use_remove_padding": False}}),
    "padded gemma2": (
        "gemma2",
        {
            "data": packed(use_remove_padding=False),
            "model": {"use_remove_padding": False, "attn_implementation": "eager"},
        },
    ),
    "one temperature": ("llama", {"data": {"temperature": 0.7}}),
    "no temperature": ("llama", {"data": {"temperature": 1.0}}),
    "log-probabilities alone": ("qwen3", {"data": packed(calculate_entropy=False)}),
    "reduced each micro-batch": ("llama", {"data": packed(), "engine": {"use_no_sync_for_gradient_accumulation": False}}),
    "one micro-batch": ("llama", {"data": packed(micro_batch_size_per_gpu=4)}),
    "padded to a bucket": ("llama", {"data": packed(), "engine": {"pad_to_length": True, "pad_to_length_bucket": 16}}),
    "dynamic batches": ("llama", {"data": packed(use_dynamic_bsz=True, max_token_len_per_gpu=20)}),
    "checkpointed": ("llama", {"data": packed(), "model": {"enable_gradient_checkpointing": True}}),
    "LoRA": ("llama", {"data": packed(), "model": LORA}),
    "LoRA on the head": ("llama", {"data": packed(micro_batch_size_per_gpu=4), "model": LORA | {"target_modules": ["q_proj", "lm_head"]}}),
    "LoRA on a tied head": ("qwen3", {"data": packed(micro_batch_size_per_gpu=4), "model": LORA | {"target_modules": ["q_proj", "lm_head"]}}),
    "Ulysses": (
        "llama",
        {
            "data": packed(micro_batch_size_per_gpu=4),
            "model": {"attn_implementation": ULYSSES},
            "engine": {"ulysses_sequence_parallel_size": 2},
        },
    ),
    "Ulysses, distillation": (
        "qwen3",
        {
            "data": packed(distillation_use_topk=True, micro_batch_size_per_gpu=4),
            "model": {"attn_implementation": ULYSSES},
            "engine": {"ulysses_sequence_parallel_size": 2},
            "distillation": {},
        },
    ),
    "images": ("qwen2_5_vl", {"data": packed(images=True)}),
    "images, padded": (
        "qwen2_5_vl",
        {"data": packed(images=True, use_remove_padding=False), "model": {"use_remove_padding": False}},
    ),
    "distillation": ("llama", {"data": packed(distillation_use_topk=True), "distillation": {}}),
    "distillation alone": (
        "qwen3",
        {
            "data": packed(
                distillation_use_topk=True,
                distillation_only=True,
                calculate_entropy=False,
                calculate_sum_pi_squared=False,
            ),
            "distillation": {"use_task_rewards": False, "use_policy_gradient": False},
        },
    ),
    "distillation in chunks": (
        "llama",
        {
            "data": packed(distillation_use_topk=True),
            "distillation": {"use_chunked_topk": True, "chunked_topk_chunk_size": 5, "log_prob_min_clamp": -6.0},
        },
    ),
    "distillation, padded": (
        "llama",
        {
            "data": packed(distillation_use_topk=True, use_remove_padding=False),
            "model": {"use_remove_padding": False},
            "distillation": {},
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verl_updates_equal_those_without_the_plug(name: str, checkpoints: Callable[[str], Path], workers_2: Workers) -> None:
    family, case = CASES[name]
    path = checkpoints(family)
    own, fused = (workers_2.run(run_updates, path, fused, case) for fused in (False, True))
    for mine, theirs in zip(fused, own, strict=True):
        assert (mine.pop("class"), theirs.pop("class")) == ("FusedEngine", "FSDPEngineWithLMHead")
        assert (theirs.pop("calls"), mine.pop("calls")) == (0, mine["passes"])
        # The gradient of a LoRA layer on lm_head has a row for each entry of the hidden states.
        assert mine.pop("logits") <= (HIDDEN_SIZE if "head" in name else ROWS) < theirs.pop("logits")
        compared = dict(differences(mine, theirs))
        # Every output of four calls, three losses, every gradient of three updates, every weight.
        assert len(compared) > 3 * len(mine["weights"]) / 2
        assert {path: value for path, value in compared.items() if not value <= 1e-5} == {}
        assert len({float(step["loss"].sum()) for step in mine["steps"]}) == 3
