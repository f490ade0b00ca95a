"""docs/combinations.md: which two features are exact, refused or untested together, and in which layouts.

Cells of the conformance suites say it by their data, other tests by a row of :data:`TESTS`, whose layouts are read from
the parameters of the test. A refusal has a row of :data:`REFUSALS`."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

from cells import CELLS, GRID, HSDP, MODEL, Cell, Model
from models import HYBRIDS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "combinations.md"
FEATURES = {
    "packed": "packed documents",
    "hybrid": "recurrent or convolution layers",
    "LoRA": "",
    "4 bits": "linear layers of bitsandbytes, with LoRA",
    "4-bit experts": "",
    "frozen": "other frozen weights, or replicated ones",
    "experts": "",
    "ep": "experts on several ranks",
    "MTP": "multi-token prediction",
    "distill": "distillation",
    "RL": "outputs with gradients: log-probabilities, entropies, sampled support",
    "replay": "routing replay",
    "sp": "sequence shards",
    "vocab": "vocab-parallel lm_head",
    "float8": "",
    "compile": "compiled layers",
    "tiles": "MLP tiles",
    "ckpt": "activation checkpointing",
    "offload": "CPU offload",
    "drafts": "draft heads",
    "diffusion": "masked diffusion",
    "pipeline": "",
    "units": "several layers in a unit of FSDP2",
}
"""names of rows and columns, and what they mean where the name does not say it"""
LAYOUTS = {
    "s": "one process",
    "D": "DDP",
    "1": "FSDP1",
    "2": "FSDP2",
    "H": "HSDP",
    "T": "tensor parallelism of lm_head",
    "X": "FSDP2 x T",
    "z": "ZeRO-0 to 2",
    "3": "ZeRO-3",
}
"""signs of layouts, in their order on the page"""


def features_of(cell: Cell) -> frozenset[str]:
    """The features that a cell of a conformance suite declares."""
    model, used, layout = cell.built, cell.used, cell.layout
    found = {
        "packed": cell.given.rows.startswith("packed"),
        "hybrid": model.family in HYBRIDS,
        "LoRA": model.has_peft,
        "4 bits": bool(model.four_bits),
        "4-bit experts": model.four_bits == "experts",
        "frozen": model.trains != "all" or "frozen" in layout,
        "experts": model.family in ("qwen3_moe", "gpt_oss"),
        "ep": "ep_size" in layout or "ep" in layout,
        "MTP": bool(model.mtp),
        "RL": used.policy,
        "replay": used.replays,
        "vocab": bool(layout.get("rows")),
        "tiles": used.mlp_tiles,
        "ckpt": used.checkpointing,
        "offload": bool(layout.get("offload")),
        "units": bool(layout.get("units")),
    }
    return frozenset(name for name, has in found.items() if has)


def layout_of(cell: Cell) -> str:
    """The sign of a cell's layout."""
    axes = cell.layout.get("axes")
    if axes == HSDP or str(cell.layout.get("sharding")).startswith("HYBRID"):
        return "H"
    if axes == GRID:
        return "X"
    if cell.engine == "zero":
        return "3" if cell.layout["stage"] == 3 else "z"
    if cell.engine == "transformers":
        return "2" if "fsdp_size" in cell.layout else "T"
    return {"none": "s", "ddp": "D", "fsdp1": "1", "fsdp2": "2", "tp": "T"}[cell.engine]


WORDS = {
    "vocab": r"vocab",
    "ckpt": r"checkpointing",
    "offload": r"offload",
    "frozen": r"replicated",
    "units": r"units",
    "compile": r"compiled",
    "LoRA": r"LoRA|DoRA|4 bits",
    "4 bits": r"4 bits",
    "tiles": r"tiles",
}
SIGNS = {
    "X": r"x TP",
    "H": r"HSDP|hsdp|replicate 2",
    "3": r"zero-?3",
    "z": r"zero-?[0-2]",
    "1": r"fsdp1",
    "D": r"ddp",
    "T": r"^tp",
    "s": r"^(none|plain|one process)",
    "2": r"",
}
"""of a value of a test's parameter: the first that it matches"""


@dataclass(frozen=True)
class Test:
    """A test that compares gradients of some features together."""

    node: str
    """file and function, below tests_multi_gpu"""
    features: str
    """in FEATURES, separated by commas"""
    layouts: str = ""
    """signs, of a test without a parameter for its layout"""
    by: str = ""
    """parameter whose values name layouts and further features"""
    without: tuple[str, ...] = ()
    """values of the parameter for which the test expects a refusal"""

    def combinations(self) -> Iterator[tuple[frozenset[str], str]]:
        features = frozenset(self.features.split(", "))
        for sign in self.layouts:
            yield features, sign
        for value in values_of(self.node, self.by) if self.by else ():
            if value in self.without:
                continue
            more = {name for name, words in WORDS.items() if re.search(words, value)}
            sign = next(sign for sign, words in SIGNS.items() if re.search(words, value, re.IGNORECASE))
            yield features | more, sign if not self.layouts else self.layouts


@dataclass(frozen=True)
class Refusal:
    """Two features, or one feature in some layouts, that an error excludes."""

    features: str
    node: str
    """the test in which it is raised"""
    words: str
    """of the sentence, as the test expects them"""
    layouts: str = ""
    """signs; empty for every layout"""
    when: str = ""
    """the variant that is refused, if another is exact"""
    source: str = ""
    """words that find the sentence in the code, if those of the test are the values in it"""


@cache
def module_of(file: str) -> ModuleType:
    path = ROOT / "tests_multi_gpu" / file
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def function_of(node: str) -> Any:
    """The function of a test; raises AttributeError if there is none."""
    file, _, name = node.partition("::")
    return getattr(module_of(file), name)


def values_of(node: str, parameter: str) -> list[str]:
    """Values of a parameter of a test, as they are in its marks."""
    found = []
    for mark in getattr(function_of(node), "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        for case in mark.args[1] if parameter in names else ():
            values = getattr(case, "values", case if len(names) > 1 else (case,))
            found.append(str(values[list(names).index(parameter)]))
    return list(dict.fromkeys(found))


FOUR_BIT, FLOAT8 = "sharding/test_four_bit.py::", "sharding/test_float8.py::"
SEQUENCE, PIPE = "sharding/test_sequence_parallel.py::", "pipelines/test_pipeline"
LORA, COMPILED = "fused_layers/test_lora_layers.py::", "fused_layers/test_compiled_layers.py::"
DISTILL, DRAFT = "fused_head/test_distillation.py::", "fused_head/test_draft_heads.py::"
MTP, REPLAY = "fused_head/test_mtp.py::", "routing/test_replay.py::"
EXPERT_PARALLEL = "sharding/test_expert_parallel.py::"
RECURRENT, EXPERTS = "fused_layers/test_recurrent_layers.py::", "fused_layers/test_experts.py::"
TESTS = (
    Test(FOUR_BIT + "test_gradients_of_all_formats", "4 bits, LoRA, packed", by="strategy", without=("fsdp1",)),
    Test(FOUR_BIT + "test_gradients_of_all_formats", "4 bits, LoRA, ckpt", by="strategy", without=("fsdp1",)),
    Test(
        FOUR_BIT + "test_gradients_of_experts_under_every_strategy",
        "4-bit experts, 4 bits, experts, LoRA, packed",
        by="strategy",
        without=("fsdp1",),
    ),
    Test(
        FOUR_BIT + "test_gradients_of_experts_under_every_strategy",
        "4-bit experts, 4 bits, experts, LoRA, ckpt",
        by="strategy",
        without=("fsdp1",),
    ),
    Test(FOUR_BIT + "test_compiled_layers_with_experts_of_4_bits", "4-bit experts, compile, LoRA, experts", "s"),
    Test(LORA + "test_gradients_of_two_ranks", "LoRA", by="name"),
    Test(FLOAT8 + "test_gradients_are_those_of_torchao_unwrapped", "float8", by="layout"),
    Test(FLOAT8 + "test_gradients_of_lora_under_checkpointing", "float8, LoRA, ckpt", "2"),
    Test(FLOAT8 + "test_experts_stay_in_the_compute_dtype", "float8, experts", "2"),
    Test(FLOAT8 + "test_compiled_layers", "float8, compile", "2"),
    Test(EXPERT_PARALLEL + "test_parts_of_sequences_are_sent_to_experts", "ep, sp, experts", "2"),
    Test(EXPERT_PARALLEL + "test_layers_of_further_tokens_have_experts_on_ranks", "ep, MTP, experts", "2"),
    Test(EXPERT_PARALLEL + "test_compiled_layers", "ep, compile, experts", "2"),
    Test(EXPERT_PARALLEL + "test_linear_layers_in_float8", "ep, float8, experts", "2"),
    Test(SEQUENCE + "test_two_parts", "sp, packed", "2"),
    Test(SEQUENCE + "test_two_parts", "sp, experts", "2"),
    Test(SEQUENCE + "test_four_ranks", "sp, packed", "2H"),
    Test(SEQUENCE + "test_options", "sp, packed", "2", by="name"),
    Test(SEQUENCE + "test_other_objectives", "sp, RL", "2", by="lm_head"),
    Test(SEQUENCE + "test_other_objectives", "sp, distill", "2", by="lm_head"),
    Test(COMPILED + "test_gradients_of_two_ranks", "compile", by="name"),
    Test(COMPILED + "test_gradients_of_two_ranks", "compile, vocab, ckpt", "2"),
    Test(EXPERTS + "test_compiled_layers_take_experts_as_an_operator", "experts, compile, LoRA", "s"),
    Test(RECURRENT + "test_documents_are_apart_in_compiled_layers", "hybrid, packed, compile", "s"),
    Test(RECURRENT + "test_distillation_of_packed_documents", "hybrid, packed, distill", "s"),
    Test(DISTILL + "test_every_pair_of_layouts", "distill", by="student"),
    Test(DISTILL + "test_four_ranks", "distill", by="student"),
    Test(DISTILL + "test_models_and_steps", "distill, ckpt", by="layout"),
    Test(DRAFT + "test_every_layout_of_draft_and_target", "drafts, distill", by="layout"),
    Test(DRAFT + "test_every_pair_of_wrapped_models", "drafts, distill", by="student"),
    Test(DRAFT + "test_a_compiled_draft", "drafts, compile", "s"),
    Test("sharding/test_sharded_by_transformers.py::test_lora_on_a_sharded_model", "LoRA, ep", "T"),
    Test("sharding/test_sharded_by_transformers.py::test_further_tokens_of_a_sharded_model", "MTP, ep", "T"),
    Test(
        "sharding/test_sharded_by_transformers.py::test_documents_of_a_hybrid_with_experts_on_several_ranks",
        "hybrid, ep, packed, experts",
        "2T",
    ),
    Test(MTP + "test_mtp_beside_log_probabilities", "MTP, RL", "s"),
    Test(MTP + "test_mtp_with_distillation", "MTP, distill", "s"),
    Test(MTP + "test_mtp_with_a_frozen_model_and_checkpointing", "MTP, frozen, ckpt", "s"),
    Test("fused_layers/test_masked_diffusion.py::test_every_layout", "diffusion, packed", by="name"),
    Test(REPLAY + "test_lora_on_all_linear_layers_and_experts", "replay, LoRA, compile, experts", "s"),
    Test("sharding/test_units.py::test_checkpointed_layers_in_units", "units, ckpt", "2"),
    Test(PIPE + "s.py::test_pipeline_is_the_uncut_model", "pipeline, packed", "s"),
    Test(PIPE + "s.py::test_pipeline_is_the_uncut_model", "pipeline, experts", "s"),
    Test(PIPE + "s.py::test_pipeline_with_fsdp2_is_the_uncut_model", "pipeline, packed", "2"),
    Test(PIPE + "s.py::test_pipeline_with_fsdp2_is_the_uncut_model", "pipeline, experts", "2"),
    Test(PIPE + "s.py::test_pipeline_with_replicas_or_rows_of_lm_head", "pipeline", by="data"),
    Test(PIPE + "_further_tokens.py::test_further_tokens_are_those_of_the_uncut_model", "pipeline, MTP", by="data"),
    Test(PIPE + "_further_tokens.py::test_options", "pipeline, MTP, frozen", "2"),
    Test(PIPE + "_steps.py::test_pipeline_with_options_of_fsdp2", "pipeline", "2", by="name"),
    Test(PIPE + "_steps.py::test_pipeline_with_checkpointed_layers", "pipeline, ckpt", "2"),
    Test(PIPE + "_steps.py::test_pipeline_keeps_documents_of_recurrent_layers_apart", "pipeline, hybrid, packed", "s"),
)
_STAGES = PIPE + "_refusals.py::test_pipeline_stage_refuses_a_model_that_is_not_whole_or_tied"
_STAGE, _CALLS = (
    PIPE + "_refusals.py::test_" + n
    for n in ("wrap_refuses_a_stage_on_all_ranks", "calls_refuse_what_only_a_whole_model_has")
)
_FOUR_BITS = "program/test_four_bit_runs.py::test_refusals"
_NO_VOCAB = "sharding/test_vocab_parallel_head.py::test_what_does_not_go_with_it"
_CONFORMANCE = "conformance/test_conformance.py::test_two_ranks"
_BY_STRATEGY = "program/test_features_by_strategy.py::test_a_feature_by_strategy"
_NO_LORA = "leave the head out of its target_modules"
_RUN = "in the training program"
_NO_SP = "cannot be computed on a mesh with an axis 'sp'"
REFUSALS = (
    Refusal(
        "LoRA, vocab", _CONFORMANCE, _NO_LORA, "2H", "LoRA on lm_head", "lm_head is 'vocab_parallel' but …, or use"
    ),
    Refusal("LoRA", _CONFORMANCE, _NO_LORA, "TX", "LoRA on lm_head", "LoRA on a tensor-parallel lm_head"),
    Refusal(
        "4 bits",
        FOUR_BIT + "test_gradients",
        "FSDP1 would flatten",
        "1",
        "without frozen='replicate', which is the way out",
    ),
    Refusal(
        "LoRA, experts",
        EXPERTS + "test_lora_on_experts_that_peft_merges_is_refused_under_fsdp1",
        "strategy='fsdp2'",
        "1",
        "LoRA on experts without layer kernels",
        "which PEFT merges into the parameter in each forward",
    ),
    Refusal(
        "LoRA, 4-bit experts",
        FOUR_BIT + "test_gradients_of_experts_under_every_strategy",
        "which PEFT's own forward reads the second one without its LoRA",
        "3",
        "LoRA on both parameters of gpt-oss's experts of 4 bits",
        "; have it added by grouped products",
    ),
    Refusal(
        "LoRA, ep",
        "sharding/test_sharded_by_transformers.py::test_lora_on_experts_of_several_ranks_is_refused",
        "has put on several ranks",
        "",
        "LoRA on experts",
        "of experts that transformers has put",
    ),
    Refusal(
        "LoRA, ep",
        "sharding/test_sharded_by_transformers.py::test_lora_on_a_sharded_model",
        "nothing averages the gradients",
        "",
        "models that transformers has sharded",
        "PEFT added them after transformers",
    ),
    Refusal(
        "MTP, ep",
        "sharding/test_sharded_by_transformers.py::test_further_tokens_of_a_sharded_model",
        "is sharded already",
        "",
        "models that transformers has sharded",
        "is sharded already; add MultiTokenPrediction",
    ),
    Refusal(
        "4-bit experts, ep",
        EXPERT_PARALLEL + "test_experts_of_four_bits_are_refused",
        "are of 4 bits, whose blocks belong to no expert",
        "2",
    ),
    Refusal(
        "frozen, vocab",
        _CONFORMANCE,
        "FSDP2 has nothing to shard",
        "2H",
        "only lm_head trains",
        "but only lm_head trains",
    ),
    Refusal(
        "frozen, offload",
        "sharding/test_frozen.py::test_refusals",
        "but cpu_offload is True",
        "12",
        "replicated",
        "which keeps full frozen parameters",
    ),
    Refusal(
        "frozen, float8",
        "sharding/test_frozen.py::test_refusals",
        "but frozen is 'replicate'",
        "2",
        "replicated",
        "with which no weight is all-gathered in float8",
    ),
    Refusal("4 bits, float8", _FOUR_BITS, "none of which works on weights of 4 bits", "", _RUN),
    Refusal("4 bits, offload", _FOUR_BITS, "none of which works on weights of 4 bits", "", _RUN),
    Refusal("4 bits, compile", _FOUR_BITS, "none of which works on weights of 4 bits", "", _RUN),
    Refusal(
        "experts, tiles",
        "fused_layers/test_mlp_memory.py::test_tiles_without_kernels_or_gated_mlps_are_refused",
        "has no gated MLP that is computed by kernels",
        "",
        "experts in every layer",
        "has no gated MLP that is computed by",
    ),
    Refusal("vocab, offload", _NO_VOCAB, "cpu_offload is True", source="is 'vocab_parallel' but cpu_offload"),
    Refusal("vocab", _NO_VOCAB, "tensor-parallel axis", "TX", "", "the mesh has a tensor-parallel axis, which"),
    Refusal(
        "float8, offload",
        FLOAT8 + "test_wrong_options",
        "but cpu_offload is True",
        "2",
        "rowwise",
        "which would cast on the CPU",
    ),
    Refusal(
        "compile, tiles",
        COMPILED + "test_tiles_of_the_mlp_are_refused",
        "but the layers are compiled",
        source="at once; leave one of",
    ),
    Refusal("hybrid, sp", SEQUENCE + "test_refusals", "conv", when="layers that mix tokens", source=_NO_SP),
    Refusal("MTP, sp", SEQUENCE + "test_refusals", "predicts further tokens, which other ranks hold"),
    Refusal("distill, sp", _BY_STRATEGY, "has no distillation", "", _RUN, "which has no distillation"),
    Refusal(
        "sp, diffusion",
        "fused_layers/test_masked_diffusion.py::test_sequence_parallelism_refuses_both_directions",
        "its attention is not causal",
        when="attention in both directions",
        source=_NO_SP,
    ),
    Refusal(
        "distill, RL",
        DISTILL + "test_refused_before_anything_runs",
        "outputs was given to a distillation loss",
        source="was given to a distillation loss",
    ),
    Refusal("pipeline, LoRA", _STAGES, "has adapters of PEFT", source="supported in pipelines; train it"),
    Refusal("pipeline, 4 bits", _STAGES, "has quantised weights", source="supported in pipelines; train it"),
    Refusal("pipeline, 4-bit experts", _STAGES, "has quantised weights", source="supported in pipelines; train it"),
    Refusal("pipeline, vocab", _STAGE, "whose collectives a schedule does not know"),
    Refusal("pipeline, ep", _STAGE, "whose collectives a schedule does not know"),
    Refusal(
        "pipeline, RL", PIPE + "_refusals.py::test_wrap_refuses_what_a_stage_cannot_have", "a pipeline has a loss only"
    ),
    Refusal("pipeline, distill", _CALLS, "expected a whole model"),
)


ONLY = {
    "ep": "2T",
    "sp": "2H",
    "vocab": "2H",
    "float8": "2H",
    "compile": "s12HX",
    "offload": "12HXz3",
    "pipeline": "s2HT",
    "units": "2HX",
}
"""layouts that features exist in, of those that do not exist in every one"""


@dataclass
class Table:
    """What is known of each pair of features, by names in the order of FEATURES; one feature alone is a pair with
    itself."""

    exact: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """signs of layouts"""
    refused: dict[tuple[str, str], list[Refusal]] = field(default_factory=dict)

    def add(self, features: frozenset[str], sign: str) -> None:
        for pair in pairs_of(features):
            self.exact.setdefault(pair, set()).add(sign)

    @property
    def counts(self) -> dict[str, int]:
        """Cells of two features and a layout. Without a layout, a refusal is of all that are not exact."""
        found = dict.fromkeys(("exact", "refused", "untested"), 0)
        for pair in combinations(FEATURES, 2):
            where = set.intersection(*(set(ONLY.get(name, "".join(LAYOUTS))) for name in pair))
            exact = self.exact.get(pair, set())
            refused = where & {sign for one in self.refused.get(pair, ()) for sign in one.layouts or LAYOUTS} - exact
            found["exact"] += len(exact)
            found["refused"] += len(refused)
            found["untested"] += len(where - exact - refused)
        return found


def pairs_of(features: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs in the order of FEATURES, each feature with itself among them."""
    ordered = [name for name in FEATURES if name in features]
    return [(one, one) for one in ordered] + list(combinations(ordered, 2))


def read() -> Table:
    """Reads the suites and the rows above."""
    table = Table()
    hybrids, paired = (module_of(f"conformance/{name}.py") for name in ("test_hybrids", "test_feature_pairs"))
    cells = [cell for cell in CELLS if not cell.refused]
    with registered(hybrids.HYBRID_MODELS | hybrids.OF_ATTENTION):
        for cell in (*cells, *(case.values[0] for case in (*hybrids.cells(), *paired.cells()))):
            table.add(features_of(cell), layout_of(cell))
        for case in paired.students():
            table.add(features_of(case.values[0]) | {"distill"}, layout_of(case.values[0]))
    for test in TESTS:
        for features, sign in test.combinations():
            table.add(features, sign)
    for refusal in REFUSALS:
        pair = pairs_of(refusal.features.split(", "))[-1]
        table.refused.setdefault(pair, []).append(refusal)
    return table


@contextmanager
def registered(models: dict[str, Model]) -> Iterator[None]:
    """Within, cells may name these models, too."""
    before = dict(MODEL)
    MODEL.update(models)
    yield
    MODEL.clear()
    MODEL.update(before)


HEAD = """# Two features together

Written by `make combinations` from the tests. Where a row and a column meet stand the layouts in which a test trains
the two features together:

{signs}

- A sign: every gradient equals that of the unwrapped model in fp64 (float8: of torchao's layers; ZeRO, 4 bits: in
  fp32). "all": in every layout.
- A number: refused, by the sentence below. Beside signs, the sentence is of a variant.
- Nothing: no test has the two. It may work: call [`liger_dist.verify`](api.md) on your model and a batch.

Example: QLoRA with multi-token prediction under FSDP2. Row **MTP** and column **4 bits** have the sign `2`: exact.
A row and its own column have the feature alone. Every model has the fused loss and the fused layers. The
[support matrix](support_matrix.md) has all kinds of layouts and data.

"""


def render() -> str:
    """Returns the page."""
    table, numbers = read(), dict[str, int]()
    names = list(FEATURES)
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for place, row in enumerate(names):
        cells = [_cell(table, (column, row), numbers) for column in names[: place + 1]]
        lines.append([f"**{row}**", *cells, *[""] * (len(names) - len(cells))])
    lines_of_signs = ([f"`{sign}`" for sign in LAYOUTS], ["---"] * len(LAYOUTS), LAYOUTS.values())
    signs = "\n".join(f"| {' | '.join(line)} |" for line in lines_of_signs)
    parts = [HEAD.format(signs=signs), *(f"| {' | '.join(line)} |\n" for line in lines), "\n## Names\n\n"]
    parts += [f"- **{name}**: {words}\n" for name, words in FEATURES.items() if words]
    parts.append("\n## Refusals\n\n")
    parts += [f"{number}. {sentence}\n" for sentence, number in numbers.items()]
    found = table.counts
    shares = f"{found['exact']} are exact, {found['refused']} refused and {found['untested']} untested"
    parts.append(f"\nOf {sum(found.values())} cells of two features and a layout of both {shares}.\n")
    return "".join(parts)


def _cell(table: Table, pair: tuple[str, str], numbers: dict[str, int]) -> str:
    exact = table.exact.get(pair, set())
    parts = ["all" if exact == LAYOUTS.keys() else "".join(sign for sign in LAYOUTS if sign in exact)]
    for refusal in table.refused.get(pair, ()):
        number = numbers.setdefault(sentence_of(refusal), len(numbers) + 1)
        parts.append(f"[{refusal.layouts and refusal.layouts + ':'}{number}](#refusals)")
    return " ".join(filter(None, parts))


def sentence_of(refusal: Refusal) -> str:
    """Returns a refusal's sentence as the code has it, with an ellipsis for each value."""
    words = refusal.source or refusal.words
    found = {text for text in _sentences() if words in text}
    if len(found) != 1:
        raise LookupError(f"{len(found)} sentences of the code have the words {words!r}: {found}")
    (sentence,) = found
    return f"{refusal.when}: {sentence}" if refusal.when else sentence


@cache
def _sentences() -> frozenset[str]:
    """Every text of the library and of its training program."""
    found = set()
    for folder in ("liger_dist", "launch/liger_dist_train"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    found.add(
                        "".join(
                            str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "…"
                            for part in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    found.add(node.value)
    return frozenset(found)
