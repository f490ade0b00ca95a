"""The examples under the launchers that people use, with two processes on CPUs; and the settings that are shipped."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hosts import printed_by
from training_runs import metrics_of

from liger_dist.integrations.deepspeed_section import read_section
from liger_dist_train.config import parse

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PROGRAM = Path(__file__).parent / "programs" / "deepspeed_training.py"
BIN = Path(sys.executable).parent
LAUNCH = ROOT / "launch"
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
        assert sharded["fsdp_version"] == int(path.stem[4])
    sizes = {"hsdp": 2 * 4, "fsdp2_tp": 4 * 2}
    assert math.prod(settings.parallelism_config.values()) == sizes.get(path.stem, 1)
    if path.stem.startswith("zero"):
        assert sharded["zero_stage"] == int(path.stem[-1])


def started(script: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | variables
    command = ["bash", str(LAUNCH / script), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("script", "variables", "sentence"),
    [
        ("torchrun_single_node.sh", {}, "this machine has no GPU; set NPROC_PER_NODE"),
        ("torchrun_single_node.sh", {"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE is 'two'"),
        ("torchrun_single_node.sh", {"PYTHON": "no-python"}, "there is no program no-python"),
        ("torchrun_single_node.sh", {"PROGRAM": "absent.py", "NPROC_PER_NODE": "1"}, "there is no program absent.py"),
        ("torchrun_multi_node.sh", {"NPROC_PER_NODE": "1"}, "NNODES is ''"),
        ("torchrun_multi_node.sh", {"NPROC_PER_NODE": "1", "NNODES": "2"}, "RDZV_ENDPOINT is ''"),
        (
            "torchrun_multi_node.sh",
            {"NPROC_PER_NODE": "1", "NNODES": "2", "RDZV_ENDPOINT": "no.such.host.invalid:1"},
            "no.such.host.invalid, is not known here",
        ),
        ("slurm.sbatch", {}, "this is no Slurm job"),
        ("deepspeed_multi_node.sh", {"NPROC_PER_NODE": "1"}, "the first word is ''; expected one of zero1 zero2 zero3"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_early(script: str, variables: dict[str, str], sentence: str) -> None:
    finished = started(script, **variables)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: ")
    assert sentence in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


def test_slurm_starts_one_torchrun_on_every_node(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands, which print what they are given."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node-7; echo node-8\n")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $*"; echo "$NNODES $RDZV_ENDPOINT $RDZV_ID $LOG_DIR"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    finished = started("slurm.sbatch", "run.yaml", "--steps", "7", **variables)
    assert finished.returncode == 0, finished.stderr
    said = finished.stdout.splitlines()
    assert said[0] == "job 4711: 2 nodes, meeting at node-7:24711, logs in runs/logs/4711"
    assert (
        said[1]
        == f"srun --kill-on-bad-exit=1 --cpus-per-task=64 bash {LAUNCH}/torchrun_multi_node.sh run.yaml --steps 7"
    )
    assert said[2] == "2 node-7:24711 4711 runs/logs/4711"


def test_the_smoke_test_on_cpus(tmp_path: Path) -> None:
    finished = started(
        "cpu_smoke.sh", "--output_dir", str(tmp_path / "run"), "--cache_dir", str(tmp_path), LOG_DIR=str(tmp_path)
    )
    assert finished.returncode == 0, finished.stderr
    assert "1 node of 2 processes (0 GPUs), up to 0 restarts" in finished.stdout
    said = (
        "fsdp2 on 2 shards, float32; a step is 4 sequences of 64 tokens: 1 micro-batches of 2 on each of 2 data ranks"
    )
    assert said in finished.stdout
    assert len(metrics_of(tmp_path / "run")) == 10


def test_the_manifest_asks_for_what_torchrun_starts() -> None:
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]
    assert policy["nProcPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert container["command"][0] == "torchrun"
    assert container["command"][1:3] == ["-m", "liger_dist_train"]
    config = parse([str(ROOT / container["command"][3]), *container["command"][4:]])
    assert config.resume
    assert (ROOT / config.model).is_file()
    assert config.data
    assert config.tokenizer


@pytest.mark.parametrize("path", sorted({*LAUNCH.glob("*.yaml")} - {LAUNCH / "kubernetes.yaml"}), ids=lambda p: p.stem)
def test_the_program_reads_the_settings(path: Path) -> None:
    assert parse([str(path)]).output_dir.startswith("runs/")


@pytest.mark.parametrize("path", sorted((LAUNCH / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_reads_the_settings(path: Path) -> None:
    settings = json.loads(path.read_text())
    assert read_section(settings) is not None
    assert f"zero{settings['zero_optimization']['stage']}" == path.stem.removesuffix("_offload")
