"""SkyRL's own model under FSDP2, on CPUs: updates with the plug and without it. ``make test-skyrl`` runs this file in
an environment with Python 3.12, which SkyRL needs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import Workers
from models import HIDDEN_SIZE
from policies import LORA, ROWS, differences
from skyrl_models import STEPS, replay_refusals_of, run_updates

pytest.importorskip("skyrl", reason="SkyRL is not installed; make test-skyrl installs it beside Python 3.12")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3 tied": ("qwen3", {}),
    "granite scale": ("granite", {}),
    "packed": ("llama", {"packed": True}),
    "LoRA on the head": ("llama", LORA | {"target_modules": ["q_proj", "lm_head"]}),
    "sequence shards": ("llama", {"shards": 2}),
    "packed sequence shards": ("llama", {"shards": 2, "packed": True}),
    "replay": ("llama", {"replay": True}),
    "replay, granite scale": ("granite", {"replay": True}),
    "replay, packed, tied": ("qwen3", {"replay": True, "packed": True}),
    "replay, LoRA on the head": ("llama", {"replay": True} | LORA | {"target_modules": ["q_proj", "lm_head"]}),
    "replay, sequence shards": ("llama", {"replay": True, "shards": 2}),
    "replay, packed sequence shards": ("llama", {"replay": True, "shards": 2, "packed": True}),
}
HAS_REPLAY = find_spec("skyrl.backends.skyrl_train.utils.sample_support_replay") is not None
needs_replay = pytest.mark.skipif(not HAS_REPLAY, reason="SkyRL before 0.4.0 has no replay of supports")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_replay if name.startswith("replay") else ()) for name in CASES]
)
def test_skyrl_updates_equal_those_without_the_plug(
    name: str, checkpoints: Callable[[str], Path], workers_2: Workers
) -> None:
    family, options = CASES[name]
    path = checkpoints(family)
    own, fused = (workers_2.run(run_updates, path, fused, options) for fused in (False, True))
    for mine, theirs in zip(fused, own, strict=True):
        assert (mine.pop("class"), theirs.pop("class")) == ("FusedModelWrapper", "HFModelWrapper")
        assert (mine.pop("calls"), theirs.pop("calls")) == (STEPS + 1, 0)
        # The gradient of a LoRA layer on lm_head has a row for each entry of the hidden states.
        assert mine.pop("logits") <= (HIDDEN_SIZE if "head" in name else ROWS) < theirs.pop("logits")
        compared = dict(differences(mine, theirs))
        assert {path: value for path, value in compared.items() if not value <= 1e-5} == {}
        assert len({float(step["loss"]) for step in mine["steps"]}) == STEPS


@needs_replay
def test_skyrl_replay_refuses_what_skyrl_refuses(checkpoints: Callable[[str], Path], workers_2: Workers) -> None:
    for no_support, no_mask, unread in workers_2.run(replay_refusals_of, checkpoints("llama")):
        assert "the FSDP forward received no 'rollout_sample_support'" in no_support
        assert no_mask.startswith("sample-support replay is enabled and loss_mask is None")
        assert unread.startswith("3 tokens that the loss reads have no support")
