"""``liger-dist doctor``: checks whether this machine is ready, and says how to fix it."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from .functional import linear_cross_entropy
from .sharding.process_groups import compute_device
from .versions import HOSTS, newest_checked, numbers

Verdict = Literal["ok", "note", "wrong"]
NEEDED = {"torch": "2.11", "transformers": "5.0", "triton": "3.5"}
OPTIONAL = {"deepspeed": "0.18", "accelerate": "1.15", "peft": "0.21", "trl": "1.16"}
OF_SOME_MODELS = {
    "mamba_ssm": "Mamba layers",
    "causal_conv1d": "convolutions of Mamba and of linear attention",
    "fla": "linear attention (pip install flash-linear-attention)",
}
"""packages with kernels that transformers calls if they are installed; without them it runs loops in torch"""
LEAST_SHARED_MEMORY = 2**30
LEAST_OPEN_FILES = 4096
MESSAGE_BYTES = 2**28
"""bytes of the timed all-reduce"""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    what: str
    found: str
    verdict: Verdict = "ok"
    """"note": training works, but not as well as it could; "wrong": it will fail, or compute wrong results"""
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Results of all checks. ``print(diagnosis)`` shows them as a table."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return all(finding.verdict != "wrong" for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.what) for finding in self.findings)
        lines = []
        for finding in self.findings:
            mark = {"ok": " ", "note": "-", "wrong": "!"}[finding.verdict]
            lines.append(f"{mark} {finding.what:<{width}}  {finding.found}")
            if finding.remedy:
                lines.append(f"  {'':<{width}}  -> {finding.remedy}")
        wrong = sum(finding.verdict == "wrong" for finding in self.findings)
        lines.append(f"{wrong} wrong" if wrong else "nothing is wrong")
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Checks versions, GPUs, cuDNN, kernels and the host; under torchrun also speed and result of an all-reduce of all
    processes (a collective). For power, clocks and links see ``nvidia-smi``, for DeepSpeed's operators
    ``ds_report``."""
    checks: list[Callable[[], Iterator[Finding]]] = [versions, gpus, cudnn, kernels, kernels_of_models, host]
    if dist.is_initialized():
        checks += [collectives, premul_sum]
    found = tuple(finding for check in checks for finding in check())
    return Diagnosis(of_all_processes(found) if dist.is_initialized() else found)


def of_all_processes(found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """All-gathers findings: returns those of this process, and problems of other processes (a collective)."""
    gathered = [(socket.gethostname(), found)] * dist.get_world_size()
    dist.all_gather_object(gathered, gathered[0])
    of_other_ranks: dict[Finding, str] = {}
    for rank, (name, findings) in enumerate(gathered):
        for finding in findings:
            if finding.verdict != "ok" and finding not in found:
                of_other_ranks.setdefault(finding, f"rank {rank} on {name}")
    return (*found, *(replace(finding, what=f"{finding.what}, {where}") for finding, where in of_other_ranks.items()))


def versions() -> Iterator[Finding]:
    """Checks versions of Python and of the packages that this library is used with."""
    python = platform.python_version()
    is_old = sys.version_info < (3, 10)
    yield Finding("python", python, "wrong" if is_old else "ok", "install Python 3.10 or newer" if is_old else "")
    for name, least in (NEEDED | OPTIONAL).items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            is_needed = name in NEEDED and not (name == "triton" and not torch.cuda.is_available())
            remedy = f"pip install '{name}>={least}'" + (", after torch" if name == "deepspeed" else "")
            yield Finding(name, "not installed", "wrong" if is_needed else "note", remedy)
            continue
        newest = newest_checked(name, found)
        if numbers(found) < numbers(least):
            yield Finding(name, found, "wrong", f"pip install '{name}>={least}'")
        elif name == "transformers" and numbers(found) >= (6,):
            yield Finding(name, found, "wrong", "pip install 'transformers<6': its models' calls may have changed")
        elif newest is not None:
            what = f"{found} is newer than {newest}, the newest that the private names read of it were checked with"
            remedy = f"pip install '{name}<={newest}', or compare a step of your model by liger_dist.verify"
            yield Finding(name, what, "note", remedy)
        else:
            yield Finding(name, found)
    for name in sorted(HOSTS.keys() - OPTIONAL.keys()):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        newest = newest_checked(name, found, HOSTS)
        if newest is None:
            yield Finding(name, found)
        else:
            what = f"{found} is newer than {newest}, the newest that liger_dist was tested with"
            yield Finding(name, what, "note", f"pip install '{name}<={newest}', or compare a step with one without it")


def gpus() -> Iterator[Finding]:
    """Checks number, kind and driver of the GPUs."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    if not torch.cuda.is_available():
        if not driver:
            yield Finding("GPUs", "none", "note", "everything runs on CPUs, for tests; kernels run as plain torch")
        elif torch.version.cuda is None:
            yield Finding("GPUs", f"torch {torch.__version__} is built for CPUs", "wrong", "install torch for CUDA")
        else:
            remedy = f"update the driver ({driver[0]}) for CUDA {torch.version.cuda}, or see CUDA_VISIBLE_DEVICES"
            yield Finding("GPUs", "torch sees none of those that nvidia-smi shows", "wrong", remedy)
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        text = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
        if found.major < 8:
            yield Finding(f"GPU {index}", text, "wrong", "bf16 products need compute capability 8.0 (Ampere) or newer")
        else:
            yield Finding(f"GPU {index}", text)
    yield Finding("CUDA", f"{torch.version.cuda}, driver {driver[0] if driver else 'unknown'}")
    yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING"):
        if os.environ.get(name, "0") != "0":
            yield Finding(name, os.environ[name], "note", f"it makes training slow: unset {name} unless you know why")


def cudnn() -> Iterator[Finding]:
    """Checks whether the loaded cuDNN is older than the package installed with torch; attention kernels use it."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return
    try:
        loaded = torch.backends.cudnn.version()
    except RuntimeError as error:  # torch refuses one that is older than what it was built with.
        remedy = "LD_LIBRARY_PATH points to an older cuDNN: remove that folder from it"
        yield Finding("cuDNN", str(error)[:200], "wrong", remedy)
        return
    found = "none" if loaded is None else f"{loaded // 10000}.{loaded // 100 % 100}.{loaded % 100}"
    try:
        brought = metadata.version(f"nvidia-cudnn-cu{torch.version.cuda.split('.')[0]}")
    except metadata.PackageNotFoundError:
        yield Finding("cuDNN", found)
        return
    if loaded is not None and numbers(found) < numbers(brought):
        remedy = "LD_LIBRARY_PATH points to the older one: remove that folder from it; attention is slower with it"
        yield Finding("cuDNN", f"{found} is loaded, {brought} is installed", "note", remedy)
    else:
        yield Finding("cuDNN", found)


def kernels() -> Iterator[Finding]:
    """Checks the kernels: a small loss and its gradient against plain torch."""
    device = compute_device()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 64, generator=generator).to(device).requires_grad_()
    weight, labels = torch.randn(512, 64, generator=generator).to(device), torch.arange(64, device=device)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    (gradient,) = torch.autograd.grad(expected, hidden)
    way = "Triton" if device.type == "cuda" else "plain torch"
    try:
        loss = linear_cross_entropy(hidden, weight, labels)
        assert isinstance(loss, torch.Tensor)
        (computed,) = torch.autograd.grad(loss, hidden)
    except Exception as fault:  # Whatever a compiler or driver raises is the finding.
        remedy = "is there a C compiler for Triton (CC), and room in its cache (TRITON_CACHE_DIR)?"
        yield Finding("kernels", f"{way}: {type(fault).__name__}: {str(fault)[:200]}", "wrong", remedy)
        return
    error = float((computed - gradient).norm() / gradient.norm())
    if error < 1e-2:
        yield Finding("kernels", f"{way}, relative error of a gradient {error:.1e}")
    else:
        remedy = "the GPU or its compiler computes wrong numbers: clear ~/.triton/cache, update triton, test the GPU"
        yield Finding("kernels", f"{way}, relative error of a gradient {error:.1e}", "wrong", remedy)


def kernels_of_models() -> Iterator[Finding]:
    """Checks optional kernel packages, without which transformers runs layers of some models in slow PyTorch code."""
    if not torch.cuda.is_available():
        return
    missing = {name: what for name, what in OF_SOME_MODELS.items() if importlib.util.find_spec(name) is None}
    if missing:
        remedy = f"install them for models with {'; '.join(missing.values())}; other models do not use them"
        yield Finding("optional model kernels", f"not installed: {', '.join(missing)}", "note", remedy)
    else:
        yield Finding("optional model kernels", ", ".join(OF_SOME_MODELS))
    if "fla" not in missing and torch.cuda.get_device_capability()[0] == 9:
        yield of_linear_attention(metadata.version("triton"))


def of_linear_attention(triton: str) -> Finding:
    """Checks this version of Triton, which flash-linear-attention 0.6 refuses in backwards on Hopper GPUs from 3.4 to
    3.7.0: they would be wrong."""
    is_refused = (3, 4, 0) <= numbers(triton) < (3, 7, 1)
    remedy = "its backward raises an error on Hopper GPUs: pip install 'triton>=3.7.1'" if is_refused else ""
    return Finding("linear attention", f"fla with Triton {triton}", "wrong" if is_refused else "ok", remedy)


def host() -> Iterator[Finding]:
    """Checks host name, shared memory and limits that processes of a node need."""
    name = socket.gethostname()
    try:
        yield Finding("host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        remedy = "processes of several machines could not meet: add it to /etc/hosts or DNS"
        yield Finding("host name", f"{name} is not known ({error})", "note", remedy)
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        is_small = size < LEAST_SHARED_MEMORY
        remedy = "NCCL and data loaders need it: docker run --shm-size=8g, or a Memory volume at /dev/shm"
        text = f"{size / 2**30:.1f} GiB"
        yield Finding("shared memory", text, "note" if is_small else "ok", remedy if is_small else "")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES
    yield Finding("open files", str(soft), "note" if is_low else "ok", "ulimit -n 65536" if is_low else "")
    yield Finding("free disk", f"{shutil.disk_usage('.').free / 2**30:.0f} GiB in {os.getcwd()}")


def collectives() -> Iterator[Finding]:
    """Checks an all-reduce over all processes: its sum, and the bus bandwidth (2 (n-1)/n bytes for each byte)."""
    size = dist.get_world_size()
    device = compute_device()
    ones = torch.ones(MESSAGE_BYTES // 4 if device.type == "cuda" else 2**16, device=device)
    dist.all_reduce(ones)
    is_right = bool((ones == size).all())
    ones.fill_(1)
    _wait(device)
    began, rounds = time.perf_counter(), 5
    for _ in range(rounds):
        dist.all_reduce(ones)
    _wait(device)
    seconds = (time.perf_counter() - began) / rounds
    # Judged after the last all-reduce: one rank alone may have wrong sums.
    if not is_right:
        remedy = "a link or a GPU is broken: try NCCL_P2P_DISABLE=1, then pairs of GPUs, to find it"
        yield Finding("all-reduce", f"wrong sums over {size} processes", "wrong", remedy)
        return
    bus = 2 * (size - 1) / size * ones.nbytes / seconds / 1e9
    yield Finding("all-reduce", f"right over {size} processes, {bus:.1f} GB/s of {ones.nbytes / 2**20:.0f} MiB")


def premul_sum() -> Iterator[Finding]:
    """Checks NCCL's bf16 ``PREMUL_SUM`` all-reduce, which FSDP2 uses after ``set_gradient_divide_factor``; some
    versions return zeros (pytorch/pytorch#190747). This library's strategies do not use it."""
    if dist.get_backend() != "nccl" and "cuda:nccl" not in str(dist.get_backend_config()):
        return
    size = dist.get_world_size()
    ones = torch.ones(2**10, dtype=torch.bfloat16, device=compute_device())
    dist.all_reduce(ones, op=dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
    if bool((ones == 0.5 * size).all()):
        yield Finding("bf16 PREMUL_SUM", f"right over {size} processes")
    else:
        remedy = (
            "gradients are wrong after set_gradient_divide_factor: use reduce_dtype=torch.float32, or do not call it"
        )
        yield Finding("bf16 PREMUL_SUM", f"{float(ones[0]):g} instead of {0.5 * size:g}", "note", remedy)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _output(*command: str) -> str:
    """Returns the standard output of a program; empty if it does not exist, fails, or hangs as nvidia-smi can."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return finished.stdout if finished.returncode == 0 else ""
