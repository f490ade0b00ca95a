"""The programs of docs/examples run as their pages say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


def test_none_is_left_out() -> None:
    assert {path.name for path in (ROOT / "docs" / "examples").glob("*.py")} == {*EXAMPLES, "tiny.py"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_prints_a_loss(name: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, *EXAMPLES[name], str(ROOT / "docs" / "examples" / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert finished.returncode == 0, finished.stderr
    assert 5 < float(finished.stdout.split()[-1]) < 8
