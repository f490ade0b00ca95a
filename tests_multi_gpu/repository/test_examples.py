"""The programs of docs/examples run as their pages say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_programs import run_command
from test_tutorial import as_pattern

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
"""needs a GPU, run by tests with more checks, imported, or run by test_verl_program.py, test_tutorial.py and
test_evaluation.py"""


SHOWN = dict(
    re.findall(r"^\| \[`(\S+)`\].* \| `([^`]+)` \|$", (ROOT / "docs" / "examples.md").read_text(), re.MULTILINE)
)
"""last lines that the page of examples shows, in other numbers"""


def test_the_page_has_every_file_and_the_output_of_every_program() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    files = {path.name for path in (ROOT / "docs" / "examples").iterdir()} - {"__pycache__"}
    assert set(re.findall(r"`([\w.]+)`", page)) >= files
    assert {*EXAMPLES, "cuda_graph.py", "draft_head.py", "masked_diffusion.py", "one_process.ipynb"} == SHOWN.keys()


def test_none_is_left_out() -> None:
    assert {path.name for path in (ROOT / "docs" / "examples").glob("*.py")} == {*EXAMPLES, *OTHERS}


@pytest.mark.gpu
def test_a_cuda_graph_trains_as_without_one(tmp_path: Path) -> None:
    said = run_command(["python", str(ROOT / "docs" / "examples" / "cuda_graph.py")], tmp_path)
    assert SHOWN["cuda_graph.py"] in said


@pytest.mark.nightly
def test_a_draft_head_gives_more_tokens_for_each_run(tmp_path: Path) -> None:
    said = run_command(["python", str(ROOT / "docs" / "examples" / "draft_head.py")], tmp_path)
    assert re.search(as_pattern(SHOWN["draft_head.py"]), said)
    before, after = (float(one) for one in re.findall(r"training: (\S+) tokens for each run", said))
    assert 1.0 <= before < 2.0
    assert after > 3.0


def test_masked_diffusion_trains_by_the_loss_of_full_logits(tmp_path: Path) -> None:
    said = run_command(["python", str(ROOT / "docs" / "examples" / "masked_diffusion.py")], tmp_path)
    assert re.search(as_pattern(SHOWN["masked_diffusion.py"]), said)
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
    assert re.search(f"{as_pattern(SHOWN[name])}\\s*$", said)
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


@pytest.mark.smoke
def test_the_notebook_runs_in_one_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, in order: losses and gradients of the wrapped model are those of the unwrapped one."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((ROOT / "docs" / "examples" / "one_process.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "a notebook is committed without outputs"
            exec(compile("".join(cell["source"]), "one_process.ipynb", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(as_pattern(SHOWN["one_process.ipynb"]), said)
    one, other = re.findall(r"loss (\S+), of the unwrapped model (\S+)", said)[0]
    assert abs(float(one) - float(other)) < 1e-4
    assert names["worst"] < 1e-4
    assert len(names["losses"]) == 50
    assert names["losses"][-1] < names["losses"][0] / 3
    assert len(names["plt"].gca().lines[0].get_xdata()) == 50
