"""The programs of docs/examples run as their pages say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosts import printed_by

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EXAMPLES: dict[str, tuple[str, ...]] = {
    "trainer.py": (),
    "accelerate_loop.py": (),
    "deepspeed_loop.py": TORCHRUN,
    "liger_names.py": (),
    "lightning_module.py": (),
    "peft_lora.py": TORCHRUN,
    "trl_sft.py": (),
}
OTHERS = ("tiny.py", "write_chats.py", "write_tasks.py")
"""imported, or run by test_own_chats.py and test_evaluation.py"""


def test_none_is_left_out() -> None:
    assert {path.name for path in (ROOT / "docs" / "examples").glob("*.py")} == {*EXAMPLES, *OTHERS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_prints_a_loss(name: str, tmp_path: Path) -> None:
    command = [sys.executable, *EXAMPLES[name], str(ROOT / "docs" / "examples" / name)]
    assert 5 < float(printed_by(command, tmp_path).split()[-1]) < 8
