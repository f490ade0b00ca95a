"""verl's own program: GRPO by ``python -m verl.trainer.main_ppo`` in Ray, on CPUs, with the plug and without it.

Everything is verl's except for the inference server, which has no build for CPUs (``programs/verl_on_cpu.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distilled import divergences, make_teacher
from policies import SIZES
from trainers import make_tokenizer

for needed in ("verl", "ray", "cachetools", "fastapi", "uvicorn"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, SAMPLES, RANKS = 3, 4, 4, 2
"""of the run; prompts of a step, answers to each, and ranks of FSDP2"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter in ground_truth for letter in solution_str) / 8
"""
FP32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")


def settings(folder: Path) -> dict[str, Any]:
    """Makes verl's configuration: two updates in each step, a KL loss to the reference, an entropy bonus."""
    engine = {"strategy": "fsdp2", "dtype": "float32", "use_torch_compile": False}
    made: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.model.path": folder / "policy",
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS // 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.05,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
        # AdamW divides gradients that are zero but for rounding by their size.
        "actor_rollout_ref.actor.optim.optimizer": "SGD",
        "actor_rollout_ref.actor.optim.lr": 0.2,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.rollout.name": "transformers",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.temperature": 0.8,
        # Requests have the same ids in each run.
        "actor_rollout_ref.rollout.full_determinism": True,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": RANKS,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        # The other trainer needs TransferQueue.
        "trainer.use_v1": False,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": RANKS,
        "trainer.total_epochs": 1,
        "trainer.logger": '["console","file"]',
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.rollout_data_dir": folder / "rollouts",
        "trainer.default_local_dir": folder / "checkpoints",
        "hydra.run.dir": folder / "hydra",
        "ray_kwargs.ray_init.num_cpus": 8,
        "+ray_kwargs.ray_init.num_gpus": RANKS,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.address": "local",
    }
    for role in ("actor", "ref"):
        made |= {f"actor_rollout_ref.{role}.fsdp_config.{name}": value for name, value in engine.items()}
        made |= {f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{name}": value for name, value in FP32.items()}
    return made


def write_inputs(folder: Path) -> None:
    """Writes a policy with a tokenizer, prompts for each step, and the reward."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    make_tokenizer().save_pretrained(folder / "policy")
    rows = [
        {
            "prompt": [{"role": "user", "content": "ab" * (1 + row % 3) + chr(97 + row)}],
            "data_source": "letters",
            "reward_model": {"style": "rule", "ground_truth": "abcdefghijklmnop"},
            "extra_info": {"index": row},
        }
        for row in range(STEPS * PROMPTS)
    ]
    datasets.Dataset.from_list(rows).to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)


def run_program(folder: Path, *, modules: str, **changes: Any) -> dict[str, Any]:
    """Runs verl's program with external modules and changed settings; returns its metrics, answers and engines."""
    write_inputs(folder)
    tests = ROOT / "tests_multi_gpu"
    paths = (ROOT, ROOT / "kernels", tests, tests / "programs", ROOT / "docs" / "examples")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": modules,
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "RUN_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"{name}={value}" for name, value in (settings(folder) | changes).items()]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    engines = [(folder / f"engines.{rank}").read_text().split() for rank in range(RANKS)]
    answers = [read_lines(folder / "rollouts" / f"{step}.jsonl") for step in range(1, STEPS + 1)]
    return {"metrics": read_lines(folder / "metrics.jsonl"), "answers": answers, "engines": engines}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ROUNDING = ("timing", "perf", "actor/perf", "rollout_corr", "training/rollout")
"""beginnings of metrics that are times, memory, or differences of numbers that are equal but for rounding"""
COMPARED = {
    *("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy_loss", "actor/entropy", "actor/grad_norm"),
    *("critic/rewards/mean", "critic/advantages/max", "response_length/mean"),
}


@pytest.mark.nightly
@pytest.mark.timeout(2000)
def test_grpo_of_verls_program_equals_that_without_the_plug(tmp_path: Path) -> None:
    """Rewards, losses and gradient norms of all steps, and every answer."""
    runs = {}
    for name, modules in (("own", "verl_on_cpu"), ("fused", "verl_on_cpu,liger_dist.integrations.verl")):
        (tmp_path / name).mkdir()
        runs[name] = run_program(tmp_path / name, modules=modules)
    own, fused = runs["own"], runs["fused"]
    # An actor and a reference on each rank.
    assert own["engines"] == [["FSDPEngineWithLMHead"] * 2] * RANKS
    assert fused["engines"] == [["FusedEngine"] * 2] * RANKS
    assert [len(step) for step in fused["answers"]] == [PROMPTS * SAMPLES] * STEPS
    for mine, theirs in zip(fused["answers"], own["answers"], strict=True):
        assert [(one["input"], one["output"], one["score"]) for one in mine] == [
            (one["input"], one["output"], one["score"]) for one in theirs
        ]
    assert len(fused["metrics"]) == STEPS
    for mine, theirs in zip(fused["metrics"], own["metrics"], strict=True):
        assert mine["step"] == theirs["step"]
        expected = {name: value for name, value in theirs["data"].items() if not name.startswith(ROUNDING)}
        assert expected.keys() >= COMPARED
        for name, value in expected.items():
            assert mine["data"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (mine["step"], name)
        # The server sampled with the weights of the last update.
        assert mine["data"]["training/rollout_probs_diff_max"] < 1e-5
    steps = [one["data"] for one in fused["metrics"]]
    assert all(step["critic/rewards/max"] > step["critic/rewards/min"] for step in steps)
    assert len({step["actor/grad_norm"] for step in steps}) == STEPS


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_verls_program_distils_over_the_vocabulary(tmp_path: Path) -> None:
    """With the trainer of the page. The first loss is that of full logits."""
    from transformers import AutoModelForCausalLM

    make_teacher(family="gemma2", dtype=torch.float32).save_pretrained(tmp_path / "teacher")
    of_loss = {"loss_mode": "reverse_kl_full", "use_task_rewards": False, "use_policy_gradient": False}
    found = run_program(
        tmp_path,
        modules="verl_on_cpu,liger_dist.integrations.verl,verl_distillation",
        **{f"distillation.distillation_loss.{name}": value for name, value in of_loss.items()},
        **{
            "distillation.distillation_loss.loss_max_clamp": "null",
            "distillation.teacher_models.teacher_model.model_path": tmp_path / "teacher",
            "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        },
    )
    losses = [step["data"]["actor/distillation/loss"] for step in found["metrics"]]
    assert len(losses) == STEPS
    assert losses[0] > losses[1] > losses[2]
    batch = torch.load(tmp_path / "batch.1")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    answers = batch["responses"].shape[1]
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)(**inputs).logits
            for name in ("policy", "teacher")
        ]
    scored = [one[:, -answers - 1 : -1][batch["response_mask"].bool()] for one in logits]
    expected = divergences(*scored, divergence="reverse_kl", temperature=0.8).mean()
    assert losses[0] == pytest.approx(float(expected), rel=1e-5)
