"""Starts several processes of a run on this machine by torchrun, and says at the end what is saved. Imports no
torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
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
    if not (processes.isdigit() and int(processes)) and processes not in ("auto", "gpu", "cpu"):
        print(f"error: --nproc_per_node is {processes!r}; expected a number, or gpu.", file=sys.stderr)
        return 2
    began = time.time()
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
            lines = [error, outcome(arguments, began) or ("" if error else "nothing is saved")]
            print("\n".join(filter(None, lines)), file=sys.stderr)
    return status if status >= 0 else 128 - status


def outcome(arguments: list[str], since: float) -> str:
    """Says what a run that failed has saved, and how to go on; empty for nothing.

    Args:
        since: when it began, in seconds since 1970.
    """
    try:
        folder = Path(parse_as(arguments, TrainOptions).output_dir)
    except Exception:  # The arguments are what is wrong, which the error says.
        return ""
    checkpoints = (folder / "checkpoints").glob("step-????????")
    saved = sorted(path for path in checkpoints if path.stat().st_mtime >= since)
    if not saved:
        return ""
    instead = " instead of --overwrite" if any(word.startswith("--overwrite") for word in arguments) else ""
    return f"saved: {saved[-1]}; to go on: the same command with --resume true{instead}"
