"""The page "Evaluate with lm-eval-harness", command by command: its figures are those of plain transformers in fp64."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = ROOT / "docs" / "evaluation.md"
TASKS = ROOT / "docs" / "examples" / "lm_eval"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_task_on_the_page_is_the_file() -> None:
    assert blocks("yaml") == [(TASKS / "held_out_text.yaml").read_text()]


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="commands for CPUs")
def test_log_likelihoods_are_those_of_transformers(tmp_path: Path) -> None:
    """Of benchmarks by name nothing is run, nor on several GPUs: they take a network and GPUs."""
    pytest.importorskip("lm_eval")
    for name in ("docs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    run_in(tmp_path, "python docs/examples/write_chats.py chats.jsonl")
    for line in "".join(blocks("bash")).replace("\\\n", " ").splitlines():
        if line.startswith(("pip", "accelerate")) or "hellaswag" in line:
            continue
        if "runs/chats" in line:
            # The tokenizer has the same chat template; what the model answers is nothing to compare.
            shutil.copytree(tmp_path / "runs" / "train" / "exported", tmp_path / "runs" / "chats" / "exported")
        run_in(tmp_path, line.removeprefix("HF_HUB_OFFLINE=1 "))
    bits = [assert_log_likelihoods(tmp_path, tmp_path / "runs" / name) for name in ("train", "lora")]
    assert abs(bits[0] - bits[1]) > 1e-4, "LoRA changed nothing"
    asked = [sample["arguments"]["gen_args_0"]["arg_0"] for sample in samples(tmp_path / "runs" / "chats", "colours")]
    assert len(asked) == 200
    assert all(re.fullmatch(r"<\|user\|>[^<]+<\|end\|><\|assistant\|>", prompt) for prompt in asked)


def run_in(folder: Path, command: str) -> None:
    program, *rest = shlex.split(command)
    programs = {"python": [sys.executable], "lm_eval": [sys.executable, "-m", "lm_eval"]}
    start = programs.get(program, [str(Path(sys.executable).with_name(program))])
    offline = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*start, *rest], cwd=folder, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stderr[-3000:])


def samples(run: Path, task: str) -> list[Any]:
    (file,) = (run / "lm_eval").rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_log_likelihoods(folder: Path, run: Path) -> float:
    """Asserts that every log-likelihood is that of transformers alone; returns the bits per byte."""
    tokenizer: Any = AutoTokenizer.from_pretrained(run / "exported")
    model: Any = AutoModelForCausalLM.from_pretrained(run / "exported", dtype=torch.float32).double().eval()
    longest = model.config.max_position_embeddings

    def log_likelihood(ids: list[int], count: int) -> float:
        """Of the last ``count`` ids, after the others."""
        with torch.no_grad():
            log_probs = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        found: float = log_probs.gather(1, torch.tensor(ids[1:])[:, None])[-count:].sum().item()
        return found

    total, length = 0.0, 0
    for sample in samples(run, "held_out_text"):
        text = sample["doc"]["text"]
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
        ends = [*range(longest, len(ids) - 1, longest), len(ids) - 1]
        parts = [
            log_likelihood(ids[max(0, end - longest) : end + 1], end - begin)
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        assert float(sample["filtered_resps"][0]) == pytest.approx(sum(parts), rel=1e-6)
        total, length = total + sum(parts), length + len(text.encode())
    questions = samples(run, "next_line")
    assert len(questions) > 20
    for sample in questions:
        context = sample["doc"]["context"]
        for choice, (found, _) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            ids = tokenizer(f"{context}\n{choice}")["input_ids"]
            count = len(ids) - len(tokenizer(context)["input_ids"])
            assert float(found) == pytest.approx(log_likelihood(ids[-longest - 1 :], count), abs=1e-3)
    (file,) = (run / "lm_eval").rglob("results_*.json")
    bits: float = json.loads(file.read_text())["results"]["held_out_text"]["bits_per_byte,none"]
    assert bits == pytest.approx(-total / length / math.log(2), rel=1e-6)
    return bits
