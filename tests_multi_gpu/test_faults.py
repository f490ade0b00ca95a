"""A fault of one rank ends all of them with its own words, soon; nobody waits in a collective."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "faulty_data.py"
LIMIT = 60.0
"""seconds from the start of the program"""


@pytest.mark.parametrize("engine", ["ddp", "fsdp2 rows", "zero"])
def test_an_exception_in_one_ranks_data_ends_all(engine: str, tmp_path: Path) -> None:
    if engine == "zero":
        pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    finished = subprocess.run(
        [*command, str(PROGRAM), engine],
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert time.monotonic() - begun < LIMIT, torch.cuda.is_available()
    assert finished.returncode != 0
    assert "OSError: shard 7 of the data set cannot be read" in finished.stderr
