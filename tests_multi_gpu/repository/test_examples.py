"""The programs of docs/examples run as their pages say."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_programs import run_command

ROOT = Path(__file__).parents[2]
ALONE, TORCHRUN = ("python",), ("torchrun", "--standalone", "--nproc-per-node", "2")
EXAMPLES: dict[str, tuple[str, ...]] = {
    "trainer.py": ALONE,
    "accelerate_loop.py": ALONE,
    "deepspeed_loop.py": TORCHRUN,
    "liger_names.py": ALONE,
    "lightning_module.py": ALONE,
    "peft_lora.py": TORCHRUN,
    "trl_sft.py": ALONE,
}
OTHERS = ("tiny.py", "write_chats.py", "write_tasks.py")
"""imported, or run by test_own_chats.py and test_evaluation.py"""


def test_none_is_left_out() -> None:
    assert {path.name for path in (ROOT / "docs" / "examples").glob("*.py")} == {*EXAMPLES, *OTHERS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_prints_a_loss(name: str, tmp_path: Path) -> None:
    command = [*EXAMPLES[name], str(ROOT / "docs" / "examples" / name)]
    assert 5 < float(run_command(command, tmp_path).split()[-1]) < 8
