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


def make_text(folder: Path, *, one_document: bool) -> list[str]:
    """Packages of Python itself, and a tokenizer of hardly more than bytes, so that they are over a million tokens;
    options of the training program."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = ("asyncio", "concurrent", "ctypes", "email", "json", "unittest", "xml")
    files = [file.read_text() for package in packages for file in sorted((library / package).rglob("*.py"))]
    documents = ["\n".join(files)] if one_document else files
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    command = [sys.executable, str(ROOT / "launch" / "demo" / "make_tokenizer.py"), str(tokenizer), str(text)]
    subprocess.run([*command, "--vocab_size", "300"], check=True, capture_output=True, timeout=100)
    return ["--data", str(text), "--eval_fraction", "0", "--tokenizer", str(tokenizer)]


def torchrun(program: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """On all GPUs of this machine, with this process's path."""
    gpus = str(torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus, *program]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


def failure_of(finished: subprocess.CompletedProcess[str]) -> str:
    """The line with the first error; prints the end of its stderr."""
    print(finished.stderr[-3000:], file=sys.stderr)
    lines = [line for line in finished.stderr.splitlines() if "Error: " in line or "error: " in line]
    return (lines or ["it failed"])[0][:200]
