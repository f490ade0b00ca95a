"""The training program with a teacher: one curve under every strategy, its loss, what it refuses, and its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import InThisProcess, Workers
from models import make_config
from training_runs import LAUNCH, MODEL, config_for, losses_of, metrics_of
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist_train.config import TrainConfig, parse
from liger_dist_train.run import train

JSD = {"divergence": "jsd", "distillation_beta": 0.3, "distillation_temperature": 2.0, "hard_weight": 0.25}
WAYS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "vocab_parallel": {"strategy": "fsdp2", "lm_head": "vocab_parallel"},
    "fsdp1": {"strategy": "fsdp1"},
    "ddp": {"strategy": "ddp"},
    "tp": {"strategy": "tp"},
    "zero3": {"strategy": "deepspeed", "deepspeed": str(LAUNCH / "deepspeed" / "zero3.json")},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of other sizes than the student, with its weights."""
    folder = tmp_path_factory.mktemp("teacher")
    config = make_config("llama")
    config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers = 640, 48, 64, 3
    config.head_dim = 24
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(teacher: Path, data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses in one process."""
    folder = tmp_path_factory.mktemp("alone")
    with InThisProcess() as here:
        here.run(train, settings(data, cache, folder, teacher, strategy="none"))
    return losses_of(folder)


def settings(data: Path, cache: Path, folder: Path, teacher: Path | str, **changes: Any) -> TrainConfig:
    return config_for(
        data, cache, folder, teacher=str(teacher), **(JSD | {"steps": 4, "checkpoint_every": 2} | changes)
    )


@pytest.mark.nightly(way=["vocab_parallel", "fsdp1", "ddp", "tp", "zero3"])
@pytest.mark.parametrize("way", WAYS)
def test_every_strategy_draws_the_same_curve(
    way: str, alone: list[float], teacher: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Stopped half-way and resumed."""
    config = settings(data, cache, tmp_path, teacher, **WAYS[way])
    workers_2.run(train, settings(data, cache, tmp_path, teacher, **(WAYS[way] | {"stop_at_step": 2})))
    assert len(losses_of(tmp_path)) == 2
    workers_2.run(train, settings(data, cache, tmp_path, teacher, **(WAYS[way] | {"resume": True})))
    assert losses_of(tmp_path) == pytest.approx(alone, rel=1e-5)
    assert config.steps == len(alone)


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
def test_a_teacher_that_does_not_fit(data: Path, cache: Path, teacher: Path, tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(teacher).config
    config.vocab_size = 300
    config.save_pretrained(tmp_path / "small")
    small = tmp_path / "small" / "config.json"
    for name, sentence in (("missing", "--teacher missing: --model is 'missing'"), (small, "has only 300")):
        with pytest.raises(liger_dist.LigerDistError) as caught, InThisProcess() as here:
            here.run(train, settings(data, cache, tmp_path / "run", name))
        assert sentence in str(caught.value)


@pytest.mark.smoke
def test_the_plan_has_the_teacher(
    data: Path, cache: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(data, cache, tmp_path, teacher, dry_run=True, world_size=4, strategy="fsdp2")
    train(config)
    assert "teacher" in capsys.readouterr().out
