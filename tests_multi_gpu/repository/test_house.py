"""Rules of the code: each check of ``make check`` fails on a planted violation, and so do those made here."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


PLANTED = {
    "TID251": ("kernels/liger_dist_kernels/planted.py", "import torch.distributed as dist\n\ndist.barrier()\n"),
    "TID253": ("liger_dist/sharding/planted.py", "import transformers as transformers\n"),
    "F401": ("liger_dist/planted.py", "import os\n"),
}
"""a violation of each kind of rule of ruff: a kernel that knows processes, a framework at the top of a module, and
those that ruff has on its own"""


def test_ruff_refuses(copy_of_the_house: Path) -> None:
    for place, line in PLANTED.values():
        (copy_of_the_house / place).write_text(line)
    status, output = check(copy_of_the_house, "ruff", "check", "--no-cache", "--output-format", "concise", ".")
    assert status != 0
    for rule, (place, _) in PLANTED.items():
        assert re.search(rf"^{re.escape(place)}:\d+:\d+: {rule} ", output, re.MULTILINE), output


def test_an_import_of_a_higher_layer_is_refused(copy_of_the_house: Path) -> None:
    planted = copy_of_the_house / "liger_dist" / "losses" / "planted.py"
    planted.write_text("from liger_dist.sharding import base as base\n")
    status, output = check(copy_of_the_house, "lint-imports", "--no-cache")
    assert status != 0
    assert "lower layers never import higher ones BROKEN" in output


def imports_of(file: Path, root: Path) -> set[str]:
    """Modules of the library that a file imports at its top level, under TYPE_CHECKING too."""
    module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    statements = list(ast.parse(file.read_text()).body)
    for statement in statements:
        if isinstance(statement, ast.If):
            statements += statement.body
        elif isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
            source = ".".join([*above, *filter(None, [statement.module])])
            for alias in statement.names:
                target = root / f"{source}.{alias.name}".replace(".", "/")
                is_module = target.is_dir() or target.with_suffix(".py").is_file()
                found.add(f"{source}.{alias.name}" if is_module else source)
    return {name for name in found - {module} if name.startswith("liger_dist")}


def cycle_of(root: Path) -> list[str]:
    """A cycle of imports among the modules below ``root``; empty without one."""
    files = list((root / "liger_dist").rglob("*.py"))
    modules = {".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): f for f in files}
    graph = {module: sorted(imports_of(file, root) & modules.keys()) for module, file in modules.items()}
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for following in graph[module]:
            found = search(following, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    return next(filter(None, (search(module, []) for module in graph)), [])


def test_no_import_cycle() -> None:
    assert not cycle_of(ROOT)


def test_a_planted_import_cycle_is_found(copy_of_the_house: Path) -> None:
    file = copy_of_the_house / "liger_dist" / "fused_head" / "logits.py"
    planted = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from .loss_call import LossCall\n"
    file.write_text(file.read_text() + planted)
    cycle = cycle_of(copy_of_the_house)
    assert {"liger_dist.fused_head.logits", "liger_dist.fused_head.loss_call"} <= set(cycle)


def test_no_function_is_longer_than_60_lines() -> None:
    """Outside of kernels, without decorators and docstring."""
    for folder in ("liger_dist", "launch", "benchmarks", "tests_multi_gpu"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.FunctionDef):
                    continue
                first = node.body[0]
                has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                docstring = first.end_lineno - first.lineno + 1 if has_docstring and first.end_lineno else 0
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1 - docstring
                assert length <= 60, f"{file.relative_to(ROOT)}: {node.name} has {length} lines"


NO_VERBS = {"This", "Its", "Loss", "Class", "Less", "Forwards", "Logits", "Weights", "Rows", "Labels"}
OPENINGS = {"Within", "True", "False", "Raises", "Args", "See"}
"""of context managers, booleans, and functions of which only errors, arguments or a note need words"""


def without_verb(source: str) -> list[str]:
    """Functions whose docstring does not begin with a verb; properties are nouns."""
    found = []
    for node in ast.walk(ast.parse(source)):
        docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if docstring is None or any("property" in ast.unparse(one) for one in node.decorator_list):  # type: ignore[attr-defined]
            continue
        word = re.split(r"[^\w-]", docstring, maxsplit=1)[0]
        if word not in OPENINGS and (word in NO_VERBS or not re.fullmatch(r"[A-Z][a-z-]+s", word)):
            found.append(f"{node.name}: {docstring[:60]}")  # type: ignore[attr-defined]
    return found


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    for folder in ("liger_dist", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not without_verb(file.read_text()), file
    assert without_verb('def f():\n    """The sum."""\n') == ["f: The sum."]


@pytest.mark.parametrize(
    "banned", [r"\bexec\(", r"gc\.get_objects", r"unittest", r"get_ident", r"inspect\.getsource"], ids=str
)
def test_the_library_does_not_use(banned: str) -> None:
    for file in (ROOT / "liger_dist").rglob("*.py"):
        assert not re.search(banned, file.read_text()), file


def test_the_training_program_imports_only_what_is_public() -> None:
    """Names that the API page lists, of ``liger_dist`` or of one of its modules."""
    page = (ROOT / "docs" / "reference.rst").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: (liger_dist\S+)$", page, re.MULTILINE))
    for file in (ROOT / "launch").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"liger_dist(\.|$)", node.module or ""):
                is_integration = (node.module or "").startswith("liger_dist.integrations.")
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                is_command = (file.name, node.module) == ("command.py", "liger_dist.cli")
                assert is_integration or is_command or names <= listed, f"{file.name}: {names - listed}"


def test_public_functions_do_not_return_any() -> None:
    """Those that ``liger_dist`` exports, and those of the integrations."""
    package = (ROOT / "liger_dist" / "__init__.py").read_text()
    exported = re.findall(r"^from \.(\S+) import (\w+) as", package, re.MULTILINE)
    files = [(ROOT / "liger_dist" / f"{module.replace('.', '/')}.py", name) for module, name in exported]
    files += [(file, None) for file in (ROOT / "liger_dist" / "integrations").rglob("*.py")]
    checked = 0
    for file, exported_name in files:
        if not file.exists():
            continue  # STRATEGIES, of the package itself
        for node in ast.parse(file.read_text()).body:
            is_function = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if is_function and exported_name in (None, node.name):
                assert node.returns is not None, f"{file.name}: {node.name}"
                assert "Any" not in ast.unparse(node.returns).replace("AnyTrainer", ""), f"{file.name}: {node.name}"
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("name", ["distributed.tensor", "distributed.fsdp", "ds_id", "deepspeed"])
def test_losses_know_no_framework(name: str) -> None:
    """Ruff cannot vary its bans by folder."""
    for file in (ROOT / "liger_dist" / "losses").glob("*.py"):
        assert name not in file.read_text(), file


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
    assert declared == found | {"liger_dist_kernels", "liger_dist_train"}
    assert not (ROOT / "kernels" / "__init__.py").exists(), "the name 'kernels' belongs to another package"


@pytest.mark.smoke
def test_continuous_integration_runs_the_readmes_commands() -> None:
    commands = (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in ("make check", "make test"):
        assert command in commands
        assert command in readme


FACTORIES = {
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"),
}
"""of torch, whose tensors are on the CPU unless a device is given"""
ON_GPUS = ("kernels", "losses", "fused_layers", "fused_head", "conformance", "sharding")
"""folders that ``make test-gpu`` runs, and the modules beside them"""


def without_device(source: str) -> list[int]:
    """Lines on which a factory of torch is called without a device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(
        call.lineno
        for call in calls
        if ast.unparse(call.func) in {f"torch.{name}" for name in FACTORIES}
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    )


@pytest.mark.smoke
def test_tensors_of_tests_are_on_the_device_of_the_tests() -> None:
    """A test that passes on a CPU alone is found there: ``on_device`` builds tensors, or a call names its device."""
    tests = ROOT / "tests_multi_gpu"
    beside = [path for path in tests.glob("*.py") if path.stem not in HOST_MODELS]
    files = [*beside, *(path for folder in ON_GPUS for path in (tests / folder).glob("*.py"))]
    found = {path.relative_to(tests): lines for path in files if (lines := without_device(path.read_text()))}
    assert not found, "build these tensors by on_device, or name their device"
    assert without_device("torch.ones(2)\ntorch.ones(2, device='cpu')\nrandom.rand(2)\n") == [1]


HOST_MODELS = ("verl_engines", "openrlhf_actors", "skyrl_models")
"""modules with engines of other frameworks, which build their own tensors"""


MOST_MECHANISMS = 44


def test_files_of_tests_have_different_names() -> None:
    """pytest collects only one of two files of one name, because folders of tests are no packages."""
    names = [file.name for file in (ROOT / "tests_multi_gpu").rglob("*.py") if file.name != "__init__.py"]
    assert sorted(set(names)) == sorted(names)


def test_mechanisms_are_few_and_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Mechanisms")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| [^*].*`", line)]
    files = [file for row in rows for file in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(files) >= len(rows) <= MOST_MECHANISMS, len(rows)
    assert not [file for file in files if not (ROOT / "liger_dist" / file).is_file()]
