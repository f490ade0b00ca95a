"""The tutorial, command by command: from a file of chats to a model that plain transformers answers with. What the
commands print is on the page, in other numbers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from forked_programs import run_command
from training_runs import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
PARTS = re.findall(r"^```(bash|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", PAGE, re.MULTILINE | re.DOTALL)
"""language and text of each program, and what it prints"""


def as_pattern(shown: str) -> str:
    """Makes a pattern of a shown line: any numbers, and anything after an ellipsis."""
    return re.sub(r"\\?\d[\d.]*", r"[\\d.]+", re.escape(shown).replace("…", ".*").replace(r"\.", "."))


def test_a_shown_line_has_any_numbers() -> None:
    assert re.search(as_pattern("step 1/42: loss 0.595, …"), "step 1/40: loss 1.2, eval_loss 3")
    assert not re.search(as_pattern("step 1/42: loss 0.595, …"), "step 1/40: eval_loss 1.2, loss 3")


@pytest.mark.nightly
@pytest.mark.timeout(480)
@pytest.mark.skipif(torch.cuda.is_available(), reason="commands for CPUs")
def test_from_chats_to_answers(tmp_path: Path) -> None:
    for name in ("docs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert [bool(shown) for _, _, shown in PARTS] == [False, True, True, True, True, True]
    for language, text, shown in PARTS:
        (tmp_path / "program.py").write_text(text)
        commands = text.replace("\\\n", " ").splitlines() if language == "bash" else ["python program.py"]
        said = "".join(
            run_command(shlex.split(line), tmp_path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1") for line in commands
        )
        for line in shown.splitlines():
            assert re.search(as_pattern(line), said), f"the page shows {line!r}; the commands said:\n{said[-3000:]}"
        for answer in re.findall(r"^The colour .* \w+\.$|^.* word for word$", shown, re.MULTILINE):
            assert answer in said
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    (source,) = json.loads((tmp_path / "runs" / "chats" / "data.json").read_text())["sources"]
    assert source["documents_read"] == source["documents"] == len(chats) == 200
    assert not any(split["documents_cut"] for split in source["splits"].values())
