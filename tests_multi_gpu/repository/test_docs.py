"""Every code block of every page runs, with what a reader has around it; commands run where two processes on CPUs can
run them (some in separate tests), and are read by the programs that they start where not. The pages build without a
warning, so that links hold."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from cells import CELLS
from forked_programs import run_command
from harness import Workers
from models import make_batch, make_model
from training_runs import ROOT

import liger_dist
from liger_dist.cli import _parser
from liger_dist.sharding.process_groups import compute_device
from liger_dist_train.config import TrainConfig, parse
from liger_dist_train.launcher import processes_of
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.parser import parse_as
from liger_dist_train.scoring import ScoreConfig
from liger_dist_train.show import ShowConfig

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("hosts/*.md"))]
BLOCK = re.compile(r"^```(\{?[\w-]*\}?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_BLOCK = re.compile(r"# ((?:kernels|liger_dist|tests_multi_gpu)/\S+\.py)\n")
"""first line of a block that is a file of the project; test_worked_examples.py makes and runs these"""
SHOWN = ("text", "{toctree}", "{eval-rst}")
"""no code: what programs print, and what builds the pages"""


def blocks(language: str) -> list[tuple[str, int, str]]:
    """Page, number and text of the blocks of a language."""
    found = []
    for page in PAGES:
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text())):
            if kind == language and not FILE_BLOCK.match(text):
                found.append((str(page.relative_to(ROOT)), number, text))
    return found


def test_every_block_has_a_language_that_is_tested() -> None:
    kinds = {(str(page), kind) for page in PAGES for kind, _ in BLOCK.findall(page.read_text())}
    tested = ("python", "bash", "json", "yaml", "diff", *SHOWN)
    assert {(page, kind) for page, kind in kinds if kind not in tested} == set()
    for page in PAGES:
        assert page.read_text().count("```") == 2 * len(BLOCK.findall(page.read_text())), page


@pytest.mark.parametrize("page", sorted({page for page, _, _ in blocks("python")} - {"docs/tutorial.md"}))
def test_python_runs(page: str, workers_2: Workers) -> None:
    """The blocks of a page share their names; each has a fresh model, but where a page is one program."""
    assert workers_2.run(run_page, page, [text for name, _, text in blocks("python") if name == page]) == [page] * 2


def run_page(page: str, texts: list[str]) -> str:
    names: dict[str, Any] = {"__name__": "page"}
    for text in texts:
        text = text.replace("mesh=(2, 4)", "mesh=(1, 2)")  # Two processes here.
        for refresh in surroundings(page, text) if page != "docs/start.md" else ():
            names |= refresh
        for part in re.split(r"^(.*# raises.*)$", text, flags=re.MULTILINE):
            refuses = pytest.raises(liger_dist.LigerDistError) if "# raises" in part else nullcontext()
            with mock.patch.object(dist, "init_process_group"), refuses:
                exec(compile(part, page, "exec"), names)
    return page


def surroundings(page: str, text: str) -> Iterator[dict[str, Any]]:
    """What a reader has around a block: a model, a batch, and what the page's library calls for."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    model: Any = make_model("llama", dtype=torch.float32)
    batch = make_batch(dist.get_rank())
    ids = torch.arange(20, device=compute_device()).reshape(2, 10)
    yield {
        "torch": torch,
        "liger_dist": liger_dist,
        "DTensor": DTensor,
        "init_device_mesh": lambda _, shape, **names: init_device_mesh(
            compute_device().type, (1, 2) if len(shape) == 2 else (2,), **names
        ),
        "device_type": compute_device().type,
        "model": model,
        "batch": batch,
        "ids": ids,
        "labels": ids.clone(),
    }
    if "wrap" not in text:
        if "parameter.grad" in text:
            liger_dist.wrap(model, "fsdp2")
            model(**batch).loss.backward()
        elif "outputs=" in text or "num_items_in_batch" in text:
            yield {"model": liger_dist.wrap(model, "auto" if "outputs=" in text else "fsdp2")}
        elif "explain" in text or "verify" in text:
            yield {"model": liger_dist.wrap(model, "fsdp2")}
    if "get_peft_model" in text:
        from peft import LoraConfig, get_peft_model

        yield {"base": model, "LoraConfig": LoraConfig, "get_peft_model": get_peft_model}
    if "hosts" in page:
        yield from surroundings_of_a_host(page)
    if "accelerator.backward" in text and "hosts" not in page:
        from accelerate import Accelerator

        # What DeepSpeed's loader yields.
        yield {
            "accelerator": Accelerator(cpu=not torch.cuda.is_available()),
            "batch": {"input_ids": ids, "shift_labels": ids.roll(-1, 1)},
        }


def surroundings_of_a_host(page: str) -> Iterator[dict[str, Any]]:
    """Trainers are replaced by what notes how they are made: the hosts' own tests train."""
    if page.endswith("accelerate.md"):
        from accelerate import Accelerator
        from trainers import forget_earlier_trainers

        forget_earlier_trainers()
        model: Any = make_model("llama", dtype=torch.float32)
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
        yield {
            "accelerator": Accelerator(cpu=not torch.cuda.is_available()),
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loader": torch.utils.data.DataLoader(rows, batch_size=2),  # type: ignore[arg-type]
        }
    if page.endswith("trainer.md"):
        import tempfile

        from trainers import Sequences, forget_earlier_trainers
        from transformers import Trainer, TrainingArguments

        forget_earlier_trainers()
        yield {
            "Trainer": Trainer,
            "arguments": TrainingArguments(
                output_dir=tempfile.mkdtemp(),
                max_steps=1,
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                use_cpu=not torch.cuda.is_available(),
            ),
            "data": Sequences(),
            "model": make_model("llama", dtype=torch.float32).cpu(),
        }
    if page.endswith("trl.md"):
        trainer = mock.MagicMock()
        yield {"DPOTrainer": trainer, "reference": None, "arguments": None, "data": None}
        yield {"DistillationTrainer": trainer, "student": None, "teacher": None, "prompts": None}
    if page.endswith("lightning.md"):
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy
        from lightning.pytorch import LightningModule

        yield {
            "LightningModule": LightningModule,
            "ModelParallelStrategy": ModelParallelStrategy,
            "Fabric": lambda **options: Fabric(accelerator="cpu", **options | {"devices": 1}),
        }


def commands(text: str) -> Iterator[list[str]]:
    """Words of each line of a block, without the variables in front."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


@pytest.mark.parametrize(("page", "number", "text"), blocks("bash"), ids=str)
def test_commands_are_understood(page: str, number: int, text: str) -> None:
    for words in commands(text):
        check_command(words)


SHORT = ("--steps", "1", "--batch_size", "1", "--eval_batches", "1")


def as_run(words: list[str]) -> list[str]:
    """The command for two processes on CPUs, and one step; nothing where it takes more than that."""
    program, *rest = words
    takes_more = {
        "launch/llama_8b.yaml",
        "launch/llama_8b_long.yaml",
        "launch/qwen3_5_4b.yaml",
        "launch/qwen3_30b_a3b.yaml",
        "sbatch",
        "kubectl",
        "make",
        "pip",
        "launch/cpu_smoke.sh",
        "deepspeed",
        *(f"liger_dist.integrations.{host}" for host in ("llamafactory", "openrlhf", "skyrl")),
    }
    if program == "export" or takes_more & set(words):
        return []
    if program == "torchrun":
        rest[rest.index("--nproc-per-node") + 1] = "2"
    if words[:2] == ["liger-dist", "train"] and "--nproc_per_node" in words:
        rest[rest.index("--nproc_per_node") + 1] = "2"
    is_training = "liger_dist_train" in words or words[:2] == ["liger-dist", "train"]
    trains = (is_training and "score" not in words) or "launch/torchrun_single_node.sh" in words
    return [program, *rest, *(SHORT if trains else [])]


RUN_AS_A_WHOLE = ("docs/tutorial.md", "docs/evaluation.md")
"""by test_tutorial.py and test_evaluation.py"""
RUN = [
    (page, text) for page, _, text in blocks("bash") if any(map(as_run, commands(text))) and page not in RUN_AS_A_WHOLE
]


@pytest.mark.nightly(
    page=["docs/launch.md", "docs/distillation.md", "docs/training.md", "docs/cuda_graphs.md", "docs/experts.md"]
)
@pytest.mark.timeout(480)
@pytest.mark.skipif(torch.cuda.is_available(), reason="commands for CPUs here")
@pytest.mark.parametrize(("page", "text"), RUN, ids=[page for page, _ in RUN])
def test_commands_run(page: str, text: str, trained: Path, tmp_path: Path) -> None:
    """In the folder that a reader has: the project, a run, some notes, and a script."""
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "docs" / "examples", ROOT / "launch"):
        (tmp_path / path.relative_to(ROOT)).symlink_to(path)
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md"):
        (tmp_path / path.name).symlink_to(path)
    if "liger-dist export" in text:
        shutil.copytree(trained, tmp_path / "runs" / "train")
    (tmp_path / "notes.txt").write_text("".join(page.read_text() for page in PAGES)[:60_000])
    for of_page, _, settings in blocks("yaml"):
        if of_page == page:
            (tmp_path / "run.yaml").write_text(settings)
    (tmp_path / "my_training.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\ndef make_model():\n"
        "    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)\n"
        "    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))\n"
    )
    variables = {"NPROC_PER_NODE": "2", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for words in filter(None, map(as_run, commands(text))):
        if words[0] in ("python", "liger-dist", "torchrun"):
            # A page names the same run by several commands.
            again = ["--overwrite", "true"] if "run.yaml" in words and (tmp_path / "runs").is_dir() else []
            run_command([*words, *again], tmp_path, **variables)
            continue
        finished = subprocess.run(
            words, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=200, check=False
        )
        assert finished.returncode == 0, (words, finished.stderr[-3000:])


def check_command(words: list[str]) -> None:
    """Raises where the program would refuse it."""
    program, *rest = words
    if program == "make":
        subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        assert rest[0] == "install"
    elif program == "export":
        assert (ROOT / (rest[0].partition("=")[2].replace(".", "/") + ".py")).is_file()
    elif program == "liger-dist":
        check_program(rest)
    elif program == "kubectl":
        assert (ROOT / rest[-1]).is_file()
    elif "lm_eval" in words:
        check_evaluation(words)
    elif program == "accelerate":
        assert (ROOT / rest[rest.index("--config_file") + 1]).is_file()
    elif "-m" in words:
        module, *options = words[words.index("-m") + 1 :]
        if module in ("liger_dist", "liger_dist_train"):
            check_program(options)
        else:
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    else:
        file = next(word for word in words if word.startswith(("launch/", "docs/examples/")))
        assert (ROOT / file).is_file(), file
        options = words[words.index(file) + 1 :]
        if file != "launch/deepspeed_multi_node.sh" and not file.startswith(("docs/", "launch/demo/")):
            check_training(options)


def check_program(words: list[str]) -> None:
    """Raises where ``liger-dist`` or ``python -m liger_dist_train`` would refuse it."""
    command, *options = words
    if command == "score":
        parse_as(options, ScoreConfig)
    elif command == "show":
        parse_as(options, ShowConfig)
    elif command in ("export", "tokenizer", "generate", "cache"):
        assert options or command == "cache"
    elif command in ("explain", "verify", "doctor", "deepspeed"):
        _parser().parse_args(words)
    else:
        check_training(processes_of(options)[1] if command == "train" else words)


def check_evaluation(words: list[str]) -> None:
    """Raises where a task of the project is not there; lm_eval itself need not be installed."""
    assert words[words.index("lm_eval") + 1 :][:3] == ["run", "--model", "hf"]
    assert words[words.index("--model_args") + 1].startswith("pretrained=runs/")
    if "--include_path" in words:
        for task in words[words.index("--tasks") + 1].split(","):
            assert (ROOT / words[words.index("--include_path") + 1] / f"{task}.yaml").is_file(), task


def check_training(options: list[str]) -> None:
    stand_in = [option for option in options if option != "run.yaml"]
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        config: TrainConfig = parse(stand_in)
        if config.strategy is not None:
            parallel_dims_of(config, config.world_size or 8)
    finally:
        os.chdir(before)


OTHER_YAML = ("docs/training.md", "docs/evaluation.md")
"""options of the training program, and a task of lm_eval"""
SETTINGS = [block for block in (*blocks("json"), *blocks("yaml")) if block[0] not in OTHER_YAML]


@pytest.mark.parametrize(("page", "number", "text"), SETTINGS, ids=str)
def test_settings_are_read(page: str, number: int, text: str) -> None:
    from liger_dist.integrations.deepspeed_section import read_section

    settings = json.loads("{" + text + "}") if text.startswith('"') else yaml.safe_load(text)
    assert read_section(settings) is not None


def test_what_is_shown_of_a_dry_run(tmp_path: Path) -> None:
    (command,) = [text for page, _, text in blocks("bash") if page == "docs/memory.md"]
    (shown,) = [text for page, _, text in blocks("text") if page == "docs/memory.md"]
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    assert run_command(shlex.split(command), tmp_path) == shown


@pytest.mark.nightly
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path / "html"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stderr
    for name in ("index", "api", "hosts/trl", "troubleshooting"):
        assert (tmp_path / "html" / f"{name}.html").is_file()
    # It would say so of a link that leads nowhere.
    page = tmp_path / "docs"
    page.mkdir()
    (page / "conf.py").write_text('extensions = ["myst_parser"]\n')
    (page / "index.md").write_text("# A page\n\n[nowhere](absent.md)\n")
    command[-2:] = [str(page), str(tmp_path / "broken")]
    assert subprocess.run(command, capture_output=True, text=True, timeout=100, check=False).returncode != 0


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), link


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    """Fragments between dots, in sources whose strings are joined."""
    sources = [path.read_text() for folder in ("liger_dist", "launch") for path in (ROOT / folder).rglob("*.py")]
    joined = re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(sources))
    rows = re.findall(r"^\| ((?:warning: )?`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for message in [message for row in rows for message in re.findall(r"`([^`]+)`", row)]:
        for fragment in filter(None, (part.strip() for part in message.split("..."))):
            assert fragment in joined, message


def test_the_page_names_every_attribute_that_is_set_on_a_model() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page[page.index("## Attributes that wrap sets on a model") :]
    sources = "".join(path.read_text() for path in (ROOT / "liger_dist").rglob("*.py"))
    names = set(re.findall(r"\b_liger_dist_[a-z0-9_]+\b", sources))
    assert len(names) > 20
    assert not names - set(re.findall(r"`(_liger_dist_[a-z0-9_]+)`", table))
    assert not set(re.findall(r"`(_liger_dist_[a-z0-9_]+)`", table)) - names


def test_every_row_of_the_table_of_policy_trainers_has_tests() -> None:
    rows = re.findall(r"^\| .* \|$", (DOCS / "rl.md").read_text().split("## Trainers")[1].split("## ")[0], re.MULTILINE)
    assert len(rows) > 8
    for row in rows[2:]:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in source_of(file), test


def test_every_row_of_the_table_of_options_has_a_test() -> None:
    rows = [line for line in (DOCS / "training_options.md").read_text().splitlines() if line.startswith("| ")]
    named = [re.search(r"`(test_\w+\.py)::(test_\w+)` \|$", row) for row in rows if not row.startswith("| | ")]
    assert len(named) > 100
    for found in named:
        assert found is not None
        assert f"def {found[2]}(" in source_of(found[1]), found[0]


def source_of(test_file: str) -> str:
    """The text of a test file, whose name is unique among the folders of tests."""
    (file,) = (ROOT / "tests_multi_gpu").glob(f"*/{test_file}")
    return file.read_text()


def test_the_first_page_counts_the_combinations_of_the_suite() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    refused = sum(bool(cell.refused) for cell in CELLS)
    assert f"in {len(CELLS) - refused} combinations of layout, model, batch and feature" in text
    assert f"{refused} further combinations raise an error" in text
