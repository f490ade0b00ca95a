"""Processes that outlive a test: one process group for a file, functions sent to it by name.

Not for longer, nor for more than :data:`CALLS` calls, over NCCL :data:`CALLS_OVER_NCCL`: torch keeps every group that a
test has made, and a thread of gloo polls for each every 10 ms.

Every call has a time limit. A rank that fails or hangs ends the pool, so that no test can wait for it, and the next
call starts a fresh one.

Over gloo, a call in which SIGSEGV or SIGABRT ends a rank is made once more, on a fresh pool: such a signal came from
gloo's threads twice in a week of runs, and never again in the same test. So is one with an error of :data:`OF_MEMORY`.
:data:`REPEATED` counts these calls, pytest's summary names each, and a run with more than :data:`MOST_REPEATED` fails.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import recording
import torch
import torch.distributed as dist

TIME_LIMIT = 150.0
"""seconds for one call; DeepSpeed compiles an extension in its first one on a machine"""
CALLS = 120
"""after which fresh processes start"""
CALLS_OVER_NCCL = 40
"""the same where a group is NCCL's, whose buffers stay in the GPU's memory: 14 pools filled 139 GiB in 70 calls"""
START_LIMIT = 120.0
"""seconds for the processes to import and meet"""
REPEATED: list[str] = []
"""calls of this process that were made once more, with the signals"""
MOST_REPEATED = 2
"""in one run of pytest"""
OF_GLOO = (-signal.SIGSEGV, -signal.SIGABRT)
"""exit codes after which a call is made once more"""
OF_MEMORY = ("make a tensor into a differentiable view, but the tensor already had autograd metadata",)
"""words of torch's errors that say no more than a signal does: most likely another thread has written into the memory
of a new tensor; this one came once, from ``repr`` of a parameter, and not again in 300 repetitions of the same call"""
WHERE = signal.SIGQUIT
"""asks a process that gives no result for its Python frames; a fatal signal would print those of C++ as well, thousands
of lines"""


PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "liger_dist",
    "liger_dist_train.run",
    "peft",
    "deepspeed.ops",
    "datasets",
    "matplotlib.pyplot",
)
"""what most functions of tests import, 4 seconds of a core for each process that is no fork"""


def forkserver() -> Any:
    """The context whose processes are forks of one that has imported torch and :data:`PRELOADED`."""
    context = mp.get_context("forkserver")
    # transformers imports torchao where it is installed, which asks for the GPU: a fork of that cannot use CUDA.
    context.set_forkserver_preload(["torch", *(() if torch.cuda.is_available() else PRELOADED)])
    return context


def reduce_over_gloo() -> None:
    """Leaves out DeepSpeed's all-reduce through shared memory in this fork: it compiles for 40 seconds on a machine,
    and is looked for in every process for 4."""
    if "deepspeed.ops" in sys.modules:
        sys.modules["deepspeed.ops"].__compatible_ops__["deepspeed_shm_comm"] = False


def shared_buffers(pattern: str = "*") -> set[Path]:
    """What DeepSpeed leaves in memory for processes of one machine, 66 MiB for each."""
    return set(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer{pattern}"))


class MemoryFaultError(RuntimeError):
    """A rank has ended within a call by a signal of :data:`OF_GLOO`, or has raised an error of :data:`OF_MEMORY`."""


class Workers:
    """``world_size`` processes that run the same function, over NCCL where there are enough GPUs; elsewhere over gloo
    and without GPUs."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._calls = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, function: Callable[..., Any], *args: Any, time_limit: float = TIME_LIMIT) -> list[Any]:
        """Calls ``function(*args)`` on every rank and returns the results in the order of ranks."""
        try:
            return self._call(function, args, time_limit)
        except MemoryFaultError as fault:
            if torch.cuda.device_count() >= self.world_size:
                raise
            first, *_, last = str(fault).splitlines()
            REPEATED.append(f"{first} {last}")
        return self._call(function, args, time_limit)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], time_limit: float) -> list[Any]:
        if not all(process.is_alive() for process in self._processes):
            # A thread of an earlier call has ended one of them since.
            self._stop()
        if self._calls >= (CALLS_OVER_NCCL if torch.cuda.device_count() >= self.world_size else CALLS):
            self._stop()
        if not self._processes:
            self._start()
        self._calls += 1
        for pipe in self._pipes:
            pipe.send((recording.current(), function, args))
        return self._collect(time_limit, function.__name__)

    def _start(self) -> None:
        context = forkserver()
        # Held from the start: a free port that is only looked up is another program's by the time they have imported.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        for rank in range(self.world_size):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        self._collect(START_LIMIT, "the start of the process group")

    def _collect(self, time_limit: float, what: str) -> list[Any]:
        deadline = time.monotonic() + time_limit
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                # Each says on stderr where it is.
                for process in self._processes:
                    os.kill(process.pid or 0, WHERE)
                time.sleep(2.0)
                self._stop()
                raise TimeoutError(f"{what}: ranks {sorted(pending.values())} gave no result within {time_limit:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending[pipe]
                try:
                    succeeded, result = pipe.recv()
                except EOFError:
                    self._processes[rank].join(10)
                    code = self._processes[rank].exitcode
                    self._stop()
                    # Where a signal was is on stderr.
                    error = MemoryFaultError if code in OF_GLOO else RuntimeError
                    raise error(f"{what}: rank {rank} failed:\nthe process died, exit code {code}") from None
                if not succeeded:
                    self._stop()
                    error = MemoryFaultError if any(words in result for words in OF_MEMORY) else RuntimeError
                    raise error(f"{what}: rank {rank} failed:\n{result}")
                results[rank] = result
        return [results[rank] for rank in range(self.world_size)]

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._store is not None:
            for path in shared_buffers(f"*_{self._store.port}_*"):
                path.unlink()
        self._processes, self._pipes, self._store, self._calls = [], [], None, 0


class InThisProcess:
    """The same for one process without a process group."""

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(*args)]


def on_cpu(result: Any) -> Any:
    """Moves the tensors of a result to the CPU: ranks have different GPUs, whose memory goes with them."""
    if isinstance(result, torch.Tensor):
        return result.cpu()
    if isinstance(result, dict):
        return {name: on_cpu(value) for name, value in result.items()}
    if type(result) in (list, tuple):
        return type(result)(map(on_cpu, result))
    return result


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    reduce_over_gloo()
    # A signal in a thread of C++ (gloo's, say) has no Python frames: torch prints those of every thread, after
    # faulthandler the Python ones.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    faulthandler.enable()
    faulthandler.register(WHERE)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    on_gpu = torch.cuda.device_count() >= world_size
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        # torch takes a GPU for a rank wherever it sees one. The kernels run in Triton's interpreter then.
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    # Imported modules stay. DeepSpeed collects garbage when an engine starts, which takes a second without this.
    gc.freeze()
    pipe.send((True, None))
    is_first = True
    while True:
        try:
            test, function, args = pipe.recv()
        except EOFError:
            return
        recording.start(test) if is_first else recording.switch(test)
        is_first = False
        try:
            result = (True, on_cpu(function(*args)))
        except Exception:
            result = (False, traceback.format_exc())
        recording.save()
        pipe.send(result)
