"""docs/combinations.md is what the tests say: its page, and the tests that its cells name."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import combinations_page
import pytest
from combinations_page import FEATURES, LAYOUTS, PAGE, REFUSALS, TESTS, Refusal, Test, function_of, module_of

QUESTIONS = {
    ("4 bits", "MTP"): "2",
    ("LoRA", "packed"): "3",
    ("LoRA", "ep"): "T",
    ("float8", "LoRA"): "2",
    ("distill", "vocab"): "2",
    ("RL", "sp"): "2",
    ("ckpt", "compile"): "2",
    ("offload", "4 bits"): "2",
}
"""pairs that users ask for, and a layout in which they are exact"""


def test_the_page_is_what_the_tests_say(request: pytest.FixtureRequest) -> None:
    rendered = combinations_page.render()
    if request.config.getoption("--write-pages"):
        PAGE.write_text(rendered)
    assert PAGE.read_text() == rendered, "run `make combinations` and read what has changed"
    assert len(rendered.split()) < 3000


def test_questions_of_users_have_an_answer() -> None:
    exact = combinations_page.read().exact
    for pair, sign in QUESTIONS.items():
        (ordered,) = (found for found in combinations_page.pairs_of(pair) if found[0] != found[1])
        assert sign in exact[ordered], pair


def test_names_on_the_page_are_features_and_layouts() -> None:
    for row in (*TESTS, *REFUSALS):
        assert set(row.features.split(", ")) <= FEATURES.keys(), row
        assert set(row.layouts) <= LAYOUTS.keys(), row
    for test in TESTS:
        assert list(test.combinations()), test


@pytest.mark.parametrize("row", [*TESTS, *REFUSALS], ids=lambda row: f"{row.node.split('::')[1]}: {row.features}")
def test_cells_name_tests_that_run(row: Test | Refusal) -> None:
    """Marks of tiers and of GPUs are no skips; a skip without a package is one of this machine."""
    function = function_of(row.node)
    skips = [mark for mark in getattr(function, "pytestmark", ()) if mark.name in ("skip", "xfail")]
    assert not skips
    if isinstance(row, Test):
        return
    source = sources(function, module_of(row.node.split("::")[0]))
    assert "pytest.raises" in source or "except liger_dist.LigerDistError" in source or "refused: " in source
    assert row.words in unescaped(source)


def sources(function: Any, module: Any) -> str:
    """The text of a test, of the functions of the tests that it names, and of its tables."""
    text, waiting, seen = "", [function.__name__], set[str]()
    texts = [inspect.getsource(module)]
    names = {node.module for node in ast.walk(ast.parse(texts[0])) if isinstance(node, ast.ImportFrom)}
    for name in ("quantized", "cells"):
        texts += [inspect.getsource(__import__(name))] if name in names else []
    defined = {}
    for source in texts:
        for node in ast.parse(source).body:
            segment = ast.get_source_segment(source, node) or ""
            targets = [getattr(node, "name", "")] if hasattr(node, "name") else []
            targets += [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            targets += [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []
            marks = "".join(ast.unparse(mark) for mark in getattr(node, "decorator_list", ()))
            defined |= dict.fromkeys(targets, marks + segment)
    while waiting:
        name = waiting.pop()
        if name in defined and name not in seen:
            seen.add(name)
            text += defined[name]
            waiting += re.findall(r"\w+", defined[name])
    return text


def unescaped(source: str) -> str:
    return source.replace('\\"', '"').replace("\\'", "'")
