"""The page "Train on your own chats", command by command: from a file of chats to a model that plain transformers
answers with."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import ROOT

PAGE = ROOT / "docs" / "own_chats.md"


@pytest.mark.skipif(torch.cuda.is_available(), reason="commands for CPUs")
def test_from_chats_to_answers(tmp_path: Path) -> None:
    for name in ("docs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    programs["liger-dist"] = [str(Path(sys.executable).with_name("liger-dist"))]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    said = ""
    for line in text.replace("\\\n", " ").splitlines():
        program, *rest = shlex.split(line)
        done = subprocess.run(
            [*programs[program], *rest], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr[-3000:])
        said = done.stdout
    promised = re.search(r"It answers as in its chats: \*(.*)\*", PAGE.read_text())
    assert promised is not None
    assert said.strip() == promised[1]
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    (source,) = json.loads((tmp_path / "runs" / "chats" / "data.json").read_text())["sources"]
    assert source["documents_read"] == source["documents"] == len(chats) == 200
    assert not any(split["documents_cut"] for split in source["splits"].values())
