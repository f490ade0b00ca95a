"""Writes docs/benchmarks.md with its plots, and the table of README.md, from the files in ``benchmarks/results``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .harness import RESULTS
from .overview import HEADER, Comparison, caption, cells, comparisons, plot
from .plots import (
    GPU_PARTS,
    Problems,
    plot_linear,
    plot_memory,
    plot_norm_widths,
    plot_ratios,
    plot_sequences,
    plot_small,
    plot_split,
    plot_steps,
    plot_time,
    plot_vocabularies,
)
from .readme import renewed
from .report_texts import ADAPTERS, DRAFTS, EXPERTS, HYBRIDS, MTP, OVERVIEW, PACKED

ROOT = Path(__file__).parent.parent
DOCS, README = ROOT / "docs", ROOT / "README.md"
HEAD = """# Benchmarks

Written by `python -m benchmarks.report` from the files in `benchmarks/results`. Implementations run in turn, call by
call, in an order that each round draws anew, the losses behind 20 ms of GEMMs; a time is the median of the rounds,
with the 20th and 80th percentile. Percentages and ratios are to what was measured in the same rounds. Versions,
clocks, date and command stand below each table.
"""
LINEAR = """## Fused linear cross entropy

Forward and backward in bf16 with fresh gradients. `ratio`: time to three bare cuBLAS GEMMs. `extra`: peak memory beyond
inputs and the two gradients, in MiB. Errors are relative (L2) to fp64, on 256 rows. `sum`: the dtype in which the
weight's gradient is added up over chunks.

![Time and memory](plots/linear_cross_entropy.png)
"""
VOCABULARIES = """## Any vocabulary

The fused linear cross entropy of 8192 tokens and 2048 hidden features, forward and backward in bf16, at vocabularies
that 64 divides and others, such as `resize_token_embeddings(len(tokenizer))` makes. `ratio`: time to three bare cuBLAS
GEMMs of the next multiple of 64 classes.

![Time to three GEMMs](plots/vocabularies.png)
"""
MEMORY = """## Kernels that move bytes

Device time of one call on inputs that are not in the cache, as a percentage of a large copy's bandwidth for the bytes
that have to be moved; `host` is what a call costs the host, in microseconds.

![Percentage of the copy bandwidth](plots/memory_bound.png)
"""
NORM_WIDTHS = """## Norms of any width

Device time of RMSNorm and LayerNorm in bf16 on tensors of about 2^25 numbers, in TB/s of the bytes that have to be
moved (forward: read and written once; backward: two read, one written), forward · backward.

![TB/s over widths](plots/norm_widths.png)
"""
SPLIT = """## Vocab-parallel lm_head

lm_head alone on several GPUs, forward and backward: N tokens of each rank, bf16, row shards with fp32 masters and
gradients. `vocab_parallel`: tokens are exchanged, with budgets for one chunk. `gathered`: the weight is all-gathered
and its gradient reduced in the named dtype, as FSDP2 does. `ratio`: time of the slowest rank to three bare GEMMs of its
tokens with the full weight. `peak`: memory beyond inputs and masters, with the gradients, in MiB.

![Time and memory](plots/vocab_parallel.png)
"""
STEP = """## Whole training steps

Forward, backward, clipping and AdamW, under FSDP2 where nothing else is named: bf16 with fp32 masters and reduction,
2 x 4096 tokens for each rank. Hugging Face and Liger are sharded as the documentation of FSDP has it, each layer and
the root. `computing`: milliseconds of a step in which the GPU runs a kernel that is not NCCL's.

![Tokens per second and memory](plots/training_step.png)
"""
TIME = """## Where the time of a step goes

By torch's profiler: milliseconds in which the GPU runs a kernel that is not NCCL's (`computing`), only NCCL's
(`communicating`) or none (`waiting`). `host`: samples of the Python stacks of all threads, by the innermost frame that
belongs to a library. A launch counts for the code that asked for it, so a layer's kernels count for the library that
computes it. Profiled steps are longer than those that are timed.

![Computing, communicating and waiting](plots/host_time.png)
"""
SMALL = """## Small models: time of the host

Steps of small models, all ways in memory together and a few steps each in turn: bf16 weights on one GPU; under FSDP2
fp32 masters, bf16 compute and fp32 reduction. Fused AdamW and clipping are torch's, and for liger_dist under FSDP2
those of `liger-dist train`. `host`: milliseconds until forward, backward and update (clipping and optimizer) return,
from an empty queue. `GPU`: milliseconds in which a kernel runs, NCCL's included, which may wait for the other GPU.
`kernels`: launches of a step. LoRA: rank 16 on all linear layers of Llama 8B, the frozen weights shared by all ways.
The tables of two GPUs were measured before garbage collection was frozen in the benchmark and before the last changes
to rotary and LoRA layers.

![Milliseconds of a step and of its host](plots/small_models.png)
"""
SEQUENCES = """## Packed, padded and long sequences

Forward and backward of four layers of the shape of Llama 8B with its lm_head, bf16, on one GPU.
`packed`: documents of about 700 tokens whose positions restart. `dense mask`: the same model with
`WrapConfig(varlen_attention=False)`. `one text`: the same tokens without boundaries. The long sequences are one text
under activation checkpointing. Memory is the peak of a step above the weights, their gradients included.

![Time and memory](plots/sequences.png)
"""
POLICIES = """## Log-probabilities and entropies

bf16 operands. `scoring`: without gradients, `ratio` to one bare cuBLAS GEMM. `forward and backward`: with fresh
gradients, to four. `training`: the scalar loss with fp32 logits to that with bf16 logits. `extra`: peak memory
beyond inputs and gradients, in MiB. Errors are relative (L2) to fp64, on 512 tokens of peaked distributions. `512
tokens at a time`: full logits of a chunk, its log-softmax by torch, checkpointed, as verl's fallback does.

![Time and memory](plots/log_probs.png)
"""
DISTILLATION = """## Divergences from a teacher

Student and teacher of the same sizes in bf16, forward and backward with fresh gradients; `soft labels`: the loss of the
labels, and half of it from K classes of each token. `ratio`: time to four bare cuBLAS GEMMs, for soft labels to the
labels alone. `extra`: peak memory beyond inputs and gradients, in MiB. Errors are relative (L2) to fp64, on 256 rows of
each gradient. `sum`: the dtype in which the weight's gradient is added up over chunks.

![Time and memory](plots/distillation.png)
"""
POLICY_STEPS = """## Steps of DPO and GRPO

Of a model of Llama 8B's layers and vocabulary with random weights, on stored completions: 8 x 1024 tokens for each GPU,
AdamW; GRPO scores, then trains. Both heads are called as TRL's trainers call them. Each row is a separate process.
"""
DISTILLATION_STEPS = """## Steps of a student with its teacher

A student of the shape of Llama 8B (fp32 masters, bf16 compute, AdamW) and a bf16 teacher of 14 billion parameters (48
layers of 5120), random weights, both under FSDP2, 8192 tokens for each GPU. `ratio`: to the student's own step and the
teacher's forward with its logits together, in the same rounds. `planned`: the peak by `liger-dist train --dry_run`.
"""
LONG = """## One long sequence over all GPUs

Llama 8B with random weights, fp32 masters, bf16 compute, AdamW with 8-bit states, activation checkpointing of every
layer. `liger_dist`: `liger-dist train launch/llama_8b_long.yaml`, with tiles of the MLP. Accelerate: FSDP2 with
`cp_size`, ring attention of torch. DeepSpeed: ZeRO-3, Ulysses and tiled MLP (ALST). Both with Liger's kernels. Every
way runs by itself with `expandable_segments:True`; its first step is not timed: medians of the following two, beside
the fastest and the slowest (ALST on 131,072 tokens: one). Of 262,144 tokens the first step is all there is, compilation
included and before AdamW has states. The sequence is one text (`--attend_across_documents true`). No way keeps
checkpoints in host memory. 65,536 tokens were measured before tiles left out the last product, which the backward does
not need.

![Tokens per second and memory](plots/long_context.png)
"""
LARGE = """## Eight billion parameters

`liger-dist train launch/llama_8b.yaml`: 8192 tokens for each GPU, bf16 with fp32 masters (ZeRO-3: DeepSpeed's), AdamW,
clipping. Every way runs by itself. `utilisation`: operations of the model (six for each weight and token, and those of
causal attention), to the 989 TFLOP/s of the data sheet. `planned`: the peak by `--dry_run`, which allocates nothing;
its rules for compiled layers and ZeRO-3 were corrected after the measurements on 2 GPUs (by 23 and 12 %), before
those on 4.
Liger: the same program, data and optimiser with its kernels, FSDP2 by layers and root.

![Tokens per second and memory](plots/large_model.png)
"""


def read(name: str, directory: Path) -> Problems:
    """The problems of one results file; none when it is not there."""
    path = directory / f"{name}.json"
    problems: Problems = json.loads(path.read_text()) if path.exists() else {}
    return problems


def number(value: Any, pattern: str) -> str:
    """A cell; empty for what was not measured."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, pattern)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def footnote(environment: dict[str, Any]) -> str:
    """Machine, versions, date, commit and command of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    clocks = environment["clocks after the run (SM, memory, power limit, temperature)"]
    commit = f", commit {environment['commit']}" if environment.get("commit") else ""
    return f"{environment['gpu']}, {versions}; {clocks}; {environment['date']}{commit}; `{environment['command']}`\n"


def measured(row: dict[str, Any], errors: Sequence[str]) -> list[str]:
    """The cells of a row: time, ratio, memory and the named errors."""
    figures = row["figures"]
    time = f"{row['median_ms']:.2f} ({row['p20_ms']:.2f}–{row['p80_ms']:.2f})"
    cells = [row["failure"] or time, number(figures.get("ratio"), ".3f"), number(figures.get("extra MiB"), ".0f")]
    return cells + [number(figures.get(f"{of} error"), ".1e") for of in errors]


def linear_section(problems: Problems) -> str:
    """One table for each shape."""
    parts = [LINEAR]
    for name, problem in problems.items():
        rows = []
        for row in problem["rows"]:
            rows.append([row["name"], row["accuracy"].removesuffix(" sum"), *measured(row, ("dW", "dX", "loss"))])
        header = ("implementation", "sum", "ms", "ratio", "extra", "dW error", "dX error", "loss error")
        parts += [
            f"### (N, D, V) = {name.replace('x', ', ', 2)}\n",
            table(header, rows),
            footnote(problem["environment"]),
        ]
    return "\n".join(parts)


def vocabularies_section(problems: Problems) -> str:
    """One table: a line for each implementation, a column for each vocabulary."""
    names = list(dict.fromkeys(row["name"].split(",")[0] for problem in problems.values() for row in problem["rows"]))
    lines: dict[str, list[str]] = {name: [name] for name in names}
    for problem in problems.values():
        seen = {row["name"].split(",")[0]: row for row in problem["rows"]}
        for name in names:
            row = seen.get(name)
            is_measured = row is not None and not row["failure"]
            time = f"{row['median_ms']:.1f} · {row['figures']['ratio']:.2f}" if row and is_measured else ""
            lines[name].append(time)
    header = ("ms · ratio", *problems)
    note = footnote(list(problems.values())[-1]["environment"])
    return "\n".join([VOCABULARIES, table(header, list(lines.values())), note])


def memory_section(problems: Problems) -> str:
    """One table for each kernel."""
    parts = [MEMORY]
    for kernel in dict.fromkeys(name.rsplit(" ", 1)[0] for name in problems):
        of_kernel = {name: problem for name, problem in problems.items() if name.rsplit(" ", 1)[0] == kernel}
        rows = []
        for name, problem in of_kernel.items():
            for row in problem["rows"]:
                figures = row["figures"]
                forward = figures.get("forward %", figures.get("of 4 bytes %"))
                cells = [name.rsplit(" ", 1)[1], row["name"], row["failure"] or f"{row['median_ms']:.3f}"]
                cells += [number(forward, ".0f"), number(figures.get("backward ms"), ".3f")]
                cells += [number(figures.get("backward %"), ".0f"), number(figures.get("host us"), ".0f")]
                rows.append(cells)
        header = ("shape", "implementation", "forward ms", "%", "backward ms", "%", "host µs")
        parts += [f"### {kernel}\n", table(header, rows), footnote(next(iter(of_kernel.values()))["environment"])]
    return "\n".join(parts)


def norm_widths_section(problems: Problems) -> str:
    """A table for each norm: a line for each width, a column for each implementation."""
    parts = [NORM_WIDTHS]
    for kernel in dict.fromkeys(name.split(" ")[0] for name in problems):
        of_kernel = {name: problem for name, problem in problems.items() if name.startswith(kernel)}
        names = list(dict.fromkeys(row["name"] for problem in of_kernel.values() for row in problem["rows"]))
        lines = []
        for problem, seen in of_kernel.items():
            figures = {row["name"]: row["figures"] for row in seen["rows"]}
            both = [[figures.get(name, {}).get(f"{which} TB/s") for which in ("forward", "backward")] for name in names]
            cells = [" · ".join(number(speed, ".2f") for speed in pair if speed) for pair in both]
            lines.append([problem.rsplit("x", 1)[1], *cells])
        note = footnote(list(of_kernel.values())[-1]["environment"])
        parts += [f"### {kernel}, TB/s\n", table(("width", *names), lines), note]
    return "\n".join(parts)


def split_section(problems: Problems) -> str:
    """One table for each shape and number of GPUs."""
    parts = [SPLIT]
    for name, problem in problems.items():
        rows = []
        for row in problem["rows"]:
            figures = row["figures"]
            time = f"{row['median_ms']:.2f} ({row['p20_ms']:.2f}–{row['p80_ms']:.2f})"
            cells = [row["name"], time, number(figures["ratio"], ".3f"), number(figures["peak MiB"], ".0f")]
            rows.append([*cells, number(figures.get("dW difference"), ".1e")])
        shape, processes = name.split(" on ")
        parts += [
            f"### (N, D, V) = {shape.replace('x', ', ', 2)} on {processes} GPUs\n",
            table(("implementation", "ms", "ratio", "peak", "dW, to gathered fp32"), rows),
            footnote(problem["environment"]),
        ]
    return "\n".join(parts)


def timed_section(head: str, problems: Problems, columns: dict[str, tuple[str, str]], first: str) -> str:
    """One table for each problem: times, and the figures of ``columns`` with their names and formats."""
    parts = [head]
    for name, problem in problems.items():
        rows = []
        for row in problem["rows"]:
            time = row["failure"] or f"{row['median_ms']:.1f} ({row['p20_ms']:.1f}–{row['p80_ms']:.1f})"
            rows.append([row["name"], time, *(number(row["figures"].get(f), form) for f, (_, form) in columns.items())])
        header = (first, "ms", *(title for title, _ in columns.values()))
        parts += [f"### {name}\n", table(header, rows), footnote(problem["environment"])]
    return "\n".join(parts)


def step_section(problems: Problems) -> str:
    """One table for each model and number of GPUs."""
    columns = {
        "tokens/s": ("tokens/s", ".0f"),
        "peak GiB": ("peak GiB", ".2f"),
        "computing ms": ("computing", ".1f"),
    }
    return timed_section(
        STEP, {f"{name} GPUs": problem for name, problem in problems.items()}, columns, "implementation"
    )


def time_section(problems: Problems) -> str:
    """One table for each model and sharding."""
    parts = [TIME]
    for name, problem in problems.items():
        rows = []
        for row in problem["rows"]:
            figures = row["figures"]
            shares = {of[6:-2]: share for of, share in figures.items() if of.startswith("host: ") and share >= 1}
            host = ", ".join(f"{of} {share:.0f} %" for of, share in sorted(shares.items(), key=lambda item: -item[1]))
            gpu = [number(figures[f"{part} ms"], ".1f") for part in GPU_PARTS]
            rows.append([row["name"], number(row["median_ms"], ".1f"), *gpu, number(figures["kernels"], ".0f"), host])
        header = ("implementation", "ms", *GPU_PARTS, "kernels", "host")
        parts += [f"### {name} GPUs\n", table(header, rows), footnote(problem["environment"])]
    return "\n".join(parts)


def small_section(problems: Problems) -> str:
    """One table for each model and sharding."""
    parts = [SMALL]
    header = ("implementation", "ms", "host: forward", "backward", "update", "GPU", "kernels", "peak GiB")
    names = ("forward host ms", "backward host ms", "update host ms", "GPU busy ms", "kernels", "peak GiB")
    for name, problem in problems.items():
        rows = []
        for row in problem["rows"]:
            time = f"{row['median_ms']:.1f} ({row['p20_ms']:.1f}–{row['p80_ms']:.1f})"
            patterns = (".1f", ".1f", ".1f", ".1f", ".0f", ".2f")
            figures = [number(row["figures"][of], form) for of, form in zip(names, patterns, strict=True)]
            rows.append([row["name"], time, *figures])
        parts += [f"### {name}\n", table(header, rows), footnote(problem["environment"])]
    return "\n".join(parts)


def sequences_section(problems: Problems) -> str:
    """One table for each problem."""
    return timed_section(SEQUENCES, problems, {"GiB above the weights": ("GiB", ".2f")}, "way")


def hybrids_section(problems: Problems) -> str:
    """One table with and without fla."""
    return timed_section(HYBRIDS, problems, {"GiB above the weights": ("GiB", ".1f")}, "way")


def packed_section(problems: Problems) -> str:
    """One table for each shape."""
    columns = {"of padded rows": ("of padded rows", ".2f"), "GiB above the weights": ("GiB", ".1f")}
    return timed_section(PACKED, problems, columns, "way")


def adapters_section(problems: Problems) -> str:
    """One table for each number of GPUs."""
    columns = {
        "GPU busy ms": ("GPU busy", ".0f"),
        "forward host ms": ("host: forward", ".0f"),
        "backward host ms": ("backward", ".0f"),
        "peak GiB": ("peak GiB", ".1f"),
    }
    return timed_section(ADAPTERS, problems, columns, "way")


def experts_section(problems: Problems) -> str:
    """One table for each shape and way of attention."""
    columns = {
        "GiB": ("GiB above the weights", ".2f"),
        "kept MiB": ("kept MiB", ".0f"),
        "of Hugging Face": ("of Hugging Face", ".2f"),
        "of before": ("of before, compiled", ".2f"),
        "of without": ("of without", ".2f"),
    }
    return timed_section(EXPERTS, problems, columns, "way")


def mtp_section(problems: Problems) -> str:
    """One table of all depths."""
    columns = {
        "GiB": ("GiB above the weights", ".2f"),
        "losses MiB": ("losses MiB", ".0f"),
        "ms of this depth": ("ms of this depth", ".1f"),
        "layer and loss ms": ("layer and loss", ".1f"),
        "ratio": ("ratio", ".2f"),
    }
    return timed_section(MTP, problems, columns, "depth and way")


def policies_section(problems: Problems) -> str:
    """One table for each shape and use."""
    parts = [POLICIES]
    for name, problem in problems.items():
        rows = []
        for row in problem["rows"]:
            rows.append([row["name"], *measured(row, ("log_prob", "entropy", "dX"))])
        header = ("implementation", "ms", "ratio", "extra", "log_prob error", "entropy error", "dX error")
        parts += [f"### {name}\n", table(header, rows), footnote(problem["environment"])]
    return "\n".join(parts)


def distillation_section(problems: Problems) -> str:
    """One table for each divergence, and one for soft labels."""
    parts = [DISTILLATION]
    for name, problem in problems.items():
        rows = [[row["name"], row["accuracy"], *measured(row, ("loss", "dW", "dX"))] for row in problem["rows"]]
        header = ("implementation", "sum", "ms", "ratio", "extra", "loss error", "dW error", "dX error")
        parts += [f"### {name}\n", table(header, rows), footnote(problem["environment"])]
    return "\n".join(parts)


def drafts_section(problems: Problems) -> str:
    """One table for each divergence."""
    columns = {"ratio": ("ratio", ".2f"), "extra MiB": ("extra MiB", ".0f")}
    columns |= {name: (name, ".1e") for name in ("loss error", "dW error", "dX error")}
    return timed_section(DRAFTS, problems, columns, "implementation")


def large_section(problems: Problems) -> str:
    """One table for each number of GPUs."""
    parts = [LARGE]
    for problem, seen in problems.items():
        rows = []
        for row in seen["rows"]:
            figures = row["figures"]
            rows.append(
                [
                    row["name"],
                    f"{row['median_ms']:.0f} ({row['p20_ms']:.0f}–{row['p80_ms']:.0f})",
                    number(figures.get("tokens/s"), ".0f"),
                    number(figures.get("utilisation"), ".1%"),
                    number(figures.get("peak GiB"), ".1f"),
                    number(figures.get("planned GiB"), ".1f"),
                ]
            )
        header = ["way", "ms", "tokens/s", "utilisation", "peak GiB", "planned GiB"]
        parts += [f"### {problem} GPUs\n", table(header, rows), footnote(seen["environment"])]
    return "\n".join(parts)


def long_section(problems: Problems) -> str:
    """One table for each length and number of GPUs."""
    columns = {"tokens/s": ("tokens/s", ".0f"), "utilisation": ("utilisation", ".1%"), "peak GiB": ("peak GiB", ".1f")}
    return timed_section(LONG, {f"{name} GPUs": one for name, one in problems.items()}, columns, "way")


def policy_steps_section(problems: Problems) -> str:
    """One table for each trainer."""
    columns = {"ratio": ("ratio", ".3f"), "peak GiB": ("peak GiB", ".1f"), "peak ratio": ("peak ratio", ".3f")}
    return timed_section(POLICY_STEPS, problems, columns, "head")


def distillation_steps_section(problems: Problems) -> str:
    """One table for each number of GPUs."""
    columns = {"ratio": ("ratio", ".3f"), "peak GiB": ("peak GiB", ".1f"), "planned GiB": ("planned GiB", ".1f")}
    return timed_section(DISTILLATION_STEPS, problems, columns, "step")


Part = tuple[str, dict[str, Callable[[Problems, Path], None]], Callable[[Problems], str]]
PARTS: tuple[Part, ...] = (
    ("linear_cross_entropy", {"linear_cross_entropy": plot_linear}, linear_section),
    ("vocabularies", {"vocabularies": plot_vocabularies}, vocabularies_section),
    ("memory_bound", {"memory_bound": plot_memory}, memory_section),
    ("norm_widths", {"norm_widths": plot_norm_widths}, norm_widths_section),
    ("vocab_parallel", {"vocab_parallel": plot_split}, split_section),
    ("training_step", {"training_step": plot_steps}, step_section),
    ("host_time", {"host_time": plot_time}, time_section),
    ("small_models", {"small_models": plot_small}, small_section),
    ("sequences", {"sequences": plot_sequences}, sequences_section),
    ("hybrids", {"hybrids": plot_sequences}, hybrids_section),
    ("packed_documents", {"packed_documents": plot_sequences}, packed_section),
    ("adapters", {"adapters": partial(plot_sequences, memory="peak GiB")}, adapters_section),
    ("experts", {"experts": partial(plot_sequences, memory="GiB")}, experts_section),
    ("mtp", {"mtp": partial(plot_sequences, memory="GiB")}, mtp_section),
    ("long_context", {"long_context": plot_steps}, long_section),
    ("log_probs", {"log_probs": plot_ratios}, policies_section),
    ("policy_step", {}, policy_steps_section),
    ("distillation", {"distillation": plot_ratios}, distillation_section),
    ("distillation_step", {}, distillation_steps_section),
    ("draft_heads", {}, drafts_section),
    ("large_model", {"large_model": plot_steps}, large_section),
)
"""of the page, in its order: name of the results, plots by name, and section"""


def overview_table(compared: Sequence[Comparison]) -> str:
    """The ratios of all workloads, which the picture's file notes, too."""
    return table(HEADER, [cells(each) for each in compared])


def page(results: Path) -> str:
    """Returns docs/benchmarks.md."""
    compared, _ = comparisons(results)
    sections = [HEAD]
    if compared:
        sections.append(OVERVIEW.replace("CAPTION", caption(compared)) + "\n" + overview_table(compared))
    read_parts = [(section, read(name, results)) for name, _, section in PARTS]
    return "\n".join([*sections, *(section(problems) for section, problems in read_parts if problems)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder that the page is written to")
    given = parser.parse_args()
    plots = given.docs / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for name, drawn, _ in PARTS:
        problems = read(name, given.results)
        for plot_name, draw in drawn.items() if problems else ():
            draw(problems, plots / f"{plot_name}.png")
    compared, left_out = comparisons(given.results)
    if compared:
        plot(compared, plots / "overview.png", overview_table(compared))
    if left_out:
        print("not in the overview:", *left_out, sep="\n  ", file=sys.stderr)
    (given.docs / "benchmarks.md").write_text(page(given.results))
    if given.results == RESULTS and given.docs == DOCS:
        README.write_text(renewed(README.read_text(), given.results))


if __name__ == "__main__":
    main()
