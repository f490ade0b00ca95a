"""Prints for each table of the results: date, commit, and the commits since then that changed the code it measures.

    python -m benchmarks.age [--only small_models] [--all]

A table with a commit is compared with that commit. A table without one, or with a commit that this checkout does not
have, is compared by date: commits of later days count, those of the same day may be in the measurement or not.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from .harness import RESULTS
from .overview import problems_of

ROOT = Path(__file__).parent.parent
SHOWN = 3
"""commits of a table that are printed without ``--all``"""
KERNELS, LAYERS, LOSSES = "kernels/liger_dist_kernels", "liger_dist/fused_layers", "liger_dist/losses"
PROGRAM = "launch/liger_dist_train"
PARTS: dict[str, tuple[str, ...]] = {
    "loss": (LOSSES, KERNELS, "liger_dist/functional.py"),
    "divergence": (
        f"{LOSSES}/distillation.py",
        f"{LOSSES}/linear_divergence.py",
        f"{LOSSES}/soft_labels.py",
        f"{KERNELS}/divergence.py",
        f"{KERNELS}/divergence_rows.py",
        f"{KERNELS}/divergence_terms.py",
        f"{KERNELS}/linear_divergence.py",
        "liger_dist/fused_head/distilled.py",
        "liger_dist/distillation.py",
    ),
    "scores": (f"{LOSSES}/support.py", f"{KERNELS}/chosen_logits.py", "liger_dist/fused_head/scored.py"),
    "token exchange": (
        f"{LOSSES}/token_exchange.py",
        f"{LOSSES}/embedding.py",
        "liger_dist/sharding/vocab_parallel.py",
    ),
    "tensor parallel": (f"{LOSSES}/tensor_parallel.py",),
    "norm": (f"{LAYERS}/norm.py", f"{KERNELS}/norm.py"),
    "layers": (LAYERS, f"{KERNELS}/gated_activation.py", f"{KERNELS}/rotary.py"),
    "lora": (f"{LAYERS}/lora.py", "liger_dist/model/peft.py"),
    "4 bits": ("liger_dist/model/quantized.py", "liger_dist/sharding/fsdp2/packed_bytes.py"),
    "packing": (
        f"{LAYERS}/document_mask.py",
        f"{LAYERS}/packed_calls.py",
        f"{LAYERS}/sink_attention.py",
        "liger_dist/model/documents.py",
    ),
    "hybrids": (
        f"{LAYERS}/convolution.py",
        f"{LAYERS}/gated_norm.py",
        f"{LAYERS}/mixer_forward.py",
        f"{LAYERS}/recurrent.py",
        f"{KERNELS}/causal_convolution.py",
        f"{KERNELS}/gated_norm.py",
        "liger_dist/model/document_rows.py",
    ),
    "experts": (
        f"{LAYERS}/experts.py",
        f"{LAYERS}/expert_dispatch.py",
        f"{LAYERS}/grouped_experts.py",
        f"{KERNELS}/expert_activation.py",
        f"{KERNELS}/expert_gate.py",
        f"{KERNELS}/experts.py",
        f"{KERNELS}/grouped_products.py",
    ),
    "mlp tiles": (f"{LAYERS}/mlp_tiles.py",),
    "routing": ("liger_dist/routing.py",),
    "wrap": (
        "liger_dist/wrap.py",
        "liger_dist/inspection.py",
        "liger_dist/config.py",
        "liger_dist/fused_head",
        "liger_dist/model",
        "liger_dist/trials",
        "liger_dist/sharding/base.py",
        "liger_dist/sharding/single.py",
    ),
    "fsdp1": (
        "liger_dist/sharding/fsdp1.py",
        "liger_dist/sharding/fsdp1_forward.py",
        "liger_dist/sharding/fsdp_options.py",
    ),
    "fsdp2": ("liger_dist/sharding/fsdp2", "liger_dist/sharding/fsdp_options.py", "liger_dist/sharding/resharding.py"),
    "deepspeed": ("liger_dist/sharding/deepspeed.py",),
    "float8": ("liger_dist/sharding/float8.py", "liger_dist/model/partitioner.py"),
    "sequence parallel": ("liger_dist/sharding/sequence_parallel.py", "liger_dist/sequences.py"),
    "mtp": ("liger_dist/mtp", f"{LOSSES}/shared_gradient.py"),
    "optimizer": (f"{PROGRAM}/optimizer.py", "liger_dist/clip.py"),
    "program": (
        f"{PROGRAM}/engine.py",
        f"{PROGRAM}/trainer.py",
        f"{PROGRAM}/run.py",
        f"{PROGRAM}/model.py",
        f"{PROGRAM}/data_loader.py",
        f"{PROGRAM}/packing.py",
    ),
    "turns": ("benchmarks/harness.py",),
    "training ways": ("benchmarks/training_ways.py",),
}
"""Parts of the code, by paths. A path below one of another part belongs to its own part alone."""
MODEL = ("wrap", "loss", "norm", "layers")
LARGE = (*MODEL, "fsdp2", "optimizer", "program")
CODE: dict[str, dict[str, tuple[str, ...]]] = {
    "adapters": {"": (*MODEL, "lora"), "4 bits": ("4 bits",), "FSDP2": ("fsdp2", "4 bits")},
    "distillation": {"": ("loss", "divergence", "turns")},
    "distillation_step": {"": (*MODEL, "divergence", "fsdp2")},
    "draft_heads": {"": ("loss", "divergence", "turns")},
    "expert_parallel": {"": ("experts", "turns")},
    "experts": {"": (*MODEL, "experts", "turns"), "LoRA": ("lora",)},
    "host_time": {"": (*MODEL, "training ways"), "FSDP2": ("fsdp2",), "FSDP1": ("fsdp1",), "ZeRO": ("deepspeed",)},
    "hybrids": {"": (*MODEL, "packing", "hybrids", "turns")},
    "large_model": {"": (*LARGE, "token exchange", "deepspeed")},
    "linear_cross_entropy": {"": ("loss", "turns")},
    "log_probs": {"": ("loss", "turns"), "replay": ("scores",)},
    "long_context": {"": (*LARGE, "sequence parallel", "mlp tiles", "token exchange")},
    "memory_bound": {"": ("norm", "turns"), "RoPE": ("layers",), "GLU": ("layers",), "cross_entropy": ("loss",)},
    "mixture_step": {"": (*LARGE, "experts")},
    "mtp": {"": (*MODEL, "mtp", "training ways", "turns")},
    "norm_widths": {"": ("norm", "turns")},
    "openrlhf_actor": {"": (*MODEL, "deepspeed")},
    "packed_documents": {"": (*MODEL, "packing", "turns")},
    "policy_step": {"": MODEL, "fsdp2": ("fsdp2",), "zero3": ("deepspeed",)},
    "replayed_update": {"": (*MODEL, "scores", "experts", "fsdp2", "optimizer", "routing", "turns")},
    "sequences": {"": (*MODEL, "packing", "training ways", "turns")},
    "small_models": {"": MODEL, "FSDP2": ("fsdp2", "optimizer"), "LoRA": ("lora",)},
    "training_step": {
        "": (*MODEL, "training ways"),
        "on 2": ("fsdp2", "token exchange"),
        "on 4": ("fsdp2", "token exchange"),
        "float8": ("float8",),
        "FSDP1": ("fsdp1",),
        "ZeRO": ("deepspeed",),
        "LoRA": ("lora",),
    },
    "verl_actor": {"": (*MODEL, "packing"), "fsdp,": ("fsdp1",), "fsdp2": ("fsdp2",)},
    "vocab_parallel": {"": ("loss", "token exchange")},
    "vocabularies": {"": ("loss", "turns")},
}
"""Parts that the tables of a results file measure, beside ``benchmarks/<file>.py``: of all tables (key ``""``), and of
those whose name contains the key."""
MORE: dict[str, tuple[str, ...]] = {
    "adapters": ("benchmarks/small_models.py",),
    "expert_parallel": ("benchmarks/vocab_parallel.py",),
    "large_model": ("benchmarks/liger_training.py", "benchmarks/launched.py", "launch/llama_8b.yaml"),
    "linear_cross_entropy": ("benchmarks/peers.py",),
    "log_probs": ("benchmarks/peers.py",),
    "long_context": ("benchmarks/long_context_peers.py", "benchmarks/launched.py", "launch/llama_8b_long.yaml"),
    "memory_bound": ("benchmarks/layers.py",),
    "mixture_step": ("liger_dist/sharding/fsdp2/expert_parallel.py", "launch/models/qwen3_30b_a3b.json"),
    "norm_widths": ("benchmarks/memory_bound.py", "benchmarks/layers.py"),
    "openrlhf_actor": ("liger_dist/integrations/openrlhf_actor.py",),
    "verl_actor": ("liger_dist/integrations/verl.py",),
    "vocabularies": ("benchmarks/peers.py",),
}
"""further paths of all tables of a file"""


class HistoryError(Exception):
    """This folder is no checkout, or one without its earlier commits."""


@dataclass(frozen=True)
class Age:
    """A table of the results, and what happened since to the code that it measures."""

    results: str
    table: str
    date: str | None
    commit: str | None
    reference: str
    """what the commits follow: ``commit 5c73db9`` or ``date 2026-11-22``"""
    commits: tuple[str, ...]
    """hash, day and title of the commits since then, newest first"""
    same_day: int
    """further commits on the day of the measurement, which may be in it; 0 if the commit is known"""


def paths_of(results: str, table: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the paths that a table measures, and the paths below these that it does not run."""
    named = {part for word, parts in CODE[results].items() if word in table for part in parts}
    own = [path for part in named for path in PARTS[part]]
    included = sorted({*own, f"benchmarks/{results}.py", *MORE.get(results, ())})
    others = {path for part, paths in PARTS.items() if part not in named for path in paths} - set(included)
    return tuple(included), tuple(sorted(path for path in others if any(path.startswith(f"{top}/") for top in own)))


def git(*command: str) -> str | None:
    """Returns what a command of git prints; None if it fails."""
    try:
        finished = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None


@cache
def check_history() -> None:
    """Checks that this is a checkout with all of its commits.

    Raises:
        HistoryError: it is not.
    """
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT.resolve():
        raise HistoryError("this folder is no checkout of git")
    if git("rev-parse", "--is-shallow-repository") != "false":
        raise HistoryError("this checkout is shallow: git fetch --unshallow")


@cache
def is_known(commit: str) -> bool:
    """True if a commit is HEAD or precedes it."""
    return git("merge-base", "--is-ancestor", commit, "HEAD") is not None


@cache
def log(start: tuple[str, ...], included: tuple[str, ...], excluded: tuple[str, ...]) -> tuple[str, ...]:
    """Lists commits that changed paths: hash, day and title, newest first."""
    paths = [*included, *(f":(exclude){path}" for path in excluded)]
    found = git("log", "--format=%h %cs %s", *start, "--", *paths)
    return tuple(found.splitlines()) if found else ()


def age_of(results: str, table: str, environment: dict[str, Any]) -> Age:
    """Compares a table with the history of the code that it measures.

    Raises:
        HistoryError: this checkout has none.
        ValueError: the table has neither a commit nor a date.
    """
    check_history()
    day, commit = environment.get("date"), environment.get("commit")
    if not day and not commit:
        raise ValueError(f"{table!r} of {results}.json has neither a commit nor a date")
    paths = paths_of(results, table)
    if commit and is_known(commit):
        return Age(results, table, day, commit, f"commit {commit}", log((f"{commit}..HEAD",), *paths), 0)
    if not day:
        return Age(results, table, day, commit, f"commit {commit}, which this checkout does not have", (), 0)
    next_day = (date.fromisoformat(day) + timedelta(days=1)).isoformat()
    since, on_day = f"--since={next_day}T00:00:00+00:00", f"--since={day}T00:00:00+00:00"
    commits = log((since, "HEAD"), *paths)
    reference = f"date {day}, no commit" if not commit else f"date {day}, commit {commit} is not in this checkout"
    return Age(results, table, day, commit, reference, commits, len(log((on_day, "HEAD"), *paths)) - len(commits))


def ages(directory: Path, only: str = "") -> Iterator[Age]:
    """Compares all tables of the files whose name contains ``only``."""
    for path in sorted(directory.glob("*.json")):
        for table, problem in problems_of(path).items() if only in path.stem else ():
            yield age_of(path.stem, table, problem["environment"])


def line_of(age: Age) -> str:
    """Says in one line how old a table is."""
    day = f", {age.same_day} of the same day" if age.same_day else ""
    return f"{age.results}: {age.table}: {age.reference}: {len(age.commits)} commits since{day}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="results files whose name contains this")
    parser.add_argument("--all", action="store_true", help=f"print all commits of a table, not the latest {SHOWN}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    given = parser.parse_args()
    before: tuple[str, ...] | None = None
    try:
        for age in ages(given.results, given.only):
            print(line_of(age))
            shown = age.commits if given.all else age.commits[:SHOWN]
            if age.commits != before:
                print(*(f"    {commit}\n" for commit in shown), sep="", end="")
            before = age.commits
    except HistoryError as error:
        raise SystemExit(f"benchmarks.age: {error}") from error


if __name__ == "__main__":
    main()
