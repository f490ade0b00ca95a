"""Packed documents in every family of transformers' causal and image-text models, by every way of telling them apart:
loss and every gradient are those of documents alone, or the call is refused. There is no third outcome."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import flash_attention
import on_device
import pytest
import torch
import transformers
from documents import alone, trained
from documents import quiet as quiet
from families import FAMILIES, Family, Hints, batch_for, build
from models import assert_below, norm_errors
from torch import Tensor

import liger_dist
from liger_dist.fused_layers.packed_calls import is_recurrent
from liger_dist.sharding.process_groups import compute_device

LENGTHS = (5, 1, 4, 2)
TOKENS = sum(LENGTHS)
POSITIONS = torch.cat([on_device.arange(length) for length in LENGTHS])[None]
ENDS = on_device.tensor([0, *LENGTHS]).cumsum(0).int()
BY_POSITIONS = {"position_ids": POSITIONS}
BY_LENGTHS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 5, "max_length_k": 5}
BY_NUMBERS = {"seq_idx": torch.repeat_interleave(on_device.arange(4), on_device.tensor(LENGTHS))[None].int()}
IDS = on_device.randint(5, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(POSITIONS == 0, -100)
ONES = {"attention_mask": on_device.ones(1, TOKENS, dtype=torch.long)}
WAYS: dict[str, dict[str, Any]] = {
    "position_ids": BY_POSITIONS,
    "cu_seq_lens": BY_LENGTHS,
    "both": BY_POSITIONS | BY_LENGTHS,
    "seq_idx": BY_NUMBERS,
    "position_ids [3, B, S]": {"position_ids": POSITIONS.expand(3, 1, -1)},
    "position_ids [4, B, S]": {"position_ids": POSITIONS.expand(4, 1, -1)},
    "cu_seq_lens and a mask of ones": BY_LENGTHS | ONES,
    "position_ids and a mask of numbers": BY_POSITIONS | {"attention_mask": 1 + BY_NUMBERS["seq_idx"].long()},
}
TOLERANCE = 5e-6
"""parts of recurrent layers are fp32 in fp64 models too"""
OF_FP32 = 2e-4
"""where the family's own code lets no fp64 through"""
OF_ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16}
MORE_HINTS = {
    "lfm2": Hints(config={"layer_types": ["conv", "full_attention"] * 2}),
    "zamba": Hints(config={"layer_types": ["linear_attention", "hybrid"] * 2, **OF_ZAMBA}),
    "zamba2": Hints(
        config={
            "layer_types": ["linear_attention", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
            "num_key_value_heads": 4,
            **OF_ZAMBA,
        }
    ),
}
"""what the default config lacks to have such a layer, or to be built"""
HYBRID_NAMES = """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_loop_text inkling2_text inkling_text jamba
    kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2 zaya
"""
HYBRIDS = frozenset(HYBRID_NAMES.split())
"""causal families of transformers 5.24 with recurrent or convolution layers"""
USUAL_NAMES = """
    afmoe bart bert bloom cpmant deepseek_v3 deepseek_v32 deepseek_v4 gemma2 gemma3 gemma4_text glm4v gpt2 gpt_oss
    granitemoe_swa granitemoehybrid inkling2_loop_text internvl kimi_linear llama llama4_text llava mamba2 minimax mpt
    olmoe opt qwen2_5_vl qwen3_5 qwen3_moe qwen3_next qwen3_vl reformer rwkv t5gemma2 whisper zamba xlstm
"""
USUAL = frozenset(USUAL_NAMES.split())
"""what ``make test`` runs: a family of each kind of attention, mask, positions and recurrence"""
PAGE = Path(__file__).parents[2] / "docs" / "packed_families.md"
HEAD = """# Packed documents by family

Written by `make families` with transformers {version}: every entry of its causal-LM and image-text-to-text mappings
that the generic shrinking of `tests_multi_gpu/families.py` builds, as a tiny random model, with "eager" attention and
with "sdpa". A row of four documents is told apart in {ways} ways:

{names}

Loss and every gradient of the wrapped model are those of the unwrapped model on each document alone, to {fp64:g} in
fp64 and to {fp32:g} where the family's own code is fp32, or the call is refused with a `LigerDistError` before any
layer runs. No family is named in the library.

{exact} of {total} combinations of family and attention are exact in every way that the model accepts. These are
refused, as `wrap`'s trial found it ([how](packing.md#how-a-model-is-tried)); pad rows of single documents instead.

| family | attention | reason |
|---|---|---|
"""


@dataclass
class Outcome:
    """Of one family with one attention."""

    skipped: str = ""
    ways: dict[str, str] = field(default_factory=dict)
    """by way: "exact", "refused", or "not accepted" where the model's own code raises"""
    reason: str = ""
    is_hybrid: bool = False


def all_families() -> list[Family]:
    return [family for family in families.families() if family.mapping in ("causal", "image-text")]


def cases() -> Iterator[Any]:
    """Every family with both implementations; ``make test`` has :data:`USUAL`, with one each."""
    for place, family in enumerate(all_families()):
        for attention in ("eager", "sdpa"):
            is_usual = family.name in USUAL and attention == ("eager", "sdpa")[place % 2]
            marks = [] if is_usual else [pytest.mark.nightly]
            yield pytest.param(family, attention, marks=marks, id=f"{family}, {attention}")


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[Family, str], Outcome]:
    return {}


@pytest.fixture(autouse=True)
def hints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, more in MORE_HINTS.items():
        monkeypatch.setitem(FAMILIES, name, more)


def made(family: Family, attention: str) -> Any:
    """A tiny model in fp64 if its code lets fp64 through; skips what cannot be built and trained."""
    try:
        # An index that the family's own code does not have ends a process that uses a GPU.
        model: Any = build(family).train().cpu()
        if attention == "sdpa" and not model._supports_sdpa:
            pytest.skip("the family has no sdpa")
        model.set_attn_implementation(attention)
        model(**batch_for(family, model))
        model.to(compute_device())
        batch = batch_for(family, model)
    except Exception as error:
        pytest.skip(f"not built by the generic shrinking: {type(error).__name__}: {error}"[:200])
    try:
        model.double()(**batch)
        padded = model(**padded_rows("left"), use_cache=False).logits if is_recurrent(model) else None
    except Exception:
        return model.float()
    # Two masks of padding add up to -inf in fp64 alone.
    return model if padded is None or padded.isfinite().all() else model.float()


def tolerance_of(family: Family, model: Any) -> float:
    is_fp64 = next(model.parameters()).dtype == torch.float64
    return TOLERANCE if is_fp64 else OF_FP32


@pytest.mark.parametrize(("family", "attention"), cases())
def test_documents_are_apart_or_refused(
    family: Family, attention: str, outcomes: dict[tuple[Family, str], Outcome]
) -> None:
    outcome = outcomes[family, attention] = Outcome(skipped="skipped")
    model = made(family, attention)
    try:
        truth = alone(model, {"input_ids": IDS, "labels": LABELS} | BY_POSITIONS)
    except (TypeError, ValueError) as error:
        pytest.skip(f"takes no text alone: {error}"[:200])
    try:
        liger_dist.wrap(model, "none")
    except liger_dist.LigerDistError as refusal:
        pytest.skip(str(refusal)[:200])
    outcome.skipped = ""
    outcome.is_hybrid = "one row" in liger_dist.explain(model).packing
    tolerance = tolerance_of(family, model)
    for way, given in WAYS.items():
        outcome.ways[way] = outcome_of_way(model, way, given, truth, tolerance, outcome)
    is_refused = "refused:" in liger_dist.explain(model).packing
    assert is_refused == (outcome.ways["position_ids"] == "refused")
    assert (outcome.ways["cu_seq_lens"] == "refused") == is_refused
    if not is_refused:
        assert {outcome.ways[way] for way in ("position_ids", "cu_seq_lens", "both", "seq_idx")} == {"exact"}
        check_evaluation(model, truth, tolerance)
        check_checkpointing(model, truth, tolerance)
        check_several_rows(model, truth, tolerance)
    if family.mapping == "causal" and not transformers.__version__.startswith("5.24."):
        return
    if family.mapping == "causal":
        assert outcome.is_hybrid == (family.name in HYBRIDS)
    if outcome.is_hybrid:
        for side in ("left", "right"):
            check(model, padded_rows(side), truth, tolerance, side)


def outcome_of_way(model: Any, way: str, given: dict[str, Any], truth: Any, tolerance: float, outcome: Outcome) -> str:
    try:
        check(model, {"input_ids": IDS, "labels": LABELS} | given, truth, tolerance, way)
    except liger_dist.LigerDistError as refusal:
        outcome.reason = outcome.reason or reason_in(str(refusal))
        return "refused" if "a separate row" in str(refusal) else f"refused otherwise: {refusal}"
    except (TypeError, ValueError, RuntimeError, IndexError):
        # Positions of other shapes, which the family's own code does not read.
        assert way.endswith("S]"), way
        return "not accepted"
    return "exact"


def reason_in(refusal: str) -> str:
    return refusal.split("), but ", 1)[-1].split(". Give each")[0]


def check(model: Any, batch: dict[str, Any], truth: Any, tolerance: float, what: str) -> None:
    losses, gradients = trained(model, batch)
    # Experts that no token has chosen have a gradient of zeros, or none.
    gradients = {name: gradient for name, gradient in gradients.items() if name in truth[1] or gradient.any()}
    assert losses == pytest.approx(truth[0], abs=tolerance), what
    assert_below(norm_errors(gradients, truth[1]), tolerance, what)


def check_evaluation(model: Any, truth: Any, tolerance: float) -> None:
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=IDS, labels=LABELS, **BY_LENGTHS).loss
    model.train()
    assert float(loss) == pytest.approx(truth[0][0], abs=tolerance)


def check_several_rows(model: Any, truth: Any, tolerance: float) -> None:
    """The same row twice, by each argument; 3 and 4 rows are in
    :func:`test_rows_that_are_as_many_as_kinds_of_positions`."""
    batch = {"input_ids": IDS.repeat(2, 1), "labels": LABELS.repeat(2, 1)}
    for way, given in ways_of_rows(2).items():
        check(model, batch | given, truth, tolerance, f"two rows, {way}")


def ways_of_rows(rows: int) -> dict[str, dict[str, Any]]:
    ends = torch.cat([ENDS[:1], *(ENDS[1:] + TOKENS * row for row in range(rows))])
    return {
        "positions": {"position_ids": POSITIONS.expand(rows, -1)},
        "lengths": {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5},
        "numbers": {"seq_idx": BY_NUMBERS["seq_idx"].expand(rows, -1)},
    }


def check_checkpointing(model: Any, truth: Any, tolerance: float) -> None:
    if not model.supports_gradient_checkpointing:
        return
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        embedding = model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
        batch = {"input_ids": IDS, "labels": LABELS} | BY_LENGTHS
        # Torch's own limit, of layers that share a tensor with a graph.
        with contextlib.suppress(*([SecondBackwardError] if use_reentrant else [])), second_backwards_noted():
            check(model, batch, truth, tolerance, f"reentrant {use_reentrant}")
        hook.remove()
        model.gradient_checkpointing_disable()


class SecondBackwardError(Exception):
    """A backward went through a graph for the second time."""


@contextlib.contextmanager
def second_backwards_noted() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise (SecondBackwardError(str(error)) if "a second time" in str(error) else error) from error


def padded_rows(side: str) -> dict[str, Any]:
    """The documents in separate rows, padded on a side."""
    ids, labels = (on_device.full((len(LENGTHS), max(LENGTHS)), value) for value in (7, -100))
    mask = torch.zeros_like(ids)
    for row, (document, target) in enumerate(zip(IDS[0].split(LENGTHS), LABELS[0].split(LENGTHS), strict=True)):
        at = slice(-len(document), None) if side == "left" else slice(len(document))
        ids[row, at], labels[row, at], mask[row, at] = document, target, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "gpt_oss", "llava", "llama", "qwen3_5"])
@pytest.mark.parametrize("rows", [3, 4])
def test_rows_that_are_as_many_as_kinds_of_positions(rows: int, name: str) -> None:
    """Positions ``[3, S]`` and ``[4, S]`` are of texts, and not those of images."""
    family = next(family for family in all_families() if family.name == name)
    model = made(family, "eager")
    truth = alone(model, {"input_ids": IDS, "labels": LABELS} | BY_POSITIONS)
    liger_dist.wrap(model, "none")
    batch = {"input_ids": IDS.repeat(rows, 1), "labels": LABELS.repeat(rows, 1)}
    for way, given in ways_of_rows(rows).items():
        check(model, batch | given, truth, tolerance_of(family, model), way)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family.name in USUAL else [pytest.mark.nightly], id=family.name)
        for family in all_families()
    ],
)
def test_flash_attention_keeps_documents_apart(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the call is refused."""
    model = made(family, "eager")
    if not model._supports_flash_attn:
        pytest.skip("the family has no FlashAttention")
    if getattr(model.config, "prefix_lm", False):
        pytest.skip("the family refuses FlashAttention for its masks")
    flash_attention.select(model, flash_attention.NAMES[0], monkeypatch)
    try:
        truth = alone(model, {"input_ids": IDS, "labels": LABELS} | BY_POSITIONS)
        liger_dist.wrap(model, "none")
    except (TypeError, ValueError, liger_dist.LigerDistError) as error:
        pytest.skip(f"takes no text alone, or is not wrapped: {error}"[:200])
    outcome = Outcome()
    for way in ("position_ids", "cu_seq_lens", "both"):
        outcome.ways[way] = outcome_of_way(model, way, WAYS[way], truth, tolerance_of(family, model), outcome)
    assert len(set(outcome.ways.values())) == 1, outcome
    if outcome.ways["both"] == "exact":
        check_several_rows(model, truth, tolerance_of(family, model))
    else:
        assert re.search(REFUSED_WITH_FLASH_ATTENTION, outcome.reason), outcome


REFUSED_WITH_FLASH_ATTENTION = "|".join(
    (
        "depend on its place in the row",  # learned positions
        "Install `flash-linear-attention`",  # what transformers says of recurrent layers that get lengths
        "which is the model's own",
        "gets no cu_seq_lens_q",  # layers that do not pass them on
        "one text for each row",
    )
)
ADAPTED = ("llama", "gpt_oss")
"""what ``make test`` runs with adapters"""


def with_adapters() -> Iterator[Any]:
    for family in all_families():
        marks = [] if family.mapping == "causal" and family.name in ADAPTED else [pytest.mark.nightly]
        yield pytest.param(family, marks=marks, id=str(family))


@pytest.mark.parametrize("family", with_adapters())
def test_documents_are_apart_with_lora(family: Family) -> None:
    import peft

    model = made(family, "eager")
    options = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False, exclude_modules=["lm_head"])
    try:
        adapted: Any = peft.get_peft_model(model, options, autocast_adapter_dtype=False).to(compute_device())
        truth = alone(adapted, {"input_ids": IDS, "labels": LABELS} | BY_POSITIONS)
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        pytest.skip(f"takes no LoRA on all linear layers: {error}"[:200])
    try:
        liger_dist.wrap(adapted, "none")
    except liger_dist.LigerDistError as refusal:
        pytest.skip(str(refusal)[:200])
    batch = {"input_ids": IDS, "labels": LABELS}
    if "refused:" in liger_dist.explain(adapted).packing:
        with pytest.raises(liger_dist.LigerDistError, match="a separate row"):
            adapted(**batch, **BY_POSITIONS)
        return
    for way in ("position_ids", "cu_seq_lens", "seq_idx"):
        check(adapted, batch | WAYS[way], truth, 10 * tolerance_of(family, model), way)


def forget_a_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents that a call reads lack the second border."""
    from liger_dist.model.documents import Documents

    own = Documents.__init__

    def without(self: Documents, begins: Tensor, *args: Any, **kwargs: Any) -> None:
        begins = begins.clone()
        begins[:, LENGTHS[0] + LENGTHS[1]] = False
        own(self, begins, *args, **kwargs)

    monkeypatch.setattr(Documents, "__init__", without)


def ask_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model's own masks are trusted."""
    from liger_dist.fused_layers import recurrent
    from liger_dist.trials import model_run

    monkeypatch.setattr(recurrent, "token_dependency", lambda *args, **kwargs: model_run.Found())


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a border is forgotten": (forget_a_border, "llama"),
    "a border is forgotten, gpt_oss": (forget_a_border, "gpt_oss"),
    "a border is forgotten, qwen3_next": (forget_a_border, "qwen3_next"),
    "no trial": (ask_no_trial, "bloom"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mixed_documents_are_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, name = MUTATIONS[mutation]
    family = next(family for family in all_families() if family.name == name)
    model = made(family, "eager")
    truth = alone(model, {"input_ids": IDS, "labels": LABELS} | BY_POSITIONS)
    if mutate is ask_no_trial:
        mutate(monkeypatch)
    liger_dist.wrap(model, "none")
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(model, {"input_ids": IDS, "labels": LABELS} | BY_LENGTHS, truth, TOLERANCE, "mutated")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("mamba2", "minimax", "qwen3_next") else [pytest.mark.nightly])
        for name in sorted(HYBRIDS)
    ],
)
def test_recurrent_layers_are_found_in_every_dtype(name: str) -> None:
    """``Module.to`` casts a model's buffers too, and the run without weights computes in fp32."""
    try:
        family = next(one for one in all_families() if one.mapping == "causal" and one.name == name)
        model: Any = build(family).eval()
    except (StopIteration, OSError, ValueError) as error:
        pytest.skip(f"not in this transformers, or not built by the generic shrinking: {error}")
    for dtype in (torch.bfloat16, torch.float64):
        assert is_recurrent(model.to(dtype)), dtype


def test_the_page_says_so(outcomes: dict[tuple[Family, str], Outcome], request: pytest.FixtureRequest) -> None:
    if len(outcomes) < len(list(cases())):
        pytest.skip("only a part of the families was run")
    page = page_of({case: outcome for case, outcome in outcomes.items() if not outcome.skipped})
    if request.config.getoption("--write-pages"):
        PAGE.write_text(page)
    if f"transformers {transformers.__version__}" not in PAGE.read_text() or torch.cuda.is_available():
        pytest.skip("the page was written with another release of transformers, or without a GPU")
    assert PAGE.read_text() == page, "docs/packed_families.md is not what this run saw; `make families` writes it"


def page_of(found: dict[tuple[Family, str], Outcome]) -> str:
    refused = {case: outcome for case, outcome in found.items() if outcome.ways["position_ids"] == "refused"}
    page = HEAD.format(
        version=transformers.__version__,
        ways=len(WAYS),
        names="\n".join(f"- {way}" for way in WAYS),
        fp64=TOLERANCE,
        fp32=OF_FP32,
        exact=len(found) - len(refused),
        total=len(found),
    )
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for (family, attention), outcome in refused.items():
        by_reason.setdefault((family.mapping, family.name, outcome.reason[:160]), []).append(attention)
    for (mapping, name, reason), attention in by_reason.items():
        clean = " ".join(reason.split()).replace("|", "\\|")
        page += f"| {mapping} {name} | {', '.join(attention)} | {clean} |\n"
    page += "\nExact, of the causal families:\n\n" + lines_of(found, refused, "causal")
    return page + "\nExact, of the image-text families, on text:\n\n" + lines_of(found, refused, "image-text")


def lines_of(found: dict[Any, Outcome], refused: dict[Any, Outcome], mapping: str) -> str:
    names = sorted({family.name for family, _ in found.keys() - refused.keys() if family.mapping == mapping})
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > 115:
            lines.append("")
        lines[-1] += f"{name}, " if name != names[-1] else name
    return "\n".join(line.rstrip() for line in lines) + "\n"
