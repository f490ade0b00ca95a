"""Every family of transformers' language models: fused and equal to its own loss, or unfused with a reason."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import transformers
from families import (
    OPTIONS,
    QUICK_OPTIONS,
    Family,
    batch_for,
    build,
    families,
    families_with_options,
    masked_families,
)
from models import norm_errors
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import liger_dist
from liger_dist.record import record_of
from liger_dist.sharding.process_groups import compute_device
from liger_dist.versions import numbers

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
HEAD = """# Families of models

Written by `make families`: every entry of transformers' causal-LM, image-text-to-text, seq2seq and masked-LM mappings
(transformers {version}), as a tiny random model from its own default config. No family is named in the library.

✓ fused: loss and every parameter's gradient equal the model's own, to {fp64:g} in fp64, and in fp32, with its layers
computed by kernels too (the last column counts those), to {fp32:g} or three times the error of its own fp32 gradients
against fp64. "fp32" alone: the family's own code does not let fp64 through. Otherwise the reason.

`make test-all` fails where a kind of layers of a family is no longer computed by kernels, with this release of
transformers also where fewer layers are, and with it or a later one where a family is no longer fused: this page is
what it expects. So does `make test`, of {usual} causal models and one in six of the others. Where the change is right,
`make families` writes the page anew.

{built} of {total} entries could be built and trained by the generic shrinking of `tests_multi_gpu/families.py`; {fused}
of them are fused ({share:.0%}), none differs.

| mapping | family | model | loss | layers |
|---|---|---|---|---|
"""
HEAD_OF_OPTIONS = """
## Options of released checkpoints

The same for options that default configs leave out, and with packed rows and rows padded on either side too, where
`wrap` selects the attention without a dense mask. Families that are not fused without the option either are left out.

| option | fused and equal | not fused, or not built by transformers |
|---|---|---|
"""
TOLERANCES = {torch.float64: 5e-6, torch.float32: 1e-5}
"""of transformers' losses, which go through fp32 even for fp64 models"""
REQUIRED_SHARE = 0.9


@dataclass(frozen=True)
class Outcome:
    kind: str
    """fused, unfused, not built"""
    words: str
    layers: tuple[tuple[str, int], ...] = ()
    """kinds of layers that are computed by kernels, and their number"""

    def __str__(self) -> str:
        words = self.words if self.kind != "not built" else f"not built: {self.words}"
        return " ".join(words.split()).replace("|", "\\|")[:160]


@pytest.fixture(scope="module")
def outcomes() -> dict[Family, Outcome]:
    return {}


USUAL = (
    *("bloom", "cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_oss", "granite"),
    *("llama", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "stablelm"),
    *("starcoder2", "prophetnet", "qwen2_moe", "doge", "hy_v4", "gemma4_text"),
)
"""causal families that ``make test`` always runs"""


def all_families() -> Iterator[Any]:
    """Every entry; with ``make test`` those of :data:`USUAL` and one in six of the others."""
    for place, family in enumerate([*families(), *masked_families()]):
        is_usual = family.mapping == "causal" and family.name in USUAL
        yield pytest.param(family, marks=[] if is_usual or place % 6 == 0 else [pytest.mark.nightly])


@pytest.mark.smoke
@pytest.mark.parametrize("family", all_families(), ids=str)
def test_equals_its_own_loss_or_says_why_not(
    family: Family, outcomes: dict[Family, Outcome], request: pytest.FixtureRequest
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes[family] = outcome_of(family)
    if not request.config.getoption("--write-pages"):
        assert_as_written(family, outcomes[family])


def assert_as_written(family: Family, outcome: Outcome) -> None:
    """A kind of layers that a family had swapped is swapped, whatever the release of transformers but for recurrent
    layers, and a family that was fused is fused, in the release of the page and later ones; with an option too. With
    the release of the page, without an option, as many layers are swapped."""
    written = expected().get((family.mapping, family.name))
    if written is None or outcome.kind == "not built":
        return
    is_fused, kinds = written
    is_older = numbers(transformers.__version__) < numbers(written_with())
    may_be_unfused = is_older or not is_fused
    assert outcome.kind == "fused" or may_be_unfused, f"{family} is no longer fused: {outcome.words}. {REGENERATE}"
    found = dict(outcome.layers)
    gone = sorted(kinds.keys() - found - (WRITTEN_ANEW if is_older else set()))
    assert not gone, f"no {' and no '.join(gone)} of {family} is computed by kernels any more. {REGENERATE}"
    if transformers.__version__ == written_with() and not family.option and not torch.cuda.is_available():
        fewer = {kind: (count, found[kind]) for kind, count in kinds.items() if found[kind] < count}
        assert not fewer, f"fewer layers of {family} are computed by kernels (before, now): {fewer}. {REGENERATE}"


WRITTEN_ANEW = {"convolution", "GatedRMSNorm"}
"""kinds in recurrent layers, whose code has changed since transformers 5.0"""
REGENERATE = "docs/families.md expects it; where the change is right, `make families` writes that page anew"


def written_with() -> str:
    """The release of transformers that the page was written with."""
    found: list[str] = re.findall(r"\(transformers ([\d.]+)\)", PAGE.read_text())
    return found[0]


@cache
def expected() -> dict[tuple[str, str], tuple[bool, dict[str, int]]]:
    """Of the page: whether a family is fused, and the kinds of its swapped layers with their number."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.count(" | ") >= 4]
    return {
        (row[0].removeprefix("| "), row[1]): (
            row[3].startswith("✓"),
            {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", row[-1])},
        )
        for row in rows
    }


@pytest.mark.parametrize("way", ["rotary", "loss"])
def test_a_family_that_loses_a_kind_or_its_loss_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family("causal", "llama", "LlamaForCausalLM")
    assert_as_written(family, outcome_of(family))
    if way == "rotary":
        own = modeling_llama.apply_rotary_pos_emb

        def of_another_layout(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
            rotated = own(q, k, cos, sin, unsqueeze_dim)
            return rotated[0] * 2, rotated[1] / 2

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", of_another_layout)
        with pytest.raises(AssertionError, match="no rotary of causal llama is computed by kernels any more"):
            assert_as_written(family, outcome_of(family))
    else:
        monkeypatch.setitem(globals(), "written_with", lambda: transformers.__version__)
        with pytest.raises(AssertionError, match="no longer fused: it passes no logits"):
            assert_as_written(family, Outcome("unfused", "it passes no logits"))


ROWS = {
    "packed": {
        "position_ids": on_device.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0]])
    },
    "padded on the right": {"attention_mask": on_device.tensor([[1] * 9 + [0] * 3, [1] * 5 + [0] * 7])},
    "padded on the left": {"attention_mask": on_device.tensor([[0] * 3 + [1] * 9, [0] * 7 + [1] * 5])},
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", families(), ids=str)
def test_packed_and_padded_rows_equal_its_own_dense_mask(family: Family) -> None:
    """Of every family for which ``wrap`` selects the attention without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = check_rows(family)
    if reason is not None:
        pytest.skip(reason)


def check_rows(family: Family) -> str | None:
    """Compares packed and padded rows; why they are not, None if they were."""
    try:
        model: Any = build(family).float()
        model.set_attn_implementation("sdpa")
        batch = batch_for(family, model)
        batches = {name: padded(batch | with_rows(rows)) for name, rows in ROWS.items()}
        own = {name: checked_step(model, rows)[1:] for name, rows in batches.items()}
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
    except Exception as error:
        return f"not built, packed or fused: {type(error).__name__}: {error}"[:200]
    if record_of(model).attention.reason is not None:
        return f"keeps its own: {record_of(model).attention.reason}"
    for name, rows in batches.items():
        if name in ("packed", "padded on the left") and liger_dist.explain(model).packing is not None:
            continue  # Wrong in its own code, whose state runs on: see test_packed_hybrids.py.
        _, loss, gradients = checked_step(model, rows)
        own_loss, own_gradients = own[name]
        assert loss == pytest.approx(own_loss, rel=1e-5), name
        errors = norm_errors(gradients, own_gradients)
        assert max(errors.values()) < 1e-4, (name, errors)
    return None


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "option", [pytest.param(name, marks=[] if name in QUICK_OPTIONS else [pytest.mark.nightly]) for name in OPTIONS]
)
def test_an_option_of_released_checkpoints_changes_nothing(
    option: str, outcomes: dict[Family, Outcome], request: pytest.FixtureRequest
) -> None:
    """Every class of models that has it: loss, gradients and kinds of swapped layers, and packed and padded rows."""
    cases = [family for family in families_with_options() if family.option == option]
    if not cases:
        pytest.skip("no family of this transformers has it")
    faults = []
    for family in cases:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes[family] = outcome_of(family)
                if outcomes[family].kind != "not built":
                    check_rows(family)
            if not request.config.getoption("--write-pages"):
                assert_as_written(family, outcomes[family])
        except Exception as error:
            faults.append(f"{family}: {type(error).__name__}: {error}"[:400])
    assert not faults, "\n".join(faults)
    if all(outcomes[family].kind == "not built" for family in cases):
        pytest.skip(f"transformers builds none: {outcomes[cases[0]].words}")
    assert any(outcomes[family].kind == "fused" for family in cases), [outcomes[family].words for family in cases]


def with_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(compute_device()) for name, value in rows.items()}


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """Without labels of padding."""
    mask = batch.get("attention_mask")
    return batch if mask is None else batch | {"labels": batch["labels"].masked_fill(mask == 0, -100)}


def outcome_of(family: Family) -> Outcome:
    try:
        model = build(family)
        batch = batch_for(family, model)
        expected = own_steps(model, batch)
    except Exception as error:
        # Transformers' own, before any of this project's code has run.
        return Outcome("not built", f"{type(error).__name__}: {error}")
    try:
        liger_dist.wrap(model, "none")
    except liger_dist.LigerDistError as refusal:
        return Outcome("unfused", str(refusal))
    record = record_of(model)
    found: Counter[str] = Counter()
    for what, count in record.layers.swapped:
        found[re.findall(r": (\w+)", what)[0]] += count
    layers = tuple(found.items())
    for dtype, (_, own_loss, own_gradients) in expected.items():
        output, loss, gradients = checked_step(model.to(dtype), batch)
        assert hasattr(output, "logits") == (record.found.unfused_reason is not None)
        tolerance = TOLERANCES[dtype]
        assert abs(loss - own_loss) <= tolerance * abs(own_loss)
        assert gradients.keys() == own_gradients.keys()
        # The truth of an ill-conditioned family is fp64, which its own fp32 gradients may miss by more.
        _, _, truth = expected.get(torch.float64, expected[dtype])
        own_errors, errors = norm_errors(own_gradients, truth), norm_errors(gradients, truth)
        for name, error in errors.items():
            assert error <= max(tolerance, 3 * own_errors[name]), f"{dtype} {name}: {error}, own {own_errors[name]}"
    if record.found.unfused_reason is not None:
        return Outcome("unfused", record.found.unfused_reason, layers)
    return Outcome("fused", "✓" if torch.float64 in expected else "✓ fp32", layers)


def own_steps(model: nn.Module, batch: dict[str, Any]) -> dict[torch.dtype, tuple[Any, float, dict[str, Tensor]]]:
    """The model's own training step in fp32, and in fp64 if its code lets fp64 through."""
    steps = {torch.float32: checked_step(model.float(), batch)}
    with contextlib.suppress(RuntimeError):
        steps[torch.float64] = checked_step(model.double(), batch)
    return steps


def checked_step(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, float, dict[str, Tensor]]:
    """Output, loss and gradients of one step. Some families draw random numbers even without dropout."""
    dtype = next(model.parameters()).dtype
    cast = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**cast)
    assert output.loss is not None, "the model gives no loss for labels"
    output.loss.backward()
    assert torch.isfinite(output.loss), "the model's loss is not finite"
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    assert all(gradient.isfinite().all() for gradient in gradients.values()), "the model's gradients are not finite"
    return output, float(output.loss.detach()), gradients


def test_nearly_all_are_fused_and_the_page_says_so(
    outcomes: dict[Family, Outcome], request: pytest.FixtureRequest
) -> None:
    by_default = {family: outcome for family, outcome in outcomes.items() if not family.option}
    if len(by_default) < len(families()) + len(masked_families()):
        pytest.skip("only a part of the families was run")
    counts = Counter(outcome.kind for outcome in by_default.values())
    built = counts["fused"] + counts["unfused"]
    assert counts["fused"] >= REQUIRED_SHARE * built, counts
    page = HEAD.format(
        version=transformers.__version__,
        fp64=TOLERANCES[torch.float64],
        fp32=TOLERANCES[torch.float32],
        built=built,
        total=len(by_default),
        fused=counts["fused"],
        share=counts["fused"] / built,
        usual=len(USUAL),
    )
    for family, outcome in by_default.items():
        layers = ", ".join(f"{count} {kind}" for kind, count in outcome.layers)
        page += f"| {family.mapping} | {family.name} | {family.model_class} | {outcome} | {layers} |\n"
    options = rows_of_options(outcomes)
    if request.config.getoption("--write-pages"):
        assert options.keys() == OPTIONS.keys(), "the page needs a run of all options"
        PAGE.write_text(page + HEAD_OF_OPTIONS + "".join(options.values()))
    written = PAGE.read_text()
    if written_with() != transformers.__version__:
        pytest.skip("the page was written with another release of transformers")
    pins = (PAGE.parent.parent / "constraints.txt").read_text()
    if f"torch=={torch.__version__.split('+')[0]}\n" not in pins:
        pytest.skip("the page was written with the torch of constraints.txt, whose errors have other words")
    if torch.cuda.is_available():
        pytest.skip("the page is of a run without a GPU, where optional packages of some families are missing")
    assert written.startswith(page), "docs/families.md is not what this run saw; `make families` writes it"
    missing = [option for option, row in options.items() if row not in written]
    assert not missing, f"docs/families.md is not what this run saw of {missing}; `make families` writes it"


def rows_of_options(outcomes: dict[Family, Outcome]) -> dict[str, str]:
    """A row of the page for each option that was run."""
    usual = {family.model_class: outcome.kind for family, outcome in outcomes.items() if not family.option}
    rows: dict[str, str] = {}
    for option in OPTIONS:
        run = {family: outcome for family, outcome in outcomes.items() if family.option == option}
        if not run:
            continue
        fused = sorted(family.name for family, outcome in run.items() if outcome.kind == "fused")
        others = [
            f"{family.name}: {outcome}"
            for family, outcome in run.items()
            if outcome.kind != "fused" and usual[family.model_class] == "fused"
        ]
        rows[option] = f"| {option} | {len(fused)}: {', '.join(fused)} | {'; '.join(sorted(others))} |\n"
    return rows
