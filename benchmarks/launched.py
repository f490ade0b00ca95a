"""Runs of the launch files: text, a tokenizer, and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
LIMIT = 600
"""seconds of one run"""


def make_text(folder: Path, *, one_document: bool) -> list[str]:
    """Writes sources of Python's standard library as JSON lines, and trains a tokenizer of hardly more than bytes on
    them (about 1.6 million tokens).

    Returns:
        options of ``liger-dist train``.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = ("asyncio", "concurrent", "ctypes", "email", "json", "unittest", "xml")
    files = [file for package in packages for file in sorted((library / package).rglob("*.py"))]
    # Some __init__.py are empty, and no documents.
    documents = [text for file in files if (text := file.read_text(encoding="utf-8")).strip()]
    if one_document:
        documents = ["\n".join(documents)]
    path, tokenizer = folder / "text.jsonl", folder / "tokenizer"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    command = [sys.executable, "-m", "liger_dist_train", "tokenizer", str(tokenizer), str(path)]
    subprocess.run([*command, "--vocab_size", "300"], check=True, capture_output=True, timeout=100)
    return ["--data", str(path), "--eval_fraction", "0", "--tokenizer", str(tokenizer)]


def torchrun(program: list[str], variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Starts a program on all GPUs of this machine, with this process's path, and ends it after :data:`LIMIT`."""
    gpus = str(torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus, *program]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path} | (variables or {})
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            # torchrun ends its processes.
            process.terminate()
            out, err = process.communicate()
            err += f"\nerror: no result within {LIMIT} s\n"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def failure_of(finished: subprocess.CompletedProcess[str]) -> str:
    """Finds the first line with an error, and prints the end of stderr."""
    print(finished.stderr[-3000:], file=sys.stderr)
    lines = [line for line in finished.stderr.splitlines() if "Error: " in line or "error: " in line]
    return (lines or ["it failed"])[0][:200]
