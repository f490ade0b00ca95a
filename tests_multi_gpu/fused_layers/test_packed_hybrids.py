"""Packed and padded documents in every family of the causal-LM mapping: recurrent and convolution layers keep them
apart, or the call is refused; models with attention alone are not refused."""

from __future__ import annotations

from typing import Any

import families
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
IDS = on_device.randint(5, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(POSITIONS == 0, -100)
READ_POSITIONS = frozenset({"bailing_hybrid", "inkling2_loop_text", "inkling2_text", "kimi_linear"})
"""hybrids with attention of their own, which reads positions and no lengths"""
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
"""of transformers 5.24"""
OTHER_MIXERS = frozenset({"deepseek_v4", "reformer"})
"""compressed keys, attention within chunks: no softmax over one key of each token; documents are mixed as well"""
UNAWARE_NAMES = """
    afmoe bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert cpmant
    data2vec-text electra ernie gpt_oss granitemoe granitemoe_swa granitemoeshared marian mbart megatron-bert
    moss_transcribe_diarize mpt mvp openai-gpt opt pegasus plbart prophetnet rembert roberta roberta-prelayernorm
    roc_bert roformer trocr xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod
"""
UNAWARE = frozenset(UNAWARE_NAMES.split())
"""attention masks that transformers 5.24 makes without position_ids: attention alone mixes what they pack"""
RELATED_NAMES = """
    bamba falcon_h1 granitemoehybrid inkling2_text inkling_text lara_mini lfm2_moe mamba qwen3_5 qwen3_5_moe
    qwen3_5_moe_text zamba2
"""
RELATED = frozenset(RELATED_NAMES.split())
"""hybrids with the recurrent or convolution layer of another one that ``make test`` runs"""
AWARE_OR_NOT = frozenset({"gpt_oss", "llama", "opt", "qwen3_moe"})
"""of the families with attention alone, those that ``make test`` runs"""
OTHER_RELEASE = not transformers.__version__.startswith("5.24.")
ATTENTION_ALONE = 149
"""families that are wrapped and not refused, with transformers 5.24"""


def causal_families() -> list[Family]:
    return [family for family in families.families() if family.mapping == "causal"]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Of every family that was run: whether attention alone reads other tokens, other layers run on rows of single
    documents, packed documents are refused, or it could not be built and wrapped."""
    return {}


@pytest.fixture(autouse=True)
def hints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, more in MORE_HINTS.items():
        monkeypatch.setitem(FAMILIES, name, more)


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """A tiny model of a family in evaluation mode, and a batch."""
    family = next(family for family in causal_families() if family.name == name)
    model: Any = build(family).eval().to(dtype)
    return model, batch_for(family, model)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=[] if family.name in (HYBRIDS - RELATED) | OTHER_MIXERS | AWARE_OR_NOT else [pytest.mark.nightly],
        )
        for family in causal_families()
    ],
    ids=str,
)
def test_documents_are_apart_or_refused(family: Family, found: dict[str, str]) -> None:
    """Loss and every gradient of packed and padded rows against documents alone, through the unwrapped model."""
    found[family.name] = "skipped"
    try:
        # An index that the family's own code does not have ends a process that uses a GPU.
        model: Any = build(family).eval().cpu()
        model(**batch_for(family, model))
        model.to(compute_device())
        batch = batch_for(family, model)
        model = in_fp64(model, batch, is_hybrid=family.name in HYBRIDS)
    except Exception as error:
        pytest.skip(f"not built by the generic shrinking: {type(error).__name__}: {error}"[:200])
    is_read = first_document_is_read(model, batch)
    truth = alone(model, {"input_ids": IDS, "labels": LABELS} | BY_POSITIONS) if family.name in HYBRIDS else None
    try:
        liger_dist.wrap(model, "none")
    except liger_dist.LigerDistError as refusal:
        pytest.skip(str(refusal)[:200])
    packing = liger_dist.explain(model).packing
    found[family.name] = "attention" if packing is None else "rows" if "one row per document" in packing else "refused"
    if truth is None:
        assert is_refused(model, batch, BY_POSITIONS) == (found[family.name] == "refused")
        is_known = found[family.name] == "refused" or is_read == (family.name in UNAWARE)
        assert OTHER_RELEASE or is_known, "documents are mixed, and not refused"
        return
    assert found[family.name] == "rows"
    for name, rows in rows_of_documents().items():
        if name == "lengths alone" and family.name in READ_POSITIONS:
            with pytest.raises(liger_dist.LigerDistError, match="Tell documents apart by position_ids"):
                model(**rows)
            continue
        losses, gradients = trained(model, rows)
        assert losses == pytest.approx(truth[0], abs=2e-6), name
        assert_below(norm_errors(gradients, truth[1]), 2e-6, name)


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
        model, _ = made(name)
    except (StopIteration, OSError, ValueError) as error:
        pytest.skip(f"not in this transformers, or not built by the generic shrinking: {error}")
    for dtype in (torch.bfloat16, torch.float64):
        assert is_recurrent(model.to(dtype)), dtype


def test_these_families_have_recurrent_layers_and_no_others(found: dict[str, str]) -> None:
    if HYBRIDS - found.keys() or OTHER_RELEASE:
        pytest.skip("only a part of the families was run, or they are of another transformers")
    assert {name for name, what in found.items() if what == "rows"} == HYBRIDS
    assert {name for name, what in found.items() if what == "refused"} == OTHER_MIXERS
    others = {name for name, what in found.items() if what == "attention"}
    assert others == AWARE_OR_NOT or len(others) == ATTENTION_ALONE


def rows_of_documents() -> dict[str, dict[str, Any]]:
    """The documents packed in a row, and padded in separate rows, on either side."""
    packed = {"input_ids": IDS, "labels": LABELS}
    rows: dict[str, dict[str, Any]] = {
        "positions": packed | BY_POSITIONS,
        "positions and lengths": packed | BY_POSITIONS | BY_LENGTHS,
        "lengths alone": packed | BY_LENGTHS,
    }
    for side in ("left", "right"):
        ids, labels = (on_device.full((len(LENGTHS), max(LENGTHS)), value) for value in (7, -100))
        mask = torch.zeros_like(ids)
        for row, (document, target) in enumerate(zip(IDS[0].split(LENGTHS), LABELS[0].split(LENGTHS), strict=True)):
            at = slice(-len(document), None) if side == "left" else slice(len(document))
            ids[row, at], labels[row, at], mask[row, at] = document, target, 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        rows[side] = {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}
    return rows


def in_fp64(model: Any, batch: dict[str, Any], *, is_hybrid: bool) -> Any:
    """The model in fp64 if its code lets fp64 through; a hybrid with padding on the left too, where two masks add up to
    -inf in fp64 alone."""
    try:
        model.double()(**batch)
        padded = model(**rows_of_documents()["left"], use_cache=False).logits if is_hybrid else None
    except RuntimeError:
        return model.float()
    return model if padded is None or padded.isfinite().all() else model.float()


def one_row(batch: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """The first row of a batch, packed."""
    rest = {name: value for name, value in batch.items() if name != "labels"}
    return {name: value[:1] if isinstance(value, Tensor) else value for name, value in rest.items()} | how


@torch.no_grad()
def first_document_is_read(model: Any, batch: dict[str, Any]) -> bool:
    """True if the logits of the second of two documents, packed by positions, change with the tokens of the first."""
    row = one_row(batch, BY_POSITIONS)
    other = row["input_ids"].clone()
    other[:, : LENGTHS[0]] = (other[:, : LENGTHS[0]] + 11) % 70 + 4
    try:
        one, two = (model(**row | {"input_ids": ids}).logits[:, -LENGTHS[1] :] for ids in (row["input_ids"], other))
    except (ValueError, TypeError, IndexError, RuntimeError):
        return False
    return not bool((one - two).abs().max() < 1e-4 * one.abs().max())


def is_refused(model: Any, batch: dict[str, Any], how: dict[str, Any]) -> bool:
    row = one_row(batch, how)
    try:
        model(**row, labels=row["input_ids"].clone())
    except liger_dist.LigerDistError as refusal:
        # Otherwise of an argument that the model does not have.
        return "packed documents" in str(refusal) and "a separate row" in str(refusal)
    except (ValueError, TypeError, IndexError, RuntimeError):
        return False
    return False
