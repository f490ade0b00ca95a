"""Wheel and sdist: built from a copy, installed alone, and used from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_house import ROOT
from test_house import copy_of_the_house as copy_of_the_house

PROGRAM = """
import sys
from pathlib import Path
import torch, transformers
import liger_dist, liger_dist_kernels
for module in (liger_dist, liger_dist_kernels):
    folder = Path(module.__file__).parent
    assert folder.parent == Path(sys.argv[1]), folder
    assert (folder / "py.typed").exists()
sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=101, **sizes))
ids = torch.arange(24).reshape(2, 12)
expected = model(input_ids=ids, labels=ids).loss
model = liger_dist.wrap(model, "none")
output = model(input_ids=ids, labels=ids)
assert not hasattr(output, "logits")
assert abs(float(output.loss) - float(expected)) < 1e-5
output.loss.backward()
assert (Path(sys.argv[1]) / "liger_dist" / "integrations" / "startup" / "sitecustomize.py").exists()
print(liger_dist.__version__)
"""


def run(*command: str, folder: Path, **environment: str) -> str:
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=150, env=os.environ | environment, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture
def installed(copy_of_the_house: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the wheel's contents; the wheel is built from the sdist."""
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("target")
    backend = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    run(sys.executable, "-c", backend, "build_sdist", str(built), folder=copy_of_the_house)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(built, filter="data")
    (unpacked,) = (path for path in built.iterdir() if path.is_dir())
    run(sys.executable, "-c", backend, "build_wheel", str(built), folder=unpacked)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.mark.nightly
def test_it_works_alone(installed: Path, tmp_path: Path) -> None:
    alone = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    version = run(sys.executable, "-c", PROGRAM, str(installed), folder=tmp_path, **alone)
    expected = (ROOT / "liger_dist" / "_version.py").read_text().split('"')[1]
    assert version.strip().splitlines()[-1] == expected
    (metadata,) = installed.glob("liger_dist-*.dist-info")
    assert "liger-dist = liger_dist_train.command:main" in (metadata / "entry_points.txt").read_text()
    assert f"Version: {expected}\n" in (metadata / "METADATA").read_text()
    assert "kernels" in run(sys.executable, "-m", "liger_dist", "doctor", folder=tmp_path, **alone)
