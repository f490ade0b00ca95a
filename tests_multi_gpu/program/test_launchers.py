"""The examples under the launchers that people use, with two processes on CPUs; and the settings that are shipped."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from hosts import printed_by
from training_runs import as_options, config_for, ends_within, metrics_of, published, wait_for

from liger_dist.integrations.deepspeed_section import read_section
from liger_dist_train.config import parse

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PROGRAM = ROOT / "tests_multi_gpu" / "programs" / "deepspeed_training.py"
BIN = Path(sys.executable).parent
LAUNCH = ROOT / "launch"
SETTINGS = sorted((ROOT / "launch" / "accelerate").glob("*.yaml"))


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


class Slurm:
    """Stand-ins for Slurm's commands, which note how they are called.

    Args:
        step: what srun does, in sh; by default it waits for SIGUSR1, takes a while to end, and fails as torchrun does.
    """

    UNTIL_SIGNAL = "trap 'sleep 1; note step ended; exit 1' USR1; while :; do sleep 0.1; done"

    def __init__(self, folder: Path, step: str = UNTIL_SIGNAL, show: str = "", requeue: str = "") -> None:
        self.folder, self._calls, self.running = folder, folder / "calls", folder / "running"
        commands = {
            "scontrol": f'[ $1 = show ] || {{ note scontrol "$@"; {requeue} exit; }}; {show} echo node-7; echo node-8',
            "srun": f'note srun "$@"; note "$NNODES $RDZV_ENDPOINT $RDZV_ID $LOG_DIR"; echo $$ >{self.running}; {step}',
            # All that Slurm signals where it tracks processes by cgroup: the process that srun has started.
            "scancel": f'note scancel "$@"; kill -USR1 $(cat {self.running})',
        }
        for name, does in commands.items():
            (folder / name).write_text(f'#!/bin/sh\nnote() {{ echo "$@" >>{self._calls}; }}\n{does}\n')
            (folder / name).chmod(0o755)

    def variables(self, **variables: str) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "4711",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "64",
            "SLURM_JOB_NODELIST": "node-[7-8]",
            "SLURM_SUBMIT_DIR": str(ROOT),
        } | variables

    def start(self, *options: str, **variables: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHON": sys.executable} | self.variables(**variables)
        command = ["bash", str(LAUNCH / "slurm.sbatch"), *options]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def calls(self) -> list[str]:
        """What has been called so far; srun's own two lines aside."""
        return self._calls.read_text().splitlines()[2:]

    def signalled(self, *options: str, times: int = 1, **variables: str) -> tuple[int, str]:
        """Starts the job, which gets the signal of its time limit; returns its status and errors."""
        job = self.start(*options, **variables)
        wait_for(lambda: self.running.is_file() and self.running.read_text() != "", 20, job)
        with ends_within(20, self.folder):
            for _ in range(times):
                job.send_signal(signal.SIGUSR1)
                time.sleep(0.3)
            errors = job.communicate()[1]
        return job.returncode, errors


def test_slurm_starts_one_torchrun_on_every_node(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, step=f"cat {tmp_path}/calls")
    finished = started("slurm.sbatch", "run.yaml", "--steps", "7", **slurm.variables())
    assert finished.returncode == 0, finished.stderr
    said = finished.stdout.splitlines()
    assert said[0] == "job 4711: 2 nodes, rendezvous at node-7:24711, logs in runs/logs/4711"
    assert (
        said[1]
        == f"srun --kill-on-bad-exit=1 --cpus-per-task=64 bash {LAUNCH}/torchrun_multi_node.sh run.yaml --steps 7"
    )
    assert said[2] == "2 node-7:24711 4711 runs/logs/4711"
    assert slurm.calls() == []


@pytest.mark.parametrize("times", [1, 2])
def test_slurm_requeues_a_job_at_its_time_limit(times: int, tmp_path: Path) -> None:
    """Once, and when the step has ended: not at once when the signal ends the shell's ``wait``."""
    slurm = Slurm(tmp_path)
    status, errors = slurm.signalled(times=times, SLURM_RESTART_COUNT="99")
    assert status == 0, errors
    assert slurm.calls() == ["scancel --signal=USR1 4711"] * times + ["step ended", "scontrol requeue 4711"]


def test_slurm_requeues_one_job_of_an_array(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    status, errors = slurm.signalled(SLURM_ARRAY_JOB_ID="4709", SLURM_ARRAY_TASK_ID="2")
    assert status == 0, errors
    assert slurm.calls() == ["scancel --signal=USR1 4709_2", "step ended", "scontrol requeue 4709_2"]


@pytest.mark.parametrize("status", [0, 3])
def test_slurm_requeues_no_job_that_ends_by_itself(status: int, tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, step=f"exit {status}")
    finished = started("slurm.sbatch", **slurm.variables())
    assert finished.returncode == status
    assert slurm.calls() == []


def test_slurm_requeues_no_job_that_is_complete_when_the_signal_comes(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, step="trap 'exit 0' USR1; while :; do sleep 0.1; done")
    status, errors = slurm.signalled()
    assert status == 0, errors
    assert slurm.calls() == ["scancel --signal=USR1 4711"]


@pytest.mark.parametrize("restarts", ["100", "7"])
def test_slurm_requeues_no_job_for_ever(restarts: str, tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    limit = {} if restarts == "100" else {"MAX_REQUEUES": restarts}
    status, errors = slurm.signalled(**limit, SLURM_RESTART_COUNT=restarts)
    assert status == 2
    assert errors == (
        f"error: job 4711 has started again {restarts} times, as MAX_REQUEUES says; go on with --resume true.\n"
    )
    assert slurm.calls() == ["scancel --signal=USR1 4711", "step ended"]


def test_a_slurm_that_requeues_nothing_is_reported(tmp_path: Path) -> None:
    status, errors = Slurm(tmp_path, requeue="exit 1;").signalled()
    assert status == 2
    assert errors == "error: Slurm does not take job 4711 back; submit it again, with --resume true.\n"


def test_slurm_signals_before_the_run_begins(tmp_path: Path) -> None:
    """As where a job's time is shorter than that of its signal: it would be requeued, and come no further."""
    slurm = Slurm(tmp_path, step="exit 0", show="kill -USR1 $PPID; sleep 0.2;")
    finished = started("slurm.sbatch", **slurm.variables())
    assert finished.returncode == 2
    assert finished.stderr == ("error: the signal of the time limit came before the run began; give a longer --time.\n")
    assert not slurm.running.exists()


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="programs that meet on CPUs")
def test_a_requeued_job_goes_on_where_it_was(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    """With torchrun and the program. The command begins anew, which counts the first time only."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    config = config_for(data, cache, run, overwrite=True, steps=25, eval_fraction=0.0, checkpoint_every=1000)
    # srun's own options aside, and in its place: the process that Slurm signals is torchrun.
    slurm = Slurm(tmp_path, step='while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = show ] && echo localhost || echo "$@" >>{tmp_path}/requeued\n'
    )
    variables = {"SLURM_NNODES": "1", "NPROC_PER_NODE": "2", "LOG_DIR": str(tmp_path / "logs"), "OMP_NUM_THREADS": "1"}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(LAUNCH), *sys.path])}
    with ends_within(200, tmp_path):
        job = slurm.start(*as_options(config), **variables)
        wait_for(lambda: published(run) == [] and 3 < len(metrics_of(run)) < 12, 90, job)
        job.send_signal(signal.SIGUSR1)
        output = "".join(job.communicate())
        assert job.returncode == 0, output
        assert (tmp_path / "requeued").read_text() == "requeue 4711\n", output
        (saved,) = published(run)
        step = int(saved.removeprefix("step-"))
        assert f"stopped after step {step}" in output
        assert 3 < step < 25
        job = slurm.start(*as_options(config), **variables, SLURM_RESTART_COUNT="1")
        output = "".join(job.communicate())
    assert job.returncode == 0, output
    assert f"continues after step {step}" in output
    assert published(run) == [saved, "step-00000025"]
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"


@pytest.mark.nightly
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
