"""OpenRLHF's own actor and loss under ZeRO, on CPUs: updates with the plug and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE
from openrlhf_actors import LENGTH, SAMPLES, STEPS, refusals_of, run_ppo
from policies import LORA, ROWS, differences

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed")

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, ZeRO-2": ("llama", 2, {}),
    "llama, ZeRO-3": ("llama", 3, {}),
    "qwen3 tied, ZeRO-3": ("qwen3", 3, {}),
    "gemma2 softcap, ZeRO-2": ("gemma2", 2, {"attn_implementation": "eager"}),
    "granite scale, ZeRO-3": ("granite", 3, {}),
    "no temperature": ("llama", 2, {"temperature": 1.0}),
    "packed, ZeRO-2": ("llama", 2, {"packing_samples": True}),
    "packed, ZeRO-3": ("qwen3", 3, {"packing_samples": True}),
    "LoRA, ZeRO-2": ("llama", 2, LORA | {"target_modules": ["q_proj", "down_proj"]}),
    "LoRA on the head, ZeRO-3": ("llama", 3, LORA | {"target_modules": ["q_proj", "lm_head"]}),
    "router loss, ZeRO-2": ("qwen3_moe", 2, {}),
}


@pytest.mark.nightly(
    name=[
        "gemma2 softcap, ZeRO-2",
        "LoRA on the head, ZeRO-3",
        "llama, ZeRO-3",
        "granite scale, ZeRO-3",
        "no temperature",
        "packed, ZeRO-2",
        "LoRA, ZeRO-2",
    ]
)
@pytest.mark.parametrize("name", CASES)
def test_openrlhf_updates_equal_those_without_the_plug(
    name: str, checkpoints: Callable[[str], Path], workers_2: Workers
) -> None:
    family, stage, options = CASES[name]
    path = checkpoints(family)
    own, fused = (workers_2.run(run_ppo, path, fused, stage, options) for fused in (False, True))
    for mine, theirs in zip(fused, own, strict=True):
        assert (mine.pop("class"), theirs.pop("class")) == ("FusedActor", "Actor")
        assert (mine.pop("calls"), theirs.pop("calls")) == (STEPS + 2, 0)
        # The gradient of a LoRA layer on lm_head has a row for each entry of the hidden states.
        assert mine.pop("logits") <= (HIDDEN_SIZE if "head" in name else ROWS) < theirs.pop("logits")
        compared = dict(differences(mine, theirs))
        assert len(compared) > STEPS * len(mine["weights"])
        assert {path: value for path, value in compared.items() if not value <= 1e-5} == {}
        assert len({float(step["loss"]) for step in mine["steps"]}) == STEPS


def test_openrlhf_refusals_and_logits(checkpoints: Callable[[str], Path], workers_2: Workers) -> None:
    for ring, liger, packing, shape in workers_2.run(refusals_of, checkpoints("llama"), checkpoints("ernie")):
        assert packing.startswith("packing_samples packs documents into rows, which ErnieForCausalLM would mix")
        assert ring.startswith("ring_attn_group was given")
        assert liger.startswith("use_liger_kernel is True")
        assert shape == str((SAMPLES, LENGTH, VOCAB_SIZE))


RUN = """
import sys, openrlhf.cli
openrlhf.cli.__path__.insert(0, sys.argv.pop(1))
from liger_dist.integrations.openrlhf import train_ppo_ray
train_ppo_ray()
"""
INITIALIZED = """
import ray
ray.init(num_cpus=1, include_dashboard=False)
from liger_dist.integrations.openrlhf import train_ppo_ray
train_ppo_ray()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "sentence"),
    [(RUN, "yes FusedActor FusedActor Actor"), (INITIALIZED, "Ray is initialized in this process already")],
)
def test_openrlhf_workers_of_ray_make_fused_policies(program: str, sentence: str) -> None:
    """Every worker of the command does, and the program's own runtime environment stays. SFT and DPO import Actor from
    openrlhf.models."""
    folder = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program, str(folder / "programs" / "openrlhf_cli")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert sentence in done.stdout + done.stderr
    assert (done.returncode == 0) == (program is RUN), done.stderr
