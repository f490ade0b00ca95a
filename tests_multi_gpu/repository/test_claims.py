"""What pages, messages and CHANGELOG say of the code, compared with the code: names, numbers, files, options."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cells import PRINCIPAL
from training_runs import ROOT

import liger_dist
from liger_dist.explain import Explanation
from liger_dist.fused_layers import KINDS, LayerReport
from liger_dist_train.config import TrainConfig
from liger_dist_train.options import PRESETS
from liger_dist_train.scoring import ScoreConfig
from liger_dist_train.show import ShowConfig

sys.path.insert(0, str(ROOT / "tests_multi_gpu" / "conformance"))
from test_hybrids import HYBRID_MODELS, cells
from test_packed_families import HYBRIDS, OF_FP32, TOLERANCE, USUAL

DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for part in ("", "hosts/", "benchmarks/") for page in sorted(DOCS.glob(f"{part}*.md"))),
]
GENERATED = ("combinations.md", "families.md", "packed_families.md", "support_matrix.md", "benchmarks.md")
LAUNCH = ROOT / "launch"
PROGRAM = LAUNCH / "liger_dist_train"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def section(text: str, heading: str) -> str:
    """The text below a heading, up to the next one of this level or a higher one."""
    level = heading.split(" ")[0]
    return re.split(rf"^#{{1,{len(level)}}} ", text.split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]


def cells_of(text: str) -> Iterator[list[str]]:
    """The cells of each row of tables, heads included."""
    for line in text.splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line[2:-2].split(" | ")]


def code(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_pages_by_hand_are_short() -> None:
    """README and all pages that no command writes; signs of tables are no words."""
    words = {
        file.relative_to(ROOT).as_posix(): sum(bool(re.search(r"\w", word)) for word in file.read_text().split())
        for file in (ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("hosts/*.md"))
        if file.parent != DOCS or file.name not in GENERATED
    }
    assert len(words) > 50
    assert sum(words.values()) <= 45_000, dict(sorted(words.items(), key=lambda item: -item[1])[:10])


def test_the_api_page_has_the_signatures_of_the_code() -> None:
    rows = [
        cells for cells in cells_of(section(page("api.md"), "## The main functions and classes")) if "`(" in cells[1]
    ]
    assert len(rows) >= 18
    for names, takes, _ in rows:
        signatures = re.findall(r"`\((.*?)\)`", takes)
        for name, signature in zip(re.findall(r"`([\w.]+)`", names), signatures, strict=True):
            parameters = inspect.signature(operator.attrgetter(name)(liger_dist)).parameters
            for given in filter(lambda one: one and "…" not in one and not one.startswith("*"), signature.split(", ")):
                argument, _, default = given.partition("=")
                assert argument in parameters, f"{name}: {argument}"
                if default:
                    assert str(parameters[argument].default) == default.strip('"'), f"{name}: {given}"


def test_the_launch_page_names_every_launch_file() -> None:
    text = page("launch.md")
    for file in LAUNCH.iterdir():
        if file.suffix in (".yaml", ".sh", ".sbatch"):
            assert file.relative_to(ROOT).as_posix() in text, file.name
    for folder in ("accelerate", "deepspeed"):
        (row,) = (row for row in text.splitlines() if f"launch/{folder}/" in row and "the folder also has" in row)
        for file in (LAUNCH / folder).iterdir():
            assert file.name in row or file.name == "hostfile" or f"`{file.stem}`" in row, file.name


def test_the_pages_name_no_launch_file_that_is_not_there() -> None:
    for file in PAGES:
        for name in re.findall(r"\blaunch/[\w/.-]+\.(?:yaml|sh|sbatch|json)\b", file.read_text()):
            assert (ROOT / name).is_file(), f"{file.name}: {name}"
    for file in (LAUNCH / "models").iterdir():
        assert any(f"launch/models/{file.name}" in other.read_text() for other in LAUNCH.glob("*.yaml")), file.name


def test_the_page_of_the_program_lists_the_presets() -> None:
    (row,) = (row for row in cells_of(page("training.md")) if row[0] == "`--model`")
    listed = re.findall(r"`(\w+)`", row[1].split("), a `config.json`")[0])
    assert sorted(listed) == sorted(PRESETS)


OF_OTHER_FOLDERS = {
    *("bases", "cache", "checkpoint", "export", "generation", "hub", "score_options", "scoring", "sources"),
    *("model_card", "tokenizer_training"),
}
"""modules that write no file of a run, but read or write checkpoints, exports, scores, data and models"""


def test_the_page_of_the_program_lists_the_files_of_a_run() -> None:
    listed = code(section(page("training.md"), "## Files in `--output_dir`"))
    found = set()
    for file in PROGRAM.glob("*.py"):
        if file.stem not in OF_OTHER_FOLDERS:
            names = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
            found |= {name for name in names if isinstance(name, str) and re.fullmatch(r"\w+\.(json|jsonl|png)", name)}
    found -= {"config.json"}
    assert {"metrics.jsonl", "data.json", "experts.png"} <= found <= listed
    files = {name for name in listed if re.fullmatch(r"\w+\.(json|jsonl|png)", name)}
    assert files <= found | {"config.json"}


OF_OTHER_PROGRAMS = {
    *("constraint", "pid", "num_gpus", "config_file", "num_processes", "multi_gpu", "nodes", "signal", "time"),
    *("apply_chat_template", "include_path", "log_samples", "model_args", "output_path", "system_instruction"),
    *("tasks", "sharding", "processes"),
}
"""options of pip, py-spy, deepspeed, accelerate, sbatch, lm_eval and the benchmarks"""


def test_options_on_pages_are_options_of_the_program() -> None:
    sources = [*PROGRAM.glob("*.py"), ROOT / "liger_dist" / "cli.py"]
    known = {name.replace("-", "_") for file in sources for name in re.findall(r'"--([a-z_-]+)"', file.read_text())}
    for options in (TrainConfig, ScoreConfig, ShowConfig):
        known |= {field.name for field in dataclasses.fields(options)}
    found = set()
    for file in (ROOT / "README.md", *DOCS.glob("*.md")):
        if file.name in ("benchmarks.md", "training_options.md"):
            continue  # They name options of other programs in columns.
        named = set(re.findall(r"(?<![\w-])--([a-z][a-z_]+)\b(?!-)", file.read_text()))
        assert named <= known | OF_OTHER_PROGRAMS, f"{file.name}: {named - known - OF_OTHER_PROGRAMS}"
        found |= named
    assert found >= OF_OTHER_PROGRAMS
    assert len(found) > 100


def test_the_table_of_explain_has_its_rows() -> None:
    """Rows after the facts, of which the table has two."""
    facts = dataclasses.make_dataclass("Facts", [("lines", Any)])(lambda: [("strategy", ""), ("storage", "")])
    sharding = {}
    for file in (ROOT / "liger_dist" / "sharding").rglob("*.py"):
        sharding |= dict.fromkeys(re.findall(r'else \{"([a-z ]+)": \w+\}', file.read_text()), "")
    assert len(sharding) > 1
    everything = Explanation(
        facts=facts,  # type: ignore[arg-type]
        fused="",
        adapter="",
        declined=("reason",),
        layers=LayerReport(swapped=(("", 1),), left=(("", ""),), absent=(("", ""),)),
        attention="",
        packing="",
        compiled="",
        sharding=sharding,
        router_loss="",
        labels="",
    )
    printed = {line.split("  ")[0].strip() for line in str(everything).splitlines()}
    table = section(page("troubleshooting.md"), "## Read the output of explain").split("| row | meaning |")[1]
    assert {row[0] for row in cells_of(table)} == printed


def test_the_page_names_every_entry_in_interfaces_of_transformers() -> None:
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    liger_dist.register_attention()
    interfaces: tuple[Any, ...] = (AttentionInterface, AttentionMaskInterface, ExpertsInterface)
    entries = {name for interface in interfaces for name in interface._global_mapping if name.startswith("liger_dist")}
    text = section(page("troubleshooting.md"), "## Attributes that wrap sets on a model").split("\n| on |")[0]
    assert len(entries) > 3
    assert entries == set(re.findall(r'`"(liger_dist\w*)"`', text))


def test_the_kernels_page_has_every_kind_of_layer() -> None:
    text = section(page("kernels.md"), "## Which layers are swapped")
    rows = [row[0] for row in cells_of(text)][1:]
    # The convolution is a function in a layer, and no kind.
    assert len(rows) == len(KINDS) + 1
    assert f"knows {['seven', 'eight', 'nine', 'ten'][len(rows) - 7]} kinds of layers" in text
    headings = " ".join(re.findall(r"^#+ (.*)$", page("kernels.md"), re.MULTILINE)).lower()
    for kind in ("norms", "gated", "rotary", "convolution", "experts", "lora"):
        assert kind in headings, kind


def test_every_public_name_is_on_the_api_page() -> None:
    package = (ROOT / "liger_dist" / "__init__.py").read_text()
    public = set(re.findall(r" import \w+ as (\w+)$", package, re.MULTILINE)) - {"__version__"}
    entries = re.findall(r"^\.\. auto\w+:: (liger_dist\S+)$", page("reference.rst"), re.MULTILINE)
    listed = {entry.split(".")[1] for entry in entries if entry.startswith("liger_dist.")}
    assert len(public) > 20
    assert public <= listed, public - listed
    assert len(entries) == len(set(entries))
    named = {name for words in code(page("api.md")) for name in words.split(".")}
    for entry in entries:
        assert exists(entry), entry
        assert entry == "liger_dist" or entry.split(".")[-1] in named, f"docs/api.md lacks {entry}"


def exists(name: str) -> bool:
    """True for a module, or for what one of them has."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


def test_the_changelog_names_what_there_is() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    today = newest.split("\n### Removed\n")[0]
    # The first column of the breaking changes has what there was.
    today = re.sub(r"^\| .*? \|(?= )", "|", today, flags=re.MULTILINE)
    named = code(today)
    options = {field.name for field in dataclasses.fields(TrainConfig)} | {"nproc_per_node", "version", "ema"}
    assert len(named) > 60
    for name in named:
        if re.fullmatch(r"liger_dist(_train)?(\.\w+)+(\(.*\))?", name) and "import" not in name:
            assert exists(name.split("(")[0]), name
        for option in re.findall(r"--([a-z_\d]+)", name):
            assert option in options, name
        for kind, option in re.findall(r"\b(WrapConfig|FSDP1|FSDP2)\((\w+)=", name):
            assert option in {field.name for field in dataclasses.fields(getattr(liger_dist, kind))}, name


def slugs(text: str) -> set[str]:
    """Anchors that a repository's page gives to its headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_lead_to_headings(file: Path) -> None:
    text = file.read_text()
    for path, anchor in re.findall(r"\]\(\s*([^)#\s]*)#([^)\s]+)\)", text):
        if path.startswith("http") or not (path == "" or path.endswith(".md")):
            continue
        target = file if path == "" else file.parent / path
        assert target.is_file(), path
        assert anchor in slugs(target.read_text()), f"{path}#{anchor}"


def test_families_are_counted_once() -> None:
    """Each number on the page that counts it, as its tests and the generated pages have it."""
    families = page("families.md").split("\n## ")[0]
    rows = list(cells_of(families))[1:]
    entries, fused = len(rows), sum(row[3].startswith("✓") for row in rows)
    built = re.search(r"^(\d+) of (\d+) entries .*?; (\d+)\s+of them are fused", families, re.MULTILINE | re.DOTALL)
    assert built is not None
    assert (int(built[2]), int(built[3])) == (entries, fused)
    of_experts = sum(bool(re.search(r"\d+ experts\b", row[-1])) for row in rows)
    assert f"\n{of_experts} entries of its mappings" in page("experts.md")

    text = " ".join(page("packing.md").split())
    (table,) = re.findall(r"^\| families, in transformers 5\.24 .*?\n\n", page("packing.md"), re.MULTILINE | re.DOTALL)
    listed = [name for row in list(cells_of(table))[1:] for name in row[0].split(", ")]
    hybrids = {name.removesuffix("_text") for name in HYBRIDS}
    assert sorted(listed) == sorted(hybrids)
    assert f"For each of these {len(hybrids)} families" in text
    assert f"within {TOLERANCE:g} in fp64, or {OF_FP32:g} if" in text
    assert f"`make test` compares {len(HYBRIDS & USUAL)} of them" in text
    suite = [case.values[0] for case in cells() if case.values[0].model in HYBRID_MODELS]
    assert f"in {len(PRINCIPAL)} layouts of sharding (`make test-all`: {len(suite)} combinations" in text
    for file in PAGES:
        counts = re.findall(r"(?<![\d,.-])(\d{2,}) (?:model )?families\b", file.read_text())
        is_generated = file.parent == DOCS / "benchmarks" or file.name in ("packing.md", *GENERATED)
        assert not counts or is_generated, f"{file.name} counts {counts} families"


REFUSED = {
    "It is not on PyPI": "test_release.py::test_no_page_installs_the_package_by_name",
    "one node with at most 4 NVIDIA GPUs": "test_claims.py::test_the_results_are_of_few_gpus_of_nvidia",
    "AMD GPUs were not tested": "test_claims.py::test_the_results_are_of_few_gpus_of_nvidia",
    "`tp_plan` keep that plan": "test_tensor_parallel.py::test_a_plan_for_the_layers_alone",
    "Second-order gradients": "test_interoperability.py::test_second_order_gradients_are_refused",
    "a quantized lm_head": "test_conformance.py::refusal",
    "`torch.compile(fullgraph=True)`": (
        "test_interoperability.py::test_a_compiled_whole_graph_is_refused_by_torch_with_a_page_that_says_so"
    ),
    "classifiers and reward models": "test_trl.py::test_a_classifier",
    "`WrapConfig(fused_loss=False)` shards them alone": "test_custom_forwards.py::test_any_head_without_a_fused_loss",
    "Contrastive losses of embedding models": "test_wrap.py::test_refusals_change_nothing",
    "a warning gives the reason": "test_extra_losses.py::test_an_extra_loss_leaves_the_loss_unfused_and_says_why",
}
"""test of what the library does not do, by words of README.md"""
HOLDS = ("_no_page_", "_few_gpus_", "_plan_")
"""tests among these that compare values"""


def test_what_the_library_does_not_do_is_held_by_tests() -> None:
    text = (ROOT / "README.md").read_text().split("**What it does not do:**")[1].split("\n\n|")[0]
    items = [" ".join(item.split()) for item in text.strip().split("\n- ")]
    for item in items:
        assert any(words in item for words in REFUSED), f"no test for: {item}"
    for words, held_by in REFUSED.items():
        assert any(words in item for item in items), words
        file, name = held_by.split("::")
        (source,) = (ROOT / "tests_multi_gpu").rglob(file)
        (test,) = (
            node
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == name
        )
        raises = re.search(r"pytest\.(raises|warns)\(", ast.unparse(test))
        assert raises or any(part in name for part in HOLDS), held_by


def test_the_results_are_of_few_gpus_of_nvidia() -> None:
    tables = [
        (title, table["environment"]["gpu"])
        for file in (ROOT / "benchmarks" / "results").glob("*.json")
        for title, table in json.loads(file.read_text()).items()
    ]
    assert len(tables) > 60
    assert {gpu.split()[0] for _, gpu in tables} == {"NVIDIA"}
    assert max(int(number) for title, _ in tables for number in re.findall(r"on (\d+)(?: GPUs|$)", title)) == 4


FIGURES = {
    ("experts.md", "## What it gains"): "experts",
    ("kernels.md", "## Experts: grouped products, gate, sum of a token's experts"): "experts",
    ("adapters.md", "## Figures"): "adapters",
    ("performance.md", "## When the host limits the step"): "*",
}
"""sections by hand, and the results that have their milliseconds; ``*``: any results, and the page of CUDA graphs"""


def figures_of(results: str) -> set[str]:
    """All measured figures of some results, with one decimal."""
    rows = [
        row
        for file in (ROOT / "benchmarks" / "results").glob(f"{results}.json")
        for table in json.loads(file.read_text()).values()
        for row in table["rows"]
    ]
    values = [value for row in rows for value in (row["median_ms"], *row["figures"].values(), host_ms(row)) if value]
    return {f"{value:.1f}" for value in values}


def host_ms(row: dict[str, Any]) -> float:
    """Milliseconds of the host in a step; 0 if not measured."""
    return sum(value for name, value in row["figures"].items() if name.endswith(" host ms"))


@pytest.mark.parametrize(("file", "heading"), FIGURES)
def test_milliseconds_of_pages_are_those_of_the_results(file: str, heading: str) -> None:
    results = FIGURES[file, heading]
    measured = figures_of(results)
    if results == "*":
        measured |= set(re.findall(r"\d+\.\d", page("cuda_graphs.md")))
    text = " ".join(" ".join(row) for row in cells_of(section(page(file), heading)))
    found = re.findall(r"(?<![\w.-])\d+\.\d(?![\d.])", text)
    assert len(found) > 2
    assert set(found) <= measured, set(found) - measured


def test_no_file_installs_the_package_by_name() -> None:
    """Messages, docstrings and comments included; pages are read in test_release.py."""
    by_name = re.compile(r"pip3? install [^\n`'\"]*[\"']?liger[-_]dist\b(?![^\s\"'`]*(/|\.whl))")
    assert by_name.search("pip install 'liger_dist" + "[train]'")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sources = [ROOT / name for name in listed if name.endswith((".py", ".yaml", ".yml", ".sh", ".toml", ".cfg"))]
    assert len(sources) > 400
    for file in sources:
        assert file.name in ("test_release.py", "test_claims.py") or not by_name.search(file.read_text()), file


def test_targets_of_make_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for file in (*PAGES, ROOT / "tests_multi_gpu" / "README.md"):
        for target in re.findall(r"`make ([a-z-]+)", file.read_text()):
            assert target in targets, f"{file.name}: make {target}"


def test_contributing_places_every_module() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    placed = {name for row in cells_of(section(text, "## Layers of the code")) for name in code(row[0])}
    modules = {file.stem for file in (ROOT / "liger_dist").iterdir() if file.suffix == ".py" or file.is_dir()}
    modules -= {"__init__", "__main__", "__pycache__", "_version"}
    assert placed - {"liger_dist", "liger_dist_kernels"} == modules


MOST_WORDS = 450
"""of a page of a host, without tables that a command writes"""


def test_pages_of_hosts_are_short() -> None:
    for file in sorted((DOCS / "hosts").glob("*.md")):
        text = re.sub(r"<!-- \w+: written by.*?<!-- end of \w+ -->", "", file.read_text(), flags=re.DOTALL)
        assert len(text.split()) <= MOST_WORDS, f"{file.name} has {len(text.split())} words"
