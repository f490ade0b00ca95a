"""The house keeps its rules: each check of ``make check`` fails on a planted violation."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture
def copy_of_the_house(tmp_path: Path) -> Path:
    """Everything that git knows, in another place."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    return tmp_path


def check(folder: Path, *command: str) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'kernels'}"}
    finished = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    return finished.returncode, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("place", "line", "rule"),
    [
        ("kernels/liger_dist_kernels/planted.py", "import torch.distributed as dist\n\ndist.barrier()\n", "TID251"),
        (
            "kernels/liger_dist_kernels/planted.py",
            "from torch.distributed.tensor import DTensor as DTensor\n",
            "TID251",
        ),
        ("kernels/liger_dist_kernels/planted.py", "import liger_dist as liger_dist\n", "TID251"),
        ("liger_dist/planted.py", "import deepspeed as deepspeed\n", "TID253"),
        ("liger_dist/sharding/planted.py", "import transformers as transformers\n", "TID253"),
        ("liger_dist/planted.py", "import os\n", "F401"),
    ],
    ids=["distributed", "dtensor", "liger_dist", "deepspeed", "transformers", "unused"],
)
def test_ruff_refuses(place: str, line: str, rule: str, copy_of_the_house: Path) -> None:
    (copy_of_the_house / place).write_text(line)
    status, output = check(copy_of_the_house, "ruff", "check", "--no-cache", ".")
    assert status != 0
    assert rule in output
    assert "planted.py" in output


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("liger_dist/losses/planted.py", "from liger_dist.sharding import base as base\n"),
        ("liger_dist/sharding/planted.py", "from liger_dist import dispatch as dispatch\n"),
        ("liger_dist/patching/planted.py", "from liger_dist import wrap as wrap\n"),
        ("kernels/liger_dist_kernels/planted.py", "from liger_dist.losses import labels as labels\n"),
        ("liger_dist/errors.py", "from liger_dist.losses import labels as labels\n"),
    ],
    ids=["losses", "sharding", "patching", "kernels", "errors"],
)
def test_an_arrow_that_points_up_is_refused(place: str, line: str, copy_of_the_house: Path) -> None:
    (copy_of_the_house / place).write_text(line)
    status, output = check(copy_of_the_house, "lint-imports", "--no-cache")
    assert status != 0
    assert "Arrows point down BROKEN" in output


def test_losses_know_no_dtensor() -> None:
    """Ruff cannot vary its bans by folder."""
    for file in (ROOT / "liger_dist" / "losses").glob("*.py"):
        assert "distributed.tensor" not in file.read_text(), file


def test_importing_a_kernel_loads_no_sharding() -> None:
    program = (
        "import sys, liger_dist_kernels\n"
        "names = ('liger_dist', 'torch.distributed.tensor', 'torch.distributed.fsdp', 'transformers', 'deepspeed')\n"
        "sys.exit(','.join(n for n in names if n in sys.modules) or None)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_importing_the_library_loads_no_framework() -> None:
    program = (
        "import sys, liger_dist\n"
        "names = ('transformers', 'deepspeed', 'accelerate', 'trl', 'peft', 'lightning', 'datasets')\n"
        "sys.exit(','.join(n for n in names if n in sys.modules) or None)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_every_package_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = set(setup["options"]["packages"].split())
    found = {str(f.parent.relative_to(ROOT)).replace("/", ".") for f in (ROOT / "liger_dist").rglob("__init__.py")}
    assert declared == found | {"liger_dist_kernels"}
    assert not (ROOT / "kernels" / "__init__.py").exists(), "the name 'kernels' belongs to another package"


def test_continuous_integration_runs_the_readmes_commands() -> None:
    commands = (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in ("make check", "make test"):
        assert command in commands
        assert command in readme
