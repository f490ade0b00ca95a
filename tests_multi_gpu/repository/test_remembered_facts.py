"""Everything that the library remembers between two moments has a row in docs/remembered_facts.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "remembered_facts.md"
CACHES = {"lru_cache", "cache", "cached_property"}
CONTAINERS = {
    "dict",
    "list",
    "set",
    "defaultdict",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
}
ATTRIBUTE = re.compile(r"_liger_dist(_[a-z0-9_]+)?")


def sources() -> Iterator[Path]:
    for folder in ("liger_dist", "kernels/liger_dist_kernels"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def remembered() -> dict[str, str]:
    """What keeps a fact, by its name in the page, and where it is."""
    found = {}
    for path in sources():
        module = path.stem if path.stem != "__init__" else path.parent.name
        for name in in_module(ast.parse(path.read_text())):
            found[f"{module}.{name}"] = str(path.relative_to(ROOT))
    return found


def in_module(tree: ast.Module) -> Iterator[str]:
    """Names of caches, of containers and context variables of a module, of attributes that it sets on modules and
    tensors of others, and of what a trial has found."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_kept(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(called_name(one) in CACHES for one in node.decorator_list):
            yield node.name
        if isinstance(node, ast.ClassDef) and node.name.endswith("Match"):
            yield node.name
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ATTRIBUTE.fullmatch(node.value):
            yield node.value


def is_kept(value: ast.expr | None) -> bool:
    """True for a container that is empty at first, and for a context variable."""
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    name = called_name(value)
    return name == "ContextVar" or (name in CONTAINERS and not value.args)


def called_name(node: ast.expr) -> str:
    """The last part of the name of a function, under a subscript and a call."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node).rpartition(".")[2]


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| fact")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def listed() -> set[str]:
    return {name for row in rows() for name in re.findall(r"`([^`]+)`", row[1])}


def test_every_remembered_fact_has_a_row() -> None:
    missing = {name: path for name, path in remembered().items() if name not in listed()}
    assert not missing, f"not in {PAGE.name}: {missing}"


def test_every_row_is_of_something_that_exists() -> None:
    # Beside what the walk finds, a row may name an attribute of a class: module.Class.attribute.
    texts = {path.stem if path.stem != "__init__" else path.parent.name: path.read_text() for path in sources()}
    for name in listed() - remembered().keys():
        module, _, rest = name.partition(".")
        assert module in texts, name
        assert all(re.search(rf"\b{re.escape(part)}\b", texts[module]) for part in rest.split(".")), name


def test_rows_say_what_happens() -> None:
    assert all(len(row) == 4 and all(row) for row in rows())


@pytest.mark.parametrize(
    "source",
    [
        "_KEPT: dict[str, int] = {}",
        "_KEPT = WeakKeyDictionary()",
        "_KEPT = ContextVar('kept', default=None)",
        "@functools.lru_cache(maxsize=None)\ndef _KEPT(): ...",
        "class A:\n    @cached_property\n    def _KEPT(self): ...",
    ],
)
def test_a_new_cache_is_noticed(source: str) -> None:
    assert list(in_module(ast.parse(source))) == ["_KEPT"]
