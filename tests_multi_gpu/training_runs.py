"""Runs of the training program on a small real corpus, as its tests make them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
CPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""environment of programs that meet on CPUs"""
sys.path.insert(0, str(LAUNCH))

import recording  # noqa: E402
import torch  # noqa: E402
from models import make_config, make_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402

from liger_dist_train.checkpoint import steps_in  # noqa: E402
from liger_dist_train.config import TrainConfig  # noqa: E402
from liger_dist_train.options import PRESETS  # noqa: E402
from liger_dist_train.tokenizer_training import train_tokenizer  # noqa: E402

MODEL = "model.json"

SOURCES = (
    "argparse",
    "ast",
    "calendar",
    "codecs",
    "copy",
    "dataclasses",
    "datetime",
    "dis",
    "doctest",
    "enum",
    "inspect",
)


def write_corpus(folder: Path) -> Path:
    """Some modules of the standard library, twice over for two splits."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    for copy in range(2):
        for name in SOURCES:
            (folder / f"{name}{copy}.txt").write_text((stdlib / f"{name}.py").read_text())
    return folder


def write_tokenizer(data: Path, folder: Path, entries: int = 601) -> Path:
    """Trained on the corpus; beside it :data:`MODEL`, the preset "tiny" with one layer: layers take most of the time
    of a run, and models of several are compared elsewhere."""
    train_tokenizer([str(data)], entries, folder)
    hidden_size, intermediate_size, _, heads, key_value_heads = PRESETS["tiny"]
    LlamaConfig(
        vocab_size=entries,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        bos_token_id=None,
        eos_token_id=None,
    ).to_json_file(folder.parent / MODEL)
    return folder


def write_base(cache: Path, folder: Path, *, family: str = "llama", tied: bool = False) -> Path:
    """A pretrained model with the tokenizer in ``cache``."""
    model: Any = make_model(family, dtype=torch.float32, tied=tied)
    model.resize_token_embeddings(601)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(cache / "tokenizer").save_pretrained(folder)
    return folder


def write_teacher(folder: Path) -> Path:
    """A pretrained model of other sizes than those of the runs, and with more classes."""
    config = make_config("llama")
    config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers = 640, 48, 64, 3
    config.head_dim = 24
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def config_for(data: Path, cache: Path, output: Path, **changes: Any) -> TrainConfig:
    """A run of 12 steps with the tokenizer in ``cache`` and its model; of a preset with another tokenizer."""
    model = cache / MODEL
    settings: dict[str, Any] = {
        "model": str(model) if model.is_file() and "tokenizer" not in changes else "tiny",
        "data": [str(data)],
        "tokenizer": str(cache / "tokenizer"),
        "cache_dir": str(cache),
        "output_dir": str(output),
        "steps": 12,
        "sequence_length": 64,
        "batch_size": 2,
        "global_batch_size": 8,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "eval_every": 5,
        "eval_batches": 2,
        "checkpoint_every": 6,
        "memory_budget": 2**16,
        "num_proc": 1,
        # On GPUs as on CPUs.
        "dtype": "float32",
        "matmul_precision": "highest",
    }
    return TrainConfig(**(settings | changes))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics_of(folder)]


def published(folder: Path) -> list[str]:
    return steps_in(folder / "checkpoints")


def as_options(config: TrainConfig) -> list[str]:
    """The command line of what differs from the defaults."""
    defaults, options = TrainConfig(), []
    for name, value in vars(config).items():
        if value != getattr(defaults, name):
            options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return options


def torchrun(*options: str, processes: int = 2, program: Path | None = None, **kwargs: Any) -> Any:
    """The program on so many processes of this machine, as a ``Popen`` with pipes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    started = ["-m", "liger_dist_train"] if program is None else [str(program)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    kwargs["env"] = kwargs["env"] | {"PYTHONFAULTHANDLER": "1"} | recording.environment()
    return subprocess.Popen([*command, *started, *options], **(pipes | kwargs))


@contextmanager
def ends_within(limit: float, folder: Path) -> Iterator[None]:
    """Or every process that has ``folder`` in its command says on stderr where it is and dies; the test fails."""
    timer = threading.Timer(limit, abort_all, [folder])
    timer.start()
    try:
        yield
        assert timer.is_alive(), f"more than {limit:.0f} s"
    finally:
        timer.cancel()


def abort_all(folder: Path) -> None:
    """Ends every process that has ``folder`` in its command."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in command.read_bytes():
                for number in (signal.SIGABRT, signal.SIGCONT):
                    os.kill(int(command.parent.name), number)


LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
runpy.run_module("liger_dist_train", run_name="__main__")
"""


def write_limited_program(folder: Path) -> Path:
    """The training program, whose files the kernel lets grow to 100 kB."""
    program = folder / "limited.py"
    program.write_text(LIMITED)
    return program


def wait_for(condition: Callable[[], bool], limit: float, *processes: subprocess.Popen[str]) -> None:
    """Waits until ``condition`` holds, while all processes live."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def workers_of(agent: int) -> list[int]:
    """Process ids that torchrun started, by rank."""
    tasks = Path(f"/proc/{agent}/task").glob("*/children")
    pids = [int(pid) for children in tasks for pid in children.read_text().split()]
    ranks = {pid: re.search(rb"\x00RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes()) for pid in pids}
    return [pid for pid, found in sorted(ranks.items(), key=lambda item: int(item[1][1]) if item[1] else -1) if found]
