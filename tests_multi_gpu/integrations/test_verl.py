"""verl's own engines and losses, on CPUs: updates of the policy with the plug and without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distilled import make_teacher
from harness import Workers
from models import HIDDEN_SIZE, assert_below, relative_errors
from policies import LORA, ROWS, differences
from transformers.models.qwen2_vl import modeling_qwen2_vl
from verl_engines import (
    PLUG,
    STEPS,
    ULYSSES,
    distil_over_the_vocabulary,
    error_of_fused_kernels,
    refusal_of,
    refusals_of_distillation,
    run_updates,
    score_in_16_bits,
)

import liger_dist

pytest.importorskip("verl", reason="verl is not installed")

TEMPERATURES = torch.tensor([1.0, 0.7, 1.3, 0.9])


FSDP1 = {"strategy": "fsdp"}


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
    "reduced each micro-batch": (
        "llama",
        {"data": packed(), "engine": {"use_no_sync_for_gradient_accumulation": False}},
    ),
    "one micro-batch": ("llama", {"data": packed(micro_batch_size_per_gpu=4)}),
    "padded to a bucket": ("llama", {"data": packed(), "engine": {"pad_to_length": True, "pad_to_length_bucket": 16}}),
    "dynamic batches": ("llama", {"data": packed(use_dynamic_bsz=True, max_token_len_per_gpu=20)}),
    "checkpointed": ("llama", {"data": packed(), "model": {"enable_gradient_checkpointing": True}}),
    "LoRA": ("llama", {"data": packed(), "model": LORA}),
    "LoRA on the head": (
        "llama",
        {"data": packed(micro_batch_size_per_gpu=4), "model": LORA | {"target_modules": ["q_proj", "lm_head"]}},
    ),
    "LoRA on a tied head": (
        "qwen3",
        {"data": packed(micro_batch_size_per_gpu=4), "model": LORA | {"target_modules": ["q_proj", "lm_head"]}},
    ),
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
    "FSDP1, tied": ("qwen3", {"data": packed(), "engine": FSDP1}),
    "FSDP1, distillation": (
        "qwen3",
        {"data": packed(distillation_use_topk=True), "engine": FSDP1, "distillation": {}},
    ),
    "SFT": ("llama", {"data": packed(calculate_entropy=False, calculate_sum_pi_squared=False), "sft": True}),
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


@pytest.mark.nightly(name=["padded gemma2", "gemma2 softcap", "LoRA on the head"])
@pytest.mark.nightly(
    name=[
        *("qwen3_moe", "qwen3 tied", "granite scale", "dynamic batches", "LoRA on a tied head", "FSDP1, tied"),
        "distillation",
        "padded",
        "one temperature",
        "no temperature",
        "log-probabilities alone",
        "reduced each micro-batch",
        "one micro-batch",
        "padded to a bucket",
        "checkpointed",
        "LoRA",
        "Ulysses",
        "FSDP1, distillation",
        "SFT",
        "distillation alone",
        "distillation in chunks",
    ]
)
@pytest.mark.parametrize("name", CASES)
def test_verl_updates_equal_those_without_the_plug(
    name: str, checkpoints: Callable[[str], Path], workers_2: Workers
) -> None:
    family, case = CASES[name]
    if family == "qwen2_5_vl" and not hasattr(modeling_qwen2_vl, "Qwen2VLCausalLMOutputWithPast"):
        pytest.skip("verl 0.9.1 knows the classes of Qwen2-VL in transformers 5.5 to 5.10; make test-verl has those")
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


FULL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reverse KL": ("llama", "reverse_kl_full", {"data": {"calculate_entropy": False}}),
    "forward KL, tied, padded hidden states": ("qwen3", "forward_kl_full", {"data": {"dense": True}}),
    "mean of each answer": ("llama", "reverse_kl_full", {"loss": {"loss_agg_mode": "seq-mean-token-mean"}}),
    "padded": (
        "llama",
        "forward_kl_full",
        {"data": {"use_remove_padding": False}, "model": {"use_remove_padding": False}},
    ),
    "FSDP1, tied": ("qwen3", "reverse_kl_full", {"engine": FSDP1}),
}


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of another size, with soft-capped logits and a tied lm_head."""
    folder = tmp_path_factory.mktemp("teacher")
    make_teacher(family="gemma2").save_pretrained(folder)
    return folder


@pytest.mark.nightly(name=["mean of each answer", "padded", "FSDP1, tied"])
@pytest.mark.parametrize("name", FULL)
def test_verl_distils_over_the_vocabulary_from_hidden_states(
    name: str, teacher: Path, checkpoints: Callable[[str], Path], workers_2: Workers
) -> None:
    """Without logits of either model. Losses and gradients are those of full logits in fp64."""
    family, mode, case = FULL[name]
    for found in workers_2.run(distil_over_the_vocabulary, checkpoints(family), teacher, mode, case):
        assert found["calls"] == 2
        assert 0 < found["logits"] <= ROWS
        for step, truth in zip(found["steps"], found["truth"], strict=True):
            assert step["loss"] == pytest.approx(float(truth["loss"]), rel=1e-12)
            assert step["metric"] == pytest.approx(step["loss"], rel=1e-12)
            # The gradients of FSDP1 are flat; those of SGD are in the weights.
            for values in ("weights",) if "FSDP1" in name else ("gradients", "weights"):
                assert_below(relative_errors(step[values], truth[values]), 1e-10, f"{name}, {values}")
        assert len({step["loss"] for step in found["steps"]}) == STEPS


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no hidden states": ({"data": {"teacher_hidden": None}}, "the batch has no 'teacher_hidden' ("),
    "prompts alone": ({"data": {"teacher_hidden": torch.zeros(4, 6, 24)}}, "teacher_hidden is padded to (2, 6, 24)"),
    "other rows": (
        {"data": {"teacher_hidden": torch.nested.nested_tensor([torch.zeros(3, 24)] * 4, layout=torch.jagged)}},
        "teacher_hidden has [3, 3] tokens and input_ids has [",
    ),
    "task rewards": ({"loss": {"use_task_rewards": True}}, "distillation_loss.use_task_rewards is True with"),
    "clamped": ({"loss": {"loss_max_clamp": 10.0}}, "distillation_loss.loss_max_clamp is 10.0 with"),
    "two teachers": ({"loss": {"teachers": 2}}, "distillation.teacher_models has the model paths ["),
    "temperatures": ({"data": {"temperature": TEMPERATURES}}, "loss_mode is 'reverse_kl_full' with the temperature"),
    "verl's engine": ({"fused": False}, "loss_mode is 'reverse_kl_full' under the strategy 'fsdp2', whose engine"),
}


def test_verl_refuses_what_full_distillation_lacks(
    teacher: Path, checkpoints: Callable[[str], Path], workers_2: Workers
) -> None:
    cases = {name: case for name, (case, _) in REFUSED.items()}
    for found in workers_2.run(refusals_of_distillation, checkpoints("llama"), teacher, cases):
        for name, (_, sentence) in REFUSED.items():
            assert found.get(name, "").startswith(sentence), (name, found.get(name))


def test_verl_temperatures_are_not_rounded_to_16_bits(checkpoints: Callable[[str], Path], workers_2: Workers) -> None:
    """FSDP2 casts the inputs of its root; 0.7 in bf16 would scale every logit by 1.0011."""
    path = checkpoints("llama")
    for mine, theirs in zip(*(workers_2.run(score_in_16_bits, path, fused) for fused in (True, False)), strict=True):
        assert float((mine - theirs).abs().max()) < 0.1
        assert mine.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "model", "engine", "sentence"),
    [
        ("llama", {"use_fused_kernels": True}, {}, "model.use_fused_kernels is True"),
        ("qwen2_5_vl", {}, {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size is 2 for a vision"),
        ("ernie", {"attn_implementation": "eager"}, {}, "model.use_remove_padding packs documents into rows, which"),
    ],
)
def test_verl_settings_are_refused(
    family: str,
    model: dict[str, Any],
    engine: dict[str, Any],
    sentence: str,
    checkpoints: Callable[[str], Path],
    workers_2: Workers,
) -> None:
    for refusal in workers_2.run(refusal_of, checkpoints(family), model, engine):
        assert refusal.startswith(sentence)


@pytest.mark.nightly
def test_errors_of_verl_that_the_page_lists(checkpoints: Callable[[str], Path], workers_2: Workers) -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors_you_come_from.md").read_text()
    rows = re.findall(r"^\| `(.+?)`", page.split("## verl")[1], re.MULTILINE)
    alone = {"calculate_sum_pi_squared": False}
    asked = (("llama", TEMPERATURES, alone), ("qwen3", 1.0, {}), ("llama", 1.0, alone))
    for row, (family, temperature, options) in zip(rows, asked, strict=False):
        errors = workers_2.run(error_of_fused_kernels, checkpoints(family), temperature, options)
        assert all(row in error for error in errors)


LOOK = """
import verl
from verl.workers.engine.base import EngineRegistry
print(*(EngineRegistry.get_engine_cls(kind, "fsdp2").__qualname__ for kind in ("language_model", "value_model")))
"""
RENAMED = """
from verl.workers.engine.fsdp import transformer_impl
del transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs
import liger_dist.integrations.verl
"""
TAKEN = """
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
EngineRegistry.register("language_model", "fsdp2", "cuda", "nvidia")(FSDPEngineWithLMHead)
import liger_dist.integrations.verl
"""


@pytest.mark.parametrize(
    ("program", "modules", "sentence"),
    [
        (LOOK, PLUG, "FusedEngine FSDPEngineWithValueHead"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (LOOK, "", "FSDPEngineWithLMHead FSDPEngineWithValueHead"),
                (RENAMED, "", "prepare_model_outputs of FSDPEngineWithLMHead is missing in verl 0."),
                (TAKEN, "", "FSDPEngineWithLMHead is registered for fsdp2 on cuda of nvidia already"),
            )
        ),
    ],
)
def test_verl_loads_the_plug_by_its_environment_variable(program: str, modules: str, sentence: str) -> None:
    """Critics keep verl's engine. Another release, or another engine in the same place, is refused."""
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": modules, "VERL_ENGINE_DEVICE": "cuda"}
    environment |= {"VERL_ENGINE_VENDOR": "nvidia"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert sentence in done.stdout + done.stderr
    assert (done.returncode == 0) == (program is LOOK)


def test_verl_is_configured_by_a_wrap_config_only() -> None:
    from verl_engines import import_verl

    import_verl()
    with pytest.raises(liger_dist.LigerDistError, match=r"expected a liger_dist\.WrapConfig"):
        sys.modules[PLUG].configure({"logits_dtype": None})
