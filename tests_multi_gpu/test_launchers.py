"""The examples under the launchers that people use, with two processes on CPUs; and the settings that are shipped."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hosts import printed_by

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PROGRAM = Path(__file__).parent / "programs" / "deepspeed_training.py"
BIN = Path(sys.executable).parent
SETTINGS = sorted((ROOT / "launch" / "accelerate").glob("*.yaml"))


def test_accelerate_launch(tmp_path: Path) -> None:
    launch = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    program = tmp_path / "program.py"
    program.write_text(
        (EXAMPLES / "accelerate_loop.py").read_text() + "\naccelerator.print(accelerator.num_processes)\n"
    )
    (tmp_path / "tiny.py").write_text((EXAMPLES / "tiny.py").read_text())
    *_, loss, processes = printed_by([*launch, str(program)], tmp_path, OMP_NUM_THREADS="1").split()
    assert 5 < float(loss) < 8
    assert processes == "2"


def test_the_deepspeed_launcher_with_only_the_json_changed(tmp_path: Path) -> None:
    """A program that knows nothing of this library."""
    launch = [str(BIN / "liger-dist"), "deepspeed", str(BIN / "deepspeed"), "--num_accelerators", "2"]
    command = [*launch, str(PROGRAM), str(EXAMPLES / "deepspeed.json")]
    printed = printed_by(command, tmp_path, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    assert printed.count("wrapped: True") == 2


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_settings(path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    settings = load_config_from_file(str(path))
    assert isinstance(settings, ClusterConfig)
    assert {field.name for field in fields(ClusterConfig)} >= set(vars(settings))
    assert settings.num_processes == 8
    sharded = {**settings.fsdp_config, **settings.deepspeed_config}
    assert bool(sharded) == (path.stem != "ddp")
    if path.stem.startswith("fsdp"):
        assert sharded["fsdp_version"] == int(path.stem[-1])
    if path.stem.startswith("zero"):
        assert sharded["zero_stage"] == int(path.stem[-1])
