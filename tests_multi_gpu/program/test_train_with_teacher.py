"""The training program with a teacher: its loss, what it refuses, and its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import InThisProcess
from training_runs import MODEL, config_for, metrics_of, write_teacher
from transformers import AutoConfig

import liger_dist
from liger_dist_train.config import TrainConfig, parse
from liger_dist_train.run import train

JSD = {"divergence": "jsd", "distillation_beta": 0.3, "distillation_temperature": 2.0, "hard_weight": 0.25}


def settings(data: Path, cache: Path, folder: Path, teacher: Path | str, **changes: Any) -> TrainConfig:
    return config_for(
        data, cache, folder, teacher=str(teacher), **(JSD | {"steps": 4, "checkpoint_every": 2} | changes)
    )


@pytest.mark.nightly
def test_a_student_that_equals_its_teacher(data: Path, cache: Path, tmp_path: Path) -> None:
    """The divergence of the first step is 0, its held-out loss that of the text."""
    runs: dict[str, dict[str, Any]] = {
        "text": {"teacher": None},
        "teacher": {"teacher": str(cache / MODEL)},
        "half": {"teacher": str(cache / MODEL), "hard_weight": 0.5},
    }
    found = {}
    for name, changes in runs.items():
        folder = tmp_path / name
        with InThisProcess() as here:
            here.run(train, config_for(data, cache, folder, steps=1, eval_every=1, checkpoint_every=0, **changes))
        found[name] = metrics_of(folder)[0]
    assert abs(found["teacher"]["loss"]) < 1e-6
    assert found["half"]["loss"] == pytest.approx(0.5 * found["text"]["loss"], rel=1e-5)
    assert found["half"]["tokens"] == found["text"]["tokens"]
    assert found["half"]["grad_norm"] == pytest.approx(0.5 * found["text"]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--divergence", "jsd"], "--hard_weight is given but --teacher is not; give the model to distil from"),
        (["--teacher", "tiny", "--hard_weight", "1.5"], "--hard_weight is 1.5; expected at most 1"),
        (["--teacher", "tiny", "--fused_loss", "false"], "--fused_loss is false, which has no divergence"),
        (
            ["--teacher", "tiny", "--distillation_beta", "0.3"],
            "expected a number between 0 and 1, with --divergence jsd",
        ),
        (["--teacher", "tiny", "--distillation_temperature", "0"], "expected a number above 0"),
    ],
)
def test_refused_options(options: list[str], sentence: str) -> None:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        parse(options)
    assert sentence in str(caught.value)


@pytest.mark.smoke
def test_a_teacher_that_does_not_fit(data: Path, cache: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_teacher(tmp_path / "teacher"))
    config.vocab_size = 300
    config.save_pretrained(tmp_path / "small")
    small = tmp_path / "small" / "config.json"
    for name, sentence in (("missing", "--teacher missing: --model is 'missing'"), (small, "has only 300")):
        with pytest.raises(liger_dist.LigerDistError) as caught, InThisProcess() as here:
            here.run(train, settings(data, cache, tmp_path / "run", name))
        assert sentence in str(caught.value)


@pytest.mark.smoke
def test_the_plan_has_the_teacher(data: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(
        data, cache, tmp_path, write_teacher(tmp_path / "teacher"), dry_run=True, world_size=4, strategy="fsdp2"
    )
    train(config)
    assert "teacher" in capsys.readouterr().out
