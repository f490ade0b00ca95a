"""Nothing of torch or transformers is changed, and no tensor grows with tokens x vocabulary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import LargestTensor

import liger_dist
from liger_dist.sharding.process_groups import compute_device

VOCAB_SIZE = 128_256
PROGRAM = Path(__file__).parents[1] / "programs" / "attributes.py"


def test_no_attribute_of_torch_or_transformers_changes() -> None:
    run = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    watched, changed = run.stdout.strip().splitlines()[-2:]
    assert int(watched.split()[0]) > 20_000
    assert changed == "changed: []"


def tiny_depth() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).to(compute_device(), torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def step(model: Any, tokens: int) -> None:
    ids = torch.arange(tokens, device=compute_device())[None] % VOCAB_SIZE
    model(input_ids=ids.reshape(-1, 512), labels=ids.reshape(-1, 512)).loss.backward()
    model.zero_grad()


def test_no_tensor_grows_with_tokens_times_vocabulary() -> None:
    """On the CPU by what operations return. The budget of logits, and the weight and its gradient, are all there is."""
    budget = 32 * 2**20
    model = liger_dist.wrap(tiny_depth(), config=liger_dist.WrapConfig(memory_budget=budget))
    largest = {}
    for tokens in (512, 1024):
        with LargestTensor() as seen:
            step(model, tokens)
        largest[tokens] = seen.bytes
    weight = VOCAB_SIZE * 16 * 4
    assert largest[1024] <= max(budget, weight) < 1024 * VOCAB_SIZE * 4
    assert largest[1024] == largest[512]
    unfused = liger_dist.wrap(tiny_depth(), config=liger_dist.WrapConfig(fused_loss=False))
    with LargestTensor() as seen:
        step(unfused, 512)
    assert seen.bytes >= 512 * VOCAB_SIZE * 4, "whole logits are not seen"


@pytest.mark.gpu
def test_peak_memory_at_8k_tokens_is_the_budget_and_the_weights() -> None:
    budget = 256 * 2**20
    model = liger_dist.wrap(tiny_depth(), config=liger_dist.WrapConfig(memory_budget=budget))
    peaks = {}
    for tokens in (2048, 4096, 8192):
        step(model, tokens)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(model, tokens)
        peaks[tokens] = torch.cuda.max_memory_allocated() - before
    print({tokens: f"{peak / 2**20:.0f} MiB" for tokens, peak in peaks.items()})
    whole = 8192 * VOCAB_SIZE * 2
    weight = VOCAB_SIZE * 16
    assert peaks[8192] < budget + 16 * weight + 128 * 2**20 < whole / 3
    assert peaks[8192] - peaks[2048] < 64 * 2**20
