"""Commands of pages and examples in processes that have imported torch and transformers already.

A Python program spends 5 seconds of a core on imports, and so does each of its ranks. Here every rank is a fork of a
process with these imports; it has its own folder, environment and arguments, and joins its process group by itself.
torchrun's part is not tested so: the tests of the launchers start it.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import recording
import torch.distributed as dist
from harness import WHERE, forkserver, reduce_over_gloo

TIME_LIMIT = 200.0
"""seconds for one command"""
TORCHRUN = "torchrun"
TWO_RANKS = [TORCHRUN, "--standalone", "--nproc-per-node", "2"]


@dataclass(frozen=True)
class Ended:
    """Ranks of a program that has ended."""

    codes: list[int]
    """exit status of each rank, negative for a signal"""
    said: list[str]
    """stdout and stderr of each rank"""

    @property
    def failed(self) -> bool:
        return any(self.codes)

    @property
    def all_said(self) -> str:
        return "\n".join(self.said)


def run_command(words: list[str], folder: Path, **variables: str) -> str:
    """Runs a command as :func:`run_program` does and returns what rank 0 says; every rank has to end with status 0."""
    ended = run_program(words, folder, **variables)
    everything = "\n".join(f"[rank {rank}] {text[-3000:]}" for rank, text in enumerate(ended.said))
    assert not ended.failed, f"{words} ended with {ended.codes}:\n{everything}"
    return ended.said[0]


def run_program(words: list[str], folder: Path, **variables: str) -> Ended:
    """Runs ``python``, ``liger-dist`` or ``torchrun --nproc-per-node N`` in ``folder`` until every rank has ended.

    A rank that fails ends the others, as torchrun does; a program that takes longer than :data:`TIME_LIMIT` fails with
    the Python frames of its ranks.
    """
    program, *rest = words
    ranks = 0
    if program == TORCHRUN:
        ranks = int(rest[rest.index("--nproc-per-node") + 1])
        rest = [word for word in rest[: rest.index("--nproc-per-node")] if word != "--standalone"] + rest[
            rest.index("--nproc-per-node") + 2 :
        ]
    elif program == "liger-dist":
        rest = ["-m", "liger_dist_train.command", *rest]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [folder / f".output-{store.port}-{rank}" for rank in range(max(1, ranks))]
    processes = []
    for rank, output in enumerate(outputs):
        of_rank = variables | (_as_torchrun_sets(rank, ranks, store.port) if ranks else {})
        # Not a daemon, which may start no processes.
        process = forkserver().Process(
            target=_become, args=(rest, str(folder), str(output), of_rank, recording.current())
        )
        process.start()
        processes.append(process)
    ended = _wait_for(processes)
    said = [output.read_text() for output in outputs]
    for output in outputs:
        output.unlink()
    assert ended, f"{words} gave no result within {TIME_LIMIT:.0f} s:\n" + "\n".join(said)
    return Ended([process.exitcode for process in processes], said)


def _as_torchrun_sets(rank: int, ranks: int, port: int) -> dict[str, str]:
    # Without TORCHELASTIC_RUN_ID, which tells a program that its parent is torchrun.
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _wait_for(processes: list[Any]) -> bool:
    """False if the time limit passed first; no process is left in either case. A rank that fails ends the others."""
    deadline, pending = time.monotonic() + TIME_LIMIT, list(processes)
    while pending:
        wait([process.sentinel for process in pending], timeout=max(0.0, deadline - time.monotonic()))
        has_failed = any(process.exitcode for process in pending if not process.is_alive())
        pending = [process for process in pending if process.is_alive()]
        if has_failed:
            # The others may see it themselves, and say so.
            wait([process.sentinel for process in pending], timeout=2.0)
            break
        if pending and time.monotonic() >= deadline:
            for process in pending:
                os.kill(process.pid, WHERE)
            time.sleep(2.0)
            break
    for process in pending:
        process.kill()
    for process in processes:
        process.join()
    return not pending or has_failed


def _become(words: list[str], folder: str, output: str, variables: dict[str, str], test: str) -> None:
    """Makes this process the program: ``-m module`` or a file, with its arguments."""
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    faulthandler.register(WHERE)
    os.environ.update(variables)
    reduce_over_gloo()
    os.chdir(folder)
    sys.path.insert(0, folder)
    recording.start(test)
    try:
        _run(words)
    finally:
        recording.save()


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        _, module, *arguments = words
        sys.argv = [module, *arguments]
        if module == "liger_dist_train.command":
            # The script that is installed as liger-dist.
            from liger_dist_train.command import main

            sys.exit(main())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
