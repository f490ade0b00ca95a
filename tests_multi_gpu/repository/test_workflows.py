"""Workflows of GitHub Actions: each step that runs a command is a target of the Makefile, so that a contributor can run
it, too. Issue forms have the fields that GitHub requires."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_house import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [form for form in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if form.stem != "config"]
COMMAND = re.compile(r'make((?: [a-z-]+)+)(?: [A-Z_]+=(?:"\$[A-Z_]+"|\S+))*')
TRIGGERS = {
    "pull_request": {"pull_request"},
    "main": {"push"},
    "nightly": {"schedule", "workflow_dispatch"},
    "release": {"push"},
}
NEEDED = {
    "pull_request": ["make check", "make smoke"],
    "main": ["make check", "make test", "make site"],
    "nightly": ["make test-all", "make test-newest", "make smoke"],
    "release": ['make release-check test-wheel VERSION="$GITHUB_REF_NAME"', 'make publish VERSION="$GITHUB_REF_NAME"'],
}


def mistakes(workflow: dict[Any, Any], targets: set[str]) -> list[str]:
    """Says what is wrong with a workflow: steps, pins, permissions and limits of time."""
    found = []
    if "permissions" not in workflow or "concurrency" not in workflow:
        found.append("no permissions or no concurrency")
    for name, job in workflow["jobs"].items():
        if "timeout-minutes" not in job:
            found.append(f"{name} has no timeout-minutes")
        for step in job["steps"]:
            if "run" in step:
                command = COMMAND.fullmatch(step["run"])
                if command is None or not set(command[1].split()) <= targets:
                    found.append(f"{name} runs {step['run']!r}; expected make with a target of the Makefile")
            elif not re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]):
                found.append(f"{name} uses {step['uses']}; expected an action of GitHub, pinned by its major version")
    return found


def targets_of(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def read(path: Path) -> dict[Any, Any]:
    workflow = yaml.safe_load(path.read_text())
    assert isinstance(workflow, dict)
    return workflow


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    assert mistakes(read(path), targets_of((ROOT / "Makefile").read_text())) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_starts_and_runs_what_it_is_for(path: Path) -> None:
    workflow = read(path)
    # YAML 1.1 takes the key "on" for true.
    assert workflow[True].keys() == TRIGGERS[path.stem]
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert set(NEEDED[path.stem]) <= set(commands)


def test_there_is_a_workflow_of_each_kind() -> None:
    assert {path.stem for path in WORKFLOWS} == TRIGGERS.keys() == NEEDED.keys()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("make check", "make chekc", "runs 'make chekc'"),
        ("make check", "make check chekc", "runs 'make check chekc'"),
        ("make check", "pip install .", "runs 'pip install .'"),
        ("make check", "make check; curl example.org", "runs 'make check; curl example.org'"),
        ("actions/checkout@v5", "actions/checkout@main", "uses actions/checkout@main"),
        ("actions/checkout@v5", "other/checkout@v5", "uses other/checkout@v5"),
        ("    timeout-minutes: 30\n", "", "has no timeout-minutes"),
        ("permissions:\n  contents: read\n", "", "no permissions"),
    ],
)
def test_planted_mistake_of_a_workflow_is_found(before: str, after: str, words: str) -> None:
    text = (ROOT / ".github" / "workflows" / "main.yml").read_text()
    assert before in text
    found = mistakes(yaml.safe_load(text.replace(before, after)), {"check", "test", "site"})
    assert found
    assert all(words in mistake for mistake in found)


def test_every_python_of_the_classifiers_is_tested() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    classified = set(re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE))
    versions = {version for path in WORKFLOWS for version in re.findall(r'"(3\.\d+)"', path.read_text())}
    assert classified == versions


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_has_what_github_requires(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["type"] in ("textarea", "input", "dropdown", "checkboxes") for field in fields)
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids) > 0


def test_bug_form_asks_for_the_reports_of_the_library() -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    for words in ("liger-dist doctor", "liger-dist explain"):
        assert words in text
