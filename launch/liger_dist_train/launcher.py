"""Starts several processes of a run on this machine by torchrun, and says at the end what is saved. Imports no
torch."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .options import TrainOptions
from .parser import parse_as

PROCESSES = ("--nproc_per_node", "--nproc-per-node")
LAST_ERROR = "LIGER_DIST_LAST_ERROR"
"""environment: file for the message of a process that fails, which is printed again below torchrun's"""


def processes_of(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Takes ``--nproc_per_node N`` out of the arguments of a run; None where it is not given."""
    rest, found = list[str](), None
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if name in PROCESSES:
            found = value if has_value else next(words, "")
        else:
            rest.append(word)
    return found, rest


def launch(processes: str, arguments: list[str]) -> int:
    """Runs ``liger-dist train`` in ``processes`` processes (a number, or what torchrun takes: gpu, auto); returns the
    exit status. A signal goes to torchrun, which hands it to them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    with tempfile.TemporaryDirectory() as folder:
        last_error = Path(folder) / "error"
        environment = os.environ | {LAST_ERROR: str(last_error)}
        process = subprocess.Popen([*command, "-m", "liger_dist_train", *arguments], env=environment)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: process.send_signal(number))
        status = process.wait()
        if status:
            error = last_error.read_text() if last_error.is_file() else ""
            lines = [error, outcome(arguments) or ("" if error else "nothing is saved")]
            print("\n".join(filter(None, lines)), file=sys.stderr)
    return status if status >= 0 else 128 - status


def outcome(arguments: list[str]) -> str:
    """Says what a run that failed has saved, and the options that go on with it; empty for nothing."""
    try:
        folder = Path(parse_as(arguments, TrainOptions).output_dir)
    except Exception:  # The arguments are what is wrong, which the error says.
        return ""
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step-????????"))
    if not saved:
        return ""
    options = shlex.join([*_without_overwrite(arguments), "--resume", "true"])
    return f"saved: {folder / 'checkpoints' / saved[-1]}; to go on: the same command with {options}"


def _without_overwrite(arguments: list[str]) -> list[str]:
    found, skips = list[str](), False
    for word in arguments:
        is_value = skips and not word.startswith("--")
        skips = word in ("--overwrite", "--resume")
        if not (is_value or skips or word.startswith(("--overwrite=", "--resume="))):
            found.append(word)
    return found
