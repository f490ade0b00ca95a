"""The programs of docs/examples run as their pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_programs import run_command

ROOT = Path(__file__).parents[2]
ALONE, TORCHRUN = ("python",), ("torchrun", "--standalone", "--nproc-per-node", "2")
EXAMPLES: dict[str, tuple[str, ...]] = {
    "trainer.py": ALONE,
    "accelerate_loop.py": ALONE,
    "deepspeed_loop.py": TORCHRUN,
    "grpo_loop.py": TORCHRUN,
    "liger_names.py": ALONE,
    "lightning_module.py": ALONE,
    "opd_loop.py": TORCHRUN,
    "peft_lora.py": TORCHRUN,
    "pipeline.py": (*TORCHRUN[:-1], "4"),
    "qlora.py": TORCHRUN,
    "trl_sft.py": ALONE,
}
OTHERS = (
    "cuda_graph.py",
    "draft_head.py",
    "masked_diffusion.py",
    "tiny.py",
    "verl_distillation.py",
    "write_chats.py",
    "write_tasks.py",
)
"""needs a GPU, run by tests with more checks, imported, or run by test_verl_program.py, test_own_chats.py and
test_evaluation.py"""


def test_none_is_left_out() -> None:
    assert {path.name for path in (ROOT / "docs" / "examples").glob("*.py")} == {*EXAMPLES, *OTHERS}


@pytest.mark.gpu
def test_a_cuda_graph_trains_as_without_one(tmp_path: Path) -> None:
    said = run_command(["python", str(ROOT / "docs" / "examples" / "cuda_graph.py")], tmp_path)
    assert "the same losses as without a graph" in said


def test_a_draft_head_gives_more_tokens_for_each_run(tmp_path: Path) -> None:
    said = run_command(["python", str(ROOT / "docs" / "examples" / "draft_head.py")], tmp_path)
    before, after = (float(one) for one in re.findall(r"training: (\S+) tokens for each run", said))
    assert 1.0 <= before < 2.0
    assert after > 3.0


def test_masked_diffusion_trains_by_the_loss_of_full_logits(tmp_path: Path) -> None:
    said = run_command(["python", str(ROOT / "docs" / "examples" / "masked_diffusion.py")], tmp_path)
    packed, alone = re.findall(r"packed (\S+), full logits of each text (\S+)", said)[0]
    assert abs(float(packed) - float(alone)) < 1e-4
    losses = [float(one) for one in re.findall(r"loss (\S+)", said)]
    assert losses[-1] < losses[0] / 1.5


@pytest.mark.smoke
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_prints_a_loss(name: str, tmp_path: Path) -> None:
    command = [*EXAMPLES[name], str(ROOT / "docs" / "examples" / name)]
    said = run_command(command, tmp_path)
    assert 5 < float(said.split()[-1]) < 8
    if name == "grpo_loop.py":
        losses = [float(loss) for loss in re.findall(r"loss (\S+),", said)]
        assert len(losses) == 3
        assert losses[0] > losses[1] > losses[2]
    if name == "pipeline.py":
        pairs = re.findall(r"loss (\S+), of the uncut model (\S+)", said)
        assert len(pairs) == 4
        assert all(abs(float(one) - float(other)) < 1e-3 for one, other in pairs)
    if name == "opd_loop.py":
        divergences = [float(one) for one in re.findall(r"divergence (\S+) nats", said)]
        assert len(divergences) == 6
        assert divergences[-1] < divergences[0] / 5
