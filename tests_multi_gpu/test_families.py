"""Every family of transformers' language models: fused and equal to its own loss, or unfused with a reason."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family, batch_for, build, families
from torch import Tensor, nn

import liger_dist
from liger_dist.sharding.process_groups import compute_device
from liger_dist.wrap import record_of

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
HEAD = """# Families of models

Written by `make families`: every entry of transformers' causal-LM, image-text-to-text and seq2seq mappings
(transformers {version}), as a tiny random model from its own default config. No family is named in the library.

✓ fused: loss and every parameter's gradient equal the model's own, to {fp64:g} in fp64, and in fp32, with its layers
computed by kernels too (the last column has those), to {fp32:g} or three times the error of its own fp32 gradients
against fp64. "fp32" alone: the family's own code does not let fp64 through. Otherwise the reason.

{built} of {total} entries could be built and trained by the generic shrinking of `tests_multi_gpu/families.py`; {fused}
of them are fused ({share:.0%}), none differs.

| mapping | family | model | loss | layers |
|---|---|---|---|---|
"""
TOLERANCES = {torch.float64: 5e-6, torch.float32: 1e-5}
"""of transformers' losses, which go through fp32 even for fp64 models"""
REQUIRED_SHARE = 0.9
KINDS = ("RMSNorm", "LayerNorm", "silu", "gelu", "rotary")


@dataclass(frozen=True)
class Outcome:
    kind: str
    """fused, unfused, not built"""
    words: str
    layers: str = ""


@pytest.fixture(scope="module")
def outcomes() -> dict[Family, Outcome]:
    return {}


@pytest.mark.parametrize("family", families(), ids=str)
def test_equals_its_own_loss_or_says_why_not(family: Family, outcomes: dict[Family, Outcome]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes[family] = outcome_of(family)


ROWS = {
    "packed": {
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0]])
    },
    "padded on the right": {"attention_mask": torch.tensor([[1] * 9 + [0] * 3, [1] * 5 + [0] * 7])},
    "padded on the left": {"attention_mask": torch.tensor([[0] * 3 + [1] * 9, [0] * 7 + [1] * 5])},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", families(), ids=str)
def test_packed_and_padded_rows_equal_its_own_dense_mask(family: Family) -> None:
    """Of every family for which ``wrap`` selects the attention without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model: Any = build(family).float()
            model.set_attn_implementation("sdpa")
            batch = batch_for(family, model)
            batches = {name: padded(batch | with_rows(rows)) for name, rows in ROWS.items()}
            own = {name: trained(model, rows)[1:] for name, rows in batches.items()}
            liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
        except Exception as error:
            pytest.skip(f"not built, packed or fused: {type(error).__name__}: {error}"[:200])
        if record_of(model).attention.reason is not None:
            pytest.skip(f"keeps its own: {record_of(model).attention.reason}")
        for name, rows in batches.items():
            if name == "packed" and liger_dist.explain(model).packing is not None:
                continue  # Refused, see test_packed_hybrids.py.
            _, loss, gradients = trained(model, rows)
            own_loss, own_gradients = own[name]
            assert loss == pytest.approx(own_loss, rel=1e-5), name
            errors = relative_errors(gradients, own_gradients)
            assert max(errors.values()) < 1e-4, (name, errors)


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
    layers = ", ".join(kind for kind in KINDS if any(kind in what for what, _ in record.layers.swapped))
    for dtype, (_, own_loss, own_gradients) in expected.items():
        output, loss, gradients = trained(model.to(dtype), batch)
        assert hasattr(output, "logits") == (record.unfused_reason is not None)
        tolerance = TOLERANCES[dtype]
        assert abs(loss - own_loss) <= tolerance * abs(own_loss)
        assert gradients.keys() == own_gradients.keys()
        # The truth of an ill-conditioned family is fp64, which its own fp32 gradients may miss by more.
        _, _, truth = expected.get(torch.float64, expected[dtype])
        own_errors, errors = relative_errors(own_gradients, truth), relative_errors(gradients, truth)
        for name, error in errors.items():
            assert error <= max(tolerance, 3 * own_errors[name]), f"{dtype} {name}: {error}, own {own_errors[name]}"
    if record.unfused_reason is not None:
        return Outcome("unfused", record.unfused_reason, layers)
    return Outcome("fused", "✓" if torch.float64 in expected else "✓ fp32", layers)


def relative_errors(gradients: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Some gradients are zero but for rounding; they are held to a thousandth of all."""
    total = float(torch.stack([gradient.norm() for gradient in truth.values()]).norm())
    return {
        name: float((gradients[name] - gradient).norm() / (gradient.norm() + 1e-3 * total))
        for name, gradient in truth.items()
    }


def own_steps(model: nn.Module, batch: dict[str, Any]) -> dict[torch.dtype, tuple[Any, float, dict[str, Tensor]]]:
    """The model's own training step in fp32, and in fp64 if its code lets fp64 through."""
    steps = {torch.float32: trained(model.float(), batch)}
    with contextlib.suppress(RuntimeError):
        steps[torch.float64] = trained(model.double(), batch)
    return steps


def trained(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, float, dict[str, Tensor]]:
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
    import transformers

    if len(outcomes) < len(families()):
        pytest.skip("only a part of the families was run")
    counts = Counter(outcome.kind for outcome in outcomes.values())
    built = counts["fused"] + counts["unfused"]
    assert counts["fused"] >= REQUIRED_SHARE * built, counts
    page = HEAD.format(
        version=transformers.__version__,
        fp64=TOLERANCES[torch.float64],
        fp32=TOLERANCES[torch.float32],
        built=built,
        total=len(outcomes),
        fused=counts["fused"],
        share=counts["fused"] / built,
    )
    for family, outcome in outcomes.items():
        words = outcome.words if outcome.kind != "not built" else f"not built: {outcome.words}"
        line = " ".join(words.split()).replace("|", "\\|")
        page += f"| {family.mapping} | {family.name} | {family.model_class} | {line[:160]} | {outcome.layers} |\n"
    if request.config.getoption("--write-pages"):
        PAGE.write_text(page)
    written = PAGE.read_text()
    if f"(transformers {transformers.__version__})" not in written:
        pytest.skip("the page was written with another release of transformers")
    if torch.cuda.is_available():
        pytest.skip("the page is of a run without a GPU, where optional packages of some families are missing")
    assert page == written, "docs/families.md is not what this run saw; `make families` writes it"
