"""Losses of ten steps of three models are those of golden.json, to the last digit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import golden
import pytest


@pytest.fixture(scope="module")
def found() -> Any:
    """Curves of a program with few vector instructions, which the processor of the machine does not choose."""
    done = subprocess.run(
        [sys.executable, golden.__file__, "--print"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.smoke
def test_golden_losses_have_not_moved(found: Any) -> None:
    """Where torch, transformers or the processor computes the unwrapped models otherwise, to three digits."""
    wanted = json.loads(golden.FILE.read_text())
    is_same_machine = all(
        found[family][golden.UNWRAPPED] == by_kind[golden.UNWRAPPED] for family, by_kind in wanted.items()
    )
    if is_same_machine:
        moved = golden.differences(found, wanted)
        assert not moved, "\n".join([*moved, "if that is meant: make golden, and say why in the commit"])
        return
    for family, by_kind in wanted.items():
        for kind, losses in by_kind.items():
            assert found[family][kind] == pytest.approx(losses, rel=1e-3), f"{family}, {kind}"


def test_golden_differences_name_the_first_step_that_moved(found: Any) -> None:
    moved = json.loads(json.dumps(found))
    moved["llama"][golden.FSDP2][3] += 1e-6
    moved["llama"][golden.FSDP2][4] += 1e-6
    (sentence,) = golden.differences(moved, found)
    assert sentence.startswith("llama, FSDP2 on two ranks: loss of step 3 is ")
