"""The page "Train on your own chats", command by command: from a file of chats to a model that plain transformers
answers with."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from forked_programs import run_command
from training_runs import ROOT

PAGE = ROOT / "docs" / "own_chats.md"


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="commands for CPUs")
def test_from_chats_to_answers(tmp_path: Path) -> None:
    for name in ("docs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    said = ""
    for line in text.replace("\\\n", " ").splitlines():
        said = run_command(shlex.split(line), tmp_path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    promised = re.search(r"It answers as in its chats: \*(.*)\*", PAGE.read_text())
    assert promised is not None
    assert said.splitlines()[-1].strip() == promised[1]
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    (source,) = json.loads((tmp_path / "runs" / "chats" / "data.json").read_text())["sources"]
    assert source["documents_read"] == source["documents"] == len(chats) == 200
    assert not any(split["documents_cut"] for split in source["splits"].values())
